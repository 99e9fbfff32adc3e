"""The subject of a profile and its pieces: token counts, and stages that show every kind of layer; what was measured, and where it
is kept, so that a rank that joins makes nobody measure again.

One sealed file per key in ``$XDG_CACHE_HOME/hetero_mpi/profiles`` (``~/.cache`` without the variable); may be deleted at any
time. Memory and links are never kept: they depend on who else uses the machine, and a link has no name by which to find it
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.codec import decode, raise_all
from hetero_mpi.planning.types.profile import LayerTimes
from hetero_mpi.planning.types.profile_rules import number_problems
from hetero_mpi.planning.types.sizes import DTYPE_BYTES
from hetero_mpi.util.disk import cache_folder
from hetero_mpi.util.sealed import load_sealed, store_value

CACHE_BYTES = 64 << 20
"""More than a processor's caches hold for one of its cores."""
Group = Sequence[tuple[int, int]]
"""Stages ``[first, last)`` that are built at the same time."""
_MOST, _FEWEST = 5, 4
"""Numbers of sequences to time, where there are so many: a bend of a line shows among five."""
_CACHE_VERSION = 6
"""Changes with what ``DeviceTimes`` holds or how it is measured."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """The subject of a profile: the model and how it will run."""

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
    """Ranks of one host may hold a stage together: what half the heads take is timed as well."""
    stream_folder: Path | None = None
    """Where this rank's files go of frozen weights for which there is no memory; None: there are none."""


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
    row_counts = set(ordered) if few else {ordered[round(i * last / (_MOST - 1))] for i in range(_MOST)}
    spaced = [max(1, round(ordered[-1] * i / _FEWEST)) for i in range(1, _FEWEST)]
    for rows in (*spaced, *range(1, ordered[-1])):
        if len(row_counts) < _FEWEST:
            row_counts.add(rows)
    return tuple(sorted(row_counts))


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


def fits_caches(subject: BenchmarkSpec, group: Group) -> bool:
    """True where the stages of a group are so small that they fit several times beside each other."""
    parameters = (spec.count for layers in group for spec in subject.chain.specs(*layers))
    return not subject.tuning.nf4 and sum(parameters) * DTYPE_BYTES[subject.train.dtype] <= CACHE_BYTES


def exceeds_caches(subject: BenchmarkSpec) -> bool:
    """True where a block is larger than caches, so that it finds them cold even when it runs over and over, or packing it is
    slow."""
    chain = subject.chain
    blocks = (sum(spec.count for spec in chain.specs(layer, layer + 1)) for layer in range(1, chain.layer_count - 1))
    largest = max(blocks, default=0)
    return subject.tuning.nf4 or largest * DTYPE_BYTES[subject.train.dtype] > CACHE_BYTES


@dataclass(frozen=True)
class DeviceTimes:
    """All that one rank measured of itself; seconds, bytes per second, bytes. All of it depends on the device alone."""

    measured: str
    """When."""
    rows: tuple[int, ...]
    """Sequences per micro-batch that were timed."""
    layers: dict[str, LayerTimes]
    forward_overhead_s: float
    backward_overhead_s: float
    activation_bytes: dict[str, float]
    """kind -> bytes kept from forward to backward per token."""
    deferred_bytes: dict[str, float]
    """kind -> bytes kept between both parts of a split backward per token."""
    optimizer_s_per_parameter: float
    copy_latency_s: float
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    host_optimizer_s_per_parameter: float | None = None
    slow_s: float = 0.0
    """The longest first pass, where it was too long to time more; else 0."""
    halved: dict[str, LayerTimes] = field(default_factory=dict)
    """Times of a member of a group with half of the heads and of the experts, without sums; empty: not timed."""
    without_experts: dict[str, LayerTimes] = field(default_factory=dict)
    """The same with none of the experts."""
    kept: bool = False
    """From an earlier run?"""


def subject_content(subject: BenchmarkSpec, mpi_library: str) -> list[Any]:
    """All of a subject, and of the programs that run it, that decides what a device takes for it."""
    return [
        {name: list(spec.shape) for name, spec in subject.chain.parameters.items()},
        list(subject.chain.kinds),
        [sorted(subject.tuning.trainable), sorted(subject.tuning.still), subject.tuning.nf4, subject.tuning.double],
        [subject.train.dtype, subject.train.optimizer],
        [subject.sequence_length, subject.groups],
        list(subject.chain.boundary(0, 1, subject.sequence_length)),
        own_versions(mpi_library),
    ]


def key_of(content: Sequence[Any]) -> str:
    """A short name for content that JSON can express."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def device_key(world: World, backend: Backend, subject: BenchmarkSpec, repeats: int) -> str:
    """Equal keys mean: the same device of the same host, beside as many other ranks, measured for the same model shape, dtype,
    token counts and versions."""
    products = backend.products(subject.train.dtype)
    device = [world.host, backend.name, backend.index, backend.description(), products]
    device += [subject.threads, round(subject.cores, 3)]
    position = [world.local_rank, world.local_size]
    rows = sampled_rows(subject.micro_batches)
    return key_of([_CACHE_VERSION, device, position, rows, repeats, *subject_content(subject, world.library)])


def load_times(key: str, tell: Callable[[str], object]) -> DeviceTimes | None:
    """The times that are kept under ``key``; None when none are. ``tell``: gets a sentence about damaged ones."""

    def read(_: Path, data: Any) -> DeviceTimes:
        raise_all(key, number_problems(data))
        return decode(DeviceTimes, data, key)

    return load_sealed(_cache_path(key), read, tell)


def is_cached(key: str) -> bool:
    """Whether something is kept under ``key``, and whole."""
    return load_sealed(_cache_path(key), lambda *_: True, lambda _: None) is not None


def store_cached(key: str, value: Any) -> None:
    """Keep a value that JSON can express. A cache that cannot be written is no reason to end a run."""
    with contextlib.suppress(OSError):
        store_value(_cache_path(key), value)


def _cache_path(key: str) -> Path:
    return cache_folder("profiles") / f"{key}.json"
