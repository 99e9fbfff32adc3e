"""Measured steps beside their prediction, for the trial of a plan, for rebalancing, and for a run's report.

    RankMeasurement      seconds of one rank's computing, of its group's sums, and when its messages began and came
    StepPrediction       the seconds predicted of the same; ``ratios``: measured over predicted, for every part of a step
    StepComparison       the ratios of several steps: is the difference beyond their noise, what is slow, the calibrated profile

A trial compares all its steps at once. Rebalancing compares each step of the run as it comes, and watches the ratios.

Waiting is left out. A group's sums take as long as the member that waits least is in them. A message takes from when it is handed
over, or the one before it on its link has come, until it has come itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.analysis.calibration import (
    GroupSums,
    LinkBetween,
    OptimizerSteps,
    Pair,
    Part,
    WatchedPart,
    calibrated_profile,
    part_text,
)
from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.fit import median_error
from hetero_mpi.planning.schedule import COMPUTE, COMPUTING, Action, Event, MeasuredEvent, Op, Schedule, parse_action
from hetero_mpi.planning.types.cluster_changes import with_free_links
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

CROWDED = 1.1
"""Ranks that compute longer than this times their processor time, beyond what they take from each other, wait for others."""
MAX_NAMED = 4
"""Parts of a step that are named as far from their prediction."""
LEAST_SHARE = 0.02
"""An action that takes less of a step, predicted and measured, is not compared: the clock and the moment decide about it."""
FAR = 2.0
"""A part is named that takes this many times as long as predicted, or less than the inverse."""
LEAST_GAIN = 0.03
"""Steps must be shorter by this share to be faster: predictions are not better than that."""
_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "the input part of backward",
    Op.W: "the weight part of backward",
    Op.STEP: "the optimizer's step",
}
_RECEIVE = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}
"""Operation of a send -> that of its receive, and how many stages further."""
_RECEIVES = (Op.RECV_F, Op.RECV_B)
Seconds = Mapping[int, float]
"""Rank -> seconds of a step."""


@dataclass(frozen=True)
class RankMeasurement:
    """A step as one rank measured it; JSON values."""

    rank: int
    computing_s: Mapping[str, float]
    """Operation -> seconds of all its actions."""
    sums_s: float
    """In its group's sums."""
    messages: Mapping[str, float]
    """Action -> when a send began, or when what was received was on the device; left out where that is not known."""
    wall_s: float = 0.0
    """From the end of the step before."""
    worked_s: float = 0.0
    """Seconds of a CPU rank's forwards and backwards by processor time."""

    @classmethod
    def of(
        cls, rank: int, events: Iterable[Event], began_s: float, wall_s: float = 0.0, worked_s: float = 0.0
    ) -> RankMeasurement:
        """From the rank's ``events``, whose times count from ``began_s``."""
        computing_s, sums_s, messages = dict[str, float](), 0.0, dict[str, float]()
        for event in events:
            op = event.action.op
            sums_s += event.exchanged_s
            if op in COMPUTING:
                computing_s[op.value] = computing_s.get(op.value, 0.0) + event.end_s - event.start_s
            elif op in _RECEIVE:
                messages[str(event.action)] = began_s + event.start_s
            elif op in _RECEIVES and isinstance(event, MeasuredEvent) and event.arrived_s is not None:
                messages[str(event.action)] = began_s + (event.arrived_s + event.copied_s)
        return cls(rank, computing_s, sums_s, messages, wall_s, worked_s)

    @property
    def passes_s(self) -> float:
        """Seconds of forwards and backwards, sums included."""
        return sum(self.computing_s.get(op.value, 0.0) for op in COMPUTE)

    @property
    def own_share(self) -> float:
        """Share of its forwards and backwards that is not sums of its group."""
        return (self.passes_s - self.sums_s) / self.passes_s if self.passes_s > 0 else 1.0


Together = Mapping[int, RankMeasurement]
"""A step: what each active rank measured of it."""


class StepPrediction:
    """The prediction of a step under ``plan``, by what ``RankMeasurement`` has."""

    def __init__(self, plan: Plan, profile: ClusterProfile, schedule: Schedule) -> None:
        self.plan, self.profile, self._schedule = plan, profile, schedule
        self._costs = Durations(plan, profile)
        self._crowded = self._costs.profile is not profile
        """Do ranks have less than a core for each of their threads?"""

    def ratios(
        self, computing_s: Seconds, sums_s: Seconds, messages_s: Mapping[Pair, Sequence[tuple[float, float]]]
    ) -> dict[WatchedPart, float]:
        """Measured over predicted seconds of the parts of a step that matter.

        The members of a group wait for one another in every layer: they are one device, as fast as the slowest. Left out are links
        between ranks that wait for a core.

        Args:
            computing_s: of forwards and backwards, without sums.
            sums_s: of the members of groups.
            messages_s: (source, destination) -> (measured, predicted) of messages between the two.
        """
        found = dict[WatchedPart, float]()
        for rank, own_s in self.computing_s.items():
            predicted_s, leader = sum(own_s.get(op, 0.0) for op in COMPUTE), self.plan.leader_of.get(rank, rank)
            if predicted_s > 0:
                found[leader] = max(found.get(leader, 0.0), computing_s[rank] / predicted_s)
        for ranks, predicted_s in self._sums_s.items():
            measured_s = min(sums_s[rank] for rank in ranks)
            if predicted_s > 0 and self.matters(measured_s, predicted_s):
                found[GroupSums(ranks)] = measured_s / predicted_s
        hosts = [device.host for device in self.profile.devices]
        for (a, b), messages in messages_s.items():
            measured_s, predicted_s = (sum(column) for column in zip(*messages, strict=True))
            if (
                predicted_s > 0
                and self.matters(measured_s, predicted_s)
                and not (self._crowded and hosts[a] == hosts[b])
            ):
                ratios = [max(0.0, own_s) / other_s for own_s, other_s in messages if other_s > 0]
                found[LinkBetween((a, b))] = statistics.median(ratios)
        return {part: ratio for part, ratio in found.items() if ratio > 0}

    def matters(self, measured_s: float, predicted_s: float) -> bool:
        """Whether an action takes enough of a step: a step takes no less than its busiest rank computes."""
        return max(predicted_s, measured_s) > self._least_s

    @cached_property
    def _least_s(self) -> float:
        return LEAST_SHARE * max((sum(own_s.values()) for own_s in self.computing_s.values()), default=0.0)

    @cached_property
    def computing_s(self) -> dict[int, dict[Op, float]]:
        """Rank -> operation -> seconds of all its actions, without sums; of the optimizer without the common decision."""
        found = dict[int, dict[Op, float]]()
        for rank, actions in self._schedule.items():
            own = found.setdefault(rank, {})
            for action in actions:
                if action.op in COMPUTING:
                    costs = self._free_of_sums if self._costs.stages[action.stage].grouped else self._costs
                    fixed_s = self._costs.profile.devices[rank].optimizer_fixed_s if action.op is Op.STEP else 0.0
                    own[action.op] = own.get(action.op, 0.0) + max(0.0, costs.of(action)[0] - fixed_s)
        return found

    @cached_property
    def _sums_s(self) -> dict[tuple[int, ...], float]:
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

    def message(self, send: Action) -> tuple[Pair, Action, float]:
        """(source and destination of a send, the receive at its other end, seconds from device to device)."""
        op, away = _RECEIVE[send.op]
        ends = (self._costs.stages[number].ranks[0] for number in (send.stage, send.stage + away))
        seconds, _ = self._costs.of(send)
        return (next(ends), next(ends)), Action(op, send.stage + away, send.micro_batch), seconds

    @cached_property
    def _free_of_sums(self) -> Durations:
        free = replace(with_free_links(self._costs.profile), devices=self._costs.profile.devices)
        return Durations(self.plan, free)


class StepWord:
    """A rank's numbers of a step, and on rank 0 the ratios that the sums over all ranks come to.

    A number for the seconds of every rank's computing, for every member's in the sums of its group, and for every pair of ranks
    with neighbouring stages. Of a pair, the first message of a step there and the first one back are taken together, so that
    clocks of hosts need not agree.

    Args:
        scale: seconds of the clock per second of an emulated run.
    """

    def __init__(self, rank: int, plan: Plan, profile: ClusterProfile, schedule: Schedule, scale: float = 1.0) -> None:
        self._rank, self._plan, self._profile, self._schedule, self._scale = rank, plan, profile, schedule, scale
        self._by_length: dict[int, StepPrediction] = {}
        self._prediction: StepPrediction | None = None
        """Of the step that ``numbers`` has told."""
        self._members = list(
            dict.fromkeys(rank for _, _, stage in plan.numbered if stage.grouped for rank in stage.ranks)
        )
        self._round_trips = {} if profile.emulated else _round_trips(plan, schedule)

    def numbers(self, own: RankMeasurement | None, length: int = 0) -> NDArray[np.float64]:
        """The numbers of this rank for a step of ``length`` tokens per sequence; zeros before the first step."""
        ranks = [*self._plan.ranks, *self._members]
        if own is None:
            self._prediction = None
            return np.zeros(len(ranks) + len(self._round_trips))
        if length not in self._by_length:
            plan = replace(self._plan, sequence_length=length)
            self._by_length[length] = StepPrediction(plan, self._profile, self._schedule)
        self._prediction = self._by_length[length]
        computing_s = (own.passes_s - own.sums_s) / self._scale
        parts = [computing_s] * len(self._plan.ranks) + [own.sums_s] * len(self._members)
        trips = [self._part(self._prediction, sends, own.messages) for sends in self._round_trips.values()]
        return np.array([*(part * (rank == self._rank) for part, rank in zip(parts, ranks, strict=True)), *trips])

    def ratios(self, heard: NDArray[np.float64]) -> dict[WatchedPart, float]:
        """From the sums of all ranks' numbers. Left out: parts that matter little."""
        prediction, numbers = self._prediction, iter(map(float, heard))
        if prediction is None:
            return {}
        computing_s = dict(zip(self._plan.ranks, numbers, strict=False))
        sums_s = dict(zip(self._members, numbers, strict=False))
        messages_s = {
            pair: [(seconds, sum(prediction.message(send)[2] for send in sends))]
            for (pair, sends), seconds in zip(self._round_trips.items(), numbers, strict=True)
        }
        return prediction.ratios(computing_s, sums_s, messages_s)

    def _part(self, prediction: StepPrediction, sends: Sequence[Action], times: Mapping[str, float]) -> float:
        """This rank's part of the seconds of two messages: when they came minus when they began; not a number: not known."""
        seconds = 0.0
        for send in sends:
            (source, destination), receive, _ = prediction.message(send)
            seconds -= times.get(str(send), math.nan) if source == self._rank else 0.0
            seconds += times.get(str(receive), math.nan) if destination == self._rank else 0.0
        return seconds


def _round_trips(plan: Plan, schedule: Schedule) -> dict[Pair, tuple[Action, Action]]:
    """Two ranks -> the first message from a stage of the one to the next one, of the other, and the first one back."""
    found: dict[Pair, tuple[Action, Action]] = {}
    for (number, index, stage), (_, there, after) in itertools.pairwise(plan.numbered):
        a, b = stage.ranks[0], after.ranks[0]
        forward = (one for one in schedule[a] if one.op is Op.SEND_F and one.stage == number)
        backward = (one for one in schedule[b] if one.op is Op.SEND_B and one.stage == number + 1)
        messages = next(forward, None), next(backward, None)
        if index == there and a != b and messages[0] is not None and messages[1] is not None:
            found.setdefault((min(a, b), max(a, b)), (messages[0], messages[1]))
    return found


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of steps, one or more, beside those predicted of one."""

    steps_s: tuple[float, ...]
    predicted_s: float

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 without a prediction."""
        return self.step_s / self.predicted_s if self.predicted_s > 0 else 1.0

    @property
    def error(self) -> float:
        """Standard error of the median of the steps' logarithms; 0 of a single step."""
        logs = [math.log(seconds) for seconds in self.steps_s]
        return median_error(statistics.stdev(logs), len(logs)) if len(logs) > 1 else 0.0

    def clearly_below(self, other: StepTimes) -> bool:
        """Whether these steps are shorter by more than the steps of both scatter."""
        return math.log(other.step_s / self.step_s) > max(LEAST_GAIN, math.hypot(self.error, other.error))


@dataclass(frozen=True)
class StepComparison(StepTimes):
    """Steps of a plan as all ranks measured them, beside the prediction. A step's seconds: the mean of the ranks' wall times."""

    prediction: StepPrediction
    ratios: Mapping[Part, Sequence[float]]
    """Measured over predicted seconds, one for every step in which the part mattered."""
    operations: Mapping[int, Mapping[Op, float]]
    """Rank -> operation -> the median ratio of the steps."""

    @classmethod
    def of(cls, prediction: StepPrediction, steps: Sequence[Together], predicted_s: float) -> StepComparison:
        """``predicted_s``: of a whole step."""
        ratios = dict[Part, list[float]]()
        operations = dict[int, dict[Op, list[float]]]()
        for step in steps:
            for rank, own_s in prediction.computing_s.items():
                own = step[rank]
                for op, seconds in own_s.items():
                    measured_s = own.computing_s.get(op.value, 0.0) * (own.own_share if op in COMPUTE else 1.0)
                    if seconds > 0 and measured_s > 0 and prediction.matters(measured_s, seconds):
                        operations.setdefault(rank, {}).setdefault(op, []).append(measured_s / seconds)
            computing_s = {rank: own.own_share * own.passes_s for rank, own in step.items()}
            sums_s = {rank: own.sums_s for rank, own in step.items()}
            for part, ratio in prediction.ratios(computing_s, sums_s, _messages_s(prediction, step)).items():
                ratios.setdefault(part, []).append(ratio)
        for rank, of_rank in operations.items():
            if Op.STEP in of_rank:
                ratios[OptimizerSteps(rank)] = of_rank[Op.STEP]
        return cls(
            tuple(statistics.fmean(own.wall_s for own in step.values()) for step in steps),
            predicted_s,
            prediction,
            ratios,
            {rank: {op: statistics.median(own) for op, own in of.items()} for rank, of in operations.items()},
        )

    def calibrated_profile(self) -> ClusterProfile:
        """The profile of the prediction with its parts as long as they were, as far as that is beyond the noise."""
        return calibrated_profile(self.prediction.profile, self.prediction.plan, self.ratios)

    def deviations(self) -> list[str]:
        """Where a whole step is far from its prediction: a line for each part that is, the farthest first."""
        if _away(self.ratio) <= FAR:
            return []
        hosts, found = [device.host for device in self.prediction.profile.devices], list[tuple[float, str]]()
        for rank, of in self.operations.items():
            named = [f"{_NAMES[op]} {ratio:.3g}" for op, ratio in of.items() if _away(ratio) > FAR]
            found.append((max(map(_away, of.values())), f"{part_text(rank, hosts)}: {', '.join(named)}"))
        for part, ratios in self.ratios.items():
            if isinstance(part, GroupSums | LinkBetween):
                ratio = statistics.median(ratios)
                found.append((_away(ratio), f"{part_text(part, hosts)}: {ratio:.3g}"))
        far = [f"{text} times as long as predicted" for away, text in sorted(found, reverse=True) if away > FAR]
        return far[:MAX_NAMED] + [f"and {len(far) - MAX_NAMED} more"] * (len(far) > MAX_NAMED)


def _away(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def _messages_s(prediction: StepPrediction, step: Together) -> dict[Pair, list[tuple[float, float]]]:
    """(source, destination) -> measured and predicted seconds of each message, in the order in which they began."""
    times = {parse_action(text): at_s for own in step.values() for text, at_s in own.messages.items()}
    found: dict[Pair, list[tuple[float, float]]] = {}
    free_s: dict[Pair, float] = {}
    for send in sorted((action for action in times if action.op in _RECEIVE), key=times.__getitem__):
        pair, receive, predicted_s = prediction.message(send)
        if receive in times:
            began_s, came_s = times[send], times[receive]
            found.setdefault(pair, []).append((came_s - max(began_s, free_s.get(pair, began_s)), predicted_s))
            free_s[pair] = came_s
    return found


def with_other_programs(profile: ClusterProfile, plan: Plan, steps: Sequence[Together]) -> ClusterProfile:
    """``profile`` with the threads of other programs on hosts whose CPU ranks waited for cores in steps of ``plan``."""

    def other_threads(host: HostProfile, cores: float) -> float:
        """As many as take the cores from the ranks for as long as these waited for one while they computed."""
        devices = [profile.devices[rank] for rank in plan.ranks]
        ranks = [device.rank for device in devices if device.backend == "cpu" and device.host == host.name]
        stretches = []
        for step in steps:
            own = [step[rank] for rank in ranks]
            if (worked_s := sum(one.worked_s for one in own)) > 0:
                stretches.append((sum(one.passes_s for one in own) - sum(one.sums_s for one in own)) / worked_s)
        threads = sum(profile.devices[rank].threads for rank in ranks)
        stretch = statistics.median(stretches) if stretches else 1.0
        return round(stretch * cores - threads, 2) if stretch > CROWDED * max(1.0, threads / cores) else 0.0

    hosts = (
        host if host.cores is None else replace(host, other_threads=other_threads(host, host.cores))
        for host in profile.hosts
    )
    return replace(profile, hosts=tuple(hosts))
