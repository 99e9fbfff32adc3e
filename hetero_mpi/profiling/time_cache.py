"""What devices were measured to do, kept on the host they are in, so that a rank that joins makes nobody measure again; and that
they passed their self-test (``runtime/setup/device_test.py``).

One JSON file per key in ``$XDG_CACHE_HOME/hetero_mpi/profiles`` (``~/.cache`` without the variable); may be deleted at any
time. Memory and links are never kept: they depend on who else uses the machine, and a link has no name by which to find it
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.disk import cache_folder, write_whole
from hetero_mpi.errors import UserError
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.profile_rules import number_problems
from hetero_mpi.profiling.benchmark_spec import Subject, sampled_rows
from hetero_mpi.profiling.device import DeviceTimes

_LAYOUT = 6
"""Changes with what ``DeviceTimes`` holds or how it is measured."""


def subject_content(subject: Subject, mpi_library: str) -> list[Any]:
    """What of a subject, and of the programs that run it, decides what a device takes for it."""
    return [
        {name: list(spec.shape) for name, spec in subject.chain.parameters.items()},
        list(subject.chain.kinds),
        [sorted(subject.tuning.trainable), subject.tuning.nf4, subject.tuning.double],
        [subject.train.dtype, subject.train.optimizer],
        [subject.sequence_length, subject.groups],
        list(subject.chain.boundary(0, 1, subject.sequence_length)),
        own_versions(mpi_library),
    ]


def key_of(content: Sequence[Any]) -> str:
    """A short name for content that JSON can express."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def device_key(world: World, backend: Backend, subject: Subject, repeats: int) -> str:
    """Equal keys mean: the same device of the same host, beside as many other ranks, measured for the same model shape, dtype,
    token counts and versions."""
    products = backend.products(subject.train.dtype)
    device = [world.host, backend.name, backend.index, backend.description(), products]
    device += [subject.threads, round(subject.cores, 3)]
    place = [world.local_rank, world.local_size]
    rows = sampled_rows(subject.micro_batches)
    return key_of([_LAYOUT, device, place, rows, repeats, *subject_content(subject, world.library)])


def load_times(key: str) -> DeviceTimes | None:
    """What is kept under ``key``; None when nothing is, or when it cannot be read."""
    data = load(key)
    try:
        return decode(DeviceTimes, data, key) if data is not None and not number_problems(data) else None
    except UserError:
        return None


def load(key: str) -> Any:
    try:
        return json.loads((cache_folder("profiles") / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def save_times(key: str, times: DeviceTimes) -> None:
    save(key, encode(times, infinity_as_text=True))


def save(key: str, value: Any) -> None:
    """Keep a value that JSON can express. A cache that cannot be written is no reason to end a run."""
    with contextlib.suppress(OSError):
        write_whole(cache_folder("profiles") / f"{key}.json", json.dumps(value), make_folder=True)
