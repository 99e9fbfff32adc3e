"""Profile calibration: a profile after steps of a plan have been measured, and how long they may take.

The trial before a run and rebalancing during one ask the same question. Steps scatter, so a ratio counts for what it is beyond
their noise; and of ranks that are alike the luckiest is not believed to be the fastest, unless the steps say so clearly.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hetero_mpi.planning.fit import like_ranks, median_error, sigma_of
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.cluster_changes import AnyLink, with_slowness
from hetero_mpi.planning.types.plan import Alone, IdleRank, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES
from hetero_mpi.util import units

LEAST_ERROR = 0.01
"""No ratio is known to better than this share."""
CLEAR = 1.5
"""A ratio within so many standard errors of what it would be otherwise changes nothing."""
LEAST_LINK = 0.1
"""Least share of a message's predicted seconds that stays on its link, where copies at its ends seem to leave it nothing."""

Key = TypeVar("Key", bound=Hashable)
Pair = tuple[int, int]
Ratios = Sequence[float]
"""Measured over predicted seconds, one for every step: 2 where it took twice as long."""


@dataclass(frozen=True)
class OptimizerSteps:
    """A rank's optimizer steps, where they were measured by themselves; else they are as its forwards and backwards."""

    rank: int


@dataclass(frozen=True)
class GroupSums:
    """Sums that the ranks of a group make in their host's memory."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkBetween:
    """Messages from the device of one rank to that of another; during a run, there and back."""

    ranks: Pair


WatchedPart = int | GroupSums | LinkBetween
"""A part of a step that has a speed. An int: the forwards and backwards of this rank, of a group's first rank for all of it."""
Part = WatchedPart | OptimizerSteps


def part_text(part: WatchedPart, hosts: Sequence[str]) -> str:
    """``rank 1 (titan)``. ``hosts``: of the ranks."""
    if isinstance(part, GroupSums):
        return f"the sums of ranks {' and '.join(map(str, part.ranks))} ({hosts[part.ranks[0]]})"
    if isinstance(part, LinkBetween):
        return "the link from " + " to ".join(f"rank {rank} ({hosts[rank]})" for rank in part.ranks)
    return f"rank {part} ({hosts[part]})"


def drifted_profile(profile: ClusterProfile, plan: Plan, ratios: Mapping[WatchedPart, float]) -> ClusterProfile:
    """``profile`` at the speeds of a run. Parts without a ratio are as they were: a machine that has changed says nothing of its
    like."""
    all_ratios: dict[Part, float] = dict.fromkeys(range(len(profile.devices)), 1.0)
    all_ratios.update(ratios.items())
    for part, ratio in ratios.items():
        if isinstance(part, LinkBetween):
            all_ratios[LinkBetween((part.ranks[1], part.ranks[0]))] = ratio
    own = {part: (ratio,) for part, ratio in all_ratios.items() if part not in plan.leader_of}
    return calibrated_profile(profile, plan, own)


def calibrated_profile(profile: ClusterProfile, plan: Plan, ratios: Mapping[Part, Ratios]) -> ClusterProfile:
    """``profile`` with ranks, sums of groups and links as they were in steps of ``plan``.

    What was not measured is as its like: a rank as those with the same device on like hosts, the sums of a host as those of like
    hosts, a link as others from the one host to the other. What has no like stays.
    """
    computing = {part: own for part, own in ratios.items() if isinstance(part, int)}
    for rank, leader in plan.leader_of.items():
        if leader in computing:
            computing.setdefault(rank, computing[leader])
    optimizer = {part.rank: own for part, own in ratios.items() if isinstance(part, OptimizerSteps)}
    class_of = {rank: place for place, like in enumerate(like_ranks(profile)) for rank in like}
    slowness, of_optimizer = (factors(own, class_of, class_of.__getitem__) for own in (computing, optimizer))
    links = {part.ranks: own for part, own in ratios.items() if isinstance(part, LinkBetween)}
    sums = dict[str, list[float]]()
    for part, own in ratios.items():
        if isinstance(part, GroupSums):
            host = profile.host(part.ranks[0])
            if host is not None and host.sum_bytes_per_s is not None:
                sums.setdefault(host.name, []).extend(own)
            else:  # links tell them
                links = {**dict.fromkeys(itertools.permutations(part.ranks, 2), own), **links}
    classes: dict[str, list[int]] = {}
    for device in profile.devices:
        classes.setdefault(device.host, []).append(class_of[device.rank])
    of_hosts = factors(sums, classes, lambda name: tuple(sorted(classes[name])))
    hosts = tuple(
        host
        if host.sum_bytes_per_s is None
        else replace(host, sum_latency_s=host.sum_latency_s * ratio, sum_bytes_per_s=host.sum_bytes_per_s / ratio)
        for host, ratio in ((host, of_hosts.get(host.name, 1.0)) for host in profile.hosts)
    )
    return _with_links(replace(with_slowness(profile, slowness, of_optimizer), hosts=hosts), plan, links)


def factors(measured: Mapping[Key, Ratios], every: Iterable[Key], like: Callable[[Key], Hashable]) -> dict[Key, float]:
    """Ratios to change ``every`` by: the median of the steps, as far as it is further than their noise from that of its like."""
    logs = {key: [math.log(one) for one in ratios if 0 < one < math.inf] for key, ratios in measured.items()}
    middles = {key: statistics.median(own) for key, own in logs.items() if own}
    sigma = _step_noise([own for own in logs.values() if own])
    errors = {key: max(LEAST_ERROR, median_error(sigma, len(logs[key]))) for key in middles}
    classes: dict[Hashable, list[Key]] = {}
    for key in every:
        classes.setdefault(like(key), []).append(key)
    found = {}
    for keys in classes.values():
        known = [key for key in keys if key in middles]
        if known:
            middle = statistics.median(middles[key] for key in known)
            common = _clear(middle, statistics.fmean(errors[key] for key in known) / math.sqrt(len(known)))
            for key in keys:
                own = _clear(middles[key] - middle, errors[key]) if key in middles else 0.0
                found[key] = math.exp(common + own)
    return found


def _clear(away: float, error: float) -> float:
    """The part that counts of a difference known up to ``error``: nothing of a small one, nearly all of a large one."""
    return away * max(0.0, 1 - (CLEAR * error / away) ** 2) if away else 0.0


def _step_noise(logs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a step, in logarithms, from all that was measured of several; robust against a few slow steps."""
    away = []
    for own in logs:
        middle, count = statistics.median(own), len(own)
        off = sorted(abs(one - middle) for one in own)[count % 2 :]  # the middle one of an odd number is no deviation
        away += [one * math.sqrt(count / (count - 1)) for one in off]
    return sigma_of(away)


def _with_links(profile: ClusterProfile, plan: Plan, measured: Mapping[Pair, Ratios]) -> ClusterProfile:
    names = [device.host for device in profile.devices]
    own = {pair: _of_link(profile, plan, pair, ratios) for pair, ratios in measured.items()}

    def hosts(pair: Pair) -> tuple[str, str]:
        return names[pair[0]], names[pair[1]]

    listed = {(link.source, link.destination): link for link in profile.links}
    ratios = factors(own, {**listed, **own}, hosts)
    links = tuple(_slower(link, ratios.get(pair, 1.0)) for pair, link in listed.items())
    # Pairs that are told by their hosts have what all of them have in common.
    told: dict[tuple[str, str], list[float]] = {}
    for pair, ratio in ratios.items():
        if pair not in listed:
            told.setdefault(hosts(pair), []).append(ratio)
    between = {(link.source, link.destination): link for link in profile.host_links}
    for ends, known in told.items():
        link = profile.host_link(*ends)
        if link is not None:
            between[ends] = _slower(replace(link, source=ends[0], destination=ends[1]), statistics.median(known))
    return replace(profile, links=links, host_links=tuple(between.values()))


def _of_link(profile: ClusterProfile, plan: Plan, pair: Pair, ratios: Ratios) -> list[float]:
    """Ratios of the link, from those of messages: copies at both ends are what they were."""
    size = _message_bytes(profile, plan, pair)
    link = profile.link(*pair)
    link_s = link.latency_s + size / link.bytes_per_s
    copies_s = profile.transfer_s(*pair, size) - link_s
    if link_s <= 0:
        return []
    return [max(LEAST_LINK, (ratio * (link_s + copies_s) - copies_s) / link_s) for ratio in ratios if ratio > 0]


def _message_bytes(profile: ClusterProfile, plan: Plan, pair: Pair) -> float:
    """The largest message between two ranks: of neighbouring stages, else a share of the largest layer's gradients."""
    model, sizes = profile.model, [0.0]
    for pipeline in plan.pipelines:
        for before, after in itertools.pairwise(pipeline.stages):
            if {before.ranks[0], after.ranks[0]} == set(pair):
                tokens = pipeline.micro_batch * plan.sequence_length
                sizes.append(tokens * model.sent_bytes_per_token(after.first - 1))
    gradients = GRADIENT_BYTES * max(layer.trainable_parameters for layer in model.layers)
    return max(sizes) or max(1.0, gradients / max(2, len(plan.pipelines)))


def _slower(link: AnyLink, ratio: float) -> AnyLink:
    return replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio)


SHARE = 0.05
"""The trial of a plan takes at most this share of what the run is predicted to take ..."""
LONG_S, LONG_SHARE = 60.0, 0.15
"""... or this one, where the run takes longer than so many seconds; so much also where another plan is looked for and tried."""
MOST_COUNTED, LEAST_COUNTED = 5, 1
"""Steps that count. Before them come the rehearsal and a first one of all ranks together."""
_UNCOUNTED = 2
_PARAMETERS_PER_S = 1e8
"""How fast weights are made up, roughly: 8 billion in 80 s."""
_NOT_FOUND = "by the times of the trial, the search found no faster plan with it"


@dataclass(frozen=True)
class Allowance:
    """How long a trial may be."""

    counted: int
    """Steps that count; 0: the plan is not tried."""
    seconds: float
    """Length of a trial, about."""
    most_s: float = math.inf
    """No other plan is looked for and tried where that would end later than so many seconds after the first one's trial began."""


def allowance(report: PlanReport, profile: ClusterProfile, steps: int, wanted: bool) -> Allowance:
    """``steps``: those that the run takes. ``wanted``: whatever it takes."""
    run_s = steps * report.predicted_step_s
    seconds = partial(trial_s, report, profile)
    for share, least_s in ((SHARE, 0.0), (LONG_SHARE, LONG_S)):
        for counted in range(MOST_COUNTED, LEAST_COUNTED - 1, -1):
            if run_s >= least_s and seconds(counted) <= share * run_s:
                return Allowance(counted, seconds(counted), math.inf if wanted else LONG_SHARE * run_s)
    return Allowance(LEAST_COUNTED, seconds(LEAST_COUNTED)) if wanted else Allowance(0, 0.0)


def trial_s(report: PlanReport, profile: ClusterProfile, counted: int) -> float:
    """Seconds of a trial of which ``counted`` steps count, about: a rank makes up its weights, then all take steps."""
    held = dict.fromkeys(report.plan.ranks, 0.0)
    for layer, ranks in holders(report.plan).items():
        for rank in ranks:
            held[rank] += profile.model.layers[layer].parameters
    return max(held.values()) / _PARAMETERS_PER_S + (_UNCOUNTED + counted) * report.predicted_step_s


def explained(
    taken: PlanReport, told: str, said: Sequence[PlanReport] = (), other: PlanReport | None = None
) -> PlanReport:
    """A plan that was tried, with reasons that belong to its figures as they were corrected.

    Args:
        taken: as ``planner.complete_plan`` has it for the corrected profile.
        told: what came of looking for another plan.
        said: plans as the planner gave them by unlike profiles: what it said of all of them still holds.
        other: the plan that was not taken.
    """
    reasons = [one for one in said[0].reasons if all(one in report.reasons for report in said)] if said else []
    kept = [one for one in said[0].idle if all(one in report.idle for report in said)] if said else []
    idle = {one.rank: one for one in kept}
    for rank in (one.rank for one in taken.idle):
        reason = told if other is None or rank in other.plan.ranks else _NOT_FOUND
        idle.setdefault(rank, IdleRank(rank, reason))
    first = f"tried: {units.seconds(taken.expected_step_s)} per step; {told}"
    return replace(
        taken,
        alone=_alone(taken, told, other),
        idle=tuple(idle[one.rank] for one in taken.idle),
        reasons=tuple(dict.fromkeys([first, *taken.reasons[1:], *reasons])),
    )


def _alone(taken: PlanReport, told: str, other: PlanReport | None) -> Alone | None:
    """The best rank alone; where that is the ``other`` plan, as it was tried, and why it is not taken where it would be faster."""
    best = taken.alone
    if best is None or best.step_s is None:
        return best
    step_s = best.step_s
    if other is not None and other.tried_step_s is not None and other.plan.ranks == [best.rank]:
        step_s = other.tried_step_s
    return replace(best, step_s=step_s, problem=told if step_s < taken.predicted_step_s else "")
