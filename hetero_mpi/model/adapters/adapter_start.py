"""Adapters that begin with a part of the weights, which learn beside what is left: PiSSA (Meng et al. 2024, arXiv:2404.02948) with
the largest singular values, OLoRA (Büyükakyüz 2024, arXiv:2406.01775) with the first columns of a QR decomposition.

What an adapter began with is kept beside it. So it can be written as one for the weights as they were, of twice the rank:
W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]. peft converts it in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.layer.seeds import one_thread, seeded
from hetero_mpi.model.tuning import Tuning, began_with, scale_of
from hetero_mpi.util.errors import UserError


class ReducedStart:
    """Start weights less what adapters begin with.

    Attributes:
        values: of the layers that were filled: adapter's tensor, and constant beside it -> what it begins with.
    """

    def __init__(self, start: Start, tuning: Tuning, seed: int) -> None:
        assert tuning.adapter is not None
        self._start, self._tuning, self._adapter, self._seed = start, tuning, tuning.adapter, seed
        self.values: dict[str, torch.Tensor] = {}

    def fill(self, chain: Any, model: Any, layer: int) -> None:
        self._start.fill(chain, model, layer)
        for name in self._tuning.modules_in(layer, layer + 1):
            weight, scale = model.get_parameter(f"{name}.weight"), scale_of(self._adapter, name)
            a, b = (f"{name}.lora_{side}.weight" for side in "AB")
            if not weight.isfinite().all():
                raise UserError(
                    "adapter.not_finite",
                    f"{name}.weight holds numbers that are not finite, and [adapter] start = {as_toml(self._adapter.start)} takes "
                    f'it apart: get the model\'s files again, or set start = "default"',
                )
            with torch.no_grad(), seeded(self._seed, name), one_thread():
                rank = self._tuning.trainable[a].shape[0]
                self.values[a], self.values[b] = _parts(self._adapter.start, weight.detach(), rank, scale)
                weight.sub_(scale * self.values[b] @ self.values[a])
            self.values |= {began_with(tensor): self.values[tensor] for tensor in (a, b)}


def _parts(start: str, weight: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) as peft begins with them."""
    if start == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if start == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = torch.svd_lowrank(weight, rank, niter=int(start.rpartition("_")[2]))
        right = right.t()
    roots = torch.diag(torch.sqrt(values[:rank] / scale))
    return roots @ right[:rank], left[:, :rank] @ roots


def as_written(adapter: AdapterTable) -> AdapterTable:
    """The settings of the adapter as it is written."""
    if adapter.start == "default":
        return adapter
    more = math.sqrt(2) if adapter.rslora else 2
    changed: dict[str, Any] = {"start": "default", "rank": 2 * adapter.rank, "alpha": more * adapter.alpha}
    changed["rank_pattern"] = {key: 2 * rank for key, rank in (adapter.rank_pattern or {}).items()} or None
    changed["alpha_pattern"] = {key: more * alpha for key, alpha in (adapter.alpha_pattern or {}).items()} or None
    return adapter.model_copy(update=changed)


def tensors_as_written(tuning: Tuning, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its tensors. ``state``: those that are trained, and the constants."""
    found = dict(state)
    for name in (name for name in tuning.trainable if began_with(name) in tuning.constants):
        is_a, first = ".lora_A." in name, found.pop(began_with(name))
        found[name] = torch.cat([state[name], first if is_a else -first], dim=0 if is_a else 1)
    return found
