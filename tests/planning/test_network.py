"""Shared NICs, gradient all-reduces: makespans worked out by hand.

Stages of ``make_plan_of((0, 2, 4), ...)``: stage 0 takes 1.1 s forward and 2.2 s backward, stage 1 takes 1.5 s and 3.0 s; a message
of 1,000 bytes takes 1 s at 1,000 bytes/s. Gradients: 4,000 bytes of the embedding and of the head, 1,600 of a block.
"""

from dataclasses import replace
from itertools import permutations

import pytest

from hetero_mpi.comm.transport import ring_of
from hetero_mpi.planning.durations import exchange_s
from hetero_mpi.planning.schedule import Op, schedule_of
from hetero_mpi.planning.simulator import SimulatedStep, simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile, HostProfile
from hetero_mpi.planning.types.request import with_shared_nics
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_profile, random_plan

SLOW = 1000.0
"""Bytes per second: one second per message."""
MODEL = make_model()


def two_pipelines(ranks: tuple[int, int, int, int] = (0, 2, 1, 3), micro_batches: int = 1) -> Plan:
    """0 -> 2 and 1 -> 3 by default; each pipeline's first rank holds the first half."""
    a, b, c, d = ranks
    pipelines = tuple(
        PipelinePlan((StagePlan((first,), 0, 2, 1), StagePlan((second,), 2, 4, 0)), 1, micro_batches)
        for first, second in ((a, b), (c, d))
    )
    return Plan(pipelines, 2 * micro_batches, SEQUENCE, 4)


def on_one_host(profile: ClusterProfile, *groups: tuple[int, ...]) -> ClusterProfile:
    name = {rank: f"shared{number}" for number, ranks in enumerate(groups) for rank in ranks}
    devices = tuple(replace(d, host=name.get(d.rank, d.host)) for d in profile.devices)
    return replace(profile, devices=devices)


def spans(result: SimulatedStep, op: Op) -> dict[str, tuple[float, float]]:
    """Action -> when it began and ended, in tenths of a microsecond."""
    return {str(e.action): (round(e.start_s, 7), round(e.end_s, 7)) for e in result.events if e.action.op is op}


@pytest.mark.parametrize(
    ("shared", "layer_3", "step_s"),
    [
        # Both pipelines as if alone: last stages 2.1-6.6, first ones 7.6-9.8; every layer's sum has a round of half its bytes.
        # Layers 3 4.6-6.6, 2 6.6-7.4 (ranks 2, 3), layers 1 9.6-10.4, 0 10.4-12.4 (ranks 0, 1), whose new values take 2.8 s: the
        # next forward hides 0.55 s of it, that of one of its two layers.
        (False, 4.6, 14.65),
        # Rank 1's activation leaves the host of ranks 0 and 1 after rank 0's, and all that follows is a second later.
        (True, 5.6, 15.65),
    ],
)
def test_ranks_of_one_host_queue_for_its_card(shared: bool, layer_3: float, step_s: float) -> None:
    profile = on_one_host(make_profile([1.0] * 4, bytes_per_s=SLOW), (0, 1))
    found = replace(profile, hosts=(HostProfile("shared0", 10**9, "made up", shared_nic=shared),))
    by_option = simulate(two_pipelines(), with_shared_nics(profile) if shared else profile)
    for result in (by_option, simulate(two_pipelines(), found)):
        assert spans(result, Op.REDUCE)["1REDUCE3"] == (layer_3, layer_3 + 2)
        assert result.step_s == pytest.approx(step_s)


def test_the_card_serves_who_comes_first_not_the_lower_rank() -> None:
    """Rank 0 is slower: rank 1 has sent (1.1 s to 2.1 s) before rank 0 begins (2.2 s), and so for the gradients."""
    profile = on_one_host(make_profile([2.0, 1.0, 1.0, 1.0], bytes_per_s=SLOW), (0, 1))
    shared = simulate(two_pipelines(), with_shared_nics(profile))
    assert shared == simulate(two_pipelines(), profile)


def test_messages_inside_a_host_do_not_use_its_card() -> None:
    profile = on_one_host(make_profile([1.0] * 4, bytes_per_s=SLOW), (0, 1, 2, 3))
    plan = two_pipelines(micro_batches=2)
    assert simulate(plan, with_shared_nics(profile)) == simulate(plan, profile)


def test_sums_of_two_stages_queue_for_the_card_between_their_hosts() -> None:
    """Pipelines 0 -> 1 on one host, 2 -> 3 on another: all sums cross between the two.

    ::

        links of their own     layers 3 7.6-15.6, 2 15.6-18.8, and beside them 1 15.6-18.8, 0 18.8-26.8
        a NIC per host        layers 3 7.6-15.6, 2 15.6-18.8, 1 18.8-22.0, 0 22.0-30.0

    New values take 11.2 s, of which half a forward of 1.1 s hides 0.55 s.
    """
    profile = on_one_host(make_profile([1.0] * 4, bytes_per_s=SLOW / 4), (0, 1), (2, 3))
    plan = two_pipelines((0, 1, 2, 3))
    free, shared = simulate(plan, profile), simulate(plan, with_shared_nics(profile))
    assert spans(free, Op.REDUCE)["0REDUCE1"] == (15.6, 18.8) and free.step_s == pytest.approx(26.8 + 10.65)
    assert spans(shared, Op.REDUCE)["1REDUCE2"] == (15.6, 18.8)
    assert spans(shared, Op.REDUCE)["0REDUCE1"] == (18.8, 22.0) and shared.step_s == pytest.approx(30 + 10.65)


def test_shares_of_a_tied_matrix_queue_for_the_card_too() -> None:
    """Heads on ranks 2 and 3 of one host, embeddings on ranks 0 and 1 of another; a share takes 4 s there, and back.

    ::

        rank 2   head whole at 4.6, share until 8.6
        rank 3   a second later, since rank 1's activation queued: whole at 5.6, its share waits until 8.6, there at 12.6
        ranks 0, 1   layer 1 10.6-11.4, layer 0 12.6-14.6, its new values until 16.6, STEP until 20.6
    """
    profile = on_one_host(make_profile([1.0] * 4, make_model(tied=True), bytes_per_s=SLOW), (0, 1), (2, 3))
    result = simulate(two_pipelines(), with_shared_nics(profile))
    found = spans(result, Op.REDUCE)
    assert (found["1REDUCE0"], found["3REDUCE0"]) == ((4.6, 8.6), (8.6, 12.6))
    assert (found["2REDUCE1"], found["2REDUCE0"]) == ((10.6, 11.4), (12.6, 14.6))
    assert result.step_s == pytest.approx(20.6)


@pytest.mark.parametrize("seed", range(60))
def test_shared_nics_only_ever_add_time(seed: int) -> None:
    plan, profile = random_plan(seed)
    profile = replace(profile, hosts=tuple(replace(host, shared_nic=False) for host in profile.hosts))
    free = simulate(plan, profile)
    assert simulate(plan, with_shared_nics(profile)).step_s >= free.step_s * (1 - 1e-12)


def test_every_rank_sums_its_gradients_when_there_are_several_pipelines() -> None:
    plan, profile = two_pipelines(), make_profile([1.0] * 4)
    lists = schedule_of(plan, MODEL)
    without = {rank: tuple(a for a in actions if a.op is not Op.REDUCE) for rank, actions in lists.items()}
    with refuses("schedule.invalid", "REDUCE"):
        simulate(plan, profile, without)


def sharing(*groups: tuple[int, ...]) -> ClusterProfile:
    ranks = 1 + max(rank for group in groups for rank in group)
    return with_shared_nics(on_one_host(make_profile([1.0] * ranks, bytes_per_s=SLOW), *groups))


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [
        ([(0,), (1,), (2,), (3,)], 6.0),  # two hops of 3 messages of 1,000 bytes per rank
        ([(0, 1, 2, 3)], 6.0),
        ([(0, 1), (2, 3)], 6.0),  # around the ring, 6 hops
        ([(0, 2), (1, 3)], 6.0),
        ([(0, 1, 2), (3,)], 6.0),
    ],
)
def test_a_sum_moves_as_many_bytes_through_every_card_however_ranks_share_hosts(
    groups: list[tuple[int, ...]], seconds: float
) -> None:
    assert exchange_s(sharing(*groups), (0, 1, 2, 3), 4000) == pytest.approx(seconds / 2)
    assert exchange_s(sharing(*groups), (3, 1, 0, 2), 4000) == pytest.approx(seconds / 2), "the order does not matter"
    assert exchange_s(sharing(*groups), (2,), 4000) == 0.0


@pytest.mark.parametrize("pair", [(2, 1), (0, 1), (0, 2)])
def test_a_ring_is_as_slow_as_the_slowest_link_between_its_ranks(pair: tuple[int, int]) -> None:
    """Ranks 0, 2 and 1, 3 share hosts; who is whose neighbour does not count."""
    profile = sharing((0, 2), (1, 3))
    links = (replace(li, bytes_per_s=250.0) if (li.source, li.destination) == pair else li for li in profile.links)
    assert exchange_s(replace(profile, links=tuple(links)), (0, 1, 2, 3), 4000) == pytest.approx(12.0)


@pytest.mark.parametrize("seed", range(10))
def test_messages_between_all_pairs_are_those_one_by_one(seed: int) -> None:
    _, profile = random_plan(seed)
    ranks = [device.rank for device in reversed(profile.devices)]
    found = profile.messages_s(ranks, 1234)
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            assert found[i, j] == pytest.approx(profile.transfer_s(a, b, 1234) if a != b else 0.0)


def test_links_of_hosts_stand_for_those_of_their_ranks() -> None:
    names = ("shared0", "shared1", "host4")
    profile = on_one_host(make_profile([1.0] * 5), (0, 1), (2, 3))
    between = tuple(HostLinkProfile(a, b, i, 100.0 + j) for i, a in enumerate(names) for j, b in enumerate(names))
    profile = replace(profile, links=(), host_links=between)
    assert profile.messages_s((1, 2, 4), 500)[0, 1] == pytest.approx(profile.transfer_s(1, 2, 500))
    assert profile.messages_s((4, 0, 1), 500)[0, 2] == pytest.approx(profile.transfer_s(4, 1, 500))
    with refuses("profile.link_missing", "0 -> 1"):
        replace(profile, host_links=between[1:]).messages_s((0, 1, 4), 500)


def test_direct_exchange_is_as_slow_as_its_busiest_rank() -> None:
    """All that rank 1 sends takes four times as long: two messages of 1,000 bytes, 4 s each."""
    profile = make_profile([1.0] * 3, bytes_per_s=SLOW)
    assert exchange_s(profile, (0, 1, 2), 3000) == pytest.approx(2.0)
    slower = tuple(replace(li, bytes_per_s=250.0) if li.source == 1 else li for li in profile.links)
    assert exchange_s(replace(profile, links=slower), (0, 1, 2), 3000) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("hosts", "ring"),
    [
        ("abc", None),
        ("aaa", None),
        ("aab", (0, 1, 2)),
        ("aba", (0, 2, 1)),
        ("abbac", (0, 3, 1, 2, 4)),
    ],
)
def test_ranks_that_share_hosts_with_some_of_the_others_sum_in_a_ring(hosts: str, ring: tuple[int, ...] | None) -> None:
    ranks = range(len(hosts))
    assert ring_of(ranks, hosts) == ring
    assert ring_of([*reversed(ranks)], hosts[::-1]) == ring


@pytest.mark.parametrize("hosts", ["abcdefgh", "aabbccdd", "aaaabbbb", "aaaaaaab", "abababab"])
def test_bytes_that_leave_a_host(hosts: str) -> None:
    """At most 2 (n - 1) / n of those that are summed, whichever way they take; direct exchange would be more."""
    count, ring = len(hosts), ring_of(range(len(hosts)), hosts)
    pairs = list(permutations(range(count), 2)) if ring is None else list(zip(ring, (*ring[1:], ring[0]), strict=True))
    hops = 2 if ring is None else 2 * (count - 1)
    for host in set(hosts):
        leaving = sum(hosts[a] == host != hosts[b] for a, b in pairs)
        assert hops * leaving <= 2 * (count - 1)
