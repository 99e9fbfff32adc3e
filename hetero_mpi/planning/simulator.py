"""Predicts a step: a discrete-event simulation of exactly the action lists that the executor runs.

Resources: every rank computes one action at a time; every directed link carries one message at a time, in the order in
which they were sent. Sends do not block their rank: a communication thread moves them. ``network.Network`` says where
that is otherwise (blocking sends, one network card per host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_mpi.planning.dry_run import awaited, validate
from hetero_mpi.planning.memory import GRADIENT_BYTES, stage_trainable
from hetero_mpi.planning.network import THREADED, Network, Resource, replica_sync_s
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.schedule import WHOLE_STEP, Action, Event, Op, Schedule, ends_are_split, one_f_one_b, stages


@dataclass(frozen=True)
class Simulation:
    """A predicted step. ``busy_s`` and ``waiting_s`` (rank -> seconds) add up to ``step_s`` on each used rank."""

    step_s: float
    events: tuple[Event, ...]
    """In order of start, then rank. A send's event spans its time on the link."""
    busy_s: dict[int, float]
    """Forward, backward and optimizer."""
    waiting_s: dict[int, float]
    """Everything else: waiting for messages, for the other ranks, and reducing."""


def compute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int, op: Op) -> float:
    """Seconds of forward (``Op.F``) or backward (``Op.B``) through the items [first, last) on ``device``."""
    total = device.forward_overhead_s if op is Op.F else device.backward_overhead_s
    for layer in profile.model.layers[first:last]:
        times = device.layers[layer.kind]
        total += (times.forward_s if op is Op.F else times.backward_s).at(tokens)
    return total


def recompute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int) -> float:
    """Seconds of the forward that backward repeats: of the blocks among the items [first, last)."""
    blocks = profile.model.layers[max(first, 1) : min(last, len(profile.model.layers) - 1)]
    total = 0.0
    for layer in blocks:
        total += device.layers[layer.kind].forward_s.at(tokens)
    return total


def optimizer_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int) -> float:
    """Seconds of one optimizer step over the items [first, last)."""
    return device.optimizer_fixed_s + device.optimizer_s_per_parameter * stage_trainable(profile.model, first, last)


def reduce_s(profile: ClusterProfile, a: int, b: int) -> float:
    """Seconds to sum the tied gradient of two ranks: to one end and back."""
    size = profile.model.tied_bytes
    return profile.transfer_s(a, b, size) + profile.transfer_s(b, a, size)


def message_bytes(action: Action, plan: Plan, profile: ClusterProfile) -> int:
    """Bytes that a send or receive moves; 0 for other actions."""
    _, index, stage = stages(plan)[action.stage]
    boundary = {Op.SEND_F: stage.last, Op.RECV_B: stage.last, Op.SEND_B: stage.first, Op.RECV_F: stage.first}
    if action.op is Op.REDUCE:
        copies = GRADIENT_BYTES * stage_trainable(profile.model, stage.first, stage.last)
        return (profile.model.tied_bytes if _sums_ends(plan, profile, index, stage) else 0) + (
            copies if len(plan.pipelines) > 1 else 0
        )
    if action.op not in boundary:
        return 0
    tokens = plan.pipelines[index].micro_batch * plan.sequence_length
    return profile.model.layers[boundary[action.op] - 1].boundary_bytes_per_token * tokens


def duration(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of one action by itself. Of a send: on its link, copies at both ends included; of a receive: 0.

    Planner, simulator and report have no other source of times.
    """
    numbered = stages(plan)
    _, index, stage = numbered[action.stage]
    pipeline = plan.pipelines[index]
    device = profile.devices[stage.ranks[0]]
    tokens = pipeline.micro_batch * plan.sequence_length
    if action.op is Op.F:
        return compute_s(profile, device, stage.first, stage.last, tokens, Op.F)
    if action.op is Op.B:
        again = recompute_s(profile, device, stage.first, stage.last, tokens) if stage.recompute else 0.0
        return again + compute_s(profile, device, stage.first, stage.last, tokens, Op.B)
    if action.op in (Op.SEND_F, Op.SEND_B):
        peer = numbered[action.stage + (1 if action.op is Op.SEND_F else -1)][2]
        return profile.transfer_s(stage.ranks[0], peer.ranks[0], message_bytes(action, plan, profile))
    if action.op is Op.STEP:
        return optimizer_s(profile, device, stage.first, stage.last)
    if action.op is Op.REDUCE:
        tied = reduce_s(profile, *_ends(pipeline)) if _sums_ends(plan, profile, index, stage) else 0.0
        return tied + (replica_sync_s(plan, profile, stage.first, stage.last) if len(plan.pipelines) > 1 else 0.0)
    return 0.0


def _ends(pipeline: PipelinePlan) -> tuple[int, int]:
    return pipeline.stages[0].ranks[0], pipeline.stages[-1].ranks[0]


def _sums_ends(plan: Plan, profile: ClusterProfile, index: int, stage: StagePlan) -> bool:
    """Does this stage's REDUCE exchange the tied gradient with the other end of its pipeline?"""
    pipeline = plan.pipelines[index]
    return profile.model.tied and ends_are_split(pipeline) and stage in (pipeline.stages[0], pipeline.stages[-1])


@dataclass
class _State:
    """The simulated cluster: when each rank and link is free, when each message arrives."""

    clock: dict[int, float]
    network: Network
    free: dict[Resource, float] = field(default_factory=dict)
    arrival: dict[Action, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class _Durations:
    """``duration`` remembered by operation and stage: it does not depend on the micro-batch."""

    def __init__(self, plan: Plan, profile: ClusterProfile) -> None:
        self.plan, self.profile = plan, profile
        self.stages: list[StagePlan] = [stage for _, _, stage in stages(plan)]
        self.known: dict[tuple[Op, int], tuple[float, int]] = {}

    def of(self, action: Action) -> tuple[float, int]:
        """(seconds, bytes)"""
        key = (action.op, action.stage)
        if key not in self.known:
            self.known[key] = (
                duration(action, self.plan, self.profile),
                message_bytes(action, self.plan, self.profile),
            )
        return self.known[key]


def simulate(
    plan: Plan, profile: ClusterProfile, schedule: Schedule | None = None, network: Network = THREADED
) -> Simulation:
    """One step of ``plan``; ``schedule`` is 1F1B at the plan's depths by default. Deterministic.

    Raises ``UserError`` when the schedule deadlocks or does not run the plan.
    """
    lists = schedule if schedule is not None else one_f_one_b(plan, profile.model.tied)
    validate(lists, plan)
    costs = _Durations(plan, profile)
    state = _State(dict.fromkeys(sorted(lists), 0.0), network)
    if network.shared_nic:
        _in_time_order(lists, state, costs)
    else:
        _rank_by_rank(lists, state, costs)
    _finish(lists, state, costs)
    return _summary(state)


def _rank_by_rank(lists: Schedule, state: _State, costs: _Durations) -> None:
    """Every rank as far as it comes, in turn: enough where each link has one sender, whose order is its own list."""
    position = dict.fromkeys(state.clock, 0)
    moved = True
    while moved:
        moved = False
        for rank in position:
            while _advance(rank, lists[rank][position[rank]], state, costs):
                position[rank] += 1
                moved = True


def _in_time_order(lists: Schedule, state: _State, costs: _Durations) -> None:
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


def _advance(rank: int, action: Action, state: _State, costs: _Durations) -> bool:
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
    state.events.append(Event(rank, 0, action, start, end, size))
    return True


def _finish(lists: Schedule, state: _State, costs: _Durations) -> None:
    """REDUCE when both ends are there; then, when every rank is there (the clip norm is global), every rank's STEP."""
    reducing = {rank: lists[rank][-2] for rank in state.clock if lists[rank][-2:-1] and lists[rank][-2].op is Op.REDUCE}
    if reducing:
        together = max(state.clock[rank] for rank in reducing)
        for rank, action in reducing.items():
            seconds, size = costs.of(action)
            state.events.append(Event(rank, 0, action, together, together + seconds, size))
            state.clock[rank] = together + seconds
    together = max(state.clock.values())
    for rank in state.clock:
        action = lists[rank][-1]
        state.clock[rank] = together + costs.of(action)[0]
        state.events.append(Event(rank, 0, action, together, state.clock[rank]))


def _summary(state: _State) -> Simulation:
    step_s = max(state.clock.values())
    busy = dict.fromkeys(state.clock, 0.0)
    for event in state.events:
        if event.action.op in (Op.F, Op.B, Op.STEP):
            busy[event.rank] += event.end_s - event.start_s
    # Stable: events that start together on one rank stay in the order of its list.
    ordered = sorted(state.events, key=lambda event: (event.start_s, event.rank))
    return Simulation(step_s, tuple(ordered), busy, {rank: step_s - seconds for rank, seconds in busy.items()})


def makespan_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    out_s: Sequence[float],
    back_s: Sequence[float],
    warm_up: Sequence[int],
    micro_batches: int,
) -> float:
    """Seconds until the last backward of one 1F1B pipeline: ``simulate`` without events, for the planner's inner loop.

    ``forward_s[s]``, ``backward_s[s]``: of stage s; ``out_s[s]``, ``back_s[s]``: of a message between stages s and s +
    1. The same additions in the same order as ``simulate``, so the same result to the last bit. Infinite on a
    deadlock.
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
                    b += 1
                    if homeward is not None:
                        back_free = (now if now > back_free else back_free) + back_s[s - 1]
                        homeward.append(back_free)
            moved = moved or f + b > before
            clock[s], forwards[s], backwards[s] = now, f, b
            link_out[s], link_back[s] = out_free, back_free
    return max(clock) if min(backwards) == micro_batches else float("inf")
