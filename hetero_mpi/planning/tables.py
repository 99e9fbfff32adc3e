"""What any stage would cost on any kind of rank, tabulated per micro-batch size: the planner's view of an instance.

Ranks that can be exchanged without changing anything form a *class*; the planner decides over sequences of classes.
Tables are indexed [first, last] by the items a stage would hold; entries with first >= last are infinite.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.codec import encode
from hetero_mpi.planning.cost import ModelCost
from hetero_mpi.planning.durations import optimizer_s, tied_s
from hetero_mpi.planning.memory import stage_memory, usable_bytes
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.request import PlanRequest

Table = NDArray[np.float64]


def rank_classes(profile: ClusterProfile) -> list[list[int]]:
    """The usable ranks in classes of interchangeable ranks, in an order that does not depend on how ranks are numbered.

    Two ranks are interchangeable when their devices are equal and swapping them leaves every link as it is.
    """
    ranks = [device.rank for device in usable_devices(profile)]
    contents = {}
    for device in usable_devices(profile):
        record = encode(device)
        contents[device.rank] = repr(
            sorted((k, v) for k, v in record.items() if k not in ("rank", "host", "memory_reason"))
        )
    links = {(link.source, link.destination): (link.latency_s, link.bytes_per_s) for link in profile.links}

    def exchangeable(a: int, b: int) -> bool:
        others = [rank for rank in ranks if rank not in (a, b)]
        return (
            contents[a] == contents[b]
            and links[a, b] == links[b, a]
            and all(links[a, x] == links[b, x] and links[x, a] == links[x, b] for x in others)
        )

    # Colours: what a rank is, then also what it is linked to; a few rounds tell unlike ranks apart.
    colours = _numbered(contents)
    for _ in range(3):
        if len(set(colours.values())) == len(ranks):
            break
        seen = {a: (colours[a], sorted((colours[b], links[a, b], links[b, a]) for b in ranks if b != a)) for a in ranks}
        colours = _numbered({rank: repr(view) for rank, view in seen.items()})
    classes: list[list[int]] = []
    for rank in sorted(ranks, key=lambda rank: (colours[rank], rank)):
        home = next((members for members in classes if exchangeable(members[0], rank)), None)
        if home is None:
            classes.append([rank])
        else:
            home.append(rank)
    return classes


def _numbered(texts: dict[int, str]) -> dict[int, int]:
    order = {text: i for i, text in enumerate(sorted(set(texts.values())))}
    return {rank: order[text] for rank, text in texts.items()}


@dataclass(frozen=True)
class StageTable:
    """One class at one in-flight depth; infinite where the stage does not fit in memory."""

    forward_s: Table
    backward_s: Table
    """Includes the repeated forward where ``recompute``."""
    total_s: Table
    recompute: NDArray[np.bool_]


def alike_stages(model: ModelCost) -> dict[tuple[int, int], Hashable]:
    """Every stage [first, last) -> a key that is the same for stages with the same layers between the same neighbours.

    Most blocks of a model are alike, so that there are few keys: what holds of one stage need not be worked out again.
    """
    items = len(model.layers)
    kinds = list(dict.fromkeys(model.layers))
    counts = np.zeros((items + 1, len(kinds)), dtype=int)
    for item, layer in enumerate(model.layers):
        counts[item + 1] = counts[item]
        counts[item + 1, kinds.index(layer)] += 1
    # What crosses a cut has one size in every transformer; where it has not, no two stages are taken to be alike.
    one_boundary = len({layer.boundary_bytes_per_token for layer in model.layers[:-1]}) <= 1
    keys: dict[tuple[int, int], Hashable] = {}
    for a in range(items):
        for b, held in enumerate((counts[a + 1 :] - counts[a]).tolist(), a + 1):
            keys[a, b] = (a == 0, b == items, *held) if one_boundary else (a, b)
    return keys


@lru_cache(maxsize=64)
def stage_bytes(model: ModelCost, tokens: int, recompute: bool) -> tuple[Table, Table]:
    """(bytes whatever the depth, bytes of every micro-batch in flight): ``stage_memory`` of every stage."""
    items = len(model.layers)
    fixed = np.full((items + 1, items + 1), np.inf)
    per_micro_batch = np.zeros_like(fixed)
    known: dict[Hashable, tuple[int, int]] = {}
    for (a, b), alike in alike_stages(model).items():
        if alike not in known:
            parts = stage_memory(model, a, b, tokens, 1, recompute)
            known[alike] = parts.total - parts.activations, parts.activations
        fixed[a, b], per_micro_batch[a, b] = known[alike]
    return fixed, per_micro_batch


class Instance:
    """The tables of one micro-batch size."""

    def __init__(
        self, profile: ClusterProfile, request: PlanRequest, micro_batch: int, classes: list[list[int]]
    ) -> None:
        self.profile, self.request, self.classes = profile, request, classes
        self.micro_batch = micro_batch
        self.micro_batches = request.global_batch // micro_batch
        self.items = len(profile.model.layers)
        self.tokens = micro_batch * request.sequence_length
        self.memory = {
            choice: stage_bytes(profile.model, self.tokens, choice) for choice in set(request.recompute_choices)
        }
        # Classes that differ in their links only share their tables.
        costs = [
            (
                d.layers,
                d.optimizer_fixed_s,
                d.optimizer_s_per_parameter,
                d.memory_bytes,
                d.forward_overhead_s,
                d.backward_overhead_s,
            )
            for d in profile.devices
        ]
        self.like = [costs.index(costs[members[0]]) for members in classes]
        times = {rank: self._times(rank) for rank in set(self.like)}
        step_s = {rank: self._optimizer(rank) for rank in set(self.like)}
        self.times = [times[rank] for rank in self.like]
        self.step_s = [step_s[rank] for rank in self.like]
        self.usable = [
            usable_bytes(profile.devices[members[0]].memory_bytes, request.memory_reserve) for members in classes
        ]
        # Remembered per instance: the keys are few, the tables are not.
        self.stage_of = lru_cache(maxsize=None)(self._stage)
        self.messages = lru_cache(maxsize=None)(self._messages)
        self.reduce_s = lru_cache(maxsize=None)(self._reduce_s)

    def stage(self, kind: int, depth: int) -> StageTable:
        """A stage on a rank of class ``kind`` with ``depth`` micro-batches in flight."""
        return self.stage_of(self.like[kind], depth)

    def need_bytes(self, depth: int, recompute: bool) -> Table:
        """Peak bytes of every stage with ``depth`` micro-batches in flight."""
        fixed, per_micro_batch = self.memory[recompute]
        return fixed + depth * per_micro_batch

    def shortage_bytes(self, kind: int, depth: int) -> Table:
        """Bytes that a rank of class ``kind`` lacks, at the cheapest choice of recompute; negative where it fits."""
        needs = [self.need_bytes(depth, choice) for choice in self.memory]
        return np.asarray(np.minimum.reduce(needs) - self.usable[kind])

    def _times(self, rank: int) -> tuple[Table, Table, Table]:
        """Seconds of forward, backward and repeated forward, added up item by item exactly as ``simulator`` does."""
        device = self.profile.devices[rank]
        times = [device.layers[layer.kind] for layer in self.profile.model.layers]
        forward = [t.forward_s.at(self.tokens) for t in times]
        backward = [t.backward_s.at(self.tokens) for t in times]
        again = [0.0, *forward[1:-1], 0.0]
        parts = ((forward, device.forward_overhead_s), (backward, device.backward_overhead_s), (again, 0.0))
        tables = []
        held = np.triu(np.ones((self.items + 1, self.items + 1), dtype=bool), 1)
        for seconds, overhead in parts:
            # Row a: zeros, the overhead at a, then the seconds of items a, a + 1, ...: summed in this order.
            summands = np.where(held, np.array([0.0, *seconds]), 0.0)
            np.fill_diagonal(summands, overhead)
            tables.append(np.where(held, np.cumsum(summands, axis=1), np.inf))
        return tables[0], tables[1], tables[2]

    def _optimizer(self, rank: int) -> Table:
        device = self.profile.devices[rank]
        table = np.full((self.items + 1, self.items + 1), np.inf)
        trainable = [layer.trainable_parameters for layer in self.profile.model.layers]
        for a in range(self.items):
            table[a, a + 1 :] = device.optimizer_fixed_s + device.optimizer_s_per_parameter * np.cumsum(
                trainable[a:], dtype=np.int64
            )
        # Both ends of a tied model share their matrix: the one stage of which the sum does not hold.
        table[0, self.items] = optimizer_s(self.profile, device, 0, self.items)
        return table

    def _stage(self, rank: int, depth: int) -> StageTable:
        """Recompute only where the stage does not fit without: it never makes a step shorter."""
        kind = self.like.index(rank)
        forward, backward, repeated = self.times[kind]
        fits = {choice: self.need_bytes(depth, choice) <= self.usable[kind] for choice in self.memory}
        nowhere = np.zeros(forward.shape, dtype=bool)
        plain, again = fits.get(False, nowhere), fits.get(True, nowhere)
        recompute = again & ~plain
        ahead = np.where(plain | again, forward, np.inf)
        back = np.where(recompute, repeated + backward, backward)
        back = np.where(plain | again, back, np.inf)
        return StageTable(ahead, back, ahead + back, recompute)

    def pair(self, kind: int, other: int) -> tuple[int, int]:
        """Two different ranks that stand for these classes."""
        return self.classes[kind][0], self.classes[other][1 if kind == other else 0]

    def _messages(self, kind: int, other: int) -> tuple[Table, Table]:
        """Seconds of the messages out and back when a stage on ``kind`` ends before item ``last`` (the index)."""
        a, b = self.pair(kind, other)
        sizes = [layer.boundary_bytes_per_token * self.tokens for layer in self.profile.model.layers]
        out = {size: self.profile.transfer_s(a, b, size) for size in set(sizes)}
        back = {size: self.profile.transfer_s(b, a, size) for size in set(sizes)}
        return np.array([0.0, *(out[s] for s in sizes)]), np.array([0.0, *(back[s] for s in sizes)])

    def _reduce_s(self, kind: int, other: int) -> float:
        return tied_s(self.profile, *self.pair(kind, other)) if self.profile.model.tied else 0.0

    def ranks(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that fill a sequence of classes: of each class, the first ones, in order."""
        taken = dict.fromkeys(order, 0)
        result = []
        for kind in order:
            result.append(self.classes[kind][taken[kind]])
            taken[kind] += 1
        return tuple(result)

    def plan(
        self, order: tuple[int, ...], cuts: tuple[int, ...], warm_up: tuple[int, ...], recompute: tuple[bool, ...]
    ) -> Plan:
        """The plan whose stage i holds the items [cuts[i], cuts[i + 1]) on a rank of class ``order[i]``."""
        ranks = self.ranks(order)
        held = tuple(StagePlan((rank,), cuts[i], cuts[i + 1], warm_up[i], recompute[i]) for i, rank in enumerate(ranks))
        pipeline = PipelinePlan(held, self.micro_batch, self.micro_batch * self.micro_batches)
        return Plan((pipeline,), self.request.global_batch, self.request.sequence_length, self.items)
