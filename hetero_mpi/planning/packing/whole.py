"""Whether counted ranks can be one pipeline that does a share by a step time, asked of whole pipelines: closer than ``chains``.

``chains`` takes the time A before a stage and the round trip R behind it from whatever pipelines make each of them least. Here both
are of one pipeline, its ends are linked as they are, and stages are told how many micro-batches the next one has in flight: the
cycles of neighbours (``planning.cycles``), in which a stage needs one micro-batch more than the next, or several where the link
between them is long. A stage's sums end no earlier than its last backward, which comes after those of all stages behind: of each of
them the *load* says how long after the first micro-batch's arrival that is at least, and

    rho A + load + tail + optimizer <= T

Pipelines are grown from the last stage to the first, all of as many ranks at once. Of every way to hold the last blocks, by the
ranks used and the class of the first of them, only what may matter is kept: the round trip R, the latest A at which everything
behind still ends in time, the load, micro-batches in flight, and seconds of the first stage. One that is no better in any of these
than another is dropped, and so is one whose A is earlier than ``chains`` allows.
"""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True)
class Torn:
    """Some block is held at a home by one pipeline and elsewhere by another: each has a stage with its sum, which takes so long."""

    sum_s: float


Rule = Span | Torn
"""What all pipelines have in common."""


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
    load_s: Floats
    """Least time from A, its forward part taken alone, until the last gradient leaves the first stage."""
    flying: Whole
    """Micro-batches in flight at the first stage."""
    around_s: Floats
    """What the first stage takes for a micro-batch."""
    there: Whole
    """Blocks at the home of a ``Span``; stages with the block that is ``Torn``."""

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

    def possible(self, passes: Passes, rule: Rule | None = None) -> bool:
        """Can all the ranks of ``chains``, or some of them, do the one share of ``passes``, as far as is known here?"""
        return _Growing(self, passes, rule).possible()


class _Growing:
    """Ends of pipelines of one share, by one step time."""

    def __init__(self, whole: WholeChains, passes: Passes, rule: Rule | None) -> None:
        self.whole, self.chains, self.passes, self.rule = whole, whole.chains, passes, rule
        self.least, self.most = (
            (rule.least, rule.most) if isinstance(rule, Span) else (int(rule is not None), whole.blocks)
        )
        """Of what counts for the rule."""
        (share,) = passes.shares.tolist()
        self.share, self.step_s, self.size = int(share), passes.step_s, whole.chains.batch.size
        self.count = -(-self.share // self.size)
        self.blocks = whole.blocks
        self.earliest = {kind: self._earliest_s(kind) for kind in self.chains.used}
        self.stages = {key: list(self._stages(key)) for key in passes.limits}

    def _earliest_s(self, kind: int) -> Floats:
        """[blocks behind, ranks behind]: least A at a stage of ``kind``, before which the other ranks hold the other blocks."""
        chains = self.chains
        least = (self.passes.arrived[0] + chains.entries[kind].hop_s).reshape(self.blocks + 1, *chains.shape)
        for axis in range(len(chains.shape)):
            least = np.minimum.accumulate(least, axis=1 + axis)
        return np.asarray(least.reshape(self.blocks + 1, -1)[::-1, ::-1])

    def _stages(self, key: tuple[int, bool, bool]) -> Iterator[tuple[Stages, Limits, Whole]]:
        """With what they add to what counts for the rule [blocks]."""
        held = np.arange(self.blocks + 1)
        at_home = isinstance(self.rule, Span) and self.chains.facts.classes[key[0]].home == self.rule.home
        for stages, limits in self.passes.limits[key]:
            yield stages, limits, held if at_home else 0 * held
            if isinstance(self.rule, Torn):
                torn = stages.torn(self.rule.sum_s)
                more = torn.limits(self.passes.shares, self.step_s, self.chains.batch, self.chains.facts.ahead)
                yield torn, more, np.ones_like(held)

    def possible(self) -> bool:
        chains = self.chains
        for kind in chains.used:
            for stages, limits, adds in self.stages[kind, True, True]:
                if not self.least <= adds[self.blocks] <= self.most:
                    continue
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
        for stages, limits, adds in self.stages[kind, False, True]:
            fill_s = stages.fill_s
            round_s = limits.end_s - limits.left_s[0] + limits.rounds[0] * fill_s
            load_s = np.maximum(self.share * stages.trip_s, round_s)
            latest_s = np.minimum(limits.latest_s[0], self._ended_s(limits.end_s, load_s, stages.tail_s))
            blocks = np.flatnonzero(latest_s >= self.earliest[kind][:, self.chains.one[kind]])
            ones = np.ones(len(blocks), dtype=np.int64)
            found.append(
                _Ends(
                    ones * self.chains.one[kind], blocks, ones * kind, fill_s[blocks], latest_s[blocks], load_s[blocks],
                    ones, stages.around_s[blocks], adds[blocks],
                )
            )  # fmt: skip
        return _joined(found) if found else _NONE

    def _closes(self, ends: _Ends, kind: int) -> bool:
        """Is there a first stage that completes one of the pipelines?"""
        ends = self._with_room(ends, kind)
        whole = self.blocks - ends.blocks
        return any(
            len(self._before(ends, kind, stages, limits, adds, whole, True))
            for stages, limits, adds in self.stages[kind, True, False]
        )

    def _grown(self, ends: _Ends, kind: int) -> _Ends:
        """With one more stage in front."""
        ends, found = self._with_room(ends, kind), [_NONE]
        for stages, limits, adds in self.stages[kind, False, False]:
            most = np.maximum(0, np.minimum(limits.most, self.blocks - ends.blocks))
            which = np.repeat(np.arange(len(ends)), most)
            held = np.arange(len(which)) - np.repeat(np.cumsum(most) - most, most) + 1
            found.append(self._before(ends.at(which), kind, stages, limits, adds, held, False))
        return _joined(found)

    def _with_room(self, ends: _Ends, kind: int) -> _Ends:
        return ends.at(self.chains.vectors[kind, ends.vector] < self.chains.count[kind])

    def _before(
        self, ends: _Ends, kind: int, stages: Stages, limits: Limits, adds: Whole, held: Whole, first: bool
    ) -> _Ends:
        """``ends`` with a stage of so many blocks in front of each, at every depth that allows a later A than a shallower one;
        only those that may matter."""
        end_s, hop_s = self.step_s - stages.optimizer_s[held], 2 * self.whole.once_s[kind, ends.kind]
        message_s = self.whole.message_s[kind, ends.kind]
        trip_s = ends.trip_s + hop_s + stages.fill_s[held]
        vector, blocks = ends.vector + self.chains.one[kind], ends.blocks + held
        there = ends.there + adds[held]
        latest_s = np.minimum(ends.latest_s - hop_s - stages.fill_s[held], limits.latest_s[0][held])
        load_s = np.maximum(ends.load_s + hop_s + stages.fill_s[held], self.share * stages.trip_s[held])
        load_s = np.maximum(load_s, (self.count - 1) * message_s + trip_s)
        latest_s = np.minimum(latest_s, self._ended_s(end_s, load_s, stages.tail_s[held]))
        earliest_s = np.zeros(len(ends)) if first else self.earliest[kind][blocks, vector]
        most = np.minimum(self.count, stages.kept[held] + ROUNDING).astype(np.int64)
        rounds = np.maximum(1.0, np.floor((end_s - earliest_s) / np.maximum(trip_s, ROUNDING) + ROUNDING))
        flying = np.maximum(ends.flying, np.ceil(self.count / rounds - ROUNDING).astype(np.int64))
        ruled = (there <= self.most) & (there + self.blocks - blocks >= self.least)
        alive = np.flatnonzero((latest_s >= earliest_s) & (flying <= most) & ruled)
        found, before_s = [_NONE], np.full(len(ends), np.inf)
        around_s = stages.around_s[held] + ends.around_s + 2 * message_s
        while len(alive):
            depth, own = flying[alive], held[alive]
            cycle_s = self._cycle_s(stages, own, depth, ends.flying[alive], around_s[alive]) + trip_s[alive]
            deep_s = np.maximum(self._rounds_s(stages, own, depth, trip_s[alive]), cycle_s)
            deep_s = np.maximum(deep_s, load_s[alive])
            at_s = np.minimum(latest_s[alive], self._ended_s(end_s[alive], deep_s, stages.tail_s[own]))
            better = (at_s >= earliest_s[alive]) & (deep_s < before_s[alive] - ROUNDING)
            which = alive[better]
            found.append(
                _Ends(
                    vector[which], blocks[which], np.full(len(which), kind), trip_s[which], at_s[better], deep_s[better],
                    flying[which], stages.around_s[held[which]], there[which],
                )
            )  # fmt: skip
            if first and len(which):
                break
            before_s[alive] = np.minimum(before_s[alive], deep_s)
            flying[alive] += 1
            alive = alive[(deep_s > load_s[alive]) & (flying[alive] <= most[alive])]
        return _joined(found)

    def _ended_s(self, end_s: Floats, load_s: Floats, tail_s: Floats) -> Floats:
        """The latest A of a stage with such a load, after which its sums follow, and the other stages' backwards."""
        return np.asarray(np.minimum(end_s - load_s, (end_s - load_s - tail_s) / self.chains.facts.ahead))

    def _rounds_s(self, stages: Stages, held: Whole, flying: Whole, trip_s: Floats) -> Floats:
        """The load with so many micro-batches in flight: round trips follow one another (``bound``)."""
        rounds = -(-self.count // flying)
        left = self.count - flying * (rounds - 1) - 1
        one_by_one_s = rounds * trip_s + left * stages.forward_s[held]
        beyond = np.maximum(0, self.share - self.size * flying)
        both_s = beyond * stages.trip_s[held] - stages.fill_s[held] + 2 * trip_s
        return np.where(beyond > 0, np.maximum(one_by_one_s, both_s), one_by_one_s)

    def _cycle_s(self, stages: Stages, held: Whole, flying: Whole, behind: Whole, around_s: Floats) -> Floats:
        """The load, but for one round trip, as far as the cycle with the next stage goes, which has ``behind`` in flight."""
        times, rest = np.divmod(self.count - behind, flying - behind + 1)
        return np.asarray((behind - 1 + rest) * stages.forward_s[held] + times * around_s)


_NO = np.zeros(0, dtype=np.int64)
_NO_S = np.zeros(0)
_NONE = _Ends(_NO, _NO, _NO, _NO_S, _NO_S, _NO_S, _NO, _NO_S, _NO)


def _kept(ends: _Ends, step_s: float) -> _Ends:
    """Without those that are no better than another of the same ranks, blocks (there, too) and class."""
    if not len(ends):
        return ends
    # Of equal depth and first stage: by R, those whose A is later than that of all with a shorter R, or whose load is less than
    # that of the last one of these.
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
    latest = np.maximum.accumulate(np.where(chosen, np.arange(len(ends)), 0))
    chosen |= ends.load_s < ends.load_s[latest] - ROUNDING
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
        & (ends.load_s >= ends.load_s[champion])
        & (ends.flying >= ends.flying[champion])
        & (ends.around_s >= ends.around_s[champion])
        & (np.arange(len(order)) != champion)
    )
    return ends.at(~beaten), group[~beaten]
