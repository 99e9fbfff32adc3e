"""Reduce-scatters and all-gathers over a group of ranks, by messages that the transport's own polling moves.

Every member owns one part of what is exchanged. Parts are cut into segments, and one segment of every member is a piece.
``transport.ring_of`` says which of two ways pieces take.

Directly: a reduce-scatter sends every segment to its owner, which adds what it gets in the order of the ranks; an all-gather sends
every member's own segment to all others::

    3 members, one piece   segment 0   segment 1   segment 2
    reduce-scatter         1,2 -> 0    0,2 -> 1    0,1 -> 2
    all-gather             0 -> 1,2    1 -> 0,2    2 -> 0,1

Around a ring, where members share hosts with each other: every member sends a segment to the next, and adds what comes to its
own, or keeps it; after n - 1 hops each has its own sum, or all segments::

    3 members a b c        reduce-scatter        all-gather
                           hop 0     hop 1       hop 0     hop 1
    segment 0 (a's)        b -> c    c -> a      a -> b    b -> c
    segment 1 (b's)        c -> a    a -> b      b -> c    c -> a
    segment 2 (c's)        a -> b    b -> c      c -> a    a -> b

Either way each rank sends, and receives, (n - 1) / n of the bytes where parts are alike. A sum is added in the order of the ranks,
or, around a ring, in the order of the ring from the member after its owner on: the same bits every time. Pieces are under way
side by side: one is added up while others travel.
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
"""Large enough that messages cost nothing, small enough to add in the cache while the next piece travels."""
PIECES_AT_ONCE = 4
_TAGS_OF_GROUP = 2 * PIECES_AT_ONCE
"""Pieces take them in turn. Messages of one tag are matched in the order in which members send and receive them, and around a ring
a piece's messages follow one another: so a tag is taken again only when the piece that has it is finished."""
MOST_GROUPS = 32768 // _TAGS_OF_GROUP
"""MPI promises tags up to 32767."""
_ALIGNMENT = 64
"""Bytes: segments begin at multiples of a cache line."""


class GroupExchange:
    """The exchanges of one group, first started first. ``comm`` is theirs alone; ``hosts``: of the group's ranks."""

    def __init__(self, progress: MpiProgress, comm: Any, rank: int, group: Group, hosts: Sequence[str]) -> None:
        assert 0 <= group.number < MOST_GROUPS, f"group numbers go up to {MOST_GROUPS - 1}"
        self.progress, self.comm = progress, comm
        ring = ring_of(group.ranks, hosts)
        order = ring if ring is not None else group.ranks
        self.size, self.position = len(order), order.index(rank)
        self.others = tuple(member for member in order if member != rank)
        self.ahead, self.behind = order[(self.position + 1) % self.size], order[self.position - 1]
        self._places = [group.ranks.index(member) for member in order]
        self._piece: type[_DirectPiece] | type[_RingPiece] = _DirectPiece if ring is None else _RingPiece
        self._first_tag = group.number * _TAGS_OF_GROUP
        self._waiting: deque[_DirectPiece | _RingPiece] = deque()
        self._tag = 0
        """The next piece's, counted from the group's first tag."""
        self._tags_in_use: set[int] = set()
        self._pieces_left: dict[Exchange, int] = {}
        self._scratch: list[Numbers] = []
        self._room = 0

    def start(self, request: Exchange) -> None:
        """Begin an exchange, or queue it behind the group's others."""
        self.progress.begin(request)
        if self.size == 1:
            self.progress.end(request)
            return
        parts = [request.parts[place] for place in self._places]
        width = segment_bytes(self.size) // parts[0].itemsize
        # Empty segments are not sent: both ends know from the parts that nothing comes.
        longest = max(part.size for part in parts)
        pieces = [
            self._piece(self, request, [part[first : first + width] for part in parts])
            for first in range(0, max(1, longest), width)
        ]
        self._pieces_left[request] = len(pieces)
        self._waiting.extend(pieces)
        self._begin_pieces()

    def _begin_pieces(self) -> None:
        while self._waiting and len(self._tags_in_use) < PIECES_AT_ONCE and self._tag not in self._tags_in_use:
            tag, self._tag = self._tag, (self._tag + 1) % _TAGS_OF_GROUP
            self._tags_in_use.add(tag)
            self._waiting.popleft().begin(self._first_tag + tag)

    def finish(self, piece: _DirectPiece | _RingPiece) -> None:
        self._tags_in_use.remove(piece.tag - self._first_tag)
        if piece.scratch is not None:
            self._scratch.append(piece.scratch)
        self._pieces_left[piece.request] -= 1
        if self._pieces_left[piece.request] == 0:
            del self._pieces_left[piece.request]
            self.progress.end(piece.request)
        self._begin_pieces()

    def take_scratch(self, size: int) -> Numbers:
        """Room for ``size`` numbers, reused from earlier pieces. All rooms are as long as the longest, so that it does not
        matter which piece takes which."""
        self._room = max(self._room, size)
        while self._scratch:
            array = self._scratch.pop()
            if array.size >= self._room:
                return array
        return huge_pages.empty(4 * self._room).view(np.float32)


def segment_bytes(members: int) -> int:
    """Bytes of one member's segment of a piece, but for the last pieces."""
    return -(-PIECE_BYTES // (members * _ALIGNMENT)) * _ALIGNMENT


class _DirectPiece:
    """A segment of each member: every one goes to its owner to be added up, or from its owner to all."""

    def __init__(self, exchange: GroupExchange, request: Exchange, segments: list[Part]) -> None:
        self.exchange, self.request = exchange, request
        self._own = segments.pop(exchange.position)
        self._segments = segments
        self.tag = 0
        self.scratch: Numbers | None = None
        self._left = 0
        """Messages."""

    def begin(self, tag: int) -> None:
        self.tag = tag
        exchange, progress = self.exchange, self.exchange.progress
        rooms: Sequence[Part] = self._segments
        sent: Sequence[Part] = [self._own] * len(rooms)
        if self.request.sums:
            self.scratch = exchange.take_scratch(self._own.size * len(rooms))
            sent, rooms = rooms, list(self._rows())
        coming = [(other, room) for other, room in zip(exchange.others, rooms, strict=True) if room.size]
        leaving = [(other, segment) for other, segment in zip(exchange.others, sent, strict=True) if segment.size]
        self._left = len(coming) + len(leaving)
        if not self._left:
            exchange.finish(self)
        for other, room in coming:
            progress.receive(exchange.comm, self.request, room, other, tag, self._one_less)
        for other, segment in leaving:
            progress.send(exchange.comm, self.request, segment, other, tag, self._one_less)

    def _rows(self) -> Numbers:
        """Others' contributions to the own segment, by rank."""
        assert self.scratch is not None
        count = len(self._segments)
        return self.scratch[: self._own.size * count].reshape(count, self._own.size)

    def _one_less(self) -> None:
        self._left -= 1
        if self._left:
            return
        if self.request.sums:
            self._add()
        self.exchange.finish(self)

    def _add(self) -> None:
        """``own = ((r0 + r1) + ...)``; the own contribution has its place in that order."""
        rows, position = self._rows(), self.exchange.position
        if position > 0:
            for row in rows[1:position]:
                np.add(rows[0], row, out=rows[0])
            np.add(rows[0], self._own, out=self._own)
        for row in rows[position:]:
            np.add(self._own, row, out=self._own)


class _RingPiece:
    """A segment of each member, one of which is sent to the next member in every hop.

    In hop t of an all-gather the member at position p sends segment p - t and receives segment p - t - 1 (modulo the members); in a
    reduce-scatter each is the one before, so that the last one to come is its own.
    """

    def __init__(self, exchange: GroupExchange, request: Exchange, segments: list[Part]) -> None:
        self.exchange, self.request, self._segments = exchange, request, segments
        self._first = exchange.position - request.sums
        self._sent = self._come = 0
        self.tag = 0
        self.scratch: Numbers | None = None

    def begin(self, tag: int) -> None:
        """The first hop. All hops use the same tag: they follow one another from each member to the next."""
        self.tag = tag
        if self.request.sums:
            self.scratch = self.exchange.take_scratch(max(segment.size for segment in self._segments))
        self._hop()

    def _segment(self, number: int) -> Part:
        return self._segments[number % self.exchange.size]

    def _hop(self) -> None:
        exchange, arriving = self.exchange, self._segment(self._first - self._come - 1)
        room = arriving if self.scratch is None else self.scratch[: arriving.size]
        if arriving.size:
            exchange.progress.receive(exchange.comm, self.request, room, exchange.behind, self.tag, self._has_come)
        leaving = self._segment(self._first - self._come)
        if leaving.size:
            exchange.progress.send(exchange.comm, self.request, leaving, exchange.ahead, self.tag, self._has_left)
        else:
            self._sent += 1
        if not arriving.size:
            self._has_come()

    def _has_come(self) -> None:
        if self.scratch is not None:
            own = self._segment(self._first - self._come - 1)
            np.add(self.scratch[: own.size], own, out=own)
        self._come += 1
        if self._come < self.exchange.size - 1:
            self._hop()
        else:
            self._finish_if_done()

    def _has_left(self) -> None:
        self._sent += 1
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._sent == self._come == self.exchange.size - 1:
            self.exchange.finish(self)
