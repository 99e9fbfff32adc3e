"""Among plans that are equally good, the one that a person would have written: ranks in their own order.

Measured links differ by a few per cent from one measurement to the next, and with them which order of equal devices looks
fastest. Where the request says that a small share of the step does not matter (``PlanRequest.indifference``), the planner's
choice is replaced by a plan at most that much slower

1. on the lowest-numbered of alike ranks, all in ascending order, where there is one pipeline; else
2. on these, where alike ranks stand in ascending order among themselves; else
3. and 4., the same on the very ranks that were chosen.

With an indifference of 0 only ranks that are equal are exchanged (2. and 4.); else those with the same device and the same times,
whatever their links and memory: what is exchanged must fit, and be as fast.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetero_mpi.planning.fit import like_ranks
from hetero_mpi.planning.search.pipelines import ROUNDING, Lines
from hetero_mpi.planning.search.search import Search
from hetero_mpi.planning.tables import in_classes, rank_classes
from hetero_mpi.planning.types.plan import Plan


def in_natural_order(plan: Plan, step_s: float, search: Search) -> tuple[Plan, float]:
    """``plan``, which takes ``step_s``, or one that the request is indifferent to and whose ranks are more nearly in order."""
    profile, request = search.profile, search.request
    limit_s = step_s * (1 + max(request.indifference, ROUNDING))
    classes = _like(search) if request.indifference > 0 else rank_classes(profile)
    alike = {rank: members for members in classes for rank in members}
    lines = search.lines(plan)
    chosen = [search.ranks[rank] for line in lines for rank in line.ranks]
    for ranks in _wishes(chosen, alike, len(lines) == 1 and request.indifference > 0):
        if ranks == chosen:
            break
        left = iter(search.ranks.index(rank) for rank in ranks)
        wished: Lines = tuple(line._replace(ranks=tuple(next(left) for _ in line.ranks)) for line in lines)
        found = search.in_order(wished, limit_s)
        if found is not None:
            return found
    return plan, step_s


def _like(search: Search) -> list[list[int]]:
    """The usable ranks in classes of like devices with equal times."""
    devices = {device.rank: device for device in search.profile.devices}
    usable = [[rank for rank in like if rank in search.ranks] for like in like_ranks(search.profile)]
    return [one for like in usable for one in in_classes(like, lambda a, b: devices[a].layers == devices[b].layers)]


def _wishes(ranks: list[int], alike: dict[int, list[int]], one: bool) -> Iterator[list[int]]:
    """Orders of ranks that would be preferred to ``ranks``, the most wanted first."""
    classes = {id(alike[rank]): alike[rank] for rank in ranks}
    counted = (sorted(members)[: sum(rank in members for rank in ranks)] for members in classes.values())
    for wanted in (sorted(rank for members in counted for rank in members), sorted(ranks)):
        if one:
            yield wanted
        yield _filled(ranks, wanted, alike)


def _filled(ranks: list[int], ascending: list[int], alike: dict[int, list[int]]) -> list[int]:
    """Each place keeps its class; the members of a class take their places in ascending order."""
    waiting, result = list(ascending), []
    for rank in ranks:
        chosen = next(other for other in waiting if other in alike[rank])
        waiting.remove(chosen)
        result.append(chosen)
    return result
