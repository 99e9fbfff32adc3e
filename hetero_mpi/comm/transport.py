"""Moving bytes between ranks beside the computation: the contract that all transports keep.

Bytes and tags, nothing about models. A buffer is a one-dimensional, contiguous ``uint8`` numpy array that belongs to
the transport from the call until ``wait`` returns: it is sent from, and received into, where it lies.

* Messages of one (source, tag) arrive in the order in which they were sent.
* ``post_receive`` and ``send`` return at once. A send may complete only when the receive is posted: post receives
  early.
* A message must be exactly as long as the buffer that receives it; the receiver's ``wait`` raises if it is not.
* Whatever goes wrong with a request is raised by ``wait`` for it.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]


class TransportError(RuntimeError):
    """A message could not be moved as promised: a defect in the program, or a machine that has gone."""


class Request:
    """One message under way. Completed once, by any thread; waited for by any number of threads."""

    def __init__(self, kind: Literal["send", "receive"], peer: int, tag: int, buffer: Buffer) -> None:
        check_buffer(buffer, writable=kind == "receive")
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.buffer = buffer
        self.error: BaseException | None = None
        self._done = threading.Lock()
        """Held until completion: a bare lock wakes its waiter faster than an event."""
        self._done.acquire()

    @property
    def completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return not self._done.locked()

    def complete(self, error: BaseException | None = None) -> None:
        """Mark as done, with what went wrong. Called once, by the transport."""
        self.error = error
        self._done.release()

    def block(self) -> None:
        """Sleep until completed."""
        with self._done:
            pass

    def raise_error(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise TransportError(f"{self}: {self.error}") from self.error

    def __str__(self) -> str:
        direction = "to" if self.kind == "send" else "from"
        return f"{self.kind} of {self.buffer.size} bytes {direction} rank {self.peer}, tag {self.tag}"


class Transport(Protocol):
    """See the module's contract. Use as a context manager: leaving the block closes the transport."""

    def post_receive(self, source: int, tag: int, buffer: Buffer) -> Request:
        """Announce a writable buffer for the next message of (source, tag)."""
        ...

    def send(self, destination: int, tag: int, buffer: Buffer) -> Request:
        """Send the buffer's bytes. It must not change before the request is complete."""
        ...

    def wait(self, request: Request) -> None:
        """Return when the request is complete.

        :raises TransportError: the message had another length, MPI failed, or the transport was closed meanwhile.
        """
        ...

    def pending(self) -> int:
        """Requests that are not complete."""
        ...

    def close(self) -> None:
        """End all requests that are still pending (their ``wait`` raises) and release the transport. Idempotent."""
        ...

    def __enter__(self) -> Transport: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_buffer(buffer: Buffer, writable: bool) -> None:
    """Refuse what could not be moved without a copy.

    :raises ValueError: not a one-dimensional contiguous uint8 array, or read-only where it must be written.
    """
    if buffer.ndim != 1 or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(
            "A message buffer must be a one-dimensional contiguous uint8 array "
            f"(shape: {buffer.shape}, dtype: {buffer.dtype}): pass `array.reshape(-1).view(np.uint8)`."
        )
    if writable and not buffer.flags.writeable:
        raise ValueError("A buffer to receive into must be writable: pass an array that owns its bytes.")


def length_problem(expected: int, arrived: int) -> TransportError:
    """The error for a message that is shorter or longer than its buffer."""
    return TransportError(
        f"the message has {arrived} bytes, the buffer {expected}: sender and receiver must agree on the length"
    )
