"""The data that a run learns from, on rank 0 only: sequences of tokens with their targets, or the samples of a user's own data.
Both are shared out to what is learnt from and what is held out. Arrays may lie in mapped files, and are then looked at in parts.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Iterator, Sequence
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
from hetero_mpi.util.errors import UserError

HELD_OUT_STREAM = 2**64 - 1
"""Key of the held-out split; epochs count from 0 and never get here."""
Array = npt.NDArray[Any]
_PART_BYTES = 16_000_000
_LOOKED_AT = 64
"""Samples whose content tells whether a resumed run goes on with the same data."""


@dataclass(frozen=True)
class SequenceSettings:
    """How sequences are cut and shared out: the job's keys, for text and for records. The split is a function of (seed, number of
    sequences).
    """

    length: int
    """Tokens."""
    packing: bool
    """Are documents, or records, joined to full sequences?"""
    held_out: float
    """Share of the sequences that is never learnt from; 0 where other data evaluate."""
    seed: int


@dataclass(frozen=True)
class Rows:
    """Sequences. ``tokens`` and ``targets``: int32 [N, T]."""

    tokens: Tokens
    targets: Tokens
    found: str = ""
    """Their sources, for messages: ``812 tokens in 4 documents``."""
    notes: tuple[str, ...] = ()
    """Remarks for a person, such as how many documents were too short."""
    positions: Tokens | None = None
    """int32 [N, T]; see ``Batch``."""
    answers: npt.NDArray[np.uint8] | None = None
    """[N, T], of preferences; see ``Compared``."""
    weights: npt.NDArray[np.float32] | None = None
    """[N, T], of the targets in the loss; None: all are 1."""
    lanes: int = 1
    """2: behind each row comes one with its prompts and the answers of other records, by which KTO finds its reference point."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Rows):
    """All sequences of a job, shared out."""

    train: Indices
    """Sequences to learn from, ascending."""
    held_out: Indices
    """Sequences that measure the evaluation loss, shuffled: any first few of them sample the whole corpus."""
    seed: int
    parts: Parts = ()
    """Samples that an epoch takes from each data set, where several are mixed by weights in ``train``."""
    known_fingerprint: str = ""
    """Where it was computed before."""

    def batch(self, step: int, global_batch: int, smaller: bool = False) -> Batch:
        """The training batch of ``step`` (from 0), a function of its arguments and the seed only. ``smaller``: an epoch's last
        one has what is left."""
        return self.gather(self.numbers(step, global_batch, smaller))

    def numbers(self, step: int, global_batch: int, smaller: bool = False) -> Indices:
        """The rows of the training batch of ``step``."""
        return self.train[batch_indices(step, global_batch, len(self.train), self.seed, self.parts, smaller=smaller)]

    def held_out_batches(self, batch: int, limit: int | None = None) -> Iterator[Batch]:
        """The first ``limit`` held-out sequences, ``batch`` at a time (fewer in the last), always the same ones."""
        chosen = self.held_out[:limit]
        for first in range(0, len(chosen), batch):
            yield self.gather(chosen[first : first + batch])

    def unigram_entropy(self) -> float | None:
        """Entropy of the training targets' frequencies, nats per token: the loss of a model that knows only these.

        None: the loss is one of preferences.
        """
        if self.answers is not None:
            return None
        own = np.zeros(len(self.targets), np.bool_)
        own[self.train] = True
        counts = np.zeros(0, np.int64)
        for first, part in parts_of_rows(self.targets):
            targets = part[own[first : first + len(part)]]
            more = np.bincount(targets[targets != IGNORED], minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        shares_of = counts[counts > 0] / counts.sum()
        return float(-(shares_of * np.log(shares_of)).sum())

    @functools.cached_property
    def records_per_row(self) -> int:
        """Records R that are compared in a row at most."""
        assert self.answers is not None
        return int(answer_counts(self.answers).max())

    @property
    def padded(self) -> bool:
        """True: a row goes on after its last target."""
        return any((part[:, -1] == IGNORED).any() for _, part in parts_of_rows(self.targets))

    def placed(self) -> Dataset:
        """With positions where it has none: each row is one text up to its last target, and what is behind that another one."""
        if self.positions is not None or not self.padded:
            return self
        lengths = Batch(self.tokens, self.targets, 0).lengths[:, None]
        places = np.arange(self.tokens.shape[1], dtype=np.int32)
        return replace(self, positions=np.where(places < lengths, places, places - lengths).astype(np.int32))

    def fingerprint(self) -> str:
        """Equal when the sequences and their shares are: a resumed run must go on with the data it began with."""
        if self.known_fingerprint:
            return self.known_fingerprint
        digest = hashlib.blake2b(digest_size=16)
        further = (array for array in (self.positions, self.answers, self.weights) if array is not None)
        for array in (self.tokens, self.targets, self.train, self.held_out, *further):
            digest.update(repr(array.shape).encode())
            for _, part in parts_of_rows(array):
                digest.update(np.ascontiguousarray(part).data)
        if self.parts:
            digest.update(repr(self.parts).encode())
        return digest.hexdigest()

    def gather(self, chosen: Indices) -> Batch:
        """The rows of these numbers."""
        targets = self.targets[chosen]
        positions = None if self.positions is None else self.positions[chosen]
        weights = None if self.weights is None else Weighed.of(targets, self.weights[chosen])
        count = int(np.count_nonzero(targets != IGNORED))
        batch = Batch(self.tokens[chosen], targets, count, positions, weighed=weights)
        if self.answers is None:
            return batch
        reference = np.zeros((len(chosen), self.records_per_row), np.float32)
        return replace(batch, compared=Compared.of(batch, self.answers[chosen], reference), numbers=chosen)


def share_out(rows: Rows, settings: SequenceSettings, what: str, advice: str) -> Dataset:
    """The dataset of which a share of the sequences is held out.

    Raises UserError when there are too few, which names ``what`` (the text, the records) and gives the advice.
    """
    share = ", one to train on and one held out (data.held_out)" if settings.held_out > 0 else ""
    _require(rows, 2 if settings.held_out > 0 else 1, what, share, advice)
    train, aside = shares(len(rows.tokens) // rows.lanes, settings.held_out, settings.seed)
    return Dataset(**vars(rows), train=rows.lanes * train, held_out=rows.lanes * aside, seed=settings.seed)


def shares(count: int, held_out: float, seed: int) -> tuple[Indices, Indices]:
    """(what of ``count`` samples is learnt from, ascending; what is held out, shuffled: one at least where ``held_out`` > 0)."""
    aside = min(max(1, round(held_out * count)), count - 1) if held_out > 0 else 0
    shuffled = permutation(count, seed, HELD_OUT_STREAM)
    return np.sort(shuffled[aside:]), shuffled[:aside]


def _columns(tables: Sequence[Rows], folder: Path | None = None) -> dict[str, Any]:
    """The columns that all of them have, one table after the other; in files of ``folder`` where they were in files. Weights are 1
    where others have some."""
    found: dict[str, Any] = {}
    if any(table.weights is not None for table in tables):
        ones = [
            np.ones(table.targets.shape, np.float32) if table.weights is None else table.weights for table in tables
        ]
        tables = [replace(table, weights=own) for table, own in zip(tables, ones, strict=True)]
    for name in ("tokens", "targets", "positions", "answers", "weights"):
        columns = [getattr(table, name) for table in tables]
        if any(column is None for column in columns):
            found[name] = None
        else:
            found[name] = np.concatenate(columns) if folder is None else joined(columns, folder / f"{name}.npy")
    return found


def mix(sources: Sequence[tuple[str, Dataset]], weights: Sequence[float], seed: int) -> Dataset:
    """One dataset of several named ones: an epoch has as many sequences as all have to train on, and takes from each its weight's
    share. What they hold out is held out.

    Raises UserError when a weight is so small that an epoch takes nothing.
    """
    sets = [dataset for _, dataset in sources]
    parts = parts_of([len(dataset.train) for dataset in sets], weights)
    count, notes = sum(take for _, take in parts), [note for dataset in sets for note in dataset.notes]
    for (name, _), weight, (size, take) in zip(sources, weights, parts, strict=True):
        if not take:
            raise UserError(
                "data.weights",
                f"data.weights: {name} gives none of the {count:,} sequences of an epoch with its weight {weight:g} of "
                f"{sum(weights):g}. Raise it, or take the data set out",
            )
        notes.append(
            f"{name}: {take:,} of the {count:,} sequences of an epoch (weight {weight:g} of {sum(weights):g}), from {size:,}: "
            f"each {take / size:.3g} times"
        )
    offsets = np.cumsum([0, *(len(dataset.tokens) for dataset in sets[:-1])])
    held_out = np.concatenate([first + dataset.held_out for first, dataset in zip(offsets, sets, strict=True)])
    return Dataset(
        **_columns(sets),
        notes=tuple(notes),
        train=np.concatenate([first + dataset.train for first, dataset in zip(offsets, sets, strict=True)]),
        held_out=held_out[permutation(len(held_out), seed, HELD_OUT_STREAM)],
        seed=seed,
        parts=parts,
    )


def join_evaluation(dataset: Dataset, evaluation: Rows, what: str, advice: str, folder: Path | None = None) -> Dataset:
    """The dataset, which holds nothing out, with ``evaluation`` to evaluate on. Raises as :func:`share_out`."""
    _require(evaluation, 1, f"{what} of data.evaluation", "", advice)
    count = len(evaluation.tokens) // evaluation.lanes
    return replace(
        dataset,
        **_columns([dataset, evaluation], folder),
        held_out=len(dataset.tokens) + evaluation.lanes * permutation(count, dataset.seed, HELD_OUT_STREAM),
        notes=(*dataset.notes, *(f"evaluation: {note}" for note in evaluation.notes)),
    )


def _require(rows: Rows, needed: int, what: str, share: str, advice: str) -> None:
    count, length = len(rows.tokens) // rows.lanes, rows.tokens.shape[1]
    if count < needed:
        raise UserError(
            "data.too_few_sequences",
            f"{what} must give at least {needed} sequence(s) of {length} tokens{share}; it gives {count}, from "
            f"{rows.found}. {advice}",
        )


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
                "samples.too_few",
                f"the factory's data has {count} samples; it needs one to train on, and one to hold out unless data.held_out = 0 "
                f"or the factory gives evaluation data",
            )
        self.train, self.held_out = shares(count, held_out if evaluation is None else 0, seed)
        if evaluation is not None:
            self.held_out = permutation(len(evaluation), seed, HELD_OUT_STREAM)

    def first(self) -> list[Array]:
        """[input, target] of one sample."""
        return list(pair(self._data, 0))

    def batch(self, step: int, global_batch: int, smaller: bool = False) -> Batch:
        chosen = self.train[batch_indices(step, global_batch, len(self.train), self._seed, smaller=smaller)]
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
        """A hash of the numbers of samples, and the content of some of them: all may be more than can be read."""
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


def pair(source: Sequence[Any], number: int) -> tuple[Array, Array]:
    """A sample as two arrays.

    :raises UserError: it is none.
    """
    sample = source[number]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise UserError(
            "samples.not_a_pair", f"a sample is a pair (input, target); number {number} is a {type(sample).__name__}"
        )
    found = np.asarray(sample[0]), np.asarray(sample[1])
    for what, array in zip(("input", "target"), found, strict=True):
        if array.dtype.kind not in "biuf":
            raise UserError(
                "samples.not_numbers",
                f"a sample's {what} is an array of numbers; that of number {number} is a {type(sample[0]).__name__} "
                f"({array.dtype})",
            )
    return found


def _gather(source: Sequence[Any], chosen: Indices) -> Batch:
    pairs = [pair(source, int(number)) for number in chosen]
    for what, arrays in zip(("input", "target"), zip(*pairs, strict=True), strict=True):
        for number, array in zip(chosen, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise UserError(
                    "samples.shapes",
                    f"all samples have one shape: the {what} of number {int(chosen[0])} is {arrays[0].shape}, that of number "
                    f"{int(number)} is {array.shape}; crop or pad them in the factory's data",
                )
    return Batch(np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs]), len(pairs))


def mapped(path: Path) -> Array:
    """The array of a ``.npy`` file, or else a file of int32 numbers; read-only."""
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)
    return np.memmap(path, np.int32, "r") if path.stat().st_size else np.empty(0, np.int32)


def parts_of_rows(array: Array) -> Iterator[tuple[int, Array]]:
    """The array in runs of rows: (number of the first, the rows). Of a mapped one, memory holds one run at a time."""
    rows = max(1, _PART_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), rows):
        yield first, array[first : first + rows]
        _release(array)


def joined(arrays: Sequence[Array], path: Path) -> Array:
    """The arrays one after the other; in a new file ``path`` (``.npy``) if one of them is mapped."""
    if all(_mapping(array) is None for array in arrays):
        return np.concatenate(arrays)
    shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
    whole, place = np.lib.format.open_memmap(path, "w+", arrays[0].dtype, shape), 0
    for array in arrays:
        for _, part in parts_of_rows(array):
            whole[place : place + len(part)] = part
            place += len(part)
            _release(whole)
    whole.flush()
    return mapped(path)


def _release(array: Array) -> None:
    mapping = _mapping(array)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapped file behind an array or a view of one."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array
