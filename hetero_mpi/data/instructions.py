"""Instruction records -> token sequences whose targets are the answers."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED, Tokens
from hetero_mpi.data.record_files import BadRecords
from hetero_mpi.data.records import Record
from hetero_mpi.data.sequences import Dataset, Rows, join_evaluation, mix, share_out
from hetero_mpi.data.template import Form, Tokenized, tokenize_records
from hetero_mpi.data.tokenizer import pad_token
from hetero_mpi.errors import UserError

ADVICE = "Add records ({}), lower data.sequence_length, or set data.packing = false."


def build_record_sequences(
    sources: Sequence[tuple[str, Iterable[Record]]],
    tokenizer: PreTrainedTokenizerFast,
    form: Form,
    sequence_length: int,
    packing: bool,
    held_out: float,
    seed: int,
    train_on_prompt: bool = False,
    evaluation: Iterable[Record] | None = None,
    isolate: bool = True,
    bad: BadRecords | None = None,
    preference: bool = False,
    weights: Sequence[float] | None = None,
    ends: Collection[int] = (),
) -> Dataset:
    """Sequences of ``sequence_length`` tokens from named sources of records; targets are the tokens of answers, or of everything,
    and -100 elsewhere.

    Packed, each sequence holds as many whole records as fit, in the order of the files::

        tokens   <user> Hi <answer> Hello <end> <user> Why ? <answer> So <end> <pad> <pad>
        targets   -100 -100  Hello  <end>  -100  -100 -100 -100  So  <end> -100  -100  -100
        positions   0    1     2      3     0     1    2    3     4    5    0     1     2

    The positions (only with ``isolate``) keep a record from seeing those before it. Otherwise each sequence holds one
    record. A record that is longer than a sequence is cut, and one that loses all of its answers by that is dropped; the
    notes count both. No record's first token is a target: nothing of its own stands before it. ``bad``: takes the records that
    cannot be rendered. ``weights``: the sources are mixed by these, and do not share sequences. ``ends``: tokens at which the model
    stops.

    With ``preference`` the records are pairs, chosen and rejected in turn, of which each stays in one sequence, isolated.

    The split is a function of (seed, number of sequences); ``evaluation`` records take the place of the held-out share.
    Raises UserError when no record keeps a target, when there are too few for the shares, when the tokenizer has no
    end token or its template fails.
    """

    def rows_of(some: Iterable[Record], key: str) -> Rows:
        tokenized, pad = tokenize_records(tokenizer, form, some, bad, ends), pad_token(tokenizer)
        return _rows(tokenized, sequence_length, packing, isolate, train_on_prompt, pad, key, preference)

    aside, advice = held_out if evaluation is None else 0, ADVICE.format("data.records")
    advice += " data.held_out = 0 holds nothing out." * (aside > 0)
    built = [(name, share_out(rows_of(records, name), aside, seed, name, advice)) for name, records in sources]
    if weights is not None:
        told = [(name, replace(one, notes=tuple(f"{name}: {note}" for note in one.notes))) for name, one in built]
        dataset = mix(told, weights, seed)
    else:
        ((_, dataset),) = built
    if evaluation is None:
        return dataset
    return join_evaluation(dataset, rows_of(evaluation, "data.evaluation"), "the records", ADVICE.format("any key"))


def _rows(
    tokenized: Iterable[Tokenized],
    length: int,
    packing: bool,
    isolate: bool,
    train_on_prompt: bool,
    pad: int,
    key: str,
    preference: bool,
) -> Rows:
    what = "pairs" if preference else "records"
    kept: list[tuple[_Part, ...]] = []
    longest, cut, forgotten, dropped = 0, 0, 0, []
    # A sequence of T inputs with targets one further is T + 1 tokens.
    for entry in _pairs(tokenized, length + 1) if preference else _singles(tokenized, length + 1, train_on_prompt):
        longest = max(longest, sum(part.uncut for part in entry))
        if not all(part.answer.any() for part in entry):
            dropped.append(entry[0].source)
            continue
        forgotten += any(part.forgotten for part in entry)
        cut += any(part.uncut > len(part.ids) for part in entry)
        kept.append(entry)
    if not kept and not dropped:
        raise UserError(f"{key} must hold records that can be learnt from; all were skipped (data.skip_bad).")
    if not kept:
        raise UserError(
            f"{key} must leave answers to learn; with data.sequence_length = {length} all {len(dropped):,} {what} are cut "
            f"before their first answer, such as {dropped[0]}. Raise data.sequence_length: the longest record has "
            f"{longest:,} tokens."
        )
    lengths = [sum(len(part.ids) for part in entry) for entry in kept]
    groups = pack(lengths, length + 1) if packing else [[index] for index in range(len(kept))]
    tokens = np.full((len(groups), length + 1), pad, dtype=np.int32)
    labels = np.full((len(groups), length + 1), IGNORED, dtype=np.int32)
    positions = np.zeros_like(tokens) if (packing and isolate) or preference else None
    answers = np.zeros(tokens.shape, np.uint8) if preference else None
    for row, group in enumerate(groups):
        parts = [part for index in group for part in kept[index]]
        ids_row = np.concatenate([part.ids for part in parts])
        tokens[row, : len(ids_row)] = ids_row
        labels[row, : len(ids_row)] = np.concatenate([part.labels for part in parts])
        if positions is not None:
            rest = length + 1 - len(ids_row)
            positions[row] = np.concatenate([np.arange(n) for n in (*(len(part.ids) for part in parts), rest)])
        if answers is not None:
            answers[row, : len(ids_row)] = np.concatenate([part.answer for part in parts])
    notes = _notes(what, lengths, int((labels != IGNORED).sum()), len(groups), cut, forgotten, dropped, length)
    places = None if positions is None else positions[:, :-1]
    compared = None if answers is None else answers[:, 1:]
    return Rows(tokens[:, :-1], labels[:, 1:], f"{len(kept)} {what}", notes, places, compared)


@dataclass(frozen=True)
class _Part:
    """A record in a sequence: its tokens, as far as they are kept; labels are what they are as targets."""

    ids: Tokens
    labels: Tokens
    answer: npt.NDArray[np.bool_]
    """Where the answers are that are learnt, or compared."""
    uncut: int
    """Tokens of the whole record."""
    forgotten: bool
    """Thoughts of its earlier answers are left out."""
    source: str


def _singles(tokenized: Iterable[Tokenized], capacity: int, train_on_prompt: bool) -> Iterator[tuple[_Part]]:
    for entry in tokenized:
        yield (_part(entry, capacity, entry.answer, entry.answer | (train_on_prompt & ~entry.never)),)


def _pairs(tokenized: Iterable[Tokenized], capacity: int) -> Iterator[tuple[_Part, _Part]]:
    """(chosen, rejected). Where both do not fit, the longer one is cut, down to half of the sequence before the other one is.

    All of a chosen record are targets, since ORPO learns its prompt, too, as TRL's does.
    """
    chosen: Tokenized | None = None
    for rejected in tokenized:
        if chosen is None or chosen.record.source != rejected.record.source:
            chosen = rejected  # the other one before it, if any, could not be rendered
            continue
        room = capacity - min(len(rejected.ids), capacity // 2)
        answers = [_last_run(entry.answer) for entry in (chosen, rejected)]
        first = _part(chosen, room, answers[0], np.ones_like(answers[0]))
        yield first, _part(rejected, capacity - len(first.ids), answers[1], answers[1])
        chosen = None


def _part(entry: Tokenized, room: int, answer: npt.NDArray[np.bool_], learnt: npt.NDArray[np.bool_]) -> _Part:
    ids, answer = entry.ids[:room], answer[:room].copy()
    labels = np.where(learnt[:room], ids, IGNORED).astype(np.int32)
    labels[:1], answer[:1] = IGNORED, False  # nothing of its own stands before the first token
    return _Part(ids, labels, answer, len(entry.ids), entry.forgotten, entry.record.source)


def _last_run(answer: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The last answer alone: those before it belong to the prompt."""
    before = np.flatnonzero(~answer[: int(np.flatnonzero(answer)[-1])])
    return answer & (np.arange(len(answer)) > (int(before[-1]) if len(before) else -1))


def _notes(
    what: str,
    lengths: Sequence[int],
    learnt: int,
    sequences: int,
    cut: int,
    forgotten: int,
    dropped: Sequence[str],
    length: int,
) -> tuple[str, ...]:
    total = sum(lengths)
    notes = [
        f"{len(lengths):,} {what} of {total:,} tokens in {sequences:,} sequences "
        f"({100 * total / (sequences * (length + 1)):.0f} % full); {learnt:,} tokens are learnt"
    ]
    if cut:
        notes.append(f"{cut:,} {what} are longer than a sequence and lose their ends (data.sequence_length = {length})")
    if forgotten:
        notes.append(
            f"{forgotten:,} {what} have thoughts of earlier answers that the template leaves out: they are not learnt"
        )
    if dropped:
        notes.append(f"{len(dropped):,} {what} dropped, as a sequence ends before their answer, such as {dropped[0]}")
    return tuple(notes)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Share records of ``lengths`` out to sequences of ``capacity`` tokens: each whole, in few sequences.

    Longest first, each into the fullest sequence that has room (best fit decreasing; Johnson, "Near-optimal bin packing
    algorithms", 1973): at most 11/9 of the fewest possible sequences. Time is linear in the records. Returns the indices of
    each sequence's records, ascending, sequences ordered by their first record: a function of the lengths alone.
    """
    groups: list[list[int]] = []
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]  # free tokens -> groups that have so many, a heap
    free = 0  # bit n: some group has n free tokens
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = lengths[index]
        if fitting := free >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            group = heapq.heappop(waiting[room])
            if not waiting[room]:
                free ^= 1 << room
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        heapq.heappush(waiting[room - length], group)
        free |= 1 << (room - length)
    return sorted(sorted(group) for group in groups)
