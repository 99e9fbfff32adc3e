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
from dataclasses import dataclass

from hetero_mpi.planning.annealing.costs import Costs
from hetero_mpi.planning.annealing.lines import Line, falling

RAISES, RAISE, CLOSE = 24, 1.4, 0.01
SHORTEST_S, SPARE = 1e-12, 1e-6


@dataclass(frozen=True)
class _Rank:
    """By whether forwards are repeated: seconds of a micro-batch up to every layer (with its part of the optimizer's step), and the
    most micro-batches in flight, negated [first][layers - 1]."""

    seconds: dict[bool, list[float]]
    depths: dict[bool, list[list[float]]]
    overhead_s: float
    fixed_s: float

    @property
    def seconds_of_all(self) -> float:
        return next(iter(self.seconds.values()))[-1]


class Estimate:
    """``costs``: of one micro-batch size."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.layer_count = costs, costs.cluster.layer_count
        self.schedule = costs.cluster.request.schedule
        ranks = range(costs.count)
        self._hop_s = [[costs.hop_s(a, b) for b in ranks] for a in ranks]
        self._known: dict[tuple[int, int], _Rank] = {}
        self._shallow = {
            again: [[[-depth for depth in row] for row in rank] for rank in depths]
            for again, depths in costs.deepest.items()
        }

    def cut(self, line: Line, depth: float) -> tuple[float, Line] | None:
        """The least time by which all layers find a place, and ``line`` with these cuts and depths; ranks for whom nothing is left
        are left out. None: memory does not hold it."""
        count = line.micro_batches
        speed = sum(1 / max(self._rank(rank, count).seconds_of_all, SHORTEST_S) for rank in line.ranks)
        low = high = count / speed
        held: dict[int, tuple[int, int]] = {}
        for _ in range(RAISES):
            placed, held = self.placed(line, high, depth)
            if placed >= self.layer_count:
                break
            low, high = high, RAISE * high
        else:
            return None
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            placed, other = self.placed(line, middle, depth)
            held, low, high = (other, low, middle) if placed >= self.layer_count else (held, middle, high)
        counts, flying = zip(*held.values(), strict=True)
        return high, line._replace(ranks=tuple(held), counts=counts, flying=falling(flying))

    def placed(self, line: Line, step_s: float, depth: float) -> tuple[float, dict[int, tuple[int, int]]]:
        """(how many layers find a place by ``step_s``, rank -> how many it holds and micro-batches in flight).

        ``depth``: so many times as many are in flight as needed at least."""
        # Pipelines are estimated by the ten thousand: local names, and no call that can be spared.
        count, ranks, layers = line.micro_batches, line.ranks, self.layer_count
        first, passed, part, keep, held = 0, 0.0, 0.0, 1 - 1 / count, dict[int, tuple[int, int]]()
        hops = [self._hop_s[a][b] for a, b in itertools.pairwise(ranks)]
        hops.append(0.0)
        left, following = sum(hops), len(ranks)
        for rank, hop_s in zip(ranks, hops, strict=True):
            table = self._known.get((rank, count)) or self._rank(rank, count)
            following -= 1
            pace = (step_s - table.fixed_s - passed) / count
            if pace > 0:
                if self.schedule == "auto":
                    behind = (count - 1) * (1 - keep**following) + left / pace
                    flying = min(count, math.ceil(1 + depth * behind - SPARE))
                else:
                    flying = count if self.schedule == "gpipe" else min(count, 1 + following)
                last, again, until = first, False, pace - table.overhead_s
                for repeated, seconds in table.seconds.items():
                    end = first + bisect_right(table.depths[repeated][first], -flying)
                    if end > last:
                        end = min(end, bisect_right(seconds, seconds[first] + until) - 1)
                        last, again = (end, repeated) if end > last else (last, again)
                if last > first:
                    held[rank] = last - first, flying
                    if last == layers:
                        return float(layers), held
                    own = table.seconds[again]
                    busy = own[last] - own[first]
                    part = min(0.9, max(0.0, (until - busy) / max(own[last + 1] - own[last], SHORTEST_S)))
                    passed += busy + table.overhead_s + hop_s
                    first = last
            left -= hop_s
        return first + part, held

    def _rank(self, rank: int, micro_batches: int) -> _Rank:
        key = rank, micro_batches
        if key not in self._known:
            costs = self.costs
            steps = [costs.step_per_parameter[rank] / micro_batches * trained for trained in costs.trainable]
            whole = [sum(each) for each in zip(costs.forward[rank], costs.backward[rank], steps, strict=True)]
            seconds = {
                again: [a + b for a, b in zip(whole, costs.repeated[rank], strict=True)] if again else whole
                for again in costs.deepest
            }
            depths = {again: depths[rank] for again, depths in self._shallow.items()}
            self._known[key] = _Rank(seconds, depths, sum(costs.overhead[rank]), costs.step_fixed[rank])
        return self._known[key]
