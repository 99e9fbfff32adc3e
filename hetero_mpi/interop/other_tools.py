"""A job made of another tool's file: axolotl's or LLaMA-Factory's YAML, TRL's YAML or command line.

``other_tools.toml`` holds their keys, what is meant where their files are silent, and why some keys have no counterpart. Here is
what needs several keys at once. Every key of the file gets into the job, or into a comment below it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hetero_mpi.interop.other_files import read_keys
from hetero_mpi.job.load import job_of_tables
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.schema import TABLES
from hetero_mpi.objectives import objectives_by_key
from hetero_mpi.util import toml
from hetero_mpi.util.disk import writing
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import printable

TABLE = toml.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PEFT = TABLE["peft"]
TOOLS = ("axolotl", "llamafactory", "trl")
TRACKERS = ("tensorboard", "trackio", "wandb")
PATHS = ("model.path", "tokenizer.path", "adapter.path")
NOT_UNDERSTOOD = "not understood"
_LISTS = ("adapter.modules_to_save", "tokenizer.add", "tokenizer.add_special")
"""May be given as one text with commas."""
_FILE = re.compile(r"[./~]|.*\.(jsonl?|parquet|csv|txt|gz|zst)$")
_RECORDS = re.compile(r"\.(jsonl?|parquet)(\.\w+)?$")
_OFF = r"^(false|no|none|null)$"
_COLUMNS = ("field", "text_column", "columns")
"""Keys of a data set that name the column of its texts."""
_MANY = ("=datasets", "=texts", "=test_sets", "=weights", "=targets", "=report_to", "=kwargs", "=unfrozen")
"""Parts that may have several values; others have one."""


def tables_of(tool: str) -> list[dict[str, Any]]:
    """A tool's tables, and behind them those of transformers' arguments where it takes them."""
    return [TABLE[tool], *([TABLE["trainer"]] if tool != "axolotl" else [])]


def keys_of(tool: str, of: str = "keys") -> dict[str, Any]:
    """Its keys -> ours, or of them the ``defaults``."""
    return {key: value for table in tables_of(tool) for key, value in table[of].items()}


def job_from(file: Path, target: Path, gpus: int | None) -> list[str]:
    """Write the job that ``file`` asks for to ``target``. ``gpus``: how many the tool ran on. Returns the lines to print.

    Raises UserError: the file is none of theirs, or asks for training that is not here; or ``target`` is there already.
    """
    if target.exists():
        raise UserError(
            "init.exists", f"{target}: there already, and init overwrites nothing; name another directory or FILE.toml"
        )
    draft = _Draft(file, read_keys(file), target.absolute().parent, gpus)
    if draft.stops:
        stops = "".join(f"\n  {key} = {value}: {why}" for key, value, why in draft.stops)
        raise UserError(
            "convert.other_objective", f"{file}: no job was written, as what is learnt would be something else:{stops}"
        )
    text = draft.text()
    try:
        job_of_tables(toml.loads(text), target.stem, target.absolute().parent)
    except (UserError, toml.TomlError) as error:
        raise UserError("convert.invalid_job", f"{file}: makes no valid job, so none was written: {error}") from None
    with writing(target, "name another directory or FILE.toml"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    unknown = [f"{NOT_UNDERSTOOD}: {', '.join(draft.left[NOT_UNDERSTOOD])}"] if NOT_UNDERSTOOD in draft.left else []
    counted = f"{len(draft.values)} keys, made of a file of {draft.title}; below them those that are not in the job"
    program = f"hetero-mpi launch -np 3 -- train {shlex.quote(str(target))} --dry-run"
    return [f"{target}: {counted}, and why ({sum(map(len, draft.left.values()))})", *unknown, "Then:", f"  {program}"]


Reasons = list[tuple[str, str]]
"""(key of theirs, why it is not taken)."""


def arguments(title: str, given: Mapping[str, Any], changed: Set[str]) -> tuple[dict[str, Any], Reasons, Reasons]:
    """(our key -> value, refused, told) of the arguments of TRL's trainers. ``changed``: those that are not at their default; among
    them are all that have no counterpart here. Told are those on which no number depends.

    Raises UserError: as ``job_from``.
    """
    draft = _Draft(Path(title), given, Path.cwd(), None, "trl")
    harmless = {group["reason"] for table in tables_of("trl") for group in table["left"] if group.get("told")}
    harmless |= {TABLE["parts"][part].replace("`", "") for part in TABLE["without_effect"]}
    left = [(text.partition(" = ")[0], why) for why, names in draft.left.items() for text in names]
    stops = {(key, why) for key, _, why in draft.stops}
    left = sorted({(key, why) for key, why in left if key in changed} | stops)
    values = {ours: value for ours, (value, _) in draft.values.items()}
    return values, [one for one in left if one[1] not in harmless], [one for one in left if one[1] in harmless]


_SILENT_WARM_UP = 100
"""Steps, at most, of axolotl's warm-up where its file has none."""


class _Draft:
    """The keys of a job, and those of a file of another tool that are not in it."""

    def __init__(
        self, file: Path, given: Mapping[str, Any], directory: Path, gpus: int | None, tool: str | None = None
    ) -> None:
        self.file, self.directory = file, directory
        if not given.keys() & {"base_model", "model_name_or_path"}:
            tools = "axolotl (base_model), LLaMA-Factory and TRL (model_name_or_path)"
            raise UserError("convert.no_model", f"{file}: names no model: init reads files of {tools}")
        self.tool = tool or max(TOOLS, key=lambda tool: len(given.keys() & keys_of(tool).keys()))
        self.title = str(TABLE[self.tool]["title"])
        self.values: dict[str, tuple[Any, str]] = {}
        """Our key -> its value, and the keys of theirs that it comes from."""
        self.left: dict[str, list[str]] = {}
        """Reason -> their keys, with their values."""
        self.stops: list[tuple[str, str, str]] = []
        """(their key, its value, why no job can be made with it)."""
        self._parts: dict[str, tuple[str, Any]] = {}
        """Part of ``other_tools.toml`` -> their key, and its value."""
        self._used: set[str] = set()
        self._steps_of_logging = given.get("logging_steps", TABLE[self.tool].get("logging_steps"))
        """Between evaluations, where nothing else is said of these."""
        self._keys, defaults = keys_of(self.tool), keys_of(self.tool, "defaults")
        inner = given["trl"] if isinstance(given.get("trl"), Mapping) else {}
        for key, value in {**given, **{f"trl.{key}": value for key, value in inner.items()}}.items():
            self._take(key, value)
        for count in [count for count in ("gpus", "nodes") if gpus is not None and count in self._parts]:
            self._leave(*self._parts.pop(count), "init --gpus says it")
        self._parts.setdefault("gpus", (f"{gpus or 1} GPU (init --gpus)", gpus or 1))
        self.compared = self._preference(given)
        self.pairs = self.compared not in ("none", "kto")
        for key, value in (defaults | (TABLE[self.tool]["preferences"] if self.compared != "none" else {})).items():
            if not {self._keys[key], self._keys[key].lstrip("=")} & (self.values.keys() | self._parts.keys()):
                self._take(key, value, " by default")
        for step in (self._adapter, self._data, self._training, self._evaluation, self._output):
            step()
        for part in self._parts.keys() - self._used:
            self._leave(*self._parts[part], TABLE["parts"][part].replace("`", ""))

    def text(self) -> str:
        """The job file."""
        name = printable(" ".join(self.file.name.split()))
        lines = [f"# Made by `init --from` of {name}, a file of {self.title}; its keys stand behind ours."]
        for table in TABLES:
            keys = {key.partition(".")[2]: found for key, found in self.values.items() if key.startswith(f"{table}.")}
            lines += ["", f"[{table}]"] if keys else []
            for key, (value, source) in keys.items():
                lines.append(f"{key} = {_written(value)}" + (f"  # {source}" if source else ""))
        lines += ["", "# Not in the job, and why:"]
        for reason, names in sorted((reason, names) for reason, names in self.left.items() if names):
            lines += textwrap.wrap(f"# * {reason}: {', '.join(sorted(names))}", 120, subsequent_indent="#   ")
        return "\n".join(lines) + "\n"

    def _take(self, key: str, value: Any, by: str = "") -> None:
        ours = self._keys.get(key)
        words, single = TABLE["values"].get(ours), (ours or "").startswith("=") and ours not in _MANY
        if single and isinstance(value, list) and len(value) == 1:
            (value,) = value
        if value is None and ours == "=length" and self.tool == "trl":
            self._stop(key, value, "rows of any length are not here: give the tokens of the longest row")
        elif value is None or value in ("", [], {}):
            self.left.setdefault("empty there", []).append(printable(key))
        elif ours is None:
            self._leave_group(key, value, tables_of(self.tool))
        elif ours.startswith("="):
            if single and isinstance(value, (list, dict)):
                raise UserError(
                    "convert.value", f"{self.file}: {key} = {as_toml(value)}: must be one value, so no job was written"
                )
            first = self._parts.get(ours[1:], (key, None))
            kept, other = (first, (key, value)) if first[1] else ((key + by, value), first)
            self._parts[ours[1:]] = kept
            if kept[0] != other[0] and other[1] is not None:
                self._leave(*other, f"{kept[0]} says it")
        elif ours in _LISTS and isinstance(value, str):
            self.values[ours] = re.split(r"\s*,\s*", value.strip()), key + by
        elif words is None:
            self.values[ours] = self._path(str(value)) if ours in PATHS else _number(value), key + by
        elif str(value).lower() in words:
            self.values[ours] = words[str(value).lower()], key + by
        else:
            self._leave(key, value, f"no {ours} of that name here, so it keeps its default")

    def _leave_group(self, key: str, value: Any, tables: Sequence[Mapping[str, Any]], where: str = "") -> None:
        """Leave a key for the reason of the first pattern that fits. ``where``: what it stands in."""
        groups = (group for table in tables for group in table["left"])
        fitting = (group for group in groups if any(fnmatch.fnmatchcase(key, one) for one in group["keys"]))
        group = next(fitting, {"reason": NOT_UNDERSTOOD})
        values = {str(one) for one in (value if isinstance(value, list) else [value]) if one}
        asked = [one for one in values if not re.search(group.get("unless", _OFF), one, re.IGNORECASE)]
        (self._stop if group.get("stop") and asked else self._leave)(where + key, value, group["reason"])

    def _stop(self, key: str, value: Any, reason: str) -> None:
        self.stops.append((printable(" ".join(key.split())), printable(as_toml(value)), reason))

    def _leave(self, key: str, value: Any, reason: str) -> None:
        names = self.left.setdefault(reason, [])
        text = f"{printable(' '.join(key.split()))} = {printable(as_toml(value))}"
        if not key.endswith(" by default") and text not in names:
            names.append(text)

    def _of(self, part: str, otherwise: Any = None) -> Any:
        """The value of a part, a number where it is one."""
        return _number(self._parts[part][1]) if part in self._parts else otherwise

    def _count(self, part: str, otherwise: float = 0) -> float:
        value = self._of(part, otherwise)
        if isinstance(value, (int, float)) and 0 <= value < math.inf:
            return value
        raise UserError(
            "convert.value", f"{self.file}: {self._parts[part][0]} = {as_toml(value)}: must be a number, not below 0"
        )

    def _word(self, part: str) -> str:
        """Our word for the value of a part; "" where it is not given. Raises UserError: there is none."""
        words, value = TABLE["values"][f"={part}"], self._of(part, "")
        value = str(value).lower()
        if value and value not in words:
            known = f"not here, so no job was written; there is {', '.join(words)}"
            raise UserError("convert.value", f"{self.file}: {self._parts[part][0]} = {value}: {known}")
        return words.get(value, "")

    def _put(self, ours: str, value: Any, *parts: str) -> None:
        self._used.update(parts)
        self.values[ours] = value, ", ".join(self._parts[part][0] for part in parts if part in self._parts)

    def _put_interval(self, ours: str, strategy: str, every: str, times: str) -> None:
        """Steps, in steps or as a share of all, from what is said of them (``every``) or of their ``times`` in an epoch."""
        when, steps = self._word(strategy), self.values.get("train.steps", (0, ""))[0]
        if every in self._parts and (when == "steps" or self.tool == "axolotl"):
            part, value = every, self._count(every)
        elif self._count(times) or (when == "epoch" and not steps):
            part, value = times, 1 / (self._count(times) or 1) / (self._count("epochs", 1) or 1)
            value = math.floor(value * 1e12) / 1e12 if value < 1 else 0  # rounded up it might be a step more
        else:
            return
        self._put(ours, int(value) if value >= 1 else math.ceil(value * steps) if steps else value, part, strategy)

    def _preference(self, given: Mapping[str, Any]) -> str:
        """The method by which answers are compared; "none": they are learnt."""
        telling = [key for key in TABLE["trl"]["tells"] if key in given]
        if self.tool == "trl" and telling and "objective" not in self._parts:  # its YAML does not name the trainer
            kind = TABLE["trl"]["tells"][telling[0]]
            self._parts["objective"] = f"{telling[0]}, a key of {kind.upper()}", kind
        kind = self._word("objective") or "none"
        if kind == "cpo":
            kind = "simpo" if self.tool == "axolotl" else self._word("loss")
            if kind != "simpo" or self._count("likelihood", 1):
                self._stop(
                    *self._parts["objective"], "of CPO there is SimPO: cpo_alpha = 0 (in TRL, and loss_type = simpo)"
                )
        elif kind == "dpo" or self.tool == "trl":
            kind = self._word("loss") or kind
        compared = kind != "none"
        if "objective" in self._parts:
            loss = ["loss"] if compared or self.tool == "trl" else []
            self._put("train.preference", kind, "objective", *loss, *(["likelihood"] if kind == "simpo" else []))
        if compared and "beta" in self._parts:
            self._put("train.preference_beta", self._of("beta"), "beta")
        if kind == "dpo" and given.get("label_smoothing"):
            self._stop("label_smoothing", given["label_smoothing"], "TRL's sigmoid loss does not read it: take it out")
        for key, methods in objectives_by_key().items():
            if kind not in methods:
                self._drop(f"train.{key}", f"is for {' and '.join(methods)}")
        return kind

    def _drop(self, ours: str, reason: str) -> None:
        """Leave a key of theirs that has got into the job."""
        if ours in self.values:
            value, key = self.values.pop(ours)
            self._leave(key, value, reason)

    def _adapter(self) -> None:
        is_lora = self._word("adapter") == "lora"
        in_four_bits = is_lora and (self._of("adapter") == "qlora" or self._of("four_bits") in (True, 4))
        absent = ["adapter.", "train.lora"] * (not is_lora) + ["model.double"] * (not in_four_bits)
        for ours in [ours for ours in self.values if ours.startswith(tuple(absent))]:
            self._drop(ours, "applies to adapters, or to 4 bits, which are not asked for")
        self._put("adapter.method", "lora" if is_lora else "none", "adapter")
        if self.compared != "none" and self._of("still", True):
            self._drop("adapter.dropout", "preferences are learnt without dropout there")
            self._put("train.dropout", False, "still")
        if not is_lora:
            if "unfrozen" in self._parts:
                self._stop(*self._parts["unfrozen"], TABLE["parts"]["unfrozen"])
            return
        if in_four_bits:
            self._put("model.quantization", "nf4", "adapter", "four_bits")
        if self.tool == "llamafactory" and "adapter.alpha" not in self.values:
            rank = self.values["adapter.rank"][0]
            self.values["adapter.alpha"] = 2 * rank if type(rank) is int else "", "twice lora_rank by default"
        if self._of("pissa") is True:
            times = self._of("pissa_iter", 16)
            self._put("adapter.start", "pissa" if times == -1 else f"pissa_niter_{times}", "pissa", "pissa_iter")
        names = self._of("targets")
        names = re.split(r"[,\s]+", names) if isinstance(names, str) else names
        if self._of("linear") or names in (["all"], ["all-linear"]):
            self._put("adapter.targets", "all-linear", "targets", "linear")
        elif isinstance(names, list) and all(re.fullmatch(r"\w[\w.]*", str(name)) for name in names):
            self._put("adapter.targets", names, "targets")
        elif names is None:
            self._put("adapter.targets", "family")

    def _data(self) -> None:
        sets = self._sets("texts") or self._sets("datasets")
        names, columns = [name for name, _ in sets], {column for _, column in sets}
        if not sets:
            raise UserError("convert.no_data", f"{self.file}: names no data set, so no job was written")
        texts = None not in columns
        if texts:
            self._put("data.text", names, "texts", "datasets", "folder", "config_name", "split")
            if any(name.startswith("hf:") or _RECORDS.search(name) for name in names):
                self._put("data.documents", "record")
                if len(columns) > 1:
                    self._leave("columns", sorted(columns), "one name for all: give the files their texts under one")
                elif columns != {"text"}:
                    self._put("data.keys", {"text": columns.pop()})
        else:
            self._put("data.records", names, "datasets", "folder", "config_name", "split")
        if "weights" in self._parts:
            shares = str(self._of("weights")).strip("[]").split(",")
            self._put("data.weights", [_number(share) for share in shares], "weights")
        tokens = int(self._count("length", 2)) * (2 if self.pairs else 1)  # the last of them is learnt, and not read
        self._put("data.sequence_length", tokens - 1, "length")
        compared = self.compared != "none"
        packing = not compared and bool(self._of("neat") or self._of("packing", texts))
        self._put("data.packing", packing, *([] if compared else ["neat", "packing"]))
        if not packing:
            self._put("data.pad", "full" if self._of("pad") else "longest", "pad")
        elif self.tool == "llamafactory" and not (texts or self._of("neat")):
            self._put("data.isolate", False, "packing")
        if not (texts or compared):
            prompts: bool | str = self._of("everything") is True or self._of("completions") is False
            if self.tool == "trl" and not prompts and self._of("answers") is not True:
                prompts = "chats"
            self._put("data.train_on_prompt", prompts, "everything", "answers", "completions")

    def _sets(self, part: str, split: str = "train") -> list[tuple[str, str | None]]:
        """Data sets: how ``data.records`` names them, and of texts their column."""
        key, value = self._parts.get(part, ("", []))
        if self.tool == "llamafactory" and value and not isinstance(value, Mapping):
            names = value if isinstance(value, list) else re.split(r"\s*,\s*", str(value))
            value = [self._listed(str(name)) for name in names]
        elif isinstance(value, str):
            which = self._of("split" if split == "train" else "test_split")
            value = [{"path": value, "name": self._of("config_name"), "split": which}]
        elif isinstance(value, Mapping):  # of the alignment handbook: a mixture
            for inner in value.keys() - {"datasets"}:
                self._leave_group(inner, value[inner], [TABLE["entries"]], f"{key}.")
            value = value.get("datasets")
        if not isinstance(value, list) or not all(
            isinstance(one, Mapping) and (one.get("path") or one.get("id")) for one in value
        ):
            raise UserError(
                "convert.data_sets",
                f"{self.file}: {key} = {as_toml(value)}: must be a list of data sets, each with a path",
            )
        columns = [self._column(part, entry) for entry in value]
        told = () if None in columns else ("type", *_COLUMNS)
        names = [self._records(f"{key}[{at}]", one, split, told) for at, one in enumerate(value)]
        return list(zip(names, columns, strict=True))

    def _column(self, part: str, entry: Mapping[str, Any]) -> str | None:
        """The column of a data set of texts; None: it holds records."""
        if part != "texts" and self._of("objective") != "pt" and entry.get("type") not in ("completion", "pretrain"):
            return None
        found = [entry[key] for key in _COLUMNS if entry.get(key)]
        column = (found[0].get("prompt") if isinstance(found[0], Mapping) else found[0]) if found else None
        return str(column or "text")

    def _records(self, where: str, entry: Mapping[str, Any], otherwise: str, told: Sequence[str]) -> str:
        path, name = str(entry.get("path") or entry.get("id")), entry.get("name") or entry.get("config")
        files = entry.get("data_files")
        split = str(entry.get("split") or otherwise)
        whole = re.split(r"[\[+]", split)[0]
        is_file = _FILE.match(path) is not None or os.path.exists(path)
        if isinstance(files, Mapping):  # by split: the one that is learnt goes first
            files = [files[one] for one in sorted(files, key=lambda one: one != whole)]
        if files and (is_file or path in ("json", "csv", "parquet", "text")):
            path, files, is_file = (files, None, True) if not isinstance(files, list) else (files[0], files[1:], True)
            path = str(path)
        for key, value in {**entry, "data_files": files, "split": split if split != whole else None}.items():
            if key not in ("path", "id", "name", "config", *told) and value:
                self._leave_group(key, value, [TABLE["entries"]], f"{where}.")
        if is_file:
            return self._path(path) + ("/*" if os.path.isdir(path) else "")
        return f"hf:{path}" + (f"/{name}" if name else "") + (f":{whole}" if whole != "train" else "")

    def _listed(self, name: str) -> dict[str, Any]:
        """A data set of LLaMA-Factory, by its entry in ``dataset_info.json``."""
        folder = str(self._of("folder", "data"))
        listed = Path(folder) / "dataset_info.json"
        entries = read_keys(listed) if os.path.exists(listed) else {}
        entry = entries.get(name)
        if not isinstance(entry, dict):
            self._leave("dataset", name, f"{folder}/dataset_info.json does not have it: correct data.records")
            entry = {"file_name": f"{name}.json"}
        path = entry.get("hf_hub_url") or f"./{folder}/{entry.get('file_name', name)}"
        rest = {key: value for key, value in entry.items() if key not in ("hf_hub_url", "file_name", "subset")}
        return {"path": path, "name": entry.get("subset"), **rest}

    def _path(self, text: str) -> str:
        """A path of theirs, which begins at the working directory, as it is seen from the job; a name of the hub as it is."""
        is_path = (_FILE.match(text) or os.path.exists(text)) and not text.startswith("~")
        return os.path.relpath(Path(text).absolute(), self.directory) if is_path else text

    def _training(self) -> None:
        parts = ("micro", "accumulation", "gpus", "nodes")
        batch = self._count("batch") if "batch" in self._parts else math.prod(self._count(part, 1) for part in parts)
        self._put("train.global_batch", int(batch), "batch", *parts)
        if isinstance(steps := self._of("steps"), int) and steps > 0:
            self._put("train.steps", steps, "steps")
        elif "epochs" in self._parts:
            self._put("train.epochs", self._of("epochs"), "epochs")
        if self._of("drop") is not True and (self.tool != "axolotl" or not self._of("packing")):
            self._put("train.last_batch", "smaller", "drop")
        if not self.values.get("train.neftune_noise_alpha", (1, ""))[0]:
            self._drop("train.neftune_noise_alpha", "off there, as here")
        if self._of("muon") is True:
            self._drop("train.optimizer", "use_muon says it")
            self._put("train.optimizer", "muon", "muon")
        if self.values.get("train.optimizer", ("",))[0] == "adafactor":
            for key in ("beta1", "beta2", "epsilon"):
                self._drop(f"train.{key}", "AdamW's: Adafactor has none")
        self._schedule()
        if "clip" in self._parts:
            self._put("train.clip_norm", self._count("clip") or "", "clip")
        of_weights = "auto" if self.values["adapter.method"][0] == "lora" else "fp32"
        dtypes = {True: "bf16", "full": "bf16", "auto": "auto", "lora": of_weights}
        dtype = "fp16" if self._of("fp16") is True else dtypes.get(self._of("bf16"), "fp32")
        self._put("train.dtype", dtype, "fp16", "bf16")

    def _warm_up(self) -> None:
        """axolotl rounds down, makes 2 of 1, and where its file is silent has no more than 100 steps; others take a count first."""
        by_axolotl, steps = self.tool == "axolotl", self.values.get("train.steps", (0, ""))[0]
        part = "warmup" if self._count("warmup") or (by_axolotl and "warmup" in self._parts) else "ratio"
        value, is_silent = self._count(part), self._parts.get(part, ("",))[0].endswith(" by default")
        if by_axolotl and steps and value < 1:
            value = min(int(value * steps), _SILENT_WARM_UP if is_silent else steps)
        elif is_silent:
            self._put("train.max_warmup_steps", _SILENT_WARM_UP, part)
        value = 2 if by_axolotl and value == 1 else value
        if value:
            self._put("train.warmup_steps", int(value) if value >= 1 else value, part)

    def _schedule(self) -> None:
        named = self._of("schedule")
        if named != "constant":  # that one has no warm-up there
            self._warm_up()
        schedule = TABLE["values"]["=schedule"].get(named)
        if self.values.get("train.min_learning_rate_ratio", (0, ""))[0] == 1:
            schedule = "constant"
        if schedule:
            self._put("train.schedule", schedule, "schedule")
        if schedule not in (None, "cosine"):
            self._drop("train.min_learning_rate_ratio", "is for the schedule cosine there")
        given, words = self._of("kwargs", {}), TABLE["schedules"].get(named, {})
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                given = json.loads(given)
        if not isinstance(given, dict) or not given.keys() <= words.keys():
            return
        for key, value in ((key, _number(value)) for key, value in given.items()):
            rate = self.values.get("train.learning_rate", (0, ""))[0]
            if key != "min_lr" or rate:
                self._put(words[key], value / rate if key == "min_lr" else value, "kwargs")

    def _evaluation(self) -> None:
        when, share = self._word("evaluation"), self._count("held_out")
        sets = self._sets("test_sets", "test")
        if self.tool == "trl" and when in ("steps", "epoch"):
            learnt = self._sets("datasets")  # files, and data sets that name their split, have none for tests
            sets = [one for one in self._sets("datasets", "test") if one not in learnt]
        if sets:
            self._put("data.evaluation", [name for name, _ in sets], "test_sets", "test_split")
        elif share < 1:
            self._put("data.held_out", share, "held_out")
        if sets or 0 < share < 1:
            if when == "steps" and self.tool != "axolotl":
                self._parts.setdefault("every", ("logging_steps", self._steps_of_logging))
            self._put_interval("train.evaluate_every", "evaluation", "every", "per_epoch")
        if "train.evaluate_every" in self.values and self._count("patience"):
            self._put("train.patience", int(self._count("patience")), "patience")

    def _output(self) -> None:
        self._put_interval("checkpoint.every", "saving", "save_every", "saves_per_epoch")
        run_dir = os.path.normpath(str(self._of("run_dir", ".")))
        if re.fullmatch(r"[^./~{}][^{}]*", run_dir):
            self._put("output.run_dir", run_dir, "run_dir")
        named = self._of("report_to", [])
        wanted = {str(one) for one in (named if isinstance(named, list) else [named])}
        wanted |= {name for name in TRACKERS if self._of(name)}
        if known := [name for name in TRACKERS if name in wanted]:
            self._put("report.trackers", known, *known, *(["report_to"] if wanted == set(known) else []))


def _written(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_written(key)} = {_written(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps("" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: Any) -> Any:
    """A number that YAML takes for a text, such as 2e-5, as one."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value
