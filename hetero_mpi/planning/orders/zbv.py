"""several stages per rank, weight gradients put off (ZB-V of Qi et al. 2024, arXiv:2405.15362): V-shaped, or looped

Two ranks that hold two of four stages each, three micro-batches, every forward and every part of a backward one clock long::

    clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0B0   . 0B1   . 3F2 3I2 3W1 3W2 0B2   .   .
    rank 1    . 1F0 2F0 1F1 2F1 2I0 1I0 1F2 2I1 1I1 2W0 2F2 1W0 2W1 2I2 1I2 1W1 2W2 1W2

A V keeps the first and the last stage on one rank, and needs no message where it turns. ``warm_up`` of a stage is how many
micro-batches it may have in flight beside one. Free of deadlock with any depths.

It is made by list scheduling: each rank always takes up what can begin first.
All stages count as equally long: a forward takes one unit, a backward two (its halves one each), a message none. Of what could
begin at the same time a backward comes before a forward and a later stage before an earlier one, as others wait for it longest;
weight gradients fill what is left.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True
Computed = tuple[str, int, int]
"""``F``, ``B``, ``I`` or ``W``; the stage's place in its pipeline; the micro-batch."""
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class _Candidate(NamedTuple):
    """Compared in this order."""

    begin: int
    kind: int
    """0: backward, 1: forward, 2: weight gradients."""
    nearness: int
    micro_batch: int
    place: int


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    return list_scheduled(pipeline)


def list_scheduled(pipeline: PipelinePlan, sparing: bool = False) -> dict[int, list[Computed]]:
    """Rank -> what it computes, in order.

    A stage has at most ``warm_up + 1`` micro-batches in flight. Where backward is split, a rank holds no more micro-batches, in
    flight or with weight gradients put off, than that over all its stages. ``sparing``: backward is split only where the stage
    before would else wait for its gradient.

    Free of deadlock, whatever the depths: the micro-batch that is furthest can always go on. On every stage forwards, backwards
    and weight gradients come in the order of the micro-batches; a rank's later stages end before its earlier ones.
    """
    ranks = tuple(stage.ranks[0] for stage in pipeline.stages)
    flying = tuple(min(stage.warm_up + 1, pipeline.micro_batches) for stage in pipeline.stages)
    found = _listed(ranks, flying, pipeline.micro_batches, pipeline.split_backward, sparing)
    return {rank: list(listed) for rank, listed in found.items()}


@lru_cache(maxsize=64)
def _listed(
    ranks: tuple[int, ...], most: tuple[int, ...], count: int, split: bool, sparing: bool
) -> dict[int, list[Computed]]:
    return _Lists(ranks, most, count, split, sparing).made()


class _Lists:
    """The lists as far as they are made.

    Attributes:
        clock: rank -> when it is free.
        inputs, gradients: of every stage by micro-batch, when they are there; absent: not yet.
        forwards, backwards: of every stage, how many have begun.
        put_off: rank -> (place, micro-batch) whose weight gradients it owes.
    """

    def __init__(self, ranks: tuple[int, ...], most: tuple[int, ...], count: int, split: bool, sparing: bool) -> None:
        self.ranks, self.most, self.count, self.split, self.sparing = ranks, most, count, split, sparing
        self.held = {rank: [place for place, other in enumerate(ranks) if other == rank] for rank in ranks}
        self.clock = dict.fromkeys(self.held, 0)
        self.inputs: list[dict[int, int]] = [dict.fromkeys(range(count), 0), *({} for _ in ranks[1:])]
        self.gradients: list[dict[int, int]] = [{} for _ in ranks]
        self.forwards, self.backwards = [0] * len(ranks), [0] * len(ranks)
        self.put_off: dict[int, deque[tuple[int, int]]] = {rank: deque() for rank in self.held}
        self.lists: dict[int, list[Computed]] = {rank: [] for rank in self.held}

    def made(self) -> dict[int, list[Computed]]:
        nexts = {rank: self._next(rank) for rank in self.held}
        while any(nexts.values()):
            (candidate, rank) = min((one, rank) for rank, one in nexts.items() if one is not None)
            self._take(rank, candidate)
            # Whoever may go on: this rank, and the holders of the stages beside.
            near = range(max(0, candidate.place - 1), min(len(self.ranks), candidate.place + 2))
            nexts |= {other: self._next(other) for other in {self.ranks[place] for place in near}}
        return self.lists

    def _next(self, rank: int) -> _Candidate | None:
        """The action that ``rank`` would take up; None: it must wait for others, or has done."""
        now, found = self.clock[rank], []
        owed = self.put_off[rank]
        held = len(owed) + sum(self._flying(place) for place in self.held[rank])
        full = bool(owed) and held >= sum(self.most[place] for place in self.held[rank])
        for place in self.held[rank]:
            forward, backward = self.forwards[place], self.backwards[place]
            ends = place == 0 and backward == self.count - 1  # in one part: what later stages owe comes before it
            if backward in self.gradients[place] and not (owed and ends):
                begin = max(now, self.gradients[place][backward])
                found.append(_Candidate(begin, 0, -place, backward, place))
            if not full and forward in self.inputs[place] and self._flying(place) < self.most[place]:
                found.append(_Candidate(max(now, self.inputs[place][forward]), 1, -place, forward, place))
        if owed:
            found.append(_Candidate(now, 2, 0, owed[0][1], owed[0][0]))
        return min(found, default=None)

    def _flying(self, place: int) -> int:
        return self.forwards[place] - self.backwards[place]

    def _take(self, rank: int, candidate: _Candidate) -> None:
        begin, kind, _, micro_batch, place = candidate
        name = "BFW"[kind]
        if name == "B" and place > 0 and self.split and (not self.sparing or self._splits(place, micro_batch, begin)):
            name = "I"
            self.put_off[rank].append((place, micro_batch))
        self.clock[rank] = end = begin + _UNITS[name]
        self.lists[rank].append((name, place, micro_batch))
        if name == "F":
            self.forwards[place] += 1
            if place + 1 < len(self.ranks):
                self.inputs[place + 1][micro_batch] = end
            else:
                self.gradients[place][micro_batch] = end
        elif name == "W":
            self.put_off[rank].popleft()
        else:
            self.backwards[place] += 1
            if place > 0:
                self.gradients[place - 1][micro_batch] = end

    def _splits(self, place: int, micro_batch: int, begin: int) -> bool:
        """True where the holder of the stage before would wait for a backward that comes in one part, having nothing else to
        compute. None comes so before what its stage owes, since gradients are added in the order of the micro-batches, nor the last
        one before what its rank owes."""
        other = self.ranks[place - 1]
        following = self._next(other)
        busy = following is not None and following.kind < 2 and following.begin + _UNITS["F"] >= begin + _UNITS["B"]
        put_off = self.put_off[self.ranks[place]]
        owed = any(of == place for of, _ in put_off) or (micro_batch == self.count - 1 and bool(put_off))
        return owed or (other != self.ranks[place] and not busy)
