"""Joins device tensors and the transport: what a stage receives from one neighbour, and what it sends to one.

Receives are posted early into reused host buffers; on CPU ranks a received tensor *is* its buffer and a sent tensor is read
where it lies, so nothing is copied. Once buffers are as large as the largest message, no step allocates any.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

import torch

from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import HOST, Backend, host_bytes


class HostBuffers:
    """Host memory for tensors of changing shapes: blocks as large as the largest so far, lent and given back."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self.backend, self.dtype = backend, dtype
        self._numbers = 0
        self._free: list[torch.Tensor] = []
        self.allocated = 0
        """Blocks made so far: constant once shapes repeat."""

    def reserve(self, shape: Sequence[int]) -> None:
        """Blocks hold a tensor of ``shape`` from now on."""
        if math.prod(shape) > self._numbers:
            self._numbers = math.prod(shape)
            self._free.clear()

    def lend(self, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of ``shape`` over a free block, or over a new one."""
        self.reserve(shape)
        if self._free:
            block = self._free.pop()
        else:
            self.allocated += 1
            block = self.backend.host_buffer((self._numbers,), self.dtype)
        return block[: math.prod(shape)].view(*shape)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Nobody reads a lent tensor any more."""
        numbers = tensor.untyped_storage().nbytes() // self.dtype.itemsize
        if numbers >= self._numbers:
            self._free.append(tensor.as_strided((numbers,), (1,), 0))


class Inbox:
    """Tensors that arrive in micro-batch order from one rank.

    A step begins with ``begin``; then for each micro-batch in order ``take``, and ``release`` as soon as nobody reads the
    tensor any more. ``depth`` buffers are in use at once: one more than are held between take and release keeps a receive
    posted while the stage computes.

    Attributes:
        arrived_s: when the tensor that was taken last was seen to be in host memory (``time.perf_counter``).
        copied_s: seconds that bringing it to the device took; 0 on CPU ranks, which copy nothing.
    """

    def __init__(
        self, transport: Transport, source: int, tag: int, backend: Backend, dtype: torch.dtype, depth: int
    ) -> None:
        self.transport, self.source, self.tag = transport, source, tag
        self.backend, self.depth = backend, depth
        self.buffers = HostBuffers(backend, dtype)
        self._posted: deque[tuple[torch.Tensor, Request]] = deque()
        self._held: deque[torch.Tensor] = deque()
        self._to_come: deque[tuple[int, ...]] = deque()
        self.copies = backend.device != HOST
        self.arrived_s: float | None = None
        self.copied_s = 0.0

    def begin(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Announce the shapes of the step's micro-batches, in order, and post the first receives."""
        assert not self._posted and not self._held, "the previous step left receives behind"
        self._to_come.extend(shapes)
        for shape in set(shapes):
            self.buffers.reserve(shape)
        while self._to_come and len(self._posted) < self.depth:
            self._post()

    def take(self) -> torch.Tensor:
        """The next micro-batch's tensor on the device; waits until it has arrived."""
        buffer, request = self._posted.popleft()
        self.transport.wait(request)
        self._held.append(buffer)
        self.arrived_s, begin = request.ended_s, time.perf_counter()
        tensor = self.backend.from_host(buffer)
        self.copied_s = time.perf_counter() - begin if self.copies else 0.0
        return tensor

    def release(self) -> None:
        """The oldest tensor taken is no longer read: its buffer serves the next receive."""
        self.buffers.give_back(self._held.popleft())
        if self._to_come:
            self._post()

    def _post(self) -> None:
        buffer = self.buffers.lend(self._to_come.popleft())
        self._posted.append((buffer, self.transport.post_receive(self.source, self.tag, host_bytes(buffer))))


class Outbox:
    """Tensors sent in micro-batch order to one rank.

    Attributes:
        copied_s: seconds that bringing the last one to host memory took; 0 on CPU ranks.
    """

    def __init__(self, transport: Transport, destination: int, tag: int, backend: Backend, dtype: torch.dtype) -> None:
        self.transport, self.destination, self.tag = transport, destination, tag
        self.copies = backend.device != HOST
        self.copied_s = 0.0
        self.buffers = HostBuffers(backend, dtype)
        self._sent: deque[tuple[torch.Tensor, Request]] = deque()

    def put(self, tensor: torch.Tensor) -> int:
        """Start sending; returns the bytes. The tensor's memory is kept until it has left."""
        while self._sent and self._sent[0][1].completed:
            self._take_back()
        begin = time.perf_counter()
        host = self.buffers.lend(tensor.shape).copy_(tensor) if self.copies else tensor.detach().contiguous()
        self.copied_s = time.perf_counter() - begin if self.copies else 0.0
        content = host_bytes(host)
        self._sent.append((host, self.transport.send(self.destination, self.tag, content)))
        return content.nbytes

    def flush(self) -> None:
        """Return when everything has left."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        host, request = self._sent.popleft()
        self.transport.wait(request)
        if self.copies:
            self.buffers.give_back(host)
