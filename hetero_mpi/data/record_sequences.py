"""Build token sequences from conversation records, with the answers as targets."""

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

_Mask = npt.NDArray[np.bool_]
ADVICE = "Add records ({}), lower data.sequence_length, or set data.packing = false."


@dataclass(frozen=True)
class RecordSequences:
    """Builds sequences from records. Targets are the tokens of answers (optionally also of prompts), and -100 elsewhere.

    With packing, each sequence holds one or more complete records, in file order::

        tokens   <user> Hi <answer> Hello <end> <user> Why ? <answer> So <end> <pad> <pad>
        targets   -100 -100  Hello  <end>  -100  -100 -100 -100  So  <end> -100  -100  -100
        positions   0    1     2      3     0     1    2    3     4    5    0     1     2

    Positions prevent attention across records. Without packing, each sequence holds one record. A record that is longer than a
    sequence is truncated, or dropped if no answer token remains; the notes count both cases. The first token of a record is
    never a target, since no token of the record precedes it.
    """

    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate
    settings: SequenceSettings
    train_on_prompt: bool | str = False
    isolate: bool = True
    """Whether attention in packed sequences is restricted to each record (by positions)."""
    preference: Compared | None = None
    """Form of the preference records, which are always isolated; None outside preference training."""
    ends: Collection[int] = ()
    """The model's stop tokens."""
    learns_chosen: bool = False
    """Whether the loss includes all targets of chosen records, not only compared answers; matters for the notes."""

    def rows(self, records: Iterable[Record], key: str, bad: BadRecords | None = None) -> Rows:
        """Build sequences of the records under the job's ``key``; records that cannot be rendered are added to ``bad``.

        Raises UserError if no record keeps a target, if all KTO records have the same prompt, if the tokenizer has no end token,
        or if its template fails.
        """
        tokenized = tokenize_records(self.tokenizer, self.template, records, bad, self.ends)
        # T inputs and their shifted targets take T + 1 tokens.
        width, what = self.settings.length + 1, "pairs" if self.preference == "pairs" else "records"
        entries: list[tuple[_Part, ...]] = []
        max_tokens, dropped = 0, []
        for entry in self._entries(tokenized, width):
            max_tokens = max(max_tokens, sum(part.uncut for part in entry))
            if all(part.answer.any() for part in entry):
                entries.append(entry)
            else:
                dropped.append(entry[0].source)
        if not entries and not dropped:
            raise UserError(
                "records.all_skipped", f"{key} must hold records to train on; all were skipped (data.skip_bad)."
            )
        if not entries:
            raise UserError(
                "records.all_cut",
                f"{key} must have answers within data.sequence_length = {width - 1}; all {len(dropped):,} {what} are truncated "
                f"before their first answer, such as {dropped[0]}. Raise data.sequence_length: the longest record has "
                f"{max_tokens:,} tokens.",
            )
        rows = self._fill(entries if self.preference != "labels" else _with_mismatched(entries, width, key))
        in_loss = rows.targets != IGNORED if rows.answers is None or self.learns_chosen else rows.answers > 0
        notes = _notes(what, entries, dropped, in_loss[:: rows.lanes])
        if rows.weights is not None:
            weights = rows.weights[rows.targets != IGNORED]
            extent = f"{weights.min():g} to {weights.max():g}, {weights.mean():.3g} on average"
            notes = (*notes, f"loss weights range from {extent}")
        return replace(rows, source_counts=f"{len(entries)} {what}", notes=notes)

    def _entries(self, tokenized: Iterable[Tokenized], width: int) -> Iterator[tuple[_Part, ...]]:
        """Yield records or pairs; each is kept in one sequence."""
        if self.preference is None:
            return _singles(tokenized, width, self.train_on_prompt)
        return _pairs(tokenized, width) if self.preference == "pairs" else _labelled(tokenized, width)

    def _fill(self, entries: Sequence[tuple[_Part, ...]]) -> Rows:
        """Fill sequences with the records or pairs."""
        width, packing, lanes = self.settings.length + 1, self.settings.packing, 2 if self.preference == "labels" else 1
        lengths = [max(sum(len(part.ids) for part in entry[lane::lanes]) for lane in range(lanes)) for entry in entries]
        groups = pack(lengths, width) if packing else [[index] for index in range(len(entries))]
        tokens = np.full((len(groups) * lanes, width), pad_token(self.tokenizer), dtype=np.int32)
        labels = np.full(tokens.shape, IGNORED, dtype=np.int32)
        offsets, answers = np.zeros_like(tokens), np.zeros(tokens.shape, np.uint8)
        weights = np.ones(tokens.shape, np.float32)
        for row in range(len(tokens)):
            end, lane = 0, row % lanes
            for part in (part for index in groups[row // lanes] for part in entries[index][lane::lanes]):
                span = slice(end, end + len(part.ids))
                tokens[row, span], labels[row, span], weights[row, span] = part.ids, part.labels, part.weight
                answers[row, span] = part.mark * part.answer
                offsets[row, span], end = np.arange(len(part.ids)), span.stop
            offsets[row, end:] = np.arange(width - end)
        positions = offsets[:, :-1] if (packing and self.isolate) or self.preference else None
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
    """Build the dataset of named record sources. With ``weights``, several sources are mixed; they never share a sequence.

    ``evaluation`` records replace the held-out fraction. Raises UserError as ``RecordSequences.rows`` does, and if there are
    too few sequences for the split.
    """
    settings, advice = sequences.settings, ADVICE.format("data.records")
    if evaluation is not None:
        settings = replace(settings, held_out=0)
    advice += " data.evaluation_fraction = 0 uses all records for training." * (settings.held_out > 0)
    sets = [(name, share_out(sequences.rows(records, name, bad), settings, name, advice)) for name, records in sources]
    if weights is not None:
        noted = [(name, replace(data, notes=tuple(f"{name}: {note}" for note in data.notes))) for name, data in sets]
        dataset = mix(noted, weights, settings.seed)
    else:
        ((_, dataset),) = sets
    if evaluation is None:
        return dataset
    rows = sequences.rows(evaluation, "data.evaluation", bad)
    return join_evaluation(dataset, rows, "the records", ADVICE.format("any key"))


@dataclass(frozen=True)
class _Part:
    """A record as placed in a sequence: its tokens after truncation and their labels (the token itself, or -100)."""

    ids: Tokens
    labels: Tokens
    answer: _Mask
    """Mask of the tokens of trained or compared answers."""
    weight: npt.NDArray[np.float32]
    """Loss weights of the tokens."""
    uncut: int
    """Number of tokens in the record before truncation."""
    forgotten: bool
    """Whether the template omits the reasoning of earlier answers."""
    source: str
    mark: int = 1
    """Value that marks the record's answer in ``Compared.answers``."""


def _singles(tokenized: Iterable[Tokenized], capacity: int, train_on_prompt: bool | str) -> Iterator[tuple[_Part]]:
    for entry in tokenized:
        prompts = entry.record.is_dialogue if train_on_prompt == "chats" else train_on_prompt is True
        yield (_part(entry, capacity, entry.answer, entry.answer | (prompts & ~entry.never)),)


def _pairs(tokenized: Iterable[Tokenized], capacity: int) -> Iterator[tuple[_Part, _Part]]:
    """Yield (chosen, rejected) pairs. If a pair is too long, the longer record is truncated first, down to half a sequence.

    All tokens of the chosen record except excluded answers are targets, since ORPO also trains on the prompt, as in TRL.
    """
    chosen_record: Tokenized | None = None
    for rejected_record in tokenized:
        if chosen_record is None or chosen_record.record.source != rejected_record.record.source:
            chosen_record = rejected_record  # the other record of the pair, if any, could not be rendered
            continue
        capacity_of_chosen = capacity - min(len(rejected_record.ids), capacity // 2)
        answers = [_last_run(entry.answer) for entry in (chosen_record, rejected_record)]
        first = _part(chosen_record, capacity_of_chosen, answers[0], ~chosen_record.never)
        yield first, _part(rejected_record, capacity - len(first.ids), answers[1], answers[1])
        chosen_record = None


def _labelled(tokenized: Iterable[Tokenized], capacity: int) -> Iterator[tuple[_Part]]:
    for entry in tokenized:
        answer = _last_run(entry.answer)
        yield (replace(_part(entry, capacity, answer, answer), mark=2 if entry.record.desirable else 3),)


def _with_mismatched(entries: Sequence[tuple[_Part, ...]], capacity: int, key: str) -> list[tuple[_Part, _Part]]:
    """Pair each record with a mismatched one, its prompt followed by an answer to the previous prompt, as TRL does for KTO.

    The first prompt gets answers to the last. Consecutive records that share a prompt cycle through the previous answers.
    """
    prompts = [part.ids[: int(np.flatnonzero(part.answer)[0])] for (part,) in entries]
    runs: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        if number and np.array_equal(prompt, prompts[number - 1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) == 1:
        raise UserError(
            "records.too_few_prompts",
            f'{key} must hold answers to at least two prompts for train.preference = "kto", which compares each answer '
            f"with answers to other prompts; its {len(entries):,} records have only one. Add records, or set another preference",
        )
    matched_pairs = []
    for previous, run in zip([*runs[-1:], *runs[:-1]], runs, strict=True):
        for index, number in enumerate(run):
            prompt, (part,), (earlier,) = prompts[number], entries[number], entries[previous[index % len(previous)]]
            ids = np.concatenate([prompt, earlier.ids[earlier.answer]])[:capacity]
            answer = np.arange(len(ids)) >= len(prompt)
            labels = np.where(answer, ids, IGNORED).astype(np.int32)
            matched_pairs.append(
                (part, replace(part, ids=ids, answer=answer, labels=labels, weight=np.ones(len(ids), np.float32)))
            )
    return matched_pairs


def _part(entry: Tokenized, capacity: int, answer: _Mask, is_target: _Mask) -> _Part:
    ids, answer = entry.ids[:capacity], answer[:capacity].copy()
    labels = np.where(is_target[:capacity], ids, IGNORED).astype(np.int32)
    labels[:1], answer[:1] = IGNORED, False  # no token of the record precedes its first token
    return _Part(ids, labels, answer, entry.weight[:capacity], len(entry.ids), entry.forgotten, entry.record.source)


def _last_run(answer: _Mask) -> _Mask:
    """Return the mask of the last answer only; earlier answers belong to the prompt."""
    before = np.flatnonzero(~answer[: int(np.flatnonzero(answer)[-1])])
    return answer & (np.arange(len(answer)) > (int(before[-1]) if len(before) else -1))


def _notes(what: str, entries: Sequence[tuple[_Part, ...]], dropped: Sequence[str], in_loss: _Mask) -> tuple[str, ...]:
    """Summarise the records for the user. ``in_loss``: whether the loss includes each target of the sequences."""
    sequences, length = in_loss.shape
    total, scored = sum(len(part.ids) for entry in entries for part in entry), int(np.count_nonzero(in_loss))
    cut = sum(any(part.uncut > len(part.ids) for part in entry) for entry in entries)
    forgotten = sum(any(part.forgotten for part in entry) for entry in entries)
    notes = [
        f"{len(entries):,} {what} of {total:,} tokens in {sequences:,} sequences "
        f"({100 * total / (sequences * (length + 1)):.0f} % full); {scored:,} tokens are targets"
    ]
    if cut:
        notes.append(f"{cut:,} {what} are longer than a sequence and are truncated (data.sequence_length = {length})")
    if forgotten:
        notes.append(
            f"{forgotten:,} {what} have reasoning in earlier answers that the template omits: it is not trained on"
        )
    if dropped:
        notes.append(f"{len(dropped):,} {what} dropped because truncation removes their answers, such as {dropped[0]}")
    return tuple(notes)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack records of the given ``lengths`` into few sequences of ``capacity`` tokens without splitting a record.

    Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): records are placed longest first, each into the
    fullest sequence with enough space, which needs at most about 11/9 of the minimum number of sequences. Returns the record
    indices of each sequence in ascending order, with sequences ordered by their first record.
    """
    groups: list[list[int]] = []
    heaps: list[list[int]] = [[] for _ in range(capacity + 1)]  # heaps[n]: groups with n free tokens
    spaces = 0  # bit n: some group has n free tokens
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = lengths[index]
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            group = heapq.heappop(heaps[space])
            if not heaps[space]:
                spaces ^= 1 << space
        else:
            space, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        heapq.heappush(heaps[space - length], group)
        spaces |= 1 << (space - length)
    return sorted(sorted(group) for group in groups)
