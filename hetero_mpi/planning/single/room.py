"""Does a model fit at all, and how: the split whose worst shortage of memory is least, at the fewest micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hetero_mpi.planning.noise import smoothed
from hetero_mpi.planning.single.optimum import Optimum, Space, on_ranks, space_of
from hetero_mpi.planning.single.orders import all_orders, found_orders, sorted_starts
from hetero_mpi.planning.single.search import Order, evaluate, warm_up_of
from hetero_mpi.planning.tables import Instance, Table, shared_memories
from hetero_mpi.planning.types.profile import ClusterProfile

SHORTAGE_LOOKS = 200
"""Orders looked at besides those sorted by memory, where there are very many ranks."""


def least_in_flight(instance: Instance, stages: int) -> int:
    """Micro-batches that the first of the last ``stages`` stages must keep: one, unless a schedule given by name keeps more."""
    return (
        1 if instance.request.schedule == "auto" else min(warm_up_of(instance, stages)[0] + 1, instance.micro_batches)
    )


@dataclass(frozen=True)
class Closest:
    """The split whose worst shortage is least."""

    shortage_bytes: float
    instance: Instance
    order: Order


class Shortages:
    """Least worst shortage of the last stages of an order, per item that they begin with."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.known: dict[Order, Table] = {}
        self.own = lru_cache(maxsize=None)(instance.shortage_bytes)
        self.nothing = np.full(instance.items + 1, np.inf)
        self.nothing[instance.items] = -np.inf

    def by_cut(self, order: Order) -> Table:
        own = self.own(order[0], least_in_flight(self.instance, len(order)))
        return np.asarray(np.maximum(own, self.of(order[1:])))

    def of(self, order: Order) -> Table:
        if not order:
            return self.nothing
        if order not in self.known:
            self.known[order] = self.by_cut(order).min(axis=1)
        return self.known[order]

    def cuts(self, order: Order) -> list[int]:
        cuts = [0]
        for i in range(len(order)):
            cuts.append(int(self.by_cut(order[i:])[cuts[-1]].argmin()))
        return cuts


def closest(space: Space) -> Closest:
    """Over all orders, where they are few; at the smallest micro-batch, which takes least."""
    instance = space.outlooks[0].instance
    shortages = Shortages(instance)

    def cost(order: Order) -> float:
        return float(shortages.of(order)[0])

    orders = all_orders(space.sizes, space.shortest, space.longest)
    if orders is None:
        memory = [float(usable) for usable in instance.usable]
        starts = sorted_starts(space.sizes, [memory], space.shortest, space.longest)
        orders = found_orders(starts, space.sizes, space.shortest, space.longest, cost, SHORTAGE_LOOKS)
    order = min(orders, key=lambda order: (cost(order), len(order), order))
    return Closest(cost(order), instance, order)


def rescued(space: Space) -> Optimum | None:
    """A plan that fits although the search for a fast one found none: the split that leaves most memory free."""
    calm = few_classes(space)
    found = closest(calm)
    if found.shortage_bytes > 0:
        return None
    instance, order = found.instance, found.order
    cuts = tuple(Shortages(instance).cuts(order))
    depths = None if instance.request.schedule != "auto" else (0,) * len(order)
    seed = evaluate(instance, order, cuts, depths)
    best, own = on_ranks(instance.ranks(order), seed, Space(space.profile, space.request, calm.classes))
    return Optimum(best, own) if best.step_s < math.inf else None


def few_classes(space: Space) -> Space:
    """``space``, or with like ranks made equal where the orders are too many."""
    many = all_orders(space.sizes, space.shortest, space.longest) is None
    return space_of(smoothed(space.profile), space.request) if many else space


def with_hosts_divided(profile: ClusterProfile) -> Iterator[ClusterProfile]:
    """Hosts whose memory ranks share: divided evenly among them first; then half of it to one of them, or all."""
    shared = shared_memories(profile)
    if not shared:
        yield profile
        return
    most = max(len(ranks) for _, ranks in shared)
    for favoured, share in [(0, 0.0), *((place, share) for share in (0.5, 0.75, 1.0) for place in range(min(most, 4)))]:
        devices = list(profile.devices)
        for host, ranks in shared:
            for place, rank in enumerate(ranks):
                part = share if place == favoured % len(ranks) else (1 - share) / (len(ranks) - 1)
                part = part if share else 1 / len(ranks)
                devices[rank] = replace(
                    devices[rank], memory_bytes=min(devices[rank].memory_bytes, int(host.memory_bytes * part))
                )
        yield replace(profile, devices=tuple(devices))
