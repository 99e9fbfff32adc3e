"""Ranks in *columns*: one rank per pipeline, which hold the same layers, so that many pipelines are planned as one.

With P pipelines cut alike, stage k of all of them is a column of P ranks. A column behaves like one device: as slow as its
slowest member, with the least of their memories, linked to another column by the worst of the links within pipelines; and it
sums the gradients of its layers around a ring of its members. Ranks of one host side by side make that ring quick; ranks of one
host one after another make a pipeline's own messages quick.

::

                 pipeline 0   pipeline 1   pipeline 2
    column 0       host A       host A       host A       <- sums stay inside host A
    column 1       host B       host C       host D       <- sums cross the network

The best pipeline of columns is found by dynamic programming along an order of all of them, of which any may be left out. Going
backward along it, ``_Best`` holds for every layer the least time from when the first micro-batch arrives there until everything
behind is done:

* ``back_s``: until the last gradient has come back: the larger of ``M a`` and ``a + hop + back_s`` of what follows (M
  micro-batches, a seconds of forward and backward of one);
* ``late_s``: how much longer the sums of gradients take. Every stage ends as long before the first one as the last gradient
  travels: ``late = max(own sums, late of what follows - backward - message)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.orders.warm_up import classic_depths, paced_each, period_s
from hetero_mpi.planning.search.cluster import ClusterArrays, Floats, Indices
from hetero_mpi.planning.simulator import spans_of_many_s

Column = tuple[int, ...]
"""Indices of a cluster's ranks, one per pipeline."""


def in_hosts(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns of like ranks, within a host as far as it has enough of them; what is left over is put together across hosts.

    ``keys``: what likeness goes by, most important last (as for ``numpy.lexsort``), largest first.
    """
    columns: list[Column] = []
    rest: list[int] = []
    for members in _by_host(cluster):
        whole = len(members) // pipelines * pipelines
        columns += [tuple(members[i : i + pipelines]) for i in range(0, whole, pipelines)]
        rest += members[whole:]
    return columns + _chunks(cluster, rest, pipelines, keys)


def of_all(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns of like ranks, wherever they are."""
    return _chunks(cluster, list(range(len(cluster.devices))), pipelines, keys)


def along_hosts(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns across hosts, such that neighbours of a host stand one after another in a pipeline.

    Ranks alike by all ``keys`` form a group of K columns: in order of hosts, the first K go to pipeline 0, and so on.
    """
    columns: list[Column] = []
    rest: list[int] = []
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank in range(len(cluster.devices)):
        groups.setdefault(tuple(float(key[rank]) for key in keys), []).append(rank)
    for members in groups.values():
        members.sort(key=lambda rank: (int(cluster.host[rank]), rank))
        width = len(members) // pipelines
        columns += [tuple(members[p * width + k] for p in range(pipelines)) for k in range(width)]
        rest += members[width * pipelines :]
    return columns + _chunks(cluster, rest, pipelines, keys)


def _by_host(cluster: ClusterArrays) -> list[list[int]]:
    """Ranks of each host, the fastest first, so that like ones stand together."""
    hosts: list[list[int]] = [[] for _ in range(int(cluster.host.max()) + 1)]
    for rank in np.lexsort((np.arange(len(cluster.host)), -cluster.speed)).tolist():
        hosts[int(cluster.host[rank])].append(rank)
    return hosts


def _chunks(cluster: ClusterArrays, ranks: list[int], pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """``ranks`` sorted by ``keys`` and cut into columns; the last few, too few for a column, stay out."""
    chosen = np.array(ranks, dtype=np.int64)
    order = chosen[np.lexsort([chosen, cluster.host[chosen], *(-key[chosen] for key in keys)])].tolist()
    return [tuple(order[i : i + pipelines]) for i in range(0, len(order) - pipelines + 1, pipelines)]


class Columns:
    """Tables of the columns of one layout. Shapes: K columns, I layers.

    ``shares``: how much of the global batch each pipeline takes, adding up to 1; a member's times count as much longer as its
    pipeline's share is larger than the mean.
    """

    def __init__(
        self, cluster: ClusterArrays, members: Sequence[Column], shares: Sequence[float] | None = None
    ) -> None:
        self.cluster, self.members = cluster, list(members)
        self.pipelines = len(members[0])
        self.table: Indices = np.array(self.members)
        weights = np.ones(self.pipelines) if shares is None else np.array(shares) * self.pipelines
        self.shares = weights / self.pipelines

        def slowest(seconds: Floats) -> Floats:
            return np.asarray((seconds[self.table] * weights[None, :, None]).max(axis=1))

        self.forward_s = slowest(cluster.forward_s)
        self.backward_s = slowest(cluster.backward_s)
        self.repeated_s = slowest(cluster.repeated_s)
        self.overhead_s = slowest(cluster.overhead_s)
        self.usable: Floats = cluster.usable[self.table].min(axis=1)
        self.relief: Floats = cluster.usable[self.table].mean(axis=1) - self.usable
        self.ratio: Floats = cluster.ratio[self.table].max(axis=1)
        self.step_fixed_s: Floats = cluster.step_fixed_s[self.table].max(axis=1)
        self.step_per_parameter_s: Floats = cluster.step_per_parameter_s[self.table].max(axis=1) / self.pipelines
        self.sum_s, self.value_s = self._exchanges(cluster.summed_bytes), self._exchanges(cluster.value_bytes)
        places = cluster.place[self.table]
        count = len(self.members)
        self.latency_s: Floats = np.zeros((count, count))
        self.per_byte_s: Floats = np.zeros((count, count))
        for p in range(self.pipelines):
            pair = np.ix_(places[:, p], places[:, p])
            np.maximum(self.latency_s, cluster.latency_s[pair] * weights[p], out=self.latency_s)
            np.maximum(self.per_byte_s, cluster.per_byte_s[pair] * weights[p], out=self.per_byte_s)

    def _exchanges(self, bytes_of_layers: Floats) -> Floats:
        """Seconds [K, I] to sum the gradients, or bring the new values, of one layer over one column."""
        sizes, which = np.unique(bytes_of_layers, return_inverse=True)
        return np.array([self.cluster.exchange_s(members, sizes)[which] for members in self.members])

    def summed_s(self, column: int, first: int, last: int, begun_s: float, end_s: float, recompute: bool) -> float:
        """When a column has summed its layers [first, last), each as soon as it is whole, the last of them first.

        ``begun_s``, ``end_s``: of its last backward.
        """
        sums = self.sum_s[column, first:last]
        if not sums.any():
            return end_s
        seconds = self.backward_s[column, first:last]
        if recompute:
            seconds = seconds + self.repeated_s[column, first:last]
        free, whole = 0.0, begun_s
        for own, summing in zip(reversed(seconds.tolist()), reversed(sums.tolist()), strict=True):
            whole += own
            free = max(free, whole) + summing
        return max(free, end_s)


WORTHWHILE = 1e-4
ALLOWANCES = (0.1, 0.4, 0.8)
"""Shares of a period by which a gradient may be late, for guessing depths."""

DEEPENING = 60_000
"""Forwards and backwards that trying depths may simulate."""
ColumnOrder = tuple[int, ...]
Seconds = Sequence[float]


@dataclass(frozen=True)
class Chain:
    """One pipeline of columns, simulated."""

    picks: tuple[int, ...]
    """The column of each stage."""
    cuts: tuple[int, ...]
    warm_up: tuple[int, ...]
    recompute: tuple[bool, ...]
    step_s: float


@dataclass
class _Best:
    """The best end of a pipeline, by the layer it begins with. ``depth``: micro-batches in flight at its first stage."""

    back_s: Floats
    late_s: Floats
    depth: Indices
    compute_s: Floats
    pick: Indices
    """Index of the first column; -1: nothing follows."""
    choice: Indices
    """Index of the ``_Choice`` it was made by."""


@dataclass
class _Choice:
    column: int
    last: Indices
    """By first layer: where the stage ends."""
    following: Indices
    """By first layer: the ``_Choice`` of the next stage."""


@dataclass(frozen=True)
class _Held:
    """The costs of every stage on one column: seconds, and the most micro-batches in flight without and with recompute."""

    forward_s: Floats
    backward_s: Floats
    repeated_s: Floats
    tail_s: Floats
    """Of the sums, what the last backward does not hide."""
    step_s: Floats
    plain: Floats
    again: Floats


class Chains:
    """Pipelines through the columns of one layout with ``micro_batches`` micro-batches each."""

    def __init__(self, columns: Columns, micro_batches: int) -> None:
        self.columns, self.micro_batches = columns, micro_batches
        self.layer_count = columns.cluster.layer_count
        self.stages = columns.cluster.stages(float(columns.usable.max()), columns.pipelines)
        self.message = np.append(0.0, columns.cluster.message_bytes)
        self.known: dict[int, _Held] = {}

    def of(self, column: int) -> _Held:
        if column not in self.known:
            columns, stages = self.columns, self.stages
            backward = stages.over(columns.backward_s[column]) + columns.overhead_s[column, 1]
            sums = columns.sum_s[column]
            room, relief = (float(columns.usable[column]), float(columns.ratio[column])), float(columns.relief[column])
            forward = stages.over(columns.forward_s[column]) + columns.overhead_s[column, 0]
            values = stages.over(columns.value_s[column])
            late = np.maximum(values / stages.count, values - forward * (stages.count - 1) / stages.count)
            self.known[column] = _Held(
                forward,
                backward,
                stages.over(columns.repeated_s[column]),
                np.maximum(sums[stages.first], stages.over(sums) - backward + backward / stages.count),
                columns.step_fixed_s[column] + columns.step_per_parameter_s[column] * stages.trainable + late,
                stages.deepest(*room, False, relief),
                stages.deepest(*room, True, relief),
            )
        return self.known[column]

    def along(
        self, line: ColumnOrder, period_s: float, allowance: float = 0.1
    ) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """(estimated seconds, picks, cuts) of the best pipeline along ``line``; infinite: none fits.

        ``period_s``: the pace hoped for, from which depths are guessed; infinite: 1F1B's own.
        """
        count = self.layer_count + 1
        nothing = np.full(count, np.inf)
        nothing[self.layer_count] = 0.0
        nobody = np.full(count, -1)
        best = _Best(nothing, np.zeros(count), np.zeros(count, dtype=np.int64), np.zeros(count), nobody, nobody.copy())
        choices: list[_Choice] = []
        for column in reversed(line):
            best = self._one_more(column, best, choices, period_s, allowance)
        value = float(best.back_s[0] + best.late_s[0])
        if value == math.inf:
            return math.inf, (), ()
        picks, cuts, index = [], [0], int(best.choice[0])
        while index >= 0:
            choice = choices[index]
            picks.append(choice.column)
            first = cuts[-1]
            cuts.append(int(choice.last[first]))
            index = int(choice.following[first])
        return value, tuple(picks), tuple(cuts)

    def _one_more(self, column: int, best: _Best, choices: list[_Choice], period_s: float, allowance: float) -> _Best:
        """``best``, or with ``column`` in front of it where that is better."""
        columns, last, held = self.columns, self.stages.last, self.of(column)
        follows = best.pick >= 0
        ways = columns.latency_s[column, best.pick] + self.message * columns.per_byte_s[column, best.pick]
        returns = columns.latency_s[best.pick, column] + self.message * columns.per_byte_s[best.pick, column]
        returns = np.where(follows, returns, 0.0)
        hop = np.where(follows, ways, 0.0) + returns
        deeper = np.maximum(1, np.ceil((best.compute_s + hop) / period_s + allowance - 1e-9)).astype(np.int64)
        flying = np.minimum(np.where(follows, best.depth + deeper, 1), self.micro_batches)[last]
        compute = held.forward_s + held.backward_s
        again = np.where(flying <= held.again, compute + held.repeated_s, np.inf)
        compute = np.where(flying <= held.plain, compute, again)
        queue = np.where(follows, np.maximum(ways, returns) * self.micro_batches, 0.0)
        back = np.maximum(self.micro_batches * compute, compute + np.maximum(queue, hop + best.back_s)[last])
        late = np.maximum(held.tail_s, (best.late_s - returns)[last] - held.backward_s)
        value = np.where(self.stages.inside, back + late, np.inf)
        chosen = value.argmin(axis=1)
        rows = np.arange(self.layer_count + 1)
        better = value[rows, chosen] < (best.back_s + best.late_s) * (1 - 1e-9)
        ends = last[rows, chosen]
        choices.append(_Choice(column, ends, best.choice[ends]))
        return _Best(
            np.where(better, back[rows, chosen], best.back_s),
            np.where(better, late[rows, chosen], best.late_s),
            np.where(better, flying[rows, chosen], best.depth),
            np.where(better, compute[rows, chosen], best.compute_s),
            np.where(better, column, best.pick),
            np.where(better, len(choices) - 1, best.choice),
        )

    def evaluate(self, picks: Sequence[int], cuts: Sequence[int], warm_up: Sequence[int]) -> Chain:
        """Simulates one pipeline; forwards are repeated where memory asks for it. Infinite: it does not fit."""
        columns = self.columns
        forward, backward, tails, steps, recompute = [], [], [], [], []
        for place, column in enumerate(picks):
            first, n = cuts[place], cuts[place + 1] - cuts[place] - 1
            flying = min(warm_up[place] + 1, self.micro_batches)
            choice = self._recompute(column, first, n, flying)
            if choice is None:
                return Chain(tuple(picks), tuple(cuts), tuple(warm_up), (), math.inf)
            held = self.of(column)
            recompute.append(choice)
            forward.append(float(held.forward_s[first, n]))
            backward.append(float(held.backward_s[first, n]) + (float(held.repeated_s[first, n]) if choice else 0.0))
            steps.append(float(held.step_s[first, n]))
        sent, returned = [], []
        for (a, b), cut in zip(itertools.pairwise(picks), cuts[1:], strict=False):
            size = float(columns.cluster.message_bytes[cut - 1])
            sent.append(float(columns.latency_s[a, b] + size * columns.per_byte_s[a, b]))
            returned.append(float(columns.latency_s[b, a] + size * columns.per_byte_s[b, a]))
        begun, ends = spans_of_many_s((forward, backward, sent, returned), warm_up, self.micro_batches)
        tails = [
            columns.summed_s(column, cuts[i], cuts[i + 1], begun[i], ends[i], recompute[i])
            for i, column in enumerate(picks)
        ]
        return Chain(tuple(picks), tuple(cuts), tuple(warm_up), tuple(recompute), max(*ends, *tails) + max(steps))

    def _recompute(self, column: int, first: int, n: int, flying: int) -> bool | None:
        """Whether a stage of n + 1 layers must repeat its forwards; None: it does not fit."""
        if n >= self.stages.longest:
            return None
        held = self.of(column)
        return False if flying <= held.plain[first, n] else True if flying <= held.again[first, n] else None

    def deepened(self, chain: Chain) -> Chain:
        """The best of several depths: 1F1B's own, and such that gradients are back in time, as far as
        memory goes without or with repeating forwards. Fewer of them where one simulation is dear."""
        looks = max(2, DEEPENING // (2 * len(chain.picks) * self.micro_batches))
        best = self.evaluate(chain.picks, chain.cuts, classic_depths(len(chain.picks), self.micro_batches))
        for allowance, recompute in itertools.product(ALLOWANCES, (False, True)):
            warm_up = self.paced(chain.picks, chain.cuts, allowance, recompute)
            if warm_up is not None and warm_up != best.warm_up and looks > 0:
                looks -= 1
                best = _better(best, self.evaluate(chain.picks, chain.cuts, warm_up))
        return best

    def paced(
        self, picks: Sequence[int], cuts: Sequence[int], allowance: float, recompute: bool
    ) -> tuple[int, ...] | None:
        """Depths at which gradients are back in time at the pace of the slowest stage; None: classic depth does not fit."""
        columns, count = self.columns, len(picks)
        compute, base = [], []
        for place, column in enumerate(picks):
            first, n = cuts[place], cuts[place + 1] - cuts[place] - 1
            choice = self._recompute(column, first, n, min(count - place, self.micro_batches))
            if choice is None:
                return None
            held = self.of(column)
            base.append(choice)
            again = held.repeated_s[first, n] if choice else 0.0
            compute.append(float(held.forward_s[first, n] + held.backward_s[first, n] + again))
        hops = []
        for (a, b), cut in zip(itertools.pairwise(picks), cuts[1:], strict=False):
            size = float(columns.cluster.message_bytes[cut - 1])
            hops.append(
                float(columns.latency_s[a, b] + columns.latency_s[b, a])
                + size * float(columns.per_byte_s[a, b] + columns.per_byte_s[b, a])
            )
        wanted = paced_each(compute, hops, period_s(compute, hops), allowance)
        shallow = classic_depths(count, self.micro_batches)
        warm_up: list[int] = []
        for place, column in enumerate(picks):
            first, n = cuts[place], cuts[place + 1] - cuts[place] - 1
            depth = min(wanted[place], self.micro_batches - 1)
            depth = max(min(depth, warm_up[-1] - 1), shallow[place]) if warm_up else max(depth, shallow[place])
            while depth > shallow[place]:
                choice = self._recompute(column, first, n, depth + 1)
                if choice is not None and (recompute or choice == base[place]):
                    break
                depth -= 1
            warm_up.append(depth)
        return tuple(warm_up)


def _better(a: Chain, b: Chain) -> Chain:
    return b if b.step_s < a.step_s * (1 - WORTHWHILE) else a
