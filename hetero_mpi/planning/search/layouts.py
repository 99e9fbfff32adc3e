"""Several pipelines side by side over many ranks: how many, which ranks in which, and who takes how much of the batch.

For every number of pipelines worth looking at and a few ways of putting ranks into columns (``columns``), the best line of
columns is estimated by dynamic programming; the most promising are simulated with the depths that suit them best.
Then shares of the global batch are dealt out so that the slowest pipeline is as fast as can be, and cuts are made anew for
these shares. Everything counts its effort in looks, not seconds: the same input gives the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.durations import exposed_s
from hetero_mpi.planning.memory import hosts_suffice
from hetero_mpi.planning.search.cluster import FEW, ClusterArrays, in_own_order
from hetero_mpi.planning.search.columns import (
    Chain,
    Chains,
    Column,
    ColumnOrder,
    Columns,
    along_hosts,
    in_hosts,
    of_all,
)
from hetero_mpi.planning.simulator import spans_s
from hetero_mpi.planning.tables import stage_bytes
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

EVERY, RATIO = 12, 1.12
"""Up to so many pipelines every number of them is looked at; beyond, every so often."""
COARSE = 6, 1.25
"""The same where there are very many ranks."""
MOST_COLUMNS = 96
"""Of more columns than this, the ones that can do most are kept: no model has so many stages."""
FIRST_LINES = 1
"""Ways of sorting columns looked at per layout; of the best layouts, all."""
KEPT = 6
"""Layouts that are simulated."""
PER_NUMBER = 2
"""Of these, at most so many of one number of pipelines."""
IMPROVED, SLOWER = 3, 1.1
"""So many numbers of pipelines have their shares dealt out; how much slower than the best one they may be."""
PACES = ((1.0, 0.1), (1.0, 0.5), (1.0, 1.5), (0.9, 0.5))
"""(share of the estimated pace, allowance) for which depths are guessed."""
AGAIN = 3
"""How often shares are dealt out, and cuts made anew for them."""
NEAR = 0.02
"""Shares that differ by less than this share of the mean need no new cuts."""


@dataclass
class _Layout:
    """Columns with the best line found through them."""

    chains: Chains
    line: ColumnOrder
    estimate_s: float

    @property
    def columns(self) -> Columns:
        return self.chains.columns


@dataclass
class _Found:
    layout: _Layout
    chain: Chain

    @property
    def cluster(self) -> ClusterArrays:
        return self.layout.columns.cluster


def several(profile: ClusterProfile, request: PlanRequest) -> list[tuple[float, Plan]]:
    """A plan of every promising number of pipelines, best first; empty: none fits. Deterministic. Their pipelines are cut alike.

    Each with the seconds of its step: what ``simulate`` says, or a little more where like columns hold unlike ranks.
    """
    sizes = sorted(set(request.micro_batch_choices))
    smallest = ClusterArrays(
        profile, request, sizes[0], None, in_own_order(profile, sizes[0] * request.sequence_length)
    )
    clusters = [smallest]
    if len(smallest.devices) <= FEW:
        # Which of several like ranks come together in a column goes by this order.
        clusters.append(ClusterArrays(profile, request, sizes[0], None, smallest.devices[::-1]))
    numbers = _numbers(smallest)
    layouts = _ranked(smallest, numbers)
    for turned in clusters[1:]:
        # Which numbers of pipelines are promising does not depend on that order.
        layouts += _ranked(turned, sorted({layout.columns.pipelines for layout in layouts}))
    found = dict[int, _Found]()
    for one in _sized(layouts, sizes):
        found.setdefault(one.layout.columns.pipelines, one)
    least_s = min((one.chain.step_s for one in found.values()), default=0.0)
    near = [one for one in found.values() if one.chain.step_s <= SLOWER * least_s]
    plans = [plan for one in near[:IMPROVED] for plan in _finished(one)]
    best: dict[int, tuple[float, Plan]] = {}
    for plan in sorted(plans, key=_seconds):
        best.setdefault(len(plan[1].pipelines), plan)
    return [one for one in best.values() if hosts_suffice(one[1], profile, request.memory_reserve)]


def _seconds(found: tuple[float, Plan]) -> float:
    return found[0]


def _sized(layouts: Sequence[_Layout], sizes: Sequence[int]) -> list[_Found]:
    """The layouts' chains at the smallest micro-batch, and those of the best at the others, best first."""
    found = _simulated(layouts)
    for size in sizes[1:]:
        again = []
        for one in found[:IMPROVED]:
            if one.layout.columns.pipelines > one.cluster.request.global_batch // size:
                continue
            cluster = ClusterArrays(one.cluster.profile, one.cluster.request, size, one.cluster)
            again.append(_estimated(Columns(cluster, one.layout.columns.members), FIRST_LINES))
        found += _simulated([layout for layout in again if layout is not None])
    return sorted(found, key=lambda one: one.chain.step_s)


def _numbers(cluster: ClusterArrays) -> list[int]:
    """Numbers of pipelines to look at: as many as there may be and as memory holds."""
    request, room = cluster.request, float(cluster.usable.sum())
    shares = request.global_batch // cluster.micro_batch  # of one micro-batch at least

    def held(number: int) -> bool:
        tables = (
            stage_bytes(cluster.model, cluster.tokens, way, cluster.sharing(number))
            for way in request.recompute_choices
        )
        return number * min(float(fixed[0, -1]) for fixed, _ in tables) <= room

    most = min(request.max_pipelines, len(cluster.devices), shares)
    while most and not held(most):
        most -= 1
    every, ratio = (EVERY, RATIO) if len(cluster.devices) <= FEW else COARSE
    numbers, number = [], 1.0
    while number <= most:
        numbers.append(int(number))
        number = number + 1 if number < every else max(number + 1, math.floor(number * ratio))
    return numbers


def _ranked(cluster: ClusterArrays, numbers: Sequence[int]) -> list[_Layout]:
    """The most promising layouts, looked at more closely, best first."""
    layouts = [
        layout
        for pipelines in numbers
        for members in _groupings(cluster, pipelines)
        if (layout := _estimated(_worthwhile(cluster, members), FIRST_LINES)) is not None
    ]
    layouts.sort(key=lambda one: one.estimate_s)
    kept: list[_Layout] = []
    for layout in layouts:
        alike = sum(one.columns.pipelines == layout.columns.pipelines for one in kept)
        if len(kept) < KEPT and alike < PER_NUMBER:
            kept.append(layout)
    closer = [_estimated(layout.columns, len(_KEYS), layout.chains) for layout in kept]
    return sorted((layout for layout in closer if layout is not None), key=lambda one: one.estimate_s)


def _groupings(cluster: ClusterArrays, pipelines: int) -> Iterator[list[Column]]:
    """Ways of putting ranks into columns."""
    likeness = (
        (cluster.memory_level, cluster.outward_level, cluster.speed_level),
        (cluster.memory_level, cluster.speed_level, cluster.outward_level),
    )
    seen: set[tuple[Column, ...]] = set()
    builds = (of_all,) if cluster.unlinked else (in_hosts, along_hosts) if pipelines > 1 else (in_hosts,)
    for keys in likeness:
        for build in builds:
            members = build(cluster, pipelines, keys)
            if members and tuple(sorted(members)) not in seen:
                seen.add(tuple(sorted(members)))
                yield members


def _worthwhile(cluster: ClusterArrays, members: list[Column]) -> Columns:
    """The columns that can do most in the time that all ranks together would need, links left aside."""
    if len(members) <= MOST_COLUMNS:
        return Columns(cluster, members)
    columns = Columns(cluster, members)
    whole_s = 2 * cluster.request.global_batch / float(cluster.speed.sum())
    speed = 1 / (columns.forward_s + columns.backward_s).sum(axis=1)
    worth = speed * np.maximum(0.0, whole_s - columns.sum_s.max(axis=1))
    kept = np.sort(np.argsort(-worth, kind="stable")[:MOST_COLUMNS])
    return Columns(cluster, [members[k] for k in kept.tolist()])


_KEYS = (
    ("memory",),
    ("sums", "speed"),
    ("speed",),
    ("sums",),
    ("speed", "sums"),
    ("outward", "memory"),
    ("memory", "outward"),
)
"""What lines are sorted by, least important first; each line is also tried reversed."""


def _lines(columns: Columns, most: int) -> list[ColumnOrder]:
    cluster, first = columns.cluster, columns.table[:, 0]
    worth = {
        "speed": -(columns.forward_s + columns.backward_s).sum(axis=1),
        "memory": columns.usable,
        "outward": cluster.outward_level[columns.table].min(axis=1),
        "sums": -columns.sum_s.max(axis=1),
    }
    place = np.arange(len(first))
    found: list[ColumnOrder] = []
    for names in _KEYS[:most]:
        line = tuple(np.lexsort([place, cluster.host[first], *(-worth[name] for name in names)]).tolist())
        found += [line, line[::-1]]
    return list(dict.fromkeys(found))


def _estimated(columns: Columns, lines: int, chains: Chains | None = None) -> _Layout | None:
    """The best of some lines, by estimate; None: nothing fits."""
    rows = -(-columns.cluster.request.global_batch // (columns.pipelines * columns.cluster.micro_batch))
    chains = chains or Chains(columns, rows)
    best: _Layout | None = None
    for line in _lines(columns, lines):
        estimate_s = chains.along(line, math.inf)[0]
        if estimate_s == math.inf:
            continue
        if lines > FIRST_LINES:
            paced_s = chains.along(line, estimate_s / rows)[0]
            estimate_s = paced_s if paced_s < math.inf else estimate_s
        if best is None or estimate_s < best.estimate_s:
            best = _Layout(chains, line, estimate_s)
    return best


def _simulated(layouts: Sequence[_Layout]) -> list[_Found]:
    """Each layout's best chain, best first."""
    found = [_Found(layout, chain) for layout in layouts if (chain := _chain(layout)) is not None]
    return sorted(found, key=lambda one: one.chain.step_s)


def _chain(layout: _Layout, paces: Sequence[tuple[float, float]] = PACES) -> Chain | None:
    """The best simulated chain along a layout's line."""
    best: Chain | None = None
    seen = set()
    for share, allowance in paces:
        pace_s = share * layout.estimate_s / layout.chains.micro_batches
        estimate_s, picks, cuts = layout.chains.along(layout.line, pace_s, allowance)
        if estimate_s == math.inf or (picks, cuts) in seen:
            continue
        seen.add((picks, cuts))
        chain = layout.chains.deepened(Chain(picks, cuts, (), (), math.inf))
        if chain.step_s < (best.step_s if best is not None else math.inf):
            best = chain
    return best


def _finished(found: _Found) -> Iterator[tuple[float, Plan]]:
    """Plans made of one chain, each with better shares than the one before."""
    for _ in range(AGAIN):
        columns, chains = found.layout.columns, found.layout.chains
        pipelines = Pipelines(columns, found.chain)
        sequences = pipelines.dealt()
        yield pipelines.step_s(sequences), _plan(found, sequences)
        shares = [own / sum(sequences) for own in sequences]
        if max(abs(a - b) for a, b in zip(shares, columns.shares.tolist(), strict=True)) * columns.pipelines < NEAR:
            return
        again = Chains(Columns(columns.cluster, columns.members, shares), chains.micro_batches)
        layout = _Layout(again, found.layout.line, found.chain.step_s)
        chain = _chain(layout)
        if chain is None:
            return
        found = _Found(layout, chain)


def _plan(found: _Found, sequences: Sequence[int]) -> Plan:
    """The chain as pipelines with these shares of the batch."""
    columns, chain = found.layout.columns, found.chain
    cluster = columns.cluster
    pipelines = []
    for p, share in enumerate(sequences):
        ranks = [cluster.devices[columns.members[k][p]].rank for k in chain.picks]
        stages = tuple(
            StagePlan((rank,), chain.cuts[i], chain.cuts[i + 1], chain.warm_up[i], chain.recompute[i])
            for i, rank in enumerate(ranks)
        )
        pipelines.append(PipelinePlan(stages, cluster.micro_batch, share))
    return Plan(tuple(pipelines), cluster.request.global_batch, cluster.request.sequence_length, cluster.layer_count)


HALVINGS = 40

Times = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Of one pipeline: forward and backward by stage, messages out and back by link; seconds per micro-batch."""


class Pipelines:
    """The pipelines of a chain, each with its own ranks' figures."""

    def __init__(self, columns: Columns, chain: Chain) -> None:
        self.columns, self.chain = columns, chain
        self.times = [self._times(p) for p in range(columns.pipelines)]
        self.known: dict[tuple[Times, int], tuple[list[float], list[float]]] = {}

    def _times(self, pipeline: int) -> Times:
        cluster, chain = self.columns.cluster, self.chain
        ranks = [self.columns.members[k][pipeline] for k in chain.picks]
        forward, backward = [], []
        for place, rank in enumerate(ranks):
            held = slice(chain.cuts[place], chain.cuts[place + 1])
            again = float(cluster.repeated_s[rank, held].sum()) if chain.recompute[place] else 0.0
            forward.append(float(cluster.forward_s[rank, held].sum() + cluster.overhead_s[rank, 0]))
            backward.append(float(cluster.backward_s[rank, held].sum() + cluster.overhead_s[rank, 1]) + again)
        out, back = [], []
        for (a, b), cut in zip(itertools.pairwise(cluster.place[ranks].tolist()), chain.cuts[1:], strict=False):
            size = float(cluster.message_bytes[cut - 1])
            out.append(float(cluster.latency_s[a, b] + size * cluster.per_byte_s[a, b]))
            back.append(float(cluster.latency_s[b, a] + size * cluster.per_byte_s[b, a]))
        return tuple(forward), tuple(backward), tuple(out), tuple(back)

    def spans_s(self, pipeline: int, micro_batches: int) -> tuple[list[float], list[float]]:
        """(when each stage begins its last backward, when it has done it); like pipelines are simulated once."""
        key = self.times[pipeline], micro_batches
        if key not in self.known:
            warm_up = [min(depth, micro_batches) for depth in self.chain.warm_up]
            self.known[key] = spans_s(*self.times[pipeline], warm_up, micro_batches)
        return self.known[key]

    def step_s(self, sequences: Sequence[int]) -> float:
        """Seconds of a step with these shares; a short last micro-batch counts as a whole one."""
        columns, chain = self.columns, self.chain
        size = columns.cluster.micro_batch
        spans = [self.spans_s(p, -(-share // size)) for p, share in enumerate(sequences)]
        ends = [max(end for _, ends in spans for end in ends)]
        steps = []
        for place, column in enumerate(chain.picks):
            begun = max(begun[place] for begun, _ in spans)
            end = max(ends[place] for _, ends in spans)
            first, last = chain.cuts[place], chain.cuts[place + 1]
            ends.append(columns.summed_s(column, first, last, begun, end, chain.recompute[place]))
            trained = sum(layer.trainable_parameters for layer in columns.cluster.model.layers[first:last])
            coming_s = float(columns.value_s[column, first:last].sum())
            late_s = exposed_s(coming_s, min(forward[place] for forward, *_ in self.times), last - first)
            step_s = float(columns.step_fixed_s[column] + columns.step_per_parameter_s[column] * trained)
            steps.append(step_s + (late_s if coming_s else 0.0))
        return max(ends) + max(steps)

    def dealt(self) -> list[int]:
        """Shares such that all pipelines end as nearly together as whole micro-batches allow; they add up to the batch."""
        cluster = self.columns.cluster
        batch, size = cluster.request.global_batch, cluster.micro_batch
        total, count = -(-batch // size), len(self.times)
        lines = [self._line(p, max(2, total // count)) for p in range(count)]
        low, high = 0.0, max(fill + slope * total for fill, slope in lines)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(_counts(lines, middle)) >= total else (middle, high)
        counts = _counts(lines, high)
        while sum(counts) > total:
            # What is too much is taken from the pipelines that end last.
            latest = max(
                (p for p in range(count) if counts[p] > 1), key=lambda p: (lines[p][0] + lines[p][1] * counts[p], p)
            )
            counts[latest] -= 1
        shares = [size * n for n in counts]
        short = sum(shares) - batch
        shares[max(range(count), key=lambda p: (lines[p][0] + lines[p][1] * counts[p], p))] -= short
        return shares

    def _line(self, pipeline: int, micro_batches: int) -> tuple[float, float]:
        """(seconds, seconds per micro-batch) of one pipeline, as a line about a number of micro-batches."""
        fewer, more = max(1, micro_batches * 3 // 4), micro_batches * 5 // 4 + 1
        low_s, high_s = max(self.spans_s(pipeline, fewer)[1]), max(self.spans_s(pipeline, more)[1])
        slope = max((high_s - low_s) / (more - fewer), 1e-30)
        return low_s - slope * fewer, slope


def _counts(lines: Sequence[tuple[float, float]], step_s: float) -> list[int]:
    """Micro-batches that each pipeline does by ``step_s``; at least one."""
    return [max(1, math.floor((step_s - fill) / slope + 1e-9)) for fill, slope in lines]
