"""Joins device tensors and the transport: what a stage receives from one neighbour, and what it sends to one.

Receives are posted early into a ring of reused host buffers; on CPU ranks a received tensor *is* its buffer and a sent tensor
is read where it lies, so nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import Backend, host_bytes


class Inbox:
    """Tensors that arrive in micro-batch order from one rank.

    A step begins with ``begin``; then for each micro-batch in order ``take``, and ``release`` as soon as nobody reads the
    tensor any more. ``depth`` buffers are in use at once: one more than are held between take and release keeps a receive
    posted while the stage computes.
    """

    def __init__(
        self, transport: Transport, source: int, tag: int, backend: Backend, dtype: torch.dtype, depth: int
    ) -> None:
        self.transport, self.source, self.tag = transport, source, tag
        self.backend, self.dtype, self.depth = backend, dtype, depth
        self._free: list[torch.Tensor] = []
        self._posted: deque[tuple[torch.Tensor, Request]] = deque()
        self._held: deque[torch.Tensor] = deque()
        self._to_come: deque[tuple[int, ...]] = deque()

    def begin(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Announce the shapes of the step's micro-batches, in order, and post the first receives."""
        assert not self._posted and not self._held, "the previous step left receives behind"
        self._to_come.extend(shapes)
        while self._to_come and len(self._posted) < self.depth:
            self._post()

    def take(self) -> torch.Tensor:
        """The next micro-batch's tensor on the device; waits until it has arrived."""
        buffer, request = self._posted.popleft()
        self.transport.wait(request)
        self._held.append(buffer)
        return self.backend.from_host(buffer)

    def release(self) -> None:
        """The oldest tensor taken is no longer read: its buffer serves the next receive."""
        self._free.append(self._held.popleft())
        if self._to_come:
            self._post()

    def _post(self) -> None:
        shape = self._to_come.popleft()
        buffer = next((free for free in self._free if free.shape == shape), None)
        if buffer is None:
            self._free.clear()  # another shape: the buffers of the former one are of no use any more
            buffer = torch.empty(shape, dtype=self.dtype)
        else:
            self._free = [free for free in self._free if free is not buffer]
        self._posted.append((buffer, self.transport.post_receive(self.source, self.tag, host_bytes(buffer))))


class Outbox:
    """Tensors sent in micro-batch order to one rank."""

    def __init__(self, transport: Transport, destination: int, tag: int, backend: Backend) -> None:
        self.transport, self.destination, self.tag, self.backend = transport, destination, tag, backend
        self._sent: deque[tuple[torch.Tensor, Request]] = deque()

    def put(self, tensor: torch.Tensor) -> int:
        """Start sending; returns the bytes. The tensor's memory is kept until it has left."""
        while self._sent and self._sent[0][1].completed:
            self.transport.wait(self._sent.popleft()[1])
        host = self.backend.to_host(tensor)
        content = host_bytes(host)
        self._sent.append((host, self.transport.send(self.destination, self.tag, content)))
        return content.nbytes

    def flush(self) -> None:
        """Return when everything has left."""
        while self._sent:
            self.transport.wait(self._sent.popleft()[1])
