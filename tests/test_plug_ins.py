"""Plug-in points: the exercises of docs/CONTRIBUTING.md train, and further modules are used from the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi import ROOT, launcher_or_skip, require_success

EXERCISES = {
    "hetero_mpi/planning/orders/all_forward_two_backward.py": "a schedule of your own",
    "hetero_mpi/objectives/exponential.py": "an objective of your own",
}
"""File of the copy -> the end of its section's title."""

MODULES = {
    "hetero_mpi/rundir/trackers/lines.py": """
class Lines:
    def __init__(self, run_dir):
        self.path = run_dir / "lines.txt"
    def log(self, values, *, step):
        self.path.open("a").write(f"{step} {values.get('loss/training')}\\n")
    def finish(self):
        self.path.open("a").write("end")
def open_tracker(run_dir, job):
    return Lines(run_dir)
""",
    "hetero_mpi/data/formats/comma_separated.py": """
import csv
BEGINS, SUFFIXES = (), (".csv",)
def read_records(path, keys, wanted):
    for number, row in enumerate(csv.DictReader(path.open()), start=1):
        yield f"{path}, row {number}", row
""",
    "hetero_mpi/commands/plug_ins/count.py": """
ABOUT = "count the lines of a file"
def add_options(add):
    add("file")
def run(file):
    return [f"{len(open(file).readlines())} lines"]
""",
}
"""File of the copy -> a minimal plug-in."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what a person checks out, which may be added to."""
    launcher_or_skip()
    for folder in ("hetero_mpi", "jobs", "profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(copy: Path, words: str) -> str:
    """What a command in the copy prints."""
    command = [sys.executable, *shlex.split(words)]
    done = require_success(subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300))
    return done.stdout


def section(title: str) -> str:
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    return text.split(f"{title}\n", 1)[1].split("\n## ", 1)[0]


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


@pytest.mark.slow
def test_the_exercises_train(copy: Path) -> None:
    for file, title in EXERCISES.items():
        (copy / file).write_text(re.findall(r"```python\n(.*?)```", section(title), re.S)[0])
        for line in section(title).splitlines():
            if " launch " in line:
                run(copy, f"{line.partition(' ')[2]} --set report.write=false --set profile.repeats=1")
    for file in EXERCISES:  # the runs can be read without the files that made them
        (copy / file).unlink()
    for words in "report", "inspect", "plan --profile", "plan --schedule 1f1b --profile":
        run(copy, f"-m hetero_mpi {words} runs/quickstart")
    run(copy, "-m hetero_mpi export runs/quickstart model")
    run(copy, "-m hetero_mpi inspect runs/dpo")
    assert len(losses(copy / "runs" / "quickstart")) == 5
    assert losses(copy / "runs" / "dpo")[0] == pytest.approx(1.0), "the model and its reference are the same"


@pytest.mark.slow
def test_a_tracker_a_format_and_a_command_of_ones_own_are_used(copy: Path) -> None:
    for file, text in MODULES.items():
        (copy / file).write_text(text)
    rows = "".join(f"question {n},answer {n}\n" for n in range(40))
    (copy / "jobs" / "data" / "pairs.csv").write_text("prompt,completion\n" + rows)
    assert "41 lines" in run(copy, "-m hetero_mpi count jobs/data/pairs.csv")
    train = "-m hetero_mpi launch -np 1 -- train jobs/letters.toml --run-dir runs/csv --set train.steps=2"
    train += """ --set 'data.records=["data/pairs.csv"]' --set 'report.trackers=["lines"]' --set report.write=false"""
    run(copy, f"{train} --set data.template=plain --set profile.repeats=1")
    first, second, *_, end = (copy / "runs" / "csv" / "lines.txt").read_text().splitlines()
    assert first.startswith("1 ") and second.startswith("2 ") and end == "end"
