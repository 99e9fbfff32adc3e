"""Files that one start keeps for the next one, in caches that anything may happen to in between: they are used only while they
are, byte for byte, what was written.

    tokens/3f9a.../stream.i32    a kept folder: its files, and
    tokens/3f9a.../seal.json     the size and CRC-32 of each, values of the writer (JSON), and a CRC-32 of these two
    profiles/81c2....json        a kept value: the value, and its CRC-32

A folder is filled beside its place, sealed, forced to the disk and renamed. So several programs may make the same one, and a power
loss leaves nothing under its name that is not whole. What is damaged is removed with a sentence, and its reader makes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hetero_mpi.util.disk import sync, write_atomic, write_errors

T = TypeVar("T")
_SEAL = "seal.json"
_PIECE_BYTES = 1 << 20
_READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading another program's bytes may raise; ``UserError`` is a ValueError."""


def load_sealed(path: Path, read: Callable[[Path, Any], T], report: Callable[[str], object]) -> T | None:
    """The content of a kept folder or file, which ``read`` makes of it and the values in it; None: nothing is kept there.

    All bytes are read (some 2 GB/s of one core). ``report``: gets a sentence about what was damaged, or made ``read`` fail, and is
    removed.
    """
    if not os.path.lexists(path):
        return None
    try:
        return read(path, _verified_values(path))
    except _READ_ERRORS as error:
        reason = str(error) or type(error).__name__
    report(f"{path} is damaged ({reason}): it is removed and made again")
    with contextlib.suppress(OSError):
        discard(path)
    return None


def store_folder(folder: Path, fill: Callable[[Path], Any], remedy: str, durable: bool = True) -> None:
    """Make the folder ``folder``, unless it is there: another program was first, or what was damaged cannot be removed.

    Args:
        fill: writes files into the folder that it is given, and returns values (JSON) to keep with them.
        remedy: what to do where the disk refuses.
        durable: a power loss must not damage it.

    Raises UserError: it cannot be written. What ``fill`` raises, it raises, too.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        with write_errors(folder.parent, remedy):
            temporary.mkdir(parents=True)
        values = fill(temporary)
        with write_errors(folder.parent, remedy):
            write_atomic(temporary / _SEAL, _sealed_text([_summaries(temporary), values]))
            for path in [*temporary.rglob("*"), temporary] if durable else ():
                sync(path)
            try:
                temporary.rename(folder)
            except OSError:
                if not os.path.lexists(folder):
                    raise
            if durable:
                sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def store_value(path: Path, value: Any) -> None:
    """Keep a value (JSON) in a file. Raises OSError."""
    write_atomic(path, _sealed_text(value), durable=True, make_folder=True)


def discard(path: Path) -> None:
    """Remove whatever is there: a file, a link, a folder and all in it. Raises OSError: it cannot be removed."""
    renamed = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another program was first
        os.rename(path, renamed)  # so that nobody sees half of it
        if renamed.is_dir() and not renamed.is_symlink():
            shutil.rmtree(renamed, ignore_errors=True)
        else:
            renamed.unlink()


def _verified_values(path: Path) -> Any:
    """The values of a kept folder or file. Raises OSError or ValueError: it is damaged."""
    if not path.is_dir():
        return _read_value(path)
    sealed_summaries, values = _read_value(path / _SEAL)
    summaries = _summaries(path)
    damaged = [
        name
        for name in sorted({*summaries, *sealed_summaries} - {_SEAL})
        if summaries.get(name) != sealed_summaries.get(name)
    ]
    if damaged:
        raise ValueError(f"{damaged[0]} is not as it was written")
    return values


def _summaries(folder: Path) -> dict[str, list[int]]:
    """Name within the folder -> (size, CRC-32) of a file; empty for what is neither a file nor a folder."""
    summaries = {}
    for path in folder.rglob("*"):
        summary, mode = [], path.lstat().st_mode
        if stat.S_ISREG(mode):  # reading a pipe would wait
            with path.open("rb") as file:
                crc = 0
                while piece := file.read(_PIECE_BYTES):
                    crc = zlib.crc32(piece, crc)
                summary = [file.tell(), crc]
        if not stat.S_ISDIR(mode):
            summaries[str(path.relative_to(folder))] = summary
    return summaries


def _sealed_text(value: Any) -> str:
    return json.dumps({"crc32": zlib.crc32(json.dumps(value).encode()), "value": value})


def _read_value(path: Path) -> Any:
    value = crc = None
    with contextlib.suppress(*_READ_ERRORS):
        content = json.loads(path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else b"")
        value, crc = content["value"], content["crc32"]
    if crc != zlib.crc32(json.dumps(value).encode()):
        raise ValueError(f"{path.name} is not as it was written")
    return value
