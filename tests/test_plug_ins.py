"""The exercises of docs/CONTRIBUTING.md: a schedule and an objective of one file each, saved where the page says, train."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi import ROOT, launcher_or_skip

EXERCISES = {
    "hetero_mpi/planning/orders/all_forward_two_backward.py": "a schedule of your own",
    "hetero_mpi/objectives/exponential.py": "an objective of your own",
}
"""File of the copy -> the end of its section's title."""


def section(title: str) -> str:
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    return text.split(f"{title}\n", 1)[1].split("\n## ", 1)[0]


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


@pytest.mark.slow
def test_the_exercises_train(tmp_path: Path) -> None:
    launcher_or_skip()
    for folder in ("hetero_mpi", "jobs", "profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, title in EXERCISES.items():
        (tmp_path / file).write_text(re.findall(r"```python\n(.*?)```", section(title), re.S)[0])
        for line in section(title).splitlines():
            if " launch " in line:
                words = [
                    sys.executable,
                    *shlex.split(line)[1:],
                    "--set",
                    "report.write=false",
                    "--set",
                    "profile.repeats=1",
                ]
                done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "runs" / "quickstart")) == 5
    assert losses(tmp_path / "runs" / "dpo")[0] == pytest.approx(1.0), "the model and its reference are the same"
