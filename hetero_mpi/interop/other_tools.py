"""Convert other tools' files to jobs: YAML configs of axolotl and LLaMA-Factory, and YAML configs or command lines of TRL.

``other_tools.toml`` lists their keys and defaults, and why some keys have no counterpart; this module implements the rules that
involve several keys. Every key of the file ends up in the job or in the comments at its end.
"""

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from hetero_mpi.interop.job_draft import NOT_UNDERSTOOD, OFF, TABLE, JobDraft, keys_of, number_of, tables_of
from hetero_mpi.interop.other_files import read_keys
from hetero_mpi.job.contradictions import objectives_by_key
from hetero_mpi.job.load import job_from_tables
from hetero_mpi.job.schema import DataTable
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import read_json
from hetero_mpi.rundir import trackers
from hetero_mpi.util import toml
from hetero_mpi.util.disk import write_errors
from hetero_mpi.util.errors import UserError

UNUSED = {part: TABLE["unused"].get(part, "its value has no counterpart") for part in TABLE["parts"]}
"""Maps each part to the reason why it is left out."""
_RECORDS = re.compile(r"\.(jsonl?|parquet)(\.\w+)?$|(^|/)[\w-]+$")


def convert_file(file: Path, target: Path, gpus: int | None) -> list[str]:
    """Convert ``file`` to the job file ``target``, and return the lines to print. The other tool used ``gpus`` GPUs.

    Raises UserError if the format is unknown, the kind of training is not supported, or ``target`` exists.
    """
    if target.exists():
        text = f"{target}: already exists, and init does not overwrite files; choose another directory or FILE.toml"
        raise UserError("init.exists", text)
    draft = _Draft(file, read_keys(file), target.absolute().parent, gpus)
    if draft.stops:
        stops = "".join(f"\n  {key} = {value}: {why}" for key, value, why in draft.stops)
        raise UserError("convert.other_objective", f"{file}: no job was written, as training would differ:{stops}")
    text = draft.text()
    try:
        job_from_tables(toml.loads(text), target.stem, target.absolute().parent)
    except (UserError, toml.TomlError) as error:
        reason = f"cannot be converted to a valid job; no job was written: {error}"
        raise UserError("convert.invalid_job", f"{file}: {reason}") from None
    with write_errors(target, "choose another directory or FILE.toml"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    lines = [f"{NOT_UNDERSTOOD}: {', '.join(names)}"] if (names := draft.omitted.get(NOT_UNDERSTOOD)) else []
    if draft.differing:
        lines += ["The job differs from the file in:", *(f"  {text}" for text in draft.differing)]
    converted = f"{len(draft.values)} keys converted from a file of {draft.title}"
    count = sum(map(len, draft.omitted.values()))
    left_out = f"; comments at its end list the other keys, with reasons ({count})" if count else ""
    program = f"hetero-mpi launch -np {draft.ranks} -- train {shlex.quote(str(target))} --dry-run"
    return [f"{target}: {converted}{left_out}", *lines, "Then (-np: ranks, one per device):", f"  {program}"]


Reasons = list[tuple[str, str]]
"""Pairs of a source key and the reason why it is not supported."""


def convert_arguments(name: str, args: Mapping[str, Any], changed: Set[str]) -> tuple[dict[str, Any], Reasons, Reasons]:
    """Convert arguments of TRL's trainers. ``changed`` contains the names of arguments with non-default values.

    Returns the job's values by key, the unsupported arguments, and the ignored arguments, which do not affect the trained model.
    """
    draft = _Draft(Path(name), args, Path.cwd(), None, "trl")
    harmless = {group["reason"] for table in tables_of("trl") for group in table["left"] if group.get("told")}
    harmless |= {OFF, *(UNUSED[part] for part in TABLE["without_effect"])}
    omitted = {(text.partition(" = ")[0], why) for why, names in draft.omitted.items() for text in names}
    rows = sorted({row for row in omitted if row[0] in changed} | {(key, why) for key, _, why in draft.stops})
    values = {ours: value for ours, (value, _) in draft.values.items()}
    return values, [row for row in rows if row[1] not in harmless], [row for row in rows if row[1] in harmless]


_MAX_DEFAULT_WARMUP_STEPS = 100
"""axolotl's default limit on the number of warm-up steps."""


def _matched_projections(targets: Any) -> list[str]:
    """Return the projections that patterns of target modules match in every layer; none if they match other modules too."""
    patterns = [targets] if isinstance(targets, str) else [rf"(.*\.)?({pattern})" for pattern in targets]
    text, names = "|".join(f"({pattern})" for pattern in patterns), TABLE["modules"]["projections"]
    with contextlib.suppress(re.error):
        pattern = re.compile(re.sub(r"language_model\\?\.", "", text))  # of models of text and images
        layers = [f"model.layers.{layer}." for layer in range(100)]
        counts = {name: sum(bool(pattern.fullmatch(layer + name)) for layer in layers) for name in names}
        if {*counts.values()} <= {0, 100} and not any(map(pattern.fullmatch, TABLE["modules"]["others"])):
            return [name.rpartition(".")[2] for name, count in counts.items() if count]
    return []


class _Draft(JobDraft):
    """A job draft, with the conversion rules that involve several keys."""

    def __init__(
        self, file: Path, source: Mapping[str, Any], directory: Path, gpus: int | None, tool: str | None = None
    ) -> None:
        super().__init__(file, source, directory, tool)
        for count in [count for count in ("gpus", "nodes") if gpus is not None and count in self._parts]:
            self._leave(*self._parts.pop(count), "set by init --gpus")
        self._parts.setdefault("gpus", (f"{gpus or 1} GPU (init --gpus)", gpus or 1))
        self.ranks = max(1, int(self._count("gpus") * self._count("nodes", 1)))
        self.compared = self._preference(source)
        self.pairs = self.compared not in ("none", "kto")
        defaults = keys_of(self.tool, "defaults")
        defaults |= TABLE[self.tool]["preferences"] if self.compared != "none" else {}
        for key, value in defaults.items():
            if not {self._keys[key], self._keys[key].lstrip("=")} & (self.values.keys() | self._parts.keys()):
                self._take(key, value, " by default")
        for step in (self._adapter, self._data, self._training, self._evaluation, self._output):
            step()
        for part in self._parts.keys() - self._used:
            self._leave_part(part, OFF if self._of(part) in (False, "none", "no") else UNUSED[part])

    def _preference(self, source: Mapping[str, Any]) -> str:
        """Convert the preference objective and return its name, or "none" for supervised training."""
        hints = [key for key in TABLE["trl"]["tells"] if key in source]
        if self.tool == "trl" and hints and "objective" not in self._parts:  # its YAML does not name the trainer
            kind = TABLE["trl"]["tells"][hints[0]]
            self._parts["objective"] = f"{hints[0]}, a key of {kind.upper()}", kind
        elif self.tool == "trl" and "_" in (script := str(self._of("objective", "")).lower().replace("-", "_")):
            named = [word for word in script.split("_") if word in TABLE["trl"]["supported"]["objective"].split(", ")]
            implied = {TABLE["trl"]["tells"][key] for key in hints} - {"dpo"}  # by keys that GRPO has too
            if len(kinds := {*named} or implied) == 1 and "online" not in script:
                self._parts["objective"] = self._parts["objective"][0], kinds.pop()
        kind = self._word("objective") or "none"
        if kind == "cpo":
            kind = "simpo" if self.tool == "axolotl" else self._word("loss")
            if kind != "simpo" or self._count("likelihood", 1):
                reason = "of CPO's losses, only SimPO is supported: set cpo_alpha = 0 (in TRL, also loss_type = simpo)"
                self._stop(*self._parts["objective"], reason)
        elif kind == "dpo" or self.tool == "trl":
            kind = self._word("loss") or kind
        compared = kind != "none"
        if "objective" in self._parts:
            loss = ["loss"] if compared or self.tool == "trl" else []
            self._put("train.preference", kind, "objective", *loss, *(["likelihood"] if kind == "simpo" else []))
        if compared and "beta" in self._parts:
            self._put("train.preference_beta", self._of("beta"), "beta")
        if kind == "dpo" and source.get("label_smoothing"):
            self._stop("label_smoothing", source["label_smoothing"], "TRL's sigmoid loss ignores it: remove it")
        for key, methods in objectives_by_key().items():
            if kind not in methods:
                self._drop(f"train.{key}", f"applies only to {' and '.join(methods)}")
        return kind

    def _adapter(self) -> None:
        is_lora = self._word("adapter") == "lora"
        in_four_bits = is_lora and (self._of("adapter") == "qlora" or self._of("four_bits") in (True, 4))
        if not in_four_bits and self._of("four_bits"):
            self._leave_part("four_bits", UNUSED["four_bits"], differs=True)
        absent = ["adapter.", "train.lora"] * (not is_lora) + ["model.double"] * (not in_four_bits)
        for ours in [ours for ours in self.values if ours.startswith(tuple(absent))]:
            self._drop(ours, "applies to adapters or 4-bit quantisation, which are off")
        self._put("adapter.method", "lora" if is_lora else "none", "adapter")
        if self.compared != "none" and self._of("still", True):
            self._drop("adapter.dropout", "preference training there does not use dropout")
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
        targets = self._of("targets")
        names = re.split(r"[,\s|]+", targets) if isinstance(targets, str) else targets
        if self._of("linear") or names in (["all"], ["all-linear"]):
            self._put("adapter.targets", "all-linear", "targets", "linear")
        elif isinstance(names, list) and all(re.fullmatch(r"\w[\w.]*", str(name)) for name in names):
            self._put("adapter.targets", names, "targets")
        elif names is None:
            self._put("adapter.targets", "family")
        elif projections := _matched_projections(targets):
            self._put("adapter.targets", projections, "targets")
        else:
            reason = "not a pattern of projections in all layers, so the default applies, all-linear: name the layers"
            self._leave_part("targets", reason, differs=True)

    def _data(self) -> None:
        sets = self._sets("texts") or self._sets("datasets")
        names, columns = [name for name, _ in sets], [column for _, column in sets]
        if not sets:
            dataset_keys = sorted(key for key, ours in self._keys.items() if ours in ("=datasets", "=texts"))
            reason = self.kind_of_file or f"has no dataset ({', '.join(dataset_keys)})"
            raise UserError("convert.no_data", f"{self.file}: {reason}, so no job was written")
        texts = all(isinstance(column, str) for column in columns)
        if any(isinstance(column, str) for column in columns) > texts:
            self._stop("datasets", names, "a job trains on texts (completion, pretrain) or on records, not on both")
        if texts:
            self._put("data.text", names, "texts", "datasets", "folder", "config_name", "split")
            if any(name.startswith("hf:") or _RECORDS.search(name) for name in names):
                self._put("data.documents", "record")
                columns = [{"text": str(column)} if column != "text" else {} for column in columns]
        else:
            self._put("data.records", names, "datasets", "folder", "config_name", "split")
        keys = [column for column in columns if isinstance(column, dict)]
        if any(keys) and (len(keys) < len(columns) or any(column != keys[0] for column in keys)):
            self._leave("columns", keys, "data.keys maps the columns of all files alike", differs=True)
        elif any(keys):
            self.values["data.keys"] = keys[0], ", ".join(self.column_sources)
        if "weights" in self._parts:
            shares = str(self._of("weights")).strip("[]").split(",")
            self._put("data.weights", [number_of(share) for share in shares], "weights")
        tokens = int(self._count("length", 2)) * (2 if self.pairs else 1)  # the last token is a target only
        file = self.directory / hub.directory_of(str(self.values["model.path"][0])) / "config.json"
        config = read_json(file, "") if self.pairs and file.is_file() else {}
        length = min(tokens - 1, config.get("max_position_embeddings") or tokens)
        if length < tokens - 1:
            self._leave_part("length", f"pairs share a sequence; the model has {length} positions", differs=True)
        self._put("data.sequence_length", length, "length")
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
        for part in self._parts.keys() & {"everything", "answers", "completions"} - self._used:
            self._leave_part(part, "all tokens of a text are targets" if texts else "preferences compare answers")

    def _training(self) -> None:
        parts = ("micro", "accumulation", "gpus", "nodes")
        batch = self._count("batch") if "batch" in self._parts else math.prod(self._count(part, 1) for part in parts)
        self._put("train.global_batch", int(batch), "batch", *parts)
        if isinstance(steps := self._of("steps"), int) and steps > 0:
            self._put("train.steps", steps, "steps")
        elif "epochs" in self._parts:
            self._put("train.epochs", self._of("epochs"), "epochs")
        if self.tool == "axolotl" and self.values["data.packing"][0]:  # drops the rest, which the next epoch fills here
            self._put("train.last_batch", "full", "packing", "drop")
        elif self._of("drop") is not True:
            self._put("train.last_batch", "smaller", "drop")
        if not self.values.get("train.neftune_noise_alpha", (1, ""))[0]:
            self._drop("train.neftune_noise_alpha", "disabled in both tools")
        if self._of("muon") is True:
            self._drop("train.optimizer", "set by use_muon")
            self._put("train.optimizer", "muon", "muon")
        if self.values.get("train.optimizer", ("",))[0] == "adafactor":
            for key in ("beta1", "beta2", "epsilon"):
                self._drop(f"train.{key}", "applies to AdamW, not to Adafactor")
        groups = [group for group in self._of("groups", []) if isinstance(group, Mapping) and group.get("lr")]
        rates = {str(module): group["lr"] for group in groups for module in group.get("modules") or ()}
        scale, rate = self._count("embedding_scale"), self.values.get("train.learning_rate", (0, ""))[0]
        if embedding := scale * rate or self._count("embedding_rate"):
            rates = {"embed_tokens|lm_head": embedding} | rates
        if rates:
            self._put("train.learning_rates", rates, "groups", "embedding_scale", "embedding_rate")
        self._schedule()
        if "clip" in self._parts:
            self._put("train.clip_norm", self._count("clip") or "", "clip")
        of_weights = "auto" if self.values["adapter.method"][0] == "lora" else "fp32"
        dtypes = {True: "bf16", "full": "bf16", "auto": "auto", "lora": of_weights}
        dtype = "fp16" if self._of("fp16") is True else dtypes.get(self._of("bf16"), "fp32")
        self._put("train.dtype", dtype, "fp16", "bf16")

    def _warm_up(self) -> None:
        """Convert the warm-up. axolotl rounds down, to at least 2 and by default at most 100 steps; others prefer a step count."""
        by_axolotl, steps = self.tool == "axolotl", self.values.get("train.steps", (0, ""))[0]
        part = "warmup" if self._count("warmup") or (by_axolotl and "warmup" in self._parts) else "ratio"
        value, is_silent = self._count(part), self._parts.get(part, ("",))[0].endswith(" by default")
        if by_axolotl and steps and value < 1:
            value = min(int(value * steps), _MAX_DEFAULT_WARMUP_STEPS if is_silent else steps)
        elif is_silent:
            self._put("train.max_warmup_steps", _MAX_DEFAULT_WARMUP_STEPS, part)
        value = 2 if by_axolotl and value == 1 else value
        if value:
            self._put("train.warmup_steps", int(value) if value >= 1 else value, part)

    def _schedule(self) -> None:
        named = self._of("schedule")
        if named != "constant":  # has no warm-up in the other tools
            self._warm_up()
        schedule = TABLE["values"]["=schedule"].get(named)
        if self.values.get("train.min_learning_rate_ratio", (0, ""))[0] == 1:
            schedule = "constant"
        if schedule:
            self._put("train.schedule", schedule, "schedule")
        elif named:
            self._leave_part("schedule", "train.schedule has no such value, so the default applies", differs=True)
        if schedule not in (None, "cosine"):
            self._drop("train.min_learning_rate_ratio", "applies only to the cosine schedule there")
        options, words = self._of("kwargs", {}), TABLE["schedules"].get(named, {})
        if isinstance(options, str):
            with contextlib.suppress(ValueError):
                options = json.loads(options)
        if not isinstance(options, dict) or not options.keys() <= words.keys():
            return
        for key, value in ((key, number_of(value)) for key, value in options.items()):
            rate = self.values.get("train.learning_rate", (0, ""))[0]
            if key != "min_lr" or rate:
                self._put(words[key], value / rate if key == "min_lr" else value, "kwargs")

    def _evaluation(self) -> None:
        when, share = self._word("evaluation"), self._count("held_out")
        sets = self._sets("test_sets", "test")
        if self.tool == "trl" and not sets and when in ("steps", "epoch"):
            train_sets = self._sets("datasets")  # without a test split: files, and datasets with a split
            sets = [entry for entry in self._sets("datasets", "test") if entry not in train_sets]
        trained = [*self.values.get("data.records", self.values.get("data.text", ([], "")))[0]]
        if any(name in trained for name, _ in sets):
            self._leave_part("test_sets", "its files are trained on; set data.evaluation to others", differs=True)
            sets = [(name, column) for name, column in sets if name not in trained]
        if sets:
            self._put("data.evaluation", [name for name, _ in sets], "test_sets", "test_split")
        elif share < 1:
            self._put("data.evaluation_fraction", share, "held_out")
        else:
            default = DataTable.model_fields["evaluation_fraction"].default
            reason = f"numbers of records are unsupported; data.evaluation_fraction = {default} applies"
            self._leave_part("held_out", reason, differs=True)
        if sets or share > 0 or when == "no":
            if when == "steps" and self.tool != "axolotl":
                self._parts.setdefault("every", ("logging_steps", self._steps_of_logging))
            self._put_interval("train.evaluate_every", "evaluation", "every", "per_epoch")
        else:
            for part in [part for part in ("evaluation", "every", "per_epoch") if self._of(part)]:
                self._leave_part(part, "no evaluation set was found, so nothing is evaluated", differs=True)
        if self.values.get("train.evaluate_every", (0, ""))[0] and self._count("patience"):
            self._put("train.early_stopping_patience", int(self._count("patience")), "patience")

    def _output(self) -> None:
        self._put_interval("checkpoint.every", "saving", "save_every", "saves_per_epoch")
        limit, key = self.values.get("checkpoint.keep", ("all", ""))
        self.values |= {"checkpoint.keep": ("all", key)} if type(limit) is int and limit <= 0 else {}  # as there
        run_dir = os.path.relpath(str(self._of("run_dir", ".")))
        if re.fullmatch(r"[^./~{}][^{}]*", run_dir):
            self._put("output.run_dir", run_dir, "run_dir")
        elif run_dir != ".":
            self._leave_part("run_dir", UNUSED["run_dir"], differs=True)
        named = self._of("report_to", [])
        requested = {str(tracker) for tracker in (named if isinstance(named, list) else [named])}
        requested |= {name for name in trackers.NAMES if self._of(name)}
        if supported := [name for name in trackers.NAMES if name in requested]:
            self._put("report.trackers", supported, *supported, *(["report_to"] if requested == set(supported) else []))
            if isinstance(self._of("wandb"), str):
                self._leave_part("wandb", UNUSED["wandb"])
