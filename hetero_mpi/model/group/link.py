"""What the members of a group exchange while they compute a stage together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch import dtype as DType


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
        ...

    def maximum(self, tensor: Tensor) -> Tensor:
        """Likewise the maximum of each element."""
        ...


class LeaderLink(GroupLink, Protocol):
    """One whose leader hands on what the stage before, or the one behind, has sent."""

    def shared(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The leader's tensor on every member's device; the others give None."""
        ...


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
