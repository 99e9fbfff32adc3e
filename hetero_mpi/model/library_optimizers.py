"""Optimizers from other libraries: AdamW, 8-bit AdamW, Adafactor and Muon.

AdamW comes from torch; 8-bit AdamW (Dettmers et al. 2022, arXiv:2110.02861) from bitsandbytes; Adafactor with factored moments
(Shazeer and Stern 2018, arXiv:1804.04235) from transformers; and Muon for the matrices of blocks, with AdamW for all other
parameters (Liu et al. 2025, arXiv:2502.16982), from torch.
"""

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
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK_SIZE

_TORCH = {
    kinds.TWO: {"moments1": "exp_avg", "moments2": "exp_avg_sq"},
    kinds.FACTORED: {"moments1": "exp_avg_sq_row", "moments2": "exp_avg_sq_col"},
    kinds.ONE: {"moments1": "momentum_buffer"},
}
_ADAFACTOR_VECTOR = {"moments2": "exp_avg_sq"}
"""Adafactor's state for vectors, which it does not factor."""
_BITSANDBYTES = {"moments1": "state1", "moments2": "state2", "absmax1": "absmax1", "absmax2": "absmax2"}
"""Maps each kind of tensor in a checkpoint to its name in the optimizer's state."""
_PIECE_ELEMENTS = 1 << 18
"""Number of elements per bitsandbytes step on the CPU; a multiple of its block size."""
_PACKING_LOCK = threading.Lock()
"""Held while bitsandbytes runs: version 0.50 quantizes wrongly on CPUs if two threads use different quantization maps at once."""


class LibraryOptimizers:
    """Updates fp32 parameters independently of each other, so that results do not depend on a rank's other parameters.

    Args:
        fused: whether to use torch's fused AdamW kernel.
        targets: (parameter, whether weight decay applies, kind of moments (``planning.types.moments``), learning rate relative to
            the job's).
    """

    def __init__(self, train: TrainTable, fused: bool, targets: Iterable[tuple[Parameter, bool, str, float]]) -> None:
        self._fused, listed = fused, list(targets)
        self._packs = train.optimizer == EIGHT_BIT
        self._in_pieces = self._packs and all(p.device.type == "cpu" for p, *_ in listed)
        for target, *_ in listed if self._in_pieces else ():
            target.data = target.data.contiguous()  # as bitsandbytes does; moments and gradients take this layout
        self._moments = {target: moments for target, _, moments, _ in listed}
        self._parts: list[Any] = []
        """One optimizer for each kind of moments."""
        self._places: dict[Parameter, tuple[Any, int, int]] = {}
        """Maps each parameter to (its optimizer, group, index in the group)."""
        for moments, make in _optimizer_makers(train, fused).items():
            groups: list[dict[str, Any]] = []
            for decay, share in sorted({(decays, share) for _, decays, _, share in listed}, reverse=True):
                same = [p for p, decays, kind, rate in listed if (decays, kind, rate) == (decay, moments, share)]
                groups += [{"params": same, "weight_decay": train.weight_decay * decay, "share": share}] if same else []
            if groups:  # a stage may have no trained parameters, such as an embedding with adapter training
                self._parts.append(make(groups, lr=train.learning_rate))
        for part in self._parts:
            for number, group in enumerate(part.param_groups):
                self._places |= {p: (part, number, index) for index, p in enumerate(group["params"])}
        assert self._places.keys() == self._moments.keys(), "the job's optimizer does not keep moments of this kind"

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups as in torch's optimizers, with keys such as ``params``, ``weight_decay`` and ``lr``."""
        return [group for part in self._parts for group in part.param_groups]

    def step(self, rate: float) -> None:
        """Run one step with learning rate ``rate``, scaled by each group's share."""
        for group in self.groups:
            group["lr"] = rate * group["share"]
        if not self._in_pieces:
            for part in self._parts:
                part.step()
            return
        for target, (part, number, _) in self._places.items():
            if target.grad is None:
                continue
            with _PACKING_LOCK:
                _step_in_pieces(target, self._state_of(target), part.param_groups[number])

    def state(self, target: Parameter) -> dict[str, torch.Tensor]:
        """Map each kind to the parameter's state tensor (``moments.moment_tensors``), without copying."""
        state = self._state_of(target)
        return {kind: state[name] for kind, name in self._names(target).items() if name in state}

    def restore(self, target: Parameter, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore a state returned by ``state`` after ``steps`` steps."""
        target_state, names = self._state_of(target), self._names(target)
        for kind, value in state.items():
            target_state[names[kind]].copy_(value)
        target_state["step"] = self._counter(target, steps)

    def _state_of(self, target: Parameter) -> dict[str, Any]:
        """Return a parameter's optimizer state, initialised with zeros before its first step."""
        part, number, index = self._places[target]
        state: dict[str, Any] = part.state[target]
        if not state and self._packs:
            part.init_state(part.param_groups[number], target, number, index)
        elif not state:
            sizes = kinds.moment_tensors(self._moments[target], tuple(target.shape))
            for kind, name in self._names(target).items():
                shape = sizes[kind][0]
                state[name] = torch.zeros_like(target) if shape == target.shape else target.detach().new_zeros(shape)
            state["step"] = self._counter(target, 0)
        return state

    def _names(self, target: Parameter) -> Mapping[str, str]:
        """Map each kind to its name in the optimizer's state."""
        moments = self._moments[target]
        names = _ADAFACTOR_VECTOR if moments == kinds.FACTORED and target.dim() < 2 else _TORCH.get(moments, {})
        return _BITSANDBYTES if self._packs else names

    def _counter(self, target: Parameter, steps: int) -> int | torch.Tensor:
        if self._packs or self._moments[target] == kinds.FACTORED:
            return steps
        # torch uses a float32 tensor, on the parameter's device for the fused kernel.
        return torch.tensor(float(steps), dtype=torch.float32, device=target.device if self._fused else "cpu")


@torch.no_grad()
def _step_in_pieces(target: Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Run bitsandbytes' ``update_step`` piece by piece, because its CPU code takes up to 20 bytes of workspace per element.

    Pieces are also faster because they fit in caches. Results equal those of a single call for the whole tensor.
    """
    from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

    assert target.grad is not None
    (beta1, beta2), zeros = group["betas"], (0.0, 0.0)
    state["step"] += 1
    tensors = [tensor.view(-1) for tensor in (target.grad, target, state["state1"], state["state2"])]
    for begin in range(0, target.numel(), _PIECE_ELEMENTS):
        gradient, values, first, second = (tensor[begin : begin + _PIECE_ELEMENTS] for tensor in tensors)
        if "absmax1" in state:
            blocks = slice(begin // MOMENT_BLOCK_SIZE, (begin + _PIECE_ELEMENTS) // MOMENT_BLOCK_SIZE)
            maps, scales = ([state[f"{name}{i}"] for i in (1, 2)] for name in ("qmap", "absmax"))
            settings = (beta1, beta2, *zeros, group["eps"], state["step"], group["lr"])
            further: tuple[Any, ...] = (*maps, *(scale[blocks] for scale in scales), group["weight_decay"])
            optimizer_update_8bit_blockwise("adam", gradient, values, first, second, *settings, *further)
        else:
            further = (beta1, group["eps"], state["step"], group["lr"], second, beta2, *zeros, group["weight_decay"])
            optimizer_update_32bit("adam", gradient, values, first, *further)


def _optimizer_makers(train: TrainTable, fused: bool) -> dict[str, Any]:
    """Map each kind of moments to the constructor of its optimizer."""
    settings: dict[str, Any] = {"betas": (train.beta1, train.beta2), "eps": train.epsilon}
    if train.optimizer == EIGHT_BIT:
        from bitsandbytes import optim

        # The choice was made for the full tensor (``with_moments``), not for its shard.
        packed = partial(optim.AdamW8bit, min_8bit_size=0, **settings)
        return {kinds.EIGHT_BIT: packed, kinds.TWO: partial(optim.AdamW, **settings)}
    if train.optimizer == "adafactor":  # as in transformers' Trainer
        adafactor = imported_peft("transformers.optimization").Adafactor
        return {kinds.FACTORED: partial(adafactor, scale_parameter=False, relative_step=False)}
    makers = {kinds.TWO: partial(torch.optim.AdamW, fused=fused, **settings)}
    if train.optimizer == "muon":  # learning rates and decay of AdamW
        makers[kinds.ONE] = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    return makers
