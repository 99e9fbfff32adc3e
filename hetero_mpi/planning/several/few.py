"""Several pipelines over a handful of ranks, where the batch is too large for the exact search.

Every way to group the ranks is looked at. What a group can do per second is bounded by its best order (``Outlook.bound_s``); the
batch is shared in proportion, and the groupings that promise most are planned and simulated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero_mpi.planning.exact.variants import depths_of
from hetero_mpi.planning.several.polish import Polisher
from hetero_mpi.planning.single.optimum import Space
from hetero_mpi.planning.single.orders import all_orders
from hetero_mpi.planning.single.search import Order, Outlook
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan

MOST_ORDERS = 700
"""With more orders of single pipelines than this, ranks are not few."""
MOST_GROUPINGS = 3000
SIMULATED = 12
"""Groupings that are simulated, of those that promise most."""
POLISHED = 3

Group = tuple[int, ...]
"""Classes of ranks, ascending."""


def several(space: Space, polisher: Polisher) -> tuple[Plan, float] | None:
    """The best plan found with two or more pipelines, and its step time; None: none fits, or there are too many ranks."""
    orders = all_orders(space.sizes, 1, min(sum(space.sizes), len(space.profile.model.layers)), MOST_ORDERS)
    if orders is None:
        return None
    best = _best_orders(space, orders)
    promising = []
    for grouping in itertools.islice(_groupings(sorted(best), space), MOST_GROUPINGS):
        speed = sum(1 / best[group][0] for group in grouping)
        promising.append((space.request.global_batch / speed, len(grouping), grouping))
    tried: list[tuple[float, Plan]] = []
    for _, _, grouping in sorted(promising)[:SIMULATED]:
        plan = _plan(grouping, best, space)
        fitting = polisher.fitted(plan) if plan is not None else None
        if fitting is not None and polisher.left > 0:
            tried.append((polisher.step_s(fitting), fitting))
    tried.sort(key=lambda entry: entry[0])
    polished = [polisher.polished(plan, step_s) for step_s, plan in tried[:POLISHED]]
    return min(polished, key=lambda entry: entry[1], default=None)


def _best_orders(space: Space, orders: list[Order]) -> dict[Group, tuple[float, Outlook, Order]]:
    """Of every group of ranks: (least seconds per sequence, at which micro-batch size, in which order)."""
    found: dict[Group, tuple[float, Outlook, Order]] = {}
    for order in orders:
        for outlook in space.outlooks:
            seconds = outlook.bound_s(order) / space.request.global_batch
            group = tuple(sorted(order))
            if seconds < math.inf and (group not in found or seconds < found[group][0]):
                found[group] = seconds, outlook, order
    return {group: entry for group, entry in found.items() if entry[0] > 0}


def _groupings(groups: list[Group], space: Space) -> Iterator[tuple[Group, ...]]:
    """Two groups and more, ascending, that use no class more often than it has ranks."""
    most = min(space.request.max_pipelines, space.request.global_batch)
    needed = sum(space.sizes) if not space.request.allow_idle else 0

    def more(chosen: tuple[Group, ...], start: int, left: tuple[int, ...]) -> Iterator[tuple[Group, ...]]:
        if len(chosen) > 1 and sum(map(len, chosen)) >= needed:
            yield chosen
        if len(chosen) == most:
            return
        for place in range(start, len(groups)):
            rest = tuple(count - groups[place].count(kind) for kind, count in enumerate(left))
            if min(rest) >= 0:
                yield from more((*chosen, groups[place]), place, rest)

    yield from more((), 0, tuple(space.sizes))


def dealt(parts: int, seconds: Sequence[float]) -> list[int]:
    """``parts``, at least as many as there are takers, in whole shares of at least one: to each as it is fast."""
    speeds = [1 / max(each, 1e-12) for each in seconds]
    exact = [parts * speed / sum(speeds) for speed in speeds]
    shares = [max(1, math.floor(share)) for share in exact]
    while sum(shares) != parts:
        by = 1 if sum(shares) < parts else -1
        able = [i for i in range(len(shares)) if shares[i] + by >= 1]
        shares[max(able, key=lambda i: (by * (exact[i] - shares[i]), -i))] += by
    return shares


def _plan(grouping: tuple[Group, ...], best: dict[Group, tuple[float, Outlook, Order]], space: Space) -> Plan | None:
    """The batch shared by speed, in micro-batches; classic depths."""
    request, sizes = space.request, sorted(set(space.request.micro_batch_choices), reverse=True)
    unit = max(size for size in sizes if size * len(grouping) <= request.global_batch or size == sizes[-1])
    parts = request.global_batch // unit
    if parts < len(grouping):
        return None
    shares = dealt(parts, [best[group][0] for group in grouping])
    waiting = [list(members) for members in space.classes]
    pipelines = []
    for group, share in zip(grouping, shares, strict=True):
        _, outlook, order = best[group]
        sequences = share * unit
        micro_batch = next(s for s in sizes if s <= max(unit, outlook.instance.micro_batch) and sequences % s == 0)
        cuts = outlook.best_cuts(order)
        schedule = "1f1b" if request.schedule == "auto" else request.schedule
        (warm_up,) = depths_of(schedule, len(order), sequences // micro_batch)
        stages = tuple(
            StagePlan((waiting[kind].pop(0),), cuts[i], cuts[i + 1], warm_up[i]) for i, kind in enumerate(order)
        )
        split = len(order) > 1 and request.schedule == "split"
        pipelines.append(PipelinePlan(stages, micro_batch, sequences, split))
    return Plan(tuple(pipelines), request.global_batch, request.sequence_length, len(space.profile.model.layers))
