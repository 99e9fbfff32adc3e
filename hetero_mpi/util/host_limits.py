"""Memory and CPU limits of this process under its control groups. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MIN_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 expresses "no limit" by a number near 2**63."""


def free_bytes(root: Path = _ROOT, group_file: Path = _OWN) -> int | None:
    """Bytes left under the memory limits of this process's control group and its ancestors; None without a limit.

    Limits come from SLURM jobs, containers and systemd services; inactive page cache counts as free. ``group_file``: the groups of
    this process, one line ``NUMBER:CONTROLLERS:PATH`` per hierarchy.
    """
    free_by_group = [free for group in _groups("memory", root, group_file) if (free := _free_bytes(group)) is not None]
    return min(free_by_group, default=None)


def core_quota(root: Path = _ROOT, group_file: Path = _OWN) -> float | None:
    """CPU quota of the control groups in cores, as set by ``docker run --cpus``; None without a limit."""
    return min(
        (cores for group in _groups("cpu", root, group_file) if (cores := _cpu_quota(group)) is not None), default=None
    )


def allowed_cores() -> list[int]:
    """Numbers of the cores on which this process may run (a launcher may bind it to a few)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores that this process can keep busy: the allowed ones, or fewer under a quota; at least one."""
    quota = core_quota()
    return max(1, min(len(allowed_cores()), int(quota))) if quota is not None else len(allowed_cores())


def _groups(controller: str, root: Path, group_file: Path) -> Iterator[Path]:
    """Yield the directories of the process's groups with a controller, and of their ancestors; in a container, the mounted one."""
    yield root  # a container may see its own group at the root, whatever its path
    yield root / controller
    try:
        lines = group_file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers
        group_path = PurePosixPath(path.lstrip("/"))
        for ancestor in (group_path, *group_path.parents):
            if ".." not in ancestor.parts:
                yield top / ancestor


def _free_bytes(group: Path) -> int | None:
    for limit_file, usage_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = (group / limit_file).read_text().strip(), (group / usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < _MIN_UNLIMITED_BYTES:
            return max(0, int(limit) - int(usage) + min(read_counter(group / "memory.stat", cached), int(usage)))
    return None


def _cpu_quota(group: Path) -> float | None:
    """CPUs allowed; v2 has one file, ``QUOTA PERIOD`` or ``max PERIOD``; v1 has two files, with -1 for no quota."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None


def read_counter(counters: Path, name: str) -> int:
    """The named value in a kernel file of counters; 0 if missing."""
    try:
        rows = dict(line.split(" ", 1) for line in counters.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
