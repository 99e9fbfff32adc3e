"""A rank that runs out of memory: told with what was predicted, what was used, what to change; and what a step of one rank by
itself needs, by which that is found while no other rank waits (``Trainer.rehearse``).

Then the rank runs its own actions, in their order, with its own buffers. What others would send is zeros, what it sends goes
nowhere.
"""

from __future__ import annotations

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
    """A rank has no memory left. ``used_bytes``: what it used at most before."""

    def __init__(self, message: str, used_bytes: int) -> None:
        super().__init__("memory.exceeded", message)
        self.used_bytes = used_bytes


@contextlib.contextmanager
def memory_explained(doing: Callable[[], str], predicted: RankMemory | None, backend: Backend) -> Iterator[None]:
    """A block whose shortage of memory becomes an ``OutOfMemory`` (of this rank alone: who ends the job names rank and host).

    ``doing``: says what ran, such as an action. ``predicted``: of this rank, where it is known.
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
    """An ``executor.Update`` of which nothing is summed."""

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
    """A transport to nobody: every message has arrived at once; what is received is zeros."""

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
    request.complete()
    return request
