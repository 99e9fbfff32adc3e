"""A message and a sum of more than 2 GiB each, where 32 bit counts end: ``mpirun -np 2 python tests/programs/comm_large.py``.

Takes about 3 GB per rank, for one buffer after the other.
"""

from __future__ import annotations

import sys

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World

SIZE_BYTES = (2 << 30) + 4096


def main(world: World) -> int:
    with MpiTransport(world.comm) as transport:
        buffer = np.zeros(SIZE_BYTES, np.uint8)
        places = np.array([0, (1 << 30) - 1, 1 << 30, (2 << 30) - 1, 2 << 30, SIZE_BYTES - 1])
        if world.rank == 0:
            buffer[places] = np.arange(1, 7)
            transport.wait(transport.send(1, 1, buffer))
        else:
            transport.wait(transport.post_receive(0, 1, buffer))
            assert buffer[places].tolist() == [1, 2, 3, 4, 5, 6] and np.count_nonzero(buffer) == 6
        world.barrier()
        if world.rank == 0:
            print("message", flush=True)
        numbers = buffer.view(np.float32)
        numbers[:] = world.rank + 1
        group, half = transport.group((0, 1), 0), len(numbers) // 4  # the larger part is beyond two gibibytes
        parts = [numbers[:half], numbers[half:]]
        transport.wait(transport.reduce_scatter(group, parts))
        assert float(parts[world.rank].min()) == float(parts[world.rank].max()) == 3.0
        transport.wait(transport.all_gather(group, [part.view(np.uint8) for part in parts]))
        assert float(numbers.min()) == float(numbers.max()) == 3.0
        assert transport.pending() == 0
    world.barrier()
    if world.rank == 0:
        print("sum", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
