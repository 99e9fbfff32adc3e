"""Sharding of one tensor across the ranks of a tensor-parallel group, by rows, columns or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from hetero_mpi.model.layer.quantize import BLOCK_SIZE
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK_SIZE


class Holding(Enum):
    """How the ranks of a group hold a tensor."""

    CUT = "cut"
    """Sharded: each rank holds a range of one dimension."""
    WHOLE = "whole"
    """Replicated with equal gradients: trained on the leader only, with the leader's gradient."""
    SUMMED = "summed"
    """Replicated with partial gradients, which are summed over the group."""
    LEADER = "leader"
    """Held by the leader only."""


@dataclass(frozen=True)
class Division:
    """Sharding of one tensor. With ``bounds = (0, 5, 8)``, rank 0 of the group holds [0, 5) and rank 1 holds [5, 8).

    Attributes:
        dim: the sharded dimension.
        bounds: member m holds the range [bounds[m], bounds[m + 1]) of that dimension.
        pieces: number of matrices stacked in that dimension, each sharded by ``bounds``.
    """

    holding: Holding
    dim: int = 0
    bounds: tuple[int, ...] = ()
    pieces: int = 1

    @property
    def cut(self) -> bool:
        return self.holding is Holding.CUT

    def place(self, tensor: torch.Tensor, member: int) -> torch.Tensor:
        """Return a view of a member's shard, with an extra dimension for the pieces before the sharded dimension."""
        first, end = self.bounds[member : member + 2]
        return tensor.unflatten(self.dim, (self.pieces, -1)).narrow(self.dim + 1, first, end - first)

    def part(self, tensor: torch.Tensor, member: int) -> torch.Tensor:
        """Return a member's shard as a contiguous copy, or the tensor itself if it is not sharded."""
        if not self.cut:
            return tensor
        shard = self.place(tensor, member).clone(memory_format=torch.contiguous_format)
        return shard.flatten(self.dim, self.dim + 1)

    def shape(self, full_shape: Sequence[int], member: int) -> tuple[int, ...]:
        sizes = list(full_shape)
        if self.cut:
            sizes[self.dim] = self.pieces * (self.bounds[member + 1] - self.bounds[member])
        return tuple(sizes)

    @property
    def of_blocks(self) -> Division:
        """Sharding of this tensor's NF4 scales, (rows, blocks per row)."""
        return self if self.dim == 0 else replace(self, bounds=tuple(bound // BLOCK_SIZE for bound in self.bounds))

    def of_moments(self, shape: Sequence[int]) -> tuple[Division, tuple[int, int]]:
        """Return sharding and shape of the 8-bit moments' scales for this tensor of ``shape``; bounds must lie between blocks."""
        outer = math.prod(shape[: self.dim]) * self.pieces
        inner = math.prod(shape) // outer
        inner_size = math.prod(shape[self.dim + 1 :])
        ends = tuple(-(-bound * inner_size // MOMENT_BLOCK_SIZE) for bound in self.bounds)
        return Division(self.holding, 1, ends), (outer, -(-inner // MOMENT_BLOCK_SIZE))

    def cuts_blocks(self, shape: Sequence[int], block: int) -> bool:
        """Return whether a shard bound splits a block of ``block`` contiguous elements in a tensor of ``shape``."""
        inner = math.prod(shape[self.dim + 1 :])
        ends = self.bounds if self.dim or self.pieces > 1 else self.bounds[:-1]
        return self.cut and any(bound * inner % block for bound in ends)

    def exists(self, member: int) -> bool:
        """Return whether a member holds any part of the tensor."""
        if self.cut:
            return self.bounds[member] < self.bounds[member + 1]
        return self.holding is not Holding.LEADER or member == 0

    def trains(self, member: int) -> bool:
        """Return whether a member has a gradient for the tensor."""
        return self.holding in (Holding.CUT, Holding.SUMMED) or member == 0
