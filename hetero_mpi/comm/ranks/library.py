"""Detects the loaded MPI library and the launcher of this process without initialising MPI.

If launcher and library belong to different MPI implementations, N separate worlds of one rank start silently or the library aborts.
This module turns the mismatch into a message with a remedy.

By default, Open MPI's ranks offer each other all network interfaces of their hosts. An unreachable interface (a VPN) or one with
the same address on several hosts (Docker's bridge) makes the job abort or hang. The launcher's daemon, which is the ranks' parent
process, is already connected to the other hosts, so its connections show which interfaces work.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
JOINED_VARIABLE = "HETERO_MPI_JOINED"
"""Environment variable with the file descriptor to which a rank reports that it has joined (``launch.launcher.command_line``)."""
ENDED_LINE = "\x1ehetero_mpi: the job has come to its end"
"""The last line that rank 0 writes to stderr if ``JOINED_VARIABLE`` was set. For a launcher that tolerates lost ranks, this line is
the only evidence that a rank survived."""

_INCLUDE, _EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
_DEVICES = Path("/sys/class/net")
_VERSION = r"(\d+(?:\.\d+)*\w*)"
# Order matters: the version texts of MPICH's descendants also contain "MPICH".
_LIBRARY_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (OPEN_MPI, OPEN_MPI, rf"Open MPI v{_VERSION}"),
    ("Intel MPI", MPICH, rf"Intel\(R\) MPI Library (?:v|Version )?{_VERSION}"),
    ("Cray MPICH", MPICH, rf"CRAY MPICH version {_VERSION}"),
    ("MVAPICH", MPICH, rf"MVAPICH\d? Version\s*:\s*{_VERSION}"),
    (MPICH, MPICH, rf"MPICH Version:\s*{_VERSION}"),
)


@dataclass(frozen=True)
class MpiLibrary:
    """Name, version and family of an MPI library, parsed from its version text."""

    name: str
    """``Open MPI``, ``MPICH``, ``Intel MPI``, ``Cray MPICH``, ``MVAPICH`` or ``unknown MPI``."""
    family: str
    """Launcher protocol that the library uses: ``Open MPI``, ``MPICH`` or, if unknown, the library's name."""
    version: str

    @property
    def major(self) -> str:
        return self.version.split(".")[0]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def parse_library_version(text: str) -> MpiLibrary:
    for name, family, pattern in _LIBRARY_PATTERNS:
        match = re.search(pattern, text)
        if match:
            return MpiLibrary(name, family, match.group(1))
    first_line = text.strip("\0\n ").split("\n")[0]
    return MpiLibrary("unknown MPI", "unknown MPI", first_line[:60])


@dataclass(frozen=True)
class LaunchInfo:
    """The launcher of this process, the process's rank and the number of ranks."""

    launcher: str
    """Name of the launcher, for messages to the user."""
    family: str
    """``Open MPI``, ``MPICH`` or ``SLURM``."""
    size: int
    rank: int


def _launch_info(environment: Mapping[str, str], launcher: str, family: str, size: str, rank: str) -> LaunchInfo | None:
    try:
        return LaunchInfo(launcher, family, int(environment[size]), int(environment.get(rank, "0")))
    except (KeyError, ValueError):
        return None


def detect_launcher(environment: Mapping[str, str], library_family: str) -> LaunchInfo | None:
    """Detect the launcher of this process from its environment; return None if the process was started without one.

    Launchers may be nested, such as an MPI launcher inside an srun step. The variables of the loaded library's own launcher take
    precedence over those of the other MPI launcher, and these over those of a SLURM *step*. Inside a batch script, SLURM's job
    variables describe the job rather than this process.
    """
    open_mpi = _launch_info(environment, "Open MPI's mpirun", OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    pmi = _launch_info(environment, "MPICH's mpiexec (or another PMI launcher)", MPICH, "PMI_SIZE", "PMI_RANK")
    slurm = _launch_info(environment, "srun", "SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    ordered = (pmi, open_mpi, slurm) if library_family == MPICH else (open_mpi, pmi, slurm)
    return next((launched for launched in ordered if launched is not None), None)


def foreign_launcher_problem(launched: LaunchInfo | None, library: MpiLibrary) -> str | None:
    """Return an error message if ``MPI_Init`` would fail, as it does with Open MPI's launcher and MPICH; otherwise None."""
    if launched is None or launched.family != OPEN_MPI or library.family != MPICH:
        return None
    return _mismatch(launched, f"the loaded MPI library ({library}) belongs to another launcher")


def world_size_problem(launched: LaunchInfo | None, library: MpiLibrary, world_size: int) -> str | None:
    """Return an error message if the launcher started another number of ranks than ``world_size``; otherwise None."""
    if launched is None or launched.size == world_size:
        return None
    return _mismatch(launched, f"the loaded MPI library ({library}) sees a world of {world_size}")


def _mismatch(launched: LaunchInfo, observation: str) -> str:
    return (
        f"{launched.launcher} started {launched.size} process{'es' if launched.size != 1 else ''}, but {observation}: "
        "launcher and library must belong together. Start with "
        f"`python -m hetero_mpi launch -np {launched.size} -- ...`, which finds the launcher of this library."
    )


def restrict_to_launcher_interfaces(environment: MutableMapping[str, str]) -> None:
    """Restrict Open MPI to the interfaces over which the launcher's daemon communicates. Call this before MPI is initialised.

    Nothing is set if the user has chosen interfaces, the daemon is not connected to another host, or an unused NIC is as fast,
    which makes it unclear which interface is meant for data.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environment or _INCLUDE in environment or _EXCLUDE in environment:
        return
    used, unused = _interfaces_of(os.getppid())
    if not used or any(_nic_speed(name) >= max(map(_nic_speed, used)) for name in unused if _nic_speed(name) > 0):
        return
    environment[_INCLUDE] = ",".join(sorted(used))


def _interfaces_of(process: int) -> tuple[set[str], set[str]]:
    """Return the interfaces over which a process is connected to other hosts, and all other interfaces except the loopback."""
    import psutil

    try:
        connections = psutil.Process(process).net_connections("tcp4")
    except (psutil.Error, OSError):
        return set(), set()
    connected_addresses = {
        connection.laddr.ip for connection in connections if connection.status == psutil.CONN_ESTABLISHED
    }
    addresses_of = {name: {entry.address for entry in entries} for name, entries in psutil.net_if_addrs().items()}
    loopback = {name for name, addresses in addresses_of.items() if "127.0.0.1" in addresses}
    used = {name for name, addresses in addresses_of.items() if addresses & connected_addresses} - loopback
    return used, set(addresses_of) - used - loopback


def _nic_speed(interface: str, devices: Path = _DEVICES) -> int:
    """Return the speed of a NIC in Mbit/s, or 0 if the interface is no NIC (bridge, tunnel) or does not report it (Wi-Fi)."""
    if not (devices / interface / "device").exists():
        return 0
    try:
        return max(0, int((devices / interface / "speed").read_text()))
    except (OSError, ValueError):
        return 0
