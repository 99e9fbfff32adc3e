"""Virtual pipeline stages: derive plans with several stages per rank from plans with one stage per rank.

Interleaved or V-shaped stages shrink the pipeline bubble between similar ranks on fast links, but send more messages, which
cost time on slow links. Simulation decides.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.planning.device_times import layer_s, repeated_s
from hetero_mpi.planning.orders import ORDERS
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


@dataclass(frozen=True)
class _Shape:
    """Assignment of stages to ranks: the order of ranks is repeated and, in a V, reversed every second time."""

    order: str
    stages_per_rank: int
    deep: bool = False
    """Keep twice as many micro-batches in flight as free links would require."""

    def ranks(self, ranks: Sequence[int]) -> list[int]:
        back = ranks if self.order == "interleaved" else ranks[::-1]
        turns = (back if turn % 2 else ranks for turn in range(self.stages_per_rank))
        return [rank for turn in turns for rank in turn]


def _shapes(orders: Sequence[str], most: int) -> Iterator[_Shape]:
    """Yield interleaved shapes with up to ``most`` stages per rank, or V shapes with two."""
    for order in orders:
        if order == "interleaved":
            yield from (_Shape(order, each) for each in range(2, most + 1))
        else:
            yield from (_Shape(order, 2, deep) for deep in (False, True))


class VirtualStageSearch:
    """Finds plans with virtual stages; simulates at most ``MAX_ACTIONS`` actions."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.actions_left = profile, request, MAX_ACTIONS
        self.fitter = Fitter(profile, request)

    def better(self, plans: Sequence[tuple[Plan, float]], best_s: float) -> tuple[Plan, float] | None:
        """Best plan with virtual stages, derived from ``plans``; None unless it beats ``best_s`` by ``MIN_GAIN_RATIO``."""
        limit_s = best_s * (1 - MIN_GAIN_RATIO)
        orders = ("interleaved", "zbv", "dualpipev") if True in self.request.split_choices else ("interleaved", "zbv")
        near = [plan for plan, step_s in plans if step_s <= best_s * MAX_START_RATIO and self._waits(plan, limit_s)]
        candidates = self._shapes_of(near, orders)
        # Interleaved ranks form a ring, which may start at any rank.
        candidates += self._shapes_of([rotated for plan in near for rotated in _rotations(plan)], ["interleaved"])
        return self._best(candidates, limit_s)

    def in_order(self, plan: Plan, order: str) -> Plan | None:
        """Convert ``plan`` to virtual stages in schedule ``order``; None if it does not fit."""
        if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
            return plan
        best = self._best(self._shapes_of([plan], [order], force=True), math.inf)
        return None if best is None else best[0]

    def _shapes_of(self, plans: Sequence[Plan], orders: Sequence[str], force: bool = False) -> list[tuple[Plan, float]]:
        """Plans with virtual stages and their step times. ``force``: ignore the action limit until one plan fits."""
        candidates: list[tuple[Plan, float]] = []
        for plan in plans:
            for shape in _shapes(orders, max(2, self.request.stages_per_rank)):
                if shape.stages_per_rank * _action_count(plan) > self.actions_left and (candidates or not force):
                    continue
                changed = self._changed(plan, shape)
                if changed is not None:
                    self.actions_left -= _action_count(changed)
                    candidates.append((changed, self.fitter.step_s(changed)))
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
        """``plan`` with this shape for all pipelines of several ranks; None if impossible or out of memory."""
        pipelines = []
        for pipeline in plan.pipelines:
            ranks = [stage.ranks[0] for stage in pipeline.stages]
            if len(ranks) == 1:
                pipelines.append(pipeline)
                continue
            cuts = self._cuts(shape.ranks(ranks), pipeline, plan)
            if cuts is None:
                return None
            pipelines.append(self._shaped(pipeline, shape, ranks, cuts))
        changed = replace(plan, pipelines=tuple(pipelines))
        for recompute in sorted(set(self.request.recompute_choices)):
            candidate = with_recompute(changed, recompute)
            if self.fitter.holds(candidate):
                return candidate
            self.actions_left -= _action_count(candidate)
        return None

    def _shaped(self, pipeline: PipelinePlan, shape: _Shape, ranks: Sequence[int], cuts: Sequence[int]) -> PipelinePlan:
        splits = ORDERS[shape.order].SPLITS and True in self.request.split_choices
        splits = splits and all(may_split(self.profile, rank) for rank in ranks)
        weights = {stage.ranks[0]: stage.state_weight for stage in pipeline.stages}
        count, max_depth = len(cuts) - 1, pipeline.micro_batches - 1
        depths = [min(max_depth, (2 if shape.deep else 1) * (count - 1 - number)) for number in range(count)]
        stages = tuple(
            StagePlan((rank,), cuts[number], cuts[number + 1], depths[number], state_weight=weights[rank])
            for number, rank in enumerate(shape.ranks(ranks))
        )
        return replace(pipeline, stages=stages, split_backward=splits, order=shape.order)

    def _cuts(self, ranks: Sequence[int], pipeline: PipelinePlan, plan: Plan) -> list[int] | None:
        """Cuts that balance compute time across ranks and across a rank's stages; None if there are too few layers."""
        if len(ranks) > plan.layers:
            return None
        tokens = pipeline.micro_batch * plan.sequence_length
        seconds = {rank: self._layers_s(rank, tokens) for rank in ranks}
        low, high = 0.0, sum(map(max, zip(*seconds.values(), strict=True)))
        best_cuts = [*range(len(ranks)), plan.layers]
        for _ in range(BISECTION_COUNT):
            middle = (low + high) / 2
            cuts = _filled_cuts(ranks, seconds, plan.layers, middle)
            low, high, best_cuts = (middle, high, best_cuts) if cuts is None else (low, middle, cuts)
        return best_cuts

    def _layers_s(self, rank: int, tokens: int) -> list[float]:
        """Seconds per layer for the forward and backward of one micro-batch."""
        times, repeats = self.profile.devices[rank].layers, self.request.recompute_choices == (True,)
        of_kind = {
            kind: layer_s(t, Op.F, tokens) + layer_s(t, Op.B, tokens) + (repeated_s(t, tokens) if repeats else 0.0)
            for kind, t in times.items()
        }
        return [of_kind[layer.kind] for layer in self.profile.model.layers]

    def _near(self, plan: Plan) -> Iterator[Plan]:
        """Yield ``plan`` with one cut moved by one layer, within the action limit."""
        for changed in itertools.takewhile(lambda p: _action_count(p) <= self.actions_left, cut_otherwise(plan)):
            self.actions_left -= _action_count(changed)
            yield changed


def _rotations(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with the ranks of each pipeline rotated."""
    for by in range(1, max(len(pipeline.stages) for pipeline in plan.pipelines)):
        pipelines = []
        for pipeline in plan.pipelines:
            stages, at = pipeline.stages, by % len(pipeline.stages)
            turned = zip(stages, (*stages[at:], *stages[:at]), strict=True)
            rotated_stages = (replace(old, ranks=new.ranks, state_weight=new.state_weight) for old, new in turned)
            pipelines.append(replace(pipeline, stages=tuple(rotated_stages)))
        yield replace(plan, pipelines=tuple(pipelines))


def _action_count(plan: Plan) -> int:
    """Approximate number of actions per step."""
    return sum(6 * len(pipeline.stages) * pipeline.micro_batches for pipeline in plan.pipelines)


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
