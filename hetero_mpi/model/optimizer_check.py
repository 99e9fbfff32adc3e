"""The test at a run's start that each rank can step with the job's optimizer."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.planning.types.moments import OF_OPTIMIZER
from hetero_mpi.util.errors import UserError


def check_optimizer(train: TrainTable, backend: Backend, who: str) -> None:
    """Let the job's optimizer step on this rank's device.

    :raises UserError: it cannot, with the reason and the name ``who`` of the rank.
    """
    tensor = Parameter(torch.zeros(64, 64, device=backend.device))
    tensor.grad = torch.ones_like(tensor)
    own = OF_OPTIMIZER[train.optimizer][-1]
    try:
        LibraryOptimizers(train, False, [(tensor, False, own, 1.0)]).step(1.0)
        moved = bool((tensor < 0).all())
        reason = "its step changed nothing"
    except Exception as error:  # whatever it raises where it has no kernel, or where it is not installed
        moved, reason = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not moved:
        needed = {EIGHT_BIT: "bitsandbytes 0.50", "muon": "torch 2.9"}.get(train.optimizer, "another transformers")
        raise UserError(
            "optimizer.unsupported",
            f'[train] optimizer = "{train.optimizer}" does not step on {who}, {backend.description()} ({reason}); install '
            f'{needed} or later there, leave that rank out, or set optimizer = "adamw"',
        )
