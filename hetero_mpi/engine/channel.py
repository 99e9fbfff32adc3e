"""Send and receive device tensors between neighbouring stages: ``Inbox`` and ``Outbox`` over the transport.

Receives are posted early, into reused host buffers. On CPU ranks a received tensor *is* its buffer and a sent tensor is read in
place, so nothing is copied. Once the buffers are as large as the largest message, steps allocate no more memory.

Long tensors are sent in pieces, so that a GPU rank copies one piece while the next is in transit: from device to host before
sending, and from host to device as pieces arrive. Both copies overlap with the device's computation.
"""

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
"""First of the tags reserved for tied matrices; lower tags are for messages between stages."""


def tag_of(stage: int, direction: int) -> int:
    """Return the tag for messages to ``stage``; one tag per receiver and direction keeps micro-batches in order."""
    return stage * 4 + direction


def _byte_slices(size_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """Yield slices of at most ``piece_bytes`` that cover a tensor's bytes; yield at least one."""
    for first in range(0, max(1, size_bytes), piece_bytes):
        yield slice(first, min(first + piece_bytes, size_bytes))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


class HostBuffers:
    """A pool of host memory blocks for tensors of varying shapes; each new block fits the largest tensor seen so far."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self.backend, self.dtype = backend, dtype
        self._elements = 0
        self._free: list[torch.Tensor] = []
        self.allocated = 0
        """Number of blocks allocated so far; it stops growing once shapes repeat."""

    def reserve(self, shape: Sequence[int]) -> None:
        """Make sure that blocks allocated from now on can hold a tensor of ``shape``."""
        if math.prod(shape) > self._elements:
            self._elements = math.prod(shape)
            self._free.clear()

    def lend(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of ``shape`` backed by a free block, or by a new block if none is free."""
        self.reserve(shape)
        if self._free:
            block = self._free.pop()
        else:
            self.allocated += 1
            block = self.backend.host_buffer((self._elements,), self.dtype)
        return block[: math.prod(shape)].view(*shape)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return a lent tensor's block to the pool."""
        count = tensor.untyped_storage().nbytes() // self.dtype.itemsize
        if count >= self._elements:
            self._free.append(tensor.as_strided((count,), (1,), 0))


class Arrival:
    """A tensor being received: posts its receives and copies each piece to the device as it arrives.

    Args:
        buffer: host memory to receive into.
        tensor: the tensor that the stage reads: the buffer itself, or a tensor on the device.

    Attributes:
        arrived_s: time (``time.perf_counter``) at which ``wait`` saw the last piece in host memory; None before ``wait``.
        copied_s: seconds that ``wait`` then spent waiting for the copy to the device.
    """

    def __init__(
        self, transport: Transport, source: int, tag: int, buffer: torch.Tensor, tensor: torch.Tensor, copying: Copying
    ) -> None:
        self.buffer, self.tensor = buffer, tensor
        self.arrived_s: float | None = None
        self.copied_s = 0.0
        self._transport, self._copying, self._copies = transport, copying, tensor is not buffer
        self._copied: list[Copied] = []
        content = host_bytes(buffer)
        if self._copies:
            copying.after_compute()  # the device may still read the memory's previous content
        self.requests = []
        for piece in _byte_slices(content.nbytes, transport.piece_bytes):
            arrived = partial(self._copy, piece) if self._copies and copying.overlaps else None
            self.requests.append(transport.post_receive(source, tag, content[piece], arrived))

    def wait(self) -> None:
        """Wait until the tensor has arrived. Device work that this thread submits afterwards sees the tensor."""
        for request in self.requests:
            self._transport.wait(request)
        self.arrived_s, begin = self.requests[-1].ended_s, time.perf_counter()
        if self._copies:
            if not self._copying.overlaps:
                self._copy(slice(None))
            self._copied[-1].hold_compute()  # copies complete in order
            self.copied_s = time.perf_counter() - begin

    def release(self) -> None:
        """Wait until the buffer can be reused for another receive."""
        for copied in self._copied:
            copied.wait()

    def _copy(self, piece: slice) -> None:
        """Copy a piece to the device. Called on the thread that sees the piece arrive."""
        self._copied.append(self._copying.copy(_bytes_of(self.tensor)[piece], _bytes_of(self.buffer)[piece]))


class Inbox:
    """Receives tensors from one rank, in micro-batch order.

    Each step calls ``start_step`` once, then ``receive`` for each micro-batch in order, and ``release`` once the tensor is no
    longer needed. ``depth`` buffers are in use at a time. To keep a receive posted while the stage computes, ``depth`` must be one
    more than the number of tensors that are received but not yet released.

    Attributes:
        arrived_s: time (``time.perf_counter``) at which the last received tensor was seen in host memory.
        copied_s: seconds spent waiting for its copy to the device; 0 on CPU ranks, which copy nothing, and where the copy overlaps
            with computation.
    """

    def __init__(
        self, transport: Transport, source: int, tag: int, backend: Backend, dtype: torch.dtype, depth: int
    ) -> None:
        self.transport, self.source, self.tag = transport, source, tag
        self.backend, self.depth = backend, depth
        self.buffers = HostBuffers(backend, dtype)
        self._copying = backend.copying()
        self._posted: deque[Arrival] = deque()
        self._held: deque[Arrival] = deque()
        self._pending_shapes: deque[tuple[int, ...]] = deque()
        self.arrived_s: float | None = None
        self.copied_s = 0.0

    def start_step(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Set the shapes of the step's micro-batches, in order, and post the first receives."""
        assert not self._posted and not self._held, "the previous step left receives behind"
        self._pending_shapes.extend(shapes)
        for shape in set(shapes):
            self.buffers.reserve(shape)
        while self._pending_shapes and len(self._posted) < self.depth:
            self._post()

    def receive(self) -> torch.Tensor:
        """Wait for the next micro-batch's tensor and return it on the device."""
        arrival = self._posted.popleft()
        arrival.wait()
        self._held.append(arrival)
        self.arrived_s, self.copied_s = arrival.arrived_s, arrival.copied_s
        return arrival.tensor

    def release(self) -> None:
        """Release the oldest received tensor and reuse its buffer for the next receive."""
        arrival = self._held.popleft()
        arrival.release()
        self.buffers.give_back(arrival.buffer)
        if self._pending_shapes:
            self._post()

    def _post(self) -> None:
        buffer = self.buffers.lend(self._pending_shapes.popleft())
        on_host = self.backend.device == HOST
        tensor = buffer if on_host else torch.empty_like(buffer, device=self.backend.device)
        self._posted.append(Arrival(self.transport, self.source, self.tag, buffer, tensor, self._copying))


class Outbox:
    """Sends tensors to one rank, in micro-batch order.

    Attributes:
        copied_s: seconds spent waiting for the last tensor's copy to host memory; 0 on CPU ranks and where copies overlap.
    """

    def __init__(self, transport: Transport, destination: int, tag: int, backend: Backend, dtype: torch.dtype) -> None:
        self.transport, self.destination, self.tag = transport, destination, tag
        self.copies = backend.device != HOST
        self.copied_s = 0.0
        self.buffers = HostBuffers(backend, dtype)
        self._copying = backend.copying()
        self._sent: deque[tuple[torch.Tensor, torch.Tensor, list[Request]]] = deque()
        """(host memory, tensor, send requests). The tensor is kept because the device reads it until the copy completes."""

    def put(self, tensor: torch.Tensor) -> int:
        """Start sending a tensor and return its size in bytes. The tensor is kept alive until the send completes."""
        while self._sent and all(request.completed for request in self._sent[0][2]):
            self._reclaim()
        begin = time.perf_counter()
        tensor = tensor.detach().contiguous()
        host = self.buffers.lend(tensor.shape) if self.copies else tensor
        requests: list[Request] = []
        content = host_bytes(host)
        if self.copies:
            self._copying.after_compute()
        for piece in _byte_slices(content.nbytes, self.transport.piece_bytes):
            ready = None
            if self.copies:
                ready = self._copying.copy(_bytes_of(host)[piece], _bytes_of(tensor)[piece]).done
            requests.append(self.transport.send(self.destination, self.tag, content[piece], ready))
        self.copied_s = time.perf_counter() - begin if self.copies else 0.0
        self._sent.append((host, tensor, requests))
        return content.nbytes

    def flush(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            self._reclaim()

    def _reclaim(self) -> None:
        host, _, requests = self._sent.popleft()
        for request in requests:
            self.transport.wait(request)
        if self.copies:
            self.buffers.give_back(host)
