"""Tensors from rank 0 to rank 1 and back through channels whose ends copy, or not; prints a line of JSON per case that holds.

mpirun -np 2 python tests/programs/channel_pieces.py
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import deque

import torch

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.channel import Inbox, Outbox
from tests.support.late_copies import LateBackend

PIECE_BYTES = 64 << 10
SHAPES = [(3, 5), (64, 1024), (1, 0), (17, 4099), (64, 1024), (33, 2048)]


def tensor(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def cut_small(transport: MpiTransport) -> MpiTransport:
    transport.piece_bytes = PIECE_BYTES
    return transport


def passes(world: World, transport: MpiTransport, backend: Backend) -> None:
    """Twice all shapes, in both directions at once; what was sent is forgotten at once."""
    peer = 1 - world.rank
    inbox = Inbox(transport, peer, 5, backend, torch.bfloat16, 3)
    outbox = Outbox(transport, peer, 5, backend, torch.bfloat16)
    known = 0
    for turn in range(2):
        inbox.start_step(SHAPES)
        held: deque[tuple[int, torch.Tensor]] = deque()

        def let_go(turn: int = turn, held: deque[tuple[int, torch.Tensor]] = held) -> None:
            number, found = held.popleft()
            assert torch.equal(found, tensor(100 * turn + number + 10 * peer, SHAPES[number])), (turn, number)
            inbox.release()

        for number, shape in enumerate(SHAPES):
            sent = tensor(100 * turn + number + 10 * world.rank, shape)
            assert outbox.put(sent) == sent.nbytes
            held.append((number, inbox.receive()))
            if len(held) > 1:  # one is kept while the next ones arrive
                let_go()
        let_go()
        outbox.flush()
        world.barrier()
        assert known in (0, inbox.buffers.allocated), "buffers are used again"
        known = inbox.buffers.allocated
        assert transport.pending() == 0


def overlaps(world: World, transport: MpiTransport) -> list[float]:
    """Seconds until the first and the last piece of a tensor of 64 have come, of which each takes 1 ms to copy at the sender."""
    if world.rank == 0:
        outbox = Outbox(transport, 1, 6, LateBackend(), torch.bfloat16)
        world.barrier()
        outbox.put(tensor(1, (64, PIECE_BYTES // 2)))
        outbox.flush()
        return []
    inbox = Inbox(transport, 0, 6, Backend(), torch.bfloat16, 1)
    inbox.start_step([(64, PIECE_BYTES // 2)])
    world.barrier()
    begin = time.perf_counter()
    inbox.receive()
    requests = inbox._held[0].requests
    inbox.release()
    return [request.ended_s - begin for request in (requests[0], requests[-1]) if request.ended_s is not None]


def main(world: World) -> int:
    ends: tuple[type[Backend], ...] = (Backend, LateBackend)
    for threaded, kinds in itertools.product((True, False), itertools.product(ends, repeat=2)):
        with cut_small(MpiTransport(world.comm, threaded)) as transport:
            passes(world, transport, kinds[world.rank]())
            world.barrier()
        if world.rank == 0:
            print(json.dumps([threaded, *(kind.__name__ for kind in kinds)]), flush=True)
    with cut_small(MpiTransport(world.comm)) as transport:
        seconds = overlaps(world, transport)
        if world.rank == 1:
            print(json.dumps(seconds), flush=True)
        world.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
