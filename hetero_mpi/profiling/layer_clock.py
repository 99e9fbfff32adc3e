"""When each layer of a stage begins and ends, seen from inside real forwards and backwards.

So a layer is timed where it stands in a real step: behind others that have taken the caches, on tensors that the layer before
it has just made. What a stage spends outside of its layers (masks, rotary tables, the walk over foreign layers) is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import Mark
from hetero_mpi.model.stage import Stage

Seconds = dict[int, float]
"""Layer -> seconds."""
_Marks = dict[int, Mark]


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
