"""Random numbers as functions of names and positions, never of the partition."""

from __future__ import annotations

import hashlib


def seed_from(*parts: int | str) -> int:
    """A 63-bit seed from any parts, such as (seed, parameter name) or (seed, step, first sample, item)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
