"""First values of modules that were on the meta device: a family's own rules, seeded by name, and an error where it has none."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.seeds import seeded
from hetero_mpi.util.errors import UserError


def initialise(chain: LayerChain, model: PreTrainedModel, layer: int, seed: int) -> None:
    """Give the meta parameters of ``layer`` of a language model their start values (fp32, host): every module is initialised by
    its family's own rule from a generator seeded by (seed, module name).
    """
    for root in chain.module_names(layer):
        for name, module in model.get_submodule(root).named_modules(prefix=root):
            names = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
            if not names or (chain.tied is not None and names == [chain.tied[0]]):
                continue  # a tied head takes the embedding's values
            materialize(module)
            _forget(module.named_parameters(recurse=False))
            with seeded(seed, name), torch.no_grad():
                model._init_weights(module)
            for own, parameter in module.named_parameters(recurse=False):
                lacking = (
                    f"{name}.{own}: transformers gives the {model.config.model_type} family no rule that initialises it; start "
                    f"from a model directory instead ([model] path; transformers' from_config and save_pretrained write one)"
                )
                _require_value(parameter, lacking)


def materialize(module: nn.Module) -> None:
    """Replace the meta parameters directly in ``module`` by uninitialised host tensors, fp32 unless they are integers."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.device.type == "meta":
            dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad))


def _forget(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill with NaN, so that what nothing initialises is seen."""
    for _, tensor in tensors:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)


def _require_value(tensor: torch.Tensor, lacking: str) -> None:
    if tensor.is_floating_point() and math.isnan(tensor.detach().sum().item()):
        raise UserError("model.no_initial_value", lacking)


def restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that are in no file (rotary frequencies, embedding scale) by the family's own rule."""
    for module in model.modules():
        buffers = [
            (name, b) for name, b in module.named_buffers(recurse=False) if b is not None and b.device.type == "meta"
        ]
        if not buffers:
            continue
        for name, buffer in buffers:
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent=False)
        _forget(module.named_buffers(recurse=False))
        # Parameters of this module hold their start already: transformers' initialisers leave flagged tensors alone.
        flagged = list(module.parameters(recurse=False))
        for parameter in flagged:
            parameter._is_hf_initialized = True
        with torch.no_grad():
            model._init_weights(module)
        for name, _ in buffers:
            family = model.config.model_type
            lacking = f"transformers gives the {family} family no rule that computes its buffer {name}"
            _require_value(getattr(module, name), lacking)
            module.register_buffer(name, getattr(module, name).to(device), persistent=False)
