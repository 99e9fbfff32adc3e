"""Puts the stand-in GPU in CUDA's place: ``available``, ``open_backend`` and all that follows find it there."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_mpi.device.accelerators import BACKENDS
from hetero_mpi.device.backends import Accelerator
from tests.stand_in_gpu import module

DTYPES = "STAND_IN_GPU_DTYPES"
"""Environment variable: what it computes in, separated by spaces."""
COUNT = "STAND_IN_GPU_COUNT"
"""Environment variable: how many of its devices are shown (1 or 2)."""


class StandIn(Accelerator):
    name = "cuda"
    torch_type = module.TYPE

    @classmethod
    def count(cls) -> int:
        return int(os.environ.get(COUNT, module.device.DEVICES))

    def dtypes(self) -> tuple[str, ...]:
        return tuple(os.environ.get(DTYPES, "fp32 bf16 fp16").split())


def for_children() -> dict[str, str]:
    """Environment in which every Python process finds the stand-in."""
    here = Path(__file__).parent
    paths = [str(here / "site"), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}


def install() -> None:
    """From now on the stand-in is this process's only kind of GPU."""
    for name in list(BACKENDS):
        if name not in ("cuda", "cpu"):
            del BACKENDS[name]
    BACKENDS["cuda"] = StandIn
