"""Predict a step by discrete-event simulation of the action lists that the executor runs.

A rank computes one action at a time; a directed link carries one message at a time, in send order. Sends are asynchronous.
Messages between hosts queue for a NIC that the profile marks as shared.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.schedule import WHOLE_STEP, Action, Event, Op, Schedule, busy, schedule_of
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import Resource, resources
from hetero_mpi.util.display import Displayed

Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True, repr=False)
class SimulatedStep(Displayed):
    """A predicted step."""

    step_s: float
    events: tuple[Event, ...]
    """Events ordered by start, then rank. A send spans its time on the link."""
    busy_s: dict[int, float]
    """Rank -> seconds of forward, backward and optimizer, including tensor-parallel exchanges."""

    @property
    def use(self) -> dict[int, float]:
        """Map each rank to the fraction of the step it spends computing, excluding tensor-parallel exchanges."""
        busy_s_by_rank = busy(self.events) or self.busy_s
        return {rank: seconds / self.step_s if self.step_s > 0 else 0.0 for rank, seconds in busy_s_by_rank.items()}


@dataclass
class _State:
    """Times at which each rank, link and NIC becomes free and each message arrives."""

    lists: Schedule
    costs: Durations
    clock: dict[int, float]
    free: dict[Resource, float] = field(default_factory=dict)
    occupied: dict[tuple[int, int], tuple[Resource, ...]] = field(default_factory=dict)
    """(source, destination) -> resources that their messages occupy."""
    arrival: dict[Action, float] = field(default_factory=dict)
    last_backward: dict[int, tuple[Action, float]] = field(default_factory=dict)
    """Stage -> (latest B or W, its start)."""
    events: list[Event] = field(default_factory=list)


def simulate(plan: Plan, profile: ClusterProfile, schedule: Schedule | None = None) -> SimulatedStep:
    """Simulate one step of ``plan`` (default: ``schedule_of``); raise ``UserError`` on a deadlock or wrong order."""
    full_schedule = schedule if schedule is not None else schedule_of(plan, profile.model)
    if schedule is not None:
        validate(full_schedule, plan, profile.model)
    lists = {rank: actions for rank, actions in full_schedule.items() if rank not in plan.leader_of}
    state = _State(lists, Durations(plan, profile), dict.fromkeys(sorted(lists), 0.0))
    if not _run_micro_batches(state):
        validate(full_schedule, plan, profile.model)  # says where they are stuck
    _run_all_reduces(state)
    _run_optimizer_steps(state)
    _copy_to_followers(plan, state)
    return _simulated_step(state)


def _run_micro_batches(state: _State) -> bool:
    """Run all micro-batches; return False on a deadlock.

    The action that can start earliest runs first (ties: lower rank), so that senders sharing a NIC queue in order of arrival.
    """
    position = dict.fromkeys(state.clock, 0)
    rank_by_message: dict[Action, int] = {}
    """message -> rank blocked on it"""
    ready = [(seconds, rank) for rank, seconds in state.clock.items()]
    while ready:
        _, rank = heapq.heappop(ready)
        action = state.lists[rank][position[rank]]
        message = awaited(action)
        if action.op in WHOLE_STEP:
            continue
        if message is not None and message not in state.arrival:
            rank_by_message[message] = rank
            continue
        _perform(rank, action, message, state)
        position[rank] += 1
        heapq.heappush(ready, (state.clock[rank], rank))
        if action in rank_by_message:
            unblocked_rank = rank_by_message.pop(action)
            heapq.heappush(ready, (state.clock[unblocked_rank], unblocked_rank))
    return not rank_by_message


def _perform(rank: int, action: Action, message: Action | None, state: _State) -> None:
    """Run one action of a micro-batch; ``message`` is the message it receives, already sent."""
    costs = state.costs
    seconds, size = costs.cost_of(action)
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


def _run_all_reduces(state: _State) -> None:
    """Run each gradient all-reduce once its ranks have final gradients. Activations still in transit are ignored."""
    costs = state.costs
    reduces = {
        (rank, action.layer): action
        for rank, actions in state.lists.items()
        for action in actions
        if action.op is Op.REDUCE and (action.layer != 0 or action.stage not in costs.tied_heads)
    }
    for reduced in gradient_sums(costs, _final_gradients_s(state) if costs.summed else {}):
        for rank in reduced.ranks:
            action = reduces[rank, reduced.layer] if reduced.head is None else Action(Op.REDUCE, reduced.head, layer=0)
            size = costs.cost_of(action)[1]
            state.events.append(Event(rank, 0, action, reduced.start_s, reduced.end_s, size))
            state.clock[rank] = max(state.clock[rank], reduced.end_s)


class GradientSum(NamedTuple):
    """The all-reduce of one layer's gradients."""

    layer: int
    ranks: tuple[int, ...]
    start_s: float
    end_s: float
    head: int | None = None
    """Stage of the head that sends its gradient of a tied matrix to the embedding's rank; None for an all-reduce."""


def gradient_sums(costs: Durations, final_s: dict[tuple[int, int], float]) -> Iterator[GradientSum]:
    """Yield the gradient all-reduces in order of start; each starts once all its ranks have final gradients.

    A rank runs one all-reduce at a time, from its last layer to its first. All-reduces queue for shared NICs. Each head of a
    tied matrix first sends its gradient to the embedding's rank, which completes layer 0 there.

    Args:
        final_s: (rank, layer) -> seconds from the start of the step until the layer's gradients are final.
    """
    nic_free_s: dict[Resource, float] = {}

    def queued_sum(layer: int, ranks: tuple[int, ...], stage: int, ready_s: float, hops: Pairs) -> GradientSum:
        occupied = {resource for a, b in hops if a != b for resource in resources(costs.profile, a, b)}
        nics = {resource for resource in occupied if resource[0] != "link"}
        start_s = max([ready_s, *(nic_free_s.get(nic, 0.0) for nic in nics)])
        end_s = start_s + costs.cost_of(Action(Op.REDUCE, stage, layer=layer))[0]
        nic_free_s.update(dict.fromkeys(nics, end_s))
        return GradientSum(layer, ranks, start_s, end_s, stage if stage in costs.tied_heads and layer == 0 else None)

    for number, first in costs.tied_heads.items() if costs.summed else ():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        part = queued_sum(0, (head,), number, final_s[head, costs.plan.layers - 1], [(head, embedding)])
        final_s[embedding, 0] = max(final_s[embedding, 0], part.end_s)
        yield part
    stages = {stage.ranks[0]: number for number, stage in reversed([*enumerate(costs.stages)])}
    ranks_of = {layer: costs.plan.holders[layer] for layer in sorted(costs.summed)}
    layers_of: dict[int, list[int]] = {}
    for layer, ranks in ranks_of.items():
        for rank in ranks:
            layers_of.setdefault(rank, []).append(layer)
    missing_ranks, ready_layers = {layer: len(ranks) for layer, ranks in ranks_of.items()}, set[int]()
    free_s, free_ranks = dict.fromkeys(layers_of, 0.0), list(layers_of)
    while True:
        for rank in free_ranks:
            if layers_of[rank]:
                layer = layers_of[rank].pop()
                missing_ranks[layer] -= 1
                ready_layers.update([layer] * (missing_ranks[layer] == 0))
        if not ready_layers:
            return
        ready_s, negated = min(
            (max(max(final_s[rank, layer], free_s[rank]) for rank in ranks_of[layer]), -layer) for layer in ready_layers
        )
        ready_layers.remove(-negated)
        ranks = ranks_of[-negated]
        free_ranks = list(ranks)
        hops = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        summed = queued_sum(-negated, ranks, stages[ranks[0]], ready_s, hops)
        free_s |= dict.fromkeys(ranks, summed.end_s)
        yield summed


def _final_gradients_s(state: _State) -> dict[tuple[int, int], float]:
    """Map (rank, layer) to the time at which the layer's gradients are final."""
    costs, final_s = state.costs, {}
    for action, start in state.last_backward.values():
        rank = costs.stages[action.stage].ranks[0]
        for layer, after_s in finished_layers_s(action, costs.plan, costs.profile).items():
            final_s[rank, layer] = start + after_s
    return final_s


def _run_optimizer_steps(state: _State) -> None:
    """Run STEP on every rank after the last all-reduce, because the clipping norm is global."""
    all_reduced_s = max(state.clock.values())
    for rank in state.clock:
        action = state.lists[rank][-1]
        state.clock[rank] = all_reduced_s + state.costs.cost_of(action)[0]
        state.events.append(Event(rank, 0, action, all_reduced_s, state.clock[rank]))


def _copy_to_followers(plan: Plan, state: _State) -> None:
    """Copy the leader's compute events to the other ranks of its tensor-parallel group; only the leader sends."""
    for rank, leader in plan.leader_of.items():
        leader_events = [event for event in state.events if event.rank == leader]
        compute_events = [event for event in leader_events if event.action.op not in (Op.SEND_F, Op.SEND_B)]
        state.events += [replace(event, rank=rank, bytes=0) for event in compute_events]
        state.clock[rank] = state.clock[leader]


def _simulated_step(state: _State) -> SimulatedStep:
    step_s, computed_s = max(state.clock.values()), busy(state.events)
    if state.costs.plan.leader_of:
        exchanged_s = state.costs.exchanged_s
        state.events = [replace(e, exchanged_s=exchanged_s(e.action, e.rank)) for e in state.events]
    # Stable: events that start together on one rank stay in the order of its list.
    ordered = sorted(state.events, key=lambda event: (event.start_s, event.rank))
    return SimulatedStep(step_s, tuple(ordered), {rank: computed_s.get(rank, 0.0) for rank in state.clock})
