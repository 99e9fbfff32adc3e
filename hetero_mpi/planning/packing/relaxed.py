"""What the packing bound knows of an instance: least times, bytes and ways of every class of ranks (``bound``).

Every figure errs on the side of less: the least over micro-batch sizes, kinds of blocks, ranks of a class and links.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.durations import layer_s, repeated_s, summed_bytes
from hetero_mpi.planning.memory import shared_parameters
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.several.fleet import Fleet, Floats


@dataclass
class RankClass:
    """Ranks that the bound does not tell apart. Triples are of a block, the embedding and the head."""

    work_s: tuple[float, ...]
    """Least seconds per sequence, forward and backward."""
    fill_s: tuple[float, ...]
    """Least seconds of one micro-batch."""
    repeated_s: float
    """Least seconds per sequence that repeating a block's forward takes."""
    refill_s: float
    hidden_s: float
    """Most seconds of an item's backward: sums of later items may run beside it."""
    ahead: float
    """Least share of forwards in forwards and backwards."""
    usable: float
    fixed_s: float
    per_parameter_s: float
    hop_s: float
    """One message there and back over the best link."""
    ranks: list[int]


class Facts:
    """What the relaxation knows of an instance."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.model = profile, request, profile.model
        self.fleet = Fleet(profile, request, min(request.micro_batch_choices))
        self.blocks = self.model.layers[1:-1]
        self.sizes = range(1, max(request.micro_batch_choices) + 1)
        self.members: list[list[int]] = [[] for _ in range(int(self.fleet.host.max()) + 1)]
        for rank, host in enumerate(self.fleet.host.tolist()):
            self.members[host].append(rank)
        self._sizes()
        self._exits()
        self.classes: list[RankClass] = []
        self.kind = np.zeros(len(self.fleet.devices), dtype=np.int64)
        self._classify()
        self.count: Floats = np.array([float(len(one.ranks)) for one in self.classes])
        self.fastest_s = min(one.fill_s[0] for one in self.classes)
        self.ahead = max(1e-9, min(0.5, *(one.ahead for one in self.classes)))

    def _sizes(self) -> None:
        """Bytes of a block, the embedding and the head: held, trained, sent."""
        model, state = self.model, self.model.state_bytes_per_trainable_parameter
        shared = shared_parameters(model, 0, len(model.layers))
        tokens = self.request.sequence_length
        block_trained = min((x.trainable_parameters for x in self.blocks), default=0)
        first, head = model.layers[0], model.layers[-1]
        # Both ends of a tied model may lie on one rank, which holds their matrix once: it is not counted at all.
        ends = [max(0, x.trainable_parameters - shared) for x in (first, head)]
        self.trained = (float(block_trained), float(0 if shared else ends[0]), float(ends[1]))
        self.held = (
            min((x.parameter_bytes + x.trainable_parameters * state for x in self.blocks), default=0.0),
            0.0 if shared else first.parameter_bytes + first.trainable_parameters * state,
            0.0 if shared else head.parameter_bytes + head.trainable_parameters * state,
        )
        boundary = min((x.boundary_bytes_per_token for x in model.layers[:-1]), default=0)
        self.message_bytes = float(boundary * tokens)
        self.kept = min((x.activation_bytes_per_token for x in self.blocks), default=0.0) * tokens
        self.kept_input = min(self.kept, boundary * tokens)
        least = min(self.request.micro_batch_choices)
        self.workspace = min((x.workspace_bytes_per_token for x in self.blocks), default=0.0) * tokens * least
        items = [
            min(range(1, len(model.layers) - 1), key=lambda i: summed_bytes(model, i), default=0),
            0,
            len(model.layers) - 1,
        ]
        sums = [float(summed_bytes(model, i)) for i in items]
        self.summed = (sums[0] if self.blocks else 0.0, 0.0 if shared else sums[1], sums[2])

    def _exits(self) -> None:
        """Least (latency, seconds per byte) of links out of and into each host; of each rank's links within its host."""
        fleet = self.fleet
        home = np.zeros(len(fleet.latency_s), dtype=np.int64)
        home[fleet.place] = fleet.host
        same = home[:, None] == home[None, :]
        alone = np.eye(len(home), dtype=bool) if len(home) == len(fleet.devices) else np.zeros(same.shape, dtype=bool)

        def least(table: Floats, where: NDArray[np.bool_]) -> Floats:
            found = np.where(where, table, np.inf)
            return np.asarray(np.minimum(found.min(axis=0), found.min(axis=1)))

        outside = [least(table, ~same) for table in (fleet.latency_s, fleet.per_byte_s)]
        inside = [least(table, same & ~alone) for table in (fleet.latency_s, fleet.per_byte_s)]
        hosts = range(len(self.members))
        self.exit = [tuple(float(table[home == host].min()) for table in outside) for host in hosts]
        self.inside = [
            tuple(float(table[place]) if len(self.members[host]) > 1 else math.inf for table in inside)
            for place, host in zip(fleet.place.tolist(), fleet.host.tolist(), strict=True)
        ]

    def message_s(self, way: tuple[float, ...], size: float) -> float:
        return way[0] + size * way[1]

    def _classify(self) -> None:
        known: dict[tuple[object, ...], int] = {}
        for rank, device in enumerate(self.fleet.devices):
            host = int(self.fleet.host[rank])
            hop_s = 2 * min(self.message_s(way, self.message_bytes) for way in (self.exit[host], self.inside[rank]))
            one = self._class_of(device, float(self.fleet.usable[rank]), 0.0 if hop_s == math.inf else hop_s)
            key = (one.work_s, one.fill_s, one.repeated_s, one.usable, one.per_parameter_s, self.exit[host])
            if key not in known:
                known[key] = len(self.classes)
                self.classes.append(one)
            home = self.classes[known[key]]
            home.hop_s = min(home.hop_s, one.hop_s)
            home.ranks.append(rank)
            self.kind[rank] = known[key]

    def _class_of(self, device: DeviceProfile, usable: float, hop_s: float) -> RankClass:
        tokens = self.request.sequence_length
        split = True in self.request.split_choices
        blocks = [device.layers[kind] for kind in sorted({x.kind for x in self.blocks})]
        ends = [device.layers[self.model.layers[i].kind] for i in (0, -1)]
        parts = [blocks, ends[:1], ends[1:]]

        def back(times: LayerTimes, size: int) -> float:
            whole = layer_s(times, Op.B, size)
            return min(whole, layer_s(times, Op.I, size) + layer_s(times, Op.W, size)) if split else whole

        def homeward(times: LayerTimes, size: int) -> float:
            whole = layer_s(times, Op.B, size)
            return min(whole, layer_s(times, Op.I, size)) if split else whole

        def least(part: list[LayerTimes], of: Callable[[LayerTimes, int], float], each: bool) -> float:
            return min((of(t, n * tokens) / (n if each else 1) for t in part for n in self.sizes), default=0.0)

        def work(times: LayerTimes, size: int) -> float:
            return layer_s(times, Op.F, size) + back(times, size)

        def fill(times: LayerTimes, size: int) -> float:
            return layer_s(times, Op.F, size) + homeward(times, size)

        def ahead(times: LayerTimes, size: int) -> float:
            forward = layer_s(times, Op.F, size)
            return forward / max(1e-30, forward + layer_s(times, Op.B, size) + repeated_s(times, size))

        everything = [(t, n * tokens) for t in (*blocks, *ends) for n in self.sizes]
        again = max((repeated_s(t, n * tokens) for t in blocks for n in self.sizes), default=0.0)
        return RankClass(
            work_s=tuple(least(part, work, True) for part in parts),
            fill_s=tuple(least(part, fill, False) for part in parts),
            repeated_s=least(blocks, repeated_s, True),
            refill_s=least(blocks, repeated_s, False),
            hidden_s=again + max(max(layer_s(t, op, size) for op in (Op.B, Op.W)) for t, size in everything),
            ahead=min(ahead(t, size) for t, size in everything),
            usable=usable,
            fixed_s=device.optimizer_fixed_s,
            per_parameter_s=device.optimizer_s_per_parameter,
            hop_s=hop_s,
            ranks=[],
        )

    def sums_s(self, pipelines: int) -> list[tuple[float, ...]]:
        """Least seconds to sum one block, the embedding, the head over ``pipelines`` ranks, by class."""
        if pipelines < 2:
            return [(0.0, 0.0, 0.0)] * len(self.classes)

        def of(rank: int, size: float) -> float:
            if size == 0:
                return 0.0
            host = int(self.fleet.host[rank])
            ways = [self.exit[host]]
            if len(self.members[host]) >= pipelines:
                ways.append(self.inside[rank])
            return 2 * (pipelines - 1) * min(self.message_s(way, size / pipelines) for way in ways)

        return [tuple(min(of(rank, size) for rank in one.ranks) for size in self.summed) for one in self.classes]

    def link_allows(self, step_s: float, shares: Floats) -> NDArray[np.bool_]:
        """[class, share]: may a rank be in a pipeline of that share, as far as leaving its host goes?"""
        allowed = np.zeros((len(self.classes), len(shares)), dtype=bool)
        for host, ranks in enumerate(self.members):
            alone = np.zeros(len(shares))
            for rank in ranks:
                one = self.classes[self.kind[rank]]
                most = np.floor(one.usable / max(self.held[0], 1.0))
                alone += np.minimum(most, np.floor(step_s / np.maximum(shares * one.work_s[0], 1e-30)))
            least = min(self.message_s(self.exit[host], n * self.message_bytes) / n for n in self.sizes)
            crosses = (
                shares * (0.0 if least == math.inf else least) <= step_s
                if least < math.inf
                else np.zeros(len(shares), dtype=bool)
            )
            for kind in {int(self.kind[rank]) for rank in ranks}:
                allowed[kind] |= crosses | (alone >= len(self.blocks))
        return allowed
