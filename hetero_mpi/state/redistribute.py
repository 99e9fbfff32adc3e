"""The tensors that trainers train, whole, whoever holds parts of them; and moving them from ranks that have them to ranks that need
them, a few at a time.

One mechanism serves saving, writing the model, and restoring under another plan: from a checkpoint, from the ranks that held the
layers before, or from copies on other ranks. Who has and who needs a tensor is a function of the plans. So all ranks make the same
list, and walk it in the same order without negotiation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hetero_mpi.comm.transport import AHEAD, Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.engine.placement import parameter_owners
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.group.division import Division
from hetero_mpi.model.layer.interface import ParameterSpec
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types import moments
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.state.checkpoint.format import SCALES

_TAG = 1 << 14


@dataclass(frozen=True)
class Parcel:
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

    def among(self, ranks: Sequence[int]) -> Parcel:
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


def parcels(tuning: Tuning, plan: Plan, kinds: Iterable[str], dtype: torch.dtype = torch.float32) -> list[Parcel]:
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
                found.append(Parcel(kind, spec.name, *there, first, needing, group))
    return found


class LiveState:
    """A trainer's part of parcels, where it lies on the device; what its group has cut is put together in host memory. The ranks
    of a group, each with a part, go through the parcels in one order.

    ``rounded``: parameters are wanted in the compute dtype, as the result has them, else in fp32.
    """

    def __init__(self, trainer: Trainer, rounded: bool = False) -> None:
        self._trainer, self._rounded = trainer, rounded

    def __call__(self, parcel: Parcel) -> torch.Tensor:
        """On its owner: all of it."""
        trainer = self._trainer
        one = trainer.divided.get(parcel.name)
        if one is None or not one.cut or trainer.group is None:
            return self._part(parcel)
        division, shape = _division(trainer, parcel, one)
        own = self._part(parcel) if trainer.has_part(parcel.name) else None
        own = own if own is None else own.view(division.shape(shape, trainer.group.member))
        return trainer.group.assembled(own, division, shape, parcel.dtype).view(parcel.shape)

    def give(self, parcel: Parcel) -> None:
        """On another rank of the owner's group: give the owner its part, if it has one."""
        if self._trainer.group is not None and self._trainer.has_part(parcel.name):
            self._trainer.group.give(self._part(parcel))

    def _part(self, parcel: Parcel) -> torch.Tensor:
        optimizer, held = self._trainer.optimizer, self._trainer.held
        assert optimizer is not None and held is not None
        tuning = self._trainer.tuning
        if parcel.name in tuning.constants or parcel.name in tuning.still:
            return held.model_parameter(parcel.name).detach().to(parcel.dtype)
        if parcel.kind != "parameters":
            return optimizer.state(parcel.name)[parcel.kind]
        if self._rounded:
            return held.parameters[parcel.name].detach().to(parcel.dtype)
        return optimizer.targets[parcel.name].detach()


def give_parts(rank: int, listed: Iterable[Parcel], own: LiveState) -> None:
    """Give the first rank of this rank's group, which takes its own parcels of ``listed`` just now, this rank's parts of them."""
    for parcel in listed:
        if rank in parcel.group and rank != parcel.owner:
            own.give(parcel)


@dataclass(frozen=True)
class Delivery:
    """One parcel's transfer: the rank that sends it, and the ranks that need it."""

    parcel: Parcel
    source: int
    destinations: tuple[int, ...]
    """Ranks that need it and do not have it."""
    keepers: tuple[int, ...] = ()
    """Ranks that need it and have it: nothing is sent to them."""


def deliveries(listed: Iterable[Parcel], having: Callable[[Parcel], Sequence[int]]) -> list[Delivery]:
    """The deliveries that bring every parcel to all ranks that need it. A function of its arguments: every rank makes the same
    list.

    Args:
        listed: as ``parcels`` returns it, of the new plan.
        having: the ranks that have a parcel, at least one; the first of them sends it.
    """
    found = []
    for parcel in listed:
        has, needs = having(parcel), (parcel.owner, *parcel.others)
        assert has, f"nobody has {parcel.kind} of {parcel.name}"
        lacking, keepers = tuple(r for r in needs if r not in has), tuple(r for r in needs if r in has)
        found.append(Delivery(parcel, has[0], lacking, keepers))
    return found


def held_under(tuning: Tuning, plan: Plan) -> Callable[[Parcel], tuple[int, ...]]:
    """Gives the ranks that have a parcel under ``plan``: its owner, or of a constant all that hold it."""
    held, owner = holders(plan), parameter_owners(tuning, plan)
    return lambda parcel: (owner[parcel.name],) if parcel.name in owner else held[tuning.constants[parcel.name].layer]


def move(
    rank: int,
    transport: Transport,
    listed: Iterable[Delivery],
    own: Callable[[Parcel], torch.Tensor],
    put: Callable[[Parcel, torch.Tensor], None],
) -> int:
    """Make every delivery, in order. Called by all sources, destinations and keepers with the same list.

    There is no deadlock: a rank that waits, waits for its oldest delivery under way, and both ends of the oldest of all wait for
    that one. Returns the bytes that this rank received.

    Args:
        own: returns a parcel that this rank sends or keeps, as a contiguous host tensor.
        put: takes a parcel that this rank receives or keeps; a keeper gets its own tensor back.
    """
    under_way: deque[tuple[Parcel, torch.Tensor, list[Request], bool]] = deque()
    received = 0

    def finish() -> None:
        parcel, tensor, requests, arrives = under_way.popleft()
        for request in requests:
            transport.wait(request)
        if arrives:
            put(parcel, tensor)

    for one in listed:
        parcel = one.parcel
        if (rank == one.source and one.destinations) or rank in one.keepers:
            tensor = own(parcel)
            if rank in one.keepers:
                put(parcel, tensor)
            if rank == one.source:
                sends = [transport.send(other, _TAG, host_bytes(tensor)) for other in one.destinations]
                under_way.append((parcel, tensor, sends, False))
        elif rank in one.destinations:
            tensor = torch.empty(parcel.shape, dtype=parcel.dtype)
            received += tensor.nbytes
            request = transport.post_receive(one.source, _TAG, host_bytes(tensor))
            under_way.append((parcel, tensor, [request], True))
        while len(under_way) > AHEAD:
            finish()
    while under_way:
        finish()
    return received


def take_over(trainer: Trainer, listed: Sequence[Delivery], own: Callable[[Parcel], torch.Tensor], updates: int) -> int:
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
        parcel = Parcel("parameters", name, tuple(value.shape), value.dtype, trainer.rank)
        if name in trainer.tuning.constants:
            held.storage_of(held.model_parameter(name)).copy_(value)
        elif name in trainer.tuning.still:
            if divided is None or trainer.group is None or divided.exists(trainer.group.member):
                held.storage_of(held.model_parameter(name)).copy_(_own_part(trainer, parcel, value))
        elif name in held.parameters:
            value = _own_part(trainer, parcel, value)
            if name in optimizer.targets:
                optimizer.targets[name].copy_(value)
            held.overwrite({name: optimizer.targets.get(name, value)})


def keeper(trainer: Trainer, updates: int) -> Callable[[Parcel, torch.Tensor], None]:
    """A function that puts arriving parameters and moments where they belong. ``updates``: by the optimizer so far."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def keep(parcel: Parcel, tensor: torch.Tensor) -> None:
        if parcel.kind == "parameters":
            set_parameter(trainer, parcel.name, tensor)
            return
        if trainer.optimizer is None or parcel.name not in trainer.optimizer.targets:
            return  # of a group, whose first rank has it
        arrived = waiting.setdefault(parcel.name, {})
        arrived[parcel.kind] = _own_part(trainer, parcel, tensor)
        spec = trainer.tuning.trainable[parcel.name]
        if len(arrived) == len(moments.kept(trainer.tuning.moments.get(parcel.name, moments.TWO), spec.shape)):
            trainer.optimizer.restore(parcel.name, waiting.pop(parcel.name), updates)

    return keep


def _own_part(trainer: Trainer, parcel: Parcel, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of a parameter."""
    divided = trainer.divided.get(parcel.name)
    if divided is None or trainer.group is None or not divided.cut:
        return whole
    division, shape = _division(trainer, parcel, divided)
    part = division.part(whole.view(shape), trainer.group.member)
    return part.flatten() if parcel.kind in SCALES else part


def _division(trainer: Trainer, parcel: Parcel, of_parameter: Division) -> tuple[Division, tuple[int, ...]]:
    """(the division of a parcel of a cut parameter, the shape in which it is divided)."""
    if parcel.kind in SCALES:
        return of_parameter.of_moments(trainer.tuning.trainable[parcel.name].shape)
    return of_parameter, parcel.shape
