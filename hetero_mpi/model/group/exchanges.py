"""The exchanges of a group's members while they compute a stage together.

The two exchanges of tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3) are made for autograd:
between them each member computes its share of attention, of an MLP, or of the logits. Where a member holds nothing of a part of a
layer, that gives zeros, and backward reaches the exchanges before it even so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import dtype as DType

from hetero_mpi.model.group.tensor_division import Division


class GroupLink(Protocol):
    """Joins the members of a group. Both sums and maxima are collective: every member calls them in the same order, with tensors
    of one shape and dtype, and gets the same bits.

    Autograd calls ``sum`` too, on accelerators from a thread of its own.

    Attributes:
        member: this rank's place in the group; 0 leads.
        size: number of members.
    """

    member: int
    size: int

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the members: the contiguous ``tensor`` itself, overwritten, or another one of its shape."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """Likewise the maximum of each element."""


class StageLink(GroupLink, Protocol):
    """One whose leader hands on what the stage before, or the one behind, has sent.

    Attributes:
        summed_s: seconds in sums and maxima so far, in which this member also waited for the others.
    """

    summed_s: float

    def shared(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The leader's tensor on every member's device; the others give None."""

    def apart(self) -> AbstractContextManager[None]:
        """A block in which this member computes by itself: sums take the memory that they take, but nothing is exchanged."""

    def assembled(self, own: Tensor | None, division: Division, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """On the leader: the whole of a tensor, in host memory, of which every other member gives its part. ``own``: the leader's
        part; None: it has none."""

    def give(self, part: Tensor) -> None:
        """On another member: its part of a tensor that the leader puts together."""


@dataclass(frozen=True)
class StageGroup:
    """The group that holds a stage.

    Attributes:
        shares: whole key/value heads of each member.
        experts: whole experts of each member, of each layer that has some; None: in proportion to the shares.
    """

    shares: tuple[int, ...]
    link: GroupLink
    experts: tuple[int, ...] | None = None


Exchange = Callable[[Tensor], Tensor]


class Exchanged(torch.autograd.Function):
    """``there`` of a tensor, whose gradient is ``back`` of what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def entered(x: Tensor, link: GroupLink) -> Tensor:
    """``x``, which is the same on all members; its gradient is the sum of theirs."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return Exchanged.apply(x, lambda x: x.view_as(x), lambda gradient: link.sum(gradient.contiguous()))


def left(x: Tensor, link: GroupLink) -> Tensor:
    """The sum of the members' ``x``, which no earlier computation needs for its backward; its gradient is the same on all."""

    def summed(x: Tensor) -> Tensor:
        total = link.sum(x.contiguous())
        return total.clone() if total.data_ptr() == x.data_ptr() else total  # autograd wants a tensor of its own

    return Exchanged.apply(x, summed, lambda gradient: gradient)


def replace_forward(module: nn.Module, zeros: Callable[[torch.Tensor], torch.Tensor], pair: bool = False) -> None:
    """From now on ``module`` gives ``zeros`` of what it is given first. ``pair``: with attention's weights, which are None."""

    def forward(*arguments: Any, **keywords: Any) -> Any:
        x = arguments[0] if arguments else keywords["hidden_states"]
        output = anchored(zeros(x), x, *module.parameters())
        return (output, None) if pair else output

    module.forward = forward  # type: ignore[method-assign]


def anchored(output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``output`` as it is, with (further) gradients of zero to those of ``others`` that have any: so every member reaches the
    exchanges before them in backward, though it computes nothing of them."""
    trained = [other for other in others if other.requires_grad]
    result: torch.Tensor = _Anchored.apply(output, *trained)
    return result


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # Saved as layers save theirs: a block is computed again up to here and from here on, between the same exchanges.
        ctx.save_for_backward(*(one.new_empty(()).expand_as(one) for one in (output, *others)))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors[1:])
