"""What people see: units, tables before the first step, and the summary."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.types.cost import EMBEDDING, HEAD, LayerCost, ModelCost
from hetero_mpi.planning.types.plan import (
    Alone,
    IdleRank,
    PipelinePlan,
    Plan,
    PlanReport,
    RankMemory,
    StagePlan,
)
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.types.toml_files import plan_to_dict, report_from_dict
from hetero_mpi.report.plan_text import plan_lines, planned_lines
from hetero_mpi.report.profile_text import measured_lines, profile_lines
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_text import final_lines
from hetero_mpi.rundir.metrics import Evaluation, measured_step_s
from hetero_mpi.util import units
from hetero_mpi.util.terminal import WIDTH
from tests.support.past_runs import metrics

# Units


def test_units() -> None:
    assert [units.seconds(value) for value in (0, 4.2e-6, 0.0123, 0.99999, 1.5, 62, 150, 3723, math.inf)] == [
        "0 s", "4.20 us", "12.3 ms", "1.00 s", "1.50 s", "62.0 s", "2:30", "1:02:03", "unknown",
    ]  # fmt: skip
    assert [units.size(value) for value in (0, 999, 1e3, 8.53e9, 999.9e6)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "8.53 GB",
        "1.00 GB",
    ]
    assert [units.count(value) for value in (7, 12_345_678, 134e6)] == ["7", "12.3 M", "134 M"]
    assert [units.percent(value) for value in (0.0834, 0.25, -0.02)] == ["8.3 %", "25 %", "-2.0 %"]
    assert units.bandwidth(math.inf) == "unlimited"


# Tables


def layer(kind: str, parameters: int, boundary: int) -> LayerCost:
    return LayerCost(kind, parameters, parameters, 4 * parameters, 1000.0, 0.0, boundary)


MODEL = ModelCost(
    "llama",
    "fp32",
    128,
    tied=False,
    state_bytes_per_trainable_parameter=12.0,
    layers=(layer(EMBEDDING, 1_048_576, 1024), *[layer("block", 851_968, 1024)] * 6, layer(HEAD, 1_048_832, 0)),
)


def device(rank: int, host: str, name: str, block_s: float, reason: str) -> DeviceProfile:
    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((128,), (seconds,)), Curve((128,), (2 * seconds,)))

    layers = {EMBEDDING: times(block_s / 10), "block": times(block_s), HEAD: times(block_s / 2)}
    backend = "cuda" if "NVIDIA" in name else "cpu"
    return DeviceProfile(rank, host, backend, name, 8 * 10**9, reason, ("fp32",), layers, 0.0, 0.0)


PROFILE = ClusterProfile(
    source="measured",
    date="2026-11-20",
    key="k",
    mpi_library="Open MPI 5.0.11",
    versions={},
    model=MODEL,
    devices=(
        device(0, "box", "NVIDIA GeForce RTX 5090 Founders Edition", 0.001, "free on the card"),
        device(
            1,
            "box",
            "AMD Ryzen 9 9950X",
            0.010,
            "the host's free memory, 16.0 GB, shared by the 2 ranks on it that compute on it",
        ),
        device(2, "a-host-with-a-very-long-name.example.org", "cpu", 0.040, "free"),
    ),
    links=tuple(
        LinkProfile(a, b, 1e-4 if 2 in (a, b) else 1e-6, 1.25e8 if 2 in (a, b) else 5e9, 2 not in (a, b))
        for a in range(3)
        for b in range(3)
        if a != b
    ),
    notes=("2 ranks share the box: timed all at once",),
)

PLAN = Plan(
    pipelines=(PipelinePlan((StagePlan((1,), 0, 3, 1), StagePlan((0,), 3, 8, 0)), micro_batch=8, sequences=64),),
    global_batch=64,
    sequence_length=128,
    layers=8,
)
REPORT = PlanReport(
    PLAN,
    predicted_step_s=2.0,
    bound_step_s=1.6,
    memory=(RankMemory(0, 1_200_000_000, 7_600_000_000), RankMemory(1, 340_000_000, 7_600_000_000)),
    alone=Alone(0, 2.4),
    idle=(IdleRank(2, "it would slow the pipeline down by 14 %"),),
    reasons=("2 ranks beat 3 by 14 %",),
)


PROFILE_LINES = """\
Ranks: 3, Open MPI 5.0.11; figures measured, 2026-11-20
  rank  host                  device                     forward  backward   memory  why so much
     0  box                   RTX 5090 Founders Edition  1.00 ms   2.00 ms  8.00 GB  free on the card
     1  box                   cpu AMD Ryzen 9 9950X      10.0 ms   20.0 ms  8.00 GB  the host's free memory, 16.0 GB,
                                                                                     shared by the 2 ranks on it that
                                                                                     compute on it
     2  a-host-with-a-ver...  cpu                        40.0 ms   80.0 ms  8.00 GB  free
  forward and backward: one block, one sequence of 128 tokens, fp32
  6 links (least, median, most): latency 1.00 us, 100 us, 100 us; bandwidth 125 MB/s, 125 MB/s, 5.00 GB/s
  slowest: rank 2 -> rank 1, 1.15 ms for one sequence's activations (131 kB)
  2 ranks share the box: timed all at once"""

PLAN_LINES = """\
2 of 3 ranks, 2.00 s per step; the best one alone, rank 0, 2.40 s (1.20x)
Plan: 2 stages, schedule 1F1B
  stage  rank  device                     layers                 weights              memory  compute  warm-up
      0     1  cpu AMD Ryzen 9 9950X      embedding, blocks 0-1   2.75 M   340 MB of 7.60 GB   504 ms        1
      1     0  RTX 5090 Founders Edition  blocks 2-5, head        4.46 M  1.20 GB of 7.60 GB   108 ms        0
  weights: parameters; compute: forward + backward of 1,024 tokens; warm-up: micro-batches ahead of the first backward
  rank 2 idles: it would slow the pipeline down by 14 %
  because: 2 ranks beat 3 by 14 %
Batch: 64 sequences = 8 micro-batches x 8 sequences, 128 tokens each: 8,192 tokens per step
Predicted: 2.00 s per step, 4,096 tokens/s"""


def test_the_profile_in_a_few_lines() -> None:
    assert "\n".join(profile_lines(PROFILE)) == PROFILE_LINES


def test_pictures_are_counted_as_samples() -> None:
    """A sequence of one token is a sample of a model made of layers."""
    profile = replace(PROFILE, model=replace(MODEL, sequence_length=1))
    report = replace(REPORT, plan=replace(PLAN, sequence_length=1))
    lines = [*profile_lines(profile), *measured_lines(profile), *plan_lines(report, profile)]
    assert not re.search(r"\btokens?\b", "\n".join(lines)) and "one block, one sample, fp32" in "\n".join(lines)


def test_the_plan_as_a_table() -> None:
    """8 sequences, 8 samples of the curve: stage 0 is (0.1 + 2) blocks of 10 ms, 8 times, thrice (backward doubles)."""
    assert "\n".join(plan_lines(REPORT, PROFILE)) == PLAN_LINES


def test_several_pipelines_and_recompute() -> None:
    one = PLAN.pipelines[0]
    plan = replace(
        PLAN,
        pipelines=(
            replace(one, sequences=56, stages=(replace(one.stages[0], recompute=True), one.stages[1])),
            PipelinePlan((StagePlan((2,), 0, 8, 0),), micro_batch=8, sequences=8),
        ),
    )
    lines = plan_lines(replace(REPORT, plan=plan, idle=()), PROFILE)
    assert lines[1] == "Plan: 3 stages in 2 pipelines, schedule 1F1B"
    assert lines[2].split()[:4] == ["pipeline", "stage", "rank", "device"]
    assert lines[3].split()[-4:] == ["664", "ms", "yes", "1"], "504 ms and once more the forward of two blocks"
    assert any(line.split()[:3] == ["1", "2", "2"] for line in lines)
    assert "64 sequences = 7 micro-batches x 8 sequences + 1 micro-batch x 8 sequences" in lines[-2]


def test_a_group_is_told_with_its_heads() -> None:
    one = PLAN.pipelines[0]
    stages = (replace(one.stages[0], ranks=(0, 2), shares=(5, 3)), one.stages[1])
    plan = replace(PLAN, pipelines=(replace(one, stages=stages),))
    lines = plan_lines(replace(REPORT, plan=plan, idle=()), PROFILE)
    assert "0, 2 (5 + 3 heads)" in lines[3] and "heads" not in lines[4]


def test_schedules_bear_their_names() -> None:
    one = PLAN.pipelines[0]

    def heading(*depths: int, split: bool = False, count: int = 1) -> str:
        stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(one.stages, depths, strict=True))
        changed = replace(one, stages=stages, split_backward=split)
        return plan_lines(replace(REPORT, plan=replace(PLAN, pipelines=(changed,) * count)), PROFILE)[1]

    assert heading(8, 8) == heading(7, 7) == "Plan: 2 stages, schedule GPipe"
    assert heading(1, 0, split=True) == "Plan: 2 stages, schedule 1F1B, split backward"
    assert heading(3, 0, count=2) == "Plan: 4 stages in 2 pipelines, schedule 1F1B with its own warm-up depths"
    alone = replace(PLAN, pipelines=(PipelinePlan((StagePlan((1,), 0, 8, 0),), 8, 64),) * 3)
    lines = plan_lines(replace(REPORT, plan=alone), PROFILE)
    assert lines[1] == "Plan: 3 stages in 3 pipelines"
    assert any("64 sequences = 3 x (8 micro-batches x 8 sequences), 128 tokens each" in line for line in lines)


def test_a_tied_matrix_held_at_both_ends_is_counted_once() -> None:
    tied = replace(PROFILE, model=replace(MODEL, tied=True, tied_bytes=4 * 1_048_576))
    plan = replace(PLAN, pipelines=(PipelinePlan((StagePlan((1,), 0, 8, 0),), 8, 64),))
    alone = replace(REPORT, plan=plan)
    assert "7.21 M" in plan_lines(alone, PROFILE)[3]
    assert "6.16 M" in plan_lines(alone, tied)[3]


def test_the_bound_is_told_where_a_plan_is_looked_at_by_itself() -> None:
    """The fluid bound tells nobody whether to look for a better plan: the file and ``inspect`` have it."""
    assert "no plan could take less than" not in " ".join(plan_lines(REPORT, PROFILE))
    told = "no plan could take less than 1.60 s (fluid bound; this one 25 % more)"
    assert told in " ".join(" ".join(plan_lines(REPORT, None)).split())


def test_no_line_is_too_long() -> None:
    long = replace(PROFILE, notes=("word " * 60,), mpi_library="Open MPI 5.0.11")
    wordy = replace(REPORT, reasons=("word " * 60,), idle=(IdleRank(2, "word " * 60),))
    assert max(map(len, [*profile_lines(long), *plan_lines(wordy, long)])) <= WIDTH


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 8, "embedding, blocks 0-5, head"),
        (0, 1, "embedding"),
        (0, 2, "embedding, block 0"),
        (1, 2, "block 0"),
        (4, 7, "blocks 3-5"),
        (6, 8, "block 5, head"),
        (7, 8, "head"),
    ],
)
def test_layers_by_name(first: int, last: int, expected: str) -> None:
    assert units.layers(first, last, 8) == expected


# Summary


def test_the_end_of_a_run() -> None:
    steps = [metrics(step, loss=8.0 - step, step_s=9.0 if step < 3 else 2.2) for step in range(1, 6)]
    assert measured_step_s(steps) == 2.2
    written = {"model": Path("runs/a/model"), "checkpoint": Path("runs/a/checkpoints/step-5.h5")}
    assert final_lines(REPORT, PROFILE, steps, [Evaluation(5, 3.25)], 5.0, written) == [
        "Step time: 2.20 s measured (median), 3,724 tokens/s; 2.00 s predicted",
        "Loss: 7.0000 at step 1, 3.0000 at step 5 (nats per token)",
        "Held-out loss: 3.2500 at step 5",
        "Unigram entropy of the training text: 5.0000; the held-out loss is 1.7500 below it",
        "Written:",
        "  model       runs/a/model",
        "  checkpoint  runs/a/checkpoints/step-5.h5",
    ]


def test_the_reason_for_a_wrong_prediction() -> None:
    steps = [metrics(step, step_s=2.5) for step in range(1, 6)]
    told = final_lines(REPORT, PROFILE, steps)
    assert told[0] == "Step time: 2.50 s measured (median), 3,277 tokens/s; 2.00 s predicted"
    assert told[1].startswith("  25 % longer: the machines are not as fast as when they were measured")
    assert "was not measured here" in final_lines(REPORT, replace(PROFILE, source="derived from sheets"), steps)[1]
    emulated = final_lines(REPORT, replace(PROFILE, source="emulated, measured"), steps)
    assert emulated[0].startswith("Step time, emulated: ") and "raise [cluster] time_scale" in emulated[1]
    assert "too few" in final_lines(REPORT, PROFILE, steps[:2])[0]


def test_measured_steps_are_compared_with_the_plan_they_were_taken_under() -> None:
    """Ten steps of 6 s under a plan that promised 5.5 s, then ten of 2 s under the last one."""
    before = [replace(metrics(step, step_s=6.0), predicted_step_s=5.5) for step in range(1, 11)]
    after = [replace(metrics(step, step_s=3.0 if step < 13 else 2.0), predicted_step_s=2.0) for step in range(11, 21)]
    assert measured_step_s([*before, *after]) == 2.0
    assert final_lines(REPORT, PROFILE, [*before, *after])[:2] == [
        "Step time: 2.00 s measured (median), 4,096 tokens/s; 2.00 s predicted (since the plan changed after step 10)",
        "  before, up to step 10: 6.00 s measured, 5.50 s predicted",
    ]
    assert measured_step_s([*before, *after[:2]]) is None
    assert "2 steps are too few" in final_lines(REPORT, PROFILE, [*before, *after[:2]])[0]


def test_a_speed_that_was_asked_for_is_the_reason_it_is() -> None:
    """A change of speed during the steps of the last plan; one that came before that plan was made is in its prediction."""
    profile = replace(PROFILE, source="emulated, measured")
    steps = [metrics(step, step_s=4.0) for step in range(1, 11)]
    told = final_lines(REPORT, profile, steps, speed_changes=[(0, 4, 0.34), (1, 20, 0.5)])[1]
    assert told.startswith(
        "  2 times as long: devices changed their speed as [cluster] emulate_changes asks (rank 0 at 0.34 from step 5), "
    )
    before = [replace(metrics(step), predicted_step_s=9.0) for step in range(1, 11)]
    later = [metrics(step, step_s=4.0) for step in range(11, 21)]
    assert (
        "raise [cluster] time_scale" in final_lines(REPORT, profile, [*before, *later], speed_changes=[(0, 4, 0.34)])[1]
    )


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (7.0, "3.5 times as long: the machines are not as fast as"),
        (0.5, "75 % shorter: the machines are faster than"),
        (2.5, "25 % longer: the machines are not as fast as"),
    ],
)
def test_the_end_says_which_way_the_machines_differ(step_s: float, told: str) -> None:
    lines = final_lines(REPORT, PROFILE, [metrics(step, step_s=step_s) for step in range(1, 6)])
    assert lines[1] == f"  {told} when they were measured: measure again (--reprofile)"


def test_the_end_blames_what_was_measured_when_the_plan_was_tried_or_made() -> None:
    """No advice to measure again where the times are of the trial, or of a plan that was made during the run."""
    tried = replace(REPORT, tried_step_s=2.0)
    short, long = ([metrics(step, step_s=step_s) for step in range(1, 6)] for step_s in (0.5, 2.5))
    host = HostProfile("a", 1 << 30, "made up", cores=2.0, other_threads=1.0)
    beside = replace(PROFILE, hosts=(host,))
    less = "other programs took more of the cores when the plan was tried"
    assert final_lines(tried, beside, short)[1] == f"  75 % shorter: {less}"
    assert (
        final_lines(tried, beside, long)[1] == "  25 % longer: the machines are not as fast as when the plan was tried"
    )
    assert (
        final_lines(tried, PROFILE, short)[1] == "  75 % shorter: the machines are faster than when the plan was tried"
    )
    told = final_lines(tried, replace(PROFILE, source="derived from sheets"), short)[1]
    assert told == "  75 % shorter: the machines are faster than when the plan was tried"
    before = [replace(metrics(step, step_s=1.0), predicted_step_s=1.0) for step in range(1, 6)]
    later = [metrics(step, step_s=2.5) for step in range(6, 12)]
    assert final_lines(REPORT, PROFILE, [*before, *later])[1] == (
        "  25 % longer: the machines are not as fast as when the plan was made"
    )


# Logs
@pytest.mark.parametrize(
    ("name", "most", "shown"),
    [
        ("NVIDIA GeForce RTX 4090", 26, "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", 10, "RTX 4090"),
        ("cuda NVIDIA GeForce RTX 4090", 20, "cuda RTX 4090"),
        ("cuda NVIDIA GeForce RTX 4090", 10, "RTX 4090"),
        ("rocm AMD Strix Halo (Radeon 8060S)", 26, "rocm Strix Halo"),
        ("cpu AMD Ryzen 9 9950X 16-Core Processor", 26, "cpu Ryzen 9 9950X"),
        ("A100-SXM4-80GB", 10, "...M4-80GB"),
    ],
)
def test_device_names_are_shortened_from_the_left(name: str, most: int, shown: str) -> None:
    """What tells one card from another stands last."""
    assert units.device_name(name, most) == shown


@pytest.mark.parametrize(("step_s", "word"), [(20.0, "10 times as long"), (2.5, "25 % longer")])
def test_what_other_programs_took_stands_beside_the_step_time(step_s: float, word: str) -> None:
    """As the reason where the step is longer than predicted, and then device times are kept."""
    others = "other programs took about 0.8 of 2 cores"
    steps = [metrics(step, step_s=step_s) for step in range(1, 6)]
    assert final_lines(REPORT, PROFILE, steps, others=others)[1:3] == [
        f"  {word}: {others}",
        "Loss: 2.0000 at step 1, 2.0000 at step 5 (nats per token)",
    ]
    usual = [metrics(step, step_s=2.1) for step in range(1, 6)]
    assert final_lines(REPORT, PROFILE, usual, others=others)[1] == f"  {others}"


def test_a_tried_step_stands_beside_the_predicted_one() -> None:
    tried = replace(REPORT, tried_step_s=2.1)
    told = "2 of 3 ranks, 2.00 s per step (2.10 s when tried); the best one alone, rank 0, 2.40 s (1.20x)"
    assert plan_lines(tried, PROFILE)[0] == told
    end = final_lines(tried, PROFILE, [metrics(step, step_s=2.2) for step in range(1, 6)])
    assert end[0].endswith("; 2.00 s predicted, 2.10 s when tried")
    assert report_from_dict(plan_to_dict(tried)) == tried


def test_the_first_screen_shows_times_as_they_are_predicted() -> None:
    """Where ranks have less than a core for each thread, as beside other programs, compute is as much longer."""
    host = HostProfile(PROFILE.devices[0].host, 1 << 40, "made up", cores=1.0, other_threads=1.0)
    crowded = replace(PROFILE, hosts=(host,), devices=tuple(replace(one, host=host.name) for one in PROFILE.devices))
    shown, full = planned_lines(REPORT, crowded, Path("run")), plan_lines(REPORT, crowded)
    assert _computing(shown) == _computing(full) != _computing(planned_lines(REPORT, PROFILE, Path("run")))


def _computing(lines: list[str]) -> list[str]:
    return [found[0] for line in lines for found in [re.findall(r"GB +(?:yes +)?([\d.]+ m?s)", line)] if found]


FIRST_SCREEN = """\
Measured: 3 ranks; forward and backward of one block over 128 tokens take 3.00 ms to 120 ms; links take 1.00 us to 100
          us, 125 MB/s or more
2 of 3 ranks, 2.00 s per step; the best one alone, rank 0, 2.40 s (1.20x)
Plan: 2 stages, schedule 1F1B
  stage  rank  device                     layers                             memory  compute
      0     1  cpu AMD Ryzen 9 9950X      embedding, blocks 0-1   340 MB of 7.60 GB   504 ms
      1     0  RTX 5090 Founders Edition  blocks 2-5, head       1.20 GB of 7.60 GB   108 ms
  rank 2 idles: it would slow the pipeline down by 14 %
Batch: 64 sequences = 8 micro-batches x 8 sequences, 128 tokens each: 8,192 tokens per step
  why, and all figures: --verbose, or `python -m hetero_mpi inspect runs/a`"""


def test_the_first_screen_has_a_line_for_each_thing() -> None:
    assert "\n".join([*measured_lines(PROFILE), *planned_lines(REPORT, PROFILE, Path("runs/a"))]) == FIRST_SCREEN
    emulated = measured_lines(replace(PROFILE, source="emulated, measured"))
    assert (
        emulated[0].startswith("Emulated, measured: 3 ranks")
        and emulated[-1] == "  2 ranks share the box: timed all at once"
    )


@pytest.mark.parametrize(
    ("step_s", "steps", "most"), [(0.35, 60, 13), (2.0, 300, 22), (0.01, 5000, 12), (20.0, 20_000, 900)]
)
def test_lines_of_progress_do_not_fill_a_file(step_s: float, steps: int, most: int) -> None:
    """By a made-up clock; the last case lasts four days, of which a line comes every ten minutes."""
    clock, stream = [0.0], io.StringIO()
    with ProgressDisplay(steps, stream=stream, now_s=lambda: clock[0]) as display:
        for step in range(1, steps + 1):
            clock[0] = step * step_s
            display.update(metrics(step, step_s=step_s))
    lines = stream.getvalue().splitlines()
    assert most * 0.4 < len(lines) <= most, len(lines)
    assert f"1/{steps} " in lines[0] and f" {steps}/{steps} " in lines[-1]
