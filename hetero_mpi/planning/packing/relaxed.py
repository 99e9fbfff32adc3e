"""What the packing bounds know of an instance: least times, bytes and ways of every class of ranks (``bound``).

Every figure errs on the side of less: the least over micro-batch sizes, kinds of blocks, ranks of a class and links.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    hides_s: tuple[tuple[float, ...], tuple[float, ...]]
    """Most seconds of the backward of a block, the embedding and the head, without and with a repeated forward."""
    forward_s: tuple[float, ...]
    """Most seconds of the forward of the same, of one micro-batch."""
    ahead: float
    """Least share of forwards in forwards and backwards."""
    usable: float
    fixed_s: float
    per_parameter_s: float
    near: tuple[float, ...]
    """Latency and seconds per byte of the best link within a host."""
    away: tuple[float, ...]
    """The same of the best link that leaves a host."""
    host_group: int
    """Number of a group of hosts. Ranks of unlike groups are on unlike hosts."""
    ranks: list[int]


MORE_IS_BETTER = ("hides_s", "forward_s", "usable")


def joined(a: RankClass, b: RankClass) -> RankClass:
    """One class of the ranks of both, at least as good as either."""
    both = {one.name: (getattr(a, one.name), getattr(b, one.name)) for one in fields(RankClass) if one.name != "ranks"}
    better = {name: _each(max if name in MORE_IS_BETTER else min, *pair) for name, pair in both.items()}
    return RankClass(**better, ranks=sorted([*a.ranks, *b.ranks]))


def _each(of: Callable[..., Any], a: Any, b: Any) -> Any:
    """``of`` two figures, or of every two of them in tuples of figures."""
    return tuple(_each(of, *pair) for pair in zip(a, b, strict=True)) if isinstance(a, tuple) else of(a, b)


class Facts:
    """What the relaxation knows of an instance. Ranks of unlike hosts are of unlike classes."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.request, self.model = request, profile.model
        self.cluster = ClusterArrays(profile, request, min(request.micro_batch_choices))
        self.blocks = self.model.layers[1:-1]
        self.choices = sorted(set(request.micro_batch_choices))
        self.sizes = range(1, max(request.micro_batch_choices) + 1)
        """Sequences of a micro-batch: the last one of a share may be short."""
        self.members: list[list[int]] = [[] for _ in range(int(self.cluster.host.max()) + 1)]
        for rank, host in enumerate(self.cluster.host.tolist()):
            self.members[host].append(rank)
        self._sizes()
        self._exits()
        self.classes: list[RankClass] = []
        self._classify()
        self._summarise()

    def _summarise(self) -> None:
        self._between: dict[tuple[int, int], tuple[float, float]] = {}
        self.ahead = max(1e-9, min(0.5, *(one.ahead for one in self.classes)))
        self.speeds: Floats = np.array([1 / max(one.work_s[0], 1e-30) for one in self.classes])
        """Blocks' sequences per second."""
        self.ends = sum(
            min(one.work_s[end] * v for one, v in zip(self.classes, self.speeds, strict=True)) for end in (1, 2)
        )
        """Embedding and head, in blocks, where they are least."""

    def join(self, a: int, b: int) -> None:
        """Tell the ranks of two classes apart no longer; their groups of hosts become one."""
        one = joined(self.classes[a], self.classes[b])
        groups = {self.classes[a].host_group, self.classes[b].host_group}
        self.classes = [one, *(x for i, x in enumerate(self.classes) if i not in (a, b))]
        for x in self.classes:
            if x.host_group in groups:
                x.host_group = one.host_group
        self._summarise()

    def _sizes(self) -> None:
        """Bytes and trained parameters of a block; bytes summed of a block, the embedding and the head; bytes sent."""
        model = self.model
        tokens = self.request.sequence_length
        self.trained = min((float(x.trainable_parameters) for x in self.blocks), default=0.0)
        state = [model.state_bytes(i, i + 1) for i in range(1, len(model.layers) - 1)]
        self.held = min((x.parameter_bytes + own for x, own in zip(self.blocks, state, strict=True)), default=0.0)
        boundary = min((x.boundary_bytes_per_token for x in model.layers[:-1]), default=0)
        sent = min((model.sent_bytes_per_token(layer) for layer in range(len(model.layers) - 1)), default=0)
        self.message_bytes = float(sent * tokens)
        self.kept = min((x.activation_bytes_per_token for x in self.blocks), default=0.0) * tokens
        self.kept_input = min(self.kept, boundary * tokens)
        least = min(self.request.micro_batch_choices)
        self.workspace = min((x.workspace_bytes_per_token for x in self.blocks), default=0.0) * tokens * least
        layers = [
            min(range(1, len(model.layers) - 1), key=lambda i: summed_bytes(model, i), default=0),
            0,
            len(model.layers) - 1,
        ]
        sums = [float(summed_bytes(model, i)) for i in layers]
        # Both ends of a tied model may lie on one rank, which holds their matrix once: the embedding's is not counted.
        shared = shared_parameters(model, 0, len(model.layers))
        self.summed = (sums[0] if self.blocks else 0.0, 0.0 if shared else sums[1], sums[2])

    def _exits(self) -> None:
        """Least (latency, seconds per byte) of links out of and into each host; of each rank's links within its host."""
        cluster = self.cluster
        host_of = np.zeros(len(cluster.latency_s), dtype=np.int64)
        host_of[cluster.place] = cluster.host
        same = host_of[:, None] == host_of[None, :]
        places = len(host_of)
        alone = np.eye(places, dtype=bool) if places == len(cluster.devices) else np.zeros(same.shape, dtype=bool)

        def least(table: Floats, where: NDArray[np.bool_]) -> Floats:
            found = np.where(where, table, np.inf)
            return np.asarray(np.minimum(found.min(axis=0), found.min(axis=1)))

        outside = [least(table, ~same) for table in (cluster.latency_s, cluster.per_byte_s)]
        inside = [least(table, same & ~alone) for table in (cluster.latency_s, cluster.per_byte_s)]
        hosts = range(len(self.members))
        self.exit = [tuple(float(table[host_of == host].min()) for table in outside) for host in hosts]
        self.inside = [
            tuple(float(table[place]) if len(self.members[host]) > 1 else math.inf for table in inside)
            for place, host in zip(cluster.place.tolist(), cluster.host.tolist(), strict=True)
        ]

    def between(self, group: int, other: int) -> tuple[float, float]:
        """Least latency, least seconds per byte of links between two groups of hosts, either way."""
        if (group, other) not in self._between:
            cluster = self.cluster
            at = [
                sorted({int(cluster.place[r]) for x in self.classes if x.host_group == g for r in x.ranks})
                for g in (group, other)
            ]
            pairs = np.ix_(*at)
            ways = [(table[pairs], table.T[pairs]) for table in (cluster.latency_s, cluster.per_byte_s)]
            least = [min(float(out.min()), float(back.min())) for out, back in ways]
            self._between[group, other] = self._between[other, group] = least[0], least[1]
        return self._between[group, other]

    def message_s(self, way: tuple[float, ...], size: float) -> float:
        return way[0] + size * way[1]

    def _classify(self) -> None:
        known: dict[tuple[object, ...], int] = {}
        for rank, device in enumerate(self.cluster.devices):
            one = self._class_of(device, rank, float(self.cluster.usable[rank]))
            key = (one.work_s, one.fill_s, one.repeated_s, one.usable, one.per_parameter_s, one.host_group)
            if key not in known:
                known[key] = len(self.classes)
                self.classes.append(one)
            else:
                self.classes[known[key]] = joined(self.classes[known[key]], one)

    def _class_of(self, device: DeviceProfile, rank: int, usable: float) -> RankClass:
        tokens, host = self.request.sequence_length, int(self.cluster.host[rank])
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

        def ahead(times: LayerTimes, size: int) -> float:
            back_s = layer_s(times, Op.B, size) + repeated_s(times, size)
            return forward(times, size) / max(1e-30, forward(times, size) + back_s)

        layers = [*blocks, *ends]
        return RankClass(
            work_s=tuple(each(part, forward, back) for part in parts),
            trip_s=tuple(each(part, forward, awaited) for part in parts),
            fill_s=tuple(least(part, forward, awaited) for part in parts),
            repeated_s=each(blocks, repeated_s),
            refill_s=least(blocks, repeated_s),
            overhead_s=device.forward_overhead_s + device.backward_overhead_s,
            hides_s=self._hides_s(parts),
            forward_s=tuple(
                max((forward(t, n * tokens) for t in part for n in self.sizes), default=0.0) for part in parts
            ),
            ahead=min(ahead(t, n * tokens) for t in layers for n in self.sizes),
            usable=usable,
            fixed_s=device.optimizer_fixed_s,
            per_parameter_s=device.optimizer_s_per_parameter,
            near=self.inside[rank],
            away=self.exit[host],
            host_group=host,
            ranks=[rank],
        )

    def _hides_s(self, parts: list[list[LayerTimes]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """See ``RankClass.hides_s``."""
        sizes = [n * self.request.sequence_length for n in self.sizes]
        own = [
            max((layer_s(t, op, size) for t in part for size in sizes for op in (Op.B, Op.W)), default=0.0)
            for part in parts
        ]
        again = max((layer_s(t, Op.B, size) + repeated_s(t, size) for t in parts[0] for size in sizes), default=0.0)
        return tuple(own), (max(own[0], again), own[1], own[2])

    def sums_s(self, pipelines: int) -> list[tuple[float, ...]]:
        """Least seconds to sum one block, the embedding, the head among at least so many pipelines, by class."""
        if pipelines < 2:
            return [(0.0, 0.0, 0.0)] * len(self.classes)

        def of(rank: int, size: float) -> float:
            if size == 0:
                return 0.0
            host = int(self.cluster.host[rank])
            ways = [self.exit[host]]
            if len(self.members[host]) >= pipelines:
                ways.append(self.inside[rank])
            return (pipelines - 1) * min(self.message_s(way, size / pipelines) for way in ways)

        return [tuple(min(of(rank, size) for rank in one.ranks) for size in self.summed) for one in self.classes]
