"""Ranks kill themselves in many ways while the others wait in as many; those that are left go on, in the same processes.

First nobody dies, but one rank says so while long messages are on their way between all: what of them still comes disturbs nobody.

``mpirun --with-ft ulfm -np 4 python tests/programs/comm_survivors.py``. Prints what became of every round.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.mpi_start import all_ranks_succeeded, run_guarded, shrink_to_survivors
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.training.watchdog import Heartbeat

MESSAGES, MESSAGE_BYTES = 20, 1 << 22
SHORT_MESSAGES = 30


def work(world: World, victim: int, death_s: float) -> int:
    """Steps that use everything a run uses. ``victim`` dies within them; returns the steps done."""

    def doom() -> None:
        # Open MPI itself crashes where a rank dies while others make a communicator with it: not before they have all been made.
        if world.rank == victim:
            threading.Timer(death_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    deadline = time.monotonic() + 20.0
    steps = 0
    last = world.size - 1
    active = list(range(last)) if last else [0]  # the last rank sleeps
    with MpiTransport(world.comm) as transport:
        members = world.subset(active)
        heartbeat = Heartbeat(members) if members is not None else None
        world.barrier()
        doom()
        if members is None or heartbeat is None:
            world.sleep_until_released()
            return 0
        group = transport.group(tuple(active), 0)
        following, before = (world.rank + 1) % len(active), (world.rank - 1) % len(active)
        while time.monotonic() < deadline:
            heartbeat.beat({"step": steps})
            incoming = np.zeros(200_000, np.uint8)
            parts = [np.ones(20_000, np.float32) for _ in active]
            short = [np.zeros(3000, np.uint8) for _ in range(SHORT_MESSAGES)]
            requests = [
                transport.post_receive(before, 1, incoming),
                transport.send(following, 1, np.full(200_000, steps % 256, np.uint8)),
                transport.reduce_scatter(group, parts),
                *(transport.post_receive(before, 2, one) for one in short),
                *(transport.send(following, 2, np.full(3000, steps % 256, np.uint8)) for _ in short),
            ]
            time.sleep(0.002 * world.rank)  # "computes"; the communication thread moves the messages
            for request in requests:
                transport.wait(request)
            assert {int(one[-1]) for one in (incoming, *short)} == {steps % 256}
            assert parts[active.index(world.rank)][-1] == len(active)
            if world.rank == 0:
                world.asked()
            assert members.all_reduce_sum(np.ones(3))[0] == len(active)
            steps += 1
        world.release([last], None)
    return steps


def false_alarm(world: World, caller: int) -> None:
    """Rank ``caller`` gives up while ``MESSAGES`` go around a ring."""
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    try:
        with MpiTransport(world.comm) as transport:
            world.barrier()
            coming = [transport.post_receive(before, tag, np.empty(MESSAGE_BYTES, np.uint8)) for tag in range(MESSAGES)]
            leaving = [transport.send(following, tag, np.ones(MESSAGE_BYTES, np.uint8)) for tag in range(MESSAGES)]
            transport.wait(coming[MESSAGES // 4])
            if world.rank == caller:
                ulfm.revoke()
            for request in coming + leaving:
                transport.wait(request)
    except ulfm.RankLost:
        pass
    assert not all_ranks_succeeded(world, False)
    assert shrink_to_survivors(world).gone == ()


def main(world: World) -> int:
    assert ulfm.active(), "start with --with-ft ulfm"
    for caller in range(world.size):
        false_alarm(world, caller)
    chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    while world.size > 1:
        victim, death_s = chance.randrange(world.size), chance.uniform(0.0, 0.5)
        size, begin = world.size, time.monotonic()
        try:
            work(world, victim, death_s)
            well = True
        except ulfm.RankLost:
            well = False
        assert not all_ranks_succeeded(world, well)
        noticed_s = time.monotonic() - begin - death_s
        loss = shrink_to_survivors(world)
        assert [rank for rank, _ in loss.gone] == [victim], loss
        assert loss.old_ranks[world.rank] != victim and world.size == size - 1
        total = world.all_reduce_sum(np.array([world.rank + 1.0]))[0]
        assert total == world.size * (world.size + 1) / 2
        if world.rank == 0:
            print(f"rank {victim} of {size} died; {world.size} went on within {noticed_s:.2f} s", flush=True)
    print("the last one", world.rank, world.size, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
