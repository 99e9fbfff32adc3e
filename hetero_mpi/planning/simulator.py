"""Predicts a step: a discrete-event simulation of exactly the action lists that the executor runs.

Resources: every rank computes one action at a time; every directed link carries one message at a time, in the order in
which they were sent. Sends do not block their rank: a communication thread moves them. Where the profile says that a host's
ranks share a NIC, their messages to other hosts queue for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.schedule import WHOLE_STEP, Action, Event, Op, Schedule, busy, held_by, schedule_of
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import Resource, resources, shares_nics

SETTLED, PERIODS = 24, 12
"""Micro-batches after which a full pipeline does the same again and again, and those that are looked at then."""


@dataclass(frozen=True)
class SimulatedStep:
    """A predicted step."""

    step_s: float
    events: tuple[Event, ...]
    """In order of start, then rank. A send's event spans its time on the link."""
    busy_s: dict[int, float]
    """Rank -> seconds of forward, backward and optimizer, in a group with its exchanges; the rest of the step it waits."""

    @property
    def use(self) -> dict[int, float]:
        """Rank -> share of the step in which it computes, without exchanges in a group."""
        own_s = busy(self.events) or self.busy_s
        return {rank: seconds / self.step_s if self.step_s > 0 else 0.0 for rank, seconds in own_s.items()}


@dataclass
class _State:
    """The simulated cluster: when each rank, link and NIC is free, when each message arrives."""

    lists: Schedule
    costs: Durations
    clock: dict[int, float]
    free: dict[Resource, float] = field(default_factory=dict)
    occupied: dict[tuple[int, int], tuple[Resource, ...]] = field(default_factory=dict)
    """(source, destination) -> what their messages occupy."""
    arrival: dict[Action, float] = field(default_factory=dict)
    last_backward: dict[int, tuple[Action, float]] = field(default_factory=dict)
    """Stage -> its latest B or W, and when that began."""
    events: list[Event] = field(default_factory=list)


def simulate(plan: Plan, profile: ClusterProfile, schedule: Schedule | None = None) -> SimulatedStep:
    """One step of ``plan``; ``schedule`` is what ``schedule_of`` gives by default. Deterministic.

    Raises ``UserError`` when the schedule deadlocks or does not run the plan.
    """
    everybody = schedule if schedule is not None else schedule_of(plan, profile.model)
    if schedule is not None:
        validate(everybody, plan, profile.model)
    lists = {rank: actions for rank, actions in everybody.items() if rank not in plan.leader_of}
    state = _State(lists, Durations(plan, profile), dict.fromkeys(sorted(lists), 0.0))
    if not _micro_batches(state):
        validate(everybody, plan, profile.model)  # says where they are stuck
    _all_reduces(state)
    _steps(state)
    _follow(plan, state)
    return _summary(state)


def _micro_batches(state: _State) -> bool:
    """All but the end of the step; False on a deadlock. Always the action that can begin first (then the lower rank's):
    senders that share a NIC queue as they come."""
    position = dict.fromkeys(state.clock, 0)
    stopped: dict[Action, int] = {}
    """message -> the rank that cannot go on without it"""
    ready = [(seconds, rank) for rank, seconds in state.clock.items()]
    while ready:
        _, rank = heapq.heappop(ready)
        action = state.lists[rank][position[rank]]
        message = awaited(action)
        if action.op in WHOLE_STEP:
            continue
        if message is not None and message not in state.arrival:
            stopped[message] = rank
            continue
        _perform(rank, action, message, state)
        position[rank] += 1
        heapq.heappush(ready, (state.clock[rank], rank))
        if action in stopped:
            woken = stopped.pop(action)
            heapq.heappush(ready, (state.clock[woken], woken))
    return not stopped


def _perform(rank: int, action: Action, message: Action | None, state: _State) -> None:
    """One action of a micro-batch, and the ``message`` that it receives, which has been sent."""
    costs = state.costs
    seconds, size = costs.of(action)
    start = state.clock[rank]
    if message is not None:
        state.clock[rank] = end = max(start, state.arrival[message])
    elif action.op in (Op.SEND_F, Op.SEND_B):
        peer = costs.stages[action.stage + (1 if action.op is Op.SEND_F else -1)].ranks[0]
        if (rank, peer) not in state.occupied:
            state.occupied[rank, peer] = resources(costs.profile, rank, peer)
        occupied = state.occupied[rank, peer]
        start = max([start, *(state.free.get(resource, 0.0) for resource in occupied)])
        end = start + seconds
        state.free.update(dict.fromkeys(occupied, end))
        state.arrival[action] = end
    else:
        state.clock[rank] = end = start + seconds
        if action.op in (Op.B, Op.W):
            state.last_backward[action.stage] = action, start
    state.events.append(Event(rank, 0, action, start, end, size))


def _all_reduces(state: _State) -> None:
    """Gradient all-reduces, each as soon as all its ranks have theirs whole, while the others' last backward may still run.

    A rank takes part in one all-reduce at a time, in the order of its list. They queue for shared NICs among themselves; the few
    messages that still pass beside them are left out of account.

    Before them each head's share of a tied matrix's gradient goes to the embedding's rank as soon as it is whole; there, that of
    layer 0 is whole when it has come.
    """
    costs = state.costs
    if not costs.summed:
        return
    whole, taken = _whole_s(state), dict[Resource, float]()

    def passed(actions: dict[int, Action], ready_s: float, nics: set[Resource]) -> float:
        """When what these ranks do together has ended."""
        start = end = max([ready_s, *(taken.get(nic, 0.0) for nic in nics)])
        for rank, action in actions.items():
            seconds, size = costs.of(action)
            end = start + seconds
            state.events.append(Event(rank, 0, action, start, end, size))
            state.clock[rank] = max(state.clock[rank], end)
        taken.update(dict.fromkeys(nics, end))
        return end

    for number, first in costs.tied_heads.items():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        nics = _nics(costs.profile, [(head, embedding)])
        end = passed({head: Action(Op.REDUCE, number, layer=0)}, whole[head, costs.plan.layers - 1], nics)
        whole[embedding, 0] = max(whole[embedding, 0], end)
    # The heads of a tied matrix have brought their shares: they do not hold it.
    left = {layer: held_by(costs.plan, layer) for layer in costs.summed}
    waiting = {
        rank: [a for a in reversed(actions) if a.op is Op.REDUCE and (a.layer != 0 or a.stage not in costs.tied_heads)]
        for rank, actions in state.lists.items()
    }
    free = dict.fromkeys(state.clock, 0.0)
    while left:
        # The dry run has shown that some sum is the next one of all its ranks. Of these the first, then the last layer.
        nexts = {rank: actions[-1].layer for rank, actions in waiting.items() if actions}
        possible = (layer for layer, ranks in left.items() if all(nexts.get(rank) == layer for rank in ranks))
        ready_s, last = min(
            (max(max(whole[rank, layer], free[rank]) for rank in left[layer]), -layer) for layer in possible
        )
        ranks = left.pop(-last)
        nics = _nics(costs.profile, zip(ranks, (*ranks[1:], ranks[0]), strict=True))
        free |= dict.fromkeys(ranks, passed({rank: waiting[rank].pop() for rank in ranks}, ready_s, nics))


def _whole_s(state: _State) -> dict[tuple[int, int], float]:
    """(rank, layer) -> when the layer's gradients are whole there: nothing is added to them any more."""
    costs, whole = state.costs, {}
    for action, start in state.last_backward.values():
        rank = costs.stages[action.stage].ranks[0]
        for layer, after_s in finished_layers_s(action, costs.plan, costs.profile).items():
            whole[rank, layer] = start + after_s
    return whole


def _nics(profile: ClusterProfile, hops: Iterable[tuple[int, int]]) -> set[Resource]:
    """The shared NICs that messages from rank to rank pass through."""
    passed = {resource for a, b in hops if a != b for resource in resources(profile, a, b)}
    return {resource for resource in passed if resource[0] != "link"}


def _steps(state: _State) -> None:
    """When every rank is there (the clip norm is global), every rank's STEP."""
    together = max(state.clock.values())
    for rank in state.clock:
        action = state.lists[rank][-1]
        state.clock[rank] = together + state.costs.of(action)[0]
        state.events.append(Event(rank, 0, action, together, state.clock[rank]))


def _follow(plan: Plan, state: _State) -> None:
    """The other ranks of a group wait and compute while their leader does; no message is theirs."""
    for rank, leader in plan.leader_of.items():
        own = [event for event in state.events if event.rank == leader]
        alike = [event for event in own if event.action.op not in (Op.SEND_F, Op.SEND_B)]
        state.events += [replace(event, rank=rank, bytes=0) for event in alike]
        state.clock[rank] = state.clock[leader]


def _summary(state: _State) -> SimulatedStep:
    step_s, computed_s = max(state.clock.values()), busy(state.events)
    if state.costs.plan.leader_of:
        exchanged_s = state.costs.exchanged_s
        state.events = [replace(one, exchanged_s=exchanged_s(one.action, one.rank)) for one in state.events]
    # Stable: events that start together on one rank stay in the order of its list.
    ordered = sorted(state.events, key=lambda event: (event.start_s, event.rank))
    return SimulatedStep(step_s, tuple(ordered), {rank: computed_s.get(rank, 0.0) for rank in state.clock})


def spans_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    out_s: Sequence[float],
    back_s: Sequence[float],
    warm_up: Sequence[int],
    micro_batches: int,
    weight_s: Sequence[float] | None = None,
) -> tuple[list[float], list[float]]:
    """(when each stage of one pipeline begins its last backward, when it has done it): ``simulate`` without events, for the
    planner's inner loop.

    ``forward_s[s]``, ``backward_s[s]``: of stage s; ``out_s[s]``, ``back_s[s]``: of a message between stages s and s +
    1. ``weight_s``: of the weight gradients where backward is split (``backward_s`` is then the input part, but on the
    first stage, whose entry is 0, the whole). The same additions in the same order as ``simulate``, so the same result to
    the last bit. Infinite on a deadlock: where depth grows from one stage to the next. Micro-batches are all alike.

    Round m is forward m of all stages, first to last, then the backwards that these allow, last to first: whatever an
    action awaits has come before it.
    """
    # The planner spends most of its time here: plain lists, comparisons and local names on purpose.
    count, last = len(forward_s), len(forward_s) - 1
    depths = [min(depth, micro_batches - 1) for depth in warm_up]
    if any(behind > before for before, behind in pairwise(depths)):
        return [math.inf] * count, [math.inf] * count
    clock, begun, out_free, back_free = ([0.0] * count for _ in range(4))
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
            begun[s] = now = message if message > now else now
            clock[s] = now = now + backward_s[s]
            if s > 0:
                free = back_free[s]
                returned[s - 1][b] = back_free[s] = (now if now > free else free) + back_s[s - 1]
                if weight_s is not None:
                    _put_off(s, b, depths[0] - depths[s], micro_batches, weight_s[s], clock, begun)
    return begun, clock


def spans_of_many_s(
    times: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]],
    warm_up: Sequence[int],
    micro_batches: int,
) -> tuple[list[float], list[float]]:
    """``spans_s``; of very many micro-batches the first ones are simulated and the rest go on as these end."""
    full = max(warm_up) + SETTLED
    if full + PERIODS > micro_batches // 2:
        return spans_s(*times, warm_up, micro_batches)
    before, after = (spans_s(*times, warm_up, count) for count in (full, full + PERIODS))
    more = (micro_batches - full) / PERIODS
    begun, ends = ([a + more * (b - a) for a, b in zip(*both, strict=True)] for both in zip(before, after, strict=True))
    return begun, ends


def _put_off(
    s: int, b: int, lag: int, micro_batches: int, weight_s: float, clock: list[float], begun: list[float]
) -> None:
    """The weight gradients that stage ``s`` works out after backward ``b``: those of ``lag`` micro-batches before, after the last
    one all that are left."""
    for _ in range((b >= lag) + (lag if b == micro_batches - 1 else 0)):
        begun[s] = clock[s]
        clock[s] += weight_s


Spans = tuple[list[float], list[float]]
"""When each stage of a pipeline begins its last backward, and when it has done it."""


def outlined(plan: Plan, profile: ClusterProfile) -> SimulatedStep:
    """A simulation of ``plan``; without events where that is possible: no shared NICs, no short micro-batches, the usual order."""
    unusual = any(pipeline.sequences % pipeline.micro_batch or pipeline.order != WARM_UP for pipeline in plan.pipelines)
    if shares_nics(profile) or unusual:
        return simulate(plan, profile)
    costs, clock, busy = Durations(plan, profile), dict[int, float](), dict[int, float]()
    whole: dict[tuple[int, int], float] = {}
    """(rank, layer) -> when its gradients are whole there."""
    known: dict[object, Spans] = {}
    number = 0
    for pipeline in plan.pipelines:
        (begun, ends), computing_s = _pipeline(costs, pipeline, number, known)
        for place, stage in enumerate(pipeline.stages):
            rank = stage.ranks[0]
            clock[rank], busy[rank] = ends[place], pipeline.micro_batches * computing_s[place]
            if costs.tied_heads or any(layer in costs.summed for layer in range(stage.first, stage.last)):
                op = Op.W if pipeline.split_backward and place > 0 else Op.B
                last = Action(op, number + place, pipeline.micro_batches - 1)
                for layer, after_s in finished_layers_s(last, plan, costs.profile).items():
                    whole[rank, layer] = begun[place] + after_s
        number += len(pipeline.stages)
    _sum(costs, clock, whole)
    together = max(clock.values())
    steps = {stage.ranks[0]: costs.of(Action(Op.STEP, number))[0] for number, stage in enumerate(costs.stages)}
    busy = {rank: seconds + steps[rank] for rank, seconds in busy.items()}
    busy |= {rank: busy[leader] for rank, leader in plan.leader_of.items()}
    step_s = max(together + seconds for seconds in steps.values())
    return SimulatedStep(step_s, (), {rank: busy[rank] for rank in sorted(busy)})


def _pipeline(
    costs: Durations, pipeline: PipelinePlan, number: int, known: dict[object, Spans]
) -> tuple[Spans, list[float]]:
    """Its spans, and seconds that each stage computes for a micro-batch. ``number``: of its first stage; ``known``: of pipelines
    before."""
    stages = range(number, number + len(pipeline.stages))

    def seconds(op: Op, numbers: Sequence[int]) -> tuple[float, ...]:
        return tuple(costs.of(Action(op, s, 0))[0] for s in numbers)

    forward, split = seconds(Op.F, stages), pipeline.split_backward
    backward = seconds(Op.B, stages[:1]) + seconds(Op.I if split else Op.B, stages[1:])
    weights = (0.0, *(seconds(Op.W, stages[1:]) if split else (0.0 for _ in stages[1:])))
    depths = tuple(min(stage.warm_up, pipeline.micro_batches) for stage in pipeline.stages)
    out, back = seconds(Op.SEND_F, stages[:-1]), seconds(Op.SEND_B, stages[1:])
    key = forward, backward, out, back, depths, pipeline.micro_batches, weights if split else None
    if key not in known:
        known[key] = spans_s(*key)
    return known[key], [f + b + w for f, b, w in zip(forward, backward, weights, strict=True)]


def _sum(costs: Durations, clock: dict[int, float], whole: dict[tuple[int, int], float]) -> None:
    """Adds the sums of gradients, as ``simulator`` does: all ranks take part in those of their layers from the last one to the
    first."""
    for number, first in costs.tied_heads.items():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        end = whole[head, costs.plan.layers - 1] + costs.of(Action(Op.REDUCE, number, layer=0))[0]
        clock[head] = max(clock[head], end)
        whole[embedding, 0] = max(whole[embedding, 0], end)
    numbers = {stage.ranks[0]: number for number, stage in enumerate(costs.stages)}
    free: dict[int, float] = {}
    for layer in sorted(costs.summed, reverse=True):
        ranks = held_by(costs.plan, layer)
        begun_s = max(max(whole[rank, layer], free.get(rank, 0.0)) for rank in ranks)
        free |= dict.fromkeys(ranks, begun_s + costs.of(Action(Op.REDUCE, numbers[ranks[0]], layer=layer))[0])
    for rank, end in free.items():
        clock[rank] = max(clock[rank], end)
