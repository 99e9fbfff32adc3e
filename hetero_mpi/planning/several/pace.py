"""How many micro-batches pipelines of given ranks, in a given order, can do by a given time: estimated for thousands of crews at
once, blocks taken to be all alike.

A *crew* is the ranks of one pipeline in order. Its stages are filled from the first on, each with as many blocks as the time T
left to it and its memory allow (c: seconds of forward and backward of one micro-batch, A: forwards, backwards and messages of
one micro-batch through all stages before):

    A_s + M c_s + optimizer <= T                      (a bound that good depths come near to)

with as many micro-batches in flight as the stages behind take until the gradient is back, if each of them is as long as it may
be. The crew can do M micro-batches if all blocks find a place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.several.fleet import Fleet, Floats, Indices
from hetero_mpi.planning.tables import stage_bytes

Crew = tuple[int, ...]
"""Indices of a fleet's ranks, in the order of stages."""

Sums = tuple[float, float, float]
"""Seconds to sum the gradients of a block, the embedding and the head."""

DEEPEST = 160
"""Micro-batches in flight that are told apart."""
SPARE = 1e-6
RETURNING = 0.85
"""Of the time of full stages, what the last gradient takes through them: later stages are less full."""


class Pace:
    """Estimates for the crews of one fleet. Shapes: N crews, S stages of the longest of them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.blocks = fleet.items - 2
        self.batch = -(-fleet.request.global_batch // fleet.micro_batch)

        def per_rank(seconds: Floats) -> Floats:
            """[3, rank]: of a block, the embedding and the head; a last column for nobody."""
            ends = np.stack([seconds[:, 1:-1].mean(axis=1), seconds[:, 0], seconds[:, -1]])
            return np.concatenate([ends, np.zeros((3, 1))], axis=1)

        def padded(values: Floats) -> Floats:
            return np.append(values, 0.0)

        self.forward_s, self.backward_s = per_rank(fleet.forward_s), per_rank(fleet.backward_s)
        self.whole_s = self.forward_s + self.backward_s
        self.again_s = per_rank(fleet.repeated_s)[0]
        self.overhead_s = padded(fleet.overhead_s.sum(axis=1))
        trained = np.array([float(layer.trainable_parameters) for layer in fleet.model.layers])
        self.block_step_s = padded(fleet.step_per_parameter_s * trained[1:-1].mean())
        self.ends_step_s = [padded(fleet.step_per_parameter_s * trained[end]) for end in (0, -1)]
        self.step_fixed_s = padded(fleet.step_fixed_s)
        self.most, self.memory = self._most_blocks()
        size = float(fleet.message_bytes[:-1].max())
        self.way_s: Floats = fleet.latency_s + size * fleet.per_byte_s
        self.place: Indices = np.append(fleet.place, 0)
        self.outward_s = self._outward()
        self.returning = RETURNING * float((self.backward_s[0, :-1] / self.whole_s[0, :-1].clip(1e-30)).mean())

    def _outward(self) -> tuple[Floats, Floats]:
        """Of each rank's best link to another host, or inside if there is only one: latency, seconds per byte."""
        fleet = self.fleet
        home = np.zeros(len(self.way_s), dtype=np.int64)
        home[fleet.place] = fleet.host
        elsewhere = home[:, None] != home[None, :]
        if not elsewhere.any():
            elsewhere = ~np.eye(len(home), dtype=bool)
        if not elsewhere.any():
            return np.zeros(len(fleet.devices)), np.zeros(len(fleet.devices))
        best = np.where(elsewhere, fleet.per_byte_s, np.inf).argmin(axis=1)
        rows = np.arange(len(home))
        return fleet.latency_s[rows, best][fleet.place], fleet.per_byte_s[rows, best][fleet.place]

    def _most_blocks(self) -> tuple[Floats, Indices]:
        """([kind of memory, with embedding?, with head?, recompute?, micro-batches in flight] -> most blocks that fit, -1: not
        even none; the kind of memory of every rank)."""
        fleet = self.fleet
        rooms, kind = np.unique(np.stack([fleet.usable, fleet.ratio], axis=1), axis=0, return_inverse=True)
        depth = np.arange(1, DEEPEST + 1, dtype=np.float64)
        most = np.full((len(rooms), 2, 2, 2, DEEPEST + 1), -1.0)
        items = fleet.items
        ways = itertools.product(enumerate(rooms.tolist()), sorted(set(fleet.request.recompute_choices)))
        for (index, (usable, ratio)), recompute in ways:
            fixed, each = stage_bytes(fleet.model.keeping(ratio), fleet.tokens, recompute)
            for head, embedding in ((0, 0), (0, 1), (1, 0), (1, 1)):
                counts = np.arange(self.blocks + 1)
                if head and embedding:
                    # A part of the chain with both its ends is not a stage: estimated from one with the embedding.
                    last = 1 + counts
                    more = fixed[items - 1, items], each[items - 1, items]
                    needs = fixed[0, last] + more[0], each[0, last] + more[1]
                    needs[0][-1], needs[1][-1] = fixed[0, items], each[0, items]
                elif head:
                    needs = fixed[items - 1 - counts, items], each[items - 1 - counts, items]
                elif embedding:
                    needs = fixed[0, 1 + counts], each[0, 1 + counts]
                else:
                    needs = fixed[1, 1 + counts].copy(), each[1, 1 + counts].copy()
                    needs[0][0] = needs[1][0] = 0.0
                total = needs[0][None, :] + depth[:, None] * needs[1][None, :]
                most[index, embedding, head, int(recompute), 1:] = (total <= usable).sum(axis=1) - 1
        most[..., 0] = most[..., 1]
        return most, np.append(kind.ravel(), 0)

    def sums_s(self, crews: Sequence[Crew]) -> Sums:
        """Seconds to sum the gradients of a block, the embedding and the head around a ring through these crews: over their
        slowest way out of a host."""
        used = sorted({rank for crew in crews for rank in crew})
        if len(crews) < 2:
            return 0.0, 0.0, 0.0
        latency_s, per_byte_s = (float(each[used].max()) for each in self.outward_s)
        sizes = self.fleet.summed_bytes

        def ring_s(size: float) -> float:
            return 2 * (len(crews) - 1) * (latency_s + size / len(crews) * per_byte_s) if size > 0 else 0.0

        return ring_s(float(sizes[1:-1].mean())), ring_s(float(sizes[0])), ring_s(float(sizes[-1]))

    def padded(self, crews: Sequence[Crew]) -> tuple[Indices, Indices]:
        """([N, S] ranks, nobody after the last; [N] stages)."""
        lengths = np.array([len(crew) for crew in crews])
        table = np.full((len(crews), int(lengths.max())), len(self.fleet.devices))
        for length in set(lengths.tolist()):
            rows = np.flatnonzero(lengths == length)
            table[rows[:, None], np.arange(length)] = [crews[row] for row in rows.tolist()]
        return table, lengths

    def covered(self, table: Indices, lengths: Indices, counts: Floats, step_s: float, sum_s: Sums) -> Floats:
        """[N] blocks that find a place when a crew is to do ``counts`` micro-batches by ``step_s``; no more than there are."""
        number, longest = table.shape
        hop = self._hops(table, lengths)
        left = np.cumsum(hop[:, ::-1], axis=1)[:, ::-1]
        # Sums go on from the last item to the first; the last gradient's way through the stages is time for them.
        chain_s = sum_s[0] * self.blocks + sum_s[1] + sum_s[2]
        until_s = np.minimum(step_s, (step_s - chain_s) / np.maximum(1 - self.returning * lengths / counts, 0.1))
        passed, done = np.zeros(number), np.zeros(number)
        for s in range(longest):
            rank, inside, end = table[:, s], lengths > s, np.equal(lengths, s + 1)
            passed = passed + hop[:, s]
            ends_s = np.where(end, self.whole_s[2, rank], 0.0) + self.overhead_s[rank]
            fixed = self.step_fixed_s[rank] + np.where(end, self.ends_step_s[1][rank], 0.0)
            if s == 0:
                ends_s, fixed = ends_s + self.whole_s[1, rank], fixed + self.ends_step_s[0][rank]
            spare = until_s - fixed - passed
            behind = (counts - 1) * (1 - (1 - 1 / counts) ** np.maximum(lengths - 1 - s, 0))
            behind = behind + left[:, s + 1] * counts / np.maximum(spare, 1e-12)
            depth = np.clip(np.minimum(np.ceil(1 + behind - SPARE), counts), 1, DEEPEST).astype(np.int64)
            best, block_s = self._most(rank, end, s == 0, depth, spare - counts * ends_s, counts)
            # Whoever can hold nothing is passed by; at the ends the embedding or the head must have a place.
            needed = inside & (best < 0) & (end | (s == 0))
            done = np.where(needed, -np.inf, done)
            blocks = np.where(inside, np.clip(best, 0.0, np.maximum(self.blocks - done, 0.0)), 0.0)
            done = done + blocks
            passed = passed + np.where(inside, blocks * block_s + ends_s, 0.0)
        return np.maximum(done, -float(self.blocks))

    def _hops(self, table: Indices, lengths: Indices) -> Floats:
        """[N, S + 1] seconds of the messages to each stage and back from it."""
        place, longest = self.place[table], table.shape[1]
        hop = np.zeros((len(table), longest + 1))
        for s in range(1, longest):
            a, b = place[:, s - 1], place[:, s]
            hop[:, s] = np.where(s < lengths, self.way_s[a, b] + self.way_s[b, a], 0.0)
        return hop

    def _most(
        self, rank: Indices, end: NDArray[np.bool_], first: bool, depth: Indices, spare_s: Floats, counts: Floats
    ) -> tuple[Floats, Floats]:
        """([N] most blocks that time and memory allow a stage, seconds of a block), repeating forwards where that allows more."""
        best, best_s = np.full(len(rank), -1.0), np.zeros(len(rank))
        head = end.astype(np.int64)
        for again in (0, 1):
            block_s = self.whole_s[0, rank] + again * self.again_s[rank]
            slots = self.most[self.memory[rank], int(first), head, again, depth]
            time = np.floor(spare_s / np.maximum(counts * block_s + self.block_step_s[rank], 1e-12) + 1e-9)
            fits = np.minimum(time, slots)
            better = fits > best
            best, best_s = np.where(better, fits, best), np.where(better, block_s, best_s)
        return best, best_s

    def counts(self, crews: Sequence[Crew], step_s: float, sum_s: Sums, guess: Floats | None = None) -> Floats:
        """[N] micro-batches that each crew can do by ``step_s``; the fraction says how near it is to one more."""
        table, lengths = self.padded(crews)
        number = len(crews)
        low, high = np.zeros(number), np.full(number, float(self.batch) + 1)
        if guess is not None:
            near = np.clip(np.floor(guess), 1, self.batch)
            for by in (0.0, 2.0, -2.0):
                at = np.clip(near + by, 1, self.batch)
                enough = self.covered(table, lengths, at, step_s, sum_s) >= self.blocks
                low = np.where(enough, np.maximum(low, at), low)
                high = np.where(enough, high, np.minimum(high, at))
        while (high - low > 1).any():
            middle = np.clip(np.floor((low + high) / 2), 1, self.batch)
            enough = self.covered(table, lengths, middle, step_s, sum_s) >= self.blocks
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        more = low + 1
        short = self.blocks - self.covered(table, lengths, more, step_s, sum_s)
        part = np.clip(1 - short * more / self.blocks, 0.0, 0.99)
        return np.where(low >= 1, low, 0.0) + part
