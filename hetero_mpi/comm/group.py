"""Collective calls of a group of ranks, in JSON and raw arrays. Nothing is pickled: no lower-case method of mpi4py is used."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 1 << 30
"""Largest array piece of one collective call: MPI counts are 32 bit in most libraries."""
LONGEST_PAUSE_S = 0.05
"""How long a rank that waits asleep sleeps between two looks at most."""


@dataclass
class Group:
    """Ranks that call together, in the same order, from their main threads, while no transport has requests in flight."""

    comm: Any
    """A duplicate of ``MPI.COMM_WORLD`` for the collectives below."""
    rank: int
    size: int

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.comm.Barrier()

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """``root``'s value on every rank, as JSON gives it back (tuples become lists, keys become strings)."""
        payload = encode(value) if self.rank == root else np.empty(0, np.uint8)
        length = np.array([payload.size], np.int64)
        self.comm.Bcast(length, root=root)
        if self.rank != root:
            payload = np.empty(int(length[0]), np.uint8)
        self._broadcast_bytes(payload, root)
        return decode(payload)

    def gather_json(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's value in rank order on ``root``, ``None`` elsewhere."""
        payload = encode(value)
        lengths = np.zeros(self.size, np.int64)
        self.comm.Allgather(np.array([payload.size], np.int64), lengths)
        everything = np.empty(int(lengths.sum()), np.uint8)
        assert everything.size < PIECE_BYTES, "gathered JSON is meant for small values"
        receive = [everything, lengths] if self.rank == root else None
        self.comm.Gatherv(payload, receive, root=root)
        return split(everything, lengths) if self.rank == root else None

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on every rank."""
        payload = encode(value)
        lengths = np.zeros(self.size, np.int64)
        self.comm.Allgather(np.array([payload.size], np.int64), lengths)
        everything = np.empty(int(lengths.sum()), np.uint8)
        assert everything.size < PIECE_BYTES, "gathered JSON is meant for small values"
        self.comm.Allgatherv(payload, [everything, lengths])
        return split(everything, lengths)

    def broadcast_array(self, array: NDArray[Any] | None, root: int = 0) -> NDArray[Any]:
        """``root``'s array (any shape, plain numeric dtype) on every rank; other ranks pass ``None``."""
        if self.rank == root:
            assert array is not None and array.dtype.kind in "biufc", "root must give an array of plain numbers"
            array = np.ascontiguousarray(array).reshape(array.shape)
        header = self.broadcast_json([array.dtype.str, array.shape] if array is not None else None, root)
        if self.rank != root or array is None:
            array = np.empty(tuple(header[1]), np.dtype(header[0]))
        self._broadcast_bytes(array.reshape(-1).view(np.uint8), root)
        return array

    def all_reduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """The element-wise sum over the ranks, with the same bits on every rank. Equal shape and dtype everywhere.

        Summed on rank 0 and broadcast: MPI does not promise that ``Allreduce`` gives all ranks the same bits, and
        decisions are taken from such sums.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        total = np.empty_like(flat)
        step = max(1, PIECE_BYTES // max(1, flat.itemsize))
        for first in range(0, flat.size, step):
            self.comm.Reduce(flat[first : first + step], total[first : first + step], root=0)
        self._broadcast_bytes(total.view(np.uint8), 0)
        return total.reshape(array.shape)

    def _broadcast_bytes(self, flat: NDArray[np.uint8], root: int) -> None:
        for first in range(0, flat.size, PIECE_BYTES):
            self.comm.Bcast(flat[first : first + PIECE_BYTES], root=root)

    def broadcast_asleep(self, value: Any) -> Any:
        """``broadcast_json`` from rank 0 for which nobody's waiting takes a core: MPI's own waiting spins."""
        payload = encode(value) if self.rank == 0 else np.empty(0, np.uint8)
        length = np.array([payload.size], np.int64)
        request = self.comm.Ibcast(length, root=0)
        pause_s = 1e-4
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self.rank != 0:
            payload = np.empty(int(length[0]), np.uint8)
        self._broadcast_bytes(payload, 0)
        return decode(payload)

    def meet_asleep(self) -> None:
        """``barrier`` for which nobody's waiting takes a core: MPI's own waiting spins."""
        request = self.comm.Ibarrier()
        pause_s = 5e-5
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-4)


def encode(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def decode(payload: NDArray[np.uint8]) -> Any:
    return json.loads(payload.tobytes())


def split(everything: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[Any]:
    ends = np.cumsum(lengths)
    return [decode(everything[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
