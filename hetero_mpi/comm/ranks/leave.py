"""The end of a rank: together with all others; or, when it fails alone, by ending all of them and printing the cause once.

Several ranks often fail together. Each waits in proportion to its rank before it prints and calls ``MPI_Abort``. So the lowest rank
prints first, and its abort ends the others while they wait. Errors of MPI itself wait longest, as most are consequences of another
rank's death.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import numpy as np

from hetero_mpi.comm.ranks.back_off import Pause
from hetero_mpi.comm.ranks.ulfm import RankLost, losses
from hetero_mpi.comm.ranks.world import World, describe_problems
from hetero_mpi.util.errors import ExitCode
from hetero_mpi.util.terminal import write_text

_LOG = logging.getLogger(__name__)
SETTLE_S = 1.0
"""Seconds that a failing rank waits for the others to end too, before it counts as failing alone."""
TURN_S = 0.3
"""Seconds per rank that a failing rank waits before it prints."""
LONGEST_TURN_S = 1.5
"""Upper limit of that wait."""
ECHO_S = 1.0
"""Further wait where the failure is an error of MPI."""
ABORT_S = 3
"""Seconds after ``MPI_Abort`` after which the alarm clock ends the process."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the job at once. ``when``: text that says what is saved and what to do."""

    def __init__(self, number: int, when: str) -> None:
        super().__init__(number)
        self.number, self.when = number, when

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} {self.when}"


def end_together(world: World, problem: str | None, code: int) -> str | None:
    """The error text that the ranks end with; None: all is well. Does not return where this rank alone fails. Collective."""
    try:
        if not _all_have_come(world.guard, code):
            end_alone(world, problem if problem is not None else f"it ended with exit code {code}", code)
        text = describe_problems(world.all_gather_json(problem), world.hosts)
        return text and world.resumable(text)
    except RankLost:  # everything had been done
        world.bereaved = True
        return problem


def _all_have_come(guard: Any, code: int) -> bool:
    """Wait for all ranks; False: this one fails (``code != 0``) and another has not come to its end within ``SETTLE_S``."""
    mine, everyone = np.array([code], np.int32), np.empty(guard.Get_size(), np.int32)
    deadline, pause = time.monotonic() + SETTLE_S, Pause(0.01)
    with losses():
        request = guard.Iallgather(mine, everyone)
        while not request.Test():
            if code != 0 and time.monotonic() > deadline:
                return False
            pause.rest()
    return True


def leave_now(code: int) -> NoReturn:
    """End this process without ``MPI_Finalize``, which would wait for dead ranks for ever."""
    write_text("", sys.stdout)
    write_text("", sys.stderr)
    logging.shutdown()
    os._exit(code)


def end_alone(world: World, cause: BaseException | str, code: int = ExitCode.FAILED) -> NoReturn:
    """Print rank, host, action and cause, and end every rank of the job with ``code`` (after signal n: 128 + n)."""
    from mpi4py import MPI

    interrupted = isinstance(cause, KeyboardInterrupt)
    # Whoever aborts first has the launcher terminate the rest: a handler that postpones SIGTERM would let them
    # speak too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_turn_s(world) + (ECHO_S if isinstance(cause, (MPI.Exception, RankLost)) else 0.0))
    heading = f"rank {world.rank}/{world.size} on {world.host} {'was interrupted' if interrupted else 'failed'}"
    if interrupted:
        code = 128 + (cause.number if isinstance(cause, Interrupted) else signal.SIGINT)
    text = f"{heading} while {world.doing}:\n{_cause_text(cause)}"
    if (
        isinstance(cause, Exception) and logging.getLogger().handlers
    ):  # without one logging would print it on stderr, too
        _LOG.error(text)
    _abort(world, text, code)


def end_all(world: World, text: str, code: int) -> NoReturn:
    """Print ``text``, and end every rank of the job with ``code``. From any thread."""
    time.sleep(_turn_s(world))
    _abort(world, text, code)


def _turn_s(world: World) -> float:
    return min(TURN_S, LONGEST_TURN_S / world.size) * world.rank


def _abort(world: World, text: str, code: int) -> NoReturn:
    from mpi4py import MPI

    # One write, so that the launcher does not mix other ranks' output into it.
    write_text(f"\n{world.resumable(text)}\n", sys.stderr)
    write_text("", sys.stdout)
    _set_alarm()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _cause_text(cause: BaseException | str) -> str:
    if isinstance(cause, str):
        return cause
    if isinstance(cause, Interrupted):
        return str(cause)
    if isinstance(cause, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return "".join(traceback.format_exception(type(cause), cause, cause.__traceback__)).rstrip()


def _set_alarm() -> None:
    """Have the kernel end this process if ``MPI_Abort`` does not return. That needs neither a thread nor the interpreter lock."""
    if not hasattr(signal, "alarm"):
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ABORT_S)
