"""Autograd functions for the two exchanges of tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3).

    forward     x ---- entered ---- shard of attention or MLP ---- left: all-reduce ---- y
    backward    dx <-- all-reduce -- backward of the shard <------- identity <---------- dy

A rank without a shard of a module outputs zeros for it, but its backward still reaches the earlier exchanges (``anchored``).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import dtype as DType

from hetero_mpi.model.group.tensor_division import Division


class GroupLink(Protocol):
    """Collectives of a tensor-parallel group.

    All members make the same calls in the same order, with equal shapes and dtypes, and get bitwise equal results. Autograd also
    calls ``sum``, on accelerators from another thread.

    Attributes:
        member: this rank's index in the group; 0 is the leader.
        size: number of members.
    """

    member: int
    size: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the members; either overwrite and return the contiguous ``tensor``, or return a new tensor."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the members; see ``sum``."""


class StageLink(GroupLink, Protocol):
    """A ``GroupLink`` whose leader also broadcasts the tensors that it receives from neighbouring stages.

    Attributes:
        summed_s: total seconds spent in ``sum`` and ``maximum``, including waiting for other members.
    """

    summed_s: float

    def broadcast(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Broadcast the leader's tensor to every member's device; members other than the leader pass None."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context in which this member computes alone: reductions use their usual memory but exchange nothing."""

    def assembled(self, shard: Tensor | None, division: Division, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Gather a sharded tensor in the leader's host memory. ``shard`` is the leader's shard; None if it has no shard."""

    def give(self, part: Tensor) -> None:
        """Send this member's shard to the leader, which is calling ``assembled``."""


@dataclass(frozen=True)
class StageGroup:
    """The tensor-parallel group of a stage.

    Attributes:
        shares: number of key/value heads of each member.
        experts: number of experts that each member holds per layer; None to divide them in proportion to the shares.
    """

    shares: tuple[int, ...]
    link: GroupLink
    experts: tuple[int, ...] | None = None


Exchange = Callable[[Tensor], Tensor]


class Exchanged(torch.autograd.Function):
    """Applies one exchange in forward and another to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_exchange: Exchange, backward_exchange: Exchange) -> Tensor:
        ctx.back = backward_exchange
        return forward_exchange(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def entered(x: Tensor, link: GroupLink) -> Tensor:
    """Enter a sharded module: pass on the replicated ``x`` in forward, all-reduce its gradient in backward."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return Exchanged.apply(x, lambda x: x.view_as(x), lambda gradient: link.sum(gradient.contiguous()))


def left(x: Tensor, link: GroupLink) -> Tensor:
    """Leave a sharded module: all-reduce the partial ``x`` in forward (possibly in place), pass on its gradient in backward."""

    def summed(x: Tensor) -> Tensor:
        total = link.sum(x.contiguous())
        return total.clone() if total.data_ptr() == x.data_ptr() else total  # autograd requires a new tensor

    return Exchanged.apply(x, summed, lambda gradient: gradient)


def replace_forward(module: nn.Module, zeros: Callable[[torch.Tensor], torch.Tensor], pair: bool = False) -> None:
    """Make ``module`` return ``zeros`` of its first argument and, if ``pair`` is true, None as attention weights."""

    def forward(*arguments: Any, **keywords: Any) -> Any:
        x = arguments[0] if arguments else keywords["hidden_states"]
        output = anchored(zeros(x), x, *module.parameters())
        return (output, None) if pair else output

    module.forward = forward  # type: ignore[method-assign]


def anchored(output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Connect ``output`` to the graph of ``inputs`` with zero gradients.

    Backward then reaches the exchanges before ``inputs`` on every rank, even on a rank that computes nothing from them.
    """
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    result: torch.Tensor = _Anchored.apply(output, *trained)
    return result


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        # Saved as other layers save tensors, so that activation checkpointing recomputes the block between the same exchanges.
        ctx.save_for_backward(*(tensor.new_empty(()).expand_as(tensor) for tensor in (output, *inputs)))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors[1:])
