"""Several pipelines side by side over many ranks: how many, which ranks in which, and who takes how much of the batch.

For every number of pipelines worth looking at and a few ways of putting ranks into columns (``columns``), the best line of
columns is estimated by dynamic programming (``chains``); the most promising are simulated, deepened, re-ordered and polished.
Then shares of the global batch are dealt out so that the slowest pipeline is as fast as can be, and cuts are made anew for
these shares. Everything counts its effort in looks, not seconds: the same input gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.memory import hosts_suffice
from hetero_mpi.planning.several.chains import Chain, Chains, ColumnOrder
from hetero_mpi.planning.several.cluster import FEW, ClusterArrays, in_own_order
from hetero_mpi.planning.several.columns import Column, Columns, along_hosts, in_hosts, of_all
from hetero_mpi.planning.several.shares import Pipelines
from hetero_mpi.planning.tables import shares_nics, stage_bytes
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

EVERY, RATIO = 12, 1.12
"""Up to so many pipelines every number of them is looked at; beyond, every so often."""
SEARCHED = 64
"""Up to so many ranks what is found here is made better by ``annealing``."""
ALONE = 16
"""Of more ranks than these the best ones are polished here: simulating whole plans, annealing looks at too few of them."""
COARSE = 6, 1.25
"""The same where there are very many ranks."""
MOST_COLUMNS = 96
"""Of more columns than this, the ones that can do most are kept: no model has so many stages."""
FIRST_LINES = 1
"""Ways of sorting columns looked at per layout; of the best layouts, all."""
KEPT = 5
"""Layouts that are simulated."""
PER_NUMBER = 2
"""Of these, at most so many of one number of pipelines."""
IMPROVED, SLOWER = 2, 1.06
"""Plans that are re-ordered and polished, of unlike numbers of pipelines; how much slower than the best one they may be."""
PACES = ((1.0, 0.1), (1.0, 0.5), (1.0, 1.5), (0.9, 0.5))
"""(share of the estimated pace, allowance) for which depths are guessed."""
REORDERED = 600
"""Columns that re-ordering a plan may pass, in all lines together."""
POLISHED = 250_000
"""Forwards and backwards that polishing a plan may simulate."""
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


def polishes(profile: ClusterProfile, ranks: int) -> bool:
    """Are the best of at most ``IMPROVED`` numbers of pipelines polished here, and no others begun with? Of NICs that are shared a
    chain knows nothing: these numbers may be the wrong ones then."""
    return ranks > (SEARCHED if shares_nics(profile) else ALONE)


def several(profile: ClusterProfile, request: PlanRequest) -> list[tuple[float, Plan]]:
    """A plan of every promising number of pipelines, best first; empty: none fits. Deterministic. Their pipelines are cut alike.

    Each with the seconds of its step: what ``simulate`` says, or a little more where like columns hold unlike ranks.

    Unless ``polishes``, of every number of pipelines that memory may hold, each found without regard to how many are allowed:
    begun with and not polished, since ``annealing`` goes on from there.
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
    if not polishes(profile, len(smallest.devices)):
        groups = [
            _sized([one for cluster in clusters for one in _ranked(cluster, [number])], sizes) for number in numbers
        ]
        plans = [min(map(_dealt, group[:IMPROVED]), key=_seconds) for group in groups if group]
    else:
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


def _dealt(found: _Found) -> tuple[float, Plan]:
    """The chain's pipelines with shares such that all end together."""
    pipelines = Pipelines(found.layout.columns, found.chain)
    sequences = pipelines.dealt()
    return pipelines.step_s(sequences), _plan(found, sequences)


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
    found = _reordered(found, REORDERED // len(found.layout.line))
    found = _Found(found.layout, _polished(found.layout.chains, found.chain))
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
        found = _Found(layout, _polished(again, chain))


def _polished(chains: Chains, chain: Chain) -> Chain:
    return chains.polished(chain, POLISHED // (2 * len(chain.picks) * chains.micro_batches))


def _reordered(found: _Found, looks: int) -> _Found:
    """One used column moved elsewhere along the line, as long as that shortens the estimate and then the simulation."""
    layout, chain = found.layout, found.chain
    improved = True
    while improved and looks > 0:
        improved = False
        for line in _moved(layout.line, chain.picks):
            if looks <= 0:
                break
            looks -= 1
            pace_s = layout.estimate_s / layout.chains.micro_batches
            estimate_s = layout.chains.along(line, pace_s)[0]
            if estimate_s < layout.estimate_s * (1 - 1e-6):
                changed = _Layout(layout.chains, line, estimate_s)
                better = _chain(changed, PACES[:3])
                layout = changed
                if better is not None and better.step_s < chain.step_s:
                    found, chain, improved = _Found(changed, better), better, True
                    break
    return found


def _moved(line: ColumnOrder, used: Sequence[int]) -> Iterator[ColumnOrder]:
    """Lines with one used column at another used one's place."""
    for column in used:
        rest = [other for other in line if other != column]
        for other in used:
            if other != column:
                place = rest.index(other)
                for at in (place, place + 1):
                    moved = (*rest[:at], column, *rest[at:])
                    if moved != line:
                        yield moved


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
