"""Collectives of a tensor-parallel group on one host: all-reduces during computation and broadcasts from the leader.

    rank 0   a0 a1 | -- all-to-all -->  a0 b0 -> s0 | -- all-gather -->  s0 s1
    rank 1   b0 b1 |                    a1 b1 -> s1 |                    s0 s1

Each rank sums one part of the tensor in host memory, in rank order and in fp32, so all ranks and all runs get bitwise equal
results. This moves no more bytes than any other all-reduce (Patarasuk & Yuan 2009). Calls block, because the computation needs the
sum immediately.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import HOST, Backend, host_bytes
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.util.errors import UserError

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def require_joinable(world: World, plan: Plan, threaded: bool) -> None:
    """Check that tensor-parallel ranks may call MPI while a communication thread also calls it.

    Raises:
        UserError: The MPI library lacks THREAD_MULTIPLE.
    """
    groups = [stage.ranks for _, _, stage in plan.numbered if stage.grouped]
    if groups and threaded and world.thread_level != "multiple":
        raise UserError(
            "mpi.thread_level",
            f"the plan's tensor-parallel group of ranks {', '.join(map(str, groups[0]))} needs an MPI library with "
            f"THREAD_MULTIPLE; this one grants {world.thread_level}: set `communication_thread = false` in [cluster], or "
            f"`tensor_parallel = false` in [plan]",
        )


def host_group(world: World, ranks: tuple[int, ...], backend: Backend) -> HostGroup | None:
    """Create the tensor-parallel group of ``ranks`` (job rank numbers); return None on other ranks. Collective over ``world``."""
    numbers = world.numbers or tuple(range(world.size))
    subset = world.subset([numbers.index(rank) for rank in ranks])
    return None if subset is None else HostGroup(subset, backend)


class HostGroup:
    """One rank's handle to its group (see ``model.group.exchanges.GroupLink``). All members make the same calls in the same order.

    Attributes:
        member: this rank's index in the group; 0 is the leader.
        size: number of members.
        summed_s: total seconds spent in ``sum`` and ``maximum``, including waiting for other members.
    """

    def __init__(self, world: World, backend: Backend) -> None:
        self._world, self._backend = world, backend
        self._exchange_world: World | _LoopbackWorld = world
        self.member, self.size, self.summed_s = world.rank, world.size, 0.0
        self._buffers: dict[int, torch.Tensor] = {}
        """Maps buffer numbers to reused host memory."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the members, in member order and in fp32."""
        return self._combined(tensor, torch.Tensor.add_)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._combined(tensor, lambda a, b: torch.maximum(a, b, out=a))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Return a context in which this member computes alone: reductions use their usual memory but exchange nothing."""
        self._exchange_world = _LoopbackWorld()
        try:
            yield
        finally:
            self._exchange_world = self._world

    def broadcast(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Broadcast the leader's tensor to every member's device; members other than the leader pass None."""
        assert (tensor is None) == (self.member > 0)
        with self._world.waiting("the first rank of its group"):
            if tensor is None:
                # A CPU rank keeps the host tensor; a GPU rank copies it and reuses the buffer.
                on_host = self._backend.device == HOST
                host = self._backend.host_buffer(shape, dtype) if on_host else self._buffer(3, shape, dtype)
                self._exchange_world.broadcast_bytes(host_bytes(host))
                return host if on_host else host.to(self._backend.device)
            self._exchange_world.broadcast_bytes(host_bytes(self._backend.to_host(tensor.contiguous())))
            return tensor

    def assembled(
        self, leader_shard: torch.Tensor | None, division: Division, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Gather a sharded tensor in the leader's host memory, while the other members call ``give``.

        Args:
            leader_shard: the leader's shard; None if the leader has no shard.
        """
        full_tensor = torch.empty(shape, dtype=dtype)
        for member in range(self.size):
            target = division.place(full_tensor, member)
            if member > 0 and division.exists(member):
                part = torch.empty(target.shape, dtype=dtype)
                self._world.receive_bytes(host_bytes(part), member)
                target.copy_(part)
            elif leader_shard is not None and member == 0:
                target.copy_(leader_shard.reshape(target.shape))
        return full_tensor

    def give(self, part: torch.Tensor) -> None:
        """Send this member's shard to the leader, which is calling ``assembled``."""
        self._world.send_bytes(host_bytes(self._backend.to_host(part.contiguous())), 0)

    def _combined(self, tensor: torch.Tensor, combine: Combine) -> torch.Tensor:
        flat, begin = tensor.detach().contiguous().view(-1), time.perf_counter()
        rows = self.size, -(-flat.numel() // self.size)
        outgoing, received, gathered = (self._buffer(number, rows, flat.dtype) for number in range(3))
        with self._world.waiting("the other ranks of its group"):
            outgoing.view(-1)[: flat.numel()].copy_(flat)
            self._exchange_world.all_to_all_bytes(_rows(outgoing), _rows(received))
            total = received[0].float()
            for row in received[1:]:
                combine(total, row.float())
            self._exchange_world.all_gather_bytes(host_bytes(total.to(flat.dtype)), _rows(gathered))
            flat.copy_(gathered.view(-1)[: flat.numel()])
        self.summed_s += time.perf_counter() - begin
        return flat.view(tensor.shape)

    def _buffer(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if number not in self._buffers or self._buffers[number].numel() < size:
            self._buffers[number] = self._backend.host_buffer((size,), torch.uint8)
        return self._buffers[number][:size].view(dtype).view(shape)


class _LoopbackWorld:
    """A stand-in for the group's communicator that exchanges nothing: other members' tensors equal this member's."""

    def broadcast_bytes(self, flat: NDArray[np.uint8]) -> None:
        flat[:] = 0

    def all_to_all_bytes(self, sent: NDArray[np.uint8], received: NDArray[np.uint8]) -> None:
        received[:] = sent

    def all_gather_bytes(self, part: NDArray[np.uint8], gathered: NDArray[np.uint8]) -> None:
        gathered[:] = part


def _rows(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return host_bytes(tensor).reshape(len(tensor), -1)
