"""Ranks in *columns*: one rank per pipeline, which hold the same layers, so that many pipelines are planned as one.

With P pipelines cut alike, stage k of all of them is a column of P ranks. A column behaves like one device: as slow as its
slowest member, with the least of their memories, linked to another column by the worst of the links within pipelines; and it
sums the gradients of its layers around a ring of its members. Ranks of one host side by side make that ring quick; ranks of one
host one after another make a pipeline's own messages quick.

::

                 pipeline 0   pipeline 1   pipeline 2
    column 0       host A       host A       host A       <- sums stay inside host A
    column 1       host B       host C       host D       <- sums cross the network
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_mpi.planning.several.cluster import ClusterArrays, Floats, Indices

Column = tuple[int, ...]
"""Indices of a cluster's ranks, one per pipeline."""


def in_hosts(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns of like ranks, within a host as far as it has enough of them; what is left over is put together across hosts.

    ``keys``: what likeness goes by, most important last (as for ``numpy.lexsort``), largest first.
    """
    columns: list[Column] = []
    rest: list[int] = []
    for members in _by_host(cluster):
        whole = len(members) // pipelines * pipelines
        columns += [tuple(members[i : i + pipelines]) for i in range(0, whole, pipelines)]
        rest += members[whole:]
    return columns + _chunks(cluster, rest, pipelines, keys)


def of_all(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns of like ranks, wherever they are."""
    return _chunks(cluster, list(range(len(cluster.devices))), pipelines, keys)


def along_hosts(cluster: ClusterArrays, pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """Columns across hosts, such that neighbours of a host stand one after another in a pipeline.

    Ranks alike by all ``keys`` form a group of K columns: in order of hosts, the first K go to pipeline 0, and so on.
    """
    columns: list[Column] = []
    rest: list[int] = []
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank in range(len(cluster.devices)):
        groups.setdefault(tuple(float(key[rank]) for key in keys), []).append(rank)
    for members in groups.values():
        members.sort(key=lambda rank: (int(cluster.host[rank]), rank))
        width = len(members) // pipelines
        columns += [tuple(members[p * width + k] for p in range(pipelines)) for k in range(width)]
        rest += members[width * pipelines :]
    return columns + _chunks(cluster, rest, pipelines, keys)


def _by_host(cluster: ClusterArrays) -> list[list[int]]:
    """Ranks of each host, the fastest first, so that like ones stand together."""
    hosts: list[list[int]] = [[] for _ in range(int(cluster.host.max()) + 1)]
    for rank in np.lexsort((np.arange(len(cluster.host)), -cluster.speed)).tolist():
        hosts[int(cluster.host[rank])].append(rank)
    return hosts


def _chunks(cluster: ClusterArrays, ranks: list[int], pipelines: int, keys: Sequence[Floats]) -> list[Column]:
    """``ranks`` sorted by ``keys`` and cut into columns; the last few, too few for a column, stay out."""
    chosen = np.array(ranks, dtype=np.int64)
    order = chosen[np.lexsort([chosen, cluster.host[chosen], *(-key[chosen] for key in keys)])].tolist()
    return [tuple(order[i : i + pipelines]) for i in range(0, len(order) - pipelines + 1, pipelines)]


class Columns:
    """Tables of the columns of one layout. Shapes: K columns, I layers.

    ``shares``: how much of the global batch each pipeline takes, adding up to 1; a member's times count as much longer as its
    pipeline's share is larger than the mean.
    """

    def __init__(
        self, cluster: ClusterArrays, members: Sequence[Column], shares: Sequence[float] | None = None
    ) -> None:
        self.cluster, self.members = cluster, list(members)
        self.pipelines = len(members[0])
        self.table: Indices = np.array(self.members)
        weights = np.ones(self.pipelines) if shares is None else np.array(shares) * self.pipelines
        self.shares = weights / self.pipelines

        def slowest(seconds: Floats) -> Floats:
            return np.asarray((seconds[self.table] * weights[None, :, None]).max(axis=1))

        self.forward_s = slowest(cluster.forward_s)
        self.backward_s = slowest(cluster.backward_s)
        self.repeated_s = slowest(cluster.repeated_s)
        self.overhead_s = slowest(cluster.overhead_s)
        self.usable: Floats = cluster.usable[self.table].min(axis=1)
        self.relief: Floats = cluster.usable[self.table].mean(axis=1) - self.usable
        self.ratio: Floats = cluster.ratio[self.table].max(axis=1)
        self.step_fixed_s: Floats = cluster.step_fixed_s[self.table].max(axis=1)
        self.step_per_parameter_s: Floats = cluster.step_per_parameter_s[self.table].max(axis=1) / self.pipelines
        self.sum_s, self.value_s = self._exchanges(cluster.summed_bytes), self._exchanges(cluster.value_bytes)
        places = cluster.place[self.table]
        count = len(self.members)
        self.latency_s: Floats = np.zeros((count, count))
        self.per_byte_s: Floats = np.zeros((count, count))
        for p in range(self.pipelines):
            pair = np.ix_(places[:, p], places[:, p])
            np.maximum(self.latency_s, cluster.latency_s[pair] * weights[p], out=self.latency_s)
            np.maximum(self.per_byte_s, cluster.per_byte_s[pair] * weights[p], out=self.per_byte_s)

    def _exchanges(self, bytes_of_layers: Floats) -> Floats:
        """Seconds [K, I] to sum the gradients, or bring the new values, of one layer over one column."""
        sizes, which = np.unique(bytes_of_layers, return_inverse=True)
        return np.array([self.cluster.exchange_s(members, sizes)[which] for members in self.members])

    def summed_s(self, column: int, first: int, last: int, begun_s: float, end_s: float, recompute: bool) -> float:
        """When a column has summed its layers [first, last), each as soon as it is whole, the last of them first.

        ``begun_s``, ``end_s``: of its last backward.
        """
        sums = self.sum_s[column, first:last]
        if not sums.any():
            return end_s
        seconds = self.backward_s[column, first:last]
        if recompute:
            seconds = seconds + self.repeated_s[column, first:last]
        free, whole = 0.0, begun_s
        for own, summing in zip(reversed(seconds.tolist()), reversed(sums.tolist()), strict=True):
            whole += own
            free = max(free, whole) + summing
        return max(free, end_s)
