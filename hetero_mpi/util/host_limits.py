"""Memory and CPU limits that control groups impose on this process. Uses only the standard library."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MIN_UNLIMITED_BYTES = 1 << 60
"""Limits from this value on mean "no limit", which cgroup v1 expresses by a number near 2**63."""


def free_bytes(root: Path = _ROOT, group_file: Path = _OWN) -> int | None:
    """Return the bytes left under the memory limits of this process's control group and its ancestors, or None if unlimited.

    SLURM jobs, containers and systemd services set such limits. Inactive page cache counts as free. ``group_file`` lists the groups
    of this process, with a line ``NUMBER:CONTROLLERS:PATH`` for each hierarchy.
    """
    free_by_group = [free for group in _groups("memory", root, group_file) if (free := _free_bytes(group)) is not None]
    return min(free_by_group, default=None)


def core_quota(root: Path = _ROOT, group_file: Path = _OWN) -> float | None:
    """Return the CPU quota of the control groups in cores, as set by ``docker run --cpus``, or None if there is no quota."""
    return min(
        (cores for group in _groups("cpu", root, group_file) if (cores := _cpu_quota(group)) is not None), default=None
    )


def allowed_cores() -> list[int]:
    """Return the numbers of the cores on which this process may run. A launcher may bind it to a few cores."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many cores this process can keep busy: the allowed cores, or fewer under a quota, but at least one."""
    quota = core_quota()
    return max(1, min(len(allowed_cores()), int(quota))) if quota is not None else len(allowed_cores())


def _groups(controller: str, root: Path, group_file: Path) -> Iterator[Path]:
    """Yield the directories of this process's groups that have the controller, and those of the groups' ancestors."""
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
    """Read a group's CPU quota in cores. In cgroup v2 one file has ``QUOTA PERIOD``; v1 has two files. No quota is "max" or -1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None


def read_counter(counters: Path, name: str) -> int:
    """Return the named value from a kernel file of counters, or 0 if it is missing."""
    try:
        rows = dict(line.split(" ", 1) for line in counters.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
