"""Find the single-pipeline split that comes closest to fitting in memory, and the edits by which a given plan would fit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.decision.rules import plan_problems
from hetero_mpi.planning.memory import StageMode, shared_memories
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.orders.warm_up import scheduled_depths
from hetero_mpi.planning.tables import in_own_order
from hetero_mpi.planning.types.plan import HostMemory, PipelinePlan, Plan, PlanReport, RankMemory, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units
from hetero_mpi.util.grouping import grouped

KindOrder = tuple[int, ...]
"""The kind of rank at each stage."""


class ClosestSplit(NamedTuple):
    """The split that minimises the largest shortage of any rank; a negative shortage means that it fits."""

    shortage_bytes: float
    plan: Plan
    """A plan with one pipeline; ``Fitter.fitted`` chooses recomputation."""


class _Shortages:
    """Memory shortages of stages by kind of rank (equal memory and activation ratio), at the smallest micro-batch size."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.memory = profile, request, MemoryModel(profile, request)
        self.layer_count, self.micro_batch = len(profile.model.layers), min(request.micro_batch_choices)
        devices = in_own_order(profile, self.micro_batch * request.sequence_length)
        by_kind = grouped(devices, lambda device: (self.memory.usable[device.rank], device.activation_ratio))
        self.kinds = sorted(by_kind, key=lambda kind: (-kind[0], kind[1]))
        self.ranks = [[device.rank for device in by_kind[kind]] for kind in self.kinds]
        self.longest = min(sum(map(len, self.ranks)), self.layer_count)
        self.least = lru_cache(maxsize=None)(self._least)
        self._own = lru_cache(maxsize=None)(self._by_stage)

    def in_flight(self, stages: int) -> int:
        """Micro-batches in flight at the first of the last ``stages`` stages: one, unless the schedule prescribes more."""
        if self.request.schedule == "auto":
            return 1
        count = self.request.global_batch // self.micro_batch
        return min(scheduled_depths(self.request.schedule, stages, count)[0] + 1, count)

    def _by_stage(self, kind: int, in_flight: int) -> NDArray[np.float64]:
        """[first, last]: missing bytes with the recompute choice that needs least memory; negative if the stage fits."""
        usable, ratio = self.kinds[kind]
        tables = [
            self.memory.stage_bytes(*self.memory.every, self.micro_batch, StageMode(again), ratio=ratio)
            for again in self.request.recompute_choices
        ]
        return np.asarray(np.minimum.reduce([fixed + in_flight * each for fixed, each in tables]) - usable)

    def _by_cut(self, order: KindOrder) -> NDArray[np.float64]:
        """[first, last]: smallest possible maximum shortage over ``order`` if its first stage holds these layers."""
        return np.asarray(np.maximum(self._own(order[0], self.in_flight(len(order))), self.least(order[1:])))

    def _least(self, order: KindOrder) -> NDArray[np.float64]:
        """[first]: smallest possible maximum shortage over ``order`` if it starts at that layer."""
        if order:
            return np.asarray(self._by_cut(order).min(axis=1))
        nothing = np.full(self.layer_count + 1, np.inf)
        nothing[self.layer_count] = -np.inf
        return nothing

    def plan(self, order: KindOrder) -> Plan:
        """The plan with the best cuts for ``order``."""
        cuts, waiting = [0], [iter(members) for members in self.ranks]
        for number in range(len(order)):
            cuts.append(int(self._by_cut(order[number:])[cuts[-1]].argmin()))
        stages = tuple(
            StagePlan((next(waiting[kind]),), cuts[i], cuts[i + 1], self.in_flight(len(order) - i) - 1)
            for i, kind in enumerate(order)
        )
        batch, length = self.request.global_batch, self.request.sequence_length
        return Plan((PipelinePlan(stages, self.micro_batch, batch),), batch, length, self.layer_count)


def closest_split(profile: ClusterProfile, request: PlanRequest) -> ClosestSplit:
    """Find the closest split over the 1, 2, ... ranks with the most memory, largest first or largest last."""
    shortages = _Shortages(profile, request)
    largest = tuple(kind for kind, members in enumerate(shortages.ranks) for _ in members)[: shortages.longest]
    counts = range(1 if request.allow_idle else len(largest), len(largest) + 1)
    orders = {largest[:count][::direction] for count in counts for direction in (1, -1)}
    shortage_bytes, _, order = min((float(shortages.least(order)[0]), len(order), order) for order in orders)
    return ClosestSplit(shortage_bytes, shortages.plan(order))


def with_hosts_divided(profile: ClusterProfile) -> Iterator[ClusterProfile]:
    """Yield profiles in which shared host memory is divided evenly, then profiles in which one rank gets half of it or more."""
    shared = shared_memories(profile)
    if not shared:
        yield profile
        return
    size = max(len(ranks) for _, ranks in shared)
    for favoured, share in [(0, 0.0), *((index, share) for share in (0.5, 0.75, 1.0) for index in range(min(size, 4)))]:
        devices = list(profile.devices)
        for host, ranks in shared:
            for index, rank in enumerate(ranks):
                rank_share = share if index == favoured % len(ranks) else (1 - share) / (len(ranks) - 1)
                rank_share = rank_share if share else 1 / len(ranks)
                devices[rank] = replace(
                    devices[rank], memory_bytes=min(devices[rank].memory_bytes, int(host.memory_bytes * rank_share))
                )
        yield replace(profile, devices=tuple(devices))


def short_places(report: PlanReport) -> dict[int | str, RankMemory | HostMemory]:
    """Map each rank (a number) and host (a name) whose memory is short to its needs."""
    needs: dict[int | str, RankMemory | HostMemory] = {memory.rank: memory for memory in report.memory}
    needs |= {memory.host: memory for memory in report.hosts}
    return {name: memory for name, memory in needs.items() if memory.peak_bytes > memory.usable_bytes}


def edits_that_help(report: PlanReport, profile: ClusterProfile, request: PlanRequest) -> str:
    """List the changes to a given plan that can help where its memory is short."""
    short = short_places(report)
    ranks = {device.rank for device in profile.devices if device.rank in short or device.host in short}
    stages = [stage for _, _, stage in report.plan.numbered]
    short_stages = [stage for stage in stages if ranks & {*stage.ranks}]
    helps = ["fewer layers"] * any(stage.last - stage.first > 1 for stage in short_stages)
    helps += ["a lower warm_up"] * any(stage.warm_up > 0 for stage in short_stages)
    for setting, changed in (
        ("recompute", [replace(stage, recompute=stage.recompute or stage in short_stages) for stage in stages]),
        ("streamed", [replace(stage, streamed=stage.streamed or stage in short_stages) for stage in stages]),
    ):
        plan = report.plan.with_stages(changed)
        if not any(plan_problems(plan, profile)) and MemoryModel(profile, request).check(plan):
            helps.append(f"{setting} = true (with it, the plan fits)")
    return f"What can help {units.ranks(ranks & {*report.plan.ranks})}: {', '.join(helps) or 'more memory'}"
