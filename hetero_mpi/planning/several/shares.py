"""Who takes how much of the global batch when pipelines are cut alike: the slowest is to be as fast as can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hetero_mpi.planning.durations import exposed_s
from hetero_mpi.planning.several.chains import Chain
from hetero_mpi.planning.several.columns import Columns
from hetero_mpi.planning.simulator import spans_s

HALVINGS = 40

Times = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Of one pipeline: forward and backward by stage, messages out and back by link; seconds per micro-batch."""


class Pipelines:
    """The pipelines of a chain, each with its own ranks' figures."""

    def __init__(self, columns: Columns, chain: Chain) -> None:
        self.columns, self.chain = columns, chain
        self.times = [self._times(p) for p in range(columns.pipelines)]
        self.known: dict[tuple[Times, int], tuple[list[float], list[float]]] = {}

    def _times(self, pipeline: int) -> Times:
        cluster, chain = self.columns.cluster, self.chain
        ranks = [self.columns.members[k][pipeline] for k in chain.picks]
        forward, backward = [], []
        for place, rank in enumerate(ranks):
            held = slice(chain.cuts[place], chain.cuts[place + 1])
            again = float(cluster.repeated_s[rank, held].sum()) if chain.recompute[place] else 0.0
            forward.append(float(cluster.forward_s[rank, held].sum() + cluster.overhead_s[rank, 0]))
            backward.append(float(cluster.backward_s[rank, held].sum() + cluster.overhead_s[rank, 1]) + again)
        out, back = [], []
        for (a, b), cut in zip(itertools.pairwise(cluster.place[ranks].tolist()), chain.cuts[1:], strict=False):
            size = float(cluster.message_bytes[cut - 1])
            out.append(float(cluster.latency_s[a, b] + size * cluster.per_byte_s[a, b]))
            back.append(float(cluster.latency_s[b, a] + size * cluster.per_byte_s[b, a]))
        return tuple(forward), tuple(backward), tuple(out), tuple(back)

    def spans_s(self, pipeline: int, micro_batches: int) -> tuple[list[float], list[float]]:
        """(when each stage begins its last backward, when it has done it); like pipelines are simulated once."""
        key = self.times[pipeline], micro_batches
        if key not in self.known:
            warm_up = [min(depth, micro_batches) for depth in self.chain.warm_up]
            self.known[key] = spans_s(*self.times[pipeline], warm_up, micro_batches)
        return self.known[key]

    def step_s(self, sequences: Sequence[int]) -> float:
        """Seconds of a step with these shares; a short last micro-batch counts as a whole one."""
        columns, chain = self.columns, self.chain
        size = columns.cluster.micro_batch
        spans = [self.spans_s(p, -(-share // size)) for p, share in enumerate(sequences)]
        ends = [max(end for _, ends in spans for end in ends)]
        steps = []
        for place, column in enumerate(chain.picks):
            begun = max(begun[place] for begun, _ in spans)
            end = max(ends[place] for _, ends in spans)
            first, last = chain.cuts[place], chain.cuts[place + 1]
            ends.append(columns.summed_s(column, first, last, begun, end, chain.recompute[place]))
            trained = sum(layer.trainable_parameters for layer in columns.cluster.model.layers[first:last])
            coming_s = float(columns.value_s[column, first:last].sum())
            late_s = exposed_s(coming_s, min(forward[place] for forward, *_ in self.times), last - first)
            step_s = float(columns.step_fixed_s[column] + columns.step_per_parameter_s[column] * trained)
            steps.append(step_s + (late_s if coming_s else 0.0))
        return max(ends) + max(steps)

    def dealt(self) -> list[int]:
        """Shares such that all pipelines end as nearly together as whole micro-batches allow; they add up to the batch."""
        cluster = self.columns.cluster
        batch, size = cluster.request.global_batch, cluster.micro_batch
        total, count = -(-batch // size), len(self.times)
        lines = [self._line(p, max(2, total // count)) for p in range(count)]
        low, high = 0.0, max(fill + slope * total for fill, slope in lines)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(_counts(lines, middle)) >= total else (middle, high)
        counts = _counts(lines, high)
        while sum(counts) > total:
            # What is too much is taken from the pipelines that end last.
            latest = max(
                (p for p in range(count) if counts[p] > 1), key=lambda p: (lines[p][0] + lines[p][1] * counts[p], p)
            )
            counts[latest] -= 1
        shares = [size * n for n in counts]
        short = sum(shares) - batch
        shares[max(range(count), key=lambda p: (lines[p][0] + lines[p][1] * counts[p], p))] -= short
        return shares

    def _line(self, pipeline: int, micro_batches: int) -> tuple[float, float]:
        """(seconds, seconds per micro-batch) of one pipeline, as a line about a number of micro-batches."""
        fewer, more = max(1, micro_batches * 3 // 4), micro_batches * 5 // 4 + 1
        low_s, high_s = max(self.spans_s(pipeline, fewer)[1]), max(self.spans_s(pipeline, more)[1])
        slope = max((high_s - low_s) / (more - fewer), 1e-30)
        return low_s - slope * fewer, slope


def _counts(lines: Sequence[tuple[float, float]], step_s: float) -> list[int]:
    """Micro-batches that each pipeline does by ``step_s``; at least one."""
    return [max(1, math.floor((step_s - fill) / slope + 1e-9)) for fill, slope in lines]
