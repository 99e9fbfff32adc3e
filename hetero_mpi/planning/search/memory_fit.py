"""Fit plans in memory: recompute first, then reduce depths."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_mpi.planning.memory import host_state_bytes, shared_memories, state_on_device, usable_bytes
from hetero_mpi.planning.memory_model import MemoryModel, predict_hosts
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.owners import owned_state_bytes, weighted
from hetero_mpi.planning.search.pipelines import falling
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest

ROUNDING_RATIO = 1e-9
MAX_DEALS = 6
"""Maximum number of attempts to distribute optimizer state."""
MAX_FEWER_IN_FLIGHT = 3
"""Maximum number of micro-batches by which depths are reduced to avoid recomputation."""
Owned = Mapping[int, float]
"""Rank -> bytes of optimizer state that the rank is assumed to own."""


class Fitter:
    """Fits plans for one profile and request in memory, and times them."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.memory = profile, request, MemoryModel(profile, request)
        self._shared, self._usable = shared_memories(profile), self.memory.usable
        self._mean = sum(self._usable) / len(self._usable)

    def step_s(self, plan: Plan) -> float:
        return outlined(plan, self.profile).step_s

    def holds(self, plan: Plan) -> bool:
        """Whether the plan fits on all ranks and hosts."""
        return self.memory.check(plan)

    def descended(self, plan: Plan, step_s: float, near: Callable[[Plan], Iterable[Plan]]) -> tuple[Plan, float]:
        """Descend from ``plan``: move to the first plan in ``near`` that is faster and fits, until there is none."""
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
        """Fit ``plan`` with as little recomputation as possible, then with smaller depths; None if it does not fit.

        If optimizer state is sharded, slightly smaller depths are preferred to recomputation where they are faster.
        """
        if len(plan.pipelines) == 1 or not self.profile.model.trained_whole:
            return self._fitted(plan, None)
        fitted, wished = self._with_owners(plan), _recomputing(plan)
        if fitted is None or _recomputing(fitted) == wished or self.request.schedule != "auto":
            return fitted
        candidates = map(self._with_owners, _shallower(plan))
        shallower = next((each for each in candidates if each is not None and _recomputing(each) == wished), None)
        return fitted if shallower is None or self.step_s(fitted) <= self.step_s(shallower) else shallower

    def _with_owners(self, plan: Plan) -> Plan | None:
        """Fit ``plan`` and distribute optimizer state; each rank's share is guessed: none, equal parts, then what did not fit."""
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
        """Yield equal shares of state, in bytes: first reduced for ranks with below-average memory, then unreduced."""
        for levelled in (True, False):
            owned = dict[int, float]()
            for _, _, stage in plan.numbered:
                part = self._state(stage) / len(plan.pipelines)
                lack = max(0.0, self._mean - self._usable[stage.ranks[0]]) if levelled else 0.0
                owned[stage.ranks[0]] = part - min(lack, part)
            yield owned

    def repeating(self, plan: Plan) -> Plan:
        """Improve ``plan`` by toggling recomputation if free memory determines which ranks own its state."""
        if len(set(self.request.recompute_choices)) < 2:
            return plan
        return self.descended(plan, self.step_s(plan), self._repeating_otherwise)[0]

    def keeping(self, plan: Plan, sizes: Sequence[int] = ()) -> Plan:
        """Choose the fastest slice size of each offloaded stage (its own or one of ``sizes``) and keep as many slices as fit.

        Ranks that compute in host memory keep slices only in memory that the file blocks they read do not need.
        """
        for number, index, stage in plan.numbered:
            if stage.streamed:
                least = 0 if self.profile.devices[stage.ranks[0]].shares_host_memory else stage.kept_slices
                smaller = [n for n in sizes if n < plan.pipelines[index].micro_batch]
                resliced = [_with_stage(plan, number, slice_sequences=n) for n in smaller]
                plan = self._fullest(plan, number, least + 1) or _with_stage(plan, number, kept_slices=least)
                fuller = [self._fullest(changed, number, 0) for changed in resliced]
                plan = min((plan, *filter(None, fuller)), key=self.step_s) if any(fuller) else plan
        return plan

    def _fullest(self, plan: Plan, number: int, least: int) -> Plan | None:
        """``plan`` with as many kept slices of a stage as fit; None if fewer than ``least`` fit."""
        _, index, stage = plan.numbered[number]
        counts = range(stage.slices(plan.pipelines[index].micro_batch), least - 1, -1)
        plans = (_with_stage(plan, number, kept_slices=count) for count in counts)
        return next((candidate for candidate in plans if self.holds(candidate) and self._can_read(candidate)), None)

    def with_files(self, plan: Plan) -> Plan:
        """Move layers of frozen weights to disk where host memory is short and the disk was measured."""
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
        """Whether hosts could hold the file pages needed at any one time if all blocks were on disk."""
        every = {number: len(stage.blocks(plan.layers)) for number, _, stage in plan.numbered if stage.streamed}
        filed = _with_files(plan, every)
        return self.profile.model.trained_whole or not any(self._lacks(host, filed) for host in self.profile.hosts)

    def _lacks(self, host: HostProfile, plan: Plan) -> bool:
        """Whether a host lacks memory for all that is not on disk, including mapped pages of ranks that compute in its memory."""
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
        """Yield ``plan`` with one stage's recomputation toggled, if free memory determines which ranks own its state."""
        if len(set(plan.state_weights.values())) < 2:
            return
        for number, _, stage in plan.numbered:
            with_owners, lacking_bytes = self._dealt(_with_stage(plan, number, recompute=not stage.recompute))
            if not lacking_bytes:
                yield with_owners

    def _dealt(self, plan: Plan) -> tuple[Plan, dict[int, float]]:
        """Distribute state evenly, or by free memory if that does not fit; also return ``_lacking`` for the result."""
        weights = plan.state_weights
        evenly = plan if {*weights.values()} == {1.0} else weighted(plan, dict.fromkeys(weights, 1.0))
        if not self._lacking(evenly):
            return evenly, {}
        by_free_memory = weighted(plan, self._free(plan))
        return by_free_memory, self._lacking(by_free_memory)

    def _free(self, plan: Plan) -> dict[int, float]:
        """Bytes that each rank has free before optimizer state is added."""
        return {
            stage.ranks[0]: self._usable[stage.ranks[0]] - self._peak(pipeline, index, {})
            for pipeline in plan.pipelines
            for index, stage in enumerate(pipeline.stages)
        }

    def _lacking(self, plan: Plan) -> dict[int, float]:
        """Map each rank that is short of memory, on its device or host, to the bytes of state that it owns."""
        state_bytes = owned_state_bytes(plan, self.profile.model)
        owned = {
            stage.ranks[0]: state_bytes[stage.ranks[0]] * state_on_device(self.profile, stage)
            for _, _, stage in plan.numbered
        }
        lacking_ranks = self._short(plan.pipelines, owned)
        for pipeline in plan.pipelines:
            stages = enumerate(pipeline.stages)
            lacking_ranks |= {stage.ranks[0] for index, stage in stages if not self.fits(pipeline, index, owned)}
        return {rank: owned[rank] for rank in lacking_ranks}

    def _fitted(self, plan: Plan, owned: Owned | None, sparing: frozenset[int] = frozenset()) -> Plan | None:
        """Fit ``plan`` with each rank's ``owned`` state (None: all state); ``sparing`` ranks recompute if allowed."""
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
        """Ranks that compute in host memory which is too small for all of them together."""
        if not self._shared:
            return set()
        peaks = {s.ranks[0]: self._peak(p, index, owned) for p in pipelines for index, s in enumerate(p.stages)}
        reserve, short = self.request.memory_reserve, set[int]()
        for host, ranks in self._shared:
            if sum(peaks.get(rank, 0) for rank in ranks) > usable_bytes(host.memory_bytes, reserve):
                short.update(rank for rank in ranks if rank in peaks)
        return short

    def _pipeline(self, pipeline: PipelinePlan, owned: Owned | None, sparing: frozenset[int]) -> PipelinePlan | None:
        choices, automatic = sorted(set(self.request.recompute_choices)), self.request.schedule == "auto"
        depths, repeats, index = [stage.warm_up for stage in pipeline.stages], list[bool](), 0
        while index < len(depths):
            stage = pipeline.stages[index]
            allowed = choices[-1:] if stage.ranks[0] in sparing else choices
            wishes = range(depths[index], -1, -1) if automatic else depths[index : index + 1]
            ways = itertools.product(wishes, allowed)
            way = next((way for way in ways if self.fits(pipeline, index, owned, *way, depths[0])), None)
            if way is not None:
                depths[index:] = [min(depth, way[0]) for depth in depths[index:]]
                repeats[index:], index = [way[1]], index + 1
            elif pipeline.split_backward and index and depths[0] and automatic:
                # A deeper first stage makes later ones defer more weight gradients.
                most = depths[0] - 1
                depths[:], index = [min(depth, most * (at < index)) for at, depth in enumerate(depths)], 0
            else:
                return None
        changed = zip(pipeline.stages, depths, repeats, strict=True)
        return replace(pipeline, stages=tuple(replace(s, warm_up=d, recompute=again) for s, d, again in changed))

    def _suffices(self, pipelines: Sequence[PipelinePlan]) -> bool:
        """Whether every rank can hold all optimizer state of its stage."""
        fit = all(self.fits(pipeline, index) for pipeline in pipelines for index in range(len(pipeline.stages)))
        return fit and not self._short(pipelines, None)

    def fits(self, pipeline: PipelinePlan, index: int, owned: Owned | None = None, *way: Any) -> bool:
        """Whether stage ``index`` of ``pipeline`` fits on its rank. ``way``: as for ``_peak``."""
        return self._peak(pipeline, index, owned, *way) <= self._usable[pipeline.stages[index].ranks[0]]

    def _peak(
        self,
        pipeline: PipelinePlan,
        index: int,
        owned: Owned | None,
        warm_up: int | None = None,
        recompute: bool = False,
        first_warm_up: int = 0,
    ) -> float:
        """Peak bytes of stage ``index``, as it is or with another depth, recomputation and depth of the first stage."""
        stage = pipeline.stages[index]
        if warm_up is None:
            warm_up, recompute, first_warm_up = stage.warm_up, stage.recompute, pipeline.stages[0].warm_up
        fixed, each, each_deferred = self.memory.parts(pipeline, stage, recompute)
        holdings = self.memory.holdings(pipeline, index, warm_up, first_warm_up)
        peak = fixed + max(each * in_flight + each_deferred * deferred for in_flight, deferred in holdings)
        return peak if owned is None else peak - max(0.0, self._state(stage) - owned.get(stage.ranks[0], 0.0))

    def _state(self, stage: StagePlan) -> float:
        """Bytes of optimizer state of ``stage``, whichever rank owns it."""
        return self.profile.model.owned_bytes(stage.first, stage.last) * state_on_device(self.profile, stage)


def _recomputing(plan: Plan) -> list[bool]:
    return [stage.recompute for _, _, stage in plan.numbered]


def _shallower(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with fewer micro-batches in flight: ranks own whole layers of state, which the search divides at will."""
    for fewer in range(1, MAX_FEWER_IN_FLIGHT + 1):
        stages = list[StagePlan]()
        for pipeline in plan.pipelines:
            first, *later = (stage.warm_up + 1 for stage in pipeline.stages)
            flying = falling((max(1, first - fewer), *later))
            stages += (replace(s, warm_up=depth - 1) for s, depth in zip(pipeline.stages, flying, strict=True))
        yield plan.with_stages(stages)


def _with_stage(plan: Plan, number: int, **changed: Any) -> Plan:
    return plan.with_stages(replace(stage, **changed) if n == number else stage for n, _, stage in plan.numbered)


def _with_files(plan: Plan, layers: Mapping[int, int]) -> Plan:
    """``plan`` with these numbers of ``layers`` on disk, by stage number."""
    return plan.with_stages(replace(stage, on_disk=layers.get(number, 0)) for number, _, stage in plan.numbered)


def with_recompute(plan: Plan, recompute: bool) -> Plan:
    """``plan`` with recomputation enabled or disabled in all stages."""
    return plan.with_stages(replace(stage, recompute=recompute) for _, _, stage in plan.numbered)


def cut_otherwise(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with one layer moved across a cut of the longest pipeline and of all pipelines with the same cuts."""
    cuts = max((pipeline.cuts for pipeline in plan.pipelines), key=len)
    for cut, by in itertools.product(range(1, len(cuts) - 1), (-1, 1)):
        new_cuts = [*cuts[:cut], cuts[cut] + by, *cuts[cut + 1 :]]
        if all(first < last for first, last in itertools.pairwise(new_cuts)):
            pipelines = (line.with_cuts(new_cuts) if line.cuts == cuts else line for line in plan.pipelines)
            yield replace(plan, pipelines=tuple(pipelines))
