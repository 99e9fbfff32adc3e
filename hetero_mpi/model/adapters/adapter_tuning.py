"""Tuning of a job: adapter or full fine-tuning, frozen parameters, and learning rates.

For an adapter, peft chooses the targets once, for the whole model on the meta device. Some modules may also be fully trained.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.job.rules import EIGHT_BIT, as_toml
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.layer.interface import ADAPTER_NAME, WRAPPED, LayerChain, ParameterSpec
from hetero_mpi.model.layer.quantize import fused_experts, packed_weights
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta, language
from hetero_mpi.model.tuning import (
    MAGNITUDE,
    ROWS,
    PeftTargets,
    Tuning,
    add_adapters,
    began_with,
    full_training,
    imported_peft,
    lora_config,
    name_in_file,
    of_pattern,
    reaches,
)
from hetero_mpi.planning.types.moments import OF_OPTIMIZER
from hetero_mpi.util.errors import UserError

_MIN_8BIT_ELEMENTS = 4096
"""Minimum size for 8-bit moments; bitsandbytes keeps the moments of smaller parameters in fp32."""


def tuning_of(job: JobConfig, chain: LayerChain) -> Tuning:
    """Return what the job trains of a model, and how.

    Raises:
        UserError: See ``adapter_tuning``; or a pattern in ``train`` matches no trained parameter.
    """
    if job.adapter.method == "none":
        tuning = full_training(chain)
    else:
        nf4, double = job.model.quantization == "nf4", job.model.double_quantization
        tuning = adapter_tuning(language(chain), job.adapter, nf4, double)
    still = _still(job.train, tuning, chain)
    shares = _shares(job.train, tuning, still)
    tuning = replace(tuning, shares=shares, still=still, noise=job.train.neftune_noise_alpha)
    return with_moments(tuning, chain, job.train.optimizer)


def _shares(train: TrainTable, tuning: Tuning, still: frozenset[str]) -> dict[str, float]:
    """Compute :attr:`Tuning.shares` from ``learning_rates``, then from LoRA+. ``still`` names the frozen parameters."""
    share_by_name: dict[str, float] = {}
    for pattern, rate in (train.learning_rates or {}).items():
        names = _named("learning_rates", pattern, tuning) - share_by_name.keys()
        if names <= still:
            problem = "matches only parameters that are not trained or that an earlier pattern matches"
            raise UserError(
                "train.learning_rates",
                f"[train] learning_rates: {as_toml(pattern)} {problem}: move it to the front, or remove it",
            )
        share_by_name |= dict.fromkeys(names, rate / train.learning_rate)
    if train.lora_plus_ratio != 1:
        later = [name for name in tuning.trainable if ".lora_B." in name or name.endswith(MAGNITUDE)]
        share_by_name = dict.fromkeys(later, train.lora_plus_ratio) | share_by_name
    return share_by_name


def _still(train: TrainTable, tuning: Tuning, chain: LayerChain) -> frozenset[str]:
    """Compute :attr:`Tuning.still`, the names of the parameters that the job freezes."""
    frozen_names, blocks = set[str](), chain.layer_count - 2
    for entry in train.freeze:
        if isinstance(entry, str):
            frozen_names |= _named("freeze", entry, tuning)
        elif entry < blocks:
            frozen_names |= {name for name, spec in tuning.trainable.items() if spec.layer == entry + 1}
        else:
            raise UserError(
                "train.freeze", f"[train] freeze: this model has no block {entry}; its blocks are 0 to {blocks - 1}"
            )
    if chain.tied is not None and not frozen_names.isdisjoint(chain.tied):
        raise UserError(
            "train.freeze",
            f"[train] freeze: {chain.tied[1]} is tied to the LM head and must be trained: remove it from the list",
        )
    if frozen_names >= tuning.trainable.keys():
        raise UserError("train.freeze", "[train] freeze: no parameter is left to train; list fewer parameters")
    return frozenset(frozen_names)


def _named(key: str, pattern: str, tuning: Tuning) -> set[str]:
    """Return the names of the trained tensors that match a pattern; raise UserError if none match."""
    names = {name for name in tuning.trainable if re.search(pattern, name)}
    if not names:
        examples = ", ".join(list(tuning.trainable)[:3])
        raise UserError(
            "train.pattern",
            f"[train] {key}: {as_toml(pattern)} matches no trained parameter; examples of their names: {examples}",
        )
    return names


def with_moments(tuning: Tuning, chain: LayerChain, optimizer: str) -> Tuning:
    """Return the tuning with the kind of optimizer state of each tensor.

    As in bitsandbytes and transformers' Trainer, small tensors and embeddings have no 8-bit states. Muon applies to the matrices
    between embedding and head, but not to biases and norms.
    """

    def is_compact(spec: ParameterSpec) -> bool:
        if optimizer == EIGHT_BIT:
            return spec.count >= _MIN_8BIT_ELEMENTS and spec.name not in chain.embeddings
        inside = 0 < spec.layer < chain.layer_count - 1 and spec.name not in chain.embeddings
        return optimizer == "adafactor" or (inside and len(spec.shape) == 2 and chain.decays(spec.name))

    if optimizer == "adamw":
        return tuning
    names = [name for name, spec in tuning.trainable.items() if is_compact(spec)]
    return replace(tuning, optimizer=optimizer, moments=dict.fromkeys(names, OF_OPTIMIZER[optimizer][-1]))


@dataclass(frozen=True)
class Adapted:
    """The adapted modules of a whole model and the adapter's tensors."""

    modules: list[str]
    """Full names of the adapted linear layers."""
    parameters: dict[str, str]
    """Maps each adapted parameter of fused experts to the name prefix of its adapter tensors, by full name. peft wraps the module
    once for each parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Maps each adapter tensor to its shape."""


def adapted(model: PreTrainedModel, adapter: AdapterTable) -> Adapted:
    """Add the adapter to ``model``, which is on the meta device, and return the adapted modules and adapter tensors.

    Raises:
        UserError: A target or pattern matches nothing, or matches a module that cannot be adapted.
    """
    imported_peft()
    from peft.tuners.lora.layer import ParamWrapper

    experts = _matched_experts(model, adapter)
    linear_names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    linears = sorted({name.rpartition(".")[2] for name in linear_names if model.get_submodule(name) is not head})
    targets = None if adapter.targets == "family" else adapter.targets
    if targets == "all-linear" and adapter.layers is not None:  # peft accepts only one of both
        targets = [end for end in linears if any(reaches(name, [end], adapter.layers) for name in linear_names)]
    if isinstance(targets, list):
        _check_targets(model, targets, adapter.layers, linears)
    try:
        with torch.device("meta"):
            add_adapters(lora_config(adapter, targets, experts, adapter.layers), model)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {as_toml(adapter.targets)} cannot be adapted by peft: {error}; the linear layers of this model "
            f'are {", ".join(linears)}; use some of them, or "all-linear"',
        ) from error
    shapes = {
        name_in_file(name): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if f".{ADAPTER_NAME}." in name
    }
    wrapped = [(name, m.parameter_name) for name, m in model.named_modules() if isinstance(m, ParamWrapper)]
    parameters = {f"{name.replace(WRAPPED, '')}.{parameter_name}": name for name, parameter_name in wrapped}
    parameters = {name: wrapper for name, wrapper in parameters.items() if name in experts}
    modules = sorted({name.rpartition(".lora_")[0] for name in shapes} - set(parameters.values()))
    rest = [name for name in modules if name not in linear_names]
    if rest:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {as_toml(adapter.targets)} match {rest[0]}, which is not a linear layer: in this family, peft "
            f"adapts "
            f'fused experts instead of layers such as gate_proj; use others, such as ["q_proj", "v_proj"], and list the experts '
            f"in [adapter] parameters",
        )
    _check_patterns(adapter, [*modules, *parameters])
    return Adapted(modules, parameters, shapes)


def _check_targets(model: PreTrainedModel, targets: list[str], layers: list[int] | None, linears: list[str]) -> None:
    """Reject targets that match no module, or that match a module other than a linear layer."""
    reached: dict[str, list[str]] = {target: [] for target in targets}
    indices = set()
    for name, _ in model.named_modules():
        parts = name.split(".")
        for target in (".".join(parts[first:]) for first in range(len(parts))):
            if target in reached and reaches(name, [target], layers):
                reached[target].append(name)
        indices |= {int(part) for part in filter(str.isdigit, parts[:3])}
    offered = f'the linear layers of this model are {", ".join(linears)}; use some of them, or "all-linear"'
    missing = [layer for layer in layers or [] if layer not in indices]
    if missing:
        raise UserError(
            "adapter.layers",
            f"[adapter] layers: this model has no block {missing[0]}; its blocks are 0 to {max(indices)}",
        )
    for target, names in reached.items():
        where = f" in blocks {as_toml(layers)}" if layers is not None else ""
        if not names:
            raise UserError(
                "adapter.targets", f"[adapter] targets: {target} matches no module of this model{where}; {offered}"
            )
        for module in map(model.get_submodule, names):
            if not isinstance(module, nn.Linear):
                kind = "an embedding" if isinstance(module, nn.Embedding) else f"a {type(module).__name__}"
                raise UserError(
                    "adapter.targets",
                    f"[adapter] targets: {target} is {kind}, but hetero_mpi adapts linear layers only; {offered}",
                )


def _check_patterns(adapter: AdapterTable, names: list[str]) -> None:
    """Reject a pattern from the job (but not from an adapter's file) that matches nothing."""
    for key in ("rank_pattern", "alpha_pattern") if adapter.path is None else ():
        for pattern in getattr(adapter, key) or {}:
            if not any(of_pattern({pattern: True}, name, False) for name in names):
                raise UserError(
                    "adapter.pattern",
                    f"[adapter] {key}: {as_toml(pattern)} matches no adapted layer; write the end of its name, such as "
                    f"{as_toml(names[0].rpartition('.')[2])} or {as_toml(names[0])}",
                )


def _matched_experts(model: PreTrainedModel, adapter: AdapterTable) -> list[str]:
    """Return the fused experts' parameters that match ``[adapter] parameters``; raise UserError if a name matches none."""
    expert_names = [f"{path}.{name}" for path, _, name, _ in fused_experts(model)]
    for name_end in adapter.parameters:
        if not any(f".{name}".endswith(f".{name_end}") for name in expert_names):
            offered = sorted({".".join(name.split(".")[-2:]) for name in expert_names})
            what = f"this model has {', '.join(offered)}" if offered else "this model has no fused experts"
            raise UserError(
                "adapter.parameters",
                f"[adapter] parameters: {name_end} matches no parameter of fused experts; {what}; linear layers belong in "
                f"[adapter] targets",
            )
    return [name for name in expert_names if any(f".{name}".endswith(f".{end}") for end in adapter.parameters)]


_UNPACKABLE = {
    "longcat_flash": "has routers that read the matrix of a linear layer directly, which 4-bit weights do not allow"
}
"""Maps each family to the reason why NF4 does not support it."""


def peft_targets(model: PreTrainedModel, adapter: AdapterTable, targets: Adapted) -> PeftTargets:
    """Return the shortest equivalent targets: last parts of names, limited to certain blocks if needed, or full names."""
    names, adapted_names = [name for name, _ in model.named_modules()], set(targets.modules)
    ends = sorted({name.rpartition(".")[2] for name in adapted_names})
    modules, layers = tuple(sorted(adapted_names)), None
    for blocks in (None, adapter.layers):
        if {name for name in names if reaches(name, ends, blocks)} == adapted_names:
            modules, layers = tuple(ends), blocks
            break
    parameters = tuple(adapter.parameters)
    matching = {
        name for name, _ in model.named_parameters() if f".{name}".endswith(tuple(f".{end}" for end in parameters))
    }
    if matching != set(targets.parameters):
        parameters = tuple(sorted(targets.parameters))
    return PeftTargets(modules, tuple(layers) if layers is not None else None, parameters)


def adapter_tuning(chain: TransformersChain, adapter: AdapterTable, nf4: bool, double: bool) -> Tuning:
    """Return the tuning for an adapter over frozen weights.

    Raises:
        UserError: Targets match nothing or lie outside the blocks, or NF4 does not support the family.
    """
    if nf4 and chain.name in _UNPACKABLE:
        raise UserError(
            "model.quantization",
            f'[model] quantization = "nf4": {chain.name} {_UNPACKABLE[chain.name]}; set it to "none"',
        )
    targets = adapted(build_on_meta(chain.config), adapter)
    outside = [name for name in targets.modules if not name.startswith(f"{chain.blocks_name}.")]
    if outside:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {as_toml(adapter.targets)} match {outside[0]}, which is not inside a block; use linear layers of "
            f"blocks only",
        )
    for name, shape in targets.shapes.items() if adapter.start != "default" else ():
        rank, width = shape if ".lora_A." in name else reversed(shape)
        if rank > width:
            raise UserError(
                "adapter.rank",
                f"[adapter] start = {as_toml(adapter.start)}: rank {rank} exceeds the {width} singular values or columns of "
                f"{name.rpartition('.lora_')[0]}: lower [adapter] rank, or set a lower rank for such layers in [adapter] "
                f"rank_pattern",
            )
    written = peft_targets(chain.model, adapter, targets)
    ids = [entry for entry in adapter.tokens or () if isinstance(entry, int)]
    saved = _saved(chain, adapter, targets, nf4)
    rows = [entry for entry in _with_rows(chain, adapter, ids) if f"{entry}.weight" not in saved]
    shapes = targets.shapes | {name: spec.shape for name, spec in chain.parameters.items() if name in saved}
    shapes |= {module + ROWS: (len(ids), chain.parameters[f"{module}.weight"].shape[1]) for module in rows}
    specs = [ParameterSpec(name, chain.layer_of(name), shape) for name, shape in shapes.items()]
    trainable = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.layer)}
    placed = tuple((chain.layer_of(name), name) for name in targets.modules)
    saved_ends = list(adapter.modules_to_save or ())
    tied = chain.tied if chain.tied is not None and chain.tied[1] in saved else None
    if tied is not None:  # peft writes both ends
        ends = [name.removesuffix(".weight") for name in reversed(tied)]
        saved_ends += [end.rpartition(".")[2] for end in ends if not end.endswith(tuple(saved_ends))]
    tokens = {module.rpartition(".")[2]: ids for module in rows}
    written = replace(written, saved=tuple(saved_ends), tokens=tokens, tied=tied)
    initial_specs = [
        replace(trainable[name], name=began_with(name)) for name in targets.shapes if adapter.start != "default"
    ]
    constants = {spec.name: spec for spec in initial_specs}
    return Tuning(trainable, constants, adapter, placed, targets.parameters, written, nf4, double)


def _saved(chain: TransformersChain, adapter: AdapterTable, targets: Adapted, nf4: bool) -> set[str]:
    """Return the parameters that are fully trained in addition to adapters; for a tied head, return the embedding's name."""
    saved, heads, packed = set[str](), {} if chain.tied is None else dict([chain.tied]), set[str]()
    for block in [chain.module_names(layer)[0] for layer in range(1, chain.layer_count - 1)] if nf4 else ():
        packed |= {f"{block}.{name}" for name in packed_weights(chain.model.get_submodule(block))}
    for module_end in adapter.modules_to_save or ():
        # peft's rule: "norm" matches every module whose name ends in it.
        names = [name for name, _ in chain.model.named_modules() if name.endswith(module_end)]
        inside = tuple(f"{name}." for name in names)
        parameters = [name for name in (*chain.parameters, *heads) if name.startswith(inside)]
        adapted = [name for name in (*targets.modules, *targets.parameters) if f"{name}.".startswith(inside)]
        reason = None
        if not names:
            reason = "matches no module of this model"
        elif adapted:
            reason = f"reaches {adapted[0]}, which has an adapter: remove it here, or from [adapter] targets"
        elif not packed.isdisjoint(parameters):
            reason = f"reaches {min(packed.intersection(parameters))}, which is stored in 4 bits and cannot be trained"
        elif not parameters:
            reason = f"reaches {names[0]}, which has no trainable parameters"
        if reason is not None:
            ends = ", ".join(module.rpartition(".")[2] for module in _ends(chain).values())
            raise UserError(
                "adapter.modules_to_save",
                f"[adapter] modules_to_save: {module_end} {reason}; supported modules are {ends} and norms",
            )
        saved |= {heads.get(name, name) for name in parameters}
    return saved


def _ends(chain: TransformersChain) -> dict[str, str]:
    """Return the module names of the embedding and the output projection."""
    names = {module: name for name, module in chain.model.named_modules()}
    model = chain.model
    return {"embedding": names[model.get_input_embeddings()], "head": names[model.get_output_embeddings()]}


def _with_rows(chain: TransformersChain, adapter: AdapterTable, tokens: list[int]) -> list[str]:
    """Return the names of the modules with trained token rows; for a tied model, only the embedding."""
    if max(tokens, default=-1) >= chain.config.vocab_size:
        raise UserError(
            "adapter.tokens",
            f"[adapter] tokens: this model has no token {max(tokens)}; its token ids are below {chain.config.vocab_size:,} "
            f"(vocab_size)",
        )
    ends, end_kind = _ends(chain), "embedding" if chain.tied is not None else adapter.tokens_in
    return [name for end, name in ends.items() if tokens and end_kind in (None, "both", end)]
