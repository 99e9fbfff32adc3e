"""How a rank exits: together with all others or, if it fails alone, by aborting the job and printing the cause once.

Several ranks often fail together. Each waits in proportion to its rank before it prints the cause and calls ``MPI_Abort``, so the
lowest rank prints first and its abort ends the others while they wait. Ranks with an MPI error wait longer, because most MPI errors
result from the loss of another rank.

The module also guards the ranks between MPI's start and the complete world: an exception in one rank, or a missing rank, ends all
ranks. Each rank counts its steps while joining. If a rank has not joined before the timeout, a thread reports its step to rank 0.
Rank 0 names the ranks that block the others, which are those that sent no report or else those with the fewest steps.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np

from hetero_mpi.comm.ranks.collectives import decode, encode
from hetero_mpi.comm.ranks.ulfm import Pause, RankLost, translate_losses
from hetero_mpi.comm.ranks.world import CollectiveUserError, World, describe_problems
from hetero_mpi.util import units
from hetero_mpi.util.background import Background
from hetero_mpi.util.errors import ExitCode, UserError
from hetero_mpi.util.terminal import write_text

_LOG = logging.getLogger(__name__)
EXIT_WAIT_S = 1.0
"""Time that a failing rank waits for the other ranks to end as well. After that it is considered to be failing alone."""
DELAY_PER_RANK_S = 0.3
"""A failing rank waits for this time multiplied by its rank before it prints the cause."""
MAX_RANK_DELAY_S = 1.5
"""Upper limit on that delay."""
MPI_ERROR_DELAY_S = 1.0
"""Additional delay if the cause is an MPI error."""
ABORT_TIMEOUT_S = 3
"""Time after the call of ``MPI_Abort`` at which an alarm signal ends the process."""


class Interrupted(KeyboardInterrupt):
    """Raised when a signal ends the job at once. ``when`` describes the saved state and what the user can do next."""

    def __init__(self, number: int, when: str) -> None:
        super().__init__(number)
        self.number, self.when = number, when

    def __str__(self) -> str:
        return f"asked to stop {self.when}"


def exit_together(world: World, problem: str | None, code: int) -> str | None:
    """Return the error message with which all ranks exit, or None on success. Aborts if this rank fails alone. Collective."""
    try:
        if not _all_ranks_arrived(world.guard, code):
            abort_job(world, problem if problem is not None else f"it ended with exit code {code}", code)
        text = describe_problems(world.all_gather_json(problem), world.hosts)
        return text and world.with_resume_hint(text)
    except RankLost:  # all work was done
        world.lost_ranks = True
        return problem


def _all_ranks_arrived(guard: Any, code: int) -> bool:
    """Wait for all ranks. If this rank fails (``code != 0``) and others have not arrived after ``EXIT_WAIT_S``, return False."""
    local_code, gathered_codes = np.array([code], np.int32), np.empty(guard.Get_size(), np.int32)
    deadline, pause = time.monotonic() + EXIT_WAIT_S, Pause(0.01)
    with translate_losses():
        request = guard.Iallgather(local_code, gathered_codes)
        while not request.Test():
            if code != 0 and time.monotonic() > deadline:
                return False
            pause.rest()
    return True


def exit_unfinalized(world: World, code: int) -> NoReturn:
    """Exit the process without ``MPI_Finalize``, which would wait forever for lost ranks."""
    # The launcher kills all ranks when one exits with an error, and rank 0 may still have to print it.
    with suppress(RankLost):
        _all_ranks_arrived(world.guard, ExitCode.FAILED)
    write_text("", sys.stdout)
    write_text("", sys.stderr)
    logging.shutdown()
    os._exit(code)


def abort_job(world: World, cause: BaseException | str, code: int = ExitCode.FAILED) -> NoReturn:
    """Print rank, host, action and cause, and end all ranks of the job with ``code``, or with 128 + n after signal n."""
    from mpi4py import MPI

    interrupted = isinstance(cause, KeyboardInterrupt)
    # The first abort makes the launcher terminate the other ranks: a handler that postpones SIGTERM would let them print too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_rank_delay_s(world) + (MPI_ERROR_DELAY_S if isinstance(cause, (MPI.Exception, RankLost)) else 0.0))
    heading = f"rank {world.rank}/{world.size} on {world.host} {'was interrupted' if interrupted else 'failed'}"
    if interrupted:
        code = 128 + (cause.number if isinstance(cause, Interrupted) else signal.SIGINT)
    text = f"{heading} while {world.current_action}:\n{_cause_text(cause)}"
    if isinstance(cause, Exception) and logging.getLogger().handlers:  # else logging would print it on stderr, too
        _LOG.error(text)
    _abort(world, text, code)


def abort_with_text(world: World, text: str, code: int) -> NoReturn:
    """Print ``text`` and end all ranks of the job with ``code``. Callable from any thread."""
    time.sleep(_rank_delay_s(world))
    _abort(world, text, code)


def _rank_delay_s(world: World) -> float:
    return min(DELAY_PER_RANK_S, MAX_RANK_DELAY_S / world.size) * world.rank


def _abort(world: World, text: str, code: int) -> NoReturn:
    from mpi4py import MPI

    # A single write keeps the launcher from interleaving other ranks' output.
    write_text(f"\n{world.with_resume_hint(text)}\n", sys.stderr)
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
    """Have the kernel end this process if ``MPI_Abort`` hangs. This requires neither a thread nor the interpreter lock."""
    if not hasattr(signal, "alarm"):
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ABORT_TIMEOUT_S)


LIMIT_S = 60.0
"""Time limit from MPI's start until all ranks have joined, which normally takes about 10 ms."""
_REPORT_WAIT_S = 3.0
"""Time that rank 0 waits for the reports of other ranks. The others wait twice as long for rank 0."""
_POLL_INTERVAL_S = 0.05
_REPORT_TAG = 1


def initial_world(mpi: Any, library: str, thread_level: str) -> World:
    """Create the world as it is before the ranks exchange host names, with this rank's host in place of every host."""
    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    return World(comm, rank, size, (os.uname().nodename,) * size, library, thread_level)


@contextmanager
def joining(world: World, watched: bool) -> Iterator[None]:
    """Guard the block in which the ranks join. CollectiveUserError propagates; any other exception aborts a multi-rank job.

    If ``watched`` is true, all ranks start at about the same time, so a rank that has not joined in time is considered hanging.
    """
    joined = threading.Event()
    watching = None
    if watched and world.size > 1 and world.thread_level == "multiple":
        watching = Background("watching the ranks join", partial(_watch_join, world, joined))
    try:
        yield
    except CollectiveUserError:
        raise
    except BaseException as error:
        if world.size == 1:
            raise
        cause = str(error) if isinstance(error, UserError) else error
        abort_job(world, cause, getattr(error, "exit_code", ExitCode.FAILED))
    finally:
        joined.set()
    world.current_action = "starting"
    if watching is not None:
        watching.finish()


def join_step(world: World, text: str) -> None:
    """Record that this rank begins the next step of joining. ``text`` describes it, as in "waiting for all ranks"."""
    world.current_action = f"joining the other ranks, {text}"
    world.activity.marks += 1


def _watch_join(world: World, joined: threading.Event) -> None:
    """Abort the job if this rank has not joined within ``LIMIT_S``."""
    from mpi4py import MPI

    if joined.wait(LIMIT_S):
        return
    report = world.activity.marks, world.host, world.current_action
    if world.rank > 0:
        MPI.COMM_WORLD.Isend(encode(report), 0, _REPORT_TAG)
        if not joined.wait(2 * _REPORT_WAIT_S):
            abort_with_text(world, _late_text({world.rank: report}, [0]), ExitCode.HUNG)
        return
    reports, status, deadline = {0: report}, MPI.Status(), time.monotonic() + _REPORT_WAIT_S
    while len(reports) < world.size and time.monotonic() < deadline and not joined.wait(_POLL_INTERVAL_S):
        while MPI.COMM_WORLD.Iprobe(tag=_REPORT_TAG, status=status):
            message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            MPI.COMM_WORLD.Recv(message, status.Get_source(), _REPORT_TAG)
            reports[status.Get_source()] = decode(message)
    if not joined.is_set():
        silent_ranks = [rank for rank in range(world.size) if rank not in reports]
        abort_with_text(world, _late_text(reports, silent_ranks), ExitCode.HUNG)


def _late_text(reports: Mapping[int, tuple[int, str, str]], silent_ranks: Sequence[int]) -> str:
    """Describe the ranks that block the others. ``reports`` maps ranks to (number of steps, host, current action)."""
    fewest_steps = min(steps for steps, _, _ in reports.values())
    late = {rank: f"on {host}: {doing}" for rank, (steps, host, doing) in reports.items() if steps == fewest_steps}
    late = dict.fromkeys(silent_ranks, "does not answer: stopped, or disconnected from the others") or late
    return "\n".join(
        [
            f"The ranks have not joined within {units.seconds(LIMIT_S)} after MPI's start: the job ends with exit code "
            f"{ExitCode.HUNG}. All ranks are waiting for:",
            *(f"  rank {rank} {where}" for rank, where in sorted(late.items())),
            "Check these processes and their hosts. If every rank is listed, messages between them are not arriving: "
            "`python -m hetero_mpi doctor` with the same hosts tests the network.",
        ]
    )
