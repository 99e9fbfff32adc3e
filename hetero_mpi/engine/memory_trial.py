"""Out-of-memory errors that report predicted and used memory with a remedy, and helpers for a rank's local memory test.

``Trainer.rehearse`` runs one step on one rank alone, before the ranks start together. It runs the usual actions with the usual
buffers, over a transport that receives zeros and discards sent messages.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.planning.types.plan import RankMemory
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


class OutOfMemory(UserError):
    """Raised when a rank runs out of memory. ``used_bytes`` is its peak memory before the failed allocation."""

    def __init__(self, message: str, used_bytes: int) -> None:
        super().__init__("memory.exceeded", message)
        self.used_bytes = used_bytes


@contextlib.contextmanager
def memory_explained(doing: Callable[[], str], predicted: RankMemory | None, backend: Backend) -> Iterator[None]:
    """Convert out-of-memory errors in the block to ``OutOfMemory``; the caller that ends the job adds the rank and host.

    Args:
        doing: returns a description of the running operation, such as an action.
        predicted: predicted memory of this rank; None if unknown.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        peak_bytes = backend.peak_bytes()
        used = f"{units.size(peak_bytes)} were used at the peak"
        if predicted is not None:
            used += f", {units.size(predicted.peak_bytes)} predicted of {units.size(predicted.usable_bytes)} usable"
        first = next(iter(str(error).strip().splitlines()), "no memory left")
        raise OutOfMemory(
            f"ran out of memory in {doing()}: {used} ({first}). Lower [train] micro_batch or [data] sequence_length, "
            f"set [train] recompute = true, or let the planner give this rank less: raise [plan] memory_reserve, or set [cluster] "
            f"memory_bytes to what its ranks really have",
            peak_bytes,
        ) from error


@dataclass(frozen=True)
class UpdateAlone:
    """An ``executor.Update`` that exchanges nothing with other ranks."""

    optimizer: Optimizer

    def finished(self, layer: int) -> None:
        pass

    def reduce(self, layer: int) -> None:
        pass

    def decide(self, losses: Sequence[torch.Tensor]) -> None:
        self.optimizer.squared_norms()

    def carry_out(self, decided: None) -> None:
        self.optimizer.end_step(0, 1.0)


class Nowhere(Transport):
    """A transport without peers: every request completes immediately, and received buffers contain zeros."""

    idle = False

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        buffer[:] = 0
        return _done(Message("receive", source, tag, buffer, arrived=arrived))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        while ready is not None and not ready():
            pass
        return _done(Message("send", destination, tag, buffer))

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        return Group(ranks, number)

    def dissolve(self, group: Group) -> None:
        pass

    def exchange(self, request: Exchange) -> Request:
        return _done(request)

    def wait(self, request: Request) -> None:
        request.raise_error()

    def pending(self) -> int:
        return 0

    def close(self) -> None:
        pass


def _done(request: Request) -> Request:
    request.mark_complete()
    return request
