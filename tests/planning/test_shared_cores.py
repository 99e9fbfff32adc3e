"""CPU ranks whose threads share the cores of their host: no plan computes more than the cores do, and few ranks may be enough."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.analysis.calibration import drifted_profile
from hetero_mpi.planning.contention import slowness, spread_out, while_computing
from hetero_mpi.planning.decision.alternatives import losses, what_ifs
from hetero_mpi.planning.decision.decide import best_alone, decide, time_alone
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.decision.rules import request_differences
from hetero_mpi.planning.device_times import whole_model_s
from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.report.plan_text import headline
from hetero_mpi.training.replan import ReplanQuestion, answer
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_profile, on_cores
from tests.support.seeds import seeds

REQUEST = PlanRequest(12, SEQUENCE, (1, 2), max_pipelines=3, indifference=0.03)


def noisy(seed: int, cores: float) -> ClusterProfile:
    """Three ranks of one host that differ as measured ranks do, with an optimizer and overheads."""
    draw = random.Random(seed)
    profile = on_cores(cores, [draw.uniform(0.9, 1.1) for _ in range(3)], optimizer_s_per_parameter=1e-4)
    devices = tuple(
        replace(device, forward_overhead_s=draw.uniform(0, 0.1), backward_overhead_s=draw.uniform(0, 0.1))
        for device in profile.devices
    )
    return replace(profile, devices=devices)


def work_s(plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of processors in a step of the plan's ranks, by the profile as it is."""
    own = replace(profile, hosts=())
    return sum(outlined(plan, own).busy_s[rank] * profile.devices[rank].threads for rank in plan.ranks)


def parallel(ranks: Sequence[int], layers: int = 4, batch: int = 12) -> Plan:
    """Every rank by itself with as much of the batch."""
    pipelines = (PipelinePlan((StagePlan((rank,), 0, layers, 0),), 1, batch // len(ranks)) for rank in ranks)
    return Plan(tuple(pipelines), batch, SEQUENCE, layers)


@seeds(20, 6)
def test_no_plan_does_more_work_than_the_cores_can(seed: int) -> None:
    """Neither the planner's own nor one given by hand, and no bound is above what was found."""
    draw = random.Random(seed)
    cores = draw.choice((1.0, 1.5, 2.0, 2.5))
    profile = noisy(seed, cores)
    request = replace(REQUEST, allow_idle=draw.random() < 0.7, max_pipelines=draw.choice((1, 3)))
    report = make_plan(profile, request)
    given = complete_plan(parallel((0, 1, 2)), profile, replace(request, max_pipelines=3))
    for one in (report, given):
        assert one.predicted_step_s >= work_s(one.plan, profile) / cores * (1 - 1e-9)
        assert one.bound_step_s <= one.predicted_step_s * (1 + 1e-9)
        assert simulate(one.plan, profile).step_s == pytest.approx(one.predicted_step_s)
    assert given.predicted_step_s == pytest.approx(3 / cores * outlined(given.plan, replace(profile, hosts=())).step_s)


def test_the_bound_knows_the_cores() -> None:
    """Three like ranks on two cores do no more than two."""
    request = replace(REQUEST, micro_batch_choices=(1,))
    shared, two = on_cores(2, (1.0,) * 3), make_profile((1.0,) * 2)
    assert make_plan(shared, request).bound_step_s == pytest.approx(make_plan(two, request).bound_step_s, rel=0.002)


def test_as_many_ranks_compute_as_there_are_cores() -> None:
    report = make_plan(on_cores(2, (1.0, 1.0, 1.0)), REQUEST)
    assert report.plan.ranks == [0, 1]
    assert report.predicted_step_s == pytest.approx(make_plan(make_profile((1.0, 1.0)), REQUEST).predicted_step_s)
    (idle,) = report.idle
    assert idle.rank == 2 and idle.reason.startswith(
        ("the best plan found with 3 ranks takes", "using 3 ranks would not shorten")
    )
    assert not any("less than one core" in reason for reason in report.reasons)


def test_more_ranks_than_cores_compute_where_that_is_clearly_faster() -> None:
    """One core and a half leaves half a core idle where one rank computes; memory may ask for more ranks, too."""
    profile = on_cores(1.5, (1.0, 1.0))
    report = make_plan(profile, REQUEST)
    assert report.plan.ranks == [0, 1]
    single = best_alone(profile, REQUEST)
    assert single is not None and single.step_s is not None
    assert report.predicted_step_s == pytest.approx(single.step_s / 1.5)
    assert make_plan(profile, replace(REQUEST, indifference=0.4)).plan.ranks == [0]
    short = on_cores(2, (1.0,) * 3, memory_bytes=30_000)
    assert decide(replace(short, hosts=()), replace(REQUEST, max_pipelines=1)) is not None
    found = decide(short, replace(REQUEST, max_pipelines=1))
    assert found is not None and len(found.plan.ranks) == 3


def test_the_planner_uses_all_ranks_where_none_may_idle() -> None:
    report = make_plan(on_cores(1, (1.0, 1.0)), replace(REQUEST, allow_idle=False))
    assert report.plan.ranks == [0, 1]
    slower = replace(on_cores(1, (1.0, 30.0)), links=make_profile((1.0, 1.0), latency_s=0.1).links)
    slower = replace(slower, links=tuple(replace(link, same_host=True) for link in slower.links))
    forced = make_plan(slower, replace(REQUEST, allow_idle=False))
    assert "a single rank would be faster: rank 0" in headline(forced) and headline(forced).endswith(
        "x): plan.allow_idle = false"
    )
    free = make_plan(slower, REQUEST)
    assert free.plan.ranks == [0] and headline(free).endswith(": only rank 0, as the other ranks would slow it down")


@pytest.mark.slow
def test_a_rank_alone_trains_alone_where_its_larger_micro_batches_make_it_faster() -> None:
    """Of a batch of 12 every rank of three gets 4 at the most; alone it may take all, here at less than a third of the price."""
    profile = make_profile((1.0, 1.0, 1.0), latency_s=0.5)
    flat = {
        kind: replace(
            times,
            forward_s=replace(times.forward_s, tokens=(SEQUENCE, 120), seconds=times.forward_s.seconds * 2),
            backward_s=replace(times.backward_s, tokens=(SEQUENCE, 120), seconds=times.backward_s.seconds * 2),
        )
        for kind, times in profile.devices[0].layers.items()
    }
    profile = replace(profile, devices=tuple(replace(device, layers=flat) for device in profile.devices))
    request = replace(REQUEST, alone_micro_batch_choices=(1, 2, 4, 12))
    report = make_plan(profile, request)
    assert report.plan.ranks == [0] and report.plan.pipelines[0].micro_batch == 12
    assert not request_differences(report.plan, request) and report.bound_step_s <= report.predicted_step_s
    assert report.alone is not None and report.alone.step_s == report.predicted_step_s
    assert all(idle.reason.startswith("the best plan found with 3 ranks takes") for idle in report.idle)
    for schedule in ("interleaved", "gpipe", "1f1b"):
        assert make_plan(profile, replace(request, schedule=schedule)).plan.ranks == [0]
    assert all(
        one.step_s is None or one.step_s <= report.predicted_step_s for one in what_ifs(report, profile, request)
    )


def test_threads_of_gpus_do_not_count_and_those_of_others_all_do() -> None:
    profile = on_cores(2, (1.0, 1.0, 1.0))
    with_gpu = replace(profile, devices=(replace(profile.devices[0], backend="cuda"), *profile.devices[1:]))
    assert slowness(with_gpu, (0, 1, 2)) == {} and spread_out(with_gpu) == [0, 1, 2]
    assert while_computing(with_gpu, (0, 1, 2)) is with_gpu
    assert make_plan(with_gpu, REQUEST).plan.ranks == [0, 1, 2]
    threaded = replace(profile, devices=tuple(replace(device, threads=2) for device in profile.devices))
    assert slowness(threaded, (0, 2)) == {0: 2.0, 2: 2.0} and spread_out(threaded) == [0]
    assert slowness(on_cores(1, (1.0,), threads=4), (0,)) == {0: 4.0}, "more threads than cores, alone"
    assert make_plan(threaded, REQUEST).plan.ranks == [0]


@pytest.mark.slow
def test_hosts_share_for_themselves() -> None:
    """Three ranks on two cores beside a host with as many cores as ranks, and one of which nothing is known."""
    profile = make_profile((1.0,) * 6)
    hosts = ("a", "b", "a", "b", "a", "c")
    devices = tuple(replace(device, host=host) for device, host in zip(profile.devices, hosts, strict=True))
    known = tuple(HostProfile(name, 10**9, "made up", cores=2.0) for name in "ab")
    profile = replace(profile, devices=devices, hosts=known)
    assert slowness(profile, range(6)) == {0: 1.5, 2: 1.5, 4: 1.5}
    assert slowness(profile, (0, 1, 3, 4, 5)) == {} and spread_out(profile) == [0, 1, 2, 3, 5]
    busy = while_computing(profile, range(6))
    assert while_computing(busy, range(6)) is busy, "what ranks share is counted once"
    assert whole_model_s(busy, busy.devices[2]) == pytest.approx(1.5 * whole_model_s(profile, profile.devices[2]))
    assert busy.devices[1] == profile.devices[1]
    request = replace(REQUEST, global_batch=10, micro_batch_choices=(2,), max_pipelines=5)
    found = decide(profile, request)
    assert found is not None and found.plan.ranks == [0, 1, 2, 3, 5]


def grouped(profile: ClusterProfile) -> ClusterProfile:
    """Layers that ranks can share, with free sums."""
    model = replace(make_model(), heads=6)
    hosts = tuple(replace(host, sum_bytes_per_s=1e12) for host in profile.hosts)
    return replace(profile, model=model, hosts=hosts)


def test_ranks_with_less_than_a_core_form_no_group() -> None:
    request = PlanRequest(1, SEQUENCE, (1,), groups=True)
    roomy, shared = grouped(on_cores(3, (1.0,) * 3)), grouped(on_cores(2, (1.0,) * 3))
    found = make_plan(roomy, request).plan
    assert found.leader_of and len(found.ranks) == 3
    crowded = make_plan(shared, request).plan
    assert len(crowded.ranks) == 2 and crowded.leader_of, "two ranks have a core each"
    everyone = make_plan(shared, replace(request, allow_idle=False)).plan
    assert len(everyone.ranks) == 3 and not everyone.leader_of
    given = complete_plan(found, shared, request)
    assert given.predicted_step_s >= work_s(found, shared) / 2
    remark = "ranks of stage 0 have less than one core per thread: they wait longer for each other than predicted"
    assert remark in given.reasons and remark not in complete_plan(found, roomy, request).reasons


@pytest.mark.slow
def test_what_is_asked_of_a_plan_agrees_with_its_prediction(tmp_path: Path) -> None:
    """Questions, replanning and the times of single actions."""
    profile = noisy(3, 2)
    save_profile(profile, tmp_path / "profile.toml")
    assert load_profile(tmp_path / "profile.toml") == profile
    report = make_plan(profile, REQUEST)
    lost = losses(report, report, profile, REQUEST)
    assert lost.bound_s <= report.predicted_step_s and lost.choice == 0
    others = [one for one in what_ifs(report, profile, REQUEST) if one.change.startswith("without rank")]
    assert all(one.step_s is not None and one.step_s >= report.predicted_step_s * 0.97 for one in others)
    three = complete_plan(parallel((0, 1, 2)), profile, REQUEST)
    ratios = dict.fromkeys(range(3), 1.0)
    again = answer(ReplanQuestion(drifted_profile(profile, three.plan, ratios), REQUEST, three, 100, 0.0))
    assert again.prospect.now_s == pytest.approx(three.predicted_step_s)
    assert again.prospect.then_s <= again.prospect.now_s
    costs = Durations(three.plan, profile)
    own = Durations(three.plan, replace(profile, hosts=()))
    for op in (Op.F, Op.B, Op.STEP):
        assert costs.cost_of(Action(op, 0, 0))[0] == pytest.approx(1.5 * own.cost_of(Action(op, 0, 0))[0])


def test_a_rank_alone_has_the_cores_for_itself() -> None:
    profile = on_cores(2, (1.0, 1.0, 1.0))
    assert time_alone(profile, REQUEST, 2).step_s == pytest.approx(12 * whole_model_s(profile, profile.devices[2]))


def test_a_host_without_cores_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    save_profile(on_cores(0.0, (1.0,), threads=0), path)
    with refuses("file.invalid", "threads = 0", "hosts[0].cores"):
        load_profile(path)
