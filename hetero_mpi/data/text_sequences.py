"""Turn text files into documents, token ids and sequences.

Text of any length is tokenised in pieces, so that memory use stays bounded, and the ids equal those of tokenising it as a whole. A
piece ends at a stable token boundary: between words, at a line break or after punctuation. A boundary is accepted if the
tokenizer returns the same tokens for the text around it and for its two sides separately, with both a long and a short context
before it. Each piece is tokenised together with the last characters of the previous piece, whose tokens are then dropped,
since some tokenizers treat the start of a text differently.
"""

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

MIN_PIECE_CHARACTERS = 250_000
"""Target length of a piece in characters; a piece is longer if no boundary is found."""
_CONTEXT, _PREFIX = 400, 60
"""Characters of context on each side of a tested boundary, and characters of the previous piece to tokenise with each piece."""
_MAX_TRIED_CUTS = 40
"""Maximum number of boundaries of each kind to test per piece."""
_CUT_PATTERNS = tuple(
    re.compile(p) for p in (r"(?<=\w) (?=\w)", r"(?<=\S)\n(?=\S)", r"(?<=\n)(?=\w)", r"(?<=[.,;:!?。，！？])(?=\w)")
)
_TELL_S = 10.0
_BLOCK_BYTES = 1 << 20
STREAM = "stream.i32"
"""Name of the file that holds packed text: the tokens of all documents, int32."""
REMEDY = "free disk space there, or set another directory: XDG_CACHE_HOME, or TMPDIR with data.cache = false"
"""Advice to show when writing token ids fails."""
Blocks = Iterable[tuple[str, bool]]
"""Documents in blocks: (text, whether it ends the document)."""


@dataclass
class CorpusReport:
    """Statistics of one pass over the corpus."""

    files: int = 0
    """Number of files that contain text."""
    bytes: int = 0
    """Number of bytes of text read."""
    documents: int = 0
    skipped: dict[Path, str] = field(default_factory=dict)
    """Maps each skipped file to the reason."""
    textless: int = 0
    """Number of records without text."""
    bad: BadRecords = field(default_factory=BadRecords)
    """Malformed records that were skipped."""
    truncated: bool = False
    """Whether reading stopped at ``max_bytes`` before the end of the text."""

    def lines(self) -> list[str]:
        limit = ", truncated at data.max_bytes" if self.truncated else ""
        counts = f"{units.plural(self.documents, 'document')} from {units.plural(self.files, 'file')}"
        lines = [f"{counts}, {self.bytes / 1e6:,.1f} MB of text{limit}"]
        if self.skipped:
            path, reason = next(iter(self.skipped.items()))
            lines.append(f"{units.plural(len(self.skipped), 'file')} skipped, such as {path}: {reason}")
        if self.textless:
            lines.append(f"{units.plural(self.textless, 'record')} without text dropped")
        return lines + self.bad.lines()


class Corpus:
    """The documents of text files, which are read from disk on every iteration and never held in memory as a whole.

    Files that are empty, unreadable or not UTF-8 are skipped and listed in the report of the last complete iteration.
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
        """Find the files of the corpus. ``patterns``, ``key`` and ``tell`` as in ``matching_files``, which may raise UserError.

        ``documents``: one per file, per non-empty line, or per record (key "text", or as renamed by ``keys``).
        ``max_bytes``: maximum amount of text to read. ``skip_bad``: maximum number of malformed records to skip.
        """
        self.patterns, self.documents, self.max_bytes, self.key = patterns, documents, max_bytes, key
        self._keys, self._skip_bad = keys or {}, skip_bad
        self.paths = matching_files(key, patterns, tell)
        self.report = CorpusReport()

    def blocks(self) -> Iterator[tuple[str, bool]]:
        """Yield the documents in file order as :data:`Blocks`. Raises UserError if no file contains text."""
        report = CorpusReport()
        if self.documents == "record":
            yield from ((text, True) for text in self._records(report))
        for path in self.paths if self.documents != "record" else ():
            bytes_left = None if self.max_bytes is None else self.max_bytes - report.bytes
            if bytes_left == 0:
                report.truncated = True
                break
            if not _is_text(path, bytes_left, report):
                continue
            texts = _texts(path, bytes_left)
            try:
                for text, ends in _one_document(texts) if self.documents == "file" else _line_documents(texts):
                    report.documents += ends
                    yield text, ends
            except OSError as error:  # the file was readable a moment ago
                raise UserError(
                    "text.no_text", f"{self.key}: {path} cannot be read ({error.strerror}). Check its disk"
                ) from error
        self.report = report
        if not report.documents:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(report.skipped.items())[:3])
            raise UserError(
                "text.no_text",
                f"{self.key} must match files with UTF-8 text; {shown_patterns(self.patterns)} matched "
                f"{units.plural(len(self.paths), 'file')} without any ({reasons}). List other files.",
            )

    def _records(self, report: CorpusReport) -> Iterator[str]:
        """Yield the text of each record. Raises UserError if more records are malformed than may be skipped."""
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
    """Return the text of a record. Raises BadRecord if the record is malformed or has no key "text"."""
    if isinstance(value, BadRecord):
        raise value
    if not isinstance(value, dict):
        raise BadRecord("record.not_an_object", f"must be a JSON object; it is {kind_name(value)}")
    if "text" not in value:
        raise BadRecord("record.no_text", without_text(value))
    text = value["text"]
    return "" if text is None or text != text else text_of(text, "text")  # pandas writes NaN for missing values


def _texts(path: Path, max_bytes: int | None) -> Iterator[str]:
    """Yield up to ``max_bytes`` of a file's text in blocks. Raises OSError, or ValueError naming the kind of a non-text file."""
    # An incremental decoder drops a character split by ``max_bytes``, but rejects invalid bytes.
    decoder, bytes_left, first = codecs.getincrementaldecoder("utf-8")(), max_bytes, True
    with path.open("rb") as file:
        try:
            while content := file.read(_BLOCK_BYTES if bytes_left is None else min(_BLOCK_BYTES, bytes_left)):
                text = decoder.decode(content)
                yield text.removeprefix("\ufeff") if first else text
                first, bytes_left = False, None if bytes_left is None else bytes_left - len(content)
            if bytes_left != 0 or not file.read(1):
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            byte_position = file.tell() - len(error.object) + error.start
            file.seek(0)
            raise ValueError(kind_of(file.read(_BLOCK_BYTES)) or f"not UTF-8 (byte {byte_position})") from None


def _is_text(path: Path, max_bytes: int | None, report: CorpusReport) -> bool:
    """Whether a file contains text. Counts the file in the report, or records why it is skipped."""
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


def _one_document(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Yield all blocks as one document."""
    before = next(texts)
    for text in texts:
        yield before, False
        before = text
    yield before, True


def _line_documents(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Yield each non-empty line as a document."""
    rest = ""
    for text in texts:
        # Not splitlines(), which also splits at form feeds and other characters that occur inside lines.
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.strip():
                yield line.removesuffix("\r"), True
    if rest.strip():
        yield rest.removesuffix("\r"), True


class Piece(NamedTuple):
    before: str
    """Preceding characters to tokenise the piece with; "" at the start of a document."""
    text: str
    ends: bool
    """Whether the document ends with this piece."""


Split = Callable[[list[str]], list[list[Any]]]
"""Splits each string into tokens or into a pre-tokenizer's parts."""


def pieces_of(blocks: Blocks, split: Split) -> Iterator[Piece]:
    """Cut documents into pieces that end at boundaries between the parts that ``split`` returns."""
    before, pending, tested = "", "", 0
    for block, ends in blocks:
        pending += block
        while len(pending) >= max(MIN_PIECE_CHARACTERS, 2 * tested) + _CONTEXT:
            position = _cut_position(pending, split)
            tested = 0 if position else len(pending)  # retested when the text has doubled
            if position:
                yield Piece(before, pending[:position], False)
                before, pending = pending[position - _PREFIX : position], pending[position:]
        if ends:
            yield Piece(before, pending, True)
            before, pending, tested = "", "", 0


def _cut_position(text: str, split: Split) -> int | None:
    """Return the last tested position at which a piece of ``text`` may end; None if no position qualifies."""
    last = len(text) - _CONTEXT
    first = max(MIN_PIECE_CHARACTERS // 2, last - MIN_PIECE_CHARACTERS // 2)
    for kind in _CUT_PATTERNS:
        candidates = [match.start() for match in kind.finditer(text, first, last)]
        for position in reversed(candidates[-_MAX_TRIED_CUTS:]):
            before, after = text[position - _CONTEXT : position], text[position : position + _CONTEXT]
            near = before[-_PREFIX:]
            both, near_both, alone, near_alone = split([before + after, near + after, before, near])
            rest = both[len(alone) :]
            if both == alone + rest and near_both == near_alone + rest:
                return position
    return None


def ids_of(
    blocks: Blocks, engine: Tokenizer, tell: Callable[[int], None] | None = None
) -> Iterator[tuple[Tokens, bool]]:
    """Tokenise documents piece by piece, including the tokens that the tokenizer prepends: (ids, whether the document ends).

    All threads of the tokenizer are used. ``tell`` is called periodically with the number of characters processed.
    """
    start_ids = beginning(engine)
    characters_done, last_report_s = 0, time.monotonic()
    for batch in in_batches(pieces_of(blocks, partial(encoded, engine)), lambda piece: len(piece.text)):
        prefix_ids_by_piece = encoded(engine, [piece.before for piece in batch])
        ids_by_piece = encoded(engine, [piece.before + piece.text for piece in batch])
        for piece, lead, ids in zip(batch, prefix_ids_by_piece, ids_by_piece, strict=True):
            assert ids[: len(lead)] == lead, "a piece must begin at the start of a token"
            first = [] if piece.before or ids[: len(start_ids)] == start_ids else start_ids
            yield np.array([*first, *ids[len(lead) :]], np.int32), piece.ends
            characters_done += len(piece.text)
        if tell is not None and time.monotonic() - last_report_s > _TELL_S:
            last_report_s = time.monotonic()
            tell(characters_done)


def build_sequences(
    documents: Corpus | Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    settings: SequenceSettings,
    evaluation: Corpus | Iterable[str] | None = None,
    folder: Path | None = None,
    tell: Callable[[int], None] | None = None,
) -> Dataset:
    """Tokenise documents, cut them into sequences, and split off the evaluation set.

    Each document ends with the tokenizer's end token. With packing, all documents form one stream; sequence i holds its tokens
    [iT, iT + T) and the targets are shifted by one, so no token is lost between sequences. Otherwise each document is one
    sequence, truncated or padded on the right, and documents of fewer than 2 tokens are dropped.

    ``evaluation`` documents replace the held-out fraction. ``folder``: directory for packed text; if it is None, packed text stays
    in memory. ``tell`` is called periodically with the number of characters processed. Raises UserError if the text is too short
    for one training and (unless ``held_out`` is 0) one evaluation sequence, or if the tokenizer has no end token.
    """

    def rows_of(texts: Corpus | Iterable[str], name: str) -> Rows:
        blocks = texts.blocks() if isinstance(texts, Corpus) else ((text, True) for text in texts)
        end, length = end_token(tokenizer), settings.length
        pieces = ids_of(blocks, own_tokens_only(tokenizer), tell)
        if settings.packing:
            with write_errors(folder.parent if folder else Path(), REMEDY):  # read errors become a UserError inside
                return _pack(pieces, end, length, None if folder is None else folder / name)
        return _pad(pieces, end, pad_token(tokenizer), length)

    advice = "Add text ({}) or lower data.sequence_length."
    rows, text_advice = rows_of(documents, STREAM), advice.format("data.text, data.max_bytes")
    if evaluation is None:
        return share_out(rows, settings, "the text", text_advice)
    evaluation_rows = rows_of(evaluation, f"evaluation-{STREAM}")
    dataset = share_out(rows, replace(settings, held_out=0), "the text", text_advice)
    with write_errors(folder.parent if folder else Path(), REMEDY):
        dataset = join_evaluation(dataset, evaluation_rows, "the text", advice.format("data.evaluation"), folder)
    if folder is not None:
        for name in (STREAM, f"evaluation-{STREAM}"):
            (folder / name).unlink(missing_ok=True)
    return dataset


def _pack(pieces: Iterable[tuple[Tokens, bool]], end: int, length: int, path: Path | None) -> Rows:
    """Pack all documents into one stream, in the file ``path`` or in memory; tokens and targets are overlapping views of it."""
    documents = 0
    with io.BytesIO() if path is None else path.open("wb") as file:
        for ids, ends in pieces:
            file.write(ids.tobytes())
            if ends:
                file.write(np.int32(end).tobytes())
                documents += 1
        content = file.getvalue() if isinstance(file, io.BytesIO) else b""
    stream = np.frombuffer(content, np.int32) if path is None else mapped(path)
    return Rows(
        *overlapping(stream, length), f"{units.plural(len(stream), 'token')} in {units.plural(documents, 'document')}"
    )


def overlapping(stream: Tokens, length: int) -> tuple[Tokens, Tokens]:
    """View a stream as tokens and targets [N, T]: sequence i holds tokens [iT, iT + T), and the targets are shifted by one."""
    count = max(len(stream) - 1, 0) // length
    tokens = stream[: count * length].reshape(count, length)
    return tokens, stream[1 : count * length + 1].reshape(count, length) if count else tokens


def _pad(pieces: Iterable[tuple[Tokens, bool]], end: int, pad: int, length: int) -> Rows:
    """Place each document in a separate row; the notes count documents that are dropped as too short or truncated."""
    parts: list[Tokens] = []
    dropped, cut, pending = 0, 0, np.empty(0, np.int32)
    for ids, ends in pieces:
        pending = np.concatenate([pending, ids[: length + 1]])
        if not ends:
            continue
        ids, pending = pending, pending[:0]
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
    short = f"{units.plural(dropped, 'document')} of fewer than 2 tokens dropped"
    long = f"{cut:,} documents are longer than a sequence and are truncated (data.sequence_length = {length})"
    notes = tuple(note for count, note in ((dropped, short), (cut, long)) if count)
    return Rows(tokens, targets, f"{units.plural(len(parts), 'document')} of at least 2 tokens", notes)
