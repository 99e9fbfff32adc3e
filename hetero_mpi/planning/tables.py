"""Which ranks are interchangeable, what their memory may hold, and the bytes of every stage.

Ranks that can be exchanged without changing anything form a *class*. Tables are indexed [first, last] by the layers a stage would
hold; entries with first >= last are infinite.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.memory import host_state_bytes, stage_memory, streamed_memory, usable_bytes
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, HostProfile

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Item = TypeVar("Item")
NOISE = 0.12
"""Figures that differ by no more than this share are taken to be the same: measured within 5 % either way."""
FEW = 128
"""Up to so many ranks every pair of ranks has its own link; beyond, every pair of hosts."""


def rank_classes(profile: ClusterProfile) -> list[list[int]]:
    """The usable ranks in classes of interchangeable ranks.

    Two ranks are interchangeable when their devices are equal, swapping them leaves every link as it is, and their hosts
    set them the same limits: ranks of one host, or each the only one of a host of the same kind.
    """
    contents, hosts = rank_contents(profile), [device.host for device in profile.devices]
    ordered = sorted(contents, key=lambda rank: (contents[rank], rank))
    # Where links are told by pairs of hosts, equal ranks of one host have equal links: one of them stands for all.
    groups = in_classes(ordered, lambda a, b: not profile.links and (hosts[a], contents[a]) == (hosts[b], contents[b]))
    ranks = {group[0]: group for group in groups}
    links = {}
    for a, b in itertools.permutations(ranks, 2):
        link = profile.link(a, b)
        links[a, b] = link.latency_s, link.bytes_per_s

    def exchangeable(a: int, b: int) -> bool:
        return bool(
            contents[a] == contents[b]
            and (
                hosts[a] == hosts[b]
                or hosts.count(hosts[a]) == hosts.count(hosts[b]) == 1
                or (profile.links and profile.host(a) is None)
            )
            and links[a, b] == links[b, a]
            and all(links[a, x] == links[b, x] and links[x, a] == links[x, b] for x in ranks if x not in (a, b))
        )

    return [sorted(rank for first in one for rank in ranks[first]) for one in in_classes(ranks, exchangeable)]


def in_classes(items: Iterable[Item], alike: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Each item with the first class to whose first member it is ``alike``."""
    classes: list[list[Item]] = []
    for item in items:
        fitting = next((members for members in classes if alike(members[0], item)), None)
        if fitting is None:
            classes.append([item])
        else:
            fitting.append(item)
    return classes


def rank_contents(profile: ClusterProfile) -> dict[int, str]:
    """All that a usable rank is, its number and its host's name aside."""
    counts = Counter(device.host for device in profile.devices)
    known: dict[int, str] = {}
    """Texts of the tables of times, which many devices of a large profile are one object or equal ones."""
    found = {}
    for device in usable_devices(profile):
        if id(device.layers) not in known:
            known[id(device.layers)] = repr(sorted((k, repr(v)) for k, v in device.layers.items()))
        host = profile.host(device.rank)
        limits = None if host is None else (host.memory_bytes, host.shared_nic, host.cores, counts[device.host] == 1)
        plain = replace(device, rank=0, host="", memory_reason="", layers={})
        found[device.rank] = f"{limits} {known[id(device.layers)]} {plain}"
    return found


def rank_usable_bytes(profile: ClusterProfile, rank: int, reserve: float) -> int:
    """Bytes that a plan may use on ``rank``; no more than its host has, where it alone computes in that memory."""
    device, host = profile.devices[rank], profile.host(rank)
    own = usable_bytes(device.memory_bytes, reserve)
    if host is None or not device.shares_host_memory:
        return own
    here = sum(other.host == device.host and other.shares_host_memory for other in profile.devices)
    return own if here > 1 else min(own, usable_bytes(host.memory_bytes, reserve))


def shared_memories(profile: ClusterProfile) -> list[tuple[HostProfile, tuple[int, ...]]]:
    """The hosts in whose memory more than one rank computes, and these ranks."""
    found = []
    for host in profile.hosts:
        ranks = tuple(d.rank for d in profile.devices if d.host == host.name and d.shares_host_memory)
        if len(ranks) > 1:
            found.append((host, ranks))
    return found


def may_split(profile: ClusterProfile, rank: int) -> bool:
    """True where a split backward was measured on ``rank``, for all kinds of layers but the embedding (which has no input)."""
    layers = profile.devices[rank].layers
    times = [layers[kind] for kind in {layer.kind for layer in profile.model.layers[1:]}]
    return all(t.input_s is not None and t.weight_s is not None for t in times)


def alike_stages(model: ModelCost) -> dict[tuple[int, int], Hashable]:
    """Every stage [first, last) -> a key that is the same for stages with the same layers between the same neighbours.

    Most blocks of a model are alike, so that there are few keys: what holds of one stage need not be worked out again.
    """
    layers = len(model.layers)
    kinds = list(dict.fromkeys(model.layers))
    counts = np.zeros((layers + 1, len(kinds)), dtype=int)
    for index, layer in enumerate(model.layers):
        counts[index + 1] = counts[index]
        counts[index + 1, kinds.index(layer)] += 1
    # What crosses a cut has one size in every transformer; where it has not, no two stages are taken to be alike.
    one_boundary = len({layer.boundary_bytes_per_token for layer in model.layers[:-1]}) <= 1
    keys: dict[tuple[int, int], Hashable] = {}
    for a in range(layers):
        for b, held in enumerate((counts[a + 1 :] - counts[a]).tolist(), a + 1):
            keys[a, b] = (a == 0, b == layers, *held) if one_boundary else (a, b)
    return keys


def stage_bytes(model: ModelCost, tokens: int, recompute: bool, pipelines: float = 1) -> tuple[Floats, Floats]:
    """(bytes whatever the depth, bytes of every micro-batch in flight): ``stage_memory`` of every stage, where as many pipelines
    own as much each of the state. (That of adapters is too small to matter.)"""
    fixed, each = _stage_bytes(model, tokens, recompute)
    return fixed - _of_others(model, pipelines), each


def _of_others(model: ModelCost, pipelines: float) -> Floats:
    """[first, last]: bytes of a stage's state that other pipelines own."""
    shared = 1 - 1 / pipelines if model.trained_whole else 0.0
    owned = np.cumsum([0.0, *(model.owned_bytes(i, i + 1) for i in range(len(model.layers)))])
    return np.asarray(shared * (owned[None, :] - owned[:, None]))


@lru_cache(maxsize=64)
def _stage_bytes(
    model: ModelCost, tokens: int, recompute: bool, at_once: int | None = None, streamed_by: str = "", kept: int = 0
) -> tuple[Floats, Floats]:
    """``at_once``: tokens of a slice; ``streamed_by``: a device with memory of its ``own``, or in its ``host``'s; ``kept``: tokens
    whose activations it keeps."""
    layers = len(model.layers)
    fixed = np.full((layers + 1, layers + 1), np.inf)
    per_micro_batch = np.zeros_like(fixed)
    known: dict[Hashable, tuple[int, int]] = {}
    for (a, b), alike in alike_stages(model).items():
        if alike not in known:
            if streamed_by:
                parts = streamed_memory(model, a, b, tokens, 1, at_once or tokens, streamed_by == "host", kept)
            else:
                parts = stage_memory(model, a, b, tokens, 1, recompute, 0, at_once)
            known[alike] = parts.total - parts.activations, parts.activations
        fixed[a, b], per_micro_batch[a, b] = known[alike]
    return fixed, per_micro_batch


@lru_cache(maxsize=64)
def _kept_in_host(model: ModelCost) -> Floats:
    """[first, last]: bytes in host memory of a streamed stage of a device with memory of its own."""
    count = len(model.layers) + 1
    return np.array([[host_state_bytes(model, a, b) if a < b else 0 for b in range(count)] for a in range(count)])


class StageMode(NamedTuple):
    """How a rank holds a stage: see ``StagePlan``."""

    recompute: bool = False
    streamed: bool = False
    slice_sequences: int | None = None
    kept_slices: int = 0


class Room(NamedTuple):
    """The memory for a stage."""

    usable: float
    """Bytes."""
    ratio: float
    """So many times the model's activation bytes are kept."""
    relief: float
    """Bytes of its part of the state that others have room for."""
    in_host_memory: bool
    """Does it compute there?"""
    of_host: float
    """Bytes of its host's memory for what is kept there; infinite: what does not fit there goes to a disk, or is not asked."""


class Stages:
    """The costs of holding layers [first, last), tabulated [first, last - first - 1] up to ``longest`` layers."""

    def __init__(
        self, model: ModelCost, micro_batch: int, sequence_length: int, longest: int, pipelines: float
    ) -> None:
        self.model, self.sequence_length, self.pipelines, layers = model, sequence_length, pipelines, len(model.layers)
        self.tokens, self.longest = micro_batch * sequence_length, min(longest, layers)
        first = np.arange(layers + 1)[:, None]
        self.last = np.minimum(first + np.arange(1, self.longest + 1)[None, :], layers)
        self.inside = first + np.arange(1, self.longest + 1)[None, :] <= layers
        self.first = np.broadcast_to(np.minimum(first, layers - 1), self.last.shape)
        self.count = np.maximum(1, self.last - first)
        shared = pipelines > 1 and model.trained_whole
        owned = [model.owned_bytes(i, i + 1) / pipelines if shared else 0.0 for i in range(layers)]
        self.owned = self.over(np.array(owned))

    def bytes(self, way: StageMode, ratio: float, in_host_memory: bool) -> tuple[Floats, Floats]:
        """Bytes whatever the depth, and of every micro-batch in flight."""
        model, first = self.model.keeping(ratio), np.arange(len(self.last))[:, None]
        at_once = None if way.slice_sequences is None else way.slice_sequences * self.sequence_length
        by = "" if not way.streamed else "host" if in_host_memory else "own"
        kept = min(self.tokens, way.kept_slices * (at_once or self.tokens))
        fixed, each = _stage_bytes(model, self.tokens, way.recompute, at_once, by, kept)
        fixed = fixed if by == "own" else fixed - _of_others(model, self.pipelines)
        return fixed[first, self.last], each[first, self.last]

    def over(self, seconds: Floats) -> Floats:
        """Sums of ``seconds`` [I] over every stage."""
        total = np.concatenate([[0.0], np.cumsum(seconds)])
        return np.asarray(total[self.last] - total[np.arange(len(self.last))[:, None]])

    def deepest(self, way: StageMode, room: Room) -> Floats:
        """Most micro-batches in flight with which every stage fits; negative: it does not at all."""
        fixed, each = self.bytes(way, room.ratio, room.in_host_memory)
        kept = way.streamed and not room.in_host_memory
        relief = 0.0 if kept else np.minimum(room.relief, self.owned)
        with np.errstate(invalid="ignore"):
            most = np.floor((room.usable + relief - fixed) / np.maximum(each, 1e-9))
        if kept and room.of_host < math.inf:
            first = np.arange(len(self.last))[:, None]
            there = (_kept_in_host(self.model) - _of_others(self.model, self.pipelines))[first, self.last]
            most = np.where(there <= room.of_host, most, -1.0)
        return np.where(self.inside, most, -1.0)


def in_own_order(profile: ClusterProfile, tokens: int) -> list[DeviceProfile]:
    """The usable devices in an order that does not depend on how ranks and hosts are numbered and named, but where they are
    alike in all that is looked at; ranks of a host together."""
    devices = usable_devices(profile)
    hosts: dict[str, list[DeviceProfile]] = {}
    for device in devices:
        hosts.setdefault(device.host, []).append(device)
    # In large clusters one rank of a host says how it is linked to the others.
    ends = devices if len(devices) <= FEW else [here[0] for here in hosts.values()]

    size = tokens * profile.model.most_sent_bytes_per_token
    numbers = [end.rank for end in ends]
    seconds = profile.messages_s(numbers, size) if len(ends) > 1 else np.zeros((len(ends), len(ends)))
    # Exactly rounded sums: the same in whatever order the others come.
    linked = {rank: math.fsum([*seconds[i], *seconds[:, i]]) for i, rank in enumerate(numbers)}
    whole: dict[int, float] = {}

    def key(device: DeviceProfile) -> tuple[float, ...]:
        if id(device.layers) not in whole:
            each = [c.at(tokens) for _, t in sorted(device.layers.items()) for c in (t.forward_s, t.backward_s)]
            whole[id(device.layers)] = math.fsum(each)
        steps = device.optimizer_fixed_s, device.optimizer_s_per_parameter
        return (-device.memory_bytes, whole[id(device.layers)], linked.get(device.rank, 0.0), *steps)

    ordered = {name: sorted(here, key=lambda device: (key(device), device.rank)) for name, here in hosts.items()}
    names = sorted(hosts, key=lambda name: ([key(device) for device in ordered[name]], ordered[name][0].rank))
    return [device for name in names for device in ordered[name]]


def levels(values: Floats) -> Floats:
    """``values`` such that those within ``NOISE`` of the largest of them are equal to it."""
    result, top = np.empty(len(values)), math.inf
    for index in np.argsort(-values, kind="stable").tolist():
        if values[index] * (1 + NOISE) < top:
            top = float(values[index])
        result[index] = top
    return result
