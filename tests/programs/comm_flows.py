"""Links and flows of all ranks, as rank 0 sees them, in JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from hetero_mpi.comm.links import measure_flows, measure_links
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World

LARGEST = 1 << 20


def main(world: World) -> int:
    with MpiTransport(world.comm) as transport:
        links = measure_links(world, transport, (1024, 16384, 262144, LARGEST), repeats=2)
        flows = measure_flows(world, transport, links, LARGEST)
    if world.rank == 0:
        largest = [[k.source, k.destination, k.sample_bytes[-1] / k.sample_s[-1]] for k in links]
        shared = {flow.host: flow.shares_nic for flow in flows}
        print(json.dumps({"links": largest, "flows": [asdict(flow) for flow in flows], "shared": shared}))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
