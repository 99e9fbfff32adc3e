"""What is profiled, and in which pieces: token counts, and stages that show every kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_mpi.job.schema import TrainTable
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.cost import DTYPE_BYTES

CACHE_BYTES = 64 << 20
"""More than a processor's caches hold for one of its cores."""
Group = Sequence[tuple[int, int]]
"""Stages ``[first, last)`` that are built at the same time."""
_MOST, _FEWEST = 5, 4
"""Numbers of sequences to time, where there are so many: a bend of a line shows among five."""


@dataclass(frozen=True)
class Subject:
    """What is profiled: the model and how it will run."""

    chain: LayerChain
    tuning: Tuning
    train: TrainTable
    sequence_length: int
    micro_batches: tuple[int, ...]
    """Sequences per micro-batch the planner may choose from, increasing."""
    cores: float
    """CPU cores this rank can count on."""
    threads: int
    """CPU threads of this rank."""
    memory_bytes: int | None
    """Usable memory given by the user instead of the measured one."""
    groups: bool = False
    """May ranks of one host hold a stage together? Then what half the heads take is timed as well."""


def sampled_rows(choices: Sequence[int]) -> tuple[int, ...]:
    """Sequences per micro-batch to time.

    Of the choices at most five, smallest and largest included; then others up to the largest until there are four, since the last
    micro-batch of a step may be shorter than the rest.

    >>> sampled_rows((1, 2, 4)), sampled_rows((8,)), sampled_rows((1, 2, 3, 4, 6, 8, 12))
    ((1, 2, 3, 4), (2, 4, 6, 8), (1, 3, 4, 6, 12))
    """
    ordered = sorted(set(choices))
    last = len(ordered) - 1
    few = last < _MOST
    chosen = set(ordered) if few else {ordered[round(i * last / (_MOST - 1))] for i in range(_MOST)}
    spaced = [max(1, round(ordered[-1] * i / _FEWEST)) for i in range(1, _FEWEST)]
    for rows in (*spaced, *range(1, ordered[-1])):
        if len(chosen) < _FEWEST:
            chosen.add(rows)
    return tuple(sorted(chosen))


def layer_groups(kinds: Sequence[str], one_by_one: bool) -> list[list[tuple[int, int]]]:
    """Groups of stages to build, one after the other; every kind of the chain is in one.

    ``one_by_one``: each kind in a stage of its own; else the front and the back of the chain, each with two blocks, or as many
    as it takes to show every kind.

    >>> layer_groups(("embedding", "a", "a", "a", "a", "a", "head"), False)
    [[(0, 3), (4, 7)]]
    """
    layers, blocks = len(kinds), len(kinds) - 2
    if one_by_one:
        return [[(kinds.index(kind), kinds.index(kind) + 1)] for kind in dict.fromkeys(kinds)]
    ends = min(2, blocks)
    while {*kinds[1 : 1 + ends], *kinds[-1 - ends : -1]} != {*kinds[1:-1]}:
        ends += 1
    middle = 1 + (blocks + 1) // 2
    if 2 * ends >= blocks:
        return [[(0, middle), (middle, layers)]]
    return [[(0, 1 + ends), (layers - 1 - ends, layers)]]


def light(subject: Subject, group: Group) -> bool:
    """Are the stages of a group so small that they fit several times beside each other?"""
    parameters = (spec.count for layers in group for spec in subject.chain.specs(*layers))
    return not subject.tuning.nf4 and sum(parameters) * DTYPE_BYTES[subject.train.dtype] <= CACHE_BYTES


def cold_by_itself(subject: Subject) -> bool:
    """Is a block larger than caches, so that it finds them cold even when it runs over and over? Or is packing it slow?"""
    chain = subject.chain
    blocks = (sum(spec.count for spec in chain.specs(layer, layer + 1)) for layer in range(1, chain.layer_count - 1))
    largest = max(blocks, default=0)
    return subject.tuning.nf4 or largest * DTYPE_BYTES[subject.train.dtype] > CACHE_BYTES
