"""What a stage of a class of ranks costs, tabulated over the blocks it holds: the steps of ``chains``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.several.cluster import Floats
from hetero_mpi.planning.tables import Table, stage_bytes
from hetero_mpi.planning.types.cost import DTYPE_BYTES, GRADIENT_BYTES, ModelCost

ENDS = tuple(itertools.product((False, True), repeat=2))
"""Does a stage begin with the embedding? Does it end with the head?"""


@dataclass(frozen=True)
class Limits:
    """When stages may begin, given shares of the batch and a step time; [share, blocks]. See ``bound`` for the inequalities."""

    latest_s: Floats
    """A may be at most this; negative: never."""
    rounds: Floats
    """So many round trips from this stage to the last one and back take place one after the other."""
    left_s: Floats
    """A and these round trips must fit into this; negative: never."""
    both_s: Floats
    """A and two round trips must fit into this, where not all sequences can be in flight: the first one's, before which no more
    than are in flight are done, and the last one's, after which no more than these are left."""
    end_s: Floats
    """[blocks]: when everything but the optimizer must have ended."""
    most: int
    """No share can have a stage of more blocks; -1: of any."""


@dataclass(frozen=True)
class BoundStages:
    """BoundStages of one class and one kind (embedding or not, head or not, recompute or not); arrays over 0 ... L blocks."""

    work_s: Floats
    """Least seconds per sequence."""
    trip_s: Floats
    """The same without what split backward may put off."""
    fill_s: Floats
    """Least seconds of one micro-batch, there and back."""
    optimizer_s: Floats
    tail_s: Floats
    """The sum of the first layer's gradients, which no backward hides."""
    kept: Floats
    """Most sequences in flight; 0: such a stage does not fit, or is none."""

    def limits(self, shares: Floats, step_s: float) -> Limits:
        end, share = step_s - self.optimizer_s, shares[:, None]
        possible = (self.kept > 0) & (share * self.work_s + self.tail_s <= end)
        latest = np.where(possible, end - share * self.trip_s, -1.0)
        found = np.flatnonzero((latest >= 0).any(axis=0))
        most = int(found.max()) if found.size else -1
        rounds = np.maximum(1.0, np.ceil(share / np.maximum(self.kept, 1e-9) - 1e-9))
        left = np.where(latest >= 0, end, -1.0)
        beyond = np.maximum(0.0, share - self.kept)
        both = np.where(beyond > 0, end - beyond * self.trip_s + self.fill_s, np.inf)
        return Limits(latest, rounds, left, both, end, most)


class StageTables:
    """``BoundStages`` of every class, for numbers of pipelines that sum gradients."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        layers = tuple(replace(layer, eight_bit_saving_bytes=0.0) for layer in facts.model.layers)
        shared = replace(facts.model, state_bytes_per_trainable_parameter=float(GRADIENT_BYTES), layers=layers)
        self._bytes = {
            (several, first, last, recompute): tuple(_over_blocks(table, first, last) for table in tables)
            for several, model in ((False, facts.model), (True, shared))
            for recompute in set(facts.request.recompute_choices)
            for tables in [self._stage_bytes(model, recompute)]
            for first, last in ENDS
        }
        """Where several pipelines hold a layer, a rank may own next to nothing of the optimizer's state."""
        sums = np.concatenate([[0.0], np.cumsum([float(x.trainable_parameters) for x in facts.model.layers])])
        trained = sums[None, :] - sums[:, None]
        self._trained = {ends: np.nan_to_num(_over_blocks(trained, *ends), posinf=0.0) for ends in ENDS}
        self._known: dict[int, dict[tuple[int, bool, bool], list[BoundStages]]] = {}

    def _stage_bytes(self, model: ModelCost, recompute: bool) -> tuple[Table, Table]:
        """(bytes whatever is in flight, bytes of every sequence in flight) [first, last]"""
        tokens = self.facts.request.sequence_length
        tables = [stage_bytes(model, tokens * size, recompute) for size in self.facts.choices]
        each = [table / size for size, (_, table) in zip(self.facts.choices, tables, strict=True)]
        return tables[0][0], np.minimum.reduce(each)

    def of(self, pipelines: int) -> dict[tuple[int, bool, bool], list[BoundStages]]:
        """(class, embedding?, head?) -> its stages, one entry for every way of recomputing that fits anywhere."""
        if pipelines not in self._known:
            sums = self.facts.sums_s(pipelines)
            self._known[pipelines] = {
                (kind, first, last): [
                    one for one in self._stages(kind, first, last, sums[kind], pipelines > 1) if one.kept.any()
                ]
                for kind in range(len(self.facts.classes))
                for first, last in ENDS
            }
        return self._known[pipelines]

    def _stages(
        self, kind: int, first: bool, last: bool, sums: tuple[float, ...], several: bool
    ) -> Iterator[BoundStages]:
        facts, one = self.facts, self.facts.classes[kind]
        blocks: Floats = np.arange(len(facts.blocks) + 1, dtype=np.float64)

        def total(each: tuple[float, ...]) -> Floats:
            return blocks * each[0] + float(first) * each[1] + float(last) * each[2]

        overhead_s = one.overhead_s / max(facts.choices)
        # The next forward waits for new values of its layers.
        values_s = total(sums) * DTYPE_BYTES[facts.model.dtype] / GRADIENT_BYTES
        forward_s = total(one.forward_s) + one.overhead_s
        share = 1 / np.maximum(1, blocks + first + last)
        late_s = np.maximum(values_s * share, values_s - forward_s * (1 - share))
        for recompute in sorted(set(facts.request.recompute_choices)):
            again = blocks * one.repeated_s if recompute else np.zeros_like(blocks)
            own = (blocks * one.refill_s if recompute else 0.0) + one.overhead_s
            yield BoundStages(
                work_s=total(one.work_s) + again + overhead_s,
                trip_s=total(one.trip_s) + again + overhead_s,
                fill_s=total(one.fill_s) + own,
                optimizer_s=one.fixed_s
                + (0.0 if several else one.per_parameter_s) * self._trained[first, last]
                + late_s,
                tail_s=np.full(len(blocks), sums[1]) if first else np.where(blocks > 0, sums[0], sums[2]),
                kept=self._kept(one.usable, several, first, last, recompute),
            )

    def _kept(self, usable: float, several: bool, first: bool, last: bool, recompute: bool) -> Floats:
        fixed, each = self._bytes[several, first, last, recompute]
        room = usable - fixed
        with np.errstate(invalid="ignore"):
            kept = np.where(each > 0, np.floor(room / np.maximum(each, 1e-30) + 1e-9), np.inf)
        kept = np.where(room >= 0, kept, 0.0)
        # A stage without blocks has no forward to repeat: one way of not doing so is enough.
        if (recompute and False in self.facts.request.recompute_choices) or not (first or last):
            kept[0] = 0.0
        return np.asarray(kept)


def _over_blocks(table: Table, first: bool, last: bool) -> Floats:
    """The least entry [first, last) of ``table`` by the number of blocks a stage holds; infinite: there is none."""
    count = table.shape[0] - 3
    blocks = np.arange(count + 1)
    if first and last:
        return np.where(blocks == count, table[0, count + 2], np.inf)
    if first:
        return np.asarray(table[0, blocks + 1], dtype=np.float64)
    if last:
        return np.asarray(table[count + 1 - blocks, count + 2], dtype=np.float64)
    inner = [min(table[i, i + n] for i in range(1, count + 2 - n)) for n in range(1, count + 1)]
    return np.array([np.inf, *inner])
