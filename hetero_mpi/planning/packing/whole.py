"""Whether counted ranks can be one pipeline that does a share by a step time, asked of whole pipelines: closer than ``chains``.

``chains`` takes the time A before a stage and the round trip R behind it from whatever pipelines make each of them least. Here both
are of one pipeline, its ends are linked as they are, and stages are told how many micro-batches the next one has in flight: the
cycles of neighbours (``planning.cycles``), in which a stage needs one micro-batch more than the next, or several where the link
between them is long.

Pipelines are grown from the last stage to the first, all of as many ranks at once. Of every way to hold the last blocks, by the
ranks used and the class of the first of them, only what may matter is kept: the round trip R, the latest A at which everything
behind still ends in time, micro-batches in flight, and seconds of the first stage. One that is no better in all four than another
is dropped, and so is one whose A is earlier than ``chains`` allows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.packing.chains import Chains, Passes
from hetero_mpi.planning.packing.relaxed import RankClass
from hetero_mpi.planning.packing.stages import Limits, Stages
from hetero_mpi.planning.several.fleet import Floats

Whole = NDArray[np.int64]

ROUNDING = 1e-9
CHAMPIONS = (0.0, 0.3, 1.0, 3.0)
"""Ends of pipelines are compared with the best of their group by ``A - so many times R``."""
BEAM = 400
"""So many ends of as many ranks are grown at first, those with most time to spare: most pipelines that are possible show so."""
MOST_ENDS = 50_000
"""With more ends of pipelines of as many ranks than this, nothing is said."""


@dataclass(frozen=True)
class Span:
    """Pipelines hold at least ``least`` and at most ``most`` blocks on ranks of a home."""

    home: int
    least: int
    most: int


@dataclass
class _Ends:
    """Ends of pipelines, as columns."""

    vector: Whole
    """Ranks used."""
    blocks: Whole
    kind: Whole
    """The class of the first stage's rank."""
    trip_s: Floats
    latest_s: Floats
    flying: Whole
    """Micro-batches in flight at the first stage."""
    around_s: Floats
    """What the first stage takes for a micro-batch."""
    there: Whole
    """Blocks at the home of a ``Span``."""

    def __len__(self) -> int:
        return len(self.vector)

    def at(self, which: NDArray[np.bool_] | Whole) -> _Ends:
        return _Ends(*(getattr(self, one.name)[which] for one in fields(self)))


def _joined(parts: list[_Ends]) -> _Ends:
    return _Ends(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(_Ends)))


class WholeChains:
    """The pipelines of ``chains``, whose micro-batches are told."""

    def __init__(self, chains: Chains) -> None:
        facts = chains.facts
        self.chains, self.blocks = chains, len(facts.blocks)
        ways = [[self._ways(one, other) for other in facts.classes] for one in facts.classes]
        sizes, whole = sorted(facts.sizes), sorted(facts.whole_sizes)
        size_bytes = facts.message_bytes

        def table(counts: list[int]) -> Floats:
            each = [
                [
                    min((facts.message_s(way, n * size_bytes) for way in pair for n in counts), default=np.inf)
                    for pair in row
                ]
                for row in ways
            ]
            return np.array(each) if facts.filling else np.zeros((len(ways), len(ways)))

        self.once_s, self.message_s = table(sizes), table(whole)
        """[class, class]: one way, of any micro-batch and of any but the last."""

    def _ways(self, one: RankClass, other: RankClass) -> list[tuple[float, ...]]:
        if one.home != other.home:
            return [self.chains.facts.between(one.home, other.home)]
        return [way for way in (one.near, one.away, other.near, other.away) if way[1] < np.inf]

    def possible(self, passes: Passes, span: Span | None = None) -> bool:
        """Can all the ranks of ``chains``, or some of them, do the one share of ``passes``, as far as is known here?"""
        return _Growing(self, passes, span).possible()


class _Growing:
    """Ends of pipelines of one share, by one step time."""

    def __init__(self, whole: WholeChains, passes: Passes, span: Span | None) -> None:
        self.whole, self.chains, self.passes = whole, whole.chains, passes
        self.span = span or Span(-1, 0, whole.blocks)
        self.there = [int(one.home == self.span.home) for one in self.chains.facts.classes]
        """By class: do its blocks count for the span?"""
        (share,) = passes.shares.tolist()
        self.share, self.step_s, self.size = int(share), passes.step_s, whole.chains.batch.size
        self.count = -(-self.share // self.size)
        self.blocks = whole.blocks
        self.earliest = {kind: self._earliest_s(kind) for kind in self.chains.used}

    def _earliest_s(self, kind: int) -> Floats:
        """[blocks behind, ranks behind]: least A at a stage of ``kind``, before which the other ranks hold the other blocks."""
        chains = self.chains
        least = (self.passes.arrived[0] + chains.entries[kind].hop_s).reshape(self.blocks + 1, *chains.shape)
        for axis in range(len(chains.shape)):
            least = np.minimum.accumulate(least, axis=1 + axis)
        return np.asarray(least.reshape(self.blocks + 1, -1)[::-1, ::-1])

    def possible(self) -> bool:
        chains = self.chains
        for kind in chains.used:
            if not self.span.least <= self.there[kind] * self.blocks <= self.span.most:
                continue
            for stages, limits in self.passes.limits[kind, True, True]:
                if (limits.rounds * stages.fill_s <= limits.left_s)[0, self.blocks]:
                    return True
        last = _kept(_joined([self._last(kind) for kind in chains.used]), self.step_s)
        return self._found(last, BEAM) or self._found(last, MOST_ENDS)

    def _found(self, ends: _Ends, most: int) -> bool:
        """Can one of ``ends`` be completed? Looks at no more than ``most`` of as many ranks; true where ``MOST_ENDS`` are not
        enough to tell."""
        while len(ends):
            if any(self._closes(ends, kind) for kind in self.chains.used):
                return True
            ends = _kept(_joined([self._grown(ends, kind) for kind in self.chains.used]), self.step_s)
            if len(ends) > MOST_ENDS:
                return True
            if len(ends) > most:
                ends = ends.at(np.argsort(-self._spare_s(ends), kind="stable")[:most])
        return False

    def _spare_s(self, ends: _Ends) -> Floats:
        spare_s = ends.latest_s.copy()
        for kind, earliest_s in self.earliest.items():
            here = ends.kind == kind
            spare_s[here] -= earliest_s[ends.blocks[here], ends.vector[here]]
        return spare_s

    def _last(self, kind: int) -> _Ends:
        found = []
        for stages, limits in self.passes.limits[kind, False, True]:
            fill_s = stages.fill_s
            latest_s = np.minimum(limits.latest_s[0], limits.left_s[0] - limits.rounds[0] * fill_s)
            blocks = np.flatnonzero(latest_s >= self.earliest[kind][:, self.chains.one[kind]])
            ones = np.ones(len(blocks), dtype=np.int64)
            found.append(
                _Ends(
                    ones * self.chains.one[kind], blocks, ones * kind, fill_s[blocks], latest_s[blocks], ones,
                    stages.around_s[blocks], blocks * self.there[kind],
                )
            )  # fmt: skip
        return _joined(found) if found else _NONE

    def _closes(self, ends: _Ends, kind: int) -> bool:
        """Is there a first stage that completes one of the pipelines?"""
        ends = self._with_room(ends, kind)
        whole = self.blocks - ends.blocks
        return any(
            len(self._before(ends, kind, stages, limits, whole, True))
            for stages, limits in self.passes.limits[kind, True, False]
        )

    def _grown(self, ends: _Ends, kind: int) -> _Ends:
        """With one more stage in front."""
        ends, found = self._with_room(ends, kind), [_NONE]
        for stages, limits in self.passes.limits[kind, False, False]:
            most = np.maximum(0, np.minimum(limits.most, self.blocks - ends.blocks))
            which = np.repeat(np.arange(len(ends)), most)
            held = np.arange(len(which)) - np.repeat(np.cumsum(most) - most, most) + 1
            found.append(self._before(ends.at(which), kind, stages, limits, held, False))
        return _joined(found)

    def _with_room(self, ends: _Ends, kind: int) -> _Ends:
        return ends.at(self.chains.vectors[kind, ends.vector] < self.chains.count[kind])

    def _before(self, ends: _Ends, kind: int, stages: Stages, limits: Limits, held: Whole, first: bool) -> _Ends:
        """``ends`` with a stage of so many blocks in front of each, at every depth that allows a later A than a shallower one;
        only those that may matter."""
        end_s, hop_s = self.step_s - stages.optimizer_s[held], 2 * self.whole.once_s[kind, ends.kind]
        message_s = self.whole.message_s[kind, ends.kind]
        trip_s = ends.trip_s + hop_s + stages.fill_s[held]
        vector, blocks = ends.vector + self.chains.one[kind], ends.blocks + held
        there = ends.there + held * self.there[kind]
        latest_s = np.minimum(ends.latest_s - hop_s - stages.fill_s[held], limits.latest_s[0][held])
        latest_s = np.minimum(latest_s, end_s - (self.count - 1) * message_s - trip_s)
        earliest_s = np.zeros(len(ends)) if first else self.earliest[kind][blocks, vector]
        most = np.minimum(self.count, stages.kept[held] + ROUNDING).astype(np.int64)
        rounds = np.maximum(1.0, np.floor((end_s - earliest_s) / np.maximum(trip_s, ROUNDING) + ROUNDING))
        flying = np.maximum(ends.flying, np.ceil(self.count / rounds - ROUNDING).astype(np.int64))
        spanned = (there <= self.span.most) & (there + self.blocks - blocks >= self.span.least)
        alive = np.flatnonzero((latest_s >= earliest_s) & (flying <= most) & spanned)
        found, before_s = [_NONE], np.full(len(ends), -1.0)
        around_s = stages.around_s[held] + ends.around_s + 2 * message_s
        while len(alive):
            depth = flying[alive]
            at_s = np.minimum(latest_s[alive], self._deep_s(stages, held[alive], depth, end_s[alive], trip_s[alive]))
            at_s = np.minimum(
                at_s,
                self._cycled_s(
                    stages, held[alive], depth, ends.flying[alive], around_s[alive], end_s[alive] - trip_s[alive]
                ),
            )
            better = (at_s >= earliest_s[alive]) & (at_s > before_s[alive] + ROUNDING)
            which = alive[better]
            found.append(
                _Ends(
                    vector[which], blocks[which], np.full(len(which), kind), trip_s[which], at_s[better], flying[which],
                    stages.around_s[held[which]], there[which],
                )
            )  # fmt: skip
            if first and len(which):
                break
            before_s[alive] = np.maximum(before_s[alive], at_s)
            flying[alive] += 1
            alive = alive[(at_s < latest_s[alive]) & (flying[alive] <= most[alive])]
        return _joined(found)

    def _deep_s(self, stages: Stages, held: Whole, flying: Whole, end_s: Floats, trip_s: Floats) -> Floats:
        """The latest A with so many micro-batches in flight: round trips follow one another (``bound``)."""
        rounds = -(-self.count // flying)
        left = self.count - flying * (rounds - 1) - 1
        latest_s = end_s - rounds * trip_s - left * stages.forward_s[held]
        beyond = np.maximum(0, self.share - self.size * flying)
        both_s = end_s - beyond * stages.trip_s[held] + stages.fill_s[held] - 2 * trip_s
        summed_s = (both_s - stages.tail_s[held]) / self.chains.facts.ahead
        return np.where(beyond > 0, np.minimum(latest_s, np.minimum(both_s, summed_s)), latest_s)

    def _cycled_s(
        self, stages: Stages, held: Whole, flying: Whole, behind: Whole, around_s: Floats, left_s: Floats
    ) -> Floats:
        """The latest A as far as the cycle with the next stage goes, which has ``behind`` in flight."""
        times, rest = np.divmod(self.count - behind, flying - behind + 1)
        return np.asarray(left_s - (behind - 1 + rest) * stages.forward_s[held] - times * around_s)


_NO = np.zeros(0, dtype=np.int64)
_NONE = _Ends(_NO, _NO, _NO, np.zeros(0), np.zeros(0), _NO, np.zeros(0), _NO)


def _kept(ends: _Ends, step_s: float) -> _Ends:
    """Without those that are no better than another of the same ranks, blocks (there, too) and class."""
    if not len(ends):
        return ends
    # Of equal depth and first stage: by R, those whose A is later than that of all with a shorter R.
    group = np.ravel_multi_index(
        (ends.vector, ends.blocks, ends.kind, ends.there),
        tuple(int(column.max()) + 1 for column in (ends.vector, ends.blocks, ends.kind, ends.there)),
    )
    order = np.lexsort((-ends.latest_s, ends.trip_s, ends.around_s, ends.flying, group))
    ends, group = ends.at(order), group[order]
    new = np.ones(len(ends), dtype=bool)
    new[1:] = (np.diff(group) != 0) | (np.diff(ends.flying) != 0) | (np.diff(ends.around_s) != 0)
    level = np.cumsum(new) * (2 * step_s) + ends.latest_s
    best = np.maximum.accumulate(level)
    chosen = new.copy()
    chosen[1:] |= level[1:] > best[:-1] + ROUNDING
    ends, group = ends.at(chosen), group[chosen]
    for weight in CHAMPIONS:
        ends, group = _beaten_dropped(ends, group, weight)
    return ends


def _beaten_dropped(ends: _Ends, group: Whole, weight: float) -> tuple[_Ends, Whole]:
    """Without those that are no better in anything than one of their group, that with the largest A less ``weight`` R."""
    order = np.lexsort((ends.flying, ends.trip_s * weight - ends.latest_s, group))
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.diff(group[order]) != 0
    champion = np.empty(len(order), dtype=np.int64)
    champion[order] = order[first][np.cumsum(first) - 1]
    beaten = (
        (ends.trip_s >= ends.trip_s[champion])
        & (ends.latest_s <= ends.latest_s[champion])
        & (ends.flying >= ends.flying[champion])
        & (ends.around_s >= ends.around_s[champion])
        & (np.arange(len(order)) != champion)
    )
    return ends.at(~beaten), group[~beaten]
