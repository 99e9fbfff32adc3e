"""Trains JOB N times in one process: ``many_runs.py JOB PLAN PROFILE DIRECTORY N``; prints open files after each tenth."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import hetero_mpi


def main(job: str, plan: str, profile: str, directory: str, count: str) -> None:
    for number in range(1, int(count) + 1):
        run_dir = Path(directory) / str(number)
        result = hetero_mpi.train(job, plan=plan, profile=profile, run_dir=run_dir)
        assert len(result.losses) == 1
        if number % 10 == 0 and result.run_dir.is_dir():
            print(f"open files: {len(os.listdir('/proc/self/fd'))}", flush=True)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
