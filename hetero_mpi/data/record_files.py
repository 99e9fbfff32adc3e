"""Read record files as JSON values with their positions. Each format is a module of ``formats``.

A broken record is yielded as a ``BadRecord`` rather than raised, since up to ``data.skip_bad`` of them are skipped.
"""

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
_RECORD_KEYS = {*SPELLINGS, *(key for pair in PAIRS.values() for keys in pair for key in keys), *FURTHER}
_COMPRESSIONS: dict[bytes, tuple[str, Any]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    b"\x28\xb5\x2f\xfd": ("zstd", None),  # supported from Python 3.14 on
}
_OTHER_KINDS = {
    b"PK\3\4": "a zip archive, or a workbook",
    b"7z\xbc\xaf": "a 7z archive",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"Obj\1": "an Avro file",
    b"SQLite": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
    b"%PDF": "a PDF",
}
"""Magic bytes of files that hold no records."""
_MAX_MAGIC_BYTES = max(map(len, (*_COMPRESSIONS, *_OTHER_KINDS)))


@dataclass
class OwnKeys:
    """Maps standard record keys to their names in the job's files (``data.keys``)."""

    names: Mapping[Any, str] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    """Names that have occurred in a record."""

    def read(self, value: Any) -> Any:
        """Rename a record's keys to the standard ones. An original key of the same name gets the suffix "(original)"."""
        if not self.names or not isinstance(value, dict):
            return value
        keys = {name: key for key, name in self.names.items() if name in value}
        self.met.update(keys)
        renamed = {*keys.values()}
        return {keys.get(key, f"{key} (original)" if key in renamed else key): inner for key, inner in value.items()}

    def check(self) -> None:
        """Raise UserError if a renamed key occurs in no record."""
        for key, name in self.names.items():
            if name not in self.met:
                raise UserError(
                    "records.key_missing",
                    f"data.keys: {key} is mapped to {name!r}, but no record has this key. Correct the name",
                )


TEXT = frozenset({"text"})
"""Keys to read from records of plain text."""


def values_of(path: Path, keys: OwnKeys | None = None, read_keys: Set[str] = _RECORD_KEYS) -> Iterator[tuple[str, Any]]:
    """Yield (position, JSON value) for every record of a file; the value of a broken record is a :class:`BadRecord`.

    ``keys`` renames the records' keys; ``read_keys`` selects the columns to read from columnar formats. JSON lines are read one
    at a time, parquet files in blocks of rows. Raises UserError if the file cannot be read, is empty or holds no records.
    """
    empty = True
    require_regular(path)
    keys = keys or OwnKeys()
    try:
        for position, value in _select_format(path).read_records(path, keys, read_keys):
            empty = False
            yield position, keys.read(value)
    except Damaged as error:
        empty = False
        text = f"the file is truncated or damaged: {error}. Copy it again"
        yield str(path), BadRecord("records.damaged", text, rest=True)
    except OSError as error:
        raise UserError("records.unreadable", f"{path}: the records file cannot be read: {error.strerror}") from None
    if empty:
        raise UserError("records.empty", f"{path}: the records file is empty. Remove it, or add records.\n{SHAPES}")


def _select_format(path: Path) -> Any:
    """Select the module of ``formats`` for a file by its magic bytes, else by its suffix, else ``json_text``."""
    modules = [plug_in(FORMATS, name) for name in plug_in_names(FORMATS)]
    with path.open("rb") as file:
        head = file.read(max(len(begin) for module in modules for begin in module.BEGINS))
    by_bytes = [module for module in modules if head.startswith(module.BEGINS)]
    by_name = [module for module in modules if head and path.name.endswith(module.SUFFIXES)]
    return next(iter(by_bytes + by_name), plug_in(FORMATS, "json_text"))


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    messages = isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)
    return messages and any(all(key in value[0] for key in spelling) for spelling in SPELLINGS.values())


class Damaged(Exception):
    """Raised while reading a compressed or UTF-16 file that turns out to be truncated or corrupt."""


def kind_of(content: bytes) -> str | None:
    """Identify a file that is not UTF-8 text by its magic bytes; None if they are unknown."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "text in UTF-16, not UTF-8: convert it"
    kinds = _OTHER_KINDS | {begin: f"compressed ({name}): unpack it" for begin, (name, _) in _COMPRESSIONS.items()}
    return next((kind for begin, kind in kinds.items() if content.startswith(begin)), None)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a text file, which may be compressed, as UTF-8 without a byte order mark.

    Raises UserError for an unsupported file format, Damaged for a truncated or corrupt file, OSError for an unreadable one.
    """
    with closing(_open_unpacked(path)) as file:
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
            raise Damaged(str(error)) from None  # raised by gzip and bz2


def _open_unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        head = file.read(_MAX_MAGIC_BYTES)
    opener = next((opener for begin, (_, opener) in _COMPRESSIONS.items() if head.startswith(begin)), open)
    if opener is None:
        try:
            from compression import zstd  # type: ignore[import-not-found]
        except ImportError:
            raise UserError(
                "records.compression",
                f"{path}: the file is compressed with zstd, which needs Python 3.14 or later: unpack it (zstd -d {path.name})",
            ) from None
        opener = zstd.open
    unpacked: IO[bytes] = opener(path, "rb")
    if opener is not open:
        with suppress(EOFError, zlib.error, lzma.LZMAError, OSError):  # reported when the lines are read
            head = unpacked.read(_MAX_MAGIC_BYTES)
            unpacked.seek(0)
    kind = next((kind for begin, kind in _OTHER_KINDS.items() if head.startswith(begin)), None)
    if kind is not None:
        unpacked.close()
        suffix = "" if opener is open else " inside a compressed file"
        raise UserError(
            "records.format",
            f"{path}: records are read from JSON lines, JSON or parquet; this is {kind}{suffix}. Convert it",
        )
    return unpacked
