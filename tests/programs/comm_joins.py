"""A rank fails, or stands still, at a step of joining: ``mpirun -np 3 python comm_joins.py hang 1 mpi_start.own_source``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from hetero_mpi.comm.ranks import leave, mpi_start, ulfm
from hetero_mpi.comm.ranks.library import detect_launcher
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.util.errors import UserError

PLACES = {"mpi_start": mpi_start, "ulfm": ulfm, "socket": socket, "World": World}
KINDS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(100),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "OSError": lambda: OSError("the bridge is up"),
    "UserError": lambda: UserError("test.fault", "the bridge is up"),
    "SystemExit": lambda: SystemExit(0),
}


def main(world: World) -> int:
    world.barrier()
    return 0


if __name__ == "__main__":
    kind, rank, step = sys.argv[1:4]
    if kind in ("hang", "stopped"):
        leave.LIMIT_S, leave._REPORT_WAIT_S = 3.0, 2.0
    launched = detect_launcher(os.environ, "")
    if launched is not None and launched.rank == int(rank):
        place, name = step.split(".")

        def failing(*_: Any, **__: Any) -> None:
            if isinstance(error := KINDS[kind](), BaseException):
                raise error

        mock.patch.object(PLACES[place], name, failing).start()
    sys.exit(mpi_start.run_guarded(main))
