"""Plans as memory allows them: recompute where it asks for that, and shallower depths where that is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hetero_mpi.planning.memory import (
    elsewhere_bytes,
    memory_of,
    memory_suffices,
    stage_holdings,
    usable_bytes,
    with_state_weights,
)
from hetero_mpi.planning.orders.warm_up import weight_lag
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.tables import shared_memories
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest


class _Sharing(NamedTuple):
    """Pipelines that own as much each of the state."""

    pipelines: int
    levelled: bool
    """Who has less memory than the mean owns less: others take that."""


NOTHING_SHARED = _Sharing(1, False)


class Fitter:
    """Fits plans of one profile and request into memory, and times them."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request = profile, request
        self._needs: dict[tuple[object, ...], int] = {}
        self._shared = shared_memories(profile)
        self._usable = [usable_bytes(device.memory_bytes, request.memory_reserve) for device in profile.devices]
        self._mean = sum(self._usable) // len(self._usable)

    def step_s(self, plan: Plan) -> float:
        return outlined(plan, self.profile).step_s

    def fitted(self, plan: Plan) -> Plan | None:
        """``plan`` with recompute where memory asks for it and nowhere else, shallower where that is not enough; None: it does not
        fit even so. Where ranks have no room for all the state of what they hold, it is dealt out by what they leave free."""
        count, reserve = len(plan.pipelines), self.request.memory_reserve
        if count == 1 or not self.profile.model.trained_whole:
            return self._fitted(plan, NOTHING_SHARED)
        for sharing in (_Sharing(count, True), _Sharing(count, False)):
            found = self._fitted(plan, sharing)
            if found is not None and self._suffices(found.pipelines, NOTHING_SHARED):
                return found
            found = None if found is None else with_state_weights(found, self.profile, reserve)
            if found is not None and memory_suffices(found, self.profile, reserve):
                return found
        return self._fitted(plan, NOTHING_SHARED)

    def _fitted(self, plan: Plan, sharing: _Sharing, sparing: frozenset[int] = frozenset()) -> Plan | None:
        """``sparing``: ranks that repeat forwards if they may."""
        pipelines = []
        for pipeline in plan.pipelines:
            fitting = self._pipeline(pipeline, sharing, sparing)
            if fitting is None:
                return None
            pipelines.append(fitting)
        short = self._short(pipelines, sharing)
        if short - sparing and True in self.request.recompute_choices:
            return self._fitted(plan, sharing, sparing | short)
        return None if short else replace(plan, pipelines=tuple(pipelines))

    def _short(self, pipelines: Sequence[PipelinePlan], sharing: _Sharing) -> set[int]:
        """Ranks that compute in the memory of a host that has too little for them together."""
        if not self._shared:
            return set()
        peaks = {
            stage.ranks[0]: self._need(one, stage) - elsewhere_bytes(self.profile, stage, sharing.pipelines)
            for one in pipelines
            for stage in one.stages
        }
        reserve, short = self.request.memory_reserve, set[int]()
        for host, ranks in self._shared:
            if sum(peaks.get(rank, 0) for rank in ranks) > usable_bytes(host.memory_bytes, reserve):
                short.update(ranks)
        return short

    def _pipeline(self, pipeline: PipelinePlan, sharing: _Sharing, sparing: frozenset[int]) -> PipelinePlan | None:
        choices, place = sorted(set(self.request.recompute_choices)), 0
        while place < len(pipeline.stages):
            own = choices[-1:] if pipeline.stages[place].ranks[0] in sparing else choices
            ways = (_with_stage(pipeline, place, recompute=again) for again in own)
            found = next((way for way in ways if self.fits(way, way.stages[place], sharing)), None)
            if found is not None:
                pipeline, place = found, place + 1
                continue
            if pipeline.split_backward and pipeline.stages[place].warm_up == 0:
                place = 0  # the deeper the first stage, the more backwards the others put off
            most = pipeline.stages[place].warm_up - 1
            if most < 0 or self.request.schedule != "auto":
                return None
            stages = tuple(
                replace(s, warm_up=min(s.warm_up, most)) if i >= place else s for i, s in enumerate(pipeline.stages)
            )
            pipeline = replace(pipeline, stages=stages)
        return pipeline

    def _suffices(self, pipelines: Sequence[PipelinePlan], sharing: _Sharing) -> bool:
        held = all(self.fits(one, stage, sharing) for one in pipelines for stage in one.stages)
        return held and not self._short(pipelines, sharing)

    def fits(self, pipeline: PipelinePlan, stage: StagePlan, sharing: _Sharing = NOTHING_SHARED) -> bool:
        """Does its rank hold ``stage``, as one of the pipeline's?"""
        room, elsewhere = self._usable[stage.ranks[0]], 0
        if sharing.pipelines > 1:
            elsewhere = elsewhere_bytes(self.profile, stage, sharing.pipelines)
            if sharing.levelled:
                room += min(max(0, self._mean - room), elsewhere // (sharing.pipelines - 1))
        return self._need(pipeline, stage) - elsewhere <= room

    def _need(self, pipeline: PipelinePlan, stage: StagePlan) -> int:
        """Peak bytes of ``stage``, with all the state of what it holds."""
        split = pipeline.split_backward and stage is not pipeline.stages[0]
        lag = weight_lag(pipeline, stage) if split else 0
        lists = (split, lag, min(stage.warm_up, pipeline.micro_batches - 1), pipeline.micro_batches)
        device = self.profile.devices[stage.ranks[0]]
        kind = device.activation_ratio, device.shares_host_memory
        way = stage.recompute, stage.streamed, stage.slice_sequences
        key = (stage.first, stage.last, way, pipeline.micro_batch, lists, kind)
        if key not in self._needs:
            self._needs[key] = max(
                memory_of(self.profile, pipeline, stage, self.request.sequence_length, holding).total
                for holding in stage_holdings(pipeline, stage, self.profile.model)
            )
        return self._needs[key]


def _with_stage(pipeline: PipelinePlan, place: int, recompute: bool) -> PipelinePlan:
    stage = replace(pipeline.stages[place], recompute=recompute)
    return replace(pipeline, stages=(*pipeline.stages[:place], stage, *pipeline.stages[place + 1 :]))
