"""Formats numbers, ranks and layers for readers, with three significant digits and a suitable unit."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_DROPPABLE_PATTERNS = (
    r"\((R|TM)\)",
    r"\b(NVIDIA|AMD|Intel|Apple)\b",
    r"\bGeForce\b",
    r" @ .*$| \d+-Core Processor$| Processor\b| CPU\b",
    r" \([^()]*\)$",
)
"""Patterns of the parts of a device name that may be dropped, in the order in which they are dropped."""
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value_s: float) -> str:
    """Format seconds: ``0.0123`` -> ``12.3 ms``. Longer times look like ``1:02:03``."""
    if not math.isfinite(value_s):
        return "unknown"
    if value_s >= 99.95:
        return clock(value_s)
    for factor, unit in ((1, "s"), (1e-3, "ms")):
        if value_s >= 0.9995 * factor:
            return f"{_digits(value_s / factor)} {unit}"
    return f"{_digits(value_s * 1e6)} µs" if value_s else "0 s"


def clock(value_s: float) -> str:
    """Format seconds as on a clock: ``62`` -> ``1:02``, ``3723`` -> ``1:02:03``."""
    minutes, seconds_left = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def size(value_bytes: float) -> str:
    """Format bytes: ``1_234_567_890`` -> ``1.23 GB`` (powers of 1000, as everywhere in the program)."""
    return _scaled(value_bytes, _BYTES) or f"{value_bytes:.0f} B"


def bandwidth(value_bytes_per_s: float) -> str:
    """Format bytes per second: ``3.2e9`` -> ``3.20 GB/s``."""
    return f"{size(value_bytes_per_s)}/s" if math.isfinite(value_bytes_per_s) else "unlimited"


def count(value: float) -> str:
    """Format a count: ``12_345_678`` -> ``12.3 M``."""
    return _scaled(value, _COUNTS) or f"{value:.0f}"


def percent(share: float) -> str:
    """Format a share: ``0.0834`` -> ``8.3 %``, ``0.25`` -> ``25 %``."""
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def change(share: float) -> str:
    """Format a relative change: ``0.0834`` -> ``+8.3 %``, ``-0.25`` -> ``-25 %``."""
    return f"{'+' if share >= 0 else '-'}{percent(abs(share))}"


def unit_of(sequence_length: int) -> str:
    """Return the unit of throughput: tokens or, if a sequence has one token (as in custom layer models), samples."""
    return "samples" if sequence_length == 1 else "tokens"


def amount(tokens: int, sequence_length: int) -> str:
    """Format an amount of data in the unit from :func:`unit_of`: ``1,024 tokens`` or ``8 samples``."""
    return plural(tokens, unit_of(sequence_length)[:-1])


def row(sequence_length: int) -> str:
    """Return the name of a row of a batch: ``sequence`` or, in custom layer models, ``sample``."""
    return "sample" if sequence_length == 1 else "sequence"


def rows_of(sequence_length: int, ending: str = "s") -> str:
    """Return ``sequences of 1,024 tokens`` or ``samples``; with ``ending`` "", the singular."""
    return f"sample{ending}" if sequence_length == 1 else f"sequence{ending} of {sequence_length:,} tokens"


def device_name(name: str, max_characters: int) -> str:
    """Shorten a device name to ``max_characters``: ``NVIDIA GeForce RTX 4090`` -> ``RTX 4090``.

    Vendors and trademarks are dropped first, then words from the left, since the last words distinguish devices.
    """
    for pattern in _DROPPABLE_PATTERNS:
        if len(name) > max_characters:
            name = " ".join(re.sub(pattern, "", name).split())
    while len(name) > max_characters and " " in name:
        name = name.partition(" ")[2]
    return name if len(name) <= max_characters else "..." + name[len(name) - max(max_characters - 3, 0) :]


def numbers(values: Iterable[int]) -> str:
    """Format integers as ranges: ``[0, 1, 2, 5]`` -> ``0-2, 5``. Two consecutive numbers stay ``0, 1``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(texts)


def ranks(values: Iterable[int]) -> str:
    """List ranks, as in ``rank 3`` or ``ranks 0-7, 9``."""
    listed = list(values)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {numbers(listed)}"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun, as in ``1 rank`` or ``1,024 ranks``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def capitalise(text: str) -> str:
    """Begin ``text`` with a capital, without changing other letters as ``str.capitalize`` does."""
    return text[:1].upper() + text[1:]


def shorten(text: str, max_characters: int = 26) -> str:
    """Truncate ``text`` to ``max_characters``, with an ellipsis."""
    return text if len(text) <= max_characters else text[: max_characters - 3].rstrip() + "..."


def layers(first: int, last: int, count: int, sequence_length: int) -> str:
    """Name the layers [first, last) of ``count``, as in ``embedding, blocks 0-3`` or, in custom layer models, ``layers 0-4``."""
    if unit_of(sequence_length) == "samples":
        return f"layer {first}" if last == first + 1 else f"layers {first}-{last - 1}"
    blocks = range(max(first, 1) - 1, min(last, count - 1) - 1)
    parts = ["embedding"] if first == 0 else []
    if len(blocks) == 1:
        parts.append(f"block {blocks[0]}")
    elif blocks:
        parts.append(f"blocks {blocks[0]}-{blocks[-1]}")
    return ", ".join(parts + (["head"] if last == count else []))


def listed(items: Sequence[object], joint: str = "and") -> str:
    """List at least two items, as in ``0, 1 and 2``."""
    return f"{', '.join(map(str, items[:-1]))} {joint} {items[-1]}"


def join_with_counts(texts: Iterable[str], joint: str) -> str:
    """Join strings with ``joint`` and merge equal ones: ``60 x (a), 3 x (b)``."""
    return joint.join(text if count == 1 else f"{count} x ({text})" for text, count in Counter(texts).items())


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or 1 if the denominator is 0, so that a profile edited to zero seconds does not break a message."""
    return numerator / denominator if denominator > 0 else 1.0


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str | None:
    for factor, unit in units:
        if abs(value) >= 0.9995 * factor:
            return f"{_digits(value / factor)} {unit}"
    return None


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
