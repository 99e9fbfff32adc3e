"""The best plan of a small instance, proven: everything that a plan decides, jointly, with simulated step time as objective.

The finite set that is searched (``Exact`` finds its minimum, to 1e-9):

* pipelines: 1 to ``max_pipelines``, of any disjoint ranks that offer the dtype, in any order; each holds the whole chain, cut
  anywhere between items; in a plan of three and more, any order of the pipelines around the ring that sums gradients;
* shares of the global batch: whole sequences, at least one each; micro-batch: a choice of the request that divides the share;
* warm-up: 0 to M per stage, not growing from one stage to the next (where it grows, a pipeline deadlocks), or what a schedule
  given by name fixes; split backward per pipeline, as far as the request offers and the profile knows it;
* recompute per stage, of the request's choices;
* within the usable memory of every device, and of every host whose memory ranks share.

Every pipeline is timed by itself, in arrays (``variants``): pipelines meet only in the sums of gradients and the STEP, which
``join`` puts together. That holds where no messages queue for a shared network card; where some do, the time so found is a
lower bound, plans are simulated in its order, and the search ends when the bound has passed the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.exact.join import Join
from hetero_mpi.planning.exact.lockstep import Table
from hetero_mpi.planning.exact.teams import Team, disjoint, shared_out
from hetero_mpi.planning.exact.variants import Order, Part, Pipelines, Variants, columns_of, part_of
from hetero_mpi.planning.memory import usable_bytes
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.single.orders import all_orders
from hetero_mpi.planning.tables import Instance, shared_memories, shares_cards
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

ROUNDING = 1e-9
"""Relative difference below which two step times are equal: sums in another order differ by less."""
MOST_WORK = 8e8
"""Array entries that are worked through at most, some two seconds: larger instances are not searched exactly."""
OVERHEAD = 1500
"""What one operation on arrays costs besides their entries, in entries."""
MOST_TEAMS = 20_000
"""Ways to form several pipelines and to share the batch among them, at most."""
MOST_SIMULATED = 6000
"""Plans that are simulated, where cards are shared, before the search gives up being exact."""


@dataclass(frozen=True)
class Found:
    """A plan and its simulated step time."""

    step_s: float
    parts: tuple[Part, ...]

    @property
    def preference(self) -> tuple[object, ...]:
        """Of equally fast plans the least is taken: fewer ranks, fewer pipelines, less recompute, no split, shallower."""
        return (
            sum(len(part.order) for part in self.parts),
            len(self.parts),
            sum(sum(part.recompute) for part in self.parts),
            sum(part.split for part in self.parts),
            sum(sum(part.warm_up) for part in self.parts),
            tuple((p.order, p.share, p.micro_batch, p.cuts, p.warm_up, p.split, p.recompute) for p in self.parts),
        )


class Exact:
    """The search over one instance. ``within``: plans up to this share slower than the best are kept too."""

    def __init__(
        self, profile: ClusterProfile, request: PlanRequest, classes: list[list[int]], within: float = 0.0
    ) -> None:
        self.profile, self.request, self.classes = profile, request, classes
        self.within = max(within, ROUNDING)
        self.items = len(profile.model.layers)
        self.sizes = [len(members) for members in classes]
        self.most = max(1, request.max_pipelines)
        self.best_s = math.inf
        self.found: list[Found] = []
        self.cards = shares_cards(profile)
        self.simulated = 0

    @cached_property
    def orders(self) -> list[Order] | None:
        """Every order of one pipeline; None: too many."""
        return all_orders(self.sizes, 1, min(sum(self.sizes), self.items))

    @cached_property
    def teams(self) -> list[Team] | None:
        """Every way to form two and more pipelines; None: too many."""
        if self.orders is None:
            return None
        found: list[Team] = []
        most = min(self.most, sum(self.sizes), self.request.global_batch)
        left = MOST_TEAMS
        for orders in disjoint(self.orders, self.sizes, most):
            left -= 1
            if self._enough(orders):
                # Before those that are the same are left out.
                count = len(orders)
                left -= math.comb(self.request.global_batch - 1, count - 1) * math.factorial(count - 1)
                if left >= 0:
                    found += shared_out(orders, self.request.global_batch)
            if left < 0:
                return None
        return found

    def _enough(self, orders: Sequence[Order]) -> bool:
        """Are as many ranks used as must be?"""
        used = sum(map(len, orders))
        return self.request.allow_idle or used == min(sum(self.sizes), self.items * self.most)

    @cached_property
    def pipelines(self) -> Pipelines:
        sizes = sorted(set(self.request.micro_batch_choices))
        instances = [Instance(self.profile, self.request, size, self.classes) for size in sizes]
        return Pipelines(self.profile, self.request, instances)

    def is_small(self) -> bool:
        """Is the whole set few enough plans to look at?"""
        if self.orders is None or (self.most > 1 and self.teams is None):
            return False
        shares: dict[int, set[int]] = {}
        for length in {len(order) for order in self.orders}:
            shares[length] = {self.request.global_batch}
        for team in self.teams or () if self.most > 1 else ():
            for order, share in team:
                shares[len(order)].add(share)
        work = 0.0
        for length, wanted in shares.items():
            columns = sum(len(order) == length for order in self.orders) * math.comb(self.items - 1, length - 1)
            actions = sum(self._actions(length, share) for share in wanted)
            work += actions * (OVERHEAD + columns)
        return work <= MOST_WORK

    def _actions(self, stages: int, share: int) -> float:
        """Operations on arrays to time one pipeline of ``stages`` in all ways."""
        total = 0.0
        every_mask = self.cards or bool(shared_memories(self.profile))
        masks = len(set(self.request.recompute_choices)) ** stages if every_mask else 1
        splits = len(set(self.request.split_choices)) if stages > 1 and self.request.schedule == "auto" else 1
        for size in self.request.micro_batch_choices:
            if share % size == 0:
                count = share // size
                free = self.request.schedule == "auto" and stages > 1
                ways = math.comb(count - 1 + stages, stages) if free else 1
                total += ways * splits * masks * (20 + 8.0 * stages * count)
        return total

    def solve(self) -> list[Found]:
        """The best plan, then those that are as good as it by ``within``, in the order of ``preference``; empty: none fits."""
        assert self.orders is not None
        singles = [order for order in self.orders if self._enough([order])]
        for length in sorted({len(order) for order in singles}):
            columns = columns_of([order for order in singles if len(order) == length], self.items)
            for variants in self.pipelines.of(columns, self.request.global_batch):
                self._keep_alone(variants)
        if self.most > 1:
            Join(self).solve()
        limit = self.best_s * (1 + self.within)
        kept = [one for one in self.found if one.step_s <= limit]
        ties = sorted(
            (one for one in kept if one.step_s <= self.best_s * (1 + ROUNDING)), key=lambda one: one.preference
        )
        others = sorted((one for one in kept if one not in ties), key=lambda one: (one.step_s, one.preference))
        return [*ties, *others]

    @property
    def is_proven(self) -> bool:
        """Was every plan looked at that might be the best?"""
        return self.simulated <= MOST_SIMULATED

    def _keep_alone(self, variants: Variants) -> None:
        step_s = self.pipelines.alone_s(variants)
        fits = self.fit_hosts(variants.host_bytes)
        for place in np.argsort(np.where(fits, step_s, np.inf), kind="stable"):
            if not fits[place] or step_s[place] > self.best_s * (1 + self.within):
                break
            self.keep(float(step_s[place]), (part_of(variants, int(place)),))

    def fit_hosts(self, host_bytes: Table) -> NDArray[np.bool_]:
        limits = [usable_bytes(host.memory_bytes, self.request.memory_reserve) for host, _ in self.pipelines.shared]
        return np.asarray((host_bytes <= np.array(limits, dtype=float).reshape(-1, 1)).all(axis=0))

    def keep(self, least_s: float, parts: tuple[Part, ...]) -> None:
        """Remember a plan that takes ``least_s``, or at least so much where cards are shared."""
        found = Found(least_s, parts)
        if self.cards:
            self.simulated += 1
            if self.simulated > MOST_SIMULATED:
                return
            found = replace(found, step_s=simulate(self.plan(found), self.profile).step_s)
        if found.step_s <= self.best_s * (1 + self.within):
            self.found.append(found)
            self.best_s = min(self.best_s, found.step_s)
            self.pipelines.limit_s = self.best_s * (1 + self.within)

    def plan(self, found: Found) -> Plan:
        """Without figures."""
        waiting = [list(members) for members in self.classes]
        pipelines = []
        for part in found.parts:
            ranks = [waiting[kind].pop(0) for kind in part.order]
            stages = tuple(
                StagePlan((rank,), part.cuts[i], part.cuts[i + 1], part.warm_up[i], part.recompute[i])
                for i, rank in enumerate(ranks)
            )
            pipelines.append(PipelinePlan(stages, part.micro_batch, part.share, part.split))
        return Plan(tuple(pipelines), self.request.global_batch, self.request.sequence_length, self.items)
