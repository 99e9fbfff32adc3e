"""Reduce-scatter and all-gather over a group of ranks, with point-to-point messages that the transport polls.

Every member owns one part of the exchanged data. Parts are split into segments; a piece has one segment of each member.
``transport.ring_of`` selects the direct or the ring algorithm.

Direct: a reduce-scatter sends every segment to its owner, which adds the contributions in rank order; an all-gather sends each
member's own segment to all others::

    3 members, one piece   segment 0   segment 1   segment 2
    reduce-scatter         1,2 -> 0    0,2 -> 1    0,1 -> 2
    all-gather             0 -> 1,2    1 -> 0,2    2 -> 0,1

Ring, where members share hosts: every member sends a segment to the next and adds the received segment to its own, or keeps it.
After n - 1 hops each member has its own sum, or all segments::

    3 members a b c        reduce-scatter        all-gather
                           hop 0     hop 1       hop 0     hop 1
    segment 0 (a's)        b -> c    c -> a      a -> b    b -> c
    segment 1 (b's)        c -> a    a -> b      b -> c    c -> a
    segment 2 (c's)        a -> b    b -> c      c -> a    a -> b

With equal parts each rank sends and receives (n - 1) / n of the bytes. Sums are added in rank order or, in a ring, in ring order
starting after the owner, so results are bitwise reproducible. Pieces overlap: one is added while others travel.
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
"""Large enough to make per-message cost negligible, small enough to add in cache while the next piece travels."""
MAX_PIECES_IN_FLIGHT = 4
_TAGS_PER_GROUP = 2 * MAX_PIECES_IN_FLIGHT
"""Pieces use these tags cyclically. MPI matches messages of one tag in the order of sends and receives, and the messages of a ring
piece follow one another: a tag is therefore reused only after its piece has finished."""
MAX_GROUPS = 32768 // _TAGS_PER_GROUP
"""MPI guarantees tags up to 32767."""
_ALIGNMENT_BYTES = 64
"""Segments begin at multiples of a cache line."""


class GroupExchange:
    """The exchanges of one group, in the order of their starts. ``comm`` is reserved for them; ``hosts`` are those of the group's
    ranks."""

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
        """Tag of the next piece, relative to the group's first tag."""
        self._tags_in_use: set[int] = set()
        self._pieces_left: dict[Exchange, int] = {}
        self._scratch: list[Numbers] = []
        self._scratch_size = 0

    def start(self, request: Exchange) -> None:
        """Begin an exchange, or queue it behind the group's earlier exchanges."""
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
        """Return scratch space for ``size`` numbers, reused from earlier pieces. All arrays have the largest requested size, so
        that any piece can use any of them."""
        self._scratch_size = max(self._scratch_size, size)
        while self._scratch:
            array = self._scratch.pop()
            if array.size >= self._scratch_size:
                return array
        return huge_pages.empty(4 * self._scratch_size).view(np.float32)


def segment_bytes(members: int) -> int:
    """Bytes of one member's segment in a full piece."""
    return -(-PIECE_BYTES // (members * _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES


class _DirectPiece:
    """One segment of each member, sent to its owner to be summed, or from its owner to all."""

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
        """The peers' contributions to this rank's segment, by rank."""
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
    """One segment of each member; every hop sends one of them to the next member.

    In hop t of an all-gather the member at position p sends segment p - t and receives segment p - t - 1 (modulo the group size).
    A reduce-scatter uses the preceding segments, so that the last received one is the member's own.
    """

    def __init__(self, exchange: GroupExchange, request: Exchange, segments: list[Part]) -> None:
        self.exchange, self.request, self._segments = exchange, request, segments
        self._first_segment = exchange.position - request.sums
        self._sent_hops = self._received_hops = 0
        self.tag = 0
        self.scratch: Numbers | None = None

    def start(self, tag: int) -> None:
        """Start the first hop. All hops share a tag because they follow one another between each pair of neighbours."""
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
