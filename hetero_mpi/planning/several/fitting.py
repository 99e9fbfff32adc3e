"""Plans as memory allows them: recompute where it asks for that, and shallower depths where that is not enough."""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi.planning.memory import memory_of, stage_holdings, usable_bytes
from hetero_mpi.planning.orders.warm_up import weight_lag
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.tables import shared_memories
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest


class Fitter:
    """Fits plans of one profile and request into memory, and times them."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request = profile, request
        self._needs: dict[tuple[object, ...], int] = {}
        self._shared = shared_memories(profile)

    def step_s(self, plan: Plan) -> float:
        return outlined(plan, self.profile).step_s

    def fitted(self, plan: Plan, sparing: frozenset[int] = frozenset()) -> Plan | None:
        """``plan`` with recompute where memory asks for it and nowhere else but on ``sparing`` ranks, shallower where that is not
        enough; None: it does not fit even so."""
        pipelines, peaks = [], {}
        for pipeline in plan.pipelines:
            fitting = self._fitted(pipeline, sparing)
            if fitting is None:
                return None
            pipelines.append(fitting)
            for stage in fitting.stages:
                peaks[stage.ranks[0]] = self._need(fitting, stage)
        short: set[int] = set()
        for host, ranks in self._shared:
            limit = usable_bytes(host.memory_bytes, self.request.memory_reserve)
            if sum(peaks.get(rank, 0) for rank in ranks) > limit:
                short.update(ranks)
        if short - sparing and True in self.request.recompute_choices:
            return self.fitted(plan, sparing | short)
        return None if short else replace(plan, pipelines=tuple(pipelines))

    def _fitted(self, pipeline: PipelinePlan, sparing: frozenset[int]) -> PipelinePlan | None:
        choices, place = sorted(set(self.request.recompute_choices)), 0
        while place < len(pipeline.stages):
            own = choices[-1:] if pipeline.stages[place].ranks[0] in sparing else choices
            ways = (_with_stage(pipeline, place, recompute=again) for again in own)
            found = next((way for way in ways if self.fits(way, way.stages[place])), None)
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

    def fits(self, pipeline: PipelinePlan, stage: StagePlan) -> bool:
        """Does its rank hold ``stage``, as one of the pipeline's?"""
        device = self.profile.devices[stage.ranks[0]]
        return self._need(pipeline, stage) <= usable_bytes(device.memory_bytes, self.request.memory_reserve)

    def _need(self, pipeline: PipelinePlan, stage: StagePlan) -> int:
        """Peak bytes of ``stage``."""
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
