"""Plans in which ranks of one host hold a stage together, each a share of every layer (tensor parallelism).

That pays where ranks would wait for each other (a batch of one or two long sequences leaves nothing to overlap), and where a layer
is larger than a device. The searches know ranks only: they are given a cluster in which a group is one rank, as fast as its
members are together (``group_costs.group_device``). What they find is written out with groups, timed and counted as it is, and
its shares and cuts are then improved one by one.

Groups are looked at only where the bounds of such a cluster leave room for the gain that is asked for, with no more pipelines than
they leave it for: where ranks by themselves have nothing to wait for, they do not, and no search is made.
"""

from __future__ import annotations

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

GAIN = 0.02
"""So much shorter a step must be for a plan with groups: its sums keep all members waiting for the slowest."""
LARGEST = 64
"""In clusters of more ranks groups are not looked for."""
SEARCHES = 4
"""So many clusters with groups are searched at the most, those with the lowest bounds; where nothing fits otherwise, all of them
until something fits."""
SEVERAL = 2
"""Of so many, beside or among these, several pipelines are looked at, which takes longer."""
NEAR = 1.05
"""Plans that take up to so many times as long as they should are improved."""
ROOMS = (1.0, 0.85, 0.7)
"""Parts of a group's memory that the searches are told, until what they find fits as it is."""
ROUNDING = 1e-9
COARSE = 16
"""Experts are moved from member to member one by one and by this part of all."""
SIZES = (2, 3, 4, 8)
"""Of groups, beside all ranks of a host and all but one."""

Timed = tuple[Plan, float]
"""A plan and the seconds of a step."""
Search = Callable[[ClusterProfile, PlanRequest], Plan | None]
Cost = Callable[[int, int], float]
"""(place in a group, how many it has) -> what is to be small for all."""


Groups = tuple[StagePlan, ...]
"""Disjoint ranks, each as if it held the whole chain."""


def with_groups(
    profile: ClusterProfile,
    request: PlanRequest,
    best_s: float | None,
    search: Search,
    crowded: Collection[int] = (),
) -> Timed | None:
    """A plan with groups at least ``GAIN`` shorter than ``best_s`` (None: nothing fits without); None: none was found. ``crowded``:
    ranks with less than a core a thread, which form none: members would wait in every layer for one that does not run."""
    hosts = _by_host(profile, crowded)
    if not _wanted(profile, request) or not hosts:
        return None
    limit_s = math.inf if best_s is None else best_s * (1 - GAIN)
    sizes = tuple({*request.micro_batch_choices, *request.alone_micro_batch_choices})
    least = replace(request, split_choices=(False,), micro_batch_choices=sizes)
    if limit_s < math.inf and fluid_bound_s(profile, least) >= limit_s:
        return None
    return _Search(profile, request, search, hosts).shorter_than(limit_s)


def improved(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Plan:
    """A plan with groups, with heads, experts and layers moved between ranks as long as that makes it shorter."""
    fitter = Fitter(profile, request)
    return fitter.descended(plan, fitter.step_s(plan), _near)[0]


def _wanted(profile: ClusterProfile, request: PlanRequest) -> bool:
    """May a plan have groups?"""
    wanted = request.groups and request.schedule == "auto" and not profile.emulated
    return wanted and (profile.model.heads or 0) > 1 and len(profile.devices) <= LARGEST


def _by_host(profile: ClusterProfile, crowded: Collection[int]) -> list[list[DeviceProfile]]:
    """The devices that may form groups, of every host that has several. Of a cluster that was measured, those of which it is known
    what half the heads take: ranks divide little of a small layer's time."""
    found: dict[str, list[DeviceProfile]] = {}
    for device in usable_devices(profile):
        if device.rank not in crowded and (device.halved or profile.source != MEASURED):
            found.setdefault(device.host, []).append(device)
    return [devices for devices in found.values() if len(devices) > 1]


class _Search:
    def __init__(
        self,
        profile: ClusterProfile,
        request: PlanRequest,
        search: Search,
        hosts: Sequence[Sequence[DeviceProfile]],
    ) -> None:
        self.profile, self.request, self.search, self.hosts = profile, request, search, hosts
        self.fitter = Fitter(profile, request)
        self.heads = profile.model.heads or 0
        self.tokens = min(request.micro_batch_choices) * request.sequence_length
        self.chains = {device.rank: member_chain_s(profile, device, self.tokens) for device in usable_devices(profile)}

    def shorter_than(self, limit_s: float) -> Timed | None:
        """The best plan with groups that is found below ``limit_s``."""
        known = {}
        for ranks in dict.fromkeys(self._groupings()):
            groups = tuple(map(self._quickest, ranks))
            known[groups] = self._bounds_s(groups, limit_s)
        several = self._for_several(known)
        first = sorted(known, key=lambda groups: known[groups].get(1, math.inf))[:SEARCHES]
        promising = []
        for groups, bounds_s in known.items():
            wanted = [number for number in bounds_s if number == 1 or groups in several]
            if wanted:
                promising.append((min(bounds_s[number] for number in wanted), max(wanted), groups))
        best: Timed | None = None
        for bound_s, most, groups in sorted(promising, key=lambda one: one[0]):
            sought_s = limit_s if best is None else best[1]
            if sought_s < math.inf and (bound_s >= sought_s or groups not in (*several, *first)):
                continue
            numbers = tuple(dict.fromkeys((most, 1))) if 1 in known[groups] else (most,)
            for plan in self._plans(groups, numbers):
                step_s = self.fitter.step_s(plan)
                if step_s < NEAR * sought_s:
                    better = self.fitter.descended(plan, step_s, _near)
                    best = better if better[1] < sought_s and (best is None or better[1] < best[1]) else best
        return best

    def _bounds_s(self, groups: Groups, limit_s: float) -> dict[int, float]:
        """Number of pipelines -> no plan of so many with these groups, heads shared so, takes less; those below ``limit_s``."""
        small, asked = contracted(self.profile, groups, self.tokens), self._asked(groups)
        by_itself = replace(asked, micro_batch_choices=tuple(sorted(self._sizes(groups))))
        fluid_s, known = fluid_bound_s(small, by_itself), filling_bounds_s(small, by_itself)
        return {number: max(fluid_s, own_s) for number, own_s in known.items() if max(fluid_s, own_s) < limit_s}

    def _for_several(self, known: Mapping[Groups, Mapping[int, float]]) -> list[Groups]:
        """The groups that are most promising in several pipelines, by their bounds; of those that like hosts would form, one."""
        unlike: dict[object, tuple[float, Groups]] = {}
        for groups, bounds_s in known.items():
            least_s = min((its_s for number, its_s in bounds_s.items() if number > 1), default=math.inf)
            memory = [[self.profile.devices[rank].memory_bytes for rank in group.ranks] for group in groups]
            if least_s < math.inf:
                unlike.setdefault(f"{bounds_s} {sorted(memory)}", (least_s, groups))
        return [groups for _, groups in sorted(unlike.values(), key=lambda one: one[0])[:SEVERAL]]

    def _groupings(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Ways to form groups: on all hosts in the same way, and on one host alone."""
        options = [self._options([device.rank for device in devices]) for devices in self.hosts]
        for name in dict.fromkeys(name for own in options for name in own):
            yield tuple(group for own in options for group in own.get(name, ()))
            yield from (own[name] for own in options if name in own)

    def _options(self, ranks: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Name -> groups of one host's ranks: all of them, the fastest ones, as many groups of one size as there can be, or as many
        with one of each kind of device."""
        count = len(ranks)
        ordered = sorted(ranks, key=lambda rank: (sum(self.chains[rank]), rank))
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        most = max(self.heads, self._timed_experts(ranks))  # each needs a head or an expert
        if count <= most:
            found["all"] = (tuple(sorted(ranks)),)
        for size in sorted({*SIZES, count - 1}):
            if 2 <= size <= min(count, most):
                found[f"{size} fastest"] = (tuple(sorted(ordered[:size])),)
                begins = range(0, count - size + 1, size)
                found[f"each {size}"] = tuple(tuple(sorted(ordered[begin : begin + size])) for begin in begins)
        kinds: dict[str, list[int]] = {}
        for rank in ordered:
            kinds.setdefault(self.profile.devices[rank].backend, []).append(rank)
        if 1 < len(kinds) <= most:  # such as a GPU with heads and a processor with experts
            found["one of each kind"] = tuple(tuple(sorted(ranks)) for ranks in zip(*kinds.values(), strict=False))
        return found

    def _timed_experts(self, ranks: Sequence[int]) -> int:
        """How many there are to share; 0 where it is not known how fast these ranks are at them."""
        timed = all(self.chains[rank].experts > 0 for rank in ranks)
        return (self.profile.model.experts or 0) if timed else 0

    def _quickest(self, ranks: tuple[int, ...]) -> StagePlan:
        """Heads and experts for each rank such that the slowest one takes as short as possible: each one to the rank that would
        have it done first. Where experts were not timed, in proportion to heads, of which each rank has one then."""
        chains = [self.chains[rank] for rank in ranks]
        timed = self._timed_experts(ranks)
        least = [int(len(ranks) > timed)] * len(ranks)
        shares = _dealt(self.heads, least, lambda place, n: chains[place].with_heads(n / self.heads))
        each_s = [chain.experts if timed else 1 / share for chain, share in zip(chains, shares, strict=True)]
        return self._group(ranks, shares, lambda place, n: each_s[place] * n)

    def _roomiest(self, ranks: tuple[int, ...]) -> StagePlan:
        """Heads and experts for each rank in proportion to its memory; of heads one each, if there are as many."""
        memory = [self.profile.devices[rank].memory_bytes for rank in ranks]

        def fullness(place: int, count: int) -> float:
            return count / max(1, memory[place])

        least = [int(len(ranks) <= self.heads)] * len(ranks)
        return self._group(ranks, _dealt(self.heads, least, fullness), fullness)

    def _group(self, ranks: tuple[int, ...], shares: tuple[int, ...], expert_cost: Cost) -> StagePlan:
        count = self.profile.model.experts
        experts = _dealt(count, [int(share == 0) for share in shares], expert_cost) if count is not None else None
        return StagePlan(ranks, 0, len(self.profile.model.layers), 0, shares=shares, experts=experts)

    def _asked(self, groups: Groups) -> PlanRequest:
        """The request for a cluster with these groups. There are fewer pipelines to share the batch, so micro-batches may be
        larger."""
        request = self.request
        left = len(self.profile.devices) - sum(len(group.ranks) - 1 for group in groups)
        most = max(1, request.global_batch // left)
        larger = {size for size in request.alone_micro_batch_choices if size <= most}
        return replace(
            request,
            micro_batch_choices=tuple(sorted({*request.micro_batch_choices, *larger})),
            split_choices=(False,),
            stages_per_rank=1,
            streaming="never",
            groups=False,
        )

    def _sizes(self, groups: Groups) -> set[int]:
        """Micro-batches of a group by itself, and of the cluster with groups."""
        return {*self.request.alone_micro_batch_choices, *self._asked(groups).micro_batch_choices}

    def _plans(self, groups: Groups, pipelines: Sequence[int]) -> Iterator[Plan]:
        """Plans with these groups that fit: one stage on each group by itself, and what the search finds of the whole cluster, of
        so many pipelines at the most; where some of several are too large, of the next number."""
        alone = len(groups) == 1 and len(groups[0].ranks) == len(self.profile.devices)
        if self.request.allow_idle or alone:
            yield from (plan for group in groups if (plan := self._by_itself(group)) is not None)
        roomy = tuple(self._roomiest(group.ranks) for group in groups)
        some = dict.fromkeys((groups, roomy))
        for most in pipelines:
            too_large, unused = False, set[Groups]()
            for shared, room in itertools.product(some, ROOMS):
                if shared in unused:  # nor would they be with less room
                    continue
                asked = replace(self._asked(shared), max_pipelines=most)
                found = self.search(contracted(self.profile, shared, self.tokens, room), asked)
                written = None if found is None else self._written(found, shared)
                if written is None or not written.leader_of:
                    unused.add(shared)
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
        """The whole model on one group."""
        layers = len(self.profile.model.layers)
        batch = self.request.global_batch
        pipelines = [PipelinePlan((group,), size, batch) for size in sorted(self._sizes((group,)))]
        return self._shortest(self._fitted(Plan((p,), batch, self.request.sequence_length, layers)) for p in pipelines)

    def _written(self, plan: Plan, groups: Groups) -> Plan:
        """A plan of the smaller cluster in the numbers of the whole one, with its groups."""
        leads = {group.ranks[0]: group for group in groups}
        follow = {rank for group in groups for rank in group.ranks[1:]}
        numbers = [rank for rank in range(len(self.profile.devices)) if rank not in follow]

        def written(stage: StagePlan) -> StagePlan:
            rank = numbers[stage.ranks[0]]
            group = leads.get(rank, StagePlan((rank,), 0, 0, 0))
            return replace(stage, ranks=group.ranks, shares=group.shares, experts=group.experts)

        return plan.with_stages([written(stage) for _, _, stage in plan.numbered])

    def _fitted(self, plan: Plan) -> Plan | None:
        """``plan``, or where memory asks for it with forwards repeated on all stages, or shared otherwise; None: it does not fit
        even so."""
        plans = [plan, with_recompute(plan, True)] if True in self.request.recompute_choices else [plan]
        if self.fitter.holds(plan):
            return plan
        return self._shortest(_lightened(one, self.fitter) for one in plans)

    def _shortest(self, plans: Iterable[Plan | None]) -> Plan | None:
        found = (plan for plan in plans if plan is not None)
        return min(found, key=self.fitter.step_s, default=None)


def _lightened(plan: Plan, fitter: Fitter) -> Plan | None:
    """``plan`` with heads and experts moved from member to member until it fits, each time those that cost the least time for the
    bytes that their rank lacked; None: it does not fit even so."""

    def lacking_bytes(plan: Plan) -> float:
        memory = predict_memory(plan, fitter.profile, fitter.request.memory_reserve)
        return sum(max(0, one.peak_bytes - one.usable_bytes) for one in memory)

    lacking = lacking_bytes(plan)
    while lacking > 0:
        step_s, best = fitter.step_s(plan), (math.inf, lacking, plan)
        for changed in _shared_otherwise(plan):
            left = lacking_bytes(changed)
            if left < lacking:
                price = (fitter.step_s(changed) - step_s) / (lacking - left)
                best = min(best, (price, left, changed), key=lambda one: one[0])
        if best[2] is plan:
            return None
        _, lacking, plan = best
    return plan if fitter.holds(plan) else None


def _near(plan: Plan) -> Iterator[Plan]:
    """Heads and experts moved from member to member, and layers from stage to stage."""
    yield from _shared_otherwise(plan)
    yield from cut_otherwise(plan)


def _dealt(count: int, least: Sequence[int], cost: Cost) -> tuple[int, ...]:
    """``count`` things dealt out to as many members as ``least`` has, of which each gets that many at least: each further one to
    the member for which it costs least."""
    dealt = list(least)
    for _ in range(count - sum(least)):
        dealt[min(range(len(dealt)), key=lambda place: cost(place, dealt[place] + 1))] += 1
    return tuple(dealt)


def _shared_otherwise(plan: Plan) -> Iterator[Plan]:
    """A head moved, or some experts: in one stage, or in all those that hold the same layers in the same shares."""
    stages = [stage for _, _, stage in plan.numbered]
    alike = [(stage.first, stage.last, stage.shares, stage.experts) for stage in stages]
    for place, stage in enumerate(stages):
        found = [replace(stage, shares=shares) for shares in _moved(stage.shares, 1)]
        for step in dict.fromkeys((sum(stage.experts or ()) // COARSE, 1)):
            found += [replace(stage, experts=experts) for experts in _moved(stage.experts or (), step) if step]
        twins = [one for one in range(len(stages)) if alike[one] == alike[place]]
        for changed in found:
            if changed.idles:
                continue
            for chosen in [[place], twins][: len(twins)]:
                other = list(stages)
                for one in chosen:
                    other[one] = replace(stages[one], shares=changed.shares, experts=changed.experts)
                yield plan.with_stages(other)


def _moved(numbers: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """``step`` of one number given to another one."""
    for giver, taker in itertools.permutations(range(len(numbers)), 2):
        if numbers[giver] >= step:
            changed = list(numbers)
            changed[giver] -= step
            changed[taker] += step
            yield tuple(changed)
