"""Step times of annealed pipelines: as ``outline`` has them but for rounding, without making a plan of them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_mpi.planning.annealing.costs import Costs
from hetero_mpi.planning.annealing.lines import Fitting
from hetero_mpi.planning.outline import add_sum
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
        self._summed = [layer for layer in range(cluster.layer_count) if cluster.summed_bytes[layer] > 0][::-1]
        self._sums: dict[tuple[int, ...], list[float]] = {}

    def step_s(self, lines: Sequence[Fitting]) -> float:
        """Seconds of a step of these pipelines, which share no rank. See ``is_plain``."""
        ended = max(max(line.spans_s[1]) for line in lines)
        if len(lines) > 1:
            ended = max(ended, self._summed_s(lines))
        return ended + max(line.step_s for line in lines)

    def _summed_s(self, lines: Sequence[Fitting]) -> float:
        """When the last gradient is summed: all ranks take part in the sums of their layers from the last one to the first."""
        holders: dict[int, list[tuple[int, float]]] = {}
        for line in lines:
            for layer, rank, whole_s in self.costs[line.line.micro_batch].whole_s(line):
                holders.setdefault(layer, []).append((rank, whole_s))
        free: dict[int, float] = {}
        for layer in self._summed:
            ranks = tuple(rank for rank, _ in holders[layer])
            add_sum(free, ranks, max(whole_s for _, whole_s in holders[layer]), self._sum_s(ranks)[layer])
        return max(free.values(), default=0.0)

    def _sum_s(self, ranks: tuple[int, ...]) -> list[float]:
        """Of every layer."""
        if ranks not in self._sums:
            self._sums[ranks] = self.cluster.all_reduce_s(ranks, self.cluster.summed_bytes).tolist()
        return self._sums[ranks]
