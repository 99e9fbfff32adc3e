"""The transport between threads of one process, for tests and single-process runs. Strict where MPI may be lenient.

A send completes only when its receive has been posted (MPI buffers small messages): a program that runs here does not
depend on such buffering.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from types import TracebackType

import numpy as np

from hetero_mpi.comm.transport import Buffer, Request, TransportError, length_problem

Route = tuple[int, int, int]
"""(source, destination, tag)"""


class LoopbackNetwork:
    """``n`` transports that reach each other: ``transports[rank]`` belongs to the thread that plays ``rank``."""

    def __init__(self, n: int) -> None:
        self._lock = threading.Lock()
        self._sends: dict[Route, deque[Request]] = defaultdict(deque)
        self._receives: dict[Route, deque[Request]] = defaultdict(deque)
        self.transports = tuple(LoopbackTransport(self, rank, n) for rank in range(n))

    def _post(self, route: Route, request: Request) -> None:
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
            error = length_problem(receive.buffer.size, send.buffer.size)
        else:
            np.copyto(receive.buffer, send.buffer)
        receive.complete(error)
        send.complete()

    def _withdraw(self, rank: int) -> None:
        """End what ``rank`` has posted and nobody has matched."""
        withdrawn: list[Request] = []
        with self._lock:
            for queues, end in ((self._sends, 0), (self._receives, 1)):
                for route in [route for route in queues if route[end] == rank]:
                    withdrawn.extend(queues.pop(route))
        for request in withdrawn:
            request.complete(TransportError("the transport was closed before the message was moved"))


class LoopbackTransport:
    """One rank's end of a ``LoopbackNetwork``."""

    def __init__(self, network: LoopbackNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network
        self._requests: list[Request] = []
        self._closed = False

    def post_receive(self, source: int, tag: int, buffer: Buffer) -> Request:
        """See ``Transport``."""
        return self._post(Request("receive", source, tag, buffer), (source, self.rank, tag))

    def send(self, destination: int, tag: int, buffer: Buffer) -> Request:
        """See ``Transport``."""
        return self._post(Request("send", destination, tag, buffer), (self.rank, destination, tag))

    def _post(self, request: Request, route: Route) -> Request:
        if self._closed:
            raise TransportError(f"{request}: the transport is closed")
        self._requests = [other for other in self._requests if not other.completed]
        self._requests.append(request)
        if 0 <= request.peer < self.size:
            self._network._post(route, request)
        else:
            request.complete(TransportError(f"there is no rank {request.peer} among {self.size}"))
        return request

    def wait(self, request: Request) -> None:
        """See ``Transport``."""
        request.block()
        request.raise_error()

    def pending(self) -> int:
        """See ``Transport``."""
        return sum(not request.completed for request in self._requests)

    def close(self) -> None:
        """See ``Transport``."""
        if not self._closed:
            self._closed = True
            self._network._withdraw(self.rank)

    def __enter__(self) -> LoopbackTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
