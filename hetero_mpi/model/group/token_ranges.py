"""The range of every sequence that each member of a group has between its shares of layers, in proportion to its heads: sequence
parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), with unequal shares.

Where all members would add up what each has computed of all tokens, each adds up its range; all of them come together where the
next share begins.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_mpi.model.group.exchanges import Exchanged, GroupLink


class TokenRanges:
    """The ranges of sequences (B, T, D), which are as long as those that were last divided."""

    def __init__(self, shares: tuple[int, ...], link: GroupLink) -> None:
        self._shares, self._link, self._sizes = shares, link, list[int]()

    def divided(self, x: Tensor) -> Tensor:
        """This member's range of ``x``, which is the same on all members; so is its gradient."""
        ends = [round(x.shape[1] * end / sum(self._shares)) for end in accumulate(self._shares)]
        self._sizes = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
        return Exchanged.apply(x, self._own, self._all)

    def entered(self, x: Tensor) -> Tensor:
        """All tokens of ranges ``x``, of which each member computes a share."""
        return Exchanged.apply(x, self._all, self._summed)

    def left(self, x: Tensor) -> Tensor:
        """This member's range of the sum of the members' ``x``."""
        return Exchanged.apply(x, self._summed, self._all)

    def joined(self, x: Tensor) -> Tensor:
        """All tokens of ranges ``x``, with which each member computes the same."""
        return Exchanged.apply(x, self._all, self._own)

    def _own(self, x: Tensor) -> Tensor:
        return x.split(self._sizes, 1)[self._link.member].clone()

    def _summed(self, x: Tensor) -> Tensor:
        rows = torch.stack([self._padded(part) for part in x.split(self._sizes, 1)])
        return self._link.scattered(rows)[:, : self._sizes[self._link.member]].contiguous()

    def _all(self, x: Tensor) -> Tensor:
        rows = zip(self._link.gathered(self._padded(x)), self._sizes, strict=True)
        return torch.cat([row[:, :size] for row, size in rows], 1)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, max(self._sizes) - x.shape[1]))
