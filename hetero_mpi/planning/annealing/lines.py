"""Pipelines as they are annealed, and what bounds their time: quick to change and quick to drop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_mpi.planning.cycles import cycle_bound_s
from hetero_mpi.planning.pacing import paced_each, period_s
from hetero_mpi.planning.several.fleet import Fleet
from hetero_mpi.planning.simulator import spans_s
from hetero_mpi.planning.tables import may_split, stage_bytes
from hetero_mpi.planning.types.plan import PipelinePlan, StagePlan

ANY_DEPTH = 10**9
ROUNDING = 1e-9


@dataclass(frozen=True)
class Line:
    """One pipeline: of every stage the rank (as the fleet counts them), how many items it holds, and the most micro-batches in
    flight, which do not grow along the line."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    flying: tuple[int, ...]
    micro_batch: int
    sequences: int
    split: bool = False
    """Backward in two parts, where there is more than one stage."""

    @property
    def is_split(self) -> bool:
        return self.split and len(self.ranks) > 1

    @property
    def micro_batches(self) -> int:
        return self.sequences // self.micro_batch

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.counts))


@dataclass(frozen=True)
class LineTimes:
    """Of every stage, and of the messages behind it; seconds per micro-batch."""

    forward: list[float]
    backward: list[float]
    out: list[float]
    back: list[float]


@dataclass(frozen=True)
class Fitting:
    """A line that memory holds."""

    line: Line
    recompute: tuple[bool, ...]
    times: LineTimes
    step_s: float
    """The longest STEP."""
    bound_s: float
    """Its step takes no less."""

    @cached_property
    def spans_s(self) -> tuple[list[float], list[float]]:
        """When each stage begins its last backward, when it has done it."""
        times, warm_up = self.times, [depth - 1 for depth in self.line.flying]
        return spans_s(times.forward, times.backward, times.out, times.back, warm_up, self.line.micro_batches)

    def pipeline(self, ranks: Sequence[int]) -> PipelinePlan:
        """``ranks``: the job's, by the fleet's."""
        line, cuts = self.line, self.line.cuts
        stages = tuple(
            StagePlan((ranks[rank],), cuts[i], cuts[i + 1], line.flying[i] - 1, self.recompute[i])
            for i, rank in enumerate(line.ranks)
        )
        return PipelinePlan(stages, line.micro_batch, line.sequences, line.is_split)


class Costs:
    """What stages cost at one micro-batch size. Tables of plain lists: single figures are asked for, millions of them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.count = fleet, len(fleet.devices)
        self.host: list[int] = fleet.host.tolist()
        self.splits = [may_split(fleet.profile, device.rank) for device in fleet.devices]
        self._forward, self._backward, self._repeated = (
            [[0.0, *itertools.accumulate(row)] for row in table.tolist()]
            for table in (fleet.forward_s, fleet.backward_s, fleet.repeated_s)
        )
        self._overhead: list[tuple[float, float]] = fleet.overhead_s.tolist()
        place = fleet.place
        self._latency: list[list[float]] = fleet.latency_s[place][:, place].tolist()
        self._per_byte: list[list[float]] = fleet.per_byte_s[place][:, place].tolist()
        self._message: list[float] = fleet.message_bytes.tolist()
        self._usable: list[float] = fleet.usable.tolist()
        self._step_fixed: list[float] = fleet.step_fixed_s.tolist()
        self._step_per_parameter: list[float] = fleet.step_per_parameter_s.tolist()
        trainable = itertools.accumulate(float(layer.trainable_parameters) for layer in fleet.model.layers)
        self._trainable = [0.0, *trainable]
        self._ratio: list[float] = fleet.ratio.tolist()
        self._bytes = {
            recompute: {
                ratio: [table.tolist() for table in stage_bytes(fleet.model.keeping(ratio), fleet.tokens, recompute)]
                for ratio in set(self._ratio)
            }
            for recompute in sorted(set(fleet.request.recompute_choices))
        }

    def fitted(self, line: Line) -> Fitting | None:
        """``line``, no deeper than memory allows, forwards repeated where it asks for that; None: it does not fit."""
        flying, recompute = [], []
        most = line.micro_batches
        for place, rank in enumerate(line.ranks):
            most = min(most, line.flying[place])
            deepest, repeated = 0, False
            for again in self._bytes:
                depth = self._deepest(rank, line.cuts[place], line.cuts[place + 1], again)
                if depth > deepest:
                    deepest, repeated = depth, again
                if deepest >= most:
                    break
            most = min(most, deepest)
            if most < 1:
                return None
            flying.append(most)
            recompute.append(repeated)
        line = replace(line, flying=tuple(flying))
        times = self._times(line, recompute)
        warm_up = [depth - 1 for depth in flying]
        bound_s = 0.0
        if not line.is_split:
            seconds = times.forward, times.backward, times.out, times.back
            bound_s = cycle_bound_s(*seconds, warm_up, line.micro_batches)
        step_s = self._step_s(line)
        return Fitting(line, tuple(recompute), times, step_s, (bound_s + step_s) * (1 - ROUNDING))

    def paced(self, line: Line, allowance: float) -> Line:
        """``line`` so deep that gradients are back in time at the pace of its slowest stage or link, ``allowance`` periods
        earlier than they have to be."""
        times = self._times(line, [False] * len(line.ranks))
        compute = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
        hops = [out + back for out, back in zip(times.out, times.back, strict=True)]
        warm_up = paced_each(compute, hops, period_s(compute, hops), allowance)
        return replace(line, flying=tuple(min(line.micro_batches, depth + 1) for depth in warm_up))

    def _times(self, line: Line, recompute: Sequence[bool]) -> LineTimes:
        times = LineTimes([], [], [], [])
        for place, rank in enumerate(line.ranks):
            first, last = line.cuts[place], line.cuts[place + 1]
            again = self._repeated[rank][last] - self._repeated[rank][first] if recompute[place] else 0.0
            forward, backward = self._forward[rank], self._backward[rank]
            times.forward.append(forward[last] - forward[first] + self._overhead[rank][0])
            times.backward.append(backward[last] - backward[first] + self._overhead[rank][1] + again)
        for (a, b), cut in zip(itertools.pairwise(line.ranks), line.cuts[1:], strict=False):
            size = self._message[cut - 1]
            times.out.append(self._latency[a][b] + size * self._per_byte[a][b])
            times.back.append(self._latency[b][a] + size * self._per_byte[b][a])
        return times

    def whole_s(self, fitting: Fitting) -> Iterator[tuple[int, int, float]]:
        """(item, rank, when the item's gradients are whole there), of every stage from its last item to its first."""
        line, begun = fitting.line, fitting.spans_s[0]
        for place, rank in enumerate(line.ranks):
            first, last = line.cuts[place], line.cuts[place + 1]
            backward, repeated = self._backward[rank], self._repeated[rank]
            for item in range(last - 1, first - 1, -1):
                again = repeated[last] - repeated[item] if fitting.recompute[place] else 0.0
                yield item, rank, begun[place] + self._overhead[rank][1] + again + backward[last] - backward[item]

    def _step_s(self, line: Line) -> float:
        """The longest STEP; of a tied model, whose ends count their matrix otherwise, nothing."""
        if self.fleet.model.tied:
            return 0.0
        longest_s = 0.0
        for place, rank in enumerate(line.ranks):
            trainable = self._trainable[line.cuts[place + 1]] - self._trainable[line.cuts[place]]
            longest_s = max(longest_s, self._step_fixed[rank] + self._step_per_parameter[rank] * trainable)
        return longest_s

    def _deepest(self, rank: int, first: int, last: int, recompute: bool) -> int:
        """Most micro-batches in flight that fit."""
        fixed, each = self._bytes[recompute][self._ratio[rank]]
        room = self._usable[rank] - fixed[first][last]
        if room < each[first][last]:
            return 0
        return math.floor(room / each[first][last]) if each[first][last] > 0 else ANY_DEPTH
