"""When each layer of a stage begins and ends, seen from inside real forwards and backwards, repeated in turns, and the curves that
planning reads.

A layer is timed where it stands in a real step: behind others that have taken the caches, on tensors that the layer before
it has just made. What a stage spends outside of its layers (masks, rotary tables, the walk over foreign layers) is left over.

Each round of repetitions runs layers once in every way, with every number of sequences that is timed. What else a machine does for
a moment, and how warm it is, then falls on all of them alike, and not on one point of one curve.
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
_SAMPLE_DIGITS = 4
"""Digits of a sample in a file: no repetition is as like another."""
MAX_TIMING_S = 0.3
"""Most seconds of all repetitions of one way with one number of sequences, after the first. A first one of half of it is long
enough to count, on devices that need not warm up."""
MAX_PASS_S = 5.0
"""Numbers of sequences but the smallest are left out where one repetition would take longer. Calls are nothing beside work there,
so that larger micro-batches would gain nothing."""


class LayerClock:
    """Times the layers of one stage, by marks in the device's queue, which never runs dry between layers.

    Attributes:
        current: the layer whose forward runs, or ran last.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._forward_runs = False
        self._entered: _Marks = {}
        self._left: _Marks = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._reached: _Marks = {}
        """Layer -> when backward had the gradient of its output."""
        self.current = stage.first
        for layer in range(stage.first, stage.last):
            for name in stage.chain.module_names(layer):
                module = stage.model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._enter, layer))
                module.register_forward_hook(partial(self._leave, layer))

    def forward(self, run: Callable[[], object]) -> tuple[Seconds, float]:
        """Run a forward: seconds of every layer, seconds outside of the layers."""
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
        """Run the backward (or its input part) of the last forward: likewise. A layer without gradients takes 0 s."""
        self._reached = {}
        begin = self._now()
        run()
        until = self._now()
        if self._stage.is_last:
            self._reached[self._stage.last - 1] = begin
        layers = dict.fromkeys(range(self._stage.first, self._stage.last), 0.0)
        for layer in sorted(self._reached):  # backward comes to the first layer last
            layers[layer] = until.seconds_since(self._reached[layer])
            until = self._reached[layer]
        return layers, max(0.0, until.seconds_since(begin))

    def weights(self, run: Callable[[Callable[[int], None]], None]) -> Seconds:
        """Run the weight part of a split backward, which is given what to call after each layer."""
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
    """The part of a micro-batch that was timed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "backward that repeats the forward"
    INPUT = "input part of a split backward"
    WEIGHT = "weight part"


class TimingSamples:
    """Seconds by part, layer kind and sequences per micro-batch; those outside of layers by the stage (its first layer) in place
    of a kind."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[TimedPart, str | int, int], list[float]] = defaultdict(list)

    def add(self, part: TimedPart, kind: str | int, rows: int, seconds: float) -> None:
        self._seconds[part, kind, rows].append(float(f"{seconds:.{_SAMPLE_DIGITS}g}"))

    def update(self, other_samples: TimingSamples) -> None:
        for key, seconds in other_samples._seconds.items():
            self._seconds[key] += seconds

    def has(self, rows: int) -> bool:
        return any(timed_rows == rows for _, _, timed_rows in self._seconds)

    def curve(self, part: TimedPart, kind: str, sequence_length: int) -> Curve | None:
        """The line through the seconds over tokens, which it keeps; None where nothing was timed."""
        rows = sorted(timed_rows for timed_part, of, timed_rows in self._seconds if (timed_part, of) == (part, kind))
        if not rows:
            return None
        return fitted_curve({count * sequence_length: self._seconds[part, kind, count] for count in rows})

    def overhead_s(self, part: TimedPart) -> float:
        """Seconds that a stage spends besides its layers with the fewest sequences: it hardly depends on their number."""
        outside = {key: times for key, times in self._seconds.items() if key[0] is part and isinstance(key[1], int)}
        fewest = min((rows for _, _, rows in outside), default=0)
        stages = [times for (_, _, rows), times in outside.items() if rows == fewest]
        return statistics.fmean(map(statistics.median, stages)) if stages else 0.0


def layer_times(samples: TimingSamples, kind: str, sequence_length: int) -> LayerTimes:
    """The curves of one kind. Parts of a split backward come together or not at all."""
    curves = {part: samples.curve(part, kind, sequence_length) for part in TimedPart}
    forward, backward, input_part = curves[TimedPart.FORWARD], curves[TimedPart.BACKWARD], curves[TimedPart.INPUT]
    assert forward is not None and backward is not None, f"{kind} was not timed"
    weight_part = curves[TimedPart.WEIGHT]
    if input_part is not None and weight_part is None:  # a kind without matrices puts nothing off
        weight_part = Curve(input_part.tokens, (0.0,) * len(input_part.tokens))
    return LayerTimes(forward, backward, curves[TimedPart.RECOMPUTE], input_part, weight_part)


@dataclass(frozen=True)
class TimedVariant:
    """One way to run layers: whole or as a member of a group, with recompute, with a split backward."""

    run: Callable[[int, TimingSamples], None]
    """One repetition with so many sequences."""
    forget: Callable[[], None]
    """Gives up what a repetition that failed for want of memory has left."""
    rows: tuple[int, ...]
    """Sequences per micro-batch to time, increasing."""
    samples: TimingSamples
    repeats: int
    ends: bool = False
    """Time only the smallest number and the largest that takes no longer than ``MAX_TIMING_S``: what is close to another way needs no
    more."""


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
        """One more repetition was begun. ``fits``: it had memory enough; else it is the last."""
        self.done = self.done + 1 if fits else self.variant.repeats
        self.spent_s += self.pass_s


class TimingRounds:
    """Times layers on one device.

    Args:
        clock: seconds.
        warms_up: must the device run a shape once before it runs it as fast as later, however long that takes?
    """

    def __init__(self, clock: Callable[[], float], warms_up: bool) -> None:
        self._clock, self._warms_up = clock, warms_up

    def time(self, variants: Sequence[TimedVariant]) -> None:
        """Fill the samples of ``variants``. Numbers of sequences for which the device has no memory are left out.

        :raises RuntimeError, MemoryError: there is none for the smallest.
        """
        laps = [lap for variant in variants for lap in self._start_laps(variant)]
        while laps := [lap for lap in laps if lap.goes_on()]:
            for lap in laps:
                lap.count(self._seconds(lap.variant, lap.rows, lap.variant.samples) is not None)

    def _start_laps(self, variant: TimedVariant) -> list[_Lap]:
        """One lap for each number of sequences that is timed, after a repetition that warms up."""
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
            elif not laps:  # what came first of all was slower than the others will be
                pass_s = self._seconds(variant, rows, variant.samples) or pass_s
            laps.append(_Lap(variant, rows, pass_s))
            if counts or len(laps) == 1:
                laps[-1].count(True)
        return laps

    def _seconds(self, variant: TimedVariant, rows: int, samples: TimingSamples) -> float | None:
        """Seconds of one repetition; None where memory was short for more than the smallest number of sequences."""
        begin = self._clock()
        try:
            variant.run(rows, samples)
            return self._clock() - begin
        except (RuntimeError, MemoryError) as error:
            if rows == variant.rows[0] or not is_out_of_memory(error):
                raise
        variant.forget()  # here nothing refers to what the failed repetition had got any more
        return None
