"""Collective calls in JSON and raw arrays. Nothing is pickled: no lower-case method of mpi4py is used.

MPI's blocking calls spin until the last rank arrives, on a core that this rank may need. Every call here therefore starts MPI's
non-blocking form and polls with back-off.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.ulfm import MAX_SLEEP_S, YIELD_PERIOD_S, Pause, finish, translate_losses

PIECE_BYTES = 1 << 30
"""Largest array piece of one collective call: MPI counts are 32 bit in most libraries."""
MAX_IDLE_SLEEP_S = 0.05
"""Longest sleep between polls of a rank that expects a long wait."""


@dataclass
class Collectives:
    """Collective calls of a group of ranks, made in the same order, from their main threads, with no transport request in flight.

    Every call raises ``RankLost`` if a rank is lost and the job continues without it (``comm.ranks.ulfm``).
    """

    comm: Any
    """A duplicate of ``MPI.COMM_WORLD``, reserved for these calls."""
    rank: int
    size: int

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        _finish(self.comm.Ibarrier)

    def broadcast_json(self, value: Any, root: int = 0, longest_s: float = MAX_SLEEP_S) -> Any:
        """Return ``root``'s value on every rank, after a JSON round trip (tuples become lists, keys become strings).

        ``longest_s``: ``MAX_IDLE_SLEEP_S`` where ``root`` works for long before the call, so that the others poll less often.
        """
        payload = encode(value) if self.rank == root else np.empty(0, np.uint8)
        length = np.array([payload.size], np.int64)
        _finish(self.comm.Ibcast, length, root=root, longest_s=longest_s)
        if self.rank != root:
            payload = np.empty(int(length[0]), np.uint8)
        self.broadcast_bytes(payload, root)
        return decode(payload)

    def gather_json(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, ``None`` elsewhere."""
        payload = encode(value)
        lengths, gathered = self._gather_buffer(payload)
        receive = [gathered, lengths] if self.rank == 0 else None
        _finish(self.comm.Igatherv, payload, receive, root=0)
        return split(gathered, lengths) if self.rank == 0 else None

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order, on every rank."""
        payload = encode(value)
        lengths, gathered = self._gather_buffer(payload)
        _finish(self.comm.Iallgatherv, payload, [gathered, lengths])
        return split(gathered, lengths)

    def all_gather_bytes(self, local: NDArray[np.uint8], gathered: NDArray[np.uint8]) -> None:
        """Fill ``gathered`` [rank, byte] with every rank's ``local`` bytes, of equal length on all ranks."""
        _finish(self.comm.Iallgather, local, gathered)

    def all_to_all_bytes(self, outgoing: NDArray[np.uint8], received: NDArray[np.uint8]) -> None:
        """Send each rank its row of ``outgoing`` [rank, byte], and receive every rank's row for this one in ``received``."""
        _finish(self.comm.Ialltoall, outgoing, received)

    def broadcast_bytes(self, flat: NDArray[np.uint8], root: int = 0) -> None:
        """Broadcast ``root``'s bytes to every rank, in place."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Ibcast, piece, root=root)

    def send_bytes(self, flat: NDArray[np.uint8], destination: int) -> None:
        """Send to a rank that calls ``receive_bytes`` with equal length. Only these two ranks call."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Isend, piece, destination)

    def receive_bytes(self, flat: NDArray[np.uint8], source: int) -> None:
        """Receive from a rank that calls ``send_bytes``."""
        for piece in _pieces_of(flat):
            _finish(self.comm.Irecv, piece, source)

    def _gather_buffer(self, payload: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the lengths of all ranks' payloads and a buffer for their concatenation."""
        lengths = np.zeros(self.size, np.int64)
        _finish(self.comm.Iallgather, np.array([payload.size], np.int64), lengths)
        gather_buffer = np.empty(int(lengths.sum()), np.uint8)
        assert gather_buffer.size < PIECE_BYTES, "gathered JSON is meant for small values"
        return lengths, gather_buffer

    def broadcast_arrays(self, arrays: Sequence[NDArray[Any]] | None, root: int = 0) -> list[NDArray[Any]]:
        """Broadcast ``root``'s arrays (any shape, plain numeric dtype) in one message; other ranks pass ``None``."""
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
        """Return the element-wise sum over the ranks, bitwise equal on every rank. All ranks pass equal shape and dtype.

        Rank 0 sums and broadcasts: MPI does not guarantee bitwise equal results of ``Allreduce``, and decisions depend on the
        sums.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        total = np.empty_like(flat)
        step = max(1, PIECE_BYTES // max(1, flat.itemsize))
        for first in range(0, flat.size, step):
            _finish(self.comm.Ireduce, flat[first : first + step], total[first : first + step], root=0)
        self.broadcast_bytes(total.view(np.uint8))
        return total.reshape(array.shape)

    def sleeping_barrier(self) -> None:
        """A barrier before the ranks compute on shared cores: a waiting rank sleeps between all its polls."""
        _finish(self.comm.Ibarrier, yield_s=0.0)


def _finish(
    call: Callable[..., Any],
    *arguments: Any,
    longest_s: float = MAX_SLEEP_S,
    yield_s: float = YIELD_PERIOD_S,
    **options: Any,
) -> None:
    """Start a non-blocking MPI call and poll until it is complete."""
    with translate_losses():
        finish(call(*arguments, **options), Pause(longest_s, yield_s))


def _pieces_of(flat: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return (flat[first : first + PIECE_BYTES] for first in range(0, flat.size, PIECE_BYTES))


def encode(value: Any) -> NDArray[np.uint8]:
    """Encode a value as the bytes of its JSON text."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def decode(payload: NDArray[np.uint8]) -> Any:
    """Decode the value of a JSON text's bytes."""
    return json.loads(payload.tobytes())


def split(gathered: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[Any]:
    """Decode the values whose JSON texts of these byte lengths are concatenated in ``gathered``."""
    ends = np.cumsum(lengths)
    return [decode(gathered[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
