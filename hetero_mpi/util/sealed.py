"""Cached files with checksums: data from an earlier start is used only if every byte is as it was written.

    tokens/3f9a.../stream.i32    a sealed folder: its files, and
    tokens/3f9a.../seal.json     size and CRC-32 of each file, the writer's values (JSON), and a CRC-32 of both
    profiles/81c2....json        a sealed value with its CRC-32

A folder is filled under a temporary name, sealed, synced and renamed. Several programs may therefore create the same folder, and a
power loss leaves no incomplete data under the final name. Damaged data is reported and removed, and the reader recreates it.
"""

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
"""Errors that parsing arbitrary bytes may raise. ``UserError`` is included because it is a ValueError."""


def load_sealed(path: Path, read: Callable[[Path, Any], T], report: Callable[[str], object]) -> T | None:
    """Verify a sealed folder or file and return ``read(path, values)``, or None if there is no valid data.

    All bytes are verified, at about 2 GB/s per core. Data that is damaged or that ``read`` rejects is reported and removed.
    """
    if not os.path.lexists(path):
        return None
    try:
        return read(path, _verified_values(path))
    except _READ_ERRORS as error:
        reason = str(error) or type(error).__name__
    report(f"{path} is damaged ({reason}): removing and recreating it")
    with contextlib.suppress(OSError):
        discard(path)
    return None


def store_folder(folder: Path, fill: Callable[[Path], Any], remedy: str, durable: bool = True) -> None:
    """Create the sealed ``folder``. An existing folder remains: another program created it, or it could not be removed.

    Args:
        fill: Writes files into the given folder and returns values (JSON) to store with them. Its errors propagate.
        remedy: Advice for the user in the UserError that is raised if writing fails.
        durable: Whether the data must survive a power loss.
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
    """Store a value (JSON) in a sealed file. Raises OSError."""
    write_atomic(path, _sealed_text(value), durable=True, make_folder=True)


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder and its contents. Raises OSError."""
    renamed = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # already removed by another program
        os.rename(path, renamed)  # no reader sees a partial folder
        if renamed.is_dir() and not renamed.is_symlink():
            shutil.rmtree(renamed, ignore_errors=True)
        else:
            renamed.unlink()


def _verified_values(path: Path) -> Any:
    """Verify a sealed folder or file and return the stored values. Raises OSError or ValueError if it is damaged."""
    if not path.is_dir():
        return _read_value(path)
    sealed_summaries, values = _read_value(path / _SEAL)
    actual = _summaries(path)
    damaged = [
        name
        for name in sorted({*actual, *sealed_summaries} - {_SEAL})
        if actual.get(name) != sealed_summaries.get(name)
    ]
    if damaged:
        raise ValueError(f"the checksum of {damaged[0]} does not match")
    return values


def _summaries(folder: Path) -> dict[str, list[int]]:
    """Map each file's path within the folder to [size, CRC-32], or to [] if it is not a regular file."""
    summaries = {}
    for path in folder.rglob("*"):
        summary, mode = [], path.lstat().st_mode
        if stat.S_ISREG(mode):  # reading a pipe would block
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
        raise ValueError(f"the checksum of {path.name} does not match")
    return value
