"""Steps of whole plans by the tables of costs: the one clock of a search."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from hetero_mpi.planning.durations import exposed_s
from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.search.pipelines import Fitting, Line
from hetero_mpi.planning.tables import shared_memories, shares_nics
from hetero_mpi.planning.types.profile import ClusterProfile


def is_plain(profile: ClusterProfile) -> bool:
    """Whether pipelines meet in nothing but sums of gradients: not in a NIC, a host's memory, or a tied matrix."""
    return not (profile.model.tied or shares_nics(profile) or shared_memories(profile))


class Clock:
    """Sums between the pipelines of a plan, remembered by who takes part in them. ``costs``: by micro-batch size."""

    def __init__(self, costs: Mapping[int, Costs]) -> None:
        self.costs, self.first = costs, next(iter(costs.values()))
        self._is_summed = [size > 0 for size in self.first.summed_bytes.tolist()]
        self._known: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        self._whole: dict[Line, list[float]] = {}

    def step_s(self, lines: Sequence[Fitting]) -> float:
        """Seconds of a step of these pipelines, which share no rank. See ``is_plain``."""
        ended, coming = max(max(line.spans_s[1]) for line in lines), dict[int, float]()
        if len(lines) > 1 or self.first.members:
            ended = max(ended, self._summed_s(lines, coming))
        return ended + max(seconds for line in lines for seconds in self._steps_s(line, len(lines), coming))

    def _steps_s(self, fitting: Fitting, pipelines: int, coming: Mapping[int, float]) -> list[float]:
        line = fitting.line
        steps = self.costs[line.micro_batch].steps_s(line, fitting.ways, pipelines)
        return [
            own_s + (exposed_s(coming_s, forward_s, layers) if (coming_s := coming.get(rank, 0.0)) else 0.0)
            for own_s, rank, forward_s, layers in zip(
                steps, line.ranks, fitting.times.forward, line.counts, strict=True
            )
        ]

    def _summed_s(self, lines: Sequence[Fitting], coming: dict[int, float]) -> float:
        """When the last gradient is summed: all ranks take part in the sums of their layers from the last one to the first, each as
        soon as the gradient is whole everywhere and all have done their earlier ones.

        ``coming``: is told how long new values of its layers take to every rank."""
        whole = [max(times_s) for times_s in zip(*map(self._whole_s, lines), strict=True)]
        free: dict[int, float] = {}
        cuts = [line.line.cuts for line in lines]
        for first, last in itertools.pairwise(sorted(set(itertools.chain(*cuts)))[::-1]):
            # Between two cuts of any pipelines the same ranks sum one layer after the other.
            ranks = tuple(line.line.ranks[bisect_left(own, first) - 1] for line, own in zip(lines, cuts, strict=True))
            (sums, values), now = self._exchanges_s(ranks), max(free.get(rank, 0.0) for rank in ranks)
            layers = [layer for layer in range(first - 1, last - 1, -1) if self._is_summed[layer]]
            for layer in layers:
                now = max(now, whole[layer]) + sums[layer]
            free.update(dict.fromkeys(ranks if layers else (), now))
            of_all_s = sum(values[last:first])
            for rank in ranks:
                coming[rank] = coming.get(rank, 0.0) + of_all_s
        return max(free.values(), default=0.0)

    def _whole_s(self, fitting: Fitting) -> list[float]:
        line = fitting.line
        if line not in self._whole:
            self._whole[line] = self.costs[line.micro_batch].whole_s(fitting)
        return self._whole[line]

    def _exchanges_s(self, ranks: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds of every layer to sum its gradients, and to bring its new values."""
        if ranks not in self._known:
            sizes = self.first.summed_bytes, self.first.value_bytes
            sums, values = (self.first.exchange_s(ranks, size).tolist() for size in sizes)
            self._known[ranks] = sums, values
        return self._known[ranks]
