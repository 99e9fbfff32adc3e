"""The tensors that a trainer trains, as those see them who save and move state: whole, whoever holds parts of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.state.redistribute import Parcel


class LiveState:
    """What a trainer has of parcels, where it lies on the device; what its group has cut is put together in host memory.

    ``rounded``: parameters are wanted in the compute dtype, as the result has them, else in fp32.
    """

    def __init__(self, trainer: Trainer, rounded: bool = False) -> None:
        self._trainer, self._rounded = trainer, rounded

    def __call__(self, parcel: Parcel) -> torch.Tensor:
        """See ``redistribute.Own``."""
        trainer = self._trainer
        one = trainer.divided.get(parcel.name)
        if one is None or not one.cut or trainer.group is None:
            return self._part(parcel)
        own = self._part(parcel) if trainer.has_part(parcel.name) else None
        return trainer.group.assembled(own, one.division, parcel.shape, parcel.dtype)

    def give(self, parcel: Parcel) -> None:
        """See ``redistribute.Own``."""
        if self._trainer.group is not None and self._trainer.has_part(parcel.name):
            self._trainer.group.give(self._part(parcel))

    def _part(self, parcel: Parcel) -> torch.Tensor:
        optimizer, held = self._trainer.optimizer, self._trainer.held
        assert optimizer is not None and held is not None
        if parcel.name in self._trainer.tuning.constants:
            return held.model_parameter(parcel.name).detach().float()
        if parcel.kind != "parameters":
            return optimizer.state(parcel.name)[parcel.kind]
        if self._rounded:
            return held.parameters[parcel.name].detach().to(self._trainer.dtype)
        return optimizer.targets[parcel.name].detach()


def set_parameter(trainer: Trainer, name: str, value: torch.Tensor) -> None:
    """Overwrite what a trainer has of a parameter (and what it is rounded to), or a constant, from a whole fp32 host tensor."""
    held, optimizer = trainer.held, trainer.optimizer
    assert held is not None and optimizer is not None
    with torch.no_grad():
        if name in trainer.tuning.constants:
            held.storage_of(held.model_parameter(name)).copy_(value)
        elif name in held.parameters:
            value = _own_part(trainer, name, value)
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
        moments = waiting.setdefault(parcel.name, {})
        moments[parcel.kind] = _own_part(trainer, parcel.name, tensor)
        if len(moments) == (4 if parcel.name in trainer.tuning.eight_bit else 2):
            trainer.optimizer.restore(parcel.name, waiting.pop(parcel.name), updates)

    return keep


def _own_part(trainer: Trainer, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor of a parameter."""
    divided = trainer.divided.get(name)
    return whole if divided is None or trainer.group is None else divided.division.part(whole, trainer.group.member)
