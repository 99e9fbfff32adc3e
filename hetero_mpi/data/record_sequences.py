"""Instruction records -> token sequences whose targets are the answers."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.answers import ChatTemplate
from hetero_mpi.data.batch import IGNORED, Tokens
from hetero_mpi.data.chat_template import Tokenized, tokenize_records
from hetero_mpi.data.dataset import Dataset, Rows, SequenceSettings, join_evaluation, mix, share_out
from hetero_mpi.data.record_shapes import BadRecords, Compared
from hetero_mpi.data.records import Record
from hetero_mpi.data.tokenizer import pad_token
from hetero_mpi.util.errors import UserError

ADVICE = "Add records ({}), lower data.sequence_length, or set data.packing = false."


@dataclass(frozen=True)
class RecordSequences:
    """How records become sequences; targets are the tokens of answers, or of everything, and -100 elsewhere.

    Packed, each sequence holds as many whole records as fit, in the order of the files::

        tokens   <user> Hi <answer> Hello <end> <user> Why ? <answer> So <end> <pad> <pad>
        targets   -100 -100  Hello  <end>  -100  -100 -100 -100  So  <end> -100  -100  -100
        positions   0    1     2      3     0     1    2    3     4    5    0     1     2

    The positions keep a record from seeing those before it. Otherwise each sequence holds one record. A record that is longer than
    a sequence is cut, and one that loses all of its answers by that is dropped; the notes count both. No record's first token is a
    target: nothing of its own stands before it.
    """

    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate
    settings: SequenceSettings
    train_on_prompt: bool | str = False
    isolate: bool = True
    """Packed ones get positions."""
    preference: Compared | None = None
    """Records are isolated. Pairs are chosen and rejected in turn, and each stays in one sequence."""
    ends: Collection[int] = ()
    """Tokens at which the model stops."""

    def rows(self, records: Iterable[Record], key: str, bad: BadRecords | None = None) -> Rows:
        """The sequences of the records that the job's ``key`` names. ``bad``: takes those that cannot be rendered.

        Raises UserError when no record keeps a target, when all have one prompt where others' answers are needed, when the
        tokenizer has no end token or its template fails.
        """
        tokenized = tokenize_records(self.tokenizer, self.template, records, bad, self.ends)
        # A sequence of T inputs with targets one further is T + 1 tokens.
        width, what = self.settings.length + 1, "pairs" if self.preference == "pairs" else "records"
        kept: list[tuple[_Part, ...]] = []
        longest, dropped = 0, []
        for entry in self._entries(tokenized, width):
            longest = max(longest, sum(part.uncut for part in entry))
            if all(part.answer.any() for part in entry):
                kept.append(entry)
            else:
                dropped.append(entry[0].source)
        if not kept and not dropped:
            raise UserError(
                "records.all_skipped",
                f"{key} must hold records that can be learnt from; all were skipped (data.skip_bad).",
            )
        if not kept:
            raise UserError(
                "records.all_cut",
                f"{key} must leave answers to learn; with data.sequence_length = {width - 1} all {len(dropped):,} {what} are cut "
                f"before their first answer, such as {dropped[0]}. Raise data.sequence_length: the longest record has "
                f"{longest:,} tokens.",
            )
        rows = self._filled(kept if self.preference != "labels" else _with_mismatched(kept, width, key))
        notes = _notes(what, kept, dropped, rows.targets[:: rows.lanes])
        if rows.weights is not None:
            own = rows.weights[rows.targets != IGNORED]
            notes = (
                *notes,
                f"their weights in the loss go from {own.min():g} to {own.max():g}, {own.mean():.3g} on average",
            )
        return replace(rows, found=f"{len(kept)} {what}", notes=notes)

    def _entries(self, tokenized: Iterable[Tokenized], width: int) -> Iterator[tuple[_Part, ...]]:
        """Records, or pairs, that stay together."""
        if self.preference == "pairs":
            return _pairs(tokenized, width)
        if self.preference == "labels":
            return _labelled(tokenized, width)
        return _singles(tokenized, width, self.train_on_prompt)

    def _filled(self, kept: Sequence[tuple[_Part, ...]]) -> Rows:
        """The sequences with these records, or pairs, in them."""
        width, packing, lanes = self.settings.length + 1, self.settings.packing, 2 if self.preference == "labels" else 1
        lengths = [max(sum(len(part.ids) for part in entry[lane::lanes]) for lane in range(lanes)) for entry in kept]
        groups = pack(lengths, width) if packing else [[index] for index in range(len(kept))]
        tokens = np.full((len(groups) * lanes, width), pad_token(self.tokenizer), dtype=np.int32)
        labels = np.full(tokens.shape, IGNORED, dtype=np.int32)
        places, answers = np.zeros_like(tokens), np.zeros(tokens.shape, np.uint8)
        weights = np.ones(tokens.shape, np.float32)
        for row in range(len(tokens)):
            end, lane = 0, row % lanes
            for part in (part for index in groups[row // lanes] for part in kept[index][lane::lanes]):
                own = slice(end, end + len(part.ids))
                tokens[row, own], labels[row, own], answers[row, own] = part.ids, part.labels, part.mark * part.answer
                weights[row, own] = part.weight
                places[row, own], end = np.arange(len(part.ids)), own.stop
            places[row, end:] = np.arange(width - end)
        positions = places[:, :-1] if (packing and self.isolate) or self.preference else None
        compared = answers[:, 1:] if self.preference else None
        weighed = weights[:, 1:] if compared is None and (weights != 1).any() else None
        return Rows(tokens[:, :-1], labels[:, 1:], "", (), positions, compared, weighed, lanes)


def build_record_sequences(
    sources: Sequence[tuple[str, Iterable[Record]]],
    sequences: RecordSequences,
    evaluation: Iterable[Record] | None = None,
    bad: BadRecords | None = None,
    weights: Sequence[float] | None = None,
) -> Dataset:
    """The dataset of named sources of records. ``weights``: they are mixed by these, and do not share sequences.

    ``evaluation`` records take the place of the held-out share. Raises UserError as ``RecordSequences.rows``, and when there are
    too few for the shares.
    """
    settings, advice = sequences.settings, ADVICE.format("data.records")
    if evaluation is not None:
        settings = replace(settings, held_out=0)
    advice += " data.held_out = 0 holds nothing out." * (settings.held_out > 0)
    built = [(name, share_out(sequences.rows(records, name, bad), settings, name, advice)) for name, records in sources]
    if weights is not None:
        told = [(name, replace(one, notes=tuple(f"{name}: {note}" for note in one.notes))) for name, one in built]
        dataset = mix(told, weights, settings.seed)
    else:
        ((_, dataset),) = built
    if evaluation is None:
        return dataset
    rows = sequences.rows(evaluation, "data.evaluation", bad)
    return join_evaluation(dataset, rows, "the records", ADVICE.format("any key"))


@dataclass(frozen=True)
class _Part:
    """A record in a sequence: its tokens, as far as they are kept; labels are what they are as targets."""

    ids: Tokens
    labels: Tokens
    answer: npt.NDArray[np.bool_]
    """Where the answers are that are learnt, or compared."""
    weight: npt.NDArray[np.float32]
    """Of its tokens in the loss."""
    uncut: int
    """Tokens of the whole record."""
    forgotten: bool
    """Thoughts of its earlier answers are left out."""
    source: str
    mark: int = 1
    """Of its answer in ``Compared.answers``."""


def _singles(tokenized: Iterable[Tokenized], capacity: int, train_on_prompt: bool | str) -> Iterator[tuple[_Part]]:
    for entry in tokenized:
        prompts = entry.record.is_dialogue if train_on_prompt == "chats" else train_on_prompt is True
        yield (_part(entry, capacity, entry.answer, entry.answer | (prompts & ~entry.never)),)


def _pairs(tokenized: Iterable[Tokenized], capacity: int) -> Iterator[tuple[_Part, _Part]]:
    """(chosen, rejected). Where both do not fit, the longer one is cut, down to half of the sequence before the other one is.

    All of a chosen record are targets, since ORPO learns its prompt, too, as TRL's does; but for answers that are not learnt.
    """
    chosen: Tokenized | None = None
    for rejected in tokenized:
        if chosen is None or chosen.record.source != rejected.record.source:
            chosen = rejected  # the other one before it, if any, could not be rendered
            continue
        room = capacity - min(len(rejected.ids), capacity // 2)
        answers = [_last_run(entry.answer) for entry in (chosen, rejected)]
        first = _part(chosen, room, answers[0], ~chosen.never)
        yield first, _part(rejected, capacity - len(first.ids), answers[1], answers[1])
        chosen = None


def _labelled(tokenized: Iterable[Tokenized], capacity: int) -> Iterator[tuple[_Part]]:
    for entry in tokenized:
        answer = _last_run(entry.answer)
        yield (replace(_part(entry, capacity, answer, answer), mark=2 if entry.record.desirable else 3),)


def _with_mismatched(kept: Sequence[tuple[_Part, ...]], capacity: int, key: str) -> list[tuple[_Part, _Part]]:
    """Each record, and its prompt with the answer of a record before it (the first one: of the last), as TRL takes them.

    Records in a row that have one prompt, as the two of a pair do, get answers to the prompt before, each that in its own place.
    """
    prompts = [own.ids[: int(np.flatnonzero(own.answer)[0])] for (own,) in kept]
    runs: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        if number and np.array_equal(prompt, prompts[number - 1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) == 1:
        raise UserError(
            "records.too_few_prompts",
            f'{key} must hold answers to two prompts at least for train.preference = "kto", which compares with answers to other '
            f"prompts; its {len(kept):,} records have one. Add records, or set another preference",
        )
    found = []
    for others, run in zip([*runs[-1:], *runs[:-1]], runs, strict=True):
        for place, number in enumerate(run):
            prompt, (own,), (before,) = prompts[number], kept[number], kept[others[place % len(others)]]
            ids = np.concatenate([prompt, before.ids[before.answer]])[:capacity]
            answer = np.arange(len(ids)) >= len(prompt)
            labels = np.where(answer, ids, IGNORED).astype(np.int32)
            found.append(
                (own, replace(own, ids=ids, answer=answer, labels=labels, weight=np.ones(len(ids), np.float32)))
            )
    return found


def _part(entry: Tokenized, room: int, answer: npt.NDArray[np.bool_], learnt: npt.NDArray[np.bool_]) -> _Part:
    ids, answer = entry.ids[:room], answer[:room].copy()
    labels = np.where(learnt[:room], ids, IGNORED).astype(np.int32)
    labels[:1], answer[:1] = IGNORED, False  # nothing of its own stands before the first token
    return _Part(ids, labels, answer, entry.weight[:room], len(entry.ids), entry.forgotten, entry.record.source)


def _last_run(answer: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The last answer alone: those before it belong to the prompt."""
    before = np.flatnonzero(~answer[: int(np.flatnonzero(answer)[-1])])
    return answer & (np.arange(len(answer)) > (int(before[-1]) if len(before) else -1))


def _notes(what: str, kept: Sequence[tuple[_Part, ...]], dropped: Sequence[str], targets: Tokens) -> tuple[str, ...]:
    """Notes on what became of the records, for a person. ``targets``: of all sequences."""
    sequences, length = targets.shape
    total, learnt = sum(len(part.ids) for entry in kept for part in entry), np.count_nonzero(targets != IGNORED)
    cut = sum(any(part.uncut > len(part.ids) for part in entry) for entry in kept)
    forgotten = sum(any(part.forgotten for part in entry) for entry in kept)
    notes = [
        f"{len(kept):,} {what} of {total:,} tokens in {sequences:,} sequences "
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
