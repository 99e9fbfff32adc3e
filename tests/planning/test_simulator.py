"""Simulated steps: makespans worked out by hand, and what holds of any plan."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from hetero_mpi.planning.analysis.idle_time import Idling, idling
from hetero_mpi.planning.device_times import compute_s, recompute_s
from hetero_mpi.planning.durations import duration
from hetero_mpi.planning.outline import spans_s
from hetero_mpi.planning.schedule import Action, Event, Op, busy, reduced_layers, schedule_of, tied_heads
from hetero_mpi.planning.simulator import SimulatedStep, simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve
from hetero_mpi.planning.types.request import with_shared_nics
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile, random_plan, with_split


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def drawn(result: SimulatedStep, *ops: Op) -> dict[int, str]:
    """Rank -> its actions with the moments at which they begin and end: ``0F0 0-1.1``."""
    rows: dict[int, list[str]] = {}
    for event in result.events:
        if event.action.op in ops:
            rows.setdefault(event.rank, []).append(f"{event.action} {event.start_s:.4g}-{event.end_s:.4g}")
    return {rank: ", ".join(cells) for rank, cells in rows.items()}


def split(plan: Plan) -> Plan:
    return replace(plan, pipelines=tuple(replace(pipeline, split_backward=True) for pipeline in plan.pipelines))


COMPUTING = (Op.F, Op.B, Op.I, Op.W)


def test_two_stages_with_a_link_by_hand() -> None:
    """Stage 0: embedding + block, F 1.1 s, B 2.2 s; stage 1: block + head, F 1.5 s, B 3 s; every message 2 s.

    rank 0  F0 0-1.1, F1 1.1-2.2, B0 9.6-11.8, B1 14.1-16.3
    0 -> 1  F0 1.1-3.1, F1 3.1-5.1
    rank 1  F0 3.1-4.6, B0 4.6-7.6, F1 7.6-9.1, B1 9.1-12.1
    1 -> 0  B0 7.6-9.6, B1 12.1-14.1
    """
    profile = make_profile((1.0, 1.0), latency_s=1.0, bytes_per_s=1000.0)
    result = simulate(make_plan_of((0, 2, 4), (0, 1), 2), profile)
    times = {str(e.action): (round(e.start_s, 9), round(e.end_s, 9)) for e in result.events}
    assert times == {
        "0F0": (0.0, 1.1), "0SEND_F0": (1.1, 3.1), "0F1": (1.1, 2.2), "0SEND_F1": (3.1, 5.1),
        "0RECV_B0": (2.2, 9.6), "0B0": (9.6, 11.8),
        "0RECV_B1": (11.8, 14.1), "0B1": (14.1, 16.3), "0STEP": (16.3, 16.3),
        "1RECV_F0": (0.0, 3.1), "1F0": (3.1, 4.6), "1B0": (4.6, 7.6), "1SEND_B0": (7.6, 9.6),
        "1RECV_F1": (7.6, 7.6), "1F1": (7.6, 9.1), "1B1": (9.1, 12.1), "1SEND_B1": (12.1, 14.1), "1STEP": (16.3, 16.3),
    }  # fmt: skip
    assert result.step_s == pytest.approx(16.3)
    assert result.busy_s == pytest.approx({0: 6.6, 1: 9.0})
    assert {e.bytes for e in result.events if e.action.op is Op.SEND_F} == {1000}


def test_copies_recompute_reduce_and_step_are_priced() -> None:
    profile = make_profile((1.0, 2.0), make_model(tied=True), latency_s=1.0, bytes_per_s=1000.0)
    slow_copy = replace(
        profile.devices[1],
        copy_latency_s=0.5,
        host_to_device_bytes_per_s=100.0,
        device_to_host_bytes_per_s=500.0,
        optimizer_fixed_s=0.25,
        optimizer_s_per_parameter=0.001,
    )
    profile = replace(profile, devices=(profile.devices[0], slow_copy))
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    first, last = plan.pipelines[0].stages
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(first, replace(last, recompute=True))),))
    priced = actions("0F0 1F0 0B1 1B1 0SEND_F0 1SEND_B0 1RECV_F0 1STEP 0STEP 0REDUCE0 1REDUCE0")
    seconds = {str(action): duration(action, plan, profile) for action in priced}
    there, back = (0.5 + 8) + (1 + 4), (1 + 4) + (0.5 + 40)
    assert seconds == pytest.approx({
        "0F0": 1.1, "1F0": 3.0, "0B1": 2.2, "1B1": 8.0, "0SEND_F0": (1 + 1) + (0.5 + 10),
        "1SEND_B0": (0.5 + 2) + (1 + 1),
        "1RECV_F0": 0.0, "0STEP": back, "1STEP": back, "0REDUCE0": 0.0, "1REDUCE0": there,
    })  # fmt: skip
    result = simulate(plan, profile)
    end = {str(e.action): e.end_s for e in result.events}
    start = {str(e.action): e.start_s for e in result.events}
    # The head's share sets out as soon as it is whole, while the block's repeated forward and backward (2 + 4 s) still run.
    assert start["1REDUCE0"] == pytest.approx(end["1B1"] - 6.0)
    assert start["0STEP"] == start["1STEP"] == max(end["0B1"], end["1REDUCE0"])
    assert result.step_s == pytest.approx(start["0STEP"] + back)


def test_recomputing_takes_as_long_as_was_measured() -> None:
    """Blocks: backward 2 s, with the forward repeated 2.7 s instead of the 3 s of both; the split takes the 0.7 s in I."""
    profile = with_split(make_profile())
    curve = Curve((SEQUENCE,), (2.7,))
    devices = tuple(
        replace(d, layers={**d.layers, "block": replace(d.layers["block"], recompute_s=curve)}) for d in profile.devices
    )
    profile = replace(profile, devices=devices)
    plan = make_plan_of((0, 2, 4), (0, 1), 1)
    stages_again = tuple(replace(stage, recompute=True) for stage in plan.pipelines[0].stages)
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages_again),))
    seconds = {str(a): duration(a, plan, profile) for a in actions("0F0 0B0 1F0 1B0 1I0 1W0")}
    assert seconds == pytest.approx({"0F0": 1.1, "0B0": 2.9, "1F0": 1.5, "1B0": 3.7, "1I0": 2.2, "1W0": 1.5})


def test_split_backward_by_hand() -> None:
    """Stage 0: F 1.1 s, B 2.2 s; stage 1: F, I and W 1.5 s each. Two micro-batches, no links: 10.1 s instead of 12.3 s."""
    profile = with_split(make_profile())
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    result = simulate(split(plan), profile)
    assert drawn(result, *COMPUTING) == {
        0: "0F0 0-1.1, 0F1 1.1-2.2, 0B0 4.1-6.3, 0B1 7.1-9.3",
        1: "1F0 1.1-2.6, 1I0 2.6-4.1, 1F1 4.1-5.6, 1I1 5.6-7.1, 1W0 7.1-8.6, 1W1 8.6-10.1",
    }
    assert result.step_s == pytest.approx(10.1) and simulate(plan, profile).step_s == pytest.approx(12.3)
    assert result.busy_s == pytest.approx({0: 6.6, 1: 9.0})


def test_gpipe_by_hand() -> None:
    """The same stages, all forwards first; messages of 1 s."""
    result = simulate(make_plan_of((0, 2, 4), (0, 1), 2, warm_up=(2, 2)), make_profile(bytes_per_s=1000.0))
    assert drawn(result, *COMPUTING) == {
        0: "0F0 0-1.1, 0F1 1.1-2.2, 0B0 9.1-11.3, 0B1 12.1-14.3",
        1: "1F0 2.1-3.6, 1F1 3.6-5.1, 1B0 5.1-8.1, 1B1 8.1-11.1",
    }
    assert result.step_s == pytest.approx(14.3)


def unlike(tied: bool = False) -> tuple[Plan, ClusterProfile]:
    """Ranks 0 -> 1 with two sequences one by one; rank 2 alone with three, two and one at a time. 1,000 bytes take 1 s
    between the pipelines, 0.5 s (tied) or none within the first."""
    halves = PipelinePlan((StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0)), 1, 2)
    plan = Plan((halves, PipelinePlan((StagePlan((2,), 0, 4, 0),), 2, 3)), 5, SEQUENCE, 4)
    profile = make_profile([1.0] * 3, make_model(tied=tied), bytes_per_s=1000.0)
    inside = 2000.0 if tied else float("inf")
    links = (replace(li, bytes_per_s=inside) if 2 not in (li.source, li.destination) else li for li in profile.links)
    return plan, replace(profile, links=tuple(links))


def test_unlike_pipelines_with_a_short_last_micro_batch_by_hand() -> None:
    """Sums begin layer by layer while rank 2's last backward runs: its head is whole after 1 s of it, its blocks after 2 s each.

    ::

        rank 0   F0 F1 B0 B1 until 12.3                                        1 until 24.0   0 until 26.0
        rank 1   F0 B0 F1 B1 until 10.1       3 (19.2-21.2)  2 until 22.0
        rank 2   F0 B0, F1 18.2, B1 until 23.4, of which 19.2: head, 21.2, 23.2: blocks, 23.4: embedding

    New values of rank 0's layers take 2.8 s, of which its next forward hides half of its 1.1 s.
    """
    plan, profile = unlike()
    result = simulate(plan, profile)
    assert drawn(result, *COMPUTING) == {
        0: "0F0 0-1.1, 0F1 1.1-2.2, 0B0 5.6-7.8, 0B1 10.1-12.3",
        1: "1F0 1.1-2.6, 1B0 2.6-5.6, 1F1 5.6-7.1, 1B1 7.1-10.1",
        2: "2F0 0-5.2, 2B0 5.2-15.6, 2F1 15.6-18.2, 2B1 18.2-23.4",
    }
    assert drawn(result, Op.REDUCE) == {
        0: "0REDUCE1 23.2-24, 0REDUCE0 24-26",
        1: "1REDUCE3 19.2-21.2, 1REDUCE2 21.2-22",
        2: "2REDUCE3 19.2-21.2, 2REDUCE2 21.2-22, 2REDUCE1 23.2-24, 2REDUCE0 24-26",
    }
    assert result.step_s == pytest.approx(26 + 2.25)
    assert {e.bytes for e in result.events if e.action.op is Op.REDUCE} == {4000, 1600}
    causes = idling(result.events, plan)
    # Rank 1 waits 1.1 s for an activation, then from 10.1 to 19.2 for rank 2, sums until 22.0, and waits for the others.
    expected = Idling(activations_s=1.1, sums_s=2.8, end_s=(19.2 - 10.1) + (26 - 22.0) + (2.25 - 2.05))
    assert vars(causes[1]) == pytest.approx(vars(expected))
    # Rank 2 computes until 23.4; from then on it takes part in a sum all the time.
    assert vars(causes[2]) == pytest.approx(vars(Idling(sums_s=2.6, end_s=2.25 - 1.7)))


def test_tied_ends_of_several_pipelines_by_hand() -> None:
    """The head's matrix belongs to layer 0: rank 1 brings its 4,000 bytes to rank 0 (2 s, from 8.6 s on), layer 3 has nothing
    left to sum, and the new values take 2 s to the other holder and 2 s back to rank 1 after the last sum, which ends at 26 s."""
    result = simulate(*unlike(tied=True))
    assert drawn(result, Op.B)[1] == "1B0 3.1-6.1, 1B1 7.6-10.6" and drawn(result, Op.B)[0].endswith("0B1 11.1-13.3")
    assert drawn(result, Op.REDUCE) == {
        0: "0REDUCE1 23.2-24, 0REDUCE0 24-26",
        1: "1REDUCE0 8.6-10.6, 1REDUCE2 21.2-22",
        2: "2REDUCE2 21.2-22, 2REDUCE1 23.2-24, 2REDUCE0 24-26",
    }
    assert drawn(result, Op.STEP) == {0: "0STEP 26-30", 1: "1STEP 26-30", 2: "2STEP 26-26.9"}
    assert result.step_s == pytest.approx(30)


def test_the_new_values_of_a_tied_matrix_travel_in_the_compute_dtype() -> None:
    plan, profile = unlike(tied=True)
    narrow = replace(profile, model=replace(profile.model, dtype="bf16"))
    assert duration(Action(Op.STEP, 1), plan, profile) == 4.0
    assert duration(Action(Op.STEP, 1), plan, narrow) == 2.0
    assert duration(Action(Op.REDUCE, 1, layer=0), plan, narrow) == 2.0, "gradients travel in fp32"


def test_a_tied_matrix_on_a_slow_way_lengthens_the_step() -> None:
    """4,000 bytes at 100 bytes/s: the share, whole at 4.6 s, takes 40 s; everything else is long done."""
    profile = make_profile(model=make_model(tied=True), bytes_per_s=100.0)
    result = simulate(make_plan_of((0, 2, 4), (0, 1), 1), profile)
    share = next(e for e in result.events if str(e.action) == "1REDUCE0")
    assert (share.start_s, share.end_s) == pytest.approx((11.1 + 1.5 + 1.0, 11.1 + 1.5 + 1.0 + 40))
    assert result.step_s == pytest.approx(11.1 + 1.5 + 1.0 + 80)


def test_a_sum_waits_for_the_heads_share_of_a_tied_matrix() -> None:
    """40,000 bytes at 2,000 bytes/s: under way from 8.6 s to 28.6 s, long after layer 0 is whole on ranks 0 and 2."""
    plan, profile = unlike(tied=True)
    result = simulate(plan, replace(profile, model=replace(profile.model, tied_bytes=40_000)))
    assert drawn(result, Op.REDUCE)[0] == "0REDUCE1 23.2-24, 0REDUCE0 28.6-30.6"
    assert drawn(result, Op.REDUCE)[1].startswith("1REDUCE0 8.6-28.6, ")
    assert result.step_s == pytest.approx(30.6 + 2 + 20)


def test_a_plan_that_deadlocks_is_refused_with_the_stuck_rows() -> None:
    with refuses("schedule.deadlock"):
        simulate(make_plan_of((0, 2, 4), (0, 1), 3, warm_up=(0, 1)), make_profile())


# What holds of any plan


def seconds_of(plan: Plan, profile: ClusterProfile, op: Op, numbers: range) -> list[float]:
    return [duration(Action(op, number, 0), plan, profile) for number in numbers]


def single(seed: int) -> tuple[Plan, ClusterProfile]:
    """One pipeline whose micro-batches are all alike, on links of its own."""
    plan, profile = random_plan(seed, most_pipelines=1)
    (pipeline,) = plan.pipelines
    whole = replace(pipeline, sequences=pipeline.micro_batch * pipeline.sequences)
    profile = replace(profile, hosts=())
    return replace(plan, pipelines=(whole,), global_batch=whole.sequences), profile


@pytest.mark.parametrize("seed", range(200))
def test_the_planners_short_form_equals_the_simulation_to_the_last_bit(seed: int) -> None:
    plan, profile = single(seed)
    (pipeline,) = plan.pipelines
    count = len(pipeline.stages)
    every, out, back = range(count), range(count - 1), range(1, count)
    backward, weight = seconds_of(plan, profile, Op.B, every), None
    if pipeline.split_backward:
        backward = [backward[0], *seconds_of(plan, profile, Op.I, back)]
        weight = [0.0, *seconds_of(plan, profile, Op.W, back)]
    times = (
        seconds_of(plan, profile, Op.F, every), backward,
        seconds_of(plan, profile, Op.SEND_F, out), seconds_of(plan, profile, Op.SEND_B, back),
        [stage.warm_up for stage in pipeline.stages], pipeline.micro_batches, weight,
    )  # fmt: skip
    result = simulate(plan, profile)
    begun, ended = spans_s(*times)
    for number, _, stage in plan.numbered:
        own = [e for e in result.events if e.rank == stage.ranks[0] and e.action.op in COMPUTING]
        assert (begun[number], ended[number]) == (own[-1].start_s, own[-1].end_s)


def design_bounds_s(plan: Plan, profile: ClusterProfile) -> list[float]:
    """Bounds that know computing and messages, of every pipeline whose micro-batches are all alike."""
    found = []
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.sequences % pipeline.micro_batch:
            continue
        numbers = [number for number, of, _ in plan.numbered if of == index]
        f = [duration(Action(Op.F, n, 0), plan, profile) for n in numbers]
        b = [duration(Action(Op.B, n, 0), plan, profile) for n in numbers]
        i = [duration(Action(Op.I, n, 0), plan, profile) for n in numbers]
        w = [duration(Action(Op.W, n, 0), plan, profile) for n in numbers]
        c = [duration(Action(Op.SEND_F, n, 0), plan, profile) for n in numbers[:-1]]
        back = [duration(Action(Op.SEND_B, n, 0), plan, profile) for n in numbers[1:]]
        i[0], w[0] = b[0], 0.0
        count = pipeline.micro_batches
        for s in range(len(numbers)):
            both_ways = sum(c[:s]) + sum(back[:s])
            if pipeline.split_backward:
                found.append(sum(f[:s]) + sum(c[:s]) + count * (f[s] + i[s] + w[s]))
                found.append(sum(f[:s]) + sum(i[:s]) + both_ways + count * (f[s] + i[s]))
            else:
                found.append(sum(f[:s]) + sum(b[:s]) + both_ways + count * (f[s] + b[s]))
    return found


@pytest.mark.parametrize("seed", range(200))
def test_no_bound_is_over_the_simulation(seed: int) -> None:
    plan, profile = random_plan(seed)
    step_s = simulate(plan, profile).step_s * (1 + 1e-9)
    assert all(found <= step_s for found in design_bounds_s(plan, profile))


def by_layer(result: SimulatedStep) -> dict[int, dict[int, Event]]:
    """layer -> rank -> its REDUCE."""
    found: dict[int, dict[int, Event]] = {}
    for event in result.events:
        if event.action.op is Op.REDUCE:
            assert event.action.layer is not None
            found.setdefault(event.action.layer, {})[event.rank] = event
    return found


@pytest.mark.parametrize("seed", range(120))
def test_sums_wait_for_whole_gradients_and_for_each_other(seed: int) -> None:
    plan, profile = random_plan(seed)
    result = simulate(plan, profile)
    number_of = {stage.ranks[0]: (number, stage) for number, _, stage in plan.numbered}
    last = {
        rank: [e for e in result.events if e.rank == rank and e.action.op in (Op.B, Op.W)][-1] for rank in number_of
    }

    def whole_s(rank: int, layer: int) -> float:
        """Backward goes from the last layer of the stage to the first."""
        stage, event = number_of[rank][1], last[rank]
        device, tokens = (
            profile.devices[rank],
            SEQUENCE * round(plan.pipelines[plan.numbered[number_of[rank][0]][1]].size(event.action.micro_batch or 0)),
        )
        again = stage.recompute and event.action.op is Op.B
        repeated = recompute_s(profile, device, layer, stage.last, tokens) if again else 0.0
        return event.start_s + repeated + compute_s(profile, device, layer, stage.last, tokens, event.action.op)

    sums, heads = by_layer(result), tied_heads(plan, profile.model)
    summed = reduced_layers(plan, profile.model)
    assert {layer: set(events) for layer, events in sums.items()} == {
        layer: set(ranks) for layer, ranks in summed.items()
    }
    for layer, events in sums.items():
        holders = {rank: e for rank, e in events.items() if layer != 0 or number_of[rank][0] not in heads}
        assert len({(e.start_s, e.end_s) for e in holders.values()}) == 1, "all ranks take part at once"
        for rank, event in holders.items():
            assert event.start_s >= whole_s(rank, layer) - 1e-9
        for head in events.keys() - holders.keys():
            share = events[head]
            assert share.start_s >= whole_s(head, plan.layers - 1) - 1e-9
            embedding = plan.numbered[heads[number_of[head][0]]][2].ranks[0]
            assert share.end_s <= events[embedding].start_s + 1e-9
    for rank in number_of:
        own = [
            events[rank]
            for layer, events in sums.items()
            if rank in events and (layer or number_of[rank][0] not in heads)
        ]
        own.sort(key=lambda event: (event.start_s, event.end_s))
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(own)), "one sum at a time"
    steps = [event for event in result.events if event.action.op is Op.STEP]
    assert len(steps) == len(number_of) and len({event.start_s for event in steps}) == 1
    assert steps[0].start_s == max(e.end_s for e in result.events if e.action.op not in (Op.STEP, Op.SEND_F, Op.SEND_B))


@pytest.mark.parametrize("seed", range(80))
def test_computing_and_idling_add_up_to_the_step_on_any_network(seed: int) -> None:
    plan, profile = random_plan(seed)
    for known in (profile, with_shared_nics(profile)):
        result = simulate(plan, known)
        assert busy(result.events) == pytest.approx(result.busy_s)
        for rank, causes in idling(result.events, plan).items():
            assert min(vars(causes).values()) >= -1e-9
            assert result.busy_s[rank] + causes.total_s == pytest.approx(result.step_s)


@pytest.mark.parametrize("seed", range(40))
def test_events_are_those_of_the_lists_in_their_order(seed: int) -> None:
    plan, profile = random_plan(seed)
    result, schedule = simulate(plan, profile), schedule_of(plan, profile.model)
    for rank, listed in schedule.items():
        own = [event.action for event in result.events if event.rank == rank]
        assert sorted(own, key=str) == sorted(listed, key=str)
        assert [a for a in own if a.op in COMPUTING] == [a for a in listed if a.op in COMPUTING]


def test_the_numbers_of_ranks_do_not_matter() -> None:
    """The same plan on ranks that are numbered otherwise takes as long, shared NICs included."""
    draw = random.Random(0)
    for seed in range(20):
        plan, profile = random_plan(seed)
        held = list(range(len(profile.devices)))
        draw.shuffle(held)
        devices = sorted((replace(d, rank=held[d.rank]) for d in profile.devices), key=lambda d: d.rank)
        links = tuple(replace(li, source=held[li.source], destination=held[li.destination]) for li in profile.links)
        pipelines = tuple(
            replace(p, stages=tuple(replace(s, ranks=(held[s.ranks[0]],)) for s in p.stages)) for p in plan.pipelines
        )
        renamed = replace(profile, devices=tuple(devices), links=links)
        if not any(host.shared_nic for host in profile.hosts):  # ties at a NIC go to the lower rank
            assert simulate(replace(plan, pipelines=pipelines), renamed).step_s == simulate(plan, profile).step_s
