"""Training data on rank 0: token sequences or samples of a user's own data, split into training and evaluation sets.

Arrays may be memory-mapped files and are therefore processed in blocks of rows.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_mpi.data.batch import (
    IGNORED,
    Batch,
    Compared,
    Indices,
    Parts,
    Tokens,
    Weighed,
    answer_counts,
    batch_indices,
    parts_of,
    permutation,
)
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

HELD_OUT_STREAM = 2**64 - 1
"""Random key of the evaluation split; the keys of epochs count from 0 and never reach it."""
Array = npt.NDArray[Any]
_PART_BYTES = 16_000_000
_MAX_HASHED = 64
"""Number of samples whose content is hashed to check that a resumed run uses the same data."""


@dataclass(frozen=True)
class SequenceSettings:
    """How text or records are cut into sequences and split. The split depends only on the seed and the number of sequences."""

    length: int
    """Tokens per sequence."""
    packing: bool
    """Whether to concatenate documents or records into full sequences."""
    held_out: float
    """Fraction of the sequences held out for evaluation; 0 if there is separate evaluation data."""
    seed: int


@dataclass(frozen=True)
class Rows:
    """Sequences of tokens and their targets, int32 [N, T]."""

    tokens: Tokens
    targets: Tokens
    source_counts: str = ""
    """Description of the source for messages, such as ``812 tokens in 4 documents``."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as the number of dropped documents."""
    positions: Tokens | None = None
    """int32 [N, T]; see ``Batch``."""
    answers: npt.NDArray[np.uint8] | None = None
    """[N, T] in preference training, else None; see ``Compared``."""
    weights: npt.NDArray[np.float32] | None = None
    """[N, T]: loss weights of the targets; None if all are 1."""
    lanes: int = 1
    """2 for KTO, where each row is followed by one with the same prompts and mismatched answers, for the reference point."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Rows):
    """All sequences of a job, split into a training and an evaluation set."""

    train: Indices
    """Row numbers of the training set, ascending."""
    held_out: Indices
    """Row numbers of the evaluation set, shuffled so that any prefix is a sample of the whole corpus."""
    seed: int
    parts: Parts = ()
    """If datasets are mixed by weight, the samples that an epoch takes from each."""
    known_fingerprint: str = ""
    """Fingerprint computed earlier; "" if it is not known."""

    def batch(self, step: int, global_batch: int, smaller: bool = False) -> Batch:
        """Return the batch of ``step`` (counted from 0). ``smaller`` allows a smaller last batch in each epoch."""
        return self.gather(self.numbers(step, global_batch, smaller))

    def numbers(self, step: int, global_batch: int, smaller: bool = False) -> Indices:
        """Return the row numbers of the training batch of ``step``."""
        return self.train[batch_indices(step, global_batch, len(self.train), self.seed, self.parts, smaller=smaller)]

    def held_out_batches(self, batch: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the first ``limit`` evaluation sequences in a fixed order, ``batch`` per batch (the last may be smaller)."""
        numbers = self.held_out[:limit]
        for first in range(0, len(numbers), batch):
            yield self.gather(numbers[first : first + batch])

    def unigram_entropy(self) -> float | None:
        """Return the entropy of the target distribution in nats per token, which is the loss of a unigram model.

        Returns None in preference training.
        """
        if self.answers is not None:
            return None
        is_training_row = np.zeros(len(self.targets), np.bool_)
        is_training_row[self.train] = True
        counts = np.zeros(0, np.int64)
        for first, part in parts_of_rows(self.targets):
            targets = part[is_training_row[first : first + len(part)]]
            block_counts = np.bincount(targets[targets != IGNORED], minlength=len(counts))
            block_counts[: len(counts)] += counts
            counts = block_counts
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    @functools.cached_property
    def records_per_row(self) -> int:
        """Maximum number R of compared records per row."""
        assert self.answers is not None
        return int(answer_counts(self.answers).max())

    @property
    def padded(self) -> bool:
        """Whether any row has padding after its last target."""
        return any((part[:, -1] == IGNORED).any() for _, part in parts_of_rows(self.targets))

    def placed(self) -> Dataset:
        """Add positions if any row is padded, so that attention treats a row's padding as a separate record."""
        if self.positions is not None or not self.padded:
            return self
        lengths = Batch(self.tokens, self.targets, 0).lengths[:, None]
        columns = np.arange(self.tokens.shape[1], dtype=np.int32)
        return replace(self, positions=np.where(columns < lengths, columns, columns - lengths).astype(np.int32))

    def fingerprint(self) -> str:
        """Hash the sequences and their split, to check that a resumed run continues with the same data."""
        if self.known_fingerprint:
            return self.known_fingerprint
        digest = hashlib.blake2b(digest_size=16)
        optional_arrays = (array for array in (self.positions, self.answers, self.weights) if array is not None)
        for array in (self.tokens, self.targets, self.train, self.held_out, *optional_arrays):
            digest.update(repr(array.shape).encode())
            for _, part in parts_of_rows(array):
                digest.update(np.ascontiguousarray(part).data)
        if self.parts:
            digest.update(repr(self.parts).encode())
        return digest.hexdigest()

    def gather(self, numbers: Indices) -> Batch:
        """Return a batch of the rows at the given indices."""
        targets = self.targets[numbers]
        positions = None if self.positions is None else self.positions[numbers]
        weights = None if self.weights is None else Weighed.from_batch(targets, self.weights[numbers])
        count = int(np.count_nonzero(targets != IGNORED))
        batch = Batch(self.tokens[numbers], targets, count, positions, weighed=weights)
        if self.answers is None:
            return batch
        reference = np.zeros((len(numbers), self.records_per_row), np.float32)
        return replace(batch, compared=Compared.from_batch(batch, self.answers[numbers], reference), numbers=numbers)


def share_out(rows: Rows, settings: SequenceSettings, what: str, advice: str) -> Dataset:
    """Split rows into training and evaluation sequences.

    Raises UserError if there are too few sequences; the message names ``what`` (the text, the records) and gives ``advice``.
    """
    share = ", one for training and one for evaluation (data.evaluation_fraction)" if settings.held_out > 0 else ""
    _require_sequences(rows, 2 if settings.held_out > 0 else 1, what, share, advice)
    train, held_out = shares(len(rows.tokens) // rows.lanes, settings.held_out, settings.seed)
    return Dataset(**vars(rows), train=rows.lanes * train, held_out=rows.lanes * held_out, seed=settings.seed)


def shares(count: int, held_out: float, seed: int) -> tuple[Indices, Indices]:
    """Split sample numbers into training (ascending) and evaluation (shuffled; at least one sample if ``held_out`` > 0)."""
    held_out_count = min(max(1, round(held_out * count)), count - 1) if held_out > 0 else 0
    shuffled = permutation(count, seed, HELD_OUT_STREAM)
    return np.sort(shuffled[held_out_count:]), shuffled[:held_out_count]


def _concatenate_columns(tables: Sequence[Rows], folder: Path | None = None) -> dict[str, Any]:
    """Concatenate the columns that all tables have, into files in ``folder`` if they are mapped. Missing weights become 1."""
    result: dict[str, Any] = {}
    if any(table.weights is not None for table in tables):
        ones = [
            np.ones(table.targets.shape, np.float32) if table.weights is None else table.weights for table in tables
        ]
        tables = [replace(table, weights=weights) for table, weights in zip(tables, ones, strict=True)]
    for name in ("tokens", "targets", "positions", "answers", "weights"):
        columns = [getattr(table, name) for table in tables]
        if any(column is None for column in columns):
            result[name] = None
        else:
            result[name] = np.concatenate(columns) if folder is None else joined(columns, folder / f"{name}.npy")
    return result


def mix(sources: Sequence[tuple[str, Dataset]], weights: Sequence[float], seed: int) -> Dataset:
    """Mix named datasets by weight. An epoch has as many sequences as all training sets together.

    The evaluation sets are joined. Raises UserError if a weight is so small that an epoch takes no sequence from its dataset.
    """
    sets = [dataset for _, dataset in sources]
    parts = parts_of([len(dataset.train) for dataset in sets], weights)
    count, notes = sum(take for _, take in parts), [note for dataset in sets for note in dataset.notes]
    for (name, _), weight, (size, take) in zip(sources, weights, parts, strict=True):
        if not take:
            raise UserError(
                "data.weights",
                f"data.weights: {name} contributes none of the {count:,} sequences of an epoch with its weight {weight:g} of "
                f"{sum(weights):g}. Raise the weight, or remove the dataset",
            )
        notes.append(
            f"{name}: {take:,} of the {count:,} sequences of an epoch (weight {weight:g} of {sum(weights):g}), from {size:,}: "
            f"each used {take / size:.3g} times"
        )
    offsets = np.cumsum([0, *(len(dataset.tokens) for dataset in sets[:-1])])
    held_out = np.concatenate([first + dataset.held_out for first, dataset in zip(offsets, sets, strict=True)])
    return Dataset(
        **_concatenate_columns(sets),
        notes=tuple(notes),
        train=np.concatenate([first + dataset.train for first, dataset in zip(offsets, sets, strict=True)]),
        held_out=held_out[permutation(len(held_out), seed, HELD_OUT_STREAM)],
        seed=seed,
        parts=parts,
    )


def join_evaluation(dataset: Dataset, evaluation: Rows, what: str, advice: str, folder: Path | None = None) -> Dataset:
    """Make ``evaluation`` the evaluation set of a dataset that has none. Raises UserError if there are too few sequences."""
    _require_sequences(evaluation, 1, f"{what} of data.evaluation", "", advice)
    count = len(evaluation.tokens) // evaluation.lanes
    return replace(
        dataset,
        **_concatenate_columns([dataset, evaluation], folder),
        held_out=len(dataset.tokens) + evaluation.lanes * permutation(count, dataset.seed, HELD_OUT_STREAM),
        notes=(*dataset.notes, *(f"evaluation: {note}" for note in evaluation.notes)),
    )


def _require_sequences(rows: Rows, min_sequences: int, what: str, share: str, advice: str) -> None:
    count, length = len(rows.tokens) // rows.lanes, rows.tokens.shape[1]
    if count < min_sequences:
        raise UserError(
            "data.too_few_sequences",
            f"{what} must fill at least {units.plural(min_sequences, 'sequence')} of {length} tokens{share}; there are only "
            f"{count}, from {rows.source_counts}. {advice}",
        )


class Samples:
    """Samples (input, target) of a user's own data. A batch holds the inputs [B, ...] as ``tokens``, the targets as ``targets``.

    ``data`` is a sequence of pairs (input, target) of arrays or array-likes. Raises UserError if there are too few samples.
    """

    def __init__(self, data: Sequence[Any], evaluation: Sequence[Any] | None, held_out: float, seed: int) -> None:
        self.notes: tuple[str, ...] = ()
        self._data, self._evaluation, self._seed = data, evaluation, seed
        count = len(data)
        if count < 1 or (held_out > 0 and evaluation is None and count < 2):
            raise UserError(
                "samples.too_few",
                f"the factory's data has {count} samples; at least one is needed for training and one for evaluation, "
                f"unless data.evaluation_fraction = 0 or the factory returns evaluation data",
            )
        self.train, self.held_out = shares(count, held_out if evaluation is None else 0, seed)
        if evaluation is not None:
            self.held_out = permutation(len(evaluation), seed, HELD_OUT_STREAM)
        self.shapes = [array.shape for array in self.first()]

    def first(self) -> list[Array]:
        """Return [input, target] of the first sample."""
        return list(pair(self._data, 0))

    def batch(self, step: int, global_batch: int, smaller: bool = False) -> Batch:
        numbers = self.train[batch_indices(step, global_batch, len(self.train), self._seed, smaller=smaller)]
        return gather_samples(self._data, numbers, self.shapes)

    def held_out_batches(self, batch: int, limit: int | None = None) -> Iterator[Batch]:
        source = self._data if self._evaluation is None else self._evaluation
        numbers = self.held_out[:limit]
        for first in range(0, len(numbers), batch):
            yield gather_samples(source, numbers[first : first + batch], self.shapes)

    def unigram_entropy(self) -> float | None:
        """Return None, since the targets need not be tokens."""
        return None

    def fingerprint(self) -> str:
        """Hash the sample counts and the content of a few samples, since reading all samples may be too expensive."""
        digest = hashlib.blake2b(digest_size=16)
        for source in (self._data, self._evaluation):
            count = len(source) if source is not None else -1
            digest.update(repr((count, self._seed, len(self.held_out))).encode())
            for number in sorted({i * (count - 1) // _MAX_HASHED for i in range(_MAX_HASHED + 1)} if count > 0 else ()):
                assert source is not None
                for array in pair(source, number):
                    digest.update(repr((array.dtype.str, array.shape)).encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


DataSource = Dataset | Samples
"""Training data of a job, served in batches. It exists on rank 0 only."""


def pair(source: Sequence[Any], number: int) -> tuple[Array, Array]:
    """Return a sample as two arrays. Raises UserError if it is not a pair of numeric arrays, or its input is not finite."""
    sample = source[number]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise UserError(
            "samples.not_a_pair", f"sample {number} must be a pair (input, target); it is a {type(sample).__name__}"
        )
    arrays = np.asarray(sample[0]), np.asarray(sample[1])
    for what, array in zip(("input", "target"), arrays, strict=True):
        if array.dtype.kind not in "biuf":
            raise UserError(
                "samples.not_numbers",
                f"a sample's {what} must be an array of numbers; the {what} of sample {number} is a {type(sample[0]).__name__} "
                f"({array.dtype})",
            )
    if not np.isfinite(arrays[0]).all():
        raise UserError(
            "samples.not_finite",
            f"the input of sample {number} contains NaN or infinite values; remove or replace them in the factory's data",
        )
    return arrays


def gather_samples(source: Sequence[Any], numbers: Iterable[int], shapes: Sequence[tuple[int, ...]]) -> Batch:
    """Return a batch of samples. Raises UserError if the shape of an input or target is not that of the first sample."""
    pairs = []
    for number in map(int, numbers):
        pairs.append(pair(source, number))
        for what, array, shape in zip(("input", "target"), pairs[-1], shapes, strict=True):
            if array.shape != shape:
                raise UserError(
                    "samples.shapes",
                    f"all samples must have the same shape: the {what} of sample 0 is {shape}, that of {number} is {array.shape}; "
                    f"crop or pad them in the factory's data",
                )
    return Batch(np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs]), len(pairs))


def mapped(path: Path) -> Array:
    """Memory-map a ``.npy`` file, or a file of raw int32 numbers, read-only."""
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)
    return np.memmap(path, np.int32, "r") if path.stat().st_size else np.empty(0, np.int32)


def parts_of_rows(array: Array) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first row, rows) in blocks, so that only one block of a mapped array is resident at a time."""
    rows = max(1, _PART_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), rows):
        yield first, array[first : first + rows]
        _release(array)


def joined(arrays: Sequence[Array], path: Path) -> Array:
    """Concatenate arrays, into a new memory-mapped file ``path`` (``.npy``) if at least one of them is mapped."""
    if all(_mapping(array) is None for array in arrays):
        return np.concatenate(arrays)
    shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
    target, row = np.lib.format.open_memmap(path, "w+", arrays[0].dtype, shape), 0
    for array in arrays:
        for _, part in parts_of_rows(array):
            target[row : row + len(part)] = part
            row += len(part)
            _release(target)
    target.flush()
    return mapped(path)


def _release(array: Array) -> None:
    mapping = _mapping(array)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(array: Any) -> mmap.mmap | None:
    """Return the memory map behind an array or view; None if it is not mapped."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array
