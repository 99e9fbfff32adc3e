"""Numbers and layers in words, for the sentences of planning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def describe_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def ratio(numerator: float, denominator: float) -> float:
    """1 for 0 / 0: a profile edited to zero seconds must not break a sentence."""
    return numerator / denominator if denominator > 0 else 1.0


def describe_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def describe_layers(first: int, last: int, layers: int) -> str:
    """``embedding + blocks 0-3``."""
    blocks = range(max(first, 1) - 1, min(last, layers - 1) - 1)
    parts = ["embedding"] if first == 0 else []
    if len(blocks) == 1:
        parts.append(f"block {blocks[0]}")
    elif blocks:
        parts.append(f"blocks {blocks[0]}-{blocks[-1]}")
    return " + ".join(parts + (["head"] if last == layers else []))


def counted(texts: Iterable[str], joint: str) -> str:
    """``a, b`` with equal ones counted: ``60 x (a), 3 x (b)``."""
    return joint.join(text if many == 1 else f"{many} x ({text})" for text, many in Counter(texts).items())
