"""A transport whose messages take as long as those of another cluster: what is received is held back until its time.

The sender knows when its message would arrive: when its link (and, between two hosts, both hosts' NICs) is free,
and then a transfer later. It sends that moment, 8 bytes, beside the message; the receiver holds the message until then.
The real transfer is hidden in that time, if it is the shorter one.

* Messages of one directed pair of ranks queue behind each other.
* All ranks of an emulated host share its NIC, one message in each direction at a time, first come, first served: as
  ``planning.types.request.Network(shared_nic=True)`` says. The times until which NICs are taken lie in a file that the ranks of
  one real host map into memory (``emulated_cards``), so ranks on different real hosts do not see each other's messages:
  each real host's ranks share a NIC of their own.
* A reduce-scatter or all-gather lasts as long as the profile says, counted from the moment when its last member started it, and
  the NICs of all its hosts are free, if it has several: every member sends its own moment to the others, and whoever first sees
  that all have come takes the NICs, in both directions, until its end; the others look that end up. So exchanges take NICs in
  the order in which they are noticed, nearly that in which they begin. A rank takes part in one exchange at a time, first
  started first.
* Moments are read off the sender's clock. Ranks of one host share a clock; between hosts the clocks are compared once,
  by ping-pong, to about half the variation of a round trip (clocks then drift apart, by milliseconds per minute at worst).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hetero_mpi.comm.precise_sleep import Sleeper
from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.emulation.emulated_nics import Nics

STAMP_TAG = 1 << 14
"""Added to a message's tag for the moment that goes with it; MPI promises tags up to 32767. The one below is ``clocks``'."""
_SUM_TAG = STAMP_TAG - 2
"""Less a group's number: for the moments at which its members start exchanges."""

Delay = Callable[[int, int, int], float]
"""(source rank, destination rank, bytes of the message) -> seconds that it takes."""
ExchangeTime = Callable[[bool], float]
"""(is it a reduce-scatter?) -> seconds that the next exchange takes."""
Clock = Callable[[], float]


_Start = tuple[Buffer, float]
"""A moment as 8 bytes, and the clock it was read off minus rank 0's."""
SumEnd = Callable[[float, float], float]
"""(moment at which the last member began it, on rank 0's clock; when it may start, on this rank's clock) -> when it ends."""


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
    """An exchange with the moments of its members, after the one that this rank started before it."""

    def __init__(
        self,
        request: Request,
        parts: Sequence[Request],
        starts: Sequence[_Start],
        own_offset_s: float,
        ends_s: SumEnd,
        before: _HeldExchange | None,
    ) -> None:
        assert isinstance(request, Exchange), "transports make exchanges"
        super().__init__(request.group, request.parts, request.sums)
        self.moves = (request, *parts)
        self.before = before
        self._starts, self._own_offset_s, self._ends_s = starts, own_offset_s, ends_s
        self._moment_s: float | None = None

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
        return all(part.completed for part in self.moves) and (self.before is None or self.before.moved)

    @property
    def completed(self) -> bool:
        return self.moved and time.perf_counter() >= self.moment_s


class EmulatedTransport(Transport):
    """``inner`` with the delays of another cluster. Closing it leaves ``inner`` open.

    Args:
        delay_s: seconds of a message by itself.
        nics: NICs shared by ranks; None: every pair of ranks has a link to itself.
        offsets_s: each rank's clock minus rank 0's, as ``clock_offset_s`` says.
        exchange_s: seconds of an exchange by itself.
    """

    def __init__(
        self,
        inner: Transport,
        rank: int,
        delay_s: Delay,
        nics: Nics | None,
        offsets_s: Sequence[float],
        sleeper: Sleeper,
        exchange_s: ExchangeTime = lambda sums: 0.0,
    ) -> None:
        self.inner, self.rank, self.delay_s, self.nics, self.exchange_s = inner, rank, delay_s, nics, exchange_s
        self._offsets_s, self._sleeper = dict(enumerate(offsets_s)), sleeper
        self._link_free_s: dict[int, float] = {}
        self._last_exchange: _HeldExchange | None = None

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        request = self.inner.post_receive(source, tag, buffer, arrived)
        stamp = np.empty(8, np.uint8)
        moment = self.inner.post_receive(source, tag + STAMP_TAG, stamp)
        return _Held(request, stamp, moment, self._offset_s(source))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """The message leaves now, or when those before it have arrived."""
        request = self.inner.send(destination, tag, buffer, ready)
        stamp = np.array([self._arrival_s(destination, buffer.size)]).view(np.uint8)
        moment = self.inner.send(destination, tag + STAMP_TAG, stamp)
        return _Held(request, stamp, moment, 0.0)

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        assert number < _SUM_TAG // 2, "group numbers share the tags with messages"
        return self.inner.group(ranks, number)

    def dissolve(self, group: Group) -> None:
        self.inner.dissolve(group)

    def exchange(self, request: Exchange) -> Request:
        return self._held(self.inner.exchange(request), request.group, self.exchange_s(request.sums))

    def _held(self, request: Request, group: Group, duration_s: float) -> Request:
        """The exchange, which is to last so long."""
        own = np.array([time.perf_counter()]).view(np.uint8)
        own_offset_s = self._offsets_s.get(self.rank, 0.0)
        starts: list[_Start] = [(own, own_offset_s)]
        parts: list[Request] = []
        tag = _SUM_TAG - group.number
        for other in group.ranks:
            if other != self.rank:
                stamp = np.empty(8, np.uint8)
                starts.append((stamp, self._offsets_s.get(other, 0.0)))
                parts += (self.inner.post_receive(other, tag, stamp), self.inner.send(other, tag, own))

        def ends_s(begun_s: float, earliest_s: float) -> float:
            if self.nics is None or duration_s == 0:
                return earliest_s + duration_s
            return self.nics.reserve_exchange(group, begun_s, earliest_s, duration_s)

        held = _HeldExchange(request, parts, starts, own_offset_s, ends_s, self._last_exchange)
        self._last_exchange = held
        return held

    def _offset_s(self, other: int) -> float:
        """What to add to a moment of another rank's clock."""
        return self._offsets_s[self.rank] - self._offsets_s.get(other, 0.0)

    def _arrival_s(self, destination: int, size_bytes: int) -> float:
        duration_s = self.delay_s(self.rank, destination, size_bytes)
        earliest_s = max(time.perf_counter(), self._link_free_s.get(destination, 0.0))
        if self.nics is not None:
            end_s = self.nics.reserve(self.rank, destination, earliest_s, duration_s)
        else:
            end_s = earliest_s + duration_s
        self._link_free_s[destination] = end_s
        return end_s

    def wait(self, request: Request) -> None:
        """Returns when the message has been moved and its moment has come, for sender and receiver."""
        assert isinstance(request, (_Held, _HeldExchange)), "a request is waited for where it was made"
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
