"""Ways not to go on, by name, under a watchdog with a limit of 3 s: ``mpirun -np 3 python tests/programs/watched.py stuck``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.training.watchdog import StandingReader, Watchdog

LIMIT_S = 3.0


def goes_on(world: World, transport: MpiTransport) -> None:
    """Short steps, for longer than the limit."""
    for step in range(8):
        world.current_action = f"training step {step + 1}"
        time.sleep(0.5)
        world.barrier()


def busy(world: World, transport: MpiTransport) -> None:
    """Rank 0 works alone for longer than the limit, and says so."""
    if world.rank == 0:
        with world.busy():
            time.sleep(3 * LIMIT_S)
    world.barrier()


def stuck(world: World, transport: MpiTransport) -> None:
    """Rank 1 does nothing; rank 0 waits for its message, rank 2 in a collective call."""
    world.current_action = "training step 7"
    if world.rank == 1:
        time.sleep(100)
    if world.rank == 0:
        transport.wait(transport.post_receive(1, 1, np.zeros(10, np.uint8)))
    with world.waiting("the others"):
        world.barrier()


def asleep(world: World, transport: MpiTransport) -> None:
    """All ranks are stopped together, for longer than the limit, while they wait for each other."""
    if world.rank == 1:
        time.sleep(1.0)
    wake = f"sleep {2 * LIMIT_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
    world.barrier()


def unwatched(world: World, transport: MpiTransport) -> None:
    """Rank 1's watchdog has failed meanwhile: ``main`` sees to that."""
    time.sleep(1.0)


def main(world: World) -> int:
    trainer: Any = SimpleNamespace(executor=None, latest=None, backend=Backend())
    with MpiTransport(world.comm) as transport:
        broken = sys.argv[1] == "unwatched" and world.rank == 1
        failing = mock.patch.object(StandingReader, "read_standing", side_effect=ZeroDivisionError)
        with failing if broken else contextlib.nullcontext(), Watchdog(world, LIMIT_S, trainer, transport):
            globals()[sys.argv[1].replace("-", "_")](world, transport)
    return 0


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # in a run the log is a file
    sys.exit(run_guarded(main))
