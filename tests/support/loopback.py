"""The transport between threads of one process. Strict where MPI may be lenient.

A send completes only when its receive has been posted (MPI buffers small messages): a program that runs here does not
depend on such buffering.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from hetero_mpi.comm.transport import (
    Arrived,
    Buffer,
    Exchange,
    Group,
    Message,
    Numbers,
    Ready,
    Request,
    Transport,
    TransportError,
    check_group,
    length_problem,
)

Route = tuple[int, int, int]
"""(source, destination, tag)"""


def in_order(parts: Sequence[Numbers]) -> Numbers:
    """((r0 + r1) + r2) + ..."""
    total: Numbers = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


class LoopbackNetwork:
    """``n`` transports that reach each other: ``transports[rank]`` belongs to the thread that plays ``rank``."""

    def __init__(self, n: int) -> None:
        self._lock = threading.Lock()
        self._sends: dict[Route, deque[Message]] = defaultdict(deque)
        self._receives: dict[Route, deque[Message]] = defaultdict(deque)
        self._exchanges: dict[Group, dict[int, deque[Exchange]]] = {}
        self.transports = tuple(LoopbackTransport(self, rank, n) for rank in range(n))

    def _post(self, route: Route, request: Message) -> None:
        """Queue a request and move the bytes if its counterpart is there: first come, first matched, per route."""
        with self._lock:
            own, other = self._sends[route], self._receives[route]
            if request.kind == "receive":
                own, other = other, own
            if not other:
                own.append(request)
                return
            partner = other.popleft()
        send, receive = (request, partner) if request.kind == "send" else (partner, request)
        error = None
        if send.buffer.size != receive.buffer.size:
            error = length_problem(receive, f"{send.buffer.size} bytes")
        else:
            np.copyto(receive.buffer, send.buffer)
        receive.complete(error)
        send.complete()

    def _exchange(self, rank: int, request: Exchange) -> None:
        """Queue an exchange; the last member to come adds up, in the order of the ranks, or hands out."""
        with self._lock:
            queues = self._exchanges.setdefault(request.group, {member: deque() for member in request.group.ranks})
            queues[rank].append(request)
            if not all(queues.values()):
                return
            members = [queue.popleft() for queue in queues.values()]
        error = None
        if len({(member.sums, *(part.size for part in member.parts)) for member in members}) > 1:
            error = length_problem(members[0], "")
        else:
            for place, owner in enumerate(members):
                others = [member for member in members if member is not owner]
                if request.sums:
                    np.copyto(owner.parts[place], in_order([member.parts[place] for member in members]))
                for other in others:  # what others have of a sum is not said
                    other.parts[place][...] = np.nan if request.sums else owner.parts[place]
        for member in members:
            member.complete(error)

    def _withdraw(self, rank: int) -> None:
        """End what ``rank`` has posted and nobody has matched."""
        withdrawn: list[Request] = []
        with self._lock:
            for queues_of_group in self._exchanges.values():
                if rank in queues_of_group:
                    withdrawn.extend(queues_of_group[rank])
                    queues_of_group[rank].clear()
            for queues, end in ((self._sends, 0), (self._receives, 1)):
                for route in [route for route in queues if route[end] == rank]:
                    withdrawn.extend(queues.pop(route))
        for request in withdrawn:
            request.complete(TransportError("the transport was closed before the message was moved"))


class LoopbackTransport(Transport):
    """One rank's end of a ``LoopbackNetwork``."""

    def __init__(self, network: LoopbackNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network
        self._requests: list[Request] = []
        self._groups: dict[int, Group] = {}
        self._closed = False

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        """See ``Transport``."""
        return self._post(Message("receive", source, tag, buffer, arrived=arrived), (source, self.rank, tag))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """See ``Transport``. Nobody looks after messages here, so the caller waits until the bytes are there."""
        _wait_for(ready)
        return self._post(Message("send", destination, tag, buffer), (self.rank, destination, tag))

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """See ``Transport``."""
        group = Group(ranks, number)
        check_group(self.rank, self.size, group, self._groups)
        self._groups[number] = group
        return group

    def dissolve(self, group: Group) -> None:
        """See ``Transport``."""
        del self._groups[group.number]

    def exchange(self, request: Exchange) -> Request:
        """See ``Transport``."""
        assert self._groups.get(request.group.number) == request.group, (
            f"{request.group} was not made by this transport"
        )
        _wait_for(request.ready)
        self._remember(request)
        self._network._exchange(self.rank, request)
        return request

    def _post(self, request: Message, route: Route) -> Request:
        self._remember(request)
        if 0 <= request.peer < self.size:
            self._network._post(route, request)
        else:
            request.complete(TransportError(f"there is no rank {request.peer} among {self.size}"))
        return request

    def _remember(self, request: Request) -> None:
        if self._closed:
            raise TransportError(f"{request}: the transport is closed")
        self._requests = [other for other in self._requests if not other.completed]
        self._requests.append(request)

    def wait(self, request: Request) -> None:
        """See ``Transport``."""
        _wait_for(lambda: request.completed)
        request.raise_error()

    def pending(self) -> int:
        """See ``Transport``."""
        return sum(not request.completed for request in self._requests)

    def close(self) -> None:
        """See ``Transport``."""
        if not self._closed:
            self._closed = True
            self._network._withdraw(self.rank)


def _wait_for(ready: Ready | None) -> None:
    while ready is not None and not ready():
        time.sleep(1e-4)
