"""Read files of records as JSON values, each with its place in the file. Each format is a module of ``formats``.

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
from pathlib import Path
from typing import IO, Any

from hetero_mpi.data.record_shapes import FURTHER, PAIRS, SHAPES, SPELLINGS, BadRecord
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

FORMATS = "hetero_mpi.data.formats"
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
    keys = keys or OwnKeys()
    try:
        for place, value in _format_of(path).read_records(path, keys, wanted):
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


def _format_of(path: Path) -> Any:
    """The module of ``formats`` that reads a file: by its bytes, else by its name."""
    modules = [plug_in(FORMATS, name) for name in plug_in_names(FORMATS)]
    with path.open("rb") as file:
        head = file.read(max(len(begin) for module in modules for begin in module.BEGINS))
    by_bytes = [module for module in modules if head.startswith(module.BEGINS)]
    by_name = [module for module in modules if head and path.name.endswith(module.SUFFIXES)]
    return next(iter(by_bytes + by_name), plug_in(FORMATS, "json_text"))


def is_chat(value: Any) -> bool:
    """True: it is a list of messages."""
    messages = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    return messages and any(all(key in value[0] for key in spelling) for spelling in SPELLINGS.values())


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
