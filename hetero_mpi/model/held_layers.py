"""The layers of all of a rank's stages, as seen by the optimizer, the exchanges and the saved state.

When a rank's stages are rebuilt for other layers, frozen weights stay on the device, packed. Only weights are reused, not modules,
whose hooks belong to the old stage. NF4 modules are kept, because their weights and quantization state belong together.
"""

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
"""Maps each layer to its modules with weights, keyed by their names in a fresh model."""
_ADAPTER = ".lora_"
"""Substring of the names of modules that peft adds."""


def frozen_layers(chain: LayerChain, model: nn.Module, layers: Iterable[int]) -> Kept:
    """Return the frozen weights of ``layers`` in a stage's model that trains only adapters.

    Skips the first and last layers of a model with tied embeddings: the stage that holds the head copies the shared weight.
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


def take_over(model: nn.Module, kept_modules: Mapping[str, nn.Module]) -> None:
    """Move kept weights into the modules of a layer of a fresh model on the meta device."""
    for name, old in kept_modules.items():
        if type(old).__module__.partition(".")[0] == "bitsandbytes":
            model.set_submodule(name, old)
            continue
        new = model.get_submodule(name)
        for parameter_name, parameter in old.named_parameters(recurse=False):
            setattr(new, parameter_name, parameter)


class SharedPart(NamedTuple):
    """The part of a layer that a set of ranks shares: the whole layer, or some segments if tensor-parallel groups shard it."""

    layer: int
    ranks: tuple[int, ...]
    """The ranks that share the part, in increasing order."""


class Segment(NamedTuple):
    """The elements of a trained parameter that belong to a shared part: all elements on a rank, or a range of one dimension."""

    name: str
    dim: int = 0
    matrices: int = 1
    """Number of matrices stacked in dimension ``dim``; the range applies to each of them."""
    first: int = 0
    length: int | None = None
    """Length of the range; None for the whole parameter."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the segment in a rank's parameter or gradient."""
        if self.length is None:
            return tensor
        return tensor.unflatten(self.dim, (self.matrices, -1)).narrow(self.dim + 1, self.first, self.length)


Shared = Mapping[SharedPart, Sequence[Sequence[Segment]]]
"""Maps each shared part to the segments that each of its ranks owns."""


class HeldLayers(ABC):
    """The layers of one stage (``stage.Stage``) or of several stages of one pipeline (``HeldStages``).

    Attributes:
        layers: indices in the chain.
        parameters: maps names to the parameters that this rank trains, in the model's order (compute dtype, on the device).
        masters: maps names to the fp32 masters of the parameters that this rank owns, if the compute dtype is narrower or
            ``state_device`` is another device; otherwise empty.
        tied_head: the head's copy of a tied embedding matrix, or None. The optimizer does not update it: its gradient is added to
            the embedding's, and new values are copied back.
        offloaded: an offloaded stage's gradients in host memory; None for other stages.
        shared: maps each shared part to the segments of trained parameters that each of its ranks owns.
        foreign: names of trained parameters that other ranks own.
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
        """Return a parameter by its name in the model, trained or frozen; adapters are not included."""

    @abstractmethod
    def before_each_layer(self, call: Callable[[int], None]) -> None:
        """Register a function that is called with each layer's index before the layer's trained parameters are read."""

    @abstractmethod
    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        """Pass each future gradient of ``parameter`` to ``add`` instead of accumulating it in ``grad``."""

    @abstractmethod
    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        """Return the frozen weights of the given layers that this rank holds; empty in full fine-tuning."""

    def storage_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the memory in which a parameter is stored and must be modified."""
        return parameter.data

    def overwrite(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set trained parameters to ``values``, rounded to their dtype."""
        pairs = [(self.storage_of(self.parameters[name]), value) for name, value in values.items()]
        pairs = [(storage, value) for storage, value in pairs if storage.data_ptr() != value.data_ptr()]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for an optimizer step; gradients are dropped when the context ends."""
        return contextlib.nullcontext()


class HeldStages(HeldLayers):
    """Several stages of one pipeline on one rank, in chain order. None of them is offloaded."""

    def __init__(self, stages: Sequence[HeldLayers]) -> None:
        assert all(stage.offloaded is None for stage in stages), "an offloaded stage must be a rank's only stage"
        first, last = stages[0], stages[-1]
        self._stages = tuple(stages)
        self.layers = [layer for stage in stages for layer in stage.layers]
        self.chain, self.backend, self.dtype, self.tuning = first.chain, first.backend, first.dtype, first.tuning
        self.parameters = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
        self.masters = {name: master for stage in stages for name, master in stage.masters.items()}
        self.shared = {part: owned for stage in stages for part, owned in stage.shared.items()}
        self.tied_head, self.offloaded, self.foreign = last.tied_head, None, first.foreign
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
        return self._stages[0].updating()  # one step per rank, and no stage is offloaded

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        indices = list(layers)
        return {layer: modules for stage in self._stages for layer, modules in stage.frozen_layers(indices).items()}
