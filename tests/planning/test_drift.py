"""When layers move because machines change their speed: decided from made-up times, without MPI."""

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np
import pytest

from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import full_training
from hetero_mpi.planning.analysis.calibration import GroupSums, LinkBetween, drifted_profile
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import restricted, with_slowness
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.plan import IdleRank, PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.redistribute import held_under, tensor_shards, transfers
from hetero_mpi.training.build import divided_tensors
from hetero_mpi.training.rebalance import MIN_MEDIAN_STEPS, Decider, Move, moved_layers
from hetero_mpi.training.replan import Prospect, ReplanAnswer, ReplanQuestion, answer, moving_s
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile, reported

PROFILE = make_profile([1.0] * 3, model=make_model(8), bytes_per_s=1e6)
REQUEST = PlanRequest(8, SEQUENCE, (1,), indifference=0.005)
Speeds = Callable[[int], dict[int, float]]
"""Step -> by how much longer than profiled each rank's computing lasts."""


@cache
def planned() -> PlanReport:
    """What every run begins with."""
    return make_plan(PROFILE, REQUEST)


def steady(step: int) -> dict[int, float]:
    return {0: 1.0, 1: 1.0, 2: 1.0}


def drop_and_recovery(step: int) -> dict[int, float]:
    """Rank 1 at a third of its speed from step 20 to 59."""
    return {0: 1.0, 1: 3.0 if 20 <= step < 60 else 1.0, 2: 1.0}


def noisy(speeds: Speeds, spread: float, seed: int) -> Speeds:
    """With normal noise on every step and rank, and one step in twenty that takes three times as long."""
    rng = np.random.default_rng(seed)

    def one(step: int) -> dict[int, float]:
        return {
            rank: ratio * max(0.2, 1 + spread * rng.normal()) * (3.0 if rng.random() < 0.05 else 1.0)
            for rank, ratio in speeds(step).items()
        }

    return one


@dataclass
class Story:
    """What became of a run of made-up speeds."""

    plans: list[Plan]
    moved_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    questions: int = 0


@lru_cache
def step_s(plan: Plan, ratios: tuple[tuple[int, float], ...]) -> float:
    return simulate(plan, with_slowness(PROFILE, dict(ratios))).step_s


def play(told: Speeds, true: Speeds, steps: int = 100, cost_s: float = 5.0, rebalance: bool = True) -> Story:
    """The decisions of a run on three like devices. ``told`` is measured, ``true`` is what steps last; an answer takes two
    steps."""
    report = planned()
    decider, story = Decider(range(3)), Story([report.plan])
    under_way: tuple[int, ReplanAnswer] | None = None
    reply: ReplanAnswer | None = None
    for step in range(steps):
        story.seconds += step_s(report.plan, tuple(sorted(true(step).items())))
        decider.observe(told(step))
        if under_way is not None and under_way[0] == step:
            reply, under_way = under_way[1], None
            decider.answered(reply.prospect)
        remaining = steps - step - 1
        move = decider.decide(remaining) if rebalance else Move.STAY
        if move is Move.ASK:
            assert decider.requested_ratios is not None
            story.questions += 1
            drifted = drifted_profile(PROFILE, report.plan, decider.requested_ratios)
            under_way = step + 2, answer(ReplanQuestion(drifted, REQUEST, report, remaining, cost_s))
        elif move is Move.GO:
            assert reply is not None
            report = reply.report
            decider.record_move()
            story.seconds += reply.prospect.cost_s
            story.moved_at.append(step)
            story.plans.append(report.plan)
    return story


def loads(plan: Plan) -> dict[int, int]:
    """rank -> layers it holds."""
    return {stage.ranks[0]: stage.last - stage.first for _, _, stage in plan.numbered}


def test_layers_leave_a_slow_rank_and_come_back() -> None:
    story = play(drop_and_recovery, drop_and_recovery)
    first, second = story.moved_at
    assert 20 + MIN_MEDIAN_STEPS <= first < 35 and 60 + MIN_MEDIAN_STEPS <= second < 80
    before, slow, after = (loads(plan) for plan in story.plans)
    assert slow[1] < before[1] and 1 in slow, "the slow rank keeps something, so that its recovery is seen"
    assert after == before
    without = play(drop_and_recovery, drop_and_recovery, rebalance=False)
    assert story.seconds < 0.85 * without.seconds


@pytest.mark.parametrize("spread", [0.05, 0.2])
@pytest.mark.parametrize("seed", range(2))
def test_noise_moves_nothing(spread: float, seed: int) -> None:
    story = play(noisy(steady, spread, seed), steady, steps=1000)
    assert story.moved_at == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_make_a_change_flap(seed: int) -> None:
    story = play(noisy(drop_and_recovery, 0.1, seed), drop_and_recovery)
    assert len(story.moved_at) == 2


@pytest.mark.slow
@pytest.mark.parametrize("period", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (6, 12)), 25])
def test_a_rank_that_changes_again_and_again_does_little_harm(period: int) -> None:
    """Moving is as dear as a third of a slow step; a speed that lasts for 25 steps is worth it, one of 3 is not noticed."""

    def restless(step: int) -> dict[int, float]:
        return {0: 1.0, 1: 3.0 if step // period % 2 else 1.0, 2: 1.0}

    steps = 120 if period > 3 else 60
    moving, staying = (play(restless, restless, steps, 60.0, way) for way in (True, False))
    assert moving.seconds <= (0.95 if period == 25 else 1.05) * staying.seconds
    assert moving.moved_at == [] or period > 3


@pytest.mark.parametrize(("cost_s", "steps"), [(1e6, 100), (5.0, 24)])
def test_nothing_moves_when_moving_costs_more(cost_s: float, steps: int) -> None:
    """Too dear, or too near the end."""
    assert play(drop_and_recovery, drop_and_recovery, steps, cost_s).moved_at == []


def test_a_common_slowness_is_asked_about_once() -> None:
    """All ranks are slower than profiled by the same factor: no other plan helps, and that is that."""
    slower = {0: 1.4, 1: 1.4, 2: 1.4}
    story = play(lambda step: slower, lambda step: slower)
    assert story.moved_at == [] and story.questions == 1


def test_pays_once_the_loss_is_as_large_as_the_cost() -> None:
    prospect = Prospect(now_s=1.0, then_s=0.75, cost_s=2.0)
    assert [prospect.pays(steps, 1000) for steps in (7, 8)] == [False, True]
    assert prospect.hopeless(15) and not prospect.hopeless(16)
    assert Prospect(1.0, 0.96, 0.0).hopeless(10**6)


def test_bands() -> None:
    decider = Decider([0])
    for _ in range(20):
        decider.observe({0: 1.1})
    assert decider.changed() == {} and decider.ratios() == {0: 1.1}
    counts = []
    for _ in range(10):
        decider.observe({0: 2.0})
        counts.append(decider.changed().get(0, 0))
    # Four of eight steps move the median; three medians in a row make a change.
    assert counts == [0] * 5 + [6, 7, 8, 9, 10]
    assert decider.decide(1000) is Move.ASK
    decider.answered(None)
    decider.observe({0: 2.2})
    assert decider.changed() == {}
    for ratio in (*[2.6] * 10, *[6.0] * 12):
        decider.observe({0: ratio})
    assert decider.changed() == {0: 12}, "the steps at this speed, not those at the one before"


def test_a_link_that_has_become_slow_is_noticed_and_left() -> None:
    report = planned()
    first, second, *_ = (stage.ranks[0] for _, _, stage in report.plan.numbered)
    slow = LinkBetween((min(first, second), max(first, second)))
    decider = Decider(range(3))
    for _ in range(MIN_MEDIAN_STEPS + 3):
        decider.observe({0: 1.0, 1: 1.0, 2: 1.0, slow: 1e4})
        if decider.decide(1000) is Move.ASK:
            break
    assert decider.requested_ratios == {0: 1.0, 1: 1.0, 2: 1.0, slow: 1e4}
    told = decider.sentence(["a", "b", "c"])
    assert re.match(
        r"the link from rank \d \(\w\) to rank \d \(\w\) and back at 0.0001 of the profiled speed for \d steps$", told
    )
    slowed = drifted_profile(PROFILE, report.plan, decider.requested_ratios)
    reply = answer(ReplanQuestion(slowed, REQUEST, report, 1000, 1.0))
    for pipeline in reply.report.plan.pipelines:
        for before, after in itertools.pairwise(pipeline.stages):
            assert {before.ranks[0], after.ranks[0]} != {first, second}
    assert reply.prospect.then_s < 0.7 * reply.prospect.now_s


def test_a_rank_that_idles_on_is_not_told_of_times_that_are_over() -> None:
    odd = replace(PROFILE.devices[2], dtypes=("bf16",))
    for profile, kept in ((PROFILE, False), (replace(PROFILE, devices=(*PROFILE.devices[:2], odd)), True)):
        report = replace(
            make_plan(restricted(profile, [0, 1]), REQUEST), idle=(IdleRank(2, "0.512 s instead of 0.427 s"),)
        )
        drifted = drifted_profile(profile, report.plan, {0: 1.0, 1: 3.0, 2: 90.0})
        found = answer(ReplanQuestion(drifted, REQUEST, report, 1000, 1.0)).report
        assert found.plan != report.plan and [one.rank for one in found.idle] == [2]
        assert ("0.427" in found.idle[0].reason) == kept


@pytest.mark.parametrize(
    ("ratios", "slowness"), [({0: 2.0, 1: 3.0}, 2.0), ({0: 1.0, 1: 3.0}, 1.0), ({0: 2.0, 2: 4.0}, 4.0)]
)
def test_an_idle_rank_of_a_busy_host_is_no_fast_one(ratios: dict[int, float], slowness: float) -> None:
    hosts = replace(PROFILE, devices=tuple(replace(d, host="one", backend="cpu") for d in PROFILE.devices))
    drifted = drifted_profile(hosts, make_plan_of((0, 5, 10), (0, 1), 8), ratios)
    then, before = (profile.devices[2].layers["block"].forward_s.at(SEQUENCE) for profile in (drifted, hosts))
    assert then == pytest.approx(slowness * before, rel=1e-2)


def two_pipelines() -> Plan:
    first = PipelinePlan((StagePlan((0,), 0, 5, 1), StagePlan((1,), 5, 10, 0)), 2, 5)
    return Plan((first, PipelinePlan((StagePlan((2,), 0, 10, 0),), 1, 3)), 8, SEQUENCE, 10)


def test_several_pipelines_keep_their_ranks_shares_and_micro_batches() -> None:
    drifted = drifted_profile(PROFILE, two_pipelines(), {1: 3.0})
    reply = answer(ReplanQuestion(drifted, REQUEST, reported(two_pipelines()), 1000, 1.0))
    assert reply.prospect.gain_s > 0 and loads(reply.report.plan)[1] < 5
    for old, new in zip(two_pipelines().pipelines, reply.report.plan.pipelines, strict=True):
        assert (old.micro_batch, old.sequences) == (new.micro_batch, new.sequences)
        assert {stage.ranks for stage in old.stages} == {stage.ranks for stage in new.stages}


def test_an_idle_rank_is_called_and_a_hopeless_one_is_left() -> None:
    profile = make_profile([1.0, 1.0, 1.6], model=make_model(4), bytes_per_s=1e9)
    request = replace(REQUEST, max_pipelines=1)
    report = make_plan(restricted(profile, [0, 1]), request)
    called = answer(ReplanQuestion(drifted_profile(profile, report.plan, {1: 1.6}), request, report, 1000, 1.0)).report
    assert set(loads(called.plan)) == {0, 1, 2}
    left = answer(ReplanQuestion(drifted_profile(profile, report.plan, {1: 50.0}), request, report, 1000, 1.0)).report
    assert set(loads(left.plan)) == {0, 2} and [idle.rank for idle in left.idle] == [1]


def test_moved_layers_and_their_seconds() -> None:
    profile = make_profile([1.0] * 3, bytes_per_s=1000.0)
    old, new = make_plan_of([0, 2, 4], [0, 1], 4), make_plan_of([0, 1, 2, 4], [0, 2, 1], 4)
    assert moved_layers(old, new) == {(0, 2): [1]}
    assert moving_s(profile, old, new) == pytest.approx(12 * 400 / 1000.0)
    assert moved_layers(new, new) == {} and moving_s(profile, new, new) == 0.0


def pipelines(*given: tuple[tuple[int, ...], tuple[int, ...]], weights: dict[int, float] | None = None) -> Plan:
    """(ranks, edges) of each."""
    made = [
        tuple(
            StagePlan((rank,), edges[i], edges[i + 1], 0, state_weight=(weights or {}).get(rank, 1.0))
            for i, rank in enumerate(ranks)
        )
        for ranks, edges in given
    ]
    return Plan(tuple(PipelinePlan(stages, 1, 2) for stages in made), 2 * len(made), SEQUENCE, 10)


def grouped(*stages: tuple[tuple[int, ...], tuple[int, ...]]) -> Plan:
    """(ranks, heads of each) of two stages, or of one."""
    edges = (0, 5, 10) if len(stages) > 1 else (0, 10)
    made = [StagePlan(ranks, edges[i], edges[i + 1], 0, shares=heads) for i, (ranks, heads) in enumerate(stages)]
    return Plan((PipelinePlan(tuple(made), 1, 2),), 2, SEQUENCE, 10)


def beside(one: Plan, other: Plan) -> Plan:
    return replace(
        one, pipelines=(*one.pipelines, *other.pipelines), global_batch=one.global_batch + other.global_batch
    )


def test_layers_of_a_group_move_to_and_from_each_member() -> None:
    one, two = grouped(((0, 1), (3, 1))), grouped(((0,), ()), ((1, 2), (2, 2)))
    assert moved_layers(one, two) == {(0, 2): [5, 6, 7, 8, 9]}
    assert moved_layers(two, one) == {(0, 1): [0, 1, 2, 3, 4], (1, 0): [5, 6, 7, 8, 9]}


WHOLE = (0, 10)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pipelines(((0, 1), (0, 5, 10))), pipelines(((0, 1), (0, 3, 10)))),
        (pipelines(((0, 1), (0, 5, 10)), ((2,), WHOLE)), pipelines(((0, 1), (0, 3, 10)), ((2,), WHOLE))),
        (pipelines(((0, 1), (0, 5, 10)), ((2, 3), (0, 5, 10))), pipelines(((0, 1), (0, 3, 10)), ((2, 3), (0, 6, 10)))),
        (pipelines(((0,), WHOLE), ((1,), WHOLE)), pipelines(((0,), WHOLE), ((1,), WHOLE))),
        (pipelines(((0,), WHOLE), ((1,), WHOLE)), pipelines(((0,), WHOLE), ((1,), WHOLE), weights={0: 0.3})),
        (pipelines(((0, 1), (0, 5, 10))), grouped(((0, 1), (3, 1)))),
        (grouped(((0, 1, 2), (1, 2, 1))), pipelines(((3, 1), (0, 5, 10)))),
        (grouped(((0, 1), (1, 3)), ((2, 3), (2, 2))), grouped(((0, 1), (3, 1)), ((2,), ()))),
        (beside(grouped(((0, 1), (1, 3))), grouped(((2, 3), (2, 2)))), pipelines(((0, 2), (0, 5, 10)))),
    ],
    ids=[
        "one",
        "cut",
        "two-cuts",
        "nothing-but-values",
        "other-owners",
        "to-a-group",
        "from-a-group",
        "of-groups",
        "of-two",
    ],
)
def test_what_moves_is_priced_as_it_is_sent(old: Plan, new: Plan) -> None:
    """By the busiest rank's bytes; a third off at most where units stand for parameters whose sizes planning does not know."""
    config = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    chain = TransformersChain(read_config({"model_type": "llama", "num_hidden_layers": 8, **config}))
    tuning = full_training(chain)
    busy: Counter[tuple[str, int]] = Counter()
    given: Counter[tuple[str, int]] = Counter()
    divided, groups = divided_tensors(old, chain, tuning), {stage.ranks[0]: stage.ranks for _, _, stage in old.numbered}
    for one in transfers(tensor_shards(tuning, new, KINDS), held_under(tuning, old)):
        division = divided.get(one.source, {}).get(one.shard.name)
        for place, member in enumerate(groups[one.source]):
            if member != one.source and division is not None and division.cut:
                size = 4 * math.prod(division.shape(one.shard.shape, place))
                given.update({("send", member): size, ("receive", one.source): size})
        for destination in one.destinations:
            busy["send", one.source] += 4 * math.prod(one.shard.shape)
            busy["receive", destination] += 4 * math.prod(one.shard.shape)
    model = model_cost(chain, tuning, "fp32", SEQUENCE, dict.fromkeys(chain.kinds, 1.0))
    priced = moving_s(make_profile([1.0] * 4, model, bytes_per_s=1.0), old, new)
    expected = max(busy.values()) + max(given.values(), default=0)
    assert priced == pytest.approx(expected, rel=0.33 if max(len(old.pipelines), len(new.pipelines)) > 1 else 1e-9)


def test_the_program_answers_as_the_function_does() -> None:
    ratios = {1: 3.0, LinkBetween((0, 1)): 2.0, GroupSums((0, 1, 2)): 1.5}
    question = ReplanQuestion(drifted_profile(PROFILE, planned().plan, ratios), REQUEST, planned(), 100, 1.0)
    asked = json.dumps(encode(question, infinity_as_text=True))
    assert decode(ReplanQuestion, json.loads(asked), "question") == question
    command = [sys.executable, "-m", "hetero_mpi.training.replan"]
    result = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert decode(ReplanAnswer, json.loads(result.stdout), "answer") == answer(question)
