"""When each layer of a stage begins and ends, seen from inside real forwards and backwards, and the curves that planning reads.

So a layer is timed where it stands in a real step: behind others that have taken the caches, on tensors that the layer before
it has just made. What a stage spends outside of its layers (masks, rotary tables, the walk over foreign layers) is left over.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import Mark
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.fit import fitted_curve
from hetero_mpi.planning.types.profile import Curve, LayerTimes

Seconds = dict[int, float]
"""Layer -> seconds."""
_Marks = dict[int, Mark]
_DIGITS = 4
"""Of a sample, in a file: no repetition is as like another."""


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
    """What of a micro-batch was timed."""

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
        self._seconds[part, kind, rows].append(float(f"{seconds:.{_DIGITS}g}"))

    def update(self, others: TimingSamples) -> None:
        for key, seconds in others._seconds.items():
            self._seconds[key] += seconds

    def has(self, rows: int) -> bool:
        return any(known == rows for _, _, known in self._seconds)

    def curve(self, part: TimedPart, kind: str, sequence_length: int) -> Curve | None:
        """The line through the seconds over tokens, which it keeps; None where nothing was timed."""
        rows = sorted(known for found, of, known in self._seconds if (found, of) == (part, kind))
        if not rows:
            return None
        return fitted_curve({count * sequence_length: self._seconds[part, kind, count] for count in rows})

    def overhead_s(self, part: TimedPart) -> float:
        """What a stage spends besides its layers with the fewest sequences: it hardly depends on their number."""
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
