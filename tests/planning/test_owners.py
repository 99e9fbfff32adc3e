"""Who owns the optimizer's state of parameters that several pipelines hold: by free memory, within one parameter."""

from dataclasses import replace

import pytest

from hetero_mpi.planning.decision.decide import decide, has_fitting_plan
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.owners import owned_state_bytes, owners
from hetero_mpi.planning.search.memory_fit import Fitter
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.brute_force import memory_suffices
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_device, make_model, make_profile

BLOCKS = 6
LAYERS = BLOCKS + 2
SIZES = {"embedding": (0, 9000), "head": (LAYERS - 1, 9000)} | {
    f"{layer}.{name}": (layer, size)
    for layer in range(1, BLOCKS + 1)
    for name, size in (("q", 800), ("k", 200), ("v", 200), ("o", 800), ("up", 2500), ("down", 2500), ("norm", 16))
}


def plan_of(*pipelines: tuple[tuple[int, ...], tuple[int, ...]], weights: dict[int, float] | None = None) -> Plan:
    """(ranks, edges) of each."""
    made = []
    for ranks, edges in pipelines:
        stages = tuple(
            StagePlan((rank,), edges[i], edges[i + 1], len(ranks) - 1 - i, state_weight=(weights or {}).get(rank, 1.0))
            for i, rank in enumerate(ranks)
        )
        made.append(PipelinePlan(stages, 1, 2))
    return Plan(tuple(made), 2 * len(made), SEQUENCE, LAYERS)


def owned(plan: Plan) -> dict[int, int]:
    found = dict.fromkeys(plan.state_weights, 0)
    for key, rank in owners(plan, SIZES).items():
        assert rank in plan.holders[SIZES[key][0]], "only who holds a parameter can own it"
        found[rank] += SIZES[key][1]
    return found


@pytest.mark.parametrize("pipelines", [1, 2, 3, 4])
def test_each_of_like_ranks_owns_as_much_within_one_parameter(pipelines: int) -> None:
    total = sum(size for _, size in SIZES.values())
    found = owned(plan_of(*(((rank,), (0, LAYERS)) for rank in range(pipelines))))
    assert sum(found.values()) == total, "each parameter has one owner"
    # Of three ranks two own a matrix of an end each, which alone is more than what is left to level out.
    assert all(abs(count - total / pipelines) <= 2500 for count in found.values())


def test_a_rank_with_a_third_of_the_weight_owns_a_third_whatever_it_shares_with_whom() -> None:
    total = sum(size for _, size in SIZES.values())
    found = owned(plan_of(((0,), (0, LAYERS)), ((1,), (0, LAYERS)), weights={0: 1.0, 1: 2.0}))
    assert abs(found[0] - total / 3) <= 800
    unlike = plan_of(((0, 1), (0, 4, LAYERS)), ((2,), (0, LAYERS)), weights={2: 2.0})
    found, first = owned(unlike), sum(size for layer, size in SIZES.values() if layer < 4)
    assert abs(found[0] - first / 3) <= 2500 and abs(found[1] - (total - first) / 3) <= 2500


def test_weights_follow_the_memory_that_a_plan_leaves_free() -> None:
    """Rank 1 has twice as much left as rank 0, once everything but masters and moments is counted: it owns two thirds, unless there
    is room for a half on each."""
    model = replace(make_model(BLOCKS), state_bytes_per_trainable_parameter=16.0)
    plan = replace(plan_of(((0,), (0, LAYERS)), ((1,), (0, LAYERS))))
    profile = make_profile([1.0, 1.0], model)
    trained, peak = (
        sum(layer.trainable_parameters for layer in model.layers),
        predict_memory(plan, profile)[0].peak_bytes,
    )
    without = peak - owned_state_bytes(plan, model)[0]
    room = [without + 18_500, without + 37_000]
    devices = tuple(replace(d, memory_bytes=size) for d, size in zip(profile.devices, room, strict=True))
    asked = PlanRequest(4, SEQUENCE, (1,), max_pipelines=2, memory_reserve=0.0)
    found = Fitter(replace(profile, devices=devices), asked).fitted(plan)
    assert found is not None and found.state_weights == {0: 0.5, 1: 1.0}
    shares = {rank: size / 12 for rank, size in owned_state_bytes(found, model).items()}
    assert shares[0] + shares[1] == trained and abs(shares[0] - trained / 3) <= 400 / 8
    peaks = [memory.peak_bytes for memory in predict_memory(found, profile)]
    assert peaks == [without + 12 * shares[0], without + 12 * shares[1]]
    plenty = tuple(replace(d, memory_bytes=4 * size) for d, size in zip(profile.devices, room, strict=True))
    assert Fitter(replace(profile, devices=plenty), asked).fitted(plan) == plan
    half = tuple(replace(d, memory_bytes=size) for d, size in zip(profile.devices, (27_500, 200_000), strict=True))
    half = tuple(replace(d, memory_bytes=without + d.memory_bytes) for d in half)
    assert Fitter(replace(profile, devices=half), asked).fitted(plan) == plan, "a half each fits, if not all"


@pytest.mark.parametrize("missing_bytes, depth", [(1_000, 2), (20_000, 1)])
def test_fewer_micro_batches_in_flight_are_preferred_to_recomputation_where_they_are_faster(
    missing_bytes: int, depth: int
) -> None:
    """The first ranks of two pipelines lack memory for the depths that are asked for."""
    model = replace(make_model(BLOCKS), state_bytes_per_trainable_parameter=16.0)
    stages = ([StagePlan((rank,), 0, 4, 3), StagePlan((rank + 1,), 4, LAYERS, 0)] for rank in (0, 2))
    plan = Plan(tuple(PipelinePlan(tuple(pair), 1, 8) for pair in stages), 16, SEQUENCE, LAYERS)
    profile = make_profile([1.0] * 4, model)
    peaks = [memory.peak_bytes for memory in predict_memory(plan, profile)]
    sizes = [peak - missing_bytes * (rank % 2 == 0) for rank, peak in enumerate(peaks)]
    devices = (replace(d, memory_bytes=size) for d, size in zip(profile.devices, sizes, strict=True))
    request = PlanRequest(16, SEQUENCE, (1,), max_pipelines=2, memory_reserve=0.0, recompute_choices=(False, True))
    fitter = Fitter(replace(profile, devices=tuple(devices)), request)
    fitted = fitter.fitted(plan)
    assert fitted is not None and fitter.step_s(fitted) == fitter.step_s(plan)
    assert [(stage.warm_up, stage.recompute) for _, _, stage in fitted.numbered] == [(depth, False), (0, False)] * 2


def test_the_step_that_is_reported_is_the_one_that_was_searched() -> None:
    """On unlike ranks with plenty of memory, of which stepping takes a good part."""
    devices = [make_device(rank, memory_bytes=10**7 * (1 + rank), optimizer_s_per_parameter=1e-3) for rank in range(3)]
    profile = replace(make_profile([1.0] * 3), devices=tuple(devices))
    asked = PlanRequest(9, SEQUENCE, (1,), max_pipelines=3)
    report, decision = make_plan(profile, asked), decide(profile, asked)
    assert decision is not None and len(report.plan.pipelines) == 3
    assert report.plan == decision.plan and set(report.plan.state_weights.values()) == {1.0}
    assert report.predicted_step_s == decision.step_s


@pytest.mark.parametrize(
    "blocks, more",
    [(1, (0, 0)), (2, (0, 0, 0)), (1, (12_500, -7_500)), (2, (10_000, -10_000, 0))],
    ids=["two", "three", "two unlike", "three unlike"],
)
def test_a_plan_is_found_whose_ranks_have_no_room_for_all_the_state(blocks: int, more: tuple[int, ...]) -> None:
    """Every rank by itself, as suits unlike layers best, with memory for its part of the state, or ``more``."""
    model = replace(make_model(blocks), state_bytes_per_trainable_parameter=16.0)
    count, layers = len(more), blocks + 2
    pipelines = tuple(PipelinePlan((StagePlan((rank,), 0, layers, 0),), 1, 4) for rank in range(count))
    plan = Plan(pipelines, 4 * count, SEQUENCE, layers)
    profile = make_profile([1.0] * count, model)
    each = max(memory.peak_bytes for memory in predict_memory(plan, profile))
    assert all(each + one < stage_memory(model, 0, layers, SEQUENCE, 1).total for one in more)
    devices = (replace(d, memory_bytes=each + one) for d, one in zip(profile.devices, more, strict=True))
    profile = replace(profile, devices=tuple(devices))
    request = PlanRequest(4 * count, SEQUENCE, (1,), max_pipelines=count, memory_reserve=0.0)
    found = make_plan(profile, request)
    assert len(found.plan.pipelines) == count and found.predicted_step_s == simulate(plan, profile).step_s
    assert memory_suffices(found.plan, profile, 0.0)
    assert (len(set(found.plan.state_weights.values())) > 1) == any(more)
    one = decide(profile, replace(request, max_pipelines=1))
    assert one is not None and found.predicted_step_s < 0.9 * one.step_s
    less = replace(profile, devices=tuple(replace(d, memory_bytes=d.memory_bytes - 5_000) for d in profile.devices))
    without = decide(less, request)
    assert without is None or len(without.plan.pipelines) < count


def test_a_layer_too_large_for_one_rank_with_its_state_is_held_by_two() -> None:
    """One block of 10,000 parameters, 160 kB with all its state: in one pipeline it fits nowhere."""
    model = replace(make_model(1), state_bytes_per_trainable_parameter=16.0)
    embedding, block, head = model.layers
    large = replace(block, parameters=10_000, trainable_parameters=10_000, parameter_bytes=40_000)
    model = replace(model, layers=(embedding, large, head))
    profile = make_profile([1.0] * 2, model, memory_bytes=185_000)
    request = PlanRequest(2, SEQUENCE, (1,), max_pipelines=2, memory_reserve=0.0)
    assert has_fitting_plan(profile, request) and not has_fitting_plan(profile, replace(request, max_pipelines=1))
    found = make_plan(profile, request)
    assert len(found.plan.pipelines) == 2 and memory_suffices(found.plan, profile, 0.0)
    with refuses("memory.exceeded"):
        make_plan(profile, replace(request, max_pipelines=1))
    assert not has_fitting_plan(make_profile([1.0] * 2, model, memory_bytes=165_000), request)
