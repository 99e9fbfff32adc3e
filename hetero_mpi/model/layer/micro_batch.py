"""The data of a micro-batch for a stage: inputs and targets, slices, and answers for preference training.

Preference training makes the chosen answer of a pair likelier than the rejected answer, or uses single answers that are desirable
or undesirable. In a row, the records of pairs alternate: chosen, rejected, chosen, rejected. Positions start at 0 in each record;
records do not attend to each other (``LayerChain.isolation``), so a pair can share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from hetero_mpi.model.layer.loss import Routed
from hetero_mpi.objectives import Answers, Settings, objective

REWARD_COUNT = 3
"""Number of reward statistics of a micro-batch: the summed rewards of chosen answers and of rejected answers, and the number of
pairs whose chosen answer has the higher reward."""
DESIRABLE_CODE = 2
"""Code of a desirable single answer; an undesirable answer has the next code, 3."""


@dataclass(frozen=True)
class Comparison:
    """The answers of a micro-batch in preference training: B rows of T tokens with at most R records each.

    Attributes:
        train: keys of the job; None to compute only log-probabilities (of the reference model).
        answers: (B, T): 0 outside answers, 1 in a pair's answer, ``DESIRABLE_CODE`` or ``DESIRABLE_CODE + 1`` in a single answer.
        reference: (B, R) fp32, log-probabilities of the answers under the reference model; 0 if there is none.
        likelihood_weight: weight of the cross-entropy of chosen records (``LEARNS_CHOSEN``).
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
        """Return the log-probability of each record's answer, (B, R). Arguments: see ``loss``."""
        return -(losses.unsqueeze(1) * self._record_mask(positions) * (self.answers > 0).unsqueeze(1)).sum(2)

    def _record_mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Return whether each token belongs to each record, (B, R, T)."""
        records = torch.arange(self.reference.shape[1], device=positions.device).view(1, -1, 1)
        return ((positions == 0).cumsum(1) - 1).unsqueeze(1) == records

    def loss(self, losses: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summed loss of all pairs or answers, a differentiable fp32 scalar; ``REWARD_COUNT`` statistics).

        Args:
            losses: (B, T), the loss of each target (``target_losses``).
            positions: (B, T), each token's position in its record.
        """
        assert self.train is not None
        is_of_record, likelihoods = self._record_mask(positions), self.likelihoods(losses, positions)
        preference = objective(self.train.preference)
        assert preference is not None
        marks = is_of_record * self.answers.unsqueeze(1)
        counts = (marks > 0).sum(2)
        means = torch.where(counts > 0, likelihoods / counts.clamp(min=1), -1.0)
        gains = likelihoods - self.reference
        rewards = self.train.preference_beta * (gains if preference.reference else means)
        answers = Answers(counts, means, gains, rewards)
        if preference.learns_from == "labels":
            desirable, undesirable = marks.amax(2) == DESIRABLE_CODE, marks.amax(2) > DESIRABLE_CODE
            if_desirable, if_undesirable = preference.losses(answers, self.point, self.train)
            loss = (desirable * if_desirable + undesirable * if_undesirable).sum()
            return loss, _summed(desirable * rewards, undesirable * rewards, torch.zeros_like(rewards))
        preferred, rejected = answers.every_second(0), answers.every_second(1)
        is_pair = preferred.tokens > 0
        loss = torch.where(is_pair, preference.losses(preferred, rejected, self.train), 0.0).sum()
        if preference.learns_chosen:
            loss = loss + self.likelihood_weight * (losses.unsqueeze(1) * is_of_record[:, ::2]).sum()
        better = preferred.reward > rejected.reward
        return loss, _summed(is_pair * preferred.reward, is_pair * rejected.reward, is_pair & better)


def _summed(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([value.detach().float().sum() for value in values])


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch with the data for its loss.

    ``step`` and ``first_sample`` (index of its first sequence in the global batch) determine the dropout masks.
    """

    index: int
    step: int
    first_sample: int
    divisor: float
    """Number by which the loss is divided: the global batch's targets, pairs or answers, or the sum of its weights."""
    positions: torch.Tensor | None = None
    """(B, T) int64: each token's position in its record; records do not attend to each other. None if no records are packed."""
    comparison: Comparison | None = None
    """Preference-training data, on the last stage."""
    routed: Routed | None = None
    """Data for router losses, on every stage; None to skip these losses (as in profiling)."""
    targets: torch.Tensor | None = None
    """Targets, on the last stage."""
    weights: torch.Tensor | None = None
    """(B, T) fp32: weights of the targets, on the last stage; None if all weights are equal."""
    host_positions: torch.Tensor | None = None
    """``positions`` in host memory; None if the device is the CPU."""

    @cached_property
    def records(self) -> list[list[int]] | None:
        """Number of tokens of each record in each sequence; None if no records are packed."""
        positions = self.positions if self.host_positions is None else self.host_positions
        if positions is None:
            return None
        assert positions.is_cpu, "reading positions would wait for the device"
        sizes = []
        for row in positions:
            starts = (torch.nonzero(row.diff() != 1).flatten() + 1).tolist()
            sizes.append([last - first for first, last in pairwise([0, *starts, len(row)])])
        return sizes

    def of_rows(self, rows: slice) -> MicroBatch:
        """Return the micro-batch restricted to some of its sequences."""
        values = vars(self).items()
        sliced: dict[str, Any] = {name: value[rows] for name, value in values if isinstance(value, torch.Tensor)}
        sliced |= {name: value.of_rows(rows) for name, value in values if isinstance(value, Comparison | Routed)}
        return replace(self, **sliced)

    def slices(self, rows: int, size: int | None) -> Slices:
        """Split ``rows`` sequences into slices of at most ``size`` (None: one slice), each with its rows."""
        size = size or rows
        ranges = [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
        return [(replace(self.of_rows(part), first_sample=self.first_sample + part.start), part) for part in ranges]


Slices = list[tuple[MicroBatch, slice]]


def joined(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the rows of all slices; return a single slice unchanged."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def split_rows(dy: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Split ``dy`` into slices with the given numbers of rows; a scalar loss factor (or None) is repeated."""
    return [dy] * len(sizes) if dy is None or not dy.dim() or len(sizes) == 1 else dy.split(list(sizes))


@dataclass(frozen=True)
class StepData:
    """A pipeline's input for a step: int64 tensors (rows, T) on the device, or samples (rows, ...); None where not needed."""

    step: int
    sizes: tuple[int, ...]
    """Number of sequences of each micro-batch; micro-batches are consecutive in the tensors."""
    first_samples: tuple[int, ...]
    """Index of each micro-batch's first sequence in the global batch."""
    length: int
    """Number of tokens T per sequence in this batch."""
    tokens: torch.Tensor | None
    targets: torch.Tensor | None
    positions: torch.Tensor | None
    """See ``MicroBatch``; present on every stage if records are packed."""
    divisor: float
    loss_scale: float = 1.0
    """Loss factor for the backward pass (fp16)."""
    comparison: Comparison | None = None
    """Preference-training data, on the last stage."""
    routed: Routed | None = None
    """Data for router losses, on every stage."""
    weights: torch.Tensor | None = None
    """Weights of the targets (fp32), on the last stage; None if all weights are equal."""
    host_positions: torch.Tensor | None = None

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """Slices of the tensors' rows, one per micro-batch."""
        return tuple(slice(end - size, end) for size, end in zip(self.sizes, accumulate(self.sizes), strict=True))

    def tokens_of(self, index: int) -> torch.Tensor:
        """Return the tokens of a micro-batch; only on a first stage."""
        assert self.tokens is not None
        return self.tokens[self.rows[index]]

    def targets_of(self, index: int) -> torch.Tensor | None:
        return None if self.targets is None else self.targets[self.rows[index]]

    def micro_batch(self, index: int) -> MicroBatch:
        data = self.positions, self.comparison, self.routed, None, self.weights, self.host_positions
        share = MicroBatch(index, self.step, self.first_samples[index], self.divisor, *data)
        return share.of_rows(self.rows[index])
