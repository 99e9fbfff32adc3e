"""A profile after steps of a plan have been measured: what was too long or too short in it becomes as long as it was.

The trial before a run and rebalancing during one ask the same question. Steps scatter, so a ratio counts for what it is beyond
their noise; and of ranks that are alike the luckiest is not believed to be the fastest, unless the steps say so clearly.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from hetero_mpi.planning.fit import like_ranks, median_error, sigma_of
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.cluster_changes import AnyLink, with_slowness
from hetero_mpi.planning.types.cost import GRADIENT_BYTES
from hetero_mpi.planning.types.plan import Alone, IdleRank, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
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
class Measured:
    """How steps of a plan differed from their prediction. What was not measured is left out."""

    computing: Mapping[int, Ratios] = field(default_factory=dict)
    """Rank -> of its forwards and backwards. Of a group its first rank stands for those that are left out."""
    optimizer: Mapping[int, Ratios] = field(default_factory=dict)
    """Rank -> of its optimizer steps, where they were measured by themselves; else they are as forwards and backwards."""
    sums: Mapping[tuple[int, ...], Ratios] = field(default_factory=dict)
    """Ranks of a group -> of what they add up in their host's memory."""
    links: Mapping[Pair, Ratios] = field(default_factory=dict)
    """(source, destination) -> of messages from device to device."""


def corrected(profile: ClusterProfile, plan: Plan, measured: Measured) -> ClusterProfile:
    """``profile`` with ranks, sums of groups and links as they were in steps of ``plan``.

    What was not measured is as its like: a rank as those with the same device on like hosts, the sums of a host as those of like
    hosts, a link as others from the one host to the other. What has no like stays.
    """
    computing = dict(measured.computing)
    for rank, leader in plan.leader_of.items():
        if leader in computing:
            computing.setdefault(rank, computing[leader])
    number = {rank: place for place, like in enumerate(like_ranks(profile)) for rank in like}
    slowness, of_optimizer = (_believed(own, number, number.__getitem__) for own in (computing, measured.optimizer))
    slower = with_slowness(profile, slowness, of_optimizer)
    sums, links = _by_host(profile, measured)
    ranks: dict[str, list[int]] = {}
    for one in profile.devices:
        ranks.setdefault(one.host, []).append(number[one.rank])
    of_hosts = _believed(sums, ranks, lambda name: tuple(sorted(ranks[name])))
    hosts = tuple(_with_sums(host, of_hosts.get(host.name, 1.0)) for host in profile.hosts)
    return _with_links(replace(slower, hosts=hosts), plan, links)


def _believed(
    measured: Mapping[Key, Ratios], every: Iterable[Key], like: Callable[[Key], Hashable]
) -> dict[Key, float]:
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


def _by_host(profile: ClusterProfile, measured: Measured) -> tuple[dict[str, Ratios], dict[Pair, Ratios]]:
    """(host -> of sums that were measured in its memory, pairs of ranks -> of messages, and of sums that links tell)."""
    sums, links = dict[str, Ratios](), dict(measured.links)
    for ranks, ratios in measured.sums.items():
        host = profile.host(ranks[0])
        if host is not None and host.sum_bytes_per_s is not None:
            sums[host.name] = [*sums.get(host.name, ()), *ratios]
        else:
            for pair in itertools.permutations(ranks, 2):
                links.setdefault(pair, ratios)
    return sums, links


def _with_sums(host: HostProfile, ratio: float) -> HostProfile:
    if host.sum_bytes_per_s is None:
        return host
    return replace(host, sum_latency_s=host.sum_latency_s * ratio, sum_bytes_per_s=host.sum_bytes_per_s / ratio)


def _with_links(profile: ClusterProfile, plan: Plan, measured: Mapping[Pair, Ratios]) -> ClusterProfile:
    names = [device.host for device in profile.devices]
    own = {pair: _of_link(profile, plan, pair, ratios) for pair, ratios in measured.items()}

    def hosts(pair: Pair) -> tuple[str, str]:
        return names[pair[0]], names[pair[1]]

    listed = {(link.source, link.destination): link for link in profile.links}
    ratios = _believed(own, {**listed, **own}, hosts)
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
LEAST_GAIN = 0.03
"""Another plan is tried where it would be faster by this share: predictions are not better than that."""
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
    """Seconds of a trial of which so many steps count, about."""
    return _building_s(report.plan, profile) + (_UNCOUNTED + counted) * report.predicted_step_s


def _building_s(plan: Plan, profile: ClusterProfile) -> float:
    held: dict[int, float] = {}
    for layer, ranks in holders(plan).items():
        for rank in ranks:
            held[rank] = held.get(rank, 0.0) + profile.model.layers[layer].parameters
    return max(held.values()) / _PARAMETERS_PER_S


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
    reasons, idle = list[str](), list[IdleRank]()
    if said:
        reasons = [one for one in said[0].reasons if all(one in report.reasons for report in said)]
        idle = [one for one in said[0].idle if all(one in report.idle for report in said)]
    held, why = {one.rank: one.reason for one in idle}, list[IdleRank]()
    for one in taken.idle:
        beyond = told if other is None or one.rank in other.plan.ranks else _NOT_FOUND
        why.append(IdleRank(one.rank, held.get(one.rank, beyond)))
    own = taken.reasons[1:]
    first = f"tried: {units.seconds(taken.expected_step_s)} per step; {told}"
    return replace(
        taken,
        alone=_alone(taken, told, other),
        idle=tuple(why),
        reasons=(first, *own, *(one for one in reasons if one not in own)),
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
