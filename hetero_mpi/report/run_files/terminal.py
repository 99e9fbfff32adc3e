"""A few lines at the bottom of a terminal that are drawn anew in place; what is said meanwhile goes above them.

A thread draws, twice a second: whoever has something to show only stores it. Where no person watches, nothing here is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from hetero_mpi.text import printable

EVERY_S = 0.5
_FALLBACK = os.terminal_size((100, 30))
_LOCK = threading.RLock()
_shown: list[Screen] = []
"""The screen that is on the terminal now, if any."""
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def write_line(text: str) -> None:
    """Print a line to stdout, above the screen where there is one."""
    with _LOCK:
        screen = _shown[-1] if _shown else None
        if screen is not None:
            screen.clear()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if screen is not None:
            screen.draw()


def is_terminal(stream: TextIO) -> bool:
    """Does a person watch this stream?

    Open MPI gives every rank a pseudo-terminal, also when its own output goes to a file; then the launcher's stdout, which
    is this process's parent's, tells. Where that cannot be seen the answer is no: plain lines are right everywhere.
    """
    if not stream.isatty():
        return False
    if not any(name in os.environ for name in _LAUNCHED):
        return True
    try:
        return os.readlink(_launchers_stdout()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Columns and lines of the terminal that is watched: the launcher's, where a launcher stands between."""
    with contextlib.suppress(OSError, ValueError):
        if any(name in os.environ for name in _LAUNCHED):
            descriptor = os.open(_launchers_stdout(), os.O_RDONLY | os.O_NOCTTY)
            try:
                size = os.get_terminal_size(descriptor)
            finally:
                os.close(descriptor)
        else:
            size = os.get_terminal_size(stream.fileno())
        if size.columns > 0 and size.lines > 0:
            return size
    return _FALLBACK


class Screen:
    """Lines that are drawn anew while the context lasts, and stay as they are at its end.

    Args:
        stream: a terminal.
        lines: what to show in so many (columns, rows); called from the drawing thread. Bold where a line begins with a star.
        every_s: seconds between two drawings.
    """

    def __init__(self, stream: TextIO, lines: Callable[[int, int], Sequence[str]], every_s: float = EVERY_S) -> None:
        self._stream, self._lines, self._every_s = stream, lines, every_s
        self._drawn = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def clear(self) -> None:
        """Take the lines away; the cursor is then where they began."""
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def draw(self) -> None:
        """Draw the lines over what was drawn before."""
        columns, rows = terminal_size(self._stream)
        lines = [line[: max(1, columns - 1)] for line in self._lines(columns - 1, rows - 1)][: max(1, rows - 1)]
        back = f"\x1b[{self._drawn}A" if self._drawn else ""
        # Each line is overwritten and what it leaves over is erased: nothing flickers.
        text = "".join(f"{_styled(printable(line))}\x1b[K\n" for line in lines)
        self._stream.write(f"{back}{text}\x1b[J")
        self._stream.flush()
        self._drawn = len(lines)

    def __enter__(self) -> Screen:
        with _LOCK:
            _shown.append(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with _LOCK:
            with contextlib.suppress(OSError, ValueError):  # the terminal may have gone: no reason to fail
                self.draw()
            _shown.remove(self)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with _LOCK, contextlib.suppress(OSError, ValueError):
                self.draw()


def _styled(line: str) -> str:
    return f"\x1b[1m{line[1:]}\x1b[0m" if line.startswith("*") else line


def _launchers_stdout() -> str:
    return f"/proc/{os.getppid()}/fd/1"
