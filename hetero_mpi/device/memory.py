"""Memory as the system sees it: what control groups leave, processes killed for lack of it, and errors that mean it was short.

No torch is imported for the first two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 says so by a number near 2**63."""


def cgroup_free_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Bytes left under the memory limits of this process's control group and of those above it, as SLURM jobs, containers and
    systemd services have them; None without a limit. What the page cache has not touched for long counts as free.

    ``own``: the groups of this process, a line ``NUMBER:CONTROLLERS:PATH`` for each hierarchy.
    """
    left = [free for group in _groups(root, own) if (free := _free_bytes(group)) is not None]
    return min(left, default=None)


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Directories of the process's groups with a memory controller and of all above them; in a container, the mounted one."""
    yield root  # a container may see its own group there, whatever its path says
    yield root / "memory"
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        place = PurePosixPath(path.lstrip("/"))
        for inner in (place, *place.parents):
            if ".." not in inner.parts:
                yield top / inner


def _free_bytes(group: Path) -> int | None:
    for limit_file, usage_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = (group / limit_file).read_text().strip(), (group / usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < _UNLIMITED:
            return max(0, int(limit) - int(usage) + min(_count(group / "memory.stat", cached), int(usage)))
    return None


def _count(counters: Path, name: str) -> int:
    """The number behind a name in a file of the kernel; 0 where it is not there."""
    try:
        rows = dict(line.split(" ", 1) for line in counters.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Processes that this machine's kernel has killed for lack of memory since it started, by the limit of a control group or for
    the whole machine; 0 where it does not count them (before Linux 4.13, other systems)."""
    return _count(counters, "oom_kill")


def memory_kills_text(kills: dict[str, int]) -> str:
    """What a person is told. ``kills``: host -> processes killed meanwhile; "" where there are none."""
    told = [
        f"the kernel of {host} killed {count} process{'es' if count > 1 else ''} for lack of memory"
        for host, count in kills.items()
        if count > 0
    ]
    if not told:
        return ""
    return (
        f"{', '.join(told)} meanwhile (`oom_kill` in /proc/vmstat). Raise the limit of the control group (SLURM: --mem; Docker: "
        "--memory), end what else takes memory there, or let the planner give its ranks less: --set plan.memory_reserve=0.2, or "
        "--set cluster.memory_bytes=8000000000 per rank"
    )


_SIGNS = (
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "Invalid buffer size",
)
"""What allocators, libraries beneath torch and drivers put into a plain RuntimeError: CPU, cuBLAS, cuDNN, SYCL (XPU), Metal."""


def is_out_of_memory(error: BaseException) -> bool:
    """Does the error mean that memory was short, whoever says it?"""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
