"""``python -m tests.stand_in_gpu ARGUMENTS``: hetero_mpi with stand-in GPUs; ``FILE.py ARGUMENTS``: that program with them.

What it launches has them too. At its end a rank prints a line of JSON about what its GPUs saw.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes' plain kernels would be compiled anew for every shape
from hetero_mpi import cli
from hetero_mpi.launch.launcher import command_line
from hetero_mpi.launch.launcher.launcher import Launcher
from tests.stand_in_gpu import COUNTERS, THROUGH


def _launch_with_them() -> None:
    """Ranks that this process starts run this module."""
    build = command_line.build_command

    def build_command(
        by: Launcher, np: int, hostfile: str | None, program: Sequence[str], *options: Sequence[str]
    ) -> command_line.CommandLine:
        python, *words = program
        words = words[2:] if words[:2] == ["-m", "hetero_mpi"] else words
        return build(by, np, hostfile, [python, *THROUGH, *words], *options)

    command_line.build_command = build_command


def _run(arguments: list[str]) -> int:
    if not arguments[:1] or not arguments[0].endswith(".py"):
        return cli.main(arguments)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> int:
    _launch_with_them()
    if sys.argv[1:2] == ["launch"]:
        return _run(sys.argv[1:])
    from tests.stand_in_gpu import backend, module

    backend.install()
    os.environ |= backend.for_children()
    copy_s, result_s = map(float, os.environ.get("STAND_IN_GPU_DELAYS", "2e-4 0").split())
    module.device.set_delays(copy_s, result_s)
    code = _run(sys.argv[1:])
    counters = {
        "rank": int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))),
        "contexts": module.device.contexts(),
        "operators": module.device.operators(),
        "seeded": sorted({index for index, _ in module.seeded}),
        "blocking_bytes": module.device.blocking_bytes(),
        "pinned_bytes": module.device.pinned_bytes(),
        "most_registered_bytes": module.device.most_registered_bytes(),
        "peak_bytes": [module.device.peak(index) for index in range(module.device.DEVICES)],
    }
    print(COUNTERS + json.dumps(counters), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
