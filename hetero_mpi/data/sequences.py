"""Documents -> token sequences with their targets, split into a training and a held-out share."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED, Batch, Indices, Pairs, Tokens, pair_counts
from hetero_mpi.data.documents import Corpus
from hetero_mpi.data.mapped import joined, mapped, parts_of_rows
from hetero_mpi.data.order import Parts, batch_indices, parts_of, permutation
from hetero_mpi.data.pieces import ids_of
from hetero_mpi.data.tokenizer import end_token, own_tokens_only, pad_token
from hetero_mpi.errors import UserError

STREAM = "stream.i32"
"""File of packed text: the tokens of all documents, int32."""
HELD_OUT_STREAM = 2**64 - 1
"""Key of the held-out split; epochs count from 0 and never get here."""


@dataclass(frozen=True)
class Rows:
    """Sequences. ``tokens`` and ``targets``: int32 [N, T]."""

    tokens: Tokens
    targets: Tokens
    found: str = ""
    """What they were made from, for messages: ``812 tokens in 4 documents``."""
    notes: tuple[str, ...] = ()
    """Remarks for a person, such as how many documents were too short."""
    positions: Tokens | None = None
    """int32 [N, T]; see ``Batch``."""
    answers: npt.NDArray[np.uint8] | None = None
    """[N, T], of preferences; see ``Pairs``."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Rows):
    """All sequences of a job, shared out."""

    train: Indices
    """Sequences to learn from, ascending."""
    held_out: Indices
    """Sequences that measure the evaluation loss, shuffled: any first few of them sample the whole corpus."""
    seed: int
    parts: Parts = ()
    """Of ``train``, where several data sets are mixed by weights: what an epoch takes from each."""
    known_fingerprint: str = ""
    """Where it was computed before."""

    def batch(self, step: int, global_batch: int) -> Batch:
        """The training batch of ``step`` (from 0), a function of its arguments and the seed only."""
        return self.gather(self.numbers(step, global_batch))

    def numbers(self, step: int, global_batch: int) -> Indices:
        """The rows of the training batch of ``step``."""
        return self.train[batch_indices(step, global_batch, len(self.train), self.seed, self.parts)]

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
        return unigram_entropy(part[own[first : first + len(part)]] for first, part in parts_of_rows(self.targets))

    @functools.cached_property
    def pairs_per_row(self) -> int:
        """Pairs K that a row holds at most."""
        assert self.answers is not None
        return int(pair_counts(self.answers).max())

    @property
    def padded(self) -> bool:
        """Does any row go on after its last target?"""
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
        further = (array for array in (self.positions, self.answers) if array is not None)
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
        batch = Batch(self.tokens[chosen], targets, int(np.count_nonzero(targets != IGNORED)), positions)
        if self.answers is None:
            return batch
        reference = np.zeros((len(chosen), self.pairs_per_row), np.float32)
        return replace(batch, pairs=Pairs.of(batch, self.answers[chosen], reference), numbers=chosen)


def build_sequences(
    documents: Corpus | Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    packing: bool,
    held_out: float,
    seed: int,
    evaluation: Corpus | Iterable[str] | None = None,
    folder: Path | None = None,
    tell: Callable[[int], None] | None = None,
) -> Dataset:
    """Tokenise the documents and cut them to sequences of ``sequence_length`` tokens; split off the held-out share.

    Each document ends with the tokenizer's end token. Packed, all are joined to one stream; sequence i holds its tokens
    [iT, iT + T) and the targets are one further, so that no token is lost between sequences. Otherwise each document is
    one sequence, cut or padded on the right, and documents of fewer than 2 tokens are dropped.

    The split is a function of (seed, number of sequences); ``evaluation`` documents take the place of the held-out
    share. ``folder``: packed text goes into files of it, and not into memory. ``tell``: is told now and then how many characters
    are done. Raises UserError when there is too little text for one training and (if ``held_out`` > 0) one held-out
    sequence, or when the tokenizer has no end token.
    """
    places = [folder / STREAM, folder / f"evaluation-{STREAM}"] if folder is not None else [None, None]
    rows = _text_rows(documents, tokenizer, sequence_length, packing, places[0], tell)
    advice = "Add text ({}) or lower data.sequence_length."
    own = advice.format("data.text, data.max_bytes")
    if evaluation is None:
        return share_out(rows, held_out, seed, "the text", own)
    other = _text_rows(evaluation, tokenizer, sequence_length, packing, places[1], tell)
    own_rows = share_out(rows, 0, seed, "the text", own)
    dataset = join_evaluation(own_rows, other, "the text", advice.format("data.evaluation"), folder)
    for place in filter(None, places):
        place.unlink(missing_ok=True)
    return dataset


def share_out(rows: Rows, held_out: float, seed: int, what: str, advice: str) -> Dataset:
    """The dataset of which ``held_out`` is a share of the sequences.

    Raises UserError when there are too few, which names ``what`` (the text, the records) and gives the advice.
    """
    needed = 2 if held_out > 0 else 1
    share = ", one to train on and one held out (data.held_out)" if held_out > 0 else ""
    _require(rows, needed, what, share, advice)
    train, aside = shares(len(rows.tokens), held_out, seed)
    return Dataset(**vars(rows), train=train, held_out=aside, seed=seed)


def shares(count: int, held_out: float, seed: int) -> tuple[Indices, Indices]:
    """(what of ``count`` samples is learnt from, ascending; what is held out, shuffled: one at least where ``held_out`` > 0)."""
    aside = min(max(1, round(held_out * count)), count - 1) if held_out > 0 else 0
    shuffled = permutation(count, seed, HELD_OUT_STREAM)
    return np.sort(shuffled[aside:]), shuffled[:aside]


def _columns(tables: Sequence[Rows], folder: Path | None = None) -> dict[str, Any]:
    """The columns that all of them have, one table after the other; in files of ``folder`` where they were in files."""
    found: dict[str, Any] = {}
    for name in ("tokens", "targets", "positions", "answers"):
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
                f"data.weights: {name} gives none of the {count:,} sequences of an epoch with its weight {weight:g} of "
                f"{sum(weights):g}. Raise it, or take the data set out"
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
    return replace(
        dataset,
        **_columns([dataset, evaluation], folder),
        held_out=len(dataset.tokens) + permutation(len(evaluation.tokens), dataset.seed, HELD_OUT_STREAM),
        notes=(*dataset.notes, *(f"evaluation: {note}" for note in evaluation.notes)),
    )


def _require(rows: Rows, needed: int, what: str, share: str, advice: str) -> None:
    count, length = rows.tokens.shape
    if count < needed:
        raise UserError(
            f"{what} must give at least {needed} sequence(s) of {length} tokens{share}; it gives {count}, from "
            f"{rows.found}. {advice}"
        )


def unigram_entropy(some: Iterable[Tokens]) -> float:
    """Entropy of the frequencies of the targets that count, in nats per token."""
    counts = np.zeros(0, np.int64)
    for targets in some:
        more = np.bincount(targets[targets != IGNORED], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _text_rows(
    documents: Corpus | Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    packing: bool,
    place: Path | None,
    tell: Callable[[int], None] | None,
) -> Rows:
    blocks = documents.blocks() if isinstance(documents, Corpus) else ((text, True) for text in documents)
    end = end_token(tokenizer)
    pieces = ids_of(blocks, own_tokens_only(tokenizer), tell)
    return _pack(pieces, end, length, place) if packing else _pad(pieces, end, pad_token(tokenizer), length)


def _pack(pieces: Iterable[tuple[Tokens, bool]], end: int, length: int, place: Path | None) -> Rows:
    """One stream of all documents, in a file ``place`` or in memory; tokens and targets are overlapping views of it."""
    documents = 0
    with io.BytesIO() if place is None else place.open("wb") as file:
        for ids, ends in pieces:
            file.write(ids.tobytes())
            if ends:
                file.write(np.int32(end).tobytes())
                documents += 1
        kept = file.getvalue() if isinstance(file, io.BytesIO) else b""
    stream = np.frombuffer(kept, np.int32) if place is None else mapped(place)
    return Rows(*overlapping(stream, length), f"{len(stream)} tokens in {documents} documents")


def overlapping(stream: Tokens, length: int) -> tuple[Tokens, Tokens]:
    """Tokens and targets [N, T] of one stream: sequence i holds tokens [iT, iT + T), and the targets are one further."""
    count = max(len(stream) - 1, 0) // length
    tokens = stream[: count * length].reshape(count, length)
    return tokens, stream[1 : count * length + 1].reshape(count, length) if count else tokens


def _pad(pieces: Iterable[tuple[Tokens, bool]], end: int, pad: int, length: int) -> Rows:
    """One document per row; a note says how many documents were too short."""
    parts: list[Tokens] = []
    dropped, begun = 0, np.empty(0, np.int32)
    for ids, ends in pieces:
        begun = np.concatenate([begun, ids[: length + 1]])
        if not ends:
            continue
        ids, begun = begun, begun[:0]
        if len(ids) < 2:
            dropped += 1
            continue
        parts.append(np.array([*ids[:length], ids[length] if len(ids) > length else end], dtype=np.int32))
    tokens = np.full((len(parts), length), pad, dtype=np.int32)
    targets = np.full((len(parts), length), IGNORED, dtype=np.int32)
    for row, part in enumerate(parts):
        tokens[row, : len(part) - 1] = part[:-1]
        targets[row, : len(part) - 1] = part[1:]
    notes = (f"{dropped:,} documents of fewer than 2 tokens dropped",) if dropped else ()
    return Rows(tokens, targets, f"{len(parts)} documents of at least 2 tokens", notes)
