"""The counting bound: under the simulated step of any plan, and by hand where one of its rules decides alone."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decide import decide
from hetero_mpi.planning.exact.joint import Exact
from hetero_mpi.planning.large_bound import TOLERANCE, Counted, Shares, hosts_of, large_bound_s
from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from tests.planning_samples import SEQUENCE, make_model, make_profile
from tests.search.test_bounds import as_needed
from tests.search.test_exact import joint_instance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from clusters import generate

EQUAL = 1 + 1e-9


def on_hosts(profile: ClusterProfile, host: list[int], faster: float) -> ClusterProfile:
    """Rank r on host ``host[r]``; links inside hosts are ``faster``."""
    devices = tuple(replace(d, host=f"host{host[d.rank]}") for d in profile.devices)
    links = tuple(
        replace(k, same_host=True, bytes_per_s=k.bytes_per_s * faster) if host[k.source] == host[k.destination] else k
        for k in profile.links
    )
    return replace(profile, devices=devices, links=links)


def spread(seed: int) -> tuple[Plan, ClusterProfile, PlanRequest]:
    """Any plan of up to four pipelines, with just the memory it needs, its ranks on hosts at random."""
    plan, profile, request = as_needed(seed, 1 + seed % 4)
    draw, count = random.Random(seed), len(profile.devices)
    most = draw.randint(1, count)
    host = [draw.randrange(most) for _ in range(count)]
    return plan, on_hosts(profile, host, draw.choice((1.0, 30.0, 1000.0))), request


def is_shown(profile: ClusterProfile, request: PlanRequest, pipelines: int, step_s: float) -> bool:
    """Is so many pipelines' doing the batch in that time shown to be impossible, by prices or by shares in ranges?"""
    facts = Facts(profile, request)
    counted = Counted(facts, hosts_of(facts), pipelines)
    return counted.impossible(step_s) or (1 < pipelines <= 8 and Shares(counted).impossible(step_s))


@pytest.mark.parametrize("block", [*range(2), *(pytest.param(block, marks=pytest.mark.long) for block in range(2, 40))])
def test_no_plan_is_under_the_bound(block: int) -> None:
    for seed in range(5000 + 10 * block, 5010 + 10 * block):
        plan, profile, request = spread(seed)
        step_s = simulate(plan, profile).step_s
        assert large_bound_s(profile, request, 2 * step_s) <= step_s * EQUAL, seed
        assert not is_shown(profile, request, len(plan.pipelines), step_s * EQUAL), seed


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_at_or_under_the_optimum(seed: int) -> None:
    profile, request = joint_instance(seed, 2 + seed % 2, 2 + seed % 3, 3)
    found = Exact(profile, request, rank_classes(profile)).solve()
    if found:
        bound_s = large_bound_s(profile, request)
        assert fluid_bound_s(profile, request) * (1 - 1e-9) <= bound_s <= found[0].step_s * EQUAL
        assert not is_shown(profile, request, len(found[0].parts), found[0].step_s * EQUAL)


@pytest.mark.parametrize(
    ("devices", "seed"),
    [(16, 3), (16, 13), (64, 1), *(pytest.param(n, s, marks=pytest.mark.long) for n in (16, 64) for s in range(20))],
)
def test_the_planners_plans_of_the_suite_are_not_under_the_bound(devices: int, seed: int) -> None:
    case = generate(devices, seed)
    decision = decide(case.profile, case.request)
    assert decision is not None
    fluid_s = fluid_bound_s(case.profile, case.request)
    assert fluid_s <= large_bound_s(case.profile, case.request, 2 * decision.step_s) <= decision.step_s * EQUAL
    assert not is_shown(case.profile, case.request, len(decision.plan.pipelines), decision.step_s * EQUAL)


def test_a_block_is_whole() -> None:
    """Two ranks cannot share three blocks of 3 s evenly: one does 2 x 4 x 3 s; always busy ones would take 4 x 10.8 / 2."""
    profile = make_profile([1.0, 1.0], make_model(3))
    bound_s = large_bound_s(profile, PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0))
    assert fluid_bound_s(profile, PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)) < 22 < 24 <= bound_s * EQUAL


def summing(hosts: list[int], pipelines: int) -> tuple[ClusterProfile, PlanRequest]:
    """Four like ranks with memory for half the model: two pipelines or one; a block's sum over the network takes 8 s."""
    model = make_model(8)
    whole = sum(x.parameter_bytes + x.trainable_parameters * 16 for x in model.layers)
    profile = make_profile([1.0] * 4, model, memory_bytes=int(whole * 0.9), latency_s=0.0, bytes_per_s=200.0)
    request = PlanRequest(16, SEQUENCE, (1,), max_pipelines=pipelines, recompute_choices=(False, True))
    return on_hosts(profile, hosts, 1e6), replace(request, memory_reserve=0.0)


def test_sums_over_the_network_count_and_sums_inside_a_host_do_not() -> None:
    alone, inside, across = (
        large_bound_s(*summing(hosts, pipelines)) for hosts, pipelines in (([0, 1, 2, 3], 1), ([0, 0, 1, 1], 2), ([0, 1, 2, 3], 2))
    )  # fmt: skip
    assert inside < alone * (1 + TOLERANCE)
    # Every sum leaves the hosts: one pipeline is the best that can be.
    assert across == pytest.approx(alone, rel=2 * TOLERANCE)


@pytest.mark.parametrize("pipelines", [1, 2, 4])
def test_like_ranks_of_a_host_leave_the_bound_little_room(pipelines: int) -> None:
    """Each rank has the whole model, or a half or a quarter of it. Of 25.8 s of a sequence, 24 s are blocks, which are counted."""
    profile = on_hosts(make_profile([1.0] * 4, make_model(8)), [0, 0, 0, 0], 1e6)
    request = PlanRequest(32, SEQUENCE, (1,), max_pipelines=pipelines, memory_reserve=0.0)
    share, stages = 32 // pipelines, 4 // pipelines
    each_s = share * 24 / stages
    assert is_shown(profile, request, pipelines, 0.999 * each_s)
    assert not is_shown(profile, request, pipelines, 1.001 * each_s)


def test_what_is_known_ends_the_search() -> None:
    case = generate(16, 3)
    assert large_bound_s(case.profile, case.request, 15.5) == pytest.approx(15.5)
