"""The two exchanges of tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3), for autograd.

Between them each member computes its share of attention, of an MLP, or of the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_mpi.model.group.link import GroupLink


def entered(x: torch.Tensor, link: GroupLink) -> torch.Tensor:
    """``x``, which is the same on all members; its gradient is the sum of theirs."""
    return _Entered.apply(x, link) if x.requires_grad and torch.is_grad_enabled() else x


def left(x: torch.Tensor, link: GroupLink) -> torch.Tensor:
    """The sum of the members' ``x``, which no earlier computation needs for its backward; its gradient is the same on all."""
    return _Left.apply(x, link)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: GroupLink) -> torch.Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.link.sum(gradient.contiguous()), None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: GroupLink) -> torch.Tensor:
        summed = link.sum(x.contiguous())
        return summed.clone() if summed.data_ptr() == x.data_ptr() else summed  # autograd wants a tensor of its own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
