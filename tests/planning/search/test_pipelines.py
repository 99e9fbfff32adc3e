"""Several pipelines over many ranks: columns, chains, shares."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi.planning.memory_model import MemoryModel, predict_hosts, predict_memory
from hetero_mpi.planning.search.columns import Chains, along_hosts, in_columns, in_hosts
from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.search.layouts import _sequences_per_pipeline, _SimulatedLayout
from hetero_mpi.planning.search.layouts import best_layouts as layouts_of
from hetero_mpi.planning.search.pipelines import Line
from hetero_mpi.planning.search.rounds import Clock
from hetero_mpi.planning.search.search import Search
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.tables import levels, links_of, seconds_by_mode
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_profile

EQUAL = 1 + 1e-9


def on_hosts(hosts: str, slowness: dict[str, float], blocks: int = 6, memory_bytes: int = 10_000_000) -> ClusterProfile:
    """One rank per letter, on the host of that name; links inside a host are a hundred times as fast as the others."""
    profile = make_profile([slowness[name] for name in hosts], make_model(blocks), memory_bytes, 0.01, 1e5)
    devices = tuple(replace(d, host=name) for d, name in zip(profile.devices, hosts, strict=True))
    links = tuple(
        replace(link, latency_s=1e-4, bytes_per_s=1e7, same_host=True)
        if hosts[link.source] == hosts[link.destination]
        else link
        for link in profile.links
    )
    return replace(profile, devices=devices, links=links)


def by_host(profile: ClusterProfile) -> ClusterProfile:
    """The same links, told by pairs of hosts."""
    pairs = {}
    for link in profile.links:
        ends = profile.devices[link.source].host, profile.devices[link.destination].host
        pairs[ends] = HostLinkProfile(*ends, link.latency_s, link.bytes_per_s)
    return replace(profile, links=(), host_links=tuple(pairs.values()))


CLUSTER = on_hosts("aaaabbbbccdddd", {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0})
REQUEST = PlanRequest(48, SEQUENCE, (1, 2), max_pipelines=14, recompute_choices=(False, True))


def costs_of(profile: ClusterProfile, request: PlanRequest) -> Costs:
    """Ranks are counted as in the profile."""
    memory, devices = MemoryModel(profile, request), list(profile.devices)
    rooms, links = memory.budgets(devices), links_of(profile, devices)
    size, members = request.micro_batch_choices[0], [(i,) for i in range(len(devices))]
    return Costs(
        memory, size, devices, rooms, *seconds_by_mode(memory.model, request, devices, size, ()), *links, members
    )


def keys(costs: Costs) -> tuple[np.ndarray, ...]:
    return levels(costs.usable), costs.outward_level, levels(costs.speed)


def names(costs: Costs, columns: list[tuple[int, ...]]) -> list[str]:
    return ["".join(costs.devices[rank].host for rank in column) for column in columns]


def test_columns_within_hosts_and_along_them() -> None:
    costs = costs_of(CLUSTER, REQUEST)
    assert names(costs, in_hosts(costs, 2, keys(costs))) == ["aa", "aa", "bb", "bb", "cc", "dd", "dd"]
    assert names(costs, in_hosts(costs, 3, keys(costs))) == ["aaa", "bbb", "ddd", "abc"]
    along = along_hosts(costs, 2, keys(costs))
    assert names(costs, along) == ["ab"] * 4 + ["cc"] + ["dd"] * 2
    assert [column[0] for column in along[:4]] == [0, 1, 2, 3]


def test_levels_join_what_noise_tells_apart() -> None:
    assert levels(np.array([10.0, 9.5, 5.0, 5.2, 1.0])).tolist() == [10.0, 10.0, 5.2, 5.2, 1.0]


def found_of(columns: Costs, cuts: tuple[int, ...], warm_up: tuple[int, ...]) -> _SimulatedLayout:
    """One pipeline through the first columns, with equal shares of the batch."""
    chains, places = Chains(columns), tuple(range(len(warm_up)))
    counts = tuple(b - a for a, b in itertools.pairwise(cuts))
    sequences = chains.micro_batches * columns.micro_batch
    line = Line(places, counts, tuple(depth + 1 for depth in warm_up), columns.micro_batch, sequences)
    chain = columns.fitted(line)
    assert chain is not None
    step_s = Clock({columns.micro_batch: columns}).step_s([chain])
    return _SimulatedLayout(chains, chain, step_s)


def plan_of(found: _SimulatedLayout, shares: list[int]) -> Plan:
    ranks = range(99)
    pipelines = tuple(one.pipeline(ranks, False) for one in found.pipelines(shares))
    return Plan(pipelines, sum(shares), SEQUENCE, found.chains.columns.layer_count)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_a_chain_takes_as_long_as_the_simulator_says(pipelines: int) -> None:
    """Columns of like ranks: the chain is each of its pipelines, sums and optimizer included."""
    costs = costs_of(CLUSTER, replace(REQUEST, memory_reserve=0.0))
    columns = in_columns(costs, in_hosts(costs, pipelines, keys(costs))[:3])
    for warm_up in ((2, 1, 0), (5, 3, 1), (9, 4, 0)):
        found, shares = found_of(columns, (0, 3, 5, 8), warm_up), [48 // pipelines] * pipelines
        assert found.step_s == pytest.approx(simulate(plan_of(found, shares), CLUSTER).step_s, rel=1e-12)
        assert Clock({1: costs}).step_s(found.pipelines(shares)) == pytest.approx(found.step_s, rel=1e-12)


def several(profile: ClusterProfile, request: PlanRequest) -> Plan | None:
    """The best layout."""
    return next((plan for _, plan in layouts_of(profile, request)), None)


def test_shares_make_unlike_pipelines_end_together() -> None:
    profile = make_profile([1.0, 1.0, 3.0, 3.0], make_model(4))
    costs = costs_of(profile, PlanRequest(48, SEQUENCE, (1,), max_pipelines=2))
    found, clock = found_of(in_columns(costs, [(0, 2), (1, 3)]), (0, 3, 6), (1, 0)), Clock({1: costs})
    shares = _sequences_per_pipeline(found)
    assert sum(shares) == 48
    step_s = clock.step_s(found.pipelines(shares))
    assert step_s == min(clock.step_s(found.pipelines([n, 48 - n])) for n in range(1, 48))
    assert simulate(plan_of(found, shares), profile).step_s <= step_s * EQUAL


def test_many_ranks_are_planned_into_pipelines_that_fit_and_repeat() -> None:
    plan = several(CLUSTER, REQUEST)
    assert plan is not None and plan == several(CLUSTER, REQUEST)
    assert len(plan.pipelines) > 1 and sum(p.sequences for p in plan.pipelines) == 48
    step_s = simulate(plan, CLUSTER).step_s
    assert all(m.peak_bytes <= m.usable_bytes for m in predict_memory(plan, CLUSTER, REQUEST.memory_reserve))
    alone = several(CLUSTER, replace(REQUEST, max_pipelines=1))
    assert alone is not None and len(alone.pipelines) == 1
    assert step_s < simulate(alone, CLUSTER).step_s


def test_links_by_hosts_give_the_same_plan() -> None:
    compact = by_host(CLUSTER)
    assert compact.link(0, 5) == CLUSTER.link(0, 5) and compact.link(0, 1) == CLUSTER.link(0, 1)
    assert several(compact, REQUEST) == several(CLUSTER, REQUEST)


def test_links_by_hosts_are_kept_in_files_and_checked(tmp_path: Path) -> None:
    compact = by_host(CLUSTER)
    save_profile(compact, tmp_path / "cluster.toml")
    assert load_profile(tmp_path / "cluster.toml") == compact
    with refuses("profile.link_missing"):
        compact.link(3, 3)
    fewer = replace(compact, host_links=(*compact.host_links[1:], HostLinkProfile("a", "nowhere", 0.0, 1.0)))
    lost = compact.host_links[0]
    save_profile(fewer, tmp_path / "fewer.toml")
    with pytest.raises(UserError) as caught:
        load_profile(tmp_path / "fewer.toml")
    pairs = [(a.rank, b.rank) for a in CLUSTER.devices for b in CLUSTER.devices if a.rank != b.rank]
    gone = [p for p in pairs if tuple(CLUSTER.devices[r].host for r in p) == (lost.source, lost.destination)]
    assert all(f"missing the link {a} -> {b}" in str(caught.value) for a, b in gone) and gone
    assert "no such host: nowhere" in str(caught.value)


def test_sums_stay_in_hosts_when_the_network_is_slow() -> None:
    """Two hosts of two: one pipeline per host would sum all gradients over the slow link."""
    profile = on_hosts("aabb", {"a": 1.0, "b": 1.0}, memory_bytes=60_000)
    slow = tuple(link if link.same_host else replace(link, bytes_per_s=2e3) for link in profile.links)
    profile = replace(profile, links=slow)
    plan = several(profile, PlanRequest(64, SEQUENCE, (1,), max_pipelines=4))
    assert plan is not None
    stages = list(zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True))
    assert [[profile.devices[s.ranks[0]].host for s in column] for column in stages] in (
        [["a", "a"], ["b", "b"]],
        [["b", "b"], ["a", "a"]],
    )


def test_ranks_that_share_a_hosts_memory_must_fit_together() -> None:
    profile = on_hosts("aabb", {"a": 1.0, "b": 1.0})
    devices = tuple(replace(device, shares_host_memory=True) for device in profile.devices)
    request = PlanRequest(16, SEQUENCE, (1,), max_pipelines=4)
    roomy = replace(profile, devices=devices, hosts=tuple(HostProfile(name, 10_000_000, "made up") for name in "ab"))
    plan = several(roomy, request)
    assert plan is not None
    most = max(host.peak_bytes for host in predict_hosts(plan, roomy))
    tight = replace(roomy, hosts=tuple(HostProfile(name, most // 4, "made up") for name in "ab"))
    other = several(tight, request)
    assert other is None or all(h.peak_bytes <= h.usable_bytes for h in predict_hosts(other, tight, 0.05))


def test_pipelines_that_end_together_are_changed_together() -> None:
    """Both have their long stage in front, and neither gains by itself."""
    profile = make_profile([1.0] * 4, make_model(6))
    request = PlanRequest(16, SEQUENCE, (2,), max_pipelines=2)
    cuts = (0, 6, 8)
    pair = [(StagePlan((a,), *cuts[:2], 1), StagePlan((b,), *cuts[1:], 0)) for a, b in ((0, 1), (2, 3))]
    plan = Plan(tuple(PipelinePlan(stages, 2, 8) for stages in pair), 16, SEQUENCE, 8)
    step_s = simulate(plan, profile).step_s
    found = Search(profile, request).best([(plan, step_s)])
    assert found is not None and found.step_s == simulate(found.plan, profile).step_s < 0.99 * step_s
    fixed = Search(profile, replace(request, schedule="1f1b")).best([(plan, step_s)])
    assert fixed is not None and fixed.step_s < 0.99 * step_s
    depths = [[stage.warm_up for stage in pipeline.stages] for pipeline in fixed.plan.pipelines]
    assert all(own == list(range(len(own)))[::-1] for own in depths)


@pytest.mark.parametrize("ranks", [3, 5])
def test_every_pipeline_has_a_whole_micro_batch(ranks: int) -> None:
    """Four sequences in micro-batches of two: two pipelines at most, whatever the number of ranks."""
    found = layouts_of(make_profile([1.0] * ranks), PlanRequest(4, SEQUENCE, (2,), max_pipelines=4))
    assert {len(plan.pipelines) for _, plan in found} <= {1, 2} and found
