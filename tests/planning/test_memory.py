"""Predicted memory: by hand, and against counting along the lists of actions."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.job.load import load_job
from hetero_mpi.job.plan_request import build_plan_request
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.memory import StageMode, stage_memory
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.owners import owned_state_bytes
from hetero_mpi.planning.schedule import Action, Op, holdings, schedule_of
from hetero_mpi.planning.types.cluster_changes import with_copies
from hetero_mpi.planning.types.plan import HostMemory
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import profile_from_dict, profile_to_dict
from tests.support.errors import refuses
from tests.support.planning_samples import JOB_TOML, SEQUENCE, make_model, make_plan_of, make_profile, random_plan


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def test_micro_batches_in_flight_are_counted() -> None:
    assert holdings(actions("0F0 0F1 0B0 0F2 0F3 0B1")) == ((3, 0),)
    for depth, count, expected in ((2, 4, 3), (3, 4, 4), (9, 4, 4), (0, 4, 1)):
        schedule = schedule_of(make_plan_of((0, 2, 4), (0, 1), count, (depth, 0)), make_model())
        assert holdings(schedule[0]) == ((expected, 0),)


def test_memory_by_hand() -> None:
    """Stage 0: embedding + block, 1,400 parameters; two micro-batches of 10 tokens in flight; 1,000-byte messages."""
    plan = make_plan_of((0, 2, 4), (1, 0), 4)
    profile = make_profile((1.0, 1.0), memory_bytes=(50_000, 40_000))
    by_rank = {m.rank: (m.peak_bytes, m.usable_bytes) for m in predict_memory(plan, profile, reserve=0.25)}
    fixed = 1400 * 4 + 1400 * 12 + 50 * 10 + 2 * 2 * 1000
    assert by_rank == {1: (fixed + 2 * 2 * 300 * 10, 30_000), 0: (fixed + 1 * 2 * 300 * 10, 37_500)}
    again = stage_memory(profile.model, 2, 4, 10, in_flight=3, mode=StageMode(recompute=True))
    # The block keeps its input, the head all it needs; one block is computed again at a time.
    assert (again.activations, again.workspace) == (3 * (1000 + 3000), 500 + 300 * 10)


def test_copies_in_host_memory_are_counted_where_ranks_compute_in_it() -> None:
    """2,800 trained parameters, all on one rank or 1,400 on each of two: 24 bytes of copies for each beside 16 of their own."""
    profile = make_profile((1.0, 1.0), memory_bytes=100_000, latency_s=100.0)
    devices = tuple(replace(device, shares_host_memory=True) for device in profile.devices)
    ours = replace(profile, devices=devices)
    request = PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    copying = replace(request, copy_bytes_per_trainable_parameter=24.0)
    alone, spread = make_plan(ours, request), make_plan(ours, copying)
    one = replace(ours, devices=devices[:1], links=())
    fitting = make_plan(replace(one, devices=(replace(devices[0], memory_bytes=200_000),)), copying)
    assert fitting.memory[0].peak_bytes - alone.memory[0].peak_bytes == 24 * 2800
    assert any("24 bytes per trained parameter)" in reason for reason in fitting.reasons)
    assert [len(memory) for memory in (alone.memory, spread.memory)] == [1, 2], "what fitted one rank needs two now"
    assert all(m.peak_bytes <= 100_000 for m in spread.memory)
    # A run that has no room for copies goes without; so does its plan.
    without = make_plan(one, copying)
    assert without.memory == alone.memory and any("no plan leaves memory for copies" in r for r in without.reasons)
    assert with_copies(profile, copying) is profile and with_copies(ours, request) is ours


@pytest.mark.parametrize("hosts", [(HostProfile("box", 100_000, ""),), ()])
def test_copies_of_a_gpu_and_of_a_processor_share_the_hosts_memory(hosts: tuple[HostProfile, ...]) -> None:
    """The processor is the faster one: without copies it takes all, which with 67,200 bytes of copies does not fit."""
    profile = make_profile((1.0, 9.0), memory_bytes=100_000)
    cpu, gpu = (replace(device, host="box") for device in profile.devices)
    ours = replace(profile, devices=(replace(cpu, shares_host_memory=True), gpu), hosts=hosts)
    request = PlanRequest(4, SEQUENCE, (1,), memory_reserve=0.0)
    copying = replace(request, copy_bytes_per_trainable_parameter=24.0)
    report = make_plan(ours, copying)
    held = {memory.rank: memory.peak_bytes for memory in report.memory}
    assert 1 in held and held.get(0, 0) + 24 * 2800 <= 100_000, held
    assert any("24 bytes per trained parameter)" in reason for reason in report.reasons)
    assert make_plan(ours, request).memory[0].peak_bytes + 24 * 2800 > 100_000, "or the test shows nothing"
    # On another host than the GPU's there is room for its own copies beside it; where nothing fits, the run goes without.
    apart = replace(ours, devices=(replace(ours.devices[0], host="other"), gpu), hosts=())
    assert with_copies(apart, copying).devices[0].memory_bytes == 100_000 - math.ceil(24 * 100_000 / (16 + 24))
    tight = replace(ours, devices=(ours.devices[0], replace(gpu, memory_bytes=1000)))
    assert any("no plan leaves memory for copies" in reason for reason in make_plan(tight, copying).reasons)


def test_what_a_job_asks_for_its_copies(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for more, versions, bytes_each in (
        ("", 0, 0),
        ("[checkpoint]\nevery = 5", 0, 12),
        ("[checkpoint]\nevery = 5\nbackground = false", 0, 0),
        ("[checkpoint]\nevery = 5", 1, 36),  # under a supervisor: one of its own and one of others
        ("", 2, 48),  # where ranks outlive others
    ):
        path.write_text(f"{JOB_TOML}{more}")
        assert build_plan_request(load_job(path), 1, False, versions).copy_bytes_per_trainable_parameter == bytes_each


def test_a_rank_with_both_tied_ends_holds_their_matrix_once() -> None:
    """Its values and moments; the head has a gradient of its own."""
    tied, untied = make_model(tied=True), make_model(tied=False)
    both, apart = stage_memory(tied, 0, 4, 10, 1), stage_memory(untied, 0, 4, 10, 1)
    assert apart.parameters - both.parameters == 1000 * 4 - 1000 * 4
    assert (both.state, apart.state) == (1800 * 12, 2800 * 12)
    head, embedding = stage_memory(tied, 3, 4, 10, 1), stage_memory(tied, 0, 3, 10, 1)
    assert (head.parameters, head.state) == (1000 * 8, 0)
    assert embedding == stage_memory(untied, 0, 3, 10, 1)
    assert both.parameters == head.parameters + embedding.parameters - 1000 * 4 and both.state == embedding.state


def test_what_is_deferred_counts_besides_what_is_in_flight() -> None:
    """Last of three stages: at most one micro-batch in flight, two put off beside it, three at the very end."""
    listed = actions("2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3")
    assert holdings(listed) == ((1, 2), (0, 3))


def counted_bytes(listed: tuple[Action, ...], kept: int, put_off: int) -> int:
    """The most bytes held for backward at any moment: F takes ``kept``, B or I gives it back, between I and W ``put_off``."""
    held = most = 0
    for action in listed:
        held += {Op.F: kept, Op.B: -kept, Op.I: put_off - kept, Op.W: -put_off}.get(action.op, 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(100))
def test_peaks_are_those_of_counting_along_the_lists(seed: int) -> None:
    plan, profile = random_plan(seed)
    model, schedule = profile.model, schedule_of(plan, profile.model)
    by_rank = {memory.rank: memory for memory in predict_memory(plan, profile, reserve=0.1)}
    owned = owned_state_bytes(plan, model)
    assert sum(owned.values()) == model.owned_bytes(0, len(model.layers)), "each number has one owner"
    for _, index, stage in plan.numbered:
        tokens = plan.pipelines[index].size(0) * plan.sequence_length
        layers = list(enumerate(model.layers))[stage.first : stage.last]
        inside = [layer.activation_bytes_per_token for number, layer in layers if 0 < number < plan.layers - 1]
        ends = [layer.activation_bytes_per_token for number, layer in layers if not 0 < number < plan.layers - 1]
        kept = sum(ends) + (100 * len(inside) if stage.recompute else sum(inside))  # a recomputed block keeps its input
        deferred = sum(layer.deferred_bytes_per_token for _, layer in layers)
        held = counted_bytes(schedule[stage.ranks[0]], math.ceil(kept * tokens), math.ceil(deferred * tokens))
        parts = stage_memory(model, stage.first, stage.last, tokens, 0, stage)
        found = by_rank[stage.ranks[0]]
        foreign = model.owned_bytes(stage.first, stage.last) - owned[stage.ranks[0]]
        assert found.peak_bytes == parts.total + held - math.floor(foreign)
        assert found.usable_bytes == int(0.9 * profile.devices[stage.ranks[0]].memory_bytes)


def test_ranks_that_compute_in_one_hosts_memory_fit_together_or_not_at_all() -> None:
    """Ranks 0 and 1 compute in the memory of host alpha, rank 2 on a GPU in it, rank 3 alone in beta's; gamma is idle."""
    profile = make_profile([1.0] * 5)
    names = ("alpha", "alpha", "alpha", "beta", "gamma")
    devices = tuple(
        replace(device, host=name, shares_host_memory=device.rank != 2)
        for device, name in zip(profile.devices, names, strict=True)
    )
    hosts = tuple(
        HostProfile(name, 1000 * size, "made up") for name, size in (("alpha", 100), ("gamma", 50), ("beta", 70))
    )
    profile = replace(profile, devices=devices, hosts=hosts)
    plan = make_plan_of((0, 1, 2, 3, 4), (2, 0, 3, 1), 4)
    peak = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile)}
    assert predict_hosts(plan, profile, reserve=0.5) == (
        HostMemory("alpha", peak[0] + peak[1], 50_000),
        HostMemory("beta", peak[3], 35_000),
    )
    assert predict_hosts(plan, replace(profile, hosts=hosts[1:2])) == ()


# ------------------------------------------------------------------------------------- a device that keeps more than others
def keeping_more(ratios: dict[int, float], ranks: int = 4) -> ClusterProfile:
    """Like ranks with two blocks for each; those in ``ratios`` keep so many times as much of a block."""
    profile = make_profile([1.0] * ranks, make_model(2 * ranks), 60_000)
    return replace(
        profile, devices=tuple(replace(d, activation_ratio=ratios.get(d.rank, 1.0)) for d in profile.devices)
    )


def test_a_rank_that_keeps_more_is_predicted_by_itself() -> None:
    plan = make_plan_of((0, 3, 5, 7, 10), (0, 1, 2, 3), 1)
    plain, more = predict_memory(plan, keeping_more({})), predict_memory(plan, keeping_more({1: 4.0}))
    # Two blocks keep three times 300 bytes more of each token, and backward holds the gradients of one.
    assert more[1].peak_bytes - plain[1].peak_bytes == 3 * 900 * SEQUENCE
    assert [more[rank] for rank in (0, 2, 3)] == [plain[rank] for rank in (0, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, pipelines", [(4, 1), (4, 4), (12, 1), (12, 4)])
def test_the_others_get_what_fits_where_one_rank_keeps_more(ranks: int, pipelines: int) -> None:
    """Searched exactly, along lines and by columns. Were all ranks taken to keep as much, nothing would fit."""
    request = PlanRequest(16, SEQUENCE, (1, 2), max_pipelines=pipelines, memory_reserve=0.0)
    profile = keeping_more({1: 4.0}, ranks)
    report = make_plan(profile, request)
    assert all(one.peak_bytes <= one.usable_bytes for one in predict_memory(report.plan, profile))
    fullest = keeping_more(dict.fromkeys(range(ranks), 4.0), ranks)
    assert any(one.peak_bytes > one.usable_bytes for one in predict_memory(report.plan, fullest))
    with refuses("memory.exceeded"):
        make_plan(fullest, request)


def test_a_ratio_is_written_read_and_never_below_one() -> None:
    profile = keeping_more({1: 4.0})
    assert profile_from_dict(profile_to_dict(profile)) == profile
    with refuses("file.invalid"):
        profile_from_dict(profile_to_dict(keeping_more({1: 0.5})))
