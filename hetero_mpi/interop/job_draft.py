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
NOT_UNDERSTOOD = "unknown, perhaps misspelled"
_LISTS = ("adapter.modules_to_save", "tokenizer.add", "tokenizer.add_special")
"""Keys whose value may be a comma-separated string."""
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
        lines += ["", "# Keys that were left out, by reason:"]
        for reason, names in sorted((reason, names) for reason, names in self.omitted.items() if names):
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
        similar = [] if exact or key in keys else difflib.get_close_matches(key, keys | self._keys.keys(), 1, likeness)
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
        else:
            return
        self._put(ours, int(value) if value >= 1 else math.ceil(value * steps) if steps else value, part, strategy)

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
