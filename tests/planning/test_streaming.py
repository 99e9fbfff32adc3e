"""Streamed stages in plans: what they cost, what they take, and when the planner chooses them."""

import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.analysis.calibration import drifted_profile
from hetero_mpi.planning.decision import decide
from hetero_mpi.planning.decision.explain import offload_texts
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.durations import Durations, duration, finished_layers_s
from hetero_mpi.planning.memory import OFFLOADED_LAYER_COUNT, StageMode, host_state_bytes, stage_memory
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.training.replan import ReplanQuestion, answer
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_device, make_model, make_profile

COPY_S = 0.5
"""Seconds in which a block's frozen weights are copied."""


def adapters(model: ModelCost) -> ModelCost:
    """``model`` with a tenth of every block trained and nothing else."""

    def frozen(layer: LayerCost) -> LayerCost:
        return replace(layer, trainable_parameters=layer.parameters // 10 if layer.kind == "block" else 0)

    return replace(model, layers=tuple(map(frozen, model.layers)))


def cluster(ranks: int = 2, blocks: int = 8, **device: object) -> ClusterProfile:
    """Blocks have 1,440 bytes that are not trained and take 1 s forward for 10 tokens."""
    copies = {"host_to_device_bytes_per_s": 1440 / COPY_S, **device}
    return of_devices([make_device(rank, **copies) for rank in range(ranks)], adapters(make_model(blocks)))


def of_devices(devices: list[DeviceProfile], model: ModelCost) -> ClusterProfile:
    return replace(make_profile([1.0] * len(devices), model), devices=tuple(devices))


def plan_of(profile: ClusterProfile, *stages: StagePlan, micro_batch: int = 4) -> Plan:
    return Plan((PipelinePlan(stages, micro_batch, 8),), 8, SEQUENCE, len(profile.model.layers))


def seconds(profile: ClusterProfile, stage: StagePlan, op: Op) -> float:
    rest = StagePlan((1,), stage.last, len(profile.model.layers), 0)
    return duration(Action(op, 0, 0), plan_of(profile, stage, rest), profile)


def test_a_layer_takes_as_long_as_its_slices_or_the_next_copy() -> None:
    """Of two micro-batches: both forwards, then both backwards; of each two, one begins with two layers that are there."""
    profile = cluster()
    embedding_s = 4000 / (1440 / COPY_S)
    # Embedding (0.1 s a sequence) and two blocks (1 s), four sequences.
    for slices, size in ((None, 1), (2, 2)):
        stage = StagePlan((0,), 0, 3, 1, streamed=True, slice_sequences=slices)
        assert seconds(profile, stage, Op.F) == pytest.approx((embedding_s + max(COPY_S, 0.4) + 0.4) / 2 + 4 + 4), size
        # The second block's weights, then blocks with their forwards (1 + 2 s), and the embedding while nothing comes.
        assert seconds(profile, stage, Op.B) == pytest.approx(COPY_S / 2 + 12 + 12 + max(0.0, 1.2))
    slow = replace(profile, devices=tuple(replace(d, host_to_device_bytes_per_s=144.0) for d in profile.devices))
    stage = StagePlan((0,), 1, 4, 1, streamed=True)
    assert seconds(slow, stage, Op.F) == pytest.approx(((10 + 10 + 10 + 4) + (4 + 10 + 4)) / 2)
    one_by_one = replace(stage, warm_up=0)
    assert seconds(slow, one_by_one, Op.F) == pytest.approx(4 + 10 + 4)
    assert seconds(slow, replace(one_by_one, last=3), Op.F) == pytest.approx(4 + 4), "two layers stay there"


def test_slices_that_are_kept_are_not_repeated_and_take_their_activations() -> None:
    profile, found = cluster(), []
    rest = StagePlan((1,), 4, len(profile.model.layers), 0)
    for kept in range(5):
        stage = StagePlan((0,), 1, 4, 0, streamed=True, slice_sequences=1, kept_slices=kept)
        plan = plan_of(profile, stage, rest)
        memory = predict_memory(plan, profile)[0].peak_bytes
        found.append((seconds(profile, stage, Op.F), seconds(profile, stage, Op.B), memory))
    forward, backward, memory_bytes = zip(*found, strict=True)
    assert len(set(forward)) == 1
    # A slice of three blocks takes 3 s forward; the copy of the first block is waited for in all of them.
    assert [before - after for before, after in itertools.pairwise(backward)] == pytest.approx([3.0] * 4)
    block = profile.model.layers[1]
    each = 3 * SEQUENCE * (block.activation_bytes_per_token - block.boundary_bytes_per_token)
    grown = [after - before for before, after in itertools.pairwise(memory_bytes)]
    assert grown[:3] == pytest.approx([each] * 3)
    assert grown[3] == pytest.approx(each - SEQUENCE * block.activation_bytes_per_token), "none is made anew"


def test_a_streamed_stage_keeps_as_many_slices_as_fit() -> None:
    asked = request(streaming="shorter")
    kept, times = [], []
    for memory in (200_000, 220_000, 270_000):
        profile = heavy_cluster(memory)
        report = make_plan(profile, asked)
        stages = [stage for _, _, stage in report.plan.numbered if stage.streamed]
        assert all(one.peak_bytes <= one.usable_bytes for one in predict_memory(report.plan, profile, 0.05))
        kept.append(sum(stage.kept_slices * (stage.slice_sequences or 4) for stage in stages))
        times.append(report.predicted_step_s)
    assert 0 < kept[0] < kept[1] and kept[-1] == 0, "what fits as a whole is not streamed"
    assert times == sorted(times, reverse=True) and times[1] < 0.95 * times[0]


@pytest.mark.parametrize(
    ("carried", "others", "copy_s"),
    [(math.inf, 1, 10), (288, 1, 10), (144, 1, 20), (288, 3, 20), (144, 0, 10)],
    ids=["not known", "enough", "half", "half beside a faster one", "alone"],
)
def test_devices_that_stream_at_once_share_what_their_host_carries(carried: float, others: int, copy_s: float) -> None:
    """``others``: how many times as fast the other device copies by itself; 0: it streams nothing."""
    profile = cluster(host="box", host_to_device_bytes_per_s=144.0, device_to_host_bytes_per_s=144.0)
    faster = replace(profile.devices[1], host_to_device_bytes_per_s=144.0 * max(1, others))
    hosts = (HostProfile("box", 10**6, "its memory", copies_bytes_per_s=carried),)
    profile = replace(profile, devices=(profile.devices[0], faster), hosts=hosts)
    stages = StagePlan((0,), 1, 4, 0, streamed=True), StagePlan((1,), 4, 10, 0, streamed=others > 0)
    costs = Durations(plan_of(profile, *stages), profile)
    assert costs.cost_of(Action(Op.F, 0, 0))[0] == pytest.approx(4 + copy_s + 4)


def test_the_planner_knows_what_a_host_carries_at_once() -> None:
    asked, carried = request(micro_batch_choices=(1,)), 4000.0
    devices = [
        replace(device, host="box", host_to_device_bytes_per_s=carried) for device in heavy_cluster(200_000).devices
    ]
    free = of_devices(devices, heavy())
    limited = replace(free, hosts=(HostProfile("box", 10**9, "its memory", copies_bytes_per_s=carried),))
    before, after = make_plan(free, asked), make_plan(limited, asked)
    assert streamed_in(before.plan) == 2
    assert after.predicted_step_s == simulate(after.plan, limited).step_s > 1.2 * before.predicted_step_s
    assert simulate(before.plan, limited).step_s >= after.predicted_step_s
    if streamed_in(after.plan) == 2:
        assert any("copies limit it: 2.00 kB/s" in reason for reason in after.reasons), after.reasons


def test_copies_are_told_beside_what_ranks_compute_that_share_cores() -> None:
    """Two threads on half a core take four times as long, so that the copies hide behind them."""
    profile = cluster(host="box", backend="cpu", host_to_device_bytes_per_s=144.0)
    plan = plan_of(profile, StagePlan((0,), 0, 4, 1, streamed=True), StagePlan((1,), 4, 10, 0))
    crowded = replace(profile, hosts=(HostProfile("box", 10**6, "its memory", cores=0.5),))
    shares = []
    for one in (profile, crowded):
        (text,) = offload_texts(plan, one)
        shares.append(int(re.findall(r"(\d+) % of its time", text)[0]))
    assert shares[0] > 2 * shares[1] > 0, shares


def test_slices_of_a_resident_stage_follow_one_another() -> None:
    profile = cluster()
    whole, sliced = (StagePlan((0,), 1, 4, 1, slice_sequences=size) for size in (None, 3))
    for op in (Op.F, Op.B):
        assert seconds(profile, sliced, op) == pytest.approx(seconds(profile, whole, op))
    overhead = replace(profile, devices=tuple(replace(d, forward_overhead_s=0.25) for d in profile.devices))
    assert seconds(overhead, sliced, Op.F) == pytest.approx(seconds(overhead, whole, Op.F) + 0.25)


@pytest.mark.parametrize("streamed", [False, True])
def test_layers_are_finished_from_the_last_on(streamed: bool) -> None:
    profile = cluster()
    stage = StagePlan((0,), 0, 4, 1, streamed=streamed, slice_sequences=2)
    plan = plan_of(profile, stage, StagePlan((1,), 4, len(profile.model.layers), 0))
    action = Action(Op.B, 0, 1)
    ends = finished_layers_s(action, plan, profile)
    assert list(ends) == [3, 2, 1, 0]
    assert sorted(ends.values()) == list(ends.values())
    assert ends[0] == pytest.approx(duration(action, plan, profile))


def test_frozen_weights_of_few_layers_count() -> None:
    profile = cluster()
    model, tokens = profile.model, 40
    sliced = StageMode(streamed=True, slice_sequences=10)
    resident, streamed = (stage_memory(model, 1, 9, tokens, 2, mode) for mode in (StageMode(), sliced))
    assert resident.parameters - streamed.parameters == (8 - OFFLOADED_LAYER_COUNT) * 1440
    assert streamed.state == resident.state
    assert streamed.activations == 2 * 8 * 100 * tokens
    # One layer's activations and workspace of a slice, and outputs of all slices.
    assert streamed.workspace == (300 + 50) * 10 + 2 * 100 * tokens


def test_the_host_holds_what_gpus_stream() -> None:
    profile = cluster(memory_bytes=100_000)
    host = profile.devices[0].host
    profile = replace(profile, hosts=(HostProfile(host, 1_000_000, "all of it"),))
    plan = plan_of(profile, StagePlan((0,), 0, 5, 1, streamed=True), StagePlan((1,), 5, 10, 0))
    (there,) = predict_hosts(plan, profile)
    assert there.peak_bytes == 4000 + 4 * 1440
    small = replace(profile, hosts=(HostProfile(host, 5000, "little"),))
    request = PlanRequest(8, SEQUENCE, (4,))
    with refuses("memory.exceeded", host, "9.76 kB"):
        complete_plan(plan, small, request)


def heavy() -> ModelCost:
    """Adapters of 40 parameters on blocks of 32 kB, between an embedding and a head of 80 kB."""
    model = adapters(make_model(8))
    layers = (replace(layer, parameter_bytes=20 * layer.parameter_bytes) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def heavy_cluster(memory_bytes: int, ranks: int = 2) -> ClusterProfile:
    copies = {"memory_bytes": memory_bytes, "host_to_device_bytes_per_s": 1e6}
    return of_devices([make_device(rank, **copies) for rank in range(ranks)], heavy())


def request(**changes: object) -> PlanRequest:
    return replace(PlanRequest(8, SEQUENCE, (1, 2), recompute_choices=(False, True), streaming="auto"), **changes)


def streamed_in(plan: Plan) -> int:
    return sum(stage.streamed for pipeline in plan.pipelines for stage in pipeline.stages)


def test_a_pass_waits_for_its_layers_on_disk() -> None:
    """Of four blocks two are on disk; a pass takes as long as their reads where these take longer."""
    disk_s = 10.0
    host = HostProfile("box", 10**6, "its memory", disk_bytes_per_s=1440 / disk_s)
    profile = replace(cluster(blocks=12, host="box"), hosts=(host,))
    stage = StagePlan((0,), 1, 9, 0, streamed=True, on_disk=2)
    assert stage.disk_layers(14) == (3, 7) and replace(stage, on_disk=8).disk_layers(14) == tuple(range(1, 9))
    for rest in (StagePlan((1,), 9, 14, 0), StagePlan((1,), 9, 14, 0, streamed=True, on_disk=1)):
        readers = 1 + rest.on_disk
        costs = Durations(plan_of(profile, stage, rest), profile)
        # Each forward follows a backward, after which the first two blocks are there: 8 blocks of 4 s, and 2 reads.
        assert costs.cost_of(Action(Op.F, 0, 0))[0] == pytest.approx(max(32.0, 2 * readers * disk_s))
        # Backward begins with blocks 8 and 7, which are there.
        assert costs.cost_of(Action(Op.B, 0, 0))[0] == pytest.approx(max(96.0, readers * disk_s))
    few = replace(profile, hosts=(replace(host, disk_bytes_per_s=144.0 / 4),))
    ends = finished_layers_s(Action(Op.B, 0, 0), plan_of(few, replace(stage, warm_up=1), rest), few)
    assert ends[1] == pytest.approx(duration(Action(Op.B, 0, 0), plan_of(few, replace(stage, warm_up=1), rest), few))
    unknown = replace(profile, hosts=(replace(host, disk_bytes_per_s=None),))
    assert seconds(unknown, stage, Op.F) == seconds(profile, replace(stage, on_disk=0), Op.F)


def small_host(
    host_bytes: int, disk_bytes_per_s: float | None = 1e5, ranks: int = 2, **changes: object
) -> ClusterProfile:
    """Cards of one host, each of which has room for half of a model of 430 kB, most of it frozen."""
    profile = heavy_cluster(200_000, ranks)
    host = HostProfile("box", host_bytes, "its memory", disk_bytes_per_s=disk_bytes_per_s)
    devices = tuple(replace(device, host="box", **changes) for device in profile.devices)
    return replace(profile, devices=devices, hosts=(host,))


def test_layers_are_on_disk_where_the_host_has_no_memory_for_them() -> None:
    asked, found = request(micro_batch_choices=(1,)), []
    for memory in (600_000, 380_000, 350_000, 310_000):
        profile = small_host(memory)
        report = make_plan(profile, asked)
        on_disk = sum(stage.on_disk for _, _, stage in report.plan.numbered)
        assert all(one.peak_bytes <= one.usable_bytes for one in (*report.memory, *report.hosts))
        told = [reason for reason in report.reasons if "read from the disk in every pass at" in reason]
        assert bool(told) == bool(on_disk)
        found.append((on_disk, report.predicted_step_s))
        if on_disk:  # no more than need be
            fewer = [replace(s, on_disk=max(0, s.on_disk - 1)) for s in report.plan.pipelines[0].stages]
            pipeline = replace(report.plan.pipelines[0], stages=tuple(fewer))
            with refuses("memory.exceeded", "host box"):
                complete_plan(replace(report.plan, pipelines=(pipeline,)), profile, asked)
    counts, times = zip(*found, strict=True)
    assert counts[0] == 0 < counts[1] < counts[-1] and list(times) == sorted(times)


def test_without_a_disk_a_model_larger_than_the_host_is_refused() -> None:
    with refuses("memory.exceeded"):
        make_plan(small_host(250_000, None), request(micro_batch_choices=(1,)))


@pytest.mark.parametrize("disk", [None, 1e4])
def test_hosts_that_hold_a_part_each_stream_as_stages(disk: float | None) -> None:
    """Each of two hosts has memory for 260 of 430 kB: not for a copy of the model beside every card, but for a stage."""
    profile = heavy_cluster(260_000)
    devices = (replace(one, host_to_device_bytes_per_s=1e7) for one in profile.devices)
    hosts = (HostProfile(one.host, 260_000, "its memory", disk_bytes_per_s=disk) for one in profile.devices)
    links = (replace(link, bytes_per_s=500.0) for link in profile.links)  # so that two pipelines look faster
    profile = replace(profile, devices=tuple(devices), hosts=tuple(hosts), links=tuple(links))
    one, two = (make_plan(profile, request(max_pipelines=most)) for most in (1, 2))
    assert two.predicted_step_s <= one.predicted_step_s and streamed_in(two.plan)
    assert not any(stage.on_disk for _, _, stage in two.plan.numbered)
    (by_itself,) = (reason for reason in two.reasons if reason.startswith("a copy of the model on every rank"))
    assert by_itself.endswith("does not fit in memory") == (disk is None)


def test_a_processors_files_are_read_again_where_memory_does_not_keep_them() -> None:
    """What is on disk costs nothing but time there: all layers are in files."""
    asked, found = request(micro_batch_choices=(1,)), []
    for speed in (None, 1e9, 1e3):
        profile = small_host(200_000, speed, 1, shares_host_memory=True, backend="cpu")
        report = make_plan(profile, asked)
        on_disk = sum(stage.on_disk for _, _, stage in report.plan.numbered)
        assert streamed_in(report.plan) > 0 and bool(on_disk) == (speed is not None)
        found.append(report.predicted_step_s)
    assert found[0] == pytest.approx(found[1], rel=0.01) and found[2] > 1.5 * found[0]


@pytest.mark.parametrize("speed", [None, pytest.param(1e9, marks=pytest.mark.slow)])
def test_a_processor_keeps_slices_beside_the_pages_that_it_reads_only(speed: float | None) -> None:
    streamed = 0
    for memory in range(110_000, 270_000, 10_000):
        profile = small_host(memory, speed, 1, shares_host_memory=True, backend="cpu", memory_bytes=memory)
        small = (replace(one, parameter_bytes=min(one.parameter_bytes, 32_000)) for one in profile.model.layers)
        profile = replace(profile, model=replace(profile.model, layers=tuple(small)))
        report = make_plan(profile, request(micro_batch_choices=(2,)))
        (stage,) = report.plan.pipelines[0].stages
        if stage.streamed and stage.kept_slices:
            pages = host_state_bytes(profile.model, 0, 10, tuple(range(1, 9)))
            assert report.hosts[0].peak_bytes + pages <= report.hosts[0].usable_bytes
        streamed += stage.streamed
    assert streamed


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"on_disk": 5}, "on_disk = 5: must be 0 to 4 (blocks of an offloaded stage with adapters)"),
        ({"on_disk": -1}, "on_disk = -1: must be 0 to 4 (blocks of an offloaded stage with adapters)"),
        ({"on_disk": 1, "streamed": False}, "on_disk = 1: must be 0 to 0 (blocks of an offloaded stage with adapters)"),
        ({"kept_slices": 3, "slice_sequences": 2}, "kept_slices = 3: must be 0 to 2 (slices of an offloaded stage)"),
        ({"kept_slices": 1, "streamed": False}, "kept_slices = 1: must be 0 to 0 (slices of an offloaded stage)"),
    ],
)
def test_layers_on_disk_and_slices_of_a_plan_by_hand(changes: dict[str, object], told: str) -> None:
    profile = cluster()
    stage = StagePlan((0,), 0, 5, 0, **{"streamed": True, **changes})  # type: ignore[arg-type]
    plan = plan_of(profile, stage, StagePlan((1,), 5, 10, 0))
    with pytest.raises(UserError) as caught:
        complete_plan(plan, profile, PlanRequest(8, SEQUENCE, (4,)))
    assert str(caught.value) == f"plan: pipelines[0].stages[0].{told}"


def test_stages_are_streamed_where_nothing_fits_otherwise() -> None:
    roomy = make_plan(heavy_cluster(10_000_000), request())
    assert streamed_in(roomy.plan) == 0
    small = heavy_cluster(200_000)
    with refuses("memory.exceeded", "plan.offload"):
        make_plan(small, request(streaming="never"))
    report = make_plan(small, request())
    assert streamed_in(report.plan) > 0
    assert all(one.peak_bytes <= one.usable_bytes for one in predict_memory(report.plan, small, 0.05))
    assert any("streams" in reason and "copies" in reason for reason in report.reasons)
    assert 0 < report.bound_step_s <= report.predicted_step_s


def test_one_search_finds_the_slices_that_are_best() -> None:
    """As good as with a search for each size."""
    profile, asked = heavy_cluster(200_000), request(micro_batch_choices=(1, 2, 4))
    by_itself = [decide.decide(profile, replace(asked, micro_batch_choices=(size,))) for size in (1, 2, 4)]
    found = decide.decide(profile, asked)
    assert found is not None and streamed_in(found.plan) > 0
    assert found.step_s <= min(one.step_s for one in by_itself if one is not None)


def test_more_is_computed_at_once_where_time_is_not_in_proportion_to_tokens() -> None:
    """As experts have it: their weights pass the device's memory once, however many tokens they serve."""

    def planned(fixed: float) -> PipelinePlan:
        def curve(one_s: float) -> Curve:
            return Curve((SEQUENCE, 8 * SEQUENCE), (one_s, one_s * (8 - 7 * fixed)))

        small = heavy_cluster(300_000, ranks=1)
        layers = {**small.devices[0].layers, "block": LayerTimes(curve(1.0), curve(2.0))}
        profile = replace(small, devices=(replace(small.devices[0], layers=layers),))
        (pipeline,) = make_plan(profile, request(micro_batch_choices=(1, 2, 4, 8))).plan.pipelines
        assert pipeline.stages[0].streamed
        return pipeline

    at_once = [min(p.micro_batch, p.stages[0].slice_sequences or p.micro_batch) for p in map(planned, (0.0, 0.5))]
    assert at_once == [1, 2], "what is kept of one micro-batch of 2 spares a forward; of 4 there is no room for it"


def test_stages_are_streamed_where_a_step_gets_shorter() -> None:
    """The fast rank has room for few layers' weights."""
    devices = [
        make_device(0, 0.25, 200_000, host_to_device_bytes_per_s=1e6),
        make_device(1, 4.0, 10_000_000, host_to_device_bytes_per_s=1e6),
    ]
    profile = of_devices(devices, heavy())
    without, with_ = (make_plan(profile, request(streaming=how)) for how in ("never", "auto"))
    assert streamed_in(with_.plan) > 0
    assert with_.predicted_step_s < 0.9 * without.predicted_step_s


def whole(memory_bytes: int, host_bytes: int | None = None, ranks: int = 2, **device: object) -> ClusterProfile:
    """GPUs of one host that train all of a model of 10,400 parameters: 41.6 kB of weights, 166.4 kB with their state."""
    given = {"memory_bytes": memory_bytes, "host": "box", "host_to_device_bytes_per_s": 1e6, **device}
    given |= {"device_to_host_bytes_per_s": 1e6, "optimizer_s_per_parameter": 1e-6, "backend": "cuda"}
    profile = of_devices([make_device(rank, **given) for rank in range(ranks)], make_model(21))
    hosts = () if host_bytes is None else (HostProfile("box", host_bytes, "its memory"),)
    return replace(profile, hosts=hosts)


def test_what_is_trained_whole_is_kept_by_the_host() -> None:
    profile = whole(45_000, 240_000)
    model, tokens = profile.model, 10
    mode = StageMode(streamed=True)
    streamed = stage_memory(model, 1, 9, tokens, 2, mode)
    assert (streamed.parameters, streamed.state) == (OFFLOADED_LAYER_COUNT * 1600, OFFLOADED_LAYER_COUNT * 1600)
    assert stage_memory(model, 1, 9, tokens, 2, mode, in_host_memory=True).state == 8 * 400 * 12
    report = make_plan(profile, request(micro_batch_choices=(1,)))
    assert streamed_in(report.plan) > 0
    assert all(one.peak_bytes <= one.usable_bytes for one in report.memory)
    assert report.hosts[0].peak_bytes > 166_400 - 45_000, "of two ranks one may be resident"
    assert any("from host memory" in reason and "optimizer" in reason for reason in report.reasons), report.reasons
    assert 0 < report.bound_step_s <= report.predicted_step_s


def test_a_host_too_small_for_what_is_trained_is_refused() -> None:
    with refuses("memory.exceeded", "166 kB", "71.4 kB"):
        make_plan(whole(10_000, 100_000), request(micro_batch_choices=(1,)))
    with refuses("memory.exceeded", "plan.offload"):
        make_plan(whole(45_000, 240_000), request(micro_batch_choices=(1,), streaming="never"))


def test_cpus_that_train_everything_and_hosts_of_unknown_memory_have_nothing_to_stream() -> None:
    profile = whole(30_000, 60_000, shares_host_memory=True)
    assert [decide.can_offload(one) for one in (profile, whole(1, 0), whole(1, 1))] == [False, False, True]
    with refuses("memory.exceeded"):
        make_plan(profile, request())


def test_gradients_leave_while_the_layer_before_computes() -> None:
    profile = whole(1_000_000)
    stage = StagePlan((0,), 1, 4, 1, streamed=True)
    # Copies of a block's weights, or of its gradients, take 1.6 ms each: nothing beside its 4 s forward and 12 s backward.
    # Weights are copied anew after each step; of two micro-batches only the second one's gradients come.
    assert seconds(profile, stage, Op.F) == pytest.approx(0.0016 + 3 * 4)
    assert seconds(profile, stage, Op.B) == pytest.approx(0.0016 / 2 + 3 * 12 + 0.0016)
    slow = {"host_to_device_bytes_per_s": 100.0, "device_to_host_bytes_per_s": 50.0}
    profile = replace(profile, devices=tuple(replace(device, **slow) for device in profile.devices))
    # Weights 16 s; gradients leave in 32 s and come in 16 s; the last block's come while nothing leaves.
    first, second = 12 + 32 + 32 + 32, 16 + 16 + (32 + 16) + 32 + 32
    assert seconds(profile, stage, Op.B) == pytest.approx((first + second) / 2)
    plan = plan_of(profile, stage, StagePlan((1,), 4, len(profile.model.layers), 0))
    assert seconds(profile, stage, Op.F) == pytest.approx(16 + 16 + 16 + 4)
    step_s = duration(Action(Op.STEP, 0), plan, profile)
    assert step_s == pytest.approx(1200 * 46 / 100)
    measured = tuple(replace(device, host_optimizer_s_per_parameter=1e-3) for device in profile.devices)
    assert duration(Action(Op.STEP, 0), plan, replace(profile, devices=measured)) == pytest.approx(1.2)


def test_a_streamed_stage_goes_back_in_one_part() -> None:
    profile = cluster()
    plan = plan_of(profile, StagePlan((0,), 0, 5, 1), StagePlan((1,), 5, 10, 0, streamed=True))
    split = replace(plan, pipelines=(replace(plan.pipelines[0], split_backward=True),))
    with refuses("plan.invalid", "split_backward"):
        complete_plan(split, profile, PlanRequest(8, SEQUENCE, (4,)))


def test_a_streamed_plan_moves_layers_away_from_a_slow_rank() -> None:
    profile, asked = heavy_cluster(220_000), request(micro_batch_choices=(1,))
    report = make_plan(profile, asked)
    assert streamed_in(report.plan) == 2
    found = answer(ReplanQuestion(drifted_profile(profile, report.plan, {0: 3.0, 1: 1.0}), asked, report, 100_000, 0.1))
    held = {stage.ranks[0]: stage.last - stage.first for _, _, stage in found.report.plan.numbered}
    assert held[0] < held[1] and streamed_in(found.report.plan) > 0
    assert found.prospect.then_s < 0.9 * found.prospect.now_s


def test_each_of_two_streamed_pipelines_moves_layers_away_from_its_slow_rank() -> None:
    profile = heavy_cluster(220_000, ranks=4)
    asked = request(micro_batch_choices=(1,))
    stages = [
        [
            StagePlan((rank,), 5 * place, 5 * (place + 1), 1 - place, streamed=True, slice_sequences=1)
            for place, rank in pair
        ]
        for pair in (((0, 0), (1, 1)), ((0, 2), (1, 3)))
    ]
    pipelines = tuple(PipelinePlan(tuple(own), 1, asked.global_batch // 2) for own in stages)
    report = complete_plan(Plan(pipelines, asked.global_batch, SEQUENCE, 10), profile, asked)
    found = answer(ReplanQuestion(drifted_profile(profile, report.plan, {0: 3.0, 3: 3.0}), asked, report, 100_000, 0.1))
    held = {stage.ranks[0]: stage.last - stage.first for _, _, stage in found.report.plan.numbered}
    assert held[0] < held[1] and held[3] < held[2] and streamed_in(found.report.plan) > 0
    assert found.prospect.then_s < 0.9 * found.prospect.now_s


@pytest.mark.slow
def test_what_fits_on_one_card() -> None:
    """A row of the table of ``benchmarks/what_fits.py``: what fits without streaming keeps its plan, or gets a shorter one."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import what_fits

    profile = dict(what_fits.clusters(alone=True))["NVIDIA RTX A6000"]
    cells = {job: what_fits.cell(profile, *shape) for job, shape in what_fits.JOBS.items()}
    assert all(cell.sound for cell in cells.values())
    assert [cell.streams for cell in cells.values()] == [True, False, False, False, True, True]
    assert [cell.resident is None for cell in cells.values()] == [True, True, True, False, True, True]
    assert cells["235B-A22B NF4"].text() == "- | 502"
    little = what_fits.cell(profile, *what_fits.JOBS["235B-A22B NF4"], host_gib=64.0)
    assert (
        little.text().endswith(" d")
        and little.planned.predicted_step_s > cells["235B-A22B NF4"].planned.predicted_step_s
    )
