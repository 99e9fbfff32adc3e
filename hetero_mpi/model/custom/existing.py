"""A user's model that is there already: every rank keeps its outline, without memory, and rank 0 sends it the values."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from hetero_mpi.errors import UserError
from hetero_mpi.model.custom.layered import Builder, LayeredModel


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
        f"layers {one!r} and {other!r} share a parameter ({parameter} of {other!r}): each would train a copy of its own. "
        f"Put all that uses it into one layer, or give each a parameter of its own"
    )
