"""What other programs take of the cores on which a run computes: measured while it runs, as it is no part of a profile."""

from __future__ import annotations

import time

import psutil

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.host_limits import own_cores

NOTABLE = 0.25
"""Cores; less is what a quiet machine does beside a run."""
BUSY = 0.85
"""Share of the cores' time: where less of it is used, nobody waits for a core."""

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""Guests' time is part of others; what a hypervisor took of a core is not free either."""


class OtherPrograms:
    """Watches the cores of this rank's host from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def told(self, world: World) -> str:
        """``other programs took about 0.8 of 2 cores``, of each host where ranks waited for them; "": hardly. Collective."""
        passed_s, own_s, *cores_s = (now - then for now, then in zip(self._now(), self._began, strict=False))
        rows = world.all_gather_json([world.host, own_cores(), passed_s, own_s, cores_s])
        found = []
        for host in dict.fromkeys(row[0] for row in rows):
            here = [row for row in rows if row[0] == host]
            usable = {core for row in here for core in row[1]}
            _, _, passed_s, _, busy_s = here[0]
            if not passed_s > 0 or max(usable) >= len(busy_s):
                continue
            taken = sum(busy_s[core] for core in usable) / passed_s
            others = taken - sum(row[3] for row in here) / passed_s
            if others > NOTABLE and taken > BUSY * len(usable):
                on = f" on {host}" if len(set(world.hosts)) > 1 else ""
                found.append(f"about {others:.1f} of {len(usable)} cores{on}")
        return f"other programs took {', '.join(found)}" if found else ""

    @staticmethod
    def _now() -> list[float]:
        """Seconds: of the clock, of this process on any core, and of all processes on each core."""
        busy_s = (
            sum(seconds for name, seconds in core._asdict().items() if name not in _NOT_BUSY)
            for core in psutil.cpu_times(percpu=True)
        )
        return [time.perf_counter(), time.process_time(), *busy_s]
