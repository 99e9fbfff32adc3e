"""The packing bound of many unlike ranks, where whole pipelines cannot be counted: fractions of pipelines may be formed.

The linear program has a column per *configuration*, a pipeline with a share S of the sequences made of ranks of some
classes; columns are found by dynamic programming as they are needed (Gilmore and Gomory 1961), and for any prices of the
ranks, rounded or not,

    sequences done by T  <=  sum over ranks of price + P * max over S of (S - price of the cheapest pipeline that does S by T)

so that nothing rests on the linear program having been solved exactly. A pipeline that no host can hold alone sends S
sequences over a link that leaves the host; the other inequalities are those of ``bound``, the pace behind a stage being that of
the fastest rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.bounds import simplex
from hetero_mpi.planning.packing.relaxed import Facts, Summing
from hetero_mpi.planning.several.fleet import Floats

ROUNDS = 10
"""Columns are looked for at most so often per step time."""
FINEST = 240
"""Parts of the step time that A is counted in."""
TOLERANCE = 0.015
"""The search for the largest step time that can be shown ends within this share of it."""
UNIT = 0.985
"""A is counted in units of the fastest rank's block, a little less so that like ranks' blocks are whole numbers of them."""
TOGETHER = 8
"""Up to so many pipelines every number of them is looked at by itself."""


@dataclass
class _Move:
    """A stage of a class that holds so many blocks. ``latest_s[S]``: A may be at most this (negative: never)."""

    kind: int
    blocks: int
    units: int
    latest_s: Floats
    round_trip: tuple[float, float] | None
    """(own seconds, sequences kept) where the number in flight limits it."""
    optimizer_s: float


class _Trial:
    """Can up to ``most`` pipelines, each at least ``least`` of them summing together, do the batch within ``step_s``?"""

    def __init__(self, facts: Facts, least: int, most: int, step_s: float) -> None:
        self.facts, self.step_s, self.most = facts, step_s, most
        self.batch = facts.request.global_batch
        self.shares = _grid(self.batch, least, most)
        self.upto: Floats = np.array([*(self.shares[1:] - 1).tolist(), float(self.batch - (least - 1))])
        self.unit_s = max(facts.fastest_s * UNIT, step_s / FINEST, 1e-30)
        self.width = int(step_s / self.unit_s) + 1
        self.arrived: Floats = np.arange(self.width, dtype=np.float64) * self.unit_s
        self.sums = facts.sums_s(Summing(least))
        self.allowed = facts.link_allows(step_s, self.shares)
        self.moves = {
            ends: list(self._moves(*ends)) for ends in ((False, False), (False, True), (True, False), (True, True))
        }

    def _moves(self, first: bool, last: bool) -> Iterator[_Move]:
        count = len(self.facts.blocks)
        for kind, one in enumerate(self.facts.classes):
            if not self.allowed[kind].any():
                continue
            for blocks in range(0 if first or last else 1, count + 1):
                if first and last and blocks != count:
                    continue
                parts = (blocks, int(first), int(last))
                held = sum(n * size for n, size in zip(parts, self.facts.held, strict=True))
                room = one.usable - held - (self.facts.workspace if blocks else 0.0)
                if room < 0:
                    break
                for recompute in sorted(set(self.facts.request.recompute_choices)):
                    if blocks or not recompute or False not in self.facts.request.recompute_choices:
                        yield from self._move(kind, parts, recompute, room)

    def _move(self, kind: int, parts: tuple[int, int, int], recompute: bool, room: float) -> Iterator[_Move]:
        facts, one = self.facts, self.facts.classes[kind]
        blocks = parts[0]

        def total(each: tuple[float, ...]) -> float:
            return sum(n * value for n, value in zip(parts, each, strict=True))

        optimizer = one.fixed_s + one.per_parameter_s * total(facts.trained)
        work = total(one.work_s) + (blocks * one.repeated_s if recompute else 0.0)
        fill = total(one.fill_s) + (blocks * one.refill_s if recompute else 0.0)
        sums = total(self.sums[kind])
        first_sum = self.sums[kind][1] if parts[1] else self.sums[kind][0 if blocks else 2]
        # When the last item is whole, the last backward still has all others to do.
        tail = max(first_sum, sums - (sum(parts) - 1) * one.hidden_s)
        spare = self.step_s - optimizer - self.shares * work
        trip = total(one.trip_s) + (blocks * one.repeated_s if recompute else 0.0)
        latest = np.minimum(self.step_s - optimizer - self.shares * trip, (spare - tail) / facts.ahead)
        latest = np.where(self.allowed[kind], latest, -1.0)
        each = blocks * (facts.kept_input if recompute else facts.kept)
        kept = math.inf if each <= 0 else math.floor(room / each)
        if kept < min(facts.request.micro_batch_choices) or (latest < 0).all():
            return
        hop = 0.0 if parts[2] else one.hop_s
        units = int((fill + hop) / self.unit_s * (1 + 1e-12))
        yield _Move(kind, blocks, units, latest, None if kept == math.inf else (fill, kept), optimizer)

    def latest_s(self, move: _Move, behind: int) -> Floats:
        """The latest A at which a stage with ``behind`` blocks behind it may begin, by share."""
        if move.round_trip is None:
            return move.latest_s
        fill, kept = move.round_trip
        rounds = np.maximum(1.0, self.shares / kept)
        return np.minimum(
            move.latest_s, self.step_s - move.optimizer_s - rounds * (fill + behind * self.facts.fastest_s)
        )

    def cheapest(self, prices: Floats) -> tuple[Floats, Floats]:
        """(price of the cheapest pipeline by share, table [blocks done, share, A] of the cheapest beginnings)."""
        count = len(self.facts.blocks)
        table = np.full((count + 1, len(self.shares), self.width), np.inf)
        whole = np.full(len(self.shares), np.inf)
        start = np.full((len(self.shares), self.width), np.inf)
        start[:, 0] = 0.0
        for first, done, here in ((True, 0, start), *((False, done, table[done]) for done in range(count + 1))):
            if not first and not (here < np.inf).any():
                continue
            for last in (False, True):
                for move in self.moves[first, last]:
                    behind = count - done - move.blocks
                    if behind < 0 or (last and behind):
                        continue
                    self._extend(here, move, behind, float(prices[move.kind]), table, whole if last else None)
        return whole, table

    def _extend(
        self, here: Floats, move: _Move, behind: int, price: float, table: Floats, whole: Floats | None
    ) -> None:
        # What may be larger shares may be smaller ones, and later than the latest A nothing may be: the rest is left aside.
        latest = self.latest_s(move, behind)
        rows = int(np.count_nonzero(latest >= 0))
        columns = min(self.width, int(latest[0] / self.unit_s) + 1) if rows else 0
        columns = min(columns, self.width - move.units) if whole is None else columns
        if columns <= 0:
            return
        value = np.where(self.arrived[None, :columns] <= latest[:rows, None], here[:rows, :columns], np.inf)
        if whole is not None:
            whole[:rows] = np.minimum(whole[:rows], value.min(axis=1) + price)
        else:
            there = table[len(self.facts.blocks) - behind][:rows, move.units : move.units + columns]
            np.minimum(there, value + price, out=there)

    def pipeline(self, share: int, prices: Floats, whole: Floats, table: Floats) -> Floats:
        """How many ranks of each class the cheapest pipeline of that share has, read back from the table."""
        used = np.zeros(len(self.facts.classes))
        count = len(self.facts.blocks)
        wanted, done, at, last = float(whole[share]), count, -1, True
        while wanted > 1e-9 * float(whole[share]) or last:
            step = self._step_back(share, wanted, done, at, last, prices, table)
            if step is None:
                break
            move, before, place = step
            used[move.kind] += 1
            if before < 0:
                break
            done, at, last = before, place, False
            wanted = float(table[done, share, at])
        return used

    def _step_back(
        self, share: int, wanted: float, done: int, at: int, last: bool, prices: Floats, table: Floats
    ) -> tuple[_Move, int, int] | None:
        """(last stage, blocks before it, A before it); -1 blocks: it is the first stage."""
        behind = len(self.facts.blocks) - done
        near = 1e-9 * max(wanted, 1e-30)
        for move in self.moves[True, last]:
            latest = float(self.latest_s(move, behind)[share])
            if (
                move.blocks == done
                and (last or move.units == at)
                and latest >= 0
                and abs(prices[move.kind] - wanted) <= near
            ):
                return move, -1, 0
        for move in self.moves[False, last]:
            before = done - move.blocks
            if before < 0 or (not move.blocks and not last):
                continue
            latest = float(self.latest_s(move, behind)[share])
            row = table[before, share] if last else table[before, share, at - move.units : at - move.units + 1]
            if not last and at < move.units:
                continue
            places = self.arrived if last else self.arrived[at - move.units : at - move.units + 1]
            hits = np.flatnonzero((np.abs(row + prices[move.kind] - wanted) <= near) & (places <= latest))
            if hits.size:
                return move, before, int(hits[0]) if last else at - move.units
        return None

    def impossible(self, prices: Floats) -> tuple[bool, Floats]:
        """(proven: the batch cannot be done, the prices that show it or the last ones)."""
        count, most = self.facts.count, float(self.most)
        columns: list[tuple[float, Floats]] = []
        best, kept = math.inf, prices
        for _ in range(ROUNDS):
            whole, table = self.cheapest(prices)
            if not np.isfinite(whole).any():
                return True, kept
            gain = np.where(np.isfinite(whole), self.upto - whole, 0.0)
            reach = float(prices @ count + most * max(0.0, gain.max()))
            if reach < best:
                best, kept = reach, prices
            if best < self.batch * (1 - 1e-9):
                return True, kept
            for share in self._promising(gain, whole):
                columns.append((float(self.upto[share]), self.pipeline(share, prices, whole, table)))
            done, duals = _master(columns, count, most)
            if done >= self.batch:
                break
            prices = 0.5 * (kept + duals) if best < math.inf else duals
        return False, kept

    def _promising(self, gain: Floats, whole: Floats) -> list[int]:
        """Shares whose cheapest pipelines become columns: the best, and the best per sequence."""
        worth = np.where(np.isfinite(whole), self.upto / np.maximum(whole, 1e-30), 0.0)
        order = [int(i) for i in np.argsort(-gain)[:4]] + [int(i) for i in np.argsort(-worth)[:3]]
        return [i for i in dict.fromkeys(order) if np.isfinite(whole[i])]


def _grid(batch: int, least: int, most: int) -> Floats:
    """Shares that are looked at, as the least of each range: fine near the mean, which most pipelines take."""
    if most == 1:
        return np.array([float(batch)])
    shares, share, largest = [1.0], 1.0, float(batch - (least - 1))
    mean = batch / most
    while True:
        ratio = 1.04 if 0.4 * mean <= share <= 3 * mean else 1.3
        share = max(share + 1, math.floor(share * ratio))
        if share > largest:
            return np.array(shares)
        shares.append(share)


def _master(columns: list[tuple[float, Floats]], count: Floats, most: float) -> tuple[float, Floats]:
    """(most sequences with the columns at hand, prices of the classes)."""
    rows = np.array([[*used, 1.0] for _, used in columns]).T
    gain = np.array([share for share, _ in columns])
    right = np.append(count, most)
    found = simplex(rows, right, gain)
    assert found is not None, "every column uses ranks"
    solution, duals = found
    return float(gain @ solution), np.maximum(duals[:-1], 0.0)


def fractions_bound_s(facts: Facts, low_s: float, known_s: float) -> float:
    """No plan of as many pipelines as the request allows is faster; within ``TOLERANCE`` of what the relaxation can show.

    ``low_s``: a bound to begin with. ``known_s``: some plan's step time, where the search begins.
    """
    most = min(len(facts.fleet.devices), facts.request.max_pipelines, facts.request.global_batch)
    cases = [(number, number) for number in range(1, min(TOGETHER, most) + 1)]
    if most > TOGETHER:
        cases.append((TOGETHER + 1, most))
    prices = {case: _first_prices(facts) for case in cases}
    high = known_s
    while high > low_s * (1 + TOLERANCE):
        middle = math.sqrt(low_s * high) if high < known_s else high * 0.999
        for case in list(cases):
            shown, prices[case] = _Trial(facts, *case, middle).impossible(prices[case])
            if not shown:
                # What was possible here is looked at first next time.
                cases.remove(case)
                cases.insert(0, case)
                high = middle
                break
        else:
            low_s = middle
            if middle >= known_s * 0.999:
                break
    return low_s


def _first_prices(facts: Facts) -> Floats:
    speed = np.array([1 / max(one.work_s[0], 1e-30) for one in facts.classes])
    return np.asarray(facts.request.global_batch * speed / (speed @ facts.count))
