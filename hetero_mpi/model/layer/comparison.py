"""The losses of preferences: of pairs of answers, of which the chosen one is to become likelier than the rejected one, and of
single answers that are desirable or not.

In a row of a micro-batch pairs alternate: chosen, rejected, chosen, rejected. Positions of a record begin at 0, and no record sees
another one of its row (``LayerChain.isolation``), so that a pair takes one row wherever a record takes one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hetero_mpi.objectives import Answers, Settings, objective

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
        likelihood_weight: factor of the loss of the chosen records' targets (``LEARNS_CHOSEN``).
        point: KTO's reference point.
    """

    train: Settings | None
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
        compared_by = objective(self.train.preference)
        assert compared_by is not None
        marks = own * self.answers.unsqueeze(1)
        counts = (marks > 0).sum(2)
        means = torch.where(counts > 0, likelihoods / counts.clamp(min=1), -1.0)
        gains = likelihoods - self.reference
        rewards = self.train.preference_beta * (gains if compared_by.reference else means)
        answers = Answers(counts, means, gains, rewards)
        if compared_by.learns_from == "labels":
            desirable, undesirable = marks.amax(2) == DESIRABLE, marks.amax(2) > DESIRABLE
            if_desirable, if_undesirable = compared_by.losses(answers, self.point, self.train)
            loss = (desirable * if_desirable + undesirable * if_undesirable).sum()
            return loss, _summed(desirable * rewards, undesirable * rewards, torch.zeros_like(rewards))
        chosen, rejected = answers.every_second(0), answers.every_second(1)
        there = chosen.tokens > 0
        loss = torch.where(there, compared_by.losses(chosen, rejected, self.train), 0.0).sum()
        if compared_by.learns_chosen:
            loss = loss + self.likelihood_weight * (losses.unsqueeze(1) * own[:, ::2]).sum()
        better = chosen.reward > rejected.reward
        return loss, _summed(there * chosen.reward, there * rejected.reward, there & better)


def _summed(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([value.detach().float().sum() for value in values])
