"""Processes that the kernel has killed for lack of memory: it ends them by SIGKILL and tells nobody, but it counts them."""

from __future__ import annotations

from pathlib import Path


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Processes that this machine's kernel has killed for lack of memory since it started, by the limit of a control group or for
    the whole machine; 0 where it does not count them (before Linux 4.13, other systems)."""
    try:
        rows = dict(line.split(" ", 1) for line in counters.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("oom_kill", 0))


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
