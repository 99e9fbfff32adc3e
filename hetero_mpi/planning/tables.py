"""Which ranks are interchangeable, what their memory may hold, and the bytes of every stage.

Ranks that can be exchanged without changing anything form a *class*. Tables are indexed [first, last] by the layers a stage would
hold; entries with first >= last are infinite.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.memory import stage_memory, usable_bytes
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

Table = NDArray[np.float64]
Item = TypeVar("Item")
NOISE = 0.12
"""Figures that differ by no more than this share are taken to be the same: measured within 5 % either way."""


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


def shares_nics(profile: ClusterProfile) -> bool:
    """True where messages between hosts may queue for a NIC."""
    names = {device.host for device in profile.devices}
    return len(names) > 1 and any(host.shared_nic and host.name in names for host in profile.hosts)


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


def stage_bytes(model: ModelCost, tokens: int, recompute: bool, pipelines: float = 1) -> tuple[Table, Table]:
    """(bytes whatever the depth, bytes of every micro-batch in flight): ``stage_memory`` of every stage, where as many pipelines
    own as much each of the state. (That of adapters is too small to matter.)"""
    fixed, each = _stage_bytes(model, tokens, recompute)
    if pipelines == 1 or not model.trained_whole:
        return fixed, each
    owned = np.cumsum([0.0, *(model.owned_bytes(i, i + 1) for i in range(len(model.layers)))])
    return fixed - (1 - 1 / pipelines) * (owned[None, :] - owned[:, None]), each


@lru_cache(maxsize=64)
def _stage_bytes(model: ModelCost, tokens: int, recompute: bool) -> tuple[Table, Table]:
    layers = len(model.layers)
    fixed = np.full((layers + 1, layers + 1), np.inf)
    per_micro_batch = np.zeros_like(fixed)
    known: dict[Hashable, tuple[int, int]] = {}
    for (a, b), alike in alike_stages(model).items():
        if alike not in known:
            parts = stage_memory(model, a, b, tokens, 1, recompute)
            known[alike] = parts.total - parts.activations, parts.activations
        fixed[a, b], per_micro_batch[a, b] = known[alike]
    return fixed, per_micro_batch
