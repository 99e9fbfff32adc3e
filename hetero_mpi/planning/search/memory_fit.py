"""Plans as memory allows them: recompute where it asks for that, and shallower depths where that is not enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_mpi.planning.memory import host_state_bytes, shared_memories, state_on_device, usable_bytes
from hetero_mpi.planning.memory_model import MemoryModel, predict_hosts
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.owners import owned_state_bytes, weighted
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest

ROUNDING_RATIO = 1e-9
MAX_DEALS = 6
"""How often state is dealt anew, each time with more room made where it was lacking."""
Owned = Mapping[int, float]
"""Rank -> bytes of the state of what it holds that it owns at least."""


class Fitter:
    """Fits plans of one profile and request into memory, and times them."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.memory = profile, request, MemoryModel(profile, request)
        self._shared, self._usable = shared_memories(profile), self.memory.usable
        self._mean = sum(self._usable) / len(self._usable)

    def step_s(self, plan: Plan) -> float:
        return outlined(plan, self.profile).step_s

    def holds(self, plan: Plan) -> bool:
        """Whether all ranks have the memory that a plan of any kind takes, and all hosts."""
        return self.memory.check(plan)

    def descended(self, plan: Plan, step_s: float, near: Callable[[Plan], Iterable[Plan]]) -> tuple[Plan, float]:
        """``plan``, or what the first shorter one of those ``near`` to it leads to; ``step_s``: its seconds."""
        improved = True
        while improved:
            improved = False
            for changed in near(plan):
                changed_s = self.step_s(changed)
                if changed_s < step_s * (1 - ROUNDING_RATIO) and self.holds(changed):
                    plan, step_s, improved = changed, changed_s, True
                    break
        return plan, step_s

    def fitted(self, plan: Plan) -> Plan | None:
        """``plan`` with recompute where memory asks for it and nowhere else, shallower where that is not enough; None: it does not
        fit even so. Where ranks have no room for all the state of what they hold, it is dealt out by what they leave free: first as
        if others owned it, then as if each owned as much, and then with room for what each was found to own."""
        if len(plan.pipelines) == 1 or not self.profile.model.trained_whole:
            return self._fitted(plan, None)
        lacked: dict[int, float] = {}
        guesses = [{}, *self._parts(plan)]
        for deal in range(MAX_DEALS):
            guess = guesses[deal] if deal < len(guesses) else lacked
            candidate = self._fitted(plan, guess)
            if candidate is None and guess is lacked:
                break
            if candidate is None:
                continue
            if self._suffices(candidate.pipelines):
                return candidate
            with_owners, lacking_bytes = self._dealt(candidate)
            if not lacking_bytes:
                return with_owners
            if deal == 0 or guess is lacked:
                lacked |= {rank: max(owned_bytes, lacked.get(rank, 0.0)) for rank, owned_bytes in lacking_bytes.items()}
        return self._fitted(plan, None)

    def _parts(self, plan: Plan) -> Iterator[Owned]:
        """Bytes that each rank owns if all own as much: first with less for those with less memory than the mean, then without."""
        for levelled in (True, False):
            owned = dict[int, float]()
            for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
                part = self._state(stage) / len(plan.pipelines)
                lack = max(0.0, self._mean - self._usable[stage.ranks[0]]) if levelled else 0.0
                owned[stage.ranks[0]] = part - min(lack, part)
            yield owned

    def repeating(self, plan: Plan) -> Plan:
        """``plan``; where its state is dealt by what ranks leave free, with other forwards repeated than memory asks for if that
        makes the step shorter: the others own less then."""
        if len(set(self.request.recompute_choices)) < 2:
            return plan
        return self.descended(plan, self.step_s(plan), self._repeating_otherwise)[0]

    def keeping(self, plan: Plan, sizes: Sequence[int] = ()) -> Plan:
        """``plan`` with each streamed stage in slices of the quickest of the ``sizes``, or in its own, of which it keeps as many as
        its memory holds; where ranks compute in their host's memory only beside the blocks that are read."""
        for index, number in [(i, k) for i, line in enumerate(plan.pipelines) for k in range(len(line.stages))]:
            pipeline = plan.pipelines[index]
            stage = pipeline.stages[number]
            if stage.streamed:
                least = 0 if self.profile.devices[stage.ranks[0]].shares_host_memory else stage.kept_slices
                unchecked = _with_pipeline(plan, index, _with_stage(pipeline, number, kept_slices=least))
                plan = self._fullest(plan, index, number, least + 1) or unchecked
                resliced = (_with_stage(pipeline, number, slice_sequences=n) for n in sizes if n < pipeline.micro_batch)
                fuller = [self._fullest(_with_pipeline(plan, index, line), index, number, 0) for line in resliced]
                plan = min((plan, *filter(None, fuller)), key=self.step_s) if any(fuller) else plan
        return plan

    def _fullest(self, plan: Plan, index: int, number: int, least: int) -> Plan | None:
        """``plan`` with as many slices kept by a stage as fit, ``least`` or more; None: not even these do."""
        pipeline = plan.pipelines[index]
        counts = range(pipeline.stages[number].slices(pipeline.micro_batch), least - 1, -1)
        plans = (_with_pipeline(plan, index, _with_stage(pipeline, number, kept_slices=count)) for count in counts)
        return next((candidate for candidate in plans if self.holds(candidate) and self._can_read(candidate)), None)

    def with_files(self, plan: Plan) -> Plan:
        """``plan`` with as many layers on disk as its hosts have no memory for: of frozen weights, where disks were measured."""
        layers = dict.fromkeys((number for number, _, stage in plan.numbered if stage.streamed), 0)
        frozen = layers and not self.profile.model.trained_whole
        for host in self.profile.hosts if frozen else ():
            host_stages = [n for n in layers if self.profile.devices[plan.numbered[n][2].ranks[0]].host == host.name]
            in_memory = {number: len(plan.numbered[number][2].blocks(plan.layers)) for number in host_stages}
            while host.disk_bytes_per_s and self._lacks(host, _with_files(plan, layers)) and any(in_memory.values()):
                number = max(
                    host_stages,
                    key=lambda candidate: in_memory[candidate] / max(1, in_memory[candidate] + layers[candidate]),
                )
                layers[number], in_memory[number] = layers[number] + 1, in_memory[number] - 1
        return _with_files(plan, layers)

    def _can_read(self, plan: Plan) -> bool:
        """Whether hosts have room for the files' pages that are needed at once, were all blocks on disk."""
        every = {number: len(stage.blocks(plan.layers)) for number, _, stage in plan.numbered if stage.streamed}
        filed = _with_files(plan, every)
        return self.profile.model.trained_whole or not any(self._lacks(host, filed) for host in self.profile.hosts)

    def _lacks(self, host: HostProfile, plan: Plan) -> bool:
        """Whether a host has no memory for all of the plan that is not on disk. All layers of ranks that compute in it are in
        files, whose pages are to stay there."""
        model, reserve = self.profile.model, self.request.memory_reserve
        needed_bytes = sum(
            predicted.peak_bytes for predicted in predict_hosts(plan, self.profile) if predicted.host == host.name
        )
        for _, _, stage in plan.numbered:
            device = self.profile.devices[stage.ranks[0]]
            if stage.streamed and device.host == host.name and device.shares_host_memory:
                needed_bytes += host_state_bytes(model, stage.first, stage.last, stage.disk_layers(plan.layers))
        return needed_bytes > usable_bytes(host.memory_bytes, reserve)

    def _repeating_otherwise(self, plan: Plan) -> Iterator[Plan]:
        """One stage repeats its forwards, or ceases to, where the state is dealt by what ranks leave free."""
        if len(set(plan.state_weights.values())) < 2:
            return
        for index, number in [(i, k) for i, line in enumerate(plan.pipelines) for k in range(len(line.stages))]:
            pipeline = plan.pipelines[index]
            pipeline = _with_stage(pipeline, number, recompute=not pipeline.stages[number].recompute)
            with_owners, lacking_bytes = self._dealt(_with_pipeline(plan, index, pipeline))
            if not lacking_bytes:
                yield with_owners

    def _dealt(self, plan: Plan) -> tuple[Plan, dict[int, float]]:
        """``plan`` with its state dealt evenly, since who owns more takes longer to step, or where that does not fit by what ranks
        leave free; who then lacks room."""
        evenly = weighted(plan, dict.fromkeys(plan.state_weights, 1.0))
        if not self._lacking(evenly):
            return evenly, {}
        by_free_memory = weighted(plan, self._free(plan))
        return by_free_memory, self._lacking(by_free_memory)

    def _free(self, plan: Plan) -> dict[int, float]:
        """Bytes that each rank leaves free when it owns no state."""
        return {
            stage.ranks[0]: self._usable[stage.ranks[0]] - self._peak(pipeline, stage, {})
            for pipeline in plan.pipelines
            for stage in pipeline.stages
        }

    def _lacking(self, plan: Plan) -> dict[int, float]:
        """Ranks that have no room for the state that the plan deals to them, or whose host has not; bytes of that state."""
        state_bytes = owned_state_bytes(plan, self.profile.model)
        owned = {
            stage.ranks[0]: state_bytes[stage.ranks[0]] * state_on_device(self.profile, stage)
            for _, _, stage in plan.numbered
        }
        lacking_ranks = self._short(plan.pipelines, owned)
        for pipeline in plan.pipelines:
            lacking_ranks |= {s.ranks[0] for s in pipeline.stages if not self.fits(pipeline, s, owned)}
        return {rank: owned[rank] for rank in lacking_ranks}

    def _fitted(self, plan: Plan, owned: Owned | None, sparing: frozenset[int] = frozenset()) -> Plan | None:
        """``owned``: None: each rank owns all the state of what it holds. ``sparing``: ranks that repeat forwards if they may."""
        pipelines = []
        for pipeline in plan.pipelines:
            fitting = self._pipeline(pipeline, owned, sparing)
            if fitting is None:
                return None
            pipelines.append(fitting)
        short = self._short(pipelines, owned)
        if short - sparing and True in self.request.recompute_choices:
            return self._fitted(plan, owned, sparing | short)
        return None if short else replace(plan, pipelines=tuple(pipelines))

    def _short(self, pipelines: Sequence[PipelinePlan], owned: Owned | None) -> set[int]:
        """Ranks that compute in the memory of a host that has too little for them together."""
        if not self._shared:
            return set()
        peaks = {
            stage.ranks[0]: self._peak(pipeline, stage, owned) for pipeline in pipelines for stage in pipeline.stages
        }
        reserve, short = self.request.memory_reserve, set[int]()
        for host, ranks in self._shared:
            if sum(peaks.get(rank, 0) for rank in ranks) > usable_bytes(host.memory_bytes, reserve):
                short.update(rank for rank in ranks if rank in peaks)
        return short

    def _pipeline(self, pipeline: PipelinePlan, owned: Owned | None, sparing: frozenset[int]) -> PipelinePlan | None:
        choices, number = sorted(set(self.request.recompute_choices)), 0
        while number < len(pipeline.stages):
            allowed = choices[-1:] if pipeline.stages[number].ranks[0] in sparing else choices
            ways = (_with_stage(pipeline, number, recompute=again) for again in allowed)
            fitting = next((way for way in ways if self.fits(way, way.stages[number], owned)), None)
            if fitting is not None:
                pipeline, number = fitting, number + 1
                continue
            if pipeline.split_backward and pipeline.stages[number].warm_up == 0:
                number = 0  # the deeper the first stage, the more backwards the others put off
            most = pipeline.stages[number].warm_up - 1
            if most < 0 or self.request.schedule != "auto":
                return None
            shallower = tuple(
                replace(s, warm_up=min(s.warm_up, most)) if i >= number else s for i, s in enumerate(pipeline.stages)
            )
            pipeline = replace(pipeline, stages=shallower)
        return pipeline

    def _suffices(self, pipelines: Sequence[PipelinePlan]) -> bool:
        """Whether every rank holds its stage with all of its state."""
        stages_fit = all(self.fits(pipeline, stage) for pipeline in pipelines for stage in pipeline.stages)
        return stages_fit and not self._short(pipelines, None)

    def fits(self, pipeline: PipelinePlan, stage: StagePlan, owned: Owned | None = None) -> bool:
        """Whether its rank holds ``stage``, as one of the pipeline's."""
        return self._peak(pipeline, stage, owned) <= self._usable[stage.ranks[0]]

    def _peak(self, pipeline: PipelinePlan, stage: StagePlan, owned: Owned | None) -> float:
        need = self.memory.peak(pipeline, stage)
        if owned is None:
            return need
        return need - max(0.0, self._state(stage) - owned.get(stage.ranks[0], 0.0))

    def _state(self, stage: StagePlan) -> float:
        """Bytes of the state of ``stage``, whoever owns it."""
        return self.profile.model.owned_bytes(stage.first, stage.last) * state_on_device(self.profile, stage)


def _with_pipeline(plan: Plan, index: int, pipeline: PipelinePlan) -> Plan:
    return replace(plan, pipelines=(*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :]))


def _with_stage(pipeline: PipelinePlan, number: int, **changed: Any) -> PipelinePlan:
    stage = replace(pipeline.stages[number], **changed)
    return replace(pipeline, stages=(*pipeline.stages[:number], stage, *pipeline.stages[number + 1 :]))


def _with_files(plan: Plan, layers: Mapping[int, int]) -> Plan:
    """``layers``: number of a stage -> how many are on disk."""
    return plan.with_stages(replace(stage, on_disk=layers.get(number, 0)) for number, _, stage in plan.numbered)


def with_recompute(plan: Plan, recompute: bool) -> Plan:
    """``plan`` with forwards repeated everywhere, or nowhere."""
    return plan.with_stages(replace(stage, recompute=recompute) for _, _, stage in plan.numbered)


def cut_otherwise(plan: Plan) -> Iterator[Plan]:
    """One layer moved from a stage to its neighbour, in the longest pipeline and in all that are cut alike."""
    cuts = max(([stage.first for stage in pipeline.stages] for pipeline in plan.pipelines), key=len)
    for cut, by in itertools.product(range(1, len(cuts)), (-1, 1)):
        new_cuts = [*cuts[:cut], cuts[cut] + by, *cuts[cut + 1 :], plan.layers]
        if all(first < last for first, last in itertools.pairwise(new_cuts)):
            yield replace(plan, pipelines=tuple(_cut(line, new_cuts, cuts) for line in plan.pipelines))


def _cut(pipeline: PipelinePlan, new_cuts: Sequence[int], cuts: Sequence[int]) -> PipelinePlan:
    if [stage.first for stage in pipeline.stages] != cuts:
        return pipeline
    ends = zip(pipeline.stages, itertools.pairwise(new_cuts), strict=True)
    return replace(pipeline, stages=tuple(replace(stage, first=first, last=last) for stage, (first, last) in ends))
