"""Cost of a model's layers for the planner, from shapes and measured activation bytes, including what groups can shard."""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from hetero_mpi.model.group.division import (
    containers,
    divisions,
    experts_to_share,
    is_of_experts,
    key_value_heads,
    styles,
)
from hetero_mpi.model.group.refusals import needs_heads, refusal
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.quantize import BLOCK_SIZE, SCALE_BLOCK_SIZE, fused_experts, packed_weights
from hetero_mpi.model.transformers.chain import TransformersChain, language
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.moments import FACTORED, ONE, TWO, saved_bytes
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, GRADIENT_BYTES

ADAM_BYTES = 8
"""Bytes per parameter of two fp32 moments."""
_STEPPING_BYTES = 12
"""Bytes of workspace per matrix element in an Adafactor or Muon step."""


def model_cost(
    chain: LayerChain, tuning: Tuning, dtype: str, sequence_length: int, activation_bytes: Mapping[str, float]
) -> ModelCost:
    """Return the cost of every layer. ``activation_bytes`` maps kinds of layers to bytes per token kept until backward."""
    tied = chain.parameters[chain.tied[1]].count if chain.tied is not None else 0
    both_ends = tuning.tied(chain)
    layers = tuple(
        _layer_cost(chain, tuning, layer, dtype, sequence_length, tied, activation_bytes)
        for layer in range(chain.layer_count)
    )
    master_bytes = 4 if dtype != "fp32" else 0
    cost = ModelCost(
        model_type=chain.name,
        dtype=dtype,
        sequence_length=sequence_length,
        tied=both_ends is not None,
        state_bytes_per_trainable_parameter=GRADIENT_BYTES + ADAM_BYTES + master_bytes,
        layers=layers,
        tied_bytes=GRADIENT_BYTES * tuning.trainable[both_ends].count if both_ends is not None else 0,
        optimizer=tuning.optimizer,
        adapter_rank=tuning.adapter.rank if tuning.adapter is not None else None,
    )
    return with_divisions(cost, chain, tuning)


def _layer_cost(
    chain: LayerChain,
    tuning: Tuning,
    layer: int,
    dtype: str,
    sequence_length: int,
    tied: int,
    activation_bytes: Mapping[str, float],
) -> LayerCost:
    head, kind = layer == chain.layer_count - 1, chain.kinds[layer]
    layer_specs = (*chain.specs(layer, layer + 1), *chain.constant_specs(layer, layer + 1))
    count, trained = sum(spec.count for spec in layer_specs), tuning.specs(layer, layer + 1)
    copy, both_ends = tied if head else 0, tuning.tied(chain) if head else None
    adapters = sum(spec.count for spec in trained if spec.name not in chain.parameters)
    inner = 0 < layer < chain.layer_count - 1
    packed, matrix, unpacked = _nf4_elements(language(chain), tuning, layer) if tuning.nf4 and inner else (0, 0, 0)
    parameter_bytes = (count - packed + copy + adapters) * DTYPE_BYTES[dtype] + packed_bytes(packed, tuning.double)
    # The head's copy of a trained tied matrix (or token rows) has a gradient but neither moments nor a master.
    parameter_bytes += GRADIENT_BYTES * tuning.trainable[both_ends].count if both_ends is not None else 0
    if tuning.adapter is not None:  # in fp32
        parameter_bytes += 4 * sum(spec.count for spec in tuning.constants.values() if spec.layer == layer)
    boundary = math.prod(chain.boundary(layer, 1, sequence_length))
    pairs = [(tuning.moments.get(spec.name, TWO), spec) for spec in tuning.specs(layer, layer + 1)]
    stepping = _STEPPING_BYTES * max((spec.count for moments, spec in pairs if moments in (FACTORED, ONE)), default=0)
    return LayerCost(
        kind=kind,
        parameters=count + copy + adapters,
        trainable_parameters=sum(spec.count for spec in trained),
        parameter_bytes=parameter_bytes,
        activation_bytes_per_token=activation_bytes[kind],
        # Backward holds the gradients of one layer's activations; the head those of its logits, and the loss's fp32 pieces
        # (``loss.piece_size``).
        workspace_bytes_per_token=(
            (2.0 + bool(tuning.tokens)) * chain.logits * DTYPE_BYTES[dtype]
            if head and chain.logits is not None
            else activation_bytes[kind]
        ),
        boundary_bytes_per_token=0 if head else math.ceil(boundary / sequence_length) * DTYPE_BYTES[dtype],
        workspace_bytes=max(max(unpacked, _dora_elements(chain, tuning, layer)) * DTYPE_BYTES[dtype], stepping),
        matrix_bytes=matrix * DTYPE_BYTES[dtype],
        moments_saving_bytes=sum(saved_bytes(moments, spec.shape) for moments, spec in pairs),
        logits_bytes_per_token=float(chain.logits * DTYPE_BYTES[dtype]) if head and chain.logits is not None else 0.0,
    )


def _dora_elements(chain: LayerChain, tuning: Tuning, layer: int) -> int:
    """Return the number of elements in DoRA's temporary matrices: the weight, B A, and their sum."""
    if tuning.adapter is None or not tuning.adapter.dora:
        return 0
    names = tuning.modules_in(layer, layer + 1)
    model = language(chain).model
    return 3 * max((model.get_submodule(name).weight.numel() for name in names), default=0)


def _nf4_elements(chain: TransformersChain, tuning: Tuning, layer: int) -> tuple[int, int, int]:
    """Count a block's elements: (in NF4, in its largest matrix, unpacked at a time: one matrix, or all fused experts)."""
    matrices, experts, sums = [], 0, 0
    for root in chain.module_names(layer):
        block = chain.model.get_submodule(root)
        matrices += [module.weight.numel() for module in block.modules() if type(module) is nn.Linear]
        for holder, _, name, parameter in fused_experts(block):
            experts += parameter.numel()
            sums += parameter.numel() if f"{root}.{holder}.{name}" in tuning.parameters else 0
    largest = max(matrices, default=0)
    return sum(matrices) + experts, largest, max(largest, experts + sums)


def shareable_heads(chain: LayerChain, tuning: Tuning) -> int | None:
    """Return how many key/value heads a tensor-parallel group can share; None if any such group is unsupported."""
    if not isinstance(chain, TransformersChain):
        return None
    heads = key_value_heads(chain)
    return heads if refusal(chain, tuning, (1,) * heads, _finest_experts(chain, heads)) is None else None


def _finest_experts(chain: TransformersChain, heads: int) -> tuple[int, ...] | None:
    """Return the number of experts of each rank in a group of ``heads`` ranks; None if the model has no experts."""
    experts = experts_to_share(chain)
    return tuple((experts + member) // heads for member in range(heads)) if experts is not None else None


def with_divisions(cost: ModelCost, chain: LayerChain, tuning: Tuning) -> ModelCost:
    """Add to the cost the number of shareable heads and the sharded part of each layer."""
    heads = shareable_heads(chain, tuning)
    if heads is None:
        return cost
    model = language(chain)
    cut = divisions(model, tuning, (1,) * heads, range(model.layer_count), _finest_experts(model, heads))
    names = {name for name, division in cut.items() if division.cut}
    experts = experts_to_share(model) if needs_heads(model, tuning) is None else None
    layers = (_sharded(layer, index, cost.dtype, model, tuning, names) for index, layer in enumerate(cost.layers))
    return replace(cost, layers=tuple(layers), heads=heads, experts=experts)


def _sharded(
    cost: LayerCost, index: int, dtype: str, chain: TransformersChain, tuning: Tuning, names: set[str]
) -> LayerCost:
    """Add to a layer's cost its sharded part. ``names`` holds the names of sharded tensors."""
    counts_of_layer = {
        spec.name: spec.count for spec in (*chain.specs(index, index + 1), *chain.constant_specs(index, index + 1))
    }
    trained = {spec.name: spec.count for spec in tuning.specs(index, index + 1)}
    counts = {name: count for name, count in {**counts_of_layer, **trained}.items() if name in names}
    experts = {name for name in counts if is_of_experts(chain, name)}
    parameters = sum(counts.values())
    head = index == chain.layer_count - 1
    if head and chain.tied is not None:
        parameters += chain.parameters[chain.tied[1]].count
    activation_bytes = cost.activation_bytes_per_token
    activations = min(activation_bytes, _sharded_activations(chain, index) * DTYPE_BYTES[dtype])
    return replace(
        cost,
        divided_parameters=parameters,
        divided_trainable=sum(count for name, count in trained.items() if name in names),
        expert_parameters=sum(counts[name] for name in experts),
        expert_trainable=sum(count for name, count in trained.items() if name in experts),
        divided_activations=activations / activation_bytes if activation_bytes else 0.0,
        # The head's workspace is that of its logits; a block's equals its activations.
        divided_workspace=1.0 if head else activations / activation_bytes if activation_bytes else 0.0,
        divided_scale_bytes=_scale_bytes(chain, index, names) if tuning.nf4 and tuning.double else 0,
        group_sums=1 if head or index == 0 else _sharded_modules(chain, index),
    )


def _sharded_modules(chain: TransformersChain, index: int) -> int:
    """Return the number of sharded modules in a block."""
    (name,) = chain.module_names(index)
    return sum(hasattr(chain.model.get_submodule(name), container) for container in containers(chain))


def _scale_bytes(chain: TransformersChain, index: int, names: set[str]) -> int:
    """Return the additional bytes that a layer's sharded NF4 weights take because they lack double quantization."""
    if not 0 < index < chain.layer_count - 1:
        return 0
    (block,) = chain.module_names(index)
    weights = packed_weights(chain.model.get_submodule(block)).items()
    cut = [weight.numel() for name, weight in weights if f"{block}.{name}" in names]
    return sum(packed_bytes(count, False) - packed_bytes(count, True) for count in cut)


def _sharded_activations(chain: TransformersChain, index: int) -> int:
    """Return a lower bound of a layer's sharded activations, in elements per token.

    For a block these are the outputs of column-parallel matrices and the inputs of row-parallel matrices; for the head, the logits.
    """
    if index == 0:
        return 0
    if index == chain.layer_count - 1:
        return int(chain.model.get_output_embeddings().out_features)
    cuts, elements = styles(chain), 0
    for root in chain.module_names(index):
        for name, module in chain.model.get_submodule(root).named_modules():
            if isinstance(module, nn.Linear):
                elements += {"colwise": module.out_features, "rowwise": module.in_features}.get(cuts.get(name, ""), 0)
    return elements


def packed_bytes(parameters: int, double: bool) -> int:
    """Return the size in bytes of ``parameters`` weights in NF4, including scales."""
    blocks = -(-parameters // BLOCK_SIZE)
    scales = blocks + 4 * -(-blocks // SCALE_BLOCK_SIZE) if double else 4 * blocks
    return -(-parameters // 2) + scales
