"""Vectorised search over rank orders, micro-batch sizes and batch shares: numpy evaluates many candidates at once.

A candidate is rated by the minimum step time T in which all its layers can be placed. Stages are filled in order, each with as
many layers as its memory and the remaining time allow::

    A + M c + optimizer <= T

Here c is the forward and backward time of one micro-batch, M the number of micro-batches, and A the time that one micro-batch
takes to pass all earlier stages and messages. The micro-batches in flight cover the round trip through later stages. Stages
without layers are dropped. All-reduces are omitted; the caller simulates the best candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.search.pipelines import Line, Lines, falling
from hetero_mpi.planning.tables import Floats, Indices

MAX_IN_FLIGHT = 3
"""Maximum number of micro-batches in flight in the tables, as a multiple of the number of ranks."""
POPULATION, SAMPLE_FACTOR = 96, 3
"""Number of candidates improved together; the initial sample is larger by ``SAMPLE_FACTOR``."""
MIN_NEAR_CANDIDATES = 24
"""Minimum number of candidates near a given plan."""
ROUNDING_RATIO = 1e-6
TARGET_RATIO, TOLERATED_LAYERS = 0.99, (1.0, 0.1)
"""The next target as a fraction of the best time; mean tolerated increase in unplaced layers, initial and final."""
DOUBLING_COUNT = 15
"""Number of rounds after which the better half of the population replaces the worse half."""
SWAP, SHIFT, GIVE = 0.40, 0.65, 0.85
"""Cumulative probabilities of swapping two ranks, moving a rank and moving sequences; other moves change a micro-batch size."""
MOVED_UNITS = (1, 1, 1, 2, 4)
"""Choices of how much of the batch to move, in least common multiples of two pipelines' micro-batch sizes."""


class Candidates(NamedTuple):
    """N candidates of K ranks in P pipelines."""

    who: Indices
    """[K, N]: ranks in pipeline order, pipeline by pipeline; idle ranks come last."""
    pipeline: Indices
    """[K, N]: pipeline of each rank; P if the rank is idle."""
    size: Indices
    """[P + 1, N]: index of each pipeline's micro-batch size; the last row is unused."""
    sequences: Indices
    """[P + 1, N]: batch share of each pipeline; the last row is unused."""

    def at(self, columns: Indices) -> Candidates:
        return Candidates(*(array[:, columns] for array in self))


class Candidate(NamedTuple):
    """A single candidate with its estimated step time."""

    seconds: float
    who: tuple[int, ...]
    pipeline: tuple[int, ...]
    size: tuple[int, ...]
    sequences: tuple[int, ...]


class Orders:
    """Generates candidates for one pipeline count. ``costs``: by micro-batch size, with state sharded over that count."""

    def __init__(self, costs: Mapping[int, Costs]) -> None:
        self.sizes = np.array(sorted(costs))
        ordered_costs = [costs[size] for size in self.sizes.tolist()]
        first, self.layers = ordered_costs[0], ordered_costs[0].layer_count
        self.count, self.request = first.count, first.request
        most = max(len(each.ways) for each in ordered_costs)
        self.most = min(self.request.global_batch, MAX_IN_FLIGHT * self.count + 4)
        self.hop = np.array([_hops_s(each) for each in ordered_costs])
        seconds = [np.cumsum(each.forward_s + each.backward_s, axis=2) for each in ordered_costs]
        padded = [np.pad(each, [(0, 0), (0, 0), (1, 0)]) for each in seconds]
        tables = [[self._rooms_of(own_way) for own_way in each.deepest.values()] for each in ordered_costs]
        # Sizes with fewer ways repeat their last one.
        self.overhead, self.seconds, self.room = (
            np.array([[each[min(way, len(each) - 1)] for way in range(most)] for each in by_size])
            for by_size in ([each.overhead_s.sum(axis=2) for each in ordered_costs], padded, tables)
        )
        """[size, way, rank]: fixed seconds per micro-batch; [size, way, rank, layer]: seconds in all earlier layers; [size, way,
        rank, first, micro-batches in flight]: maximum number of layers that fit in memory."""
        each_s = first.step_per_parameter_s[0]
        self.fixed = first.step_fixed_s + each_s * first.trainable[-1] / self.count
        self._gap = float(self.seconds.max() * 1.001 + 1e-9)
        rows = self.seconds.reshape(-1, self.layers + 1)
        self._rows, self._rising = rows, (rows + self._gap * np.arange(len(rows))[:, None]).ravel()
        self._overheads, self._rooms = self.overhead.ravel(), self.room.reshape(len(rows), *self.room.shape[3:])
        self.speed = 1 / np.maximum(self.seconds[0, 0, :, -1], 1e-12)
        self.memory, self.host = first.usable, first.host.astype(float)

    def _rooms_of(self, deepest: list[list[list[int]]]) -> Indices:
        """[rank, first, micro-batches in flight]: maximum number of layers. ``deepest``: by rank; equal ranks share tables."""
        rooms_by_table: dict[int, Indices] = {}
        depths_asked = np.maximum(1, np.arange(self.most + 1))
        for table in deepest:
            if id(table) not in rooms_by_table:
                depths = np.minimum.accumulate(np.array(table), axis=1)
                rooms_by_table[id(table)] = (depths[:, :, None] >= depths_asked).sum(axis=1).astype(np.int16)
        return np.array([rooms_by_table[id(table)] for table in deepest])

    def place(self, time: Floats, these: Candidates, depth: float) -> tuple[Indices, Indices, Indices]:
        """Place layers within ``time`` [N]; ``depth`` scales the number of micro-batches in flight.

        Returns:
            Unplaced layers [N], layers on each rank [K, N], micro-batches in flight [K, N].
        """
        (K, N), P, n = these.who.shape, len(these.size) - 1, self.count
        who, column = these.who, np.arange(N)
        size = these.size[these.pipeline, column]
        count = np.maximum(1, (these.sequences // self.sizes[these.size])[these.pipeline, column]).astype(float)
        same = these.pipeline[1:] == these.pipeline[:-1]
        hops, hops_left_s, after = np.zeros((K, N)), np.zeros((K, N)), np.zeros((K, N))
        hops[:-1] = np.where(same, self.hop[size[:-1], who[:-1], who[1:]], 0.0)
        hops_left_s[-1] = hops[-1]
        for k in range(K - 2, -1, -1):
            hops_left_s[k] = hops[k] + np.where(same[k], hops_left_s[k + 1], 0.0)
            after[k] = np.where(same[k], after[k + 1] + 1, 0.0)
        filling = (count - 1) * (1 - (1 - 1 / count) ** after)
        every_way = np.arange(self.seconds.shape[1])[:, None]
        rows = (size * len(every_way) + every_way[:, None]) * n + who
        overhead = self._overheads[rows]
        left_s = np.where(these.pipeline < P, time - self.fixed[who], -1.0)
        counts, flying = np.zeros((K, N), dtype=np.int64), np.ones((K, N), dtype=np.int64)
        first, passed = np.zeros(N, dtype=np.int64), np.zeros(N)
        for k in range(K):
            if k:
                first, passed = np.where(same[k - 1], first, 0), np.where(same[k - 1], passed, 0.0)
            pace = np.maximum((left_s[k] - passed) / count[k], 1e-30)
            flying[k] = self._flying(filling[k] + hops_left_s[k] / pace, after[k], count[k], depth)
            row, way_s = rows[:, k], overhead[:, k]
            begin_s = self._rows[row, first]
            end = self._rising.searchsorted(begin_s + (pace - way_s) + row * self._gap, side="right")
            room = np.minimum(first + self._rooms[row, first, np.minimum(flying[k], self.most)], self.layers)
            end = np.minimum(np.maximum(end - 1 - row * (self.layers + 1), first), room)
            way = end.argmax(axis=0), column
            last = end[way]
            counts[k] = last - first
            busy_s = self._rows[row[way], last] - begin_s[way] + way_s[way] + hops[k]
            first, passed = last, passed + np.where(counts[k] > 0, busy_s, 0.0)
        placed = np.zeros((P + 1, N), dtype=np.int64)
        np.add.at(placed, (these.pipeline, column), counts)
        return (self.layers - placed[:-1]).sum(axis=0), counts, flying

    def _flying(self, periods: Floats, after: Floats, count: Floats, depth: float) -> Indices:
        schedule = self.request.schedule
        if schedule == "auto":
            return np.minimum(np.ceil(1 + depth * np.minimum(periods, 1e9) - ROUNDING_RATIO), count).astype(np.int64)
        return (count if schedule == "gpipe" else np.minimum(count, after + 1)).astype(np.int64)

    def least(self, these: Candidates, depth: float, steps: int = 9, span: float = 32.0) -> Floats:
        """Minimum time [N] in which all layers can be placed, to 0.7 % by default; infinite if none was found."""
        column, power = np.arange(these.who.shape[1]), np.zeros(these.size.shape)
        size = these.size[these.pipeline, column]
        sequence_s = (self.seconds[..., -1] + self.overhead).min(axis=1)[size, these.who]
        np.add.at(power, (these.pipeline, column), 1 / sequence_s)
        lower = (these.sequences // self.sizes[these.size] / np.maximum(power, 1e-12))[:-1].max(axis=0)
        upper, least_s = lower * span, np.full(len(lower), math.inf)
        for _ in range(steps):
            middle = np.sqrt(lower * upper)
            done = self.place(middle, these, depth)[0] <= 0
            upper, lower, least_s = (
                np.where(done, middle, upper),
                np.where(done, lower, middle),
                np.where(done, middle, least_s),
            )
        return least_s

    def lines(self, candidate: Candidate, depth: float) -> Lines | None:
        """Convert a candidate to pipelines; None if a layer cannot be placed within its step time."""
        these = Candidates(*(np.array(column)[:, None] for column in candidate[1:]))
        unplaced, counts, flying = self.place(np.array([candidate.seconds * 1.0001]), these, depth)
        if unplaced[0] > 0:
            return None
        pipelines = []
        for p in range(len(candidate.size) - 1):
            at = [k for k in range(len(candidate.who)) if candidate.pipeline[k] == p and counts[k, 0] > 0]
            ranks, layers = tuple(candidate.who[k] for k in at), tuple(counts[at, 0].tolist())
            in_flight = flying[at, 0].tolist()
            depths = falling(in_flight) if self.request.schedule == "auto" else tuple(in_flight)
            pipelines.append(Line(ranks, layers, depths, int(self.sizes[candidate.size[p]]), candidate.sequences[p]))
        return tuple(pipelines)

    def spread_over_all_ranks(self, candidate: Candidate) -> Lines | None:
        """The candidate's pipelines with layers on all ranks by speed, at full depth; None if a pipeline has too many ranks."""
        pipelines = []
        for p, (size, sequences) in enumerate(zip(candidate.size[:-1], candidate.sequences, strict=False)):
            ranks = tuple(rank for rank, of in zip(candidate.who, candidate.pipeline, strict=True) if of == p)
            if len(ranks) > self.layers:
                return None
            counts = [1] * len(ranks)
            for _ in range(self.layers - len(ranks)):
                counts[max(range(len(ranks)), key=lambda k: self.speed[ranks[k]] / (counts[k] + 1))] += 1
            deep = (self.request.global_batch,) * len(ranks)
            pipelines.append(Line(ranks, tuple(counts), deep, int(self.sizes[size]), sequences))
        return tuple(pipelines)

    def cut(self, lines: Lines, depth: float) -> Lines | None:
        """Recut ``lines`` for the minimum estimated time; None if out of memory."""
        who = [rank for line in lines for rank in line.ranks]
        pipeline = [p for p, line in enumerate(lines) for _ in line.ranks]
        sizes = [*(self.sizes.tolist().index(line.micro_batch) for line in lines), 0]
        candidate = (tuple(who), tuple(pipeline), tuple(sizes), (*(line.sequences for line in lines), 1))
        seconds = float(self.least(Candidates(*(np.array(each)[:, None] for each in candidate)), depth, steps=12)[0])
        cut = None if seconds == math.inf else self.lines(Candidate(seconds, *candidate), depth)
        return None if cut is None else tuple(new._replace(split=o.split) for new, o in zip(cut, lines, strict=True))

    # Initial candidates

    def random_candidates(self, pipelines: int, draw: np.random.Generator, depth: float = 1.0) -> Candidates:
        """Sample candidates: sort ranks by host, speed or memory, or shuffle them, then assign them in blocks or in turn."""
        K, N = self.count, POPULATION * SAMPLE_FACTOR
        host, speed = self.host, self.speed
        keys = (host, -speed, -self.memory, host * 1e6 - speed, -host * 1e6 - speed, speed)
        who, of = np.argsort(draw.random((K, N)), axis=0), np.zeros((K, N), dtype=np.int64)
        even = np.searchsorted([round(K * (p + 1) / pipelines) for p in range(pipelines)], np.arange(K), side="right")
        for c in range(N):
            of[:, c] = even
            if c >= 3 * N // 4:
                cut = np.sort(draw.permutation(np.arange(1, K))[: pipelines - 1])
                of[:, c] = np.searchsorted(cut, np.arange(K), side="right")
                continue
            key, way = keys[c % len(keys)], c // len(keys) % 3
            blur = draw.choice([0, 0.0, 0.5]) * (key.std() + 1e-9)
            order = np.lexsort((draw.random(K), key + draw.random(K) * blur))
            if way:
                turn, slot = np.divmod(np.arange(K), pipelines)
                slot = np.where((turn % 2 == 1) & (way == 2), pipelines - 1 - slot, slot)
                at = np.argsort(slot, kind="stable")
                order, of[:, c] = order[at], slot[at]
            who[:, c] = order
        these = self._shared(who, of, pipelines, draw.integers(len(self.sizes), size=N))
        return these.at(np.argsort(self.least(these, depth), kind="stable")[:POPULATION])

    def near(self, plans: Sequence[Lines], pipelines: int) -> Candidates:
        """``plans`` with one idle rank at every place, or none; split anew for another number of ``pipelines``."""
        orders: list[tuple[list[int], list[int], list[int], Lines]] = []
        for lines in plans:
            pipeline_of = {rank: p for p, line in enumerate(lines) for rank in line.ranks}
            ranks, of = list(pipeline_of), list(pipeline_of.values())
            idle = [rank for rank in range(self.count) if rank not in pipeline_of]
            if len(lines) != pipelines:
                ranks, of = [*ranks, *idle], [k * pipelines // self.count for k in range(self.count)]
                idle = []
            orders.append((ranks, idle, of, lines))
            for k in range(len(ranks) + 1) if idle else ():
                more = [*of[:k], of[max(0, k - 1)], *of[k:]]
                orders.append(([*ranks[:k], idle[0], *ranks[k:]], idle[1:], more, lines))
        columns = [orders[c % len(orders)] for c in range(max(MIN_NEAR_CANDIDATES, len(orders)))]
        who = np.array([[*ranks, *idle] for ranks, idle, *_ in columns]).T
        of_all = np.array([[*of, *[pipelines] * len(idle)] for _, idle, of, _ in columns]).T
        sizes = self.sizes.tolist()
        these = self._shared(who, of_all, pipelines, np.arange(len(columns)) % len(sizes))
        for column, (*_, lines) in enumerate(columns):
            batch, has_sizes = sum(line.sequences for line in lines), all(line.micro_batch in sizes for line in lines)
            if len(lines) == pipelines and batch == self.request.global_batch and has_sizes:
                these.size[:-1, column] = [sizes.index(line.micro_batch) for line in lines]
                these.sequences[:-1, column] = [line.sequences for line in lines]
        return these

    def _shared(self, who: Indices, of: Indices, pipelines: int, sizes: Indices) -> Candidates:
        """Share the batch by pipeline speed; use the smallest micro-batch size where the given one is too large."""
        sizes = np.where(self.request.global_batch // self.sizes[sizes] >= pipelines, sizes, 0)
        column, power = np.arange(len(sizes)), np.zeros((pipelines + 1, len(sizes)))
        np.add.at(power, (of, column), self.speed[who])
        power = power[:-1]
        units = self.request.global_batch // self.sizes[sizes]
        share = np.maximum(1, np.floor(units * power / power.sum(axis=0)).astype(np.int64))
        while (wrong := np.flatnonzero(share.sum(axis=0) != units)).size:
            few = share[:, wrong].sum(axis=0) < units[wrong]
            gains, most = power[:, wrong] / (share[:, wrong] + 1), np.where(share[:, wrong] > 1, share[:, wrong], 0)
            np.add.at(share, (np.where(few, gains.argmax(axis=0), most.argmax(axis=0)), wrong), np.where(few, 1, -1))
        rows = np.broadcast_to(sizes, share.shape)
        idle = np.zeros((1, len(sizes)), dtype=np.int64)
        return Candidates(who, of, np.concatenate([rows, idle]), np.concatenate([share * self.sizes[rows], idle + 1]))

    # Improvement

    def changed(self, these: Candidates, draw: np.random.Generator) -> Candidates:
        """Apply a random move to each candidate."""
        (K, N), P = these.who.shape, len(these.size) - 1
        column, (who, of, size, sequences) = np.arange(N), (array.copy() for array in these)
        kind, i, j = draw.random(N), draw.integers(K, size=N), draw.integers(K, size=N)
        swap, shift = kind < SWAP, (kind >= SWAP) & (kind < SHIFT) & (i != j)
        a, b = who[i, column], who[j, column]
        who[i, column], who[j, column] = np.where(swap, b, a), np.where(swap | (i == j), a, b)
        key = np.broadcast_to(np.arange(K, dtype=float)[:, None], (K, N)).copy()
        key[i, column] = np.where(shift, j + np.where(j > i, 0.5, -0.5), i)
        order = np.argsort(key, axis=0, kind="stable")
        who, turned = np.take_along_axis(who, order, 0), np.take_along_axis(of, order, 0)
        turned[np.argmax(order == i, axis=0), column] = of[np.where(shift, j, i), column]
        filled = np.zeros((P + 1, N), dtype=np.int64)
        np.add.at(filled, (turned, column), 1)
        of = np.where((filled[:-1] == 0).any(axis=0), of, turned)
        p, q = draw.integers(P, size=N), draw.integers(P, size=N)
        unit = np.lcm(self.sizes[size[p, column]], self.sizes[size[q, column]]) * draw.choice(MOVED_UNITS, size=N)
        give = (kind >= SHIFT) & (kind < GIVE) & (p != q) & (sequences[p, column] - unit >= self.sizes[size[p, column]])
        np.subtract.at(sequences, (p, column), np.where(give, unit, 0))
        np.add.at(sequences, (q, column), np.where(give, unit, 0))
        p, new, every = draw.integers(P, size=N), draw.integers(len(self.sizes), size=N), draw.random(N) < 0.5
        for k in range(P):
            fits = (kind >= (GIVE if P > 1 else SHIFT)) & (every | (p == k)) & (sequences[k] % self.sizes[new] == 0)
            size[k] = np.where(fits, new, size[k])
        return Candidates(who, of, size, sequences)

    def improved(
        self, these: Candidates, rounds: int, depth: float, draw: np.random.Generator, max_candidates: int
    ) -> tuple[list[Candidate], Candidates]:
        """Improve candidates by ``rounds`` rounds of random moves.

        Returns:
            A diverse selection of the best candidates, best first (empty if none fits), and the final population.
        """
        time = self.least(these, depth)
        best = {candidate[1:]: candidate for candidate in self._sorted(these, time, 4 * max_candidates)}
        if not best:
            return [], these
        goal = float(time.min()) * TARGET_RATIO
        unplaced = self.place(np.full(len(time), goal), these, depth)[0]
        for turn in range(rounds):
            proposals = self.changed(these, draw)
            unplaced_changed = self.place(np.full(len(time), goal), proposals, depth)[0]
            accepted = unplaced_changed <= unplaced + TOLERATED_LAYERS[0] * (
                TOLERATED_LAYERS[1] / TOLERATED_LAYERS[0]
            ) ** (turn / rounds) * draw.exponential(size=len(time))
            these = Candidates(*(np.where(accepted, new, old) for old, new in zip(these, proposals, strict=True)))
            unplaced = np.where(accepted, unplaced_changed, unplaced)
            if (done := np.flatnonzero(unplaced <= 0)).size:
                part = these.at(done)
                seconds = np.minimum(self.least(part, depth, steps=8, span=1.3), goal)
                for candidate in self._sorted(part, seconds, 2 * max_candidates):
                    best[candidate[1:]] = min(candidate, best.get(candidate[1:], candidate))
                goal = float(seconds.min()) * TARGET_RATIO
                unplaced = self.place(np.full(len(time), goal), these, depth)[0]
            if turn % DOUBLING_COUNT == DOUBLING_COUNT - 1:
                order = np.argsort(unplaced, kind="stable")
                half = len(order) // 2
                source = np.concatenate([order[: len(order) - half], order[:half]])
                these, unplaced = these.at(source), unplaced[source]
        return unlike(sorted(best.values()), max_candidates), these

    def _sorted(self, these: Candidates, seconds: Floats, most: int) -> list[Candidate]:
        """The ``most`` fastest candidates that fit."""
        order = [c for c in np.argsort(seconds, kind="stable")[:most].tolist() if seconds[c] < math.inf]
        arrays = [array.T.tolist() for array in these.at(np.array(order, dtype=np.int64))]
        return [Candidate(float(seconds[c]), *(tuple(array[at]) for array in arrays)) for at, c in enumerate(order)]


def _hops_s(costs: Costs) -> Floats:
    """[rank, rank]: round-trip seconds of a message sent after the first layer."""
    away = (costs.latency_s + costs.message_bytes[0] * costs.per_byte_s)[costs.place_of][:, costs.place_of]
    return np.where(np.eye(costs.count, dtype=bool), 0.0, away + away.T)


def unlike(candidates: list[Candidate], max_candidates: int) -> list[Candidate]:
    """Select diverse candidates: few with equal micro-batches and batch shares, and few with equal rank orders."""
    diverse: list[Candidate] = []
    for candidate in candidates:
        sized = sum(earlier.sequences == candidate.sequences and earlier.size == candidate.size for earlier in diverse)
        ordered = sum(earlier[1:3] == candidate[1:3] for earlier in diverse)
        if len(diverse) < max_candidates and ordered < 3 and (sized < max_candidates // 2 or not ordered):
            diverse.append(candidate)
    return diverse
