"""JSON lines and JSON, compressed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from itertools import chain
from pathlib import Path
from typing import Any

from hetero_mpi.data.record_files import OwnKeys, is_chat, lines_of
from hetero_mpi.data.record_shapes import BadRecord
from hetero_mpi.util.errors import UserError

BEGINS: tuple[bytes, ...] = ()
SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".xz", ".bz2", ".zst"))


def read_records(path: Path, _: OwnKeys, __: Set[str]) -> Iterator[tuple[str, Any]]:
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
