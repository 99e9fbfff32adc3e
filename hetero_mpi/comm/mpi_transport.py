"""Transport over MPI, with a communication thread that moves messages while the rank computes.

MPI libraries make little progress on a message unless a thread calls into them. While the rank computes, the communication thread
polls and sleeps longer between polls while nothing arrives. It polls more often while the rank's thread waits for its device. If a
thread of the rank waits for a request, that thread polls instead, which avoids a hand-over between threads and contention for the
core and the interpreter lock. A lock makes MPI calls exclusive, so THREAD_SERIALIZED is sufficient.

While nothing is pending, the communication thread makes no MPI calls, so collectives on the main thread have MPI to themselves.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hetero_mpi.comm.mpi_group_exchange import GroupExchange
from hetero_mpi.comm.mpi_progress import MpiProgress
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.ulfm import Pause
from hetero_mpi.comm.transport import (
    Arrived,
    Buffer,
    Exchange,
    Group,
    Message,
    Ready,
    Request,
    Transport,
    TransportError,
    check_group,
)
from hetero_mpi.util.background import Background
from hetero_mpi.util.errors import UserError

PIECE_BYTES = 1 << 30
"""Longer messages are sent in pieces of this size, because counts have 32 bits in most MPI libraries."""
MIN_SLEEP_S = 100e-6
MAX_SLEEP_S = 2.5e-3
"""Limits of the communication thread's sleep between polls. An unsuccessful poll costs a computing rank about 40 us, because the
thread needs a core and the interpreter lock."""
MIN_USEFUL_POLL_S = 100e-6
"""A poll that takes longer than this has moved data: copying 300 KB takes about this long. The limit must exceed the 40 us of an
unsuccessful poll, or the communication thread would never increase its sleep."""
CLOSE_GRACE_S = 0.5
"""Time that ``close`` gives pending sends to finish before it abandons them."""


class MpiTransport(Transport):
    """Transport between the ranks of ``comm``. The constructor is collective because it duplicates the communicator.

    With ``threaded=False``, only ``wait`` polls, for debugging and MPI libraries without thread support. Otherwise, UserError is
    raised if the library supports neither THREAD_MULTIPLE nor THREAD_SERIALIZED. ``hosts`` lists the host of each rank so that
    ``ring_of`` can minimise traffic between hosts. By default all ranks are on one host.
    """

    def __init__(
        self, comm: Any, threaded: bool = True, piece_bytes: int = PIECE_BYTES, hosts: Sequence[str] = ()
    ) -> None:
        from mpi4py import MPI

        if threaded and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UserError(
                "mpi.thread_level",
                "The communication thread needs an MPI library with THREAD_SERIALIZED or THREAD_MULTIPLE, but this one "
                "does not support it: set `communication_thread = false` in [cluster], or use another MPI build.",
            )
        self._message_comm, self._exchange_comm = ulfm.duplicate(comm), ulfm.duplicate(comm)
        self._piece_bytes = piece_bytes
        self._hosts = tuple(hosts) or ("",) * comm.Get_size()
        self._progress = MpiProgress(MPI)
        self._groups: dict[int, Group] = {}
        self._exchanges: dict[Group, GroupExchange] = {}
        self._mpi_lock = threading.Lock()
        self._to_start: deque[Request] = deque()
        self._held: list[Request] = []
        """Sends and exchanges whose data is not ready, and later requests on the same routes."""
        self._posted_count = 0
        self._closed = False
        self.waiting: list[Request] = []
        """Requests for which threads of the rank are waiting. These threads poll MPI themselves."""
        self._thread = _CommunicationThread(self) if threaded else None

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        return self._post(Message("receive", source, tag, buffer, arrived=arrived))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        return self._post(Message("send", destination, tag, buffer, ready=ready))

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """See ``Transport.group``. Does not wait for other ranks."""
        group = Group(ranks, number)
        rank = self._exchange_comm.Get_rank()
        check_group(rank, self._exchange_comm.Get_size(), group, self._groups)
        self._groups[number] = group
        self._exchanges[group] = GroupExchange(
            self._progress, self._exchange_comm, rank, group, [self._hosts[r] for r in ranks]
        )
        return group

    def dissolve(self, group: Group) -> None:
        del self._groups[group.number], self._exchanges[group]

    def exchange(self, request: Exchange) -> Request:
        assert request.group in self._exchanges, f"{request.group} was not made by this transport"
        return self._post(request)

    def _post(self, request: Request) -> Request:
        if self._closed:
            raise TransportError(f"{request}: the transport is closed")
        self._posted_count += 1
        self._to_start.append(request)
        # If the communication thread holds the lock, it starts the request.
        if self._mpi_lock.acquire(blocking=False):
            try:
                self._start()
            finally:
                self._mpi_lock.release()
        if self._thread is not None:
            self._thread.wake()
        return request

    def _start(self) -> bool:
        """Start posted requests and held requests whose data is ready, and return whether any held request has started."""
        while self._to_start:
            request = self._to_start.popleft()
            receives = isinstance(request, Message) and request.kind == "receive"
            if request.ready is not None or (self._held and not receives):
                self._held.append(request)
            else:
                self._start_request(request)
        return bool(self._held) and self._start_held()

    def _start_request(self, request: Request) -> None:
        if isinstance(request, Exchange):
            self._exchanges[request.group].start(request)
        else:
            assert isinstance(request, Message)
            self._progress.start_message(self._message_comm, request, self._piece_bytes)

    def _start_held(self) -> bool:
        """Start the held requests whose data is ready, in order for each (destination, tag) and for each group."""
        still_held: list[Request] = []
        blocked_routes = set()
        for request in self._held:
            try:
                if request.route in blocked_routes or not (request.ready is None or request.ready()):
                    blocked_routes.add(request.route)
                    still_held.append(request)
                    continue
            except Exception as error:
                self._progress.register(request)
                self._progress.complete_request(request, error)
                continue
            self._start_request(request)
        started = len(still_held) < len(self._held)
        self._held = still_held
        return started

    def poll(self) -> bool:
        """Start posted requests and handle completed ones; return whether any request made progress."""
        with self._mpi_lock:
            started = self._start()
            return self._progress.poll() or started

    def wait(self, request: Request) -> None:
        """See ``Transport.wait``. Also raises RankLost if any rank is lost, even if the request does not involve it."""
        if not request.completed:
            self.waiting.append(request)
            pause, check = Pause(), ulfm.RevocationCheck()
            try:
                while not request.completed:
                    begin_s = time.perf_counter()
                    # A long poll has copied part of a message: poll again at once.
                    if self.poll() or time.perf_counter() - begin_s > MIN_USEFUL_POLL_S:
                        pause.reset()
                    else:
                        check()
                        pause.rest()
            finally:
                self.waiting.remove(request)
        if ulfm.is_loss(request.error):
            raise ulfm.RankLost from request.error
        request.raise_error()

    def pending(self) -> int:
        return self._posted_count - self._progress.completed

    @property
    def progress_count(self) -> int:
        """A counter that grows whenever a request is posted or completed."""
        return self._posted_count + self._progress.completed

    def sending(self) -> dict[str, list[int]]:
        """Map each rank to the [messages, bytes] that MPI has not finished sending to it. Callable from any thread."""
        pending_by_rank: dict[str, list[int]] = {}
        for request in list(self._progress.requests):
            if isinstance(request, Message) and request.kind == "send":
                totals = pending_by_rank.setdefault(str(request.peer), [0, 0])
                totals[0], totals[1] = totals[0] + 1, totals[1] + request.buffer.nbytes
        return pending_by_rank

    def close(self) -> None:
        """Close the transport, giving pending sends up to ``CLOSE_GRACE_S`` to finish."""
        self._close(CLOSE_GRACE_S)

    def _close(self, grace_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.stop()
        with self._mpi_lock:
            self._start()
            for request in self._held:
                self._progress.register(request)
            self._progress.abandon(grace_s)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # After a failure there may be no receiver left: do not wait for sends.
        self._close(CLOSE_GRACE_S if error is None else 0.0)


class _CommunicationThread:
    """Polls MPI while requests are pending and no thread waits for one."""

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._idle = self._stopping = False
        self._sleep_s = MIN_SLEEP_S
        self._wake_events: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._background = Background("moving messages", self._run)

    def wake(self) -> None:
        if self._idle:
            self._idle = False
            self._wake_events.put(None)

    def stop(self) -> None:
        """Stop the thread. Afterwards only the calling thread makes MPI calls."""
        self._stopping = True
        self._wake_events.put(None)
        self._background.finish()

    def _run(self) -> None:
        transport = self._transport
        while not self._stopping:
            if transport.pending() == 0:
                self._idle = True
                if transport.pending() == 0:  # checked again: a poster reads `_idle` after counting its request
                    self._wake_events.get()
                self._idle = False
            elif transport.waiting:
                self._sleep_s = MAX_SLEEP_S  # the waiting thread polls, and needs the interpreter lock
            else:
                begin_s = time.thread_time()
                finished = transport.poll()
                made_progress = finished or time.thread_time() - begin_s > MIN_USEFUL_POLL_S
                self._sleep_s = min(max(self._sleep_s * (0.5 if made_progress else 2), MIN_SLEEP_S), MAX_SLEEP_S)
            time.sleep(MIN_SLEEP_S if transport.idle else self._sleep_s)
