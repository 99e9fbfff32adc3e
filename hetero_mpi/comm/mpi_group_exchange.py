"""Reduce-scatter and all-gather over a group of ranks, built from point-to-point messages that the transport polls.

Every member owns one part of the exchanged data. Parts are split into segments, and a piece consists of one segment per member.
``transport.ring_of`` selects the direct or the ring algorithm.

In the direct algorithm, a reduce-scatter sends every segment to its owner, which adds the contributions in rank order, and an
all-gather sends each member's own segment to all other members::

    3 members, one piece   segment 0   segment 1   segment 2
    reduce-scatter         1,2 -> 0    0,2 -> 1    0,1 -> 2
    all-gather             0 -> 1,2    1 -> 0,2    2 -> 0,1

In the ring algorithm, used where members share hosts, every member sends a segment to the next member and adds the one it receives
to its own (reduce-scatter) or keeps it (all-gather). After n - 1 hops each member has its own sum, or all segments::

    3 members a b c        reduce-scatter        all-gather
                           hop 0     hop 1       hop 0     hop 1
    segment 0 (a's)        b -> c    c -> a      a -> b    b -> c
    segment 1 (b's)        c -> a    a -> b      b -> c    c -> a
    segment 2 (c's)        a -> b    b -> c      c -> a    a -> b

With equal parts, each rank sends and receives (n - 1) / n of the bytes. Sums are taken in rank order or, in a ring, in ring order
starting after the owner, so results are bitwise reproducible. Pieces overlap: one is summed while others are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetero_mpi.comm import huge_pages
from hetero_mpi.comm.mpi_progress import MpiProgress
from hetero_mpi.comm.transport import Exchange, Group, Numbers, Part, ring_of

PIECE_BYTES = 1 << 22
"""Large enough to make the cost per message negligible, small enough to be summed in cache while the next piece is in flight."""
MAX_PIECES_IN_FLIGHT = 4
_TAGS_PER_GROUP = 2 * MAX_PIECES_IN_FLIGHT
"""Number of tags that the pieces of a group use cyclically. MPI matches messages with the same tag in the order of sends and
receives, and a ring piece sends several messages one after another, so a tag is reused only after its piece has finished."""
MAX_GROUPS = 32768 // _TAGS_PER_GROUP
"""Maximum number of groups: MPI guarantees tags up to 32767."""
_ALIGNMENT_BYTES = 64
"""Size of a cache line, at whose multiples segments begin."""


class GroupExchange:
    """Executes the exchanges of one group in order, on a dedicated ``comm``. ``hosts`` has the host of each rank in the group."""

    def __init__(self, progress: MpiProgress, comm: Any, rank: int, group: Group, hosts: Sequence[str]) -> None:
        assert 0 <= group.number < MAX_GROUPS, f"group numbers go up to {MAX_GROUPS - 1}"
        self.progress, self.comm = progress, comm
        ring = ring_of(group.ranks, hosts)
        order = ring if ring is not None else group.ranks
        self.size, self.position = len(order), order.index(rank)
        self.peers = tuple(member for member in order if member != rank)
        self.next_rank, self.previous_rank = order[(self.position + 1) % self.size], order[self.position - 1]
        self._part_indices = [group.ranks.index(member) for member in order]
        self._piece_class: type[_DirectPiece] | type[_RingPiece] = _DirectPiece if ring is None else _RingPiece
        self._first_tag = group.number * _TAGS_PER_GROUP
        self._queue: deque[_DirectPiece | _RingPiece] = deque()
        self._next_tag = 0
        """Tag of the next piece, counted from the group's first tag."""
        self._tags_in_use: set[int] = set()
        self._pieces_left: dict[Exchange, int] = {}
        self._scratch: list[Numbers] = []
        self._scratch_size = 0

    def start(self, request: Exchange) -> None:
        """Start an exchange, or queue it behind the group's earlier exchanges."""
        self.progress.register(request)
        if self.size == 1:
            self.progress.complete_request(request)
            return
        parts = [request.parts[index] for index in self._part_indices]
        width = segment_bytes(self.size) // parts[0].itemsize
        # Empty segments are not sent: both ends know their sizes from the parts.
        longest = max(part.size for part in parts)
        pieces = [
            self._piece_class(self, request, [part[first : first + width] for part in parts])
            for first in range(0, max(1, longest), width)
        ]
        self._pieces_left[request] = len(pieces)
        self._queue.extend(pieces)
        self._start_pieces()

    def _start_pieces(self) -> None:
        while self._queue and len(self._tags_in_use) < MAX_PIECES_IN_FLIGHT and self._next_tag not in self._tags_in_use:
            tag, self._next_tag = self._next_tag, (self._next_tag + 1) % _TAGS_PER_GROUP
            self._tags_in_use.add(tag)
            self._queue.popleft().start(self._first_tag + tag)

    def finish(self, piece: _DirectPiece | _RingPiece) -> None:
        self._tags_in_use.remove(piece.tag - self._first_tag)
        if piece.scratch is not None:
            self._scratch.append(piece.scratch)
        self._pieces_left[piece.request] -= 1
        if self._pieces_left[piece.request] == 0:
            del self._pieces_left[piece.request]
            self.progress.complete_request(piece.request)
        self._start_pieces()

    def take_scratch(self, size: int) -> Numbers:
        """Return scratch space for ``size`` numbers. Arrays have the largest size requested, so any piece can reuse them."""
        self._scratch_size = max(self._scratch_size, size)
        while self._scratch:
            array = self._scratch.pop()
            if array.size >= self._scratch_size:
                return array
        return huge_pages.empty(4 * self._scratch_size).view(np.float32)


def segment_bytes(members: int) -> int:
    """Return the size of each member's segment in a full piece, in bytes."""
    return -(-PIECE_BYTES // (members * _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES


class _DirectPiece:
    """A piece in the direct algorithm. Each segment is sent to its owner to be summed, or from its owner to all other members."""

    def __init__(self, exchange: GroupExchange, request: Exchange, segments: list[Part]) -> None:
        self.exchange, self.request = exchange, request
        self._own = segments.pop(exchange.position)
        self._segments = segments
        self.tag = 0
        self.scratch: Numbers | None = None
        self._messages_left = 0

    def start(self, tag: int) -> None:
        self.tag = tag
        exchange, progress = self.exchange, self.exchange.progress
        buffers: Sequence[Part] = self._segments
        send_segments: Sequence[Part] = [self._own] * len(buffers)
        if self.request.sums:
            self.scratch = exchange.take_scratch(self._own.size * len(buffers))
            send_segments, buffers = buffers, list(self._rows())
        receives = [(peer, buffer) for peer, buffer in zip(exchange.peers, buffers, strict=True) if buffer.size]
        sends = [(peer, segment) for peer, segment in zip(exchange.peers, send_segments, strict=True) if segment.size]
        self._messages_left = len(receives) + len(sends)
        if not self._messages_left:
            exchange.finish(self)
        for peer, buffer in receives:
            progress.receive(exchange.comm, self.request, buffer, peer, tag, self._count_message)
        for peer, segment in sends:
            progress.send(exchange.comm, self.request, segment, peer, tag, self._count_message)

    def _rows(self) -> Numbers:
        """Return the other members' contributions to this rank's segment, one row per member in rank order."""
        assert self.scratch is not None
        count = len(self._segments)
        return self.scratch[: self._own.size * count].reshape(count, self._own.size)

    def _count_message(self) -> None:
        self._messages_left -= 1
        if self._messages_left:
            return
        if self.request.sums:
            # ((r0 + r1) + ...) in rank order, this rank's contribution included.
            rows, position = self._rows(), self.exchange.position
            if position > 0:
                for row in rows[1:position]:
                    np.add(rows[0], row, out=rows[0])
                np.add(rows[0], self._own, out=self._own)
            for row in rows[position:]:
                np.add(self._own, row, out=self._own)
        self.exchange.finish(self)


class _RingPiece:
    """A piece in the ring algorithm. In every hop, each member sends one of the piece's segments to the next member.

    In hop t of an all-gather the member at position p sends segment p - t and receives segment p - t - 1 (modulo the group size).
    In a reduce-scatter these numbers are lower by one, so that the last segment received is the member's own.
    """

    def __init__(self, exchange: GroupExchange, request: Exchange, segments: list[Part]) -> None:
        self.exchange, self.request, self._segments = exchange, request, segments
        self._first_segment = exchange.position - request.sums
        self._sent_hops = self._received_hops = 0
        self.tag = 0
        self.scratch: Numbers | None = None

    def start(self, tag: int) -> None:
        """Start the first hop. All hops can use the same tag because each pair of neighbours makes them one after another."""
        self.tag = tag
        if self.request.sums:
            self.scratch = self.exchange.take_scratch(max(segment.size for segment in self._segments))
        self._hop()

    def _segment(self, number: int) -> Part:
        return self._segments[number % self.exchange.size]

    def _hop(self) -> None:
        exchange, incoming = self.exchange, self._segment(self._first_segment - self._received_hops - 1)
        buffer = incoming if self.scratch is None else self.scratch[: incoming.size]
        if incoming.size:
            exchange.progress.receive(
                exchange.comm, self.request, buffer, exchange.previous_rank, self.tag, self._on_received
            )
        outgoing = self._segment(self._first_segment - self._received_hops)
        if outgoing.size:
            exchange.progress.send(exchange.comm, self.request, outgoing, exchange.next_rank, self.tag, self._on_sent)
        else:
            self._sent_hops += 1
        if not incoming.size:
            self._on_received()

    def _on_received(self) -> None:
        if self.scratch is not None:
            segment = self._segment(self._first_segment - self._received_hops - 1)
            np.add(self.scratch[: segment.size], segment, out=segment)
        self._received_hops += 1
        if self._received_hops < self.exchange.size - 1:
            self._hop()
        else:
            self._finish_if_done()

    def _on_sent(self) -> None:
        self._sent_hops += 1
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._sent_hops == self._received_hops == self.exchange.size - 1:
            self.exchange.finish(self)
