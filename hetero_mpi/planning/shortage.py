"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.explain import describe_bytes, describe_items
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.noise import smoothed
from hetero_mpi.planning.optimum import Optimum, Space, on_ranks, space_of
from hetero_mpi.planning.orders import all_orders, found_orders, sorted_starts
from hetero_mpi.planning.remedies import TOGETHER, nothing_helps, remedies
from hetero_mpi.planning.search import Order, classic, evaluate
from hetero_mpi.planning.tables import Instance, Table

MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""
SHORTAGE_LOOKS = 200
"""Orders looked at besides those sorted by memory, where there are very many ranks."""


@dataclass(frozen=True)
class Closest:
    """The split whose worst shortage is least."""

    shortage_bytes: float
    instance: Instance
    order: Order


class _Shortages:
    """Least worst shortage of the last stages of an order, per item that they begin with."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.known: dict[Order, Table] = {}
        self.nothing = np.full(instance.items + 1, np.inf)
        self.nothing[instance.items] = -np.inf

    def by_cut(self, order: Order) -> Table:
        own = self.instance.shortage_bytes(order[0], min(len(order), self.instance.micro_batches))
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
    """Over all micro-batch sizes and orders (all of them where they are few)."""
    best: Closest | None = None
    for outlook in space.outlooks:
        shortages = _Shortages(outlook.instance)

        def cost(order: Order, shortages: _Shortages = shortages) -> float:
            return float(shortages.of(order)[0])

        orders = all_orders(space.sizes, space.shortest, space.longest)
        if orders is None:
            memory = [float(usable) for usable in outlook.instance.usable]
            starts = sorted_starts(space.sizes, [memory], space.shortest, space.longest)
            orders = found_orders(starts, space.sizes, space.shortest, space.longest, cost, SHORTAGE_LOOKS)
        order = min(orders, key=lambda order: (cost(order), len(order), order))
        if best is None or cost(order) < best.shortage_bytes:
            best = Closest(cost(order), outlook.instance, order)
    assert best is not None
    return best


def rescued(space: Space) -> Optimum | None:
    """A plan that fits although the search for a fast one found none: the split that leaves most memory free."""
    calm = _few_classes(space)
    found = closest(calm)
    if found.shortage_bytes > 0:
        return None
    instance, order = found.instance, found.order
    cuts = tuple(_Shortages(instance).cuts(order))
    seed = evaluate(instance, order, cuts, classic(len(order), instance.micro_batches))
    best, own = on_ranks(instance.ranks(order), seed, Space(space.profile, space.request, calm.classes))
    return Optimum(best, False, 0.0, own) if best.step_s < math.inf else None


def _few_classes(space: Space) -> Space:
    """``space``, or with like ranks made equal where the orders are too many."""
    many = all_orders(space.sizes, space.shortest, space.longest) is None
    return space_of(smoothed(space.profile), space.request) if many else space


def explain_shortage(space: Space) -> str:
    """The message for a model that fits nowhere."""
    found = closest(_few_classes(space))
    instance, count = found.instance, len(found.order)
    lines = [
        "the model does not fit in memory on these ranks "
        f"(sequences of {space.request.sequence_length} tokens, {space.profile.model.dtype}). "
        f"The split that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {instance.micro_batch}:"
    ]
    short = _short_ranks(found, space)
    told = sorted(short, reverse=True)[:MOST_RANKS]
    lines += [text for lacking, text in short if (lacking, text) in told]
    if len(short) > len(told):
        rest = len(short) - len(told)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    helps = list(remedies(space))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else nothing_helps())
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _short_ranks(found: Closest, space: Space) -> list[tuple[int, str]]:
    """(bytes lacking, a line about it) of every rank that the closest split asks too much of, in its order."""
    instance, count, result = found.instance, len(found.order), []
    cuts = _Shortages(instance).cuts(found.order)
    for i, rank in enumerate(instance.ranks(found.order)):
        depth = min(count - i, instance.micro_batches)
        recompute = min(instance.memory, key=lambda choice: instance.need_bytes(depth, choice)[cuts[i], cuts[i + 1]])
        parts = stage_memory(space.profile.model, cuts[i], cuts[i + 1], instance.tokens, depth, recompute)
        usable = instance.usable[found.order[i]]
        if parts.total > usable:
            text = (
                f"  rank {rank} ({space.profile.devices[rank].name}) with "
                f"{describe_items(cuts[i], cuts[i + 1], instance.items)} is short by {parts.total - usable} bytes: "
                f"it needs {describe_bytes(parts.total)} (parameters {describe_bytes(parts.parameters)}, "
                f"optimizer state and gradients {describe_bytes(parts.state)}, "
                f"activations {describe_bytes(parts.activations)}, workspace {describe_bytes(parts.workspace)}, "
                f"buffers {describe_bytes(parts.staging)}) and may use "
                f"{describe_bytes(usable)}"
            )
            result.append((parts.total - usable, text))
    return result
