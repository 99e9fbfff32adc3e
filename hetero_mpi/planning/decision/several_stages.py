"""Derive plans with virtual stages (several per rank), or in other requested orders, from plans that the search finds.

Interleaved or V-shaped stages shrink the pipeline bubble between similar ranks on fast links, but send more messages, which
cost time on slow links. Simulation decides.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.planning.device_times import layer_s, repeated_s
from hetero_mpi.planning.memory import warm_ups
from hetero_mpi.planning.orders import INTERLEAVINGS, ORDERS, OTHER_ORDERS
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.search.memory_fit import Fitter, cut_otherwise, with_recompute
from hetero_mpi.planning.tables import may_split
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

MIN_GAIN_RATIO = 0.02
"""Minimum relative gain for choosing virtual stages, because they send more messages."""
MAX_START_RATIO = 1.3
"""Virtual stages are tried for plans whose step takes up to this multiple of the best step time."""
MAX_ACTIONS, BISECTION_COUNT = 40_000, 40
"""Maximum number of actions simulated for all candidates (about a second), and of bisection steps per cut search."""
MAX_FITS = 12
"""Maximum number of attempts to fit a plan: ranks that lack memory recompute; then, if the order is requested, lose layers."""


@dataclass(frozen=True)
class _Shape:
    """Assignment of stages to ranks: the order of ranks is repeated and, in a V, reversed every second time."""

    order: str
    stages_per_rank: int
    depth: float = 1
    """Micro-batches in flight relative to the number that free links would require."""

    def ranks(self, ranks: Sequence[int]) -> list[int]:
        back = ranks if self.order == "interleaved" else ranks[::-1]
        turns = (back if turn % 2 else ranks for turn in range(self.stages_per_rank))
        return [rank for turn in turns for rank in turn]


class VirtualStageSearch:
    """Finds plans with virtual stages; simulates at most ``MAX_ACTIONS`` actions."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.actions_left = profile, request, MAX_ACTIONS
        self.fitter, self.requested = Fitter(profile, request), request.schedule != "auto"
        self.closest: tuple[float, Plan | None] = math.inf, None
        """Of the plans that do not fit, the one that lacks least memory, with its ratio of needed to usable bytes."""

    def better(self, plans: Sequence[tuple[Plan, float]], best_s: float) -> tuple[Plan, float] | None:
        """Best plan with virtual stages, derived from ``plans``; None unless it beats ``best_s`` by ``MIN_GAIN_RATIO``."""
        limit_s = best_s * (1 - MIN_GAIN_RATIO)
        orders = ("interleaved", "zbv", "dualpipev") if True in self.request.split_choices else ("interleaved", "zbv")
        near = [plan for plan, step_s in plans if step_s <= best_s * MAX_START_RATIO and self._waits(plan, limit_s)]
        candidates = self._shapes_of(near, orders)
        # Interleaved ranks form a ring, which may start at any rank.
        candidates += self._shapes_of([rotated for plan in near for rotated in _rotations(plan)], ["interleaved"])
        return self._best(candidates, limit_s)

    def in_order(self, plans: Sequence[Plan]) -> Plan | None:
        """The fastest of ``plans`` converted to virtual stages in the requested schedule; None if none fits."""
        orders, timed, turned = [self.request.schedule], list[tuple[Plan, float]](), list[tuple[float, int]]()
        for number, plan in enumerate(plans):
            if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
                candidates = self._shapes_of([plan], orders, force=not timed)
                turned += ((step_s, number) for _, step_s in candidates if orders == ["interleaved"])
            else:
                candidates = [(plan, self.fitter.step_s(plan))] if self.fitter.holds(plan) else []
            timed += candidates
        self.actions_left = max(self.actions_left, MAX_ACTIONS // 4)
        for number in dict.fromkeys(number for _, number in sorted(turned)):
            timed += self._shapes_of([*_rotations(plans[number])], orders)
        self.actions_left = max(self.actions_left, 3 * MAX_ACTIONS // 4)
        best = self._best(timed, math.inf)
        return None if best is None else best[0]

    def _shapes_of(self, plans: Sequence[Plan], orders: Sequence[str], force: bool = False) -> list[tuple[Plan, float]]:
        """Plans with virtual stages and their step times. ``force``: ignore the action limit until one plan fits."""
        shapes, depths = list[_Shape](), (1, 2, 0.5)[: 2 + self.requested]
        for order in orders:
            if order == "interleaved":
                shapes += (_Shape(order, each) for each in range(2, max(2, self.request.stages_per_rank) + 1))
            else:
                shapes += (_Shape(order, 2, depth) for depth in depths)
        candidates: list[tuple[Plan, float]] = []
        for plan in plans:
            for shape in shapes:
                too_many = shape.stages_per_rank * _action_count(plan) > self.actions_left
                if too_many and (candidates or not force):
                    continue
                changed = self._changed(plan, shape)
                if changed is not None:
                    self.actions_left -= _action_count(changed)
                    candidates.append((changed, self.fitter.step_s(changed)))
                elif self.requested and shape.order == "interleaved":
                    break  # more stages per rank need more memory
        return candidates

    def _best(self, candidates: Sequence[tuple[Plan, float]], limit_s: float) -> tuple[Plan, float] | None:
        """Improve the cuts of the best candidate; None if its step is not shorter than ``limit_s``."""
        if not candidates:
            return None
        best = self.fitter.descended(*min(candidates, key=lambda candidate: candidate[1]), self._near)
        return best if best[1] < limit_s else None

    def _waits(self, plan: Plan, limit_s: float) -> bool:
        """Whether removing wait time could bring the plan below ``limit_s``."""
        if any(stage.streamed for _, _, stage in plan.numbered) or all(len(p.stages) == 1 for p in plan.pipelines):
            return False
        busy_s = outlined(plan, self.profile).busy_s
        return sum(busy_s.values()) / len(busy_s) < limit_s

    def _changed(self, plan: Plan, shape: _Shape) -> Plan | None:
        """``plan`` with this shape for all pipelines of several ranks; None if impossible or out of memory.

        Ranks that lack memory recompute. If the order is requested, they then get fewer layers, or are left out.
        """
        choices, slowdown = self.request.recompute_choices, dict.fromkeys(plan.ranks, 1.0)
        repeating, may_idle = set() if False in choices else {*plan.ranks}, self.requested and self.request.allow_idle
        for pipeline in plan.pipelines if may_idle else ():
            longest_first = sorted(pipeline.stages, key=lambda stage: stage.first - stage.last)
            for stage in longest_first[plan.layers // shape.stages_per_rank :]:
                del slowdown[stage.ranks[0]]
        for _ in range(MAX_FITS if self.requested else 2):
            if self.actions_left < -6 * MAX_ACTIONS:  # on dozens of ranks, an attempt takes seconds
                break
            changed = self._cut(plan, shape, slowdown, repeating)
            if changed is None or not (overfull := self.fitter.memory.overfull(changed)):
                return changed
            self.actions_left -= _action_count(changed)
            self.closest = min(self.closest, (max(overfull.values()), changed), key=lambda pair: pair[0])
            reducible = {stage.ranks[0] for _, _, stage in changed.numbered if stage.last - stage.first > 1}
            if True in choices and not overfull.keys() <= repeating:
                repeating |= overfull.keys()
            elif may_idle and not overfull.keys() <= reducible:
                slowdown = {rank: slowdown[rank] for rank in slowdown if rank not in overfull or rank in reducible}
            else:
                slowdown = {rank: times * overfull.get(rank, 1.0) for rank, times in slowdown.items()}
        return None

    def _cut(self, plan: Plan, shape: _Shape, slowdown: Mapping[int, float], repeating: Collection[int]) -> Plan | None:
        """``plan`` with this shape, on the ranks in ``slowdown``, cut as if they computed that many times more slowly.

        ``repeating`` ranks recompute. None if there are too few layers or ranks.
        """
        pipelines = []
        for pipeline in plan.pipelines:
            if len(pipeline.stages) > 1:
                ranks, tokens = [*pipeline.stages_of], pipeline.micro_batch * plan.sequence_length
                seconds = {rank: self._layers_s(rank, tokens, rank in repeating) for rank in ranks if rank in slowdown}
                seconds = {rank: [slowdown[rank] * layer_s for layer_s in of_rank] for rank, of_rank in seconds.items()}
                stage_ranks = shape.ranks([*seconds])
                cuts = _cuts(stage_ranks, seconds, plan.layers) if len(seconds) > 1 else None
                if cuts is None:
                    return None
                pipeline = self._shaped(pipeline, shape, stage_ranks, cuts)
            pipelines.append(pipeline)
        cut = replace(plan, pipelines=tuple(pipelines))
        return cut.with_stages(replace(stage, recompute=stage.ranks[0] in repeating) for _, _, stage in cut.numbered)

    def _shaped(self, pipeline: PipelinePlan, shape: _Shape, ranks: Sequence[int], cuts: Sequence[int]) -> PipelinePlan:
        splits = ORDERS[shape.order].SPLITS and True in self.request.split_choices
        splits = splits and all(may_split(self.profile, rank) for rank in ranks)
        weights = {stage.ranks[0]: stage.state_weight for stage in pipeline.stages}
        count, max_depth = len(cuts) - 1, pipeline.micro_batches - 1
        depths = [min(max_depth, int(shape.depth * (count - 1 - number))) for number in range(count)]
        stages = tuple(
            StagePlan((rank,), cuts[number], cuts[number + 1], depths[number], state_weight=weights[rank])
            for number, rank in enumerate(ranks)
        )
        return replace(pipeline, stages=stages, split_backward=splits, order=shape.order)

    def _layers_s(self, rank: int, tokens: int, repeats: bool) -> list[float]:
        """Seconds per layer for the forward and backward of one micro-batch."""
        of_kind = {
            kind: layer_s(t, Op.F, tokens) + layer_s(t, Op.B, tokens) + (repeated_s(t, tokens) if repeats else 0.0)
            for kind, t in self.profile.devices[rank].layers.items()
        }
        return [of_kind[layer.kind] for layer in self.profile.model.layers]

    def _near(self, plan: Plan) -> Iterator[Plan]:
        """Yield ``plan`` with one cut moved by one layer, within the action limit."""
        for changed in itertools.takewhile(lambda p: _action_count(p) <= self.actions_left, cut_otherwise(plan)):
            self.actions_left -= _action_count(changed)
            yield changed


def nearest_searched(request: PlanRequest) -> PlanRequest:
    """``request`` with the schedule replaced by the closest one that the search supports."""
    if request.schedule not in OTHER_ORDERS:
        return request
    if request.schedule in INTERLEAVINGS:
        return replace(request, schedule="auto", stages_per_rank=1, groups=False)
    return replace(request, schedule="split" if OTHER_ORDERS[request.schedule].SPLITS else "1f1b")


def in_requested_order(
    plans: Sequence[Plan], profile: ClusterProfile, request: PlanRequest, fits: bool = True
) -> Plan | None:
    """The fastest of ``plans`` in the requested schedule, with virtual stages if that needs them; None if none fits.

    With one stage per rank, depths and recomputation follow from the micro-batches that the schedule keeps in flight. Unless
    ``fits``, return the plan that lacks least memory; None if there are too few layers.
    """
    name = request.schedule
    if name in INTERLEAVINGS:
        search = VirtualStageSearch(profile, request)
        best = search.in_order(plans)
        return best if fits else search.closest[1]
    if name not in OTHER_ORDERS:
        return plans[0]
    plans = [replace(plan, pipelines=tuple(_reordered(p, name) for p in plan.pipelines)) for plan in plans]
    fitter, recompute = Fitter(profile, request), max(request.recompute_choices)
    if fits:
        return min(filter(None, map(fitter.fitted, plans)), key=fitter.step_s, default=None)
    plans = [with_recompute(plan, recompute) for plan in plans]
    return min(plans, key=lambda plan: max(fitter.memory.overfull(plan).values(), default=1.0))


def _reordered(pipeline: PipelinePlan, schedule: str) -> PipelinePlan:
    """``pipeline`` in the order ``schedule``, with the depths that this order keeps in flight."""
    if len(pipeline.stages) == 1:
        return pipeline
    pipeline = replace(pipeline, order=schedule, split_backward=OTHER_ORDERS[schedule].SPLITS)
    stages = (replace(stage, warm_up=n) for stage, n in zip(pipeline.stages, warm_ups(pipeline), strict=True))
    return replace(pipeline, stages=tuple(stages))


def _rotations(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with the stages of each pipeline rotated, for their ranks: layers are cut anew."""
    for by in range(1, max(len(pipeline.stages) for pipeline in plan.pipelines)):
        turns = ((pipeline, pipeline.stages, by % len(pipeline.stages)) for pipeline in plan.pipelines)
        yield replace(plan, pipelines=tuple(replace(p, stages=(*old[at:], *old[:at])) for p, old, at in turns))


def _action_count(plan: Plan) -> int:
    """Approximate number of actions per step."""
    return sum(6 * len(pipeline.stages) * pipeline.micro_batches for pipeline in plan.pipelines)


def _cuts(ranks: Sequence[int], seconds: dict[int, list[float]], layers: int) -> list[int] | None:
    """Cuts that balance compute time across ranks and across a rank's stages; None if there are too few layers."""
    if len(ranks) > layers:
        return None
    low, high = 0.0, sum(map(max, zip(*seconds.values(), strict=True)))
    best_cuts = [*range(len(ranks)), layers]
    for _ in range(BISECTION_COUNT):
        middle = (low + high) / 2
        cuts = _filled_cuts(ranks, seconds, layers, middle)
        low, high, best_cuts = (middle, high, best_cuts) if cuts is None else (low, middle, cuts)
    return best_cuts


def _filled_cuts(ranks: Sequence[int], seconds: dict[int, list[float]], layers: int, step_s: float) -> list[int] | None:
    """Cut greedily so that the i-th of a rank's n stages fills it to i/n of ``step_s`` seconds; None if layers remain."""
    stages_of_rank = {rank: list(ranks).count(rank) for rank in ranks}
    stages_seen, busy_s, cuts = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0), [0]
    for number, rank in enumerate(ranks):
        stages_seen[rank] += 1
        until_s, layer = step_s * stages_seen[rank] / stages_of_rank[rank], cuts[-1]
        stages_behind = len(ranks) - number - 1
        while layer < layers - stages_behind and (layer == cuts[-1] or busy_s[rank] + seconds[rank][layer] <= until_s):
            busy_s[rank] += seconds[rank][layer]
            layer += 1
        if busy_s[rank] > step_s:
            return None
        cuts.append(layer)
    return cuts if cuts[-1] == layers else None
