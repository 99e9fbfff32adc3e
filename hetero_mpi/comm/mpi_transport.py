"""The transport over MPI: one communication thread owns MPI for its requests, so messages move while ranks compute.

MPI libraries make little progress on a message unless somebody calls into them. Here a thread does: it takes requests
from a queue, starts them, polls ``Testsome`` and sleeps in between, briefly at first and up to a millisecond when
nothing comes. With nothing pending it blocks on its queue and makes no MPI call at all, so that collectives on the
main thread have MPI to themselves (they need it when the library grants THREAD_SERIALIZED only).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hetero_mpi.comm.transport import Buffer, Request, TransportError, length_problem
from hetero_mpi.errors import UserError

PIECE_BYTES = 1 << 30
"""Longer messages travel in pieces: MPI counts are 32 bit in most libraries."""
SPIN_S = 200e-6
"""Poll without sleeping for this long after something has happened ..."""
SLEEP_SHARE = 0.1
SHORTEST_SLEEP_S = 10e-6
LONGEST_SLEEP_S = 1e-3
"""... then sleep between polls for this share of the time since then, within these limits: a message is noticed at most
a tenth late, and long waits cost nothing."""
CLOSE_S = 0.5
"""How long ``close`` lets pending sends run on before it abandons them."""


class MpiTransport:
    """Messages between the ranks of ``comm``. The constructor is collective (it duplicates the communicator).

    ``threaded=False`` makes the same calls on the caller's thread: ``wait`` polls, nothing moves outside it. For
    debugging, and for MPI libraries that allow no second thread.

    :raises UserError: ``threaded`` with a library that grants neither THREAD_MULTIPLE nor THREAD_SERIALIZED.
    """

    def __init__(self, comm: Any, threaded: bool = True, piece_bytes: int = PIECE_BYTES) -> None:
        from mpi4py import MPI

        if threaded and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UserError(
                "The communication thread needs an MPI library with THREAD_SERIALIZED or THREAD_MULTIPLE, this one "
                "grants less: set `communication_thread = false` in [cluster], or use another MPI build."
            )
        # Never freed by hand: freeing is collective, and a rank that fails could not wait for the others.
        self._progress = _Progress(comm.Dup(), MPI, piece_bytes)
        self._posted = 0
        self._closed = False
        self._thread = _CommunicationThread(self._progress) if threaded else None

    def post_receive(self, source: int, tag: int, buffer: Buffer) -> Request:
        """See ``Transport``."""
        return self._post(Request("receive", source, tag, buffer))

    def send(self, destination: int, tag: int, buffer: Buffer) -> Request:
        """See ``Transport``."""
        return self._post(Request("send", destination, tag, buffer))

    def _post(self, request: Request) -> Request:
        if self._closed:
            raise TransportError(f"{request}: the transport is closed")
        self._posted += 1
        if self._thread is not None:
            self._thread.post(request)
        else:
            self._progress.start(request)
        return request

    def wait(self, request: Request) -> None:
        """See ``Transport``."""
        if self._thread is not None:
            request.block()
        else:
            self._progress.run_until(lambda: request.completed)
        request.raise_error()

    def pending(self) -> int:
        """See ``Transport``."""
        return self._posted - self._progress.completed

    def close(self) -> None:
        """See ``Transport``. Sends that are still pending may run on for ``CLOSE_S``."""
        self._close(CLOSE_S)

    def _close(self, grace_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.stop()
        self._progress.abandon(grace_s)

    def __enter__(self) -> MpiTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nobody may be left to take the messages: do not wait for them.
        self._close(CLOSE_S if error is None else 0.0)


class _CommunicationThread:
    """The thread and its queue. ``None`` in the queue ends it."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="communication", daemon=True)
        self._thread.start()

    def post(self, request: Request) -> None:
        self._queue.put(request)

    def stop(self) -> None:
        """End the thread; what was posted before is started first. From now on the caller's thread owns MPI."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        pause = _Pause()
        while True:
            while (new := self._next(pause)) is not None:
                self._progress.start(new)
                pause.reset()
            if self._stopping:
                return
            if self._progress.poll():
                pause.reset()

    _stopping = False

    def _next(self, pause: _Pause) -> Request | None:
        """The next request; sleeps on the queue as long as the pause says, or for good if nothing is pending."""
        try:
            if self._progress.requests:
                sleep_s = pause.next_s()
                item = self._queue.get(timeout=sleep_s) if sleep_s > 0 else self._queue.get_nowait()
            else:
                item = self._queue.get()
        except queue.Empty:
            return None
        self._stopping = item is None
        return item


class _Pause:
    """The time to sleep before the next poll: the longer nothing has happened, the longer."""

    def __init__(self) -> None:
        self._last_event = time.perf_counter()

    def reset(self) -> None:
        """Something has happened."""
        self._last_event = time.perf_counter()

    def next_s(self) -> float:
        quiet_s = time.perf_counter() - self._last_event
        if quiet_s < SPIN_S:
            return 0.0
        return min(max(SLEEP_SHARE * quiet_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)


class _Progress:
    """The requests that MPI is working on, and how to push them. Used by one thread at a time."""

    def __init__(self, comm: Any, mpi: Any, piece_bytes: int) -> None:
        self._comm = comm
        self._mpi = mpi
        self._piece_bytes = piece_bytes
        self._handles: list[Any] = []
        """MPI requests, one per piece of a message ..."""
        self._owners: list[Request] = []
        """... and, beside each, the request it belongs to."""
        self._expected: list[int] = []
        """Bytes of each piece."""
        self.requests: dict[Request, int] = {}
        """Request -> pieces of it that are still under way."""
        self.completed = 0
        """Requests that have ended, well or badly."""

    def start(self, request: Request) -> None:
        """Hand a request to MPI. What MPI refuses completes with that error.

        A message of n bytes is n // piece_bytes full pieces and a last one that is shorter, or even empty: so a
        receiver with another length always sees a piece of a wrong length, and never waits for one that will not come.
        """
        call = self._comm.Isend if request.kind == "send" else self._comm.Irecv
        size = request.buffer.size
        self.requests[request] = 0
        for first in range(0, size + 1, self._piece_bytes):
            piece = request.buffer[first : first + self._piece_bytes]
            try:
                handle = call([piece, self._mpi.BYTE], request.peer, request.tag)
            except (self._mpi.Exception, ValueError, OverflowError) as error:
                self._complete(request, error)
                return
            self._handles.append(handle)
            self._owners.append(request)
            self._expected.append(piece.size)
            self.requests[request] += 1

    def poll(self) -> int:
        """Complete what MPI has finished. Returns how many pieces that were; an error of MPI fails all requests."""
        if not self._handles:
            return 0
        statuses = [self._mpi.Status() for _ in self._handles]
        try:
            finished = self._mpi.Request.Testsome(self._handles, statuses)
        except self._mpi.Exception as error:
            self._fail_all(error, statuses)
            return 1
        if not finished:
            return 0
        for index, status in zip(finished, statuses, strict=False):
            self._finish(self._owners[index], self._expected[index], status.Get_count(self._mpi.BYTE))
        gone = set(finished)
        self._keep([index for index in range(len(self._handles)) if index not in gone])
        return len(finished)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll on the caller's thread, with growing pauses, until ``done()`` or nothing is left to poll."""
        pause = _Pause()
        while not done() and self.requests:
            if self.poll():
                pause.reset()
            elif not done() and (sleep_s := pause.next_s()) > 0:
                time.sleep(sleep_s)

    def abandon(self, grace_s: float) -> None:
        """Cancel receives, give sends ``grace_s`` to end, and complete what is left with an error."""
        deadline = time.monotonic() + grace_s

        def sending() -> bool:
            return any(request.kind == "send" for request in self.requests)

        self.run_until(lambda: not sending() or time.monotonic() > deadline)
        for handle, owner in zip(self._handles, self._owners, strict=True):
            if owner.kind == "receive":
                handle.Cancel()
                handle.Wait()
        self._keep([])
        for request in list(self.requests):
            self._complete(request, TransportError("the transport was closed before the message was moved"))

    def _finish(self, request: Request, expected: int, arrived: int) -> None:
        if request not in self.requests:
            return
        if request.kind == "receive" and arrived != expected:
            self._complete(request, length_problem(request.buffer.size, request.buffer.size - expected + arrived))
            return
        self.requests[request] -= 1
        if self.requests[request] == 0:
            self._complete(request, None)

    def _complete(self, request: Request, error: BaseException | None) -> None:
        del self.requests[request]
        self.completed += 1
        request.complete(error)

    def _fail_all(self, error: BaseException, statuses: list[Any]) -> None:
        """MPI does not say which requests are still good after an error, so none is; the guilty ones say why."""
        truncated = {
            (status.Get_source(), status.Get_tag())
            for status in statuses
            if status.Get_error() != 0 and self._mpi.Get_error_class(status.Get_error()) == self._mpi.ERR_TRUNCATE
        }
        self._keep([])
        for request in list(self.requests):
            if request.kind == "receive" and (request.peer, request.tag) in truncated:
                self._complete(
                    request,
                    TransportError(
                        f"the message has more than the buffer's {request.buffer.size} bytes: "
                        "sender and receiver must agree on the length"
                    ),
                )
            else:
                self._complete(request, error)

    def _keep(self, indices: list[int]) -> None:
        self._handles = [self._handles[index] for index in indices]
        self._owners = [self._owners[index] for index in indices]
        self._expected = [self._expected[index] for index in indices]
