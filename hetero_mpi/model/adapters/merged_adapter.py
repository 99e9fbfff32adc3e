"""Weights with what an adapter adds to them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.tuning import scale_of


def expert_delta(whole: PreTrainedModel, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product that an adapter's matrices ``a`` (experts x r, in) and ``b`` (out, r x experts) add to the parameter ``name`` of
    fused experts, but for alpha / r."""
    holder, _, _ = name.rpartition(".")
    experts = whole.get_parameter(name).shape[0]
    first, second = a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], -1, experts)
    transposed = getattr(whole.get_submodule(holder), "is_transposed", False)
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", second, first)


def merged(
    adapter: AdapterTable, name: str, weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None
) -> torch.Tensor:
    """A weight (out, in) with what its adapter adds.

    Args:
        name: of the adapted module, or parameter of fused experts.
        delta: B A.
        magnitude: DoRA's (out), else None.
    """
    summed = weight + scale_of(adapter, name) * delta
    return summed if magnitude is None else (magnitude / torch.linalg.norm(summed, dim=1)).unsqueeze(1) * summed
