"""Blocking sends, shared network cards, several pipelines: makespans worked out by hand.

Stages of ``make_plan_of((0, 2, 4), ...)``: stage 0 takes 1.1 s forward and 2.2 s backward, stage 1 takes 1.5 s and 3.0 s; a message
of 1,000 bytes takes 1 s at 1,000 bytes/s.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_mpi.errors import UserError
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.network import THREADED, Network, replica_sync_s, ring_s
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import Action, Op, gradients_first, one_f_one_b
from hetero_mpi.planning.simulator import simulate
from tests.planning_samples import SEQUENCE, make_plan_of, make_profile, random_instance

SLOW = 1000.0
"""Bytes per second: one second per message."""


@pytest.mark.parametrize(
    ("blocking", "late", "step_s"),
    [
        (False, False, 14.3),  # the second activation travels while stage 1 computes
        (True, False, 15.3),  # stage 1 sends its first gradient before it begins its second forward
        (False, True, 16.3),  # the second activation waits for the first gradient: a round trip shows
        (True, True, 16.3),
    ],
)
def test_blocking_sends_and_late_activations_by_hand(blocking: bool, late: bool, step_s: float) -> None:
    plan, profile = make_plan_of((0, 2, 4), (0, 1), 2), make_profile(bytes_per_s=SLOW)
    schedule = one_f_one_b(plan, tied=False)
    schedule = gradients_first(schedule) if late else schedule
    assert simulate(plan, profile, schedule, Network(blocking_sends=blocking)).step_s == pytest.approx(step_s)


def test_gradients_first_swaps_only_where_a_gradient_is_awaited_next() -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 3)
    lists = gradients_first(one_f_one_b(plan, tied=False))
    validate(lists, plan)
    assert " ".join(str(action) for action in lists[0]) == (
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2 0STEP"
    )
    assert lists[1] == one_f_one_b(plan, tied=False)[1]


def two_pipelines(micro_batches: int = 1) -> Plan:
    """Ranks 0 and 1 hold the first half, ranks 2 and 3 the second: 0 -> 2 and 1 -> 3."""
    pipelines = tuple(
        PipelinePlan((StagePlan((p,), 0, 2, 1), StagePlan((p + 2,), 2, 4, 0)), 1, micro_batches) for p in (0, 1)
    )
    return Plan(pipelines, 2 * micro_batches, SEQUENCE, 4)


def on_one_host(profile: ClusterProfile, *ranks: int) -> ClusterProfile:
    devices = tuple(replace(d, host="shared") if d.rank in ranks else d for d in profile.devices)
    return replace(profile, devices=devices)


@pytest.mark.parametrize(
    ("shared_nic", "step_s"),
    [
        (False, 9.8 + 5.6),  # both pipelines as if alone, then 1,400 gradients of 4 bytes in two rounds of 2.8 s
        (True, 10.8 + 5.6),  # rank 1's activation leaves the host of ranks 0 and 1 after rank 0's
    ],
)
def test_ranks_of_one_host_queue_for_its_card(shared_nic: bool, step_s: float) -> None:
    profile = on_one_host(make_profile([1.0] * 4, bytes_per_s=SLOW), 0, 1)
    result = simulate(two_pipelines(), profile, network=Network(shared_nic=shared_nic))
    assert result.step_s == pytest.approx(step_s)


def test_the_card_serves_who_comes_first_not_the_lower_rank() -> None:
    """Rank 0 is slower: rank 1 has sent (1.1 s to 2.1 s) before rank 0 begins (2.2 s), and so for the gradients."""
    profile = on_one_host(make_profile([2.0, 1.0, 1.0, 1.0], bytes_per_s=SLOW), 0, 1)
    shared = simulate(two_pipelines(), profile, network=Network(shared_nic=True))
    assert shared == simulate(two_pipelines(), profile)


def test_messages_inside_a_host_do_not_use_its_card() -> None:
    profile = on_one_host(make_profile([1.0] * 4, bytes_per_s=SLOW), 0, 1, 2, 3)
    plan = two_pipelines(2)
    assert simulate(plan, profile, network=Network(shared_nic=True)) == simulate(plan, profile)


@pytest.mark.parametrize("seed", range(20))
def test_options_only_ever_add_time(seed: int) -> None:
    profile, _ = random_instance(seed, 3, 6)
    plan = make_plan_of((0, 2, 4, 6), (2, 0, 1), 4)
    schedule = one_f_one_b(plan, profile.model.tied)
    free = simulate(plan, profile, schedule).step_s
    assert simulate(plan, profile, schedule, THREADED).step_s == free
    for network in (Network(True, False), Network(False, True), Network(True, True)):
        assert simulate(plan, profile, schedule, network).step_s >= free


def test_every_rank_sums_its_gradients_when_there_are_several_pipelines() -> None:
    plan, profile = two_pipelines(), make_profile([1.0] * 4)
    lists = one_f_one_b(plan, tied=False)
    assert all(actions[-2:] == (Action(Op.REDUCE, n), Action(Op.STEP, n)) for n, actions in _by_stage(lists))
    without = {rank: tuple(a for a in actions if a.op is not Op.REDUCE) for rank, actions in lists.items()}
    with pytest.raises(UserError, match="must REDUCE once"):
        simulate(plan, profile, without)


def _by_stage(lists: dict[int, tuple[Action, ...]]) -> list[tuple[int, tuple[Action, ...]]]:
    return [(actions[0].stage, actions) for actions in lists.values()]


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    profile = make_profile([1.0] * 3, bytes_per_s=SLOW)
    assert ring_s(profile, (0,), 3000) == 0.0
    assert ring_s(profile, (0, 1, 2), 3000) == pytest.approx(4.0)  # 2 * (3 - 1) rounds of 1,000 bytes
    slower = tuple(replace(li, bytes_per_s=250.0) if li.source == 1 else li for li in profile.links)
    assert ring_s(replace(profile, links=slower), (0, 1, 2), 3000) == pytest.approx(16.0)


def test_unlike_cuts_sum_each_part_with_its_own_holders() -> None:
    halves = PipelinePlan((StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0)), 1, 1)
    whole = PipelinePlan((StagePlan((2,), 0, 4, 0),), 1, 1)
    plan, profile = Plan((halves, whole), 2, SEQUENCE, 4), make_profile([1.0] * 3, bytes_per_s=SLOW)
    assert replica_sync_s(plan, profile, 0, 2) == pytest.approx(5.6)
    assert replica_sync_s(plan, profile, 0, 4) == pytest.approx(11.2)
