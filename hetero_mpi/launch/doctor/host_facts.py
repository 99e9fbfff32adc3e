"""Facts about a host and its Python, gathered there, and the targets to examine (hosts, hosts-file entries, or ranks).

Only the standard library (and psutil if installed) is imported. torch and MPI are tried in subprocesses, so that a host with a
broken installation can still report.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.comm.ranks.versions import PACKAGE, own_source, own_versions
from hetero_mpi.device.device_probe import drivers
from hetero_mpi.device.self_test import self_test
from hetero_mpi.util.disk import folder_space, temporary_folder
from hetero_mpi.util.host_limits import usable_cores
from hetero_mpi.util.shipped import absent_packages

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.mesh import Mesh

TOOLS = ("prted", "orted", "hydra_pmi_proxy", "mpirun", "mpiexec", "python3", "ssh")
"""Programs to look for; the first three are the remote daemons of Open MPI 5, Open MPI 4 and MPICH."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "LD_LIBRARY_PATH", "PYTHONPATH",
    "OMP_NUM_THREADS", "HETERO_MPI_DEVICE", "OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES",
)  # fmt: skip
_TORCH_TIMEOUT_S = 180.0
"""Timeout in seconds for importing torch, which takes long from a cold network disk."""
_MPI_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
found = {"library": MPI.Get_library_version(), "threads": ""}
print("\\n" + json.dumps(found), flush=True)
MPI.Init_thread(MPI.THREAD_MULTIPLE)
levels = {MPI.THREAD_MULTIPLE: "multiple", MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_FUNNELED: "funneled"}
found["threads"] = levels.get(MPI.Query_thread(), "single")
print("\\n" + json.dumps(found), flush=True)
MPI.Finalize()
"""


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host, gathered on it, as JSON-serializable values."""

    host: str
    python: str
    prefix: str
    system: str
    cores: int
    memory_bytes: int
    """Memory that is free now."""
    addresses: tuple[tuple[str, str, str], ...]
    """(interface, IPv4 address, netmask) of each local address."""
    versions: dict[str, str]
    """Package -> version or ``absent``."""
    missing: tuple[str, ...]
    """Modules in ``REQUIRED`` that are not installed."""
    path: str
    """Value of ``PATH`` for a non-interactive command."""
    tools: dict[str, str]
    """Paths of those ``TOOLS`` that exist next to this Python or on ``PATH``."""
    variables: dict[str, str]
    drivers: dict[str, str]
    """Versions (or "yes") of the kernel drivers ``nvidia``, ``amdgpu`` and ``intel``, if loaded."""
    kfd: str
    """Access to the device of AMD's compute driver: ``open``, ``closed`` (no permission) or ``absent``."""
    directories: dict[str, Any]
    """Results of ``disk.folder_space`` for ``run``, ``tmp``, ``cache`` and ``work``."""
    mpi: dict[str, Any] = field(default_factory=dict)
    """``library`` (its version string), ``threads``, ``fault_tolerance`` (None if unknown), ``error``."""
    torch: dict[str, Any] = field(default_factory=dict)
    """The result of ``device.device_probe``, or {"error": ...}."""
    self_tests: tuple[dict[str, Any], ...] = ()
    """Results (``SelfTest.to_dict``) for the GPUs, or for the CPU if there are none; empty if not requested."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostFacts:
        """Invert ``to_dict`` after a JSON round trip."""
        plain = {**values, "addresses": tuple((a, b, c) for a, b, c in values["addresses"])}
        return cls(**{**plain, "missing": tuple(values["missing"])})


@dataclass(frozen=True)
class Target:
    """A host, an entry of a hosts file, or a rank, with facts about it or the reason why there are none."""

    title: str
    address: str
    """IPv4 address; "" if there is none."""
    name: str
    """Name for the launch agent."""
    local: bool
    python: str = sys.executable
    prefix: str = ""
    """Directory where the launcher will look for MPI on the host; "" if it is not to be checked."""
    directory: str = ""
    """Working directory of the target's ranks; "" for the local path, if it exists there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    """Number of the target's ranks; 0 if unknown."""
    device: str = "auto"
    """Device that the hosts file sets for the target's ranks."""
    mesh: Mesh | None = None
    """Mesh of the hosts file, if it contains the address."""
    facts: HostFacts | None = None
    complaint: str = ""
    """If there are no facts: the last line printed by the launch agent, or by Python on the host."""


def answering(targets: Sequence[Target]) -> list[tuple[Target, HostFacts]]:
    """Return the targets that have facts, with these facts."""
    return [(target, target.facts) for target in targets if target.facts is not None]


def gather(directory: str, deeply: bool = True, prefix: str = "", work: str = "") -> HostFacts:
    """Gather facts about this host and this Python.

    Args:
        deeply: Whether to try MPI and torch too, in subprocesses (takes seconds).
        prefix: Expected directory of MPI, searched before this environment and ``PATH``; "" to search only these.
        work: Required working directory of the ranks; "" for any.
    """
    missing = absent_packages()
    addresses: tuple[tuple[str, str, str], ...] = ()
    free_bytes = 0
    if "psutil" not in missing:
        import psutil

        from hetero_mpi.launch.hosts.interface import local_addresses

        addresses = tuple((item.interface, item.address, item.netmask) for item in local_addresses())
        free_bytes = int(psutil.virtual_memory().available)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kfd = Path("/dev/kfd")
    may_open = "open" if os.access(kfd, os.R_OK | os.W_OK) else "closed"
    return HostFacts(
        host=socket.gethostname(),
        python=sys.executable,
        prefix=sys.prefix,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=usable_cores(),
        memory_bytes=free_bytes,
        addresses=addresses,
        versions={**own_versions("absent"), PACKAGE: own_source()},
        missing=missing,
        path=os.environ.get("PATH", ""),
        tools={name: tool_path for name in TOOLS if (tool_path := _tool(name, prefix))},
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        drivers=drivers(),
        kfd=may_open if kfd.exists() else "absent",
        directories={
            "run": folder_space(Path(directory)),
            "tmp": folder_space(temporary_folder(), must_exist=True),
            "cache": folder_space(cache),
            "work": _work(work),
        },
        mpi=try_mpi() if deeply else {},
        torch=try_torch() if deeply else {},
    )


def try_mpi() -> dict[str, Any]:
    """Return the library that mpi4py loads and its thread support, as started without a launcher."""
    # Otherwise the child would inherit this rank's identity, and MPI accepts no rank twice.
    launcher = ("PMIX_", "PMI_", "SLURM_", "HYDRA_", "OMPI_COMM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = _json_of([sys.executable, "-c", _MPI_PROBE], {**environment, **root}, 60.0)
    return {**result, "fault_tolerance": fault_tolerance()}


def fault_tolerance() -> bool | None:
    """Whether this environment's Open MPI has ULFM; None if unknown (another MPI, or no ``ompi_info``)."""
    tool = _tool("ompi_info")
    if not tool:
        return None
    try:
        answer = subprocess.run([tool, "--parsable"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "ft_mpi_support:yes" in answer.stdout if "ft_mpi_support:" in answer.stdout else None


def try_torch() -> dict[str, Any]:
    """Return the result of ``device.device_probe`` in a subprocess, or {"error": ...} if it fails."""
    return _json_of([sys.executable, "-m", "hetero_mpi.device.device_probe"], dict(os.environ), _TORCH_TIMEOUT_S)


def devices_to_test(torch: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (backend, index) of every GPU found by ``try_torch``, or of the CPU if there are none."""
    devices = [(device["backend"], device["index"]) for device in torch.get("devices", ())]
    return [device for device in devices if device[0] != "cpu"] or devices


def self_tests(torch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Test the devices one after the other, each in a subprocess."""
    return [self_test(backend, index).to_dict() for backend, index in devices_to_test(torch)]


def _json_of(command: list[str], environment: dict[str, str], patience_s: float) -> dict[str, Any]:
    """Return the last JSON line that a command prints, with ``error`` added if the command fails."""
    error, output, error_output = "", "", ""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=patience_s, env=environment, stdin=subprocess.DEVNULL, errors="replace"
        )  # fmt: skip
        output, error_output = answer.stdout, answer.stderr
        if answer.returncode != 0:
            error = _error_line(error_output) or f"it ended with exit code {answer.returncode}"
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout.decode(errors="replace") if isinstance(timeout.stdout, bytes) else timeout.stdout or ""
        error = f"did not end within {patience_s:g} s"
    except OSError as failure:
        error = str(failure)
    result: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
    return {**result, "error": error} if error else result


def _error_line(text: str) -> str:
    """Return the most informative line of an error output: the last exception's, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[^ :]*(Error|Exception)(:|$)", line)]
    return ((exceptions or lines or [""])[-1])[:400]


def _tool(name: str, prefix: str = "") -> str:
    folders = [Path(prefix)] if prefix else []
    for folder in (*folders, Path(sys.prefix)):
        if tool_path := shutil.which(name, path=str(folder / "bin")):
            return tool_path
    return shutil.which(name) or ""


def _work(path: str) -> dict[str, Any]:
    problem = "" if not path or Path(path).is_dir() else "no such directory"
    return {"path": path, "free_bytes": 0, "problem": problem}
