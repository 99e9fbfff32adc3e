"""AdamW as torch has it, or as bitsandbytes has it, whose moments of large tensors are blocks of 8 bits (Dettmers et al. 2022,
arXiv:2110.02861)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from hetero_mpi.device.backend import Backend
from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.planning.types.cost import MOMENT_BLOCK

_TORCH = {"moments1": "exp_avg", "moments2": "exp_avg_sq"}
_BITSANDBYTES = {"moments1": "state1", "moments2": "state2", "absmax1": "absmax1", "absmax2": "absmax2"}
"""Kind of tensor in a checkpoint -> its name in the optimizer's state."""
_PIECE = 1 << 18
"""Numbers that bitsandbytes steps at once in host memory: whole blocks."""
_ALONE = threading.Lock()
"""bitsandbytes 0.50 packs on CPUs with the wrong map where two threads of a process pack by unlike ones at a time."""


class AdamW:
    """Steps fp32 parameters, each by itself: what it steps besides changes no bit.

    Args:
        fused: torch's kernel is to be the fused one.
        targets: (parameter, does it decay?, are its moments in 8 bits?, its learning rate as a share of the job's).
    """

    def __init__(self, train: TrainTable, fused: bool, targets: Iterable[tuple[Parameter, bool, bool, float]]) -> None:
        self._fused, listed = fused, list(targets)
        self._in_pieces = train.optimizer == EIGHT_BIT and all(p.device.type == "cpu" for p, *_ in listed)
        for target, *_ in listed if self._in_pieces else ():
            target.data = target.data.contiguous()  # as bitsandbytes does; moments and gradients get its layout
        self._names = _BITSANDBYTES if train.optimizer == EIGHT_BIT else _TORCH
        settings = {"lr": train.learning_rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon}
        self._parts: list[Any] = []
        """torch's optimizer, or bitsandbytes' of either width."""
        self._places: dict[Parameter, tuple[Any, int, int]] = {}
        """Parameter -> (its optimizer, group, place in the group)."""
        for make, widths in _makers(train, fused):
            groups: list[dict[str, Any]] = []
            for decay, share in sorted({(decays, share) for _, decays, _, share in listed}, reverse=True):
                some = [
                    p for p, decays, eight_bit, own in listed if (decays, own) == (decay, share) and eight_bit in widths
                ]
                groups += [{"params": some, "weight_decay": train.weight_decay * decay, "share": share}] if some else []
            if groups:  # a stage may hold nothing that is trained, such as an embedding beside adapters
                self._parts.append(make(groups, **settings))
        for part in self._parts:
            for number, group in enumerate(part.param_groups):
                self._places |= {p: (part, number, place) for place, p in enumerate(group["params"])}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """As torch's optimizers have them: ``params``, ``weight_decay``, ``lr`` and more."""
        return [group for part in self._parts for group in part.param_groups]

    def step(self, rate: float) -> None:
        """One step with the learning rate ``rate``, of which each group has its share."""
        for group in self.groups:
            group["lr"] = rate * group["share"]
        if not self._in_pieces:
            for part in self._parts:
                part.step()
            return
        for target, (part, number, _) in self._places.items():
            if target.grad is None:
                continue
            with _ALONE:
                _step_in_pieces(target, self._held(target), part.param_groups[number])

    def state(self, target: Parameter) -> dict[str, torch.Tensor]:
        """Kind -> tensor of what is kept of a parameter from step to step: ``moments1`` and ``moments2``, of its shape, in fp32 or
        uint8, and of these ``absmax1`` and ``absmax2``, an fp32 scale for each block of 256 numbers. As they are."""
        held = self._held(target)
        return {kind: held[name] for kind, name in self._names.items() if name in held}

    def restore(self, target: Parameter, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Put back what ``state`` gave after ``steps`` steps."""
        held = self._held(target)
        for kind, value in state.items():
            held[self._names[kind]].copy_(value)
        held["step"] = self._counter(target, steps)

    def _held(self, target: Parameter) -> dict[str, Any]:
        """The state of a parameter, which is zeros before its first step."""
        part, number, place = self._places[target]
        held: dict[str, Any] = part.state[target]
        if not held and self._names is _TORCH:
            held["step"] = self._counter(target, 0)
            held |= {name: torch.zeros_like(target) for name in _TORCH.values()}
        elif not held:
            part.init_state(part.param_groups[number], target, number, place)
        return held

    def _counter(self, target: Parameter, steps: int) -> int | torch.Tensor:
        if self._names is not _TORCH:
            return steps
        # torch keeps it as a float32 tensor, on the device where the kernel is fused.
        return torch.tensor(float(steps), dtype=torch.float32, device=target.device if self._fused else "cpu")


@torch.no_grad()
def _step_in_pieces(target: Parameter, held: dict[str, Any], group: Mapping[str, Any]) -> None:
    """``update_step`` of bitsandbytes' optimizers, in host memory: its code for CPUs takes up to 20 bytes for each number that it
    is given at once, and is slower out of the caches. The same bits as of the whole tensor."""
    from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

    assert target.grad is not None
    (beta1, beta2), rest = group["betas"], (0.0, 0.0)
    held["step"] += 1
    tensors = [tensor.view(-1) for tensor in (target.grad, target, held["state1"], held["state2"])]
    for begin in range(0, target.numel(), _PIECE):
        gradient, values, first, second = (tensor[begin : begin + _PIECE] for tensor in tensors)
        if "absmax1" in held:
            blocks = slice(begin // MOMENT_BLOCK, (begin + _PIECE) // MOMENT_BLOCK)
            maps, scales = ([held[f"{name}{i}"] for i in (1, 2)] for name in ("qmap", "absmax"))
            numbers = (beta1, beta2, *rest, group["eps"], held["step"], group["lr"])
            own: tuple[Any, ...] = (*maps, *(one[blocks] for one in scales), group["weight_decay"])
            optimizer_update_8bit_blockwise("adam", gradient, values, first, second, *numbers, *own)
        else:
            own = (beta1, group["eps"], held["step"], group["lr"], second, beta2, *rest, group["weight_decay"])
            optimizer_update_32bit("adam", gradient, values, first, *own)


def _makers(train: TrainTable, fused: bool) -> list[tuple[Any, tuple[bool, ...]]]:
    if train.optimizer != EIGHT_BIT:
        return [(partial(torch.optim.AdamW, fused=fused), (False, True))]
    from bitsandbytes import optim

    return [(optim.AdamW8bit, (True,)), (optim.AdamW, (False,))]


def check_eight_bit(backend: Backend, who: str) -> None:
    """Let bitsandbytes' optimizer step on this rank's device.

    :raises UserError: it cannot, with the reason and the name ``who`` of the rank.
    """
    tensor = Parameter(torch.zeros(4096, device=backend.device))
    tensor.grad = torch.ones_like(tensor)
    train = TrainTable(optimizer="adamw_8bit")
    try:
        AdamW(train, False, [(tensor, False, True, 1.0)]).step(1.0)
        moved = bool((tensor < 0).all())
        reason = "its step changed nothing"
    except Exception as error:  # whatever it raises where it has no kernel, or where it is not installed
        moved, reason = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not moved:
        raise UserError(
            f'[train] optimizer = "adamw_8bit": bitsandbytes does not step on {who}, {backend.description()} ({reason}); install '
            f'bitsandbytes 0.50 or later there, leave that rank out, or set optimizer = "adamw"'
        )
