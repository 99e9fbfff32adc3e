"""A step's batch: its sequences, the answers that it compares, and which samples they are.

The samples of a step are a function of the step alone, so that a resumed run needs no state to go on.
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
"""Target where nothing is to be learnt (padding, prompts); the value that torch's cross-entropy ignores."""

PADDED_TO = 8
"""Lengths of trimmed batches are multiples of this: matrix units like it, and fewer lengths occur."""


@dataclass(frozen=True)
class Compared:
    """The answers that a batch of preferences compares. Of pairs records alternate within a row: chosen, rejected."""

    answers: npt.NDArray[np.uint8]
    """[B, T], above 0 where the target belongs to an answer that is compared: 1 in a pair; by itself 2 (desirable) or 3 (not)."""
    reference: npt.NDArray[np.float32]
    """[B, R], of each record: the log-likelihood of its answer by the reference model."""
    chosen: int
    """Chosen, or desirable, answers of the whole batch."""
    rejected: int
    count: int
    """Pairs, or answers by themselves, of the whole batch: what the summed loss is divided by."""
    likelihood_weight: float
    """Pairs of the whole batch by targets of its chosen records."""
    point: float | None = None
    """KTO's reference point: how much likelier the model finds answers of other prompts than the reference does, or 0."""

    @classmethod
    def of(cls, batch: Batch, answers: npt.NDArray[np.uint8], reference: npt.NDArray[np.float32]) -> Compared:
        """The answers of a whole batch, which has positions."""
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
    """The weights of a batch's targets in the loss, which is their weighted sum by the sum of the weights of the whole batch."""

    weights: npt.NDArray[np.float32]
    """[B, T]."""
    together: float
    """The sum, over the targets of the whole batch that count."""

    @classmethod
    def of(cls, targets: Tokens, weights: npt.NDArray[np.float32]) -> Weighed:
        """``targets``: of the whole batch."""
        return cls(weights, float(weights.sum(where=targets != IGNORED, dtype=np.float64)))


@dataclass(frozen=True)
class Batch:
    """Sequences of one step or evaluation, int32 [B, T]; ``targets[b, t]`` follows ``tokens[b, t]``, or is -100."""

    tokens: Tokens
    targets: Tokens
    target_tokens: int
    """Number of targets that count."""
    positions: Tokens | None = None
    """[B, T]: each token's place in its own record, which sees no other one of its sequence. None: a sequence is one text."""
    compared: Compared | None = None
    """None: it is no batch of preferences."""
    numbers: Indices | None = None
    """[B], of the rows in their dataset, where it is one of preferences."""
    weighed: Weighed | None = None
    """None: all targets count alike."""

    @property
    def divisor(self) -> float:
        """Divisor of the summed loss: the targets that count, or their weights, or the pairs or answers that are compared."""
        if self.weighed is not None:
            return self.weighed.together or 1.0
        return max(1, self.target_tokens if self.compared is None else self.compared.count)

    @property
    def lengths(self) -> Indices:
        """[B]: each row's tokens up to the last after which something is learnt; 0 where nothing is. Of preferences also the
        answer's own last token, which TRL gives to the routers, too."""
        learnt = self.targets[:, ::-1] != IGNORED
        ends = learnt.shape[1] - learnt.argmax(axis=1) + (self.compared is not None)
        return np.where(learnt.any(axis=1), np.minimum(ends, learnt.shape[1]), 0)

    def rows(self, chosen: Sequence[int]) -> Batch:
        """A copy of some of the sequences. What the loss is divided by stays that of all."""
        index = np.array(chosen, np.intp)
        positions = None if self.positions is None else self.positions[index]
        compared = None if self.compared is None else self.compared.rows(index)
        weighed = self.weighed and replace(self.weighed, weights=self.weighed.weights[index])
        return Batch(self.tokens[index], self.targets[index], self.target_tokens, positions, compared, None, weighed)

    def trimmed(self, multiple: int = PADDED_TO) -> Batch:
        """Without the last columns, in which no row learns anything, but for as many as make the length a ``multiple``.

        What is left out comes after everything that is learnt, and a causal model does not look ahead: the loss is the same.
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
    """Answers of each row, [N]: every record has one, and a prompt before it. ``answers``: [N, T], not 0 in them."""
    begun = np.diff((answers != 0).astype(np.int8), axis=1, prepend=0) > 0
    return np.asarray(begun.sum(axis=1))


Parts = tuple[tuple[int, int], ...]
"""For each data set (samples that it has, samples that an epoch takes from it)."""


def steps_per_epoch(samples: int, global_batch: int, smaller: bool) -> float:
    """``smaller``: as in ``batch_indices``."""
    return -(-samples // global_batch) if smaller else samples / global_batch


def batch_indices(
    step: int, global_batch: int, samples: int, seed: int, parts: Parts = (), stream: int = 0, smaller: bool = False
) -> Indices:
    """The samples of one step, int64 [global_batch]: ``global_batch`` positions of an endless stream of epochs.

    ``step`` counts from 0 (the number of steps already done). Each epoch is a permutation of its own, every sample
    once, so that a batch may end one epoch and begin the next::

        samples = 5, global_batch = 3      epoch 0      | epoch 1
        stream                             3 0 4  1 2   | 4  0 2 1 ...
        step                               0      1          2

    ``parts``: the samples are those of several data sets, one set after the other, and an epoch takes from each its number,
    which all together are ``samples``. ``stream``: key of the first epoch's permutation. ``smaller``: no batch
    begins the next epoch, and an epoch's last one has what is left.
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
        here = epochs == epoch
        order = _mixed(parts, seed, int(epoch)) if parts else permutation(samples, seed, stream + int(epoch))
        indices[here] = order[offsets[here]]
    return indices


def parts_of(sizes: Sequence[int], weights: Sequence[float]) -> Parts:
    """Samples that an epoch takes from data sets of these sizes: as many samples as they have together, shared out by weight.

    Rounded down, and the rest given to the largest remainders. A share may be 0.
    """
    total = sum(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    takes = [int(share) for share in exact]
    for number in sorted(range(len(takes)), key=lambda number: takes[number] - exact[number])[: total - sum(takes)]:
        takes[number] += 1
    return tuple(zip(sizes, takes, strict=True))


@functools.lru_cache(maxsize=2)
def _mixed(parts: Parts, seed: int, epoch: int) -> Indices:
    """The samples of one epoch in their order: each data set goes on in an endless stream of its own, where the last epoch stopped.

    So a set that gives more than it has repeats itself, and one that gives less gives other samples in the next epoch.
    """
    chosen, first = [], 0
    for number, (size, take) in enumerate(parts, start=1):
        chosen.append(first + batch_indices(epoch, take, size, seed, stream=number << 48))
        first += size
    together = np.concatenate(chosen)
    return together[permutation(len(together), seed, epoch)]


@functools.lru_cache(maxsize=2)
def permutation(samples: int, seed: int, stream: int) -> Indices:
    """A permutation of ``range(samples)`` keyed by (seed, stream), int64 [samples], read-only.

    Sorts Philox's raw output (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) instead of calling
    ``Generator.permutation``, whose results may change between numpy versions: a resumed run must see the same order.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(samples), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
