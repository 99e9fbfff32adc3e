"""The trained part of a model: all weights (full fine-tuning), or LoRA adapters over frozen weights, which may be in NF4.

peft implements LoRA (Hu et al. 2021, arXiv:2106.09685). It chooses the targets once, on the whole model (``adapter_tuning``), and
each stage injects those in its layers, so that names, shapes and initial values do not depend on the partition. peft is imported
where it is used, since the import takes seconds. Which modules an adapter reaches, its rank and alpha follow peft's rules.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.layer.interface import ADAPTER_NAME, LayerChain, ParameterSpec, seeded

if TYPE_CHECKING:
    from peft import LoraConfig


MAGNITUDE = ".lora_magnitude_vector"
"""DoRA's magnitude tensor; its name in adapter files lacks the module's ``.weight``."""
FILE_PREFIX = "base_model.model."
"""peft's prefix of the model's names in adapter files."""
ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix of the name of trained token rows, after the name of the embedding or head."""


def lora_config(
    adapter: AdapterTable, targets: list[str] | str | None, parameters: list[str], layers: list[int] | None = None
) -> LoraConfig:
    """The ``LoraConfig`` (peft) of the job's adapter.

    Args:
        targets: target modules; None for peft's choice for the family.
        parameters: target parameters of fused experts.
        layers: blocks in which modules are adapted; None for all.
    """
    config: LoraConfig = imported_peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,  # others expect 8, not 8.0
        rank_pattern=adapter.rank_pattern or {},
        alpha_pattern=adapter.alpha_pattern or {},
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=targets,
        layers_to_transform=layers,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )
    return config


def scale_of(adapter: AdapterTable, name: str) -> float:
    """Scaling factor of B A of an adapted module or parameter of fused experts."""
    rank = of_pattern(adapter.rank_pattern or {}, name, adapter.rank)
    alpha: float = of_pattern(adapter.alpha_pattern or {}, name, adapter.alpha)
    return alpha / (math.sqrt(rank) if adapter.rslora else rank)


def inject(
    model: PreTrainedModel,
    adapter: AdapterTable,
    modules: list[str],
    parameters: list[str],
    device: torch.device,
    start: Callable[[str], torch.Tensor],
    label: str = ADAPTER_NAME,
) -> dict[str, nn.Parameter]:
    """Inject adapters (fp32, on ``device``) into the named modules and parameters of a stage.

    Args:
        start: initial value of an adapter tensor, by its name. DoRA's magnitudes keep peft's, the norms of the weights' rows.

    Returns:
        Name in adapter files, without prefix -> parameter.
    """
    if not modules and not parameters:
        return {}
    add_adapters(lora_config(adapter, modules, parameters), model, label)
    for layer in (module for module in model.modules() if not getattr(module, "_did_swap_in_out_features", True)):
        layer.fan_in_fan_out = layer.num_experts == 1  # peft takes a single expert's B A for (out, in), as of a matrix
    adapters = {name_in_file(name, label): p for name, p in model.named_parameters() if f".{label}." in name}
    for name, parameter in adapters.items():
        parameter.data = (parameter.data.float() if name.endswith(MAGNITUDE) else start(name)).to(device)
    return adapters


def add_adapters(config: LoraConfig, model: PreTrainedModel, name: str = ADAPTER_NAME) -> None:
    """Inject peft's adapters into a model under ``name``; all other parameters lose their gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about patterns for layers of other stages
        imported_peft().inject_adapter_in_model(config, model, name)


def began_with(name: str) -> str:
    """Name of the constant that stores an adapter tensor's initial value."""
    return name.replace(".lora_", ".began_with_")


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial value as in peft (A: Kaiming uniform, B: zero), as a function of (seed, name)."""
    value = torch.zeros(shape, dtype=torch.float32)
    if ".lora_A." in name:
        with seeded(seed, name):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def name_in_file(name: str, label: str = ADAPTER_NAME) -> str:
    """Name of a tensor of the adapter ``label`` in files, without their prefix."""
    return name.replace(f".{label}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


@dataclass(frozen=True)
class PeftTargets:
    """Targets as written in ``adapter_config.json``: they reach exactly the adapted modules of the model."""

    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    """``modules_to_save``."""
    tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """``trainable_token_indices``."""
    tied: tuple[str, str] | None = None
    """Names of a tied head and its embedding, if they are fully trained."""


@dataclass(frozen=True)
class Tuning:
    """The trained and frozen tensors of a whole model; equal on all ranks."""

    trainable: dict[str, ParameterSpec]
    """Name -> trained tensor, in the model's order. Adapter tensors have their names in adapter files, without the prefix."""
    constants: dict[str, ParameterSpec] = field(default_factory=dict)
    """Name -> untrained tensor of checkpoints and, in full fine-tuning, of model directories; for adapters the initial values that
    were subtracted from the weights."""
    adapter: AdapterTable | None = None
    """None for full fine-tuning."""
    modules: tuple[tuple[int, str], ...] = ()
    """(layer, full name) of every adapted linear layer."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Full name of each adapted parameter of fused experts -> name prefix of its adapter tensors."""
    written: PeftTargets = PeftTargets()
    """Targets in ``adapter_config.json``."""
    nf4: bool = False
    """Linear layers and fused experts of blocks are stored in NF4."""
    double: bool = True
    """Double quantization: the scales of NF4 weights are quantized too."""
    frozen: bool = False
    """Nothing is trained; the model is only used for inference."""
    optimizer: str = "adamw"
    """``train.optimizer``."""
    moments: Mapping[str, str] = field(default_factory=dict)
    """Name -> kind of optimizer state (``planning.types.moments``) of a trained tensor, if not two fp32 moments."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Name -> learning rate relative to the job's, if different."""
    still: frozenset[str] = frozenset()
    """Tensors frozen by the job, in the compute dtype, without gradients, masters or moments; they have owners."""
    noise: float | None = None
    """``train.neftune_noise_alpha``."""

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens with trained rows, in ascending order."""
        return next(iter(self.written.tokens.values()), [])

    def tied(self, chain: LayerChain) -> str | None:
        """Trained tensor of embedding and head: the tied matrix, or token rows of it; None if there is none."""
        matrix = chain.tied[1] if chain.tied is not None else ""
        return next((name for name in (matrix, matrix.removesuffix(".weight") + ROWS) if name in self.trainable), None)

    @property
    def full(self) -> bool:
        return self.adapter is None and not self.frozen

    def modules_in(self, first: int, last: int) -> list[str]:
        return [name for layer, name in self.modules if first <= layer < last]

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Trained tensors of the layers [first, last)."""
        return [s for s in self.trainable.values() if first <= s.layer < last and s.name not in self.still]

    def adapted_tensors(self, chain: LayerChain, first: int, last: int) -> dict[str, str]:
        """Adapted tensor of the model -> name prefix of its adapter tensors."""
        wrapper_by_tensor = {f"{name}.weight": name for name in self.modules_in(first, last)}
        return wrapper_by_tensor | {
            n: wrapper for n, wrapper in self.parameters.items() if first <= chain.layer_of(n) < last
        }

    def summary(self, chain: LayerChain) -> str:
        """One-line description of the adapter's size and targets."""
        names = sorted({name.rpartition(".")[2] for name in (*(name for _, name in self.modules), *self.parameters)})
        count, total = (sum(spec.count for spec in specs.values()) for specs in (self.trainable, chain.parameters))
        blocks = len({spec.layer for name, spec in self.trainable.items() if ".lora_" in name})
        adapted = len(self.modules) + len(self.parameters)
        other_trained = [f"{name}, whole" for name in self.trainable if name in chain.parameters]
        other_trained += [f"{len(self.tokens)} rows of {name}" for name in self.written.tokens]
        suffix = f"; {', '.join(other_trained[:4])}{' and more' * (len(other_trained) > 4)}" if other_trained else ""
        return (
            f"adapter: {', '.join(names)} in {blocks} block{'s' * (blocks > 1)}, {adapted} in all{suffix}; {count:,} parameters "
            f"are trained in addition to {total:,} ({100 * count / total:.2g} %)"
        )

    def uses_dropout(self, chain: LayerChain) -> bool:
        """Whether training draws dropout masks, which depend on the sequences of a micro-batch; NEFTune's noise does not."""
        return chain.draws or (self.adapter is not None and self.adapter.dropout > 0)


def full_training(chain: LayerChain) -> Tuning:
    return Tuning(dict(chain.parameters), dict(chain.constants))


def nothing_trained() -> Tuning:
    """Tuning of a model for inference: no gradients, no masters."""
    return Tuning({}, frozen=True)


def imported_peft(name: str = "peft") -> ModuleType:
    """Import peft, or a module that imports it, without loading ``torch.distributed``, which would import torch's compiler."""
    is_available = torch.distributed.is_available
    if "torch.distributed.tensor" not in sys.modules:
        torch.distributed.is_available = lambda: False
    try:
        return importlib.import_module(name)
    finally:
        torch.distributed.is_available = is_available


def reaches(
    module: str,
    targets: str | Iterable[str],
    layers: list[int] | None = None,
    layers_pattern: list[str] | str | None = None,
    exclude: str | list[str] | None = None,
) -> bool:
    """Whether an adapter's settings reach the module of this name, by peft's rules."""
    imported_peft()
    from peft.tuners.tuners_utils import check_target_module_exists

    settings = SimpleNamespace(
        target_modules=targets,
        target_parameters=None,
        exclude_modules=exclude,
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
    )
    return bool(check_target_module_exists(settings, module))


def of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Value of ``rank_pattern`` or ``alpha_pattern`` for a module or parameter of fused experts, by peft's rules."""
    imported_peft()
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(patterns, name), default)
