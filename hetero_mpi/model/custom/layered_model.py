"""The value of a job's ``[model] factory``: a model as a list of layers, with its loss and its data.

Of a model that is there already every rank keeps an outline, without memory, and rank 0 sends it the values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero_mpi.util.errors import UserError

Builder = Callable[[], nn.Module]


@dataclass(frozen=True)
class LayeredModel:
    """A model that is a chain of layers, each of which takes one tensor and gives one. It may be cut between any two.

    The first dimension of every tensor counts samples, and what a layer makes of a sample may not depend on the others (no batch
    normalisation). Tensors between layers are fp32.
    """

    layers: Sequence[Builder] | Mapping[str, Builder] | nn.Sequential
    """Functions without arguments, each of which builds one layer, at least two of them. A rank calls those of the layers that
    it holds; random numbers drawn by a call are functions of ``train.seed`` and the layer's name. Names are keys, or 0, 1, 2 ...:
    parameters are called as in ``torch.nn.Sequential`` of the layers.

    Or a model that is there already, as ``torch.nn.Sequential``: its parts are the layers, and its weights on rank 0 are the
    start, which is sent to the other ranks. It is copied, never changed."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(the last layer's output, targets) -> the losses of the samples, *summed*: a scalar."""
    data: Callable[[], Sequence[Any]]
    """Gives what is learnt from, on rank 0 only: it has a length and gives under each number a pair (input, target) of arrays,
    as data sets of torch do. Whole numbers reach the model as int64, others as fp32."""
    evaluation: Callable[[], Sequence[Any]] | None = None
    """The same, never learnt from; None: ``data.held_out`` is a share of ``data``."""

    @property
    def existing(self) -> bool:
        return isinstance(self.layers, nn.Sequential)

    def modules(self) -> dict[str, nn.Module]:
        """Name -> layer of a model that is there already."""
        assert isinstance(self.layers, nn.Sequential)
        return dict(self.layers._modules.items())  # type: ignore[arg-type]  # ``named_children`` leaves out repeated modules

    def named_layers(self) -> dict[str, Builder]:
        """Name -> builder; of a model that is there already, of a copy."""
        if self.existing:
            return {name: _copier(layer) for name, layer in self.modules().items()}
        assert not isinstance(self.layers, nn.Sequential)
        if isinstance(self.layers, Mapping):
            return dict(self.layers)
        return {str(number): layer for number, layer in enumerate(self.layers)}


def _copier(layer: nn.Module) -> Builder:
    return lambda: copy.deepcopy(layer).train()


def outline(layer: nn.Module) -> nn.Module:
    """A copy of the layer whose parameters and buffers are on the meta device."""
    empty: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in layer.buffers()}
    for parameter in layer.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(layer, dict(empty))


def builder_of(layer: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Builder:
    """Builds a layer from its outline: the buffers have their values, the parameters none yet (host)."""

    def build() -> nn.Module:
        built = copy.deepcopy(layer).to_empty(device="cpu").train()
        for name, buffer in built.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        return built

    return build


def check_not_shared(model: LayeredModel) -> None:
    """Refuse a parameter that two layers have, be it under other names or in another shape.

    :raises UserError: with both places.
    """
    places: dict[int, tuple[str, str]] = {}
    for name, layer in model.modules().items():
        for inner, parameter in layer.named_parameters():
            other = places.setdefault(parameter.data_ptr(), (name, inner))
            if other[0] != name and parameter.numel():
                raise shared(other[0], name, inner)


def shared(one: str, other: str, parameter: str) -> UserError:
    return UserError(
        "custom.shared_parameter",
        f"layers {one!r} and {other!r} share a parameter ({parameter} of {other!r}): each would train a copy of its own. "
        f"Put all that uses it into one layer, or give each a parameter of its own",
    )
