"""Compare measured steps with their prediction, for calibration, rebalancing and reports.

    RankMeasurement      one rank's compute and all-reduce seconds, and message times
    StepPrediction       its predicted counterparts; ``ratios``: measured over predicted per part of a step
    StepComparison       ratios over several steps: noise, deviations, the calibrated profile

Calibration compares all its steps at once, rebalancing each step as it ends. Wait time is excluded: a group's all-reduce
counts as the minimum over its members, and a message starts when its link is free.
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
from hetero_mpi.planning.schedule import COMPUTE, COMPUTING, SENDS, Action, Event, MeasuredEvent, Op, Schedule
from hetero_mpi.planning.types.cluster_changes import with_free_links
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

MIN_CROWDED_STRETCH = 1.1
"""Minimum ratio of wall time to CPU time at which ranks are assumed to wait for other programs."""
MAX_NAMED = 4
"""Maximum number of deviations reported."""
MIN_COMPARED_RATIO = 0.02
"""Actions below this share of the step are too noisy to compare."""
MIN_DEVIATION = 2.0
"""Deviations are reported only if they exceed this factor."""
MIN_GAIN_RATIO = 0.03
"""Minimum relative gain; predictions are too inaccurate for smaller ones to count."""
_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "the input part of backward",
    Op.W: "the weight part of backward",
    Op.STEP: "the optimizer's step",
}
Seconds = Mapping[int, float]


@dataclass(frozen=True)
class RankMeasurement:
    """One rank's measurements of a step, in types that JSON supports."""

    rank: int
    computing_s: Mapping[str, float]
    """Operation -> seconds."""
    sums_s: float
    """Seconds in the all-reduces of its tensor-parallel group."""
    messages: Mapping[str, float]
    """Action -> time at which a send starts or a message arrives on the device; unknown times are missing."""
    wall_s: float = 0.0
    """Seconds since the end of the previous step."""
    worked_s: float = 0.0
    """CPU seconds that a CPU rank spends in forwards and backwards."""

    @classmethod
    def from_events(
        cls, rank: int, events: Iterable[Event], began_s: float, wall_s: float = 0.0, worked_s: float = 0.0
    ) -> RankMeasurement:
        """Summarise ``events``, whose times are relative to ``began_s``."""
        computing_s, sums_s, messages = dict[str, float](), 0.0, dict[str, float]()
        for event in events:
            op = event.action.op
            sums_s += event.exchanged_s
            if op in COMPUTING:
                computing_s[op.value] = computing_s.get(op.value, 0.0) + event.end_s - event.start_s
            elif op in SENDS:
                messages[str(event.action)] = began_s + event.start_s
            elif isinstance(event, MeasuredEvent) and event.arrived_s is not None:
                messages[str(event.action)] = began_s + (event.arrived_s + event.copied_s)
        return cls(rank, computing_s, sums_s, messages, wall_s, worked_s)

    @property
    def passes_s(self) -> float:
        """Seconds in forwards and backwards, including group all-reduces."""
        return sum(self.computing_s.get(op.value, 0.0) for op in COMPUTE)

    @property
    def own_share(self) -> float:
        """Fraction of forward and backward time that is not spent in group all-reduces."""
        return (self.passes_s - self.sums_s) / self.passes_s if self.passes_s > 0 else 1.0


StepByRank = Mapping[int, RankMeasurement]
"""Rank -> its measurements, for each active rank."""


class StepPrediction:
    """Predicted counterparts of ``RankMeasurement``."""

    def __init__(self, plan: Plan, profile: ClusterProfile, schedule: Schedule) -> None:
        self.plan, self.profile, self._schedule = plan, profile, schedule
        self._costs = Durations(plan, profile)
        self._crowded = self._costs.profile is not profile
        """Whether ranks have less than one core per thread."""

    def ratios(
        self, computing_s: Seconds, sums_s: Seconds, messages_s: Mapping[Pair, Sequence[tuple[float, float]]]
    ) -> dict[WatchedPart, float]:
        """Measured over predicted seconds of each significant part of a step.

        A tensor-parallel group counts as one device, as slow as its slowest member. Links within a host are left out if its
        ranks compete for cores.

        Args:
            computing_s: seconds of forwards and backwards without all-reduces, by rank.
            sums_s: seconds of all-reduces, by group member.
            messages_s: (source, destination) -> (measured, predicted) seconds of each message.
        """
        ratio_by_part = dict[WatchedPart, float]()
        for rank, own_s in self.computing_s.items():
            predicted_s, leader = sum(own_s.get(op, 0.0) for op in COMPUTE), self.plan.leader_of.get(rank, rank)
            if predicted_s > 0:
                ratio_by_part[leader] = max(ratio_by_part.get(leader, 0.0), computing_s[rank] / predicted_s)
        for ranks, predicted_s in self._sums_s.items():
            measured_s = min(sums_s[rank] for rank in ranks)
            if predicted_s > 0 and self.matters(measured_s, predicted_s):
                ratio_by_part[GroupSums(ranks)] = measured_s / predicted_s
        hosts = [device.host for device in self.profile.devices]
        for (a, b), messages in messages_s.items():
            measured_s, predicted_s = (sum(column) for column in zip(*messages, strict=True))
            crowded = self._crowded and hosts[a] == hosts[b]
            if predicted_s > 0 and self.matters(measured_s, predicted_s) and not crowded:
                ratios = [max(0.0, own_s) / other_s for own_s, other_s in messages if other_s > 0]
                ratio_by_part[LinkBetween((a, b))] = statistics.median(ratios)
        return {part: ratio for part, ratio in ratio_by_part.items() if ratio > 0}

    def matters(self, measured_s: float, predicted_s: float) -> bool:
        """Whether an action takes a significant share of the step."""
        return max(predicted_s, measured_s) > self._least_s

    @cached_property
    def _least_s(self) -> float:
        return MIN_COMPARED_RATIO * max((sum(own_s.values()) for own_s in self.computing_s.values()), default=0.0)

    @cached_property
    def computing_s(self) -> dict[int, dict[Op, float]]:
        """Map rank and operation to seconds per step, excluding all-reduces and the optimizer's fixed time."""
        seconds_by_rank = dict[int, dict[Op, float]]()
        for rank, actions in self._schedule.items():
            rank_seconds = seconds_by_rank.setdefault(rank, {})
            for action in actions:
                if action.op in COMPUTING:
                    costs = self._free_of_sums if self._costs.stages[action.stage].grouped else self._costs
                    fixed_s = self._costs.profile.devices[rank].optimizer_fixed_s if action.op is Op.STEP else 0.0
                    own_s = max(0.0, costs.cost_of(action)[0] - fixed_s)
                    rank_seconds[action.op] = rank_seconds.get(action.op, 0.0) + own_s
        return seconds_by_rank

    @cached_property
    def _sums_s(self) -> dict[tuple[int, ...], float]:
        """Map each group's ranks to the seconds per step that it spends in all-reduces."""

        def passes_s(rank: int, costs: Durations) -> float:
            return sum(costs.cost_of(action)[0] for action in self._schedule[rank] if action.op in COMPUTE)

        groups = [stage.ranks for _, _, stage in self.plan.numbered if stage.grouped]
        return {ranks: passes_s(ranks[0], self._costs) - passes_s(ranks[0], self._free_of_sums) for ranks in groups}

    def message(self, send: Action) -> tuple[Pair, Action, float]:
        """Source and destination of ``send``, the matching receive, and the seconds from device to device."""
        receive = send.other_end()
        source, destination = (self._costs.stages[end.stage].ranks[0] for end in (send, receive))
        return (source, destination), receive, self._costs.cost_of(send)[0]

    @cached_property
    def _free_of_sums(self) -> Durations:
        free = replace(with_free_links(self._costs.profile), devices=self._costs.profile.devices)
        return Durations(self.plan, free)


class StepExchange:
    """Condenses a rank's measurements into numbers; from their sum over all ranks, rank 0 computes the ratios.

    There is one number per rank (compute time), per group member (all-reduces) and per pair of neighbouring ranks (the first
    round trip, so that host clocks need not agree).

    Args:
        scale: clock seconds per second of an emulated run.
    """

    def __init__(self, rank: int, plan: Plan, profile: ClusterProfile, schedule: Schedule, scale: float = 1.0) -> None:
        self._rank, self._plan, self._profile, self._schedule, self._scale = rank, plan, profile, schedule, scale
        self._by_length: dict[int, StepPrediction] = {}
        self._prediction: StepPrediction | None = None
        """The prediction for the step passed to the last call of ``numbers``."""
        self._members = list(dict.fromkeys(rank for _, _, s in plan.numbered if s.grouped for rank in s.ranks))
        self._round_trips = {} if profile.emulated else _round_trips(plan)

    def numbers(self, record: RankMeasurement | None, length: int = 0) -> NDArray[np.float64]:
        """This rank's numbers for a step with ``length`` tokens per sequence; zeros if there is no ``record``."""
        ranks = [*self._plan.ranks, *self._members]
        if record is None:
            self._prediction = None
            return np.zeros(len(ranks) + len(self._round_trips))
        if length not in self._by_length:
            plan = replace(self._plan, sequence_length=length)
            self._by_length[length] = StepPrediction(plan, self._profile, self._schedule)
        self._prediction = self._by_length[length]
        computing_s = (record.passes_s - record.sums_s) / self._scale
        parts = [computing_s] * len(self._plan.ranks) + [record.sums_s] * len(self._members)
        trips = [self._part(self._prediction, sends, record.messages) for sends in self._round_trips.values()]
        return np.array([*(part * (rank == self._rank) for part, rank in zip(parts, ranks, strict=True)), *trips])

    def ratios(self, summed_numbers: NDArray[np.float64]) -> dict[WatchedPart, float]:
        """Measured-to-predicted ratios of the significant parts, from values summed over all ranks."""
        prediction, numbers = self._prediction, iter(map(float, summed_numbers))
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
        """This rank's contribution to a round trip in seconds: arrivals minus starts; NaN if a time is unknown."""
        seconds = 0.0
        for send in sends:
            (source, destination), receive, _ = prediction.message(send)
            seconds -= times.get(str(send), math.nan) if source == self._rank else 0.0
            seconds += times.get(str(receive), math.nan) if destination == self._rank else 0.0
        return seconds


def _round_trips(plan: Plan) -> dict[Pair, tuple[Action, Action]]:
    """Map each pair of ranks to the first micro-batch's message between their neighbouring stages and its message back."""
    round_trips: dict[Pair, tuple[Action, Action]] = {}
    for (number, index, stage), (_, next_index, after) in itertools.pairwise(plan.numbered):
        a, b = stage.ranks[0], after.ranks[0]
        if index == next_index and a != b:
            messages = Action(Op.SEND_F, number, 0), Action(Op.SEND_B, number + 1, 0)
            round_trips.setdefault((min(a, b), max(a, b)), messages)
    return round_trips


@dataclass(frozen=True)
class StepTimes:
    """Measured step times and the predicted one, in seconds."""

    steps_s: tuple[float, ...]
    predicted_s: float

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Measured over predicted step time; 1 if there is no prediction."""
        return self.step_s / self.predicted_s if self.predicted_s > 0 else 1.0

    @property
    def error(self) -> float:
        """Standard error of the median's logarithm; 0 for a single step."""
        logs = [math.log(seconds) for seconds in self.steps_s]
        return median_error(statistics.stdev(logs), len(logs)) if len(logs) > 1 else 0.0

    def clearly_below(self, reference: StepTimes) -> bool:
        """Whether these steps are shorter than those of ``reference`` by more than the noise of both."""
        return math.log(reference.step_s / self.step_s) > max(MIN_GAIN_RATIO, math.hypot(self.error, reference.error))


@dataclass(frozen=True)
class StepComparison(StepTimes):
    """Measured steps of a plan (wall time averaged over ranks) compared with the prediction."""

    prediction: StepPrediction
    ratios: Mapping[Part, Sequence[float]]
    """Measured over predicted seconds, one value per step in which the part is significant."""
    operations: Mapping[int, Mapping[Op, float]]
    """Rank -> operation -> median ratio of measured to predicted seconds."""

    @classmethod
    def from_steps(cls, prediction: StepPrediction, steps: Sequence[StepByRank], predicted_s: float) -> StepComparison:
        """Compare ``steps`` with a predicted step of ``predicted_s`` seconds."""
        ratios = dict[Part, list[float]]()
        operations = dict[int, dict[Op, list[float]]]()
        for step in steps:
            for rank, own_s in prediction.computing_s.items():
                record = step[rank]
                for op, seconds in own_s.items():
                    measured_s = record.computing_s.get(op.value, 0.0) * (record.own_share if op in COMPUTE else 1.0)
                    if seconds > 0 and measured_s > 0 and prediction.matters(measured_s, seconds):
                        operations.setdefault(rank, {}).setdefault(op, []).append(measured_s / seconds)
            computing_s = {rank: record.own_share * record.passes_s for rank, record in step.items()}
            sums_s = {rank: record.sums_s for rank, record in step.items()}
            for part, ratio in prediction.ratios(computing_s, sums_s, _messages_s(prediction, step)).items():
                ratios.setdefault(part, []).append(ratio)
        for rank, of_rank in operations.items():
            if Op.STEP in of_rank:
                ratios[OptimizerSteps(rank)] = of_rank[Op.STEP]
        return cls(
            tuple(statistics.fmean(record.wall_s for record in step.values()) for step in steps),
            predicted_s,
            prediction,
            ratios,
            {rank: {op: statistics.median(record) for op, record in of.items()} for rank, of in operations.items()},
        )

    def calibrated_profile(self) -> ClusterProfile:
        """The profile calibrated to the measured steps."""
        return calibrated_profile(self.prediction.profile, self.prediction.plan, self.ratios)

    def deviations(self) -> list[str]:
        """Describe the parts that deviate in the direction of the whole step, largest first; empty if the whole does not."""
        direction = 1 if self.ratio > 1 else -1  # a slow step is not explained by a fast part
        if self.ratio**direction <= MIN_DEVIATION:
            return []
        hosts, lines = [device.host for device in self.prediction.profile.devices], list[tuple[float, str]]()
        for rank, of in self.operations.items():
            named = [f"{_NAMES[op]} {ratio:.3g}" for op, ratio in of.items() if ratio**direction > MIN_DEVIATION]
            lines.append(
                (max(ratio**direction for ratio in of.values()), f"{part_text(rank, hosts)}: {', '.join(named)}")
            )
        for part, ratios in self.ratios.items():
            if isinstance(part, GroupSums | LinkBetween):
                ratio = statistics.median(ratios)
                lines.append((ratio**direction, f"{part_text(part, hosts)}: {ratio:.3g}"))
        far = [f"{text} times as long as predicted" for off, text in sorted(lines, reverse=True) if off > MIN_DEVIATION]
        return far[:MAX_NAMED] + [f"and {len(far) - MAX_NAMED} more"] * (len(far) > MAX_NAMED)


def _messages_s(prediction: StepPrediction, step: StepByRank) -> dict[Pair, list[tuple[float, float]]]:
    """Map (source, destination) to the measured and predicted seconds of each message, in start order."""
    times = {Action.parse(text): at_s for record in step.values() for text, at_s in record.messages.items()}
    messages_s: dict[Pair, list[tuple[float, float]]] = {}
    free_s: dict[Pair, float] = {}
    for send in sorted((action for action in times if action.op in SENDS), key=times.__getitem__):
        pair, receive, predicted_s = prediction.message(send)
        if receive in times:
            began_s, came_s = times[send], times[receive]
            messages_s.setdefault(pair, []).append((came_s - max(began_s, free_s.get(pair, began_s)), predicted_s))
            free_s[pair] = came_s
    return messages_s


def with_other_programs(profile: ClusterProfile, plan: Plan, steps: Sequence[StepByRank]) -> ClusterProfile:
    """Add other programs' threads to hosts whose CPU ranks waited for cores."""

    def other_threads(host: HostProfile, cores: float) -> float:
        """Number of threads that explains the measured stretch of compute time."""
        devices = (profile.devices[rank] for rank in plan.ranks)
        ranks = [device.rank for device in devices if (device.backend, device.host) == ("cpu", host.name)]
        stretches = []
        for step in steps:
            records = [step[rank] for rank in ranks]
            if (worked_s := sum(r.worked_s for r in records)) > 0:
                stretches.append((sum(r.passes_s for r in records) - sum(r.sums_s for r in records)) / worked_s)
        threads = sum(profile.devices[rank].threads for rank in ranks)
        stretch = statistics.median(stretches) if stretches else 1.0
        return round(stretch * cores - threads, 2) if stretch > MIN_CROWDED_STRETCH * max(1.0, threads / cores) else 0.0

    hosts = (
        host if host.cores is None else replace(host, other_threads=other_threads(host, host.cores))
        for host in profile.hosts
    )
    return replace(profile, hosts=tuple(hosts))
