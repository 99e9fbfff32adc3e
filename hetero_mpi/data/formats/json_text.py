"""Read JSON lines and JSON documents, optionally compressed."""

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
    """Yield the records of JSON lines, of one JSON array, or of concatenated JSON values in any layout."""
    numbered = ((number, line) for number, line in enumerate(lines_of(path), start=1) if line.strip())
    first, second = next(numbered, None), next(numbered, None)
    if first is None:
        return
    value = _parse_line(first[1])
    spans_lines = isinstance(value, BadRecord) and (
        first[1].lstrip().startswith(b"[") or (second is not None and _unfinished(first[1], second[1]))
    )
    if spans_lines or (second is None and isinstance(value, list) and not is_chat(value)):
        yield from _read_document(path)
        return
    yield f"{path}, line {first[0]}", value
    for number, line in chain([] if second is None else [second], numbered):
        yield f"{path}, line {number}", _parse_line(line)


def _unfinished(line: bytes, following: bytes) -> bool:
    """Whether ``line`` begins a value that continues on the ``following`` line, as in pretty-printed JSON."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip()) and isinstance(_parse_line(following), BadRecord)
    except (ValueError, RecursionError):
        return False
    return False


def _parse_line(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
        value, end = _decode(text, _skip_spaces(text, 0))
        if (further := _skip_spaces(text, end)) < len(text):
            raise json.JSONDecodeError("Extra data", text, further)
        return value
    except UnicodeDecodeError as error:
        return BadRecord(
            "records.encoding",
            f"records must be JSON in UTF-8; byte {error.start + 1} of the line is invalid. Convert the file",
        )
    except (ValueError, RecursionError) as error:
        return BadRecord("record.json", _describe_error(error))


def _read_document(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of JSON that is not line-based, up to the first error; the rest cannot be split into records."""
    try:
        text = b"".join(lines_of(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "records.encoding",
            f"{path}: records must be JSON in UTF-8; byte {error.start + 1} is invalid. Convert the file.",
        ) from None
    end, line, is_first = 0, 1, True
    while (start := _skip_spaces(text, end)) < len(text):
        line += text.count("\n", end, start)
        try:
            value, end = _decode(text, start)
        except (ValueError, RecursionError) as error:
            where = f"{path}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
            yield where, BadRecord("record.json", _describe_error(error), rest=True)
            return
        if is_first and isinstance(value, list) and not is_chat(value) and _skip_spaces(text, end) == len(text):
            if not value:
                raise UserError(
                    "records.empty",
                    f"{path}: the file holds no records: its JSON array is empty. Remove it, or add records.",
                )
            yield from ((f"{path}, record {number}", record) for number, record in enumerate(value, start=1))
            return
        yield f"{path}, line {line}", value
        line, is_first = line + text.count("\n", start, end), False


def _skip_spaces(text: str, begin: int) -> int:
    spaces = json.decoder.WHITESPACE.match(text, begin)  # type: ignore[attr-defined]
    return int(spaces.end())


def _decode(text: str, begin: int = 0) -> tuple[Any, int]:
    """Return the JSON value at ``begin`` and its end. A record with a repeated key, which would lose data, becomes a BadRecord."""
    repeated_keys: list[str] = []

    def with_unique_keys(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        keys = [key for key, _ in pairs]
        repeated_keys.append(next(key for index, key in enumerate(keys) if key in keys[:index]))
        return BadRecord(
            "record.repeated_key", f"the key {repeated_keys[-1]!r} occurs twice in one object: remove one of them"
        )

    value, end = json.JSONDecoder(object_pairs_hook=with_unique_keys).raw_decode(text, begin)
    if not repeated_keys:
        return value, end
    return [_repeat_in(record) or record for record in value] if isinstance(value, list) else _repeat_in(value), end


def _repeat_in(value: Any) -> BadRecord | None:
    """Return the first BadRecord inside a value, or None."""
    if isinstance(value, BadRecord):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_repeat_in, inner)), None)


_CAUSE_BY_CHARACTER = {
    "\ufeff": "a byte order mark (BOM), as left by concatenating files: remove it",
    "\x1e": "a record separator (RS) of JSON text sequences: remove it",
    "\0": "a NUL byte, as left by an interrupted write: write the file again",
    "\r": "a lone carriage return (CR): end lines with a line feed (LF), and write \\r in strings",
    "'": "a single quotation mark, as in a Python repr: write JSON",
}
"""Maps the character at which parsing fails to the likely cause and its remedy."""


def _cause(error: json.JSONDecodeError) -> str | None:
    """Guess the cause of a JSON error from the characters around its position; None if they do not reveal it."""
    before, at = error.doc[max(0, error.pos - 100) : error.pos], error.doc[error.pos : error.pos + 1]
    last = before.rstrip()[-1:]
    if at in _CAUSE_BY_CHARACTER:
        return _CAUSE_BY_CHARACTER[at]
    if error.msg == "Extra data" and at != ",":
        joined = "a line break is missing before the next record" if at in ("{", "[") else None
        return _CAUSE_BY_CHARACTER["\r"] if "\r" in before.rpartition(last)[2] else joined
    if (at == "," and last in ("", ",", "[", "{", "}")) or (at in ("]", "}") and last == ",") or "comma" in error.msg:
        return "an extra comma"
    may_lack_comma = at and error.msg.startswith("Expecting ','")
    return "a comma is missing, or a quotation mark in a string is not escaped" if may_lack_comma else None


def _describe_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        cause, position = _cause(error), min(error.pos, len(error.doc.rstrip()))
        column = position - error.doc.rfind("\n", 0, position)
        return f"broken JSON at column {column}: {error.msg}" + (f" ({cause})" if cause else "")
    if isinstance(error, ValueError):
        return "JSON with a number that has too many digits"
    return "the JSON is nested too deeply for a record"
