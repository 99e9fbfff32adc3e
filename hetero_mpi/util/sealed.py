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

from hetero_mpi.util.disk import sync, write_whole, writing

T = TypeVar("T")
_SEAL = "seal.json"
_PIECE_BYTES = 1 << 20
_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading another program's bytes may raise; ``UserError`` is a ValueError."""


def opened(place: Path, read: Callable[[Path, Any], T], tell: Callable[[str], object]) -> T | None:
    """The content of a kept folder or file, which ``read`` makes of it and the values in it; None: nothing is kept there.

    All bytes are read (some 2 GB/s of one core). ``tell``: gets a sentence about what was damaged, or made ``read`` fail, and is
    removed.
    """
    if not os.path.lexists(place):
        return None
    try:
        return read(place, _checked(place))
    except _FAULTS as error:
        reason = str(error) or type(error).__name__
    tell(f"{place} is damaged ({reason}): it is removed and made again")
    with contextlib.suppress(OSError):
        discard(place)
    return None


def store(place: Path, fill: Callable[[Path], Any], remedy: str, durable: bool = True) -> None:
    """Make the folder ``place``, unless it is there: another program was first, or what was damaged cannot be removed.

    Args:
        fill: writes files into the folder that it is given, and returns values (JSON) to keep with them.
        remedy: what to do where the disk refuses.
        durable: a power loss must not damage it.

    Raises UserError: it cannot be written. What ``fill`` raises, it raises, too.
    """
    made = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    try:
        with writing(place.parent, remedy):
            made.mkdir(parents=True)
        values = fill(made)
        with writing(place.parent, remedy):
            write_whole(made / _SEAL, _sealed_text([_summaries(made), values]))
            for path in [*made.rglob("*"), made] if durable else ():
                sync(path)
            try:
                made.rename(place)
            except OSError:
                if not os.path.lexists(place):
                    raise
            if durable:
                sync(place.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def store_value(place: Path, value: Any) -> None:
    """Keep a value (JSON) in a file. Raises OSError."""
    write_whole(place, _sealed_text(value), durable=True, make_folder=True)


def discard(place: Path) -> None:
    """Remove whatever is there: a file, a link, a folder and all in it. Raises OSError: it cannot be removed."""
    aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another program was first
        os.rename(place, aside)  # so that nobody sees half of it
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def _checked(place: Path) -> Any:
    """The values of a kept folder or file. Raises OSError or ValueError: it is damaged."""
    if not place.is_dir():
        return _value(place)
    listed, values = _value(place / _SEAL)
    found = _summaries(place)
    wrong = [name for name in sorted({*found, *listed} - {_SEAL}) if found.get(name) != listed.get(name)]
    if wrong:
        raise ValueError(f"{wrong[0]} is not as it was written")
    return values


def _summaries(folder: Path) -> dict[str, list[int]]:
    """Name within the folder -> (size, CRC-32) of a file; empty for what is neither a file nor a folder."""
    found = {}
    for path in folder.rglob("*"):
        summary, mode = [], path.lstat().st_mode
        if stat.S_ISREG(mode):  # reading a pipe would wait
            with path.open("rb") as file:
                crc = 0
                while piece := file.read(_PIECE_BYTES):
                    crc = zlib.crc32(piece, crc)
                summary = [file.tell(), crc]
        if not stat.S_ISDIR(mode):
            found[str(path.relative_to(folder))] = summary
    return found


def _sealed_text(value: Any) -> str:
    return json.dumps({"crc32": zlib.crc32(json.dumps(value).encode()), "value": value})


def _value(path: Path) -> Any:
    value = crc = None
    with contextlib.suppress(*_FAULTS):
        content = json.loads(path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else b"")
        value, crc = content["value"], content["crc32"]
    if crc != zlib.crc32(json.dumps(value).encode()):
        raise ValueError(f"{path.name} is not as it was written")
    return value
