"""Which pipelines stand side by side: every way to form them of given ranks and to share the batch among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetero_mpi.planning.exact.variants import Order

Team = tuple[tuple[Order, int], ...]
"""Pipelines as (order, share of the global batch), in the order of the ring."""


def disjoint(orders: Sequence[Order], sizes: Sequence[int], most: int) -> Iterator[tuple[Order, ...]]:
    """Two to ``most`` orders, ascending, that together use no class more often than it has ranks."""

    def more(chosen: tuple[Order, ...], start: int, left: tuple[int, ...]) -> Iterator[tuple[Order, ...]]:
        if len(chosen) > 1:
            yield chosen
        if len(chosen) == most:
            return
        for place in range(start, len(orders)):
            order = orders[place]
            rest = tuple(left[kind] - order.count(kind) for kind in range(len(left)))
            if min(rest) >= 0:
                yield from more((*chosen, order), place, rest)

    yield from more((), 0, tuple(sizes))


def shared_out(orders: tuple[Order, ...], batch: int) -> Iterator[Team]:
    """Every way to share ``batch`` among the orders and to stand in a ring; turning a ring changes nothing."""
    seen: set[Team] = set()
    for inner in itertools.combinations(range(1, batch), len(orders) - 1):
        shares = [b - a for a, b in itertools.pairwise((0, *inner, batch))]
        pairs = list(zip(orders, shares, strict=True))
        for rest in itertools.permutations(pairs[1:]):
            ring = (pairs[0], *rest)
            turned = min((*ring[i:], *ring[:i]) for i in range(len(ring)))
            if turned not in seen:
                seen.add(turned)
                yield turned
