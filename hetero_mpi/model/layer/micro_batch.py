"""A micro-batch as a stage computes it: the data that its loss needs, its slices, and the answers that it compares.

Preferences: of pairs of answers the chosen one is to become likelier than the rejected one; single answers are desirable or not.
In a row of a micro-batch pairs alternate: chosen, rejected, chosen, rejected. Positions of a record begin at 0, and no record sees
another one of its row (``LayerChain.isolation``), so that a pair takes one row wherever a record takes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from hetero_mpi.model.layer.loss import Routed
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

    def of_rows(self, rows: slice) -> MicroBatch:
        """The same with the data of some of its sequences."""
        return replace(
            self,
            positions=None if self.positions is None else self.positions[rows],
            comparison=None if self.comparison is None else self.comparison.of_rows(rows),
            routed=None if self.routed is None else self.routed.of_rows(rows),
            targets=None if self.targets is None else self.targets[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def slices(self, rows: int, size: int | None) -> Slices:
        """The parts of at most ``size`` of the micro-batch's ``rows`` sequences (None: one part), and which rows each has."""
        size = size or rows
        ranges = [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
        return [(replace(self.of_rows(part), first_sample=self.first_sample + part.start), part) for part in ranges]


Slices = list[tuple[MicroBatch, slice]]


def joined(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all slices; the tensor itself where there is one."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def parts(dy: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """``dy`` by slices of so many rows. The factor of a loss (or None) is every slice's."""
    return [dy] * len(sizes) if dy is None or not dy.dim() or len(sizes) == 1 else dy.split(list(sizes))


@dataclass(frozen=True)
class StepData:
    """The input of a pipeline. Tensors on the device, (rows of its share, T) int64, or samples (rows, ...) in the dtypes of
    ``interface.as_input``; None where this rank does not need them."""

    step: int
    sizes: tuple[int, ...]
    """Sequences in each micro-batch; they follow one another in the tensors."""
    first_samples: tuple[int, ...]
    """Where each micro-batch begins in the global batch."""
    length: int
    """Tokens T per sequence of this batch."""
    tokens: torch.Tensor | None
    targets: torch.Tensor | None
    positions: torch.Tensor | None
    """See ``MicroBatch``; on every stage, where records are packed."""
    divisor: float
    """The whole global batch's; see ``MicroBatch``."""
    loss_scale: float = 1.0
    """Factor of the loss in backward (fp16)."""
    comparison: Comparison | None = None
    """On the last stage, where preferences are learnt."""
    routed: Routed | None = None
    """On every stage, where routers have a loss."""
    weights: torch.Tensor | None = None
    """fp32, of the targets on the last stage; None: they count alike."""

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The rows of each micro-batch."""
        return tuple(slice(end - size, end) for size, end in zip(self.sizes, accumulate(self.sizes), strict=True))

    def tokens_of(self, index: int) -> torch.Tensor:
        """A micro-batch's, on a first stage."""
        assert self.tokens is not None
        return self.tokens[self.rows[index]]

    def targets_of(self, index: int) -> torch.Tensor | None:
        return None if self.targets is None else self.targets[self.rows[index]]

    def micro_batch(self, index: int) -> MicroBatch:
        data = self.positions, self.comparison, self.routed
        share = MicroBatch(index, self.step, self.first_samples[index], self.divisor, *data, weights=self.weights)
        return share.of_rows(self.rows[index])
