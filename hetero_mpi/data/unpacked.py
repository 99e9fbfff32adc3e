"""Files of records as lines in UTF-8, whatever they are packed in; what cannot be read is named by what it is."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from hetero_mpi.errors import UserError

_PACKED: dict[bytes, tuple[str, Any]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
}
_ZSTD = b"\x28\xb5\x2f\xfd"
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


class Damaged(Exception):
    """What is wrong with a compressed file, or one in UTF-16, behind what was read of it."""


def kind_of(content: bytes) -> str | None:
    """What a file is that is no text in UTF-8, by how it begins; None: that is not known."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "text in UTF-16, not UTF-8: convert it"
    packed = {**{begin: name for begin, (name, _) in _PACKED.items()}, _ZSTD: "zstd"}
    kinds = {**_KINDS, **{begin: f"compressed by {name}: unpack it" for begin, name in packed.items()}}
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
    if head.startswith(_ZSTD):
        try:
            from compression import zstd  # type: ignore[import-not-found]
        except ImportError:
            raise UserError(
                f"{path}: the file is compressed by zstd, which Python reads from 3.14 on: unpack it (zstd -d {path.name})"
            ) from None
        opener = zstd.open
    found: IO[bytes] = opener(path, "rb")
    try:
        head = head if opener is open else found.read(_LONGEST)
        found.seek(0)
    except (EOFError, zlib.error, lzma.LZMAError, OSError):
        pass  # told by whoever reads it
    kind = next((kind for begin, kind in _KINDS.items() if head.startswith(begin)), None)
    if kind is not None:
        found.close()
        inside = "" if opener is open else " in a compressed one"
        raise UserError(
            f"{path}: records are read from JSON lines, JSON or parquet; this is {kind}{inside}. Convert it"
        )
    return found
