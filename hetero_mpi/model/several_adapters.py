"""Several adapters in one stage, of which one computes at a time: those beside the one that the stage was built with."""

from __future__ import annotations

import torch
from torch import nn

from hetero_mpi.model.layer.interface import ADAPTER_NAME
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.tuning import Tuning, inject

OPENED = ADAPTER_NAME
"""The adapter that a stage was built with, if any. Every other name is another adapter's; that of none is ""."""


def add_adapter(stage: Stage, name: str, tuning: Tuning) -> dict[str, nn.Parameter]:
    """Give a stage one more adapter; returns its tensors here, by their names in adapter files, yet to be filled."""
    assert tuning.adapter is not None and not tuning.parameters
    modules = tuning.modules_in(stage.first, stage.last)
    zeros = lambda own: torch.zeros(tuning.trainable[own].shape)  # noqa: E731
    found = inject(stage.model, tuning.adapter, modules, [], stage.backend.device, zeros, name)
    for parameter in found.values():
        parameter.data = parameter.data.to(stage.dtype)
    return found


class AdapterSwitch:
    """Which adapter of a stage computes."""

    def __init__(self, stage: Stage) -> None:
        self._modules = [module for module in stage.model.modules() if hasattr(module, "lora_A")]
        self._now: str | None = None

    def turn_to(self, name: str) -> None:
        """``name``: of an adapter, of which a module may have no tensors; then, and for "", it computes as the base does."""
        if name != self._now:
            for module in self._modules:
                if module.active_adapters != [name]:
                    module.set_adapter(name)
            self._now = name
