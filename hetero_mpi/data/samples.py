"""What a run learns from: sequences of text (``sequences.Dataset``), or the samples of a user's own data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.data.batch import Batch, Indices
from hetero_mpi.data.order import batch_indices, permutation
from hetero_mpi.data.sequences import HELD_OUT_STREAM, Dataset, shares
from hetero_mpi.errors import UserError

_LOOKED_AT = 64
"""Samples whose content tells whether a resumed run goes on with the same data."""


class Samples:
    """Samples (input, target) by number. A batch's ``tokens`` are the inputs (B, ...), its ``targets`` (B, ...).

    ``data``: has a length, and gives under each number the pair (input, target): arrays, or what numpy makes one of.

    :raises UserError: there are too few.
    """

    def __init__(self, data: Sequence[Any], evaluation: Sequence[Any] | None, held_out: float, seed: int) -> None:
        self.notes: tuple[str, ...] = ()
        self._data, self._evaluation, self._seed = data, evaluation, seed
        count = len(data)
        if count < 1 or (held_out > 0 and evaluation is None and count < 2):
            raise UserError(
                f"the factory's data has {count} samples; it needs one to train on, and one to hold out unless data.held_out = 0 "
                f"or the factory gives evaluation data"
            )
        self.train, self.held_out = shares(count, held_out if evaluation is None else 0, seed)
        if evaluation is not None:
            self.held_out = permutation(len(evaluation), seed, HELD_OUT_STREAM)

    def first(self) -> list[NDArray[Any]]:
        """[input, target] of one sample."""
        return list(pair(self._data, 0))

    def batch(self, step: int, global_batch: int) -> Batch:
        chosen = self.train[batch_indices(step, global_batch, len(self.train), self._seed)]
        return _gather(self._data, chosen)

    def held_out_batches(self, batch: int, limit: int | None = None) -> Iterator[Batch]:
        source = self._data if self._evaluation is None else self._evaluation
        chosen = self.held_out[:limit]
        for first in range(0, len(chosen), batch):
            yield _gather(source, chosen[first : first + batch])

    def unigram_entropy(self) -> float | None:
        """None: how frequent targets are means nothing."""
        return None

    def fingerprint(self) -> str:
        """Of the numbers of samples, and the content of some of them: all may be more than can be read."""
        digest = hashlib.blake2b(digest_size=16)
        for source in (self._data, self._evaluation):
            count = len(source) if source is not None else -1
            digest.update(repr((count, self._seed, len(self.held_out))).encode())
            for number in sorted({i * (count - 1) // _LOOKED_AT for i in range(_LOOKED_AT + 1)} if count > 0 else ()):
                assert source is not None
                for array in pair(source, number):
                    digest.update(repr((array.dtype.str, array.shape)).encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


DataSource = Dataset | Samples
"""The data of a job, in batches. Only rank 0 has it."""


def pair(source: Sequence[Any], number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A sample as two arrays.

    :raises UserError: it is none.
    """
    sample = source[number]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise UserError(f"a sample is a pair (input, target); number {number} is a {type(sample).__name__}")
    found = np.asarray(sample[0]), np.asarray(sample[1])
    for what, array in zip(("input", "target"), found, strict=True):
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"a sample's {what} is an array of numbers; that of number {number} is a {type(sample[0]).__name__} ({array.dtype})"
            )
    return found


def _gather(source: Sequence[Any], chosen: Indices) -> Batch:
    pairs = [pair(source, int(number)) for number in chosen]
    for what, arrays in zip(("input", "target"), zip(*pairs, strict=True), strict=True):
        for number, array in zip(chosen, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise UserError(
                    f"all samples have one shape: the {what} of number {int(chosen[0])} is {arrays[0].shape}, that of number "
                    f"{int(number)} is {array.shape}; crop or pad them in the factory's data"
                )
    return Batch(np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs]), len(pairs))
