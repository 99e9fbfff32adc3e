"""A request that allows more is answered by a plan that is no slower: more pipelines, idle ranks, one rank more."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.search.search import Search
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.errors import UserError
from tests.planning.search.test_annealing import REQUEST, cluster, even_plan
from tests.support.brute_force import joint_instance
from tests.support.seeds import seeds

ROUNDING = 1 + 1e-9
MOST_SLOWER = 1.005
"""With one rank more."""


def instance(seed: int, most: int = 6) -> tuple[ClusterProfile, PlanRequest]:
    """Of 2 to ``most`` ranks."""
    draw = random.Random(seed)
    profile, request = joint_instance(seed, 2 + seed % (most - 1), draw.randint(2, 6), draw.choice((4, 6, 8)))
    return profile, replace(request, allow_idle=True, max_pipelines=3)


def step_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Infinite: nothing fits, or the request cannot be planned for."""
    try:
        found = decide(profile, request)
    except UserError:
        return math.inf
    return math.inf if found is None else found.step_s


@pytest.mark.slow
@seeds(40, 3)
def test_more_pipelines_make_no_plan_slower(seed: int) -> None:
    profile, request = instance(seed)
    steps = [step_s(profile, replace(request, max_pipelines=most)) for most in (1, 2, 3, 8)]
    assert all(more <= fewer * ROUNDING for fewer, more in itertools.pairwise(steps))


@pytest.mark.slow
@seeds(40, (0, 2, 4))
def test_leave_to_idle_makes_no_plan_slower(seed: int) -> None:
    profile, request = instance(seed)
    assert step_s(profile, request) <= step_s(profile, replace(request, allow_idle=False)) * ROUNDING


@seeds(40, 3)
def test_one_rank_more_makes_no_plan_slower(seed: int) -> None:
    """Of up to 4 ranks, whose orders are all begun with."""
    profile, request = instance(seed, most=4)
    every, ranks = step_s(profile, request), range(len(profile.devices))
    for left_out in ranks:
        assert every <= MOST_SLOWER * step_s(restricted(profile, [rank for rank in ranks if rank != left_out]), request)


@pytest.mark.slow
@seeds(40, (1, 2))
def test_what_is_told_of_other_plans_is_what_they_take(seed: int) -> None:
    """One pipeline, and no idle rank: the search for the plan has found these, too."""
    profile, request = instance(seed)
    found = decide(profile, request)
    if found is None:
        return
    assert found.one_pipeline_s == pytest.approx(step_s(profile, replace(request, max_pipelines=1)))
    assert found.at_work_s == pytest.approx(step_s(profile, replace(request, allow_idle=False)), rel=0.005)


@pytest.mark.parametrize("at_work", [((0,), (1,)), ((0, 2, 5), (1, 3)), ((6, 0, 5, 1, 4, 2, 3),)])
def test_idle_ranks_are_put_to_work(at_work: tuple[tuple[int, ...], ...]) -> None:
    """Each with one layer, and the layers of all are still the model's."""
    annealer = Search(cluster(10_000_000), REQUEST)
    lines = annealer.rounds.using_at_least(7).with_idle_ranks_used(annealer.lines(even_plan(at_work)))
    assert sorted(rank for line in lines for rank in line.ranks) == list(range(7))
    assert all(sum(line.counts) == 14 and len(line.counts) == len(line.flying) == len(line.ranks) for line in lines)
    assert annealer.rounds.price(lines) < math.inf
