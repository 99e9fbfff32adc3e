"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: which tensors an adapter has, and how a stage gets its own.

peft decides the targets once, on the whole model on the meta device; each stage then injects the targets it holds. So a stage
without any is no error, and names, shapes and start values do not depend on the partition.

peft takes several seconds to import, which a job without an adapter need not wait for: it is imported where it is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable
from hetero_mpi.model.layer.seeds import seed_from

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"
"""peft's name of the only adapter; it is part of module names but not of the names in adapter files."""
FILE_PREFIX = "base_model.model."
"""What peft puts before the model's names in adapter files."""


def lora_config(adapter: AdapterTable, targets: list[str] | str) -> LoraConfig:
    """peft's configuration of the job's adapter for the given targets."""
    from peft import LoraConfig

    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def adapter_shapes(whole: PreTrainedModel, adapter: AdapterTable) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """(full names of the adapted modules, adapter tensor -> shape) of the whole model, which is on the meta device and is changed.

    :raises UserError: the targets match nothing, or something that is not inside a block.
    """
    from peft import inject_adapter_in_model

    wanted: list[str] | str = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    linear_names = {name for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    linears = sorted({name.rpartition(".")[2] for name in linear_names})
    try:
        with torch.device("meta"):
            inject_adapter_in_model(lora_config(adapter, wanted), whole)
    except ValueError as error:
        raise UserError(
            f"[adapter] targets = {adapter.targets!r} match no module of this model; its linear layers are "
            f'{", ".join(linears)}; name some of them, or use "all-linear" ({error})'
        ) from error
    shapes = {
        _short(name): tuple(parameter.shape) for name, parameter in whole.named_parameters() if f".{_NAME}." in name
    }
    modules = sorted({name.rpartition(".lora_")[0] for name in shapes})
    others = [name for name in modules if name not in linear_names]
    if others:
        raise UserError(
            f"[adapter] targets = {adapter.targets!r} reach {others[0]}, which is no linear layer: in this family peft adapts the "
            f'fused experts in place of layers like gate_proj; name others instead, such as ["q_proj", "v_proj"]'
        )
    return modules, shapes


def inject(model: PreTrainedModel, adapter: AdapterTable, modules: list[str], device: torch.device, seed: int) -> None:
    """Give the named modules of a stage their adapters (fp32, on ``device``) with the start values of ``start_value``."""
    if not modules:
        return
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora_config(adapter, modules), model)
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            parameter.data = start_value(_short(name), tuple(parameter.shape), seed).to(device)


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """peft's own start (A: Kaiming uniform, B: zero), drawn from (seed, name)."""
    value = torch.zeros(shape, dtype=torch.float32)
    if ".lora_A." in name:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_from(seed, name))
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """name, as in adapter files but for their prefix -> parameter."""
    return {_short(name): parameter for name, parameter in model.named_parameters() if f".{_NAME}." in name}


def _short(name: str) -> str:
    return name.replace(f".{_NAME}.", ".")
