"""A micro-batch as a stage computes it: what its loss needs, and its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hetero_mpi.model.layer.comparison import Comparison
from hetero_mpi.model.layer.loss import Routed


@dataclass(frozen=True)
class MicroBatch:
    """Which micro-batch runs, and what its loss needs.

    ``step`` and ``first_sample`` (position of its first sequence within the global batch) key the dropout masks.
    """

    index: int
    step: int
    first_sample: int
    divisor: float
    """Targets (their weights, pairs, answers) of the whole global batch, over all micro-batches and pipelines: the loss is divided
    by it once."""
    positions: torch.Tensor | None = None
    """(B, T) int64: each token's place in its own record, which sees no other one of its sequence; None: a sequence is one text."""
    comparison: Comparison | None = None
    """On the last stage, where preferences are learnt."""
    routed: Routed | None = None
    """On every stage, where routers have a loss; None: it is not computed (nor is it in profiling)."""
    targets: torch.Tensor | None = None
    """On the last stage."""
    weights: torch.Tensor | None = None
    """(B, T) fp32, of the targets, on the last stage; None: they count alike."""

    def slices(self, rows: int, size: int | None) -> Slices:
        """The parts of at most ``size`` of the micro-batch's ``rows`` sequences (None: one part), and which rows each has."""
        found, size = [], size or rows
        for begin in range(0, rows, size):
            part = slice(begin, min(begin + size, rows))
            own = replace(
                self,
                first_sample=self.first_sample + begin,
                positions=None if self.positions is None else self.positions[part],
                comparison=None if self.comparison is None else self.comparison.of_rows(part),
                routed=None if self.routed is None else self.routed.of_rows(part),
                targets=None if self.targets is None else self.targets[part],
                weights=None if self.weights is None else self.weights[part],
            )
            found.append((own, part))
        return found


Slices = list[tuple[MicroBatch, slice]]


def joined(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all slices; the tensor itself where there is one."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def parts(dy: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """``dy`` by slices of so many rows. The factor of a loss (or None) is every slice's."""
    return [dy] * len(sizes) if dy is None or not dy.dim() or len(sizes) == 1 else dy.split(list(sizes))
