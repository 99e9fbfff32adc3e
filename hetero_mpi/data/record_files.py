"""Files of records -> JSON values, each with the place where it stands; the shapes that records have, and the broken ones.

A broken record is told and not raised: so many are skipped, and more end the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hetero_mpi.errors import UserError

Shape = Literal["chat", "alpaca", "prompt/completion"]

SHAPES = """\
A file holds JSON lines, one JSON array, or the rows of a parquet file: records in these shapes:
  alpaca             {"instruction": "...", "input": "...", "output": "..."}; input may be left out
  chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  chat (ShareGPT)    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  prompt/completion  {"prompt": "...", "completion": "..."}
  preference         {"prompt": "...", "chosen": "...", "rejected": "..."}, for [train] preference; texts, or lists of messages"""

SPELLINGS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a chat -> keys of its messages."""
PAIRS: dict[Shape, tuple[str, str]] = {
    "alpaca": ("instruction", "output"),
    "prompt/completion": ("prompt", "completion"),
}
PREFERENCE = ("chosen", "rejected")
FURTHER = ("input", "tools", *PREFERENCE)
"""Keys that are used beside those."""


def unrecognised(value: Mapping[str, Any]) -> str:
    """Why a record with these keys has none of the shapes, in words."""
    for shape, pair in PAIRS.items():
        missing = [key for key in pair if key not in value]
        if len(missing) == 1:
            return f"{missing[0]!r} is missing for the {shape} shape; the record has {keys_named(value)}"
    return f"no shape has these keys: {keys_named(value)}"


def keys_named(value: Mapping[str, Any]) -> str:
    """The first keys of a record, for messages to a person."""
    shown = ", ".join(repr(key) for key in list(value)[:6])
    return (shown + (", ..." if len(value) > 6 else "")) or "no keys"


ROWS_AT_ONCE = 1000
"""Rows of a parquet file that are in memory together."""
_MESSAGES = {*SPELLINGS, *PREFERENCE, "prompt"}
"""Keys that may hold messages."""
_WANTED = {*SPELLINGS, *(key for pair in PAIRS.values() for key in pair), *FURTHER}


def values_of(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of every record of a file; the value is a :class:`BadRecord` where the record is broken.

    JSON lines are read line by line, parquet files some rows at a time. Raises UserError when the file cannot be
    read, is empty or holds no records.
    """
    empty = True
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1" or (path.suffix == ".parquet" and file.tell()):
                yield from _table(path)
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                if empty and line.lstrip().startswith(b"["):
                    yield from _array(path)
                    return
                empty = False
                yield f"{path}, line {number}", _value(line)
    except OSError as error:
        raise UserError(f"{path}: the file of records cannot be read: {error.strerror}") from None
    if empty:
        raise UserError(f"{path}: the file of records is empty. Leave it out, or fill it.\n{SHAPES}")


def _value(line: bytes) -> Any:
    try:
        return _decoded(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(f"records must be JSON in UTF-8; byte {error.start + 1} of the line is not. Convert it")
    except (ValueError, RecursionError) as error:
        return BadRecord(_broken(error))


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of one JSON array; none but a BadRecord where it is broken, as records are not to be told apart then."""
    try:
        values = _decoded(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: records must be JSON in UTF-8; byte {error.start + 1} is not. Convert it.") from None
    except (ValueError, RecursionError) as error:
        where = f"{path}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        yield where, BadRecord(_broken(error), rest=True)
        return
    if not values:
        raise UserError(f"{path}: the file holds no records: its JSON array is empty. Leave it out, or fill it.")
    for number, value in enumerate(values, start=1):
        yield f"{path}, record {number}", value


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a parquet file; of its columns, those that records have."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(
            f"{path}: parquet files are read by the package pyarrow, which is not installed on rank 0's machine: run "
            f"`pip install pyarrow` (or `pip install 'hetero_mpi[parquet]'`) there"
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            shapes = (*PAIRS.values(), PREFERENCE, *([key] for key in SPELLINGS))
            if not any(set(keys) <= set(names) for keys in shapes):
                yield str(path), BadRecord(unrecognised(dict.fromkeys(names)), rest=True)
                return
            if not file.metadata.num_rows:
                raise UserError(f"{path}: the file holds no records: it has no rows. Leave it out, or fill it.")
            rows = file.iter_batches(ROWS_AT_ONCE, columns=[name for name in names if name in _WANTED])
            for number, row in enumerate((row for batch in rows for row in batch.to_pylist()), start=1):
                value = {key: _without_nulls(inner, key in _MESSAGES) for key, inner in row.items()}
                yield f"{path}, row {number}", value
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        yield str(path), BadRecord(f"damaged, or no parquet file: {reason}. Get it again", rest=True)


def _without_nulls(value: Any, messages: bool = False) -> Any:
    """A value without the keys that are null: all objects of a column have the same keys. Those of ``messages`` keep theirs."""
    if isinstance(value, list):
        return [_without_nulls(inner, messages) for inner in value]
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if messages or inner is not None}
    return value


def _decoded(text: str) -> Any:
    """The JSON value; a record in which an object has a key twice is a BadRecord, as one of the two values would be lost."""
    doubled: list[str] = []

    def whole(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        keys = [key for key, _ in pairs]
        doubled.append(next(key for place, key in enumerate(keys) if key in keys[:place]))
        return BadRecord(f"the key {doubled[-1]!r} stands twice in one object: leave one of the two")

    value = json.loads(text, object_pairs_hook=whole)
    if not doubled:
        return value
    return [_doubled(one) or one for one in value] if isinstance(value, list) else _doubled(value)


def _doubled(value: Any) -> BadRecord | None:
    """The first BadRecord inside a value."""
    if isinstance(value, BadRecord):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_doubled, inner)), None)


def _broken(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at column {error.colno}: {error.msg}"
    if isinstance(error, ValueError):
        return "JSON with a number of more digits than can be read"
    return "JSON nested too deeply to be a record"


_SHOWN = 5
"""Bad records that one error names; a wrong file would otherwise fill the terminal."""
_MOST_SHOWN = 100
"""The same where many may be skipped, all of which are named."""


class BadRecord(Exception):
    """What is wrong with one record, in words; ``rest``: all that follows in its file cannot be read, so it is never skipped."""

    def __init__(self, problem: str, rest: bool = False) -> None:
        super().__init__(problem)
        self.rest = rest


@dataclass
class BadRecords:
    """The bad records of a job, in the order of the files; ``allowed`` of them are skipped (``data.skip_bad``)."""

    allowed: int = 0
    problems: list[str] = field(default_factory=list)
    """``data/a.jsonl, line 7: must be a JSON object; it is text``."""
    cut: list[str] = field(default_factory=list)
    """Places behind which the rest of a file cannot be read."""

    def add(self, source: str, problem: BadRecord) -> None:
        if self.problems and self.problems[-1].startswith(f"{source}: "):
            return  # the other record of a pair
        self.problems.append(f"{source}: {problem}")
        self.cut.extend([source] if problem.rest else [])

    def check(self, key: str) -> None:
        """Raise UserError, naming the first ones and the job's ``key``, where there are more than may be skipped."""
        count = len(self.problems)
        if count <= self.allowed and not self.cut:
            return
        limit = f" (data.skip_bad = {self.allowed:,} are skipped at most)" if self.allowed else ""
        if self.cut and count <= self.allowed:
            limit = f" ({self.cut[0]}: what follows there cannot be read, and is never skipped)"
        shown = min(max(_SHOWN, self.allowed + 1), _MOST_SHOWN)
        title = f"{key} must hold records that can be learnt from; {count:,} cannot{limit}:"
        raise UserError("\n".join([title, *self._named(shown), SHAPES]))

    def lines(self) -> list[str]:
        """What was skipped, for a person."""
        if not self.problems:
            return []
        count = f"{len(self.problems):,} bad record{'s' if len(self.problems) > 1 else ''}"
        return [f"{count} skipped (data.skip_bad = {self.allowed:,}):", *self._named(_MOST_SHOWN)]

    def _named(self, shown: int) -> list[str]:
        more = len(self.problems) - shown
        return [*(f"  {problem}" for problem in self.problems[:shown]), *([f"  and {more:,} more"] if more > 0 else [])]
