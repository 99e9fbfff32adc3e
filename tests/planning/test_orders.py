"""An order of computing that is one file: it is planned for, counted, simulated, kept in plan files and executed as the others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_mpi.planning import orders
from hetero_mpi.planning.analysis.calibration import drifted_profile
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.decision.rules import request_differences
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.memory import stage_holdings, warm_ups
from hetero_mpi.planning.orders import SCHEDULES
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_plan, save_plan
from hetero_mpi.report.plan_text import schedule_text
from hetero_mpi.training.replan import ReplanQuestion, answer
from tests.planning import two_backwards
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile, with_split

NAME = "two_backwards"
MODEL = make_model()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(orders.ORDERS, NAME, two_backwards)
    monkeypatch.setitem(orders.OTHER_ORDERS, NAME, two_backwards)
    monkeypatch.setitem(orders.SCHEDULES, NAME, "two backwards")


def ordered(plan: Plan) -> Plan:
    pipelines = (replace(pipeline, order=NAME, split_backward=True) for pipeline in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def test_messages_are_added_to_what_is_computed() -> None:
    plan = ordered(make_plan_of((0, 2, 4), (0, 1), 2))
    lists = schedule_of(plan, MODEL)
    assert " ".join(map(str, lists[0])) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0STEP"
    assert " ".join(map(str, lists[1])) == "1RECV_F0 1F0 1RECV_F1 1F1 1I0 1SEND_B0 1I1 1SEND_B1 1W0 1W1 1STEP"
    assert stage_holdings(plan.pipelines[0], plan.pipelines[0].stages[1]) == ((2, 0), (1, 1), (0, 2))
    assert warm_ups(plan.pipelines[0]) == (2, 2), "as gpipe"
    v_shaped = make_plan_of((0, 1, 2, 3, 4), (0, 1, 1, 0), 3).pipelines[0]
    assert warm_ups(replace(v_shaped, order="zbv", split_backward=True)) == (3, 1, 1, 0), "as in the picture of zbv"
    assert schedule_text(plan) == ", schedule two_backwards"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_order_runs_every_pipeline(stages: int, count: int) -> None:
    for name in orders.ORDERS:
        plan = make_plan_of((*range(stages), 4), range(stages), count)
        split = orders.ORDERS[name].SPLITS
        pipelines = tuple(replace(pipeline, order=name, split_backward=split) for pipeline in plan.pipelines)
        plan = replace(plan, pipelines=pipelines)
        validate(schedule_of(plan, MODEL), plan, MODEL)


def test_a_plan_is_made_for_it_and_kept(tmp_path: Path) -> None:
    profile = with_split(make_profile((1.0, 1.0, 2.0)))
    request = PlanRequest(8, SEQUENCE, (1, 2), split_choices=(False, True), schedule=NAME)
    report = make_plan(profile, request)
    assert [(pipeline.order, pipeline.split_backward) for pipeline in report.plan.pipelines] == [(NAME, True)]
    assert report.predicted_step_s == simulate(report.plan, profile).step_s >= report.bound_step_s
    assert report.predicted_step_s > make_plan(profile, replace(request, schedule="split")).predicted_step_s
    save_plan(report, tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == report.plan


def test_memory_is_that_of_the_order() -> None:
    """All micro-batches are in flight at once: what is short is said before anything runs."""
    profile = with_split(make_profile((1.0, 1.0), memory_bytes=70_000))
    request = PlanRequest(16, SEQUENCE, (1,), split_choices=(True,), schedule="split", memory_reserve=0.0)
    assert make_plan(profile, request).plan.pipelines[0].split_backward
    with refuses("memory.exceeded"):
        make_plan(profile, replace(request, schedule=NAME))


def test_a_plan_made_while_the_run_goes_on_keeps_it() -> None:
    profile = with_split(make_profile((1.0, 1.0)))
    request = PlanRequest(8, SEQUENCE, (1,), split_choices=(False, True), schedule=NAME)
    report = make_plan(profile, request)
    found = answer(
        ReplanQuestion(drifted_profile(profile, report.plan, {1: 3.0}), request, report, 1000, 0.0)
    ).report.plan
    assert found.pipelines[0].stages != report.plan.pipelines[0].stages
    assert [(pipeline.order, pipeline.split_backward) for pipeline in found.pipelines] == [(NAME, True)]


def test_layers_may_move_from_ranks_that_hold_several_stages() -> None:
    profile = with_split(make_profile((1.0, 1.0)))
    request = PlanRequest(8, SEQUENCE, (1,), split_choices=(False, True), stages_per_rank=2)
    plan = make_plan_of((0, 1, 2, 3, 4), (0, 1, 1, 0), 8)
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], order="zbv", split_backward=True),))
    report = complete_plan(plan, profile, request)
    told = answer(ReplanQuestion(drifted_profile(profile, report.plan, {1: 9.0}), request, report, 1000, 0.0))
    assert told.prospect.then_s < told.prospect.now_s
    assert sum(stage.last - stage.first for stage in told.report.plan.pipelines[0].stages if stage.ranks == (1,)) < 2


@pytest.mark.parametrize(
    ("change", "named"),
    [({"order": "zigzag"}, "zigzag"), ({"order": "zbv"}, "zbv"), ({"split_backward": True}, "split_backward")],
)
def test_impossible_orders_are_refused(change: dict[str, Any], named: str) -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], **change),))
    with refuses("plan.invalid", named):
        complete_plan(plan, make_profile(), PlanRequest(2, SEQUENCE, (1,)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "split", "zbv", NAME])
def test_a_given_plan_of_another_schedule_differs_from_the_job(schedule: str) -> None:
    profile = with_split(make_profile((1.0, 1.0)))
    request = PlanRequest(8, SEQUENCE, (1,), split_choices=(False, True), stages_per_rank=2, schedule=schedule)
    plan = make_plan(profile, request).plan
    agreeing = [name for name in SCHEDULES if not request_differences(plan, replace(request, schedule=name))]
    assert agreeing == ["auto", schedule]


def test_the_requested_schedule_is_named_where_times_are_missing() -> None:
    with refuses("plan.split_times", NAME):
        make_plan(make_profile(), PlanRequest(2, SEQUENCE, (1,), schedule=NAME))


def test_a_schedule_that_cannot_defer_says_what_the_profile_lacks() -> None:
    request = PlanRequest(8, SEQUENCE, (1,), split_choices=(False, True), stages_per_rank=2, schedule="dualpipev")
    for profile, lacks in ((make_profile((1.0, 1.0)), True), (with_split(make_profile((1.0, 1.0))), False)):
        report = make_plan(profile, request)
        assert report.plan.pipelines[0].split_backward is not lacks
        assert any("input_s and weight_s" in reason for reason in report.reasons) is lacks


def register(monkeypatch: pytest.MonkeyPatch, computing: Callable[[PipelinePlan, int], Any]) -> None:
    for table in (orders.ORDERS, orders.OTHER_ORDERS):
        monkeypatch.setitem(table, NAME, SimpleNamespace(SPLITS=False, computing=computing))


def pairs(pipeline: PipelinePlan, place: int) -> Iterator[tuple[str, int]]:
    """At most four micro-batches in flight on the first stage and two on the next, however many stages follow."""
    ahead, count = 2 * (len(pipeline.stages) - place), pipeline.micro_batches
    yield from (("F", m) for m in range(min(ahead, count)))
    for m in range(0, count, 2):
        yield from (("B", each) for each in range(m, min(m + 2, count)))
        yield from (("F", each) for each in range(m + ahead, min(m + ahead + 2, count)))


def test_an_order_is_planned_with_the_micro_batches_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile((1.0, 1.0), memory_bytes=52_000)
    request = PlanRequest(16, SEQUENCE, (1,), schedule="gpipe", memory_reserve=0.0)
    with refuses("memory.exceeded"):
        make_plan(profile, request)
    register(monkeypatch, pairs)
    (pipeline,) = make_plan(profile, replace(request, schedule=NAME)).plan.pipelines
    assert [(stage.warm_up, stage.recompute) for stage in pipeline.stages] == [(3, False), (1, False)]


def test_an_order_that_adds_gradients_out_of_turn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    last_first = [*(("F", m) for m in range(4)), *(("B", 3 - m) for m in range(4))]
    register(monkeypatch, lambda pipeline, place: last_first)
    with refuses("schedule.invalid", f"orders/{NAME}.py", "0B"):
        make_plan(make_profile(), PlanRequest(4, SEQUENCE, (1,), schedule=NAME))


def test_an_order_that_leaves_a_micro_batch_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, lambda pipeline, place: [(op, m) for m in range(pipeline.micro_batches - 1) for op in "FB"])
    with refuses("schedule.invalid", f"orders/{NAME}.py", "0F3"):
        make_plan(make_profile(), PlanRequest(4, SEQUENCE, (1,), schedule=NAME))
