"""Makes a plan better by small changes of everything it decides, each simulated: the last step of the search.

Unlike the searches before it, it sees the plan whole: sums between pipelines, messages that queue for a network card, the
memory of hosts. It takes the first change that helps and ends when none does or the effort is spent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hetero_mpi.planning.memory import stage_holdings, stage_memory, usable_bytes
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import weight_lag
from hetero_mpi.planning.tables import may_split, shared_memories
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

WORTHWHILE = 1e-4
"""A change must shorten the step by more than this share."""
FEW_STAGES = 4
"""In pipelines of so many stages ranks are exchanged too."""
AMOUNTS = (1, 2, 4, 8)
"""So many micro-batches go from one pipeline to another at a time."""


class Polisher:
    """Small changes of plans for one profile and request. ``effort``: simulated actions that may be spent, in all."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest, effort: int) -> None:
        self.profile, self.request, self.left = profile, request, effort
        self._needs: dict[tuple[object, ...], int] = {}
        self._shared = shared_memories(profile)

    def step_s(self, plan: Plan) -> float:
        self.left -= sum(4 * len(p.stages) * p.micro_batches + len(p.stages) for p in plan.pipelines)
        return outlined(plan, self.profile).step_s

    def polished(self, plan: Plan, step_s: float | None = None) -> tuple[Plan, float]:
        """``plan``, which fits, or better; and its step time."""
        best_s = self.step_s(plan) if step_s is None else step_s
        improved = True
        while improved:
            improved = False
            for changed in self._changes(plan):
                if self.left <= 0:
                    return plan, best_s
                fitting = self.fitted(changed)
                if fitting is None or fitting == plan:
                    continue
                seconds = self.step_s(fitting)
                # Ranks leave the order that they stand in only for more than the request is indifferent to.
                least = WORTHWHILE if _ranks(fitting) == _ranks(plan) else max(WORTHWHILE, self.request.indifference)
                if seconds < best_s * (1 - least):
                    plan, best_s, improved = fitting, seconds, True
                    break
        return plan, best_s

    def _changes(self, plan: Plan) -> Iterator[Plan]:
        for index, pipeline in enumerate(plan.pipelines):
            for changed in self._pipeline_changes(pipeline):
                yield _with_pipeline(plan, index, changed)
        yield from self._share_changes(plan)

    def _pipeline_changes(self, pipeline: PipelinePlan) -> Iterator[PipelinePlan]:
        stages, request = pipeline.stages, self.request
        for place, by in itertools.product(range(1, len(stages)), (-1, 1)):
            cut = stages[place].first + by
            if stages[place - 1].first < cut < stages[place].last:
                before, behind = replace(stages[place - 1], last=cut), replace(stages[place], first=cut)
                yield replace(pipeline, stages=(*stages[: place - 1], before, behind, *stages[place + 1 :]))
        if len(stages) <= FEW_STAGES:
            for i, j in itertools.combinations(range(len(stages)), 2):
                exchanged = list(stages)
                exchanged[i], exchanged[j] = (
                    replace(stages[i], ranks=stages[j].ranks),
                    replace(stages[j], ranks=stages[i].ranks),
                )
                yield replace(pipeline, stages=tuple(exchanged))
        if request.schedule == "auto":
            if len(request.split_choices) > 1 and len(stages) > 1 and self._splits(pipeline):
                yield replace(pipeline, split_backward=not pipeline.split_backward)
            yield from _depth_changes(pipeline)
        for size in sorted(set(request.micro_batch_choices)):
            if size != pipeline.micro_batch and pipeline.sequences % size == 0:
                yield replace(pipeline, micro_batch=size)

    def _splits(self, pipeline: PipelinePlan) -> bool:
        return all(may_split(self.profile, stage.ranks[0]) for stage in pipeline.stages)

    def _share_changes(self, plan: Plan) -> Iterator[Plan]:
        """A few micro-batches from one pipeline to another, the smallest sizes that still divide the shares."""
        sizes = sorted(set(self.request.micro_batch_choices), reverse=True)
        for (i, giving), (j, taking) in itertools.permutations(enumerate(plan.pipelines), 2):
            for amount in AMOUNTS:
                moved = amount * min(self.request.micro_batch_choices)
                if moved >= giving.sequences:
                    break
                pipelines = list(plan.pipelines)
                for index, one, share in ((i, giving, -moved), (j, taking, moved)):
                    sequences = one.sequences + share
                    size = next(s for s in sizes if s <= one.micro_batch and sequences % s == 0)
                    pipelines[index] = replace(one, sequences=sequences, micro_batch=size)
                yield replace(plan, pipelines=tuple(pipelines))

    def fitted(self, plan: Plan) -> Plan | None:
        """``plan`` with recompute where memory asks for it and nowhere else, shallower where that is not enough; None: it
        does not fit even so."""
        pipelines, peaks = [], {}
        for pipeline in plan.pipelines:
            fitting = self._fitted(pipeline)
            if fitting is None:
                return None
            pipelines.append(fitting)
            for stage in fitting.stages:
                peaks[stage.ranks[0]] = self._need(fitting, stage)
        for host, ranks in self._shared:
            limit = usable_bytes(host.memory_bytes, self.request.memory_reserve)
            if sum(peaks.get(rank, 0) for rank in ranks) > limit:
                return None
        return replace(plan, pipelines=tuple(pipelines))

    def _fitted(self, pipeline: PipelinePlan) -> PipelinePlan | None:
        choices = sorted(set(self.request.recompute_choices))
        for place in range(len(pipeline.stages)):
            while True:
                ways = (_with_stage(pipeline, place, recompute=again) for again in choices)
                found = next((way for way in ways if self._fits(way, way.stages[place])), None)
                stage = pipeline.stages[place]
                if found is not None:
                    pipeline = found
                    break
                if stage.warm_up == 0 or self.request.schedule != "auto":
                    return None
                most = stage.warm_up - 1
                stages = tuple(
                    replace(s, warm_up=min(s.warm_up, most)) if i >= place else s for i, s in enumerate(pipeline.stages)
                )
                pipeline = replace(pipeline, stages=stages)
        return pipeline

    def _fits(self, pipeline: PipelinePlan, stage: StagePlan) -> bool:
        device = self.profile.devices[stage.ranks[0]]
        return self._need(pipeline, stage) <= usable_bytes(device.memory_bytes, self.request.memory_reserve)

    def _need(self, pipeline: PipelinePlan, stage: StagePlan) -> int:
        """Peak bytes of ``stage``."""
        split = pipeline.split_backward and stage is not pipeline.stages[0]
        lag = weight_lag(pipeline, stage) if split else 0
        lists = (split, lag, min(stage.warm_up, pipeline.micro_batches - 1), pipeline.micro_batches)
        model = self.profile.model_on(stage.ranks[0])
        ratio = self.profile.devices[stage.ranks[0]].activation_ratio
        key = (stage.first, stage.last, stage.recompute, pipeline.micro_batch, lists, ratio)
        if key not in self._needs:
            tokens = pipeline.micro_batch * self.request.sequence_length
            held = stage_holdings(pipeline, stage, model)
            self._needs[key] = max(
                stage_memory(model, stage.first, stage.last, tokens, flying, stage.recompute, late).total
                for flying, late in held
            )
        return self._needs[key]


def _ranks(plan: Plan) -> list[tuple[int, ...]]:
    return [stage.ranks for pipeline in plan.pipelines for stage in pipeline.stages]


def _with_pipeline(plan: Plan, index: int, pipeline: PipelinePlan) -> Plan:
    return replace(plan, pipelines=(*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :]))


def _with_stage(pipeline: PipelinePlan, place: int, recompute: bool) -> PipelinePlan:
    stage = replace(pipeline.stages[place], recompute=recompute)
    return replace(pipeline, stages=(*pipeline.stages[:place], stage, *pipeline.stages[place + 1 :]))


def _depth_changes(pipeline: PipelinePlan) -> Iterator[PipelinePlan]:
    """One micro-batch more in flight at a stage (and as many as that before it), or one fewer (and no more behind it)."""
    most = pipeline.micro_batches - 1
    for place in range(len(pipeline.stages)):
        for by in (1, -1):
            depth = pipeline.stages[place].warm_up + by
            if not 0 <= depth <= most:
                continue
            stages = tuple(
                replace(stage, warm_up=max(stage.warm_up, depth) if i <= place and by > 0 else
                        min(stage.warm_up, depth) if i >= place and by < 0 else stage.warm_up)
                for i, stage in enumerate(pipeline.stages)
            )  # fmt: skip
            yield replace(pipeline, stages=stages)
