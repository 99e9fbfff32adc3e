"""Stages that several ranks of one host hold: their lists, their simulation, and what such a plan must keep to."""

from dataclasses import replace
from typing import Any

import pytest

from hetero_mpi.planning.analysis.idle_time import idling
from hetero_mpi.planning.decision.planner import complete_plan
from hetero_mpi.planning.dry_run import stuck_at, validate
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, schedule_of
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile

HEADS, LAYERS = 8, 6


def grouped_plan(**changed: Any) -> Plan:
    """Ranks 0 and 1 hold the first stage together, rank 2 the second one. ``changed``: of the first stage."""
    plan = make_plan_of([0, 4, LAYERS], [0, 2], 4)
    first, second = plan.pipelines[0].stages
    first = replace(first, ranks=(0, 1), shares=(5, 3))
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=(replace(first, **changed), second)),))


def on_one_host(tied: bool = False, heads: int | None = HEADS) -> ClusterProfile:
    profile = make_profile([1.0, 1.0, 1.0], replace(make_model(LAYERS - 2, tied), heads=heads))
    devices = (replace(device, host="box" if device.rank < 2 else "other") for device in profile.devices)
    return replace(profile, devices=tuple(devices))


def with_experts() -> ClusterProfile:
    profile = on_one_host()
    return replace(profile, model=replace(profile.model, experts=6))


def completed(plan: Plan, profile: ClusterProfile) -> PlanReport:
    return complete_plan(plan, profile, PlanRequest(plan.global_batch, SEQUENCE, (1, 2)))


def test_the_first_rank_of_a_group_exchanges_messages_and_the_others_compute_as_it_does() -> None:
    plan, model = grouped_plan(), make_model(LAYERS - 2)
    schedule = schedule_of(plan, model)
    validate(schedule, plan, model)
    assert [a for a in schedule[0] if a.op in COMPUTE] == [a for a in schedule[1] if a.op in COMPUTE]
    assert {a.op for a in schedule[1]} == {Op.F, Op.RECV_B, Op.B, Op.STEP}
    assert Op.SEND_F in {a.op for a in schedule[0]}


def test_members_that_compute_in_different_orders_deadlock() -> None:
    plan, model = grouped_plan(), make_model(LAYERS - 2)
    schedule = schedule_of(plan, model)
    backwards = [Action(op, 0, m) for m in range(4) for op in (Op.RECV_B, Op.B)]
    computed = [Action(Op.F, 0, m) for m in range(4)] + backwards
    with refuses("schedule.deadlock"):
        validate({**schedule, 1: (*computed, Action(Op.STEP, 0))}, plan, model)
    assert stuck_at(schedule) == {}


def test_a_member_that_sends_is_refused() -> None:
    plan, model = grouped_plan(), make_model(LAYERS - 2)
    schedule = schedule_of(plan, model)
    with refuses("schedule.invalid", "0SEND_F0"):
        validate({**schedule, 1: schedule[0]}, plan, model)


def test_members_are_busy_as_long_as_their_leader_and_the_step_is_as_long_in_both_simulations() -> None:
    plan, profile = grouped_plan(), on_one_host()
    simulated, quick = simulate(plan, profile), outlined(plan, profile)
    assert quick.step_s == simulated.step_s and quick.busy_s == pytest.approx(simulated.busy_s)
    assert set(quick.busy_s) == {0, 1, 2} and quick.busy_s[0] == quick.busy_s[1] > 0
    assert {event.rank for event in simulated.events if event.action.op is Op.F and event.action.stage == 0} == {0, 1}
    leader, member = ([e for e in simulated.events if e.rank == rank and e.action.op is Op.RECV_B] for rank in (0, 1))
    assert [replace(event, rank=1, bytes=0) for event in leader] == member, "and wait when it does"
    waits = idling(simulated.events, plan)
    assert len(member) == 4 and replace(waits[1], group_s=waits[0].group_s) == waits[0]
    assert waits[1].group_s > waits[0].group_s, "the faster one waits inside, too"


@pytest.mark.parametrize(
    ("changed", "profile", "shown"),
    [
        ({"shares": (5, 2)}, on_one_host(), (7, 8)),
        ({"shares": (8, 0)}, on_one_host(), ([8, 0],)),
        ({"shares": (8, 0), "experts": (6, 0)}, with_experts(), ([0, 1], "shares = [8, 0]", "experts = [6, 0]")),
        ({"shares": (8, 0)}, with_experts(), ("shares = [8, 0]",)),
        ({"shares": (9, -1), "experts": (0, 6)}, with_experts(), ("shares = [9, -1]",)),
        ({"shares": (8,)}, on_one_host(), ([0, 1], "shares = [8]")),
        ({}, on_one_host(heads=None), ()),
        ({"ranks": (0, 2)}, on_one_host(), ("box", "other")),
        ({"ranks": (1, 0)}, on_one_host(), ([1, 0],)),
        ({"streamed": True}, on_one_host(), ("streamed = true",)),
        ({}, on_one_host(tied=True), ()),
        ({"ranks": (0,)}, on_one_host(), ("shares",)),
        ({"ranks": (0,), "shares": (), "experts": (4,)}, on_one_host(), ("experts",)),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_the_rule_and_the_values(
    changed: dict[str, Any], profile: ClusterProfile, shown: tuple[object, ...]
) -> None:
    with refuses("plan.invalid", *shown):
        completed(grouped_plan(**changed), profile)


@pytest.mark.parametrize("changed", [{"shares": (8, 0), "experts": (0, 6)}, {"shares": (0, 8), "experts": (5, 1)}])
def test_a_rank_with_experts_needs_no_heads(changed: dict[str, Any]) -> None:
    completed(grouped_plan(**changed), with_experts())


def two_pipelines(**changed: Any) -> tuple[Plan, ClusterProfile]:
    """Ranks 0 and 1 and rank 2 as above, beside ranks 3 and 4 with shares of their own; ``changed``: rank 2's stage."""
    plan, other = grouped_plan(), make_plan_of([0, LAYERS], [3], 3).pipelines[0]
    first, second = plan.pipelines[0].stages
    one = replace(plan.pipelines[0], stages=(first, replace(second, **changed)))
    other = replace(other, stages=(replace(other.stages[0], ranks=(3, 4), shares=(1, 7)),))
    profile = make_profile([1.0, 1.0, 1.0, 2.0, 0.5], replace(make_model(LAYERS - 2), heads=HEADS))
    devices = tuple(replace(d, host=h) for d, h in zip(profile.devices, ("a", "a", "b", "c", "c"), strict=True))
    return replace(plan, pipelines=(one, other), global_batch=7), replace(profile, devices=devices)


def test_groups_of_two_pipelines_compute_side_by_side_and_are_told_of_each_by_its_stage() -> None:
    plan, profile = two_pipelines()
    report = complete_plan(plan, profile, PlanRequest(7, SEQUENCE, (1,)))
    simulated, quick = simulate(plan, profile), outlined(plan, profile)
    assert report.predicted_step_s == quick.step_s == pytest.approx(simulated.step_s)
    assert set(quick.busy_s) == {0, 1, 2, 3, 4} and quick.busy_s == pytest.approx(simulated.busy_s)
    told = [reason for reason in report.reasons if "tensor parallelism" in reason]
    assert told == [
        "ranks 0 and 1 share stage 0 (tensor parallelism): 5 and 3 of 8 key/value heads",
        "ranks 3 and 4 share stage 2 (tensor parallelism): 1 and 7 of 8 key/value heads",
    ]


def test_a_streamed_stage_beside_groups_in_several_pipelines_is_refused() -> None:
    plan, profile = two_pipelines(streamed=True)
    with refuses("plan.invalid", "streamed = true", 2):
        complete_plan(plan, profile, PlanRequest(7, SEQUENCE, (1,)))
