"""The NICs of emulated hosts: until when messages and exchanges take them, known to all ranks of one real host."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Group

_EXCHANGES_KEPT = 4096
"""Far more than can be under way at once: a rank has at most one for every layer of the model."""


class Nics:
    """Until when each emulated host's NIC is taken, in seconds of this machine's clock, per direction.

    The table is a file in memory that the ranks of one real host share; a file lock makes booking one act. Behind the NICs lie
    the ends of the latest ``_EXCHANGES_KEPT`` exchanges: group, beginning, end.
    """

    def __init__(self, file_descriptor: int, hosts: Sequence[str]) -> None:
        self._file = file_descriptor
        names = sorted(set(hosts))
        self._row = [names.index(host) for host in hosts]
        self._memory = mmap.mmap(file_descriptor, _table_bytes(hosts))
        numbers = np.frombuffer(self._memory, np.float64)
        self._taken_until_s = numbers[: 2 * len(names)].reshape(len(names), 2)
        self._exchanges_reserved = numbers[2 * len(names) : 2 * len(names) + 1]
        self._exchanges = numbers[2 * len(names) + 1 :].reshape(_EXCHANGES_KEPT, 3)

    @classmethod
    def create(cls, path: str, hosts: Sequence[str]) -> Nics:
        """The table in a file, made with all NICs free unless it is there. ``hosts``: the emulated host of each rank."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(descriptor).st_size < _table_bytes(hosts):
            os.ftruncate(descriptor, _table_bytes(hosts))
        return cls(descriptor, hosts)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def reserve(self, source: int, destination: int, earliest_s: float, duration_s: float) -> float:
        """Take both NICs for a message that may start at ``earliest_s``; returns when it ends."""
        out, into = self._row[source], self._row[destination]
        if out == into:
            return earliest_s + duration_s
        with self._locked():
            taken = self._taken_until_s
            end_s = max(earliest_s, float(taken[out, 0]), float(taken[into, 1])) + duration_s
            taken[out, 0] = taken[into, 1] = end_s
        return end_s

    def reserve_exchange(self, group: Group, begun_s: float, earliest_s: float, duration_s: float) -> float:
        """Take the NICs of all the group's hosts for an exchange that may start at ``earliest_s``; returns when it ends.

        Every member on this real host calls it; the first one reserves. ``begun_s`` tells the group's exchanges apart: it is the
        same on all members to the last bit.
        """
        rows = sorted({self._row[rank] for rank in group.ranks})
        if len(rows) == 1:
            return earliest_s + duration_s
        with self._locked():
            same = (self._exchanges[:, 0] == group.number) & (self._exchanges[:, 1] == begun_s)
            if same.any():
                return float(self._exchanges[same.argmax(), 2])
            end_s = max(earliest_s, float(self._taken_until_s[rows].max())) + duration_s
            self._taken_until_s[rows] = end_s
            self._exchanges[int(self._exchanges_reserved[0]) % _EXCHANGES_KEPT] = group.number, begun_s, end_s
            self._exchanges_reserved[0] += 1
        return end_s


def _table_bytes(hosts: Sequence[str]) -> int:
    return 8 * (2 * len(set(hosts)) + 1 + 3 * _EXCHANGES_KEPT)


def shared_nics(world: World, hosts: Sequence[str]) -> Nics:
    """The table of this real host's ranks. Collective. ``hosts``: the emulated host of each rank of the whole job."""
    path = None
    if world.local_rank == 0:
        descriptor, path = tempfile.mkstemp(prefix="hetero_mpi-nics-")
        os.close(descriptor)
    paths = {host: made for host, made in world.all_gather_json([world.host, path]) if made is not None}
    nics = Nics.create(paths[world.host], hosts)
    world.barrier()
    if path is not None:
        os.unlink(path)  # the ranks have it open; a crash leaves nothing behind
    return nics
