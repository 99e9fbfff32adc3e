"""Passes on what launcher and ranks print, filters their stderr, and reads from it what the launcher's exit code does not say.

Whoever reads this process's own output may go away (``| head``): it is read on, as the launcher would end the job.

Open MPI prints a box between lines of dashes for every exit code but 0, and for every rank that aborts, also where the job has
given the reason already. Under fault tolerance its launcher ends with exit code 0 when it loses a host's daemon, and the job with
it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, TextIO

from hetero_mpi.background import Background
from hetero_mpi.comm.ranks.library import ENDED_LINE
from hetero_mpi.errors import ExitCode

_LINE = b"-" * 74
_BEGINS = (b"prterun ", b"PRTE has lost communication", b"MPI_ABORT was invoked")
_ABORTED = (b"MPI_ABORT was invoked", b'calling\n"abort"')
"""Words in boxes about a rank that has printed its reason (``comm.ranks.leave``)."""
_FAILED = b"exited with non-zero status"
_LOST = b"PRTE has lost communication"
_ENDED = ENDED_LINE.encode()
_NOBODY_LEFT = b"launch: no rank is left, and none has told that the job has come to its end\n"
_TOLD = (ExitCode.USER_ERROR, ExitCode.STOPPED)
"""Exit codes whose reason the job has printed."""
_PATIENCE_S = 2.0
"""Longest wait for the end of stderr, seconds: processes that the launcher left behind may hold it open."""


class ErrorStream:
    """Reads ``stream``, a launcher's stderr, to its end on a thread of its own, and passes on what tells something.

    ``output``: its stdout, all of which is passed on, on another thread. ``outlives``: the launcher lets ranks die, and ends with
    exit code 0 when none is left.
    """

    def __init__(self, stream: IO[bytes], output: IO[bytes] | None = None, outlives: bool = False) -> None:
        self._stream, self._outlives = stream, outlives
        self._box: list[bytes] = []
        """Lines since one of dashes, while they may still become a box."""
        self._held = b""
        """Complete boxes that say no more than an exit code."""
        self._lost = self._ended = False
        self._reading = [Background("passing on the launcher's stderr", self._read)]
        if output is not None:
            self._reading.append(Background("passing on the launcher's stdout", lambda: _pass_on(output)))

    def finish(self, code: int) -> int:
        """The job's exit code, when the launcher ended with ``code``. Prints held boxes where the job has given no reason."""
        for reading in self._reading:
            reading.finish(_PATIENCE_S)
        if code not in _TOLD:
            _write(self._held)
        if code == 0 and self._outlives and not self._ended:
            _write(_NOBODY_LEFT)
        return int(ExitCode.FAILED) if code == 0 and (self._lost or (self._outlives and not self._ended)) else code

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError, ValueError):
            while piece := os.read(self._stream.fileno(), 65536):
                piece = piece.replace(b"\0", b"")  # Open MPI ends its boxes with one
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take(line + b"\n")
                if not self._box and not rest.startswith(b"-") and b"\x1e" not in rest:
                    _write(rest)
                    rest = b""
        _write(b"".join(self._box) + rest)

    def _take(self, line: bytes) -> None:
        if _ENDED in line:
            self._ended = True
            _write(line.replace(_ENDED, b"").strip(b"\r\n"))
            return
        rule = line.strip(b"\r\n") == _LINE
        if not self._box and not rule:
            _write(line)
            return
        self._box.append(line)
        if len(self._box) == 2 and rule:
            _write(self._box.pop(0))
        elif len(self._box) > 1 and (rule or not self._box[1].startswith(_BEGINS)):
            self._close(b"".join(self._box))

    def _close(self, box: bytes) -> None:
        self._box = []
        if any(words in box for words in _ABORTED):
            return
        if _FAILED in box:
            self._held += box
            return
        self._lost = self._lost or _LOST in box
        _write(box)


def _pass_on(output: IO[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while piece := os.read(output.fileno(), 65536):
            _write(piece, sys.stdout)


def _write(piece: bytes, stream: TextIO | None = None) -> None:
    """Write to stderr, or ``stream``."""
    rest = memoryview(piece)
    with contextlib.suppress(OSError):  # its reader may have gone, and the job need not end for that
        while rest:
            rest = rest[os.write((stream or sys.stderr).fileno(), rest) :]
