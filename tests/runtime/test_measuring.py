"""Measured steps against their prediction: made-up times, without MPI."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hetero_mpi.planning.analysis.calibration import (
    LONG_RUN_S,
    MAX_COUNTED_STEPS,
    MAX_LONG_TRIAL_RATIO,
    GroupSums,
    LinkBetween,
    OptimizerSteps,
    allowance,
    with_reasons,
)
from hetero_mpi.planning.analysis.step_comparison import (
    RankMeasurement,
    StepByRank,
    StepComparison,
    StepExchange,
    StepPrediction,
    StepTimes,
    with_other_programs,
)
from hetero_mpi.planning.decision.planner import complete_plan
from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.schedule import COMPUTE, Action, Event, Op, schedule_of
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Alone, IdleRank, PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.rundir.rank_steps import MeasuredEvent
from tests.support.planning_samples import SEQUENCE, make_model, make_profile

MODEL, SPEED = make_model(4), 4e3
PROFILE = make_profile([1.0, 1.0], model=MODEL, bytes_per_s=SPEED)
HOSTS = [device.host for device in PROFILE.devices]
PLAN = Plan((PipelinePlan((StagePlan((0,), 0, 3, 1), StagePlan((1,), 3, 6, 0)), 1, 4),), 4, SEQUENCE, 6)
ALIKE = Plan(tuple(PipelinePlan((StagePlan((rank,), 0, 6, 0),), 1, 2) for rank in (0, 1)), 4, SEQUENCE, 6)


def as_simulated(profile: ClusterProfile, plan: Plan, waits: float = 1.0) -> StepByRank:
    """A step as ranks measure it that is as predicted for ``profile``; ``waits``: seconds of computing in a second of work."""
    step, found = simulate(plan, profile), {}
    sends = {event.action for event in step.events if event.action.op in (Op.SEND_F, Op.SEND_B)}
    for rank in plan.ranks:
        own = [event for event in step.events if event.rank == rank]
        computing: dict[str, float] = {}
        for event in own:
            if event.action.op in (*COMPUTE, Op.STEP):
                name = event.action.op.value
                fixed_s = profile.devices[rank].optimizer_fixed_s if event.action.op is Op.STEP else 0.0
                computing[name] = computing.get(name, 0.0) + event.end_s - event.start_s - fixed_s
        messages = [(str(event.action), event.start_s) for event in own if event.action in sends]
        for event in step.events:
            if event.action in sends:
                pair, receive, _ = predicted(plan, profile).message(event.action)
                messages += [(str(receive), event.end_s)] if pair[1] == rank else []
        worked_s = sum(computing.get(op.value, 0.0) for op in COMPUTE) / waits
        found[rank] = RankMeasurement(rank, computing, 0.0, dict(messages), step.step_s, worked_s)
    return found


def predicted(plan: Plan, profile: ClusterProfile = PROFILE) -> StepPrediction:
    return StepPrediction(plan, profile, schedule_of(plan, profile.model))


def compared(plan: Plan, steps: Sequence[StepByRank], profile: ClusterProfile = PROFILE) -> StepComparison:
    return StepComparison.from_steps(predicted(plan, profile), steps, simulate(plan, profile).step_s)


@pytest.mark.parametrize("plan", [PLAN, ALIKE])
def test_a_step_as_predicted_corrects_nothing(plan: Plan) -> None:
    found = compared(plan, [as_simulated(PROFILE, plan)] * 2)
    assert all(ratio == pytest.approx(1.0) for ratios in found.ratios.values() for ratio in ratios)
    links = {LinkBetween((0, 1)), LinkBetween((1, 0))} if plan is PLAN else set()
    assert set(found.ratios) - {OptimizerSteps(0), OptimizerSteps(1)} == {0, 1, *links}
    assert found.ratio == pytest.approx(1.0) and found.calibrated_profile() == PROFILE
    assert found.deviations() == []


def test_a_slow_rank_and_a_slow_link_are_told_and_named() -> None:
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s / 3, latency_s=3 * link.latency_s) if link.source == 1 else link
        for link in PROFILE.links
    )
    slower = make_profile([1.0, 4.0], model=MODEL, bytes_per_s=SPEED)
    found = compared(PLAN, [as_simulated(replace(slower, links=links), PLAN)] * 3)
    assert found.ratios[0] == pytest.approx([1.0] * 3) and found.ratios[1] == pytest.approx([4.0] * 3)
    assert found.ratios[LinkBetween((1, 0))][0] == pytest.approx(3.0)
    assert found.ratios[LinkBetween((0, 1))][0] == pytest.approx(1.0)
    told = replace(found, predicted_s=found.predicted_s / 10).deviations()
    assert any(line.startswith(f"the link from rank 1 ({HOSTS[1]}) to rank 0") for line in told), told
    assert any("forward" in line and "backward" in line for line in told), told
    operations = {0: {Op.F: 0.1, Op.B: 4.0}, 1: {Op.F: 0.2}}
    for times, named in ((10.0, ["backward 4"]), (0.1, ["forward 0.1", "forward 0.2"])):
        mixed = replace(found, operations=operations, ratios={}, predicted_s=found.step_s / times)
        assert re.findall(r"\w+ward [\d.]+", "; ".join(mixed.deviations())) == named, (
            "only in the direction of the step"
        )
    near = replace(found, predicted_s=found.step_s)
    assert near.deviations() == [], "only where the step as a whole is far from its prediction"


@pytest.mark.parametrize("grouped", [False, True])
def test_what_ranks_tell_during_a_run_adds_up_to_what_is_slow(grouped: bool) -> None:
    """Each rank has a clock of its own. Of a group the slowest member counts, and the one that waited least in sums."""
    profile = make_profile([1.0, 1.0, 1.0], model=replace(MODEL, heads=4), bytes_per_s=SPEED / 10)
    profile = replace(profile, devices=tuple(replace(one, host="box") for one in profile.devices))
    stages = (
        (StagePlan((0, 1), 0, 3, 1, shares=(2, 2)), StagePlan((2,), 3, 6, 0)) if grouped else PLAN.pipelines[0].stages
    )
    plan = replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=stages),))
    schedule, own = schedule_of(plan, profile.model), predicted(plan, profile)
    slow, step = {0: 1.0, 1: 2.0, 2: 3.0}, simulate(plan, profile)
    words = {rank: StepExchange(rank, plan, profile, schedule) for rank in plan.ranks}
    told, last = np.zeros(len(next(iter(words.values())).numbers(None))), plan.ranks[-1]
    for rank, word in words.items():
        assert word.ratios(told) == {}
        events: list[Event] = []
        for event in step.events:
            if event.action.op in (Op.SEND_F, Op.SEND_B):
                (source, destination), receive, seconds = own.message(event.action)
                came_s = event.start_s + 5 * seconds - 100 * rank
                sent = replace(event, start_s=event.start_s - 100 * rank)
                events += [sent] if source == rank else []
                events += [MeasuredEvent(rank, 0, receive, 0, came_s, arrived_s=came_s)] if destination == rank else []
        for op, seconds in own.computing_s[rank].items():
            events.append(Event(rank, 0, Action(op, 0, 0), 0.0, slow[rank] * seconds))
        sums_s = own._sums_s.get((0, 1), 0.0) * (7.0 + rank) if rank < 2 else 0.0
        events.append(Event(rank, 0, Action(Op.F, 0, 1), 0.0, sums_s, exchanged_s=sums_s))
        told += word.numbers(RankMeasurement.from_events(rank, events, 100.0 * rank), SEQUENCE)
    found = words[0].ratios(told)
    assert found.pop(LinkBetween((0, last))) == pytest.approx(5.0)
    if grouped:
        assert found.pop(GroupSums((0, 1))) == pytest.approx(7.0)
    assert found == pytest.approx({0: 2.0, 2: 3.0} if grouped else {0: 1.0, 1: 2.0})


def crowded(cores: float) -> ClusterProfile:
    host = HostProfile("box", 1 << 40, "", cores=cores)
    devices = tuple(replace(device, host="box", backend="cpu") for device in PROFILE.devices)
    links = tuple(replace(link, same_host=True) for link in PROFILE.links)
    return replace(PROFILE, devices=devices, links=links, hosts=(host,))


@pytest.mark.parametrize(
    ("cores", "waits", "others"), [(2, 1.0, 0.0), (2, 1.5, 1.0), (2, 2.0, 2.0), (1, 2.0, 0.0), (1, 3.0, 1.0)]
)
def test_other_programs_are_told_from_slow_work(cores: float, waits: float, others: float) -> None:
    """Ranks that wait for cores longer than they make each other wait do so for others; their work is as profiled then."""
    profile = crowded(cores)
    longer = replace(profile, hosts=(replace(profile.hosts[0], other_threads=others),))
    steps = [as_simulated(longer, ALIKE, waits)] * 3
    seen = with_other_programs(profile, ALIKE, steps)
    assert seen.hosts[0].other_threads == pytest.approx(others)
    ratios = compared(ALIKE, steps, seen).ratios
    assert all(ratio == pytest.approx(1.0) for rank in (0, 1) for ratio in ratios[rank])
    one = Durations(replace(ALIKE, pipelines=ALIKE.pipelines[:1]), seen).profile.devices[0].layers
    alone = max(1.0, (1 + others) / cores)
    for kind, times in one.items():
        assert times.forward_s.seconds[0] == pytest.approx(alone * profile.devices[0].layers[kind].forward_s.seconds[0])


def test_a_trial_takes_a_small_share_of_the_run() -> None:
    report = PlanReport(PLAN, 1.0, 1.0)
    assert allowance(report, PROFILE, 10_000, False).counted == MAX_COUNTED_STEPS
    assert allowance(report, PROFILE, round(LONG_RUN_S), False).counted > 0
    for steps in (1, 15):
        assert allowance(report, PROFILE, steps, False).counted == 0
        assert allowance(report, PROFILE, steps, True).counted == 1
    short = replace(report, predicted_step_s=1e-3)
    assert allowance(short, PROFILE, 50, False).counted == 0 and allowance(short, PROFILE, 100, False).counted > 0


def test_no_other_plan_is_looked_for_where_the_run_is_too_short_for_it() -> None:
    report = PlanReport(PLAN, 1.0, 1.0)
    assert allowance(report, PROFILE, 1000, False).most_s == pytest.approx(MAX_LONG_TRIAL_RATIO * 1000)
    assert allowance(report, PROFILE, 1000, True).most_s == allowance(report, PROFILE, 1, True).most_s == math.inf


THREE = make_profile([1.0, 1.0, 1.0], model=MODEL, bytes_per_s=SPEED)
STALE = "using 3 ranks would take 0.512 s per step instead of 0.427 s"
ALONE = Plan((PipelinePlan((StagePlan((2,), 0, 6, 0),), 1, 4),), 4, SEQUENCE, 6)


def test_the_reasons_of_a_tried_plan_belong_to_its_corrected_figures() -> None:
    """What the planner said by the profile as it was is kept only where it says so of the other plan by the corrected one, too."""
    odd = IdleRank(1, "its device does not support bf16")
    before = PlanReport(PLAN, 0.427, 0.4, idle=(IdleRank(2, STALE), odd), reasons=("an even cut: 0.5 s", "copies"))
    taken = complete_plan(PLAN, THREE, PlanRequest(4, SEQUENCE, (1,), max_pipelines=1))
    taken = replace(taken, tried_step_s=1.55, idle=(*taken.idle, IdleRank(1, "made up")), alone=Alone(2, 0.0))
    other = PlanReport(ALONE, 1.2, 1.0, idle=(odd,), reasons=("an even cut: 1.4 s", "copies"), tried_step_s=1.6)
    told = with_reasons(taken, "another plan was run and took 1.60 s", (before, other), other)
    assert told.reasons[0] == "calibration run: 1.55 s per step; another plan was run and took 1.60 s"
    assert told.reasons[1].startswith("busiest: ") and told.reasons[-1] == "copies" and len(told.reasons) == 3
    assert told.idle == (IdleRank(2, "another plan was run and took 1.60 s"), odd)
    assert told.alone == Alone(2, 1.6, "another plan was run and took 1.60 s" if taken.predicted_step_s > 1.6 else "")
    untried = with_reasons(taken, "no time")
    assert [one.reason for one in untried.idle] == ["no time"] * 2 and untried.alone == Alone(2, 0.0, "no time")
    same = with_reasons(taken, "a tie", (before, before), replace(other, plan=PLAN))
    assert same.idle[0].reason == STALE, "said by both profiles"
    without = with_reasons(taken, "a tie", (before, replace(other, idle=())), replace(other, plan=PLAN))
    assert {one.reason for one in without.idle} == {
        "with the calibrated times, the search found no faster plan with it",
        "a tie",
    }


def test_a_tie_within_the_noise_is_no_gain() -> None:
    slow = StepTimes((1.0,) * 3, 1.0)
    for times, faster in (
        ((0.9, 0.9, 0.9), True),
        ((0.995,) * 3, False),
        ((0.8, 0.95, 1.1), False),
        ((1.1,) * 3, False),
    ):
        assert StepTimes(times, 1.0).clearly_below(slow) == faster
