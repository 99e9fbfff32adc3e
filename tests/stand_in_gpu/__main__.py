"""``python -m tests.stand_in_gpu ARGUMENTS``: hetero_mpi with stand-in GPUs; at the end a line of JSON about what they saw."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes' plain kernels would be compiled anew for every shape
from hetero_mpi import cli
from tests.stand_in_gpu import backend, module

COUNTERS = "stand-in GPU: "


def main() -> int:
    backend.install()
    copy_s, result_s = map(float, os.environ.get("STAND_IN_GPU_DELAYS", "2e-4 0").split())
    module.device.set_delays(copy_s, result_s)
    code = cli.main(sys.argv[1:])
    counters = {
        "rank": os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")),
        "contexts": module.device.contexts(),
        "operators": module.device.operators(),
        "seeded": sorted({index for index, _ in module.seeded}),
        "pinned_bytes": module.device.pinned_bytes(),
        "peak_bytes": [module.device.peak(index) for index in range(module.device.DEVICES)],
    }
    print(COUNTERS + json.dumps(counters), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
