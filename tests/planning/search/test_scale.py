"""Many ranks, ranks that differ by a measurement's noise, the order among equally good plans, and what makes a model fit."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.decide import decide, has_fitting_plan
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.decision.shortage import closest_split
from hetero_mpi.planning.memory import StageMode, stage_memory
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import is_packed, with_adapters
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.errors import UserError
from tests.planning.search.pipeline_bound import pipeline_bound_s
from tests.support.planning_samples import SEQUENCE, make_model, make_profile, renumbered
from tests.support.seeds import seeds

pytestmark = pytest.mark.slow  # plans of many ranks

EQUAL = 1 + 1e-9


def noisy(profile: ClusterProfile, seed: int, noise: float = 0.05) -> ClusterProfile:
    """Every curve and link times a factor of its own."""
    draw = random.Random(seed)

    def curve(exact: Curve) -> Curve:
        by = draw.uniform(1 - noise, 1 + noise)
        return replace(exact, seconds=tuple(s * by for s in exact.seconds))

    devices = tuple(
        replace(d, layers={k: LayerTimes(curve(t.forward_s), curve(t.backward_s)) for k, t in d.layers.items()})
        for d in profile.devices
    )
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s * draw.uniform(1 - noise, 1 + noise)) for link in profile.links
    )
    return replace(profile, devices=devices, links=links)


def on_hosts(profile: ClusterProfile, per_host: int) -> ClusterProfile:
    """Consecutive ranks share a host; links inside are a hundred times as fast."""
    host = [rank // per_host for rank in range(len(profile.devices))]
    devices = tuple(replace(d, host=f"host{host[d.rank]}") for d in profile.devices)
    links = tuple(
        replace(link, same_host=True, latency_s=link.latency_s / 100, bytes_per_s=link.bytes_per_s * 100)
        if host[link.source] == host[link.destination]
        else link
        for link in profile.links
    )
    return replace(profile, devices=devices, links=links)


def many(seed: int = 0) -> tuple[ClusterProfile, PlanRequest]:
    """Six hosts of four like ranks, three speeds; 30 blocks."""
    slowness = [speed for speed in (1, 4, 1, 2, 2, 4) for _ in range(4)]
    profile = on_hosts(make_profile(slowness, make_model(30), latency_s=0.05, bytes_per_s=1e4), 4)
    return noisy(profile, seed), PlanRequest(48, SEQUENCE, (1, 2), recompute_choices=(False, True))


@pytest.mark.slow
def test_a_plan_for_many_noisy_ranks_is_simulated_with_their_own_figures_and_repeatable() -> None:
    profile, request = many()
    report = make_plan(profile, request)
    assert report == make_plan(profile, request)
    assert report.predicted_step_s == simulate(report.plan, profile).step_s
    assert all(m.peak_bytes <= m.usable_bytes for m in report.memory)
    bound_s = pipeline_bound_s(profile, request)
    assert (
        fluid_bound_s(profile, request) == report.bound_step_s <= bound_s <= report.predicted_step_s <= 1.35 * bound_s
    )


@pytest.mark.slow
def test_many_noisy_ranks_numbered_anew_give_the_same_plan() -> None:
    profile, request = many(1)
    other = renumbered(profile, random.Random(1).sample(range(24), 24))
    # Which of several alike ranks is used depends on their numbers; what the plan costs, within their noise only.
    assert make_plan(other, request).predicted_step_s == pytest.approx(
        make_plan(profile, request).predicted_step_s, 0.05
    )


@seeds(6, 2)
def test_equal_ranks_measured_with_noise_stand_in_their_own_order(seed: int) -> None:
    profile = noisy(make_profile([1.0] * 4, make_model(10), latency_s=0.01), seed, noise=0.003)
    request = PlanRequest(32, SEQUENCE, (1,))
    fastest = make_plan(profile, request)
    report = make_plan(profile, replace(request, indifference=0.005))
    assert [stage.ranks[0] for stage in report.plan.pipelines[0].stages] == list(
        range(len(report.plan.pipelines[0].stages))
    )
    assert report.predicted_step_s <= 1.005 * fastest.predicted_step_s
    assert report.predicted_step_s == simulate(report.plan, profile).step_s


def test_order_is_not_preferred_to_more_than_the_indifference() -> None:
    profile = make_profile((4.0, 1.0), make_model(8), latency_s=1.0, memory_bytes=(10_000_000, 60_000))
    request = PlanRequest(8, SEQUENCE, (1,))
    fastest = make_plan(profile, request)
    report = make_plan(profile, replace(request, indifference=0.005))
    assert fastest.predicted_step_s <= report.predicted_step_s <= 1.005 * fastest.predicted_step_s


@pytest.mark.parametrize("pipelines", [1, 3])
def test_all_ranks_are_used_when_none_may_idle(pipelines: int) -> None:
    profile = on_hosts(make_profile([1.0, 1.0, 30.0] * 3, make_model(12), latency_s=0.01), 3)
    report = make_plan(profile, PlanRequest(16, SEQUENCE, (1,), allow_idle=False, max_pipelines=pipelines))
    assert sum(len(pipeline.stages) for pipeline in report.plan.pipelines) == 9 and not report.idle


def test_tables_hold_what_stage_memory_counts() -> None:
    """Also where two kinds of blocks alternate."""
    model = make_model(7, tied=True)
    wide = replace(model.layers[1], kind="wide", activation_bytes_per_token=700.0, parameter_bytes=3000)
    model = replace(model, layers=tuple(wide if i in (2, 4, 6) else x for i, x in enumerate(model.layers)))
    memory = MemoryModel(replace(make_profile((1.0,)), model=model), PlanRequest(4, 30, (1,)))
    for recompute, (a, b) in itertools.product((False, True), itertools.combinations(range(10), 2)):
        if b <= len(model.layers):
            parts = stage_memory(model, a, b, 30, 4, StageMode(recompute))
            fixed, each = memory.stage_bytes(*memory.every, 1, StageMode(recompute))
            assert fixed[a, b] + 4 * each[a, b] == parts.total, (a, b, recompute)


def test_pipeline_bound_by_hand() -> None:
    """Two blocks of 3 s over three ranks: whole blocks forbid less than one each; filling makes the second wait."""
    profile = make_profile((1.0, 1.0, 1.0))
    request = PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    work = 4 * 3 * 2.6
    speeds = 1 + 3 / 4 + 9 / 16
    assert pipeline_bound_s(profile, request) == pytest.approx(work / speeds)
    deep = PlanRequest(4000, SEQUENCE, (1,), memory_reserve=0.0)
    assert pipeline_bound_s(profile, deep) == pytest.approx(4000 * 3.0)
    assert fluid_bound_s(profile, deep) == pytest.approx(4000 * 3 * 2.6 / 3)


def remedies_of(profile: ClusterProfile, request: PlanRequest) -> tuple[str, list[str]]:
    with pytest.raises(UserError) as caught:
        make_plan(profile, request)
    message = str(caught.value)
    return message, [line.strip() for line in message.partition("What would make it fit")[2].splitlines()[1:]]


def test_recompute_adapters_and_four_bits_are_suggested_where_they_help() -> None:
    request = PlanRequest(8, SEQUENCE, (1,), schedule="1f1b", memory_reserve=0.0)
    profile = make_profile((1.0, 1.0), make_model(6), memory_bytes=(56_000, 56_000))
    _, lines = remedies_of(profile, request)
    assert any('train.recompute = "auto"' in line for line in lines)
    make_plan(profile, replace(request, recompute_choices=(False, True)))
    packed = next(line for line in lines if 'model.quantization = "nf4" and adapter.method = "lora"' in line)
    assert "estimated" in packed
    make_plan(replace(profile, model=with_adapters(profile.model, packed=True)), request)


def test_when_no_change_alone_helps_several_together_are_tried() -> None:
    request = PlanRequest(8, SEQUENCE, (8,), memory_reserve=0.0)
    profile = make_profile((1.0,), make_model(12), memory_bytes=40_000)
    _, lines = remedies_of(profile, request)
    assert len(lines) == 1 and lines[0].startswith('together: train.recompute = "auto", train.micro_batch = 1')
    easier = replace(request, micro_batch_choices=(1,), recompute_choices=(False, True))
    length = (
        int(lines[0].partition("data.sequence_length = ")[2].split()[0]) if "sequence_length" in lines[0] else SEQUENCE
    )
    model = with_adapters(profile.model, packed=True) if "nf4" in lines[0] else profile.model
    make_plan(replace(profile, model=model), replace(easier, sequence_length=length))
    with pytest.raises(UserError):
        make_plan(profile, easier)


def test_adapters_over_four_bits_cost_what_they_should() -> None:
    model = make_model(3)
    assert model.trained_whole and not is_packed(model)
    packed = with_adapters(model, packed=True)
    assert not packed.trained_whole and is_packed(packed)
    block = packed.layers[1]
    assert (block.trainable_parameters, block.parameter_bytes) == (4, math.ceil(0.5625 * 400) + 16)
    assert packed.layers[0].trainable_parameters == packed.layers[-1].trainable_parameters == 0


def test_a_rank_that_fits_only_with_recompute_is_told_so() -> None:
    profile = make_profile((1.0, 1.0), make_model(4), memory_bytes=(10_000_000, 30_600))
    request = PlanRequest(8, SEQUENCE, (2,), memory_reserve=0.0)
    report = make_plan(profile, request)
    assert [idle.rank for idle in report.idle] == [1]
    with_it = make_plan(profile, replace(request, recompute_choices=(False, True)))
    told = report.idle[0].reason
    if with_it.idle:
        assert told.endswith(", nor with recompute")
    else:
        assert 'with train.recompute = "auto" it fits' in told


@pytest.mark.parametrize("seed", range(4))
def test_what_just_fits_is_planned(seed: int) -> None:
    """As much memory as the split that leaves most free needs, not a byte more."""
    profile, request = many(seed)
    request = replace(request, memory_reserve=0.0, micro_batch_choices=(1,))
    tiny = replace(profile, devices=tuple(replace(d, memory_bytes=5000) for d in profile.devices))
    short = closest_split(tiny, request)
    assert short.shortage_bytes > 0 and not has_fitting_plan(tiny, request) and decide(tiny, request) is None
    enough = 5000 + math.ceil(short.shortage_bytes)
    just = replace(profile, devices=tuple(replace(d, memory_bytes=enough) for d in profile.devices))
    assert has_fitting_plan(just, request) and decide(just, request) is not None
