"""What the packing bounds know of an instance: least times, bytes and ways of every class of ranks (``bound``).

Every figure errs on the side of less: the least over micro-batch sizes, kinds of blocks, ranks of a class and links.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hetero_mpi.planning.durations import layer_s, repeated_s, summed_bytes
from hetero_mpi.planning.memory import shared_parameters
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.several.cluster import ClusterArrays, Floats
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

Way = Callable[[LayerTimes, int], float]
"""Seconds of a layer with so many tokens."""


@dataclass
class RankClass:
    """Ranks that the bound does not tell apart. Triples are of a block, the embedding and the head."""

    work_s: tuple[float, ...]
    """Least seconds per sequence, forward and backward."""
    trip_s: tuple[float, ...]
    """The same without what split backward may put off: the gradients of the weights."""
    fill_s: tuple[float, ...]
    """Least seconds of one micro-batch, forward and back as far as others wait for it."""
    repeated_s: float
    """Least seconds per sequence that repeating a block's forward takes."""
    refill_s: float
    """Least seconds per micro-batch of the same."""
    overhead_s: float
    """Least seconds of a stage's own per micro-batch, forward and backward."""
    forward_s: tuple[float, ...]
    """Most seconds of the forward of the same, of one micro-batch."""
    usable: float
    fixed_s: float
    per_parameter_s: float
    host: int
    ranks: list[int]


class Facts:
    """What the relaxation knows of an instance. Ranks of unlike hosts are of unlike classes."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.request, self.model = request, profile.model
        self.cluster = ClusterArrays(profile, request, min(request.micro_batch_choices))
        self.blocks = self.model.layers[1:-1]
        self.choices = sorted(set(request.micro_batch_choices))
        self.sizes = range(1, max(request.micro_batch_choices) + 1)
        """Sequences of a micro-batch: the last one of a share may be short."""
        self._sizes()
        hosts = range(int(self.cluster.host.max()) + 1)
        self.ways = [[self._between(host, other) for other in hosts] for host in hosts]
        """Latency and seconds per byte from host to host, at best."""
        self.classes: list[RankClass] = []
        for rank, device in enumerate(self.cluster.devices):
            one = self._class_of(device, rank)
            alike = next((x for x in self.classes if replace(one, ranks=x.ranks) == x), None)
            if alike is None:
                self.classes.append(one)
            else:
                alike.ranks.append(rank)
        self.speeds: Floats = np.array([1 / max(one.work_s[0], 1e-30) for one in self.classes])
        """Blocks' sequences per second."""
        self.ends = sum(
            min(one.work_s[end] * v for one, v in zip(self.classes, self.speeds, strict=True)) for end in (1, 2)
        )
        """Embedding and head, in blocks, where they are least."""

    def _sizes(self) -> None:
        """Bytes summed of a block, the embedding and the head; bytes sent of a sequence."""
        model, layers = self.model, range(len(self.model.layers))
        self.message_bytes = float(
            min(model.sent_bytes_per_token(i) for i in layers[:-1]) * self.request.sequence_length
        )
        sums = [float(summed_bytes(model, i)) for i in layers]
        # Both ends of a tied model may lie on one rank, which holds their matrix once: the embedding's is not counted.
        shared = shared_parameters(model, 0, len(layers))
        self.summed = (min(sums[1:-1]), 0.0 if shared else sums[0], sums[-1])

    def _between(self, host: int, other: int) -> tuple[float, float]:
        """Least latency, least seconds per byte of links between ranks of two hosts, either way; infinite: there are none."""
        hosts, place = self.cluster.host, self.cluster.place
        pairs = [(a, b) for a in np.flatnonzero(hosts == host) for b in np.flatnonzero(hosts == other) if a != b]
        ends = [way for a, b in pairs for way in ((place[a], place[b]), (place[b], place[a]))]
        tables = self.cluster.latency_s, self.cluster.per_byte_s
        latency_s, per_byte_s = (min((float(table[way]) for way in ends), default=math.inf) for table in tables)
        return latency_s, per_byte_s

    def _class_of(self, device: DeviceProfile, rank: int) -> RankClass:
        tokens = self.request.sequence_length
        split = True in self.request.split_choices
        blocks = [device.layers[kind] for kind in sorted({x.kind for x in self.blocks})]
        ends = [device.layers[self.model.layers[i].kind] for i in (0, -1)]
        parts = [blocks, ends[:1], ends[1:]]

        def forward(times: LayerTimes, size: int) -> float:
            return layer_s(times, Op.F, size)

        def back(times: LayerTimes, size: int) -> float:
            whole = layer_s(times, Op.B, size)
            return min(whole, layer_s(times, Op.I, size) + layer_s(times, Op.W, size)) if split else whole

        def awaited(times: LayerTimes, size: int) -> float:
            whole = layer_s(times, Op.B, size)
            return min(whole, layer_s(times, Op.I, size)) if split else whole

        # Forwards and backwards may be of unlike micro-batches: each is the least by itself.
        def each(part: list[LayerTimes], *ways: Way) -> float:
            return min((sum(min(of(t, n * tokens) / n for n in self.sizes) for of in ways) for t in part), default=0.0)

        def least(part: list[LayerTimes], *ways: Way) -> float:
            return min((sum(min(of(t, n * tokens) for n in self.sizes) for of in ways) for t in part), default=0.0)

        return RankClass(
            work_s=tuple(each(part, forward, back) for part in parts),
            trip_s=tuple(each(part, forward, awaited) for part in parts),
            fill_s=tuple(least(part, forward, awaited) for part in parts),
            repeated_s=each(blocks, repeated_s),
            refill_s=least(blocks, repeated_s),
            overhead_s=device.forward_overhead_s + device.backward_overhead_s,
            forward_s=tuple(
                max((forward(t, n * tokens) for t in part for n in self.sizes), default=0.0) for part in parts
            ),
            usable=float(self.cluster.usable[rank]),
            fixed_s=device.optimizer_fixed_s,
            per_parameter_s=device.optimizer_s_per_parameter,
            host=int(self.cluster.host[rank]),
            ranks=[rank],
        )

    def sums_s(self, pipelines: int) -> list[tuple[float, ...]]:
        """Least seconds to sum one block, the embedding, the head among at least so many pipelines, by class."""
        if pipelines < 2:
            return [(0.0, 0.0, 0.0)] * len(self.classes)

        found = []
        for one in self.classes:
            least_s, per_byte_s = (min(figures) for figures in zip(*self.ways[one.host], strict=True))
            part = (pipelines - 1) / pipelines
            seconds = [(pipelines - 1) * least_s + part * size * per_byte_s if size else 0.0 for size in self.summed]
            found.append(tuple(seconds))
        return found
