"""Ways to fail, by name: ``mpirun -np 3 python tests/programs/comm_failures.py exception-while-others-wait``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import all_ranks_succeeded, check_versions, run_guarded, shrink_to_survivors
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.util.errors import UserError


def exception_while_others_wait(world: World) -> int:
    """Rank 1 fails; rank 0 waits for a message on the communication thread, the others in a collective."""
    world.current_action = "loading weights"
    with MpiTransport(world.comm) as transport:
        if world.rank == 1:
            time.sleep(0.2)
            raise RuntimeError("the shelf broke")
        if world.rank == 0:
            transport.wait(transport.post_receive(1, 1, np.zeros(10, np.uint8)))
        else:
            world.barrier()
    return 0


def exception_on_every_rank(world: World) -> int:
    """All ranks fail at the same moment, with a handler that would postpone SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    world.current_action = "dividing"
    world.barrier()
    raise ZeroDivisionError("by nothing")


def user_error_together(world: World) -> int:
    """A problem of one rank inside ``collective_errors``."""
    with world.collective_errors("reading the job"):
        if world.rank == 1:
            raise UserError("test.fault", "the job file has no [model]")
    return 0


def user_error_everywhere(world: World) -> int:
    """Every rank finds the same problem for itself, unmarked."""
    raise UserError("test.fault", "the plan does not fit")


def user_error_alone(world: World) -> int:
    """One rank finds a problem while the others wait for it."""
    world.current_action = "reading shards"
    if world.rank == 1:
        raise UserError("test.fault", "shard 3 is truncated")
    world.barrier()
    return 0


def exit_code(world: World) -> int:
    """``sys.exit`` on every rank."""
    sys.exit(7)


def other_versions(world: World) -> int:
    """Rank 1 has another transformers, rank 2 another torch (which is allowed)."""
    own = own_versions(world.library) | {"transformers": "5.23.0", "torch": "2.13.0"}
    if world.rank == 1:
        own["transformers"] = "5.22.0"
    if world.rank == 2:
        own["torch"] = "2.6.0+rocm"
    check_versions(world, own)
    return 0


def interrupted(world: World) -> int:
    """Ctrl-C reaches one rank."""
    world.current_action = "training"
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    world.barrier()
    return 0


def error_after_a_loss(world: World) -> int:
    """Rank 2 dies; the others end with the same error, which rank 0 prints later than rank 1 would be gone."""
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert not all_ranks_succeeded(world, False)
    shrink_to_survivors(world)
    time.sleep(0.6 if world.rank == 0 else 0.0)
    raise CollectiveUserError("test.fault", "nothing is left to read")


if __name__ == "__main__":
    code = run_guarded(globals()[sys.argv[1].replace("-", "_")])
    if len(sys.argv) > 2:
        Path(sys.argv[2]).touch()
    sys.exit(code)
