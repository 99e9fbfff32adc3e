"""Collective work inside a user's Python program: MPI stays initialised, and the program goes on after it.

``mpi_start.run_guarded`` is for commands, which end with their work. Here the world is joined once. A problem that all ranks share
is raised on all of them; any other problem ends the job.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from hetero_mpi.comm.ranks.leave import end_alone, end_together, leave_now
from hetero_mpi.comm.ranks.mpi_start import join
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.errors import ExitCode, UserError

T = TypeVar("T")


class _Script:
    """This process's part in the user's program: the world it has joined, and whether it has failed."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.failed = False

    def joined(self) -> World:
        """The world; the first call joins it, and is collective."""
        if self.world is None:
            self.world = join()
            self._hook = sys.excepthook
            sys.excepthook = self._uncaught
            atexit.register(self._leave)
        return self.world

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The hook for uncaught exceptions: ends all ranks, as the others would wait for this one for ever."""
        self.failed = True
        assert self.world is not None
        if isinstance(error, CollectiveUserError):  # on all ranks: one tells it
            if self.world.rank == 0:
                error.__cause__, error.__suppress_context__ = None, True  # the text says what is to be known
                self._hook(kind, error, trace)
        elif isinstance(error, Exception) and self.world.size > 1:
            end_alone(self.world, error)
        else:
            self._hook(kind, error, trace)

    def _leave(self) -> None:
        """At exit: leave without ``MPI_Finalize`` where ranks have died, as it would wait for them without end."""
        if self.world is not None and self.world.bereaved:
            leave_now(ExitCode.FAILED if self.failed else ExitCode.DONE)


_SCRIPT = _Script()


def collectively(work: Callable[[World], T]) -> T:
    """Run ``work`` on all ranks together and return its result. Collective; the first call initialises MPI.

    :raises UserError: the same on all ranks. Any other exception, or a problem of one rank alone while others go on, is printed
        with rank, host and action, and ends all ranks.
    """
    world = _SCRIPT.joined()
    done: list[T] = []
    problem: UserError | None = None
    try:
        done.append(work(world))
    except CollectiveUserError:
        raise
    except UserError as error:
        problem = error
    except BaseException as error:
        end_alone(world, error)
    finally:
        world.doing = "between calls of hetero_mpi"
    text = end_together(world, str(problem) if problem else None, problem.exit_code if problem else 0)
    if text is not None:
        raise CollectiveUserError(text, (problem or UserError).exit_code) from problem
    return done[0]
