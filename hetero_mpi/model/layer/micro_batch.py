"""A micro-batch as a stage computes it: what its loss needs, and its slices; and the losses of preferences.

Of two answers to a prompt, the chosen one is to become likelier than the rejected one. In a row of a micro-batch the records
alternate: chosen, rejected, chosen, rejected. Their positions begin at 0, and no record sees another one of its row
(``LayerChain.isolation``), so that a pair takes one row wherever a record takes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from hetero_mpi.model.layer.loss import Routed

Method = Literal["dpo", "orpo", "margins"]
"""The loss; or the margins by themselves, of which a reference model's are kept."""


@dataclass(frozen=True)
class Comparison:
    """The pairs of a micro-batch. B rows of T tokens have at most K pairs each.

    Attributes:
        answers: (B, T), 1 where the target belongs to an answer that is compared.
        reference: (B, K) fp32, the reference model's margins; 0 without one.
        likelihood_weight: factor of the loss of the chosen records' targets (ORPO).
    """

    method: Method
    beta: float
    answers: torch.Tensor
    reference: torch.Tensor
    likelihood_weight: float = 0.0

    def of_rows(self, rows: slice) -> Comparison:
        return Comparison(self.method, self.beta, self.answers[rows], self.reference[rows], self.likelihood_weight)

    def loss(self, losses: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all pairs, a scalar (fp32), differentiable; or the margins (B, K).

        Args:
            losses: (B, T), of each target (``target_losses``).
            positions: (B, T), each token's place in its own record.
        """
        records = torch.arange(2 * self.reference.shape[1], device=losses.device).view(1, -1, 1)
        own = ((positions == 0).cumsum(1) - 1).unsqueeze(1) == records
        answers = own * self.answers.unsqueeze(1)
        counts = answers.sum(2)
        likelihoods = -(losses.unsqueeze(1) * answers).sum(2)
        there = counts[:, ::2] > 0
        if self.method == "orpo":  # where there is no pair: any number of which the loss is finite
            means = torch.where(counts > 0, likelihoods / counts.clamp(min=1), -1.0)
            pairs = -self.beta * F.logsigmoid(_log_odds(means[:, ::2]) - _log_odds(means[:, 1::2]))
            of_chosen = (losses.unsqueeze(1) * own[:, ::2]).sum()
            return torch.where(there, pairs, 0.0).sum() + self.likelihood_weight * of_chosen
        margins = likelihoods[:, ::2] - likelihoods[:, 1::2]
        if self.method == "margins":
            return margins
        return torch.where(there, -F.logsigmoid(self.beta * (margins - self.reference)), 0.0).sum()


def _log_odds(likelihoods: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p, which is below 0 (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).

    Of an answer that is certain in fp32 the odds would have no end, and the gradient no number.
    """
    likelihoods = likelihoods.clamp(max=-1e-7)
    small = torch.log1p(-torch.exp(likelihoods.clamp(max=-math.log(2))))
    large = torch.log(-torch.expm1(likelihoods.clamp(min=-math.log(2))))
    return likelihoods - torch.where(likelihoods < -math.log(2), small, large)


@dataclass(frozen=True)
class MicroBatch:
    """Which micro-batch runs, and what its loss needs.

    ``step`` and ``first_sample`` (position of its first sequence within the global batch) key the dropout masks.
    """

    index: int
    step: int
    first_sample: int
    divisor: int
    """Targets (or pairs) of the whole global batch, over all micro-batches and pipelines: the loss is divided by it once."""
    positions: torch.Tensor | None = None
    """(B, T) int64: each token's place in its own record, which sees no other one of its sequence; None: a sequence is one text."""
    comparison: Comparison | None = None
    """On the last stage, where preferences are learnt."""
    routed: Routed | None = None
    """On every stage, where routers have a loss; None: it is not computed (nor is it in profiling)."""
    targets: torch.Tensor | None = None
    """On the last stage."""

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
