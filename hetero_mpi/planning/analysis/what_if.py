"""Questions about a plan that planning again answers: what its step time is lost to, and what if the cluster were another.

Nothing here is extrapolated: every figure is the simulated step time of a plan made for the changed cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero_mpi.planning.bounds import fluid_bound_s, usable_devices
from hetero_mpi.planning.decision.decide import Decision, fastest
from hetero_mpi.planning.device_times import whole_model_s
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.simulator import outlined
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.cluster_changes import (
    restricted,
    with_copy_of,
    with_faster_links,
    with_free_links,
    with_plenty_of_memory,
    with_wire,
)
from hetero_mpi.planning.types.cost import INT8
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile, LinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.errors import UserError

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


@dataclass(frozen=True)
class WhatIf:
    """A change, and the step time of the plan made for it; None: no plan, for the reason ``problem``."""

    change: str
    step_s: float | None
    problem: str = ""


def losses(plan: PlanReport, own: PlanReport, profile: ClusterProfile, request: PlanRequest) -> Losses:
    """The losses of ``plan`` by their causes. ``own``: the planner's plan for the same request (often ``plan`` itself, also
    where it has none)."""
    free, step_s = with_free_links(profile), plan.predicted_step_s
    roomy = with_plenty_of_memory(free)
    found = _decided(roomy, request)
    planned = found if MemoryModel(free, request).check(found.plan) else _fastest(free, request)
    # A plan by hand may be faster than what the job leaves to the planner.
    known_s = [outlined(one.plan, free).step_s for one in (plan, own) if one.predicted_step_s <= own.predicted_step_s]
    without_links = min([*known_s, *([planned.step_s] if planned is not None else [])])
    without_both, own_s = min(without_links, found.step_s), min(own.predicted_step_s, step_s)
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


def what_ifs(
    own: PlanReport, profile: ClusterProfile, request: PlanRequest, free_links_s: float = 0.0
) -> Iterator[WhatIf]:
    """The planner's answers to changes of the cluster; ``own`` is its plan for the cluster as it is.

    Args:
        free_links_s: ``Losses.free_links_s``, where it is known: where messages cost nothing, faster links are not planned for.
    """
    unchanged = own.predicted_step_s <= free_links_s * (1 + NO_CHANGE)
    for name, faster in _with_other_links(own.plan, profile):
        yield WhatIf(name, own.predicted_step_s) if unchanged else _what_if(name, faster, request)
    if not unchanged and profile.model.wire is None and profile.model.sequence_length > 1:  # a language model
        yield _what_if(AS_INT8, with_wire(profile, INT8), request)
    used = own.plan.ranks
    if len(used) > 1:
        for rank in _representatives(used, profile)[:MOST_RANKS]:
            name = f"without rank {rank} ({profile.devices[rank].name})"
            others = [device.rank for device in profile.devices if device.rank != rank]
            yield _what_if(name, restricted(profile, others), request)
    fastest = min(usable_devices(profile), key=lambda device: (whole_model_s(profile, device), device.rank))
    more = with_copy_of(profile, fastest.rank)
    alike = sum(device.name == fastest.name for device in profile.devices)
    yield _what_if(
        f"{'a second' if alike == 1 else 'one more'} {fastest.name}, like rank {fastest.rank}", more, request
    )


def _with_other_links(own: Plan, profile: ClusterProfile) -> Iterator[tuple[str, ClusterProfile]]:
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
        yield (
            f"{NEXT_GBIT[now]:g} GbE instead of {now:g}",
            with_faster_links(profile, times=times, latency=False, where=alike),
        )


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


def _representatives(used: Sequence[int], profile: ClusterProfile) -> list[int]:
    """One used rank of each class of interchangeable ranks, fastest first."""
    chosen = [
        next(rank for rank in members if rank in used) for members in rank_classes(profile) if set(members) & set(used)
    ]
    return sorted(chosen, key=lambda rank: (whole_model_s(profile, profile.devices[rank]), rank))


def _fastest(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    return fastest(profile, replace(request, brief=True))


def _decided(profile: ClusterProfile, request: PlanRequest) -> Decision:
    decision = _fastest(profile, request)
    if decision is None:
        raise UserError("memory.exceeded", "the model does not fit in memory")
    return decision


def _what_if(change: str, profile: ClusterProfile, request: PlanRequest) -> WhatIf:
    try:
        return WhatIf(change, _decided(profile, request).step_s)
    except UserError as error:
        return WhatIf(change, None, str(error).splitlines()[0])
