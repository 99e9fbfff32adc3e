"""Finds the best split of the chain over given orders of ranks: best-first search, then deeper warm-up.

A plan is a sequence of classes of ranks (``tables.rank_classes``), the cuts of the chain between them, a micro-batch
size and a warm-up depth per stage. For every order and every place in the chain, dynamic programming over the
remaining stages gives the least that the rest can cost (``Remainder``); added to what is decided it bounds every
completion from below, so that plans are simulated in the order of their bounds and the search ends when the bounds
have passed the best plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hetero_mpi.planning.pacing import classic_depths, paced_each, scheduled_depths
from hetero_mpi.planning.simulator import spans_s
from hetero_mpi.planning.tables import Instance, Table
from hetero_mpi.planning.types.plan import Plan

ROUNDING = 1e-9
"""Relative difference below which two step times are equal: sums in another order differ by less."""
WORTHWHILE = 1e-3
"""A deeper warm-up costs memory: it must shorten the step by more than this share."""

ALLOWANCES = (0.1, 0.3)
ROUNDS = 4
"""When the effort suffices for fewer rounds of the greedy search for depth, it is spent on better guesses."""

Order = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A simulated plan."""

    instance: Instance
    order: Order
    cuts: tuple[int, ...]
    warm_up: tuple[int, ...]
    step_s: float
    """Infinite: does not fit in memory."""

    def plan(self) -> Plan:
        depths = _depths(self.instance, self.warm_up)
        recompute = tuple(
            bool(self.instance.stage(kind, depth).recompute[self.cuts[i], self.cuts[i + 1]])
            for i, (kind, depth) in enumerate(zip(self.order, depths, strict=True))
        )
        return self.instance.plan(self.order, self.cuts, self.warm_up, recompute)

    def beats(self, other: Candidate | None) -> bool:
        """Faster, or as fast with fewer ranks."""
        if other is None or other.step_s == math.inf:
            return self.step_s < math.inf
        if abs(self.step_s - other.step_s) <= ROUNDING * other.step_s:
            return len(self.order) < len(other.order)
        return self.step_s < other.step_s


@dataclass
class Effort:
    """How much simulating is left, in simulated forwards and backwards: a count, not a clock, so that the same input
    always gives the same plan."""

    left: int

    def spend(self, candidate: Candidate) -> None:
        self.left -= 2 * len(candidate.order) * candidate.instance.micro_batches


def warm_up_of(instance: Instance, stages: int) -> tuple[int, ...]:
    """The depths to begin with: all micro-batches where the request asks for GPipe, else 1F1B's own, as far as allowed."""
    count, most = instance.micro_batches, instance.most_in_flight
    depths = scheduled_depths(instance.request.schedule, stages, count)
    return depths if most is None or instance.request.schedule == "gpipe" else tuple(min(d, most - 1) for d in depths)


def _depths(instance: Instance, warm_up: Iterable[int]) -> list[int]:
    """Micro-batches in flight at each stage."""
    return [min(depth + 1, instance.micro_batches) for depth in warm_up]


def evaluate(
    instance: Instance, order: Order, cuts: tuple[int, ...], warm_up: tuple[int, ...] | None = None
) -> Candidate:
    """Simulates one plan; ``warm_up`` is ``warm_up_of`` by default."""
    depth = warm_up if warm_up is not None else warm_up_of(instance, len(order))
    tables = [instance.stage(kind, flying) for kind, flying in zip(order, _depths(instance, depth), strict=True)]
    spans = list(itertools.pairwise(cuts))
    forward = [float(table.forward_s[span]) for table, span in zip(tables, spans, strict=True)]
    if math.inf in forward:
        return Candidate(instance, order, cuts, depth, math.inf)
    backward = [float(table.backward_s[span]) for table, span in zip(tables, spans, strict=True)]
    links = [instance.messages(a, b) for a, b in itertools.pairwise(order)]
    out = [float(link[0][cut]) for link, cut in zip(links, cuts[1:], strict=False)]
    back = [float(link[1][cut]) for link, cut in zip(links, cuts[1:], strict=False)]
    begun, ended = spans_s(forward, backward, out, back, depth, instance.micro_batches)
    end_s = max(ended)
    steps = [float(instance.step_s[kind][span]) for kind, span in zip(order, spans, strict=True)]
    if len(order) > 1:
        share_s, return_s = instance.tied_s(order[0], order[-1])
        end_s = max(end_s, begun[-1] + share_s)
        steps.append(steps[0] + return_s)
    return Candidate(instance, order, cuts, depth, end_s + max(steps))


@dataclass(frozen=True)
class Remainder:
    """For the last stages of an order: per item that the first of them begins with, the least that they can take.

    Seconds counted from when the first micro-batch arrives there until its rank has done its last backward.
    """

    work_s: Table
    """All micro-batches, for any warm-up: the plan bound of ``bounds``, with links that carry one message at a time."""
    trip_s: Table
    """One micro-batch, there and back."""
    step_s: Table
    """The longest optimizer step."""


class Outlook:
    """Remainders of one instance, remembered by their sequence of classes."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.known: dict[Order, Remainder] = {}
        start = np.full(instance.items + 1, np.inf)
        start[instance.items] = 0.0
        self.nothing = Remainder(start, start, start)

    def hop(self, order: Order) -> tuple[Table | float, Table | float]:
        """(one message there and back, all messages of a step over the first link of ``order``), by cut."""
        if len(order) == 1:
            return 0.0, 0.0
        out, back = self.instance.messages(order[0], order[1])
        count = self.instance.micro_batches
        return out + back, np.maximum(count * out + back, out + count * back)

    def remainder(self, order: Order) -> Remainder:
        """Dynamic programming from the last stage: the best first cut for every item to begin with."""
        if not order:
            return self.nothing
        if order not in self.known:
            rest = self.remainder(order[1:])
            compute = self.compute(order)
            there_and_back, all_messages = self.hop(order)
            work = np.maximum(
                self.instance.micro_batches * compute, compute + np.maximum(all_messages, there_and_back + rest.work_s)
            )
            work = np.where(np.isinf(rest.work_s), np.inf, work)
            self.known[order] = Remainder(
                work.min(axis=1),
                (compute + there_and_back + rest.trip_s).min(axis=1),
                np.maximum(self.instance.step_s[order[0]], rest.step_s).min(axis=1),
            )
        return self.known[order]

    def compute(self, order: Order) -> Table:
        """Forward + backward of the first stage of ``order``, at the depth to begin with."""
        (depth,) = _depths(self.instance, warm_up_of(self.instance, len(order))[:1])
        return self.instance.stage(order[0], depth).total_s

    def bound_s(self, order: Order) -> float:
        """No split over this order is faster at any warm-up (depth takes memory: the classic one is most lenient)."""
        rest = self.remainder(order)
        return float(rest.work_s[0] + rest.step_s[0])

    def best_cuts(self, order: Order) -> tuple[int, ...]:
        """The cuts that attain ``remainder(order).work_s[0]``."""
        cuts = [0]
        for i in range(len(order)):
            here = order[i:]
            rest = self.remainder(here[1:])
            compute = self.compute(here)[cuts[-1]]
            there_and_back, all_messages = self.hop(here)
            onward = compute + np.maximum(all_messages, there_and_back + rest.work_s)
            work = np.maximum(self.instance.micro_batches * compute, onward)
            cuts.append(int(np.where(np.isinf(rest.work_s), np.inf, work).argmin()))
        return tuple(cuts)


@dataclass(frozen=True, order=True)
class Node:
    """A partly decided split; ordered by bound, then by fewer ranks, then the same way every time."""

    bound_s: float
    ranks: int
    choice: int
    """Index of the outlook (the micro-batch size)."""
    order: Order
    cuts: tuple[int, ...]
    arrived_s: tuple[float, ...] = field(compare=False)
    """When the first micro-batch reaches each decided stage and the next, its way back included."""
    work_s: float = field(compare=False)
    """The decided stages' part of the bound."""
    step_s: float = field(compare=False)


def best_classic(
    outlooks: list[Outlook], orders: list[Order], effort: Effort, best: Candidate | None = None
) -> Candidate | None:
    """The fastest plan at classic warm-up over ``orders``; the proven optimum unless ``effort`` runs out.

    ``best``: a plan known already; it is returned when no classic plan beats it.
    """
    heap: list[Node] = []
    for choice, outlook in enumerate(outlooks):
        for order in orders:
            node = Node(outlook.bound_s(order), len(order), choice, order, (0,), (0.0,), 0.0, 0.0)
            if node.bound_s < math.inf:
                heap.append(node)
    heapq.heapify(heap)
    while heap and effort.left > 0:
        node = heapq.heappop(heap)
        if _hopeless(node.bound_s, node.ranks, best):
            continue
        outlook = outlooks[node.choice]
        if len(node.cuts) == len(node.order) + 1:
            candidate = evaluate(outlook.instance, node.order, node.cuts)
            effort.spend(candidate)
            best = candidate if candidate.beats(best) else best
            continue
        effort.left -= 50
        for child in _children(node, outlook):
            if not _hopeless(child.bound_s, child.ranks, best):
                heapq.heappush(heap, child)
    return best


def _hopeless(bound_s: float, ranks: int, best: Candidate | None) -> bool:
    """Nothing under this bound can beat ``best``."""
    if best is None:
        return bound_s == math.inf
    if ranks < len(best.order):
        return bound_s > best.step_s * (1 + ROUNDING)
    return bound_s > best.step_s * (1 - ROUNDING)


def _children(node: Node, outlook: Outlook) -> Iterable[Node]:
    """The next cut in all ways, each with a bound on everything that can still follow."""
    instance = outlook.instance
    index = len(node.cuts) - 1
    here, first = node.order[index:], node.cuts[-1]
    rest = outlook.remainder(here[1:])
    compute = outlook.compute(here)[first]
    there_and_back, all_messages = outlook.hop(here)
    now = node.arrived_s[-1]
    arrived = now + compute + there_and_back
    work = np.maximum(node.work_s, now + np.maximum(instance.micro_batches * compute, compute + all_messages))
    bound = np.maximum(work, arrived + rest.work_s)
    for place, start in enumerate(node.arrived_s):
        # With k micro-batches in flight, micro-batch m + k sets out only after m has come back.
        rounds = math.ceil(instance.micro_batches / (len(node.order) - place))
        bound = np.maximum(bound, start + rounds * (arrived - start + rest.trip_s))
    step = instance.step_s[node.order[index]][first]
    if index == 0 and len(node.order) > 1:
        step = step + instance.tied_s(node.order[0], node.order[-1])[1]
    step = np.maximum(node.step_s, step)
    bound = bound + np.maximum(step, rest.step_s)
    for cut in np.flatnonzero(np.isfinite(bound)):
        yield Node(
            float(bound[cut]),
            node.ranks,
            node.choice,
            node.order,
            (*node.cuts, int(cut)),
            (*node.arrived_s, float(arrived[cut])),
            float(work[cut]),
            float(step[cut]),
        )


def deepen(candidate: Candidate, bound_s: float, effort: Effort) -> Candidate:
    """Deeper warm-up, greedily: the one change that helps most, as long as one helps by more than 0.1 % and fits.

    A change is one more micro-batch in flight at one stage, or at that stage and all before it (a stage must not be
    deeper than the one before). Where looking at all changes is dear, ``paced`` depths are tried first. A schedule given by
    name leaves nothing to deepen.
    """
    if candidate.instance.request.schedule != "auto":
        return candidate
    changes = 2 * (len(candidate.order) - 1)
    cost = changes * 2 * len(candidate.order) * candidate.instance.micro_batches
    if candidate.step_s > bound_s * (1 + WORTHWHILE) and cost > effort.left / ROUNDS:
        for allowance, recompute in itertools.product(ALLOWANCES, (False, True)):
            changed = paced(candidate, allowance, recompute)
            if changed.warm_up == candidate.warm_up:
                continue
            effort.spend(changed)
            candidate = changed if changed.step_s < candidate.step_s * (1 - WORTHWHILE) else candidate
    while candidate.step_s > bound_s * (1 + WORTHWHILE) and effort.left > cost:
        best = candidate
        for warm_up in _deeper(candidate):
            changed = evaluate(candidate.instance, candidate.order, candidate.cuts, warm_up)
            effort.spend(changed)
            if changed.step_s < best.step_s * (1 - ROUNDING):
                best = changed
        if best.step_s >= candidate.step_s * (1 - WORTHWHILE):
            break
        candidate = best
    return candidate


def paced(candidate: Candidate, allowance: float = 0.0, recompute: bool = False) -> Candidate:
    """Each stage so much deeper than the next that the gradient it needs is back in time, at the pace of the slowest.

    See ``pacing``; ``allowance`` (a share of the period) makes up for waiting in queues. As far as memory goes;
    ``recompute``: a stage may be made to recompute for it.
    """
    instance, order, cuts = candidate.instance, candidate.order, candidate.cuts
    spans = list(itertools.pairwise(cuts))
    shallow = classic_depths(len(order), instance.micro_batches)
    tables = [instance.stage(kind, depth) for kind, depth in zip(order, _depths(instance, shallow), strict=True)]
    compute = [float(table.total_s[span]) for table, span in zip(tables, spans, strict=True)]
    links = [instance.messages(a, b) for a, b in itertools.pairwise(order)]
    hops = [(float(out[cut]), float(back[cut])) for (out, back), cut in zip(links, cuts[1:], strict=False)]
    period = max(*compute, *(max(hop) for hop in hops), 0.0)
    if period <= 0 or period == math.inf:
        return candidate
    wanted = paced_each(compute, [sum(hop) for hop in hops], period, allowance)
    warm_up: list[int] = []
    for place, (kind, span, was) in enumerate(zip(order, spans, tables, strict=True)):
        depth = min(wanted[place], instance.micro_batches - 1)
        depth = max(min(depth, warm_up[-1] - 1), shallow[place]) if warm_up else depth
        while depth > shallow[place]:
            deeper = instance.stage(kind, depth + 1)
            if deeper.total_s[span] < math.inf and (recompute or not deeper.recompute[span] > was.recompute[span]):
                break
            depth -= 1
        warm_up.append(depth)
    if tuple(warm_up) == candidate.warm_up:
        return candidate
    return evaluate(instance, order, cuts, tuple(warm_up))


def shifted(candidate: Candidate, effort: Effort) -> Candidate:
    """The cuts moved by one item each, as long as that shortens the step and ``effort`` lasts."""
    improved = True
    while improved:
        improved = False
        for place in range(1, len(candidate.cuts) - 1):
            for by in (-1, 1):
                cut = candidate.cuts[place] + by
                if effort.left <= 0 or not candidate.cuts[place - 1] < cut < candidate.cuts[place + 1]:
                    continue
                cuts = (*candidate.cuts[:place], cut, *candidate.cuts[place + 1 :])
                changed = evaluate(candidate.instance, candidate.order, cuts, candidate.warm_up)
                effort.spend(changed)
                if changed.step_s < candidate.step_s * (1 - ROUNDING):
                    candidate, improved = changed, True
    return candidate


def _deeper(candidate: Candidate) -> list[tuple[int, ...]]:
    depths = candidate.warm_up
    most = candidate.instance.micro_batches - 1
    changes: set[tuple[int, ...]] = set()
    for i in range(len(depths) - 1):
        alone = (*depths[:i], depths[i] + 1, *depths[i + 1 :])
        together = (*(min(d + 1, most) for d in depths[: i + 1]), *depths[i + 1 :])
        for changed in (alone, together):
            if changed[i] <= most and all(a >= b for a, b in itertools.pairwise(changed)):
                changes.add(changed)
    return sorted(changes - {depths})
