"""Predicts a step: a discrete-event simulation of exactly the action lists that the executor runs.

Resources: every rank computes one action at a time; every directed link carries one message at a time, in the order in
which they were sent. Sends do not block their rank: a communication thread moves them. ``network.Network`` says where
that is otherwise (blocking sends, one network card per host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.durations import Durations, finished_items_s
from hetero_mpi.planning.network import THREADED, Network, Resource
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Event, Op, Schedule, schedule_of


@dataclass(frozen=True)
class Simulation:
    """A predicted step. ``busy_s`` and ``waiting_s`` (rank -> seconds) add up to ``step_s`` on each used rank."""

    step_s: float
    events: tuple[Event, ...]
    """In order of start, then rank. A send's event spans its time on the link."""
    busy_s: dict[int, float]
    """Forward, backward and optimizer."""
    waiting_s: dict[int, float]
    """Everything else: waiting for messages, for sums of gradients and for the other ranks."""


@dataclass
class _State:
    """The simulated cluster: when each rank and link is free, when each message arrives."""

    clock: dict[int, float]
    network: Network
    free: dict[Resource, float] = field(default_factory=dict)
    arrival: dict[Action, float] = field(default_factory=dict)
    last_backward: dict[int, tuple[Action, float]] = field(default_factory=dict)
    """rank -> its latest B or W, and when that began."""
    whole: dict[tuple[int, int], float] = field(default_factory=dict)
    """(rank, item) -> when the item's gradients are whole: nothing is added to them any more."""
    events: list[Event] = field(default_factory=list)


def simulate(
    plan: Plan, profile: ClusterProfile, schedule: Schedule | None = None, network: Network = THREADED
) -> Simulation:
    """One step of ``plan``; ``schedule`` is what ``schedule_of`` gives by default. Deterministic.

    Raises ``UserError`` when the schedule deadlocks or does not run the plan.
    """
    lists = schedule if schedule is not None else schedule_of(plan, profile.model)
    validate(lists, plan, profile.model)
    costs = Durations(plan, profile)
    state = _State(dict.fromkeys(sorted(lists), 0.0), network)
    if network.shares(profile):
        _in_time_order(lists, state, costs)
    else:
        _rank_by_rank(lists, state, costs)
    _finish(lists, state, costs)
    return _summary(state)


def _rank_by_rank(lists: Schedule, state: _State, costs: Durations) -> None:
    """Every rank as far as it comes, in turn: enough where each link has one sender, whose order is its own list."""
    position = dict.fromkeys(state.clock, 0)
    moved = True
    while moved:
        moved = False
        for rank in position:
            while _advance(rank, lists[rank][position[rank]], state, costs):
                position[rank] += 1
                moved = True


def _in_time_order(lists: Schedule, state: _State, costs: Durations) -> None:
    """Always the action that can begin first (then the lower rank): senders that share a card queue as they come."""
    position = dict.fromkeys(state.clock, 0)
    while True:
        ready = []
        for rank, clock in state.clock.items():
            action = lists[rank][position[rank]]
            message = awaited(action)
            if action.op not in WHOLE_STEP and (message is None or message in state.arrival):
                ready.append((max(clock, state.arrival[message]) if message else clock, rank))
        if not ready:
            return
        _, rank = min(ready)
        _advance(rank, lists[rank][position[rank]], state, costs)
        position[rank] += 1


def _advance(rank: int, action: Action, state: _State, costs: Durations) -> bool:
    """Does ``action`` on ``rank`` if it can be done now. The collective end of the step is left to ``_finish``."""
    if action.op in WHOLE_STEP:
        return False
    seconds, size = costs.of(action)
    start = state.clock[rank]
    message = awaited(action)
    if message is not None:
        if message not in state.arrival:
            return False
        state.clock[rank] = end = max(start, state.arrival[message])
    elif action.op in (Op.SEND_F, Op.SEND_B):
        peer = costs.stages[action.stage + (1 if action.op is Op.SEND_F else -1)].ranks[0]
        occupied = state.network.resources(costs.profile, rank, peer)
        start = max(start, *(state.free.get(resource, 0.0) for resource in occupied))
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
    return True


def _finish(lists: Schedule, state: _State, costs: Durations) -> None:
    """Sums of gradients, each as soon as all its ranks have theirs whole; then, when every rank is there (the clip norm is
    global), every rank's STEP. A rank sums one item at a time, in the order of its list."""
    for rank, (action, start) in state.last_backward.items():
        for item, after_s in finished_items_s(action, costs.plan, costs.profile).items():
            state.whole[rank, item] = state.clock[rank] if state.network.late_sums else start + after_s
    free = dict.fromkeys(state.clock, 0.0)
    for item in sorted(costs.summed, reverse=True):
        ranks = costs.summed[item]
        reduces = {rank: next(a for a in lists[rank] if a.op is Op.REDUCE and a.item == item) for rank in ranks}
        # A tied head's rank does not hold item 0: its share of that gradient is whole with its own item.
        whole = [state.whole.get((rank, item), state.whole.get((rank, costs.plan.items - 1), 0.0)) for rank in ranks]
        start = max(*whole, *(free[rank] for rank in ranks))
        for rank, action in reduces.items():
            seconds, size = costs.of(action)
            free[rank] = start + seconds
            state.events.append(Event(rank, 0, action, start, free[rank], size))
            state.clock[rank] = max(state.clock[rank], free[rank])
    together = max(state.clock.values())
    for rank in state.clock:
        action = lists[rank][-1]
        state.clock[rank] = together + costs.of(action)[0]
        state.events.append(Event(rank, 0, action, together, state.clock[rank]))


def _summary(state: _State) -> Simulation:
    step_s = max(state.clock.values())
    busy = dict.fromkeys(state.clock, 0.0)
    for event in state.events:
        if event.action.op in COMPUTE or event.action.op is Op.STEP:
            busy[event.rank] += event.end_s - event.start_s
    # Stable: events that start together on one rank stay in the order of its list.
    ordered = sorted(state.events, key=lambda event: (event.start_s, event.rank))
    return Simulation(step_s, tuple(ordered), busy, {rank: step_s - seconds for rank, seconds in busy.items()})


def clocks_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    out_s: Sequence[float],
    back_s: Sequence[float],
    warm_up: Sequence[int],
    micro_batches: int,
    weight_s: Sequence[float] | None = None,
) -> list[float]:
    """When each stage of one pipeline has done its last backward: ``simulate`` without events, for the planner's inner loop.

    ``forward_s[s]``, ``backward_s[s]``: of stage s; ``out_s[s]``, ``back_s[s]``: of a message between stages s and s +
    1. ``weight_s``: of the weight gradients where backward is split (``backward_s`` is then the input part, but on the
    first stage, whose entry is 0, the whole). The same additions in the same order as ``simulate``, so the same result to
    the last bit. Infinite on a deadlock. Micro-batches are all alike.
    """
    count = len(forward_s)
    clock, link_out, link_back = [0.0] * count, [0.0] * count, [0.0] * count
    forwards, backwards = [0] * count, [0] * count
    inputs: list[list[float]] = [[0.0] * micro_batches, *([] for _ in range(count - 1))]
    gradients: list[list[float]] = [*([] for _ in range(count - 1)), [0.0] * micro_batches]
    moved = True
    while moved:
        moved = False
        # The planner spends most of its time in these loops: plain comparisons and local names on purpose.
        for s in range(count):
            b = backwards[s]
            if b == micro_batches:
                continue
            now, f, before = clock[s], forwards[s], forwards[s] + b
            forward, backward, depth, arrived, returned = (
                forward_s[s],
                backward_s[s],
                warm_up[s],
                inputs[s],
                gradients[s],
            )
            weight = weight_s[s] if weight_s is not None and s > 0 else 0.0
            lag = max(0, warm_up[0] - depth)
            onward = inputs[s + 1] if s + 1 < count else None
            homeward = gradients[s - 1] if s > 0 else None
            out_free, back_free = link_out[s], link_back[s]
            arrivals, returns = len(arrived), len(returned)
            while b < micro_batches:
                # Before backward b, 1F1B has done warm_up + b + 1 forwards, as far as there are so many.
                if f < micro_batches and f <= depth + b:
                    if f >= arrivals:
                        break
                    if arrived[f] > now:
                        now = arrived[f]
                    now += forward
                    f += 1
                    if onward is not None:
                        out_free = (now if now > out_free else out_free) + out_s[s]
                        onward.append(out_free)
                else:
                    if b >= returns:
                        break
                    if returned[b] > now:
                        now = returned[b]
                    now += backward
                    if homeward is not None:
                        back_free = (now if now > back_free else back_free) + back_s[s - 1]
                        homeward.append(back_free)
                    if weight and b >= lag:
                        now += weight
                    b += 1
            if weight and b == micro_batches:
                for _ in range(min(lag, micro_batches)):
                    now += weight
            moved = moved or f + b > before
            clock[s], forwards[s], backwards[s] = now, f, b
            link_out[s], link_back[s] = out_free, back_free
    return clock if min(backwards) == micro_batches else [float("inf")] * count


def makespan_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    out_s: Sequence[float],
    back_s: Sequence[float],
    warm_up: Sequence[int],
    micro_batches: int,
    weight_s: Sequence[float] | None = None,
) -> float:
    """Seconds until the last backward of one pipeline: the latest of ``clocks_s``."""
    return max(clocks_s(forward_s, backward_s, out_s, back_s, warm_up, micro_batches, weight_s))
