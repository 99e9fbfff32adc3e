"""The self-test at the start of a run: does this rank's GPU compute what the CPU does?

It runs once per GPU, software build and kind of computation; the answer is kept.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from hetero_mpi.comm.ranks.versions import installed
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.device_probe import drivers
from hetero_mpi.device.self_test import NF4, self_test
from hetero_mpi.profiling.benchmark_spec import key_of, load, save
from hetero_mpi.report.run_files.logs import say

SELF_TEST_VARIABLE = "HETERO_MPI_SELF_TEST"
"""Environment variable; with 0 a rank does not test its GPU."""
_LAYOUT = 2
"""Version of the tests: raise it when what is tested changes."""


@dataclass(frozen=True)
class Needs:
    """The kinds of computation that a run needs of its devices."""

    dtype: str
    """``auto``, or the compute dtype."""
    nf4: bool

    def of(self, backend: Backend) -> list[str]:
        """The names that ``self_test`` takes. Sums and AdamW are always in fp32; ``auto`` takes bf16 where it can
        (``best_dtype``).
        """
        dtypes = backend.dtypes()
        dtype = self.dtype if self.dtype != "auto" else next(d for d in ("bf16", "fp16", "fp32") if d in dtypes)
        found = ["fp32", dtype, NF4 if self.nf4 else ""]
        return [name for name in dict.fromkeys(found) if name == NF4 or name in dtypes]


def failure(world: World, backend: Backend | None, needs: Needs) -> str:
    """The problem of this rank's device, and what to do; "" where nothing is. ``backend`` None: there is no GPU. Collective."""
    wanted, key = [], ""
    if backend is not None and os.environ.get(SELF_TEST_VARIABLE) != "0":
        wanted = needs.of(backend)
        key = _key(world, backend, wanted)
    untested = world.all_gather_json(bool(key) and load(key) is None)
    if any(untested):
        ranks = ", ".join(str(rank) for rank, one in enumerate(untested) if one)
        say(f"testing the GPUs of these ranks, which these builds have not computed on yet: {ranks}")
    test = None
    with world.together("testing the GPU"):
        if backend is not None and untested[world.rank]:
            test = self_test(backend.name, backend.index, wanted)
    if backend is None or test is None:
        return ""
    if test.passed:
        save(key, test.to_dict())
    if not test.problems:
        return ""
    more = f" (and {len(test.problems) - 1} more)" if len(test.problems) > 1 else ""
    device = f"{test.label} of rank {world.rank} on {world.host} ({backend.description()})"
    return (
        f"{device} does not compute what the CPU does: {test.problems[0]}{more}. Remedy: {test.remedy()}. "
        "All checks: python -m hetero_mpi doctor --selftest"
    )


def _key(world: World, backend: Backend, needs: list[str]) -> str:
    """Equal keys mean the same GPU, driver, builds and needs."""
    builds = [torch.__version__, *(installed(name) for name in ("bitsandbytes", "transformers"))]
    device = [world.host, backend.identity(), backend.architecture(), drivers(), platform.release()]
    return f"self-test-{key_of([_LAYOUT, device, builds, needs])}"
