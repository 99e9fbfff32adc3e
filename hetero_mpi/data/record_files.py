"""Read files of records (JSON lines, JSON, parquet; compressed or not) as JSON values, each with its place in the file.

A broken record is yielded as a ``BadRecord`` and not raised: ``data.skip_bad`` of them are skipped, and one more ends the job.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hetero_mpi.data.record_shapes import (
    FURTHER,
    PAIRS,
    PREFERENCE,
    SHAPES,
    SPELLINGS,
    BadRecord,
    unrecognised,
    without_text,
)
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError

ROWS_AT_ONCE = 1000
"""Rows of a parquet file that are in memory together."""
_MESSAGES = {*SPELLINGS, *PREFERENCE, "prompt", "completion", "history"}
"""Keys that may hold messages."""
_WANTED = {*SPELLINGS, *(key for pair in PAIRS.values() for keys in pair for key in keys), *FURTHER}
_PACKED: dict[bytes, tuple[str, Any]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    b"\x28\xb5\x2f\xfd": ("zstd", None),  # read from Python 3.14 on
}
_KINDS = {
    b"PK\3\4": "a zip archive, or a workbook",
    b"7z\xbc\xaf": "a 7z archive",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"Obj\1": "an Avro file",
    b"SQLite": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
    b"%PDF": "a PDF",
}
"""How files begin that are no records."""
_LONGEST = max(map(len, (*_PACKED, *_KINDS)))


@dataclass
class OwnKeys:
    """The job's own names of a record's keys (``data.keys``): key -> its name in the files."""

    names: Mapping[Any, str] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    """Names that a record had."""

    def read(self, value: Any) -> Any:
        """A record with the keys that are meant. One that has such a key's name by itself is another key, and told as one."""
        if not self.names or not isinstance(value, dict):
            return value
        keys = {name: key for key, name in self.names.items() if name in value}
        self.met.update(keys)
        taken = {*keys.values()}
        return {keys.get(key, f"{key} (its own)" if key in taken else key): inner for key, inner in value.items()}

    def check(self) -> None:
        """Raises UserError: a name is that of no key of all records."""
        for key, name in self.names.items():
            if name not in self.met:
                raise UserError(
                    "records.key_missing",
                    f"data.keys: {key} is read from {name!r}, and no record has that key. Correct the name",
                )


TEXT = frozenset({"text"})
"""The key of records whose texts are learnt as they are."""


def values_of(path: Path, keys: OwnKeys | None = None, wanted: Set[str] = _WANTED) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of every record of a file; the value is a :class:`BadRecord` where the record is broken. Its keys are
    those that ``keys`` reads. ``wanted``: keys that are looked at.

    JSON lines are read line by line, parquet files some rows at a time. Raises UserError when the file cannot be
    read, is empty or holds no records.
    """
    empty = True
    require_regular(path)
    try:
        with path.open("rb") as file:
            head = file.read(4)
        keys, is_table = keys or OwnKeys(), head == b"PAR1" or (path.suffix == ".parquet" and head)
        for place, value in _table(path, keys, wanted) if is_table else _json(path):
            empty = False
            yield place, keys.read(value)
    except Damaged as error:
        empty = False
        yield (
            str(path),
            BadRecord("records.damaged", f"the file breaks off, or is damaged: {error}. Get it again", rest=True),
        )
    except OSError as error:
        raise UserError("records.unreadable", f"{path}: the file of records cannot be read: {error.strerror}") from None
    if empty:
        raise UserError("records.empty", f"{path}: the file of records is empty. Leave it out, or fill it.\n{SHAPES}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of JSON lines; or of one array; or of JSON values one after the other, however they are printed."""
    numbered = ((number, line) for number, line in enumerate(lines_of(path), start=1) if line.strip())
    first, second = next(numbered, None), next(numbered, None)
    if first is None:
        return
    value = _value(first[1])
    begun = isinstance(value, BadRecord) and (
        first[1].lstrip().startswith(b"[") or (second is not None and _unfinished(first[1], second[1]))
    )
    if begun or (second is None and isinstance(value, list) and not is_chat(value)):
        yield from _whole(path)
        return
    yield f"{path}, line {first[0]}", value
    for number, line in chain([] if second is None else [second], numbered):
        yield f"{path}, line {number}", _value(line)


def is_chat(value: Any) -> bool:
    """True: it is a list of messages."""
    messages = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    return messages and any(all(key in value[0] for key in spelling) for spelling in SPELLINGS.values())


def _unfinished(line: bytes, following: bytes) -> bool:
    """True: a line begins a value that goes on in the following one, as pretty-printed JSON does."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip()) and isinstance(_value(following), BadRecord)
    except (ValueError, RecursionError):
        return False
    return False


def _value(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
        value, end = _decoded(text, _behind_spaces(text, 0))
        if (further := _behind_spaces(text, end)) < len(text):
            raise json.JSONDecodeError("Extra data", text, further)
        return value
    except UnicodeDecodeError as error:
        return BadRecord(
            "records.encoding", f"records must be JSON in UTF-8; byte {error.start + 1} of the line is not. Convert it"
        )
    except (ValueError, RecursionError) as error:
        return BadRecord("record.json", _broken(error))


def _whole(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of JSON that is not one of lines; up to where it is broken, as records are not to be told apart then."""
    try:
        text = b"".join(lines_of(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "records.encoding", f"{path}: records must be JSON in UTF-8; byte {error.start + 1} is not. Convert it."
        ) from None
    end, line, alone = 0, 1, True
    while (place := _behind_spaces(text, end)) < len(text):
        line += text.count("\n", end, place)
        try:
            value, end = _decoded(text, place)
        except (ValueError, RecursionError) as error:
            where = f"{path}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
            yield where, BadRecord("record.json", _broken(error), rest=True)
            return
        if alone and isinstance(value, list) and not is_chat(value) and _behind_spaces(text, end) == len(text):
            if not value:
                raise UserError(
                    "records.empty",
                    f"{path}: the file holds no records: its JSON array is empty. Leave it out, or fill it.",
                )
            yield from ((f"{path}, record {number}", one) for number, one in enumerate(value, start=1))
            return
        yield f"{path}, line {line}", value
        line, alone = line + text.count("\n", place, end), False


def _behind_spaces(text: str, begin: int) -> int:
    found = json.decoder.WHITESPACE.match(text, begin)  # type: ignore[attr-defined]
    return int(found.end())


def _table(path: Path, keys: OwnKeys, wanted: Set[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a parquet file; of its columns, those that records have."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(
            "records.package_missing",
            f"{path}: parquet files are read by the package pyarrow, which is not installed on rank 0's machine: run "
            f"`pip install pyarrow` (or `pip install 'hetero_mpi[parquet]'`) there",
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            columns = dict.fromkeys(file.schema_arrow.names)
            read_as = dict(zip(columns, names := keys.read(columns), strict=True))
            pairs = any(all({*keys} & {*names} for keys in pair) for pair in PAIRS.values())
            if wanted is TEXT:
                pairs = "text" in names
            if not (pairs or {*PREFERENCE} <= {*names} or {*SPELLINGS} & {*names}):
                problem = without_text(columns) if wanted is TEXT else unrecognised(dict(names))
                yield str(path), BadRecord("record.unknown_shape", problem, rest=True)
                return
            if not file.metadata.num_rows:
                raise UserError(
                    "records.empty", f"{path}: the file holds no records: it has no rows. Leave it out, or fill it."
                )
            unread = {name: True for name, key in read_as.items() if key not in wanted}  # there, and not looked at
            rows = file.iter_batches(ROWS_AT_ONCE, columns=[name for name in columns if name not in unread])
            for number, row in enumerate((row for batch in rows for row in batch.to_pylist()), start=1):
                value = {name: _without_nulls(inner, read_as[name] in _MESSAGES) for name, inner in row.items()}
                yield f"{path}, row {number}", {**value, **unread}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        yield str(path), BadRecord("records.damaged", f"damaged, or no parquet file: {reason}. Get it again", rest=True)


def _without_nulls(value: Any, messages: bool = False) -> Any:
    """A value without the keys that are null: all objects of a column have the same keys. Those of ``messages`` keep theirs."""
    if isinstance(value, list):
        return [_without_nulls(inner, messages) for inner in value]
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if messages or inner is not None}
    return value


def _decoded(text: str, begin: int = 0) -> tuple[Any, int]:
    """(the JSON value at ``begin``, where it ends); a record in which an object has a key twice is a BadRecord, as one of the two
    values would be lost.
    """
    doubled: list[str] = []

    def whole(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        keys = [key for key, _ in pairs]
        doubled.append(next(key for place, key in enumerate(keys) if key in keys[:place]))
        return BadRecord(
            "record.repeated_key", f"the key {doubled[-1]!r} stands twice in one object: leave one of the two"
        )

    value, end = json.JSONDecoder(object_pairs_hook=whole).raw_decode(text, begin)
    if not doubled:
        return value, end
    return [_doubled(one) or one for one in value] if isinstance(value, list) else _doubled(value), end


def _doubled(value: Any) -> BadRecord | None:
    """The first BadRecord inside a value."""
    if isinstance(value, BadRecord):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_doubled, inner)), None)


_STRAY = {
    "\ufeff": "a byte order mark (BOM) stands there, as where files were joined: remove it",
    "\x1e": "a record separator (RS) of JSON text sequences stands there: remove it",
    "\0": "a NUL byte stands there, as where writing broke off: write the file anew",
    "\r": "a lone carriage return (CR) stands there: end lines with a line feed (LF), and write \\r in texts",
    "'": "a single quotation mark stands there, as Python prints texts: write JSON",
}
"""Character at which JSON is broken -> the cause, and what to do."""


def _cause(error: json.JSONDecodeError) -> str | None:
    """The cause of broken JSON, as far as the characters around the place tell it."""
    before, at = error.doc[max(0, error.pos - 100) : error.pos], error.doc[error.pos : error.pos + 1]
    last = before.rstrip()[-1:]
    if at in _STRAY:
        return _STRAY[at]
    if error.msg == "Extra data" and at != ",":
        joined = "a line break is missing before the next record" if at in ("{", "[") else None
        return _STRAY["\r"] if "\r" in before.rpartition(last)[2] else joined
    if (at == "," and last in ("", ",", "[", "{", "}")) or (at in ("]", "}") and last == ",") or "comma" in error.msg:
        return "a comma too many stands there"
    lacking = at and error.msg.startswith("Expecting ','")
    return "a comma is missing, or a quotation mark in a text has no backslash" if lacking else None


def _broken(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        cause = _cause(error)
        return f"broken JSON at column {error.colno}: {error.msg}" + (f" ({cause})" if cause else "")
    if isinstance(error, ValueError):
        return "JSON with a number of more digits than can be read"
    return "JSON nested too deeply to be a record"


class Damaged(Exception):
    """A compressed file, or one in UTF-16, is broken behind what was read of it; the message says how."""


def kind_of(content: bytes) -> str | None:
    """The kind of a file that is no text in UTF-8, by its beginning; None: not known."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "text in UTF-16, not UTF-8: convert it"
    kinds = _KINDS | {begin: f"compressed by {name}: unpack it" for begin, (name, _) in _PACKED.items()}
    return next((kind for begin, kind in kinds.items() if content.startswith(begin)), None)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file in UTF-8, without a byte order mark.

    Raises:
        UserError: it is a file of another kind.
        Damaged: it breaks off.
        OSError: it cannot be read.
    """
    with closing(_opened(path)) as file:
        try:
            head = file.read(4)
            file.seek(0)
            encoding = json.detect_encoding(head)
            lines: Iterator[bytes] = iter(file)
            if not encoding.startswith("utf-8"):
                lines = (line.encode("utf-8") for line in io.TextIOWrapper(file, encoding, newline="\n"))
            for number, line in enumerate(lines):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        except (EOFError, zlib.error, lzma.LZMAError, UnicodeError) as error:
            raise Damaged(str(error)) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise Damaged(str(error)) from None  # gzip's and bz2's


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        head = file.read(_LONGEST)
    opener = next((opener for begin, (_, opener) in _PACKED.items() if head.startswith(begin)), open)
    if opener is None:
        try:
            from compression import zstd  # type: ignore[import-not-found]
        except ImportError:
            raise UserError(
                "records.compression",
                f"{path}: the file is compressed by zstd, which Python reads from 3.14 on: unpack it (zstd -d {path.name})",
            ) from None
        opener = zstd.open
    found: IO[bytes] = opener(path, "rb")
    if opener is not open:
        with suppress(EOFError, zlib.error, lzma.LZMAError, OSError):  # told by whoever reads it
            head = found.read(_LONGEST)
            found.seek(0)
    kind = next((kind for begin, kind in _KINDS.items() if head.startswith(begin)), None)
    if kind is not None:
        found.close()
        inside = "" if opener is open else " in a compressed one"
        raise UserError(
            "records.format",
            f"{path}: records are read from JSON lines, JSON or parquet; this is {kind}{inside}. Convert it",
        )
    return found
