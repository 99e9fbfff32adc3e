"""Which ranks are interchangeable, what their memory may hold, and the bytes of every stage.

Ranks that can be exchanged without changing anything form a *class*. Tables are indexed [first, last] by the layers a stage would
hold; entries with first >= last are infinite.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.memory import stage_memory, usable_bytes
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

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
        fitting = next((members for members in classes if exchangeable(members[0], rank)), None)
        if fitting is None:
            classes.append([rank])
        else:
            fitting.append(rank)
    return classes


def _only_one_of_its_host(profile: ClusterProfile) -> dict[int, bool]:
    counts = Counter(device.host for device in profile.devices)
    return {device.rank: counts[device.host] == 1 for device in profile.devices}


def _numbered(texts: dict[int, str]) -> dict[int, int]:
    order = {text: i for i, text in enumerate(sorted(set(texts.values())))}
    return {rank: order[text] for rank, text in texts.items()}


def rank_usable_bytes(profile: ClusterProfile, rank: int, reserve: float) -> int:
    """What a plan may use on ``rank``: of a rank that alone computes in its host's memory, no more than that has."""
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
    """May messages between hosts queue for a NIC?"""
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
