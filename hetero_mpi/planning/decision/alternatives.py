"""Alternative plans: plan again with one change and report the simulated step time.

The changes are other plans for the same cluster (reasons), other machines and links (what-if), free links and unlimited
memory (losses), and changes that make a model fit (``planner.remedies``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from hetero_mpi.planning.bounds import fluid_bound_s, usable_devices
from hetero_mpi.planning.contention import while_computing
from hetero_mpi.planning.decision.decide import fastest
from hetero_mpi.planning.device_times import whole_model_s
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.orders.warm_up import with_classic_depths
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.search.memory_fit import Fitter, with_recompute
from hetero_mpi.planning.search.search import MAX_RANKS_WITHOUT_LAYOUTS, MAX_SEARCH_RANKS, Decision
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.cluster_changes import (
    renumbered,
    restricted,
    with_copy_of,
    with_faster_links,
    with_free_links,
    with_plenty_of_memory,
    with_wire,
)
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile, LinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import INT8
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

DOES_NOT_FIT = "the model does not fit in memory"
MAX_SIMULATED_ACTIONS = 20_000
"""Plans with more actions get no simulated alternatives: simulation would take longer than planning."""
AS_INT8 = 'activations and gradients as int8 (train.wire = "int8", which rounds them)'
LINK_SPEEDUP_FACTOR = 10
"""Factor by which what-if alternatives speed up a link."""
NEXT_GBIT = {1.0: 10.0, 2.5: 10.0, 5.0: 10.0, 10.0: 25.0, 25.0: 100.0, 40.0: 100.0, 50.0: 100.0}
"""Common Ethernet speed -> its usual upgrade, in Gbit/s."""
MIN_NOMINAL_RATIO = 0.75
"""Minimum ratio of measured to nominal link speed."""
MAX_NAMED_LINKS = 6
MAX_NAMED_RANKS = 8
"""Maximum number of links, and of ranks, named in what-if alternatives."""
MIN_SEARCHED_RATIO = 0.02
"""Minimum gain of all links together for which plans are searched with one link faster; the plan is timed otherwise."""
MIN_STEP_CHANGE_RATIO = 0.0005
"""Step times that differ by no more than this ratio count as equal."""
MIN_LIMITING_RATIO = 0.1
"""If every loss is a smaller share of the step than this, device speed is reported as the limit."""


@dataclass(frozen=True)
class Outcome:
    """The step time of an alternative, or None if ``problem`` prevents a plan."""

    change: str
    step_s: float | None
    problem: str = ""

    def sentence(self, best_s: float) -> str:
        """Compare with a step of ``best_s`` seconds, for example ``equal shares of the batch: 1.20x slower (492 ms per step)``."""
        if self.step_s is None:
            return f"{self.change}: does not fit in memory"
        times = f"{units.ratio(self.step_s, best_s):.2f}"
        comparison = "as fast" if float(times) <= 1 else f"{times}x slower"
        return f"{self.change}: {comparison} ({units.seconds(self.step_s)} per step)"


@dataclass(frozen=True)
class Alternative:
    """A cluster and a request with one or more changes."""

    name: str
    profile: ClusterProfile
    request: PlanRequest
    plans: tuple[Plan, ...] | None = None
    """Candidate plans, of which the fastest that fits is chosen; None runs the planner."""
    known_plan: Plan | None = None
    """A plan known to fit, as the search near a plan may not find a plan that is as fast."""
    settings: tuple[str, ...] = ()
    """Job settings that make the change."""
    estimated: str = ""
    """Note appended if costs are estimated, not profiled."""

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.name, " and ".join(self.settings)))) + self.estimated

    def changing(self, name: str, setting: str, **changes: Any) -> Alternative:
        """Add a change to the request."""
        return replace(self, name=name, settings=(*self.settings, setting), request=replace(self.request, **changes))

    def costing(
        self, name: str, settings: Iterable[str], model: ModelCost, source: str = "this profile's figures"
    ) -> Alternative:
        """Add a change to the model's costs, estimated from ``source``."""
        settings, profile = (*self.settings, *settings), replace(self.profile, model=model)
        return replace(self, name=name, settings=settings, profile=profile, estimated=f" (estimated from {source})")

    def plan_again(self) -> Outcome:
        """Step time of the best plan for the changed cluster and request."""
        try:
            step_s = self._step_s()
        except UserError as error:
            return Outcome(self.name, None, str(error).splitlines()[0])
        return Outcome(self.name, step_s, "" if step_s is not None else DOES_NOT_FIT)

    def _step_s(self) -> float | None:
        if self.plans is None:
            is_large = len(self.profile.devices) > MAX_SEARCH_RANKS and self.known_plan is not None
            decision = None if is_large else fastest(self.profile, self.request)
            seconds = [decision.step_s] if decision is not None else []
            seconds += [outlined(self.known_plan, self.profile).step_s] if self.known_plan is not None else []
            return min(seconds, default=None)
        fitter = Fitter(self.profile, self.request)
        fitted = (plan for plan in map(fitter.fitted, self.plans) if plan is not None)
        filed = (fitter.with_files(fitter.keeping(plan)) for plan in fitted)
        return min((fitter.step_s(plan) for plan in filed if fitter.holds(plan)), default=None)


def near(plans: Sequence[Plan], request: PlanRequest, without: int | None = None) -> PlanRequest:
    """A request for plans like ``plans`` on the same ranks, or on those that remain ``without`` one of them."""
    is_streamed = any(stage.streamed for _, _, stage in plans[0].numbered)
    if without is not None:
        ranks = range(1 + max(max(plan.ranks) for plan in plans))
        new_ranks = [-1 if rank == without else rank - (rank > without) for rank in ranks]
        plans = [renumbered(plan, new_ranks) for plan in plans]
    streaming = "never" if without is None and not is_streamed else request.streaming
    return replace(_with_counts_near(plans[0], request), thorough=False, streaming=streaming, near=tuple(plans))


def _with_counts_near(plan: Plan, request: PlanRequest) -> PlanRequest:
    count = len(plan.pipelines)
    return replace(request, near_counts=(count - 1, count, count + 1))


def without_rank(rank: int, plans: Sequence[Plan], profile: ClusterProfile, request: PlanRequest) -> Alternative:
    """The cluster without one rank, for both a reason and a what-if alternative. ``plans``: the plan and similar ones.

    Without the least busy rank, which a reason names, plans unlike these are searched as well.
    """
    remaining = restricted(profile, [device.rank for device in profile.devices if device.rank != rank])
    busy_s = outlined(plans[0], profile).busy_s
    is_least_busy = rank == min(busy_s, key=lambda r: (busy_s[r], r))
    fewer = _with_counts_near(plans[0], request) if is_least_busy else near(plans, request, rank)
    return Alternative(f"without rank {rank} ({profile.devices[rank].name})", remaining, fewer)


# Reasons: alternative plans


def alternative_outcomes(decision: Decision, profile: ClusterProfile, request: PlanRequest) -> Iterator[Outcome]:
    """Simulate an even split, one pipeline, plain 1F1B and other alternatives for the same ranks."""
    plan, count = decision.plan, len(decision.plan.pipelines)
    actions = sum(4 * len(pipeline.stages) * pipeline.micro_batches for pipeline in plan.pipelines)
    if decision.one_stage_s is not None:
        yield Outcome("one stage per rank instead of several", decision.one_stage_s)
    if actions > MAX_SIMULATED_ACTIONS or any(pipeline.interleaved for pipeline in plan.pipelines) or plan.leader_of:
        return
    for name, ways in _alternative_pipelines(plan, profile, request).items():
        plans = tuple(replace(plan, pipelines=tuple(way)) for way in ways)
        if plans and plans != (plan,):
            yield Alternative(name, profile, request, plans).plan_again()
    if count > 1 and decision.one_pipeline_s is not None and request.allow_idle:
        step_s = decision.one_pipeline_s if decision.one_pipeline_s < math.inf else None
        most = max(request.micro_batch_choices)
        limit = f" with micro-batches of at most {most}" * (most < max(request.alone_micro_batch_choices, default=0))
        yield Outcome(f"one pipeline{limit} instead of {decision.plan.replicas}", step_s)


def _alternative_pipelines(
    plan: Plan, profile: ClusterProfile, request: PlanRequest
) -> dict[str, Iterable[Iterable[PipelinePlan]]]:
    """Map names to the pipelines of alternative plans for the same ranks that differ from ``plan`` in one aspect."""
    pipelines, count, used = plan.pipelines, len(plan.pipelines), len(plan.numbered)
    sizes, auto = sorted(set(request.micro_batch_choices), reverse=True), request.schedule == "auto"
    share, rest = divmod(request.global_batch, count)
    uneven = rest == 0 and len({pipeline.sequences for pipeline in pipelines}) > 1
    enough = count < used <= min(request.max_pipelines, request.global_batch // sizes[-1])
    depths = units.join_with_counts((str([stage.warm_up for stage in pipeline.stages]) for pipeline in pipelines), ", ")
    return {
        "the same ranks with an even cut": [[_even_split(pipeline, plan.layers) for pipeline in pipelines]],
        "a copy of the model on every rank": _data_parallel(plan, profile, request) if enough else (),
        "equal shares of the batch": (
            [replace(pipeline, sequences=share, micro_batch=size) for pipeline in pipelines]
            for size in sizes
            if uneven and share % size == 0
        ),
        "backward in one part instead of two": [[replace(p, split_backward=False) for p in pipelines]] * auto,
        f"1F1B's own warm-up instead of {depths}": [with_classic_depths(plan).pipelines] * auto,
    }


def _even_split(pipeline: PipelinePlan, layers: int) -> PipelinePlan:
    """``pipeline`` with layers split evenly across its stages."""
    count = len(pipeline.stages)
    return pipeline.with_cuts([round(i * layers / count) for i in range(count + 1)])


def _data_parallel(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[list[PipelinePlan]]:
    """Yield plans with one single-stage replica per rank; each micro-batch goes to the rank that would finish it first.

    Tries every micro-batch size and, if ``plan`` offloads a stage, every slice size.
    """
    ranks = sorted(stage.ranks[0] for _, _, stage in plan.numbered)
    sizes, devices = sorted(set(request.micro_batch_choices)), while_computing(profile, ranks).devices
    streams = any(stage.streamed for _, _, stage in plan.numbered)
    for size in (n for n in sizes if request.global_batch // n >= len(ranks)):
        seconds = [whole_model_s(profile, devices[rank], size * request.sequence_length) for rank in ranks]
        counts = [1] * len(ranks)
        for _ in range(request.global_batch // size - len(ranks)):
            counts[min(range(len(ranks)), key=lambda i: (counts[i] + 1) * seconds[i])] += 1
        for slice_size in (None, *(n for n in sizes if n <= size and streams)):
            stage = StagePlan((0,), 0, plan.layers, 0, streamed=slice_size is not None, slice_sequences=slice_size)
            copies = (replace(stage, ranks=(rank,)) for rank in ranks)
            yield [PipelinePlan((copy,), size, count * size) for copy, count in zip(copies, counts, strict=True)]


# What if: other machines and links


def what_ifs(
    planned: PlanReport, profile: ClusterProfile, request: PlanRequest, free_links_s: float = 0.0
) -> Iterator[Outcome]:
    """Plan for faster links, int8 messages, and machines removed or added.

    Args:
        planned: plan for the unchanged cluster.
        free_links_s: ``Losses.free_links_s`` if known; if even free links gain nothing, faster links are not planned for.
    """
    plans = planned.plan, *planned.similar
    nearby = near(plans, request)
    unchanged, model = planned.predicted_step_s <= free_links_s * (1 + MIN_STEP_CHANGE_RATIO), profile.model
    faster_links = [
        Alternative(name, faster, nearby, known_plan=planned.plan)
        for name, faster in _faster_link_profiles(planned.plan, profile)
    ]
    outcomes = [] if unchanged else [alternative.plan_again() for alternative in faster_links[-1:]]
    matters = any((outcome.step_s or 0.0) < planned.predicted_step_s * (1 - MIN_SEARCHED_RATIO) for outcome in outcomes)
    for alternative in faster_links[: -1 if outcomes else None]:
        kept_s = planned.predicted_step_s if unchanged else outlined(planned.plan, alternative.profile).step_s
        yield alternative.plan_again() if matters else Outcome(alternative.name, kept_s)
    yield from outcomes
    if not unchanged and model.wire is None and model.sequence_length > 1:  # a language model
        yield Alternative(AS_INT8, with_wire(profile, INT8), nearby, known_plan=planned.plan).plan_again()
    for alternative in _cluster_alternatives(plans, profile, request):
        yield alternative.plan_again()


def _faster_link_profiles(plan: Plan, profile: ClusterProfile) -> Iterator[tuple[str, ClusterProfile]]:
    """Yield profiles with the next faster Ethernet, with each link in use faster, and with all links faster."""
    yield from faster_networks(plan, profile)
    pairs = link_pairs(plan)
    for pair in pairs[:MAX_NAMED_LINKS]:
        yield f"link {pair[0]} - {pair[1]} {LINK_SPEEDUP_FACTOR}x faster", with_faster_links(profile, [pair])
    if len(pairs) > 1:
        yield f"all links {LINK_SPEEDUP_FACTOR}x faster", with_faster_links(profile)


def faster_networks(plan: Plan, profile: ClusterProfile) -> Iterator[tuple[str, ClusterProfile]]:
    """Yield a profile with the next faster Ethernet for each Ethernet speed in use between hosts."""
    used = {ethernet_gbit(profile.link(*pair)) for a, b in link_pairs(plan) for pair in ((a, b), (b, a))}
    for gbit in sorted(speed for speed in used if speed is not None):
        times, matches = NEXT_GBIT[gbit] / gbit, partial(lambda speed, link: ethernet_gbit(link) == speed, gbit)
        faster = with_faster_links(profile, times=times, latency=False, where=matches)
        yield f"{NEXT_GBIT[gbit]:g} GbE instead of {gbit:g}", faster


def ethernet_gbit(link: LinkProfile | HostLinkProfile) -> float | None:
    """Nominal Ethernet speed that matches a link's bandwidth; None within a host or if no common speed matches."""
    measured = 8 * link.bytes_per_s / 1e9
    return None if link.same_host else next((g for g in NEXT_GBIT if MIN_NOMINAL_RATIO * g <= measured <= g), None)


def link_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of ranks that exchange messages, lower rank first, in pipeline order."""
    neighbours = (pair for pipeline in plan.pipelines for pair in pairwise(pipeline.stages))
    pairs = ((before.ranks[0], behind.ranks[0]) for before, behind in neighbours)
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))


def _cluster_alternatives(
    plans: Sequence[Plan], profile: ClusterProfile, request: PlanRequest
) -> Iterator[Alternative]:
    """Yield the cluster without the least busy rank of each class, fastest class first, then with a copy of the fastest rank."""

    def speed(rank: int) -> tuple[float, int]:
        return whole_model_s(profile, profile.devices[rank]), rank

    plan, busy_s = plans[0], outlined(plans[0], profile).busy_s
    classes = [[rank for rank in members if rank in plan.ranks] for members in rank_classes(profile)]
    representatives = sorted((min(members, key=busy_s.__getitem__) for members in classes if members), key=speed)
    for rank in representatives[:MAX_NAMED_RANKS] if len(plan.ranks) > 1 else ():
        yield without_rank(rank, plans, profile, request)
    quickest = profile.devices[min((device.rank for device in usable_devices(profile)), key=speed)]
    is_only = sum(device.name == quickest.name for device in profile.devices) == 1
    name = f"{'a second' if is_only else 'one more'} {quickest.name} on rank {quickest.rank}'s host"
    yield Alternative(name, with_copy_of(profile, quickest.rank), near(plans, request), known_plan=plan)


# Losses: free links and plenty of memory


@dataclass(frozen=True)
class Losses:
    """Step time lost compared with fully busy devices, by cause, as fractions of the step.

    ``1 - bound_s / step_s = choice + links + memory + granularity``, except for clipping at zero.
    """

    step_s: float
    bound_s: float
    """Fluid bound with free links and unlimited memory, so that only device speed counts."""
    choice: float
    """Loss of a hand-written plan compared with the planner's plan."""
    links: float
    memory: float
    free_links_s: float
    """Step time of the planner's plan with free links."""
    granularity: float
    """Uneven stages, and pipeline fill and drain."""

    @property
    def limit(self) -> str:
        """The largest loss (``plan``, ``link``, ``memory`` or ``granularity``), or ``device`` if none is notable."""
        shares = {"plan": self.choice, "link": self.links, "memory": self.memory, "granularity": self.granularity}
        worst = max(shares, key=lambda kind: shares[kind])
        return worst if shares[worst] >= MIN_LIMITING_RATIO else "device"


def losses(plan: PlanReport, planned: PlanReport, profile: ClusterProfile, request: PlanRequest) -> Losses:
    """Break down by cause the time that ``plan`` loses. ``planned``: the planner's plan for the same request."""
    free, step_s = with_free_links(profile), plan.predicted_step_s
    roomy = with_plenty_of_memory(free)
    # A hand-written plan may be faster than the planner's.
    plans = [report.plan for report in (plan, planned) if report.predicted_step_s <= planned.predicted_step_s]
    free_s = [outlined(p, free).step_s for p in plans]
    if len(profile.devices) > MAX_RANKS_WITHOUT_LAYOUTS:  # planning again would take too long
        roomy_s = outlined(with_recompute(plans[-1], min(request.recompute_choices)), roomy).step_s
    else:
        counts = tuple(range(1, len(profile.devices) + 1))
        nearby = replace(near([plans[-1], *planned.similar], request), near_counts=counts)
        roomy_decision = fastest(roomy, nearby)
        if roomy_decision is None:
            raise UserError("memory.exceeded", DOES_NOT_FIT)
        fits = MemoryModel(free, request).check(roomy_decision.plan)
        free_decision = roomy_decision if fits else fastest(free, nearby)
        roomy_s = roomy_decision.step_s
        free_s += [free_decision.step_s] if free_decision is not None else []
    without_links = min(free_s)
    without_links_and_memory, own_s = min(without_links, roomy_s), min(planned.predicted_step_s, step_s)
    bound_s = fluid_bound_s(roomy, request)

    def share(more_s: float, less_s: float) -> float:
        return max(0.0, more_s - less_s) / step_s if step_s > 0 else 0.0

    return Losses(
        step_s=step_s,
        bound_s=bound_s,
        choice=share(step_s, own_s),
        links=share(own_s, without_links),
        memory=share(without_links, without_links_and_memory),
        free_links_s=without_links,
        granularity=share(without_links_and_memory, bound_s),
    )
