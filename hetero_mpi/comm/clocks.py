"""By how much the clocks of two hosts differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport

_PING_TAG = (1 << 14) - 1
"""MPI promises tags up to 32767; stages take the small ones."""
_PINGS = 20
Clock = Callable[[], float]


def clock_offset_s(world: World, transport: Transport) -> float:
    """This rank's clock minus that of the first rank of ``world``, in seconds: 0 on its host, else by ping-pong. Collective."""
    numbers, own = list(world.numbers or range(world.size)), 0.0
    for index in range(1, world.size):
        if world.hosts[index] == world.hosts[0]:
            continue
        if world.rank == 0:
            compare_clocks(transport, numbers[index], "leads")
        elif world.rank == index:
            own = compare_clocks(transport, numbers[0], "follows")
    return own


def compare_clocks(
    transport: Transport, peer: int, role: Literal["leads", "follows"], clock: Clock = time.perf_counter
) -> float:
    """This rank's clock minus the leader's, in seconds (0 on the leader). Called by both ranks at once.

    The follower asks for the leader's time; the answer is taken to be as old as half the round trip, of the quickest of 20
    (the method of Cristian 1989).
    """
    best_s, offset_s = float("inf"), 0.0
    answer = np.zeros(8, np.uint8)
    for _ in range(_PINGS):
        if role == "leads":
            transport.wait(transport.post_receive(peer, _PING_TAG, answer))
            transport.wait(transport.send(peer, _PING_TAG, np.array([clock()]).view(np.uint8)))
            continue
        begin = clock()
        receive = transport.post_receive(peer, _PING_TAG, answer)
        transport.wait(transport.send(peer, _PING_TAG, np.zeros(8, np.uint8)))
        transport.wait(receive)
        end = clock()
        if end - begin < best_s:
            best_s = end - begin
            offset_s = (begin + end) / 2 - float(answer.view(np.float64)[0])
    return offset_s
