"""A run directory that is used again: the run before is moved aside."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.run_directory import holds_run, own_event, refuse_files_of_run, set_run_aside
from tests.support.errors import refuses
from tests.support.past_runs import cluster, make_run, planned

ROOT = Path(__file__).parents[2]


def files_under(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_is_set_aside_whole_but_for_what_the_new_one_needs(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "a", planned(profile), profile)
    (run / "notes.txt").write_text("the user's own")
    results = ("evaluation.json", "report-shared.html", "tiny/results_2026.json")  # of other commands, about this run
    (run / "tiny").mkdir()
    for name in results:
        (run / name).write_text("{}")
    before, told = files_under(run), read_run(run)
    new = (
        json.dumps({"unix_s": 2e9, "event": "start", "text": "of the new run's supervisor", "supervisor": "new"}) + "\n"
    )
    with (run / "events.jsonl").open("a") as file:
        file.write(new)

    refuse_files_of_run(run, [tmp_path / "model"])
    assert files_under(run).keys() == before.keys()
    aside = set_run_aside(run, lambda values: values.get("supervisor") == "new")
    (run / "plan.toml").write_text("the new run's")
    assert aside == run / "set-aside-1"
    kept = read_run(aside)
    assert (kept.metrics, kept.plan, kept.rank_steps) == (told.metrics, told.plan, told.rank_steps)
    assert kept.happenings == told.happenings
    assert [(one.step, one.bytes) for one in kept.checkpoints] == [(60, 4)]
    assert files_under(aside) == {name: content for name, content in before.items() if name != "notes.txt"}
    left = {name for name in files_under(run) if not name.startswith("set-aside-1/")}
    assert left == {"notes.txt", "plan.toml", "profile.toml", "events.jsonl"}
    assert (run / "events.jsonl").read_text() == new
    assert (run / "plan.toml").read_text() == "the new run's"
    assert not holds_run(run), "no run is left there"


@pytest.mark.parametrize(
    ("values", "own"),
    [
        ({"unix_s": time.time() + 60, "event": "died"}, True),
        ({"unix_s": 1e9, "event": "died"}, False),
        ({"unix_s": "yesterday", "event": "died"}, False),
        ({"unix_s": None}, False),
        ({}, False),
    ],
)
def test_events_of_this_process_are_told_from_those_of_a_run_before(values: dict[str, Any], own: bool) -> None:
    assert own_event(values) is own


def test_a_run_that_is_read_is_not_set_aside(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "a", planned(profile), profile)
    before = files_under(run)
    with refuses("run.files_in_use"):
        refuse_files_of_run(run, [run / "model"])
    assert files_under(run) == before


DIES = """
import os, sys
from pathlib import Path
from typing import Any
from hetero_mpi.rundir.run_directory import set_run_aside
moves = 0
def look(event, arguments):
    global moves
    if event == "os.rename":
        moves += 1
        if moves == int(sys.argv[2]):
            os._exit(9)
sys.addaudithook(look)
set_run_aside(Path(sys.argv[1]), lambda values: False)
"""


def test_a_crash_while_a_run_is_set_aside_loses_nothing(tmp_path: Path) -> None:
    profile = cluster(2)
    for move in range(1, 7):
        run = make_run(tmp_path / str(move), planned(profile), profile)
        before = files_under(run)
        died = subprocess.run(
            [sys.executable, "-c", DIES, str(run), str(move)], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert died.returncode == (9 if move < 6 else 0), "five files and folders are moved"
        assert move == 6 or (run / "checkpoints" / "step-00000060.h5").exists(), "there is a run until the last move"
        if holds_run(run):
            set_run_aside(run, lambda values: False)
        assert files_under(run / "set-aside-1") == before
        assert not (run / "set-aside-2").exists()
