"""Joins device tensors and the transport: what a stage receives from one neighbour, and what it sends to one.

Receives are posted early into reused host buffers; on CPU ranks a received tensor *is* its buffer and a sent tensor is read
where it lies, so nothing is copied. Once buffers are as large as the largest message, no step allocates any.

Longer tensors travel in pieces, so that a rank whose device has its own memory copies one piece while the next one travels: to the
host on the way out (a piece leaves when it is there), to the device as pieces arrive, both beside what the device computes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import HOST, Backend, Copied, Copying, host_bytes

FORWARD, BACKWARD, EVALUATION = 0, 1, 2
TIED_TAG = 1 << 12
"""The first tag that no message between stages has."""


def tag_of(stage: int, direction: int) -> int:
    """Message tag of what stage ``stage`` receives; one tag per receiving stage and direction keeps micro-batches in order."""
    return stage * 4 + direction


def _pieces(size_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """The pieces of a tensor's bytes: at least one."""
    for first in range(0, max(1, size_bytes), piece_bytes):
        yield slice(first, min(first + piece_bytes, size_bytes))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


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


class Arrival:
    """A tensor that comes from one rank: its receives are posted, and pieces are copied to the device as they come.

    Args:
        buffer: host memory that it is received into.
        tensor: what the stage will see: the buffer, or a tensor on the device.

    Attributes:
        arrived_s: when it was seen to be in host memory (``time.perf_counter``), once it was waited for.
        copied_s: seconds that this rank waited for it to come to the device after that.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        tag: int,
        buffer: torch.Tensor,
        tensor: torch.Tensor,
        copying: Copying,
    ) -> None:
        self.buffer, self.tensor = buffer, tensor
        self.arrived_s: float | None = None
        self.copied_s = 0.0
        self._transport, self._copying, self._copies = transport, copying, tensor is not buffer
        self._copied: list[Copied] = []
        content = host_bytes(buffer)
        if self._copies:
            copying.after_compute()  # the device may still read what lay in the tensor's memory before
        self.requests = []
        for piece in _pieces(content.nbytes, transport.piece_bytes):
            arrived = partial(self._copy, piece) if self._copies and copying.beside else None
            self.requests.append(transport.post_receive(source, tag, content[piece], arrived))

    def wait(self) -> None:
        """Return when it has arrived; what this thread gives the device from now on sees it."""
        for request in self.requests:
            self._transport.wait(request)
        self.arrived_s, begin = self.requests[-1].ended_s, time.perf_counter()
        if self._copies:
            if not self._copying.beside:
                self._copy(slice(None))
            self._copied[-1].hold_compute()  # begun last, it ends last
            self.copied_s = time.perf_counter() - begin

    def release(self) -> None:
        """Return when the buffer may be received into again."""
        for copied in self._copied:
            copied.wait()

    def _copy(self, piece: slice) -> None:
        """Called by whatever thread sees a piece arrive."""
        self._copied.append(self._copying.copy(_bytes_of(self.tensor)[piece], _bytes_of(self.buffer)[piece]))


class Inbox:
    """Tensors that arrive in micro-batch order from one rank.

    A step begins with ``begin``; then for each micro-batch in order ``take``, and ``release`` as soon as nobody reads the
    tensor any more. ``depth`` buffers are in use at once: one more than are held between take and release keeps a receive
    posted while the stage computes.

    Attributes:
        arrived_s: when the tensor that was taken last was seen to be in host memory (``time.perf_counter``).
        copied_s: seconds that this rank waited for it to come to the device after that; 0 on CPU ranks, which copy nothing, and
            where copies run beside.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        tag: int,
        backend: Backend,
        dtype: torch.dtype,
        depth: int,
    ) -> None:
        self.transport, self.source, self.tag = transport, source, tag
        self.backend, self.depth = backend, depth
        self.buffers = HostBuffers(backend, dtype)
        self._copying = backend.copying()
        self._posted: deque[Arrival] = deque()
        self._held: deque[Arrival] = deque()
        self._to_come: deque[tuple[int, ...]] = deque()
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
        coming = self._posted.popleft()
        coming.wait()
        self._held.append(coming)
        self.arrived_s, self.copied_s = coming.arrived_s, coming.copied_s
        return coming.tensor

    def release(self) -> None:
        """The oldest tensor taken is no longer read: its buffer serves the next receive."""
        coming = self._held.popleft()
        coming.release()
        self.buffers.give_back(coming.buffer)
        if self._to_come:
            self._post()

    def _post(self) -> None:
        buffer = self.buffers.lend(self._to_come.popleft())
        on_host = self.backend.device == HOST
        tensor = buffer if on_host else torch.empty_like(buffer, device=self.backend.device)
        self._posted.append(Arrival(self.transport, self.source, self.tag, buffer, tensor, self._copying))


class Outbox:
    """Tensors sent in micro-batch order to one rank.

    Attributes:
        copied_s: seconds that this rank waited while the last one came to host memory; 0 on CPU ranks, and where copies run beside.
    """

    def __init__(self, transport: Transport, destination: int, tag: int, backend: Backend, dtype: torch.dtype) -> None:
        self.transport, self.destination, self.tag = transport, destination, tag
        self.copies = backend.device != HOST
        self.copied_s = 0.0
        self.buffers = HostBuffers(backend, dtype)
        self._copying = backend.copying()
        self._sent: deque[tuple[torch.Tensor, torch.Tensor, list[Request]]] = deque()
        """Host memory, the tensor (kept, as the device reads it until it is copied), and its sends."""

    def put(self, tensor: torch.Tensor) -> int:
        """Start sending; returns the bytes. The tensor's memory is kept until it has left."""
        while self._sent and all(request.completed for request in self._sent[0][2]):
            self._take_back()
        begin = time.perf_counter()
        tensor = tensor.detach().contiguous()
        host = self.buffers.lend(tensor.shape) if self.copies else tensor
        requests: list[Request] = []
        content = host_bytes(host)
        if self.copies:
            self._copying.after_compute()
        for piece in _pieces(content.nbytes, self.transport.piece_bytes):
            ready = None
            if self.copies:
                ready = self._copying.copy(_bytes_of(host)[piece], _bytes_of(tensor)[piece]).done
            requests.append(self.transport.send(self.destination, self.tag, content[piece], ready))
        self.copied_s = time.perf_counter() - begin if self.copies else 0.0
        self._sent.append((host, tensor, requests))
        return content.nbytes

    def flush(self) -> None:
        """Return when everything has left."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        host, _, requests = self._sent.popleft()
        for request in requests:
            self.transport.wait(request)
        if self.copies:
            self.buffers.give_back(host)
