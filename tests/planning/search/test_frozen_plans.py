"""The plans that were frozen: whole, within memory, and no faster than what the planner finds now."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import frozen_plans as frozen  # noqa: E402

from hetero_mpi.planning.dry_run import validate  # noqa: E402
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory  # noqa: E402
from hetero_mpi.planning.schedule import schedule_of  # noqa: E402

pytestmark = pytest.mark.slow

ENTRIES = frozen.read(frozen.FILE)


def test_every_size_and_way_of_training_is_frozen() -> None:
    first = list(frozen.names(12))
    assert [one["name"] for one in ENTRIES[: len(first)]] == first
    sizes = Counter(one["devices"] for one in ENTRIES if one["name"][0].isdigit())
    assert sizes == {**dict.fromkeys(frozen.SIZES, 5), 128: 2, 256: 2, 512: 1, 1024: 1}
    assert Counter(
        one["job"].split()[-1] for one in ENTRIES if one["devices"] in frozen.SIZES and one["name"][0].isdigit()
    ) == {way: count * len(frozen.SIZES) for way, count in frozen.JOBS.items()}


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(one, id=one["name"], marks=() if one["devices"] <= 64 else pytest.mark.long)
        for one in ENTRIES
        if one["devices"] <= 128
    ],
)
def test_a_frozen_plan_is_whole_and_fits(entry: dict[str, object]) -> None:
    case = frozen.case_of(str(entry["name"]))
    plan, profile, request = frozen.plan_of(entry, case), case.profile, case.request
    validate(schedule_of(plan, profile.model), plan, profile.model)
    assert sum(pipeline.sequences for pipeline in plan.pipelines) == request.global_batch
    needs = (
        *predict_memory(plan, profile, request.memory_reserve),
        *predict_hosts(plan, profile, request.memory_reserve),
    )
    assert all(one.peak_bytes <= one.usable_bytes for one in needs)


def test_small_clusters_are_planned_as_well_as_then(capsys: pytest.CaptureFixture[str]) -> None:
    assert frozen.main(["--most", "3", "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("7 clusters: step time over the frozen plan's, mean ")


def test_the_check_misses_no_slower_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the planner: the frozen plan with each micro-batch after the other through all stages."""
    (entry,) = (one for one in ENTRIES if one["name"] == "3-0")
    plan = frozen.plan_of(entry, frozen.case_of("3-0"))
    one_at_a_time = tuple(
        replace(p, stages=tuple(replace(stage, warm_up=0) for stage in p.stages)) for p in plan.pipelines
    )
    monkeypatch.setattr(frozen, "planned", lambda case: replace(plan, pipelines=one_at_a_time))
    assert frozen.main(["--only", "3-0", "--most", "3", "--check"]) == 1


@pytest.mark.long
def test_all_clusters_are_planned_as_well_as_then() -> None:
    assert frozen.main(["--check"]) == 0
