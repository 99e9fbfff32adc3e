"""Where the gradients of a layer lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable

_ALIGNMENT = 16
"""Floats: every gradient in a flat buffer starts at a cache line."""


def flat_layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(where gradients of so many numbers begin in one flat buffer, its length): the same wherever a layer is held."""
    starts, length = [], 0
    for size in sizes:
        starts.append(length)
        length += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, length
