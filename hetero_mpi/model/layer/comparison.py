"""The losses of preferences: of pairs of answers, of which the chosen one is to become likelier than the rejected one, and of
single answers that are desirable or not.

In a row of a micro-batch pairs alternate: chosen, rejected, chosen, rejected. Positions of a record begin at 0, and no record sees
another one of its row (``LayerChain.isolation``), so that a pair takes one row wherever a record takes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hetero_mpi.job.training_tables import TrainTable

REWARDS = 3
"""Numbers of a micro-batch beside its loss: the sums of the rewards of chosen and of rejected answers, and how many pairs give the
chosen one more."""
DESIRABLE = 2
"""Mark of an answer by itself that is desirable; the next number: that is not."""


@dataclass(frozen=True)
class Comparison:
    """The answers of a micro-batch that are compared. B rows of T tokens have at most R records each.

    Attributes:
        train: the job's keys; None: the likelihoods themselves are asked for, of which a reference model's are kept.
        answers: (B, T), above 0 where the target belongs to an answer that is compared: 1 in a pair, else as ``DESIRABLE`` says.
        reference: (B, R) fp32, the reference model's log-likelihoods of the answers; 0 without one.
        likelihood_weight: factor of the loss of the chosen records' targets (ORPO).
        point: KTO's reference point.
    """

    train: TrainTable | None
    answers: torch.Tensor
    reference: torch.Tensor
    likelihood_weight: float = 0.0
    point: float = 0.0

    def of_rows(self, rows: slice) -> Comparison:
        return replace(self, answers=self.answers[rows], reference=self.reference[rows])

    def likelihoods(self, losses: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Log-likelihood of each record's answer, (B, R). Takes what ``loss`` does."""
        return -(losses.unsqueeze(1) * self._own(positions) * (self.answers > 0).unsqueeze(1)).sum(2)

    def _own(self, positions: torch.Tensor) -> torch.Tensor:
        """True where a token is one of the record, (B, R, T)."""
        records = torch.arange(self.reference.shape[1], device=positions.device).view(1, -1, 1)
        return ((positions == 0).cumsum(1) - 1).unsqueeze(1) == records

    def loss(self, losses: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the losses of all pairs or answers, a scalar (fp32), differentiable; ``REWARDS`` numbers).

        Args:
            losses: (B, T), of each target (``target_losses``).
            positions: (B, T), each token's place in its own record.
        """
        assert self.train is not None
        own, likelihoods = self._own(positions), self.likelihoods(losses, positions)
        method, beta, marks = self.train.preference, self.train.preference_beta, own * self.answers.unsqueeze(1)
        counts = (marks > 0).sum(2)
        # Where there is no answer: any number of which the loss is finite.
        means = torch.where(counts > 0, likelihoods / counts.clamp(min=1), -1.0)
        gained = likelihoods - self.reference
        rewards = beta * (means if method in ("simpo", "orpo") else gained)
        if method == "kto":
            return self._of_single(rewards, marks.amax(2))
        there, (chosen, rejected) = counts[:, ::2] > 0, (rewards[:, ::2], rewards[:, 1::2])
        if method == "orpo":
            pairs = -beta * F.logsigmoid(_log_odds(means[:, ::2]) - _log_odds(means[:, 1::2]))
        elif method == "ipo":
            gained = gained / counts.clamp(min=1)
            pairs = (gained[:, ::2] - gained[:, 1::2] - 1 / (2 * beta)) ** 2
        else:
            margins = chosen - rejected - (self.train.preference_margin if method == "simpo" else 0.0)
            flipped = self.train.preference_smoothing
            flipped /= 2 * flipped - 1 if method == "robust" else 1  # below 0: takes off what the flipped pairs add
            pairs = -F.logsigmoid(margins) * (1 - flipped) - F.logsigmoid(-margins) * flipped
            pairs = torch.relu(1 - margins) if method == "hinge" else pairs
        loss = torch.where(there, pairs, 0.0).sum()
        if method == "orpo":
            loss = loss + self.likelihood_weight * (losses.unsqueeze(1) * own[:, ::2]).sum()
        return loss, _summed(there * chosen, there * rejected, there & (chosen > rejected))

    def _of_single(self, rewards: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``loss``, by KTO. ``kinds``: (B, R), the answers' marks."""
        assert self.train is not None
        good, bad = kinds == DESIRABLE, kinds > DESIRABLE
        above = rewards - self.train.preference_beta * self.point
        losses = good * self.train.desirable_weight * (1 - torch.sigmoid(above))
        losses = losses + bad * self.train.undesirable_weight * (1 - torch.sigmoid(-above))
        return losses.sum(), _summed(good * rewards, bad * rewards, torch.zeros_like(rewards))


def _summed(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([value.detach().float().sum() for value in values])


def _log_odds(likelihoods: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p, which is below 0 (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).

    Of an answer that is certain in fp32 the odds would have no end, and the gradient no number.
    """
    likelihoods = likelihoods.clamp(max=-1e-7)
    small = torch.log1p(-torch.exp(likelihoods.clamp(max=-math.log(2))))
    large = torch.log(-torch.expm1(likelihoods.clamp(min=-math.log(2))))
    return likelihoods - torch.where(likelihoods < -math.log(2), small, large)
