"""Sums over a group of ranks, by direct exchange of messages that the transport's own polling moves.

The numbers are cut into pieces, each piece into one segment per member. Every member sends each segment to its owner, the
owner adds what it gets in the order of the ranks, and sends the result back to all::

    3 members, one piece   segment 0   segment 1   segment 2
    contributions          1,2 -> 0    0,2 -> 1    0,1 -> 2
    results                0 -> 1,2    1 -> 0,2    2 -> 0,1

Each rank sends and receives 2 (n - 1) / n of the bytes, as in a ring, in two hops instead of 2 (n - 1). A library's
``Iallreduce`` would do as much, but the order in which it adds depends on library, size and place in the buffer; here
it is the order of the ranks everywhere. Pieces are under way side by side: one is added up while others travel.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm.mpi_progress import Progress
from hetero_mpi.comm.transport import Group, Numbers, Sum

PIECE_NUMBERS = 1 << 20
"""4 MiB: large enough that messages cost nothing, small enough to add in the cache while the next piece travels."""
PIECES_AT_ONCE = 4
_TAGS_OF_GROUP = 4 * PIECES_AT_ONCE
"""Two hops; and a member may be a whole window of pieces ahead."""
MOST_GROUPS = 32768 // _TAGS_OF_GROUP
"""MPI promises tags up to 32767."""
_ALIGNMENT = 16
"""Segments begin at multiples of a cache line."""


class GroupSums:
    """The sums of one group, first started first. ``comm`` is used by sums alone."""

    def __init__(self, progress: Progress, comm: Any, rank: int, group: Group) -> None:
        assert 0 <= group.number < MOST_GROUPS, f"group numbers go up to {MOST_GROUPS - 1}"
        self.progress, self.comm = progress, comm
        self.others = tuple(member for member in group.ranks if member != rank)
        self.position = group.ranks.index(rank)
        self.size = len(group.ranks)
        self._first_tag = group.number * _TAGS_OF_GROUP
        self._waiting: deque[_Piece] = deque()
        self._begun = 0
        self._under_way = 0
        self._pieces_left: dict[Sum, int] = {}
        self._scratch: list[Numbers] = []

    def start(self, request: Sum) -> None:
        """Begin a sum, or queue it behind the group's others."""
        self.progress.begin(request)
        numbers: Numbers = request.buffer
        if self.size == 1:
            self.progress.end(request)
            return
        # As with messages, the last piece is shorter, or even empty: members with another length always find out.
        pieces = [
            _Piece(self, request, numbers[first : first + PIECE_NUMBERS])
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

    def finish(self, piece: _Piece) -> None:
        """A piece is done: the next one begins."""
        self._under_way -= 1
        self._scratch.append(piece.scratch)
        self._pieces_left[piece.request] -= 1
        if self._pieces_left[piece.request] == 0:
            del self._pieces_left[piece.request]
            self.progress.end(piece.request)
        self._begin_pieces()

    def take_scratch(self, size: int) -> Numbers:
        """Room for ``size`` numbers, reused from earlier pieces."""
        fitting = next((index for index, array in enumerate(self._scratch) if array.size >= size), None)
        if fitting is not None:
            return self._scratch.pop(fitting)
        if self._scratch:
            self._scratch.pop()  # too small now, and it would be too small again
        return np.empty(size, np.float32)


class _Piece:
    """A range of a sum's numbers, a segment of which belongs to each member."""

    def __init__(self, sums: GroupSums, request: Sum, numbers: Numbers) -> None:
        self.sums, self.request = sums, request
        width = -(-numbers.size // (sums.size * _ALIGNMENT)) * _ALIGNMENT
        self._segments = [numbers[index * width : (index + 1) * width] for index in range(sums.size)]
        self._own = self._segments.pop(sums.position)
        self.scratch: Numbers = np.empty(0, np.float32)
        self._contributions_left = self._results_left = self._sends_left = len(sums.others)
        self._tag = 0

    def begin(self, tag: int) -> None:
        """The first hop: contributions to the owners of their segments. ``tag + 1`` is the second hop's."""
        sums, progress = self.sums, self.sums.progress
        self._tag = tag
        self.scratch = sums.take_scratch(self._own.size * len(sums.others))
        for other, row in zip(sums.others, self._rows(), strict=True):
            progress.receive(sums.comm, self.request, row, other, tag, self._contribution_has_come)
        for other, segment in zip(sums.others, self._segments, strict=True):
            then = partial(self._contribution_has_left, other, segment)
            progress.send(sums.comm, self.request, segment, other, tag, then)

    def _rows(self) -> Numbers:
        """Others' contributions to the own segment, by rank."""
        count = len(self.sums.others)
        return self.scratch[: self._own.size * count].reshape(count, self._own.size)

    def _contribution_has_left(self, other: int, segment: Numbers) -> None:
        # Not earlier: MPI forbids to receive into what is still being sent.
        sums = self.sums
        sums.progress.receive(sums.comm, self.request, segment, other, self._tag + 1, self._result_has_come)

    def _contribution_has_come(self) -> None:
        self._contributions_left -= 1
        if self._contributions_left:
            return
        self._add()
        sums = self.sums
        for other in sums.others:
            sums.progress.send(sums.comm, self.request, self._own, other, self._tag + 1, self._result_has_left)

    def _add(self) -> None:
        """``own = ((r0 + r1) + ...)``; the own contribution has its place in that order."""
        rows, position = self._rows(), self.sums.position
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
            self.sums.finish(self)
