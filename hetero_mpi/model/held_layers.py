"""The layers that a rank holds: what the optimizer, the exchanges and saved state see of its stages, be they one or several.

Frozen weights stay where they are, on the device and packed, when a rank's stage is built anew for other layers. Only weights are
carried over, not modules with their hooks: those belong to the stage that goes. NF4 layers are the exception: their weights and the
state of their packing are one.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.layer.interface import WRAPPED, LayerChain
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.tuning import Tuning

Kept = Mapping[int, Mapping[str, nn.Module]]
"""Layer -> name of each of its modules, as in a fresh model -> a module that has the weights."""
_ADAPTER = ".lora_"
"""The part that peft's wrappers put into the names of what they add."""


def frozen_layers(chain: LayerChain, model: nn.Module, layers: Iterable[int]) -> Kept:
    """The frozen weights of ``layers`` in a stage's model, of which nothing but adapters is trained.

    The ends of a tied model are left out: a stage makes the head's copy itself.
    """
    return {
        layer: {
            name.replace(WRAPPED, ""): module
            for root in chain.module_names(layer)
            for name, module in model.get_submodule(root).named_modules(prefix=root)
            if _ADAPTER not in name and next(module.parameters(recurse=False), None) is not None
        }
        for layer in layers
        if chain.tied is None or 0 < layer < chain.layer_count - 1
    }


def take_over(model: nn.Module, kept: Mapping[str, nn.Module]) -> None:
    """Give the modules of a layer in a fresh model (on the meta device) the weights that were kept."""
    for name, old in kept.items():
        if type(old).__module__.partition(".")[0] == "bitsandbytes":
            model.set_submodule(name, old)
            continue
        new = model.get_submodule(name)
        for own, parameter in old.named_parameters(recurse=False):
            setattr(new, own, parameter)


class SharedPart(NamedTuple):
    """A layer, or what of it the same ranks hold where groups hold it in several pipelines."""

    layer: int
    ranks: tuple[int, ...]
    """Increasing."""


class Segment(NamedTuple):
    """The numbers of a trained parameter that are of a shared part: all that a rank has of it, or a range of one dimension."""

    name: str
    dim: int = 0
    matrices: int = 1
    """So many lie one after the other in that dimension; the range is of each."""
    first: int = 0
    length: int | None = None
    """None: it is no range."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the segment of a rank's parameter, or of its gradient."""
        if self.length is None:
            return tensor
        return tensor.unflatten(self.dim, (self.matrices, -1)).narrow(self.dim + 1, self.first, self.length)


Shared = Mapping[SharedPart, Sequence[Sequence[Segment]]]
"""What several ranks hold -> the segments that each of these owns."""


class HeldLayers(ABC):
    """The layers of one stage (``stage.Stage``), or of several of one pipeline (``HeldStages``).

    Attributes:
        layers: their indices in the chain.
        parameters: name -> parameter this rank trains, in the model's order (compute dtype, on the device).
        masters: name -> fp32 copy of each parameter that this rank owns where the compute dtype is narrower or ``state_device``
            another; else empty.
        tied_head: the head's own copy of a tied embedding matrix, or None. It is never optimised here: its gradient is
            added to the embedding's and the new values come back.
        offloaded: gradients in host memory, of a stage whose device has another; else None.
        shared: what several ranks hold -> the segments of trained parameters that each of them owns.
        foreign: trained parameters that other ranks own.
    """

    chain: LayerChain
    layers: Sequence[int]
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

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the optimizer steps: at its end the gradients are no more."""
        return contextlib.nullcontext()


class HeldStages(HeldLayers):
    """Several stages of one pipeline on one rank, in the order of the chain, none of which is streamed."""

    def __init__(self, stages: Sequence[HeldLayers]) -> None:
        assert all(stage.offloaded is None for stage in stages), "a streamed stage is a rank's only one"
        one, last = stages[0], stages[-1]
        self._stages = tuple(stages)
        self.layers = [layer for stage in stages for layer in stage.layers]
        self.chain, self.backend, self.dtype, self.tuning = one.chain, one.backend, one.dtype, one.tuning
        self.parameters = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
        self.masters = {name: master for stage in stages for name, master in stage.masters.items()}
        self.shared = {part: owned for stage in stages for part, owned in stage.shared.items()}
        self.tied_head, self.offloaded, self.foreign = last.tied_head, None, one.foreign
        self._holders = {parameter: stage for stage in stages for parameter in stage.parameters.values()}
        if self.tied_head is not None:
            self._holders[self.tied_head] = last

    def model_parameter(self, name: str) -> nn.Parameter:
        layer = self.chain.layer_of(name)
        return next(stage for stage in self._stages if layer in stage.layers).model_parameter(name)

    def before_each_layer(self, call: Callable[[int], None]) -> None:
        for stage in self._stages:
            stage.before_each_layer(call)

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        self._holders[parameter].take_gradients(parameter, add)

    def updating(self) -> contextlib.AbstractContextManager[None]:
        return self._stages[0].updating()  # one rank steps once, and no streamed stage is among them

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        wanted = list(layers)
        return {layer: kept for stage in self._stages for layer, kept in stage.frozen_layers(wanted).items()}
