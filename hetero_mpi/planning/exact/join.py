"""Puts the variants of several pipelines together, for the exact search: they meet only in the sums of gradients and the STEP."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetero_mpi.planning.durations import all_reduce_s, summed_bytes
from hetero_mpi.planning.exact.lockstep import Table
from hetero_mpi.planning.exact.teams import Team
from hetero_mpi.planning.exact.variants import Indices, Order, Part, columns_of, part_of

if TYPE_CHECKING:
    from hetero_mpi.planning.exact.joint import Exact


@dataclass(frozen=True)
class _Choices:
    """The variants of one order with one share that may be part of a good plan; arrays end with the variant."""

    parts: tuple[Part, ...]
    stage: Indices
    """[item, variant] -> the stage that holds the item."""
    clock_s: Table
    whole_s: Table
    """[item, variant] -> when its gradients are whole."""
    step_s: Table
    host_bytes: Table
    end_s: Table

    def picked(self, which: Indices) -> _Choices:
        return _Choices(
            tuple(self.parts[i] for i in which), self.stage[:, which], self.clock_s[:, which], self.whole_s[:, which],
            self.step_s[which], self.host_bytes[:, which], self.end_s[which],
        )  # fmt: skip


class Join:
    """Puts the variants of several pipelines together."""

    def __init__(self, exact: Exact) -> None:
        self.exact = exact
        self.choices: dict[tuple[Order, int], _Choices] = {}
        self.sums: dict[tuple[int, tuple[int, ...]], float] = {}
        """(bytes, ranks) -> seconds"""
        model = exact.profile.model
        self.summed_bytes = [
            summed_bytes(model, item) if layer.trainable_parameters > 0 else None
            for item, layer in enumerate(model.layers)
        ]
        """Of each item; None: it has no sum."""

    def solve(self) -> None:
        teams = self.exact.teams or []
        wanted: dict[tuple[int, int], set[Order]] = {}
        for team in teams:
            for order, share in team:
                wanted.setdefault((len(order), share), set()).add(order)
        for (_, share), orders in sorted(wanted.items(), key=lambda entry: entry[0]):
            self._gather(sorted(orders), share)
        ready = [team for team in teams if all(pair in self.choices for pair in team)]
        # Those that promise most first, so that the best is known when the others are looked at.
        ready.sort(key=lambda team: (max(float(self.choices[pair].end_s.min()) for pair in team), team))
        for team in ready:
            self._team(team)

    def _limit_s(self) -> float:
        return self.exact.best_s * (1 + self.exact.within)

    def _gather(self, orders: list[Order], share: int) -> None:
        """The choices of all ``orders`` (of one length) with ``share``, but those that are too slow by themselves."""
        exact, found = self.exact, [[] for _ in orders]  # type: tuple[Exact, list[list[_Choices]]]
        for variants in exact.pipelines.of(columns_of(orders, exact.items), share):
            variants = variants.picked(variants.end_s <= self._limit_s())
            if not variants.columns.order.size:
                continue
            columns = variants.columns
            stage = np.stack([(columns.last <= item).sum(axis=0) for item in range(exact.items)])
            whole = exact.pipelines.whole_s(variants)
            parts = tuple(part_of(variants, place) for place in range(columns.order.size))
            every = _Choices(
                parts, stage, variants.clock_s, whole, variants.step_s, variants.host_bytes, variants.end_s
            )
            for index in np.unique(columns.order):
                found[index].append(every.picked(np.flatnonzero(columns.order == index)))
        for order, blocks in zip(orders, found, strict=True):
            if blocks:
                self.choices[order, share] = self._undominated(_joined(blocks))

    def _undominated(self, choices: _Choices) -> _Choices:
        """Without those that another with the same cuts is no slower than in any respect. (Where cards are shared, slower
        may be better.)"""
        if self.exact.cards:
            return choices
        figures = np.concatenate(
            [choices.clock_s, choices.whole_s, choices.step_s[None, :], choices.host_bytes], axis=0
        )
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, part in enumerate(choices.parts):
            groups.setdefault(part.cuts, []).append(place)
        kept: list[int] = []
        for places in groups.values():
            own = figures[:, places]
            good: list[int] = []
            for i in np.argsort(own.sum(axis=0), kind="stable"):
                if not good or not (own[:, good] <= own[:, [i]]).all(axis=0).any():
                    good.append(int(i))
            kept += [places[i] for i in good]
        return choices.picked(np.array(sorted(kept), dtype=np.int64))

    def _team(self, team: Team) -> None:
        limit = self._limit_s()
        own = []
        for pair in team:
            choices = self.choices[pair]
            picked = choices.picked(np.flatnonzero(choices.end_s <= limit))
            if not picked.parts:
                return
            own.append(picked)
        ranks = self._ranks(team)
        for index, choices in enumerate(own):
            least = self._with_sums(choices, index, ranks)
            which = np.flatnonzero(least <= limit)
            own[index] = choices.picked(which[np.argsort(least[which], kind="stable")])
            if not which.size:
                return
        limits = self.exact.pipelines.shared
        for places in itertools.product(*(range(len(choices.parts)) for choices in own)):
            if limits:
                used = sum(choices.host_bytes[:, place] for choices, place in zip(own, places, strict=True))
                if not self.exact.fit_hosts(np.asarray(used).reshape(-1, 1)).all():
                    continue
            step_s = self._together_s(own, places, ranks)
            if step_s <= self._limit_s():
                parts = tuple(choices.parts[place] for choices, place in zip(own, places, strict=True))
                self.exact.keep(step_s, parts)

    def _ranks(self, team: Team) -> list[tuple[int, ...]]:
        waiting = [list(members) for members in self.exact.classes]
        return [tuple(waiting[kind].pop(0) for kind in order) for order, _ in team]

    def _with_sums(self, choices: _Choices, index: int, ranks: list[tuple[int, ...]]) -> Table:
        """A bound on the step: this pipeline's own clocks, and the sums of its gradients as soon as they are whole."""
        many, stages = len(choices.parts), len(ranks[index])
        free = np.zeros((stages, many))
        every = np.arange(many)
        for item in reversed(range(self.exact.items)):
            least = np.array([self._least_sum_s(item, index, s, ranks) for s in range(stages)])
            stage = choices.stage[item]
            free[stage, every] = np.maximum(free[stage, every], choices.whole_s[item]) + least[stage]
        return np.asarray(np.maximum(choices.clock_s, free).max(axis=0) + choices.step_s)

    def _least_sum_s(self, item: int, index: int, stage: int, ranks: list[tuple[int, ...]]) -> float:
        """The shortest that a sum can be in which this stage takes part, whoever holds the item elsewhere."""
        if len(ranks) > 2:
            return 0.0
        return min(self._sum_s(item, (ranks[index][stage], other)) for other in ranks[1 - index])

    def _sum_s(self, item: int, holders: tuple[int, ...]) -> float:
        size = self.summed_bytes[item]
        if size is None:
            return 0.0
        key = size, holders
        if key not in self.sums:
            self.sums[key] = all_reduce_s(self.exact.profile, holders, size)
        return self.sums[key]

    def _together_s(self, own: list[_Choices], places: tuple[int, ...], ranks: list[tuple[int, ...]]) -> float:
        """Step time of one variant of each: the sums of gradients, last item first, then the longest STEP."""
        chosen = list(zip(own, places, strict=True))
        free = [[0.0] * len(each) for each in ranks]
        end = max(float(choices.clock_s[:, place].max()) for choices, place in chosen)
        end = max(end, *(float(choices.whole_s[0, place]) for choices, place in chosen))
        for item in reversed(range(self.exact.items)):
            if self.exact.profile.model.layers[item].trainable_parameters == 0:
                continue
            held = [int(choices.stage[item, place]) for choices, place in chosen]
            start = max(float(choices.whole_s[item, place]) for choices, place in chosen)
            start = max(start, *(free[i][s] for i, s in enumerate(held)))
            start += self._sum_s(item, tuple(ranks[i][s] for i, s in enumerate(held)))
            for i, s in enumerate(held):
                free[i][s] = start
            end = max(end, start)
        return end + max(float(choices.step_s[place]) for choices, place in chosen)


def _joined(blocks: list[_Choices]) -> _Choices:
    return _Choices(
        tuple(part for block in blocks for part in block.parts),
        np.concatenate([block.stage for block in blocks], axis=1),
        np.concatenate([block.clock_s for block in blocks], axis=1),
        np.concatenate([block.whole_s for block in blocks], axis=1),
        np.concatenate([block.step_s for block in blocks]),
        np.concatenate([block.host_bytes for block in blocks], axis=1),
        np.concatenate([block.end_s for block in blocks]),
    )
