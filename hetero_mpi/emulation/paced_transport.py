"""A transport whose messages take as long as those of another cluster: what is received is held back until its time.

The sender knows when its message would arrive: when its link (and, between two hosts, both hosts' NICs) is free,
and then a transfer later. It sends that moment, 8 bytes, beside the message; the receiver holds the message until then.
The real transfer is hidden in that time, if it is the shorter one.

* Messages of one directed pair of ranks queue behind each other.
* All ranks of an emulated host share its NIC, one message in each direction at a time, first come, first served: as
  ``planning.types.request.Network(shared_nic=True)`` says. The times until which NICs are taken lie in a file that the ranks of
  one real host map into memory (``Nics``), so ranks on different real hosts do not see each other's messages: each real host's
  ranks share a NIC of their own.
* A reduce-scatter or all-gather lasts as long as the profile says, counted from the moment when its last member started it, and
  the NICs of all its hosts are free, if it has several: every member sends its own moment to the others, and whoever first sees
  that all have come takes the NICs, in both directions, until its end; the others look that end up. So exchanges take NICs in
  the order in which they are noticed, nearly that in which they begin. A rank takes part in one exchange at a time, first
  started first: it says that it has started a sum when those of its other groups are done.
* Moments are read off the sender's clock. Ranks of one host share a clock; between hosts the clocks are compared once,
  by ping-pong, to about half the variation of a round trip (clocks then drift apart, by milliseconds per minute at worst).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.emulation.paced_stage import Sleeper

STAMP_TAG = 1 << 14
"""Added to a message's tag for the moment that goes with it; MPI promises tags up to 32767. The one below is ``clocks``'."""
_SUM_TAG = STAMP_TAG - 2
"""Less a group's number: for the moments at which its members start exchanges."""
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

    @classmethod
    def shared(cls, world: World, hosts: Sequence[str]) -> Nics:
        """The table of this real host's ranks. Collective. ``hosts``: the emulated host of each rank of the whole job."""
        path = None
        if world.local_rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="hetero_mpi-nics-")
            os.close(descriptor)
        paths = {host: made for host, made in world.all_gather_json([world.host, path]) if made is not None}
        nics = cls.create(paths[world.host], hosts)
        world.barrier()
        if path is not None:
            os.unlink(path)  # the ranks have it open; a crash leaves nothing behind
        return nics

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


Delay = Callable[[int, int, int], float]
"""(source rank, destination rank, bytes of the message) -> seconds that it takes."""
_Start = tuple[Buffer, float]
"""A moment as 8 bytes, and the clock it was read off minus rank 0's."""


@dataclass(frozen=True)
class MessageTimes:
    """How long messages take that queue for the same links and NICs."""

    delay_s: Delay
    """Seconds of a message by itself."""
    nics: Nics | None
    """Shared by ranks; None: every pair of ranks has a link to itself."""


class _Held(Message):
    """A message with its moment: complete when both have been moved and the moment has come."""

    def __init__(self, request: Request, stamp: Buffer, stamp_request: Request, offset_s: float) -> None:
        assert isinstance(request, Message), "transports make messages"
        super().__init__(request.kind, request.peer, request.tag, request.buffer)
        self.moves = (request, stamp_request)
        self._stamp, self._offset_s = stamp, offset_s

    @property
    def moment_s(self) -> float:
        """When it arrives, on this rank's clock; known once ``moves`` are complete."""
        return float(self._stamp.view(np.float64)[0]) + self._offset_s

    @property
    def ended_s(self) -> float | None:
        return self.moment_s if all(part.completed for part in self.moves) else None

    @property
    def completed(self) -> bool:
        return all(part.completed for part in self.moves) and time.perf_counter() >= self.moment_s


class _HeldExchange(Exchange):
    """An exchange with the moments of its members, after the one that this rank started before it.

    ``ends_s``: (moment at which the last member began it, on rank 0's clock; when it may start, on this rank's) -> when it ends.
    """

    def __init__(
        self,
        request: Request,
        own_offset_s: float,
        ends_s: Callable[[float, float], float],
        before: _HeldExchange | None,
    ) -> None:
        assert isinstance(request, Exchange), "transports make exchanges"
        super().__init__(request.group, request.parts, request.sums, number=request.number)
        self.moves: list[Request] = [request]
        self.before = before
        self._starts: list[_Start] = []
        """The moments of all members; none before this rank has said that it has started."""
        self._own_offset_s, self._ends_s = own_offset_s, ends_s
        self._moment_s: float | None = None

    @property
    def announced(self) -> bool:
        return bool(self._starts)

    def announce(self, starts: Sequence[_Start], parts: Sequence[Request]) -> None:
        """This rank's start is on its way to the others, and theirs to it (``parts``)."""
        self._starts += starts
        self.moves += parts

    @property
    def moment_s(self) -> float:
        """When it is done, on this rank's clock; known once ``moves`` of it, and of those before it, are complete."""
        if self._moment_s is None:
            before_s = self.before.moment_s if self.before is not None else 0.0
            # On one clock, so that all members find the same to the last bit.
            begun_s = max(float(stamp.view(np.float64)[0]) - offset_s for stamp, offset_s in self._starts)
            self._moment_s = self._ends_s(begun_s, max(before_s, begun_s + self._own_offset_s))
            self.before = None  # the chain of a whole run would be long
        return self._moment_s

    @property
    def moved(self) -> bool:
        """Whether all parts are complete, of those before it too."""
        own = self.announced and all(part.completed for part in self.moves)
        return own and (self.before is None or self.before.moved)

    @property
    def completed(self) -> bool:
        return self.moved and time.perf_counter() >= self.moment_s


@dataclass(frozen=True)
class LinkTimes:
    """How long messages and exchanges take."""

    line_of: Callable[[int], MessageTimes | None]
    """Tag of a message -> how long it takes; None: as long as it does."""
    exchange_s: Callable[[int, bool], float]
    """(its number, is it a reduce-scatter?) -> seconds that an exchange by itself takes."""
    exchange_nics: Nics | None = None


class PacedTransport(Transport):
    """``inner`` with the times of another cluster. Closing it leaves ``inner`` open.

    All ranks start the sums of all groups in one common order, as the engine does, layer after layer: in other orders ranks could
    wait for one another for ever, since a rank starts a sum only when those of its other groups are done.

    Args:
        offsets_s: each rank's clock minus rank 0's, as ``clock_offset_s`` says.
    """

    piece_bytes = sys.maxsize  # a message takes its time whole: pieces would each wait for a link's latency

    def __init__(
        self, inner: Transport, rank: int, times: LinkTimes, offsets_s: Sequence[float], sleeper: Sleeper
    ) -> None:
        self.inner, self.rank, self.times = inner, rank, times
        self._offsets_s, self._sleeper = dict(enumerate(offsets_s)), sleeper
        self._link_free_s: dict[tuple[MessageTimes, int], float] = {}
        self._last_exchange: _HeldExchange | None = None
        self._unannounced: deque[_HeldExchange] = deque()
        self._summing: list[_HeldExchange] = []
        """Sums that have been announced and were not complete when it was looked last."""

    @property
    def idle(self) -> bool:
        return self.inner.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        self.inner.idle = idle

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        request = self.inner.post_receive(source, tag, buffer, arrived)
        if self.times.line_of(tag) is None:
            return request
        stamp = np.empty(8, np.uint8)
        moment = self.inner.post_receive(source, tag + STAMP_TAG, stamp)
        return _Held(request, stamp, moment, self._offsets_s[self.rank] - self._offsets_s.get(source, 0.0))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """The message leaves now, or when those before it have arrived."""
        request, line = self.inner.send(destination, tag, buffer, ready), self.times.line_of(tag)
        if line is None:
            return request
        stamp = np.array([self._arrival_s(line, destination, buffer.size)]).view(np.uint8)
        return _Held(request, stamp, self.inner.send(destination, tag + STAMP_TAG, stamp), 0.0)

    def _arrival_s(self, line: MessageTimes, destination: int, size_bytes: int) -> float:
        duration_s = line.delay_s(self.rank, destination, size_bytes)
        earliest_s = max(time.perf_counter(), self._link_free_s.get((line, destination), 0.0))
        end_s = earliest_s + duration_s
        if line.nics is not None:
            end_s = line.nics.reserve(self.rank, destination, earliest_s, duration_s)
        self._link_free_s[line, destination] = end_s
        return end_s

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        assert number < _SUM_TAG // 2, "group numbers share the tags with messages"
        return self.inner.group(ranks, number)

    def dissolve(self, group: Group) -> None:
        self.inner.dissolve(group)

    def exchange(self, request: Exchange) -> Request:
        group, nics = request.group, self.times.exchange_nics
        duration_s = self.times.exchange_s(request.number, request.sums)

        def ends_s(begun_s: float, earliest_s: float) -> float:
            if nics is None or duration_s == 0:
                return earliest_s + duration_s
            return nics.reserve_exchange(group, begun_s, earliest_s, duration_s)

        own_offset_s = self._offsets_s.get(self.rank, 0.0)
        held = _HeldExchange(self.inner.exchange(request), own_offset_s, ends_s, self._last_exchange)
        self._last_exchange = held
        self._unannounced.append(held)
        while self._unannounced and not self._others_summing(self._unannounced[0]):
            self._announce()
        return held

    def _others_summing(self, held: _HeldExchange) -> list[_HeldExchange]:
        """Sums of other groups that are under way, if ``held`` is a sum, too."""
        self._summing = [one for one in self._summing if not one.completed]
        return [one for one in self._summing if held.sums and one.group != held.group]

    def _announce(self) -> None:
        """Say to the other members of an exchange that this rank has started it."""
        held = self._unannounced.popleft()
        own = np.array([time.perf_counter()]).view(np.uint8)
        starts: list[_Start] = [(own, self._offsets_s.get(self.rank, 0.0))]
        parts: list[Request] = []
        tag = _SUM_TAG - held.group.number
        for other in held.group.ranks:
            if other != self.rank:
                stamp = np.empty(8, np.uint8)
                starts.append((stamp, self._offsets_s.get(other, 0.0)))
                parts += (self.inner.post_receive(other, tag, stamp), self.inner.send(other, tag, own))
        held.announce(starts, parts)
        if held.sums:
            self._summing.append(held)

    def wait(self, request: Request) -> None:
        """Returns when the message has been moved and its moment has come, for sender and receiver."""
        if not isinstance(request, _Held | _HeldExchange):
            self.inner.wait(request)
            return
        while isinstance(request, _HeldExchange) and not request.announced:
            for other in self._others_summing(self._unannounced[0]):
                self.wait(other)
            self._announce()
        self._wait_until_moved(request)
        self._sleeper.until(request.moment_s)

    def _wait_until_moved(self, request: _Held | _HeldExchange) -> None:
        if isinstance(request, _HeldExchange) and request.before is not None:
            self._wait_until_moved(request.before)
        for part in request.moves:
            self.inner.wait(part)

    def pending(self) -> int:
        """Moments count as messages."""
        return self.inner.pending()

    def close(self) -> None:
        """Nothing of its own is to be closed."""
