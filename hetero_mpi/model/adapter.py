"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: which tensors an adapter has, and how a stage gets its own.

peft decides the targets once, on the whole model on the meta device; each stage then injects the targets it holds. So a stage
without any is no error, and names, shapes and start values do not depend on the partition.

peft takes several seconds to import, which a job without an adapter need not wait for: it is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable
from hetero_mpi.model.eager_imports import imported_peft
from hetero_mpi.model.layer.quantize import fused_experts
from hetero_mpi.model.layer.seeds import seed_from

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"
"""peft's name of the only adapter; it is part of module names but not of the names in adapter files."""
MAGNITUDE = ".lora_magnitude_vector"
"""DoRA's tensor, which adapter files name without the ``.weight`` of its module."""
_WRAPPED = ".base_layer"
"""What peft's wrappers put into the names of what they wrap."""
FILE_PREFIX = "base_model.model."
"""What peft puts before the model's names in adapter files."""


def lora_config(adapter: AdapterTable, targets: list[str] | str, parameters: list[str]) -> LoraConfig:
    """peft's configuration of the job's adapter for the given targets: modules, and parameters of fused experts."""
    config: LoraConfig = imported_peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=targets,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )
    return config


def scale_of(adapter: AdapterTable) -> float:
    """The factor of B A."""
    return adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank)


@dataclass(frozen=True)
class Adapted:
    """What an adapter belongs to, and its tensors, of a whole model."""

    modules: list[str]
    """Full names of the adapted linear layers."""
    parameters: dict[str, str]
    """Full name of each adapted parameter of fused experts -> what the names of its adapter's tensors begin with. (peft wraps the
    module once for each of them.)"""
    shapes: dict[str, tuple[int, ...]]
    """Adapter tensor -> shape."""


def adapted(whole: PreTrainedModel, adapter: AdapterTable) -> Adapted:
    """What the adapter is on ``whole``, a model on the meta device, which is changed.

    :raises UserError: the targets match nothing, or something that they cannot be.
    """
    inject = imported_peft().inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    wanted: list[str] | str = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    experts = _matched_experts(whole, adapter)
    linear_names = {name for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    linears = sorted({name.rpartition(".")[2] for name in linear_names})
    try:
        with torch.device("meta"):
            inject(lora_config(adapter, wanted, experts), whole)
    except ValueError as error:
        raise UserError(
            f"[adapter] targets = {adapter.targets!r} match no module of this model; its linear layers are "
            f'{", ".join(linears)}; name some of them, or use "all-linear" ({error})'
        ) from error
    shapes = {
        _short(name): tuple(parameter.shape) for name, parameter in whole.named_parameters() if f".{_NAME}." in name
    }
    wrapped = [(name, m.parameter_name) for name, m in whole.named_modules() if isinstance(m, ParamWrapper)]
    parameters = {f"{name.replace(_WRAPPED, '')}.{own}": name for name, own in wrapped}
    parameters = {name: wrapper for name, wrapper in parameters.items() if name in experts}
    modules = sorted({name.rpartition(".lora_")[0] for name in shapes} - set(parameters.values()))
    others = [name for name in modules if name not in linear_names]
    if others:
        raise UserError(
            f"[adapter] targets = {adapter.targets!r} reach {others[0]}, which is no linear layer: in this family peft adapts the "
            f'fused experts in place of layers like gate_proj; name others instead, such as ["q_proj", "v_proj"], and the experts '
            f"in [adapter] parameters"
        )
    return Adapted(modules, parameters, shapes)


def _matched_experts(whole: PreTrainedModel, adapter: AdapterTable) -> list[str]:
    """Full names of the fused experts' parameters that the job names.

    :raises UserError: a name matches none.
    """
    known = [f"{path}.{name}" for path, _, name, _ in fused_experts(whole)]
    for wanted in adapter.parameters:
        if not any(f".{name}".endswith(f".{wanted}") for name in known):
            offered = sorted({".".join(name.split(".")[-2:]) for name in known})
            what = f"those of this model are {', '.join(offered)}" if offered else "this model has none"
            raise UserError(
                f"[adapter] parameters: {wanted} matches no parameter of fused experts; {what}; linear layers belong into "
                f"[adapter] targets"
            )
    return [name for name in known if any(f".{name}".endswith(f".{wanted}") for wanted in adapter.parameters)]


def inject(
    model: PreTrainedModel,
    adapter: AdapterTable,
    modules: list[str],
    parameters: list[str],
    device: torch.device,
    start: Callable[[str], torch.Tensor],
) -> None:
    """Give what is named in a stage its adapters (fp32, on ``device``) with start values by their tensors' names.

    The magnitudes of DoRA begin as peft has them: the norms of the rows of the weights, which are there.
    """
    if not modules and not parameters:
        return
    imported_peft().inject_adapter_in_model(lora_config(adapter, modules, parameters), model)
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            own = _short(name)
            value = parameter.data.float() if own.endswith(MAGNITUDE) else start(own)
            parameter.data = value.to(device)


def expert_delta(whole: PreTrainedModel, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What an adapter's matrices ``a`` (experts x r, in) and ``b`` (out, r x experts) add to the parameter ``name`` of fused
    experts, but for alpha / r."""
    holder, _, _ = name.rpartition(".")
    experts = whole.get_parameter(name).shape[0]
    first, second = a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], -1, experts)
    transposed = getattr(whole.get_submodule(holder), "is_transposed", False)
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", second, first)


def merged(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None) -> torch.Tensor:
    """A weight (out, in) with what its adapter adds, scaled; ``magnitude`` (out): DoRA's, else None."""
    summed = weight + delta
    return summed if magnitude is None else (magnitude / torch.linalg.norm(summed, dim=1)).unsqueeze(1) * summed


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
    return name.replace(f".{_NAME}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)
