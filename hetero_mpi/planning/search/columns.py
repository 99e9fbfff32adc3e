"""Group ranks that hold the same layers, one per pipeline, into columns, so that many pipelines are planned as one.

Stage k of P identically cut pipelines is a column of P ranks. A column behaves like one device: as slow as its slowest member,
with the memory of its smallest, and linked to other columns by the slowest link of any pipeline. Its members all-reduce their
gradients in a ring. The ring is fast if a column's ranks share a host; messages are fast if a pipeline's ranks share a host::

                 pipeline 0   pipeline 1   pipeline 2
    column 0       host A       host A       host A       <- all-reduce inside host A
    column 1       host B       host C       host D       <- all-reduce across the network

Dynamic programming along an order of the columns, each of which may be skipped, finds the best pipeline. It runs backwards: for
each layer, ``_Best`` holds the minimum time from the arrival of the first micro-batch at that layer to the end of the step:

* ``back_s``: time until the last gradient returns: the larger of ``M a`` and ``a + hop + back_s`` of the next stage, for ``M``
  micro-batches that each take ``a`` seconds of forward and backward;
* ``late_s``: additional all-reduce time: ``late = max(own all-reduce, late of the next stage - backward - message)``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetero_mpi.planning.memory_model import MemoryBudget
from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.tables import Floats, Indices
from hetero_mpi.util.grouping import grouped

Column = tuple[int, ...]
"""Rank indices, one per pipeline."""


def in_hosts(costs: Costs, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Form columns of similar ranks within each host, then across hosts. ``keys``: as for ``numpy.lexsort``, largest first."""
    columns: list[Column] = []
    rest: list[int] = []
    for members in _by_host(costs):
        full_count = len(members) // pipelines * pipelines
        columns += [tuple(members[i : i + pipelines]) for i in range(0, full_count, pipelines)]
        rest += members[full_count:]
    return columns + _chunks(costs, rest, pipelines, keys)


def along_hosts(costs: Costs, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Form columns across hosts so that the ranks of a host are consecutive in a pipeline.

    Ranks that are equal in all ``keys`` form K columns: in host order, the first K ranks go to pipeline 0, and so on.
    """
    columns: list[Column] = []
    rest: list[int] = []
    for members in grouped(range(costs.count), lambda rank: tuple(float(key[rank]) for key in keys)).values():
        members.sort(key=lambda rank: (int(costs.host[rank]), rank))
        width = len(members) // pipelines
        columns += [tuple(members[p * width + k] for p in range(pipelines)) for k in range(width)]
        rest += members[width * pipelines :]
    return columns + _chunks(costs, rest, pipelines, keys)


def _by_host(costs: Costs) -> list[list[int]]:
    """Ranks of each host, fastest first."""
    hosts: list[list[int]] = [[] for _ in range(int(costs.host.max()) + 1)]
    for rank in np.lexsort((np.arange(len(costs.host)), -costs.speed)).tolist():
        hosts[int(costs.host[rank])].append(rank)
    return hosts


def _chunks(costs: Costs, ranks: list[int], pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Sort ``ranks`` by ``keys`` and cut them into full columns."""
    rank_array = np.array(ranks, dtype=np.int64)
    order = rank_array[np.lexsort([rank_array, costs.host[rank_array], *(-key[rank_array] for key in keys)])].tolist()
    return [tuple(order[i : i + pipelines]) for i in range(0, len(order) - pipelines + 1, pipelines)]


def in_columns(costs: Costs, members: Sequence[Column]) -> Costs:
    """Costs of a pipeline in which each column acts as a single rank."""
    table, pipelines = np.array(members), len(members[0])

    def slowest(seconds: Floats) -> Floats:
        return np.asarray(seconds[:, table].max(axis=2))

    def least(rooms: list[MemoryBudget]) -> MemoryBudget:
        usable, ratio, _, in_host_memory, of_host = zip(*rooms, strict=True)
        relief = sum(usable) / pipelines - min(usable)
        return MemoryBudget(min(usable), max(ratio), relief, all(in_host_memory), min(of_host))

    places, count = costs.place_of[table], len(members)
    latency_s, per_byte_s = np.zeros((count, count)), np.zeros((count, count))
    for p in range(pipelines):
        pair = np.ix_(places[:, p], places[:, p])
        np.maximum(latency_s, costs.latency_s[pair], out=latency_s)
        np.maximum(per_byte_s, costs.per_byte_s[pair], out=per_byte_s)
    return replace(
        costs,
        rooms=[least([costs.rooms[rank] for rank in column]) for column in members],
        forward_s=slowest(costs.forward_s),
        backward_s=slowest(costs.backward_s),
        overhead_s=slowest(costs.overhead_s),
        step_per_parameter_s=costs.step_per_parameter_s[:, table].max(axis=2) / pipelines,
        place_of=np.arange(count),
        latency_s=latency_s,
        per_byte_s=per_byte_s,
        members=members,
        base=costs,
    )


ColumnOrder = tuple[int, ...]


@dataclass
class _Best:
    """Return the best pipeline tail for each possible first layer. ``depth``: micro-batches in flight at the tail's first stage."""

    back_s: Floats
    late_s: Floats
    depth: Indices
    compute_s: Floats
    pick: Indices
    """Index of the tail's first column; -1 if the tail is empty."""
    choice: Indices
    """Index of the ``_Choice`` for that column; -1 if the tail is empty."""


@dataclass
class _Choice:
    column: int
    last: Indices
    """The end of the stage, by its first layer."""
    following: Indices
    """Index of the next stage's ``_Choice``, by this stage's first layer."""


class _Held(NamedTuple):
    """The costs of every possible stage on one column."""

    ways: list[tuple[Floats, Floats]]
    """For each memory strategy: seconds per micro-batch, and the maximum number of micro-batches in flight."""
    backward_s: Floats
    tail_s: Floats
    """All-reduce time not hidden by the last backward."""


class Chains:
    """Pipelines through some or all columns of a layout."""

    def __init__(self, columns: Costs) -> None:
        self.columns, self.pipelines = columns, len(columns.members[0])
        self.micro_batches = -(-columns.request.global_batch // (self.pipelines * columns.micro_batch))
        self.stages = columns.grid(self.pipelines)
        self.message = np.append(0.0, columns.message_bytes)
        sums = [columns.exchange_s((column,), columns.summed_bytes) for column in range(columns.count)]
        self.sum_s: Floats = np.array(sums)
        """[column, layer]: seconds of the gradient all-reduce."""
        self.estimates: dict[int, _Held] = {}

    def estimates_of(self, column: int) -> _Held:
        if column not in self.estimates:
            columns, stages, over, room = self.columns, self.stages, self.stages.over, self.columns.rooms[column]
            both_s, overhead_s = columns.forward_s + columns.backward_s, columns.overhead_s[:, column]
            ways = [
                (seconds + overhead.sum(), columns.max_in_flight(stages, way, room, self.pipelines))
                for way, seconds, overhead in zip(columns.ways, map(over, both_s[:, column]), overhead_s, strict=True)
            ]
            sums, backward = self.sum_s[column], over(columns.backward_s[0, column]) + overhead_s[0, 1]
            tails = np.maximum(
                sums[np.minimum(stages.first, columns.layer_count - 1)], over(sums) - backward + backward / stages.count
            )
            self.estimates[column] = _Held(ways, backward, tails)
        return self.estimates[column]

    def along(
        self, line: ColumnOrder, period_s: float, allowance: float = 0.1
    ) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """Find the best pipeline along ``line``: estimated seconds (infinite if none fits), columns and cuts.

        ``period_s`` is the assumed time per micro-batch, from which depths follow; an infinite period gives 1F1B depths.
        """
        count = self.columns.layer_count + 1
        nothing = np.full(count, np.inf)
        nothing[self.columns.layer_count] = 0.0
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
        """Put ``column`` in front of the tails in ``best`` wherever that is faster."""
        columns, last, estimates = self.columns, self.stages.last, self.estimates_of(column)
        follows = best.pick >= 0
        out_s = columns.latency_s[column, best.pick] + self.message * columns.per_byte_s[column, best.pick]
        return_s = columns.latency_s[best.pick, column] + self.message * columns.per_byte_s[best.pick, column]
        return_s = np.where(follows, return_s, 0.0)
        hop = np.where(follows, out_s, 0.0) + return_s
        deeper = np.maximum(1, np.ceil((best.compute_s + hop) / period_s + allowance - 1e-9)).astype(np.int64)
        flying = np.minimum(np.where(follows, best.depth + deeper, 1), self.micro_batches)[last]
        compute: Floats = np.full(last.shape, np.inf)
        for seconds, deepest in reversed(estimates.ways):
            compute = np.where(flying <= deepest, seconds, compute)
        queue = np.where(follows, np.maximum(out_s, return_s) * self.micro_batches, 0.0)
        back = np.maximum(self.micro_batches * compute, compute + np.maximum(queue, hop + best.back_s)[last])
        late = np.maximum(estimates.tail_s, (best.late_s - return_s)[last] - estimates.backward_s)
        value = np.where(self.stages.inside, back + late, np.inf)
        best_columns = value.argmin(axis=1)
        rows = np.arange(self.columns.layer_count + 1)
        better = value[rows, best_columns] < (best.back_s + best.late_s) * (1 - 1e-9)
        ends = last[rows, best_columns]
        choices.append(_Choice(column, ends, best.choice[ends]))
        return _Best(
            np.where(better, back[rows, best_columns], best.back_s),
            np.where(better, late[rows, best_columns], best.late_s),
            np.where(better, flying[rows, best_columns], best.depth),
            np.where(better, compute[rows, best_columns], best.compute_s),
            np.where(better, column, best.pick),
            np.where(better, len(choices) - 1, best.choice),
        )
