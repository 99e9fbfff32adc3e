"""Random numbers as functions of names and positions, never of the partition."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_from(*parts: int | str) -> int:
    """A 63-bit seed from any parts, such as (seed, parameter name) or (seed, step, first sample, layer)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """A block whose random numbers on the host are functions of ``parts``; the program's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_from(*parts))
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A block whose sums have the same bits on ranks with other numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
