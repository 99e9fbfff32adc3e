"""The trained part of a model, and how the rest is held: everything (full training), or LoRA adapters over frozen, perhaps NF4,
weights.

LoRA (Hu et al. 2021, arXiv:2106.09685) comes through peft, which decides the targets once, on the whole model
(``adapter_tuning``); each stage then injects those it holds. So a stage without any is no error, and names, shapes and start
values do not depend on the partition. peft takes seconds to import, for which a job without an adapter need not wait: it is
imported where it is used.

Also here: which modules the settings of an adapter reach, and with which rank and alpha: by peft's own rules.
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
"""DoRA's tensor, which adapter files name without the ``.weight`` of its module."""
FILE_PREFIX = "base_model.model."
"""The part that peft puts before the model's names in adapter files."""
ROWS = ".token_adapter.trainable_tokens_delta"
"""Ends the name of the trained rows of an embedding, or of a head; before it stands the module's name."""


def lora_config(
    adapter: AdapterTable, targets: list[str] | str | None, parameters: list[str], layers: list[int] | None = None
) -> LoraConfig:
    """peft's configuration of the job's adapter for the given targets: modules (None: peft's choice for the family; in blocks
    ``layers``; None: wherever they are), and parameters of fused experts."""
    config: LoraConfig = imported_peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,  # others take no 8.0 for 8
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
    """The factor of B A of an adapted module, or parameter of fused experts."""
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
    own: str = ADAPTER_NAME,
) -> dict[str, nn.Parameter]:
    """Give what is named in a stage its adapters (fp32, on ``device``) with start values by their tensors' names.

    The magnitudes of DoRA begin as peft has them: the norms of the rows of the weights, which are there. ``own``: its name.

    Returns: name, as in adapter files but for their prefix -> parameter.
    """
    if not modules and not parameters:
        return {}
    add_adapters(lora_config(adapter, modules, parameters), model, own)
    for layer in (module for module in model.modules() if not getattr(module, "_did_swap_in_out_features", True)):
        layer.fan_in_fan_out = layer.num_experts == 1  # peft takes a single expert's B A for (out, in), as of a matrix
    found = {name_in_file(name, own): parameter for name, parameter in model.named_parameters() if f".{own}." in name}
    for name, parameter in found.items():
        parameter.data = (parameter.data.float() if name.endswith(MAGNITUDE) else start(name)).to(device)
    return found


def add_adapters(config: LoraConfig, model: PreTrainedModel, name: str = ADAPTER_NAME) -> None:
    """peft's adapters in a model, of this name; nothing else in it has a gradient from then on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of patterns for layers that other stages hold
        imported_peft().inject_adapter_in_model(config, model, name)


def began_with(name: str) -> str:
    """The name of the constant that an adapter's tensor began with."""
    return name.replace(".lora_", ".began_with_")


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """peft's own start (A: Kaiming uniform, B: zero), drawn from (seed, name)."""
    value = torch.zeros(shape, dtype=torch.float32)
    if ".lora_A." in name:
        with seeded(seed, name):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def name_in_file(name: str, own: str = ADAPTER_NAME) -> str:
    """The name of a tensor of the adapter ``own`` in files, but for their prefix."""
    return name.replace(f".{own}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


@dataclass(frozen=True)
class PeftTargets:
    """Targets as ``adapter_config.json`` has them: they reach what was adapted, and nothing else of the model."""

    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    """``modules_to_save``."""
    tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """``trainable_token_indices``."""
    tied: tuple[str, str] | None = None
    """Names of a tied head and its embedding, which are trained whole."""


@dataclass(frozen=True)
class Tuning:
    """The trained tensors of a whole model and the state of the others; the same on every rank."""

    trainable: dict[str, ParameterSpec]
    """Name -> trained tensor, in the model's order. Adapter tensors bear their names in adapter files, without the prefix."""
    constants: dict[str, ParameterSpec] = field(default_factory=dict)
    """Name -> tensor that is never trained but belongs into checkpoints, and in full training into model directories. Of an
    adapter: what its tensors began with, where that has left the weights."""
    adapter: AdapterTable | None = None
    """None: full training."""
    modules: tuple[tuple[int, str], ...] = ()
    """(layer, full name) of every adapted linear layer."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Full name of each adapted parameter of fused experts -> what the names of its adapter's tensors begin with."""
    written: PeftTargets = PeftTargets()
    """The targets in ``adapter_config.json``."""
    nf4: bool = False
    """Linear layers and fused experts of blocks are held in NF4."""
    double: bool = True
    """The scales of NF4 weights are quantised too."""
    frozen: bool = False
    """Nothing is trained: the model is only used."""
    optimizer: str = "adamw"
    """``train.optimizer``."""
    moments: Mapping[str, str] = field(default_factory=dict)
    """Name -> what the optimizer keeps of a trained tensor (``planning.types.moments``), where it is other than two moments."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Name -> learning rate as a share of the job's, where it is another."""
    still: frozenset[str] = frozenset()
    """Names of those that stay as they are, in the compute dtype: no gradients, masters, or moments. They have owners."""
    noise: float | None = None
    """``train.neftune_noise_alpha``."""

    @property
    def tokens(self) -> list[int]:
        """Ids, ascending, of the tokens that have trained rows of their own."""
        return next(iter(self.written.tokens.values()), [])

    def tied(self, chain: LayerChain) -> str | None:
        """The trained tensor that is at both ends of a model: the tied matrix, or rows of it; None: there is none."""
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
        """Adapted tensor of the model -> what the names of its adapter's tensors begin with."""
        found = {f"{name}.weight": name for name in self.modules_in(first, last)}
        return found | {n: wrapper for n, wrapper in self.parameters.items() if first <= chain.layer_of(n) < last}

    def summary(self, chain: LayerChain) -> str:
        """The adapter's size and targets, in a line."""
        names = sorted({name.rpartition(".")[2] for name in (*(name for _, name in self.modules), *self.parameters)})
        count, whole = (sum(spec.count for spec in specs.values()) for specs in (self.trainable, chain.parameters))
        blocks = len({spec.layer for name, spec in self.trainable.items() if ".lora_" in name})
        adapted = len(self.modules) + len(self.parameters)
        own = [f"{name}, whole" for name in self.trainable if name in chain.parameters]
        own += [f"{len(self.tokens)} rows of {name}" for name in self.written.tokens]
        further = f"; {', '.join(own[:4])}{' and more' * (len(own) > 4)}" if own else ""
        return (
            f"adapter: {', '.join(names)} in {blocks} block{'s' * (blocks > 1)}, {adapted} in all{further}; {count:,} parameters "
            f"are trained beside {whole:,} ({100 * count / whole:.2g} %)"
        )

    def uses_dropout(self, chain: LayerChain) -> bool:
        """Whether training draws masks, which depend on the sequences that are computed together; noise on embeddings does not."""
        return chain.draws or (self.adapter is not None and self.adapter.dropout > 0)


def full_training(chain: LayerChain) -> Tuning:
    return Tuning(dict(chain.parameters), dict(chain.constants))


def nothing_trained() -> Tuning:
    """A model that is only used: no gradients, no masters."""
    return Tuning({}, frozen=True)


def imported_peft(name: str = "peft") -> ModuleType:
    """peft, or a module that may import it, without ``torch.distributed`` where nobody has imported that: it would look for the
    compiler's part of it."""
    known = torch.distributed.is_available
    if "torch.distributed.tensor" not in sys.modules:
        torch.distributed.is_available = lambda: False
    try:
        return importlib.import_module(name)
    finally:
        torch.distributed.is_available = known


def reaches(
    module: str,
    targets: str | Iterable[str],
    layers: list[int] | None = None,
    layers_pattern: list[str] | str | None = None,
    exclude: str | list[str] | None = None,
) -> bool:
    """Whether the settings of an adapter reach the module of this name, by peft's own rules."""
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
    """The value of ``rank_pattern`` or ``alpha_pattern`` for a module, or a parameter of fused experts. By peft's own rules."""
    imported_peft()
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(patterns, name), default)
