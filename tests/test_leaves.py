"""A leaf's folder can be deleted: a job still trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.mpi import ROOT, run_mpi
from tests.test_house import LEAVES


@pytest.mark.slow
def test_a_job_trains_without_the_leaves(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hetero_mpi", tmp_path / "hetero_mpi", ignore=shutil.ignore_patterns("__pycache__"))
    for leaf in LEAVES:
        shutil.rmtree(tmp_path / "hetero_mpi" / leaf)
    job, short = ROOT / "jobs" / "letters.toml", ["--set", "train.steps=2", "--set", "profile.calibrate=false"]
    program = [
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hetero_mpi.cli import main; sys.exit(main())",
    ]
    result = run_mpi(
        2, [*program, "train", str(job), *short, "--run-dir", str(tmp_path / "run")], 300, {"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 0 and (tmp_path / "run" / "model").is_dir(), result.stdout + result.stderr
