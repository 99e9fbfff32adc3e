"""Profile calibration: correct a profile with measured steps, and limit the length of a calibration run.

Calibration runs and rebalancing both use this module. Only ratios that exceed the noise of the measured steps count.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero_mpi.planning.fit import like_ranks, median_error, sigma_of
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.cluster_changes import AnyLink, with_slowness
from hetero_mpi.planning.types.plan import ALL_RANKS_WORK, Alone, IdleRank, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES
from hetero_mpi.util import units
from hetero_mpi.util.grouping import Key, grouped

MIN_RATIO_ERROR = 0.01
"""Minimum relative error of a measured ratio."""
MIN_STANDARD_ERRORS = 1.5
"""Deviations within this many standard errors change nothing."""
MIN_LINK_RATIO = 0.1
"""Minimum ratio of a link's measured to its predicted time, after copies are subtracted."""

Pair = tuple[int, int]
Ratios = Sequence[float]
"""Measured over predicted seconds, one value per step."""


@dataclass(frozen=True)
class OptimizerSteps:
    """A rank's optimizer steps. If they are not measured, the ratio of the rank's passes is used."""

    rank: int


@dataclass(frozen=True)
class GroupSums:
    """All-reduces of a tensor-parallel group in its host's memory."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkBetween:
    """Messages from one rank's device to another's, or round trips if measured during a run."""

    ranks: Pair


WatchedPart = int | GroupSums | LinkBetween
"""A part of a step with its own speed. An int stands for the passes of a rank, or of the group that it leads."""
Part = WatchedPart | OptimizerSteps


def part_text(part: WatchedPart, hosts: Sequence[str]) -> str:
    """Name a part, for example ``rank 1 (titan)``. ``hosts``: host of each rank."""
    if isinstance(part, GroupSums):
        return f"the all-reduce of ranks {' and '.join(map(str, part.ranks))} ({hosts[part.ranks[0]]})"
    if isinstance(part, LinkBetween):
        return "the link from " + " to ".join(f"rank {rank} ({hosts[rank]})" for rank in part.ranks)
    return f"rank {part} ({hosts[part]})"


def drifted_profile(profile: ClusterProfile, plan: Plan, ratios: Mapping[WatchedPart, float]) -> ClusterProfile:
    """``profile`` at the speeds measured during a run. Parts that were not measured keep their speed."""
    all_ratios: dict[Part, float] = dict.fromkeys(range(len(profile.devices)), 1.0)
    all_ratios.update(ratios.items())
    # Other programs take cores from idle CPU ranks as well: take them to be as slow as the least slowed one on their host.
    hosts = {d.rank: d.host for d in profile.devices if d.backend == "cpu"}
    for idle in hosts.keys() - set(plan.ranks):
        at_work = (ratios.get(rank, 1.0) for rank in plan.ranks if hosts.get(rank) == hosts[idle])
        all_ratios[idle] = max(all_ratios[idle], min(at_work, default=1.0))
    for part, ratio in ratios.items():
        if isinstance(part, LinkBetween):
            all_ratios[LinkBetween((part.ranks[1], part.ranks[0]))] = ratio
    ratios_by_part = {part: (ratio,) for part, ratio in all_ratios.items() if part not in plan.leader_of}
    return calibrated_profile(profile, plan, ratios_by_part)


def calibrated_profile(profile: ClusterProfile, plan: Plan, ratios: Mapping[Part, Ratios]) -> ClusterProfile:
    """Calibrate ranks, group all-reduces and links to the measured steps of ``plan``.

    Unmeasured parts follow measured parts of the same kind: the same device on similar hosts, or links between the same hosts.
    """
    computing = {part: values for part, values in ratios.items() if isinstance(part, int)}
    for rank, leader in plan.leader_of.items():
        if leader in computing:
            computing.setdefault(rank, computing[leader])
    optimizer = {part.rank: values for part, values in ratios.items() if isinstance(part, OptimizerSteps)}
    class_of = {rank: index for index, like_group in enumerate(like_ranks(profile)) for rank in like_group}
    slowness, of_optimizer = (factors(values, class_of, class_of.__getitem__) for values in (computing, optimizer))
    links = {part.ranks: values for part, values in ratios.items() if isinstance(part, LinkBetween)}
    sums = dict[str, list[float]]()
    for part, values in ratios.items():
        if isinstance(part, GroupSums):
            host = profile.host(part.ranks[0])
            if host is not None and host.sum_bytes_per_s is not None:
                sums.setdefault(host.name, []).extend(values)
            else:  # all-reduces over links
                links = {**dict.fromkeys(itertools.permutations(part.ranks, 2), values), **links}
    ranks_of = grouped(range(len(profile.devices)), lambda rank: profile.devices[rank].host)
    of_hosts = factors(sums, ranks_of, lambda name: tuple(sorted(class_of[rank] for rank in ranks_of[name])))
    hosts = tuple(
        host
        if host.sum_bytes_per_s is None
        else replace(host, sum_latency_s=host.sum_latency_s * ratio, sum_bytes_per_s=host.sum_bytes_per_s / ratio)
        for host, ratio in ((host, of_hosts.get(host.name, 1.0)) for host in profile.hosts)
    )
    return _with_links(replace(with_slowness(profile, slowness, of_optimizer), hosts=hosts), plan, links)


def factors(measured: Mapping[Key, Ratios], items: Iterable[Key], kind: Callable[[Key], Hashable]) -> dict[Key, float]:
    """Calibration factor of each key: its class's median ratio times its own deviation from it, both reduced by the noise."""
    logs = {key: [math.log(ratio) for ratio in ratios if 0 < ratio < math.inf] for key, ratios in measured.items()}
    medians = {key: statistics.median(step_logs) for key, step_logs in logs.items() if step_logs}
    sigma = _step_noise([step_logs for step_logs in logs.values() if step_logs])
    errors = {key: max(MIN_RATIO_ERROR, median_error(sigma, len(logs[key]))) for key in medians}
    factor_by_key = {}
    for keys in grouped(items, kind).values():
        timed = [key for key in keys if key in medians]
        if timed:
            median = statistics.median(medians[key] for key in timed)
            common = _threshold(median, statistics.fmean(errors[key] for key in timed) / math.sqrt(len(timed)))
            for key in keys:
                step_logs = _threshold(medians[key] - median, errors[key]) if key in medians else 0.0
                factor_by_key[key] = math.exp(common + step_logs)
    return factor_by_key


def _threshold(difference: float, error: float) -> float:
    """Soft-threshold a difference by its standard error."""
    return difference * max(0.0, 1 - (MIN_STANDARD_ERRORS * error / difference) ** 2) if difference else 0.0


def _step_noise(logs: Sequence[Sequence[float]]) -> float:
    """Robust standard deviation of log ratios, pooled over all series that have several steps."""
    deviations = []
    for run in logs:
        middle, count = statistics.median(run), len(run)
        off = sorted(abs(log - middle) for log in run)[count % 2 :]  # the median is not a deviation
        deviations += [log * math.sqrt(count / (count - 1)) for log in off]
    return sigma_of(deviations)


def _with_links(profile: ClusterProfile, plan: Plan, measured: Mapping[Pair, Ratios]) -> ClusterProfile:
    names = [device.host for device in profile.devices]
    ratios_by_pair = {pair: _link_ratios(profile, plan, pair, ratios) for pair, ratios in measured.items()}

    def hosts(pair: Pair) -> tuple[str, str]:
        return names[pair[0]], names[pair[1]]

    listed = {(link.source, link.destination): link for link in profile.links}
    ratios = factors(ratios_by_pair, {**listed, **ratios_by_pair}, hosts)
    links = tuple(_slower(link, ratios.get(pair, 1.0)) for pair, link in listed.items())
    # Pairs without a link of their own share their hosts' median ratio.
    unlisted = grouped((pair for pair in ratios if pair not in listed), hosts)
    between = {(link.source, link.destination): link for link in profile.host_links}
    for ends, pairs in unlisted.items():
        link = profile.host_link(*ends)
        if link is not None:
            median = statistics.median(ratios[pair] for pair in pairs)
            between[ends] = _slower(replace(link, source=ends[0], destination=ends[1]), median)
    return replace(profile, links=links, host_links=tuple(between.values()))


def _link_ratios(profile: ClusterProfile, plan: Plan, pair: Pair, ratios: Ratios) -> list[float]:
    """Ratios for the link alone, assuming that copies at both ends take their predicted time."""
    # Of the largest message between two ranks: activations, else a share of the largest layer's gradients.
    model, sizes = profile.model, [0.0]
    for pipeline in plan.pipelines:
        for before, after in itertools.pairwise(pipeline.stages):
            if {before.ranks[0], after.ranks[0]} == set(pair):
                tokens = pipeline.micro_batch * plan.sequence_length
                sizes.append(tokens * model.sent_bytes_per_token(after.first - 1))
    gradients = GRADIENT_BYTES * max(layer.trainable_parameters for layer in model.layers)
    size = max(sizes) or max(1.0, gradients / max(2, len(plan.pipelines)))
    link = profile.link(*pair)
    link_s = link.latency_s + size / link.bytes_per_s
    copies_s = profile.transfer_s(*pair, size) - link_s
    if link_s <= 0:
        return []
    return [max(MIN_LINK_RATIO, (ratio * (link_s + copies_s) - copies_s) / link_s) for ratio in ratios if ratio > 0]


def _slower(link: AnyLink, ratio: float) -> AnyLink:
    return replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio)


MAX_TRIAL_RATIO = 0.05
"""Maximum share of the predicted run time to spend on calibration."""
LONG_RUN_S, MAX_LONG_TRIAL_RATIO = 60.0, 0.15
"""Runs of at least ``LONG_RUN_S`` may spend this share instead, which also limits the time for trying another plan."""
MAX_COUNTED_STEPS, MIN_COUNTED_STEPS = 5, 1
"""Maximum and minimum number of measured steps, which follow the warm-up steps."""
_WARM_UP_STEPS = 2
_PARAMETERS_PER_S = 1e8
"""Approximate speed of random weight initialisation, in parameters per second."""
_NO_FASTER_PLAN = "with the calibrated times, the search found no faster plan with it"


@dataclass(frozen=True)
class Allowance:
    """Limits of a calibration run."""

    counted: int
    """Number of steps to measure; 0 skips calibration."""
    seconds: float
    """Approximate length of the calibration run, in seconds."""
    most_s: float = math.inf
    """Time limit for trying another plan, in seconds from the start of the first calibration run."""


def allowance(report: PlanReport, profile: ClusterProfile, steps: int, is_required: bool) -> Allowance:
    """Choose the limits of the calibration run before a run of ``steps`` steps. ``is_required``: calibrate at any cost."""
    run_s = steps * report.predicted_step_s
    seconds = partial(trial_s, report, profile)
    for share, least_s in ((MAX_TRIAL_RATIO, 0.0), (MAX_LONG_TRIAL_RATIO, LONG_RUN_S)):
        for counted in range(MAX_COUNTED_STEPS, MIN_COUNTED_STEPS - 1, -1):
            if run_s >= least_s and seconds(counted) <= share * run_s:
                return Allowance(counted, seconds(counted), math.inf if is_required else MAX_LONG_TRIAL_RATIO * run_s)
    return Allowance(MIN_COUNTED_STEPS, seconds(MIN_COUNTED_STEPS)) if is_required else Allowance(0, 0.0)


def trial_s(report: PlanReport, profile: ClusterProfile, counted: int) -> float:
    """Approximate seconds of a calibration run: weight initialisation, warm-up and ``counted`` steps."""
    parameters_by_rank = dict.fromkeys(report.plan.ranks, 0.0)
    for layer, ranks in holders(report.plan).items():
        for rank in ranks:
            parameters_by_rank[rank] += profile.model.layers[layer].parameters
    return max(parameters_by_rank.values()) / _PARAMETERS_PER_S + (_WARM_UP_STEPS + counted) * report.predicted_step_s


def with_reasons(
    calibrated: PlanReport, outcome: str, reports: Sequence[PlanReport] = (), rejected: PlanReport | None = None
) -> PlanReport:
    """Add the outcome of calibration to a plan's reasons.

    Args:
        calibrated: report for the calibrated profile.
        outcome: result of looking for another plan.
        reports: earlier planner reports; reasons that all of them share are kept.
        rejected: the other plan, if one was found.
    """
    reasons = [r for r in reports[0].reasons if all(r in report.reasons for report in reports)] if reports else []
    common_idle = [r for r in reports[0].idle if all(r in report.idle for report in reports)] if reports else []
    idle = {entry.rank: entry for entry in common_idle}
    for rank in (entry.rank for entry in calibrated.idle):
        reason = outcome if rejected is None or rank in rejected.plan.ranks else _NO_FASTER_PLAN
        idle.setdefault(rank, IdleRank(rank, reason))
    first = f"calibration run: {units.seconds(calibrated.expected_step_s)} per step; {outcome}"
    return replace(
        calibrated,
        alone=_alone(calibrated, outcome, rejected),
        idle=tuple(idle[entry.rank] for entry in calibrated.idle),
        reasons=tuple(dict.fromkeys([first, *calibrated.reasons[1:], *reasons])),
    )


def _alone(calibrated: PlanReport, outcome: str, rejected: PlanReport | None) -> Alone | None:
    """The best single rank, with its measured time if ``rejected`` is its plan; if it is faster, ``outcome`` is its problem."""
    best = calibrated.alone
    if best is None or best.step_s is None:
        return best
    step_s = best.step_s
    if rejected is not None and rejected.tried_step_s is not None and rejected.plan.ranks == [best.rank]:
        step_s = rejected.tried_step_s
    problem = ALL_RANKS_WORK if best.problem == ALL_RANKS_WORK else outcome
    return replace(best, step_s=step_s, problem=problem if step_s < calibrated.predicted_step_s else "")
