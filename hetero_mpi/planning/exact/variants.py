"""All ways of running one pipeline, timed in arrays: every split over every order of ranks, at every depth.

A *column* is an order of classes of ranks with the cuts of the chain between them. ``Pipelines`` times all columns of one
length for one share of the global batch; ``joint`` puts the results together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.durations import return_s, tied_s
from hetero_mpi.planning.exact.lockstep import Seconds, Table, depths, lists_of, run
from hetero_mpi.planning.tables import Instance, deferred_bytes, may_split, shared_memories, shares_cards
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

Order = tuple[int, ...]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """Orders of one length with all their cuts, as [stage, column]."""

    orders: tuple[Order, ...]
    order: Indices
    """Index of each column's order, ascending."""
    kinds: Indices
    first: Indices
    last: Indices

    @property
    def stages(self) -> int:
        return len(self.kinds)

    def picked(self, which: Indices | Mask) -> Columns:
        return Columns(self.orders, self.order[which], self.kinds[:, which], self.first[:, which], self.last[:, which])


def columns_of(orders: Sequence[Order], items: int) -> Columns:
    """``orders``: of one length, at most ``items``."""
    stages = len(orders[0])
    inner = list(itertools.combinations(range(1, items), stages - 1))
    cuts = np.array([(0, *cut, items) for cut in inner], dtype=np.int64).T
    order = np.repeat(np.arange(len(orders)), len(inner))
    kinds = np.array(orders, dtype=np.int64).T[:, order]
    spans = np.tile(cuts, len(orders))
    return Columns(tuple(orders), order, kinds, spans[:-1], spans[1:])


@dataclass(frozen=True)
class Variants:
    """Columns that run the same lists of actions, and when: all arrays end with the column."""

    columns: Columns
    share: int
    micro_batch: int
    warm_up: tuple[int, ...]
    split: bool
    recompute: Mask
    clock_s: Table
    """When each stage has done its last backward."""
    begun_s: Table
    """When that action began."""
    step_s: Table
    """The longest STEP."""
    host_bytes: Table
    """Per host that ranks share the memory of, what these ranks take."""

    @property
    def end_s(self) -> Table:
        """No step with this pipeline in it is shorter."""
        return np.asarray(self.clock_s.max(axis=0) + self.step_s)

    def picked(self, which: Indices | Mask) -> Variants:
        return Variants(
            self.columns.picked(which), self.share, self.micro_batch, self.warm_up, self.split, self.recompute[:, which],
            self.clock_s[:, which], self.begun_s[:, which], self.step_s[which], self.host_bytes[:, which],
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One pipeline of a plan."""

    order: Order
    share: int
    micro_batch: int
    cuts: tuple[int, ...]
    warm_up: tuple[int, ...]
    split: bool
    recompute: tuple[bool, ...]


def part_of(variants: Variants, place: int) -> Part:
    columns = variants.columns
    cuts = (0, *(int(last) for last in columns.last[:, place]))
    recompute = tuple(bool(again) for again in variants.recompute[:, place])
    order = columns.orders[int(columns.order[place])]
    return Part(order, variants.share, variants.micro_batch, cuts, variants.warm_up, variants.split, recompute)


class _Figures:
    """An ``Instance``'s tables stacked by class."""

    def __init__(self, instance: Instance) -> None:
        kinds = range(len(instance.classes))
        self.forward = np.stack([instance.times[kind].forward_s for kind in kinds])
        self.backward = np.stack([instance.times[kind].backward_s for kind in kinds])
        self.repeated = np.stack([instance.times[kind].repeated_s for kind in kinds])
        self.input = np.stack([instance.times[kind].input_s for kind in kinds])
        self.weight = np.stack([instance.times[kind].weight_s for kind in kinds])
        self.step = np.stack([instance.step_s[kind] for kind in kinds])
        self.out = np.full((len(kinds), len(kinds), instance.items + 1), np.inf)
        self.home = np.full_like(self.out, np.inf)
        for a, b in itertools.product(kinds, repeat=2):
            if a != b or len(instance.classes[a]) > 1:
                self.out[a, b], self.home[a, b] = instance.messages(a, b)
        self.memory = {
            choice: [np.stack([each[choice][part] for each in instance.memory]) for part in (0, 1)]
            for choice in instance.choices
        }
        self.deferred = deferred_bytes(instance.profile.model, instance.tokens)
        self.usable = np.array(instance.usable, dtype=float)


class Pipelines:
    """What one pipeline may be, for every share of the global batch.

    ``every_mask``: all choices of recompute are looked at, not only where memory forces it. Repeating a forward never makes a
    pipeline faster while its messages are alone on their links; it may when they queue with those of others, and it may
    leave a neighbour the host's memory.
    """

    def __init__(self, profile: ClusterProfile, request: PlanRequest, instances: Sequence[Instance]) -> None:
        self.profile, self.request = profile, request
        self.instances = {instance.micro_batch: instance for instance in instances}
        self.classes = instances[0].classes
        self.tied = profile.model.tied and profile.model.layers[0].trainable_parameters > 0
        self.figures = {size: _Figures(instance) for size, instance in self.instances.items()}
        self.shared = shared_memories(profile)
        self.limit_s = math.inf
        self.every_mask = bool(self.shared) or shares_cards(profile)
        self.splits = np.array([may_split(profile, members[0]) for members in self.classes])
        # [host, class]: does a rank of the class compute in the host's memory?
        self.sharing = np.array(
            [[members[0] in ranks for members in self.classes] for _, ranks in self.shared], dtype=bool
        ).reshape(len(self.shared), len(self.classes))

    def of(self, columns: Columns, share: int) -> Iterator[Variants]:
        """Every variant of the columns that fits on its devices, but for those whose busiest rank alone computes longer than
        ``limit_s``."""
        for size in sorted(self.figures):
            if share % size:
                continue
            count = share // size
            promising = columns.picked(self._busiest_s(columns, size, count) <= self.limit_s)
            for split in self.split_choices(columns.stages):
                able: Mask = np.asarray(self.splits[promising.kinds].all(axis=0))
                kept = promising.picked(able) if split else promising
                for warm_up in depths_of(self.request.schedule, columns.stages, count) if kept.order.size else ():
                    yield from self._at(kept, share, size, warm_up, split)

    def _busiest_s(self, columns: Columns, size: int, count: int) -> Table:
        """What the busiest rank of each column computes in a step, one action after the other."""
        figures, spans = self.figures[size], (columns.kinds, columns.first, columns.last)
        backward = np.minimum(figures.backward[spans], figures.input[spans] + figures.weight[spans])
        return np.asarray((count * (figures.forward[spans] + backward)).max(axis=0))

    def split_choices(self, stages: int) -> tuple[bool, ...]:
        """Splitting changes nothing in a pipeline of one stage; a schedule given by name says whether to."""
        if stages == 1 or self.request.schedule in ("gpipe", "1f1b"):
            return (False,)
        return (True,) if self.request.schedule == "split" else tuple(sorted(set(self.request.split_choices)))

    def _at(self, columns: Columns, share: int, size: int, warm_up: tuple[int, ...], split: bool) -> Iterator[Variants]:
        figures = self.figures[size]
        spans, own = (columns.first, columns.last), (columns.kinds, columns.first, columns.last)
        held = lists_of(warm_up, share // size, split).holdings
        need = {}
        for again, (fixed, each) in figures.memory.items():
            peaks = [
                np.max([flying * each[own][s] + late * figures.deferred[spans][s] for flying, late in pairs], axis=0)
                for s, pairs in enumerate(held)
            ]
            need[again] = fixed[own] + np.array(peaks)
        usable = figures.usable[columns.kinds]
        for recompute in self._masks(need, usable):
            peak = np.where(recompute, need.get(True, np.inf), need.get(False, np.inf))
            fits: Mask = np.asarray((peak <= usable).all(axis=0))
            if fits.any():
                hosts = self._host_bytes(columns.picked(fits), peak[:, fits])
                yield self._timed(columns.picked(fits), share, size, warm_up, split, recompute[:, fits], hosts)

    def _masks(self, need: dict[bool, Table], usable: Table) -> Iterator[Mask]:
        """Where to recompute: every choice, or only where it does not fit without."""
        stages, many = usable.shape
        if self.every_mask:
            for mask in itertools.product(sorted(need), repeat=stages):
                yield np.repeat(np.array(mask, dtype=bool)[:, None], many, axis=1)
        elif len(need) == 1:
            yield np.full(usable.shape, next(iter(need)))
        else:
            yield need[False] > usable

    def _host_bytes(self, columns: Columns, peak: Table) -> Table:
        if not self.shared:
            return np.zeros((0, columns.order.size))
        return np.stack([np.where(sharing[columns.kinds], peak, 0.0).sum(axis=0) for sharing in self.sharing])

    def _timed(
        self,
        columns: Columns,
        share: int,
        size: int,
        warm_up: tuple[int, ...],
        split: bool,
        recompute: Mask,
        hosts: Table,
    ) -> Variants:
        figures, kinds = self.figures[size], columns.kinds
        spans = kinds, columns.first, columns.last
        backward, weight = figures.backward[spans], np.zeros(kinds.shape)
        if split:
            backward[1:] = figures.input[spans][1:]
            weight[1:] = figures.weight[spans][1:]
        backward = np.where(recompute, figures.repeated[spans] + backward, backward)
        links = kinds[:-1], kinds[1:], columns.first[1:]
        seconds = Seconds(figures.forward[spans], backward, weight, figures.out[links], figures.home[links])
        clock, begun = run(lists_of(warm_up, share // size, split), seconds)
        step = self._step_s(columns, figures.step[spans])
        return Variants(columns, share, size, warm_up, split, recompute, clock, begun, step, hosts)

    def _step_s(self, columns: Columns, own: Table) -> Table:
        """The longest STEP of a pipeline: where the model is tied, the head's rank waits for the new values."""
        longest = own.max(axis=0)
        if not self.tied or columns.stages == 1:
            return np.asarray(longest)
        way = self._ends(return_s)
        return np.asarray(np.maximum(longest, own[0] + way[columns.kinds[0], columns.kinds[-1]]))

    def _ends(self, seconds: object) -> Table:
        """[class of the embedding's rank, class of the head's] -> ``seconds(profile, embedding, head)``."""
        assert callable(seconds)
        count, any_instance = len(self.classes), next(iter(self.instances.values()))
        table = np.full((count, count), np.inf)
        for a, b in itertools.product(range(count), repeat=2):
            if a != b or len(self.classes[a]) > 1:
                table[a, b] = seconds(self.profile, *any_instance.pair(a, b))
        return table

    def alone_s(self, variants: Variants) -> Table:
        """Step time of each column as the only pipeline of its plan."""
        model, columns = self.profile.model, variants.columns
        end = variants.clock_s.max(axis=0)
        if model.tied and columns.stages > 1 and model.layers[0].trainable_parameters > 0:
            # The head's share of the gradient sets out as soon as it is whole.
            whole = self.whole_s(variants)
            end = np.maximum(end, whole[-1] + self._ends(tied_s)[columns.kinds[0], columns.kinds[-1]])
        return np.asarray(end + variants.step_s)

    def whole_s(self, variants: Variants) -> Table:
        """[item, column] -> when the item's gradients are whole; backward goes from a stage's last item to its first."""
        columns, figures = variants.columns, self.figures[variants.micro_batch]
        items, every = len(self.profile.model.layers), np.arange(columns.order.size)
        whole = np.empty((items, columns.order.size))
        for item in range(items):
            stage = (columns.last <= item).sum(axis=0)
            span = columns.kinds[stage, every], np.full(every.shape, item), columns.last[stage, every]
            after = figures.backward[span]
            after = np.where(variants.recompute[stage, every], figures.repeated[span] + after, after)
            if variants.split:
                after = np.where(stage > 0, figures.weight[span], after)
            whole[item] = variants.begun_s[stage, every] + after
        if self.tied and columns.stages > 1:
            way = self._ends(tied_s)
            whole[0] = np.maximum(whole[0], whole[-1] + way[columns.kinds[0], columns.kinds[-1]])
        return whole


def depths_of(schedule: str, stages: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The warm-ups that a schedule leaves to choose from."""
    if schedule == "auto":
        return depths(stages, micro_batches)
    if schedule == "gpipe":
        return ((micro_batches,) * stages,)
    return (tuple(min(stages - 1 - i, micro_batches) for i in range(stages)),)
