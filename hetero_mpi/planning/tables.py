"""What any stage would cost on any kind of rank, tabulated per micro-batch size: the planner's view of an instance.

Ranks that can be exchanged without changing anything form a *class*; the planner decides over sequences of classes.
Tables are indexed [first, last] by the items a stage would hold; entries with first >= last are infinite.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.durations import layer_s, repeated_s, return_s, tied_s
from hetero_mpi.planning.memory import stage_memory, usable_bytes
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest

Table = NDArray[np.float64]


def rank_classes(profile: ClusterProfile) -> list[list[int]]:
    """The usable ranks in classes of interchangeable ranks, in an order that does not depend on how ranks are numbered.

    Two ranks are interchangeable when their devices are equal, swapping them leaves every link as it is, and their hosts
    set them the same limits: ranks of one host, or each the only one of a host of the same kind.
    """
    contents = rank_contents(profile)
    if profile.links:
        return _linked_classes(profile, [device.rank for device in usable_devices(profile)], contents)
    # Where links are told by pairs of hosts, equal ranks of one host have equal links: one of them stands for all.
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, content in contents.items():
        groups.setdefault((profile.devices[rank].host, content), []).append(rank)
    members = {group[0]: group for group in groups.values()}
    classes = _linked_classes(profile, list(members), {rank: contents[rank] for rank in members})
    return [sorted(rank for first in one for rank in members[first]) for one in classes]


def rank_contents(profile: ClusterProfile) -> dict[int, str]:
    """What every usable rank is, its number and its host's name aside."""
    alone = _only_one_of_its_host(profile)
    known: dict[int, str] = {}
    """Of the tables of times, which many devices of a large profile are one object or equal ones."""
    found = {}
    for device in usable_devices(profile):
        if id(device.layers) not in known:
            known[id(device.layers)] = repr(sorted((k, repr(v)) for k, v in device.layers.items()))
        host = profile.host(device.rank)
        limits = None if host is None else (host.memory_bytes, host.shared_nic, alone[device.rank])
        plain = replace(device, rank=0, host="", memory_reason="", layers={})
        found[device.rank] = f"{limits} {known[id(device.layers)]} {plain}"
    return found


def _linked_classes(profile: ClusterProfile, ranks: list[int], contents: dict[int, str]) -> list[list[int]]:
    """Classes of ``ranks`` by what they are and how they are linked among themselves."""
    alone = _only_one_of_its_host(profile)
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for a, b in itertools.permutations(ranks, 2):
        link = profile.link(a, b)
        links[a, b] = link.latency_s, link.bytes_per_s

    def exchangeable(a: int, b: int) -> bool:
        same_host = profile.devices[a].host == profile.devices[b].host
        return bool(
            contents[a] == contents[b]
            and (same_host or (alone[a] and alone[b]) or (profile.links and profile.host(a) is None))
            and links[a, b] == links[b, a]
            and all(links[a, x] == links[b, x] and links[x, a] == links[x, b] for x in ranks if x not in (a, b))
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


def _only_one_of_its_host(profile: ClusterProfile) -> dict[int, bool]:
    counts = Counter(device.host for device in profile.devices)
    return {device.rank: counts[device.host] == 1 for device in profile.devices}


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


class Times(NamedTuple):
    """Seconds of every stage on one device, by what it does."""

    forward_s: Table
    backward_s: Table
    repeated_s: Table
    """What backward takes longer when it repeats the forwards of blocks."""
    input_s: Table
    weight_s: Table


def rank_usable_bytes(profile: ClusterProfile, rank: int, reserve: float) -> int:
    """What a plan may use on ``rank``: of a rank that alone computes in its host's memory, no more than that has."""
    device, host = profile.devices[rank], profile.host(rank)
    own = usable_bytes(device.memory_bytes, reserve)
    if (
        host is None
        or not device.shares_host_memory
        or rank in {r for _, group in shared_memories(profile) for r in group}
    ):
        return own
    return min(own, usable_bytes(host.memory_bytes, reserve))


def shared_memories(profile: ClusterProfile) -> list[tuple[HostProfile, tuple[int, ...]]]:
    """The hosts in whose memory more than one rank computes, and these ranks."""
    found = []
    for host in profile.hosts:
        ranks = tuple(d.rank for d in profile.devices if d.host == host.name and d.shares_host_memory)
        if len(ranks) > 1:
            found.append((host, ranks))
    return found


def shares_cards(profile: ClusterProfile) -> bool:
    """May messages between hosts queue for a network card?"""
    names = {device.host for device in profile.devices}
    return len(names) > 1 and any(host.shared_nic and host.name in names for host in profile.hosts)


def may_split(profile: ClusterProfile, rank: int) -> bool:
    """Was a split backward measured on ``rank``, for all kinds of layers but the embedding (which has no input)?"""
    layers = profile.devices[rank].layers
    times = [layers[kind] for kind in {layer.kind for layer in profile.model.layers[1:]}]
    return all(t.input_s is not None and t.weight_s is not None for t in times)


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


@lru_cache(maxsize=64)
def deferred_bytes(model: ModelCost, tokens: int) -> Table:
    """Bytes that every stage keeps of a micro-batch from its input gradients until its weight gradients."""
    items = len(model.layers)
    table = np.full((items + 1, items + 1), np.inf)
    for a, b in itertools.combinations(range(items + 1), 2):
        table[a, b] = math.ceil(sum(layer.deferred_bytes_per_token for layer in model.layers[a:b]) * tokens)
    return table


class Instance:
    """The tables of one micro-batch size."""

    def __init__(
        self, profile: ClusterProfile, request: PlanRequest, micro_batch: int, classes: list[list[int]]
    ) -> None:
        self.profile, self.request, self.classes = profile, request, classes
        self.most_in_flight: int | None = None
        self.micro_batch = micro_batch
        self.micro_batches = request.global_batch // micro_batch
        self.items = len(profile.model.layers)
        self.tokens = micro_batch * request.sequence_length
        self.choices = set(request.recompute_choices)
        self.memory = [
            {choice: stage_bytes(profile.model_on(members[0]), self.tokens, choice) for choice in self.choices}
            for members in classes
        ]
        # Classes that differ in their links only share their tables.
        costs = [
            (
                d.layers,
                d.optimizer_fixed_s,
                d.optimizer_s_per_parameter,
                d.memory_bytes,
                d.forward_overhead_s,
                d.backward_overhead_s,
                d.activation_ratio,
            )
            for d in profile.devices
        ]
        self.like = [costs.index(costs[members[0]]) for members in classes]
        times = {rank: self._times(rank) for rank in set(self.like)}
        step_s = {rank: self._optimizer(rank) for rank in set(self.like)}
        self.times = [times[rank] for rank in self.like]
        self.step_s = [step_s[rank] for rank in self.like]
        self.usable = [rank_usable_bytes(profile, members[0], request.memory_reserve) for members in classes]
        # Remembered per instance: the keys are few, the tables are not.
        self.stage_of = lru_cache(maxsize=None)(self._stage)
        self.messages = lru_cache(maxsize=None)(self._messages)
        self.tied_s = lru_cache(maxsize=None)(self._tied_s)

    def stage(self, kind: int, depth: int) -> StageTable:
        """A stage on a rank of class ``kind`` with ``depth`` micro-batches in flight."""
        return self.stage_of(self.like[kind], depth)

    def need_bytes(self, kind: int, depth: int, recompute: bool) -> Table:
        """Peak bytes of every stage on a rank of class ``kind`` with ``depth`` micro-batches in flight."""
        fixed, per_micro_batch = self.memory[kind][recompute]
        return fixed + depth * per_micro_batch

    def shortage_bytes(self, kind: int, depth: int) -> Table:
        """Bytes that a rank of class ``kind`` lacks, at the cheapest choice of recompute; negative where it fits."""
        needs = [self.need_bytes(kind, depth, choice) for choice in self.choices]
        return np.asarray(np.minimum.reduce(needs) - self.usable[kind])

    def _times(self, rank: int) -> Times:
        """Seconds of every stage, added up item by item exactly as ``durations.compute_s`` does."""
        device, kinds = self.profile.devices[rank], [layer.kind for layer in self.profile.model.layers]
        inside = set(kinds[1:-1])
        again = {kind: repeated_s(device.layers[kind], self.tokens) if kind in inside else 0.0 for kind in set(kinds)}
        held = np.triu(np.ones((self.items + 1, self.items + 1), dtype=bool), 1)

        def table(seconds: list[float], overhead: float) -> Table:
            # Row a: zeros, the overhead at a, then the seconds of items a, a + 1, ...: summed in this order.
            summands = np.where(held, np.array([0.0, *seconds]), 0.0)
            np.fill_diagonal(summands, overhead)
            return np.where(held, np.cumsum(summands, axis=1), np.inf)

        def of(op: Op) -> list[float]:
            known = {kind: layer_s(device.layers[kind], op, self.tokens) for kind in set(kinds)}
            return [known[kind] for kind in kinds]

        return Times(
            table(of(Op.F), device.forward_overhead_s),
            table(of(Op.B), device.backward_overhead_s),
            table([0.0, *(again[kind] for kind in kinds[1:-1]), 0.0], 0.0),
            table(of(Op.I), device.backward_overhead_s),
            table(of(Op.W), 0.0),
        )

    def _optimizer(self, rank: int) -> Table:
        device = self.profile.devices[rank]
        table = np.full((self.items + 1, self.items + 1), np.inf)
        trainable = [layer.trainable_parameters for layer in self.profile.model.layers]
        for a in range(self.items):
            table[a, a + 1 :] = device.optimizer_fixed_s + device.optimizer_s_per_parameter * np.cumsum(
                trainable[a:], dtype=np.int64
            )
        return table

    def _stage(self, rank: int, depth: int) -> StageTable:
        """Recompute only where the stage does not fit without: it never makes a step shorter."""
        kind = self.like.index(rank)
        forward, backward, repeated = self.times[kind][:3]
        fits = {choice: self.need_bytes(kind, depth, choice) <= self.usable[kind] for choice in self.choices}
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

    def _tied_s(self, kind: int, other: int) -> tuple[float, float]:
        """Of a tied matrix with the embedding on ``kind`` and the head on ``other``: seconds from the beginning of the head's
        last backward until its share of the gradient has come to the embedding (negative where there is none), and seconds of
        the new values' way back."""
        if not self.profile.model.tied or not self.profile.model.layers[0].trainable_parameters:
            return -math.inf, 0.0
        ranks = self.pair(kind, other)
        whole_s = float(self.times[other].backward_s[self.items - 1, self.items])
        return whole_s + tied_s(self.profile, *ranks), return_s(self.profile, *ranks)

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
