"""Hundreds of runs in one process: communicators, files and threads of a run are given back at its end."""

import sys
from pathlib import Path

import pytest

from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Workshop, write_profile
from tests.support.mpi import finish_mpi

RUNS = 300


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_hundreds_of_runs_in_one_process(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    job = shop.job("many", shop.values(shop.model()), train={"steps": 1}, checkpoint={"every": 0})
    plan = shop.plan("many", 1, GLOBAL_BATCH, SEQUENCE)
    profile = write_profile(tmp_path / "profile.toml", job, 1)
    arguments = [str(job), str(plan), str(profile), str(tmp_path / "runs"), str(RUNS)]
    result = finish_mpi(1, ["tests/programs/many_runs.py", *arguments], timeout_s=3_000)
    counts = [int(line.split()[2]) for line in result.stdout.splitlines() if line.startswith("open files: ")]
    assert len(counts) == RUNS // 10 and counts[-1] <= counts[0] + 5
