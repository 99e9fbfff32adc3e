"""Which part of a layer's cost the ranks of a group divide, from shapes."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hetero_mpi.model.group.division import (
    Holding,
    containers,
    divisions,
    experts_to_share,
    is_of_experts,
    key_value_heads,
    refusal,
    styles,
)
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.quantize import packed_bytes, packed_weights
from hetero_mpi.model.transformers.chain import TransformersChain, language
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.cost import DTYPE_BYTES, LayerCost, ModelCost


def shareable_heads(chain: LayerChain, tuning: Tuning) -> int | None:
    """Key/value heads that a group may share, whichever way; None: there are groups that could not train the model."""
    if not isinstance(chain, TransformersChain):
        return None
    heads = key_value_heads(chain)
    return heads if refusal(chain, tuning, (1,) * heads, _finest_experts(chain, heads)) is None else None


def _finest_experts(chain: TransformersChain, heads: int) -> tuple[int, ...] | None:
    """Experts of each of so many members."""
    experts = experts_to_share(chain)
    return tuple((experts + place) // heads for place in range(heads)) if experts is not None else None


def with_divisions(cost: ModelCost, chain: LayerChain, tuning: Tuning) -> ModelCost:
    """The cost with the heads that a group may share and what it divides."""
    heads = shareable_heads(chain, tuning)
    if heads is None:
        return cost
    model = language(chain)
    cut = divisions(model, tuning, (1,) * heads, range(model.layer_count), _finest_experts(model, heads))
    names = {name for name, division in cut.items() if division.held is Holding.CUT}
    layers = (_divided(layer, index, cost.dtype, model, tuning, names) for index, layer in enumerate(cost.layers))
    return replace(cost, layers=tuple(layers), heads=heads, experts=experts_to_share(model))


def _divided(
    cost: LayerCost, index: int, dtype: str, chain: TransformersChain, tuning: Tuning, names: set[str]
) -> LayerCost:
    """``names``: of the tensors that are cut."""
    held = {spec.name: spec.count for spec in (*chain.specs(index, index + 1), *chain.constant_specs(index, index + 1))}
    trained = {spec.name: spec.count for spec in tuning.specs(index, index + 1)}
    counts = {name: count for name, count in {**held, **trained}.items() if name in names}
    experts = {name for name in counts if is_of_experts(chain, name)}
    parameters = sum(counts.values())
    head = index == chain.layer_count - 1
    if head and chain.tied is not None:
        parameters += chain.parameters[chain.tied[1]].count
    kept = cost.activation_bytes_per_token
    activations = min(kept, _kept_numbers(chain, index) * DTYPE_BYTES[dtype])
    return replace(
        cost,
        divided_parameters=parameters,
        divided_trainable=sum(count for name, count in trained.items() if name in names),
        expert_parameters=sum(counts[name] for name in experts),
        expert_trainable=sum(count for name, count in trained.items() if name in experts),
        divided_activations=activations / kept if kept else 0.0,
        # A head's is of its logits; a block's backward holds as much as was kept.
        divided_workspace=1.0 if head else activations / kept if kept else 0.0,
        divided_scale_bytes=_scale_bytes(chain, index, names) if tuning.nf4 and tuning.double else 0,
        group_sums=1 if head or index == 0 else len(containers(chain)),
    )


def _scale_bytes(chain: TransformersChain, index: int, names: set[str]) -> int:
    """By how much more a layer's NF4 weights take that are cut, without double quantisation."""
    if not 0 < index < chain.layer_count - 1:
        return 0
    (block,) = chain.module_names(index)
    weights = packed_weights(chain.model.get_submodule(block)).items()
    cut = [weight.numel() for name, weight in weights if f"{block}.{name}" in names]
    return sum(packed_bytes(count, False) - packed_bytes(count, True) for count in cut)


def _kept_numbers(chain: TransformersChain, index: int) -> int:
    """Numbers per token that a layer certainly keeps of what is divided: of a block outputs of the matrices cut by rows (queries,
    keys, values, the MLP's inner columns) and inputs of those cut by columns, of the head the logits."""
    if index == 0:
        return 0
    if index == chain.layer_count - 1:
        return int(chain.model.get_output_embeddings().out_features)
    cuts, found = styles(chain), 0
    for root in chain.module_names(index):
        for name, module in chain.model.get_submodule(root).named_modules():
            if isinstance(module, nn.Linear):
                found += {"colwise": module.out_features, "rowwise": module.in_features}.get(cuts.get(name, ""), 0)
    return found
