"""A transport whose messages take as long as those of another cluster: what is received is held back until its time.

The sender knows when its message would arrive: when its link is free, and then a transfer later. It sends that moment, 8 bytes,
beside the message; the receiver holds the message until then. The real transfer is hidden in that time, if it is the shorter one.

* Messages of one directed pair of ranks queue behind each other; those of other pairs, on the same hosts too, do not meet.
* A reduce-scatter or all-gather lasts as long as the profile says, counted from when its last member started it. A rank takes part
  in one exchange at a time, first started first, and sends the moment at which it starts one to the other members as soon as it
  knows the end of the one before.
* Moments are read off the sender's clock. Ranks of one host share a clock; between hosts the clocks are compared once,
  by ping-pong, to about half the variation of a round trip (clocks then drift apart, by milliseconds per minute at worst).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.emulation.paced_stage import Sleeper

STAMP_TAG = 1 << 14
"""Added to a message's tag for the moment that goes with it; MPI promises tags up to 32767. The one below is ``clocks``'."""
_SUM_TAG = STAMP_TAG - 2
"""Less a group's number: for the moments at which its members start exchanges."""
Delay = Callable[[int, int, int], float]
"""(source rank, destination rank, bytes of the message) -> seconds that it takes; one ``Delay``'s messages share links."""


def _stamp(moment_s: float = 0.0) -> Buffer:
    """A moment as 8 bytes."""
    return np.array([moment_s]).view(np.uint8)


def _seconds(stamp: Buffer) -> float:
    return float(stamp.view(np.float64)[0])


class _Held(Message):
    """A message with its moment: complete when both have been moved and the moment has come."""

    def __init__(self, request: Request, stamp: Buffer, stamp_request: Request, offset_s: float) -> None:
        assert isinstance(request, Message), "transports make messages"
        super().__init__(request.kind, request.peer, request.tag, request.buffer)
        self.moves = [request, stamp_request]
        self._stamp, self._offset_s = stamp, offset_s

    @property
    def moment_s(self) -> float:
        """When it arrives, on this rank's clock; known once ``moves`` are complete."""
        return _seconds(self._stamp) + self._offset_s

    @property
    def ended_s(self) -> float | None:
        return self.moment_s if all(part.completed for part in self.moves) else None

    @property
    def completed(self) -> bool:
        return all(part.completed for part in self.moves) and time.perf_counter() >= self.moment_s


class _HeldExchange(Exchange):
    """An exchange that lasts ``duration_s`` from the moment at which its last member starts it. Its members tell each other their
    moments as soon as they know them.

    Args:
        offset_s: this rank's clock minus rank 0's.
        before: the exchange that this rank started before it.
    """

    def __init__(
        self,
        request: Exchange,
        inner: Transport,
        rank: int,
        offset_s: float,
        duration_s: float,
        before: _HeldExchange | None,
    ) -> None:
        super().__init__(request.group, request.parts, request.sums, number=request.number)
        called_s = time.perf_counter()
        self.starts = {member: _stamp(called_s - offset_s) for member in request.group.ranks}
        """Member -> the moment at which it starts, on rank 0's clock: so all find the same end, to the last bit."""
        self._own, self._called_s, self._before = self.starts[rank], called_s, before
        self._offset_s, self._duration_s = offset_s, duration_s
        others, tag = [member for member in self.starts if member != rank], _SUM_TAG - request.group.number
        self.moves = [inner.exchange(request)]
        self.moves += [inner.post_receive(other, tag, self.starts[other]) for other in others]
        self.moves += [inner.send(other, tag, self._own, self.started) for other in others]

    def started(self) -> bool:
        """Whether this rank's own moment is known: the end of the exchange before is. For the thread that moves messages."""
        before = self._before
        if before is not None and before.moved:
            self._own[:] = _stamp(max(self._called_s, before.moment_s) - self._offset_s)
            self._before = None  # the chain of a whole run would be long
        return self._before is None

    @property
    def moved(self) -> bool:
        return all(part.completed for part in self.moves)

    @property
    def moment_s(self) -> float:
        """When it is done, on this rank's clock; known once ``moves`` are complete."""
        return max(map(_seconds, self.starts.values())) + self._offset_s + self._duration_s

    @property
    def completed(self) -> bool:
        return self.moved and time.perf_counter() >= self.moment_s


class PacedTransport(Transport):
    """``inner`` with the times of another cluster. Closing it leaves ``inner`` open.

    All ranks start the exchanges of all groups in one common order, as the engine does, layer after layer: in other orders ranks
    could wait for one another for ever, since a rank starts one only when the one before is done.

    Args:
        delay_of: tag of a message -> how long it takes; None: as long as it does.
        exchange_s: (its number, is it a reduce-scatter?) -> seconds that an exchange by itself takes.
        offsets_s: each rank's clock minus rank 0's, as ``clock_offset_s`` says.
    """

    piece_bytes = sys.maxsize  # a message takes its time whole: pieces would each wait for a link's latency

    def __init__(
        self,
        inner: Transport,
        rank: int,
        delay_of: Callable[[int], Delay | None],
        exchange_s: Callable[[int, bool], float],
        offsets_s: Sequence[float],
        sleeper: Sleeper,
    ) -> None:
        self.inner, self.rank, self._delay_of, self._exchange_s = inner, rank, delay_of, exchange_s
        self._offsets_s, self._sleeper = dict(enumerate(offsets_s)), sleeper
        self._link_free_s: dict[tuple[Delay, int], float] = {}
        self._last_exchange: _HeldExchange | None = None

    @property
    def idle(self) -> bool:
        return self.inner.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        self.inner.idle = idle

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        request = self.inner.post_receive(source, tag, buffer, arrived)
        if self._delay_of(tag) is None:
            return request
        stamp = _stamp()
        moment = self.inner.post_receive(source, tag + STAMP_TAG, stamp)
        return _Held(request, stamp, moment, self._offsets_s[self.rank] - self._offsets_s.get(source, 0.0))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """The message leaves now, or when those before it have arrived."""
        request, delay_s = self.inner.send(destination, tag, buffer, ready), self._delay_of(tag)
        if delay_s is None:
            return request
        begin_s = max(time.perf_counter(), self._link_free_s.get((delay_s, destination), 0.0))
        end_s = self._link_free_s[delay_s, destination] = begin_s + delay_s(self.rank, destination, buffer.size)
        stamp = _stamp(end_s)
        return _Held(request, stamp, self.inner.send(destination, tag + STAMP_TAG, stamp), 0.0)

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        assert number < _SUM_TAG // 2, "group numbers share the tags with messages"
        return self.inner.group(ranks, number)

    def dissolve(self, group: Group) -> None:
        self.inner.dissolve(group)

    def exchange(self, request: Exchange) -> Request:
        duration_s, offset_s = self._exchange_s(request.number, request.sums), self._offsets_s[self.rank]
        self._last_exchange = _HeldExchange(request, self.inner, self.rank, offset_s, duration_s, self._last_exchange)
        return self._last_exchange

    def wait(self, request: Request) -> None:
        """Returns when the message has been moved and its moment has come, for sender and receiver."""
        if not isinstance(request, _Held | _HeldExchange):
            self.inner.wait(request)
            return
        for part in request.moves:
            self.inner.wait(part)
        self._sleeper.until(request.moment_s)

    def pending(self) -> int:
        """Moments count as messages."""
        return self.inner.pending()

    def close(self) -> None:
        """Nothing of its own is to be closed."""
