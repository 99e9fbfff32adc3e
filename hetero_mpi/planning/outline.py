"""Event-free ``simulator`` for the planner's inner loop: the same additions in the same order, so bit-identical times."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.orders.warm_up import computing
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.simulator import SimulatedStep, gradient_sums, simulate
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import Resource, resources, shares_nics

SETTLED_MICRO_BATCHES, PERIOD_MICRO_BATCHES = 24, 12
"""Micro-batches until a full pipeline becomes periodic, and micro-batches over which its period is then measured."""

Spans = tuple[list[float], list[float]]
"""Start and end of each stage's last backward."""


class PipelineTimes(NamedTuple):
    """Arguments of ``spans_s``."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    out: tuple[float, ...]
    back: tuple[float, ...]
    depths: tuple[int, ...]
    micro_batches: int
    weights: tuple[float, ...] | None


_latest: list[tuple[Plan, ClusterProfile, SimulatedStep]] = []
"""Latest result: search, report and screen output all simulate the chosen plan, which may take seconds."""


def outlined(plan: Plan, profile: ClusterProfile) -> SimulatedStep:
    """Simulate ``plan``, without events unless it has partial micro-batches or an order other than ``warm_up``."""
    if not (_latest and _latest[0][0] is plan and _latest[0][1] is profile):
        _latest[:] = [(plan, profile, _simulate_without_events(plan, profile))]
    return _latest[0][2]


def _simulate_without_events(plan: Plan, profile: ClusterProfile) -> SimulatedStep:
    if any(pipeline.sequences % pipeline.micro_batch or pipeline.order != WARM_UP for pipeline in plan.pipelines):
        return simulate(plan, profile)
    costs, clock, busy = Durations(plan, profile), dict[int, float](), dict[int, float]()
    final_s: dict[tuple[int, int], float] = {}
    """(rank, layer) -> time at which the layer's gradients are final on the rank."""
    starts = [*itertools.accumulate((len(pipeline.stages) for pipeline in plan.pipelines[:-1]), initial=0)]
    times = [_times(costs, pipeline, number) for pipeline, number in zip(plan.pipelines, starts, strict=True)]
    if shares_nics(profile):
        spans = queued_spans_s(times, plan.pipelines, costs.profile)
    else:
        spans_by_timing = {timing: spans_s(*timing) for timing in dict.fromkeys(times)}
        spans = [spans_by_timing[timing] for timing in times]
    for number, pipeline, timing, (begins, ends) in zip(starts, plan.pipelines, times, spans, strict=True):
        for index, stage in enumerate(pipeline.stages):
            rank = stage.ranks[0]
            weights_s = timing.weights[index] if timing.weights is not None else 0.0
            clock[rank] = ends[index]
            busy[rank] = pipeline.micro_batches * (timing.forward[index] + timing.backward[index] + weights_s)
            if costs.tied_heads or any(layer in costs.summed for layer in range(stage.first, stage.last)):
                op = Op.W if pipeline.split_backward and index > 0 else Op.B
                last = Action(op, number + index, pipeline.micro_batches - 1)
                for layer, after_s in finished_layers_s(last, plan, costs.profile).items():
                    final_s[rank, layer] = begins[index] + after_s
    for reduced in gradient_sums(costs, final_s):
        for rank in reduced.ranks:
            clock[rank] = max(clock[rank], reduced.end_s)
    all_reduced_s = max(clock.values())
    steps = {stage.ranks[0]: costs.cost_of(Action(Op.STEP, number))[0] for number, stage in enumerate(costs.stages)}
    busy = {rank: seconds + steps[rank] for rank, seconds in busy.items()}
    busy |= {rank: busy[leader] for rank, leader in plan.leader_of.items()}
    step_s = max(all_reduced_s + seconds for seconds in steps.values())
    return SimulatedStep(step_s, (), {rank: busy[rank] for rank in sorted(busy)})


def _times(costs: Durations, pipeline: PipelinePlan, number: int) -> PipelineTimes:
    """Return the arguments of ``spans_s`` for a pipeline whose first stage has the given number."""
    stages = range(number, number + len(pipeline.stages))

    def seconds(op: Op, numbers: Sequence[int]) -> tuple[float, ...]:
        return tuple(costs.cost_of(Action(op, s, 0))[0] for s in numbers)

    split = pipeline.split_backward
    backward = seconds(Op.B, stages[:1]) + seconds(Op.I if split else Op.B, stages[1:])
    weights = (0.0, *seconds(Op.W, stages[1:])) if split else None
    depths = tuple(min(stage.warm_up, pipeline.micro_batches) for stage in pipeline.stages)
    out, back = seconds(Op.SEND_F, stages[:-1]), seconds(Op.SEND_B, stages[1:])
    return PipelineTimes(seconds(Op.F, stages), backward, out, back, depths, pipeline.micro_batches, weights)


def spans_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    out_s: Sequence[float],
    back_s: Sequence[float],
    warm_up: Sequence[int],
    micro_batches: int,
    weight_s: Sequence[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Return the start and end of each stage's last backward in one pipeline, bit-identical to ``simulate``.

    Micro-batches have equal sizes. Times are infinite on a deadlock, which occurs if depth grows from one stage to the next.
    Round m runs forward m of all stages, first to last, then the backwards that it enables, last to first, so that every action
    follows its inputs.

    Args:
        forward_s: Forward seconds of each stage.
        backward_s: Backward seconds of each stage; only of the input part on later stages if ``weight_s`` is given.
        out_s: Seconds of the activation message from stage s to s + 1.
        back_s: Seconds of the gradient message from stage s + 1 to s.
        weight_s: Seconds of each stage's deferred weight gradients (0 on the first); None if backward is not split.
    """
    # The planner spends most of its time here: plain lists, comparisons and local names on purpose.
    count, last = len(forward_s), len(forward_s) - 1
    depths = [min(depth, micro_batches - 1) for depth in warm_up]
    if any(behind > before for before, behind in pairwise(depths)):
        return [math.inf] * count, [math.inf] * count
    clock, begin_s, out_free, back_free = ([0.0] * count for _ in range(4))
    arrived, returned = [0.0] * count, [[0.0] * micro_batches for _ in range(count)]
    for m in range(micro_batches + depths[0]):
        if m < micro_batches:
            for s in range(count):
                now, message = clock[s], arrived[s]
                clock[s] = now = (message if message > now else now) + forward_s[s]
                if s < last:
                    free = out_free[s]
                    arrived[s + 1] = out_free[s] = (now if now > free else free) + out_s[s]
        for s in range(last, -1, -1):
            b = m - depths[s]
            if b < 0:
                break
            if b >= micro_batches:
                continue
            now, message = clock[s], returned[s][b]
            begin_s[s] = now = message if message > now else now
            clock[s] = now = now + backward_s[s]
            if s > 0:
                free = back_free[s]
                returned[s - 1][b] = back_free[s] = (now if now > free else free) + back_s[s - 1]
                if weight_s is not None:
                    lag = depths[0] - depths[s]  # due are the weight gradients ``lag`` behind and, at the end, the rest
                    for _ in range((b >= lag) + (lag if b == micro_batches - 1 else 0)):
                        begin_s[s] = clock[s]
                        clock[s] += weight_s[s]
    return begin_s, clock


def spans_of_many_s(
    times: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]],
    warm_up: Sequence[int],
    micro_batches: int,
) -> tuple[list[float], list[float]]:
    """Like ``spans_s``, but extrapolated from the first micro-batches if there are very many."""
    full = max(warm_up) + SETTLED_MICRO_BATCHES
    if full + PERIOD_MICRO_BATCHES > micro_batches // 2:
        return spans_s(*times, warm_up, micro_batches)
    before, after = (spans_s(*times, warm_up, count) for count in (full, full + PERIOD_MICRO_BATCHES))
    n = (micro_batches - full) / PERIOD_MICRO_BATCHES
    begins, ends = ([a + n * (b - a) for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True))
    return begins, ends


def queued_spans_s(
    times: Sequence[PipelineTimes], pipelines: Sequence[PipelinePlan], profile: ClusterProfile
) -> list[Spans]:
    """Compute ``spans_s`` for pipelines whose messages queue for shared NICs, as ``simulate`` does but without events.

    The queue holds messages that are ready to send as (seconds, rank, sender). Once its message is sent, a sender computes
    until its next message is ready or it blocks.

    Returns:
        The spans of each pipeline, infinite on a deadlock.
    """
    senders = [
        [_Sender(timing, pipeline, stage) for stage in range(len(pipeline.stages))]
        for timing, pipeline in zip(times, pipelines, strict=True)
    ]
    index_of: dict[Resource, int] = {}
    for row in senders:
        for before, behind in pairwise(row):
            before.behind, behind.before = behind, before
            out, back = resources(profile, before.rank, behind.rank), resources(profile, behind.rank, before.rank)
            before.out, behind.back = (
                tuple(index_of.setdefault(each, len(index_of)) for each in used) for used in (out, back)
            )
    free = [0.0] * len(index_of)
    every = itertools.chain.from_iterable(senders)
    queue = [(sender.clock, sender.rank, sender) for sender in every if sender.compute_until_message()]
    heapq.heapify(queue)
    while queue:
        now, _, sender = queue[0]
        forward = sender.program[sender.done - 1] == FORWARD
        occupied, seconds = (sender.out, sender.out_s) if forward else (sender.back, sender.back_s)
        for resource in occupied:
            if (busy_until := free[resource]) > now:
                now = busy_until
        now += seconds
        for resource in occupied:
            free[resource] = now
        receiver = sender.behind if forward else sender.before
        (receiver.arrived if forward else receiver.returned).append(now)
        if sender.compute_until_message():
            heapq.heapreplace(queue, (sender.clock, sender.rank, sender))
        else:
            heapq.heappop(queue)
        if receiver.is_blocked and receiver.compute_until_message():
            heapq.heappush(queue, (receiver.clock, receiver.rank, receiver))
    ended = ([s.clock if s.done == len(s.program) else math.inf for s in row] for row in senders)
    return [([sender.begin_s for sender in row], ends) for row, ends in zip(senders, ended, strict=True)]


FORWARD, BACKWARD, WEIGHTS = range(3)
_KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHTS}


class _Sender:
    """A stage in ``queued_spans_s``: its program, its position in the program and the messages received so far."""

    behind: _Sender
    before: _Sender

    def __init__(self, times: PipelineTimes, pipeline: PipelinePlan, stage: int) -> None:
        self.rank, self.is_first = pipeline.stages[stage].ranks[0], stage == 0
        self.is_last = stage == len(pipeline.stages) - 1
        self.clock = self.begin_s = 0.0
        self.done, self.is_blocked = 0, False
        self.out: tuple[int, ...] = ()
        self.back: tuple[int, ...] = ()
        """Indices of the resources that messages to the next and to the previous stage occupy."""
        self.seconds = times.forward[stage], times.backward[stage], (times.weights or times.forward)[stage]
        self.out_s = 0.0 if self.is_last else times.out[stage]
        self.back_s = 0.0 if self.is_first else times.back[stage - 1]
        self.arrived: list[float] = []
        self.returned: list[float] = []
        self.forwards = self.backwards = 0
        self.program = [_KINDS[name] for name, _ in computing(pipeline, stage)]

    def compute_until_message(self) -> bool:
        """Compute until a message is ready to send; return False if the stage blocks or its program ends first."""
        program, now, (forward_s, backward_s, weights_s) = self.program, self.clock, self.seconds
        for position in range(self.done, len(program)):
            kind = program[position]
            if kind == FORWARD:
                if not self.is_first:
                    if self.forwards == len(self.arrived):
                        break
                    message = self.arrived[self.forwards]
                    now = message if message > now else now
                self.forwards += 1
                now += forward_s
                sends = not self.is_last
            elif kind == BACKWARD:
                if not self.is_last:
                    if self.backwards == len(self.returned):
                        break
                    message = self.returned[self.backwards]
                    now = message if message > now else now
                self.backwards += 1
                self.begin_s = now
                now += backward_s
                sends = not self.is_first
            else:
                self.begin_s = now
                now += weights_s
                sends = False
            if sends:
                self.clock, self.done, self.is_blocked = now, position + 1, False
                return True
        else:
            position = len(program)
        self.clock, self.done, self.is_blocked = now, position, position < len(program)
        return False
