"""The tuning of an adapter: what it reaches of a whole model on the meta device, where peft decides the targets once, and what is
trained whole beside it.

Also here: the tuning that a job asks for: an adapter or all weights, what of them is frozen, and at which learning rates.
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

_LEAST = 4096
"""bitsandbytes keeps the moments of smaller parameters in fp32."""


def tuning_of(job: JobConfig, chain: LayerChain) -> Tuning:
    """The job's tuning of a model.

    :raises UserError: as ``adapter_tuning``; or a parameter that ``train`` names is none.
    """
    if job.adapter.method == "none":
        found = full_training(chain)
    else:
        nf4, double = job.model.quantization == "nf4", job.model.double_quantization
        found = adapter_tuning(language(chain), job.adapter, nf4, double)
    still = _still(job.train, found, chain)
    shares = _shares(job.train, found, still)
    found = replace(found, shares=shares, still=still, noise=job.train.neftune_noise_alpha)
    return with_moments(found, chain, job.train.optimizer)


def _shares(train: TrainTable, tuning: Tuning, still: frozenset[str]) -> dict[str, float]:
    """:attr:`Tuning.shares`: by ``learning_rates``, and else LoRA+'s. ``still``: is not trained."""
    found: dict[str, float] = {}
    for pattern, rate in (train.learning_rates or {}).items():
        own = _named("learning_rates", pattern, tuning) - found.keys()
        if own <= still:
            told = "is found in no parameter that is trained and that none before it is found in"
            raise UserError(
                "train.learning_rates",
                f"[train] learning_rates: {as_toml(pattern)} {told}: put it first, or leave it out",
            )
        found |= dict.fromkeys(own, rate / train.learning_rate)
    if train.lora_plus_ratio != 1:
        later = [name for name in tuning.trainable if ".lora_B." in name or name.endswith(MAGNITUDE)]
        found = dict.fromkeys(later, train.lora_plus_ratio) | found
    return found


def _still(train: TrainTable, tuning: Tuning, chain: LayerChain) -> frozenset[str]:
    """:attr:`Tuning.still`."""
    found, blocks = set[str](), chain.layer_count - 2
    for entry in train.freeze:
        if isinstance(entry, str):
            found |= _named("freeze", entry, tuning)
        elif entry < blocks:
            found |= {name for name, spec in tuning.trainable.items() if spec.layer == entry + 1}
        else:
            raise UserError(
                "train.freeze",
                f"[train] freeze: this model has no block {entry}; the first is 0, the last {blocks - 1}",
            )
    if chain.tied is not None and not found.isdisjoint(chain.tied):
        raise UserError(
            "train.freeze",
            f"[train] freeze: {chain.tied[1]} is the matrix of the head, too, and is trained: name others",
        )
    if found >= tuning.trainable.keys():
        raise UserError("train.freeze", "[train] freeze: nothing is left to train; name fewer parameters")
    return frozenset(found)


def _named(key: str, pattern: str, tuning: Tuning) -> set[str]:
    """The trained tensors in whose names a pattern is found. Raises UserError: there are none."""
    found = {name for name in tuning.trainable if re.search(pattern, name)}
    if not found:
        some = ", ".join(list(tuning.trainable)[:3])
        raise UserError(
            "train.pattern",
            f"[train] {key}: {as_toml(pattern)} is found in no name of a trained parameter, such as {some}",
        )
    return found


def with_moments(tuning: Tuning, chain: LayerChain, optimizer: str) -> Tuning:
    """The tuning with what an optimizer keeps. In 8 bits: where bitsandbytes and transformers' Trainer keep it so, not of small
    tensors, nor of embeddings. Muon: steps matrices between the embedding and the head; biases and norms are none."""

    def own(spec: ParameterSpec) -> bool:
        if optimizer == EIGHT_BIT:
            return spec.count >= _LEAST and spec.name not in chain.embeddings
        inside = 0 < spec.layer < chain.layer_count - 1 and spec.name not in chain.embeddings
        return optimizer == "adafactor" or (inside and len(spec.shape) == 2 and chain.decays(spec.name))

    if optimizer == "adamw":
        return tuning
    names = [name for name, spec in tuning.trainable.items() if own(spec)]
    return replace(tuning, optimizer=optimizer, moments=dict.fromkeys(names, OF_OPTIMIZER[optimizer][-1]))


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
    targets = None if adapter.targets == "family" else adapter.targets
    if targets == "all-linear" and adapter.layers is not None:  # peft takes either
        targets = [end for end in linears if any(reaches(name, [end], adapter.layers) for name in linear_names)]
    if isinstance(targets, list):
        _check_targets(whole, targets, adapter.layers, linears)
    try:
        with torch.device("meta"):
            add_adapters(lora_config(adapter, targets, experts, adapter.layers), whole)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {as_toml(adapter.targets)} cannot be adapted by peft: {error}; the linear layers of this model "
            f'are {", ".join(linears)}; name some of them, or use "all-linear"',
        ) from error
    shapes = {
        name_in_file(name): tuple(parameter.shape)
        for name, parameter in whole.named_parameters()
        if f".{ADAPTER_NAME}." in name
    }
    wrapped = [(name, m.parameter_name) for name, m in whole.named_modules() if isinstance(m, ParamWrapper)]
    parameters = {f"{name.replace(WRAPPED, '')}.{own}": name for name, own in wrapped}
    parameters = {name: wrapper for name, wrapper in parameters.items() if name in experts}
    modules = sorted({name.rpartition(".lora_")[0] for name in shapes} - set(parameters.values()))
    others = [name for name in modules if name not in linear_names]
    if others:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {adapter.targets!r} reach {others[0]}, which is no linear layer: in this family peft adapts the "
            f'fused experts in place of layers like gate_proj; name others instead, such as ["q_proj", "v_proj"], and the experts '
            f"in [adapter] parameters",
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
            "adapter.layers",
            f"[adapter] layers: this model has no block {missing[0]}; the first is 0, the last {max(indices)}",
        )
    for target, names in reached.items():
        where = f" in blocks {as_toml(layers)}" if layers is not None else ""
        if not names:
            raise UserError(
                "adapter.targets", f"[adapter] targets: {target} matches no module of this model{where}; {offered}"
            )
        for module in map(whole.get_submodule, names):
            if not isinstance(module, nn.Linear):
                kind = "an embedding" if isinstance(module, nn.Embedding) else f"a {type(module).__name__}"
                raise UserError(
                    "adapter.targets",
                    f"[adapter] targets: {target} is {kind}, and hetero_mpi adapts linear layers only; {offered}",
                )


def _check_patterns(adapter: AdapterTable, names: list[str]) -> None:
    """Refuse a pattern of the job, not of an adapter's file, that matches nothing."""
    for key in ("rank_pattern", "alpha_pattern") if adapter.path is None else ():
        for pattern in getattr(adapter, key) or {}:
            if not any(of_pattern({pattern: True}, name, False) for name in names):
                raise UserError(
                    "adapter.pattern",
                    f"[adapter] {key}: {as_toml(pattern)} matches no adapted layer; write the end of its name, such as "
                    f"{as_toml(names[0].rpartition('.')[2])} or {as_toml(names[0])}",
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
                "adapter.parameters",
                f"[adapter] parameters: {wanted} matches no parameter of fused experts; {what}; linear layers belong into "
                f"[adapter] targets",
            )
    return [name for name in known if any(f".{name}".endswith(f".{wanted}") for wanted in adapter.parameters)]


_UNPACKABLE = {
    "longcat_flash": "has routers that read the matrix of a linear layer directly, which 4 bits do not allow"
}
"""Family -> why its linear layers cannot be packed."""


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


def adapter_tuning(chain: TransformersChain, adapter: AdapterTable, nf4: bool, double: bool) -> Tuning:
    """An adapter over frozen weights.

    :raises UserError: the adapter's targets match nothing, or lie outside the blocks; or the family cannot be packed.
    """
    if nf4 and chain.name in _UNPACKABLE:
        raise UserError(
            "model.quantization",
            f'[model] quantization = "nf4": {chain.name} {_UNPACKABLE[chain.name]}; set it to "none"',
        )
    found = adapted(build_on_meta(chain.config), adapter)
    outside = [name for name in found.modules if not name.startswith(f"{chain.blocks_name}.")]
    if outside:
        raise UserError(
            "adapter.targets",
            f"[adapter] targets = {as_toml(adapter.targets)} match {outside[0]}, which is not inside a block; "
            f"adapt linear layers of blocks only",
        )
    for name, shape in found.shapes.items() if adapter.start != "default" else ():
        rank, width = shape if ".lora_A." in name else reversed(shape)
        if rank > width:
            raise UserError(
                "adapter.rank",
                f"[adapter] start = {as_toml(adapter.start)}: an adapter of rank {rank} cannot begin with so many parts of "
                f"{name.rpartition('.lora_')[0]}, which has {width}: lower the rank, or give such layers another by rank_pattern",
            )
    written, ids = (
        peft_targets(chain.model, adapter, found),
        [one for one in adapter.tokens or () if isinstance(one, int)],
    )
    saved = _saved(chain, adapter, found, nf4)
    rows = [one for one in _with_rows(chain, adapter, ids) if f"{one}.weight" not in saved]
    shapes = found.shapes | {name: spec.shape for name, spec in chain.parameters.items() if name in saved}
    shapes |= {module + ROWS: (len(ids), chain.parameters[f"{module}.weight"].shape[1]) for module in rows}
    specs = [ParameterSpec(name, chain.layer_of(name), shape) for name, shape in shapes.items()]
    trainable = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.layer)}
    placed = tuple((chain.layer_of(name), name) for name in found.modules)
    kept = list(adapter.modules_to_save or ())
    tied = chain.tied if chain.tied is not None and chain.tied[1] in saved else None
    if tied is not None:  # both ends, as peft itself writes them
        ends = [name.removesuffix(".weight") for name in reversed(tied)]
        kept += [end.rpartition(".")[2] for end in ends if not end.endswith(tuple(kept))]
    tokens = {module.rpartition(".")[2]: ids for module in rows}
    written = replace(written, saved=tuple(kept), tokens=tokens, tied=tied)
    begun = [replace(trainable[name], name=began_with(name)) for name in found.shapes if adapter.start != "default"]
    constants = {spec.name: spec for spec in begun}
    return Tuning(trainable, constants, adapter, placed, found.parameters, written, nf4, double)


def _saved(chain: TransformersChain, adapter: AdapterTable, found: Adapted, nf4: bool) -> set[str]:
    """The parameters that are trained whole beside the adapters. A tied head's is the embedding's."""
    saved, heads, packed = set[str](), {} if chain.tied is None else dict([chain.tied]), set[str]()
    for block in [chain.module_names(layer)[0] for layer in range(1, chain.layer_count - 1)] if nf4 else ():
        packed |= {f"{block}.{name}" for name in packed_weights(chain.model.get_submodule(block))}
    for wanted in adapter.modules_to_save or ():
        # peft's own rule, by which "norm" is every module whose name ends so.
        names = [name for name, _ in chain.model.named_modules() if name.endswith(wanted)]
        inside = tuple(f"{name}." for name in names)
        own = [name for name in (*chain.parameters, *heads) if name.startswith(inside)]
        adapted = [name for name in (*found.modules, *found.parameters) if f"{name}.".startswith(inside)]
        reason = None
        if not names:
            reason = "matches no module of this model"
        elif adapted:
            reason = f"reaches {adapted[0]}, which has an adapter: leave it out here, or in [adapter] targets"
        elif not packed.isdisjoint(own):
            reason = f"reaches {min(packed.intersection(own))}, which is held in 4 bits and cannot be trained itself"
        elif not own:
            reason = f"reaches {names[0]}, which has nothing that is trained"
        if reason is not None:
            ends = ", ".join(module.rpartition(".")[2] for module in _ends(chain).values())
            raise UserError(
                "adapter.modules_to_save",
                f"[adapter] modules_to_save: {wanted} {reason}; such modules are {ends} and norms",
            )
        saved |= {heads.get(name, name) for name in own}
    return saved


def _ends(chain: TransformersChain) -> dict[str, str]:
    """Names of the embedding and of the output projection."""
    names = {module: name for name, module in chain.model.named_modules()}
    model = chain.model
    return {"embedding": names[model.get_input_embeddings()], "head": names[model.get_output_embeddings()]}


def _with_rows(chain: TransformersChain, adapter: AdapterTable, tokens: list[int]) -> list[str]:
    """Names of the modules that have trained rows of tokens. A tied head's are the embedding's."""
    if max(tokens, default=-1) >= chain.config.vocab_size:
        raise UserError(
            "adapter.tokens",
            f"[adapter] tokens: {max(tokens)} is no token of this model, which has {chain.config.vocab_size:,} (vocab_size)",
        )
    ends, wanted = _ends(chain), "embedding" if chain.tied is not None else adapter.tokens_in
    return [name for end, name in ends.items() if tokens and wanted in (None, "both", end)]
