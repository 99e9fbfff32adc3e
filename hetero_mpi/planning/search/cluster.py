"""All usable ranks of a cluster as arrays, at one micro-batch size: what a search over hundreds of ranks looks at.

Times are tabulated per rank and layer, links per pair of *places*: a rank is a place of its own in small clusters; in
large ones a host is, since millions of pairs of ranks say no more than tens of thousands of pairs of hosts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.durations import repeated_s, summed_bytes, value_bytes
from hetero_mpi.planning.tables import NOISE, rank_usable_bytes, stage_bytes
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

FEW = 128
"""Up to so many ranks every pair of ranks has its own link; beyond, every pair of hosts."""


SHARING = 64
"""Up to so many ranks plans are laid out that fit only because pipelines share the state. Of more, nothing mends those that do not
fit when whole parameters are dealt."""


class ClusterArrays:
    """Ranks are counted as in ``devices``, which leaves out those without the model's dtype."""

    def __init__(
        self,
        profile: ClusterProfile,
        request: PlanRequest,
        micro_batch: int,
        like: ClusterArrays | None = None,
        devices: list[DeviceProfile] | None = None,
    ) -> None:
        """``like``: a cluster of the same ranks, whose links need not be looked up again. ``devices``: the usable ones, in the
        order in which they are to be counted; by default that of their ranks."""
        self.profile, self.request, self.micro_batch = profile, request, micro_batch
        self.model = profile.model
        self.layer_count = len(profile.model.layers)
        self.tokens = micro_batch * request.sequence_length
        self.devices: list[DeviceProfile] = like.devices if like is not None else devices or usable_devices(profile)
        names = list(dict.fromkeys(device.host for device in self.devices))
        self.host: Indices = np.array([names.index(device.host) for device in self.devices])
        self.usable: Floats = np.array(
            [float(rank_usable_bytes(profile, device.rank, request.memory_reserve)) for device in self.devices]
        )
        self.ratio: Floats = np.array([device.activation_ratio for device in self.devices])
        self._stages: dict[tuple[int, float], Stages] = {}
        self._tabulate()
        self._linked: tuple[Indices, Floats, Floats] = self._links() if like is None else like._linked
        self.place, self.latency_s, self.per_byte_s = self._linked
        sent = [self.model.sent_bytes_per_token(layer) for layer in range(self.layer_count)]
        self.message_bytes: Floats = np.array([float(each * self.tokens) for each in sent])
        self.summed_bytes: Floats = np.array([float(summed_bytes(profile.model, i)) for i in range(self.layer_count)])
        self.value_bytes: Floats = np.array([float(value_bytes(profile.model, i)) for i in range(self.layer_count)])

    def _tabulate(self) -> None:
        """Seconds [rank, layer] of forward, backward and the forward that backward repeats."""
        kinds = list(dict.fromkeys(layer.kind for layer in self.model.layers))
        place = np.array([kinds.index(layer.kind) for layer in self.model.layers])
        times = np.array(
            [
                [
                    (t.forward_s.at(self.tokens), t.backward_s.at(self.tokens), repeated_s(t, self.tokens))
                    for t in (device.layers[kind] for kind in kinds)
                ]
                for device in self.devices
            ]
        )
        self.forward_s: Floats = times[:, place, 0]
        self.backward_s: Floats = times[:, place, 1]
        self.repeated_s: Floats = times[:, place, 2].copy()
        self.repeated_s[:, [0, -1]] = 0.0
        self.overhead_s: Floats = np.array([(d.forward_overhead_s, d.backward_overhead_s) for d in self.devices])
        self.step_fixed_s: Floats = np.array([d.optimizer_fixed_s for d in self.devices])
        self.step_per_parameter_s: Floats = np.array([d.optimizer_s_per_parameter for d in self.devices])

    def _links(self) -> tuple[Indices, Floats, Floats]:
        """(place of every rank; latency, seconds per byte of the way from place to place, copies at both ends included)."""
        place = np.arange(len(self.devices)) if len(self.devices) <= FEW else self.host
        members: list[list[int]] = [[] for _ in range(int(place.max()) + 1)]
        for index, of in enumerate(place.tolist()):
            members[of].append(self.devices[index].rank)
        latency_s, per_byte_s = np.zeros((len(members), len(members))), np.zeros((len(members), len(members)))
        for a, b in itertools.product(range(len(members)), repeat=2):
            if a == b and len(members[a]) < 2:
                continue
            source, destination = members[a][0], members[b][1 if a == b else 0]
            link, out, into = (
                self.profile.link(source, destination),
                self.profile.devices[source],
                self.profile.devices[destination],
            )
            latency_s[a, b] = out.copy_latency_s + link.latency_s + into.copy_latency_s
            per_byte_s[a, b] = (
                1 / out.device_to_host_bytes_per_s + 1 / link.bytes_per_s + 1 / into.host_to_device_bytes_per_s
            )
        return place, latency_s, per_byte_s

    @cached_property
    def speed(self) -> Floats:
        """Sequences per second of each rank, were it alone with a memory that holds everything."""
        return np.asarray(self.micro_batch / (self.forward_s.sum(axis=1) + self.backward_s.sum(axis=1)))

    @property
    def unlinked(self) -> bool:
        """Whether messages take no time at all. Then it does not matter who is whose neighbour."""
        return not self.latency_s.any() and not self.per_byte_s.any()

    @cached_property
    def outward_s(self) -> Floats:
        """Seconds of one micro-batch's message over each rank's best link to another host; 0: there is only one."""
        away = self.latency_s + self.message_bytes.max() * self.per_byte_s
        host_of = np.zeros(len(away), dtype=np.int64)
        host_of[self.place] = self.host
        away = np.where(host_of[:, None] == host_of[None, :], np.inf, away).min(axis=1)
        return np.where(np.isinf(away), 0.0, away)[self.place]

    @cached_property
    def speed_level(self) -> Floats:
        """``speed``, alike for ranks that differ by no more than a measurement's noise."""
        return levels(self.speed)

    @cached_property
    def outward_level(self) -> Floats:
        """The higher the faster: messages per second to other hosts, alike for like ranks."""
        return levels(1 / np.maximum(self.outward_s, 1e-9))

    @cached_property
    def memory_level(self) -> Floats:
        return levels(self.usable)

    def sharing(self, pipelines: float) -> float:
        """How many of so many pipelines are taken to share the state."""
        return pipelines if self.model.trained_whole and len(self.devices) <= SHARING else 1

    def stages(self, room_bytes: float, pipelines: float) -> Stages:
        """Tables of all stages that fit into ``room_bytes``, where so many pipelines share the state."""
        longest, pipelines = 1, self.sharing(pipelines)
        for recompute in set(self.request.recompute_choices):
            fixed, each = stage_bytes(self.model, self.tokens, recompute, pipelines)
            fits = np.argwhere(fixed + each <= room_bytes)
            longest = max([longest, *(fits[:, 1] - fits[:, 0]).tolist()])
        key = longest, pipelines
        if key not in self._stages:
            self._stages[key] = Stages(self, *key)
        return self._stages[key]

    def exchange_s(self, members: Sequence[int], size_bytes: Floats) -> Floats:
        """``durations.exchange_s`` for several sizes at once."""
        count = len(members)
        if count < 2:
            return np.zeros(len(size_bytes))
        part = size_bytes / count
        places = self.place[np.array(members)]
        others = ~np.eye(count, dtype=bool)
        latency_s = self.latency_s[np.ix_(places, places)] * others
        per_byte_s = self.per_byte_s[np.ix_(places, places)] * others
        hosts = len(set(self.host[np.array(members)].tolist()))
        if hosts not in (1, count):  # around a ring from host to host (``comm.group_paths``)
            slowest = [float((latency_s + per_byte_s * size).max()) for size in part.tolist()]
            return np.where(size_bytes > 0, (count - 1) * np.array(slowest), 0.0)
        busiest = np.maximum(
            (latency_s.sum(axis=1)[:, None] + per_byte_s.sum(axis=1)[:, None] * part).max(axis=0),
            (latency_s.sum(axis=0)[:, None] + per_byte_s.sum(axis=0)[:, None] * part).max(axis=0),
        )
        return np.where(size_bytes > 0, busiest, 0.0)


class Stages:
    """The costs of holding layers [first, last), tabulated [first, last - first - 1] up to ``longest`` layers."""

    def __init__(self, cluster: ClusterArrays, longest: int, pipelines: float) -> None:
        model, layers = cluster.model, cluster.layer_count
        self.longest = min(longest, layers)
        first = np.arange(layers + 1)[:, None]
        self.last = np.minimum(first + np.arange(1, self.longest + 1)[None, :], layers)
        self.inside = first + np.arange(1, self.longest + 1)[None, :] <= layers
        self.first = np.broadcast_to(np.minimum(first, layers - 1), self.last.shape)
        self.count = np.maximum(1, self.last - first)
        self.bytes = {
            (ratio, recompute): tuple(
                table[first, self.last]
                for table in stage_bytes(model.keeping(ratio), cluster.tokens, recompute, pipelines)
            )
            for ratio in set(cluster.ratio.tolist())
            for recompute in set(cluster.request.recompute_choices)
        }
        self.trainable = self.over(np.array([float(layer.trainable_parameters) for layer in model.layers]))
        shared = pipelines > 1 and model.trained_whole
        owned = [model.owned_bytes(i, i + 1) / pipelines if shared else 0.0 for i in range(layers)]
        self.owned = self.over(np.array(owned))

    def over(self, seconds: Floats) -> Floats:
        """Sums of ``seconds`` [I] over every stage."""
        total = np.concatenate([[0.0], np.cumsum(seconds)])
        return np.asarray(total[self.last] - total[np.arange(len(self.last))[:, None]])

    def deepest(self, usable: float, ratio: float, recompute: bool, relief: float = 0.0) -> Floats:
        """Most micro-batches in flight with which every stage fits on a device that keeps ``ratio`` times the model's activation
        bytes; negative: it does not at all. ``relief``: bytes of the device's part of the state that others have room for."""
        if (ratio, recompute) not in self.bytes:
            return np.full(self.last.shape, -1.0)
        fixed, each = self.bytes[ratio, recompute]
        with np.errstate(invalid="ignore"):
            most = np.floor((usable + np.minimum(relief, self.owned) - fixed) / np.maximum(each, 1e-9))
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
