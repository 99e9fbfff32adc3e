"""The planner against a brute force that knows nothing of it: loops over everything, priced by the simulator."""

import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.brute_force import brute_force_s, joint_instance
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_profile, renumbered
from tests.support.seeds import seeds

pytestmark = pytest.mark.slow

MOST_SLOWER = 1 + 1e-9


def compared(profile: ClusterProfile, request: PlanRequest) -> float:
    """The planner's step time over the least one; its plan is simulated and fits."""
    best_s, found = brute_force_s(profile, request), decide(profile, request)
    if found is None:
        return 1.0 if best_s == math.inf else math.inf
    assert simulate(found.plan, profile).step_s == pytest.approx(found.step_s, rel=1e-9)
    assert fluid_bound_s(profile, request) <= found.step_s * (1 + 1e-9)
    assert all(m.peak_bytes <= m.usable_bytes for m in predict_memory(found.plan, profile, request.memory_reserve))
    assert all(m.peak_bytes <= m.usable_bytes for m in predict_hosts(found.plan, profile, request.memory_reserve))
    assert best_s <= found.step_s * (1 + 1e-9)
    return found.step_s / best_s


def small(seed: int) -> float:
    """Up to 3 devices, 5 blocks, 4 sequences."""
    draw = random.Random(seed * 7 + 1)
    ranks = draw.choice((1, 2, 2, 3, 3))
    return compared(*joint_instance(seed, ranks, draw.randint(1, 5), draw.choice((1, 2, 3, 4))))


def four(seed: int) -> float:
    """Four devices with a block or two."""
    return compared(*joint_instance(seed, 4, 1 + seed % 2, random.Random(seed).choice((2, 3, 4))))


def tiny(seed: int) -> float:
    """As ``small``, but with 2 blocks at most where there are three devices."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 3))
    return compared(*joint_instance(seed, ranks, draw.randint(1, 2 if ranks == 3 else 4), draw.choice((2, 3, 4))))


@seeds(40, (0, 8, 20, 32), "block")
def test_the_planner_finds_what_brute_force_finds(block: int) -> None:
    for seed in range(block * 5, block * 5 + 5):
        assert tiny(seed) <= MOST_SLOWER, f"seed {seed}"


@seeds(30, (7,), "block")
def test_four_ranks_are_planned_as_brute_force_does(block: int) -> None:
    for seed in range(block * 2, block * 2 + 2):
        assert four(seed) <= MOST_SLOWER, f"seed {seed}"


@pytest.mark.parametrize(
    ("instance", "seed"), [(tiny, 135), (four, 7), (four, 45), (four, 49), (small, 50), (small, 143)]
)
def test_plans_that_were_missed_are_found(instance: Callable[[int], float], seed: int) -> None:
    """Plans that fit only with very unlike owners, forwards repeated for the sake of other ranks, a frozen embedding, a rank with
    more memory than its host. The first one is found but for 1.9 %."""
    assert instance(seed) <= 1.02


@pytest.mark.long
def test_two_hundred_instances_are_planned_as_brute_force_does() -> None:
    with ProcessPoolExecutor(2) as pool:
        ratios = list(pool.map(small, range(200), chunksize=10))
    assert {seed: ratio for seed, ratio in enumerate(ratios) if ratio > MOST_SLOWER} == {}


# What the planner makes of it


@seeds(30, 4)
def test_how_ranks_are_numbered_changes_nothing(seed: int) -> None:
    """Pipelines, shares, stages, depths: all the same, on the same devices; so which of equal plans is taken is no accident."""
    profile, request = joint_instance(seed, 3, 3, 4)
    order = random.Random(seed).sample(range(3), 3)
    plan, again = decide(profile, request), decide(renumbered(profile, order), request)
    if plan is None or again is None:
        assert plan is again
        return
    alike = [set(members) for members in rank_classes(profile)]

    def described(chosen: Plan, old: list[int]) -> list[object]:
        """Ranks by the class of ranks that nothing tells apart."""
        return [
            (p.sequences, p.micro_batch, p.split_backward, [
                (next(i for i, members in enumerate(alike) if old[s.ranks[0]] in members), replace(s, ranks=()))
                for s in p.stages
            ])
            for p in chosen.pipelines
        ]  # fmt: skip

    assert described(again.plan, order) == described(plan.plan, [0, 1, 2])
    assert again.step_s == pytest.approx(plan.step_s, rel=1e-12)


def test_a_schedule_given_by_name_is_kept() -> None:
    for batch in (4, 64):
        profile, request = split_cluster(), PlanRequest(batch, SEQUENCE, (1,), split_choices=(False, True))
        for schedule in ("gpipe", "1f1b", "split"):
            report = make_plan(profile, replace(request, schedule=schedule))
            (pipeline,) = report.plan.pipelines
            depths_ = [stage.warm_up for stage in pipeline.stages]
            assert depths_ == ([batch] * 2 if schedule == "gpipe" else [1, 0])
            assert pipeline.split_backward == (schedule == "split")
        free = make_plan(profile, request)
        assert free.predicted_step_s <= report.predicted_step_s
    with refuses("plan.split_times"):
        make_plan(make_profile(), PlanRequest(4, SEQUENCE, (1,), schedule="split"))


def split_cluster() -> ClusterProfile:
    """Two equal ranks; the two parts of a backward take as long as the whole."""
    profile = make_profile((1.0, 1.0), make_model(6))

    def parted(times: LayerTimes) -> LayerTimes:
        half = replace(times.backward_s, seconds=tuple(s / 2 for s in times.backward_s.seconds))
        return replace(times, input_s=half, weight_s=half)

    devices = tuple(replace(d, layers={k: parted(t) for k, t in d.layers.items()}) for d in profile.devices)
    return replace(profile, devices=devices)


@pytest.mark.parametrize("batch", [4, 32])
def test_backward_is_split_where_that_fills_gaps(batch: int) -> None:
    request = PlanRequest(batch, SEQUENCE, (1,))
    whole, parted = (make_plan(split_cluster(), replace(request, split_choices=c)) for c in ((False,), (False, True)))
    assert parted.plan.pipelines[0].split_backward and parted.predicted_step_s < 0.99 * whole.predicted_step_s
    assert any(reason.startswith("backward in one part instead of two: 1.") for reason in parted.reasons)


@pytest.mark.parametrize("batch", [4, 64])
def test_slow_links_make_pipelines_of_their_own(batch: int) -> None:
    """Gradient all-reduces once per step cost less than a message per micro-batch; shares follow speed."""
    profile = make_profile((1.0, 3.0), make_model(4), bytes_per_s=1e3)
    report = make_plan(profile, PlanRequest(batch, SEQUENCE, (1,), max_pipelines=2))
    shares = {pipeline.stages[0].ranks[0]: pipeline.sequences for pipeline in report.plan.pipelines}
    assert len(report.plan.pipelines) == 2 and abs(shares[0] - 0.75 * batch) <= 1
    assert report.predicted_step_s == simulate(report.plan, profile).step_s
    assert any("one pipeline instead of 2 copies of the model: " in reason for reason in report.reasons)
    alone = make_plan(profile, PlanRequest(batch, SEQUENCE, (1,)))
    assert len(alone.plan.pipelines) == 1 and alone.predicted_step_s > report.predicted_step_s


@pytest.mark.parametrize("batch", [4, 64])
def test_ranks_that_share_a_hosts_memory_fit_together(batch: int) -> None:
    profile = make_profile((1.0, 1.0), make_model(6), memory_bytes=200_000)
    devices = tuple(replace(device, host="host0", shares_host_memory=True) for device in profile.devices)
    request = PlanRequest(batch, SEQUENCE, (1,), memory_reserve=0.0)
    roomy = make_plan(replace(profile, devices=devices), request)
    need = sum(memory.peak_bytes for memory in roomy.memory)
    host = HostProfile("host0", need - 1, "made up")
    report = make_plan(replace(profile, devices=devices, hosts=(host,)), request)
    (both,) = report.hosts
    assert both.peak_bytes <= both.usable_bytes == need - 1 and report.predicted_step_s >= roomy.predicted_step_s
    with refuses("memory.exceeded"):
        make_plan(replace(profile, devices=devices, hosts=(replace(host, memory_bytes=40_000),)), request)


@pytest.mark.parametrize("batch", [4, 64])
def test_shallower_than_classic_where_memory_asks_for_it(batch: int) -> None:
    """What three stages keep in flight at the classic depths does not fit, in any split."""
    profile, request = make_profile((1.0,) * 3, make_model(7)), PlanRequest(batch, SEQUENCE, (1,), memory_reserve=0.0)
    fixed = replace(request, schedule="1f1b")
    short = replace(profile, devices=tuple(replace(d, memory_bytes=47_000) for d in profile.devices))
    with refuses("memory.exceeded"):
        make_plan(short, fixed)
    report = make_plan(short, request)
    depths_ = [stage.warm_up for stage in report.plan.pipelines[0].stages]
    assert all(memory.peak_bytes <= 47_000 for memory in report.memory)
    assert any(depth < len(depths_) - 1 - place for place, depth in enumerate(depths_))
