"""A step of one rank by itself: what its memory does not hold is found while no other rank waits for it.

The rank runs its own actions, in their order, with its own buffers. What others would send is zeros, what it sends goes nowhere.
"""

from __future__ import annotations

import contextlib

from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.data.batch import Batch
from hetero_mpi.engine.executor import Executor
from hetero_mpi.engine.out_of_memory import memory_explained
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.planning.schedule import Action, Op


def rehearse(trainer: Trainer, batch: Batch) -> None:
    """Forwards, backwards and the optimizer's step of this rank. Local; what is trained changes. Raises OutOfMemory."""
    optimizer, own = trainer.optimizer, trainer.executor
    if optimizer is None or own is None or trainer.pipeline is None:
        return

    def step(_: Action) -> None:
        optimizer.squared_norms()
        optimizer.step(0, 1.0)
        optimizer.zero()

    executor = Executor(
        trainer.rank,
        trainer.stages,
        trainer.places,
        trainer.plan.pipelines[trainer.pipeline],
        own.actions,
        _Nowhere(),
        {Op.REDUCE: lambda _: None, Op.STEP: step},
        lambda _: None,
        None,
        own.wire,
        trainer.group,
    )
    apart = trainer.group.apart() if trainer.group is not None else contextlib.nullcontext()
    with memory_explained(lambda: str(executor.current), trainer.memory, trainer.backend), apart:
        executor.run(trainer.step_data(0, batch))


class _Nowhere(Transport):
    """Every message has arrived at once; what is received is zeros."""

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
