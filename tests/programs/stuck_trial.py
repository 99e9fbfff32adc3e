"""``python -m hetero_mpi``, in which rank 1 does not go on after its first step of a plan that is tried."""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

from hetero_mpi.cli import main
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.training import trial
from hetero_mpi.training.measuring import OwnStep, own_step


def stuck(trainer: Trainer, *arguments: Any) -> OwnStep:
    if trainer.rank == 1:
        time.sleep(600)
    return own_step(trainer, *arguments)


if __name__ == "__main__":
    with mock.patch.object(trial, "own_step", stuck):
        code = main()
    sys.exit(code)
