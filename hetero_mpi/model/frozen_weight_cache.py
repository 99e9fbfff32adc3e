"""Frozen weights that stay where they are, on the device and packed, when a rank's stage is built anew for other layers.

Only weights are carried over, not modules with their hooks: those belong to the stage that goes. NF4 layers are the exception:
their weights and the state of their packing are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from hetero_mpi.model.layer.interface import LayerChain

Kept = Mapping[int, Mapping[str, nn.Module]]
"""Layer -> name of each of its modules, as in a fresh model -> a module that has the weights."""
_WRAPPED, _ADAPTER = ".base_layer", ".lora_"
"""What peft's wrappers put into the names of what they wrap, and of what they add."""


def frozen_layers(chain: LayerChain, model: nn.Module, layers: Iterable[int]) -> Kept:
    """The frozen weights of ``layers`` in a stage's model, of which nothing but adapters is trained.

    The ends of a tied model are left out: a stage makes the head's copy itself.
    """
    return {
        layer: {
            name.replace(_WRAPPED, ""): module
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
