"""Threads that wait for each other do not spin for long: what torch's OpenMP was told when it was loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp(**given: str) -> dict[str, str]:
    """What OpenMP says of itself in a program of the package."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "hetero_mpi.device.device_probe"],
        env={**environment, **given, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found = dict(re.findall(r"(\w+) ?= ?'?(\w+)'?$", done.stderr, re.MULTILINE))
    if "OMP_WAIT_POLICY" not in found:
        pytest.skip("torch was not built with OpenMP here")
    return found


@pytest.mark.slow
def test_waiting_threads_spin_for_a_moment_only() -> None:
    found = openmp()
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert found.get("GOMP_SPINCOUNT", "1000") == "1000", "LLVM's and Intel's OpenMP do not know it, and sleep at once"


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "5"}])
def test_what_the_user_has_set_stays(given: dict[str, str]) -> None:
    found = openmp(**given)
    for name, value in given.items():
        assert found.get(name, value) == value
    assert found.get("GOMP_SPINCOUNT") != "1000"
