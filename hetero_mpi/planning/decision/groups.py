"""Tensor parallelism: plans in which ranks of one host share the layers of a stage.

Groups help when a pipeline cannot overlap work (a batch of one or two long sequences) or a layer exceeds a device's memory. The
search runs on a contracted cluster, where each group is one rank (``group_costs.group_device``). Its plans are expanded to
the full cluster, simulated, and improved by moving heads, experts and layers. Groupings whose lower bounds rule out
a gain of ``MIN_GAIN_RATIO`` are not searched.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetero_mpi.planning.bounds import filling_bounds_s, fluid_bound_s, usable_devices
from hetero_mpi.planning.decision.rules import group_problems
from hetero_mpi.planning.group_costs import contracted, member_chain_s
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.search.memory_fit import Fitter, cut_otherwise, with_recompute
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import MEASURED, ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.grouping import grouped

MIN_GAIN_RATIO = 0.02
"""Minimum relative gain for choosing groups, because their members wait for the slowest one in every layer."""
MAX_GROUP_SEARCH_RANKS = 64
"""Maximum number of ranks for which groups are searched."""
MAX_SEARCHES = 4
"""Maximum number of groupings searched, lowest bounds first; while no plan fits, further groupings are searched."""
MAX_MULTI_SEARCHES = 2
"""Maximum number of groupings searched with several pipelines."""
MAX_DESCENT_START_RATIO = 1.05
"""Plans are improved by descent only if their step is shorter than this multiple of the target."""
MEMORY_RATIOS = (1.0, 0.85, 0.7)
"""Fractions of a group's memory that the search may use, tried in order until the plan fits on all members."""
EXPERT_MOVE_DIVISOR = 16
"""Experts are moved one at a time, and in batches of the number of experts divided by this."""
GROUP_SIZES = (2, 3, 4, 8)
"""Group sizes to try, besides all ranks of a host and all but one of them."""

TimedPlan = tuple[Plan, float]
"""A plan and its step time in seconds."""
PlanSearch = Callable[[ClusterProfile, PlanRequest], Plan | None]
MemberCost = Callable[[int, int], float]
"""(member, number of heads or experts assigned to it) -> cost; the maximum cost is minimised."""


Groups = tuple[StagePlan, ...]
"""Disjoint groups, each represented by a stage that holds all layers."""


def with_groups(
    profile: ClusterProfile, request: PlanRequest, best_s: float | None, search: PlanSearch, crowded: Collection[int]
) -> TimedPlan | None:
    """Find a plan with groups at least ``MIN_GAIN_RATIO`` faster than ``best_s``.

    Args:
        best_s: step time without groups; None if no plan without groups fits.
        crowded: ranks with less than a core per thread, left out because a group would wait for them in every layer.
    """
    # Measured devices need a time for half the heads, since small layers divide badly.
    timed = [device for device in usable_devices(profile) if device.halved or profile.source != MEASURED]
    by_host = grouped((device for device in timed if device.rank not in crowded), lambda device: device.host)
    hosts = [devices for devices in by_host.values() if len(devices) > 1]
    may_group = request.groups and request.schedule == "auto" and not profile.emulated
    divisible = (profile.model.heads or 0) > 1 and len(profile.devices) <= MAX_GROUP_SEARCH_RANKS
    if not may_group or not divisible or not hosts:
        return None
    limit_s = math.inf if best_s is None else best_s * (1 - MIN_GAIN_RATIO)
    sizes = tuple({*request.micro_batch_choices, *request.alone_micro_batch_choices})
    least = replace(request, split_choices=(False,), micro_batch_choices=sizes)
    if limit_s < math.inf and fluid_bound_s(profile, least) >= limit_s:
        return None
    return GroupSearch(profile, request, search, hosts).shorter_than(limit_s)


def improve_group_plan(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Plan:
    """Move heads, experts and layers between ranks for as long as the step gets shorter."""
    fitter = Fitter(profile, request)
    return fitter.descended(plan, fitter.step_s(plan), _neighbours)[0]


class GroupSearch:
    def __init__(
        self,
        profile: ClusterProfile,
        request: PlanRequest,
        search: PlanSearch,
        hosts: Sequence[Sequence[DeviceProfile]],
    ) -> None:
        self.profile, self.request, self.search, self.hosts = profile, request, search, hosts
        self.fitter = Fitter(profile, request)
        self.heads = profile.model.heads or 0
        self.tokens = min(request.micro_batch_choices) * request.sequence_length
        self.chains = {device.rank: member_chain_s(profile, device, self.tokens) for device in usable_devices(profile)}

    def shorter_than(self, limit_s: float) -> TimedPlan | None:
        """Find the best plan with groups whose step is shorter than ``limit_s``."""
        bounds_by_groups = {}
        for ranks in dict.fromkeys(self._groupings()):
            groups = tuple(map(self._quickest, ranks))
            bounds_by_groups[groups] = self._bounds_s(groups, limit_s)
        several = self._for_several(bounds_by_groups)
        first = sorted(bounds_by_groups, key=lambda groups: bounds_by_groups[groups].get(1, math.inf))[:MAX_SEARCHES]
        promising = []
        for groups, bounds_s in bounds_by_groups.items():
            pipeline_counts = [number for number in bounds_s if number == 1 or groups in several]
            if pipeline_counts:
                promising.append((min(bounds_s[number] for number in pipeline_counts), max(pipeline_counts), groups))
        best: TimedPlan | None = None
        for bound_s, max_pipelines, groups in sorted(promising, key=lambda entry: entry[0]):
            target_s = limit_s if best is None else best[1]
            if target_s < math.inf and (bound_s >= target_s or groups not in (*several, *first)):
                continue
            numbers = tuple(dict.fromkeys((max_pipelines, 1))) if 1 in bounds_by_groups[groups] else (max_pipelines,)
            for plan in self._plans(groups, numbers):
                step_s = self.fitter.step_s(plan)
                if step_s < MAX_DESCENT_START_RATIO * target_s:
                    better = self.fitter.descended(plan, step_s, _neighbours)
                    best = better if better[1] < target_s and (best is None or better[1] < best[1]) else best
        return best

    def _bounds_s(self, groups: Groups, limit_s: float) -> dict[int, float]:
        """Map pipeline counts to lower bounds of the step time with these groups, omitting bounds of ``limit_s`` or more."""
        small, request = contracted(self.profile, groups, self.tokens), self._asked(groups)
        by_itself = replace(request, micro_batch_choices=tuple(sorted(self._sizes(groups))))
        fluid_s, filling = fluid_bound_s(small, by_itself), filling_bounds_s(small, by_itself)
        return {number: max(fluid_s, fill_s) for number, fill_s in filling.items() if max(fluid_s, fill_s) < limit_s}

    def _for_several(self, bounds_by_groups: Mapping[Groups, Mapping[int, float]]) -> list[Groups]:
        """The groupings with the lowest bounds for several pipelines; of groupings on identical devices, only the first."""
        distinct: dict[object, tuple[float, Groups]] = {}
        for groups, bounds_s in bounds_by_groups.items():
            least_s = min((bound_s for number, bound_s in bounds_s.items() if number > 1), default=math.inf)
            memory = [[self.profile.devices[rank].memory_bytes for rank in group.ranks] for group in groups]
            if least_s < math.inf:
                distinct.setdefault(f"{bounds_s} {sorted(memory)}", (least_s, groups))
        return [groups for _, groups in sorted(distinct.values(), key=lambda entry: entry[0])[:MAX_MULTI_SEARCHES]]

    def _groupings(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield groupings that apply the same option to all hosts, and groupings of a single host."""
        options = [self._options([device.rank for device in devices]) for devices in self.hosts]
        for name in dict.fromkeys(name for host_options in options for name in host_options):
            yield tuple(group for host_options in options for group in host_options.get(name, ()))
            yield from (host_options[name] for host_options in options if name in host_options)

    def _options(self, ranks: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Map option names to groups of one host's ranks: all, the fastest, groups of equal size, or one rank per backend."""
        count = len(ranks)
        ordered = sorted(ranks, key=lambda rank: (sum(self.chains[rank]), rank))
        options: dict[str, tuple[tuple[int, ...], ...]] = {}
        max_size = max(self.heads, self._timed_experts(ranks))  # each needs a head or an expert
        if count <= max_size:
            options["all"] = (tuple(sorted(ranks)),)
        for size in sorted({*GROUP_SIZES, count - 1}):
            if 2 <= size <= min(count, max_size):
                options[f"{size} fastest"] = (tuple(sorted(ordered[:size])),)
                begins = range(0, count - size + 1, size)
                options[f"each {size}"] = tuple(tuple(sorted(ordered[begin : begin + size])) for begin in begins)
        kinds = grouped(ordered, lambda rank: self.profile.devices[rank].backend)
        if 1 < len(kinds) <= max_size:  # such as a GPU with heads and a processor with experts
            options["one of each kind"] = tuple(tuple(sorted(ranks)) for ranks in zip(*kinds.values(), strict=False))
        return options

    def _timed_experts(self, ranks: Sequence[int]) -> int:
        """Number of experts to share; 0 unless all of these ranks have expert times."""
        timed = all(self.chains[rank].experts > 0 for rank in ranks)
        return (self.profile.model.experts or 0) if timed else 0

    def _quickest(self, ranks: tuple[int, ...]) -> StagePlan:
        """Assign each head and expert to the rank that would finish it first, which minimises the time of the slowest rank.

        If there are no expert times, experts are shared in proportion to heads.
        """
        chains = [self.chains[rank] for rank in ranks]
        timed = self._timed_experts(ranks)
        least = [int(len(ranks) > timed)] * len(ranks)
        shares = _deal(self.heads, least, lambda member, n: chains[member].with_heads(n / self.heads))
        each_s = [chain.experts if timed else 1 / share for chain, share in zip(chains, shares, strict=True)]
        return self._group(ranks, shares, lambda member, n: each_s[member] * n)

    def _roomiest(self, ranks: tuple[int, ...]) -> StagePlan:
        """Share heads and experts in proportion to memory, with at least one head per rank if possible."""
        memory = [self.profile.devices[rank].memory_bytes for rank in ranks]

        def fullness(member: int, count: int) -> float:
            return count / max(1, memory[member])

        least = [int(len(ranks) <= self.heads)] * len(ranks)
        return self._group(ranks, _deal(self.heads, least, fullness), fullness)

    def _group(self, ranks: tuple[int, ...], shares: tuple[int, ...], expert_cost: MemberCost) -> StagePlan:
        count = self.profile.model.experts
        experts = _deal(count, [int(share == 0) for share in shares], expert_cost) if count is not None else None
        return StagePlan(ranks, 0, len(self.profile.model.layers), 0, shares=shares, experts=experts)

    def _asked(self, groups: Groups) -> PlanRequest:
        """The request for the contracted cluster, whose fewer ranks allow larger micro-batches."""
        request = self.request
        remaining_ranks = len(self.profile.devices) - sum(len(group.ranks) - 1 for group in groups)
        max_size = max(1, request.global_batch // remaining_ranks)
        larger = {size for size in request.alone_micro_batch_choices if size <= max_size}
        return replace(
            request,
            micro_batch_choices=tuple(sorted({*request.micro_batch_choices, *larger})),
            split_choices=(False,),
            stages_per_rank=1,
            streaming="never",
            groups=False,
        )

    def _sizes(self, groups: Groups) -> set[int]:
        """Micro-batch sizes to try for a single group or for the contracted cluster."""
        return {*self.request.alone_micro_batch_choices, *self._asked(groups).micro_batch_choices}

    def _plans(self, groups: Groups, pipelines: Sequence[int]) -> Iterator[Plan]:
        """Yield plans that fit: each group as a single stage, then searched plans, with fewer pipelines if several do not fit."""
        alone = len(groups) == 1 and len(groups[0].ranks) == len(self.profile.devices)
        if self.request.allow_idle or alone:
            yield from (plan for group in groups if (plan := self._by_itself(group)) is not None)
        roomy = tuple(self._roomiest(group.ranks) for group in groups)
        share_choices = dict.fromkeys((groups, roomy))
        for max_pipelines in pipelines:
            too_large, groups_not_used = False, set[Groups]()
            for shared, memory_ratio in itertools.product(share_choices, MEMORY_RATIOS):
                if shared in groups_not_used:  # nor with less memory
                    continue
                request = replace(self._asked(shared), max_pipelines=max_pipelines)
                contracted_plan = self.search(contracted(self.profile, shared, self.tokens, memory_ratio), request)
                written = None if contracted_plan is None else self._written(contracted_plan, shared)
                if written is None or not written.leader_of:
                    groups_not_used.add(shared)
                    continue
                if any(any(group_problems(n, stage, written, self.profile)) for n, _, stage in written.numbered):
                    continue
                fitting = self._fitted(written)
                if fitting is not None:
                    yield fitting
                    break
                too_large |= len(written.pipelines) > 1
            if not too_large:
                return

    def _by_itself(self, group: StagePlan) -> Plan | None:
        layers = len(self.profile.model.layers)
        batch = self.request.global_batch
        pipelines = [PipelinePlan((group,), size, batch) for size in sorted(self._sizes((group,)))]
        return self._shortest(self._fitted(Plan((p,), batch, self.request.sequence_length, layers)) for p in pipelines)

    def _written(self, plan: Plan, groups: Groups) -> Plan:
        """Expand a plan for the contracted cluster to the full cluster."""
        leads = {group.ranks[0]: group for group in groups}
        follow = {rank for group in groups for rank in group.ranks[1:]}
        numbers = [rank for rank in range(len(self.profile.devices)) if rank not in follow]

        def written(stage: StagePlan) -> StagePlan:
            rank = numbers[stage.ranks[0]]
            group = leads.get(rank, StagePlan((rank,), 0, 0, 0))
            return replace(stage, ranks=group.ranks, shares=group.shares, experts=group.experts)

        return plan.with_stages([written(stage) for _, _, stage in plan.numbered])

    def _fitted(self, plan: Plan) -> Plan | None:
        """``plan``, with recomputation or other shares if memory requires it; None if it does not fit."""
        plans = [plan, with_recompute(plan, True)] if True in self.request.recompute_choices else [plan]
        if self.fitter.holds(plan):
            return plan
        if self.profile.model.experts:  # a head moved alone may not fit where a head and experts moved do
            plans += [changed for each in plans for changed in _with_shares_moved(each, experts=False)]
        return self._shortest(_with_shares_that_fit(candidate, self.fitter) for candidate in plans)

    def _shortest(self, plans: Iterable[Plan | None]) -> Plan | None:
        fitting_plans = (plan for plan in plans if plan is not None)
        return min(fitting_plans, key=self.fitter.step_s, default=None)


def _with_shares_that_fit(plan: Plan, fitter: Fitter) -> Plan | None:
    """Move heads and experts until ``plan`` fits, each time at the least time per byte saved; None if it cannot fit."""

    def plan_shortage_bytes(candidate: Plan) -> float:
        memory = predict_memory(candidate, fitter.profile, fitter.request.memory_reserve)
        return sum(max(0, predicted.peak_bytes - predicted.usable_bytes) for predicted in memory)

    shortage_bytes = plan_shortage_bytes(plan)
    while shortage_bytes > 0:
        step_s, best = fitter.step_s(plan), (math.inf, shortage_bytes, plan)
        for changed in _with_shares_moved(plan):
            remaining_bytes = plan_shortage_bytes(changed)
            if remaining_bytes < shortage_bytes:
                price = (fitter.step_s(changed) - step_s) / (shortage_bytes - remaining_bytes)
                best = min(best, (price, remaining_bytes, changed), key=lambda entry: entry[0])
        if best[2] is plan:
            return None
        _, shortage_bytes, plan = best
    return plan if fitter.holds(plan) else None


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Yield plans in which a head, some experts or a layer has moved."""
    yield from _with_shares_moved(plan)
    yield from cut_otherwise(plan)


def _deal(count: int, least: Sequence[int], cost: MemberCost) -> tuple[int, ...]:
    """Deal ``count`` units to members: first ``least`` to each, then one at a time to the member with the lowest cost."""
    counts = list(least)
    for _ in range(count - sum(least)):
        counts[min(range(len(counts)), key=lambda member: cost(member, counts[member] + 1))] += 1
    return tuple(counts)


def _with_shares_moved(plan: Plan, experts: bool = True) -> Iterator[Plan]:
    """Yield plans with a head or (if ``experts``) experts moved in one stage, or in all stages with equal layers and shares."""
    stages = [stage for _, _, stage in plan.numbered]
    alike = [(stage.first, stage.last, stage.shares, stage.experts) for stage in stages]
    for number, stage in enumerate(stages):
        changes = [replace(stage, shares=shares) for shares in _transfers(stage.shares, 1)]
        counts = stage.experts or () if experts else ()
        for step in dict.fromkeys((sum(counts) // EXPERT_MOVE_DIVISOR, 1)):
            changes += [replace(stage, experts=changed) for changed in _transfers(counts, step) if step]
        twins = [twin for twin in range(len(stages)) if alike[twin] == alike[number]]
        for changed in changes:
            if changed.idles:
                continue
            for stage_numbers in [[number], twins][: len(twins)]:
                new_stages = list(stages)
                for twin in stage_numbers:
                    new_stages[twin] = replace(stages[twin], shares=changed.shares, experts=changed.experts)
                yield plan.with_stages(new_stages)


def _transfers(numbers: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """Yield ``numbers`` with ``step`` units moved from one entry to another."""
    for giver, taker in itertools.permutations(range(len(numbers)), 2):
        if numbers[giver] >= step:
            changed = list(numbers)
            changed[giver] -= step
            changed[taker] += step
            yield tuple(changed)
