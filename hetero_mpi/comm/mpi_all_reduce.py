"""All-reduces over a group of ranks, by messages that the transport's own polling moves.

The numbers are cut into pieces, each piece into one segment per member. ``all_reduce_paths`` says which of two ways they take.

Directly: every member sends each segment to its owner, the owner adds what it gets in the order of the ranks, and sends the
result back to all::

    3 members, one piece   segment 0   segment 1   segment 2
    contributions          1,2 -> 0    0,2 -> 1    0,1 -> 2
    results                0 -> 1,2    1 -> 0,2    2 -> 0,1

Around a ring, where members share hosts with each other: every member sends a segment to the next and adds what comes to
its own; after n - 1 hops each holds one whole segment, and these go around once more::

    3 members a b c        hop 0       hop 1       hop 2       hop 3
    segment 0              a -> b      b -> c      c -> a      a -> b
    segment 1              b -> c      c -> a      a -> b      b -> c
    segment 2              c -> a      a -> b      b -> c      c -> a

Either way each rank sends and receives 2 (n - 1) / n of the bytes. A library's ``Iallreduce`` would do as much, but the
order in which it adds depends on library and size; here segment i is added in the order of the ranks, or, around a ring,
in the order of the ring from its i-th member on: the same bits on all members, every time. Pieces are under way side by
side: one is added up while others travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm import huge_pages
from hetero_mpi.comm.all_reduce_paths import ring_of
from hetero_mpi.comm.mpi_progress import MpiProgress
from hetero_mpi.comm.transport import AllReduce, Group, Numbers

PIECE_NUMBERS = 1 << 20
"""4 MiB: large enough that messages cost nothing, small enough to add in the cache while the next piece travels."""
PIECES_AT_ONCE = 4
_TAGS_OF_GROUP = 4 * PIECES_AT_ONCE
"""Two hops (a ring needs one tag for all of its hops); and a member may be a whole window of pieces ahead."""
MOST_GROUPS = 32768 // _TAGS_OF_GROUP
"""MPI promises tags up to 32767."""
_ALIGNMENT = 16
"""Segments begin at multiples of a cache line."""


class GroupAllReduce:
    """The all-reduces of one group, first started first. ``comm`` is theirs alone; ``hosts``: of the group's ranks."""

    def __init__(self, progress: MpiProgress, comm: Any, rank: int, group: Group, hosts: Sequence[str]) -> None:
        assert 0 <= group.number < MOST_GROUPS, f"group numbers go up to {MOST_GROUPS - 1}"
        self.progress, self.comm = progress, comm
        ring = ring_of(group.ranks, hosts)
        order = ring if ring is not None else group.ranks
        self.size, self.position = len(order), order.index(rank)
        self.others = tuple(member for member in order if member != rank)
        self.ahead, self.behind = order[(self.position + 1) % self.size], order[self.position - 1]
        self._piece: type[_DirectPiece] | type[_RingPiece] = _DirectPiece if ring is None else _RingPiece
        self._first_tag = group.number * _TAGS_OF_GROUP
        self._waiting: deque[_DirectPiece | _RingPiece] = deque()
        self._begun = 0
        self._under_way = 0
        self._pieces_left: dict[AllReduce, int] = {}
        self._scratch: list[Numbers] = []
        self._room = 0

    def start(self, request: AllReduce) -> None:
        """Begin an all-reduce, or queue it behind the group's others."""
        self.progress.begin(request)
        numbers: Numbers = request.buffer
        if self.size == 1:
            self.progress.end(request)
            return
        # As with messages, the last piece is shorter, or even empty: members with another length always find out.
        pieces = [
            self._piece(self, request, numbers[first : first + PIECE_NUMBERS])
            for first in range(0, numbers.size + 1, PIECE_NUMBERS)
        ]
        self._pieces_left[request] = len(pieces)
        self._waiting.extend(pieces)
        self._begin_pieces()

    def _begin_pieces(self) -> None:
        while self._waiting and self._under_way < PIECES_AT_ONCE:
            self._under_way += 1
            tag = self._first_tag + 2 * (self._begun % (_TAGS_OF_GROUP // 2))
            self._begun += 1
            self._waiting.popleft().begin(tag)

    def finish(self, piece: _DirectPiece | _RingPiece) -> None:
        self._under_way -= 1
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


def _segments(numbers: Numbers, members: int) -> list[Numbers]:
    width = -(-numbers.size // (members * _ALIGNMENT)) * _ALIGNMENT
    return [numbers[index * width : (index + 1) * width] for index in range(members)]


class _DirectPiece:
    """A range of an all-reduce's numbers, a segment of which belongs to each member."""

    def __init__(self, all_reduce: GroupAllReduce, request: AllReduce, numbers: Numbers) -> None:
        self.all_reduce, self.request = all_reduce, request
        self._segments = _segments(numbers, all_reduce.size)
        self._own = self._segments.pop(all_reduce.position)
        self.scratch: Numbers = np.empty(0, np.float32)
        self._contributions_left = self._results_left = self._sends_left = len(all_reduce.others)
        self._tag = 0

    def begin(self, tag: int) -> None:
        """The first hop: contributions to the owners of their segments. ``tag + 1`` is the second hop's."""
        all_reduce, progress = self.all_reduce, self.all_reduce.progress
        self._tag = tag
        self.scratch = all_reduce.take_scratch(self._own.size * len(all_reduce.others))
        for other, row in zip(all_reduce.others, self._rows(), strict=True):
            progress.receive(all_reduce.comm, self.request, row, other, tag, self._contribution_has_come)
        for other, segment in zip(all_reduce.others, self._segments, strict=True):
            then = partial(self._contribution_has_left, other, segment)
            progress.send(all_reduce.comm, self.request, segment, other, tag, then)

    def _rows(self) -> Numbers:
        """Others' contributions to the own segment, by rank."""
        count = len(self.all_reduce.others)
        return self.scratch[: self._own.size * count].reshape(count, self._own.size)

    def _contribution_has_left(self, other: int, segment: Numbers) -> None:
        # Not earlier: MPI forbids to receive into what is still being sent.
        all_reduce = self.all_reduce
        all_reduce.progress.receive(all_reduce.comm, self.request, segment, other, self._tag + 1, self._result_has_come)

    def _contribution_has_come(self) -> None:
        self._contributions_left -= 1
        if self._contributions_left:
            return
        self._add()
        all_reduce = self.all_reduce
        for other in all_reduce.others:
            all_reduce.progress.send(
                all_reduce.comm, self.request, self._own, other, self._tag + 1, self._result_has_left
            )

    def _add(self) -> None:
        """``own = ((r0 + r1) + ...)``; the own contribution has its place in that order."""
        rows, position = self._rows(), self.all_reduce.position
        if position > 0:
            for row in rows[1:position]:
                np.add(rows[0], row, out=rows[0])
            np.add(rows[0], self._own, out=self._own)
        for row in rows[position:]:
            np.add(self._own, row, out=self._own)

    def _result_has_come(self) -> None:
        self._results_left -= 1
        self._finish_if_done()

    def _result_has_left(self) -> None:
        self._sends_left -= 1
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._results_left == 0 and self._sends_left == 0:
            self.all_reduce.finish(self)


class _RingPiece:
    """A range of an all-reduce's numbers, a segment of which is sent to the next member in every hop.

    In hop t the member at position p sends segment p - t and receives segment p - t - 1 (modulo the members). In the first
    half of the hops the latter is added to its own, in the second half it is whole and takes its place.
    """

    def __init__(self, all_reduce: GroupAllReduce, request: AllReduce, numbers: Numbers) -> None:
        self.all_reduce, self.request = all_reduce, request
        self._segments = _segments(numbers, all_reduce.size)
        self._half = all_reduce.size - 1
        self._left = [False] * (2 * self._half)
        """Which hops' segments have been sent."""
        self._hop = 0
        """The next to be received."""
        self._announced = False
        self._tag = 0
        self.scratch: Numbers = np.empty(0, np.float32)

    def begin(self, tag: int) -> None:
        """The first hop. All hops use the same tag: they follow one another from each member to the next."""
        self._tag = tag
        self.scratch = self.all_reduce.take_scratch(self._segments[0].size)
        self._announce()
        self._send(0)

    def _segment(self, number: int) -> Numbers:
        return self._segments[number % self.all_reduce.size]

    def _send(self, hop: int) -> None:
        all_reduce, segment = self.all_reduce, self._segment(self.all_reduce.position - hop)
        all_reduce.progress.send(
            all_reduce.comm, self.request, segment, all_reduce.ahead, self._tag, partial(self._has_left, hop)
        )

    def _announce(self) -> None:
        """Be ready for the next segment, once there is room for it: MPI forbids to receive into what is still being sent."""
        arriving = self._segment(self.all_reduce.position - self._hop - 1)
        if self._hop < self._half:
            arriving = self.scratch[: arriving.size]
        elif not self._left[self._hop - self._half]:
            return
        self._announced = True
        all_reduce = self.all_reduce
        all_reduce.progress.receive(
            all_reduce.comm, self.request, arriving, all_reduce.behind, self._tag, self._has_come
        )

    def _has_come(self) -> None:
        if self._hop < self._half:
            own = self._segment(self.all_reduce.position - self._hop - 1)
            np.add(self.scratch[: own.size], own, out=own)
        self._hop += 1
        self._announced = False
        if self._hop < 2 * self._half:
            self._announce()
            self._send(self._hop)
        self._finish_if_done()

    def _has_left(self, hop: int) -> None:
        self._left[hop] = True
        if not self._announced and self._hop < 2 * self._half:
            self._announce()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._hop == 2 * self._half and all(self._left):
            self.all_reduce.finish(self)
