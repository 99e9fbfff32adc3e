"""Plan again with one thing changed, and say what came of it.

The alternatives: other plans for the same cluster (a plan's reasons), other machines and links (what if), free links and
plenty of memory (losses), and changes that make a model fit (``planner.remedies``). No figure is extrapolated: each is the
simulated step time of a plan for what was changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetero_mpi.planning.bounds import fluid_bound_s, usable_devices
from hetero_mpi.planning.contention import while_computing
from hetero_mpi.planning.decision.decide import Decision, fastest
from hetero_mpi.planning.device_times import whole_model_s
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.orders.warm_up import with_classic_depths
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.search.memory_fit import Fitter, with_recompute
from hetero_mpi.planning.search.search import MAX_RANKS_WITHOUT_LAYOUTS
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.cluster_changes import (
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
MOST_ACTIONS = 20_000
"""Alternatives to plans with more actions are not simulated: it takes longer than planning."""
AS_INT8 = 'activations and gradients as int8 (train.wire = "int8", which rounds them)'
FASTER = 10
"""What-if lines make a link this many times as fast."""
NEXT_GBIT = {1.0: 10.0, 2.5: 10.0, 5.0: 10.0, 10.0: 25.0, 25.0: 100.0, 40.0: 100.0, 50.0: 100.0}
"""Ethernet's usual speeds, and what one would buy next."""
SHARE_OF_NOMINAL = 0.75
"""At least so much of its nominal speed reaches the program."""
MOST_LINKS = 6
MOST_RANKS = 8
"""What-if lines name no more pairs of ranks, and ranks, than these: the ones that matter most."""
NO_CHANGE = 0.0005
"""Step times that differ by less are shown as the same."""
NOTABLE = 0.1
"""From this share of the step on, a loss is named as what limits a plan; below it the devices are."""


@dataclass(frozen=True)
class Outcome:
    """The step time of an alternative; None: no plan, for the reason ``problem``."""

    change: str
    step_s: float | None
    problem: str = ""

    def sentence(self, best_s: float) -> str:
        """``one pipeline instead of 2: 1.20x slower (492 ms per step)``, beside a step of ``best_s`` seconds."""
        if self.step_s is None:
            return f"{self.change}: does not fit in memory"
        times = f"{units.ratio(self.step_s, best_s):.2f}"
        how = "as fast" if float(times) <= 1 else f"{times}x slower"
        return f"{self.change}: {how} ({units.seconds(self.step_s)} per step)"


@dataclass(frozen=True)
class Alternative:
    """A cluster and a request with one thing changed, or a row of changes."""

    name: str
    profile: ClusterProfile
    request: PlanRequest
    plans: tuple[Plan, ...] | None = None
    """Those of which the fastest that fits is the answer; None: the planner's own."""
    known: Plan | None = None
    """A plan that fits here as well: what is searched briefly may be slower than it."""
    settings: tuple[str, ...] = ()
    """Keys of the job with the values that make the change."""
    estimated: str = ""
    """Words on costs that are not the profile's."""

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.name, " and ".join(self.settings)))) + self.estimated

    def asking(self, name: str, setting: str, **changes: Any) -> Alternative:
        """This one with a further change, to the request."""
        return replace(self, name=name, settings=(*self.settings, setting), request=replace(self.request, **changes))

    def costing(
        self, name: str, settings: Iterable[str], model: ModelCost, source: str = "this profile's figures"
    ) -> Alternative:
        """This one with a further change, to a model of other costs, estimated from ``source``."""
        settings, profile = (*self.settings, *settings), replace(self.profile, model=model)
        return replace(self, name=name, settings=settings, profile=profile, estimated=f" (estimated from {source})")

    def plan_again(self) -> Outcome:
        """The step time of the plan for what is changed."""
        try:
            step_s = self._step_s()
        except UserError as error:
            return Outcome(self.name, None, str(error).splitlines()[0])
        return Outcome(self.name, step_s, "" if step_s is not None else DOES_NOT_FIT)

    def _step_s(self) -> float | None:
        if self.plans is None:
            decision = _fastest(self.profile, self.request)
            seconds = [decision.step_s] if decision is not None else []
            seconds += [outlined(self.known, self.profile).step_s] if self.known is not None else []
            return min(seconds, default=None)
        fitter = Fitter(self.profile, self.request)
        fitted = (plan for plan in map(fitter.fitted, self.plans) if plan is not None)
        filed = (fitter.with_files(fitter.keeping(plan)) for plan in fitted)
        return min((fitter.step_s(plan) for plan in filed if fitter.holds(plan)), default=None)


def _fastest(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    return fastest(profile, replace(request, brief=True))


# Reasons: other ways to run the step


def other_ways(decision: Decision, profile: ClusterProfile, request: PlanRequest) -> Iterator[Outcome]:
    """Other ways to run the step, planned and simulated likewise: an even split, one pipeline, plain 1F1B."""
    plan, count = decision.plan, len(decision.plan.pipelines)
    actions = sum(4 * len(pipeline.stages) * pipeline.micro_batches for pipeline in plan.pipelines)
    if decision.one_stage_s is not None:
        yield Outcome("one stage per rank instead of several", decision.one_stage_s)
    if actions > MOST_ACTIONS or any(pipeline.interleaved for pipeline in plan.pipelines) or plan.leader_of:
        return
    for name, ways in _other_plans(plan, profile, request).items():
        plans = tuple(replace(plan, pipelines=tuple(way)) for way in ways)
        if plans and plans != (plan,):
            yield Alternative(name, profile, request, plans).plan_again()
    if count > 1 and decision.one_pipeline_s is not None and request.allow_idle:
        step_s = decision.one_pipeline_s if decision.one_pipeline_s < math.inf else None
        yield Outcome(f"one pipeline instead of {count}", step_s)


def _other_plans(
    plan: Plan, profile: ClusterProfile, request: PlanRequest
) -> dict[str, Iterable[Iterable[PipelinePlan]]]:
    """Name -> the pipelines of plans for the same ranks that differ in one thing."""
    pipelines, count, used = plan.pipelines, len(plan.pipelines), len(plan.numbered)
    sizes, auto = sorted(set(request.micro_batch_choices), reverse=True), request.schedule == "auto"
    share, rest = divmod(request.global_batch, count)
    uneven = rest == 0 and len({pipeline.sequences for pipeline in pipelines}) > 1
    enough = count < used <= min(request.max_pipelines, request.global_batch // sizes[-1])
    depths = units.join_with_counts((str([stage.warm_up for stage in pipeline.stages]) for pipeline in pipelines), ", ")
    return {
        "the same ranks with an even cut": [[_even_split(pipeline, plan.layers) for pipeline in pipelines]],
        "every rank by itself, with a share of the batch": _data_parallel(plan, profile, request) if enough else (),
        "equal shares of the batch": (
            [replace(pipeline, sequences=share, micro_batch=size) for pipeline in pipelines]
            for size in sizes
            if uneven and share % size == 0
        ),
        "backward in one part instead of two": [[replace(one, split_backward=False) for one in pipelines]] * auto,
        f"1F1B's own warm-up instead of {depths}": [with_classic_depths(plan).pipelines] * auto,
    }


def _even_split(pipeline: PipelinePlan, layers: int) -> PipelinePlan:
    """``pipeline`` with an even cut: stages with equally many layers, or one more or less."""
    cuts = [round(i * layers / len(pipeline.stages)) for i in range(len(pipeline.stages) + 1)]
    ends = zip(pipeline.stages, cuts, cuts[1:], strict=False)
    return replace(pipeline, stages=tuple(replace(stage, first=first, last=last) for stage, first, last in ends))


def _data_parallel(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[list[PipelinePlan]]:
    """A pipeline for every rank in use: each micro-batch goes to the rank that would be done with it first. With micro-batches of
    every size; where the plan streams some stage, streamed in slices of every size, too."""
    ranks = sorted(stage.ranks[0] for _, _, stage in plan.numbered)
    sizes, devices = sorted(set(request.micro_batch_choices)), while_computing(profile, ranks).devices
    streams = any(stage.streamed for _, _, stage in plan.numbered)
    for size in (one for one in sizes if request.global_batch // one >= len(ranks)):
        seconds = [whole_model_s(profile, devices[rank], size * request.sequence_length) for rank in ranks]
        counts = [1] * len(ranks)
        for _ in range(request.global_batch // size - len(ranks)):
            counts[min(range(len(ranks)), key=lambda i: (counts[i] + 1) * seconds[i])] += 1
        for part in (None, *(one for one in sizes if one <= size and streams)):
            stage = StagePlan((0,), 0, plan.layers, 0, streamed=part is not None, slice_sequences=part)
            held = (replace(stage, ranks=(rank,)) for rank in ranks)
            yield [PipelinePlan((own,), size, count * size) for own, count in zip(held, counts, strict=True)]


# What if: other machines and links


def what_ifs(
    own: PlanReport, profile: ClusterProfile, request: PlanRequest, free_links_s: float = 0.0
) -> Iterator[Outcome]:
    """The planner's answers to changes of the cluster; ``own`` is its plan for the cluster as it is.

    Args:
        free_links_s: ``Losses.free_links_s``, where it is known: where messages cost nothing, faster links are not planned for.
    """
    unchanged, model = own.predicted_step_s <= free_links_s * (1 + NO_CHANGE), profile.model
    for name, faster in _faster_links(own.plan, profile):
        again = Alternative(name, faster, request, known=own.plan)
        yield Outcome(name, own.predicted_step_s) if unchanged else again.plan_again()
    if not unchanged and model.wire is None and model.sequence_length > 1:  # a language model
        yield Alternative(AS_INT8, with_wire(profile, INT8), request, known=own.plan).plan_again()
    for alternative in _other_machines(own.plan, profile, request):
        yield alternative.plan_again()


def _faster_links(own: Plan, profile: ClusterProfile) -> Iterator[tuple[str, ClusterProfile]]:
    """The next Ethernet, each link that matters, and all of them, faster."""
    yield from faster_networks(own, profile)
    pairs = link_pairs(own)
    for pair in pairs[:MOST_LINKS]:
        yield f"link {pair[0]} - {pair[1]} {FASTER}x faster", with_faster_links(profile, [pair])
    if len(pairs) > 1:
        yield f"all links {FASTER}x faster", with_faster_links(profile)


def faster_networks(plan: Plan, profile: ClusterProfile) -> Iterator[tuple[str, ClusterProfile]]:
    """The cluster with the usual next Ethernet, for each that the plan's messages between hosts run over now."""
    used = {ethernet_gbit(profile.link(*pair)) for a, b in link_pairs(plan) for pair in ((a, b), (b, a))}
    for now in sorted(speed for speed in used if speed is not None):
        times, alike = NEXT_GBIT[now] / now, partial(lambda speed, link: ethernet_gbit(link) == speed, now)
        faster = with_faster_links(profile, times=times, latency=False, where=alike)
        yield f"{NEXT_GBIT[now]:g} GbE instead of {now:g}", faster


def ethernet_gbit(link: LinkProfile | HostLinkProfile) -> float | None:
    """The Ethernet that a link between hosts looks like by its speed; None: none of the usual ones."""
    measured = 8 * link.bytes_per_s / 1e9
    return None if link.same_host else next((g for g in NEXT_GBIT if SHARE_OF_NOMINAL * g <= measured <= g), None)


def link_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of ranks that exchange messages under ``plan``, lower rank first, in the order of the pipelines."""
    pairs: dict[tuple[int, int], None] = {}
    for pipeline in plan.pipelines:
        for before, behind in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            a, b = before.ranks[0], behind.ranks[0]
            if a != b:
                pairs[min(a, b), max(a, b)] = None
    return list(pairs)


def _other_machines(own: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[Alternative]:
    """Without one rank of each class of interchangeable ranks in use, the fastest first; and with one more like the fastest."""

    def speed(rank: int) -> tuple[float, int]:
        return whole_model_s(profile, profile.devices[rank]), rank

    classes = [[rank for rank in members if rank in own.ranks] for members in rank_classes(profile)]
    chosen = sorted((members[0] for members in classes if members), key=speed)
    for rank in chosen[:MOST_RANKS] if len(own.ranks) > 1 else ():
        others = restricted(profile, [device.rank for device in profile.devices if device.rank != rank])
        yield Alternative(f"without rank {rank} ({profile.devices[rank].name})", others, request)
    quickest = profile.devices[min((device.rank for device in usable_devices(profile)), key=speed)]
    alone = sum(device.name == quickest.name for device in profile.devices) == 1
    name = f"{'a second' if alone else 'one more'} {quickest.name}, like rank {quickest.rank}"
    yield Alternative(name, with_copy_of(profile, quickest.rank), request, known=own)


# Losses: free links and plenty of memory


@dataclass(frozen=True)
class Losses:
    """Where a plan's step goes beyond the time that always busy devices would take, in shares of the step.

    ``1 - bound_s / step_s = choice + links + memory + granularity``, but for what is clipped at zero.
    """

    step_s: float
    bound_s: float
    """Fluid bound of the cluster with free links and plenty of memory: nothing but the devices' speed."""
    choice: float
    """The plan is not the one the planner would have made (0 for its own)."""
    links: float
    memory: float
    free_links_s: float
    """The step of the planner's plan, if messages took no time."""
    granularity: float
    """Whole layers and whole micro-batches: uneven stages, and a pipeline that fills and drains."""

    @property
    def limit(self) -> str:
        """``device``, ``link``, ``memory`` or ``granularity``: what costs most; the devices, when nothing costs much."""
        shares = {"link": self.links, "memory": self.memory, "granularity": self.granularity}
        worst = max(shares, key=lambda kind: shares[kind])
        return worst if shares[worst] >= NOTABLE else "device"


def losses(plan: PlanReport, own: PlanReport, profile: ClusterProfile, request: PlanRequest) -> Losses:
    """The losses of ``plan`` by their causes. ``own``: the planner's plan for the same request (often ``plan`` itself, also
    where it has none)."""
    free, step_s = with_free_links(profile), plan.predicted_step_s
    roomy = with_plenty_of_memory(free)
    # A plan by hand may be faster than what the job leaves to the planner.
    known = [report.plan for report in (plan, own) if report.predicted_step_s <= own.predicted_step_s]
    free_s, roomy_s = ([outlined(one, cluster).step_s for one in known] for cluster in (free, roomy))
    if len(profile.devices) > MAX_RANKS_WITHOUT_LAYOUTS:  # too many ranks to plan again for three shares of a step
        roomy_s.append(outlined(with_recompute(known[-1], min(request.recompute_choices)), roomy).step_s)
    else:
        roomy_decision = _fastest(roomy, request)
        if roomy_decision is None:
            raise UserError("memory.exceeded", DOES_NOT_FIT)
        fits = MemoryModel(free, request).check(roomy_decision.plan)
        free_decision = roomy_decision if fits else _fastest(free, request)
        roomy_s.append(roomy_decision.step_s)
        free_s += [free_decision.step_s] if free_decision is not None else []
    without_links = min(free_s)
    without_both, own_s = min(without_links, *roomy_s), min(own.predicted_step_s, step_s)
    bound_s = fluid_bound_s(roomy, request)

    def share(more_s: float, less_s: float) -> float:
        return max(0.0, more_s - less_s) / step_s if step_s > 0 else 0.0

    return Losses(
        step_s=step_s,
        bound_s=bound_s,
        choice=share(step_s, own_s),
        links=share(own_s, without_links),
        memory=share(without_links, without_both),
        free_links_s=without_links,
        granularity=share(without_both, bound_s),
    )
