"""The functions for Python programs, used by programs that a real mpirun starts, and what docs/python.md says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hetero_mpi
from tests.support.errors import refuses
from tests.support.mpi import ROOT, launcher_or_skip, require_success, run_mpi
from tests.support.pages import follow, write_files
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


def test_a_job_built_in_python_tells_all_its_problems() -> None:
    tables = {"model": {"config": {"model_type": "llama"}}, "data": {"text": ["*.txt"]}, "train": {"steps": 0}}
    with refuses("job.invalid", "job 'mine': ", "set 'steps'") as caught:
        hetero_mpi.Job.build(tables, name="mine", set={"train.global_batch": -1, "steps": 3})
    kinds = ("job.set", "job.train.steps", "job.train.global_batch", "job.tokenizer.path")
    assert caught.value.kinds >= set(kinds)


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


@pytest.mark.parametrize("job", [None, [{"train": {"steps": 6}}]])
def test_an_argument_of_another_type_is_named(job: Any) -> None:
    build, load = hetero_mpi.Job.build, hetero_mpi.Job.load
    calls: list[Any] = [lambda: hetero_mpi.plan(job, "moe-4090-3060"), lambda: load(job), lambda: build(job)]
    for call in (*calls, lambda: build({}, directory=job)):
        with refuses("api.argument", type(job).__name__):
            call()
