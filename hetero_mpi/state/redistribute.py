"""Redistribute tensors of the training state from the ranks that have them to the ranks that need them, a few at a time.

The same mechanism saves checkpoints, exports the model, and restores the state under another plan: from a checkpoint, from the
ranks that held the layers before, or from copies on other ranks. The plans determine which ranks have and need each tensor, so all
ranks compute the same list of transfers and process it in the same order without negotiation. Tensors are transferred unsharded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_mpi.comm.transport import MAX_MESSAGES_IN_FLIGHT, Request, Transport, receive_in_order, send_in_order
from hetero_mpi.device.backend import HOST, host_bytes
from hetero_mpi.engine.placement import parameter_owners
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.model.layer.interface import ParameterSpec
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types import moments
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.state.hdf5 import SCALES

_TAG = 1 << 14


@dataclass(frozen=True)
class TensorShard:
    """A named tensor and the ranks that hold it."""

    kind: str
    """Its kind in a checkpoint, one of ``hdf5.KINDS``."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The rank that provides the tensor."""
    receivers: tuple[int, ...] = ()
    """Other ranks that need the tensor; for a parameter, all other ranks that hold it."""
    group: tuple[int, ...] = ()
    """Tensor-parallel ranks of the owner's stage: each may have a shard, which it sends to the owner when the owner assembles the
    tensor, and cuts from the complete tensor when it receives one."""

    def renumbered(self, ranks: Sequence[int]) -> TensorShard:
        """Return the same shard with ranks renumbered by their positions in ``ranks``."""
        owner, group = ranks.index(self.owner), tuple(map(ranks.index, self.group))
        return replace(self, owner=owner, receivers=(), group=group)

    @property
    def dtype_name(self) -> str:
        """Dtype name in a checkpoint."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def held_as(
    tuning: Tuning, spec: ParameterSpec, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return (shape, dtype) of a tensor's state of the given kind; None if it has none. ``dtype``: dtype of parameters."""
    if kind == "parameters":
        return spec.shape, dtype
    if spec.name not in tuning.trainable or spec.name in tuning.still:
        return None
    shape, named = moments.moment_tensors(tuning.moments.get(spec.name, moments.TWO), spec.shape).get(kind, (None, ""))
    return None if shape is None else (shape, getattr(torch, named))


def tensor_shards(
    tuning: Tuning, plan: Plan, kinds: Iterable[str], dtype: torch.dtype = torch.float32
) -> list[TensorShard]:
    """List all tensors of the given kinds layer by layer, in model order. Constants are fp32 parameters without moments."""
    holders_by_layer, owner, kinds = holders(plan), parameter_owners(tuning, plan), tuple(kinds)
    groups = {stage.ranks[0]: stage.ranks for _, _, stage in plan.numbered if stage.grouped}
    specs = [(spec, dtype) for spec in tuning.trainable.values()]
    specs += [(spec, torch.float32) for spec in tuning.constants.values()]
    specs.sort(key=lambda row: row[0].layer)  # stable: keeps model order within a layer
    shards = []
    for spec, spec_dtype in specs:
        first = owner.get(spec.name, holders_by_layer[spec.layer][0])
        other_ranks = tuple(rank for rank in holders_by_layer[spec.layer] if rank != first)
        for kind in kinds:
            stored = held_as(tuning, spec, kind, spec_dtype)
            if stored is not None:
                group = groups.get(first, ())
                receivers = other_ranks if kind == "parameters" else group[1:]
                shards.append(TensorShard(kind, spec.name, *stored, first, receivers, group))
    return shards


class LiveState:
    """A trainer's tensors on the device; tensors sharded over its tensor-parallel group are assembled in host memory.

    All ranks of the group must process the tensors in the same order. ``rounded``: whether to return parameters in the compute
    dtype, as needed for the exported model, instead of fp32.
    """

    def __init__(self, trainer: Trainer, rounded: bool = False) -> None:
        self._trainer, self._rounded = trainer, rounded

    def __call__(self, shard: TensorShard) -> torch.Tensor:
        """Return the complete tensor; called on its owner."""
        trainer = self._trainer
        divided = trainer.divided.get(shard.name)
        if divided is None or not divided.cut or trainer.group is None:
            return self._part(shard)
        division, shape = _division(trainer, shard, divided)
        part = self._part(shard) if trainer.has_part(shard.name) else None
        part = part if part is None else part.view(division.shape(shape, trainer.group.member))
        return trainer.group.assembled(part, division, shape, shard.dtype).view(shard.shape)

    def give(self, shard: TensorShard) -> None:
        """Send this rank's shard, if it has one, to the tensor's owner; called on the other ranks of the owner's group."""
        if self._trainer.group is not None and self._trainer.has_part(shard.name):
            self._trainer.group.give(self._part(shard))

    def _part(self, shard: TensorShard) -> torch.Tensor:
        optimizer, layers = self._trainer.optimizer, self._trainer.layers
        assert optimizer is not None and layers is not None
        tuning = self._trainer.tuning
        if shard.name in tuning.constants or shard.name in tuning.still:
            return layers.model_parameter(shard.name).detach().to(shard.dtype)
        if shard.kind != "parameters":
            return optimizer.state(shard.name)[shard.kind]
        if self._rounded:
            return layers.parameters[shard.name].detach().to(shard.dtype)
        return optimizer.targets[shard.name].detach()


def give_parts(rank: int, listed: Iterable[TensorShard], live: LiveState) -> None:
    """Send this rank's shards of ``listed`` to their owner in the same group, while the owner reads these tensors."""
    for shard in listed:
        if rank in shard.group and rank != shard.owner:
            live.give(shard)


@dataclass(frozen=True)
class Transfer:
    """The transfer of one tensor from one rank to the ranks that need it."""

    shard: TensorShard
    source: int
    destinations: tuple[int, ...]
    """Ranks that need the tensor and do not have it."""
    keepers: tuple[int, ...] = ()
    """Ranks that need the tensor and have it already."""


def transfers(listed: Iterable[TensorShard], having: Callable[[TensorShard], Sequence[int]]) -> list[Transfer]:
    """List the transfers that bring every tensor to all ranks that need it; every rank computes the same list.

    Args:
        listed: tensors under the new plan (``tensor_shards``).
        having: returns the ranks that have a tensor (at least one); the first of them sends it.
    """
    transfer_list = []
    for shard in listed:
        has, needs = having(shard), (shard.owner, *shard.receivers)
        assert has, f"no rank has {shard.kind} of {shard.name}"
        receivers, keepers = tuple(r for r in needs if r not in has), tuple(r for r in needs if r in has)
        transfer_list.append(Transfer(shard, has[0], receivers, keepers))
    return transfer_list


def held_under(tuning: Tuning, plan: Plan) -> Callable[[TensorShard], tuple[int, ...]]:
    """Return a function that lists the ranks that have a tensor under ``plan``: its owner, or all holders of a constant."""
    by_layer, owner = holders(plan), parameter_owners(tuning, plan)
    return lambda shard: (owner[shard.name],) if shard.name in owner else by_layer[tuning.constants[shard.name].layer]


def move(
    rank: int,
    transport: Transport,
    listed: Iterable[Transfer],
    read: Callable[[TensorShard], torch.Tensor],
    put: Callable[[TensorShard, torch.Tensor], None],
) -> int:
    """Execute transfers in order. All sources, destinations and keepers must call it with the same list.

    It cannot deadlock: a rank waits only for its oldest active transfer, so both ends of the globally oldest transfer make
    progress. Returns the number of bytes received by this rank.

    Args:
        read: returns a tensor that this rank sends or keeps, as a contiguous host tensor.
        put: stores a tensor that this rank receives or keeps; for a kept tensor, it is passed the result of ``read``.
    """
    active: deque[tuple[TensorShard, torch.Tensor, list[Request], bool]] = deque()
    received = 0

    def finish() -> None:
        shard, tensor, requests, arrives = active.popleft()
        for request in requests:
            transport.wait(request)
        if arrives:
            put(shard, tensor)

    for transfer in listed:
        shard = transfer.shard
        if (rank == transfer.source and transfer.destinations) or rank in transfer.keepers:
            tensor = read(shard)
            if rank in transfer.keepers:
                put(shard, tensor)
            if rank == transfer.source:
                sends = [transport.send(receiver, _TAG, host_bytes(tensor)) for receiver in transfer.destinations]
                active.append((shard, tensor, sends, False))
        elif rank in transfer.destinations:
            tensor = torch.empty(shard.shape, dtype=shard.dtype)
            received += tensor.nbytes
            request = transport.post_receive(transfer.source, _TAG, host_bytes(tensor))
            active.append((shard, tensor, [request], True))
        while len(active) > MAX_MESSAGES_IN_FLIGHT:
            finish()
    while active:
        finish()
    return received


def take_over(
    trainer: Trainer, listed: Sequence[Transfer], read: Callable[[TensorShard], torch.Tensor], updates: int
) -> int:
    """Move tensors of all ``KINDS`` to the ranks that need them under the new plan. Collective over the trainers.

    Ranks that only send must call ``move`` with the same list. Returns the number of bytes received by this rank.

    Args:
        read: returns this rank's tensor, as a contiguous host tensor.
        updates: number of optimizer updates so far.
    """
    received = move(trainer.rank, trainer.transport, listed, read, keeper(trainer, updates))
    trainer.share_tied_weight()
    return received


def set_parameter(trainer: Trainer, name: str, value: torch.Tensor) -> None:
    """Overwrite a parameter (and its copy in the compute dtype) or constant of a trainer with a complete fp32 host tensor."""
    layers, optimizer = trainer.layers, trainer.optimizer
    assert layers is not None and optimizer is not None
    with torch.no_grad():
        divided = trainer.divided.get(name)
        shard = TensorShard("parameters", name, tuple(value.shape), value.dtype, trainer.rank)
        if name in trainer.tuning.constants:
            layers.storage_of(layers.model_parameter(name)).copy_(value)
        elif name in trainer.tuning.still:
            if divided is None or trainer.group is None or divided.exists(trainer.group.member):
                layers.storage_of(layers.model_parameter(name)).copy_(_local_part(trainer, shard, value))
        elif name in layers.parameters:
            value = _local_part(trainer, shard, value)
            if name in optimizer.targets:
                optimizer.targets[name].copy_(value)
            layers.overwrite({name: optimizer.targets.get(name, value)})


def keeper(trainer: Trainer, updates: int) -> Callable[[TensorShard, torch.Tensor], None]:
    """Return a function that stores received parameters and moments in the trainer. ``updates``: number of optimizer updates."""
    pending: dict[str, dict[str, torch.Tensor]] = {}

    def store(shard: TensorShard, tensor: torch.Tensor) -> None:
        if shard.kind == "parameters":
            set_parameter(trainer, shard.name, tensor)
            return
        if trainer.optimizer is None or shard.name not in trainer.optimizer.targets:
            return  # belongs to a group, whose first rank stores it
        arrived = pending.setdefault(shard.name, {})
        arrived[shard.kind] = _local_part(trainer, shard, tensor)
        spec = trainer.tuning.trainable[shard.name]
        if len(arrived) == len(moments.moment_tensors(trainer.tuning.moments.get(shard.name, moments.TWO), spec.shape)):
            trainer.optimizer.restore(shard.name, pending.pop(shard.name), updates)

    return store


def _local_part(trainer: Trainer, shard: TensorShard, full: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a complete tensor; returns the tensor itself if it is not sharded."""
    divided = trainer.divided.get(shard.name)
    if divided is None or trainer.group is None or not divided.cut:
        return full
    division, shape = _division(trainer, shard, divided)
    part = division.part(full.view(shape), trainer.group.member)
    return part.flatten() if shard.kind in SCALES else part


def _division(trainer: Trainer, shard: TensorShard, of_parameter: Division) -> tuple[Division, tuple[int, ...]]:
    """Return how a tensor of a sharded parameter is divided, and the shape to which the division applies."""
    if shard.kind in SCALES:
        return of_parameter.of_moments(trainer.tuning.trainable[shard.name].shape)
    return of_parameter, shard.shape


def collect(
    rank: int, transport: Transport, listed: Iterable[TensorShard], live: LiveState
) -> Iterator[tuple[TensorShard, torch.Tensor]]:
    """Send every tensor to rank 0. Collective: every rank must exhaust the iterator.

    Yields:
        On rank 0, each shard with its tensor on the host, which is valid until the next iteration; nothing on other ranks.
    """
    listed = list(listed)
    if rank != 0:
        owned = (_on_host(live(shard)) for shard in listed if shard.owner == rank)
        send_in_order(transport, ((0, _TAG, host_bytes(tensor)) for tensor in owned))
        give_parts(rank, listed, live)
        return
    coming = ((p.owner, _TAG, np.empty(p.bytes, np.uint8)) for p in listed if p.owner != 0)
    arriving = receive_in_order(transport, coming)
    for shard in listed:
        if shard.owner == 0:
            yield shard, _on_host(live(shard))
        else:
            yield shard, torch.from_numpy(next(arriving)).view(shard.dtype).view(shard.shape)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(HOST).contiguous()
