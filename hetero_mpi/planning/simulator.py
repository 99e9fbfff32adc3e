"""Predicts a step: a discrete-event simulation of exactly the action lists that the executor runs.

Resources: every rank computes one action at a time; every directed link carries one message at a time, in the order in
which they were sent. Sends do not block their rank: a communication thread moves them. ``network.Network`` says where
that is otherwise (blocking sends, one network card per host).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.durations import Durations, finished_items_s
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Event, Op, Schedule, held_by, schedule_of
from hetero_mpi.planning.types.network import THREADED, Network, Resource, resources
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile


@dataclass(frozen=True)
class SimulatedStep:
    """A predicted step."""

    step_s: float
    events: tuple[Event, ...]
    """In order of start, then rank. A send's event spans its time on the link."""
    busy_s: dict[int, float]
    """Rank -> seconds of forward, backward and optimizer; the rest of the step it waits."""


@dataclass
class _State:
    """The simulated cluster: when each rank, link and card is free, when each message arrives."""

    lists: Schedule
    costs: Durations
    network: Network
    clock: dict[int, float]
    free: dict[Resource, float] = field(default_factory=dict)
    occupied: dict[tuple[int, int], tuple[Resource, ...]] = field(default_factory=dict)
    """(source, destination) -> what their messages occupy."""
    arrival: dict[Action, float] = field(default_factory=dict)
    last_backward: dict[int, tuple[Action, float]] = field(default_factory=dict)
    """rank -> its latest B or W, and when that began."""
    events: list[Event] = field(default_factory=list)


def simulate(
    plan: Plan, profile: ClusterProfile, schedule: Schedule | None = None, network: Network = THREADED
) -> SimulatedStep:
    """One step of ``plan``; ``schedule`` is what ``schedule_of`` gives by default. Deterministic.

    Raises ``UserError`` when the schedule deadlocks or does not run the plan.
    """
    lists = schedule if schedule is not None else schedule_of(plan, profile.model)
    if schedule is not None:
        validate(lists, plan, profile.model)
    state = _State(lists, Durations(plan, network.seen_by(profile)), network, dict.fromkeys(sorted(lists), 0.0))
    if not _micro_batches(state):
        validate(lists, plan, profile.model)  # says where they are stuck
    _sums(state)
    _steps(state)
    return _summary(state)


def _micro_batches(state: _State) -> bool:
    """All but the end of the step; False on a deadlock. Always the action that can begin first (then the lower rank's):
    senders that share a card queue as they come."""
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
        if state.network.blocking_sends:
            state.clock[rank] = end
    else:
        state.clock[rank] = end = start + seconds
        if action.op in (Op.B, Op.W):
            state.last_backward[rank] = action, start
    state.events.append(Event(rank, 0, action, start, end, size))


def _sums(state: _State) -> None:
    """Sums of gradients, each as soon as all its ranks have theirs whole, while the others' last backward may still run.

    A rank takes part in one sum at a time, in the order of its list. Sums queue for shared cards among themselves; the few
    messages that still pass beside them are left out of account.
    """
    costs = state.costs
    if not costs.summed:
        return
    whole = _whole_s(state)
    taken: dict[Resource, float] = {}
    _bring_tied_shares(whole, taken, state)
    # The heads of a tied matrix have brought their shares: they do not hold it.
    left = {item: held_by(costs.plan, item) for item in costs.summed}
    waiting = {
        rank: [a for a in reversed(actions) if a.op is Op.REDUCE and (a.item != 0 or a.stage not in costs.tied_heads)]
        for rank, actions in state.lists.items()
    }
    free = dict.fromkeys(state.clock, 0.0)
    while left:
        # The dry run has shown that some sum is the next one of all its ranks. Of these the first, then the last item.
        nexts = {rank: actions[-1].item for rank, actions in waiting.items() if actions}
        possible = (item for item, ranks in left.items() if all(nexts.get(rank) == item for rank in ranks))
        ready_s, last = min(
            (max(max(whole[rank, item], free[rank]) for rank in left[item]), -item) for item in possible
        )
        ranks = left.pop(-last)
        cards = _cards(costs.profile, ranks)
        start = max([ready_s, *(taken.get(card, 0.0) for card in cards)])
        for rank in ranks:
            action = waiting[rank].pop()
            seconds, size = costs.of(action)
            free[rank] = end = start + seconds
            state.events.append(Event(rank, 0, action, start, end, size))
            state.clock[rank] = max(state.clock[rank], end)
            taken.update(dict.fromkeys(cards, end))


def _whole_s(state: _State) -> dict[tuple[int, int], float]:
    """(rank, item) -> when the item's gradients are whole there: nothing is added to them any more."""
    costs, whole = state.costs, {}
    for rank, (action, start) in state.last_backward.items():
        for item, after_s in finished_items_s(action, costs.plan, costs.profile).items():
            whole[rank, item] = state.clock[rank] if state.network.late_sums else start + after_s
    return whole


def _bring_tied_shares(whole: dict[tuple[int, int], float], taken: dict[Resource, float], state: _State) -> None:
    """Each head's share of a tied matrix's gradient goes to the embedding's rank as soon as it is whole; there, that of item
    0 is whole when it has come, which ``whole`` is told. ``taken``: until when shared cards are."""
    costs = state.costs
    for number, first in costs.tied_heads.items():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        action = Action(Op.REDUCE, number, item=0)
        seconds, size = costs.of(action)
        cards = _cards(costs.profile, (head, embedding), there_only=True)
        start = max([whole[head, costs.plan.items - 1], *(taken.get(card, 0.0) for card in cards)])
        end = start + seconds
        taken.update(dict.fromkeys(cards, end))
        state.events.append(Event(head, 0, action, start, end, size))
        state.clock[head] = max(state.clock[head], end)
        whole[embedding, 0] = max(whole[embedding, 0], end)


def _cards(profile: ClusterProfile, ranks: Sequence[int], there_only: bool = False) -> set[Resource]:
    """The shared cards that messages around a ring of ``ranks`` pass through, or from the first to the second only."""
    hops = [ranks] if there_only else zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    passed = {resource for a, b in hops if a != b for resource in resources(profile, a, b)}
    return {resource for resource in passed if resource[0] != "link"}


def _steps(state: _State) -> None:
    """When every rank is there (the clip norm is global), every rank's STEP."""
    together = max(state.clock.values())
    for rank in state.clock:
        action = state.lists[rank][-1]
        state.clock[rank] = together + state.costs.of(action)[0]
        state.events.append(Event(rank, 0, action, together, state.clock[rank]))


def _summary(state: _State) -> SimulatedStep:
    step_s = max(state.clock.values())
    busy = dict.fromkeys(state.clock, 0.0)
    for event in state.events:
        if event.action.op in COMPUTE or event.action.op is Op.STEP:
            busy[event.rank] += event.end_s - event.start_s
    # Stable: events that start together on one rank stay in the order of its list.
    ordered = sorted(state.events, key=lambda event: (event.start_s, event.rank))
    return SimulatedStep(step_s, tuple(ordered), busy)


@dataclass(slots=True)
class _Stage:
    """One stage of ``spans_s``: its times, and how far it is."""

    forward_s: float
    backward_s: float
    weight_s: float | None
    """None: the backward is whole."""
    depth: int
    lag: int
    out_s: float
    back_s: float
    arrived: list[float]
    """When the activations of each micro-batch have come, as far as they have been sent."""
    returned: list[float]
    onward: list[float] | None = None
    homeward: list[float] | None = None
    clock: float = 0.0
    begun: float = 0.0
    out_free: float = 0.0
    back_free: float = 0.0
    forwards: int = 0
    backwards: int = 0

    def advance(self, micro_batches: int) -> bool:
        """Go on until something is awaited that has not been sent; has anything been done?"""
        # The planner spends most of its time here: plain comparisons and local names on purpose.
        now, begun, f, b = self.clock, self.begun, self.forwards, self.backwards
        depth, arrivals, returns = self.depth, len(self.arrived), len(self.returned)
        forward, backward, weight = self.forward_s, self.backward_s, self.weight_s
        out_free, back_free = self.out_free, self.back_free
        while b < micro_batches:
            # Before backward b, 1F1B has done warm_up + b + 1 forwards, as far as there are so many.
            if f < micro_batches and f <= depth + b:
                if f >= arrivals:
                    break
                if self.arrived[f] > now:
                    now = self.arrived[f]
                now += forward
                f += 1
                if self.onward is not None:
                    out_free = (now if now > out_free else out_free) + self.out_s
                    self.onward.append(out_free)
            else:
                if b >= returns:
                    break
                if self.returned[b] > now:
                    now = self.returned[b]
                begun = now
                now += backward
                if self.homeward is not None:
                    back_free = (now if now > back_free else back_free) + self.back_s
                    self.homeward.append(back_free)
                if weight is not None and b >= self.lag:
                    begun = now
                    now += weight
                b += 1
        moved = f + b > self.forwards + self.backwards
        if moved and b == micro_batches and weight is not None:
            for _ in range(self.lag):
                begun = now
                now += weight
        self.clock, self.begun, self.forwards, self.backwards = now, begun, f, b
        self.out_free, self.back_free = out_free, back_free
        return moved


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
    the last bit. Infinite on a deadlock. Micro-batches are all alike.
    """
    count, deepest = len(forward_s), micro_batches - 1
    stages: list[_Stage] = []
    for s in range(count):
        weight = weight_s[s] if weight_s is not None and s > 0 else None
        lag = max(0, min(warm_up[0], deepest) - min(warm_up[s], deepest))
        out, back = out_s[s] if s + 1 < count else 0.0, back_s[s - 1] if s > 0 else 0.0
        arrived, returned = ([] if s > 0 else [0.0] * micro_batches), ([] if s + 1 < count else [0.0] * micro_batches)
        stages.append(_Stage(forward_s[s], backward_s[s], weight, warm_up[s], lag, out, back, arrived, returned))
    for before, behind in pairwise(stages):
        before.onward, behind.homeward = behind.arrived, before.returned
    moved = True
    while moved:
        moved = False
        for stage in stages:
            moved = stage.advance(micro_batches) or moved
    if any(stage.backwards < micro_batches for stage in stages):
        return [math.inf] * count, [math.inf] * count
    return [stage.begun for stage in stages], [stage.clock for stage in stages]
