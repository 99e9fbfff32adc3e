"""The functions for Python programs, used by programs that a real mpirun starts, and what docs/python.md says of them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import hetero_mpi
from tests.support.errors import refuses
from tests.support.mpi import ROOT, launcher_or_skip, require_success, run_mpi
from tests.support.pages import follow, write_files
from tests.support.processes import run_within
from tests.support.rank_pool import run_pooled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory and what each of 3 ranks saw, of one run of the program."""
    out = tmp_path_factory.mktemp("api")
    result = require_success(run_pooled(3, "python_api", [str(out)], timeout_s=300))
    assert result.stdout.count("the end of the program") == 3
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(3)]


def test_every_rank_gets_the_same_results(used: tuple[Path, list[dict[str, Any]]]) -> None:
    out, ranks = used
    assert ranks[1] == ranks[0] and ranks[2] == ranks[0]
    assert ranks[0]["same"] and ranks[0]["ranks"] == 3 and ranks[0]["step_s"] > 0
    assert ranks[0]["directories"] == [str(out / "made"), str(out / "again"), str(out / "made")]
    assert (Path(ranks[0]["result"]) / "model.safetensors").is_file()
    assert Path(ranks[0]["checkpoint"]).name == "step-00000005.h5" and Path(ranks[0]["checkpoint"]).is_file()


def test_a_program_trains_again_and_goes_on(used: tuple[Path, list[dict[str, Any]]]) -> None:
    first, again, resumed = used[1][0]["losses"]
    assert len(first) == 3 and again == first
    assert len(resumed) == 5 and resumed[:3] == first


def test_errors_are_raised_on_all_ranks_and_the_program_goes_on(used: tuple[Path, list[dict[str, Any]]]) -> None:
    found = used[1][2]
    assert "nowhere.h5" in found["resume"][0] and found["resume"][1] == 2
    assert "nowhere.toml" in found["job"][0] and "3" in found["few"][0]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 3 ranks, the last one idle, saw of the steps of runs that it followed."""
    out = tmp_path_factory.mktemp("follow")
    result = require_success(run_pooled(3, "python_api", [str(out), "follow"], timeout_s=300))
    assert "Stopped after step 3 (the program left its loop): " in result.stdout
    return [json.loads((out / f"follow{rank}.json").read_text()) for rank in range(3)]


def test_a_run_that_is_followed_has_the_numbers_of_one_that_is_not(followed: list[dict[str, Any]]) -> None:
    for rank in followed:
        plain, called, iterated, left, stopped = rank["losses"]
        assert len(plain) == 6 and plain == called == iterated == left
        assert stopped == plain[:3]
        assert rank["result"] == [True] * 4


def test_every_rank_is_told_what_happens_in_its_order(followed: list[dict[str, Any]]) -> None:
    first = followed[0]["seen"]
    assert followed[2]["seen"] == first, "the idle rank too, with rank 0's times"
    assert followed[1]["seen"] == [one for one in first if one[0] != "step"], "it has no such callback"
    assert first[0] == ["plan", True]
    assert [one[1] for one in first if one[0] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [one[2] for one in first if one[0] == "step"] == followed[0]["losses"][0]
    assert [one[1] for one in first if one[0] == "evaluation"] == [2, 4, 6]
    whole = [f"step-0000000{step}.h5" for step in (2, 4, 6)]
    assert [one[1:] for one in first if one[0] == "checkpoint"] == [[name, True] for name in whole]
    at = first.index(next(one for one in first if one[:2] == ["evaluation", 2]))
    assert first[at + 1][:2] == ["step", 2]


def test_a_loop_is_left_on_all_ranks_after_the_same_step(followed: list[dict[str, Any]]) -> None:
    for rank in followed:
        assert rank["left"][:2] == [3, None]
        assert "another run of this program is active" in rank["left"][2][0]
        assert rank["sums"] == [3, 6, 9, 12, 15, 18]
        assert [loss is not None for loss in rank["went_on"]] == [True, False, True]


@pytest.mark.parametrize("where", ["callback", "alone"])
def test_an_exception_of_one_rank_ends_all(where: str, tmp_path: Path) -> None:
    result = run_mpi(2, ["tests/programs/python_api.py", where, str(tmp_path)], timeout_s=100)
    assert result.returncode != 0 and "the end of the program" not in result.stdout
    assert "rank 1/2 on" in result.stderr and "ValueError: rank 1 has had enough" in result.stderr


CELLS = """
import time
from pathlib import Path
import hetero_mpi
from tests.programs.python_api import job_in
out = Path({out!r})
job = job_in(out, **{{"train.steps": 6}})
result = hetero_mpi.train(job)
# %%
def fail(step):
    raise KeyError("of mine")
hetero_mpi.train(job, run_dir=out / "failed", on_step=fail)
# %%
run = hetero_mpi.steps(job, run_dir=out / "half")
for step in run:
    if step.step == 2:
        raise ValueError("half way")
# %%
run = hetero_mpi.steps(job, run_dir=out / "half", resume="latest")
print("begins with", next(run).step)
# %%
# interrupt asleep beside it
print("asleep beside it")
time.sleep(60)
# %%
# interrupt asleep in step 4
for step in run:
    print("asleep in step", step.step)
    time.sleep(60)
# %%
print("under way:", run.under_way)
run = hetero_mpi.steps(job, run_dir=out / "half", resume="latest")
print("the rest", [step.step for step in run], run.result.losses == result.losses)
# %%
run = hetero_mpi.steps(job, run_dir=out / "open")
next(run)
"""


def test_a_notebook_trains_with_one_rank_and_no_launcher(tmp_path: Path) -> None:
    """Errors are the cell's; an interrupt in the body ends the run with a checkpoint, as its end with the kernel does."""
    (tmp_path / "cells.py").write_text(CELLS.format(out=str(tmp_path)))
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX"))}
    command = [sys.executable, "-m", "tests.programs.notebook", str(tmp_path / "cells.py")]
    done = run_within(300, command, alone, ROOT)
    printed = done.stdout
    assert done.returncode == 0, printed[-4000:] + done.stderr[-4000:]
    assert printed.count("KeyError: 'of mine'") == 1 and printed.count("ValueError: half way") == 1
    assert "begins with 3" in printed and "the rest [5, 6] True" in printed and "under way: False" in printed
    assert printed.count("KeyboardInterrupt\n") == 2
    left = re.findall(r"Stopped after step (\d) \(the program left its loop\): \S+ is complete", printed)
    assert left == ["2", "4", "1"]
    assert (tmp_path / "open" / "checkpoints" / "step-00000001.h5").is_file()


def test_a_job_built_in_python_tells_all_its_problems() -> None:
    tables = {"model": {"config": {"model_type": "llama"}}, "data": {"text": ["*.txt"]}, "train": {"steps": 0}}
    with refuses("job.invalid", "job 'mine': ", "set 'steps'") as caught:
        hetero_mpi.Job.build(tables, name="mine", set={"train.global_batch": -1, "steps": 3})
    kinds = ("job.set", "job.train.steps", "job.train.global_batch", "job.tokenizer.path")
    assert caught.value.kinds >= set(kinds)


def test_names_of_the_package() -> None:
    assert set(hetero_mpi.__all__) <= set(dir(hetero_mpi))
    for name in hetero_mpi.__all__:
        assert getattr(hetero_mpi, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = hetero_mpi.trian


def test_the_programs_and_commands_of_the_document_run_in_an_empty_folder(tmp_path: Path) -> None:
    """Every block of Python in docs/python.md, under the name that stands before it."""
    launcher_or_skip()
    page = ROOT / "docs" / "python.md"
    assert len(write_files(page, tmp_path)) == page.read_text().count("```python") >= 4
    printed = follow(page, tmp_path, 300)
    assert re.search(r"predicted: \d+\.\d{4} s", printed) and (tmp_path / "runs" / "second" / "model").is_dir()
    first, last = re.search(r"loss (\S+) -> (\S+), ", printed).groups()  # type: ignore[union-attr]
    assert float(last) < float(first)
    assert "was not made for" in printed and "tensor(" in printed
    (taken,) = re.findall(r"^0 (\d+) steps$", printed, re.MULTILINE)
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == int(taken) < 16
    assert printed.count("## Continuation") >= 3 and "[1, 2, 3, 4, 5, 6] " in printed
    assert "step-00000006.h5 is complete" in printed and "training resumed after step 3 on 2 ranks" in printed
    assert "4 steps, evaluation loss" in printed and (tmp_path / "tuned" / "model.safetensors").is_file()
