"""How fast one rank is by itself: every command says the same, over all that it could do, by the times it took alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.planning.decision.alternatives import what_ifs
from hetero_mpi.planning.decision.decide import best_alone, time_alone
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import restricted, with_slowness
from hetero_mpi.planning.types.plan import Alone, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_profile, load_report, save_profile
from hetero_mpi.report.plan_text import headline
from hetero_mpi.util import units
from tests.support.past_runs import WHOLE_JOB, make_run
from tests.support.planning_folder import cluster, fill, run
from tests.support.planning_samples import SEQUENCE, make_plan_of, make_profile, on_cores, random_instance
from tests.support.seeds import seeds

ROOT = Path(__file__).resolve().parents[3]
QUICK = 2
"""Ranks up to which planning takes about a second."""
SHIPPED = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if len(load_profile(path).devices) > QUICK else [])
    for path in sorted((ROOT / "profiles").glob("*.toml"))
]


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED)
def test_plan_what_if_baseline_and_report_say_the_same(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(path)
    plan_path = tmp_path / "plan.toml"
    what_if = ["--explain"] if len(profile.devices) == 2 else []  # of two, one remains where the other is left out
    assert main(["plan", "--profile", str(path), *what_if, "-o", str(plan_path)]) == 0
    planned = capsys.readouterr().out
    plan = load_report(plan_path)
    first_line = planned.splitlines()[0]
    assert first_line == headline(plan) and plan.alone is not None
    assert main(["baseline", "--profile", str(path)]) == 0
    compared = capsys.readouterr().out
    run_directory = make_run(tmp_path / "run", plan, profile, steps=3)
    assert main(["report", str(run_directory)]) == 0
    assert f"Predicted: {first_line}." in (run_directory / "report.html").read_text()
    name = f"rank {plan.alone.rank}"
    if plan.alone.step_s is None:
        assert (
            f"no single rank can run this job ({name}: " in first_line
            and "no single device can run this job" in compared
        )
        return
    seconds, gain = units.seconds(plan.alone.step_s), plan.alone.step_s / plan.predicted_step_s
    if gain == 1:  # it is the plan
        assert f"only {name}, as the other ranks would slow it down" in first_line
        return
    assert f"best single rank: {name}, {seconds} ({gain:.2f}x)" in first_line
    rows = re.findall(rf"^  (rank \d+) alone +.*? {re.escape(seconds)} ", compared, re.M)
    assert name in rows, compared
    assert f"all devices together are {gain:.2f} times as fast" in compared
    if len(profile.devices) == 2:
        (other,) = {0, 1} - {plan.alone.rank}
        assert re.search(rf"without rank {other} .*\({re.escape(seconds)} per step\)", planned)


@seeds(12, 5)
def test_one_rank_alone_is_the_fastest_of_all_it_could_do(seed: int) -> None:
    """By trying every micro-batch, with recompute and without; the best rank by trying all ranks."""
    profile, request = random_instance(seed, 4, 5)
    sizes = tuple(size for size in (1, 2, 3, 4, 6) if request.global_batch % size == 0)
    request = replace(
        request, alone_micro_batch_choices=sizes, micro_batch_choices=(1,), recompute_choices=(False, True)
    )
    found = [time_alone(profile, request, rank) for rank in range(4)]
    for rank, one in enumerate(found):
        single = restricted(profile, [rank])
        tried = []
        for size in sizes:
            for again in (False, True):
                stage = StagePlan((0,), 0, 5, 0, again)
                plan = Plan((PipelinePlan((stage,), size, request.global_batch),), request.global_batch, SEQUENCE, 5)
                (memory,) = predict_memory(plan, single, request.memory_reserve)
                if memory.peak_bytes <= memory.usable_bytes:
                    tried.append(simulate(plan, single).step_s)
        assert one.step_s == (pytest.approx(min(tried)) if tried else None), one
    able = [one.step_s for one in found if one.step_s is not None]
    best = best_alone(profile, request)
    assert best is not None and best.step_s == min(able, default=None)
    scheduled = replace(request, schedule="gpipe")
    assert best_alone(profile, scheduled) == best, "one machine needs no pipeline's order"


def test_ranks_that_share_cores_are_alone_as_fast_as_with_cores_of_their_own() -> None:
    profile, request = on_cores(1.5, (1.0, 1.0)), PlanRequest(8, SEQUENCE, (1,))
    report = make_plan(profile, request)
    still = simulate(make_plan_of((0, 4), (0,), 8), make_profile((1.0, 1.0))).step_s
    assert report.alone == Alone(0, still)
    assert complete_plan(report.plan, profile, request).alone == report.alone
    without = [one.step_s for one in what_ifs(report, profile, request) if one.change.startswith("without rank")]
    assert without == [still], "of two like ranks, one is asked for"
    slower = make_plan(with_slowness(profile, {0: 3.0, 1: 3.0}), request).alone
    assert slower is not None and slower.step_s == pytest.approx(3 * still), "a slow machine is slow alone, too"


def test_the_headline_stands_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(fill(tmp_path))
    still = simulate(make_plan_of((0, 8), (0,), 8), cluster()).step_s
    arguments = ("job.toml", "--profile", "profile.toml")
    text = run(capsys, "plan", *arguments, "-o", "plan.toml")
    plan = load_report("plan.toml")
    gain = still / plan.predicted_step_s
    words = f"2 of 3 ranks, {units.seconds(plan.predicted_step_s)} per step; "
    words += f"best single rank: rank 0, {units.seconds(still)} ({gain:.2f}x)"
    assert text.startswith(f"{words} Plan: ")
    assert run(capsys, "simulate", *arguments, "-o", "out").startswith(words)
    assert run(capsys, "inspect", "plan.toml").startswith(words)
    assert "rank 0 alone: " not in text, "said once"


def test_the_headline_is_honest() -> None:
    plan = replace(make_plan(make_profile((1.0, 1.0)), PlanRequest(8, SEQUENCE, (1,))), predicted_step_s=2.0)
    headlines = {
        Alone(0, 3.0): "2 ranks, 2.00 s per step; best single rank: rank 0, 3.00 s (1.50x)",
        Alone(1, 1.0): "2 ranks, 2.00 s per step; a single rank would be faster: rank 1, 1.00 s (0.50x)",
        Alone(1, None, "too small"): "2 ranks, 2.00 s per step; no single rank can run this job (rank 1, the fastest: too small)",
        None: "2 ranks, 2.00 s per step",
    }  # fmt: skip
    for one, words in headlines.items():
        assert headline(replace(plan, alone=one)) == words
    single = make_plan(make_profile((1.0, 40.0)), PlanRequest(1, SEQUENCE, (1,)))
    assert headline(single).startswith("1 of 2 ranks, ") and headline(single).endswith(
        ": only rank 0, as the other ranks would slow it down"
    )
    assert headline(make_plan(make_profile((1.0,)), PlanRequest(1, SEQUENCE, (1,)))).startswith("1 rank, ")


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_told_the_command_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = "profiles/homelab-5090-strix-halo.toml"
    refused = run(capsys, "plan", "jobs/quickstart.toml", "--profile", path, code=2)
    command = f"plan --profile {path} --set train.global_batch=16"
    assert "6 blocks: the profile has 32" in refused and refused.endswith(f"python -m hetero_mpi {command}")
    text = run(capsys, *command.split())
    assert "planning 16 sequences of 1,024 tokens per step of the profile's model (llama, 32 blocks, bf16" in text
    assert "homelab" in run(capsys, "plan", "--profile", path, "--set", "data.sequence_length=5", code=2)
    save_profile(cluster(), tmp_path / "p.toml")
    drawn = run(capsys, "simulate", "--profile", str(tmp_path / "p.toml"), "-o", str(tmp_path / "out"))
    assert "Simulated step: " in drawn


def test_baseline_of_a_run_takes_the_runs_own_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    profile = cluster()
    report = make_plan(profile, PlanRequest(8, SEQUENCE, (1, 2)))
    directory = make_run(tmp_path / "run", report, profile, job=WHOLE_JOB)
    own = run(capsys, "baseline", "--profile", str(directory))
    by_file = run(capsys, "baseline", str(tmp_path / "job.toml"), "--profile", str(directory))
    assert re.sub(r"No job given: .*? of the run's job; .*?=N ", "", own) == by_file != own
