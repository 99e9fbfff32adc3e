"""Trains a model that is there already for a step and prints how much memory its start took: ``existing_memory.py RUN_DIR``.

"start +A MiB, kept +B MiB" on one rank, over what the process had before.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hetero_mpi
from hetero_mpi.model.eager_imports import eager_imports

with eager_imports():  # as a rank of ``train`` does
    from hetero_mpi.device.backend import return_freed_memory
    from hetero_mpi.training import training_run

WIDTH, LAYERS = 1024, 10
"""40 MiB, in layers that the C library keeps when they are freed."""


def model() -> hetero_mpi.LayeredModel:
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    return hetero_mpi.LayeredModel(net, loss, lambda: [(np.full(WIDTH, n, np.float32), n) for n in range(20)])


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def memory_mib(key: str) -> float:
    """``VmRSS``, or ``VmHWM``, the most since ``clear_refs`` was written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def measured(start: Any) -> Any:
    """The function that builds the stages and brings their start weights, between two looks at the memory."""

    def look(*arguments: Any) -> Any:
        gc.collect()
        return_freed_memory()
        before = memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        made = start(*arguments)
        most = memory_mib("VmHWM")
        print(f"start +{most - before:.0f} MiB, kept +{memory_mib('VmRSS') - before:.0f} MiB", flush=True)
        return made

    return look


if __name__ == "__main__":
    training_run.load_start = measured(training_run.load_start)
    values = {
        "model": {"factory": "tests.programs.existing_memory:model"},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 1},
        "cluster": {"threads": 1},
        "profile": {"repeats": 1, "cache": False},
        "report": {"write": False},
        "output": {"run_dir": sys.argv[1]},
    }
    hetero_mpi.train(hetero_mpi.Job.build(values, name="memory", directory=Path(sys.argv[1])))
