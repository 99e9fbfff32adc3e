"""The loaded MPI library and the launcher of this process, identified from text and environment variables only.

Both are found without initialising MPI. A launcher of one MPI with a library of another would silently start N separate worlds of
one rank, or end in the library's abort. Here that becomes a message with a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
JOINED_VARIABLE = "HETERO_MPI_JOINED"
"""Environment variable: to this file a rank writes a line when it has joined the others (``launch.launcher.launcher``)."""

_VERSION = r"(\d+(?:\.\d+)*\w*)"
# Order matters: MPICH's descendants also mention MPICH in their text.
_LIBRARY_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (OPEN_MPI, OPEN_MPI, rf"Open MPI v{_VERSION}"),
    ("Intel MPI", MPICH, rf"Intel\(R\) MPI Library (?:v|Version )?{_VERSION}"),
    ("Cray MPICH", MPICH, rf"CRAY MPICH version {_VERSION}"),
    ("MVAPICH", MPICH, rf"MVAPICH\d? Version\s*:\s*{_VERSION}"),
    (MPICH, MPICH, rf"MPICH Version:\s*{_VERSION}"),
)


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library: name, version and family, from its own version text."""

    name: str
    """``Open MPI``, ``MPICH``, ``Intel MPI``, ``Cray MPICH``, ``MVAPICH`` or ``unknown MPI``."""
    family: str
    """The launcher protocol it speaks: ``Open MPI``, ``MPICH``, or the name itself."""
    version: str

    @property
    def major(self) -> str:
        return self.version.split(".")[0]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def parse_library_version(text: str) -> MpiLibrary:
    """The library behind the text of ``MPI_Get_library_version``."""
    for name, family, pattern in _LIBRARY_PATTERNS:
        found = re.search(pattern, text)
        if found:
            return MpiLibrary(name, family, found.group(1))
    first_line = text.strip("\0\n ").split("\n")[0]
    return MpiLibrary("unknown MPI", "unknown MPI", first_line[:60])


@dataclass(frozen=True)
class LaunchedAs:
    """How this process was started: by which launcher, as which of how many ranks."""

    launcher: str
    """The launcher's name, for messages."""
    family: str
    """``Open MPI``, ``MPICH`` or ``SLURM``."""
    size: int
    rank: int


def _read(environment: Mapping[str, str], launcher: str, family: str, size: str, rank: str) -> LaunchedAs | None:
    try:
        return LaunchedAs(launcher, family, int(environment[size]), int(environment.get(rank, "0")))
    except (KeyError, ValueError):
        return None


def launched_as(environment: Mapping[str, str], library_family: str) -> LaunchedAs | None:
    """The launcher of this process, from its environment; ``None``: there is none, the process runs alone.

    Launchers may be nested (an MPI launcher inside an srun step, for instance). The variables of the loaded library's own launcher
    come first, then the other MPI launcher's. SLURM's come last, and only those of a *step* count: inside a batch script SLURM
    describes the job and not this process.
    """
    open_mpi = _read(environment, "Open MPI's mpirun", OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    pmi = _read(environment, "MPICH's mpiexec (or another PMI launcher)", MPICH, "PMI_SIZE", "PMI_RANK")
    slurm = _read(environment, "srun", "SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    ordered = (pmi, open_mpi, slurm) if library_family == MPICH else (open_mpi, pmi, slurm)
    return next((launched for launched in ordered if launched is not None), None)


def foreign_launcher_problem(launched: LaunchedAs | None, library: MpiLibrary) -> str | None:
    """A message where the pair would fail inside ``MPI_Init``: Open MPI's launcher with an MPICH library. Else ``None``."""
    if launched is None or launched.family != OPEN_MPI or library.family != MPICH:
        return None
    return _mismatch(launched, f"the loaded MPI library ({library}) belongs to another launcher")


def world_size_problem(launched: LaunchedAs | None, library: MpiLibrary, world_size: int) -> str | None:
    """What is wrong with a world of ``world_size`` ranks under this launcher, or ``None``."""
    if launched is None or launched.size == world_size:
        return None
    return _mismatch(launched, f"the loaded MPI library ({library}) sees a world of {world_size}")


def _mismatch(launched: LaunchedAs, but: str) -> str:
    return (
        f"{launched.launcher} started {launched.size} process{'es' if launched.size != 1 else ''}, but {but}: "
        "launcher and library must belong together. Start with "
        f"`python -m hetero_mpi launch -np {launched.size} -- ...`, which finds the launcher of this library."
    )
