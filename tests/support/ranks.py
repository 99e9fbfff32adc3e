"""Ranks as threads of this process: the transport between them, and trainers on them; all of a step but MPI.

The transport is strict where MPI may be lenient: a send completes only when its receive has been posted (MPI buffers small
messages), so a program that runs here does not depend on such buffering. Threads share torch's random generators: no dropout here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import (
    Arrived,
    Buffer,
    Exchange,
    Group,
    Message,
    Numbers,
    Ready,
    Request,
    Transport,
    TransportError,
    check_group,
    length_problem,
)
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.placement import RankSetup
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.training.build import StageBuilder, divided_tensors
from tests.support import plans
from tests.support.planning_samples import make_model
from tests.support.plans import pipeline

Route = tuple[int, int, int]
"""(source, destination, tag)"""


def in_order(parts: Sequence[Numbers]) -> Numbers:
    """((r0 + r1) + r2) + ..."""
    total: Numbers = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


class LoopbackNetwork:
    """``n`` transports that reach each other: ``transports[rank]`` belongs to the thread that plays ``rank``."""

    def __init__(self, n: int) -> None:
        self._lock = threading.Lock()
        self._sends: dict[Route, deque[Message]] = defaultdict(deque)
        self._receives: dict[Route, deque[Message]] = defaultdict(deque)
        self._exchanges: dict[Group, dict[int, deque[Exchange]]] = {}
        self.transports = tuple(LoopbackTransport(self, rank, n) for rank in range(n))

    def _post(self, route: Route, request: Message) -> None:
        """Queue a request and move the bytes if its counterpart is there: first come, first matched, per route."""
        with self._lock:
            own, other = self._sends[route], self._receives[route]
            if request.kind == "receive":
                own, other = other, own
            if not other:
                own.append(request)
                return
            partner = other.popleft()
        send, receive = (request, partner) if request.kind == "send" else (partner, request)
        error = None
        if send.buffer.size != receive.buffer.size:
            error = length_problem(receive, f"{send.buffer.size} bytes")
        else:
            np.copyto(receive.buffer, send.buffer)
        receive.mark_complete(error)
        send.mark_complete()

    def _exchange(self, rank: int, request: Exchange) -> None:
        """Queue an exchange; the last member to come adds up, in the order of the ranks, or hands out."""
        with self._lock:
            queues = self._exchanges.setdefault(request.group, {member: deque() for member in request.group.ranks})
            queues[rank].append(request)
            if not all(queues.values()):
                return
            members = [queue.popleft() for queue in queues.values()]
        error = None
        if len({(member.sums, *(part.size for part in member.parts)) for member in members}) > 1:
            error = length_problem(members[0], "")
        else:
            for place, owner in enumerate(members):
                others = [member for member in members if member is not owner]
                if request.sums:
                    np.copyto(owner.parts[place], in_order([member.parts[place] for member in members]))
                for other in others:  # what others have of a sum is not said
                    other.parts[place][...] = np.nan if request.sums else owner.parts[place]
        for member in members:
            member.mark_complete(error)

    def _withdraw(self, rank: int) -> None:
        """End what ``rank`` has posted and nobody has matched."""
        withdrawn: list[Request] = []
        with self._lock:
            for queues_of_group in self._exchanges.values():
                if rank in queues_of_group:
                    withdrawn.extend(queues_of_group[rank])
                    queues_of_group[rank].clear()
            for queues, end in ((self._sends, 0), (self._receives, 1)):
                for route in [route for route in queues if route[end] == rank]:
                    withdrawn.extend(queues.pop(route))
        for request in withdrawn:
            request.mark_complete(TransportError("the transport was closed before the message was moved"))


class LoopbackTransport(Transport):
    """One rank's end of a ``LoopbackNetwork``."""

    def __init__(self, network: LoopbackNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network
        self._requests: list[Request] = []
        self._groups: dict[int, Group] = {}
        self._closed = False

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        """See ``Transport``."""
        return self._post(Message("receive", source, tag, buffer, arrived=arrived), (source, self.rank, tag))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """See ``Transport``. Nobody looks after messages here, so the caller waits until the bytes are there."""
        _wait_for(ready)
        return self._post(Message("send", destination, tag, buffer), (self.rank, destination, tag))

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        """See ``Transport``."""
        group = Group(ranks, number)
        check_group(self.rank, self.size, group, self._groups)
        self._groups[number] = group
        return group

    def dissolve(self, group: Group) -> None:
        """See ``Transport``."""
        del self._groups[group.number]

    def exchange(self, request: Exchange) -> Request:
        """See ``Transport``."""
        assert self._groups.get(request.group.number) == request.group, (
            f"{request.group} was not made by this transport"
        )
        _wait_for(request.ready)
        self._remember(request)
        self._network._exchange(self.rank, request)
        return request

    def _post(self, request: Message, route: Route) -> Request:
        self._remember(request)
        if 0 <= request.peer < self.size:
            self._network._post(route, request)
        else:
            request.mark_complete(TransportError(f"there is no rank {request.peer} among {self.size}"))
        return request

    def _remember(self, request: Request) -> None:
        if self._closed:
            raise TransportError(f"{request}: the transport is closed")
        self._requests = [other for other in self._requests if not other.completed]
        self._requests.append(request)

    def wait(self, request: Request) -> None:
        """See ``Transport``."""
        _wait_for(lambda: request.completed)
        request.raise_error()

    def pending(self) -> int:
        """See ``Transport``."""
        return sum(not request.completed for request in self._requests)

    def close(self) -> None:
        """See ``Transport``."""
        if not self._closed:
            self._closed = True
            self._network._withdraw(self.rank)


def _wait_for(ready: Ready | None) -> None:
    while ready is not None and not ready():
        time.sleep(1e-4)


TIMEOUT_S = 120.0


class Meeting:
    """What the threads' collectives share."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)


class ThreadWorld:
    """The collectives that a trainer uses, between threads."""

    host, numbers, thread_level = "here", (), "multiple"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.values), meeting

    def all_gather_json(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.values)
        self._meeting.barrier.wait()
        return found

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        total: NDArray[Any] = np.sum(np.stack(self.all_gather_json(array)), axis=0)
        return total


class ThreadStageLink:
    """A ``StageLink`` between threads."""

    def __init__(self, member: int, meeting: Meeting) -> None:
        self.member, self.size, self.summed_s = member, len(meeting.values), 0.0
        self._meeting = meeting

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor)).float().sum(0).to(tensor.dtype)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor)).amax(0)

    def broadcast(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._all(tensor)[0].to(dtype).view(shape)

    def apart(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def assembled(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError

    def give(self, part: torch.Tensor) -> None:
        raise NotImplementedError

    def _all(self, tensor: torch.Tensor | None) -> list[Any]:
        self._meeting.values[self.member] = tensor.detach().clone() if tensor is not None else None
        self._meeting.barrier.wait()
        found = list(self._meeting.values)
        self._meeting.barrier.wait()
        return found


def play_ranks(
    count: int, play: Callable[[int], Any], failed: Callable[[], None] = lambda: None, timeout_s: float = 30.0
) -> list[Any]:
    """What ``play`` gives on every rank, each in a thread of its own; what fails on one of them fails here, after ``failed``."""
    found: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = play(rank)
        except BaseException as error:
            failures.append(error)
            failed()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


class Threads:
    """One trainer for each rank of a plan whose ranks are 0, 1, ...; ``backend`` makes each one's device, ``start`` its weights."""

    def __init__(
        self,
        chain: TransformersChain,
        plan: Plan,
        train: TrainTable,
        tuning: Tuning | None = None,
        backend: Callable[[], Backend] = Backend,
        start: Start | None = None,
    ) -> None:
        torch.set_num_threads(1)  # the ranks are threads enough
        tuning = tuning if tuning is not None else full_training(chain)
        self.size = 1 + max(rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks)
        self.transports: tuple[LoopbackTransport, ...] = LoopbackNetwork(self.size).transports
        meeting = Meeting(self.size)
        schedule = schedule_of(plan, cost_of(chain, tuning))
        groups = [stage.ranks for _, _, stage in plan.numbered if stage.grouped]
        self._meetings = [meeting, *(Meeting(len(ranks)) for ranks in groups)]
        links = {
            rank: ThreadStageLink(member, own)
            for ranks, own in zip(groups, self._meetings[1:], strict=True)
            for member, rank in enumerate(ranks)
        }
        self.trainers = [
            Trainer(
                setup,
                cast(World, ThreadWorld(setup.rank, meeting)),
                plan,
                schedule,
                StageBuilder(setup, start or SeededStart(train.seed)),
                divided_tensors(plan, chain, tuning),
            )
            for rank, transport in enumerate(self.transports)
            for setup in [RankSetup(rank, transport, chain, tuning, backend(), train, links.get(rank))]
        ]

    def together(self, play: Callable[[Trainer], Any]) -> list[Any]:
        """What ``play`` gives on every rank, each in a thread of its own."""

        def stop() -> None:
            for meeting in self._meetings:
                meeting.barrier.abort()
            for transport in self.transports:
                transport.close()

        return play_ranks(self.size, lambda rank: play(self.trainers[rank]), stop, TIMEOUT_S)


def cost_of(chain: TransformersChain, tuning: Tuning) -> ModelCost:
    """As much of a model's cost as schedules depend on."""
    model = make_model(chain.blocks, chain.tied is not None and tuning.full)
    trained = [sum(spec.count for spec in tuning.specs(layer, layer + 1)) for layer in range(chain.layer_count)]
    layers = tuple(replace(one, trainable_parameters=n) for one, n in zip(model.layers, trained, strict=True))
    return replace(model, layers=layers)


def plan_of(
    chain: TransformersChain,
    pipelines: Sequence[tuple[Sequence[int], Sequence[int], int, int]],
    length: int,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> Plan:
    """``pipelines``: (ranks in chain order, boundaries, micro-batch, sequences) of each. ``schedule``: as ``trained_once``."""
    made = [pipeline(*of, schedule=schedule, recompute=recompute) for of in pipelines]
    return plans.plan_of(*made, length=length)
