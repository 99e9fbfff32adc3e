"""Signals that ask a run to end: SIGINT (Ctrl-C), SIGTERM and SIGUSR1.

* During training, the first signal is only recorded. The decision of the next step carries it to all ranks, which write a
  checkpoint and exit with ``ExitCode.STOPPED``.
* Before the first step there is nothing to save, so the job ends at once.
* During recovery from a lost rank, the signal is recorded as well: the recovered state is saved after its first step.
* A second SIGINT or SIGTERM ends the process at once through the signal's default action.
* A second SIGUSR1 has no effect, because SLURM sends one before the time limit even if the user has already sent a signal.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hetero_mpi.comm.ranks.leave import Interrupted
from hetero_mpi.util.errors import ABORT_SIGNALS

ECHO_S = 1.0
"""Time within which a second signal is taken for a duplicate: terminals signal process groups, and launchers forward signals."""
_BEFORE_STEPS = "before the first step, so this launch saved nothing" + (
    ". Under SLURM: increase --time: it must cover startup (imports, profile, plan, weights), a few steps and --signal's seconds"
    if "SLURM_JOB_ID" in os.environ
    else ""
)
_AFTER_STEPS = "after the last step, before the result was written"
REQUESTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """Records whether this process has been asked to end. A context manager, for the main thread, that handles the signals.

    Attributes:
        asked_by: the first signal received; None if none has been received.
    """

    def __init__(self) -> None:
        self.asked_by: signal.Signals | None = None
        self._noting = self._aside = False
        self._saved = _BEFORE_STEPS
        self._first_s = 0.0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether the process has been asked to end."""
        return self.asked_by is not None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._handle) for number in REQUESTS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the first signal instead of ending the process, even after an error in the block (the run may recover)."""
        self._noting = True
        yield
        self._noting, self._saved = False, _AFTER_STEPS

    @contextmanager
    def aside(self, defer: bool) -> Iterator[None]:
        """If ``defer`` is set, pass SIGINT to the previously installed handler within the block."""
        self._aside = defer
        yield
        self._aside = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._aside and number == signal.SIGINT and callable(before := self._before[number]):
            before(number, frame)
            return
        now = time.monotonic()
        if self.asked_by is None:
            self.asked_by, self._first_s = signal.Signals(number), now
            if not self._noting:
                raise Interrupted(number, self._saved)
        elif number in ABORT_SIGNALS and now - self._first_s > ECHO_S:
            os.write(2, b"asked to stop a second time: exiting immediately, without waiting for a checkpoint\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
