"""The optimizers of the libraries: torch's AdamW; bitsandbytes', whose moments of large tensors are blocks of 8 bits (Dettmers et
al. 2022, arXiv:2110.02861); transformers' Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), which keeps of a matrix the means
of its rows and columns; torch's Muon for matrices inside of blocks (Liu et al. 2025, arXiv:2502.16982), beside AdamW."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.tuning import imported_peft
from hetero_mpi.planning.types import moments as kinds
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK

_TORCH = {
    kinds.TWO: {"moments1": "exp_avg", "moments2": "exp_avg_sq"},
    kinds.FACTORED: {"moments1": "exp_avg_sq_row", "moments2": "exp_avg_sq_col"},
    kinds.ONE: {"moments1": "momentum_buffer"},
}
_VECTOR = {"moments2": "exp_avg_sq"}
"""Adafactor's."""
_BITSANDBYTES = {"moments1": "state1", "moments2": "state2", "absmax1": "absmax1", "absmax2": "absmax2"}
"""Kind of tensor in a checkpoint -> its name in the optimizer's state."""
_PIECE = 1 << 18
"""Numbers that bitsandbytes steps at once in host memory: whole blocks."""
_ALONE = threading.Lock()
"""bitsandbytes 0.50 packs on CPUs with the wrong map where two threads of a process pack by unlike ones at a time."""


class LibraryOptimizers:
    """Step fp32 parameters, each by itself: what they step besides changes no bit.

    Args:
        fused: torch's kernel of AdamW is to be the fused one.
        targets: (parameter, does it decay?, what is kept of it (``planning.types.moments``), its learning rate as a share of the
            job's).
    """

    def __init__(self, train: TrainTable, fused: bool, targets: Iterable[tuple[Parameter, bool, str, float]]) -> None:
        self._fused, listed = fused, list(targets)
        self._packs = train.optimizer == EIGHT_BIT
        self._in_pieces = self._packs and all(p.device.type == "cpu" for p, *_ in listed)
        for target, *_ in listed if self._in_pieces else ():
            target.data = target.data.contiguous()  # as bitsandbytes does; moments and gradients get its layout
        self._moments = {target: moments for target, _, moments, _ in listed}
        self._parts: list[Any] = []
        """The optimizers, each of what is kept in its way."""
        self._places: dict[Parameter, tuple[Any, int, int]] = {}
        """Parameter -> (its optimizer, group, place in the group)."""
        for moments, make in _makers(train, fused).items():
            groups: list[dict[str, Any]] = []
            for decay, share in sorted({(decays, share) for _, decays, _, share in listed}, reverse=True):
                some = [p for p, decays, own, of_p in listed if (decays, own, of_p) == (decay, moments, share)]
                groups += [{"params": some, "weight_decay": train.weight_decay * decay, "share": share}] if some else []
            if groups:  # a stage may hold nothing that is trained, such as an embedding beside adapters
                self._parts.append(make(groups, lr=train.learning_rate))
        for part in self._parts:
            for number, group in enumerate(part.param_groups):
                self._places |= {p: (part, number, place) for place, p in enumerate(group["params"])}
        assert self._places.keys() == self._moments.keys(), "the job's optimizer keeps nothing in such a way"

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
        """Kind -> tensor of what is kept of a parameter from step to step (``moments.kept``). As they are."""
        held = self._held(target)
        return {kind: held[name] for kind, name in self._names(target).items() if name in held}

    def restore(self, target: Parameter, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Put back what ``state`` gave after ``steps`` steps."""
        held, names = self._held(target), self._names(target)
        for kind, value in state.items():
            held[names[kind]].copy_(value)
        held["step"] = self._counter(target, steps)

    def _held(self, target: Parameter) -> dict[str, Any]:
        """The state of a parameter, which is zeros before its first step."""
        part, number, place = self._places[target]
        held: dict[str, Any] = part.state[target]
        if not held and self._packs:
            part.init_state(part.param_groups[number], target, number, place)
        elif not held:
            sizes = kinds.kept(self._moments[target], tuple(target.shape))
            for kind, name in self._names(target).items():
                shape = sizes[kind][0]
                held[name] = torch.zeros_like(target) if shape == target.shape else target.detach().new_zeros(shape)
            held["step"] = self._counter(target, 0)
        return held

    def _names(self, target: Parameter) -> Mapping[str, str]:
        """Kind -> name in the optimizer's state."""
        moments = self._moments[target]
        own = _VECTOR if moments == kinds.FACTORED and target.dim() < 2 else _TORCH.get(moments, {})
        return _BITSANDBYTES if self._packs else own

    def _counter(self, target: Parameter, steps: int) -> int | torch.Tensor:
        if self._packs or self._moments[target] == kinds.FACTORED:
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


def _makers(train: TrainTable, fused: bool) -> dict[str, Any]:
    """Moments -> maker of the optimizer that keeps them so."""
    settings: dict[str, Any] = {"betas": (train.beta1, train.beta2), "eps": train.epsilon}
    if train.optimizer == EIGHT_BIT:
        from bitsandbytes import optim

        # Of a tensor that a group has cut it does not decide anew.
        packed = partial(optim.AdamW8bit, min_8bit_size=0, **settings)
        return {kinds.EIGHT_BIT: packed, kinds.TWO: partial(optim.AdamW, **settings)}
    if train.optimizer == "adafactor":  # as transformers' Trainer makes it
        adafactor = imported_peft("transformers.optimization").Adafactor
        return {kinds.FACTORED: partial(adafactor, scale_parameter=False, relative_step=False)}
    found = {kinds.TWO: partial(torch.optim.AdamW, fused=fused, **settings)}
    if train.optimizer == "muon":  # rates and decay as for AdamW
        found[kinds.ONE] = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    return found
