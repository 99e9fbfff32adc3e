"""Accidents of files that a program of ours reads again: what disks, power losses, other programs and people do to them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes() or b"?")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def elsewhere(path: Path) -> None:
    path.rename(path.with_name("other"))


def other_numbers(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, -np.ones(10))


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def content(text: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text)

    write.__name__ = repr(text)
    return write


DAMAGES: list[Callable[[Path], None]] = [
    Path.unlink, zeroed, half, flipped, longer, elsewhere, other_numbers, deep, a_folder, a_pipe, a_dangling_link,
    *map(content, [b"", b"\xff\xfe garbage", b"null", b"[]", b"{}", b'{"crc32": 0, "value": []}',
                   b'{"step": 1e999, "last_step": 1e999, "unix_s": 1e999, "event": 1, "text": [], "starts": [{"step": 1e999}]}\n']),
]  # fmt: skip
