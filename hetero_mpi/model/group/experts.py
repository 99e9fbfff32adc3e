"""Experts that are shared out among the members of a group: each runs its own on all tokens that chose them.

Everybody computes the router, as in transformers' own expert parallelism; unlike devices may round near ties differently, so the
leader's choices count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_mpi.model.group.absent import anchored, replace_forward
from hetero_mpi.model.group.link import GroupLink


class ExpertShare:
    """The experts [first, first + count) of a layer, which are called with hidden states (N, D), the experts that each token chose
    (N, K), and their weights (N, K)."""

    def __init__(self, first: int, count: int, link: GroupLink) -> None:
        self._first, self._count, self._link = first, count, link

    def connect(self, experts: nn.Module) -> None:
        experts.register_forward_pre_hook(self._choose)
        experts.register_forward_hook(_anchor)
        if self._count == 0:
            replace_forward(experts, torch.zeros_like)

    def _choose(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Choices of other members' experts become number ``count``, which transformers' kernels skip."""
        hidden_states, chosen, weights, *rest = given
        chosen, weights = _agreed(chosen, weights, self._link)
        own = chosen - self._first
        foreign = (own < 0) | (own >= self._count)
        return hidden_states, own.masked_fill(foreign, self._count), weights.masked_fill(foreign, 0.0), *rest


def _agreed(chosen: torch.Tensor, weights: torch.Tensor, link: GroupLink) -> tuple[torch.Tensor, torch.Tensor]:
    """The leader's choices and weights. (Numbers of experts are exact in fp32.)"""
    with torch.no_grad():
        wide = torch.promote_types(weights.dtype, torch.float32)
        both = torch.stack((chosen.to(wide), weights.to(wide)))
        both = link.sum(both if link.member == 0 else torch.zeros_like(both))
        difference = both[1].to(weights.dtype) - weights
    return both[0].to(chosen.dtype), weights + difference


def _anchor(module: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Perhaps no token chose this member's experts."""
    return anchored(output, given[0], given[2])
