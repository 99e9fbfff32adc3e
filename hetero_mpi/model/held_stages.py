"""The stages of a rank that holds several of its pipeline, as optimizer, exchanges and saved state see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from hetero_mpi.model.frozen_weight_cache import Kept
from hetero_mpi.model.held_layers import HeldLayers
from hetero_mpi.model.stage import Stage


class HeldStages(HeldLayers):
    """Several stages of one pipeline on one rank, none of which is streamed.

    ``stages``: in the order of the chain.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        assert all(stage.offloaded is None for stage in stages), "a streamed stage is a rank's only one"
        one, last = stages[0], stages[-1]
        self._stages = tuple(stages)
        self.chain, self.backend, self.dtype, self.tuning = one.chain, one.backend, one.dtype, one.tuning
        self.parameters = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
        self.masters = {name: master for stage in stages for name, master in stage.masters.items()}
        self.shared = {layer: owned for stage in stages for layer, owned in stage.shared.items()}
        self.tied_head, self.offloaded, self.foreign = last.tied_head, None, one.foreign
        self._holders = {parameter: stage for stage in stages for parameter in stage.parameters.values()}
        if self.tied_head is not None:
            self._holders[self.tied_head] = last

    def model_parameter(self, name: str) -> nn.Parameter:
        layer = self.chain.layer_of(name)
        return next(stage for stage in self._stages if stage.first <= layer < stage.last).model_parameter(name)

    def before_each_layer(self, call: Callable[[int], None]) -> None:
        for stage in self._stages:
            stage.before_each_layer(call)

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        self._holders[parameter].take_gradients(parameter, add)

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        wanted = list(layers)
        return {layer: kept for stage in self._stages for layer, kept in stage.frozen_layers(wanted).items()}
