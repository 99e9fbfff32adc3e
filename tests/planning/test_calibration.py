"""A profile after steps of a plan have been measured: it predicts them, and what is alike stays alike as far as they allow."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from hetero_mpi.planning.analysis.calibration import GroupSums, LinkBetween, Part, Ratios, calibrated_profile
from hetero_mpi.planning.group_costs import sum_s
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.profile import ANY_HOST, ClusterProfile, HostLinkProfile, HostProfile, LinkProfile
from tests.support.planning_samples import make_model, make_plan_of, make_profile

MODEL = make_model(8)
PLAN = make_plan_of([0, 3, 7, 10], [2, 1, 0], 4)
"""Ranks 0, 1 and 2; rank 3 idles."""


def cluster(speed: float = 1e4, names: str = "AAAB") -> ClusterProfile:
    """Ranks with a device by their letter: 0 and 1 on host a, 2 and 3 on hosts of their own."""
    profile = make_profile((1.0,) * 4, MODEL, latency_s=0.01, bytes_per_s=speed)
    hosts = dict(enumerate("aabc"))
    devices = tuple(replace(one, host=hosts[one.rank], name=names[one.rank]) for one in profile.devices)
    links = tuple(replace(link, same_host=hosts[link.source] == hosts[link.destination]) for link in profile.links)
    return replace(profile, devices=devices, links=links)


def block_s(profile: ClusterProfile) -> list[float]:
    return [one.layers["block"].forward_s.at(10) for one in profile.devices]


def slower_links(profile: ClusterProfile, ratios: Mapping[tuple[int, int], float]) -> ClusterProfile:
    def slower(link: LinkProfile) -> LinkProfile:
        ratio = ratios.get((link.source, link.destination), 1.0)
        return replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio)

    return replace(profile, links=tuple(map(slower, profile.links)))


def test_a_corrected_profile_predicts_the_measured_step() -> None:
    profile = cluster()
    copies = {"copy_latency_s": 0.002, "device_to_host_bytes_per_s": 3e4, "host_to_device_bytes_per_s": 5e4}
    profile = replace(profile, devices=tuple(replace(one, **copies) for one in profile.devices))  # type: ignore[arg-type]
    links = dict.fromkeys(itertools.permutations(range(4), 2), 4.0)
    truth = slower_links(with_slowness(profile, {0: 1.5, 1: 1.8, 2: 0.7}), links)
    real, guess = outlined(PLAN, truth), outlined(PLAN, profile)
    size = 10 * MODEL.sent_bytes_per_token(1)
    pairs = ((0, 1), (1, 0), (1, 2), (2, 1))
    measured: dict[Part, Ratios] = {rank: (real.busy_s[rank] / guess.busy_s[rank],) for rank in PLAN.ranks}
    for pair in pairs:
        measured[LinkBetween(pair)] = (truth.transfer_s(*pair, size) / profile.transfer_s(*pair, size),)
    found = outlined(PLAN, calibrated_profile(profile, PLAN, measured))
    assert abs(guess.step_s / real.step_s - 1) > 0.2 and found.step_s == pytest.approx(real.step_s, rel=0.01)


def test_the_median_of_steps_counts() -> None:
    measured = {0: (1.5, 1.5, 1.5, 20.0, 1.5), 2: (1.0, 0.99, 1.0, 9.0, 1.01)}
    assert block_s(calibrated_profile(cluster(names="ABCD"), PLAN, measured)) == pytest.approx(
        [1.5, 1.0, 1.0, 1.0], abs=0.01
    )


def test_a_ratio_below_the_noise_of_the_steps_changes_nothing() -> None:
    profile, draw = cluster(), random.Random(3)
    measured = {rank: [1.02 * draw.lognormvariate(0, 0.1) for _ in range(5)] for rank in range(3)}
    assert calibrated_profile(profile, PLAN, measured) == profile


def test_like_ranks_that_seem_to_differ_by_noise_are_changed_alike() -> None:
    """Rank 1, beside rank 0, is twice as slow as profiled, too."""
    steps = {0: (1.9, 2.1, 2.0), 1: (2.15, 1.95, 2.05)}
    seconds = block_s(calibrated_profile(cluster(), PLAN, steps))
    assert seconds[0] == seconds[1] == pytest.approx(2.03, rel=0.02) and seconds[2:] == [1.0, 1.0]


def test_like_ranks_that_differ_clearly_are_changed_each_by_itself_if_less() -> None:
    sharp = block_s(calibrated_profile(cluster(), PLAN, {0: (1.0, 1.0, 1.0), 1: (1.5, 1.5, 1.5)}))
    assert sharp[:2] == pytest.approx([1.0, 1.5], rel=0.02)
    damped = block_s(calibrated_profile(cluster(), PLAN, {0: (0.9, 1.0, 1.1), 1: (1.4, 1.5, 1.6)}))
    assert 1.0 < damped[0] < damped[1] < 1.5


def test_an_idle_rank_is_as_its_like() -> None:
    profile = cluster(names="ABCC")
    assert block_s(calibrated_profile(profile, PLAN, {2: (1.5,)})) == pytest.approx([1.0, 1.0, 1.5, 1.5], rel=0.01)
    told = {2: (1.5,), 3: (1.0,)}
    assert block_s(calibrated_profile(profile, PLAN, told)) == pytest.approx([1.0, 1.0, 1.5, 1.0], rel=0.01)


def test_the_first_rank_of_a_group_stands_for_the_others() -> None:
    first, second, *_ = PLAN.pipelines[0].stages
    grouped = replace(first, ranks=(0, 1), shares=(1, 1))
    plan = replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=(grouped, replace(second, ranks=(2,)))),))
    profile = cluster(names="ABCD")
    assert block_s(calibrated_profile(profile, plan, {0: (2.0,)})) == pytest.approx([2.0, 2.0, 1.0, 1.0], rel=0.01)
    assert block_s(calibrated_profile(profile, plan, {0: (2.0,), 1: (3.0,)}))[1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("in_memory", [True, False])
def test_sums_of_a_group(in_memory: bool) -> None:
    """As two ranks were timed in their host's memory, or as links tell."""
    host = HostProfile("a", 10**9, "made up", sum_latency_s=0.1, sum_bytes_per_s=1e3 if in_memory else None)
    profile = replace(cluster(), hosts=(host,))
    found = calibrated_profile(profile, PLAN, {GroupSums((0, 1)): (3.0, 3.0)})
    rel = 0.01 if in_memory else 0.2  # the links' latency weighs otherwise at another size
    assert sum_s(found, (0, 1), 1e3) == pytest.approx(3 * sum_s(profile, (0, 1), 1e3), rel=rel)
    assert found.devices == profile.devices and found.link(0, 2) == profile.link(0, 2)


def test_links_of_the_same_hosts_are_as_the_one_that_was_used() -> None:
    profile = cluster()
    found = calibrated_profile(profile, PLAN, {LinkBetween((1, 2)): (4.0, 4.1, 3.9)})
    slowness = {(link.source, link.destination): 1e4 / link.bytes_per_s for link in found.links}
    assert slowness.pop((1, 2)) == slowness.pop((0, 2)) == pytest.approx(4.0, rel=0.02)
    assert set(slowness.values()) == {1.0}


def test_links_that_hosts_tell() -> None:
    profile = replace(
        cluster(),
        links=(),
        host_links=(HostLinkProfile(ANY_HOST, ANY_HOST, 0.01, 1e4), HostLinkProfile("a", "a", 0.0, 1e6)),
    )
    found = calibrated_profile(profile, PLAN, {LinkBetween((1, 2)): (4.0,)})
    assert found.link(0, 2).bytes_per_s == pytest.approx(2.5e3, rel=0.01)
    assert found.link(2, 0) == profile.link(2, 0) and found.link(0, 1) == profile.link(0, 1)


def test_nothing_measured_changes_nothing() -> None:
    profile = cluster()
    assert calibrated_profile(profile, PLAN, {0: (), GroupSums((0, 1)): (0.0,), LinkBetween((0, 1)): ()}) == profile
