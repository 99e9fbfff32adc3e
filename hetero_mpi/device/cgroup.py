"""The memory that the control groups of this process leave it: limits of SLURM jobs, containers and systemd services.

A process is in a group, which lies in others; each may have a limit, and the least that is left counts. Files that were read lie in
the page cache and count as used, but the kernel gives them up first: what it has not touched for long counts as free here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 says so by a number near 2**63."""


def cgroup_free_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Bytes left under the memory limits of this process's control group and of those above it; None without a limit.

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
            return max(0, int(limit) - int(usage) + min(_cached_bytes(group, cached), int(usage)))
    return None


def _cached_bytes(group: Path, name: str) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
