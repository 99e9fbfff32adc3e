"""The draft of a job that is converted from another tool's file, and the source keys that have no counterpart.

``other_tools.toml`` lists the keys of each tool, their defaults, and why some have no counterpart.
"""

import difflib
import fnmatch
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.data.source_files import split_files
from hetero_mpi.interop.other_files import read_keys
from hetero_mpi.job.other_names import read_names
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.schema import TABLES
from hetero_mpi.util import toml
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import printable

TABLE = read_names("other_tools.toml")
_KNOWN = toml.loads(Path(__file__).with_name("known_keys.toml").read_text(encoding="utf-8"))["keys"]
TOOLS = ("axolotl", "llamafactory", "trl")
PATHS = ("model.path", "tokenizer.path", "adapter.path")
NOT_UNDERSTOOD, OFF = "unknown, perhaps misspelled", "off there too"
_LISTS = ("adapter.modules_to_save", "tokenizer.add", "tokenizer.add_special")
"""Keys whose value may be a comma-separated string."""
_COLUMNS = ("field", "text_column", "columns")
"""Keys of a dataset entry that may name its text column."""
FILE_PATTERN = re.compile(r"[./~]|.*\.(jsonl?|parquet|csv|txt|gz|zst)$")
_OFF_VALUES = r"^(false|no|none|null)$"
_LIST_PARTS = (
    "=datasets", "=texts", "=test_sets", "=weights", "=targets", "=report_to", "=kwargs", "=unfrozen", "=groups",
)  # fmt: skip
"""Parts (see ``_parts``) that may have several values."""


def tables_of(tool: str) -> list[dict[str, Any]]:
    """Return the tool's table, followed by the table of transformers' arguments if the tool accepts them."""
    return [TABLE[tool], *([TABLE["trainer"]] if tool != "axolotl" else [])]


def keys_of(tool: str, column: str = "keys") -> dict[str, Any]:
    """Map the tool's keys to job keys, or to the values of another ``column``, such as ``defaults``."""
    return {key: value for table in tables_of(tool) for key, value in table[column].items()}


class JobDraft:
    """The keys of a job under conversion, and the source keys that have no counterpart."""

    def __init__(self, file: Path, source: Mapping[str, Any], directory: Path, tool: str | None = None) -> None:
        self.file, self.directory = file, directory
        kinds = (group["reason"] for group in TABLE["others"] if source.keys() & set(group["keys"]))
        self.kind_of_file = next(kinds, None)
        """Kind of a file that does not train, as its keys suggest."""
        if not source.keys() & {"base_model", "model_name_or_path"}:
            tools = "axolotl (base_model), LLaMA-Factory and TRL (model_name_or_path)"
            kind = self.kind_of_file or "has no model key"
            raise UserError("convert.no_model", f"{file}: {kind}: init converts training files of {tools}")
        self.tool = tool or max(TOOLS, key=lambda tool: len(source.keys() & keys_of(tool).keys()))
        self.title = str(TABLE[self.tool]["title"])
        self.values: dict[str, tuple[Any, str]] = {}
        """Maps a job key to its value and the source keys, as text."""
        self.omitted: dict[str, list[str]] = {}
        """Maps a reason to the source keys, with their values, that are omitted for it."""
        self.stops: list[tuple[str, str, str]] = []
        """Keys that prevent the conversion: (source key, value, reason)."""
        self.differing: list[str] = []
        """Omitted source keys, with values and reasons, without which training differs."""
        self._parts: dict[str, tuple[str, Any]] = {}
        """Maps a part, an input of a conversion rule named in ``other_tools.toml``, to its source key and value."""
        self._used: set[str] = set()
        self.pairs = False
        """Whether the records are pairs of answers."""
        self.column_sources: dict[str, None] = {}
        """Source keys of ``data.keys``."""
        self._steps_of_logging = source.get("logging_steps", TABLE[self.tool].get("logging_steps"))
        """Default number of steps between evaluations."""
        self._keys = keys_of(self.tool)
        self._known = {*_KNOWN[self.tool], *(f"trl.{key}" for key in _KNOWN["axolotl.trl"])}
        self._known |= set(_KNOWN["trainer"] if self.tool != "axolotl" else ())
        inner = source["trl"] if isinstance(source.get("trl"), Mapping) else {}
        for key, value in {**source, **{f"trl.{key}": value for key, value in inner.items()}}.items():
            self._take(key, value)

    def text(self) -> str:
        """Render the job file."""
        name = printable(" ".join(self.file.name.split()))
        lines = [f"# Converted from {name} ({self.title}) by `init --from`; comments show the source keys."]
        for table in TABLES:
            keys = {key.partition(".")[2]: entry for key, entry in self.values.items() if key.startswith(f"{table}.")}
            lines += ["", f"[{table}]"] if keys else []
            for key, (value, source) in keys.items():
                lines.append(f"{key} = {toml.inline(value)}" + (f"  # {source}" if source else ""))
        left_out = sorted((reason, names) for reason, names in self.omitted.items() if names)
        lines += ["", "# Keys that were left out, by reason:"] if left_out else []
        for reason, names in left_out:
            lines += textwrap.wrap(f"# * {reason}: {', '.join(sorted(names))}", 120, subsequent_indent="#   ")
        return "\n".join(lines) + "\n"

    def _take(self, key: str, value: Any, by: str = "") -> None:
        ours = self._keys.get(key)
        words, single = TABLE["values"].get(ours), (ours or "").startswith("=") and ours not in _LIST_PARTS
        if single and isinstance(value, list) and len(value) == 1:
            (value,) = value
        if value is None and ours == "=length" and self.tool == "trl":
            self._stop(key, value, "rows of unlimited length are not supported: set the maximum number of tokens")
        elif value is None or value in ("", [], {}):
            self.omitted.setdefault("empty there", []).append(printable(key))
        elif ours is None:
            self._leave_group(key, value, tables_of(self.tool))
        elif ours.startswith("="):
            if single and isinstance(value, (list, dict)):
                raise self._bad_value(key, as_toml(value), "must be a single value; no job was written")
            first = self._parts.get(ours[1:], (key, None))
            chosen, dropped = (first, (key, value)) if first[1] else ((key + by, value), first)
            self._parts[ours[1:]] = chosen
            if chosen[0] != dropped[0] and dropped[1] is not None:
                self._leave(*dropped, f"set by {chosen[0]}")
        elif ours in _LISTS and isinstance(value, str):
            self.values[ours] = re.split(r"\s*,\s*", value.strip()), key + by
        elif words is None and not (ours in _LISTS and isinstance(value, Mapping)):
            self.values[ours] = self._path(str(value)) if ours in PATHS else number_of(value), key + by
        elif words is not None and str(value).lower() in words:
            self.values[ours] = words[str(value).lower()], key + by
        else:
            self._leave(key, value, f"{ours} has no such value, so the default applies", differs=True)

    def _leave_group(self, key: str, value: Any, tables: Sequence[Mapping[str, Any]], where: str = "") -> None:
        """Omit a key, or stop the conversion, as the first matching pattern says. ``where`` is a prefix for the key's name."""
        groups = [group for table in tables for group in table["left"]]
        exact = [group for group in groups if key in group["keys"]]
        fitting = exact or [group for group in groups if any(fnmatch.fnmatchcase(key, name) for name in group["keys"])]
        keys = self._known if not where else set(_KNOWN["entries"])
        likeness = 0.9 if fitting else 0.7
        similar = [] if exact or key in keys else difflib.get_close_matches(key, keys | self._keys.keys(), 3, likeness)
        similar.sort(key=lambda name: name.split("_")[0] != key.split("_")[0])
        meanings = {keys_of(tool).get(key) for tool in TOOLS}
        similar = [name for name, ours in self._keys.items() if ours in meanings and similar] or similar
        if similar or not fitting:
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            return self._leave(where + key, value, NOT_UNDERSTOOD, hint)
        group, texts = fitting[0], {str(text) for text in (value if isinstance(value, list) else [value]) if text}
        pattern = group.get("unless", _OFF_VALUES)
        enabled = any(not re.search(pattern, text, re.IGNORECASE) for text in texts)
        if group.get("stop") and enabled:
            self._stop(where + key, value, group["reason"])
        else:
            reason = group["reason"].partition("; remove")[0]
            reason = reason if enabled or "unless" in group or not group.get("differs") else OFF
            self._leave(where + key, value, reason, differs=group.get("differs", False) and enabled)

    def _stop(self, key: str, value: Any, reason: str) -> None:
        self.stops.append((printable(" ".join(key.split())), printable(as_toml(value)), reason))

    def _leave(self, key: str, value: Any, reason: str, hint: str = "", differs: bool = False) -> None:
        names = self.omitted.setdefault(reason, [])
        text = f"{printable(' '.join(key.split()))} = {printable(as_toml(value))}{hint}"
        if not key.endswith(" by default") and text not in names:
            names.append(text)
            self.differing.extend([f"{text}: {reason}"] if differs else [])

    def _leave_part(self, part: str, reason: str, differs: bool = False) -> None:
        self._used.add(part)
        self._leave(*self._parts[part], reason, differs=differs)

    def _bad_value(self, key: str, value: str, rule: str) -> UserError:
        return UserError("convert.value", f"{self.file}: {key} = {value}: {rule}")

    def _of(self, part: str, otherwise: Any = None) -> Any:
        """Return the value of a part, converted to a number if possible, or ``otherwise`` if the part is missing."""
        return number_of(self._parts[part][1]) if part in self._parts else otherwise

    def _count(self, part: str, otherwise: float = 0) -> float:
        value = self._of(part, otherwise)
        if isinstance(value, (int, float)) and 0 <= value < math.inf:
            return value
        raise self._bad_value(self._parts[part][0], as_toml(value), "must be a number of at least 0")

    def _word(self, part: str) -> str:
        """Return the job's value for a part, or "" if the part is missing. Raises UserError if its value is not supported."""
        words, value = TABLE["values"][f"={part}"], self._of(part, "")
        value = str(value).lower()
        if value and value not in words:
            supported = TABLE[self.tool]["supported"].get(part, ", ".join(words))
            rule = f"not supported, so no job was written; supported: {supported}"
            raise self._bad_value(self._parts[part][0], value, rule)
        return words.get(value, "")

    def _put(self, ours: str, value: Any, *parts: str) -> None:
        self._used.update(parts)
        self.values[ours] = value, ", ".join(self._parts[part][0] for part in parts if part in self._parts)

    def _put_interval(self, ours: str, strategy: str, every: str, times: str) -> None:
        """Set ``ours`` to the interval ``every`` (in steps or as a share of the run), or derive it from ``times`` per epoch."""
        when, steps = self._word(strategy), self.values.get("train.steps", (0, ""))[0]
        if every in self._parts and (when == "steps" or self.tool == "axolotl"):
            part, value = every, self._count(every)
        elif self._count(times) or (when == "epoch" and not steps):
            part, value = times, 1 / (self._count(times) or 1) / (self._count("epochs", 1) or 1)
            value = math.floor(value * 1e12) / 1e12 if value < 1 else 0  # rounding up might add a step
        elif when == "no" and not self._parts[strategy][0].endswith(" by default"):
            part, value = strategy, 0
        else:
            return
        value = int(value) if value >= 1 else math.ceil(value * steps) if steps else value
        self._put(ours, value, *{part: 0, strategy: 0})

    def _sets(self, part: str, split: str = "train") -> list[tuple[str, str | dict[str, str]]]:
        """Return the files of a part as (name for ``data.records``, text column or the names of a record's columns)."""
        key, value = self._parts.get(part, ("", []))
        if self.tool == "llamafactory" and value and not isinstance(value, Mapping):
            names = value if isinstance(value, list) else re.split(r"\s*,\s*", str(value))
            value = [self._listed(str(name)) for name in names]
        elif isinstance(value, str):
            which = self._of("split" if split == "train" else "test_split")
            value = [{"path": value, "name": self._of("config_name"), "split": which}]
        elif isinstance(value, Mapping):  # a mixture of the alignment handbook
            for inner in value.keys() - {"datasets"}:
                self._leave_group(inner, value[inner], [TABLE["entries"]], f"{key}.")
            value = value.get("datasets")
        entries = value if isinstance(value, list) else [None]
        if not all(isinstance(each, Mapping) and (each.get("path") or each.get("id")) for each in entries):
            text = f"{self.file}: {key} = {as_toml(value)}: must be a list of datasets, each with a path"
            raise UserError("convert.data_sets", text)
        sets = []
        for at, entry in enumerate(value):
            where, column = f"{key}[{at}]", self._column(part, entry)
            converted = ["type", *_COLUMNS]
            if isinstance(column, dict):
                inner = {name: each.values() if isinstance(each, Mapping) else [each] for name, each in entry.items()}
                converted = [name for name, values in inner.items() if any(key in values for key in column.values())]
                self.column_sources |= {f"{where}.{name}": None for name in converted}
            sets += [(name, column) for name in self._records(where, entry, split, converted)]
        return sets

    def _column(self, part: str, entry: Mapping[str, Any]) -> str | dict[str, str]:
        """Return the text column of a dataset, or the columns of its records by our name, without those of that name."""
        style = entry.get("type")
        if part == "texts" or self._of("objective") == "pt" or style in ("completion", "pretrain"):
            columns = [entry[key] for key in _COLUMNS if entry.get(key)]
            column = (columns[0].get("prompt") if isinstance(columns[0], Mapping) else columns[0]) if columns else None
            return str(column or "text")
        inner = [entry.get(key) for key in ("columns", "message_property_mappings", "tags")]
        layout = str(entry.get("formatting", style)).removeprefix("chatml.").removeprefix("llama3.")
        defaults = TABLE["pairs" if self.pairs else "single"].get(layout, {})
        named = {**defaults, **entry, **(style if isinstance(style, Mapping) else {})}
        for mapping in inner:
            named |= mapping if isinstance(mapping, Mapping) else {}
        for key in named.keys() & {"images", "videos", "audios", "format"}:
            self._leave_group(key, named[key], [TABLE["entries"]], f"{part}.")
        roles = [named[key] for key in ("role", "message_field_role", "role_tag") if isinstance(named.get(key), str)]
        is_sharegpt = roles[0] == "from" if roles and roles[0] else entry.get("formatting") == "sharegpt"
        chats = "prompt" if self.pairs else "conversations" if is_sharegpt else "messages"
        names = [(chats if ours == "messages" else ours, named.get(key)) for key, ours in TABLE["columns"].items()]
        return {ours: name for ours, name in names if isinstance(name, str) and name != ours}

    def _records(self, where: str, entry: Mapping[str, Any], default_split: str, converted: Sequence[str]) -> list[str]:
        path, name = str(entry.get("path") or entry.get("id")), entry.get("name") or entry.get("config")
        files = entry.get("data_files")
        split = str(entry.get("split") or default_split)
        base_split = re.split(r"[\[+]", split)[0]
        is_file = FILE_PATTERN.match(path) is not None or os.path.exists(path)
        if isinstance(files, Mapping):  # by split
            files = files.get(base_split, next(iter(files.values())))
        if files and (is_file or path in ("json", "csv", "parquet", "text")):
            first, *files = files if isinstance(files, list) else [files]
            path, is_file = str(first), True
        for key, value in {**entry, "data_files": files, "split": split if split != base_split else None}.items():
            if key not in ("path", "id", "name", "config", *converted) and value:
                self._leave_group(key, value, [TABLE["entries"]], f"{where}.")
        if not is_file:
            return [f"hf:{path}" + (f"/{name}" if name else "") + (f":{base_split}" if base_split != "train" else "")]
        files_by_split = split_files(Path(path), name) if os.path.isdir(path) and self.tool != "llamafactory" else {}
        if not any(files_by_split.values()):
            return [self._path(path) + ("/*" if os.path.isdir(path) else "")]
        if base_split not in files_by_split:
            self._leave(f"{where}.split", base_split, f"{path} has no files of this split", differs=True)
        return [self._path(file) for file in files_by_split.get(base_split, [])]

    def _listed(self, name: str) -> dict[str, Any]:
        """Look up a LLaMA-Factory dataset in ``dataset_info.json``, and return it as an entry like those of axolotl."""
        folder = str(self._of("folder", "data"))
        listed = Path(folder) / "dataset_info.json"
        entries = read_keys(listed) if os.path.exists(listed) else {}
        entry = entries.get(name)
        if not isinstance(entry, dict):
            self._leave("dataset", name, f"{folder}/dataset_info.json has no such entry: set its file", differs=True)
            return {"path": f"./{name}"}
        path = entry.get("hf_hub_url") or os.path.join(".", folder, str(entry.get("file_name", name)))
        rest = {key: value for key, value in entry.items() if key not in ("hf_hub_url", "file_name", "subset")}
        return {"path": path, "name": entry.get("subset"), **rest}

    def _drop(self, ours: str, reason: str) -> None:
        """Remove a converted key from the job, and list it as omitted."""
        if ours in self.values:
            value, key = self.values.pop(ours)
            self._leave(key, value, reason)

    def _path(self, text: str) -> str:
        """Make a path relative to the job's directory instead of the working directory. Hub names are unchanged."""
        is_path = (FILE_PATTERN.match(text) or os.path.exists(text)) and not text.startswith("~")
        return os.path.relpath(Path(text).absolute(), self.directory) if is_path else text


def number_of(value: Any) -> Any:
    """Convert a number that YAML reads as a string, such as 2e-5; return other values unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value
