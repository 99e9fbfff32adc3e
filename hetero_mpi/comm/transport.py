"""Asynchronous messages, reduce-scatters and all-gathers between ranks: the contract of all transports.

The transport handles bytes and tags and knows nothing about models. A message buffer is a one-dimensional, contiguous ``uint8``
numpy array. In an exchange over a group, each member owns one part, which is a ``uint8`` array or, if parts are to be summed, a
``float32`` array. Buffers belong to the transport from the call until ``wait`` returns; all operations work in place.

* Messages with the same source and tag arrive in the order in which they are sent.
* ``post_receive``, ``send``, ``reduce_scatter`` and ``all_gather`` return at once. A send may not complete until the receive is
  posted, so post receives early.
* A message must be exactly as long as the receiving buffer; otherwise the receiver's ``wait`` raises. (This reports a bug but
  cannot undo it: Open MPI 5.0 writes beyond the buffer if a message of more than about 100 KB is too long.)
* All members of a group start its exchanges in the same order and with equal part lengths. Messages and exchanges over different
  groups may overlap.
* A reduce-scatter adds contributions in rank order, ``((r0 + r1) + r2) + ...``, elementwise in fp32. The result is bitwise equal
  whatever the order of arrival, the owner of the element, or the split into exchanges. Only if a group spans several hosts and one
  of them has several of its ranks may the order depend on the owner.
* A send or an exchange can be *held back* until its data is ready (``ready``), and a receive or an exchange can report its arrival
  (``arrived``). The thread that moves messages calls both functions, so they must be quick. Sends with the same destination and tag
  still leave in order, and exchanges over the same group still start in order.
* One thread makes requests; any thread may ask whether they are complete.
* ``wait`` raises the error of the request if it failed.

``ring_of`` selects the direct or the ring algorithm for a group's exchanges. It is a pure function because the planner uses it too.

A direct exchange takes one hop, but each of h ranks on a host sends to every remote rank, so ``h (n - h)`` times 1/n of the bytes
leave the host through its single NIC. A ring that visits one host after another leaves each host once per hop, which makes
``n - 1`` times 1/n of the bytes (Patarasuk & Yuan 2009)::

    bytes leaving a host with           1 of 8 ranks   2 ranks    4 ranks
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
"""``Numbers`` if the parts are to be summed, otherwise a ``Buffer``."""
Ready = Callable[[], bool]
Arrived = Callable[[], None]
T = TypeVar("T")


class TransportError(RuntimeError):
    """Raised if a message could not be delivered, because of a bug in the program or a lost machine."""


@dataclass(frozen=True)
class Group:
    """A group of ranks that exchange parts. Created by ``Transport.group`` and valid only for that transport."""

    ranks: tuple[int, ...]
    """Ranks of the members in increasing order, including this rank."""
    number: int
    """Number that distinguishes groups that have ranks in common."""

    def __str__(self) -> str:
        return f"group {self.number} of ranks {', '.join(map(str, self.ranks))}"


class Request:
    """A message or an exchange in progress. One thread completes it once; any number of threads may wait for it.

    Requests with the same ``route`` start in order.
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
        """Mark the request as complete, with its error if it failed. The transport calls this once."""
        if error is None and self._arrived is not None:
            try:
                self._arrived()
            except Exception as failure:
                error = failure
        self.error = error
        self._ended_s = time.perf_counter()

    @property
    def ended_s(self) -> float | None:
        """Time of completion (``time.perf_counter``), or None while the request is in progress."""
        return self._ended_s

    def raise_error(self) -> None:
        if self.error is not None:
            raise TransportError(f"{self}: {self.error}") from self.error


class Message(Request):
    """A message to or from the rank ``peer``."""

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
    """An in-place reduce-scatter (if ``sums`` is true) or all-gather over ``group``.

    ``parts`` has one part per rank, in the group's order. ``number`` identifies the data for the caller, such as a layer number.
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
    """Moves data between ranks as specified in the module's docstring. Usable as a context manager, which closes it."""

    idle: bool = False
    """Set by the rank's thread while it waits for its device, because frequent polling then does not slow down computation."""
    piece_bytes: int = 4 << 20
    """Longer tensors are split into pieces of this size, in the same way on both ranks. Copying a piece to or from a device takes
    half a millisecond, sending it over 10 Gbit/s takes 3 ms, and posting it takes about 20 us."""

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        """Post a writable buffer for the next message with this source and tag.

        ``arrived`` is called when the message has arrived, just before the request completes. It is not called after an error.
        """

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """Send the buffer once ``ready()`` is true. From then on, its contents must not change until the request is complete."""

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """Create a group of ranks, in increasing order and including this rank, that can exchange parts.

        Every member passes the same ranks and number. A rank must not reuse a number before its group has been dissolved.
        """

    def dissolve(self, group: Group) -> None:
        """Free the group's number. Every member calls this, at a time when no exchange over the group is in progress."""

    def exchange(self, request: Exchange) -> Request:
        """Start the exchange once its ``ready()`` is true."""

    def reduce_scatter(
        self,
        group: Group,
        parts: Sequence[Numbers],
        ready: Ready | None = None,
        arrived: Arrived | None = None,
        number: int = 0,
    ) -> Request:
        """Replace this member's own part with the sum over all members, starting once ``ready()`` is true.

        ``parts`` has one part per rank, in the group's order; the parts of other ranks are undefined afterwards. ``arrived`` is
        called when the sums arrive, just before the request completes, but never after an error. See ``Exchange`` for ``number``.
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
        """Send this member's own part to all other members once ``ready()`` is true. See ``reduce_scatter`` for the arguments."""
        return self.exchange(Exchange(group, parts, False, ready, arrived, number))

    def wait(self, request: Request) -> None:
        """Wait until a request is complete. Raises TransportError for a wrong length, an MPI failure or a closed transport."""

    def pending(self) -> int:
        """Return the number of incomplete requests."""

    def close(self) -> None:
        """Fail all pending requests, so that ``wait`` raises for them, and release the transport. Idempotent."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()


def check_group(rank: int, size: int, group: Group, groups_by_number: dict[int, Group]) -> None:
    """Raise ValueError if the ranks are not a valid group of this job or another group has the same number."""
    ranks = group.ranks
    if list(ranks) != sorted(set(ranks)) or rank not in ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"A group's ranks must be increasing, below {size}, and hold the calling rank {rank} (ranks: {ranks})."
        )
    if group.number in groups_by_number:
        ranks_in_use = groups_by_number[group.number].ranks
        raise ValueError(f"Every group needs a unique number (number: {group.number}, in use by ranks {ranks_in_use}).")


MAX_MESSAGES_IN_FLIGHT = 2
"""Enough messages to keep the link busy, but few enough to bound memory."""


def send_in_order(transport: Transport, messages: Iterable[tuple[int, int, Buffer]]) -> None:
    """Send (destination, tag, buffer) messages in order; return when all of them are complete."""
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
    """Receive (source, tag, buffer) messages in order, with up to ``max_in_flight`` receives posted at a time.

    Each buffer is valid until the next one is requested, so buffer ``i + max_in_flight`` may reuse buffer ``i``.
    """
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
    """Return the error for a length mismatch. ``arrived`` is the received length as text, such as ``90 bytes``."""
    if isinstance(request, Exchange):
        text = "the members do not agree on the length: all must start the group's exchanges in the same order"
    else:
        text = (
            f"the message has {arrived}, the buffer {request.buffer.size}: sender and receiver must agree on the length"
        )
    return TransportError(text)


# The order in which the ranks of a group exchange


def ring_of(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...] | None:
    """Return the ranks in ring order, or None if they are to exchange data directly.

    A ring is used if the ranks are on several hosts and at least one host has more than one of them. It visits the hosts in the
    order of their lowest ranks, whatever the order of ``ranks``.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in sorted(zip(ranks, hosts, strict=True)):
        ranks_by_host.setdefault(host, []).append(rank)
    if len(ranks_by_host) in (1, len(ranks)):
        return None
    return tuple(rank for members in ranks_by_host.values() for rank in members)
