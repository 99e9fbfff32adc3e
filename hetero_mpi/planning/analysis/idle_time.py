"""Idle time of predicted or measured steps: attribute each idle second of a rank to a cause."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from hetero_mpi.planning.schedule import COMPUTING, Action, Event, Op
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.util.grouping import grouped


@dataclass(frozen=True)
class Idling:
    """Seconds per step in which a rank computes nothing, by cause."""

    activations_s: float = 0.0
    """Waiting for the previous stage to compute activations."""
    gradients_s: float = 0.0
    """Waiting for the next stage to compute gradients."""
    link_s: float = 0.0
    """Waiting for a message that is queued or in transit, or for a blocking send."""
    sums_s: float = 0.0
    """Gradient all-reduce or exchange of a tied matrix, not overlapped with compute."""
    group_s: float = 0.0
    """Exchange within a tensor-parallel group."""
    end_s: float = 0.0
    """Waiting for other ranks after finishing its own micro-batches."""

    @property
    def total_s(self) -> float:
        return self.activations_s + self.gradients_s + self.link_s + self.sums_s + self.group_s + self.end_s


def idling(events: Sequence[Event], plan: Plan) -> dict[int, Idling]:
    """Attribute each rank's idle time in one step to causes.

    The step lasts from 0 to the end of the last event; computing (F, B, I, W, STEP) and idling add up to its length::

        clock     0   1   2   3   4   5   6   7
        rank 0    F   F   g   g   B   B   s   S
        rank 1    a   F   B   F   B   e   s   S      a: activations, g: gradients, s: all-reduce, e: end
    """
    last = max((event.end_s for event in events), default=0.0)
    pipeline_of = {number: index for number, index, _ in plan.numbered}
    # Of the same action on several ranks, the one that ends first.
    ends = {event.action: event.end_s for event in sorted(events, key=lambda event: event.end_s, reverse=True)}
    ordered = sorted(events, key=lambda event: (event.rank, event.start_s, event.end_s))
    result: dict[int, Idling] = {}
    for rank, rank_events in grouped(ordered, lambda event: event.rank).items():
        sums = [(event.start_s, event.end_s) for event in rank_events if event.action.op is Op.REDUCE]
        parts, now = [{"group_s": sum(event.exchanged_s for event in rank_events)}], 0.0
        for event in rank_events:
            if event.action.op in COMPUTING:
                if event.action.op is Op.STEP:
                    parts.append(_done(sums, now, event.start_s))
                elif event.start_s > now:
                    parts.append(_awaited(now, event, ends, pipeline_of))
                now = max(now, event.end_s)
        parts.append(_done(sums, now, last))
        causes = {cause.name: sum(part.get(cause.name, 0.0) for part in parts) for cause in fields(Idling)}
        result[rank] = Idling(**causes)
    return result


def _done(sums: Iterable[tuple[float, float]], now: float, until: float) -> dict[str, float]:
    """Causes of the wait from ``now`` to ``until`` on a rank that has finished its micro-batches."""
    waiting, summing = max(0.0, until - now), 0.0
    for start, stop in sums:  # sorted by start
        start, stop = max(start, now), min(stop, until)
        if stop > start:
            summing, now = summing + stop - start, stop
    return {"sums_s": summing, "end_s": waiting - summing}


def _awaited(now: float, event: Event, ends: dict[Action, float], pipeline_of: dict[int, int]) -> dict[str, float]:
    """Causes of the wait from ``now`` until ``event`` starts; ``ends``: when each action ended."""
    op, stage, micro_batch, _ = event.action
    source, passes = (stage - 1, (Op.F,)) if op is Op.F else (stage + 1, (Op.I, Op.B))
    awaits = op is not Op.W and pipeline_of.get(source) == pipeline_of[stage]
    awaited = [Action(each, source, micro_batch) for each in passes] if awaits else []
    computed = next((ends[action] for action in awaited if action in ends), None)
    # Without an awaited message, only a blocking send can have delayed the rank.
    since = now if computed is None else min(max(now, computed), event.start_s)
    return {"link_s": event.start_s - since, "activations_s" if op is Op.F else "gradients_s": since - now}
