"""How many layers find a place in a pipeline of given ranks in a given order by a given time: far quicker than a simulation.

Stages are filled from the first on, each with as many layers as the time T left to it and its memory allow (c: seconds of forward
and backward of one micro-batch, A: forwards, backwards and messages of one micro-batch through all stages before):

    A + M c + optimizer <= T                          (a bound that good depths come near to)

with as many micro-batches in flight as the stages behind take until the gradient is back, if each of them is as long as it may be.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right

from hetero_mpi.planning.annealing.costs import Costs
from hetero_mpi.planning.annealing.lines import Line, falling

RAISES, RAISE, CLOSE = 24, 1.4, 0.01
SHORTEST_S, SPARE = 1e-12, 1e-6


_Way = tuple[list[float], list[list[int]]]
"""Of a rank that repeats its forwards or does not: seconds of a micro-batch up to every layer (with its part of the optimizer's
step), and the most micro-batches in flight, negated [first][layers - 1]."""
_Rank = tuple[list[_Way], float, float]
"""Both ways, where there is a choice; seconds that a micro-batch costs besides, and the optimizer's step."""
_Cut = tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Seconds; of every stage the rank, layers and micro-batches in flight."""


class Estimate:
    """``costs``: of one micro-batch size."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.layer_count = costs, costs.cluster.layer_count
        self.schedule = costs.cluster.request.schedule
        ranks = range(costs.count)
        self._hop_s = [[costs.hop_s(a, b) for b in ranks] for a in ranks]
        self._known: dict[int, tuple[list[_Rank | None], list[float]]] = {}
        """By micro-batches: of every rank what it takes; of as many stages behind one, the periods that filling them takes."""
        self._cuts: dict[tuple[tuple[int, ...], int, float], _Cut | None] = {}
        """By ranks, sequences and depth: few ranks are looked at in the same order again and again."""
        self._shallow = {
            again: [[[-depth for depth in row] for row in rank] for rank in depths]
            for again, depths in costs.deepest.items()
        }

    def cut(self, line: Line, depth: float) -> tuple[float, Line] | None:
        """The least time by which all layers find a place, and ``line`` with these cuts and depths; ranks for whom nothing is left
        are left out. None: memory does not hold it."""
        key = line.ranks, line.sequences, depth
        if key not in self._cuts:
            self._cuts[key] = self._cut(line, depth)
        found = self._cuts[key]
        if found is None:
            return None
        seconds, ranks, counts, flying = found
        return seconds, line._replace(ranks=ranks, counts=counts, flying=flying)

    def _cut(self, line: Line, depth: float) -> _Cut | None:
        count = line.micro_batches
        speed = sum(1 / max(self._rank(rank, count)[0][0][0][-1], SHORTEST_S) for rank in line.ranks)
        low = count / speed
        for _ in range(RAISES):
            high = RAISE * low
            placed, held = self.placed(line, high, depth)
            if placed >= self.layer_count:
                break
            low = high
        else:
            return None
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            placed, other = self.placed(line, middle, depth)
            held, low, high = (other, low, middle) if placed >= self.layer_count else (held, middle, high)
        counts, flying = zip(*held.values(), strict=True)
        return high, tuple(held), counts, falling(flying)

    def placed(self, line: Line, step_s: float, depth: float) -> tuple[float, dict[int, tuple[int, int]]]:
        """(how many layers find a place by ``step_s``, rank -> how many it holds and micro-batches in flight).

        ``depth``: so many times as many are in flight as needed at least."""
        # Pipelines are estimated by the ten thousand: local names, and no call that can be spared.
        count, ranks, layers, automatic = line.micro_batches, line.ranks, self.layer_count, self.schedule == "auto"
        tables, fillings = self._of(count)
        first, passed, held = 0, 0.0, dict[int, tuple[int, int]]()
        spare_s, next_s = 0.0, 1.0
        hops = [self._hop_s[a][b] for a, b in itertools.pairwise(ranks)]
        hops.append(0.0)
        left, following = sum(hops), len(ranks)
        for rank, hop_s in zip(ranks, hops, strict=True):
            ways, overhead_s, fixed_s = tables[rank] or self._rank(rank, count)
            following -= 1
            pace = (step_s - fixed_s - passed) / count
            if pace > 0:
                if automatic:
                    flying = math.ceil(1 + depth * (fillings[following] + left / pace) - SPARE)
                    if flying > count:
                        flying = count
                else:
                    flying = count if self.schedule == "gpipe" else min(count, 1 + following)
                last, until_s, own = first, pace - overhead_s, ways[0][0]
                for seconds, depths in ways:
                    room = first + bisect_right(depths[first], -flying)
                    if room > last:
                        end = bisect_right(seconds, seconds[first] + until_s, first, room + 1) - 1
                        if end > last:
                            last, own = end, seconds
                        if end < room:
                            break  # it is not memory that asks for repeated forwards
                if last > first:
                    held[rank] = last - first, flying
                    if last == layers:
                        return float(layers), held
                    busy_s = own[last] - own[first]
                    spare_s, next_s = until_s - busy_s, own[last + 1] - own[last]
                    passed += busy_s + overhead_s + hop_s
                    first = last
            left -= hop_s
        return first + min(0.9, max(0.0, spare_s / max(next_s, SHORTEST_S))), held

    def _of(self, micro_batches: int) -> tuple[list[_Rank | None], list[float]]:
        """See ``_known``; ranks are worked out when they are asked for."""
        if micro_batches not in self._known:
            count, keep = self.costs.count, 1 - 1 / micro_batches
            fillings = [(micro_batches - 1) * (1 - keep**following) for following in range(count)]
            self._known[micro_batches] = [None] * count, fillings
        return self._known[micro_batches]

    def _rank(self, rank: int, micro_batches: int) -> _Rank:
        costs, (known, _) = self.costs, self._of(micro_batches)
        found = known[rank]
        if found is None:
            steps = [costs.step_per_parameter[rank] / micro_batches * trained for trained in costs.trainable]
            whole = [sum(each) for each in zip(costs.forward[rank], costs.backward[rank], steps, strict=True)]
            again = [a + b for a, b in zip(whole, costs.repeated[rank], strict=True)]
            ways = [(again if repeated else whole, depths[rank]) for repeated, depths in self._shallow.items()]
            known[rank] = found = ways, sum(costs.overhead[rank]), costs.step_fixed[rank]
        return found
