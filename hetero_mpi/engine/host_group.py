"""The ranks of one host that hold a stage together: sums while they compute, and what the first of them hands on to the others.

Every rank has its own tensors in host memory (of a GPU, copies). A sum is cut into as many parts as there are ranks: each rank
adds up one part, in the order of the ranks and in fp32, and all get all parts. So the bits are the same on every rank and in every
run, and no more bytes move than any all-reduce moves (Patarasuk & Yuan 2009). Whoever computes needs the sum at once: the calls
block.
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
    """Can the ranks of groups call MPI while a communication thread may do so, too?

    Raises:
        UserError: the MPI library does not allow it.
    """
    groups = [stage.ranks for _, _, stage in plan.numbered if stage.grouped]
    if groups and threaded and world.thread_level != "multiple":
        raise UserError(
            "mpi.thread_level",
            f"the plan gives a stage to ranks {', '.join(map(str, groups[0]))} together, whose sums need an MPI library with "
            f"THREAD_MULTIPLE; this one grants {world.thread_level}: set `communication_thread = false` in [cluster], or "
            f"`groups = false` in [plan]",
        )


def host_group(world: World, ranks: tuple[int, ...], backend: Backend) -> HostGroup | None:
    """The group of ``ranks``, numbers in the whole job; None on a rank that is not one of them. Collective over ``world``."""
    numbers = world.numbers or tuple(range(world.size))
    own = world.subset([numbers.index(rank) for rank in ranks])
    return None if own is None else HostGroup(own, backend)


class HostGroup:
    """A rank's end of the group; see ``model.group.exchanges.GroupLink``. All members call in the same order.

    Attributes:
        member: this rank's place in the group; 0 leads.
        size: number of members.
        summed_s: seconds in sums and maxima so far, in which this member also waited for the others.
    """

    def __init__(self, world: World, backend: Backend) -> None:
        self._world, self._backend = world, backend
        self._among: World | _Nobody = world
        self.member, self.size, self.summed_s = world.rank, world.size, 0.0
        self._rooms: dict[int, torch.Tensor] = {}
        """Host memory that is used again, by number."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the members, each element added in their order in fp32."""
        return self._combined(tensor, torch.Tensor.add_)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of the members' elements."""
        return self._combined(tensor, lambda a, b: torch.maximum(a, b, out=a))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A block in which this member computes by itself: sums take the memory that they take, but nothing is exchanged."""
        self._among = _Nobody()
        try:
            yield
        finally:
            self._among = self._world

    def shared(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The leader's tensor on every member's device; the others give None."""
        assert (tensor is None) == (self.member > 0)
        with self._world.waiting("the first rank of its group"):
            if tensor is None:
                # On a processor it stays with whoever computes; else it is copied, and the memory used again.
                own = self._backend.device == HOST
                host = self._backend.host_buffer(shape, dtype) if own else self._room(3, shape, dtype)
                self._among.broadcast_bytes(host_bytes(host))
                return host if own else host.to(self._backend.device)
            self._among.broadcast_bytes(host_bytes(self._backend.to_host(tensor.contiguous())))
            return tensor

    def assembled(
        self, own: torch.Tensor | None, division: Division, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """On the leader: the whole of a tensor, in host memory, of which every other member gives its part (``give``).

        Args:
            own: the leader's part; None: it has none.
        """
        whole = torch.empty(shape, dtype=dtype)
        for member in range(self.size):
            place = division.place(whole, member)
            if member > 0 and division.exists(member):
                part = torch.empty(place.shape, dtype=dtype)
                self._world.receive_bytes(host_bytes(part), member)
                place.copy_(part)
            elif own is not None and member == 0:
                place.copy_(own.reshape(place.shape))
        return whole

    def give(self, part: torch.Tensor) -> None:
        """On another member: its part of a tensor that the leader puts together."""
        self._world.send_bytes(host_bytes(self._backend.to_host(part.contiguous())), 0)

    def _combined(self, tensor: torch.Tensor, combine: Combine) -> torch.Tensor:
        flat, begin = tensor.detach().contiguous().view(-1), time.perf_counter()
        rows = self.size, -(-flat.numel() // self.size)
        given, received, whole = (self._room(number, rows, flat.dtype) for number in range(3))
        with self._world.waiting("the other ranks of its group"):
            given.view(-1)[: flat.numel()].copy_(flat)
            self._among.all_to_all_bytes(_rows(given), _rows(received))
            total = received[0].float()
            for row in received[1:]:
                combine(total, row.float())
            self._among.all_gather_bytes(host_bytes(total.to(flat.dtype)), _rows(whole))
            flat.copy_(whole.view(-1)[: flat.numel()])
        self.summed_s += time.perf_counter() - begin
        return flat.view(tensor.shape)

    def _room(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if number not in self._rooms or self._rooms[number].numel() < size:
            self._rooms[number] = self._backend.host_buffer((size,), torch.uint8)
        return self._rooms[number][:size].view(dtype).view(shape)


class _Nobody:
    """In place of the members' world: each rank gives this one what it has itself."""

    def broadcast_bytes(self, flat: NDArray[np.uint8]) -> None:
        flat[:] = 0

    def all_to_all_bytes(self, own: NDArray[np.uint8], received: NDArray[np.uint8]) -> None:
        received[:] = own

    def all_gather_bytes(self, own: NDArray[np.uint8], everyone: NDArray[np.uint8]) -> None:
        everyone[:] = own


def _rows(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return host_bytes(tensor).reshape(len(tensor), -1)
