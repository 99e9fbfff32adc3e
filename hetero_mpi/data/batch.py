"""Batches of sequences, the answers that preference losses compare, and the selection of samples for each step.

The samples of a step depend only on the step number and the seed, so a resumed run needs no data-loader state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
IGNORED = -100
"""Target of tokens that are excluded from the loss (padding, prompts); the value that torch's cross-entropy ignores."""

PAD_MULTIPLE_TOKENS = 8
"""Lengths of trimmed batches are multiples of this value, which suits matrix units and limits the number of distinct shapes."""


@dataclass(frozen=True)
class Compared:
    """The answers that a preference loss compares. In rows of pairs, chosen and rejected records alternate."""

    answers: npt.NDArray[np.uint8]
    """[B, T]: nonzero where the target belongs to a compared answer: 1 paired, 2 desirable (unpaired), 3 undesirable (unpaired)."""
    reference: npt.NDArray[np.float32]
    """[B, R]: log-probability of each record's answer under the reference model."""
    chosen: int
    """Number of chosen or desirable answers in the batch."""
    rejected: int
    count: int
    """Number of pairs, or of unpaired answers, in the batch; the summed loss is divided by it."""
    likelihood_weight: float
    """Number of pairs in the batch divided by the number of targets in chosen records."""
    point: float | None = None
    """KTO's reference point: mean log-ratio of model to reference over mismatched answers, clamped to at least 0."""

    @classmethod
    def from_batch(cls, batch: Batch, answers: npt.NDArray[np.uint8], reference: npt.NDArray[np.float32]) -> Compared:
        """Count the compared answers of a complete batch. The batch must include positions."""
        assert batch.positions is not None
        of_chosen = ((batch.positions == 0).cumsum(axis=1) % 2 == 1) & (batch.targets != IGNORED)
        in_pairs, good, bad = (int(answer_counts(answers == mark).sum()) for mark in (1, 2, 3))
        chosen, rejected = good + in_pairs // 2, bad + in_pairs // 2
        count, weight = good + bad + in_pairs // 2, chosen / max(1, int(of_chosen.sum()))
        return cls(answers, reference, chosen, rejected, count, weight)

    def rows(self, index: npt.NDArray[np.intp]) -> Compared:
        return replace(self, answers=self.answers[index], reference=self.reference[index])


@dataclass(frozen=True)
class Weighed:
    """Loss weights of a batch's targets. The batch loss is the weighted mean of the losses of its targets."""

    weights: npt.NDArray[np.float32]
    """[B, T]."""
    together: float
    """Sum of the weights over all targets of the batch that are not ignored."""

    @classmethod
    def from_batch(cls, targets: Tokens, weights: npt.NDArray[np.float32]) -> Weighed:
        """Sum the ``weights`` of a complete batch over the ``targets`` that are not ignored."""
        return cls(weights, float(weights.sum(where=targets != IGNORED, dtype=np.float64)))


@dataclass(frozen=True)
class Batch:
    """Sequences of a training or evaluation step, int32 [B, T]; ``targets[b, t]`` is the token after ``tokens[b, t]``, or -100."""

    tokens: Tokens
    targets: Tokens
    target_tokens: int
    """Number of targets that are not ignored."""
    positions: Tokens | None = None
    """[B, T]: each token's position in its record; attention does not cross records. None if each row is one sequence."""
    compared: Compared | None = None
    """The compared answers in preference training, else None."""
    numbers: Indices | None = None
    """[B]: row numbers in the dataset in preference training, else None."""
    weighed: Weighed | None = None
    """Loss weights; None if all targets have weight 1."""

    @property
    def divisor(self) -> float:
        """Divisor of the summed loss: the number of targets, the sum of their weights, or the number of pairs or answers."""
        if self.weighed is not None:
            return self.weighed.together or 1.0
        return max(1, self.target_tokens if self.compared is None else self.compared.count)

    @property
    def lengths(self) -> Indices:
        """[B]: length of each row up to its last target (one more in preference training, as in TRL); 0 if it has no target."""
        learnt = self.targets[:, ::-1] != IGNORED
        ends = learnt.shape[1] - learnt.argmax(axis=1) + (self.compared is not None)
        return np.where(learnt.any(axis=1), np.minimum(ends, learnt.shape[1]), 0)

    def rows(self, numbers: Sequence[int]) -> Batch:
        """Copy the rows at the given indices. The loss divisor remains that of the full batch."""
        index = np.array(numbers, np.intp)
        positions = None if self.positions is None else self.positions[index]
        compared = None if self.compared is None else self.compared.rows(index)
        weighed = self.weighed and replace(self.weighed, weights=self.weighed.weights[index])
        return Batch(self.tokens[index], self.targets[index], self.target_tokens, positions, compared, None, weighed)

    def trimmed(self, multiple: int = PAD_MULTIPLE_TOKENS) -> Batch:
        """Drop trailing columns that hold no targets, keeping the length a multiple of ``multiple``.

        The loss is unchanged, because all dropped tokens come after the last target and the model is causal.
        """
        used = np.flatnonzero((self.targets != IGNORED).any(axis=0))
        used = used[-1:] + 1 + (self.compared is not None)
        length = multiple * (-(-int(used[-1]) // multiple)) if len(used) else multiple
        positions = None if self.positions is None else self.positions[:, :length]
        compared = None if self.compared is None else replace(self.compared, answers=self.compared.answers[:, :length])
        tokens, targets = self.tokens[:, :length], self.targets[:, :length]
        weighed = self.weighed and replace(self.weighed, weights=self.weighed.weights[:, :length])
        return Batch(tokens, targets, self.target_tokens, positions, compared, None, weighed)


def answer_counts(answers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Count the answers in each row, one per record: [N]. ``answers`` [N, T] is nonzero within an answer."""
    starts = np.diff((answers != 0).astype(np.int8), axis=1, prepend=0) > 0
    return np.asarray(starts.sum(axis=1))


Parts = tuple[tuple[int, int], ...]
"""For each dataset: (samples in the dataset, samples drawn from it per epoch)."""


def steps_per_epoch(samples: int, global_batch: int, smaller: bool) -> float:
    """Return the number of steps per epoch; ``smaller`` as in ``batch_indices``."""
    return -(-samples // global_batch) if smaller else samples / global_batch


def batch_indices(
    step: int, global_batch: int, samples: int, seed: int, parts: Parts = (), stream: int = 0, smaller: bool = False
) -> Indices:
    """Return the sample numbers of one step, int64 [global_batch]: the next slice of an endless stream of epochs.

    ``step`` is the number of completed steps. Each epoch is a different permutation of all samples, and a batch may span the
    end of one epoch and the start of the next::

        samples = 5, global_batch = 3      epoch 0      | epoch 1
        stream                             3 0 4  1 2   | 4  0 2 1 ...
        step                               0      1          2

    Args:
        parts: sizes of several datasets that are stored one after the other, and the samples that an epoch draws from each,
            ``samples`` in total.
        stream: random key of the first epoch's permutation.
        smaller: whether batches end at epoch boundaries, so that the last batch of an epoch may be smaller.
    """
    first, end = step * global_batch, (step + 1) * global_batch
    if smaller:
        epoch, number = divmod(step, -(-samples // global_batch))
        first = epoch * samples + number * global_batch
        end = min(first + global_batch, (epoch + 1) * samples)
    positions = np.arange(first, end, dtype=np.int64)
    epochs, offsets = np.divmod(positions, samples)
    indices = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        order = _mixed_epoch(parts, seed, int(epoch)) if parts else permutation(samples, seed, stream + int(epoch))
        indices[in_epoch] = order[offsets[in_epoch]]
    return indices


def parts_of(sizes: Sequence[int], weights: Sequence[float]) -> Parts:
    """Distribute the samples of an epoch (the sum of ``sizes``) over datasets in proportion to their weights.

    Shares are rounded down, and the remainder goes to the datasets with the largest fractions. A share may be 0.
    """
    total = sum(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    takes = [int(share) for share in exact]
    for number in sorted(range(len(takes)), key=lambda number: takes[number] - exact[number])[: total - sum(takes)]:
        takes[number] += 1
    return tuple(zip(sizes, takes, strict=True))


@functools.lru_cache(maxsize=2)
def _mixed_epoch(parts: Parts, seed: int, epoch: int) -> Indices:
    """Return the samples of one mixed epoch. Each dataset resumes its own endless stream where the previous epoch stopped.

    A dataset that contributes more samples than it has repeats some of them; one that contributes fewer takes several epochs.
    """
    indices_by_set, first = [], 0
    for number, (size, count) in enumerate(parts, start=1):
        indices_by_set.append(first + batch_indices(epoch, count, size, seed, stream=number << 48))
        first += size
    indices = np.concatenate(indices_by_set)
    return indices[permutation(len(indices), seed, epoch)]


@functools.lru_cache(maxsize=2)
def permutation(samples: int, seed: int, stream: int) -> Indices:
    """Return a read-only permutation of ``range(samples)`` keyed by (seed, stream), int64 [samples].

    It sorts Philox's raw output (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), because
    ``Generator.permutation`` may change between numpy versions and a resumed run must see the same order.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(samples), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
