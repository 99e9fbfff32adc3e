"""Lower bounds: under every plan's simulated step, under the exact optimum, and by hand where one inequality decides alone."""

import math
import random
from dataclasses import replace

import pytest

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.memory import predict_memory
from hetero_mpi.planning.packing import counted
from hetero_mpi.planning.packing.bound import TOLERANCE, packing_bound_s
from hetero_mpi.planning.packing.counted import Counted, packed
from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import with_plenty_of_memory
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, LinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.brute_force import brute_force_s, joint_instance
from tests.support.planning_samples import SEQUENCE, looks_possible, make_model, make_profile, random_plan

EQUAL = 1 + 1e-9
NEAR = 1 + 1.5 * TOLERANCE


def as_needed(seed: int, pipelines: int = 3) -> tuple[Plan, ClusterProfile, PlanRequest]:
    """Any plan, with the memory that it needs and not a byte more, and a request that it may be the answer to."""
    plan, profile = random_plan(seed, pipelines)
    draw = random.Random(seed)
    whole = tuple(replace(p, micro_batch=min(p.micro_batch, p.sequences)) for p in plan.pipelines)
    plan = replace(plan, pipelines=whole)
    if draw.random() < 0.4:  # adapters: little is trained
        layers = tuple(replace(x, trainable_parameters=x.trainable_parameters // 50) for x in profile.model.layers)
        profile = replace(profile, model=replace(profile.model, layers=layers, tied=False, tied_bytes=0))
    if draw.random() < 0.5:  # links that matter
        slower = draw.choice((3.0, 30.0))
        links = tuple(replace(k, bytes_per_s=k.bytes_per_s / slower, latency_s=k.latency_s * 3) for k in profile.links)
        profile = replace(profile, links=links)
    peaks = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile)}
    devices = tuple(
        replace(d, memory_bytes=peaks.get(d.rank, d.memory_bytes), dtypes=(profile.model.dtype,))
        for d in profile.devices
    )
    request = PlanRequest(
        plan.global_batch,
        plan.sequence_length,
        tuple(sorted({pipeline.micro_batch for pipeline in plan.pipelines} | set(draw.sample((1, 2, 3), 1)))),
        max_pipelines=len(plan.pipelines),
        recompute_choices=(False, True),
        split_choices=(False, True),
        memory_reserve=0.0,
    )
    return plan, replace(profile, devices=devices), request


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_what_a_plan_does_looks_possible(seed: int) -> None:
    plan, profile, request = as_needed(seed)
    assert looks_possible(profile, request, simulate(plan, profile).step_s * EQUAL)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_no_plan_is_under_a_packing_bound(seed: int) -> None:
    """A bound that were too high would show at once: the search begins far above."""
    plan, profile, request = as_needed(seed)
    step_s = simulate(plan, profile).step_s
    assert packing_bound_s(profile, request, 2 * step_s) <= step_s * EQUAL


@pytest.mark.parametrize("seed", range(30))
def test_the_packing_bound_is_at_or_under_the_optimum(seed: int) -> None:
    profile, request = joint_instance(seed, 2 + seed % 2, 2 + seed % 3, 3)
    best_s = brute_force_s(profile, request)
    if best_s < math.inf:
        bound_s = packing_bound_s(profile, request, 2 * best_s)
        assert fluid_bound_s(profile, request) * (1 - 1e-9) <= bound_s <= best_s * EQUAL


def test_the_packing_bound_is_nearly_exact_where_ranks_are_alike() -> None:
    """Three like ranks, five blocks of 3 s, four sequences: the bound is within 3 % of the best plan."""
    profile = make_profile([1.0] * 3, make_model(5))
    request = PlanRequest(4, SEQUENCE, (1,), max_pipelines=3, memory_reserve=0.0)
    best_s = brute_force_s(profile, request)
    bound_s = packing_bound_s(profile, request, 2 * best_s)
    assert 0.97 * best_s <= bound_s <= best_s * EQUAL


def test_too_little_memory_for_two_in_flight_costs_a_round_trip_per_sequence() -> None:
    """One in flight: embedding 0.3, blocks 3, head 1.5 s of every sequence follow one another, and so do all sequences."""
    profile = make_profile([1.0, 1.0], make_model(4), memory_bytes=[76_000, 45_000])
    request = PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    cuts = [StagePlan((0,), 0, 3, 0), StagePlan((1,), 3, 6, 0)]
    one_at_a_time = Plan((PipelinePlan(tuple(cuts), 1, 4),), 4, SEQUENCE, 6)
    needed = {m.rank: m.peak_bytes for m in predict_memory(one_at_a_time, profile)}
    profile = replace(profile, devices=tuple(replace(d, memory_bytes=needed[d.rank] + 1000) for d in profile.devices))
    step_s = simulate(one_at_a_time, profile).step_s
    assert step_s == pytest.approx(4 * 13.8)
    assert step_s / NEAR <= packing_bound_s(profile, request, 2 * step_s) <= step_s * EQUAL
    # With room for more in flight both ranks work at once.
    assert packing_bound_s(with_plenty_of_memory(profile), request, 2 * step_s) < 0.75 * step_s


def test_before_the_first_gradient_and_after_the_last_forward_there_is_little_to_do() -> None:
    """A long first stage keeps two in flight: it idles while the first gradient comes back, and again at the end."""
    profile = make_profile([1.0] * 3, make_model(4), memory_bytes=10_000_000)
    cuts = (StagePlan((0,), 0, 3, 1), StagePlan((1,), 3, 4, 1), StagePlan((2,), 4, 6, 0))
    plan = Plan((PipelinePlan(cuts, 1, 6),), 6, SEQUENCE, 6)
    needed = {m.rank: m.peak_bytes for m in predict_memory(plan, profile)}
    profile = replace(profile, devices=tuple(replace(d, memory_bytes=needed[d.rank]) for d in profile.devices))
    request = PlanRequest(6, SEQUENCE, (1,), memory_reserve=0.0)
    best_s = brute_force_s(profile, request)
    # One sequence takes 6.3 s on the first stage and 13.8 s on all: one round trip, what is left of six, another round trip.
    by_hand_s = 2 * 13.8 + (6 - 2) * 6.3 - 6.3
    assert by_hand_s / NEAR <= packing_bound_s(profile, request, 2 * best_s) <= best_s * EQUAL


def on_two_hosts(slowness: tuple[float, ...], bytes_per_s: float, blocks: int = 4) -> ClusterProfile:
    """The first two ranks on one host, the others on another; links inside a host cost next to nothing."""
    profile = make_profile(slowness, make_model(blocks), bytes_per_s=bytes_per_s)
    devices = tuple(replace(d, host=f"host{min(1, d.rank // 2)}") for d in profile.devices)
    links = tuple(
        LinkProfile(k.source, k.destination, 0.0, 1e9, True) if k.source // 2 == k.destination // 2 else k
        for k in profile.links
    )
    return replace(profile, devices=devices, links=links)


@pytest.mark.parametrize("seed", range(6))
def test_no_good_plan_with_sums_inside_hosts_is_under_a_packing_bound(seed: int) -> None:
    draw = random.Random(seed)
    profile = on_two_hosts(
        tuple(draw.choice((1.0, 1.0, 2.0)) for _ in range(4)), draw.choice((100.0, 1000.0)), draw.randint(2, 5)
    )
    roomy = draw.choice((45_000, 60_000, 10_000_000))
    profile = replace(profile, devices=tuple(replace(d, memory_bytes=roomy) for d in profile.devices))
    request = PlanRequest(
        draw.choice((6, 12)),
        SEQUENCE,
        (1, 2, 3),
        max_pipelines=4,
        recompute_choices=(False, True),
        memory_reserve=0.0,
    )
    found = decide(profile, request)
    if found is not None:
        assert packing_bound_s(profile, request, 2 * found.step_s) <= found.step_s * EQUAL


def test_a_pipeline_over_two_hosts_passes_every_sequence_over_their_link() -> None:
    """A message of 1,000 bytes takes 25 s: six of them, forward and back of the last, and what is computed around them."""
    profile = make_profile([1.0, 1.0], make_model(4), memory_bytes=50_000, bytes_per_s=40.0)
    request = PlanRequest(6, SEQUENCE, (1,), memory_reserve=0.0, recompute_choices=(True,))
    bound_s = packing_bound_s(profile, request, 1000.0)
    assert bound_s >= 6 * 25 + 25
    same = tuple(replace(d, host="host0") for d in profile.devices)
    inside = tuple(LinkProfile(k.source, k.destination, 0.0, 1e9, True) for k in profile.links)
    assert packing_bound_s(replace(profile, devices=same, links=inside), request, 1000.0) < 80


def test_a_bound_that_takes_too_long_ends_with_what_it_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile((1.0, 1.3, 1.7, 2.1), make_model(8))
    request = PlanRequest(4, SEQUENCE, (1,), max_pipelines=2)
    fluid_s, close_s = fluid_bound_s(profile, request), packing_bound_s(profile, request, 50.0)
    assert fluid_s < close_s * (1 - TOLERANCE)
    within = []
    for work in (0, 3000, 10**9):
        monkeypatch.setattr(counted, "MOST_WORK", work)
        within.append(packing_bound_s(profile, request, 50.0))
    assert within == sorted(within)
    assert fluid_s < within[0] < within[-1] == close_s


def test_packing_finds_the_best_of_all_partitions() -> None:
    """Two classes of two and three ranks; what a vector carries is drawn, the more ranks the more."""
    draw = random.Random(7)
    profile = make_profile([1.0, 1.0, 2.0, 2.0, 2.0])
    profile = replace(profile, devices=tuple(replace(d, host="host0") for d in profile.devices))
    table = Counted(Facts(profile, PlanRequest(8, SEQUENCE, (1,), max_pipelines=5)))
    assert table.shape == (3, 4)
    most = table.vectors.sum(axis=0) * 4 - 3
    most = most + [draw.randint(0, 3) for _ in most]
    most[0] = 0

    def best(a: int, b: int, pipelines: int) -> int:
        if pipelines == 0:
            return 0
        choices = [(i, j) for i in range(a + 1) for j in range(b + 1)]
        return max(int(most[4 * i + j]) + best(a - i, b - j, pipelines - 1) for i, j in choices)

    for alone, pipelines in ((True, 1), (False, 5)):
        sequences, parts = packed(table, most, alone)
        assert sequences == best(2, 3, pipelines) == sum(int(most[vector]) for vector in parts)
        assert len(parts) <= pipelines
