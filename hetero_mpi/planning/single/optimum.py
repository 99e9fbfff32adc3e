"""The fastest single pipeline over a cluster: looks at orders of ranks, splits the chain over them, deepens warm-up.

Exact at classic warm-up where all orders can be looked at and the effort suffices (a handful of unlike ranks, or many
in few classes); beyond that, the best found, with the gap to the bounds reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_mpi.errors import UserError
from hetero_mpi.planning.noise import smoothed
from hetero_mpi.planning.single.lines import Lines, orders_along_lines
from hetero_mpi.planning.single.orders import all_orders, found_orders
from hetero_mpi.planning.single.search import (
    Candidate,
    Effort,
    Order,
    Outlook,
    best_classic,
    deepen,
    evaluate,
    shifted,
    warm_up_of,
)
from hetero_mpi.planning.tables import Instance, rank_classes
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

SEARCH_EFFORT = 1_500_000
DEEPEN_EFFORT = 1_000_000
SEEDS = 12
"""Splits of least bound that are deepened besides the best classic one: depth changes which split is best."""
KEPT_ORDERS = 30
"""Orders along lines whose bounds are looked at."""
STARTS = 3
CLIMB = 3000
"""Orders looked at by changing the best ones rank by rank, times their length."""
SIMULATED = 6
"""Orders of very many that are simulated."""
NEAR = 0.005
"""A plan within this share of its bound is not worth cutting anew."""
PLACES = 8
"""About so many places of a long pipeline are tried for one more rank."""
LINE_EFFORT = 70_000
"""Effort for one of few long pipelines."""


@dataclass
class Space:
    """All that the planner may choose from."""

    profile: ClusterProfile
    request: PlanRequest
    classes: list[list[int]]
    most_in_flight: int | None = None
    """Micro-batches in flight to begin with, at most; None: as the classic depths have it."""

    @cached_property
    def outlooks(self) -> list[Outlook]:
        """One per micro-batch size, smallest first."""
        sizes = sorted(set(self.request.micro_batch_choices))
        instances = [Instance(self.profile, self.request, size, self.classes) for size in sizes]
        for instance in instances:
            instance.most_in_flight = self.most_in_flight
        return [Outlook(instance) for instance in instances]

    @property
    def sizes(self) -> list[int]:
        return [len(members) for members in self.classes]

    @property
    def longest(self) -> int:
        return min(sum(self.sizes), len(self.profile.model.layers))

    @property
    def shortest(self) -> int:
        return 1 if self.request.allow_idle else self.longest


@dataclass
class Optimum:
    """What was found."""

    best: Candidate | None
    space: Space
    """What ``best`` is a choice from: the classes that its order speaks of."""


def space_of(profile: ClusterProfile, request: PlanRequest) -> Space:
    """Raises ``UserError`` when the request cannot be planned for at all."""
    check(profile, request)
    return Space(profile, request, rank_classes(profile))


def check(profile: ClusterProfile, request: PlanRequest) -> None:
    """Raises ``UserError`` unless the request can be planned for, memory apart."""
    bad = [b for b in request.micro_batch_choices if b < 1 or request.global_batch % b]
    if bad or not request.micro_batch_choices:
        raise UserError(
            f"each micro-batch size must divide the global batch (global_batch: {request.global_batch}, "
            f"micro-batch sizes: {list(request.micro_batch_choices)}); change train.micro_batch or train.global_batch"
        )
    usable = [device.rank for device in profile.devices if profile.model.dtype in device.dtypes]
    if not usable:
        offers = ", ".join(f"rank {device.rank}: {'/'.join(device.dtypes)}" for device in profile.devices)
        raise UserError(f"no rank's device offers the job's dtype {profile.model.dtype} ({offers}); change train.dtype")
    most = len(profile.model.layers) * min(request.max_pipelines, request.global_batch)
    if not request.allow_idle and len(profile.devices) > min(len(usable), most):
        raise UserError(
            f"plan.allow_idle = false asks for work on all {len(profile.devices)} ranks, but {len(usable)} offer "
            f"{profile.model.dtype} and {most} can be given something: a stage holds one of {len(profile.model.layers)} "
            f"items of the model; start fewer ranks"
        )


def optimise(space: Space) -> Optimum:
    """The fastest plan; ``best`` is None when nothing fits in memory."""
    orders = all_orders(space.sizes, space.shortest, space.longest)
    if orders is not None:
        return _among(orders, space)
    calm = space_of(smoothed(space.profile), space.request)
    orders = all_orders(calm.sizes, calm.shortest, calm.longest)
    found = _among(orders, calm) if orders is not None else _along_lines(calm)
    if found.best is None:
        return Optimum(None, space)
    return _settled(found.best, calm, space.profile)


def _among(orders: list[Order], space: Space) -> Optimum:
    """All ``orders`` looked at: exact at classic warm-up unless the effort runs out."""
    roots = sorted(
        (outlook.bound_s(order), len(order), choice, order)
        for choice, outlook in enumerate(space.outlooks)
        for order in orders
    )
    roots = [root for root in roots if root[0] < math.inf]
    if not roots:
        return Optimum(None, space)
    best: Candidate | None = None
    effort = Effort(DEEPEN_EFFORT)
    for bound_s, _, choice, order in roots[:SEEDS]:
        if best is None or bound_s < best.step_s:
            outlook = space.outlooks[choice]
            seed = deepen(evaluate(outlook.instance, order, outlook.best_cuts(order)), bound_s, effort)
            seed = with_room(seed, space, effort)
            best = seed if seed.beats(best) else best
    # What is already deep and fast rules out most of the classic plans before they are simulated.
    best = best_classic(space.outlooks, orders, Effort(SEARCH_EFFORT), best)
    assert best is not None
    deeper = with_room(deepen(best, _bound_of(best, space), effort), space, effort)
    deeper = shifted(deeper, Effort(LINE_EFFORT))
    best = deeper if deeper.beats(best) else best
    return Optimum(_with_more_ranks(best, space), space)


def _along_lines(space: Space) -> Optimum:
    """Very many orders: those of the best lines, the best of them changed rank by rank, the best of these simulated."""
    along = orders_along_lines(space.outlooks, space.sizes, _weights(space), not space.request.allow_idle)
    bounds = {(choice, order): space.outlooks[choice].bound_s(order) for _, choice, order in along[:KEPT_ORDERS]}
    chosen = sorted((bound_s, choice, order) for (choice, order), bound_s in bounds.items() if bound_s < math.inf)
    if not chosen:
        return Optimum(None, space)
    _, choice, order = chosen[0]
    outlook = space.outlooks[choice]
    starts = [other for _, of, other in chosen[:STARTS] if of == choice]
    looks = CLIMB // len(order)
    climbed = found_orders(starts, space.sizes, space.shortest, space.longest, outlook.bound_s, looks)
    chosen = sorted({*chosen, *((outlook.bound_s(other), choice, other) for other in climbed[:SIMULATED])})
    best: Candidate | None = None
    effort = Effort(LINE_EFFORT)
    for bound_s, of, other in chosen[:SIMULATED]:
        if best is None or (bound_s < best.step_s and effort.left > 0):
            seed = evaluate(space.outlooks[of].instance, other, space.outlooks[of].best_cuts(other))
            effort.spend(seed)
            seed = with_room(deepen(seed, bound_s, effort), space, effort)
            best = seed if seed.beats(best) else best
    return Optimum(best, space)


def _settled(best: Candidate, calm: Space, profile: ClusterProfile) -> Optimum:
    """``best``, found among ranks made equal, with every rank's own figures: cut anew and simulated."""
    candidate, space = on_ranks(best.instance.ranks(best.order), best, replace(calm, profile=profile))
    assert candidate.step_s < math.inf, "the ranks made equal had the least memory of all of them"
    return Optimum(candidate, space)


def on_ranks(ranks: tuple[int, ...], like: Candidate, space: Space, most: int = LINE_EFFORT) -> tuple[Candidate, Space]:
    """The best plan found on just these ranks in this order, with micro-batches as in ``like``; infinite: none fits.

    ``most``: effort to spend. Each of these ranks becomes a class of its own; those left out stay in the classes of ``space``.
    """
    rest = [[rank for rank in members if rank not in ranks] for members in space.classes]
    own = Space(space.profile, space.request, [*([rank] for rank in ranks), *(members for members in rest if members)])
    size = like.instance.micro_batch
    outlook = next(outlook for outlook in own.outlooks if outlook.instance.micro_batch == size)
    order = tuple(range(len(ranks)))
    effort = Effort(most)
    bound_s = outlook.bound_s(order)
    shallow = warm_up_of(outlook.instance, len(order))
    candidate = evaluate(outlook.instance, order, like.cuts, like.warm_up)
    for cuts in dict.fromkeys((like.cuts, outlook.best_cuts(order) if bound_s < math.inf else like.cuts)):
        for warm_up in dict.fromkeys((like.warm_up, shallow)):
            seed = evaluate(outlook.instance, order, cuts, warm_up)
            effort.spend(seed)
            candidate = seed if seed.beats(candidate) else candidate
    if candidate.step_s < math.inf:
        candidate = shifted(with_room(deepen(candidate, bound_s, effort), own, effort), effort)
    return candidate, own


def _weights(space: Space) -> list[list[float]]:
    """Ways of sorting classes: by memory, by speed, by how fast their links are on average."""
    instance, count = space.outlooks[0].instance, len(space.classes)
    speed = [-float(instance.times[kind][1][0, -1]) for kind in range(count)]
    memory = [float(usable) for usable in instance.usable]
    links = [
        -sum(float(instance.messages(kind, other)[0][1]) for other in range(count) if other != kind)
        for kind in range(count)
    ]
    return [memory, speed, links]


def _with_more_ranks(best: Candidate, space: Space) -> Candidate:
    """``best``, or better: with one more rank, as long as that helps (it may where not every split was looked at)."""
    while True:
        larger = [added(best, kind, space) for kind, size in enumerate(space.sizes) if best.order.count(kind) < size]
        helps = [candidate for candidate in larger if candidate is not None and candidate.beats(best)]
        if not helps:
            return best
        best = min(helps, key=lambda candidate: (candidate.step_s, candidate.order))


def added(best: Candidate, kind: int, space: Space, effort: Effort | None = None) -> Candidate | None:
    """The best plan found with one more rank, of class ``kind``, somewhere in ``best``'s order; None: none fits."""
    effort = effort or Effort(DEEPEN_EFFORT // 10)
    if len(best.order) == len(space.profile.model.layers):
        return None
    outlook = outlook_of(best, space)
    every = max(1, len(best.order) // PLACES)
    places: set[Order] = {(*best.order[:i], kind, *best.order[i:]) for i in range(0, len(best.order) + 1, every)}
    bounds = sorted((outlook.bound_s(order), order) for order in places)
    if bounds[0][0] == math.inf:
        return None
    result: Candidate | None = None
    for bound_s, order in bounds[:3]:
        if result is None or (bound_s < result.step_s and effort.left > 0):
            seed = evaluate(outlook.instance, order, outlook.best_cuts(order))
            effort.spend(seed)
            candidate = deepen(seed, bound_s, effort)
            result = candidate if candidate.beats(result) else result
    return result


def outlook_of(candidate: Candidate, space: Space) -> Outlook:
    return next(outlook for outlook in space.outlooks if outlook.instance is candidate.instance)


def with_room(candidate: Candidate, space: Space, effort: Effort) -> Candidate:
    """``candidate``, or better: cut so that memory is left for the depth that its links ask for.

    The depth depends on the pace: that of the bound is tried, that of ``candidate``, and one between.
    """
    outlook = outlook_of(candidate, space)
    bound_s, count = outlook.bound_s(candidate.order), candidate.instance.micro_batches
    best = candidate
    tried = {candidate.cuts}
    for share in (0.0, 0.5, 1.0):
        given = candidate.instance.request.schedule != "auto"
        if best.step_s <= bound_s * (1 + NEAR) or effort.left <= 0 or len(candidate.order) == 1 or given:
            break
        pace_s = (bound_s + share * (candidate.step_s - bound_s)) / count
        cuts = Lines(outlook, space.sizes, True, pace_s).cuts_of(candidate.order)
        if cuts is not None and cuts not in tried:
            tried.add(cuts)
            seed = evaluate(candidate.instance, candidate.order, cuts)
            effort.spend(seed)
            seed = deepen(seed, bound_s, effort)
            best = seed if seed.beats(best) else best
    return best


def _bound_of(candidate: Candidate, space: Space) -> float:
    return outlook_of(candidate, space).bound_s(candidate.order)
