"""Step times without events, sums of gradients, and plans to begin with."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hetero_mpi.planning.durations import exchange_s
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.search.costs import costs_by_size
from hetero_mpi.planning.search.layouts import best_layouts
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.planning_samples import SEQUENCE, make_model, make_profile, random_plan, renumbered

EQUAL = 1 + 1e-9


def cluster(seed: int, blocks: int = 12, memory_bytes: int = 60_000) -> ClusterProfile:
    """Eight ranks of three speeds on three hosts; messages and sums between hosts take a part of a block's time."""
    draw = random.Random(seed)
    slowness = [1.0] * 3 + [2.0] * 3 + [4.0] * 2
    profile = make_profile(slowness, make_model(blocks), memory_bytes, 0.01, 2e4)
    devices = tuple(replace(d, host=f"host{int(slowness[d.rank])}") for d in profile.devices)
    links = tuple(
        replace(link, latency_s=1e-4, bytes_per_s=1e6, same_host=True)
        if slowness[link.source] == slowness[link.destination]
        else replace(link, bytes_per_s=link.bytes_per_s * draw.uniform(0.5, 1.0))
        for link in profile.links
    )
    return replace(profile, devices=devices, links=links)


REQUEST = PlanRequest(48, SEQUENCE, (1,), max_pipelines=8, recompute_choices=(False, True))


@pytest.mark.parametrize("block", range(4))
def test_an_outline_is_the_simulation_to_the_last_bit(block: int) -> None:
    """Split backward, recompute, tied ends and several pipelines among them."""
    without_events = 0
    for seed in range(block * 50, block * 50 + 50):
        plan, profile = random_plan(seed)
        whole, outline = simulate(plan, profile), outlined(plan, profile)
        without_events += not outline.events
        assert outline.step_s == whole.step_s, seed
        assert outline.busy_s == pytest.approx(whole.busy_s)
    assert without_events > 5


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 3, 6), (0, 1, 3, 7), (2, 5), (7, 4, 0, 1, 2)])
def test_sums_take_as_long_as_durations_say(members: tuple[int, ...]) -> None:
    profile = cluster(0)
    sizes = np.array([0.0, 10.0, 4000.0])  # nothing trained: no message
    expected = [exchange_s(profile, members, size) for size in sizes.tolist()]
    (costs,) = costs_by_size(profile, REQUEST).values()
    numbers = [[device.rank for device in costs.devices].index(rank) for rank in members]
    assert costs.exchange_s(numbers, sizes).tolist() == pytest.approx(expected)


def test_several_is_no_slower_than_alike_pipelines_and_indifferent_to_numbers() -> None:
    profile = cluster(1)
    ((step_s, plan), *others) = best_layouts(profile, REQUEST)
    assert all(other_s >= step_s for other_s, _ in others)
    assert step_s == pytest.approx(simulate(plan, profile).step_s, rel=1e-9)
    again_s, _ = best_layouts(renumbered(profile, [5, 2, 7, 0, 3, 6, 1, 4]), REQUEST)[0]
    assert again_s == pytest.approx(step_s, rel=1e-9)
    ((alone_s, _),) = best_layouts(profile, replace(REQUEST, max_pipelines=1))
    assert step_s <= alone_s * EQUAL


def test_classes_do_not_depend_on_how_links_are_told() -> None:
    """Two hosts of three like ranks each, a third with one rank: by pairs of ranks and by pairs of hosts."""
    profile = make_profile([1.0] * 7, latency_s=0.1, bytes_per_s=1e4)
    devices = tuple(replace(d, host=f"host{d.rank // 3}") for d in profile.devices)
    links = tuple(
        replace(k, latency_s=0.001, same_host=True) if k.source // 3 == k.destination // 3 else k for k in profile.links
    )
    linked = replace(profile, devices=devices, links=links)
    hosts = sorted({d.host for d in devices})
    between = tuple(HostLinkProfile(a, b, 0.001 if a == b else 0.1, 1e4) for a in hosts for b in hosts)
    told = replace(linked, links=(), host_links=between)
    expected = [[0, 1, 2], [3, 4, 5], [6]]
    assert sorted(rank_classes(told)) == sorted(rank_classes(linked)) == expected
