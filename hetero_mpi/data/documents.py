"""Text files as a stream of documents, in an order that depends on the files' names only."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetero_mpi.data.hub_records import PREFIX, hub_files
from hetero_mpi.data.unpacked import kind_of
from hetero_mpi.disk import require_regular
from hetero_mpi.errors import UserError

_BLOCK_BYTES = 1 << 20


@dataclass
class CorpusReport:
    """What a reading of the corpus found."""

    files: int = 0
    """Files that gave text."""
    bytes: int = 0
    """Bytes of text read from them."""
    documents: int = 0
    skipped: dict[Path, str] = field(default_factory=dict)
    """File -> why it gave nothing."""
    truncated: bool = False
    """Whether reading stopped at ``max_bytes`` with text left."""

    def lines(self) -> list[str]:
        limit = ", cut at data.max_bytes" if self.truncated else ""
        lines = [f"{self.documents:,} documents from {self.files:,} files, {self.bytes / 1e6:,.1f} MB of text{limit}"]
        if self.skipped:
            path, reason = next(iter(self.skipped.items()))
            lines.append(f"{len(self.skipped):,} files skipped, such as {path}: {reason}")
        return lines


@dataclass
class Corpus:
    """Documents of text, read from the files anew on every iteration (the corpus itself is never held in memory)."""

    patterns: tuple[str, ...]
    paths: tuple[Path, ...]
    documents: Literal["file", "line"]
    max_bytes: int | None
    key: str = "data.text"
    """The job's key that names these files, for messages."""
    report: CorpusReport = field(default_factory=CorpusReport)
    """Of the latest complete iteration."""

    def __iter__(self) -> Iterator[str]:
        """Whole documents, as :meth:`blocks` gives them in parts."""
        parts: list[str] = []
        for text, ends in self.blocks():
            parts.append(text)
            if ends:
                yield "".join(parts)
                parts = []

    def blocks(self) -> Iterator[tuple[str, bool]]:
        """Documents in sorted order of the files, in parts: (text, does the document end with it). Raises UserError at the end when
        there was no text at all."""
        report = CorpusReport()
        for path in self.paths:
            left = None if self.max_bytes is None else self.max_bytes - report.bytes
            if left == 0:
                report.truncated = True
                break
            if not _is_text(path, left, report):
                continue
            texts = _texts(path, left)
            for text, ends in _whole(texts) if self.documents == "file" else _lines(texts):
                report.documents += ends
                yield text, ends
        self.report = report
        if not report.documents:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(report.skipped.items())[:3])
            raise UserError(
                f"{self.key} must match files with text in UTF-8; {_shown(self.patterns)} matched "
                f"{len(self.paths)} file(s) without any ({reasons}). Point it at other files."
            )


def read_documents(
    patterns: Sequence[str],
    documents: Literal["file", "line"] = "file",
    max_bytes: int | None = None,
    key: str = "data.text",
) -> Corpus:
    """The documents of all files that match the glob patterns of the job's ``key`` (see :func:`matching_files`).

    ``documents``: one document per file, or per non-empty line. ``max_bytes``: stop after so many bytes of text. Files
    that are not UTF-8, empty or unreadable are skipped and named in the report. Raises UserError when nothing matches.
    """
    return Corpus(tuple(patterns), matching_files(key, patterns), documents, max_bytes, key)


def matching_files(key: str, patterns: Sequence[str], tell: Callable[[str], None] | None = None) -> tuple[Path, ...]:
    """The files that match the glob patterns of the job's ``key``: sorted by path, each once, directories ignored; then those of
    data sets of the hub, in the order of the job.

    A pattern that begins with ``!`` takes files of the patterns before it away again. ``tell``: is told of files that are
    fetched from the hub; None: none is. Raises UserError when nothing matches.
    """
    from_hub = [file for text in patterns if text.startswith(PREFIX) for file in hub_files(text, key, tell)]
    patterns = [text for text in patterns if not text.startswith(PREFIX)]
    # A link and its target are one file; the real path is its identity and its place in the order.
    paths: dict[str, Path] = {}
    directories: list[str] = []
    for pattern in patterns:
        for text in glob.iglob(pattern.removeprefix("!"), recursive=True):
            if pattern.startswith("!"):
                paths.pop(os.path.realpath(text), None)
            elif os.path.isfile(text):
                paths.setdefault(os.path.realpath(text), Path(text))
            else:
                if not os.path.isdir(text):
                    require_regular(Path(text))
                directories.append(text)
    if not paths and not from_hub:
        kind = "jsonl" if key.startswith("data.records") else "txt"
        what = (
            f"only directories, such as {directories[0]} (add /**/*.{kind} to read inside)"
            if directories
            else "nothing"
        )
        raise UserError(f"{key} must match at least one file; {_shown(patterns)} matched {what}.")
    return (*(paths[real] for real in sorted(paths)), *from_hub)


def _texts(path: Path, max_bytes: int | None) -> Iterator[str]:
    """A file's text in blocks, at most ``max_bytes`` of it. Raises OSError and UnicodeDecodeError."""
    # An incremental decoder keeps a character that the cut has split to itself, yet refuses real garbage.
    decoder, left, first = codecs.getincrementaldecoder("utf-8")(), max_bytes, True
    with path.open("rb") as file:
        while content := file.read(_BLOCK_BYTES if left is None else min(_BLOCK_BYTES, left)):
            text = decoder.decode(content)
            yield text.removeprefix("\ufeff") if first else text
            first, left = False, None if left is None else left - len(content)
        if left != 0 or not file.read(1):
            decoder.decode(b"", final=True)


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
    except UnicodeDecodeError:
        report.skipped[path] = f"is {_what(path)}"
        return False
    if empty:
        report.skipped[path] = "is empty"
        return False
    report.files += 1
    report.bytes += size if max_bytes is None else min(size, max_bytes)
    report.truncated |= max_bytes is not None and size > max_bytes
    return True


def _what(path: Path) -> str:
    """What a file is that is no UTF-8."""
    with path.open("rb") as file:
        kind = kind_of(file.read(_BLOCK_BYTES))
        if kind is not None:
            return kind
        file.seek(0)
        place, decoder = 0, codecs.getincrementaldecoder("utf-8")()
        while content := file.read(_BLOCK_BYTES):
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(content)
            except UnicodeDecodeError as error:
                return f"not UTF-8 (byte {place - held + error.start})"
            place += len(content)
    return f"not UTF-8 (byte {place - len(decoder.getstate()[0])})"


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


def _shown(patterns: Sequence[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns)
