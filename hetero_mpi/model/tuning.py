"""The trained part of a model: all weights (full fine-tuning), or LoRA adapters over frozen weights, which may be in NF4.

LoRA (Hu et al. 2021, arXiv:2106.09685) is implemented by peft, except for the products of plain adapters (``layer.lora``). peft
chooses the targets once, for the whole model (``adapter_tuning``), and each stage injects those in its own layers, so that names,
shapes and initial values do not depend on the partition. The modules that an adapter reaches, its rank and alpha follow peft's
rules. peft is imported only where it is used, because the import takes seconds.
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
"""DoRA's magnitude tensor; in adapter files its name lacks the module's ``.weight``."""
FILE_PREFIX = "base_model.model."
"""Prefix that peft adds to the model's names in adapter files."""
ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix that forms the name of trained token rows from the name of the embedding or head."""


def lora_config(
    adapter: AdapterTable, targets: list[str] | str | None, parameters: list[str], layers: list[int] | None = None
) -> LoraConfig:
    """Return peft's ``LoraConfig`` for the job's adapter.

    Args:
        targets: target modules; None for peft's default choice for the family.
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
    """Return the scaling factor of B A for an adapted module or fused experts' parameter."""
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
        start: returns an adapter tensor's initial value by name. DoRA magnitudes keep peft's values, the weight's row norms.

    Returns:
        Map from names in adapter files, without prefix, to parameters.
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
    """Inject peft's adapters into a model under ``name``; all other parameters stop requiring gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about patterns for layers of other stages
        imported_peft().inject_adapter_in_model(config, model, name)


def began_with(name: str) -> str:
    """Return the name of the constant that stores an adapter tensor's initial value."""
    return name.replace(".lora_", ".began_with_")


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the initial value as in peft (A: Kaiming uniform, B: zero); it depends only on (seed, name)."""
    value = torch.zeros(shape, dtype=torch.float32)
    if ".lora_A." in name:
        with seeded(seed, name):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def name_in_file(name: str, label: str = ADAPTER_NAME) -> str:
    """Return a tensor's name in the files of the adapter ``label``, without prefix."""
    return name.replace(f".{label}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


@dataclass(frozen=True)
class PeftTargets:
    """Targets as written to ``adapter_config.json``; they match exactly the adapted modules of the model."""

    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    """Value of ``modules_to_save``."""
    tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """Value of ``trainable_token_indices``."""
    tied: tuple[str, str] | None = None
    """Names of a tied head and its embedding if they are fully trained."""


@dataclass(frozen=True)
class Tuning:
    """The trained and frozen tensors of a whole model; equal on all ranks."""

    trainable: dict[str, ParameterSpec]
    """Maps names to trained tensors, in the model's order. Adapter tensors are named as in adapter files, without the prefix."""
    constants: dict[str, ParameterSpec] = field(default_factory=dict)
    """Maps names to untrained tensors that checkpoints and, in full fine-tuning, model directories store. For adapters these are
    the initial values that were subtracted from the weights."""
    adapter: AdapterTable | None = None
    """The adapter's settings; None for full fine-tuning."""
    modules: tuple[tuple[int, str], ...] = ()
    """(layer, full name) of every adapted linear layer."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Maps each adapted parameter of fused experts to the name prefix of its adapter tensors, by full name."""
    written: PeftTargets = PeftTargets()
    """Targets as written to ``adapter_config.json``."""
    nf4: bool = False
    """Whether linear layers and fused experts of blocks are stored in NF4."""
    double: bool = True
    """Whether the scales of NF4 weights are also quantized (double quantization)."""
    frozen: bool = False
    """Whether nothing is trained because the model is only used for inference."""
    optimizer: str = "adamw"
    """Value of ``train.optimizer``."""
    moments: Mapping[str, str] = field(default_factory=dict)
    """Maps trained tensors whose optimizer state is not two fp32 moments to the kind of state (``planning.types.moments``)."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Maps names to learning rates relative to the job's, where they differ."""
    still: frozenset[str] = frozenset()
    """Tensors that the job freezes: in the compute dtype, without gradients, masters or moments, but with owners."""
    noise: float | None = None
    """Value of ``train.neftune_noise_alpha``."""

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens whose rows are trained, in ascending order."""
        return next(iter(self.written.tokens.values()), [])

    def tied(self, chain: LayerChain) -> str | None:
        """Return the name of the trained tensor that embedding and head share (the tied matrix or its token rows), or None."""
        matrix = chain.tied[1] if chain.tied is not None else ""
        return next((name for name in (matrix, matrix.removesuffix(".weight") + ROWS) if name in self.trainable), None)

    @property
    def full(self) -> bool:
        return self.adapter is None and not self.frozen

    def modules_in(self, first: int, last: int) -> list[str]:
        return [name for layer, name in self.modules if first <= layer < last]

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Return the trained tensors of layers ``[first, last)``."""
        return [s for s in self.trainable.values() if first <= s.layer < last and s.name not in self.still]

    def adapted_tensors(self, chain: LayerChain, first: int, last: int) -> dict[str, str]:
        """Map each adapted tensor of the model to the name prefix of its adapter tensors."""
        wrapper_by_tensor = {f"{name}.weight": name for name in self.modules_in(first, last)}
        return wrapper_by_tensor | {
            n: wrapper for n, wrapper in self.parameters.items() if first <= chain.layer_of(n) < last
        }

    def summary(self, chain: LayerChain) -> str:
        """Return a one-line description of the adapter's size and targets."""
        names = sorted({name.rpartition(".")[2] for name in (*(name for _, name in self.modules), *self.parameters)})
        count, total = (sum(spec.count for spec in specs.values()) for specs in (self.trainable, chain.parameters))
        blocks = len({spec.layer for name, spec in self.trainable.items() if ".lora_" in name})
        adapted = len(self.modules) + len(self.parameters)
        other_trained = [f"{name} (full)" for name in self.trainable if name in chain.parameters]
        other_trained += [f"{len(self.tokens)} rows of {name}" for name in self.written.tokens]
        suffix = f"; {', '.join(other_trained[:4])}{' and more' * (len(other_trained) > 4)}" if other_trained else ""
        return (
            f"adapter: {', '.join(names)} in {blocks} block{'s' * (blocks > 1)}, {adapted} in all{suffix}; {count:,} trainable "
            f"parameters ({100 * count / total:.2g} % of the model's {total:,})"
        )

    def uses_dropout(self, chain: LayerChain) -> bool:
        """Return whether training draws dropout masks, which depend on a micro-batch's sequences, unlike NEFTune's noise."""
        return chain.draws or (self.adapter is not None and self.adapter.dropout > 0)


def full_training(chain: LayerChain) -> Tuning:
    return Tuning(dict(chain.parameters), dict(chain.constants))


def nothing_trained() -> Tuning:
    """Return the tuning of a model for inference: no gradients and no masters."""
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
    """Return whether an adapter's settings match the module with this name, by peft's rules."""
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
    """Look up a module or fused experts' parameter in ``rank_pattern`` or ``alpha_pattern``, by peft's rules."""
    imported_peft()
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(patterns, name), default)
