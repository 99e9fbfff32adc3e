"""The benchmark's specification: micro-batch sizes and stages to time, and the cache of measured device times.

The cache has one sealed file per key in ``$XDG_CACHE_HOME/hetero_mpi/profiles`` (default: ``~/.cache``), and may be deleted at any
time. Memory and links are not cached, as they depend on other users of the machine.

"""

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
"""A size in bytes that exceeds the caches of one core."""
Group = Sequence[tuple[int, int]]
"""Stages ``[first, last)`` that are built at the same time."""
_MOST, _FEWEST = 5, 4
"""Maximum and minimum number of micro-batch sizes to time; five sizes reveal a bend in a curve."""
_CACHE_VERSION = 7
"""Changes whenever the fields of ``DeviceTimes`` or their measurement change."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """The model to profile, and how it will run."""

    chain: LayerChain
    tuning: Tuning
    train: TrainTable
    sequence_length: int
    micro_batches: tuple[int, ...]
    """Sequences per micro-batch, ascending."""
    cores: float
    """CPU cores this rank can count on."""
    threads: int
    """CPU threads of this rank."""
    memory_bytes: int | None
    """Memory budget set by the user, which replaces the measured memory."""
    groups: bool = False
    """Whether to time tensor-parallel shards (half of the heads) too."""
    stream_folder: Path | None = None
    """Folder for this rank's offloaded frozen weights; None if there is no offloading."""
    compiled: bool = False
    """Whether blocks are compiled on this rank."""


def sampled_rows(choices: Sequence[int]) -> tuple[int, ...]:
    """Return the micro-batch sizes to time: at most five of the choices, filled up to four with smaller sizes.

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
    """Return the stages to build in turn to cover every layer kind: each kind alone (``one_by_one``), or both chain ends.

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
    """Whether the stages of a group are so small that several copies of them fit in memory."""
    parameters = (spec.count for layers in group for spec in subject.chain.specs(*layers))
    return not subject.tuning.nf4 and sum(parameters) * DTYPE_BYTES[subject.train.dtype] <= CACHE_BYTES


def exceeds_caches(subject: BenchmarkSpec) -> bool:
    """Whether a block is larger than the caches, so that repetitions find them cold, or is slow to pack."""
    chain = subject.chain
    blocks = (sum(spec.count for spec in chain.specs(layer, layer + 1)) for layer in range(1, chain.layer_count - 1))
    largest = max(blocks, default=0)
    return subject.tuning.nf4 or largest * DTYPE_BYTES[subject.train.dtype] > CACHE_BYTES


@dataclass(frozen=True)
class DeviceTimes:
    """Measurements of one rank's device, in seconds, bytes and bytes per second."""

    measured: str
    """Date of the measurement."""
    rows: tuple[int, ...]
    """Numbers of sequences per micro-batch that were timed."""
    layers: dict[str, LayerTimes]
    forward_overhead_s: float
    backward_overhead_s: float
    activation_bytes: dict[str, float]
    """Layer kind -> activation bytes per token."""
    deferred_bytes: dict[str, float]
    """Layer kind -> bytes per token kept between the two parts of a split backward."""
    optimizer_s_per_parameter: float
    copy_latency_s: float
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    host_optimizer_s_per_parameter: float | None = None
    slow_s: float = 0.0
    """Duration of the first pass if it was too slow to measure more, else 0."""
    halved: dict[str, LayerTimes] = field(default_factory=dict)
    """Times of a tensor-parallel rank with half of the heads and experts, without all-reduces; empty if not timed."""
    without_experts: dict[str, LayerTimes] = field(default_factory=dict)
    """Times of a tensor-parallel rank without experts."""
    from_cache: bool = False
    """Whether the times come from the cache."""


def subject_content(subject: BenchmarkSpec, mpi_library: str) -> list[Any]:
    """Return everything in the specification and the library versions that affects device times."""
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
    """Hash JSON-serializable content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def device_key(world: World, backend: Backend, subject: BenchmarkSpec, repeats: int) -> str:
    """Return the cache key of device times, built from host, device, local ranks, model shape, dtype, token counts and versions."""
    products = backend.products(subject.train.dtype)
    device = [world.host, backend.name, backend.index, backend.description(), products]
    device += [subject.threads, round(subject.cores, 3), subject.compiled]
    position = [world.local_rank, world.local_size]
    rows = sampled_rows(subject.micro_batches)
    return key_of([_CACHE_VERSION, device, position, rows, repeats, *subject_content(subject, world.library)])


def load_times(key: str, tell: Callable[[str], object]) -> DeviceTimes | None:
    """Load the times cached under ``key``, or return None; ``tell`` is called with a message about each damaged file."""

    def read(_: Path, data: Any) -> DeviceTimes:
        raise_all(key, number_problems(data))
        return decode(DeviceTimes, data, key)

    return load_sealed(_cache_path(key), read, tell)


def load_cached(key: str) -> Any:
    """Load the value that ``store_cached`` stored under ``key``; None if there is no intact one."""
    return load_sealed(_cache_path(key), lambda _, value: value, lambda _: None)


def store_cached(key: str, value: Any) -> None:
    """Cache a JSON-serializable value; a cache that cannot be written is ignored."""
    with contextlib.suppress(OSError):
        store_value(_cache_path(key), value)


def _cache_path(key: str) -> Path:
    return cache_folder("profiles") / f"{key}.json"
