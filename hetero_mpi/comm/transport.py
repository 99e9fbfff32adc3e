"""Moving bytes and summing numbers between ranks, asynchronously: the contract of all transports.

The transport handles bytes and tags and knows nothing about models. A message's buffer is a one-dimensional, contiguous ``uint8``
numpy array. A group exchanges parts, one owned by each member: arrays of the same kind, or ``float32`` arrays to be summed. A
buffer belongs to the transport from the call until ``wait`` returns; data is sent, received and summed in place.

* Messages of one (source, tag) arrive in the order in which they were sent.
* ``post_receive``, ``send``, ``reduce_scatter`` and ``all_gather`` return at once. A send may complete only when the receive is
  posted: post receives early.
* A message must be exactly as long as the receiving buffer; otherwise the receiver's ``wait`` raises. (This reports a bug but
  cannot undo it: Open MPI 5.0 writes beyond the buffer if a message above some 100 KB is too long.)
* All members of a group start its exchanges in the same order, with equal part lengths. Exchanges of different groups, and
  messages, may overlap.
* A reduce-scatter adds in rank order, ``((r0 + r1) + r2) + ...``, element by element in fp32: bitwise equal whatever the order of
  arrival, the owner of the element, or the split into exchanges. Only where several ranks of a group share one of several hosts
  may the order depend on the owner.
* A send or an exchange may be *held back* until its data is ready (``ready``); a receive or exchange may report its arrival
  (``arrived``). The thread that moves messages calls both, so they must be quick. Sends of one (destination, tag) still leave in
  order, and exchanges of one group start in order.
* One thread makes requests; any thread may ask whether they are complete.
* ``wait`` for a request raises any error of that request.

``ring_of`` selects the direct or the ring algorithm for the exchanges of a group. It is pure because the planner prices the same
choice.

Direct exchange takes one hop, but each of h ranks on a host sends to every remote rank: ``h (n - h)`` times 1/n of the bytes leave
the host through its one NIC. A ring that visits host after host leaves each host once per hop: ``n - 1`` times 1/n (Patarasuk &
Yuan 2009)::

    8 ranks, bytes that leave a host    alone on it    2 on it    4 on it
    direct                              7/8            12/8       16/8
    ring                                7/8            7/8        7/8
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]
Numbers = NDArray[np.float32]
Part = NDArray[Any]
"""``Numbers`` to be summed, or a ``Buffer``."""
Ready = Callable[[], bool]
Arrived = Callable[[], None]
T = TypeVar("T")


class TransportError(RuntimeError):
    """A message could not be moved as promised, because of a bug in the program or a lost machine."""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange parts. Created by ``Transport.group`` and valid for that transport only."""

    ranks: tuple[int, ...]
    """Increasing; this rank is one of them."""
    number: int
    """Distinguishes groups that share ranks."""

    def __str__(self) -> str:
        return f"group {self.number} of ranks {', '.join(map(str, self.ranks))}"


class Request:
    """An active message or exchange. One thread completes it, once; any number of threads may wait for it.

    ``route``: key within which requests start in order.
    """

    def __init__(
        self, buffer: NDArray[Any], route: Any, ready: Ready | None = None, arrived: Arrived | None = None
    ) -> None:
        self.buffer, self.route, self.ready, self._arrived = buffer, route, ready, arrived
        self.error: BaseException | None = None
        self._ended_s: float | None = None

    @property
    def completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._ended_s is not None

    def mark_complete(self, error: BaseException | None = None) -> None:
        """Mark as complete, with an error if it failed. Called once, by the transport."""
        if error is None and self._arrived is not None:
            try:
                self._arrived()
            except Exception as failure:
                error = failure
        self.error = error
        self._ended_s = time.perf_counter()

    @property
    def ended_s(self) -> float | None:
        """Time of completion (``time.perf_counter``); None while active."""
        return self._ended_s

    def raise_error(self) -> None:
        if self.error is not None:
            raise TransportError(f"{self}: {self.error}") from self.error


class Message(Request):
    """Bytes to or from ``peer``."""

    def __init__(
        self,
        kind: Literal["send", "receive"],
        peer: int,
        tag: int,
        buffer: Buffer,
        ready: Ready | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        if buffer.ndim != 1 or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
            raise ValueError(
                "A message buffer must be a one-dimensional contiguous uint8 array "
                f"(shape: {buffer.shape}, dtype: {buffer.dtype}): pass `array.reshape(-1).view(np.uint8)`."
            )
        if kind == "receive" and not buffer.flags.writeable:
            raise ValueError("A buffer to receive into must be writable: pass an array that owns its bytes.")
        super().__init__(buffer, (peer, tag), ready, arrived)
        self.kind, self.peer, self.tag = kind, peer, tag

    def __str__(self) -> str:
        direction = "to" if self.kind == "send" else "from"
        return f"{self.kind} of {self.buffer.size} bytes {direction} rank {self.peer}, tag {self.tag}"


class Exchange(Request):
    """A reduce-scatter (``sums``) or an all-gather over ``group``, in place.

    ``parts``: one per rank, in the group's order. ``number``: the caller's identifier of the data, such as a layer's number.
    """

    def __init__(
        self,
        group: Group,
        parts: Sequence[Part],
        sums: bool,
        ready: Ready | None = None,
        arrived: Arrived | None = None,
        number: int = 0,
    ) -> None:
        dtype = np.float32 if sums else np.uint8
        if len(parts) != len(group.ranks):
            raise ValueError(f"Every member of {group} owns one part (parts: {len(parts)}).")
        for part in parts:
            if part.ndim != 1 or part.dtype != dtype or not part.flags.c_contiguous or not part.flags.writeable:
                raise ValueError(
                    f"A part must be a one-dimensional, contiguous, writable {np.dtype(dtype)} array "
                    f"(shape: {part.shape}, dtype: {part.dtype}): pass `array.reshape(-1)`."
                )
        super().__init__(parts[0], group, ready, arrived)
        self.group, self.parts, self.sums, self.number = group, tuple(parts), sums, number

    def __str__(self) -> str:
        name = "reduce-scatter" if self.sums else "all-gather"
        return f"{name} of {sum(part.nbytes for part in self.parts)} bytes over {self.group}"


class Transport(Protocol):
    """Moves messages and sums between ranks; the module's docstring is the contract. A context manager that closes the
    transport."""

    idle: bool = False
    """Set by the rank's thread while it waits for its device: frequent polling then costs no computation."""
    piece_bytes: int = 4 << 20
    """Longer tensors are sent in pieces of this size, split alike at both ends. Copying a piece to or from a device takes half a
    millisecond, sending it over 10 Gbit/s takes 3; posting it costs some 20 us."""

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        """Post a writable buffer for the next message of (source, tag).

        ``arrived`` is called when the message has arrived, before the request is complete; never after an error.
        """

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """Send the buffer's bytes once ``ready()`` is true. From then on they must not change until the request is complete."""

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """Create a group of ranks (increasing, this rank included) that can exchange parts.

        Every member calls it with equal ranks and number; a number is used once per rank until its group is dissolved.
        """

    def dissolve(self, group: Group) -> None:
        """Free the group's number. Every member calls it, while no member has an active exchange of the group."""

    def exchange(self, request: Exchange) -> Request:
        """Start an exchange once its ``ready()`` is true."""

    def reduce_scatter(
        self,
        group: Group,
        parts: Sequence[Numbers],
        ready: Ready | None = None,
        arrived: Arrived | None = None,
        number: int = 0,
    ) -> Request:
        """Replace this member's own part by the sum over the members, once ``ready()`` is true of all its parts.

        ``parts``: one per rank, in the group's order; the others' parts are undefined afterwards. ``arrived`` is called when the
        sums are there, before the request is complete; never after an error. ``number``: see ``Exchange``.
        """
        return self.exchange(Exchange(group, parts, True, ready, arrived, number))

    def all_gather(
        self,
        group: Group,
        parts: Sequence[Buffer],
        ready: Ready | None = None,
        arrived: Arrived | None = None,
        number: int = 0,
    ) -> Request:
        """Send this member's own part to all others once ``ready()`` is true; otherwise as ``reduce_scatter``."""
        return self.exchange(Exchange(group, parts, False, ready, arrived, number))

    def wait(self, request: Request) -> None:
        """Return when the request is complete. Raises TransportError on a wrong message length, an MPI failure or a closed
        transport."""

    def pending(self) -> int:
        """Number of incomplete requests."""

    def close(self) -> None:
        """Fail all pending requests (their ``wait`` raises) and release the transport. Idempotent."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()


def check_group(rank: int, size: int, group: Group, groups_by_number: dict[int, Group]) -> None:
    """Raise ValueError if the ranks form no group of this job or the number belongs to another group."""
    ranks = group.ranks
    if list(ranks) != sorted(set(ranks)) or rank not in ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"A group's ranks must be increasing, below {size}, and hold the calling rank {rank} (ranks: {ranks})."
        )
    if group.number in groups_by_number:
        ranks_in_use = groups_by_number[group.number].ranks
        raise ValueError(f"Every group needs a unique number (number: {group.number}, in use by ranks {ranks_in_use}).")


MAX_MESSAGES_IN_FLIGHT = 2
"""Enough to keep the link busy, few enough to bound memory."""


def send_in_order(transport: Transport, messages: Iterable[tuple[int, int, Buffer]]) -> None:
    """Send the (destination, tag, bytes) messages of an iterable; return when all have left."""
    under_way: deque[Request] = deque()
    for message in messages:
        under_way.append(transport.send(*message))
        if len(under_way) == MAX_MESSAGES_IN_FLIGHT:
            transport.wait(under_way.popleft())
    while under_way:
        transport.wait(under_way.popleft())


def receive_in_order(
    transport: Transport, messages: Iterable[tuple[int, int, Buffer]], max_in_flight: int = MAX_MESSAGES_IN_FLIGHT
) -> Iterator[Buffer]:
    """Receive (source, tag, buffer) messages, posting ``max_in_flight`` receives at once. Each buffer is valid until the next one
    is yielded: buffer ``i + max_in_flight`` may be buffer ``i`` again."""
    under_way: deque[Request] = deque()
    for message in messages:
        under_way.append(transport.post_receive(*message))
        if len(under_way) == max_in_flight:
            yield _wait_for_buffer(transport, under_way.popleft())
    while under_way:
        yield _wait_for_buffer(transport, under_way.popleft())


def _wait_for_buffer(transport: Transport, request: Request) -> Buffer:
    transport.wait(request)
    return request.buffer


def length_problem(request: Request, arrived: str) -> TransportError:
    """The error for a length mismatch. ``arrived``: the received length in words, such as ``90 bytes``."""
    if isinstance(request, Exchange):
        text = "the members do not agree on the length: all must start the group's exchanges in the same order"
    else:
        text = (
            f"the message has {arrived}, the buffer {request.buffer.size}: sender and receiver must agree on the length"
        )
    return TransportError(text)


# The order in which the ranks of a group exchange


def ring_of(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...] | None:
    """Return the ranks in ring order, or None for direct exchange.

    The ring is used if some host has several of the ranks and another host has others. It visits the hosts in the order of their
    lowest ranks, whatever the order of ``ranks``.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in sorted(zip(ranks, hosts, strict=True)):
        ranks_by_host.setdefault(host, []).append(rank)
    if len(ranks_by_host) in (1, len(ranks)):
        return None
    return tuple(rank for members in ranks_by_host.values() for rank in members)
