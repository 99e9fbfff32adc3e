"""The fastest single pipeline over a cluster: looks at orders of ranks, splits the chain over them, deepens warm-up.

Exact at classic warm-up where all orders can be looked at and the effort suffices (a handful of unlike ranks, or many
in few classes); beyond that, the best found, with the gap to the bounds reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_mpi.errors import UserError
from hetero_mpi.planning.orders import all_orders, found_orders
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.search import Candidate, Effort, Order, Outlook, best_classic, deepen, evaluate
from hetero_mpi.planning.tables import Instance, rank_classes

SEARCH_EFFORT = 1_500_000
DEEPEN_EFFORT = 1_000_000
SEEDS = 12
"""Splits of least bound that are deepened besides the best classic one: depth changes which split is best."""
KEPT_ORDERS = 30
"""Orders that the local search hands on."""


@dataclass
class Space:
    """All that the planner may choose from."""

    profile: ClusterProfile
    request: PlanRequest
    classes: list[list[int]]
    outlooks: list[Outlook]
    """One per micro-batch size, smallest first."""

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
    """What was found. ``exhaustive``: every order was looked at, so ``bound_s`` holds for every split."""

    best: Candidate | None
    exhaustive: bool
    bound_s: float


def space_of(profile: ClusterProfile, request: PlanRequest) -> Space:
    """Raises ``UserError`` when the request cannot be planned for at all."""
    _check(profile, request)
    classes = rank_classes(profile)
    sizes = sorted(set(request.micro_batch_choices))
    return Space(profile, request, classes, [Outlook(Instance(profile, request, size, classes)) for size in sizes])


def _check(profile: ClusterProfile, request: PlanRequest) -> None:
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
    if not request.allow_idle and len(profile.devices) > min(len(usable), len(profile.model.layers)):
        raise UserError(
            f"plan.allow_idle = false asks for work on all {len(profile.devices)} ranks, but {len(usable)} offer  "
            f"{profile.model.dtype} and the model has {len(profile.model.layers)} items; start fewer ranks"
        )


def optimise(space: Space) -> Optimum:
    """The fastest plan; ``best`` is None when nothing fits in memory."""
    orders = all_orders(space.sizes, space.shortest, space.longest)
    exhaustive = orders is not None
    if orders is None:
        orders = _search_orders(space)
    roots = sorted(
        (outlook.bound_s(order), len(order), choice, order)
        for choice, outlook in enumerate(space.outlooks)
        for order in orders
    )
    roots = [root for root in roots if root[0] < math.inf]
    if not roots:
        return Optimum(None, exhaustive, math.inf)
    best = best_classic(space.outlooks, orders, Effort(SEARCH_EFFORT))
    effort = Effort(DEEPEN_EFFORT)
    if best is not None:
        best = deepen(best, _bound_of(best, space), effort)
    for bound_s, _, choice, order in roots[:SEEDS]:
        if best is None or bound_s < best.step_s:
            outlook = space.outlooks[choice]
            seed = deepen(evaluate(outlook.instance, order, outlook.best_cuts(order)), bound_s, effort)
            best = seed if seed.beats(best) else best
    assert best is not None
    return Optimum(_with_more_ranks(best, space), exhaustive, roots[0][0])


def _with_more_ranks(best: Candidate, space: Space) -> Candidate:
    """``best``, or better: with one more rank, as long as that helps (it may where not every split was looked at)."""
    while True:
        larger = [added(best, kind, space) for kind, size in enumerate(space.sizes) if best.order.count(kind) < size]
        helps = [candidate for candidate in larger if candidate is not None and candidate.beats(best)]
        if not helps:
            return best
        best = min(helps, key=lambda candidate: (candidate.step_s, candidate.order))


def added(best: Candidate, kind: int, space: Space) -> Candidate | None:
    """The best plan found with one more rank, of class ``kind``, somewhere in ``best``'s order; None: none fits."""
    if len(best.order) == len(space.profile.model.layers):
        return None
    outlook = outlook_of(best, space)
    places: set[Order] = {(*best.order[:i], kind, *best.order[i:]) for i in range(len(best.order) + 1)}
    bounds = sorted((outlook.bound_s(order), order) for order in places)
    if bounds[0][0] == math.inf:
        return None
    result: Candidate | None = None
    for bound_s, order in bounds[:3]:
        if bound_s < math.inf:
            seed = evaluate(outlook.instance, order, outlook.best_cuts(order))
            candidate = deepen(seed, bound_s, Effort(DEEPEN_EFFORT // 10))
            result = candidate if candidate.beats(result) else result
    return result


def outlook_of(candidate: Candidate, space: Space) -> Outlook:
    return next(outlook for outlook in space.outlooks if outlook.instance is candidate.instance)


def _bound_of(candidate: Candidate, space: Space) -> float:
    return outlook_of(candidate, space).bound_s(candidate.order)


def _search_orders(space: Space) -> list[Order]:
    """Local search over orders, under the micro-batch size that is best when as many ranks as possible are used."""
    speeds = [-float(space.outlooks[0].instance.times[c][1][0, -1]) for c in range(len(space.classes))]
    memory = [float(usable) for usable in space.outlooks[0].instance.usable]
    everyone = sorted((c for c, size in enumerate(space.sizes) for _ in range(size)), key=lambda c: (-memory[c], c))
    whole = tuple(everyone[: space.longest])
    chosen = min(range(len(space.outlooks)), key=lambda i: (space.outlooks[i].bound_s(whole), i))
    hosts = [float(-index) for index in range(len(space.classes))]
    found = found_orders(
        space.sizes, [speeds, memory, hosts], space.shortest, space.longest, space.outlooks[chosen].bound_s
    )
    return found[:KEPT_ORDERS]
