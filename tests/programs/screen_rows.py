"""A rank that draws a screen of fixed rows until the file that it is told is there."""

from __future__ import annotations

import os
import sys
import time

from hetero_mpi.report.progress import Screen
from hetero_mpi.util.terminal import is_terminal

if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
    assert is_terminal(sys.stdout)
    with Screen(sys.stdout, lambda rows: [f"row {number}" for number in range(3)]):
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
