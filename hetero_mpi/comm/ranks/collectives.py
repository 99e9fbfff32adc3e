"""Collective calls that exchange JSON and raw arrays. Nothing is pickled: mpi4py's lower-case methods are never used.

MPI's blocking calls spin until the last rank arrives, on a core that another rank may need. Every call here therefore uses MPI's
non-blocking variant and polls with back-off.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.ulfm import MAX_SLEEP_S, YIELD_PERIOD_S, Pause, finish, translate_losses

PIECE_BYTES = 1 << 30
"""Maximum number of bytes per MPI call. Larger arrays are split, because counts have 32 bits in most MPI libraries."""
MAX_IDLE_SLEEP_S = 0.05
"""Maximum sleep between polls for a rank that expects to wait for a long time."""


@dataclass
class Collectives:
    """Collective calls. All ranks make them in the same order, on their main threads, with no transport requests in flight.

    A call raises ``RankLost`` if a rank is lost and the job continues without it (``comm.ranks.ulfm``).
    """

    comm: Any
    """A duplicate of ``MPI.COMM_WORLD``, reserved for these calls."""
    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        _finish(self.comm.Ibarrier)

    def broadcast_json(self, value: Any, root: int = 0, longest_s: float = MAX_SLEEP_S) -> Any:
        """Return ``root``'s value on every rank, after a JSON round trip (tuples become lists, keys become strings).

        Pass ``longest_s=MAX_IDLE_SLEEP_S`` if ``root`` works for a long time before the call, so that others poll less often.
        """
        payload = encode(value) if self.rank == root else np.empty(0, np.uint8)
        length = np.array([payload.size], np.int64)
        _finish(self.comm.Ibcast, length, root=root, longest_s=longest_s)
        if self.rank != root:
            payload = np.empty(int(length[0]), np.uint8)
        self.broadcast_bytes(payload, root)
        return decode(payload)

    def gather_json(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on the other ranks."""
        payload = encode(value)
        lengths, gathered = self._gather_buffer(payload)
        receive = [gathered, lengths] if self.rank == 0 else None
        _finish(self.comm.Igatherv, payload, receive, root=0)
        return split(gathered, lengths) if self.rank == 0 else None

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        payload = encode(value)
        lengths, gathered = self._gather_buffer(payload)
        _finish(self.comm.Iallgatherv, payload, [gathered, lengths])
        return split(gathered, lengths)

    def all_gather_bytes(self, local: NDArray[np.uint8], gathered: NDArray[np.uint8]) -> None:
        """Fill ``gathered`` [rank, byte] with the ``local`` bytes of all ranks, which have equal lengths."""
        _finish(self.comm.Iallgather, local, gathered)

    def all_to_all_bytes(self, outgoing: NDArray[np.uint8], received: NDArray[np.uint8]) -> None:
        """Send row r of ``outgoing`` [rank, byte] to each rank r, and receive the row from rank r in row r of ``received``."""
        _finish(self.comm.Ialltoall, outgoing, received)

    def broadcast_bytes(self, flat: NDArray[np.uint8], root: int = 0) -> None:
        """Broadcast the bytes of ``root`` to every rank, in place."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Ibcast, piece, root=root)

    def send_bytes(self, flat: NDArray[np.uint8], destination: int) -> None:
        """Send bytes to a rank that calls ``receive_bytes`` with the same length. Only these two ranks take part."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Isend, piece, destination)

    def receive_bytes(self, flat: NDArray[np.uint8], source: int) -> None:
        """Receive bytes from a rank that calls ``send_bytes``."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Irecv, piece, source)

    def _gather_buffer(self, payload: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the payload lengths of all ranks and an empty buffer for the concatenated payloads."""
        lengths = np.zeros(self.size, np.int64)
        _finish(self.comm.Iallgather, np.array([payload.size], np.int64), lengths)
        gather_buffer = np.empty(int(lengths.sum()), np.uint8)
        assert gather_buffer.size < PIECE_BYTES, "gathered JSON is meant for small values"
        return lengths, gather_buffer

    def broadcast_arrays(self, arrays: Sequence[NDArray[Any]] | None, root: int = 0) -> list[NDArray[Any]]:
        """Broadcast the arrays of ``root`` (any shape, plain numeric dtype) in one message. Other ranks pass None."""
        local_arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in arrays or ()]
        assert all(array.dtype.kind in "biufc" for array in local_arrays), "root must pass arrays of plain numbers"
        header = self.broadcast_json(
            [[array.dtype.str, array.shape] for array in local_arrays] if arrays is not None else None, root
        )
        if arrays is None:
            local_arrays = [np.empty(tuple(shape), np.dtype(dtype)) for dtype, shape in header]
        pieces = [array.reshape(-1).view(np.uint8) for array in local_arrays]
        if len(pieces) == 1:
            self.broadcast_bytes(pieces[0], root)
            return local_arrays
        joined = np.concatenate(pieces) if arrays is not None else np.empty(sum(map(len, pieces)), np.uint8)
        self.broadcast_bytes(joined, root)
        if arrays is None:
            for piece, content in zip(
                pieces, np.split(joined, np.cumsum([len(piece) for piece in pieces])[:-1]), strict=True
            ):
                piece[:] = content
        return local_arrays

    def all_reduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the elementwise sum over all ranks, bitwise equal on every rank. All ranks pass the same shape and dtype.

        The sum is reduced on rank 0 and broadcast, because decisions depend on it and MPI does not guarantee bitwise equal results
        of ``Allreduce``.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        total = np.empty_like(flat)
        step = max(1, PIECE_BYTES // max(1, flat.itemsize))
        for first in range(0, flat.size, step):
            _finish(self.comm.Ireduce, flat[first : first + step], total[first : first + step], root=0)
        self.broadcast_bytes(total.view(np.uint8))
        return total.reshape(array.shape)

    def sleeping_barrier(self) -> None:
        """Wait for all ranks, sleeping between all polls. For use while other ranks compute on the same cores."""
        _finish(self.comm.Ibarrier, yield_s=0.0)


def _finish(
    call: Callable[..., Any],
    *arguments: Any,
    longest_s: float = MAX_SLEEP_S,
    yield_s: float = YIELD_PERIOD_S,
    **options: Any,
) -> None:
    """Start a non-blocking MPI call and poll until it completes."""
    with translate_losses():
        finish(call(*arguments, **options), Pause(longest_s, yield_s))


def _pieces_of(flat: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return (flat[first : first + PIECE_BYTES] for first in range(0, flat.size, PIECE_BYTES))


def encode(value: Any) -> NDArray[np.uint8]:
    """Encode a value as JSON bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def decode(payload: NDArray[np.uint8]) -> Any:
    """Decode a value from JSON bytes."""
    return json.loads(payload.tobytes())


def split(gathered: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[Any]:
    """Decode concatenated JSON values, given the length of each in bytes."""
    ends = np.cumsum(lengths)
    return [decode(gathered[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
