"""Text on a person's terminal: anybody's is made harmless, it is fitted to the width, and the reader may go away."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import textwrap
from typing import TextIO

CONSOLE_LOGGER = "hetero_mpi.say"
"""Name of the logger whose lines the user sees."""
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing them, that turn the direction of text, or that no encoding can write."""


def printable(text: str) -> str:
    """``text`` with such characters spelt out (``\\x1b``). Names in files may hold any; lines and tabs stay."""
    return _HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


_FALLBACK = os.terminal_size((100, 30))
UNWATCHED_VARIABLE = "HETERO_MPI_UNWATCHED"
"""Environment variable: the launcher is to outlive its terminal, so that nobody watches it."""
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_MIN_COLUMNS = 30
MAX_COLUMNS = 120
"""Most characters of a line that is fitted to a terminal: two terminals fit beside each other."""
_MIN_PROSE_COLUMNS = 30
"""Least width of a paragraph behind its beginning."""
_MAX_LOG_COLUMNS = 1_000_000
_COMMAND = re.compile(r"\s*(launch[\d: ]*: )?(python3? -m|curl|mpirun|mpiexec|pip) ")
"""A line that begins so is a command to be copied, and stays whole."""


def columns(stream: TextIO | None = None) -> int | None:
    """Characters that a line may have: ``COLUMNS`` of the environment, else those of the terminal that is watched. None: as many as
    it needs, since logs are searched by lines. ``stream``: stdout unless named; of a rank, stdout.
    """
    requested = os.environ.get("COLUMNS", "")
    if requested.isdecimal() and int(requested) > 0:
        return max(int(requested), _MIN_COLUMNS)
    terminal = sys.stdout if stream is None or _has_launcher() else stream
    return max(terminal_size(terminal).columns, _MIN_COLUMNS) if is_terminal(terminal) else None


def fit_to_terminal(text: str, stream: TextIO | None = None) -> str:
    """``text`` with lines that are too long for ``columns`` broken between words; what follows stands a little to the right."""
    width = columns(stream)
    return (
        text
        if width is None
        else "\n".join(line for long_line in text.split("\n") for line in fold_line(long_line, width))
    )


def fold_line(line: str, width: int, start: str = "", indent: str | None = None) -> list[str]:
    """``start + line`` within ``width``, where words allow it. ``indent``: of the later lines."""
    if len(start) + len(line) <= width or _COMMAND.match(line):
        return [start + line]
    first_indent = start if start else line[: len(line) - len(line.lstrip(" "))]
    later_indent = " " * (len(first_indent) + 2) if indent is None else indent
    return textwrap.wrap(
        line.lstrip(" "),
        width,
        initial_indent=first_indent,
        subsequent_indent=later_indent,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [start]


def is_terminal(stream: TextIO) -> bool:
    """True: a person watches this stream.

    Open MPI gives every rank a pseudo-terminal, even when its own output goes to a file. Then the stdout of the launcher, which is
    this process's parent, decides. Where that cannot be seen the answer is no, since plain lines are right everywhere. Nobody
    watches a process that is to outlive its terminal (SIGHUP is ignored).
    """
    if not stream.isatty() or UNWATCHED_VARIABLE in os.environ or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    if not _has_launcher():
        return True
    try:
        return os.readlink(_launcher_stdout()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Columns and lines of the terminal that is watched; the launcher's, where there is a launcher."""
    with contextlib.suppress(OSError, ValueError):
        if _has_launcher():
            descriptor = os.open(_launcher_stdout(), os.O_RDONLY | os.O_NOCTTY)
            try:
                size = os.get_terminal_size(descriptor)
            finally:
                os.close(descriptor)
        else:
            size = os.get_terminal_size(stream.fileno())
        if size.columns > 0 and size.lines > 0:
            return size
    return _FALLBACK


def _launcher_stdout() -> str:
    return f"/proc/{os.getppid()}/fd/1"


def _has_launcher() -> bool:
    return any(name in os.environ for name in _LAUNCHED)


def write_text(text: str, stream: TextIO, exact: bool = False) -> None:
    """Write to stdout or stderr, ``printable`` and ``fit_to_terminal``; ``exact``: as it is where nobody watches. If nobody reads it any
    more (``| head``, a terminal that was closed), it leads nowhere from then on: the work goes on.
    """
    try:
        stream.write(text if exact and not is_terminal(stream) else fit_to_terminal(printable(text), stream))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the program has closed the stream, or it lacks a character
        if getattr(error, "errno", None) not in (errno.EPIPE, errno.EIO):  # a full disk may have room again
            return
        with contextlib.suppress(OSError, ValueError):
            # What is left in the buffer would fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def line_width() -> int:
    """Characters of a line of stdout, at most ``MAX_COLUMNS``; no limit where nobody watches."""
    width = columns()
    return _MAX_LOG_COLUMNS if width is None else min(width, MAX_COLUMNS)


def wrap_text(start: str, text: str) -> list[str]:
    """``start + text`` within ``line_width``; later lines are indented below the text, or a little where ``start`` is long."""
    width = line_width()
    indent = " " * (len(start) if len(start) <= width - _MIN_PROSE_COLUMNS else 4)
    return [line.rstrip() for line in fold_line(" ".join(text.split()), width, start, indent)]
