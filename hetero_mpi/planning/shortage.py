"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help.

A change is only suggested after the memory of all orders was looked at again under it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetero_mpi.planning.cost import ModelCost
from hetero_mpi.planning.explain import describe_bytes, describe_items
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.optimum import Space, space_of
from hetero_mpi.planning.orders import all_orders, found_orders
from hetero_mpi.planning.profile import ClusterProfile, LinkProfile
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.search import Order
from hetero_mpi.planning.tables import Instance, Table

MORE_RANKS = 8
SHORTEST_SEQUENCE = 32


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
            orders = found_orders(space.sizes, [memory], space.shortest, space.longest, cost)
        order = min(orders, key=lambda order: (cost(order), len(order), order))
        if best is None or cost(order) < best.shortage_bytes:
            best = Closest(cost(order), outlook.instance, order)
    assert best is not None
    return best


def explain_shortage(space: Space) -> str:
    """The message for a model that fits nowhere."""
    found = closest(space)
    instance, count = found.instance, len(found.order)
    cuts = _Shortages(instance).cuts(found.order)
    lines = [
        "the model does not fit in memory on these ranks "
        f"(sequences of {space.request.sequence_length} tokens, {space.profile.model.dtype}). "
        f"The split that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {instance.micro_batch}:"
    ]
    for i, rank in enumerate(instance.ranks(found.order)):
        depth = min(count - i, instance.micro_batches)
        recompute = min(instance.memory, key=lambda choice: instance.need_bytes(depth, choice)[cuts[i], cuts[i + 1]])
        parts = stage_memory(space.profile.model, cuts[i], cuts[i + 1], instance.tokens, depth, recompute)
        usable = instance.usable[found.order[i]]
        if parts.total > usable:
            lines.append(
                f"  rank {rank} ({space.profile.devices[rank].name}) with "
                f"{describe_items(cuts[i], cuts[i + 1], instance.items)} is short by {parts.total - usable} bytes: "
                f"it needs {describe_bytes(parts.total)} (parameters {describe_bytes(parts.parameters)}, "
                f"optimizer state and gradients {describe_bytes(parts.state)}, "
                f"activations {describe_bytes(parts.activations)}, workspace {describe_bytes(parts.workspace)}, "
                f"buffers {describe_bytes(parts.staging)}) and may use "
                f"{describe_bytes(usable)}"
            )
    remedies = [text for text in _remedies(space) if text]
    lines.append("What would make it fit, each by itself:" if remedies else _nothing_helps(space))
    return "\n".join([*lines, *(f"  {text}" for text in remedies)])


def _nothing_helps(space: Space) -> str:
    return (
        "None of these alone makes it fit: the smallest micro-batch, shorter sequences, bf16 where it is offered, "
        f"no memory reserve, {MORE_RANKS} more ranks like the largest. Use a smaller model, or ranks with more memory."
    )


def _remedies(space: Space) -> Iterator[str]:
    """Changes that were tried and found to make it fit."""
    profile, request = space.profile, space.request
    smaller = [b for b in range(1, min(request.micro_batch_choices)) if request.global_batch % b == 0]
    for size in reversed(smaller):
        if _fits(profile, replace(request, micro_batch_choices=(size,))):
            yield f"smaller micro-batches: train.micro_batch = {size}"
            break
    length = request.sequence_length // 2
    while length >= min(SHORTEST_SEQUENCE, max(1, request.sequence_length // 2)):
        if _fits(profile, replace(request, sequence_length=length)):
            yield f"shorter sequences: data.sequence_length = {length}"
            break
        length //= 2
    if request.memory_reserve > 0 and _fits(profile, replace(request, memory_reserve=0.0)):
        yield "keeping no memory free: plan.memory_reserve = 0.0"
    if profile.model.dtype == "fp32" and _fits(replace(profile, model=in_bf16(profile.model)), request):
        yield 'half the bytes per value: train.dtype = "bf16" (estimated from the fp32 figures)'
    for count in range(1, MORE_RANKS + 1):
        if _fits(with_more_ranks(profile, count), request):
            largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
            yield f"{count} more rank{'s' if count > 1 else ''} like rank {largest.rank} ({largest.name})"
            break


def _fits(profile: ClusterProfile, request: PlanRequest) -> bool:
    if not any(profile.model.dtype in device.dtypes for device in profile.devices):
        return False
    return closest(space_of(profile, request)).shortage_bytes <= 0


def in_bf16(model: ModelCost) -> ModelCost:
    """The fp32 model's costs with 2 bytes per value and an fp32 master weight; workspaces (fp32 logits) stay."""
    layers = tuple(
        replace(
            layer,
            parameter_bytes=math.ceil(layer.parameter_bytes / 2),
            activation_bytes_per_token=layer.activation_bytes_per_token / 2,
            boundary_bytes_per_token=math.ceil(layer.boundary_bytes_per_token / 2),
        )
        for layer in model.layers
    )
    state = model.state_bytes_per_trainable_parameter + 4
    return replace(model, dtype="bf16", layers=layers, state_bytes_per_trainable_parameter=state)


def with_more_ranks(profile: ClusterProfile, count: int) -> ClusterProfile:
    """The cluster with ``count`` more ranks like the one with the most memory, linked as that one is."""
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    devices, links = list(profile.devices), list(profile.links)
    for _ in range(count):
        new = len(devices)
        like = {link.destination: link for link in links if link.source == largest.rank}
        into = {link.source: link for link in links if link.destination == largest.rank}
        some = next(iter(like.values()), LinkProfile(0, 0, 0.0, float("inf"), False))
        for rank in range(new):
            links.append(replace(like.get(rank, some), source=new, destination=rank))
            links.append(replace(into.get(rank, some), source=rank, destination=new))
        devices.append(replace(largest, rank=new))
    return replace(profile, devices=tuple(devices), links=tuple(links))
