"""Device code on a GPU made of host memory, which a first run on a real one would break: the checks of tests/stand_in_gpu/.

In a process of their own: torch counts the devices when the first backward of a process runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.stand_in_gpu import build
from tests.support.mpi import require_success, run_bounded

pytestmark = pytest.mark.slow


def test_device_code_on_a_stand_in_gpu() -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.stand_in_gpu.fixtures",
        *sorted(str(path) for path in Path(build.__file__).parent.glob("*_checks.py")),
    ]
    result = require_success(run_bounded(command, {**os.environ, "OMP_NUM_THREADS": "1"}, 600))
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout
