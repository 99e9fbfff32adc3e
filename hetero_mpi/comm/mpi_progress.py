"""Starts and polls the MPI requests of a transport. Used by only one thread at a time.

A ``Request`` consists of *parts* with one MPI request each: a message is split into pieces, an exchange into the segments that
members send each other. MPI reports finished parts in any order, and the callback of a part starts its successor.

MPI requests are persistent, because MPI frees a non-persistent request when it reports a failure. If bytes of the failed request
are still in flight, as happens when ranks survive the loss of another rank, Open MPI 5 then aborts the job ("Send error after
request freed"). Sends in exchanges are synchronous, because a short send could otherwise be freed before its data has left.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.ulfm import Pause
from hetero_mpi.comm.transport import Message, Request, TransportError, length_problem

Then = Callable[[], None]

_ABANDONED: list[Any] = []
"""Abandoned MPI requests, kept until the process ends because MPI may still write into their buffers."""


@dataclass(slots=True)
class _Part:
    request: Request
    receives: bool
    expected_bytes: int
    then: Then | None
    """Called when the part is done. If None, the request completes with the last of its parts that have no ``then``."""


class MpiProgress:
    """The active MPI requests of one transport."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._handles: list[Any] = []
        self._parts: list[_Part] = []
        """The part to which each MPI request in ``_handles`` belongs."""
        self._statuses: list[Any] = []
        """Status objects, at least one per handle. They are reused, so that polling allocates no objects."""
        self.requests: dict[Request, int] = {}
        """Maps each request to the number of its active parts that have no ``then``."""
        self.completed = 0
        """Number of requests that have succeeded or failed."""

    def register(self, request: Request) -> None:
        """Register a request, whose parts are then started with ``send`` and ``receive`` and ended with ``complete_request``."""
        self.requests[request] = 0

    def start_message(self, comm: Any, request: Message, piece_bytes: int) -> None:
        """Start a message. If MPI rejects it, the request completes with MPI's error.

        A message of n bytes is sent as n // piece_bytes full pieces and a shorter, possibly empty, last piece. A receiver that
        expects a different length therefore always gets a piece of the wrong length and never waits for one that is not sent.
        """
        self.register(request)
        start_part = self.send if request.kind == "send" else self.receive
        if request.buffer.size < piece_bytes:
            start_part(comm, request, request.buffer, request.peer, request.tag)
            return
        for first in range(0, request.buffer.size + 1, piece_bytes):
            start_part(comm, request, request.buffer[first : first + piece_bytes], request.peer, request.tag)

    def send(self, comm: Any, request: Request, buffer: Any, peer: int, tag: int, then: Then | None = None) -> None:
        call = comm.Send_init if then is None else comm.Ssend_init
        self._start(call, _Part(request, False, buffer.nbytes, then), buffer, peer, tag)

    def receive(self, comm: Any, request: Request, buffer: Any, peer: int, tag: int, then: Then | None = None) -> None:
        self._start(comm.Recv_init, _Part(request, True, buffer.nbytes, then), buffer, peer, tag)

    def _start(self, call: Any, part: _Part, buffer: Any, peer: int, tag: int) -> None:
        if part.request not in self.requests:
            return  # an earlier part has failed
        try:
            handle = call([buffer, buffer.nbytes, self._mpi.BYTE], peer, tag)
            handle.Start()
        except (self._mpi.Exception, ValueError, OverflowError) as error:
            ulfm.revoke_on_loss(error)
            self.complete_request(part.request, error)
            return
        self._handles.append(handle)
        self._parts.append(part)
        if len(self._statuses) < len(self._handles):
            self._statuses.append(self._mpi.Status())
        if part.then is None:
            self.requests[part.request] += 1

    def complete_request(self, request: Request, error: BaseException | None = None) -> None:
        del self.requests[request]
        self.completed += 1
        request.mark_complete(error)

    def poll(self) -> bool:
        """Handle the parts that MPI has finished, and return whether there were any. An MPI error fails all requests."""
        if not self._handles:
            return False
        try:
            finished = self._mpi.Request.Testsome(self._handles, self._statuses)
        except self._mpi.Exception as error:
            self._fail_all(error)
            return True
        if not finished:
            return False
        ended = [
            (self._parts[index], status.Get_count(self._mpi.BYTE))
            for index, status in zip(finished, self._statuses, strict=False)
        ]
        for index in sorted(finished, reverse=True):
            self._handles.pop(index).Free()
            del self._parts[index]
        for part, arrived_bytes in ended:
            self._finish(part, arrived_bytes)
        return True

    def _finish(self, part: _Part, arrived_bytes: int) -> None:
        request = part.request
        if request not in self.requests:
            return
        if part.receives and arrived_bytes != part.expected_bytes:
            arrived_bytes += request.buffer.size - part.expected_bytes
            self.complete_request(request, length_problem(request, f"{arrived_bytes} bytes"))
        elif part.then is not None:
            part.then()
        elif self.requests[request] > 1:
            self.requests[request] -= 1
        else:
            self.complete_request(request)

    def abandon(self, grace_s: float) -> None:
        """Give sends ``grace_s`` to finish, cancel the receives, and complete the remaining requests with an error."""
        deadline = time.monotonic() + grace_s
        pause = Pause()
        while not all(part.receives for part in self._parts) and time.monotonic() < deadline:
            if self.poll():
                pause.reset()
            else:
                pause.rest()
        for handle, part in zip(self._handles, self._parts, strict=True):
            # After the loss of a rank, MPI may wait forever for a partially received message.
            if part.receives and not ulfm.any_rank_lost():
                self._cancel(handle)
        self._abandon_handles()
        for request in list(self.requests):
            self.complete_request(request, TransportError("the transport was closed before the operation completed"))

    def _cancel(self, handle: Any) -> None:
        try:
            handle.Cancel()
            handle.Wait()
            handle.Free()
        except self._mpi.Exception as error:
            if not ulfm.is_loss(error):
                raise

    def _fail_all(self, error: BaseException) -> None:
        """Fail all requests, as an MPI error does not tell which of them are intact. Truncated receives get their own error."""
        if ulfm.revoke_on_loss(error):
            error = ulfm.RankLost()
        truncated = {
            (status.Get_source(), status.Get_tag())
            for status in self._statuses[: len(self._handles)]
            if status.Get_error() != 0 and self._mpi.Get_error_class(status.Get_error()) == self._mpi.ERR_TRUNCATE
        }
        self._abandon_handles()
        for request in list(self.requests):
            receives = isinstance(request, Message) and request.kind == "receive"
            truncates = receives and (request.peer, request.tag) in truncated  # type: ignore[attr-defined]
            self.complete_request(request, length_problem(request, "more bytes") if truncates else error)

    def _abandon_handles(self) -> None:
        _ABANDONED.extend(handle for handle in self._handles if handle != self._mpi.REQUEST_NULL)
        self._handles.clear()
        self._parts.clear()
