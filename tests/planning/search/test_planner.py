"""The planner against brute force, its invariances, what it says when nothing fits, and hand-written plans."""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.alternatives import alternative_outcomes
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.decision.rules import batch_problems
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.search.search import Decision
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import EMBEDDING
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from tests.planning.search.pipeline_bound import pipeline_bound_s
from tests.support.errors import refuses
from tests.support.planning_samples import (
    SEQUENCE,
    make_device,
    make_model,
    make_plan_of,
    make_profile,
    random_instance,
    renumbered,
)
from tests.support.seeds import seeds

EQUAL = 1 + 1e-9


def brute_force_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """The least simulated step over all sizes, subsets, orders, cuts and choices of recompute at classic warm-up; inf:
    nothing fits."""
    layers, best = len(profile.model.layers), math.inf
    for size in request.micro_batch_choices:
        count = request.global_batch // size
        for stages in range(1, min(len(profile.devices), layers) + 1):
            for order in itertools.permutations(range(len(profile.devices)), stages):
                for inner in itertools.combinations(range(1, layers), stages - 1):
                    cuts = (0, *inner, layers)
                    for again in itertools.product(request.recompute_choices, repeat=stages):
                        held = tuple(
                            StagePlan((r,), cuts[i], cuts[i + 1], stages - 1 - i, again[i]) for i, r in enumerate(order)
                        )
                        plan = Plan((PipelinePlan(held, size, size * count),), request.global_batch, SEQUENCE, layers)
                        memory = predict_memory(plan, profile, request.memory_reserve)
                        if all(m.peak_bytes <= m.usable_bytes for m in memory):
                            best = min(best, simulate(plan, profile).step_s)
    return best


def planned_as_brute_force_does(seed: int) -> None:
    """The plan of instance ``seed`` (two of seven may recompute) is no slower than the best at classic depths."""
    profile, request = random_instance(seed, ranks=1 + seed % 3, layers=2 + seed % 5)
    if seed % 7 < 2:
        request = replace(request, recompute_choices=(False, True))
    expected = brute_force_s(profile, request)
    try:
        report = make_plan(
            profile, request
        )  # with fewer micro-batches in flight than the classic depth where that does not fit
    except UserError as error:
        assert expected == math.inf and re.search(r"short by [\d.]+ \w*B", str(error))
        return
    assert report.bound_step_s <= report.predicted_step_s * EQUAL
    assert pipeline_bound_s(profile, request) <= report.predicted_step_s * EQUAL
    assert report.predicted_step_s <= expected * EQUAL, f"seed {seed}"
    assert all(m.peak_bytes <= m.usable_bytes for m in report.memory)
    assert complete_plan(report.plan, profile, request).predicted_step_s == report.predicted_step_s


@pytest.mark.slow
@seeds(10, (0, 6), "block")
def test_the_plan_is_no_slower_than_brute_force_at_classic_depths(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        planned_as_brute_force_does(seed)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 4), layers=st.integers(2, 7), data=st.data())
def test_bounds_are_at_or_under_every_simulation(seed: int, ranks: int, layers: int, data: st.DataObject) -> None:
    profile, request = random_instance(seed, ranks, layers)
    stages = data.draw(st.integers(1, min(ranks, layers)))
    order = data.draw(st.permutations(range(ranks)))[:stages]
    cuts = [
        0,
        *sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1))),
        layers,
    ]
    extra = sorted(data.draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages)), reverse=True)
    plan = make_plan_of(cuts, order, request.global_batch, [stages - 1 - i + extra[i] for i in range(stages)])
    step_s = simulate(plan, profile).step_s
    if all(m.peak_bytes <= m.usable_bytes for m in predict_memory(plan, profile, request.memory_reserve)):
        alone = replace(request, micro_batch_choices=(1,))
        assert fluid_bound_s(profile, alone) <= pipeline_bound_s(profile, alone) <= step_s * EQUAL


def test_fluid_bound_by_hand() -> None:
    """Forward 2.6 s and backward 5.2 s per sequence, four sequences; then with a second rank of half the speed."""
    request = PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    work = 4 * 3 * 2.6
    assert fluid_bound_s(make_profile((1.0,)), request) == pytest.approx(work)
    assert fluid_bound_s(make_profile((1.0, 2.0)), request) == pytest.approx(work / 1.5)


def described(plan: Plan, profile: ClusterProfile) -> list[tuple[str, int, int, int, int]]:
    names = [(profile.devices[s.ranks[0]].name, s) for s in plan.pipelines[0].stages]
    return [(name, s.first, s.last, s.warm_up, plan.pipelines[0].micro_batch) for name, s in names]


@seeds(12, 2)
def test_how_ranks_are_numbered_changes_nothing(seed: int) -> None:
    profile, request = random_instance(seed * 7, ranks=4, layers=6)
    order = random.Random(seed).sample(range(4), 4)
    other = renumbered(profile, order)
    try:
        report = make_plan(profile, request)
    except UserError:
        with pytest.raises(UserError):
            make_plan(other, request)
        return
    again = make_plan(other, request)
    assert described(again.plan, other) == described(report.plan, profile)
    assert again.predicted_step_s == report.predicted_step_s
    assert [order[s.ranks[0]] for s in again.plan.pipelines[0].stages] == [
        s.ranks[0] for s in report.plan.pipelines[0].stages
    ]


def test_ties_between_unlike_ranks_are_broken_by_what_they_are() -> None:
    """Equal speed, unlike memory: either order is as fast."""
    profile = make_profile((1.0, 1.0), make_model(4), memory_bytes=(10_000_000, 20_000_000))
    devices = tuple(replace(d, name=name) for d, name in zip(profile.devices, ("small", "large"), strict=True))
    profile, request = replace(profile, devices=devices), PlanRequest(8, SEQUENCE, (1,))
    other = renumbered(profile, [1, 0])
    assert described(make_plan(other, request).plan, other) == described(make_plan(profile, request).plan, profile)


@pytest.mark.slow
def test_many_ranks_in_few_classes_are_planned_alike_however_numbered() -> None:
    profile = make_profile([1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4], make_model(20), latency_s=0.02, bytes_per_s=1e5)
    request = PlanRequest(16, SEQUENCE, (1, 2))
    report = make_plan(profile, request)
    other = renumbered(profile, random.Random(3).sample(range(12), 12))
    again = decide(other, request)
    assert again is not None and described(again.plan, other) == described(report.plan, profile)
    alone = 16 * 3 * 20.6
    assert report.bound_step_s <= report.predicted_step_s < 0.3 * alone


def test_equal_ranks_get_equal_blocks() -> None:
    even = replace(make_model(6), layers=tuple(replace(x, boundary_bytes_per_token=0) for x in make_model(6).layers))
    profile = make_profile((1.0, 1.0, 1.0), even)
    report = make_plan(profile, PlanRequest(32, SEQUENCE, (1,)))
    assert [(s.first, s.last) for s in report.plan.pipelines[0].stages] == [(0, 3), (3, 5), (5, 8)]
    assert [s.ranks for s in report.plan.pipelines[0].stages] == [(0,), (1,), (2,)]


def test_a_slow_rank_is_left_out_with_the_price_of_using_it() -> None:
    profile = make_profile((1.0, 1.0, 40.0))
    report = make_plan(profile, PlanRequest(8, SEQUENCE, (1,)))
    assert [idle.rank for idle in report.idle] == [2]
    with_it = make_plan(profile, PlanRequest(8, SEQUENCE, (1,), allow_idle=False))
    assert with_it.idle == ()
    slow, fast = with_it.predicted_step_s, report.predicted_step_s
    assert report.idle[0].reason == (
        f"the best plan found with 3 ranks takes {units.seconds(slow)} per step instead of {units.seconds(fast)}"
    )


def test_reasons_compare_with_the_even_split() -> None:
    profile = make_profile((1.0, 2.0), make_model(7))
    report = make_plan(profile, PlanRequest(16, SEQUENCE, (1,)))
    even = simulate(
        make_plan_of((0, 4, 9), tuple(s.ranks[0] for s in report.plan.pipelines[0].stages), 16), profile
    ).step_s
    text = "\n".join(report.reasons)
    assert f"an even cut: {even / report.predicted_step_s:.2f}x slower" in text
    assert "busiest: stage" in text


@pytest.mark.parametrize(("sizes", "told"), [((2,), False), ((1, 2), True)])
def test_every_rank_by_itself_is_priced_where_the_batch_has_a_share_for_each(
    sizes: tuple[int, ...], told: bool
) -> None:
    """Two micro-batches are too few for three ranks with a pipeline each; four sequences are not."""
    profile, request = make_profile((1.0, 1.0, 1.0)), PlanRequest(4, SEQUENCE, sizes, max_pipelines=3)
    plan = make_plan_of((0, 1, 3, 4), (0, 1, 2), 4)
    names = [other.change for other in alternative_outcomes(Decision(plan, 1.0), profile, request)]
    assert ("a copy of the model on every rank" in names) == told


def test_alternatives_are_priced_with_the_micro_batches_that_fit() -> None:
    """Each rank has memory for the whole model with one sequence at a time, and not with eight."""
    profile = make_profile((1.0, 2.0))
    profile = replace(profile, devices=tuple(replace(one, memory_bytes=80_000) for one in profile.devices))
    request = PlanRequest(16, SEQUENCE, (1, 2, 4, 8), max_pipelines=2)
    layers = len(profile.model.layers)
    alone = [PipelinePlan((StagePlan((rank,), 0, layers, 0),), 1, share) for rank, share in ((0, 10), (1, 6))]
    unequal, staged = Plan(tuple(alone), 16, SEQUENCE, layers), make_plan_of((0, 2, layers), (0, 1), 16)
    names = "equal shares of the batch", "a copy of the model on every rank"
    for plan, name in zip((unequal, staged), names, strict=True):
        steps = {other.change: other.step_s for other in alternative_outcomes(Decision(plan, 1.0), profile, request)}
        assert steps[name] is not None, name


def test_more_ranks_than_layers_is_no_error() -> None:
    report = make_plan(make_profile([1.0] * 6), PlanRequest(64, SEQUENCE, (1,)))
    assert len(report.idle) >= 2
    assert len(report.idle) + len(report.plan.pipelines[0].stages) == 6
    report = make_plan(make_profile([1.0] * 3, make_model(0)), PlanRequest(64, SEQUENCE, (1,)))
    assert [idle.reason for idle in report.idle] == ["2 layers of work, 3 ranks"]


def test_of_equally_fast_plans_the_one_with_fewer_ranks() -> None:
    nothing = LayerTimes(Curve((SEQUENCE,), (0.0,)), Curve((SEQUENCE,), (0.0,)))
    device = make_device(0)
    device = replace(device, layers={**device.layers, EMBEDDING: nothing})  # embedding | head gains nothing
    profile = replace(make_profile(model=make_model(0)), devices=(device, replace(device, rank=1)))
    report = make_plan(profile, PlanRequest(4, SEQUENCE, (1,)))
    assert [stage.ranks for stage in report.plan.pipelines[0].stages] == [(0,)]
    assert report.idle[0].reason.startswith("using 2 ranks would not shorten the step")


def test_ranks_without_the_dtype_are_not_used() -> None:
    profile = make_profile((1.0, 1.0))
    profile = replace(profile, model=replace(profile.model, dtype="bf16"))
    with refuses("plan.dtype"):
        make_plan(profile, PlanRequest(4, SEQUENCE, (1,)))
    able = replace(profile.devices[1], dtypes=("fp32", "bf16"))
    report = make_plan(replace(profile, devices=(profile.devices[0], able)), PlanRequest(4, SEQUENCE, (1,)))
    assert [stage.ranks for stage in report.plan.pipelines[0].stages] == [(1,)]
    assert report.idle[0].reason == "its device does not support bf16 (it supports fp32)"


def test_slow_links_are_hidden_by_deeper_warm_up_as_far_as_memory_goes() -> None:
    request = PlanRequest(16, SEQUENCE, (1,), memory_reserve=0.0)
    profile = make_profile((1.0, 1.0), make_model(8), latency_s=6.0)
    report = make_plan(profile, request)
    depth = report.plan.pipelines[0].stages[0].warm_up
    assert depth > 1
    shallow = make_plan_of(
        (0, report.plan.pipelines[0].stages[0].last, 10), [s.ranks[0] for s in report.plan.pipelines[0].stages], 16
    )
    assert report.predicted_step_s < 0.95 * simulate(shallow, profile).step_s
    peak = max(m.peak_bytes for m in report.memory)
    tight = replace(profile, devices=tuple(replace(d, memory_bytes=peak - 1) for d in profile.devices))
    less = make_plan(tight, request)
    assert max(m.peak_bytes for m in less.memory) < peak
    assert less.predicted_step_s >= report.predicted_step_s


def test_recompute_is_used_only_where_memory_forces_it() -> None:
    request = PlanRequest(8, SEQUENCE, (1,), recompute_choices=(False, True), schedule="1f1b", memory_reserve=0.0)
    roomy = make_plan(make_profile((1.0,)), request)
    assert not roomy.plan.pipelines[0].stages[0].recompute
    # 4 | 6 layers need 63,700 and 70,500 bytes, 5 | 5 need 76,100 and 61,100; recomputing the first five, 63,100.
    short = make_profile((1.0, 1.0), make_model(8), memory_bytes=66_000)
    with pytest.raises(UserError):
        make_plan(short, replace(request, recompute_choices=(False,)))
    report = make_plan(short, request)
    assert [(stage.first, stage.last, stage.recompute) for stage in report.plan.pipelines[0].stages] == [
        (0, 5, True),
        (5, 10, False),
    ]
    assert [m.peak_bytes for m in report.memory] == [63_100, 61_100]


def test_what_is_short_and_only_what_was_verified_to_help() -> None:
    profile = make_profile((1.0, 1.0), make_model(4), memory_bytes=(55_000, 54_000))
    request = PlanRequest(8, SEQUENCE, (4,))
    with pytest.raises(UserError) as caught:
        make_plan(profile, request)
    message = str(caught.value)
    assert "is short by" in message and "rank " in message
    remedies = message.partition("each by itself:\n")[2].splitlines()
    assert any("train.micro_batch = 1" in line for line in remedies)
    for line in remedies:
        if "micro_batch" in line:
            make_plan(profile, replace(request, micro_batch_choices=(int(line.rpartition("= ")[2]),)))
        if "sequence_length" in line:
            make_plan(profile, replace(request, sequence_length=int(line.rpartition("= ")[2])))
    assert not any("bf16" in line for line in remedies), "these devices do not offer bf16"


def test_when_no_single_change_helps_it_is_said() -> None:
    with refuses("memory.exceeded"):
        make_plan(make_profile((1.0,), memory_bytes=100), PlanRequest(4, SEQUENCE, (1,)))


@pytest.mark.parametrize("choices", [(3,), (), (0,)])
def test_micro_batches_must_divide_the_batch(choices: tuple[int, ...]) -> None:
    with refuses("plan.micro_batch"):
        make_plan(make_profile(), PlanRequest(4, SEQUENCE, choices))


def test_a_hand_written_plan_is_completed() -> None:
    profile, request = make_profile((1.0, 1.0, 1.0)), PlanRequest(4, SEQUENCE, (1,))
    given_plan = make_plan_of((0, 1, 4), (2, 0), 4)
    report = complete_plan(given_plan, profile, request)
    assert report.plan.pipelines == given_plan.pipelines
    assert report.predicted_step_s == simulate(given_plan, profile).step_s
    assert report.bound_step_s == fluid_bound_s(profile, request)
    assert [m.rank for m in report.memory] == [0, 2]
    assert [(idle.rank, idle.reason) for idle in report.idle] == [(1, "not used by the given plan")]


@pytest.mark.parametrize(
    ("cuts", "ranks", "batches", "expected"),
    [
        ((0, 2, 3), (0, 1), 4, "layers = 3: the model's chain has 4 layers"),
        ((0, 2, 3), (0, 1), 4, "ends with layer 2: the chain's last layer is 3"),
        ((0, 2, 2, 4), (0, 1, 2), 4, "holds layers [2, 2): it must begin with layer 2 and hold at least one"),
        ((1, 2, 4), (0, 1), 4, "holds layers [1, 2): it must begin with layer 0"),
        ((0, 2, 4), (0, 0), 4, "stage 1 names rank 0 again"),
        ((0, 2, 4), (0, 7), 4, "stage 1 names rank 7: the profile has ranks 0 to 2"),
        ((0, 2, 4), (0, 1), 5, "global_batch = 5: the job has 4"),
    ],
)
def test_hand_written_plans_that_do_not_fit_the_job(
    cuts: tuple[int, ...], ranks: tuple[int, ...], batches: int, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        complete_plan(make_plan_of(cuts, ranks, batches), make_profile((1.0,) * 3), PlanRequest(4, SEQUENCE, (1,)))
    assert expected in str(caught.value)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_hand_written_plan_gives_every_rank_a_part_of_the_state(weight: float) -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 4)
    first, second = plan.pipelines[0].stages
    changed = replace(plan.pipelines[0], stages=(first, replace(second, state_weight=weight)))
    with refuses("plan.invalid", "state_weight"):
        complete_plan(replace(plan, pipelines=(changed,)), make_profile((1.0, 1.0)), PlanRequest(4, SEQUENCE, (1,)))


def test_hand_written_plans_with_a_wrong_batch_depth_or_too_little_memory() -> None:
    profile, request = make_profile((1.0, 1.0)), PlanRequest(4, SEQUENCE, (1,))
    plan = make_plan_of((0, 2, 4), (0, 1), 4)
    with refuses("plan.invalid", "global_batch = 4"):
        complete_plan(replace(plan, pipelines=(replace(plan.pipelines[0], sequences=3),)), profile, request)
    with refuses("schedule.deadlock"):
        complete_plan(make_plan_of((0, 2, 4), (0, 1), 4, (0, 2)), profile, request)
    with refuses("plan.invalid", "warm_up = 5"):
        complete_plan(make_plan_of((0, 2, 4), (0, 1), 4, (5, 0)), profile, request)
    small = make_profile((1.0, 1.0), memory_bytes=(10_000_000, 1000))
    with refuses("memory.exceeded", "rank 1"):
        complete_plan(plan, small, request)


def test_edits_named_where_memory_is_short_help() -> None:
    plan, request = make_plan_of((0, 2, 4), (0, 1), 4, (3, 0)), PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    edited = plan.with_stages(replace(stage, recompute=stage.ranks == (0,)) for _, _, stage in plan.numbered)
    least = predict_memory(edited, make_profile((1.0, 1.0)))[0].peak_bytes
    with refuses("memory.exceeded", "rank 0", "warm_up", "recompute = true"):
        complete_plan(plan, make_profile((1.0, 1.0), memory_bytes=(least, 10_000_000)), request)
    complete_plan(edited, make_profile((1.0, 1.0), memory_bytes=(least, 10_000_000)), request)
    with refuses("memory.exceeded", "rank 1", "layers") as refusal:
        complete_plan(plan, make_profile((1.0, 1.0), memory_bytes=(10_000_000, 1000)), request)
    assert not any(key in str(refusal.value) for key in ("warm_up", "recompute", "streamed"))


@pytest.mark.parametrize(
    ("pipelines", "kept", "remedy"),
    [
        ([(2, 8, (None, None))], True, None),
        ([(2, 6, (None, None)), (2, 2, (None, 4))], True, None),
        ([(4, 8, (2, 2))], True, None),  # computed in slices as large as the masks
        ([(1, 8, (None, None))], False, 1),
        ([(4, 8, (None, None))], False, 4),
        ([(2, 8, (1, 1))], False, 1),
        ([(4, 8, (2, None))], False, None),
        ([(3, 8, (2, 2))], False, None),  # 2 1, 2 1, 2
        ([(2, 5, (None, None)), (2, 3, (None, None))], False, None),  # the second one begins within a mask's sequences
    ],
)
def test_with_dropout_a_given_plan_keeps_the_sequences_of_each_mask(
    pipelines: list[tuple[int, int, tuple[int | None, int | None]]], kept: bool, remedy: int | None
) -> None:
    profile, made = make_profile((1.0,) * 4), []
    for number, (micro_batch, sequences, slices) in enumerate(pipelines):
        ranks, cuts = (2 * number, 2 * number + 1), ((0, 2), (2, 4))
        stages = [StagePlan((r,), *cut, 0, slice_sequences=n) for r, cut, n in zip(ranks, cuts, slices, strict=True)]
        made.append(PipelinePlan(tuple(stages), micro_batch, sequences))
    plan, request = Plan(tuple(made), 8, SEQUENCE, 4), PlanRequest(8, SEQUENCE, (2,), max_pipelines=2)
    assert complete_plan(plan, profile, request).plan == plan, "without dropout any will do"
    if kept:
        assert complete_plan(plan, profile, replace(request, mask_sequences=2)).plan == plan
        return
    with pytest.raises(UserError) as refused:
        complete_plan(plan, profile, replace(request, mask_sequences=2))
    assert ("[train] micro_batch" in str(refused.value)) is (remedy is not None)
    if remedy is not None:
        assert f"[train] micro_batch = {remedy}" in str(refused.value)
        assert complete_plan(plan, profile, replace(request, mask_sequences=remedy)).plan == plan


@seeds(20, 2)
def test_plans_of_the_planner_keep_the_sequences_of_each_mask(seed: int) -> None:
    profile, request = random_instance(seed, ranks=3, layers=5)
    size, streaming = request.micro_batch_choices[seed % 2], "shorter" if seed % 3 else "never"
    request = replace(request, micro_batch_choices=(size,), mask_sequences=size, max_pipelines=3, streaming=streaming)
    found = decide(profile, request)
    assert found is None or not [*batch_problems(found.plan, request)]
