"""Measurements of a step against its prediction: the ranks' computing, the sums of groups, the messages on every link.

Waiting is left out. A group's sums take as long as the member that waits least is in them. A message takes from when it is handed
over, or the one before it on its link has come, until it has come itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hetero_mpi.engine.trainer import StepResult, Trainer
from hetero_mpi.planning.analysis.correction import Measured
from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.schedule import COMPUTE, COMPUTING, Action, Event, MeasuredEvent, Op, Schedule, parse_action
from hetero_mpi.planning.types.cluster_changes import with_free_links
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

_CROWDED = 1.1
"""Ranks that compute by so much longer than their processor time, beyond what they take from each other, wait for others."""
_MOST_TOLD = 4
LEAST_SHARE = 0.02
"""An action that takes less of a step, predicted and measured, is not compared: the clock and the moment decide about it."""
FAR = 2.0
"""An action that takes so many times as long as predicted, or less than the inverse, is named."""
_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "the input part of backward",
    Op.W: "the weight part of backward",
    Op.STEP: "the optimizer's step",
}
_MESSAGES = (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)
_NEXT = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}
Pair = tuple[int, int]
_Operations = dict[int, dict[Op, list[float]]]


@dataclass(frozen=True)
class OwnStep:
    """A step as one rank measured it. Times of messages are on the clock that all ranks share."""

    rank: int
    wall_s: float
    """From the end of the step before."""
    computing_s: dict[str, float]
    """Operation -> seconds of all its actions."""
    worked_s: float
    """Seconds of a CPU rank's forwards and backwards by processor time."""
    sums_s: float
    """In its group's sums."""
    messages: tuple[tuple[str, float], ...]
    """(action, when it began) of sends, (action, when it was on the device) of receives."""


def own_step(trainer: Trainer, result: StepResult, wall_s: float, clock_s: float) -> OwnStep:
    """The trainer's latest step; where that was skipped, nothing is said of the optimizer. ``clock_s``: this rank's clock minus the
    common one."""
    computing_s, messages = dict[str, float](), []
    for event in result.events:
        op = event.action.op
        if op in COMPUTE or (op is Op.STEP and result.decision.finite):
            computing_s[op.value] = computing_s.get(op.value, 0.0) + event.end_s - event.start_s
        elif (at_s := message_at_s(event)) is not None:
            messages.append((str(event.action), result.began_s - clock_s + at_s))
    return OwnStep(trainer.rank, wall_s, computing_s, result.worked_s, result.sums_s, tuple(messages))


def message_at_s(event: Event) -> float | None:
    """When a send began, or what was received was on the device; None: neither, or not known."""
    if event.action.op in _NEXT:
        return event.start_s
    if event.action.op not in _MESSAGES or not isinstance(event, MeasuredEvent) or event.arrived_s is None:
        return None
    return event.arrived_s + event.copied_s


Together = Mapping[int, OwnStep]
"""A step: what each active rank measured of it."""


class Expected:
    """The prediction of a step, as ``own_step`` measures it."""

    def __init__(self, plan: Plan, profile: ClusterProfile, schedule: Schedule) -> None:
        self.plan, self.profile, self._schedule = plan, profile, schedule
        self._costs = Durations(plan, profile)
        self.crowded = self._costs.profile is not profile
        """Do ranks have less than a core for each of their threads?"""

    @cached_property
    def step_s(self) -> float:
        """Seconds of the rank that computes longest: a step takes no less."""
        return max((sum(own.values()) for own in self.computing_s.values()), default=0.0)

    @cached_property
    def computing_s(self) -> dict[int, dict[Op, float]]:
        """Rank -> operation -> seconds of all its actions, without sums; of the optimizer without the common decision."""
        sums, found = self._free_of_sums, dict[int, dict[Op, float]]()
        for rank, actions in self._schedule.items():
            own = found.setdefault(rank, {})
            for action in actions:
                if action.op in COMPUTING:
                    costs = sums if self._costs.stages[action.stage].grouped else self._costs
                    fixed_s = self._costs.profile.devices[rank].optimizer_fixed_s if action.op is Op.STEP else 0.0
                    own[action.op] = own.get(action.op, 0.0) + max(0.0, costs.of(action)[0] - fixed_s)
        return found

    @cached_property
    def sums_s(self) -> dict[tuple[int, ...], float]:
        """Ranks of a group -> seconds in the sums of their layers."""
        found = dict[tuple[int, ...], float]()
        for _, _, stage in self.plan.numbered:
            if stage.grouped:
                own = [action for action in self._schedule[stage.ranks[0]] if action.op in COMPUTE]
                with_s, without_s = (
                    sum(costs.of(action)[0] for action in own) for costs in (self._costs, self._free_of_sums)
                )
                found[stage.ranks] = found.get(stage.ranks, 0.0) + with_s - without_s
        return found

    def message(self, action: Action) -> tuple[Pair, Action, float]:
        """(source and destination of a send, the receive at its other end, seconds from device to device)."""
        op, away = _NEXT[action.op]
        ends = (self._costs.stages[number].ranks[0] for number in (action.stage, action.stage + away))
        seconds, _ = self._costs.of(action)
        return (next(ends), next(ends)), Action(op, action.stage + away, action.micro_batch), seconds

    @cached_property
    def _free_of_sums(self) -> Durations:
        free = replace(with_free_links(self._costs.profile), devices=self._costs.profile.devices)
        return Durations(self.plan, free)


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of a plan as all ranks measured them, against the prediction. On rank 0."""

    profile: ClusterProfile
    """The profile of the prediction."""
    steps_s: tuple[float, ...]
    """The mean of the ranks' wall times, for each step."""
    measured: Measured
    operations: Mapping[int, Mapping[Op, float]]
    """Rank -> operation -> how many times as long as predicted; the median of the steps."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    def far(self, hosts: Sequence[str], predicted_s: float) -> list[str]:
        """Where a step took ``FAR`` times as long as ``predicted_s``, or less than the inverse: of what, the farthest first."""
        if not _far(self.step_s / predicted_s):
            return []
        own, found = self.measured, list[tuple[float, str]]()
        for rank, of in self.operations.items():
            named = [f"{_NAMES[op]} {ratio:.3g}" for op, ratio in of.items() if _far(ratio)]
            if named:
                found.append((max(map(_away, of.values())), f"rank {rank} ({hosts[rank]}): {', '.join(named)}"))
        for ranks, ratios in own.sums.items():
            text = f"sums of ranks {', '.join(map(str, ranks))} ({hosts[ranks[0]]})"
            found.append((_away(statistics.median(ratios)), f"{text}: {statistics.median(ratios):.3g}"))
        for (a, b), ratios in own.links.items():
            text = f"link from rank {a} ({hosts[a]}) to rank {b} ({hosts[b]})"
            found.append((_away(statistics.median(ratios)), f"{text}: {statistics.median(ratios):.3g}"))
        told = [text for away, text in sorted(found, reverse=True) if away > FAR]
        more = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
        return [f"{text} times as long as predicted" for text in told[:_MOST_TOLD]] + more


def _away(ratio: float) -> float:
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def _far(ratio: float) -> bool:
    return _away(ratio) > FAR


def with_others(profile: ClusterProfile, plan: Plan, steps: Sequence[Together]) -> ClusterProfile:
    """``profile`` with the threads of other programs on hosts whose CPU ranks waited for cores in steps of ``plan``."""
    threads: dict[str, list[int]] = {}
    for rank in plan.ranks:
        if profile.devices[rank].backend == "cpu":
            threads.setdefault(profile.devices[rank].host, []).append(rank)
    hosts = tuple(
        host
        if host.cores is None
        else replace(host, other_threads=_others(profile, host, threads.get(host.name, ()), steps))
        for host in profile.hosts
    )
    return replace(profile, hosts=hosts)


def _others(profile: ClusterProfile, host: HostProfile, ranks: Sequence[int], steps: Sequence[Together]) -> float:
    """As many threads as take the cores from ``ranks`` for as long as these waited for one while they computed."""
    assert host.cores is not None
    stretches = []
    for step in steps:
        own = [step[rank] for rank in ranks]
        computing_s = sum(one.computing_s.get(op.value, 0.0) for one in own for op in COMPUTE) - sum(
            one.sums_s for one in own
        )
        worked_s = sum(one.worked_s for one in own)
        if worked_s > 0:
            stretches.append(computing_s / worked_s)
    threads = sum(profile.devices[rank].threads for rank in ranks)
    alone = max(1.0, threads / host.cores)
    stretch = statistics.median(stretches) if stretches else 1.0
    return round(stretch * host.cores - threads, 2) if stretch > _CROWDED * alone else 0.0


def compared(expected: Expected, steps: Sequence[Together]) -> MeasuredSteps:
    """``steps``: of each one what every active rank measured."""
    least_s = LEAST_SHARE * expected.step_s
    computing, operations = dict[int, list[float]](), _Operations()
    sums, links = dict[tuple[int, ...], list[float]](), dict[Pair, list[float]]()
    for step in steps:
        for rank, own_s in expected.computing_s.items():
            _compare_rank(step[rank], own_s, least_s, computing, operations)
        for ranks, expected_s in expected.sums_s.items():
            measured_s = min(step[rank].sums_s for rank in ranks)
            if expected_s > 0 and max(expected_s, measured_s) > least_s:
                sums.setdefault(ranks, []).append(measured_s / expected_s)
        for pair, ratio in _links(expected, step, least_s).items():
            links.setdefault(pair, []).append(ratio)
    for ranks in expected.sums_s:  # they wait for one another in every layer: as one device, as fast as the slowest
        slowest = [max(ratios) for ratios in zip(*(computing.pop(rank) for rank in ranks), strict=True)]
        computing[ranks[0]] = slowest
    optimizer = {rank: of[Op.STEP] for rank, of in operations.items() if Op.STEP in of}
    return MeasuredSteps(
        expected.profile,
        tuple(statistics.fmean(own.wall_s for own in step.values()) for step in steps),
        Measured(computing, optimizer, sums, links),
        {rank: {op: statistics.median(ratios) for op, ratios in of.items()} for rank, of in operations.items()},
    )


def _compare_rank(
    own: OwnStep,
    expected_s: Mapping[Op, float],
    least_s: float,
    computing: dict[int, list[float]],
    operations: _Operations,
) -> None:
    whole_s = sum(own.computing_s.get(op.value, 0.0) for op in COMPUTE)
    between = (whole_s - own.sums_s) / whole_s if whole_s > 0 else 1.0
    predicted_s = sum(expected_s.get(op, 0.0) for op in COMPUTE)
    if predicted_s > 0:
        computing.setdefault(own.rank, []).append(between * whole_s / predicted_s)
    for op, seconds in expected_s.items():
        measured_s = own.computing_s.get(op.value, 0.0) * (between if op in COMPUTE else 1.0)
        if seconds > 0 and measured_s > 0 and max(seconds, measured_s) > least_s:
            operations.setdefault(own.rank, {}).setdefault(op, []).append(measured_s / seconds)


def _links(expected: Expected, step: Together, least_s: float) -> dict[Pair, float]:
    """(source, destination) -> measured over predicted seconds of a message. Left out: links whose messages matter little, and
    those between ranks that wait for a core."""
    times = {parse_action(text): at_s for own in step.values() for text, at_s in own.messages}
    taken: dict[Pair, list[tuple[float, float]]] = {}
    free_s: dict[Pair, float] = {}
    for send, began_s in sorted(
        ((one, at_s) for one, at_s in times.items() if one.op in _NEXT), key=lambda one: one[1]
    ):
        pair, receive, expected_s = expected.message(send)
        if receive in times:
            came_s = times[receive]
            taken.setdefault(pair, []).append((came_s - max(began_s, free_s.get(pair, began_s)), expected_s))
            free_s[pair] = came_s
    hosts = [device.host for device in expected.profile.devices]
    found = {}
    for (a, b), messages in taken.items():
        measured_s, expected_s = (sum(column) for column in zip(*messages, strict=True))
        if (expected.crowded and hosts[a] == hosts[b]) or max(measured_s, expected_s) < least_s or expected_s <= 0:
            continue
        found[a, b] = statistics.median(max(0.0, own_s) / other_s for own_s, other_s in messages if other_s > 0)
    return found


def to_dict(step: OwnStep) -> dict[str, Any]:
    """As JSON carries it."""
    return {**vars(step), "messages": [list(message) for message in step.messages]}


def from_dict(told: Mapping[str, Any]) -> OwnStep:
    return OwnStep(**{**told, "messages": tuple((text, at_s) for text, at_s in told["messages"])})
