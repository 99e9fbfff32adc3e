"""What other programs take of the cores, on any number of ranks: as JSON what is said while they keep all cores busy."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.training.run_report import OtherPrograms
from hetero_mpi.util.host_limits import allowed_cores

BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
WATCHED_S = 1.5


def main(world: World) -> int:
    """Each rank computes all the time; rank 0 starts as many others as there are cores."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in allowed_cores() if world.rank == 0]
    world.barrier()
    watch = OtherPrograms()
    end = time.monotonic() + WATCHED_S
    while time.monotonic() < end:
        pass
    told = watch.summary(world)
    for process in others:
        process.kill()
        process.wait()
    if world.rank == 0:
        print(json.dumps([told, len(allowed_cores())]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
