"""Step times of annealed pipelines: as ``outline`` has them but for rounding, without making a plan of them first."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from hetero_mpi.planning.annealing.costs import Costs
from hetero_mpi.planning.annealing.lines import Fitting, Line
from hetero_mpi.planning.several.cluster import ClusterArrays
from hetero_mpi.planning.tables import shared_memories, shares_nics
from hetero_mpi.planning.types.profile import ClusterProfile


def is_plain(profile: ClusterProfile) -> bool:
    """Do pipelines meet in nothing but sums of gradients? Not in a NIC, a host's memory, or a tied matrix."""
    return not (profile.model.tied or shares_nics(profile) or shared_memories(profile))


class Clock:
    """Sums between the pipelines of a plan, remembered by who takes part in them."""

    def __init__(self, costs: Mapping[int, Costs], cluster: ClusterArrays) -> None:
        self.costs, self.cluster = costs, cluster
        self._is_summed = [size > 0 for size in cluster.summed_bytes.tolist()]
        self._sums: dict[tuple[int, ...], list[float]] = {}
        self._whole: dict[Line, list[float]] = {}

    def step_s(self, lines: Sequence[Fitting]) -> float:
        """Seconds of a step of these pipelines, which share no rank. See ``is_plain``."""
        ended = max(max(line.spans_s[1]) for line in lines)
        if len(lines) > 1:
            ended = max(ended, self._summed_s(lines))
        return ended + max(line.step_s for line in lines)

    def _summed_s(self, lines: Sequence[Fitting]) -> float:
        """When the last gradient is summed: all ranks take part in the sums of their layers from the last one to the first, each as
        soon as the gradient is whole everywhere and all have done their earlier ones."""
        whole = list(map(max, *map(self._whole_s, lines)))
        free: dict[int, float] = {}
        cuts = [line.line.cuts for line in lines]
        for first, last in itertools.pairwise(sorted(set(itertools.chain(*cuts)))[::-1]):
            # Between two cuts of any pipelines the same ranks sum one layer after the other.
            ranks = tuple(line.line.ranks[bisect_left(own, first) - 1] for line, own in zip(lines, cuts, strict=True))
            sums, now = self._sum_s(ranks), max(free.get(rank, 0.0) for rank in ranks)
            layers = [layer for layer in range(first - 1, last - 1, -1) if self._is_summed[layer]]
            for layer in layers:
                now = max(now, whole[layer]) + sums[layer]
            free.update(dict.fromkeys(ranks if layers else (), now))
        return max(free.values(), default=0.0)

    def _whole_s(self, fitting: Fitting) -> list[float]:
        line = fitting.line
        if line not in self._whole:
            self._whole[line] = self.costs[line.micro_batch].whole_s(fitting)
        return self._whole[line]

    def _sum_s(self, ranks: tuple[int, ...]) -> list[float]:
        """Of every layer."""
        if ranks not in self._sums:
            self._sums[ranks] = self.cluster.all_reduce_s(ranks, self.cluster.summed_bytes).tolist()
        return self._sums[ranks]
