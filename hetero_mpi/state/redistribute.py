"""The tensors that trainers train, whole, whoever holds parts of them; and moving them from ranks that have them to ranks that need
them, a few at a time.

One mechanism serves saving, writing the model, and restoring under another plan: from a checkpoint, from the ranks that held the
layers before, or from copies on other ranks. Who has and who needs a tensor is a function of the plans. So all ranks make the same
list, and walk it in the same order without negotiation.
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
    """The kind in a checkpoint: one of ``checkpoint.KINDS``."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The rank that owns it: where it is taken from."""
    others: tuple[int, ...] = ()
    """Further ranks that need it: of a parameter, all that hold it."""
    group: tuple[int, ...] = ()
    """The ranks that hold the owner's stage together with it, each perhaps with a part: they give theirs to the owner when it takes
    the tensor, and need all of it to cut theirs."""

    def among(self, ranks: Sequence[int]) -> TensorShard:
        """The same with its ranks numbered by their places in ``ranks``."""
        owner, group = ranks.index(self.owner), tuple(map(ranks.index, self.group))
        return replace(self, owner=owner, others=(), group=group)

    @property
    def dtype_name(self) -> str:
        """The name in a checkpoint."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def held_as(
    tuning: Tuning, spec: ParameterSpec, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """(shape, dtype) of what there is of a kind for a tensor; None: nothing. ``dtype``: of parameters."""
    if kind == "parameters":
        return spec.shape, dtype
    if spec.name not in tuning.trainable or spec.name in tuning.still:
        return None
    shape, named = moments.kept(tuning.moments.get(spec.name, moments.TWO), spec.shape).get(kind, (None, ""))
    return None if shape is None else (shape, getattr(torch, named))


def tensor_shards(
    tuning: Tuning, plan: Plan, kinds: Iterable[str], dtype: torch.dtype = torch.float32
) -> list[TensorShard]:
    """All tensors of the given kinds, in the model's order, layer by layer. Constants are parameters in fp32, without moments."""
    held, owner, kinds = holders(plan), parameter_owners(tuning, plan), tuple(kinds)
    groups = {stage.ranks[0]: stage.ranks for _, _, stage in plan.numbered if stage.grouped}
    specs = [(spec, dtype) for spec in tuning.trainable.values()]
    specs += [(spec, torch.float32) for spec in tuning.constants.values()]
    specs.sort(key=lambda one: one[0].layer)  # stable: the model's order within a layer
    found = []
    for spec, own in specs:
        first = owner.get(spec.name, held[spec.layer][0])
        others = tuple(rank for rank in held[spec.layer] if rank != first)
        for kind in kinds:
            there = held_as(tuning, spec, kind, own)
            if there is not None:
                group = groups.get(first, ())
                needing = others if kind == "parameters" else group[1:]
                found.append(TensorShard(kind, spec.name, *there, first, needing, group))
    return found


class LiveState:
    """A trainer's part of tensors, where it lies on the device; what its group has cut is put together in host memory. The ranks
    of a group, each with a part, go through the tensors in one order.

    ``rounded``: parameters are wanted in the compute dtype, as the result has them, else in fp32.
    """

    def __init__(self, trainer: Trainer, rounded: bool = False) -> None:
        self._trainer, self._rounded = trainer, rounded

    def __call__(self, shard: TensorShard) -> torch.Tensor:
        """On its owner: all of it."""
        trainer = self._trainer
        one = trainer.divided.get(shard.name)
        if one is None or not one.cut or trainer.group is None:
            return self._part(shard)
        division, shape = _division(trainer, shard, one)
        own = self._part(shard) if trainer.has_part(shard.name) else None
        own = own if own is None else own.view(division.shape(shape, trainer.group.member))
        return trainer.group.assembled(own, division, shape, shard.dtype).view(shard.shape)

    def give(self, shard: TensorShard) -> None:
        """On another rank of the owner's group: give the owner its part, if it has one."""
        if self._trainer.group is not None and self._trainer.has_part(shard.name):
            self._trainer.group.give(self._part(shard))

    def _part(self, shard: TensorShard) -> torch.Tensor:
        optimizer, held = self._trainer.optimizer, self._trainer.held
        assert optimizer is not None and held is not None
        tuning = self._trainer.tuning
        if shard.name in tuning.constants or shard.name in tuning.still:
            return held.model_parameter(shard.name).detach().to(shard.dtype)
        if shard.kind != "parameters":
            return optimizer.state(shard.name)[shard.kind]
        if self._rounded:
            return held.parameters[shard.name].detach().to(shard.dtype)
        return optimizer.targets[shard.name].detach()


def give_parts(rank: int, listed: Iterable[TensorShard], own: LiveState) -> None:
    """Give the first rank of this rank's group, which takes its own tensors of ``listed`` just now, this rank's parts of them."""
    for shard in listed:
        if rank in shard.group and rank != shard.owner:
            own.give(shard)


@dataclass(frozen=True)
class Transfer:
    """The transfer of one tensor: the rank that sends it, and the ranks that need it."""

    shard: TensorShard
    source: int
    destinations: tuple[int, ...]
    """Ranks that need it and do not have it."""
    keepers: tuple[int, ...] = ()
    """Ranks that need it and have it: nothing is sent to them."""


def transfers(listed: Iterable[TensorShard], having: Callable[[TensorShard], Sequence[int]]) -> list[Transfer]:
    """The transfers that bring every tensor to all ranks that need it. A function of its arguments: every rank makes the same
    list.

    Args:
        listed: as ``tensor_shards`` returns it, of the new plan.
        having: the ranks that have a tensor, at least one; the first of them sends it.
    """
    found = []
    for shard in listed:
        has, needs = having(shard), (shard.owner, *shard.others)
        assert has, f"nobody has {shard.kind} of {shard.name}"
        lacking, keepers = tuple(r for r in needs if r not in has), tuple(r for r in needs if r in has)
        found.append(Transfer(shard, has[0], lacking, keepers))
    return found


def held_under(tuning: Tuning, plan: Plan) -> Callable[[TensorShard], tuple[int, ...]]:
    """Gives the ranks that have a tensor under ``plan``: its owner, or of a constant all that hold it."""
    held, owner = holders(plan), parameter_owners(tuning, plan)
    return lambda shard: (owner[shard.name],) if shard.name in owner else held[tuning.constants[shard.name].layer]


def move(
    rank: int,
    transport: Transport,
    listed: Iterable[Transfer],
    own: Callable[[TensorShard], torch.Tensor],
    put: Callable[[TensorShard, torch.Tensor], None],
) -> int:
    """Make every transfer, in order. Called by all sources, destinations and keepers with the same list.

    There is no deadlock: a rank that waits, waits for its oldest transfer under way, and both ends of the oldest of all wait for
    that one. Returns the bytes that this rank received.

    Args:
        own: returns a tensor that this rank sends or keeps, as a contiguous host tensor.
        put: takes a tensor that this rank receives or keeps; a keeper gets its own tensor back.
    """
    under_way: deque[tuple[TensorShard, torch.Tensor, list[Request], bool]] = deque()
    received = 0

    def finish() -> None:
        shard, tensor, requests, arrives = under_way.popleft()
        for request in requests:
            transport.wait(request)
        if arrives:
            put(shard, tensor)

    for one in listed:
        shard = one.shard
        if (rank == one.source and one.destinations) or rank in one.keepers:
            tensor = own(shard)
            if rank in one.keepers:
                put(shard, tensor)
            if rank == one.source:
                sends = [transport.send(other, _TAG, host_bytes(tensor)) for other in one.destinations]
                under_way.append((shard, tensor, sends, False))
        elif rank in one.destinations:
            tensor = torch.empty(shard.shape, dtype=shard.dtype)
            received += tensor.nbytes
            request = transport.post_receive(one.source, _TAG, host_bytes(tensor))
            under_way.append((shard, tensor, [request], True))
        while len(under_way) > MAX_MESSAGES_IN_FLIGHT:
            finish()
    while under_way:
        finish()
    return received


def take_over(
    trainer: Trainer, listed: Sequence[Transfer], own: Callable[[TensorShard], torch.Tensor], updates: int
) -> int:
    """Move parameters and moments of all ``KINDS`` from the ranks that have them to the ranks that need them now. Collective over
    the trainers. Ranks that only send call ``move`` with the same list. Returns the bytes that this rank received.

    Args:
        own: returns what this rank has, as a contiguous host tensor.
        updates: updates by the optimizer so far.
    """
    received = move(trainer.rank, trainer.transport, listed, own, keeper(trainer, updates))
    trainer.share_tied_weight()
    return received


def set_parameter(trainer: Trainer, name: str, value: torch.Tensor) -> None:
    """Overwrite what a trainer has of a parameter (and what it is rounded to), or a constant, from a whole fp32 host tensor."""
    held, optimizer = trainer.held, trainer.optimizer
    assert held is not None and optimizer is not None
    with torch.no_grad():
        divided = trainer.divided.get(name)
        shard = TensorShard("parameters", name, tuple(value.shape), value.dtype, trainer.rank)
        if name in trainer.tuning.constants:
            held.storage_of(held.model_parameter(name)).copy_(value)
        elif name in trainer.tuning.still:
            if divided is None or trainer.group is None or divided.exists(trainer.group.member):
                held.storage_of(held.model_parameter(name)).copy_(_own_part(trainer, shard, value))
        elif name in held.parameters:
            value = _own_part(trainer, shard, value)
            if name in optimizer.targets:
                optimizer.targets[name].copy_(value)
            held.overwrite({name: optimizer.targets.get(name, value)})


def keeper(trainer: Trainer, updates: int) -> Callable[[TensorShard, torch.Tensor], None]:
    """A function that puts arriving parameters and moments where they belong. ``updates``: by the optimizer so far."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def keep(shard: TensorShard, tensor: torch.Tensor) -> None:
        if shard.kind == "parameters":
            set_parameter(trainer, shard.name, tensor)
            return
        if trainer.optimizer is None or shard.name not in trainer.optimizer.targets:
            return  # of a group, whose first rank has it
        arrived = waiting.setdefault(shard.name, {})
        arrived[shard.kind] = _own_part(trainer, shard, tensor)
        spec = trainer.tuning.trainable[shard.name]
        if len(arrived) == len(moments.kept(trainer.tuning.moments.get(shard.name, moments.TWO), spec.shape)):
            trainer.optimizer.restore(shard.name, waiting.pop(shard.name), updates)

    return keep


def _own_part(trainer: Trainer, shard: TensorShard, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of a parameter."""
    divided = trainer.divided.get(shard.name)
    if divided is None or trainer.group is None or not divided.cut:
        return whole
    division, shape = _division(trainer, shard, divided)
    part = division.part(whole.view(shape), trainer.group.member)
    return part.flatten() if shard.kind in SCALES else part


def _division(trainer: Trainer, shard: TensorShard, of_parameter: Division) -> tuple[Division, tuple[int, ...]]:
    """(the division of a tensor of a cut parameter, the shape in which it is divided)."""
    if shard.kind in SCALES:
        return of_parameter.of_moments(trainer.tuning.trainable[shard.name].shape)
    return of_parameter, shard.shape


def collect(
    rank: int, transport: Transport, listed: Iterable[TensorShard], own: LiveState
) -> Iterator[tuple[TensorShard, torch.Tensor]]:
    """Send every tensor to rank 0. Collective: every rank must exhaust the iterator. ``own``: returns a tensor this rank holds.

    Yields:
        on rank 0 each tensor with its host tensor, valid until the next one is taken; nothing on other ranks.
    """
    listed = list(listed)
    if rank != 0:
        owned = (_on_host(own(shard)) for shard in listed if shard.owner == rank)
        send_in_order(transport, ((0, _TAG, host_bytes(tensor)) for tensor in owned))
        give_parts(rank, listed, own)
        return
    coming = ((p.owner, _TAG, np.empty(p.bytes, np.uint8)) for p in listed if p.owner != 0)
    arriving = receive_in_order(transport, coming)
    for shard in listed:
        if shard.owner == 0:
            yield shard, _on_host(own(shard))
        else:
            yield shard, torch.from_numpy(next(arriving)).view(shard.dtype).view(shard.shape)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(HOST).contiguous()
