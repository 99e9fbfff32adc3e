"""The division of one tensor among the members of a group, by rows, columns or words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from hetero_mpi.model.layer.quantize import BLOCK
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK


class Holding(Enum):
    """The part of a tensor that members hold."""

    CUT = "cut"
    """Each a range of one dimension."""
    WHOLE = "whole"
    """Everybody all of it, with the same gradient: the leader's is used, and it is trained there only."""
    SUMMED = "summed"
    """Everybody all of it, with a part of the gradient, which is the sum of the parts."""
    LEADER = "leader"
    """The leader all of it; it does not exist elsewhere."""


@dataclass(frozen=True)
class Division:
    """The division of one tensor among the members.

    Attributes:
        dim: the dimension that is cut.
        bounds: member m holds the places [bounds[m], bounds[m + 1]) of it.
        pieces: so many matrices lie one after the other in that dimension, each of which is cut so.
    """

    held: Holding
    dim: int = 0
    bounds: tuple[int, ...] = ()
    pieces: int = 1

    @property
    def cut(self) -> bool:
        """Has each of the members a part of its own?"""
        return self.held is Holding.CUT

    def place(self, whole: torch.Tensor, member: int) -> torch.Tensor:
        """A view of a member's part of what is cut, with a dimension for the pieces before the one that is cut."""
        first, end = self.bounds[member : member + 2]
        return whole.unflatten(self.dim, (self.pieces, -1)).narrow(self.dim + 1, first, end - first)

    def part(self, whole: torch.Tensor, member: int) -> torch.Tensor:
        """A member's part of it: contiguous memory of its own, or all of it as it is."""
        if not self.cut:
            return whole
        found = self.place(whole, member).clone(memory_format=torch.contiguous_format)
        return found.flatten(self.dim, self.dim + 1)

    def shape(self, whole: Sequence[int], member: int) -> tuple[int, ...]:
        """Shape of ``part``."""
        sizes = list(whole)
        if self.cut:
            sizes[self.dim] = self.pieces * (self.bounds[member + 1] - self.bounds[member])
        return tuple(sizes)

    @property
    def of_blocks(self) -> Division:
        """The division of a tensor that has a number for each NF4 block of this one: (rows, blocks of a row)."""
        return self if self.dim == 0 else replace(self, bounds=tuple(bound // BLOCK for bound in self.bounds))

    def of_moments(self, shape: Sequence[int]) -> tuple[Division, tuple[int, int]]:
        """(the division of a tensor that has a number for each block of moments in 8 bits of this one, which is of ``shape``; its
        shape). Cuts fall between blocks."""
        outer = math.prod(shape[: self.dim]) * self.pieces
        inner = math.prod(shape) // outer
        each = math.prod(shape[self.dim + 1 :])
        ends = tuple(-(-bound * each // MOMENT_BLOCK) for bound in self.bounds)
        return Division(self.held, 1, ends), (outer, -(-inner // MOMENT_BLOCK))

    def cuts_blocks(self, shape: Sequence[int], block: int) -> bool:
        """Whether a cut of a tensor of ``shape`` falls within a block of so many numbers that follow each other in memory."""
        inner = math.prod(shape[self.dim + 1 :])
        ends = self.bounds if self.dim or self.pieces > 1 else self.bounds[:-1]
        return self.cut and any(bound * inner % block for bound in ends)

    def exists(self, member: int) -> bool:
        """Not where another member leads, or has all that is cut."""
        if self.cut:
            return self.bounds[member] < self.bounds[member + 1]
        return self.held is not Holding.LEADER or member == 0

    def trains(self, member: int) -> bool:
        """Whether it has a gradient there."""
        return self.held in (Holding.CUT, Holding.SUMMED) or member == 0
