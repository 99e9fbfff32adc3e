"""Predicts a step: a discrete-event simulation of exactly the action lists that the executor runs.

Resources: every rank computes one action at a time; every directed link carries one message at a time, in the order in
which they were sent. Sends do not block their rank: a communication thread moves them. Where the profile says that a host's
ranks share a NIC, their messages to other hosts queue for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.schedule import WHOLE_STEP, Action, Event, Op, Schedule, busy, held_by, schedule_of
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import Resource, resources

Pairs = Iterable[tuple[int, int]]


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
    """Gradient all-reduces, each as soon as all its ranks have their gradients, while other ranks' last backward may still run.

    The few activations that are still under way are left out of account.
    """
    costs = state.costs
    reduces = {
        (rank, action.layer): action
        for rank, actions in state.lists.items()
        for action in actions
        if action.op is Op.REDUCE and (action.layer != 0 or action.stage not in costs.tied_heads)
    }
    for reduced in gradient_sums(costs, _whole_s(state) if costs.summed else {}):
        for rank in reduced.ranks:
            action = reduces[rank, reduced.layer] if reduced.head is None else Action(Op.REDUCE, reduced.head, layer=0)
            size = costs.of(action)[1]
            state.events.append(Event(rank, 0, action, reduced.start_s, reduced.end_s, size))
            state.clock[rank] = max(state.clock[rank], reduced.end_s)


class GradientSum(NamedTuple):
    """The all-reduce of one layer's gradients."""

    layer: int
    ranks: tuple[int, ...]
    start_s: float
    end_s: float
    head: int | None = None
    """Stage of the head that sends its part of a tied matrix's gradient to its pipeline's embedding; None: an all-reduce."""


def gradient_sums(costs: Durations, final_s: dict[tuple[int, int], float]) -> Iterator[GradientSum]:
    """All-reduces in the order in which they begin, each as soon as all its ranks have final gradients.

    A rank takes part in one all-reduce at a time, from its last layer to its first. All-reduces queue for shared NICs among
    themselves. First each head of a tied matrix sends its part to the embedding's rank, where the gradient of layer 0 is final
    once that part has come.

    Args:
        final_s: (rank, layer) -> seconds from the start of the step until the layer's gradients are final there.
    """
    taken: dict[Resource, float] = {}

    def passed(layer: int, ranks: tuple[int, ...], stage: int, ready_s: float, hops: Pairs) -> GradientSum:
        nics = _nics(costs.profile, hops)
        start_s = max([ready_s, *(taken.get(nic, 0.0) for nic in nics)])
        end_s = start_s + costs.of(Action(Op.REDUCE, stage, layer=layer))[0]
        taken.update(dict.fromkeys(nics, end_s))
        return GradientSum(layer, ranks, start_s, end_s, stage if stage in costs.tied_heads and layer == 0 else None)

    for number, first in costs.tied_heads.items() if costs.summed else ():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        part = passed(0, (head,), number, final_s[head, costs.plan.layers - 1], [(head, embedding)])
        final_s[embedding, 0] = max(final_s[embedding, 0], part.end_s)
        yield part
    stages = {stage.ranks[0]: number for number, stage in reversed([*enumerate(costs.stages)])}
    ranks_of = {layer: held_by(costs.plan, layer) for layer in sorted(costs.summed)}
    layers_of: dict[int, list[int]] = {}
    for layer, ranks in ranks_of.items():
        for rank in ranks:
            layers_of.setdefault(rank, []).append(layer)
    missing, possible = {layer: len(ranks) for layer, ranks in ranks_of.items()}, set[int]()
    free_s, waiting = dict.fromkeys(layers_of, 0.0), list(layers_of)
    while True:
        for rank in waiting:
            if layers_of[rank]:
                layer = layers_of[rank].pop()
                missing[layer] -= 1
                possible.update([layer] * (missing[layer] == 0))
        if not possible:
            return
        ready_s, negated = min(
            (max(max(final_s[rank, layer], free_s[rank]) for rank in ranks_of[layer]), -layer) for layer in possible
        )
        possible.remove(-negated)
        ranks = ranks_of[-negated]
        waiting = list(ranks)
        hops = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        summed = passed(-negated, ranks, stages[ranks[0]], ready_s, hops)
        free_s |= dict.fromkeys(ranks, summed.end_s)
        yield summed


def _whole_s(state: _State) -> dict[tuple[int, int], float]:
    """(rank, layer) -> when the layer's gradients are whole there: nothing is added to them any more."""
    costs, whole = state.costs, {}
    for action, start in state.last_backward.values():
        rank = costs.stages[action.stage].ranks[0]
        for layer, after_s in finished_layers_s(action, costs.plan, costs.profile).items():
            whole[rank, layer] = start + after_s
    return whole


def _nics(profile: ClusterProfile, hops: Pairs) -> set[Resource]:
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
