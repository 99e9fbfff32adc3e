"""A lower bound on the step time that is quick for any number of ranks: it counts blocks by hosts, and prices sums of gradients.

A *pipeline* p does S_p of the B sequences of a batch, and each of the P pipelines holds every one of the L blocks. Therefore, for
any price ``w(S) = a S + (1 - a) B / P`` with a between 0 and 1, a block that a rank holds being worth w of its pipeline's share,

    all blocks of all ranks are worth  sum over p of L w(S_p)  =  L B                                            (1)

If ranks cannot hold so much by a step time T, at any one a, then no P pipelines do the step in T. A rank that holds n blocks
computes, sums and steps one after the other (c, o: least seconds of a block per sequence, of its optimizer step; s: of its sum,
less what one backward of a layer can hide of it, since the last block is whole when the others' last backward is yet to come):

    n (S c + s + o) + fixed  <=  T                                                                               (2)

* A block whose P holders are not all of one host is summed over the best link that leaves a rank's host, or a longer way: 2
  (P - 1) messages of 1/P of it, around a ring or directly. Among holders of one host it is s of the host's own links.
* A block that a host holds for all pipelines is worth ``sum of w(S_p) = B`` at whatever a. Of ``N`` such blocks each pipeline has
  them all, on its own ranks of the host: if it has v of them there, some holds N / v of them, rounded up, and by (2) no
  more than so many sequences pass. The host's ranks dealt out to P pipelines must let B sequences pass. This bounds N; a host of
  fewer than P ranks holds none.
* What time is left of a host's ranks is worth, per second, at most the largest ``w(S) / (S c + s + o)`` with s over the network.
* A pipeline that is not all in one host sends S messages over a link of each of its hosts, so that S messages last no longer than
  T. One that is all in one host holds L blocks there.

(1) needs no more than that every pipeline holds every block once, and (2) nothing of how pipelines are cut or ordered.

Up to 8 pipelines are then looked at more closely (``Shares``): the shares, largest first, are taken to lie in ranges, which are
halved until nothing is possible in them or they are narrow. At the least shares of a range, (2) says how many blocks a rank of each
pipeline holds; the same argument holds for any prices w_p, one for each pipeline: all blocks are worth ``L * sum of w_p``.

Filling, the embedding, the head and what is in flight are left out: ``packing.bound`` knows them, but not that copies of a block
inside one host serve all pipelines, and it cannot count many unlike ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import fluid_bound_s, pipeline_bound_s
from hetero_mpi.planning.packing.relaxed import Facts, RankClass, joined
from hetero_mpi.planning.several.fleet import Floats
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

TOLERANCE = 0.002
"""The search for the largest step time that can be shown to be too short ends within this share of it."""
PRICES: Floats = np.concatenate([np.linspace(0.0, 0.9, 19), [0.925, 0.95, 0.97, 0.98, 0.99, 1.0]])
"""Values of a that are tried."""
FAR_S = 1e12
"""Seconds after which nothing becomes possible any more."""
MOST_BOXED = 8
"""Up to so many pipelines, shares of the batch are looked at in ranges."""
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How much of a pipeline's price goes by its share, the rest being the same for all: what is tried."""
NARROW = 1.04
"""Ranges of shares are not halved beyond this."""
MOST_LOOKED = 30_000
"""Ranges that are looked at, in all, for one step time."""
MOST_DEALT = 16
"""Up to so many ranks of a host are dealt out to pipelines one by one; of more, as well as fractions would be."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one host; seconds and counts, each at its best."""

    count: int
    block_s: float
    """Per sequence, forward and backward."""
    hidden_s: float
    """Of a sum, what the backward of one layer can hide."""
    step_s: float
    """Of a block's optimizer."""
    fixed_s: float
    most: int
    """Blocks that memory holds."""
    near: tuple[float, ...]
    """(latency, seconds per byte) inside the host."""
    away: tuple[float, ...]
    """The same, out of it."""
    message_s: float
    """One sequence's message out of the host."""


def large_bound_s(profile: ClusterProfile, request: PlanRequest, known_s: float = math.inf) -> float:
    """No plan of as many pipelines as the request allows is faster; at or over ``bounds.fluid_bound_s``.

    ``known_s``: some plan's step time, beyond which nothing is looked for.
    """
    fluid_s = fluid_bound_s(profile, request)
    blocks = len(profile.model.layers) - 2
    if blocks < 1 or math.isinf(fluid_s):
        return fluid_s
    facts = Facts(profile, request)
    groups = hosts_of(facts)
    most = min(len(facts.fleet.devices), request.max_pipelines, request.global_batch)
    alone_s = max(fluid_s, pipeline_bound_s(profile, request))
    found = []
    for pipelines in range(1, most + 1):
        counted = Counted(facts, groups, pipelines)
        low_s = alone_s if pipelines == 1 else fluid_s
        found.append((longest_impossible_s(counted.impossible, low_s, known_s), pipelines, counted))
    best_s = known_s
    for low_s, pipelines, counted in sorted(found, key=lambda one: one[:2]):
        if low_s >= best_s:
            break
        if 1 < pipelines <= MOST_BOXED:
            low_s = longest_impossible_s(Shares(counted).impossible, low_s, best_s)
        best_s = min(best_s, low_s)
    return max(best_s, fluid_s) if best_s < math.inf else math.inf


def longest_impossible_s(impossible: Callable[[float], bool], low_s: float, known_s: float) -> float:
    """The longest step time that is shown to be too short: at least ``low_s``, at most ``known_s``."""
    high_s = min(known_s, 2 * low_s)
    while high_s < known_s and impossible(high_s):
        low_s, high_s = high_s, min(known_s, 2 * high_s)
        if low_s > FAR_S:
            return math.inf
    if high_s <= low_s or impossible(high_s):
        return max(low_s, high_s)
    while high_s > low_s * (1 + TOLERANCE):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if impossible(middle_s) else (low_s, middle_s)
    return low_s


def hosts_of(facts: Facts) -> list[Ranks]:
    """The ranks of every host; unlike ones are taken to be as good as the best of them in every respect."""
    by_host: dict[int, RankClass] = {}
    for one in facts.classes:  # each of them of one host
        by_host[one.home] = joined(by_host[one.home], one) if one.home in by_host else one
    return [_group(facts, one, host) for host, one in sorted(by_host.items())]


def _group(facts: Facts, one: RankClass, host: int) -> Ranks:
    room = one.usable - facts.workspace
    held = facts.held + (facts.kept_input if True in facts.request.recompute_choices else facts.kept)
    away = facts.exit[host]
    layers = [facts.fleet.devices[index].layers for index in one.ranks]
    sizes = [n * facts.request.sequence_length for n in facts.sizes]
    hidden = max(
        curve.at(size)
        for times in layers
        for layer in times.values()
        for curve in (layer.backward_s, layer.weight_s)
        if curve is not None
        for size in sizes
    )
    return Ranks(
        count=len(one.ranks),
        block_s=one.work_s[0],
        hidden_s=hidden,
        step_s=one.per_parameter_s * facts.trained,
        fixed_s=one.fixed_s,
        most=max(0, min(len(facts.blocks), math.floor(room / max(held, 1.0)))),
        near=one.near,
        away=away,
        message_s=facts.message_bytes * away[1] if away[1] < math.inf else math.inf,
    )


class Counted:
    """Can ``pipelines`` pipelines do the batch by some step time?"""

    def __init__(self, facts: Facts, groups: list[Ranks], pipelines: int) -> None:
        self.groups, self.pipelines = groups, pipelines
        self.batch, self.blocks = facts.request.global_batch, len(facts.blocks)
        self.most_share = self.batch - pipelines + 1
        self.least_share = self.batch if pipelines == 1 else 1
        # At a = 1 a block is worth its share, at a = 0 all blocks are worth the same.
        self.prices = PRICES if pipelines > 1 else np.array([1.0])
        self.summed = facts.summed[0] if pipelines > 1 else 0.0

    def impossible(self, step_s: float) -> bool:
        """Inequality (1) fails at some price."""
        worth = sum((self._worth(group, step_s) for group in self.groups), np.zeros(len(self.prices)))
        return bool((worth < self.batch * self.blocks * (1 - 1e-9)).any())

    def sum_s(self, group: Ranks, way: tuple[float, ...]) -> float:
        if self.pipelines == 1:
            return 0.0
        if way[1] == math.inf:  # there are no such links
            return math.inf
        count = self.pipelines
        seconds = 2 * (count - 1) * (way[0] + self.summed / count * way[1])
        return max(0.0, seconds - group.hidden_s)

    def _worth(self, group: Ranks, step_s: float) -> Floats:
        """By price: what the blocks of a group of ranks are worth at most."""
        left_s = step_s - group.fixed_s
        if left_s <= 0 or group.most < 1:
            return np.zeros(len(self.prices))
        away_s = self.sum_s(group, group.away)
        near_s = self.sum_s(group, group.near)
        passing = self.passing(group, step_s)
        share = self.share(group, step_s, passing, min(near_s, away_s))
        inside = self.inside(group, step_s, passing, near_s, away_s)
        scattered = self._scattered(group, left_s, share, away_s)
        total = group.count * scattered
        if inside < 1 or self.pipelines == 1:
            return total
        # Blocks held for all pipelines take time from the others; all of it at a rate, as if it could be cut at will.
        counts = np.arange(1, inside + 1)[:, None]
        each_s = self.batch * group.block_s + self.pipelines * (near_s + group.step_s)
        spare_s = np.maximum(0.0, group.count * left_s - counts * each_s)
        others = np.minimum(total[None, :], spare_s * self._rate(group, left_s, share, away_s)[None, :])
        return np.asarray(np.maximum(total, (counts * self.batch + others).max(axis=0)))

    def passing(self, group: Ranks, step_s: float) -> int:
        """Sequences that a link out of the host lets pass by ``step_s``."""
        return self.most_share if group.message_s <= 0 else math.floor(min(1e18, step_s / group.message_s))

    def share(self, group: Ranks, step_s: float, passing: int, sum_s: float) -> int:
        """Most sequences of a pipeline with ranks here: what a link lets pass; all, if the whole pipeline can be here."""
        if passing >= self.most_share:
            return self.most_share
        whole_s = self.blocks * ((passing + 1) * group.block_s + min(sum_s, step_s))
        return self.most_share if whole_s <= group.count * step_s else passing

    def inside(self, group: Ranks, step_s: float, passing: int, near_s: float, away_s: float) -> int:
        """Most blocks that a host can hold for all pipelines."""
        if group.count < self.pipelines or near_s == math.inf:
            return 0
        if self.pipelines * passing < self.batch:
            # Some pipeline is all in this host, and so are all its blocks, each of them summed here or over the network.
            here_s = self.batch * group.block_s + self.pipelines * near_s
            if self.blocks * min(here_s, (passing + 1) * group.block_s + away_s) > group.count * step_s:
                return 0
            passing = self.batch
        low, high = 0, self.blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._passes(group, step_s, middle, passing, near_s) else (low, middle - 1)
        return low

    def _passes(self, group: Ranks, step_s: float, blocks: int, passing: int, near_s: float) -> bool:
        """Do the host's ranks, dealt out to all pipelines, let the batch pass, each pipeline holding so many blocks here?"""
        left_s, extra = step_s - group.fixed_s, group.count - self.pipelines + 1

        @cache
        def through(ranks: int) -> int:
            held = -(-blocks // ranks)
            if held > group.most:
                return 0
            spare_s = left_s - held * (near_s + group.step_s)
            return max(0, min(passing, self.most_share, math.floor(spare_s / (held * group.block_s) + 1e-9)))

        if group.count > MOST_DEALT:
            return group.count * max(through(n) / n for n in range(1, extra + 1)) >= self.batch
        best = [0] + [-1] * group.count
        for _ in range(self.pipelines):
            best = [
                max((best[used - n] + through(n) for n in range(1, used + 1) if best[used - n] >= 0), default=-1)
                for used in range(group.count + 1)
            ]
        return max(best) >= self.batch

    def _scattered(self, group: Ranks, left_s: float, share: int, away_s: float) -> Floats:
        """By price: what the blocks of one rank are worth at most, if other hosts hold them too."""
        if away_s == math.inf:
            return np.zeros(len(self.prices))
        held: Floats = np.arange(1, group.most + 1, dtype=np.float64)
        shares = np.floor((left_s - held * (away_s + group.step_s)) / (held * group.block_s) + 1e-9)
        shares = np.minimum(shares, share)
        worth = self._price(shares[:, None]) * held[:, None]
        return np.asarray(np.where(shares[:, None] >= self.least_share, worth, 0.0).max(axis=0))

    def _rate(self, group: Ranks, left_s: float, share: int, away_s: float) -> Floats:
        """By price: the same per second. It grows or falls with the share all the way."""
        fixed_s = away_s + group.step_s
        largest = min(share, math.floor((left_s - fixed_s) / group.block_s + 1e-9)) if away_s < math.inf else 0
        if largest < 1:
            return np.zeros(len(self.prices))
        ends = np.array([1.0, float(largest)])
        rates = self._price(ends[:, None]) / (ends * group.block_s + fixed_s)[:, None]
        return np.asarray(rates.max(axis=0))

    def _price(self, shares: Floats) -> Floats:
        return np.asarray(self.prices * shares + (1 - self.prices) * self.batch / self.pipelines)


class Shares:
    """The same question for few pipelines, with shares in ranges and a price of its own for every pipeline."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def impossible(self, step_s: float) -> bool:
        """No shares that add up to the batch are possible: those of each range are shown not to be, or it is halved."""
        counted = self.counted
        count, batch = counted.pipelines, counted.batch
        low = np.ones((1, count))
        high = np.full((1, count), float(batch - count + 1))
        looked = 0
        while len(low):
            low, high = _tightened(low, high, batch)
            possible = ~self._shown(low, step_s)
            looked += len(low)
            low, high = low[possible], high[possible]
            if not len(low):
                return True
            ratio = np.where(high > low, high / low, 0.0)
            widest = ratio.argmax(axis=1)
            if (ratio.max(axis=1) < NARROW).any() or looked > MOST_LOOKED:
                return False
            rows = np.arange(len(low))
            middle = np.floor(np.sqrt(low[rows, widest] * high[rows, widest]))
            below, above = high.copy(), low.copy()
            below[rows, widest], above[rows, widest] = middle, middle + 1
            low, high = np.concatenate([low, above]), np.concatenate([below, high])
        return True

    def _shown(self, shares: Floats, step_s: float) -> NDArray[np.bool_]:
        """[K] of shares [K, P] at least: are they too large, at some prices?"""
        counted = self.counted
        mean = shares / shares.mean(axis=1, keepdims=True)
        shown = np.zeros(len(shares), dtype=np.bool_)
        for part in PARTS:
            prices = part * mean + (1 - part)
            worth = np.zeros(len(shares))
            for group in counted.groups:
                worth += self._worth(group, shares, prices, step_s)
            shown |= worth < prices.sum(axis=1) * counted.blocks * (1 - 1e-9)
        return shown

    def _worth(self, group: Ranks, shares: Floats, prices: Floats, step_s: float) -> Floats:
        """[K] what the blocks of a group of ranks are worth at most."""
        counted, left_s = self.counted, step_s - group.fixed_s
        if left_s <= 0 or group.most < 1:
            return np.zeros(len(shares))
        away_s = counted.sum_s(group, group.away)
        near_s = counted.sum_s(group, group.near)
        passing = counted.passing(group, step_s)
        share = counted.share(group, step_s, passing, min(near_s, away_s))
        outside = np.where(shares <= share, self._most(group, shares, left_s, away_s), 0.0)
        total = group.count * (outside * prices).max(axis=1)
        inside = counted.inside(group, step_s, passing, near_s, away_s)
        if inside < 1:
            return total
        blocks = np.arange(1, inside + 1)
        each = np.maximum(self._most(group, shares, left_s, near_s), 1e-9)
        ranks = np.ceil(blocks[None, :, None] / each[:, None, :] - 1e-9).sum(axis=2)
        rate = np.where(outside >= 1, prices / (shares * group.block_s + away_s + group.step_s), 0.0).max(axis=1)
        used_s = shares.sum(axis=1) * group.block_s + counted.pipelines * (near_s + group.step_s)
        spare_s = np.maximum(0.0, group.count * left_s - blocks[None, :] * used_s[:, None])
        both = blocks[None, :] * prices.sum(axis=1)[:, None] + np.minimum(total[:, None], spare_s * rate[:, None])
        return np.maximum(total, np.where(ranks <= group.count, both, 0.0).max(axis=1))

    def _most(self, group: Ranks, shares: Floats, left_s: float, sum_s: float) -> Floats:
        if sum_s == math.inf:
            return np.zeros(shares.shape)
        return np.minimum(group.most, np.floor(left_s / (shares * group.block_s + sum_s + group.step_s) + 1e-9))


def _tightened(low: Floats, high: Floats, batch: int) -> tuple[Floats, Floats]:
    """Ranges of shares in falling order that add up to the batch; those that none do are left out."""
    for _ in range(3):
        high = np.minimum.accumulate(high, axis=1)
        low = np.maximum.accumulate(low[:, ::-1], axis=1)[:, ::-1]
        high = np.minimum(high, batch - (low.sum(axis=1, keepdims=True) - low))
        low = np.maximum(low, batch - (high.sum(axis=1, keepdims=True) - high))
    kept = (low <= high).all(axis=1)
    return low[kept], high[kept]
