"""``python -m hetero_mpi``, in which rank 1 does not go on after its first step of a plan that is tried."""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

from hetero_mpi.cli import main
from hetero_mpi.planning.analysis.step_comparison import RankMeasurement
from hetero_mpi.training import trial

_measured = trial._measured


def stuck(rank: int, *arguments: Any) -> RankMeasurement:
    if rank == 1:
        time.sleep(600)
    return _measured(rank, *arguments)


if __name__ == "__main__":
    with mock.patch.object(trial, "_measured", stuck):
        code = main()
    sys.exit(code)
