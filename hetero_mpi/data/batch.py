"""What a step computes on: the sequences of a batch, and the pairs of answers that it compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
IGNORED = -100
"""Target where nothing is to be learnt (padding, prompts); the value that torch's cross-entropy ignores."""

PADDED_TO = 8
"""Lengths of trimmed batches are multiples of this: matrix units like it, and fewer lengths occur."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of answers that a batch of preferences compares. Within a row records alternate: chosen, rejected."""

    answers: npt.NDArray[np.uint8]
    """[B, T], 1 where the target belongs to an answer that is compared."""
    reference: npt.NDArray[np.float32]
    """[B, K], of each pair: how much likelier the chosen answer is to the reference model, as a difference of logarithms."""
    count: int
    """Pairs of the whole batch: what the summed loss is divided by."""
    likelihood_weight: float
    """Pairs of the whole batch by targets of its chosen records."""

    @classmethod
    def of(cls, batch: Batch, answers: npt.NDArray[np.uint8], reference: npt.NDArray[np.float32]) -> Pairs:
        """The pairs of a whole batch, which has positions."""
        assert batch.positions is not None
        of_chosen = ((batch.positions == 0).cumsum(axis=1) % 2 == 1) & (batch.targets != IGNORED)
        count = int(pair_counts(answers).sum())
        return cls(answers, reference, count, count / max(1, int(of_chosen.sum())))

    def rows(self, index: npt.NDArray[np.intp]) -> Pairs:
        return replace(self, answers=self.answers[index], reference=self.reference[index])


@dataclass(frozen=True)
class Batch:
    """Sequences of one step or evaluation, int32 [B, T]; ``targets[b, t]`` follows ``tokens[b, t]``, or is -100."""

    tokens: Tokens
    targets: Tokens
    target_tokens: int
    """Number of targets that count."""
    positions: Tokens | None = None
    """[B, T]: each token's place in its own record, which sees no other one of its sequence. None: a sequence is one text."""
    pairs: Pairs | None = None
    """Of a batch of preferences."""
    numbers: Indices | None = None
    """[B], of the rows in their dataset, where it is one of preferences."""

    @property
    def divisor(self) -> int:
        """What the summed loss is divided by: the targets that count, or the pairs."""
        return max(1, self.target_tokens if self.pairs is None else self.pairs.count)

    @property
    def lengths(self) -> Indices:
        """[B]: each row's tokens up to the last after which something is learnt; 0 where nothing is."""
        learnt = self.targets[:, ::-1] != IGNORED
        return np.where(learnt.any(axis=1), learnt.shape[1] - learnt.argmax(axis=1), 0)

    def rows(self, chosen: Sequence[int]) -> Batch:
        """A copy of some of the sequences. What the loss is divided by stays that of all."""
        index = np.array(chosen, np.intp)
        positions = None if self.positions is None else self.positions[index]
        pairs = None if self.pairs is None else self.pairs.rows(index)
        return Batch(self.tokens[index], self.targets[index], self.target_tokens, positions, pairs)

    def trimmed(self, multiple: int = PADDED_TO) -> Batch:
        """Without the last columns, in which no row learns anything, but for as many as make the length a ``multiple``.

        What is left out comes after everything that is learnt, and a causal model does not look ahead: the loss is the same.
        """
        used = np.flatnonzero((self.targets != IGNORED).any(axis=0))
        length = multiple * (-(-(int(used[-1]) + 1) // multiple)) if len(used) else multiple
        positions = None if self.positions is None else self.positions[:, :length]
        pairs = None if self.pairs is None else replace(self.pairs, answers=self.pairs.answers[:, :length])
        return Batch(self.tokens[:, :length], self.targets[:, :length], self.target_tokens, positions, pairs)


def pair_counts(answers: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Pairs of each row, [N]: every record has one answer, and a prompt before it."""
    begun = np.diff(answers.astype(np.int8), axis=1, prepend=0) > 0
    return np.asarray(begun.sum(axis=1) // 2)
