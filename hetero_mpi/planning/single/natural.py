"""Among plans that are equally good, the one that a person would have written: ranks in their own order.

Measured times differ by a few per cent from one measurement to the next, and with them which order of equal devices looks
fastest. Where the request says that a small share of the step does not matter (``PlanRequest.indifference``), the planner's
choice is replaced by a plan at most that much slower

1. on the lowest-numbered of alike ranks, all in ascending order; else
2. on these, where alike ranks stand in ascending order among themselves; else
3. and 4., the same on the very ranks that were chosen;

and then neighbouring hosts' ranks are exchanged that stand in descending order, as long as the limit holds. With an
indifference of 0 the fastest plan found stays as it is.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from hetero_mpi.planning.noise import smoothed
from hetero_mpi.planning.single.optimum import Optimum, on_ranks
from hetero_mpi.planning.single.search import Candidate
from hetero_mpi.planning.tables import rank_classes

EFFORT = 30_000
"""Effort for the plan of one order."""
LONG = 12
EXCHANGES = 8
"""Exchanges of neighbours that are tried at most; a quarter of that in pipelines longer than ``LONG``."""


def in_natural_order(found: Optimum, indifference: float) -> Optimum:
    """``found``, or a plan at most ``indifference`` slower whose ranks are more nearly in order. Deterministic."""
    if found.best is None or indifference <= 0:
        return found
    best = found.best
    limit_s = best.step_s * (1 + indifference)
    ranks = best.instance.ranks(best.order)
    chosen, result = ranks, found
    for wanted in dict.fromkeys(_wishes(ranks, found)):
        if wanted == ranks:
            break
        candidate, space = on_ranks(wanted, best, found.space, EFFORT)
        if candidate.step_s <= limit_s:
            chosen, result = wanted, replace(found, best=candidate, space=space)
            break
    left, place = EXCHANGES if len(ranks) <= LONG else EXCHANGES // 4, 0
    runs = _runs(chosen, found)
    while place + 1 < len(runs) and left > 0:
        if runs[place] > runs[place + 1]:
            changed = [*runs[:place], runs[place + 1], runs[place], *runs[place + 2 :]]
            wanted = tuple(rank for run in changed for rank in run)
            candidate, space = on_ranks(wanted, _of(result), found.space, EFFORT)
            left -= 1
            if candidate.step_s <= limit_s:
                runs, result = changed, replace(found, best=candidate, space=space)
                place = max(place - 1, 0)
                continue
        place += 1
    return result


def _runs(ranks: tuple[int, ...], found: Optimum) -> list[tuple[int, ...]]:
    """Neighbours on one host together: an exchange must not tear a host's ranks apart."""
    hosts = itertools.groupby(ranks, lambda rank: found.space.profile.devices[rank].host)
    return [tuple(run) for _, run in hosts]


def _of(found: Optimum) -> Candidate:
    assert found.best is not None
    return found.best


def _wishes(ranks: tuple[int, ...], found: Optimum) -> list[tuple[int, ...]]:
    """Orders of ranks that would be preferred to ``ranks``, the most wanted first; ends with ``ranks`` itself."""
    alike = {rank: members for members in rank_classes(smoothed(found.space.profile)) for rank in members}
    lowest = sorted(rank for members in _counted(ranks, alike) for rank in members)
    return [
        tuple(lowest),
        _filled(ranks, tuple(lowest), alike),
        tuple(sorted(ranks)),
        _filled(ranks, tuple(sorted(ranks)), alike),
        ranks,
    ]


def _counted(ranks: tuple[int, ...], alike: dict[int, list[int]]) -> list[list[int]]:
    """Of each class in use, as many ranks as are used, the lowest numbers."""
    classes = {id(alike[rank]): alike[rank] for rank in ranks}
    return [sorted(members)[: sum(rank in members for rank in ranks)] for members in classes.values()]


def _filled(ranks: tuple[int, ...], ascending: tuple[int, ...], alike: dict[int, list[int]]) -> tuple[int, ...]:
    """Each place keeps its class; the members of a class take their places in ascending order."""
    waiting = list(ascending)
    result = []
    for rank in ranks:
        chosen = next(other for other in waiting if other in alike[rank])
        waiting.remove(chosen)
        result.append(chosen)
    return tuple(result)
