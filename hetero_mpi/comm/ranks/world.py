"""The world: all ranks of a job, their collective calls, and errors that all of them raise. ``mpi_start`` creates it.

Messages are JSON and raw arrays. Nothing is pickled: mpi4py's lower-case methods are never used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.collectives import MAX_IDLE_SLEEP_S, Collectives, decode, encode
from hetero_mpi.comm.ranks.ulfm import Pause
from hetero_mpi.util.errors import Problem, UserError

T = TypeVar("T")
RELEASE_POLL_S = 0.05
"""Interval at which a sleeping rank checks whether it has been released."""
_RELEASE_TAG, _ASK_TAG = 1, 2


class CollectiveUserError(UserError):
    """A user error that every rank raises at the same point. Rank 0 prints it, and all ranks exit cleanly."""


Outcome = list[Any] | None
"""Serialised outcome of a block on one rank: kind, text, exit code and problems of its error, or None for success."""


@dataclass
class Activity:
    """The current activity of a rank. All worlds to which the rank belongs share this object."""

    text: str = "starting"
    waits_for: str | None = None
    """Why the current collective call is waiting, or None if it is not."""
    marks: int = 0
    """Progress counter of the current activity."""
    busy: int = 0
    """Number of active blocks, on any thread, that may take long without visible progress."""
    resume_text: Callable[[], str] = str
    """Returns the command that resumes a run that ends early, or "" if there is nothing to resume."""


@dataclass
class World(Collectives):
    """All ranks of the job (``MPI.COMM_WORLD``), or some of them.

    Methods are collective unless documented otherwise: every rank calls them in the same order, on its main thread, with no
    transport requests in flight.
    """

    hosts: tuple[str, ...]
    """Host of each rank. Ranks have the same host if they share its name *and* memory; a second host of that name is ``name#2``."""
    library: str
    """Name and version of the MPI library, such as ``Open MPI 5.0.11``."""
    thread_level: str
    """Thread support of the MPI library: ``multiple``, ``serialized``, ``funneled`` or ``single``."""
    activity: Activity = field(default_factory=Activity)
    numbers: tuple[int, ...] = ()
    """Number of each rank in the complete job, for messages to the user. Empty if this is the complete job."""
    guard: Any = None
    """Parent communicator of ``comm``, used only when the job ends."""
    lost_ranks: bool = False
    """Whether ranks have been lost, so that this world contains only the survivors (``comm.ranks.mpi_start``)."""

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its host, in rank order."""
        return self.hosts[: self.rank].count(self.host)

    @property
    def local_size(self) -> int:
        return self.hosts.count(self.host)

    @property
    def current_action(self) -> str:
        """The current action of this rank, for error messages. Set it as in ``world.current_action = "loading weights"``."""
        return self.activity.text

    @current_action.setter
    def current_action(self, text: str) -> None:
        self.activity.text = text

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Mark a block that waits for other ranks in a collective call. ``reason`` tells users why nothing happens."""
        self.activity.waits_for = reason
        try:
            yield
        finally:
            self.activity.waits_for = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark a block that may take long on this rank without being a hang, such as closing a large file. On any thread."""
        self.activity.busy += 1
        try:
            yield
        finally:
            self.activity.busy -= 1

    def marked(self, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items``, reporting each to the watchdog as progress. Callable from any thread."""
        for item in items:
            self.activity.marks += 1
            yield item

    def with_resume_hint(self, text: str) -> str:
        """Append the command that resumes the job to ``text``, unless ``text`` contains one. Not collective."""
        remedy = self.activity.resume_text()
        return f"{text}\n{remedy}" if remedy and "--resume" not in text else text

    def agree(self, problem: UserError | None) -> None:
        """Raise CollectiveUserError on every rank if any has a problem. It lists each distinct problem with its ranks and hosts."""
        _raise(self._combined_outcome(_outcome(problem)))

    def _combined_outcome(self, outcome: Outcome) -> Outcome:
        """Combine the problems of all ranks into one, with the kind of the first. The result is equal on every rank."""
        outcomes = self.all_gather_json(outcome)
        text = describe_problems(
            [rank_outcome[1] if rank_outcome else None for rank_outcome in outcomes], self.hosts, self.numbers
        )
        if text is None:
            return None
        kind, _, code, problems = next(rank_outcome for rank_outcome in outcomes if rank_outcome)
        return [kind, text, code, problems]

    def leaves_together(self, error: BaseException | None) -> bool:
        """Return whether all ranks leave a block that this rank leaves with ``error`` (None for no error). Not collective."""
        return error is None or isinstance(error, CollectiveUserError) or self.size == 1

    def share_problem(self, problem: CollectiveUserError | None) -> None:
        """Raise the problem of the lowest rank that has one on every rank. Some ranks have already raised it together."""
        _raise(next(filter(None, self.all_gather_json(_outcome(problem))), None), problem)

    def collective_errors(self, action: str) -> AbstractContextManager[None]:
        """Run a block on every rank; if it raises ``UserError`` on any, all ranks raise it. Sets ``current_action`` meanwhile.

        Any other exception propagates at once. The block must not communicate, because ranks without an error would wait for a rank
        that has left the block.
        """
        return self._collective_block(action, self._combined_outcome)

    def on_leader(self, action: str) -> AbstractContextManager[None]:
        """Run a block in which only rank 0 works. The other ranks have nothing to do and sleep until the outcome is known.

        If rank 0 raises ``UserError``, all ranks raise it at the end of the block. The block must not communicate.
        """
        return self._collective_block(action, self._leader_outcome)

    def _leader_outcome(self, local_outcome: Outcome) -> Outcome:
        """Return rank 0's outcome on every rank."""
        assert self.rank == 0 or local_outcome is None, "only rank 0 works in a led block"
        outcome: Outcome = self.broadcast_json(local_outcome, longest_s=MAX_IDLE_SLEEP_S)
        return outcome

    @contextmanager
    def _collective_block(self, action: str, combine: Callable[[Outcome], Outcome]) -> Iterator[None]:
        """Run a block and defer its ``UserError`` until ``combine``, which every rank calls, has merged the ranks' outcomes."""
        previous_action, self.current_action = self.current_action, action
        problem: UserError | None = None
        try:
            yield
        except CollectiveUserError:
            raise
        except UserError as error:
            problem = error
        _raise(combine(_outcome(problem)), problem)
        self.current_action = previous_action

    def subset(self, ranks: Sequence[int]) -> World | None:
        """Return a world of only these ranks (in increasing order), renumbered; None on other ranks. Collective over this world.

        Messages to the user still show the ranks' numbers in the complete job.
        """
        from mpi4py import MPI

        member = self.rank in ranks
        comm = ulfm.make_communicator(self.comm, lambda: self.comm.Split(0 if member else MPI.UNDEFINED, self.rank))
        if not member:
            return None
        hosts = tuple(self.hosts[rank] for rank in ranks)
        numbers = tuple(self.numbers[rank] if self.numbers else rank for rank in ranks)
        return replace(self, comm=comm, rank=comm.Get_rank(), size=comm.Get_size(), hosts=hosts, numbers=numbers)

    def dissolve(self) -> None:
        """Free the communicator of a ``subset`` that is no longer used, and its children. Collective over the subset."""
        ulfm.free(self.comm)

    def release(self, ranks: Sequence[int], problem: CollectiveUserError | None, value: Any = None) -> None:
        """Wake ``ranks`` from ``sleep_until_released`` with a JSON value or an error. Does nothing on ranks other than 0."""
        if self.rank == 0:
            payload = encode([_outcome(problem), value])
            with ulfm.translate_losses():
                sent = [self.comm.Isend(payload, dest=rank, tag=_RELEASE_TAG) for rank in ranks]
                for request in sent:  # MPI's blocking wait would ignore signals
                    ulfm.finish(request, Pause(RELEASE_POLL_S))

    def ask(self) -> None:
        """Tell rank 0, which polls ``asked``, that this rank has been asked to end. Not collective."""
        with ulfm.translate_losses():
            self.comm.Send(np.empty(0, np.uint8), dest=0, tag=_ASK_TAG)

    def asked(self) -> bool:
        """Return, on rank 0, whether a rank has called ``ask`` since the last poll. Takes a microsecond."""
        from mpi4py import MPI

        requested = False
        with ulfm.translate_losses():
            while self.rank == 0 and self.comm.Iprobe(source=MPI.ANY_SOURCE, tag=_ASK_TAG):
                self.comm.Recv(np.empty(0, np.uint8), source=MPI.ANY_SOURCE, tag=_ASK_TAG)
                requested = True
        return requested

    def sleep_until_released(self, stop_requested: Callable[[], bool] = lambda: False) -> Any:
        """Wait for rank 0's ``release`` and return its value, or raise its CollectiveUserError. Unlike MPI, sleeps between polls.

        When ``stop_requested()`` first returns true, because this rank has been asked to end, rank 0 is notified.
        """
        from mpi4py import MPI

        status, check = MPI.Status(), ulfm.RevocationCheck()
        reported = False
        with ulfm.translate_losses():
            while not self.comm.Iprobe(source=0, tag=_RELEASE_TAG, status=status):
                check()
                if not reported and stop_requested():
                    reported = True
                    self.ask()
                time.sleep(RELEASE_POLL_S)
            payload = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.comm.Recv(payload, source=0, tag=_RELEASE_TAG)
        outcome, value = decode(payload)
        _raise(outcome)
        return value


def _outcome(problem: UserError | None) -> Outcome:
    if problem is None:
        return None
    return [problem.kind, str(problem), problem.exit_code, [[detail.kind, detail.text] for detail in problem.problems]]


def _raise(outcome: Outcome, cause: UserError | None = None) -> None:
    if outcome is not None:
        kind, text, code, problems = outcome
        values = cause.values if cause is not None else {}
        raise CollectiveUserError(
            kind, text, exit_code=code, problems=[Problem(*detail) for detail in problems], **values
        ) from cause


def describe_problems(problems: Sequence[str | None], hosts: Sequence[str], numbers: Sequence[int] = ()) -> str | None:
    """Combine the problems that ranks report (None for no problem) into one message, or return None if there are no problems.

    A problem that all ranks share is stated without ranks; other problems are listed with their ranks and hosts. ``numbers`` has
    the ranks' numbers in the complete job if those differ from their positions here.
    """
    distinct = list(dict.fromkeys(problem for problem in problems if problem is not None))
    if not distinct:
        return None
    if len(distinct) == 1 and None not in problems:
        return distinct[0]
    lines = []
    for text in distinct:
        places = [
            f"{numbers[rank] if numbers else rank} on {hosts[rank]}"
            for rank, problem in enumerate(problems)
            if problem == text
        ]
        lines.append(f"rank{'s' if len(places) > 1 else ''} {', '.join(places)}: {text}")
    return "\n".join(lines)
