"""Timings of layer kinds as they come in, and the curves that planning reads."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum

from hetero_mpi.planning.types.profile import Curve, LayerTimes


class TimedPart(Enum):
    """What of a micro-batch was timed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "backward that repeats the forward"
    INPUT = "input part of a split backward"
    WEIGHT = "weight part"


class TimingSamples:
    """Seconds by part, layer kind and sequences per micro-batch."""

    def __init__(self) -> None:
        self._layers: dict[tuple[TimedPart, str, int], list[float]] = defaultdict(list)
        self._overheads: dict[tuple[TimedPart, int, int], list[float]] = defaultdict(list)

    def add(self, part: TimedPart, kind: str, rows: int, seconds: float) -> None:
        self._layers[part, kind, rows].append(seconds)

    def add_overhead(self, part: TimedPart, stage: int, rows: int, seconds: float) -> None:
        """A stage (by its first layer) spent so long outside of its layers."""
        self._overheads[part, stage, rows].append(seconds)

    def update(self, others: TimingSamples) -> None:
        for key, seconds in others._layers.items():
            self._layers[key] += seconds
        for stage, seconds in others._overheads.items():
            self._overheads[stage] += seconds

    def has(self, rows: int) -> bool:
        return any(known == rows for _, _, known in self._layers)

    def curve(self, part: TimedPart, kind: str, sequence_length: int, stretch: float) -> Curve | None:
        """Median seconds over tokens, times ``stretch``, with their spread; None where nothing was timed."""
        rows = sorted(known for found, of, known in self._layers if (found, of) == (part, kind))
        if not rows:
            return None
        lists = [self._layers[part, kind, count] for count in rows]
        return Curve(
            tuple(count * sequence_length for count in rows),
            tuple(stretch * statistics.median(times) for times in lists),
            tuple(spread(times) for times in lists),
        )

    def overhead_s(self, part: TimedPart, stretch: float) -> float:
        """What a stage spends besides its layers with the fewest sequences: it hardly depends on their number."""
        rows = min((known for found, _, known in self._overheads if found is part), default=0)
        stages = [times for (found, _, known), times in self._overheads.items() if (found, known) == (part, rows)]
        return stretch * statistics.fmean(map(statistics.median, stages)) if stages else 0.0


def layer_times(samples: TimingSamples, kind: str, sequence_length: int, stretch: float) -> LayerTimes:
    """The curves of one kind, times ``stretch``. Parts of a split backward come together or not at all."""
    curves = {part: samples.curve(part, kind, sequence_length, stretch) for part in TimedPart}
    forward, backward, input_part = curves[TimedPart.FORWARD], curves[TimedPart.BACKWARD], curves[TimedPart.INPUT]
    assert forward is not None and backward is not None, f"{kind} was not timed"
    weight_part = curves[TimedPart.WEIGHT]
    if input_part is not None and weight_part is None:  # a kind without matrices puts nothing off
        weight_part = Curve(input_part.tokens, (0.0,) * len(input_part.tokens))
    return LayerTimes(forward, backward, curves[TimedPart.RECOMPUTE], input_part, weight_part)


def spread(seconds: Sequence[float]) -> float:
    """(p75 - p25) / median; 0 of fewer than three, which have no quartiles."""
    if len(seconds) < 3:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle if middle > 0 else 0.0
