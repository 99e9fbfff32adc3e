"""Layer times inside real forwards and backwards, and the curves fitted to them for planning.

A layer is timed as in a real step, after other layers and on their output. Overhead outside of layers (masks, rotary tables) is
reported separately. Each round runs every variant once with every micro-batch size, so that load and temperature affect all of
them equally.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import Mark
from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.fit import fitted_curve
from hetero_mpi.planning.types.profile import Curve, LayerTimes

Seconds = dict[int, float]
"""Layer -> seconds."""
_Marks = dict[int, Mark]
_MAX_SAMPLE_DIGITS = 4
"""Number of significant digits to which samples are rounded."""
MAX_TIMING_S = 0.3
"""Maximum seconds of all repetitions at one point of a curve; without warm-up, a first pass of half of it is a sample."""
MAX_PASS_S = 5.0
"""Maximum seconds of one repetition; larger micro-batches would tell no more about overhead."""


class LayerClock:
    """Times the layers of one stage by device events, without synchronizing between layers.

    Attributes:
        current: The layer whose forward is running, or ran last.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._forward_runs = False
        self._entered: _Marks = {}
        self._left: _Marks = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._reached: _Marks = {}
        """Layer -> event recorded when backward has the layer's output gradient."""
        self.current = stage.first
        for layer in range(stage.first, stage.last):
            for name in stage.chain.module_names(layer):
                module = stage.model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._enter, layer))
                module.register_forward_hook(partial(self._leave, layer))

    def forward(self, run: Callable[[], object]) -> tuple[Seconds, float]:
        """Run a forward; return (seconds of every layer, seconds outside layers)."""
        self._entered, self._left, self._outputs = {}, {}, {}
        self._forward_runs = True
        begin = self._now()
        run()
        end = self._now()
        self._forward_runs = False
        if self._stage.is_last:
            self._left[self._stage.last - 1] = end  # the loss belongs to the head
        for layer, output in self._outputs.items():
            if output.requires_grad:
                output.register_hook(partial(self._reach, layer))
        self._outputs = {}
        layers = {layer: self._left[layer].seconds_since(entered) for layer, entered in self._entered.items()}
        return layers, max(0.0, end.seconds_since(begin) - sum(layers.values()))

    def backward(self, run: Callable[[], object]) -> tuple[Seconds, float]:
        """Run a backward, or its input part; returns the same as ``forward``, with 0 s for layers without gradients."""
        self._reached = {}
        begin = self._now()
        run()
        until = self._now()
        if self._stage.is_last:
            self._reached[self._stage.last - 1] = begin
        layers = dict.fromkeys(range(self._stage.first, self._stage.last), 0.0)
        for layer in sorted(self._reached):  # backward reaches the first layer last
            layers[layer] = until.seconds_since(self._reached[layer])
            until = self._reached[layer]
        return layers, max(0.0, until.seconds_since(begin))

    def weights(self, run: Callable[[Callable[[int], None]], None]) -> Seconds:
        """Run the weight part of a split backward; ``run`` receives a callback that it calls after each layer."""
        begin, ends = self._now(), list[tuple[int, Mark]]()
        run(lambda layer: ends.append((layer, self._now())))
        begins = [begin, *(end for _, end in ends)]
        return {layer: end.seconds_since(before) for before, (layer, end) in zip(begins, ends, strict=False)}

    def _now(self) -> Mark:
        return self._stage.backend.mark()

    def _enter(self, layer: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._forward_runs:  # recomputing runs the modules again, inside backward
            self.current = layer
            self._entered.setdefault(layer, self._now())

    def _leave(self, layer: int, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._forward_runs:
            self._left[layer] = self._now()
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            self._outputs[layer] = tensor

    def _reach(self, layer: int, gradient: torch.Tensor) -> None:
        self._reached[layer] = self._now()


class TimedPart(Enum):
    """A part of a micro-batch that is timed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "backward pass that repeats the forward pass"
    INPUT = "input part of a split backward"
    WEIGHT = "weight part"


class TimingSamples:
    """Seconds by part, layer kind (for overhead: first layer of a stage) and sequences per micro-batch."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[TimedPart, str | int, int], list[float]] = defaultdict(list)

    def add(self, part: TimedPart, kind: str | int, rows: int, seconds: float) -> None:
        self._seconds[part, kind, rows].append(float(f"{seconds:.{_MAX_SAMPLE_DIGITS}g}"))

    def update(self, other_samples: TimingSamples) -> None:
        for key, seconds in other_samples._seconds.items():
            self._seconds[key] += seconds

    def has(self, rows: int) -> bool:
        return any(timed_rows == rows for _, _, timed_rows in self._seconds)

    def curve(self, part: TimedPart, kind: str, sequence_length: int) -> Curve | None:
        """Fit a curve of seconds over tokens; None if nothing was timed."""
        rows = sorted(timed_rows for timed_part, of, timed_rows in self._seconds if (timed_part, of) == (part, kind))
        if not rows:
            return None
        return fitted_curve({count * sequence_length: self._seconds[part, kind, count] for count in rows})

    def overhead_s(self, part: TimedPart) -> float:
        """Seconds that a stage spends outside its layers, with the smallest micro-batch."""
        outside = {key: times for key, times in self._seconds.items() if key[0] is part and isinstance(key[1], int)}
        fewest = min((rows for _, _, rows in outside), default=0)
        stages = [times for (_, _, rows), times in outside.items() if rows == fewest]
        return statistics.fmean(map(statistics.median, stages)) if stages else 0.0


def layer_times(samples: TimingSamples, kind: str, sequence_length: int) -> LayerTimes:
    """Return the curves of one layer kind, with both parts of a split backward or neither."""
    curves = {part: samples.curve(part, kind, sequence_length) for part in TimedPart}
    forward, backward, input_part = curves[TimedPart.FORWARD], curves[TimedPart.BACKWARD], curves[TimedPart.INPUT]
    assert forward is not None and backward is not None, f"{kind} was not timed"
    weight_part = curves[TimedPart.WEIGHT]
    if input_part is not None and weight_part is None:  # a layer without matrices defers no weight gradients
        weight_part = Curve(input_part.tokens, (0.0,) * len(input_part.tokens))
    return LayerTimes(forward, backward, curves[TimedPart.RECOMPUTE], input_part, weight_part)


@dataclass(frozen=True)
class TimedVariant:
    """One way of running layers: complete, as a tensor-parallel shard, with recomputation, or with a split backward."""

    run: Callable[[int, TimingSamples], None]
    """Runs one repetition with the given number of sequences."""
    forget: Callable[[], None]
    """Releases the memory of a repetition that ran out of memory."""
    rows: tuple[int, ...]
    """Sequences per micro-batch to time, increasing."""
    samples: TimingSamples
    repeats: int
    ends: bool = False
    """Whether to time only the smallest size and the largest within ``MAX_TIMING_S``, as for secondary variants."""


@dataclass
class _Lap:
    variant: TimedVariant
    rows: int
    pass_s: float
    """Seconds of one repetition."""
    done: int = 0
    spent_s: float = 0.0

    def goes_on(self) -> bool:
        within_limits = self.done < self.variant.repeats and self.spent_s + self.pass_s <= MAX_TIMING_S
        return self.done == 0 or within_limits

    def count(self, fits: bool) -> None:
        """Count a repetition; if ``fits`` is false (out of memory), no further repetitions follow."""
        self.done = self.done + 1 if fits else self.variant.repeats
        self.spent_s += self.pass_s


class TimingRounds:
    """Times layers on one device with ``clock`` (in seconds); if ``warms_up``, the first run of every shape is slower."""

    def __init__(self, clock: Callable[[], float], warms_up: bool) -> None:
        self._clock, self._warms_up = clock, warms_up

    def time(self, variants: Sequence[TimedVariant]) -> None:
        """Fill the samples of ``variants``, leaving out sizes that exceed the memory.

        Raises:
            RuntimeError, MemoryError: if the smallest size exceeds the memory.
        """
        laps = [lap for variant in variants for lap in self._start_laps(variant)]
        while laps := [lap for lap in laps if lap.goes_on()]:
            for lap in laps:
                lap.count(self._seconds(lap.variant, lap.rows, lap.variant.samples) is not None)

    def _start_laps(self, variant: TimedVariant) -> list[_Lap]:
        """Return a lap for each micro-batch size to time, after a warm-up."""
        laps: list[_Lap] = []
        for rows in variant.rows:
            if laps:
                expected_s = laps[0].pass_s * rows / laps[0].rows
                later = [more for more in variant.rows if more > rows and expected_s / rows * more <= MAX_TIMING_S]
                if expected_s > (MAX_TIMING_S if variant.ends else MAX_PASS_S):
                    break
                if variant.ends and later:
                    continue
            unused = TimingSamples()
            pass_s = self._seconds(variant, rows, unused)
            if pass_s is None:
                break
            counts = pass_s > MAX_TIMING_S / 2 and not self._warms_up
            if counts:
                variant.samples.update(unused)
            elif not laps:  # the very first repetition is slower
                pass_s = self._seconds(variant, rows, variant.samples) or pass_s
            laps.append(_Lap(variant, rows, pass_s))
            if counts or len(laps) == 1:
                laps[-1].count(True)
        return laps

    def _seconds(self, variant: TimedVariant, rows: int, samples: TimingSamples) -> float | None:
        """Seconds of one repetition; None if it ran out of memory and is larger than the smallest size."""
        begin = self._clock()
        try:
            variant.run(rows, samples)
            return self._clock() - begin
        except (RuntimeError, MemoryError) as error:
            if rows == variant.rows[0] or not is_out_of_memory(error):
                raise
        variant.forget()  # outside of the handler, whose traceback refers to the tensors
        return None
