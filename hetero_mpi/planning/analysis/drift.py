"""Decides from measured times when machines have changed their speed, and when moving layers for it pays. Pure.

Every step each rank says how its computing lasted, against its profile (2: twice as long); so are the sums of groups and the links
between neighbouring stages told. Two questions, asked apart:

* ``SpeedWatch``: has a rank's speed, or that of sums or of a link, left the band around the speed that the plan was made with?
  By the median of the last steps, with a band that widens with the noise, for several steps in a row: one slow step, or many that
  merely scatter, is no change of speed.
* ``Prospect``: is the plan for the new speeds enough faster? Nobody knows how long the new speed will last, so the layers move
  once the steps since the change have lost as much as moving costs. Whatever the machine does next, little more than twice
  the time is lost that somebody who knew the future would lose (the ski-rental argument; Karlin, Manasse, Rudolph, Sleator 1988,
  "Competitive snoopy caching").

``Decider`` puts both together.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero_mpi.planning.analysis.correction import Measured, Pair
from hetero_mpi.planning.fit import median_error
from hetero_mpi.planning.owners import owned_units
from hetero_mpi.planning.schedule import held_by, holders
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile

BAND = 0.15
"""A rank is as fast as it was while its ratio stays within this share of the one that was planned with ..."""
SPREADS = 4.0
"""... or within so many standard errors of the median, where steps scatter more."""
WINDOW = 8
"""Steps of which the median counts."""
FEWEST = 5
"""Steps after which there is a median at all."""
PATIENCE = 3
"""Medians in a row outside the band, on one side, that make a change."""
LEAST_GAIN = 0.05
"""A step must become shorter by this share, or nothing moves: predictions are not better than that."""
MARGIN = 2.0
"""Least gain of the remaining steps, in parts of what moving costs."""
_VALUE_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes of a trained parameter on its way: itself and two moments, in fp32."""
_Way = tuple[int, int, int]
"""(from rank, to rank, layer)"""


@dataclass(frozen=True)
class GroupSums:
    """Sums that the ranks of a group make in their host's memory."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkBetween:
    """Messages between two ranks, there and back."""

    ranks: Pair


Watched = int | GroupSums | LinkBetween
"""A thing with a speed: a rank's computing, or one of these."""


def as_measured(ratios: Mapping[Watched, float]) -> Measured:
    """As a profile is corrected by it."""
    links = {one.ranks: (ratio,) for one, ratio in ratios.items() if isinstance(one, LinkBetween)}
    return Measured(
        {one: (ratio,) for one, ratio in ratios.items() if isinstance(one, int)},
        sums={one.ranks: (ratio,) for one, ratio in ratios.items() if isinstance(one, GroupSums)},
        links=links | {(b, a): ratio for (a, b), ratio in links.items()},
    )


@dataclass
class _Speed:
    """All that is known of one speed."""

    planned: float = 1.0
    """The ratio that the plan was made with."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    jumps: deque[float] = field(default_factory=lambda: deque(maxlen=4 * WINDOW))
    """Between neighbouring steps, as logarithms: a change of speed is one of them, noise is all of them."""
    side: int = 0
    """1: the newest medians were over the band, -1: under it."""
    medians: int = 0
    """The number of these in a row."""
    steps: int = 0
    """Steps since the speed went to that side."""

    @property
    def median(self) -> float:
        """The median of the last steps; what was planned with, while there are too few."""
        return statistics.median(self.recent) if len(self.recent) >= FEWEST else self.planned

    @property
    def band(self) -> float:
        """As a logarithm."""
        if not self.jumps or not self.recent:
            return math.log1p(BAND)
        sigma = statistics.median(self.jumps) / 0.954  # of normal values
        return max(math.log1p(BAND), SPREADS * median_error(sigma, len(self.recent)))

    def observe(self, ratio: float) -> None:
        if self.recent:
            self.jumps.append(abs(math.log(ratio / self.recent[-1])))
        self.recent.append(ratio)
        if len(self.recent) < FEWEST:
            return
        away = math.log(self.median / self.planned)
        side = 0 if abs(away) <= self.band else int(math.copysign(1, away))
        if side and side == self.side:
            self.medians, self.steps = self.medians + 1, self.steps + 1
        else:
            # The newest steps, one after the other, that were themselves outside on this side.
            beyond = (side * math.log(value / self.planned) > math.log1p(BAND) for value in reversed(self.recent))
            self.medians, self.steps = abs(side), sum(1 for _ in itertools.takewhile(bool, beyond))
        self.side = side


class SpeedWatch:
    """Speeds as ratios: measured over profiled seconds. Of all ``ranks``, and of what else is told."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._speeds: dict[Watched, _Speed] = {rank: _Speed() for rank in ranks}

    def observe(self, ratios: Mapping[Watched, float]) -> None:
        """One step: the ratios of what was measured in it."""
        for one, ratio in ratios.items():
            self._speeds.setdefault(one, _Speed()).observe(ratio)

    def changed(self) -> dict[Watched, int]:
        """Speeds that have left their bands for good enough reasons -> for how many steps now."""
        return {one: speed.steps for one, speed in self._speeds.items() if speed.medians >= PATIENCE}

    def ratios(self) -> dict[Watched, float]:
        """Every ratio as far as is known: the median of the last steps, else what was planned with."""
        return {one: speed.median for one, speed in self._speeds.items()}

    def far_from(self, ratios: Mapping[Watched, float]) -> bool:
        """True where a speed has moved on by more than its band from these, which a plan is being made with."""
        return any(
            abs(math.log(speed.median / ratios.get(one, speed.planned))) > speed.band
            for one, speed in self._speeds.items()
        )

    def look_again(self) -> None:
        """Changes must show themselves ``PATIENCE`` times once more."""
        for speed in self._speeds.values():
            speed.medians = 0

    def settle(self, ratios: Mapping[Watched, float], moved: bool) -> None:
        """These ratios have been planned with: bands are around them from now on.

        Args:
            moved: layers have moved: what was measured before says nothing of the steps to come.
        """
        for one, speed in self._speeds.items():
            speed.planned = ratios.get(one, speed.planned)
            speed.side = speed.medians = speed.steps = 0
            if moved:
                speed.recent.clear()


@dataclass(frozen=True)
class Prospect:
    """The gain and the cost of a change of plans."""

    now_s: float
    """A step under the plan as it is, at the new speeds."""
    then_s: float
    """A step under the new plan."""
    cost_s: float
    """Seconds that moving takes."""

    @property
    def gain_s(self) -> float:
        """Per step."""
        return self.now_s - self.then_s

    def hopeless(self, remaining_steps: int) -> bool:
        """Whatever comes: the gain is too small, or the run too short."""
        return self.gain_s < LEAST_GAIN * self.now_s or self.gain_s * remaining_steps < MARGIN * self.cost_s

    def pays(self, steps_since: int, remaining_steps: int) -> bool:
        """True if layers should move now, ``steps_since`` steps after the speeds have changed."""
        return not self.hopeless(remaining_steps) and self.gain_s * steps_since >= self.cost_s


class Move(enum.Enum):
    """The decision after a step."""

    STAY = "stay"
    ASK = "ask"
    """Ask for a plan for ``Decider.asked``."""
    GO = "go"
    """Change to the plan that was found."""


class Decider:
    """Watches, asks, waits and says when to go. After every step comes ``observe``, then ``decide``; in between, once, ``answered``
    when the plan that was asked for is there.

    Attributes:
        asked: the ratios that a plan was asked for; None: no question is open.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.asked: dict[Watched, float] | None = None
        self._watch = SpeedWatch(ranks)
        self._prospect: Prospect | None = None
        self._answered = True

    def observe(self, ratios: Mapping[Watched, float]) -> None:
        """One step: the ratios of what was measured in it."""
        self._watch.observe(ratios)

    def answered(self, prospect: Prospect | None) -> None:
        """A plan was found that would bring this; None: none was, and the same question would have the same fate."""
        assert self.asked is not None
        self._prospect, self._answered = prospect, True
        if prospect is None:
            self._settle(moved=False)

    def decide(self, remaining_steps: int) -> Move:
        """The decision now, with so many steps to come."""
        changed = self._watch.changed()
        if self.asked is not None:
            if not self._answered:
                return Move.STAY
            assert self._prospect is not None
            if changed and not self._watch.far_from(self.asked):
                if self._prospect.hopeless(remaining_steps):
                    self._settle(moved=False)
                elif self._prospect.pays(max(changed.values()), remaining_steps):
                    return Move.GO
                return Move.STAY
            # What was found is for speeds that are over. Where they never rest, planning need not either.
            self.asked = self._prospect = None
            self._watch.look_again()
            return Move.STAY
        if not changed or remaining_steps == 0:
            return Move.STAY
        self.asked, self._answered = self._watch.ratios(), False
        return Move.ASK

    def moved(self) -> None:
        """Layers have moved, after ``Move.GO``."""
        self._settle(moved=True)

    def sentence(self, hosts: Sequence[str]) -> str:
        """A sentence about the speeds that have changed. ``hosts``: of the ranks."""
        ratios = self._watch.ratios()
        return ", ".join(
            f"{_subject(one, hosts)} at {1 / ratios[one]:.2g} of {'its' if isinstance(one, int) else 'the'} profiled speed "
            f"for {steps} steps"
            for one, steps in self._watch.changed().items()
        )

    def _settle(self, moved: bool) -> None:
        assert self.asked is not None
        self._watch.settle(self.asked, moved)
        self.asked = self._prospect = None


def _subject(one: Watched, hosts: Sequence[str]) -> str:
    if isinstance(one, int):
        return f"rank {one} ({hosts[one]}) runs"
    ranks = " and ".join(str(rank) for rank in one.ranks)
    if isinstance(one, GroupSums):
        return f"the sums of ranks {ranks} ({hosts[one.ranks[0]]}) run"
    return f"the link between ranks {ranks} ({' and '.join(dict.fromkeys(hosts[rank] for rank in one.ranks))}) runs"


def moved_layers(old: Plan, new: Plan) -> dict[tuple[int, int], list[int]]:
    """(from rank, to rank) -> layers that the second did not hold and gets from the first, or a share of them; of a group its
    first rank sends."""
    before, after, found = holders(old), holders(new), dict[tuple[int, int], list[int]]()
    for layer in range(new.layers):
        for rank in after[layer]:
            if rank not in before[layer]:
                found.setdefault((before[layer][0], rank), []).append(layer)
    return found


def moving_s(profile: ClusterProfile, old: Plan, new: Plan) -> float:
    """Seconds until every rank has the trained state that it needs and does not have, as ``state.redistribute`` sends it: a
    parameter's owner sends the values to all that will hold it, and the moments to its next owner. Of a group first all give
    their parts to the owner; whole tensors are sent to each member. Each rank receives and sends one thing at a time."""
    model, sent = profile.model, dict[_Way, float]()
    after, together = owned_units(new, model), {stage.ranks[0]: stage.ranks for _, _, stage in new.numbered}
    needing = holders(new)
    for (layer, unit), (source, count) in owned_units(old, model).items():
        owning = together[after[layer, unit][0]]
        for rank in needing[layer]:
            size = count * (_VALUE_BYTES + _moments_bytes(model.layers[layer]) * (rank in owning))
            sent[source, rank, layer] = sent.get((source, rank, layer), 0) + size
    return _busiest_s(profile, _parts(old, model)) + _busiest_s(profile, sent)


def _parts(plan: Plan, model: ModelCost) -> dict[_Way, float]:
    """Bytes that members of groups give their first rank: their share of what is cut, and of several pipelines theirs owns."""
    found, weight = {}, plan.state_weights
    for _, _, stage in plan.numbered:
        for place, rank in enumerate(stage.ranks[1:], 1):
            for number in range(stage.first, stage.last):
                layer, leader = model.layers[number], stage.ranks[0]
                owned = weight[leader] / sum(weight[other] for other in held_by(plan, number))
                experts = layer.expert_trainable * stage.expert_share(place)
                cut = (layer.divided_trainable - layer.expert_trainable) * stage.share(place) + experts
                found[rank, leader, number] = owned * cut * (_VALUE_BYTES + _moments_bytes(layer))
    return found


def _moments_bytes(layer: LayerCost) -> float:
    """Bytes of a trained parameter's moments."""
    return _MOMENTS_BYTES - layer.moments_saving_bytes / max(1, layer.trainable_parameters)


def _busiest_s(profile: ClusterProfile, sent: Mapping[_Way, float]) -> float:
    busy: dict[tuple[str, int], float] = {}
    for (source, destination, _), size in sent.items():
        if source != destination and size:
            seconds = profile.transfer_s(source, destination, size)
            for end in (("send", source), ("receive", destination)):
                busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)
