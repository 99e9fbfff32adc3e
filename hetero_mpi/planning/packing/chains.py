"""Which ranks can carry which share of the batch by a step time, at best: pipelines over counted ranks, two passes.

Ranks are told apart by class only: ``(2, 0, 1)`` are two of the first class and one of the third, in any order along the
pipeline, any of them left out. All such *vectors* up to a given one are looked at side by side, as axes of an array.

* From the last stage to the first: the least round trip from the stage at hand through all later ones and back, by ranks used
  and blocks done, of stages that could at best do their share so.
* From the first to the last: the least time A until the first micro-batch arrives, forward and back. A stage may follow where
  the inequalities of ``bound`` allow it, the round trip behind it being the least that the ranks not yet used allow.

A stage is reached over the best link from a host on which a stage before it is; all its pipeline's messages pass there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.packing.stages import BoundStages, Limits, StageTables
from hetero_mpi.planning.several.cluster import Floats

Places = NDArray[np.int64]
"""Numbers of vectors."""


@dataclass(frozen=True)
class _Entry:
    """How a message reaches a rank of one class, by the ranks that the pipeline has already [vector]."""

    hop_s: Floats
    """One micro-batch's, there and back; infinite: the pipeline has no rank yet."""
    each_s: Floats
    """Each sequence's, one way. 0 where there is none."""


class BoundChains:
    """All pipelines of at most ``count[class]`` ranks of every class. Vectors are numbered as arrays of ``shape`` lay them."""

    def __init__(self, tables: StageTables, count: tuple[int, ...], pipelines: int) -> None:
        facts = tables.facts
        self.facts, self.count, self.stages = facts, count, tables.of(pipelines)
        self.shape = tuple(n + 1 for n in count)
        self.vectors = np.indices(self.shape).reshape(len(count), -1)
        self.used = [kind for kind, n in enumerate(count) if n]
        self.one = [math.prod(self.shape[kind + 1 :]) for kind in range(len(count))]
        """How far behind a vector in their order is the one with another rank of a class."""
        self.entries = [self._entry(kind) for kind in range(len(count))]
        self.speed: Floats = facts.speeds @ self.vectors

    def _entry(self, kind: int) -> _Entry:
        """The message comes from a rank of the vector, over the best link between the two hosts."""
        facts, number = self.facts, self.vectors.shape[1]
        hop_s, each_s = (np.full(number, np.inf) for _ in range(2))
        for host in sorted({other.host for other in facts.classes}):
            there = [i for i, other in enumerate(facts.classes) if other.host == host]
            latency_s, per_byte_s = facts.ways[host][facts.classes[kind].host]
            seconds = [latency_s + n * facts.message_bytes * per_byte_s for n in facts.sizes]
            from_there = self.vectors[there].sum(axis=0) > 0
            each = min(s / n for s, n in zip(seconds, facts.sizes, strict=True))
            hop_s = np.where(from_there, np.minimum(hop_s, 2 * min(seconds)), hop_s)
            each_s = np.where(from_there, np.minimum(each_s, each), each_s)
        return _Entry(hop_s, np.where(np.isfinite(each_s), each_s, 0.0))

    def carried(self, shares: list[int], step_s: float, most: int, spare: float) -> NDArray[np.bool_]:
        """[share, vector]: can these ranks, or some of them, be a pipeline that does so many sequences by ``step_s``?

        Pipelines that do no more than ``most`` and waste more than ``spare`` blocks' sequences of their ranks' time are left
        aside: with them, the others could not do the rest of the batch.
        """
        wasted = step_s * self.speed - most * self.facts.ends - spare
        passes = _Passes(self, np.array(shares, dtype=np.float64), step_s, most, wasted)
        passes.last_to_first()
        return passes.first_to_last()

    def grown(self, vectors: Places, kind: int) -> Places:
        """Of ``vectors``, those to which a rank of a class can be added."""
        return np.asarray(vectors[self.vectors[kind, vectors] < self.count[kind]])


class _Passes:
    """Both passes for some shares and one step time. Arrays are [share, blocks, vector]."""

    def __init__(self, chains: BoundChains, shares: Floats, step_s: float, most: int, wasted: Floats) -> None:
        self.chains, self.shares, self.most, self.wasted = chains, shares, most, wasted
        self.blocks, self.last = len(chains.facts.blocks), chains.vectors.shape[1] - 1
        self.limits: dict[tuple[int, bool, bool], list[tuple[BoundStages, Limits]]] = {
            key: [(stages, stages.limits(shares, step_s)) for stages in kinds]
            for key, kinds in chains.stages.items()
            if chains.count[key[0]]
        }
        self.behind: dict[int, Floats] = {}
        """class -> least round trip behind a stage of that class, the message to it included, [share, blocks behind,
        ranks that may be there]."""

    def _empty(self) -> Floats:
        return np.full((len(self.shares), self.blocks + 1, self.last + 1), np.inf)

    def _alive(self, table: Floats, done: int) -> Places:
        """Vectors that have done so many blocks by any share, and have not wasted too much."""
        found = np.isfinite(table[:, done]).any(axis=0) & (self.wasted <= self.most * done)
        return np.flatnonzero(found)

    def last_to_first(self) -> None:
        chains, trip = self.chains, self._empty()
        for kind in chains.used:
            here = trip[:, :, chains.one[kind]]
            for stages, limits in self.limits[kind, False, True]:
                possible = limits.rounds * stages.fill_s <= limits.left_s
                np.minimum(here, np.where(possible, stages.fill_s, np.inf), out=here)
        for done in range(self.blocks):
            alive = self._alive(trip, done)
            for kind in chains.used:
                vectors = chains.grown(alive, kind)
                if vectors.size:
                    self._prepend(trip, done, kind, vectors)
        for kind in chains.used:
            least = (trip + chains.entries[kind].hop_s).reshape(len(self.shares), self.blocks + 1, *chains.shape)
            for axis in range(len(chains.shape)):
                least = np.minimum.accumulate(least, axis=2 + axis)
            self.behind[kind] = least.reshape(trip.shape)

    def _prepend(self, trip: Floats, done: int, kind: int, vectors: Places) -> None:
        """Every stage of a class before those of ``vectors`` that hold the last ``done`` blocks."""
        chains = self.chains
        later = (trip[:, done, vectors] + chains.entries[kind].hop_s[vectors])[:, None]
        for stages, limits in self.limits[kind, False, False]:
            most = min(limits.most, self.blocks - done)
            if most < 1:
                continue
            some = slice(1, most + 1)
            whole = later + stages.fill_s[some, None]
            too_long = limits.rounds[:, some, None] * whole > limits.left_s[:, some, None]
            too_long |= 2 * whole > limits.both_s[:, some, None]
            whole[too_long] = np.inf
            _lower(trip, slice(done + 1, done + most + 1), vectors + chains.one[kind], whole)

    def first_to_last(self) -> NDArray[np.bool_]:
        chains, arrived = self.chains, self._empty()
        carried = np.zeros((len(self.shares), self.last + 1), dtype=bool)
        for kind in chains.used:
            self._begin(arrived, carried, kind)
        for done in range(self.blocks + 1):
            alive = self._alive(arrived, done)
            for kind in chains.used:
                vectors = chains.grown(alive, kind)
                if vectors.size:
                    self._append(arrived, carried, done, kind, vectors)
        by_class = carried.reshape(len(self.shares), *chains.shape)
        for axis in range(len(chains.shape)):
            by_class = np.logical_or.accumulate(by_class, axis=1 + axis)
        return by_class.reshape(carried.shape)

    def _begin(self, arrived: Floats, carried: NDArray[np.bool_], kind: int) -> None:
        one, whole = self.chains.one[kind], self.blocks
        for stages, limits in self.limits[kind, True, True]:
            carried[:, one] |= (limits.rounds * stages.fill_s <= limits.left_s)[:, whole]
        behind = self.behind[kind][:, ::-1, self.last - one]
        here = arrived[:, :, one]
        for stages, limits in self.limits[kind, True, False]:
            trip = stages.fill_s + behind
            possible = (limits.rounds * trip <= limits.left_s) & (2 * trip <= limits.both_s)
            np.minimum(here, np.where(possible, stages.fill_s, np.inf), out=here)

    def _append(self, arrived: Floats, carried: NDArray[np.bool_], done: int, kind: int, vectors: Places) -> None:
        """Every stage of a class behind those of ``vectors`` that hold the first ``done`` blocks."""
        entry, left, after = self.chains.entries[kind], self.blocks - done, vectors + self.chains.one[kind]
        at = arrived[:, done, vectors] + entry.hop_s[vectors]
        # All messages of the pipeline pass over the link to this stage, one after the other.
        last_at = at + self._queued_s(entry)[:, vectors]
        for stages, limits in self.limits[kind, False, False]:
            most = min(limits.most, left)
            if most < 1:
                continue
            some, fill = slice(1, most + 1), stages.fill_s[1 : most + 1, None]
            trip = self.behind[kind][:, left - most : left, self.last - after][:, ::-1] + fill
            possible = at[:, None] + limits.rounds[:, some, None] * trip <= limits.left_s[:, some, None]
            possible &= at[:, None] <= limits.latest_s[:, some, None]
            possible &= last_at[:, None] + trip <= limits.end_s[some, None]
            possible &= at[:, None] + 2 * trip <= limits.both_s[:, some, None]
            whole = np.where(possible, at[:, None] + fill, np.inf)
            _lower(arrived, slice(done + 1, done + most + 1), after, whole)
        for stages, limits in self.limits[kind, False, True]:
            fill_s = stages.fill_s[left]
            possible = at + limits.rounds[:, left, None] * fill_s <= limits.left_s[:, left, None]
            possible &= (at <= limits.latest_s[:, left, None]) & (last_at + fill_s <= limits.end_s[left])
            carried[:, after] |= possible

    def _queued_s(self, entry: _Entry) -> Floats:
        """[share, vector] what all messages but the one that A counts take, one way."""
        once_s = np.where(np.isfinite(entry.hop_s), entry.hop_s / 2, 0.0)
        return np.asarray(np.maximum(0.0, self.shares[:, None] * entry.each_s - once_s))


def _lower(table: Floats, blocks: slice, vectors: Places, to: Floats) -> None:
    """Entries that are higher become ``to``."""
    table[:, blocks, vectors] = np.minimum(table[:, blocks, vectors], to)
