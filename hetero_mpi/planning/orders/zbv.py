"""two stages per rank in a V, weight gradients deferred where possible (ZB-V of Qi et al. 2024, arXiv:2405.15362).

Two ranks with two stages each and three micro-batches; every forward and each part of a backward takes one clock::

    clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0B0   . 0B1   . 3F2 3I2 3W1 3W2 0B2   .   .
    rank 1    . 1F0 2F0 1F1 2F1 2I0 1I0 1F2 2I1 1I1 2W0 2F2 1W0 2W1 2I2 1I2 1W1 2W2 1W2

A V keeps the first and the last stage on one rank, and needs no message where it turns. A stage has at most ``warm_up`` + 1
micro-batches in flight. The order is deadlock-free at any depths.

It results from list scheduling: each rank runs the pass that can begin first. All stages are assumed to be equally long: a
forward takes one unit, a backward two (one per half), a message none. In a tie, a backward goes before a forward and a later
stage before an earlier one, because other ranks wait longest for them; weight gradients fill idle time.
"""

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True
Computed = tuple[str, int, int]
"""(``F``, ``B``, ``I`` or ``W``; index of the stage in its pipeline; micro-batch)"""
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class _Candidate(NamedTuple):
    """An operation that could run next; the smallest candidate runs first."""

    begin: int
    kind: int
    """0: backward, 1: forward, 2: weight gradients."""
    nearness: int
    micro_batch: int
    stage: int


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    return list_scheduled(pipeline)


def list_scheduled(pipeline: PipelinePlan, sparing: bool = False) -> dict[int, list[Computed]]:
    """List-schedule a pipeline: map each rank to its operations, in order.

    A stage has at most ``warm_up + 1`` micro-batches in flight. If backward is split, a rank holds at most the sum of these limits
    over its stages, in flight or deferred. ``sparing``: split a backward only if the previous stage would otherwise wait for it.

    Deadlock-free at any depths, because the most advanced micro-batch can always proceed. Every stage runs forwards, backwards
    and weight gradients in micro-batch order; a rank's later stages finish before its earlier ones.
    """
    ranks = tuple(stage.ranks[0] for stage in pipeline.stages)
    limits = tuple(min(stage.warm_up + 1, pipeline.micro_batches) for stage in pipeline.stages)
    return _ListScheduler(ranks, limits, pipeline.micro_batches, pipeline.split_backward, sparing).lists


@lru_cache(maxsize=64)
class _ListScheduler:
    """The list scheduler, which runs when it is created; cached, as the memory and the messages of a plan ask for its lists.

    Attributes:
        clock: rank -> time at which the rank becomes free.
        inputs, gradients: for each stage, micro-batch -> time of arrival.
        forwards, backwards: number of passes started, by stage.
        deferred: rank -> (stage, micro-batch) pairs whose weight gradients are due.
        lists: rank -> its operations, in order.
    """

    def __init__(self, ranks: tuple[int, ...], limits: tuple[int, ...], count: int, split: bool, sparing: bool) -> None:
        self.ranks, self.limits, self.count, self.split, self.sparing = ranks, limits, count, split, sparing
        self.stages_of = {rank: [index for index, holder in enumerate(ranks) if holder == rank] for rank in ranks}
        self.clock = dict.fromkeys(self.stages_of, 0)
        self.inputs: list[dict[int, int]] = [dict.fromkeys(range(count), 0), *({} for _ in ranks[1:])]
        self.gradients: list[dict[int, int]] = [{} for _ in ranks]
        self.forwards, self.backwards = [0] * len(ranks), [0] * len(ranks)
        self.deferred: dict[int, deque[tuple[int, int]]] = {rank: deque() for rank in self.stages_of}
        self.lists: dict[int, list[Computed]] = {rank: [] for rank in self.stages_of}
        nexts = {rank: self._next_candidate(rank) for rank in self.stages_of}
        while any(nexts.values()):
            (candidate, rank) = min((option, rank) for rank, option in nexts.items() if option is not None)
            self._append(rank, candidate)
            # Only this rank and the ranks of adjacent stages may have become ready.
            near = range(max(0, candidate.stage - 1), min(len(self.ranks), candidate.stage + 2))
            nexts |= {peer: self._next_candidate(peer) for peer in {self.ranks[index] for index in near}}

    def _next_candidate(self, rank: int) -> _Candidate | None:
        """Next operation of ``rank``; None if the rank must wait or has finished."""
        now, options = self.clock[rank], []
        owed = self.deferred[rank]
        held_count = len(owed) + sum(self._in_flight(index) for index in self.stages_of[rank])
        full = bool(owed) and held_count >= sum(self.limits[index] for index in self.stages_of[rank])
        for index in self.stages_of[rank]:
            forward, backward = self.forwards[index], self.backwards[index]
            ends = index == 0 and backward == self.count - 1  # in one part: what later stages owe comes before it
            if backward in self.gradients[index] and not (owed and ends):
                begin = max(now, self.gradients[index][backward])
                options.append(_Candidate(begin, 0, -index, backward, index))
            if not full and forward in self.inputs[index] and self._in_flight(index) < self.limits[index]:
                options.append(_Candidate(max(now, self.inputs[index][forward]), 1, -index, forward, index))
        if owed:
            options.append(_Candidate(now, 2, 0, owed[0][1], owed[0][0]))
        return min(options, default=None)

    def _in_flight(self, index: int) -> int:
        return self.forwards[index] - self.backwards[index]

    def _append(self, rank: int, candidate: _Candidate) -> None:
        begin, kind, _, micro_batch, index = candidate
        name = "BFW"[kind]
        if name == "B" and index > 0 and self.split and (not self.sparing or self._splits(index, micro_batch, begin)):
            name = "I"
            self.deferred[rank].append((index, micro_batch))
        self.clock[rank] = end = begin + _UNITS[name]
        self.lists[rank].append((name, index, micro_batch))
        if name == "F":
            self.forwards[index] += 1
            if index + 1 < len(self.ranks):
                self.inputs[index + 1][micro_batch] = end
            else:
                self.gradients[index][micro_batch] = end
        elif name == "W":
            self.deferred[rank].popleft()
        else:
            self.backwards[index] += 1
            if index > 0:
                self.gradients[index - 1][micro_batch] = end

    def _splits(self, index: int, micro_batch: int, begin: int) -> bool:
        """Whether to split a backward because the previous stage's rank would idle until an unsplit one ends.

        Deferred weight gradients also force a split: a stage accumulates in micro-batch order, and a last backward comes last.
        """
        previous = self.ranks[index - 1]
        following = self._next_candidate(previous)
        busy = following is not None and following.kind < 2 and following.begin + _UNITS["F"] >= begin + _UNITS["B"]
        deferred = self.deferred[self.ranks[index]]
        owed = any(stage == index for stage, _ in deferred) or (micro_batch == self.count - 1 and bool(deferred))
        return owed or (previous != self.ranks[index] and not busy)
