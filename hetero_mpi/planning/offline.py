"""Questions about a plan that planning again answers: what its step time is lost to, and what if the cluster were another.

Nothing here is extrapolated: every figure is the simulated step time of a plan made for the changed cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.errors import UserError
from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.durations import compute_s
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.planner import make_plan
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile, LinkProfile
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.schedule import Op, stages
from hetero_mpi.planning.tables import rank_classes

FASTER = 10
"""What-if lines make a link this many times as fast."""
MOST_LINKS = 6
MOST_RANKS = 8
"""What-if lines name no more pairs of ranks, and ranks, than these: the ones that matter most."""
PLENTY_BYTES = 2**50
"""More memory than any model needs."""
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
    granularity: float
    """Whole items and whole micro-batches: uneven stages, and a pipeline that fills and drains."""

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


def losses(plan: Plan, own: Plan, profile: ClusterProfile, request: PlanRequest) -> Losses:
    """What ``plan`` loses to what. ``own``: the planner's plan for the same request (often ``plan`` itself)."""
    free = with_free_links(profile)
    without_links = _step_s(free, request)
    roomy = with_plenty_of_memory(free)
    without_both = min(without_links, _step_s(roomy, request))
    bound_s = fluid_bound_s(roomy, request)
    step_s = plan.predicted_step_s

    def share(more_s: float, less_s: float) -> float:
        return max(0.0, more_s - less_s) / step_s if step_s > 0 else 0.0

    return Losses(
        step_s=step_s,
        bound_s=bound_s,
        choice=share(step_s, own.predicted_step_s),
        links=share(own.predicted_step_s, without_links),
        memory=share(without_links, without_both),
        granularity=share(without_both, bound_s),
    )


def what_ifs(own: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[WhatIf]:
    """The planner's answers to changes of the cluster; ``own`` is its plan for the cluster as it is."""
    pairs = link_pairs(own)
    for pair in pairs[:MOST_LINKS]:
        yield _what_if(f"link {pair[0]} - {pair[1]} {FASTER}x faster", with_faster_links(profile, [pair]), request)
    if len(pairs) > 1:
        yield _what_if(f"all links {FASTER}x faster", with_faster_links(profile), request)
    used = sorted(rank for _, _, stage in stages(own) for rank in stage.ranks)
    if len(used) > 1:
        for rank in _representatives(used, profile)[:MOST_RANKS]:
            others = [device.rank for device in profile.devices if device.rank != rank]
            yield _what_if(f"without rank {rank} ({profile.devices[rank].name})", restricted(profile, others), request)
    fastest = min(_fit(profile), key=lambda device: (whole_model_s(profile, device), device.rank))
    more = with_copy_of(profile, fastest.rank)
    yield _what_if(f"a second rank like rank {fastest.rank} ({fastest.name})", more, request)


def link_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of ranks that exchange messages under ``plan``, lower rank first, in the order of the pipelines."""
    pairs: dict[tuple[int, int], None] = {}
    for pipeline in plan.pipelines:
        for before, behind in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            for a, b in zip(before.ranks, behind.ranks, strict=False):
                pairs[min(a, b), max(a, b)] = None
    return list(pairs)


def whole_model_s(profile: ClusterProfile, device: DeviceProfile) -> float:
    """Seconds of forward and backward of one sequence through the whole chain on ``device``: how fast it is."""
    items, tokens = len(profile.model.layers), profile.model.sequence_length
    return sum(compute_s(profile, device, 0, items, tokens, op) for op in (Op.F, Op.B))


def with_faster_links(profile: ClusterProfile, pairs: Collection[tuple[int, int]] | None = None) -> ClusterProfile:
    """Both directions of ``pairs`` (all by default) with ``FASTER`` times the bandwidth and 1 / ``FASTER`` the latency."""

    def faster(link: LinkProfile) -> LinkProfile:
        pair = (min(link.source, link.destination), max(link.source, link.destination))
        if pairs is not None and pair not in pairs:
            return link
        return replace(link, latency_s=link.latency_s / FASTER, bytes_per_s=link.bytes_per_s * FASTER)

    return replace(profile, links=tuple(faster(link) for link in profile.links))


def with_free_links(profile: ClusterProfile) -> ClusterProfile:
    """Messages take no time: neither on links nor between devices and their hosts."""
    devices = tuple(
        replace(
            device,
            copy_latency_s=0.0,
            device_to_host_bytes_per_s=float("inf"),
            host_to_device_bytes_per_s=float("inf"),
        )
        for device in profile.devices
    )
    links = tuple(replace(link, latency_s=0.0, bytes_per_s=float("inf")) for link in profile.links)
    return replace(profile, devices=devices, links=links)


def with_plenty_of_memory(profile: ClusterProfile) -> ClusterProfile:
    """Nothing is short of memory."""
    devices = tuple(replace(device, memory_bytes=PLENTY_BYTES) for device in profile.devices)
    return replace(profile, devices=devices)


def restricted(profile: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """The cluster of ``ranks`` alone, numbered anew in this order."""
    new = {rank: number for number, rank in enumerate(ranks)}
    devices = tuple(replace(profile.devices[rank], rank=new[rank]) for rank in ranks)
    links = tuple(
        replace(link, source=new[link.source], destination=new[link.destination])
        for link in profile.links
        if link.source in new and link.destination in new
    )
    return replace(profile, devices=devices, links=links)


def with_copy_of(profile: ClusterProfile, rank: int) -> ClusterProfile:
    """One more rank like ``rank``, linked to the others as that one is, and to that one by its fastest link."""
    new = len(profile.devices)
    out = {link.destination: link for link in profile.links if link.source == rank}
    into = {link.source: link for link in profile.links if link.destination == rank}
    none = LinkProfile(rank, rank, 0.0, float("inf"), False)
    between = max(out.values(), key=lambda link: (link.bytes_per_s, -link.latency_s, link.destination), default=none)
    links = list(profile.links)
    for other in range(new):
        links.append(replace(out.get(other, between), source=new, destination=other))
        links.append(replace(into.get(other, between), source=other, destination=new))
    devices = (*profile.devices, replace(profile.devices[rank], rank=new))
    return replace(profile, devices=devices, links=tuple(links))


def _fit(profile: ClusterProfile) -> list[DeviceProfile]:
    """Devices that offer the model's dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def _representatives(used: Sequence[int], profile: ClusterProfile) -> list[int]:
    """One used rank of each class of interchangeable ranks, fastest first."""
    chosen = [
        next(rank for rank in members if rank in used) for members in rank_classes(profile) if set(members) & set(used)
    ]
    return sorted(chosen, key=lambda rank: (whole_model_s(profile, profile.devices[rank]), rank))


def _step_s(profile: ClusterProfile, request: PlanRequest) -> float:
    return make_plan(profile, request).predicted_step_s


def _what_if(change: str, profile: ClusterProfile, request: PlanRequest) -> WhatIf:
    try:
        return WhatIf(change, _step_s(profile, request))
    except UserError as error:
        return WhatIf(change, None, str(error).splitlines()[0])
