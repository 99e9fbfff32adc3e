"""Plans whose ranks hold several stages, made from plans whose ranks hold one.

A rank that waits for its neighbours waits a shorter time for shorter stages: between like ranks on fast links several stages each,
in a loop or a V, take most of the waiting away. Over slow links they cost messages. Which it is, simulation says.
"""

from __future__ import annotations

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

GAIN = 0.02
"""So much shorter a step must be for a plan whose ranks hold several stages: it is harder to read, and sends more messages."""
NEAR = 1.3
"""Plans up to so many times as slow as the best one are tried with several stages per rank."""
ACTIONS, BISECTIONS = 40_000, 40
"""The actions of all candidates together, to be listed, counted and simulated: about a second. Halvings of the time by which all
layers find a place."""


@dataclass(frozen=True)
class _Shape:
    """Which rank holds which stage: turn by turn all ranks, in a V every other turn backwards."""

    order: str
    each: int
    v_shaped: bool
    deep: bool
    """Twice as many micro-batches in flight as are needed where messages take no time."""

    def ranks(self, ranks: Sequence[int]) -> list[int]:
        turns = (ranks if not self.v_shaped or turn % 2 == 0 else ranks[::-1] for turn in range(self.each))
        return [rank for turn in turns for rank in turn]


def _shapes(orders: Sequence[str], most: int) -> Iterator[_Shape]:
    """Up to ``most`` stages per rank in a loop, two in a V."""
    for order in orders:
        if order == "interleaved":
            yield from (_Shape(order, each, False, False) for each in range(2, most + 1))
        else:
            yield from (_Shape(order, 2, True, deep) for deep in (False, True))


class SeveralStages:
    """Finds plans whose ranks hold several stages; simulates no more than ``ACTIONS`` actions."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.left = profile, request, ACTIONS
        self.fitter = Fitter(profile, request)

    def better(self, plans: Sequence[tuple[Plan, float]], best_s: float) -> tuple[Plan, float] | None:
        """A plan at least ``GAIN`` shorter than ``best_s``, made from one of ``plans``, each with its seconds; None: none is."""
        limit_s = best_s * (1 - GAIN)
        orders = ("interleaved", "zbv", "dualpipev") if True in self.request.split_choices else ("interleaved", "zbv")
        near = [plan for plan, step_s in plans if step_s <= best_s * NEAR and self._waits(plan, limit_s)]
        found = self._shapes_of(near, orders)
        # In a loop the last rank passes on to the first: it may begin with any of them.
        found += self._shapes_of([other for plan in near for other in _turned(plan)], ["interleaved"])
        return self._best(found, limit_s)

    def in_order(self, plan: Plan, order: str) -> Plan | None:
        """``plan`` with its pipelines of several stages in this order for several stages; None: that fits nowhere."""
        if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
            return plan
        found = self._best(self._shapes_of([plan], [order], wanted=True), math.inf)
        return None if found is None else found[0]

    def _shapes_of(
        self, plans: Sequence[Plan], orders: Sequence[str], wanted: bool = False
    ) -> list[tuple[Plan, float]]:
        """Plans with several stages per rank, and their seconds. ``wanted``: one at least, however much there is to simulate."""
        found: list[tuple[Plan, float]] = []
        for plan in plans:
            for shape in _shapes(orders, max(2, self.request.stages_per_rank)):
                if not self._affords(shape.each * _actions(plan)) and (found or not wanted):
                    continue
                changed = self._changed(plan, shape)
                if changed is not None:
                    found.append((changed, self._step_s(changed)))
        return found

    def _best(self, found: Sequence[tuple[Plan, float]], limit_s: float) -> tuple[Plan, float] | None:
        """The best of them, with cuts moved; None: it is not below ``limit_s``."""
        if not found:
            return None
        best = self.fitter.descended(*min(found, key=lambda one: one[1]), self._near)
        return best if best[1] < limit_s else None

    def _waits(self, plan: Plan, limit_s: float) -> bool:
        """Could less waiting make the plan so short?"""
        if any(stage.streamed for _, _, stage in plan.numbered) or all(len(p.stages) == 1 for p in plan.pipelines):
            return False
        busy_s = outlined(plan, self.profile).busy_s
        return sum(busy_s.values()) / len(busy_s) < limit_s

    def _changed(self, plan: Plan, shape: _Shape) -> Plan | None:
        """``plan`` with pipelines of this shape where they have several ranks; None: there is none that can have it and fits."""
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
            again = with_recompute(changed, recompute)
            if self.fitter.holds(again):
                return again
            self.left -= _actions(again)
        return None

    def _shaped(self, pipeline: PipelinePlan, shape: _Shape, ranks: Sequence[int], cuts: Sequence[int]) -> PipelinePlan:
        splits = ORDERS[shape.order].SPLITS and True in self.request.split_choices
        splits = splits and all(may_split(self.profile, rank) for rank in ranks)
        weights = {stage.ranks[0]: stage.state_weight for stage in pipeline.stages}
        count, most = len(cuts) - 1, pipeline.micro_batches - 1
        depths = [min(most, (2 if shape.deep else 1) * (count - 1 - place)) for place in range(count)]
        stages = tuple(
            StagePlan((rank,), cuts[place], cuts[place + 1], depths[place], state_weight=weights[rank])
            for place, rank in enumerate(shape.ranks(ranks))
        )
        return replace(pipeline, stages=stages, split_backward=splits, order=shape.order)

    def _cuts(self, ranks: Sequence[int], pipeline: PipelinePlan, plan: Plan) -> list[int] | None:
        """Where stages on ``ranks`` end so that all ranks compute about equally long, a rank's stages too; None: too few layers."""
        if len(ranks) > plan.layers:
            return None
        tokens = pipeline.micro_batch * plan.sequence_length
        seconds = {rank: self._layers_s(rank, tokens) for rank in ranks}
        low, high = 0.0, sum(map(max, zip(*seconds.values(), strict=True)))
        found = [*range(len(ranks)), plan.layers]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            cuts = _filled(ranks, seconds, plan.layers, middle)
            low, high, found = (middle, high, found) if cuts is None else (low, middle, cuts)
        return found

    def _layers_s(self, rank: int, tokens: int) -> list[float]:
        """Seconds of every layer's forward and backward of a micro-batch."""
        times, again = self.profile.devices[rank].layers, self.request.recompute_choices == (True,)
        of_kind = {
            kind: layer_s(one, Op.F, tokens) + layer_s(one, Op.B, tokens) + (repeated_s(one, tokens) if again else 0.0)
            for kind, one in times.items()
        }
        return [of_kind[layer.kind] for layer in self.profile.model.layers]

    def _affords(self, actions: int) -> bool:
        """May so many more be looked at?"""
        return actions <= self.left

    def _step_s(self, plan: Plan) -> float:
        self.left -= _actions(plan)
        return self.fitter.step_s(plan)

    def _near(self, plan: Plan) -> Iterator[Plan]:
        """``plan`` with a cut moved by a layer, as long as that can be afforded."""
        for changed in itertools.takewhile(lambda one: self._affords(_actions(one)), cut_otherwise(plan)):
            self.left -= _actions(changed)
            yield changed


def _turned(plan: Plan) -> Iterator[Plan]:
    """``plan`` with its pipelines beginning with another of their ranks."""
    for by in range(1, max(len(pipeline.stages) for pipeline in plan.pipelines)):
        pipelines = []
        for pipeline in plan.pipelines:
            stages, at = pipeline.stages, by % len(pipeline.stages)
            turned = zip(stages, (*stages[at:], *stages[:at]), strict=True)
            moved = (replace(old, ranks=new.ranks, state_weight=new.state_weight) for old, new in turned)
            pipelines.append(replace(pipeline, stages=tuple(moved)))
        yield replace(plan, pipelines=tuple(pipelines))


def _actions(plan: Plan) -> int:
    """About how many actions a step has."""
    return sum(6 * len(pipeline.stages) * pipeline.micro_batches for pipeline in plan.pipelines)


def _filled(ranks: Sequence[int], seconds: dict[int, list[float]], layers: int, step_s: float) -> list[int] | None:
    """Cuts with which no rank computes longer than ``step_s``, filled from the first stage on: of its n stages, a rank's i-th takes
    it to i/n of that. None: layers are left over."""
    turns = {rank: list(ranks).count(rank) for rank in ranks}
    seen, busy_s, cuts = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0), [0]
    for place, rank in enumerate(ranks):
        seen[rank] += 1
        until_s, layer = step_s * seen[rank] / turns[rank], cuts[-1]
        left = len(ranks) - place - 1
        while layer < layers - left and (layer == cuts[-1] or busy_s[rank] + seconds[rank][layer] <= until_s):
            busy_s[rank] += seconds[rank][layer]
            layer += 1
        if busy_s[rank] > step_s:
            return None
        cuts.append(layer)
    return cuts if cuts[-1] == layers else None
