"""Text files -> documents -> token ids -> sequences.

Texts of any length become token ids in pieces: of a text no more is in memory than a piece, and the ids are those of the whole. A
piece ends where a token ends whatever is around it: between words, before a line break or behind a full stop. Whether a place is
one is tried with the tokenizer itself: what stands before and behind it must give the same tokens together and apart, with much and
with little before it. The next piece is tokenised behind the last characters of this one, whose tokens are then left out, since
some tokenizers treat the beginning of a text otherwise than its middle.
"""

from __future__ import annotations

import codecs
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED, Tokens
from hetero_mpi.data.dataset import Dataset, Rows, SequenceSettings, join_evaluation, mapped, share_out
from hetero_mpi.data.messages import kind_name, text_of
from hetero_mpi.data.record_files import TEXT, OwnKeys, kind_of, values_of
from hetero_mpi.data.record_shapes import BadRecord, BadRecords, without_text
from hetero_mpi.data.source_files import matching_files, shown_patterns
from hetero_mpi.data.tokenizer import beginning, encoded, end_token, in_batches, own_tokens_only, pad_token
from hetero_mpi.util import units
from hetero_mpi.util.disk import require_regular, write_errors
from hetero_mpi.util.errors import UserError

PIECE = 250_000
"""Characters of a piece; a text that has nowhere to be cut goes on until it has."""
_AROUND, _BEFORE = 400, 60
"""Characters on both sides of a place with which it is tried, and the fewer ones before it that the next piece begins with."""
_TRIED = 40
"""Places of one kind that are tried in a piece."""
_PLACES = tuple(
    re.compile(one) for one in (r"(?<=\w) (?=\w)", r"(?<=\S)\n(?=\S)", r"(?<=\n)(?=\w)", r"(?<=[.,;:!?。，！？])(?=\w)")
)
_TELL_S = 10.0
_BLOCK_BYTES = 1 << 20
STREAM = "stream.i32"
"""File of packed text: the tokens of all documents, int32."""
REMEDY = "make room there, or name another folder: XDG_CACHE_HOME, or TMPDIR with data.cache = false"
"""What to do where token ids cannot be written."""
Blocks = Iterable[tuple[str, bool]]
"""Texts in blocks: (a part of a text, is it the text's last)."""


@dataclass
class CorpusReport:
    """Counts of one reading of the corpus."""

    files: int = 0
    """Files that gave text."""
    bytes: int = 0
    """Bytes of text read from them."""
    documents: int = 0
    skipped: dict[Path, str] = field(default_factory=dict)
    """File -> why it gave nothing."""
    textless: int = 0
    """Records without any text."""
    bad: BadRecords = field(default_factory=BadRecords)
    """Records that were skipped."""
    truncated: bool = False
    """Whether reading stopped at ``max_bytes`` with text left."""

    def lines(self) -> list[str]:
        limit = ", cut at data.max_bytes" if self.truncated else ""
        found = f"{units.plural(self.documents, 'document')} from {units.plural(self.files, 'file')}"
        lines = [f"{found}, {self.bytes / 1e6:,.1f} MB of text{limit}"]
        if self.skipped:
            path, reason = next(iter(self.skipped.items()))
            lines.append(f"{len(self.skipped):,} files skipped, such as {path}: {reason}")
        if self.textless:
            lines.append(f"{self.textless:,} records without text left out")
        return lines + self.bad.lines()


class Corpus:
    """Documents of text files, read from them anew on every iteration (the corpus itself is never held in memory).

    Files that are not UTF-8, empty or unreadable are skipped and named in the report, which is that of the latest whole iteration.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        documents: Literal["file", "line", "record"] = "file",
        max_bytes: int | None = None,
        key: str = "data.text",
        keys: Mapping[Any, str] | None = None,
        skip_bad: int = 0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """``documents``: one per file, per non-empty line, or per record (the key "text", or what ``keys`` say in its place).
        ``max_bytes``: reading stops after so many bytes of text. ``skip_bad``: so many broken records are skipped. ``patterns``,
        ``key`` and ``tell``: as in ``matching_files``. Raises UserError when nothing matches.
        """
        self.patterns, self.documents, self.max_bytes, self.key = patterns, documents, max_bytes, key
        self._keys, self._skip_bad = keys or {}, skip_bad
        self.paths = matching_files(key, patterns, tell)
        self.report = CorpusReport()

    def blocks(self) -> Iterator[tuple[str, bool]]:
        """Documents in sorted order of the files, in parts: (text, does the document end with it). Raises UserError at the end when
        there was no text at all."""
        report = CorpusReport()
        if self.documents == "record":
            yield from ((text, True) for text in self._records(report))
        for path in self.paths if self.documents != "record" else ():
            left = None if self.max_bytes is None else self.max_bytes - report.bytes
            if left == 0:
                report.truncated = True
                break
            if not _is_text(path, left, report):
                continue
            texts = _texts(path, left)
            try:
                for text, ends in _whole(texts) if self.documents == "file" else _lines(texts):
                    report.documents += ends
                    yield text, ends
            except OSError as error:  # it could be, a moment ago
                raise UserError(
                    "text.no_text", f"{self.key}: {path} cannot be read ({error.strerror}). Check its disk"
                ) from error
        self.report = report
        if not report.documents:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(report.skipped.items())[:3])
            raise UserError(
                "text.no_text",
                f"{self.key} must match files with text in UTF-8; {shown_patterns(self.patterns)} matched "
                f"{len(self.paths)} file(s) without any ({reasons}). Point it at other files.",
            )

    def _records(self, report: CorpusReport) -> Iterator[str]:
        """The texts of records. Raises UserError when more are broken than may be skipped."""
        keys, report.bad = OwnKeys(self._keys), BadRecords(self._skip_bad)
        for path in self.paths:
            report.files += 1
            for source, value in values_of(path, keys, TEXT):
                try:
                    text = _text_of_record(value)
                except BadRecord as problem:
                    report.bad.add(source, problem)
                    continue
                size = len(text.encode())
                if self.max_bytes is not None and report.bytes + size > self.max_bytes:
                    report.truncated = True
                    break
                report.bytes, report.textless = report.bytes + size, report.textless + (not text.strip())
                if text.strip():
                    report.documents += 1
                    yield text
            if report.truncated:
                break
        report.bad.check(self.key)
        keys.check()


def _text_of_record(value: Any) -> str:
    """Raises BadRecord: it is broken, or has no text."""
    if isinstance(value, BadRecord):
        raise value
    if not isinstance(value, dict):
        raise BadRecord("record.not_an_object", f"must be a JSON object; it is {kind_name(value)}")
    if "text" not in value:
        raise BadRecord("record.no_text", without_text(value))
    text = value["text"]
    return "" if text is None or text != text else text_of(text, "text")  # pandas writes NaN where a table has nothing


def _texts(path: Path, max_bytes: int | None) -> Iterator[str]:
    """A file's text in blocks, at most ``max_bytes`` of it. Raises OSError, and ValueError that says what else than text it is."""
    # An incremental decoder keeps a character that the cut has split to itself, yet refuses real garbage.
    decoder, left, first = codecs.getincrementaldecoder("utf-8")(), max_bytes, True
    with path.open("rb") as file:
        try:
            while content := file.read(_BLOCK_BYTES if left is None else min(_BLOCK_BYTES, left)):
                text = decoder.decode(content)
                yield text.removeprefix("\ufeff") if first else text
                first, left = False, None if left is None else left - len(content)
            if left != 0 or not file.read(1):
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            place = file.tell() - len(error.object) + error.start
            file.seek(0)
            raise ValueError(kind_of(file.read(_BLOCK_BYTES)) or f"not UTF-8 (byte {place})") from None


def _is_text(path: Path, max_bytes: int | None, report: CorpusReport) -> bool:
    """Counts a file in the report: as one that gives text, or with the reason why it gives none."""
    require_regular(path)
    try:
        empty = True
        for text in _texts(path, max_bytes):
            empty = empty and not text.strip()
        size = path.stat().st_size
    except OSError as error:
        report.skipped[path] = f"cannot be read: {error.strerror}"
        return False
    except ValueError as error:
        report.skipped[path] = f"is {error}"
        return False
    if empty:
        report.skipped[path] = "is empty"
        return False
    report.files += 1
    report.bytes += size if max_bytes is None else min(size, max_bytes)
    report.truncated |= max_bytes is not None and size > max_bytes
    return True


def _whole(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """One document of all blocks."""
    before = next(texts)
    for text in texts:
        yield before, False
        before = text
    yield before, True


def _lines(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """A document of each line that is not empty."""
    rest = ""
    for text in texts:
        # Not splitlines(): that also cuts at form feeds and other characters that people use inside a line.
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.strip():
                yield line.removesuffix("\r"), True
    if rest.strip():
        yield rest.removesuffix("\r"), True


class Piece(NamedTuple):
    before: str
    """The characters of the text before it that it is tokenised with; "": the text begins with it."""
    text: str
    ends: bool
    """The text ends with it."""


Split = Callable[[list[str]], list[list[Any]]]
"""Texts -> what each is split into: tokens, or what a pre-tokenizer makes of it."""


def pieces_of(blocks: Blocks, split: Split) -> Iterator[Piece]:
    """The texts in pieces, which end where the parts do that ``split`` makes."""
    before, waiting, tried = "", "", 0
    for block, ends in blocks:
        waiting += block
        while len(waiting) >= max(PIECE, 2 * tried) + _AROUND:
            place = _place(waiting, split)
            tried = 0 if place else len(waiting)  # a text without a place is tried again when it has doubled
            if place:
                yield Piece(before, waiting[:place], False)
                before, waiting = waiting[place - _BEFORE : place], waiting[place:]
        if ends:
            yield Piece(before, waiting, True)
            before, waiting, tried = "", "", 0


def _place(text: str, split: Split) -> int | None:
    """Where a piece of ``text`` may end, as late as possible; None: nowhere."""
    last = len(text) - _AROUND
    first = max(PIECE // 2, last - PIECE // 2)
    for kind in _PLACES:
        found = [match.start() for match in kind.finditer(text, first, last)]
        for place in reversed(found[-_TRIED:]):
            left, right = text[place - _AROUND : place], text[place : place + _AROUND]
            few = left[-_BEFORE:]
            much_both, few_both, much, little = split([left + right, few + right, left, few])
            behind = much_both[len(much) :]
            if much_both == much + behind and few_both == little + behind:
                return place
    return None


def ids_of(
    blocks: Blocks, engine: Tokenizer, tell: Callable[[int], None] | None = None
) -> Iterator[tuple[Tokens, bool]]:
    """Token ids of the texts, begun as the tokenizer begins texts: (ids of a piece, does the text end). All threads of the
    tokenizer work. ``tell``: is told now and then how many characters are done.
    """
    begin = beginning(engine)
    done, told = 0, time.monotonic()
    for some in in_batches(pieces_of(blocks, partial(encoded, engine)), lambda piece: len(piece.text)):
        before = encoded(engine, [piece.before for piece in some])
        whole = encoded(engine, [piece.before + piece.text for piece in some])
        for piece, lead, ids in zip(some, before, whole, strict=True):
            assert ids[: len(lead)] == lead, "a piece begins where a token does"
            first = [] if piece.before or ids[: len(begin)] == begin else begin
            yield np.array([*first, *ids[len(lead) :]], np.int32), piece.ends
            done += len(piece.text)
        if tell is not None and time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            tell(done)


def build_sequences(
    documents: Corpus | Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    settings: SequenceSettings,
    evaluation: Corpus | Iterable[str] | None = None,
    folder: Path | None = None,
    tell: Callable[[int], None] | None = None,
) -> Dataset:
    """Tokenise the documents and cut them to sequences; split off the held-out share.

    Each document ends with the tokenizer's end token. Packed, all are joined to one stream; sequence i holds its tokens
    [iT, iT + T) and the targets are one further, so that no token is lost between sequences. Otherwise each document is
    one sequence, cut or padded on the right, and documents of fewer than 2 tokens are dropped.

    ``evaluation`` documents take the place of the held-out share. ``folder``: packed text goes into files of it, not into memory.
    ``tell``: is told now and then how many characters are done. Raises UserError when there is too little text for one training
    and (if some is held out) one held-out sequence, or when the tokenizer has no end token.
    """

    def rows_of(some: Corpus | Iterable[str], name: str) -> Rows:
        blocks = some.blocks() if isinstance(some, Corpus) else ((text, True) for text in some)
        end, length = end_token(tokenizer), settings.length
        pieces = ids_of(blocks, own_tokens_only(tokenizer), tell)
        if settings.packing:
            with write_errors(folder.parent if folder else Path(), REMEDY):  # what cannot be read is a UserError before
                return _pack(pieces, end, length, None if folder is None else folder / name)
        return _pad(pieces, end, pad_token(tokenizer), length)

    advice = "Add text ({}) or lower data.sequence_length."
    rows, own = rows_of(documents, STREAM), advice.format("data.text, data.max_bytes")
    if evaluation is None:
        return share_out(rows, settings, "the text", own)
    other = rows_of(evaluation, f"evaluation-{STREAM}")
    dataset = share_out(rows, replace(settings, held_out=0), "the text", own)
    with write_errors(folder.parent if folder else Path(), REMEDY):
        dataset = join_evaluation(dataset, other, "the text", advice.format("data.evaluation"), folder)
    if folder is not None:
        for name in (STREAM, f"evaluation-{STREAM}"):
            (folder / name).unlink(missing_ok=True)
    return dataset


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
    """One document per row; notes say how many documents were too short, or too long."""
    parts: list[Tokens] = []
    dropped, cut, begun = 0, 0, np.empty(0, np.int32)
    for ids, ends in pieces:
        begun = np.concatenate([begun, ids[: length + 1]])
        if not ends:
            continue
        ids, begun = begun, begun[:0]
        if len(ids) < 2:
            dropped += 1
            continue
        cut += len(ids) > length
        parts.append(np.array([*ids[:length], ids[length] if len(ids) > length else end], dtype=np.int32))
    tokens = np.full((len(parts), length), pad, dtype=np.int32)
    targets = np.full((len(parts), length), IGNORED, dtype=np.int32)
    for row, part in enumerate(parts):
        tokens[row, : len(part) - 1] = part[:-1]
        targets[row, : len(part) - 1] = part[1:]
    short = f"{dropped:,} documents of fewer than 2 tokens dropped"
    long = f"{cut:,} documents are longer than a sequence and lose their ends (data.sequence_length = {length})"
    notes = tuple(note for count, note in ((dropped, short), (cut, long)) if count)
    return Rows(tokens, targets, f"{len(parts)} documents of at least 2 tokens", notes)
