"""A long random search for plans that knows nothing of the planner's: random pipelines, made better by small changes, started anew.

Every plan is fitted into memory and simulated as it is. Which ranks, in what order, in how many pipelines, cuts, micro-batches,
shares of the batch and depths are all drawn at random; layers and shares more often near the ranks' speeds than far.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

from hetero_mpi.planning.device_times import whole_model_s
from hetero_mpi.planning.search.memory_fit import Fitter
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

PATIENCE = 300
"""Changes in a row that make nothing better, after which the search starts anew."""


@dataclass(frozen=True)
class Drawn:
    """A pipeline: ranks, layers and micro-batches ahead by stage; its sequences, and the largest micro-batch."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    depths: tuple[int, ...]
    micro_batch: int
    sequences: int


Pipelines = tuple[Drawn, ...]


def random_search_s(profile: ClusterProfile, request: PlanRequest, looks: int, seed: int) -> float:
    """The least step time among ``looks`` plans; infinite: none of them fits."""
    search = _Search(profile, request, random.Random(seed))
    best_s, now, now_s, failed = math.inf, (), math.inf, PATIENCE
    for _ in range(looks):
        anew = failed >= PATIENCE or now_s == math.inf
        tried = search.drawn() if anew else search.changed(now)
        tried_s = search.step_s(tried)
        if anew or tried_s < now_s:
            now, now_s, failed = tried, tried_s, 0
        else:
            failed += 1
        best_s = min(best_s, now_s)
    return best_s


class _Search:
    def __init__(self, profile: ClusterProfile, request: PlanRequest, draw: random.Random) -> None:
        self.request, self.draw, self.fitter = request, draw, Fitter(profile, request)
        self.layers = len(profile.model.layers)
        self.speed = {one.rank: 1 / whole_model_s(profile, one) for one in profile.devices}

    def step_s(self, pipelines: Pipelines) -> float:
        if len({rank for one in pipelines for rank in one.ranks}) < sum(len(one.ranks) for one in pipelines):
            return math.inf
        if any(min(*one.counts, one.sequences) < 1 or sum(one.counts) != self.layers for one in pipelines):
            return math.inf
        made = []
        for one in pipelines:
            last, stages = 0, []
            for rank, count, depth in zip(one.ranks, one.counts, one.depths, strict=True):
                stages.append(StagePlan((rank,), last, last + count, depth))
                last += count
            sizes = [
                size
                for size in self.request.micro_batch_choices
                if size <= one.micro_batch and one.sequences % size == 0
            ]
            if not sizes:
                return math.inf
            made.append(PipelinePlan(tuple(stages), max(sizes), one.sequences))
        plan = Plan(tuple(made), self.request.global_batch, self.request.sequence_length, self.layers)
        fitted = self.fitter.fitted(plan)
        return math.inf if fitted is None else self.fitter.step_s(fitted)

    def drawn(self) -> Pipelines:
        """Random pipelines; some do not fit."""
        ranks = self.draw.sample(sorted(self.speed), self.draw.randint((len(self.speed) + 1) // 2, len(self.speed)))
        number = self.draw.randint(1, min(len(ranks), self.request.max_pipelines))
        ends = [*sorted(self.draw.sample(range(1, len(ranks)), number - 1)), len(ranks)]
        groups = [tuple(ranks[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        shares = self._divided([sum(self.speed[rank] for rank in group) for group in groups], self.request.global_batch)
        return tuple(self._pipeline(group, share) for group, share in zip(groups, shares, strict=True))

    def _pipeline(self, ranks: tuple[int, ...], sequences: int) -> Drawn:
        slope = self.draw.choice((1, 1, 2, 3))
        counts = self._divided([self.speed[rank] for rank in ranks], self.layers)
        depths = tuple(slope * (len(ranks) - 1 - place) for place in range(len(ranks)))
        return Drawn(ranks, counts, depths, self.draw.choice(self.request.micro_batch_choices), sequences)

    def _divided(self, weights: list[float], total: int) -> tuple[int, ...]:
        """``total`` by weights that are changed by up to half, 1 at least where that goes."""
        changed = [weight * self.draw.uniform(0.5, 1.5) for weight in weights]
        edges = [round(total * sum(changed[:n]) / sum(changed)) for n in range(len(changed) + 1)]
        return tuple(max(1, b - a) for a, b in itertools.pairwise(edges))

    def changed(self, pipelines: Pipelines) -> Pipelines:
        """One or two small changes."""
        for _ in range(self.draw.choice((1, 1, 2))):
            index = self.draw.randrange(len(pipelines))
            kind = self.draw.choice(
                (self._layer, self._layer, self._depth, self._size, self._share, self._rank, self._moved)
            )
            pipelines = kind(pipelines, index)
        return pipelines

    def _layer(self, pipelines: Pipelines, index: int) -> Pipelines:
        counts = list(pipelines[index].counts)
        counts[self.draw.randrange(len(counts))] -= 1
        counts[self.draw.randrange(len(counts))] += 1
        return _with(pipelines, index, replace(pipelines[index], counts=tuple(counts)))

    def _depth(self, pipelines: Pipelines, index: int) -> Pipelines:
        depths, place, by = (
            list(pipelines[index].depths),
            self.draw.randrange(len(pipelines[index].depths)),
            self.draw.choice((-1, 1)),
        )
        for i in range(len(depths)):
            depths[i] += by if (i <= place and by > 0) or (i >= place and by < 0) else 0
        return _with(pipelines, index, replace(pipelines[index], depths=tuple(max(0, depth) for depth in depths)))

    def _size(self, pipelines: Pipelines, index: int) -> Pipelines:
        size = self.draw.choice(self.request.micro_batch_choices)
        return _with(pipelines, index, replace(pipelines[index], micro_batch=size))

    def _share(self, pipelines: Pipelines, index: int) -> Pipelines:
        other, amount = self.draw.randrange(len(pipelines)), self.draw.choice((1, 2, 4))
        giving = replace(pipelines[index], sequences=pipelines[index].sequences - amount)
        pipelines = _with(pipelines, index, giving)
        return _with(pipelines, other, replace(pipelines[other], sequences=pipelines[other].sequences + amount))

    def _rank(self, pipelines: Pipelines, index: int) -> Pipelines:
        """One rank for another, which may be at work elsewhere."""
        a = self.draw.choice(pipelines[index].ranks)
        b = self.draw.choice([rank for rank in self.speed if rank != a])
        names = {a: b, b: a}
        return tuple(replace(one, ranks=tuple(names.get(rank, rank) for rank in one.ranks)) for one in pipelines)

    def _moved(self, pipelines: Pipelines, index: int) -> Pipelines:
        """A rank out of its pipeline, or an idle one, into this one; both are cut anew."""
        rank = self.draw.choice(sorted(self.speed))
        made = []
        for number, one in enumerate(pipelines):
            ranks = [own for own in one.ranks if own != rank]
            if number == index and self.draw.random() < 0.8:
                ranks.insert(self.draw.randint(0, len(ranks)), rank)
            if not ranks:
                return pipelines
            made.append(one if tuple(ranks) == one.ranks else self._pipeline(tuple(ranks), one.sequences))
        return tuple(made)


def _with(pipelines: Pipelines, index: int, one: Drawn) -> Pipelines:
    return (*pipelines[:index], one, *pipelines[index + 1 :])
