"""stdout, shared by printed lines and the screen: lines are printed above the screen."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Protocol, TextIO


class Watched(Protocol):
    """A screen on a terminal."""

    def say(self, text: str) -> None:
        """Print a line above it."""


SHOWN: list[Watched] = []
"""The screens on the terminal now: one or none."""
_LOCK = threading.RLock()
_FALLBACK = os.terminal_size((100, 30))
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def write_line(text: str) -> None:
    """Print a line to stdout, above the screen where there is one."""
    with _LOCK:
        if SHOWN:
            SHOWN[-1].say(text)
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def is_terminal(stream: TextIO) -> bool:
    """Does a person watch this stream?

    Open MPI gives every rank a pseudo-terminal, even when its own output goes to a file. Then the stdout of the launcher, which is
    this process's parent, decides. Where that cannot be seen the answer is no, since plain lines are right everywhere.
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
    """Columns and lines of the terminal that is watched; the launcher's, where there is a launcher."""
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


def _launchers_stdout() -> str:
    return f"/proc/{os.getppid()}/fd/1"
