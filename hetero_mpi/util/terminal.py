"""Prints text to terminals: escapes control characters, wraps lines to the width, and tolerates a closed reader."""

import contextlib
import errno
import os
import re
import signal
import sys
import textwrap
from typing import TextIO

CONSOLE_LOGGER = "hetero_mpi.say"
"""Name of the logger whose messages are shown to the user."""
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that change the text direction, and surrogates, which no encoding can represent."""


def printable(text: str) -> str:
    """Escape the characters in ``_HIDDEN``, which file names may contain. Line breaks and tabs are kept."""
    return _HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


_FALLBACK = os.terminal_size((100, 30))
UNWATCHED_VARIABLE = "HETERO_MPI_UNWATCHED"
"""Environment variable that is set if the launcher is to outlive its terminal, so that no user is watching."""
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_MIN_COLUMNS = 30
MAX_COLUMNS = 120
"""Maximum width of a line on a terminal. Wider lines are hard to read."""
_MIN_PROSE_COLUMNS = 30
"""Minimum width of a paragraph to the right of its label."""
_MAX_LOG_COLUMNS = 1_000_000
_COMMAND = re.compile(r"\s*(launch[\d: ]*: )?(python3? -m|curl|mpirun|mpiexec|pip) ")
"""Matches lines with commands for the user to copy, which are never wrapped."""


def columns(stream: TextIO | None = None) -> int | None:
    """Return the line width from ``COLUMNS`` or the terminal, or None for a log. Under a launcher, stdout's terminal counts."""
    requested = os.environ.get("COLUMNS", "")
    if requested.isdecimal() and int(requested) > 0:
        return max(int(requested), _MIN_COLUMNS)
    terminal = sys.stdout if stream is None or _has_launcher() else stream
    return max(terminal_size(terminal).columns, _MIN_COLUMNS) if is_terminal(terminal) else None


def fit_to_terminal(text: str, stream: TextIO | None = None) -> str:
    """Wrap the lines of ``text`` that are longer than ``columns`` at word boundaries, and indent the continuation lines."""
    width = columns(stream)
    return text if width is None else "\n".join(line for row in text.split("\n") for line in fold_line(row, width))


def fold_line(line: str, width: int, start: str = "", indent: str | None = None) -> list[str]:
    """Wrap ``start + line`` to ``width`` at word boundaries. Continuation lines begin with ``indent``."""
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
    """Return whether a user is watching this stream.

    Open MPI gives every rank a pseudo-terminal even if the launcher's output goes to a file, so in a rank the stdout of its parent
    process, the launcher, decides. If that cannot be read, the result is False, since plain lines are always acceptable. It is also
    False for a process that is to outlive its terminal, recognised by its ignoring SIGHUP.
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
    """Return the size of the terminal that the user sees, which is the launcher's if there is a launcher."""
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
    """Escape and wrap ``text`` and write it to stdout or stderr. If ``exact``, only do so if a user is watching.

    If the reader is gone (``| head``, a closed terminal), later output is discarded and the program continues.
    """
    try:
        stream.write(text if exact and not is_terminal(stream) else fit_to_terminal(printable(text), stream))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the program has closed the stream, or it lacks a character
        if getattr(error, "errno", None) not in (errno.EPIPE, errno.EIO):  # a full disk may get free space again
            return
        with contextlib.suppress(OSError, ValueError):
            # The buffered text would fail again at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def line_width() -> int:
    """Return the maximum length of a line on stdout: at most ``MAX_COLUMNS``, or practically unlimited in a log."""
    width = columns()
    return _MAX_LOG_COLUMNS if width is None else min(width, MAX_COLUMNS)


def wrap_text(start: str, text: str) -> list[str]:
    """Wrap ``start + text`` to ``line_width``. Continuation lines align with the text or, if ``start`` is long, indent by 4."""
    width = line_width()
    indent = " " * (len(start) if len(start) <= width - _MIN_PROSE_COLUMNS else 4)
    return [line.rstrip() for line in fold_line(" ".join(text.split()), width, start, indent)]
