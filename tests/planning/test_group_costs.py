"""What a stage of several ranks takes: times, sums and memory, against sums made by hand."""

from dataclasses import replace

import pytest

from hetero_mpi.planning.durations import duration, update_s
from hetero_mpi.planning.group_costs import busiest
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.types.cluster_changes import with_free_links, with_slowness
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile

HEADS, BLOCKS, LAYERS = 8, 4, 6
LATENCY_S, SPEED = 0.01, 1e5
SUM_S = 2 * LATENCY_S + SEQUENCE * 100 / SPEED
"""Of 10 tokens' 25 fp32 numbers between two ranks: there and back, half of them each time."""


def divisible(model: ModelCost) -> ModelCost:
    """Of a block's 400 parameters 300 are divided and of its activations half; of the ends all but activations."""

    def of(kind: str, **fields: float) -> dict[str, float]:
        ends = {"divided_parameters": 1000, "divided_trainable": 1000, "group_sums": 1, "divided_workspace": 1.0}
        block = {"divided_parameters": 300, "divided_trainable": 300, "group_sums": 2, "divided_activations": 0.5}
        return {**(ends if kind in (EMBEDDING, HEAD) else block), **fields}

    layers = tuple(replace(layer, **of(layer.kind)) for layer in model.layers)  # type: ignore[arg-type]
    return replace(model, layers=layers, heads=HEADS)


def cluster(slowness: tuple[float, ...] = (1.0, 1.0, 1.0), measured: bool = True) -> ClusterProfile:
    """Ranks 0 and 1 on a host, rank 2 on another. ``measured``: half the heads take 0.6 of a block's time, 0.5 of an end's."""
    profile = make_profile(slowness, divisible(make_model(BLOCKS)), latency_s=LATENCY_S, bytes_per_s=SPEED)

    def half(kind: str, times: LayerTimes) -> LayerTimes:
        return scaled(times, 0.6 if kind == "block" else 0.5)

    devices = tuple(
        replace(
            device,
            host="box" if device.rank < 2 else "other",
            halved={kind: half(kind, times) for kind, times in device.layers.items()} if measured else {},
        )
        for device in profile.devices
    )
    return replace(profile, devices=devices)


def scaled(times: LayerTimes, factor: float) -> LayerTimes:
    def of(curve: Curve) -> Curve:
        return replace(curve, seconds=tuple(factor * seconds for seconds in curve.seconds))

    return LayerTimes(of(times.forward_s), of(times.backward_s))


def plan_of(shares: tuple[int, int], cut: int = 3, recompute: bool = False) -> Plan:
    """Ranks 0 and 1 hold layers [cut, 6), rank 2 those before."""
    plan = make_plan_of([0, cut, LAYERS], [2, 0], 4)
    first, second = plan.pipelines[0].stages
    second = replace(second, ranks=(0, 1), shares=shares, recompute=recompute)
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=(first, second)),))


def seconds(profile: ClusterProfile, plan: Plan, op: Op) -> float:
    return duration(Action(op, 1, None if op is Op.STEP else 0), plan, profile)


ARRIVES_S = LATENCY_S + SEQUENCE * 100 / SPEED


def test_a_group_takes_as_long_as_its_slowest_member_and_its_sums() -> None:
    """A block: 0.2 s of 1 s are everybody's, 0.8 s are divided: with 5 of 8 heads 0.7 s. The head is divided whole."""
    profile, plan = cluster(), plan_of((5, 3))
    assert seconds(profile, plan, Op.F) == pytest.approx(2 * (0.7 + 2 * SUM_S) + 0.5 * 5 / 8 + ARRIVES_S)
    assert seconds(profile, plan, Op.B) == pytest.approx(2 * (1.4 + 2 * SUM_S) + 1.0 * 5 / 8 + SUM_S)
    slow = with_slowness(profile, {1: 2.0})  # its 3 heads take longer than the other's 5
    block_s = 2 * (0.2 + 0.8 * 3 / 8)
    assert seconds(slow, plan, Op.F) == pytest.approx(2 * (block_s + 2 * SUM_S) + 2 * 0.5 * 3 / 8 + ARRIVES_S)


def test_recompute_repeats_the_forward_and_its_sums() -> None:
    plain, again = (seconds(cluster(), plan_of((5, 3), recompute=recompute), Op.B) for recompute in (False, True))
    assert again - plain == pytest.approx(2 * (0.7 + 2 * SUM_S))


def test_without_a_measurement_nine_tenths_of_blocks_and_head_are_divided() -> None:
    profile, plan = with_free_links(cluster(measured=False)), plan_of((4, 4))
    assert seconds(profile, plan, Op.F) == pytest.approx((2 * 1.0 + 0.5) * 0.55)


def test_sums_are_as_fast_as_they_were_measured_on_the_host_and_pass_through_devices_copies() -> None:
    plan, profile = plan_of((4, 4)), cluster()
    hosts = (HostProfile("box", 10**9, "made up", sum_latency_s=0.5, sum_bytes_per_s=1e3),)
    devices = tuple(replace(device, copy_latency_s=0.25, device_to_host_bytes_per_s=1e4) for device in profile.devices)
    told = replace(profile, hosts=hosts, devices=devices)
    # Two blocks' two sums; of 1,000 bytes each; the input that comes is copied once.
    more_s = 4 * (0.5 + 1.0 - SUM_S) + 4 * (2 * 0.25 + 0.1) + 0.25
    assert seconds(told, plan, Op.F) - seconds(profile, plan, Op.F) == pytest.approx(more_s)


def test_members_that_copy_at_once_share_what_their_host_carries() -> None:
    plan, profile = plan_of((4, 4)), cluster()
    speeds = {"device_to_host_bytes_per_s": 1e4, "host_to_device_bytes_per_s": 1e4}
    profile = replace(profile, devices=tuple(replace(device, **speeds) for device in profile.devices))
    hosts = (HostProfile("box", 10**9, "made up", copies_bytes_per_s=1e4),)
    # Two blocks' two sums of 1,000 bytes, out and back at half the speed; the input goes to one of the two.
    more_s = 4 * 2 * 0.1
    limited = seconds(replace(profile, hosts=hosts), plan, Op.F)
    assert limited - seconds(profile, plan, Op.F) == pytest.approx(more_s)


def test_a_member_steps_what_it_holds_after_the_sums_of_what_everybody_holds() -> None:
    profile = cluster()
    devices = tuple(replace(device, optimizer_s_per_parameter=0.01) for device in profile.devices)
    trained = 2 * (100 + 300 * 5 / 8) + 1000 * 5 / 8
    sums_s = 2 * (2 * LATENCY_S + 400 / SPEED)  # of two blocks' 100 numbers each
    stepping = seconds(replace(profile, devices=devices), plan_of((5, 3)), Op.STEP)
    assert stepping == pytest.approx(0.01 * trained + sums_s, abs=0.011)  # parts of a parameter are rounded up


def test_a_member_holds_its_share_of_what_is_divided_and_all_of_the_rest() -> None:
    held = {memory.rank: memory.peak_bytes for memory in predict_memory(plan_of((6, 2)), cluster())}
    for rank, share in ((0, 0.75), (1, 0.25)):
        parameters = 2 * (100 + 300 * share) + 1000 * share
        kept = SEQUENCE * (2 * 300 * (0.5 + 0.5 * share) + 300)  # of one micro-batch; the head's activations are whole
        workspace, staging = SEQUENCE * 50, 4 * SEQUENCE * 100 + 3 * SEQUENCE * 100
        assert held[rank] == pytest.approx((4 + 12) * parameters + kept + workspace + staging)
    assert held.keys() == {0, 1, 2}


def side_by_side(*shares: tuple[int, ...]) -> tuple[Plan, ClusterProfile]:
    """A pipeline of one stage, one micro-batch and a host of its own for each of these shares; none: of one rank."""
    pipelines: list[PipelinePlan] = []
    hosts: list[str] = []
    for own in shares:
        ranks = tuple(range(len(hosts), len(hosts) + max(1, len(own))))
        pipelines.append(PipelinePlan((StagePlan(ranks, 0, LAYERS, 0, shares=own),), 1, 1))
        hosts += [f"box{len(pipelines)}"] * len(ranks)
    profile = make_profile((1.0,) * len(hosts), divisible(make_model(BLOCKS)), latency_s=LATENCY_S, bytes_per_s=SPEED)
    devices = tuple(replace(one, host=host) for one, host in zip(profile.devices, hosts, strict=True))
    return Plan(tuple(pipelines), len(shares), SEQUENCE, LAYERS), replace(profile, devices=devices)


def held_by_member(share: float, owned: float, exchanged: bool) -> float:
    """Bytes of the whole model on a member. Of all trained numbers it holds its share or all; a value and a gradient of each, two
    moments of ``owned``, and where parts are ``exchanged`` one more gradient."""
    kept, workspace = SEQUENCE * (4 * 300 * (0.5 + 0.5 * share) + 2 * 300), SEQUENCE * 50
    summing = 3 * SEQUENCE * 100 if share < 1 else 0
    return (8 + 4 * exchanged) * trained_by(share) + 8 * owned + kept + workspace + summing


def trained_by(share: float) -> float:
    return 4 * (100 + 300 * share) + 2 * 1000 * share


def test_members_of_groups_in_several_pipelines_own_their_parts_of_what_their_pipeline_owns() -> None:
    """The first pipeline owns the embedding and half of the blocks, the other the head and the other half."""
    plan, profile = side_by_side((6, 2), (2, 6))
    held = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile)}
    for rank, share in enumerate((6 / 8, 2 / 8, 2 / 8, 6 / 8)):
        assert held[rank] == pytest.approx(held_by_member(share, trained_by(share) / 2, exchanged=True))


def test_ranks_need_no_further_buffer_where_all_pipelines_divide_alike_and_a_rank_beside_a_group_does() -> None:
    plan, profile = side_by_side((6, 2), (6, 2))
    held = [memory.peak_bytes for memory in predict_memory(plan, profile)]
    alike = [held_by_member(share, trained_by(share) / 2, exchanged=False) for share in (6 / 8, 2 / 8)]
    assert held == pytest.approx([*alike, *alike])
    plan, profile = side_by_side((6, 2), ())
    held = [memory.peak_bytes for memory in predict_memory(plan, profile)]
    own = [held_by_member(share, trained_by(share) / 2, exchanged=True) for share in (6 / 8, 2 / 8, 1)]
    assert held == pytest.approx(own)


def test_groups_in_two_pipelines_sum_all_gradients_between_their_hosts_and_step_their_parts_of_half_of_them() -> None:
    plan, profile = side_by_side((6, 2), (2, 6))
    devices = tuple(replace(device, optimizer_s_per_parameter=0.01) for device in profile.devices)
    profile = replace(profile, devices=devices)
    # Half of a layer goes to its owner, either way at once.
    for layer, count in ((0, 1000), (1, 400)):
        assert duration(Action(Op.REDUCE, 0, layer=layer), plan, profile) == pytest.approx(
            LATENCY_S + 4 * count / 2 / SPEED
        )
    common_s = BLOCKS * (2 * LATENCY_S + 400 / SPEED)  # of each block's 100 numbers that both members hold
    for number, share in ((0, 6 / 8), (1, 6 / 8)):
        assert update_s(number, plan, profile) == pytest.approx(0.01 * trained_by(share) / 2 + common_s)


def test_ranks_of_a_group_that_share_their_hosts_memory_are_counted_together() -> None:
    profile = cluster()
    devices = tuple(replace(device, shares_host_memory=device.rank < 2) for device in profile.devices)
    profile = replace(profile, devices=devices, hosts=(HostProfile("box", 10**6, "made up"),))
    held = {memory.rank: memory.peak_bytes for memory in predict_memory(plan_of((6, 2)), profile)}
    assert [host.peak_bytes for host in predict_hosts(plan_of((6, 2)), profile)] == [held[0] + held[1]]


def test_times_of_groups_are_remembered_for_one_profile_only() -> None:
    """Times of groups are remembered by ranks: another profile must not be told those of this one."""
    profile, plan = with_slowness(cluster(), {2: 3.0}), plan_of((5, 3))
    assert seconds(profile, plan, Op.F) < seconds(with_slowness(profile, {0: 2.0}), plan, Op.F)


def with_experts(profile: ClusterProfile) -> ClusterProfile:
    """8 experts have 200 of a block's 300 divided parameters; half the heads and none of the experts take 0.3 of a block's time,
    of which 0.3 of rank 1's are 0.35."""
    blocks = (
        replace(layer, expert_parameters=200, expert_trainable=200) if layer.kind == "block" else layer
        for layer in profile.model.layers
    )
    model = replace(profile.model, layers=tuple(blocks), experts=8)

    def none(device: DeviceProfile, kind: str, times: LayerTimes) -> LayerTimes:
        return scaled(times, (0.3 if device.rank == 0 else 0.35) if kind == "block" else 0.5)

    devices = (
        replace(d, without_experts={kind: none(d, kind, times) for kind, times in d.layers.items()})
        for d in profile.devices
    )
    return replace(profile, model=model, devices=tuple(devices))


def test_members_wait_for_the_slowest_before_experts_and_for_the_slowest_at_them() -> None:
    """Of a block's second rank 0's experts take 0.6 and rank 1's 0.5, both halves of all; heads divide 0.2 and 0.3 of the rest."""
    profile, plan = with_experts(cluster()), plan_of((5, 3))
    one, other = plan.pipelines[0].stages
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(one, replace(other, experts=(2, 6)))),))
    rest_s = max(0.2 + 0.2 * 5 / 8, 0.2 + 0.3 * 3 / 8)
    experts_s = max(0.6 * busiest(2 / 8, 8), 0.5 * busiest(6 / 8, 8))
    assert seconds(profile, plan, Op.F) == pytest.approx(2 * (rest_s + experts_s + 2 * SUM_S) + 0.5 * 5 / 8 + ARRIVES_S)


def test_many_experts_are_chosen_more_evenly_than_few() -> None:
    assert busiest(0.5, 8) == pytest.approx(0.77, abs=0.01)  # as measured
    assert [busiest(share, 128) for share in (0.0, 1.0)] == [0.0, 1.0]
    assert 0.5 < busiest(0.5, 128) < 0.6 and busiest(7 / 8, 8) == 1.0


def test_a_member_holds_its_own_share_of_the_experts() -> None:
    plan = plan_of((6, 2))
    one, other = plan.pipelines[0].stages
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(one, replace(other, experts=(0, 8)))),))
    profile = with_experts(cluster())
    held = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile)}
    as_heads = {memory.rank: memory.peak_bytes for memory in predict_memory(plan_of((6, 2)), profile)}
    for rank, moved in ((0, -6 / 8), (1, 6 / 8)):
        assert held[rank] - as_heads[rank] == pytest.approx((4 + 12) * 2 * 200 * moved)
