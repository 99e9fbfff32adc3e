"""What a rank holds of the model: what the optimizer, the exchanges and saved state see of its stages, be they one or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.frozen_weight_cache import Kept
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.tuning import Tuning

Shared = Mapping[int, Sequence[Sequence[str]]]
"""Layer -> the names of the trained parameters that each of its holders owns."""


class HeldLayers(ABC):
    """The layers of one stage (``stage.Stage``), or of several of one pipeline (``held_stages.HeldStages``).

    Attributes:
        parameters: name -> parameter this rank trains, in the model's order (compute dtype, on the device).
        masters: name -> fp32 copy of each parameter that this rank owns where the compute dtype is narrower, or ``state_device``
            another; else empty.
        tied_head: the head's own copy of a tied embedding matrix, or None. It is never optimised here: its gradient is
            added to the embedding's and the new values come back.
        offloaded: gradients in host memory, of a stage whose device has another; else None.
        shared: layers that several ranks hold -> the names of the trained parameters that each of them owns.
        foreign: trained parameters that other ranks own.
    """

    chain: LayerChain
    backend: Backend
    dtype: torch.dtype
    tuning: Tuning
    parameters: dict[str, nn.Parameter]
    masters: dict[str, torch.Tensor]
    tied_head: nn.Parameter | None
    offloaded: OffloadedGradients | None
    shared: Shared
    foreign: Collection[str]

    @abstractmethod
    def model_parameter(self, name: str) -> nn.Parameter:
        """A parameter by its name in the model, trained or not; not of adapters."""

    @abstractmethod
    def before_each_layer(self, call: Callable[[int], None]) -> None:
        """``call`` a function with a layer before its trained parameters are read."""

    @abstractmethod
    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        """From now on every gradient of ``parameter`` is given to ``add`` instead of being added to its ``grad``."""

    @abstractmethod
    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        """The frozen weights of those of ``layers`` that are held; nothing where all weights are trained."""

    def storage_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The memory in which a parameter is kept: whoever changes it writes there."""
        return parameter.data

    def overwrite(self, values: Mapping[str, torch.Tensor]) -> None:
        """Round trained parameters from these, by name."""
        pairs = [(self.storage_of(self.parameters[name]), value) for name, value in values.items()]
        pairs = [(own, value) for own, value in pairs if own.data_ptr() != value.data_ptr()]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def gradients_gone(self) -> None:  # noqa: B027 - nothing to do, where memory is not short
        """A step has ended, and its gradients are no more."""
