"""Why ranks wait: every second of a step in which a rank computes nothing is given one cause.

Works on events alone, so measured steps are explained as predicted ones are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.planning.schedule import COMPUTE, COMPUTING, Event, Op
from hetero_mpi.planning.types.plan import Plan


@dataclass(frozen=True)
class Idling:
    """Seconds of a step in which one rank computes nothing, by cause."""

    activations_s: float = 0.0
    """The stage before has not computed the awaited activations yet."""
    gradients_s: float = 0.0
    """The stage behind has not computed the awaited gradients yet."""
    link_s: float = 0.0
    """The awaited message has been computed and is queued or under way, or a send keeps the rank from computing."""
    sums_s: float = 0.0
    """Gradients are being summed with those of other ranks, or brought to the other end of a tied matrix."""
    group_s: float = 0.0
    """It exchanges with the other ranks of its group, or waits for them, while they compute a stage together."""
    end_s: float = 0.0
    """The rank is done with its micro-batches and sums, or with the step, and others are not."""

    @property
    def total_s(self) -> float:
        return self.activations_s + self.gradients_s + self.link_s + self.sums_s + self.group_s + self.end_s


def idling(events: Sequence[Event], plan: Plan) -> dict[int, Idling]:
    """Rank -> its idle seconds by cause, of one step's ``events`` under ``plan``.

    The step lasts from 0 to the last event's end; on each rank computing (F, B, I, W, STEP) and idling add up to it::

        clock     0   1   2   3   4   5   6   7
        rank 0    F   F   g   g   B   B   s   S
        rank 1    a   F   B   F   B   e   s   S      a: activations, g: gradients, s: sums, e: end
    """
    last = max((event.end_s for event in events), default=0.0)
    ready, pipeline_of = _computed(events), {number: index for number, index, _ in plan.numbered}
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    result: dict[int, Idling] = {}
    for rank in sorted(by_rank):
        own = sorted(by_rank[rank], key=lambda event: (event.start_s, event.end_s))
        sums = [(event.start_s, event.end_s) for event in own if event.action.op is Op.REDUCE]
        found, now = Idling(group_s=sum(event.exchanged_s for event in own)), 0.0
        for event in own:
            if event.action.op in COMPUTING:
                if event.start_s > now:
                    found = _with_gap(found, now, event, ready, pipeline_of, sums)
                now = max(now, event.end_s)
        summing = _covered_s(sums, now, last)
        result[rank] = replace(found, sums_s=found.sums_s + summing, end_s=found.end_s + last - now - summing)
    return result


def _with_gap(
    found: Idling,
    now: float,
    event: Event,
    ready: dict[tuple[bool, int, int | None], float],
    pipeline_of: dict[int, int],
    sums: Sequence[tuple[float, float]],
) -> Idling:
    """``found``, and the cause of waiting from ``now`` until ``event`` begins."""
    op, gap = event.action.op, event.start_s - now
    if op is Op.STEP:
        summing = _covered_s(sums, now, event.start_s)
        return replace(found, sums_s=found.sums_s + summing, end_s=found.end_s + gap - summing)
    stage = event.action.stage
    source = stage - 1 if op is Op.F else stage + 1
    awaits = op is not Op.W and pipeline_of.get(source) == pipeline_of[stage]
    computed = ready.get((op is Op.F, source, event.action.micro_batch)) if awaits else None
    # With nothing to wait for, only a send that blocks its rank can have kept it.
    since = now if computed is None else min(max(now, computed), event.start_s)
    found = replace(found, link_s=found.link_s + event.start_s - since)
    if op is Op.F:
        return replace(found, activations_s=found.activations_s + since - now)
    return replace(found, gradients_s=found.gradients_s + since - now)


def _covered_s(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between ``begin`` and ``end`` that lie in some span; spans in order of their starts."""
    covered, now = 0.0, begin
    for start, stop in spans:
        start, stop = max(start, now), min(stop, end)
        if stop > start:
            covered, now = covered + stop - start, stop
    return covered


def _computed(events: Sequence[Event]) -> dict[tuple[bool, int, int | None], float]:
    """(forward?, stage, micro-batch) -> when its result was there: the first end, where a backward has several parts."""
    ready: dict[tuple[bool, int, int | None], float] = {}
    for event in sorted(events, key=lambda event: event.end_s):
        if event.action.op in COMPUTE:
            key = (event.action.op is Op.F, event.action.stage, event.action.micro_batch)
            ready.setdefault(key, event.end_s)
    return ready
