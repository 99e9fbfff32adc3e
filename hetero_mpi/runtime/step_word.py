"""What ranks tell of every step during a run, in a few numbers: for what ``planning.analysis.drift`` watches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.engine.trainer import StepResult
from hetero_mpi.planning.analysis.drift import GroupSums, LinkBetween, Watched
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, Schedule
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.runtime.measuring import LEAST_SHARE, Expected, Pair, message_at_s


class StepWord:
    """What ranks tell of a step in a few numbers, which are added up over all of them: measured over predicted seconds.

    A number for every rank's computing, for every member's sums, and for every link between neighbouring stages. Of a link, the
    first message of a step there and the first one back are taken together, so that clocks of hosts need not agree.
    """

    def __init__(self, rank: int, plan: Plan, profile: ClusterProfile, schedule: Schedule) -> None:
        self._rank, self._plan, self._profile, self._schedule = rank, plan, profile, schedule
        self._by_length: dict[int, Expected] = {}
        self._told: Expected | None = None
        """Of the step that ``numbers`` has told."""
        groups = dict.fromkeys(stage.ranks for _, _, stage in plan.numbered if stage.grouped)
        self._sums = [(ranks, rank) for ranks in groups for rank in ranks]
        self._links = self._round_trips() if not profile.emulated else {}
        self._size = len(plan.ranks) + len(self._sums) + len(self._links)

    def numbers(self, step: StepResult | None, scale: float = 1.0) -> NDArray[np.float64]:
        """Of this rank; zeros before the first step. ``scale``: of an emulated run's times."""
        if step is None:
            self._told = None
            return np.zeros(self._size)
        expected = self._told = self._of_length(step.length)
        seconds, times = 0.0, dict[Action, float]()
        for event in step.events:
            if event.action.op in COMPUTE:
                seconds += event.end_s - event.start_s
            elif (at_s := message_at_s(event)) is not None:
                times[event.action] = step.began_s + at_s
        own = expected.computing_s.get(self._rank, {})
        predicted_s = scale * sum(own.get(op, 0.0) for op in COMPUTE)
        computing = (seconds - step.sums_s) / predicted_s if predicted_s > 0 else 0.0
        return np.array(
            [
                *(computing * (rank == self._rank) for rank in self._plan.ranks),
                *(
                    step.sums_s / expected.sums_s[ranks] if rank == self._rank and expected.sums_s[ranks] > 0 else 0.0
                    for ranks, rank in self._sums
                ),
                *(self._part(expected, messages, times) for messages in self._links.values()),
            ]
        )

    def ratios(self, told: NDArray[np.float64]) -> dict[Watched, float]:
        """From all ranks' numbers. Left out: what matters little."""
        expected, found = self._told, dict[Watched, float]()
        if expected is None:
            return found
        least_s = LEAST_SHARE * expected.step_s
        numbers = iter(map(float, told))
        computing = dict(zip(self._plan.ranks, numbers, strict=False))
        for rank, leader in self._plan.leader_of.items():
            computing[leader] = max(computing[leader], computing.pop(rank))
        found.update((rank, ratio) for rank, ratio in computing.items() if ratio > 0)
        sums = dict[tuple[int, ...], float]()
        for (ranks, _), ratio in zip(self._sums, numbers, strict=False):
            sums[ranks] = min(ratio, sums.get(ranks, math.inf))
        for ranks, ratio in sums.items():
            if max(1.0, ratio) * expected.sums_s[ranks] > least_s and ratio > 0:
                found[GroupSums(ranks)] = ratio
        for (pair, messages), ratio in zip(self._links.items(), numbers, strict=True):
            matters = max(1.0, ratio) * _both_s(expected, messages) > least_s
            if matters and ratio > 0 and not (expected.crowded and self._on_one_host(pair)):
                found[LinkBetween(pair)] = ratio
        return found

    def _of_length(self, length: int) -> Expected:
        if length not in self._by_length:
            plan = replace(self._plan, sequence_length=length)
            self._by_length[length] = Expected(plan, self._profile, self._schedule)
        return self._by_length[length]

    def _on_one_host(self, pair: Pair) -> bool:
        return len({self._profile.devices[rank].host for rank in pair}) == 1

    def _round_trips(self) -> dict[Pair, tuple[Action, Action]]:
        """Two ranks -> the first message from a stage of the one to the next one, of the other, and the first one back."""
        found: dict[Pair, tuple[Action, Action]] = {}
        for (number, index, stage), (_, there, after) in itertools.pairwise(self._plan.numbered):
            a, b = stage.ranks[0], after.ranks[0]
            forward = (one for one in self._schedule[a] if one.op is Op.SEND_F and one.stage == number)
            backward = (one for one in self._schedule[b] if one.op is Op.SEND_B and one.stage == number + 1)
            messages = next(forward, None), next(backward, None)
            if index == there and a != b and messages[0] is not None and messages[1] is not None:
                found.setdefault((min(a, b), max(a, b)), (messages[0], messages[1]))
        return found

    def _part(self, expected: Expected, messages: Sequence[Action], times: Mapping[Action, float]) -> float:
        """This rank's part of the ratio of two messages: when they came minus when they began; not a number: not known."""
        seconds, both_s = 0.0, _both_s(expected, messages)
        for send in messages:
            (source, destination), receive, _ = expected.message(send)
            seconds -= times.get(send, math.nan) if source == self._rank else 0.0
            seconds += times.get(receive, math.nan) if destination == self._rank else 0.0
        return seconds / both_s if both_s > 0 else math.nan


def _both_s(expected: Expected, messages: Sequence[Action]) -> float:
    return sum(expected.message(send)[2] for send in messages)
