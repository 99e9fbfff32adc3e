"""Moving bytes between ranks, and summing over them, beside the computation: the contract that all transports keep.

Bytes and tags, nothing about models. A message's buffer is a one-dimensional, contiguous ``uint8`` numpy array; a group exchanges
parts, one owned by each member: such arrays too, or of a sum ``float32`` ones. A buffer belongs to the transport from the call
until ``wait`` returns: it is sent from, received into, and summed in, where it lies.

* Messages of one (source, tag) arrive in the order in which they were sent.
* ``post_receive``, ``send``, ``reduce_scatter`` and ``all_gather`` return at once. A send may complete only when the receive is
  posted: post receives early.
* A message must be exactly as long as the buffer that receives it; the receiver's ``wait`` raises if it is not. (That tells a
  defect, it does not undo it: Open MPI 5.0 writes beyond the buffer when a message of some 100 KB or more is too long.)
* All members of a group start its exchanges in the same order and with parts of equal lengths. Exchanges of
  different groups, and messages, may be under way at the same time.
* A reduce-scatter adds in the order of the group's ranks, ``((r0 + r1) + r2) + ...``, element by element in fp32: the same bits
  whatever arrives first, whoever owns the element, and however the elements are divided among exchanges. Only where a group has
  several ranks on one of several hosts, a transport may add in an order that depends on the owner.
* A send or an exchange may be *held back* until its bytes are there (``ready``), a receive or exchange may say when they
  have come (``arrived``): both are called by the thread that moves the messages, and must be quick. Sends of one (destination, tag)
  leave in order all the same, and exchanges of one group start in order.
* Requests are made by one thread; any may ask whether they are complete.
* Whatever goes wrong with a request is raised by ``wait`` for it.

Also here: which way reduce-scatters and all-gathers take between the ranks of a group. Pure, since the planner prices the same way.

Direct exchange takes one hop, but of h ranks on one host every one sends to every rank elsewhere: ``h (n - h)`` of 1/n of the
bytes leave the host, through its one NIC. A ring that visits host after host leaves each host once per hop: ``n - 1`` of 1/n
(Patarasuk & Yuan 2009). So::

    8 ranks, bytes that leave a host    alone on it    2 on it    4 on it
    direct                              7/8            12/8       16/8
    around the ring                     7/8            7/8        7/8
"""

from __future__ import annotations

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
    """A message could not be moved as promised: there is a defect in the program, or a machine is gone."""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange parts. Made by ``Transport.group``; of use with that transport only."""

    ranks: tuple[int, ...]
    """Increasing; this rank is one of them."""
    number: int
    """Distinguishes groups that share ranks."""

    def __str__(self) -> str:
        return f"group {self.number} of ranks {', '.join(map(str, self.ranks))}"


class Request:
    """A message or exchange under way. It is completed once, by any thread; any number of threads may wait for it.

    ``route``: the key within which requests start in order.
    """

    def __init__(
        self, buffer: NDArray[Any], route: Any, ready: Ready | None = None, arrived: Arrived | None = None
    ) -> None:
        self.buffer, self.route, self.ready, self._arrived = buffer, route, ready, arrived
        self.error: BaseException | None = None
        self._ended_s: float | None = None

    @property
    def completed(self) -> bool:
        """Would ``wait`` return (or raise) at once?"""
        return self._ended_s is not None

    def mark_complete(self, error: BaseException | None = None) -> None:
        """Mark as complete, with its error if any. Called once, by the transport."""
        if error is None and self._arrived is not None:
            try:
                self._arrived()
            except Exception as failure:
                error = failure
        self.error = error
        self._ended_s = time.perf_counter()

    @property
    def ended_s(self) -> float | None:
        """When it was seen to be complete (``time.perf_counter``); None: it is not."""
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
        check_buffer(buffer, writable=kind == "receive")
        super().__init__(buffer, (peer, tag), ready, arrived)
        self.kind, self.peer, self.tag = kind, peer, tag

    def __str__(self) -> str:
        direction = "to" if self.kind == "send" else "from"
        return f"{self.kind} of {self.buffer.size} bytes {direction} rank {self.peer}, tag {self.tag}"


class Exchange(Request):
    """A reduce-scatter (``sums``) or an all-gather over ``group``, in place.

    ``parts``: in the order of its ranks. ``number``: the caller's own number of what is exchanged, such as a layer's.
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
        check_parts(group, parts, np.float32 if sums else np.uint8)
        super().__init__(parts[0], group, ready, arrived)
        self.group, self.parts, self.sums, self.number = group, tuple(parts), sums, number

    def __str__(self) -> str:
        name = "reduce-scatter" if self.sums else "all-gather"
        return f"{name} of {sum(part.nbytes for part in self.parts)} bytes over {self.group}"


class Transport(Protocol):
    """Moves messages and sums between ranks; the module's docstring is the contract. A context manager: leaving it closes the
    transport.
    """

    idle: bool = False
    """The rank's thread waits for its device, so polling often costs no computation. Set by that thread."""
    piece_bytes: int = 4 << 20
    """Longer tensors travel in pieces of this size, cut alike at both ends, whether or not they copy. One is copied to or from a
    device in half a millisecond, and travels in 3 on a link of 10 Gbit/s; posting it costs some 20 us."""

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        """Announce a writable buffer for the next message of (source, tag).

        ``arrived`` is called when it has come, before the request is complete; never if anything went wrong.
        """
        ...

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """Send the buffer's bytes, once ``ready()`` says that they are there. After that they must not change before the request is
        complete."""
        ...

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """The ranks (increasing, this one among them) as a group that can exchange parts.

        Every member calls it with the same ranks and number; a number is used once per rank until it is dissolved.
        """
        ...

    def dissolve(self, group: Group) -> None:
        """The group's number is free again. Every member calls it, with no exchange of the group under way on any."""
        ...

    def exchange(self, request: Exchange) -> Request:
        """Start an exchange, once its ``ready()`` says that the bytes are there."""
        ...

    def reduce_scatter(
        self,
        group: Group,
        parts: Sequence[Numbers],
        ready: Ready | None = None,
        arrived: Arrived | None = None,
        number: int = 0,
    ) -> Request:
        """Start to replace the numbers of this member's own part by their sums over the members, once ``ready()`` says that all
        parts' are there. ``parts``: in the order of the group's ranks; what others' parts hold then is not said.

        ``arrived`` is called when the sums are there, before the request is complete; never if anything went wrong. ``number``:
        see ``Exchange``.
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
        """Start to bring every member's own part to all others, once ``ready()`` says that this member's is there; else as
        ``reduce_scatter``."""
        return self.exchange(Exchange(group, parts, False, ready, arrived, number))

    def wait(self, request: Request) -> None:
        """Return when the request is complete. Raises TransportError: the message had another length, MPI failed, or the transport
        was closed meanwhile.
        """
        ...

    def pending(self) -> int:
        """Number of requests that are not complete."""
        ...

    def close(self) -> None:
        """End all requests that are still pending (their ``wait`` raises) and release the transport. Idempotent."""
        ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()


def check_buffer(buffer: Buffer, writable: bool) -> None:
    """Refuse a buffer that could not be moved without a copy. Raises ValueError: not a one-dimensional contiguous uint8 array, or
    read-only where it must be written.
    """
    if buffer.ndim != 1 or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(
            "A message buffer must be a one-dimensional contiguous uint8 array "
            f"(shape: {buffer.shape}, dtype: {buffer.dtype}): pass `array.reshape(-1).view(np.uint8)`."
        )
    if writable and not buffer.flags.writeable:
        raise ValueError("A buffer to receive into must be writable: pass an array that owns its bytes.")


def check_parts(group: Group, parts: Sequence[Part], dtype: type[np.generic]) -> None:
    """Refuse what could not be exchanged in place. Raises ValueError: not a one-dimensional, contiguous, writable array of
    ``dtype`` for each member.
    """
    if len(parts) != len(group.ranks):
        raise ValueError(f"Every member of {group} owns one part (parts: {len(parts)}).")
    for part in parts:
        if part.ndim != 1 or part.dtype != dtype or not part.flags.c_contiguous or not part.flags.writeable:
            raise ValueError(
                f"A part must be a one-dimensional, contiguous, writable {np.dtype(dtype)} array "
                f"(shape: {part.shape}, dtype: {part.dtype}): pass `array.reshape(-1)`."
            )


def check_group(rank: int, size: int, group: Group, groups_by_number: dict[int, Group]) -> None:
    """Refuse ranks that are no group of this job, or a number that is in use for another group. Raises ValueError: with the rule
    and the values.
    """
    ranks = group.ranks
    if list(ranks) != sorted(set(ranks)) or rank not in ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"A group's ranks must be increasing, below {size}, and hold the calling rank {rank} (ranks: {ranks})."
        )
    if group.number in groups_by_number:
        ranks_in_use = groups_by_number[group.number].ranks
        raise ValueError(
            f"Every group needs a number of its own (number: {group.number}, taken by ranks {ranks_in_use})."
        )


MAX_MESSAGES_IN_FLIGHT = 2
"""Messages under way at once: enough to keep the link busy, few enough to bound memory."""


def send_in_order(transport: Transport, messages: Iterable[tuple[int, int, Buffer]]) -> None:
    """Send messages (destination, tag, bytes) that an iterator produces; returns when all have left."""
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
    """Receive messages (source, tag, buffer), of which ``max_in_flight`` are posted at once. Each is valid until the next one is taken: an
    iterator may give buffer ``i`` again as buffer ``i + ahead``."""
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
    """The error for a request whose length is not that of the other ends. ``arrived``: in words, such as ``90 bytes``."""
    if isinstance(request, Exchange):
        text = "the members do not agree on the length: all must start the group's exchanges in the same order"
    else:
        text = (
            f"the message has {arrived}, the buffer {request.buffer.size}: sender and receiver must agree on the length"
        )
    return TransportError(text)


# The order in which the ranks of a group exchange


def ring_of(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks in the order of the ring, or None where they exchange directly.

    A ring where some host holds several of the ranks and another host holds others; there, host after host, in the order of
    their lowest ranks. The order in which ``ranks`` are given does not matter.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in sorted(zip(ranks, hosts, strict=True)):
        ranks_by_host.setdefault(host, []).append(rank)
    if len(ranks_by_host) in (1, len(ranks)):
        return None
    return tuple(rank for members in ranks_by_host.values() for rank in members)
