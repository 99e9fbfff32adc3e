"""The trained part of a model, and how the rest is held: everything (full training), or LoRA adapters over frozen, perhaps NF4,
weights.

LoRA (Hu et al. 2021, arXiv:2106.09685) comes through peft, which decides the targets once, on the whole model on the meta
device; each stage then injects those it holds. So a stage without any is no error, and names, shapes and start values do not depend
on the partition. peft takes seconds to import, for which a job without an adapter need not wait: it is imported where it is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapter_targets import of_pattern, reaches
from hetero_mpi.model.eager_imports import imported_peft
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.layer.quantize import fused_experts
from hetero_mpi.model.layer.seeds import seeded
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"
"""peft's name of the only adapter; it is part of module names but not of the names in adapter files."""
MAGNITUDE = ".lora_magnitude_vector"
"""DoRA's tensor, which adapter files name without the ``.weight`` of its module."""
_WRAPPED = ".base_layer"
"""The part that peft's wrappers put into the names of what they wrap."""
FILE_PREFIX = "base_model.model."
"""The part that peft puts before the model's names in adapter files."""


def lora_config(
    adapter: AdapterTable, targets: list[str] | str, parameters: list[str], layers: list[int] | None = None
) -> LoraConfig:
    """peft's configuration of the job's adapter for the given targets: modules (in blocks ``layers``; None: wherever they are), and
    parameters of fused experts."""
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


@dataclass(frozen=True)
class Adapted:
    """The modules of an adapter, and its tensors, of a whole model."""

    modules: list[str]
    """Full names of the adapted linear layers."""
    parameters: dict[str, str]
    """Full name of each adapted parameter of fused experts -> what the names of its adapter's tensors begin with. (peft wraps the
    module once for each of them.)"""
    shapes: dict[str, tuple[int, ...]]
    """Adapter tensor -> shape."""


def adapted(whole: PreTrainedModel, adapter: AdapterTable) -> Adapted:
    """The adapter's modules and tensors on ``whole``, a model on the meta device, which is changed.

    :raises UserError: a target, or a pattern's key, matches nothing, or something that it cannot be.
    """
    imported_peft()
    from peft.tuners.lora.layer import ParamWrapper

    experts = _matched_experts(whole, adapter)
    linear_names = {name for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    head = whole.get_output_embeddings()
    linears = sorted({name.rpartition(".")[2] for name in linear_names if whole.get_submodule(name) is not head})
    targets = adapter.targets
    if targets == "all-linear" and adapter.layers is not None:  # peft takes either
        targets = [end for end in linears if any(reaches(name, [end], adapter.layers) for name in linear_names)]
    if isinstance(targets, list):
        _check_targets(whole, targets, adapter.layers, linears)
    try:
        with torch.device("meta"):
            _inject(lora_config(adapter, targets, experts, adapter.layers), whole)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"[adapter] targets = {as_toml(adapter.targets)} cannot be adapted by peft: {error}; the linear layers of this model "
            f'are {", ".join(linears)}; name some of them, or use "all-linear"'
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
    _check_patterns(adapter, [*modules, *parameters])
    return Adapted(modules, parameters, shapes)


def _check_targets(whole: PreTrainedModel, targets: list[str], layers: list[int] | None, linears: list[str]) -> None:
    """Refuse a target, each for itself, that reaches no module, or one that is no linear layer."""
    reached: dict[str, list[str]] = {target: [] for target in targets}
    indices = set()
    for name, _ in whole.named_modules():
        parts = name.split(".")
        for target in (".".join(parts[first:]) for first in range(len(parts))):
            if target in reached and reaches(name, [target], layers):
                reached[target].append(name)
        indices |= {int(part) for part in filter(str.isdigit, parts[:3])}
    offered = f'the linear layers of this model are {", ".join(linears)}; name some of them, or use "all-linear"'
    missing = [layer for layer in layers or [] if layer not in indices]
    if missing:
        raise UserError(
            f"[adapter] layers: this model has no block {missing[0]}; the first is 0, the last {max(indices)}"
        )
    for target, names in reached.items():
        where = f" in blocks {as_toml(layers)}" if layers is not None else ""
        if not names:
            raise UserError(f"[adapter] targets: {target} matches no module of this model{where}; {offered}")
        for module in map(whole.get_submodule, names):
            if not isinstance(module, nn.Linear):
                kind = "an embedding" if isinstance(module, nn.Embedding) else f"a {type(module).__name__}"
                raise UserError(
                    f"[adapter] targets: {target} is {kind}, and hetero_mpi adapts linear layers only; {offered}"
                )


def _check_patterns(adapter: AdapterTable, names: list[str]) -> None:
    """Refuse a pattern of the job, not of an adapter's file, that matches nothing."""
    for key in ("rank_pattern", "alpha_pattern") if adapter.path is None else ():
        for pattern in getattr(adapter, key) or {}:
            if not any(of_pattern({pattern: True}, name, False) for name in names):
                raise UserError(
                    f"[adapter] {key}: {as_toml(pattern)} matches no adapted layer; write the end of its name, such as "
                    f"{as_toml(names[0].rpartition('.')[2])} or {as_toml(names[0])}"
                )


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
) -> dict[str, nn.Parameter]:
    """Give what is named in a stage its adapters (fp32, on ``device``) with start values by their tensors' names.

    The magnitudes of DoRA begin as peft has them: the norms of the rows of the weights, which are there.

    Returns: name, as in adapter files but for their prefix -> parameter.
    """
    if not modules and not parameters:
        return {}
    _inject(lora_config(adapter, modules, parameters), model)
    found = {_short(name): parameter for name, parameter in model.named_parameters() if f".{_NAME}." in name}
    for name, parameter in found.items():
        parameter.data = (parameter.data.float() if name.endswith(MAGNITUDE) else start(name)).to(device)
    return found


def _inject(config: LoraConfig, model: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of patterns for layers that other stages hold
        imported_peft().inject_adapter_in_model(config, model)


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


def _short(name: str) -> str:
    return name.replace(f".{_NAME}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


_UNPACKABLE = {
    "longcat_flash": "has routers that read the matrix of a linear layer directly, which 4 bits do not allow"
}
"""Family -> why its linear layers cannot be packed."""


@dataclass(frozen=True)
class PeftTargets:
    """Targets as ``adapter_config.json`` has them: they reach what was adapted, and nothing else of the model."""

    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()


def peft_targets(model: PreTrainedModel, adapter: AdapterTable, found: Adapted) -> PeftTargets:
    """The shortest targets: last parts of names, those in some blocks, or full names. ``model``: without adapters."""
    names, wanted = [name for name, _ in model.named_modules()], set(found.modules)
    ends = sorted({name.rpartition(".")[2] for name in wanted})
    modules, layers = tuple(sorted(wanted)), None
    for some in (None, adapter.layers):
        if {name for name in names if reaches(name, ends, some)} == wanted:
            modules, layers = tuple(ends), some
            break
    parameters = tuple(adapter.parameters)
    held = {name for name, _ in model.named_parameters() if f".{name}".endswith(tuple(f".{end}" for end in parameters))}
    if held != set(found.parameters):
        parameters = tuple(sorted(found.parameters))
    return PeftTargets(modules, tuple(layers) if layers is not None else None, parameters)


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
        blocks = len({spec.layer for spec in self.trainable.values()})
        adapted = len(self.modules) + len(self.parameters)
        return (
            f"adapter: {', '.join(names)} in {blocks} block{'s' * (blocks > 1)}, {adapted} in all; {count:,} parameters are "
            f"trained beside {whole:,} ({100 * count / whole:.2g} %)"
        )

    def uses_dropout(self, chain: LayerChain) -> bool:
        """Whether training draws random numbers."""
        return chain.draws or self.noise is not None or (self.adapter is not None and self.adapter.dropout > 0)


def full_training(chain: LayerChain) -> Tuning:
    return Tuning(dict(chain.parameters), dict(chain.constants))


def nothing_trained() -> Tuning:
    """A model that is only used: no gradients, no masters."""
    return Tuning({}, frozen=True)


def adapter_tuning(chain: TransformersChain, adapter: AdapterTable, nf4: bool, double: bool) -> Tuning:
    """An adapter over frozen weights.

    :raises UserError: the adapter's targets match nothing, or lie outside the blocks; or the family cannot be packed.
    """
    if nf4 and chain.name in _UNPACKABLE:
        raise UserError(f'[model] quantization = "nf4": {chain.name} {_UNPACKABLE[chain.name]}; set it to "none"')
    found = adapted(build_on_meta(chain.config), adapter)
    outside = [name for name in found.modules if not name.startswith(f"{chain.blocks_name}.")]
    if outside:
        raise UserError(
            f"[adapter] targets = {as_toml(adapter.targets)} match {outside[0]}, which is not inside a block; "
            f"adapt linear layers of blocks only"
        )
    trainable = {name: ParameterSpec(name, chain.layer_of(name), shape) for name, shape in found.shapes.items()}
    placed = tuple((chain.layer_of(name), name) for name in found.modules)
    written = peft_targets(chain.model, adapter, found)
    begun = (replace(spec, name=began_with(name)) for name, spec in trainable.items() if adapter.start != "default")
    constants = {spec.name: spec for spec in begun}
    return Tuning(trainable, constants, adapter, placed, found.parameters, written, nf4, double)
