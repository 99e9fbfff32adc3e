"""Which orders of ranks the planner looks at: all of them when they are few, else those that a local search finds.

An order is a sequence of classes of interchangeable ranks; leaving ranks out is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from hetero_mpi.planning.single.search import Order

FEW = 2000
"""So many orders are all looked at."""
LOOKS = 1000
"""The local search looks at no more orders than this."""
STARTS = 3


def all_orders(sizes: list[int], shortest: int, longest: int, limit: int = FEW) -> list[Order] | None:
    """Every sequence with at most ``sizes[c]`` ranks of class c, short ones first; None when more than ``limit``."""
    found: list[Order] = []
    layer: list[Order] = [()]
    for length in range(1, longest + 1):
        layer = [(*order, c) for order in layer for c in range(len(sizes)) if order.count(c) < sizes[c]]
        if length >= shortest:
            found += layer
        if len(found) > limit or len(layer) > limit:
            return None
    return found


def found_orders(
    starts: Sequence[Order],
    sizes: list[int],
    shortest: int,
    longest: int,
    cost: Callable[[Order], float],
    looks: int = LOOKS,
) -> list[Order]:
    """Good orders among very many, the best by ``cost`` first, by local search from the best of ``starts``.

    At most ``looks`` orders are looked at besides the starts. The first change that helps is taken, so that few looks go far.
    Deterministic.
    """
    known = {start: cost(start) for start in starts}
    left = looks

    def ranking(order: Order) -> tuple[float, int, Order]:
        return known[order], len(order), order

    for start in sorted(known, key=ranking)[:STARTS]:
        here, improved = start, True
        while improved and left > 0:
            improved = False
            for there in sorted(_moves(here, sizes, shortest, longest)):
                if there not in known and left > 0:
                    known[there], left = cost(there), left - 1
                if there in known and ranking(there) < ranking(here):
                    here, improved = there, True
                    break
    return sorted((order for order in known if known[order] < math.inf), key=ranking)


def sorted_starts(sizes: list[int], weights: list[list[float]], shortest: int, longest: int) -> list[Order]:
    """Orders to begin with: the first k ranks of each sorting by a weight of the classes, in the order of every sorting and
    of its reverse, for every k. ``weights``: one list per way of sorting (speed, memory), largest first."""
    return sorted(set(_starts(sizes, weights, shortest, longest)))


def _starts(sizes: list[int], weights: list[list[float]], shortest: int, longest: int) -> Iterator[Order]:
    everyone = [c for c, size in enumerate(sizes) for _ in range(size)]
    for chosen_by in weights:
        by_choice = sorted(everyone, key=lambda c: (-chosen_by[c], c))
        for count in range(shortest, longest + 1):
            for placed_by in weights:
                order = tuple(sorted(by_choice[:count], key=lambda c: (-placed_by[c], c)))
                yield order
                yield order[::-1]


def _moves(order: Order, sizes: list[int], shortest: int, longest: int) -> set[Order]:
    """Orders one change away: two ranks swapped, one moved, left out, added, or replaced."""
    spare = [c for c, size in enumerate(sizes) if order.count(c) < size]
    count = len(order)
    result: set[Order] = set()
    for i in range(count):
        without = order[:i] + order[i + 1 :]
        if count > shortest:
            result.add(without)
        result |= {(*order[:i], c, *order[i + 1 :]) for c in spare}
        result |= {(*without[:j], order[i], *without[j:]) for j in range(count)}
        for j in range(i):
            result.add((*order[:j], order[i], *order[j + 1 : i], order[j], *order[i + 1 :]))
    if count < longest:
        result |= {(*order[:i], c, *order[i:]) for i in range(count + 1) for c in spare}
    return result - {order}
