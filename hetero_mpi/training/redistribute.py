"""Moves named tensors between rank 0 and the ranks that hold them, one at a time.

One mechanism serves saving, restoring under another plan, and writing the model: who holds a tensor is a function of the plan,
so the same list of parcels, walked by all ranks in the same order, needs no negotiation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.plan import Plan
from hetero_mpi.training.places import holders

_TAG = 1 << 14
_AHEAD = 2
"""Tensors under way at once: enough to keep the link busy, few enough to bound memory."""


@dataclass(frozen=True)
class Parcel:
    """A named tensor and the ranks that hold it."""

    kind: str
    """``parameters``, ``moments1`` or ``moments2``."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The first of its holders, which speaks for all: where it is taken from."""
    others: tuple[int, ...] = ()
    """Its further holders, in plan order: they are given the same."""


def parcels(tuning: Tuning, plan: Plan, kinds: Iterable[str], dtype: torch.dtype = torch.float32) -> list[Parcel]:
    """All tensors of the given kinds, in the model's order, item by item. Constants are parameters in fp32, without moments."""
    held, kinds = holders(plan), tuple(kinds)
    tensors = [(spec, kind, dtype) for spec in tuning.trainable.values() for kind in kinds]
    if "parameters" in kinds:
        tensors += [(spec, "parameters", torch.float32) for spec in tuning.constants.values()]
    tensors.sort(key=lambda tensor: tensor[0].item)  # stable: the model's order within an item
    return [
        Parcel(kind, spec.name, spec.shape, own, held[spec.item][0], held[spec.item][1:]) for spec, kind, own in tensors
    ]


def collect(
    rank: int, transport: Transport, listed: Iterable[Parcel], own: Callable[[Parcel], torch.Tensor]
) -> Iterator[tuple[Parcel, torch.Tensor]]:
    """Bring every parcel to rank 0. Collective: every rank must exhaust the iterator.

    Args:
        own: gives a parcel this rank holds, as a contiguous host tensor.

    Yields:
        on rank 0 each parcel with its host tensor, valid until the next one is asked for; nothing on other ranks.
    """
    if rank != 0:
        _send_all((parcel for parcel in listed if parcel.owner == rank), transport, own)
        return
    coming: deque[tuple[Parcel, torch.Tensor | None, Request | None]] = deque()
    queue = deque(listed)
    while queue or coming:
        while queue and len(coming) < _AHEAD:
            parcel = queue.popleft()
            if parcel.owner == 0:
                coming.append((parcel, None, None))
            else:
                buffer = torch.empty(parcel.shape, dtype=parcel.dtype)
                coming.append((parcel, buffer, transport.post_receive(parcel.owner, _TAG, host_bytes(buffer))))
        parcel, tensor, request = coming.popleft()
        if request is None:
            tensor = own(parcel)
        else:
            transport.wait(request)
        assert tensor is not None
        yield parcel, tensor


def distribute(
    rank: int,
    transport: Transport,
    listed: Iterable[Parcel],
    produce: Callable[[Parcel], torch.Tensor],
    keep: Callable[[Parcel, torch.Tensor], None],
) -> None:
    """Bring every parcel from rank 0 to all its holders. Collective.

    Args:
        produce: gives a parcel on rank 0, as a contiguous host tensor.
        keep: takes a parcel this rank holds.
    """
    _spread(rank, transport, ((parcel, 0, (parcel.owner, *parcel.others)) for parcel in listed), produce, keep)


def align(
    rank: int,
    transport: Transport,
    listed: Iterable[Parcel],
    own: Callable[[Parcel], torch.Tensor],
    keep: Callable[[Parcel, torch.Tensor], None],
) -> None:
    """Bring every parcel from its first holder to the others. Collective.

    Args:
        own: gives a parcel this rank speaks for, as a contiguous host tensor.
        keep: takes a parcel this rank holds too.
    """
    _spread(rank, transport, ((parcel, parcel.owner, parcel.others) for parcel in listed), own, keep)


def _spread(
    rank: int,
    transport: Transport,
    deliveries: Iterable[tuple[Parcel, int, tuple[int, ...]]],
    produce: Callable[[Parcel], torch.Tensor],
    keep: Callable[[Parcel, torch.Tensor], None],
) -> None:
    """``deliveries``: (parcel, from which rank, to which ranks), the same list on every rank."""
    under_way: deque[tuple[torch.Tensor, list[Request]]] = deque()
    for parcel, source, destinations in deliveries:
        if rank == source and destinations:
            tensor = produce(parcel)
            if rank in destinations:
                keep(parcel, tensor)
            others = [other for other in destinations if other != rank]
            under_way.append((tensor, [transport.send(other, _TAG, host_bytes(tensor)) for other in others]))
            while len(under_way) > _AHEAD:
                _wait_all(transport, under_way.popleft()[1])
        elif rank in destinations:
            tensor = torch.empty(parcel.shape, dtype=parcel.dtype)
            transport.wait(transport.post_receive(source, _TAG, host_bytes(tensor)))
            keep(parcel, tensor)
    while under_way:
        _wait_all(transport, under_way.popleft()[1])


def _wait_all(transport: Transport, requests: Iterable[Request]) -> None:
    for request in requests:
        transport.wait(request)


def _send_all(listed: Iterable[Parcel], transport: Transport, own: Callable[[Parcel], torch.Tensor]) -> None:
    under_way: deque[tuple[torch.Tensor, Request]] = deque()
    for parcel in listed:
        if len(under_way) == _AHEAD:
            transport.wait(under_way.popleft()[1])
        tensor = own(parcel)
        under_way.append((tensor, transport.send(0, _TAG, host_bytes(tensor))))
    while under_way:
        transport.wait(under_way.popleft()[1])
