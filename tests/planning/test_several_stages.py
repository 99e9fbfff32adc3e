"""Ranks that hold several stages of a pipeline: their lists, times, memory, and what is refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.commands.plan_commands import ask
from hetero_mpi.planning.analysis.calibration import drifted_profile
from hetero_mpi.planning.decision import several_stages
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.orders import INTERLEAVINGS, ORDERS
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, reduced_layers, schedule_of, tied_heads
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_plan, load_profile, save_plan
from hetero_mpi.report.plan_text import plan_lines
from hetero_mpi.training.replan import ReplanQuestion, answer
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile, reported, with_split

ROOT = Path(__file__).parents[2]


def looped(ranks: int, each: int) -> list[int]:
    return list(range(ranks)) * each


def v_shaped(ranks: int, each: int) -> list[int]:
    return [rank for turn in range(each) for rank in (range(ranks) if turn % 2 == 0 else reversed(range(ranks)))]


def interleaved_plan(ranks: Sequence[int], micro_batches: int, order: str, split: bool | None = None) -> Plan:
    """A stage for each of ``ranks``, of one layer each."""
    plan = make_plan_of(range(len(ranks) + 1), ranks, micro_batches)
    split = ORDERS[order].SPLITS if split is None else split
    return replace(plan, pipelines=(replace(plan.pipelines[0], order=order, split_backward=split),))


def even_profile(ranks: int, stages: int, tied: bool = False) -> ClusterProfile:
    """Every layer takes one second forward and two backward."""
    profile = with_split(make_profile([1.0] * ranks, make_model(stages - 2, tied)))
    block = profile.devices[0].layers["block"]
    devices = tuple(replace(d, layers=dict.fromkeys(d.layers, block)) for d in profile.devices)
    return replace(profile, devices=devices)


@pytest.mark.parametrize("order", sorted(INTERLEAVINGS))
@pytest.mark.parametrize("shape", [looped, v_shaped], ids=["looped", "v"])
@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_lists_run_their_plans(order: str, shape: Callable[[int, int], list[int]], ranks: int, each: int) -> None:
    for groups in (1, 2, 3):
        for more in (0, 1):
            if order == "interleaved" and shape is v_shaped:
                continue  # wants a loop
            plan = interleaved_plan(shape(ranks, each), groups * ranks + more, order)
            model = make_model(ranks * each - 2, tied=True)
            validate(schedule_of(plan, model), plan, model)
            simulate(plan, even_profile(ranks, ranks * each, tied=True))


def test_neighbours_on_one_rank_exchange_no_message() -> None:
    plan = interleaved_plan([0, 1, 1, 0], 1, "zbv", split=False)
    lists = schedule_of(plan, make_model(2))
    assert " ".join(map(str, lists[1])) == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1STEP"
    assert " ".join(map(str, lists[0])) == "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 0STEP"


def test_tied_ends_on_one_rank_need_no_traffic() -> None:
    model = make_model(2, tied=True)
    v, loop = (interleaved_plan(ranks, 2, "zbv") for ranks in ([0, 1, 1, 0], [0, 1, 0, 1]))
    assert not tied_heads(v, model) and not reduced_layers(v, model)
    assert tied_heads(loop, model) == {3: 0} and reduced_layers(loop, model) == {0: (0, 1)}


@pytest.mark.parametrize(("ranks", "each", "micro_batches"), [(2, 2, 5), (4, 2, 8), (4, 2, 11), (4, 4, 6), (8, 2, 8)])
def test_interleaved_waits_as_long_as_its_paper_says(ranks: int, each: int, micro_batches: int) -> None:
    """Narayanan et al. 2021, section 2.2: of the computing time, (p - 1) / (v m). Here for any number of micro-batches."""
    stages = ranks * each
    plan = interleaved_plan(looped(ranks, each), micro_batches, "interleaved")
    profile = even_profile(ranks, stages)
    step_s = max(event.end_s for event in simulate(plan, profile).events if event.action.op in COMPUTE)
    times = [event.end_s - event.start_s for event in simulate(plan, profile).events if event.action.op in COMPUTE]
    computing_s = sum(times) / ranks
    assert step_s == pytest.approx(computing_s * (1 + (ranks - 1) / (each * micro_batches)))


def test_a_v_with_split_backward_waits_less_than_any_other_order() -> None:
    """Four ranks, eight micro-batches: 1.375 times the computing for 1F1B, 1.19 interleaved; and with as many in flight."""
    profile, count = even_profile(4, 8), 8

    def waits(plan: Plan) -> float:
        events = [event for event in simulate(plan, profile).events if event.action.op in COMPUTE]
        return 4 * max(event.end_s for event in events) / sum(event.end_s - event.start_s for event in events)

    classic = make_plan_of((0, 2, 4, 6, 8), range(4), count)
    found = {order: waits(interleaved_plan(v_shaped(4, 2), count, order)) for order in ("zbv", "dualpipev")}
    loop = waits(interleaved_plan(looped(4, 2), count, "interleaved"))
    assert waits(classic) == pytest.approx(1.375) and loop == pytest.approx(1.1875)
    assert found["zbv"] < 1.08 < found["dualpipev"] < 1.25


def test_memory_is_counted_at_the_worst_place_of_the_rank_s_list() -> None:
    plan, profile = interleaved_plan([0, 1, 1, 0], 5, "zbv", split=False), even_profile(2, 4)
    model, now, most = profile.model, 0, 0
    held = {0: stage_memory(model, 0, 1, SEQUENCE, 1), 3: stage_memory(model, 3, 4, SEQUENCE, 1)}
    for action in schedule_of(plan, model)[0]:
        sign = {Op.F: 1, Op.B: -1}.get(action.op, 0)
        now += sign * (held[action.stage].activations if sign else 0)
        most = max(most, now)
    fixed = sum(one.parameters + one.state + one.staging for one in held.values())
    peaks = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile)}
    assert peaks[0] == fixed + most + max(one.workspace for one in held.values())
    turn = 8 * model.layers[1].boundary_bytes_per_token * SEQUENCE  # staged if it were between ranks
    apart = predict_memory(interleaved_plan([0, 1, 2, 0], 5, "zbv", split=False), even_profile(3, 4))
    assert peaks[1] < sum(memory.peak_bytes for memory in apart[1:]) - turn


def edited(plan: Plan, **changes: object) -> Plan:
    return replace(plan, pipelines=(replace(plan.pipelines[0], **changes),))  # type: ignore[arg-type]


def test_what_cannot_run_is_refused_with_the_rule_and_the_values() -> None:
    plan, profile = interleaved_plan([0, 1, 1, 0], 4, "zbv", split=False), make_profile((1.0, 1.0), make_model(2))
    request = PlanRequest(4, SEQUENCE, (1,))
    assert complete_plan(plan, profile, request).predicted_step_s > 0
    stages = plan.pipelines[0].stages

    def refused(changed: Plan, *shown: object, kind: str = "plan.invalid") -> None:
        with refuses(kind, *shown):
            complete_plan(changed, profile, request)

    refused(edited(plan, order="warm_up"), "stage 2", "rank 1", "warm_up", "dualpipev", "interleaved", "zbv")
    streamed = tuple(replace(stage, streamed=stage.ranks == (1,)) for stage in stages)
    refused(edited(plan, stages=streamed), "stage 2", "rank 1")
    weights = (replace(stages[0], state_weight=0.5), *stages[1:])
    refused(edited(plan, stages=weights), "stage 3", "rank 0", "state_weight", 0.5, 1.0)
    hole = (stages[0], replace(stages[1], first=2, last=3), *stages[2:])
    refused(edited(plan, stages=hole), "stages[1]", "[2, 3)", "layer 1")
    twice = Plan((plan.pipelines[0], plan.pipelines[0]), 8, SEQUENCE, 4)
    with refuses("plan.invalid", "stage 4", "rank 0"):
        complete_plan(twice, profile, replace(request, global_batch=8))
    refused(edited(plan, order="interleaved"), kind="schedule.deadlock")


def test_a_rank_s_later_stage_ends_first() -> None:
    plan, model = interleaved_plan([0, 1, 1, 0], 1, "zbv"), make_model(2)
    lists = schedule_of(plan, model)
    ends = list(lists[1])
    places = [ends.index(Action.parse(text)) for text in ("2W0", "1W0")]
    ends[places[0]], ends[places[1]] = ends[places[1]], ends[places[0]]
    with refuses("schedule.invalid", "stage 2", "stage 1"):
        validate({**lists, 1: tuple(ends)}, plan, model)


def test_plan_files_keep_it(tmp_path: Path) -> None:
    plan = interleaved_plan([0, 1, 1, 0], 4, "zbv")
    save_plan(reported(plan), tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == plan


def test_a_pipeline_knows_who_holds_what() -> None:
    stages = tuple(StagePlan((rank,), place, place + 1, 0) for place, rank in enumerate([0, 1, 1, 0]))
    pipeline = PipelinePlan(stages, 1, 1)
    assert pipeline.stages_of == {0: (0, 3), 1: (1, 2)} and pipeline.interleaved
    assert [pipeline.is_local_boundary(place) for place in range(3)] == [False, True, False]


def like_cluster(latency_s: float = 0.0, memory_bytes: int = 10**9) -> ClusterProfile:
    """Four like ranks, 32 layers."""
    return make_profile([1.0] * 4, make_model(30), memory_bytes=memory_bytes, latency_s=latency_s)


ONE_PIPELINE = PlanRequest(8, SEQUENCE, (1,), stages_per_rank=4)


def test_like_ranks_on_fast_links_get_several_stages_each() -> None:
    report = make_plan(like_cluster(), ONE_PIPELINE)
    (pipeline,) = report.plan.pipelines
    assert pipeline.order == "interleaved" and len(pipeline.stages) == 16 and set(pipeline.stages_of) == {0, 1, 2, 3}
    apart = next(reason for reason in report.reasons if reason.startswith("one stage per rank instead of several"))
    slower = float(re.search(r"([\d.]+)x slower", apart)[1])  # type: ignore[index]
    assert slower > 1.1
    assert report.predicted_step_s == simulate(report.plan, like_cluster()).step_s
    assert report.bound_step_s < report.predicted_step_s


def test_a_job_may_leave_it_at_one() -> None:
    report = make_plan(like_cluster(), replace(ONE_PIPELINE, stages_per_rank=1))
    assert not any(pipeline.interleaved for pipeline in report.plan.pipelines)
    two = make_plan(like_cluster(), replace(ONE_PIPELINE, stages_per_rank=2)).plan.pipelines[0]
    assert {len(places) for places in two.stages_of.values()} == {2}


@pytest.mark.slow
def test_slow_links_and_waits_too_short_to_matter_keep_one_stage_per_rank() -> None:
    for profile, batch in ((like_cluster(latency_s=30.0), 8), (like_cluster(), 128)):
        report = make_plan(profile, replace(ONE_PIPELINE, global_batch=batch))
        assert not any(pipeline.interleaved for pipeline in report.plan.pipelines)


@pytest.mark.slow
def test_faster_links_lose_no_gain() -> None:
    profile = load_profile(ROOT / "profiles" / "zorse-2xl4-a6000-p40.toml")
    job = PlanRequest(16, profile.model.sequence_length, (1, 2, 4), recompute_choices=(False, True), stages_per_rank=4)
    step_s = []
    for gbit in (10, 100):
        links = (x if x.same_host else replace(x, bytes_per_s=gbit * 1e9 / 8) for x in profile.links)
        report = make_plan(replace(profile, links=tuple(links)), job)
        step_s.append(report.predicted_step_s)
    assert step_s[1] <= step_s[0]


@pytest.mark.parametrize(("order", "ranks"), [("zbv", (0, 1, 2, 3, 3, 2, 1, 0)), ("interleaved", (0, 1, 2, 3) * 4)])
def test_a_schedule_for_several_stages_can_be_asked_for(order: str, ranks: tuple[int, ...]) -> None:
    report = make_plan(like_cluster(), replace(ONE_PIPELINE, schedule=order))
    (pipeline,) = report.plan.pipelines
    assert pipeline.order == order and tuple(stage.ranks[0] for stage in pipeline.stages) == ranks
    assert report.reasons[0].startswith(order)
    few_layers = make_profile([1.0] * 4, make_model(3))
    with refuses("plan.schedule_impossible", order, "plan.allow_idle"):
        make_plan(few_layers, replace(ONE_PIPELINE, schedule=order, allow_idle=False))
    idling = make_plan(few_layers, replace(ONE_PIPELINE, schedule=order)).plan.pipelines[0]
    assert idling.order == order and len(idling.stages_of) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("order", "memory_bytes"), [("interleaved", 120_000), ("zbv", 110_000)])
def test_a_requested_schedule_takes_the_micro_batch_and_recomputation_that_fit(order: str, memory_bytes: int) -> None:
    """The search's own schedules have room for larger micro-batches."""
    sizes = replace(ONE_PIPELINE, global_batch=16, micro_batch_choices=(1, 2, 4), recompute_choices=(False, True))
    tight, request = like_cluster(memory_bytes=memory_bytes), replace(sizes, stages_per_rank=2, schedule=order)
    report = make_plan(tight, request)
    (pipeline,) = report.plan.pipelines
    assert pipeline.order == order and any(stage.recompute for stage in pipeline.stages)
    assert all(memory.peak_bytes <= memory.usable_bytes for memory in report.memory)
    with refuses("memory.exceeded", order, "train.recompute"):
        make_plan(tight, replace(request, recompute_choices=(False,)))


def test_a_requested_schedule_is_as_fast_as_where_the_planner_chooses_it() -> None:
    question = ask(None, (), ROOT / "profiles" / "zorse-2xa6000-2xw6800.toml")
    chosen = make_plan(question.profile, question.request)
    assert chosen.plan.pipelines[0].order == "interleaved"
    requested = make_plan(question.profile, replace(question.request, schedule="interleaved"))
    assert requested.predicted_step_s <= chosen.predicted_step_s


def test_several_stages_keep_to_the_memory() -> None:
    """What interleaved 1F1B holds beyond 1F1B has no room: another order, or forwards repeated, or one stage each."""
    roomy = make_plan(like_cluster(), ONE_PIPELINE)
    peak = max(memory.peak_bytes for memory in roomy.memory)
    tight = like_cluster(memory_bytes=int(peak * 0.8 / 0.95))
    report = make_plan(tight, ONE_PIPELINE)
    assert report.plan != roomy.plan
    assert all(memory.peak_bytes <= memory.usable_bytes for memory in report.memory)


@pytest.mark.slow
def test_plans_made_while_the_run_goes_on_keep_several_stages() -> None:
    profile = like_cluster()
    report = make_plan(profile, ONE_PIPELINE)
    found = answer(ReplanQuestion(drifted_profile(profile, report.plan, {3: 1.5}), ONE_PIPELINE, report, 1000, 0.0))
    slowed = with_slowness(profile, {3: 1.5})
    assert simulate(found.report.plan, slowed).step_s < simulate(report.plan, slowed).step_s
    complete_plan(found.report.plan, profile, ONE_PIPELINE)


def test_a_plan_says_who_holds_what() -> None:
    plan = interleaved_plan([0, 1, 1, 0], 4, "zbv")
    profile = with_split(make_profile((1.0, 1.0), make_model(2)))
    report = complete_plan(plan, profile, replace(ONE_PIPELINE, global_batch=4, split_choices=(False, True)))
    text = "\n".join(plan_lines(report, profile))
    assert "2 ranks" in text and "Plan: 4 stages on 2 ranks, schedule zbv (2 stages per rank)" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [("of" in row) for row in rows[1:5]] == [True, True, False, False]  # a rank's memory stands once
    assert (
        "busiest: stages 1, 2 (rank 1: block 0; block 1)" in text or "busiest: stages 0, 3 (rank 0: embedding" in text
    )


def test_no_rank_may_idle_where_none_is_to() -> None:
    """A start that leaves the slow rank out is no start then."""
    profile = make_profile((1.0, 1.0, 1.0, 20.0), make_model(14))
    report = make_plan(profile, replace(ONE_PIPELINE, global_batch=4, allow_idle=False))
    assert report.plan.ranks == [0, 1, 2, 3]


def test_streamed_stages_are_a_rank_s_only_ones() -> None:
    """Planned on a view of the cluster that must not give ranks several stages: they could not be streamed."""
    found = 0
    for memory_bytes in (45_000, 60_000, 80_000):
        devices = tuple(
            replace(device, shares_host_memory=False, host_to_device_bytes_per_s=1e6, device_to_host_bytes_per_s=1e6)
            for device in like_cluster(memory_bytes=memory_bytes).devices
        )
        hosts = tuple({device.host: HostProfile(device.host, 10**9, "made up") for device in devices}.values())
        profile = replace(like_cluster(), devices=devices, hosts=hosts)
        try:
            report = make_plan(profile, replace(ONE_PIPELINE, streaming="auto"))
        except UserError:
            continue
        streamed = [stage for _, _, stage in report.plan.numbered if stage.streamed]
        found += len(streamed)
        assert not streamed or not any(pipeline.interleaved for pipeline in report.plan.pipelines)
        assert all(memory.peak_bytes <= memory.usable_bytes for memory in report.memory)
    assert found


def test_a_schedule_that_is_asked_for_is_given_however_many_micro_batches_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_stages, "MAX_ACTIONS", 100)
    report = make_plan(like_cluster(), replace(ONE_PIPELINE, schedule="zbv"))
    assert report.plan.pipelines[0].interleaved
    assert not make_plan(like_cluster(), ONE_PIPELINE).plan.pipelines[0].interleaved


def test_tied_ends_on_one_rank_share_the_matrix_and_nothing_else() -> None:
    """The embedding holds more than the tied matrix: learned positions."""
    model = make_model(2, tied=True)
    first = replace(model.layers[0], parameters=1500, trainable_parameters=1500, parameter_bytes=6000)
    model = replace(model, layers=(first, *model.layers[1:]))
    profile = replace(even_profile(1, 4, tied=True), model=model)
    together = predict_memory(make_plan_of((0, 4), (0,), 1), profile)[0].peak_bytes
    apart = predict_memory(interleaved_plan([0, 0, 0, 0], 1, "zbv", split=False), profile)[0].peak_bytes
    assert together == apart


def test_gradients_are_added_in_the_order_of_the_micro_batches() -> None:
    """A whole backward before weight gradients that its stage owes would add them in another order, and give other bits."""
    plan, model = interleaved_plan([0, 1, 0, 1], 3, "zbv"), make_model(2)
    lists = schedule_of(plan, model)
    late = [action for action in lists[1] if action not in (Action.parse("3W0"), Action.parse("3W1"))]
    at = late.index(Action.parse("3I1")) + 1
    wrong = (*late[:at], Action.parse("3W1"), Action.parse("3W0"), *late[at:])
    with refuses("schedule.invalid", "3W0"):
        validate({**lists, 1: wrong}, plan, model)
