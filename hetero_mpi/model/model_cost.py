"""What a model costs, as planning's plain numbers: from shapes alone, plus the activation bytes measured on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from hetero_mpi.model.divided_cost import with_divisions
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.quantize import fused_experts, packed_bytes
from hetero_mpi.model.transformers.chain import TransformersChain, language
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.cost import EIGHT_BIT_SAVING, GRADIENT_BYTES, LayerCost, ModelCost

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAM_BYTES = 8
"""Two fp32 moments."""


def model_cost(
    chain: LayerChain, tuning: Tuning, dtype: str, sequence_length: int, activation_bytes: Mapping[str, float]
) -> ModelCost:
    """The cost of every layer of the chain. ``activation_bytes``: kind -> bytes kept from forward to backward, per token."""
    tied = chain.parameters[chain.tied[1]].count if chain.tied is not None else 0
    layers = tuple(
        _layer_cost(chain, tuning, layer, dtype, sequence_length, tied, activation_bytes)
        for layer in range(chain.layer_count)
    )
    master_bytes = 4 if dtype != "fp32" else 0
    cost = ModelCost(
        model_type=chain.name,
        dtype=dtype,
        sequence_length=sequence_length,
        tied=chain.tied is not None and tuning.full,
        state_bytes_per_trainable_parameter=GRADIENT_BYTES + ADAM_BYTES + master_bytes,
        layers=layers,
        tied_bytes=tied * GRADIENT_BYTES if tuning.full else 0,
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
    trained = sum(spec.count for spec in chain.specs(layer, layer + 1))
    held = trained + sum(spec.count for spec in chain.constant_specs(layer, layer + 1))
    copy = tied if head else 0
    adapters = 0 if tuning.full else sum(spec.count for spec in tuning.specs(layer, layer + 1))
    packed, unpacked = (
        _packed(language(chain), tuning, layer) if tuning.nf4 and 0 < layer < chain.layer_count - 1 else (0, 0)
    )
    parameter_bytes = (held - packed + copy + adapters) * BYTES[dtype] + packed_bytes(packed, tuning.double)
    # The head's copy of a trained tied matrix has a gradient but neither moments nor a master of its own.
    parameter_bytes += copy * GRADIENT_BYTES if tuning.full else 0
    boundary = math.prod(chain.boundary(layer, 1, sequence_length))
    return LayerCost(
        kind=kind,
        parameters=held + copy + adapters,
        trainable_parameters=trained if tuning.full else adapters,
        parameter_bytes=parameter_bytes,
        activation_bytes_per_token=activation_bytes[kind],
        # Backward holds the gradients of one layer's activations; the head those of its logits, and
        # what the loss computes in fp32, a piece at a time (``loss.piece_size``).
        workspace_bytes_per_token=(
            2.0 * chain.logits * BYTES[dtype] if head and chain.logits is not None else activation_bytes[kind]
        ),
        boundary_bytes_per_token=0 if head else math.ceil(boundary / sequence_length) * BYTES[dtype],
        workspace_bytes=max(unpacked, _composed(chain, tuning, layer)) * BYTES[dtype],
        eight_bit_saving_bytes=EIGHT_BIT_SAVING
        * sum(spec.count for spec in tuning.specs(layer, layer + 1) if spec.name in tuning.eight_bit),
    )


def _composed(chain: LayerChain, tuning: Tuning, layer: int) -> int:
    """Numbers of what DoRA makes of a matrix to compute with it: the weight, B A, and their sum."""
    if tuning.adapter is None or not tuning.adapter.dora:
        return 0
    names = tuning.modules_in(layer, layer + 1)
    model = language(chain).model
    return 3 * max((model.get_submodule(name).weight.numel() for name in names), default=0)


def _packed(chain: TransformersChain, tuning: Tuning, layer: int) -> tuple[int, int]:
    """(weights that NF4 packs, weights that are unpacked at once to compute) of a block: a matrix, or all fused experts and their
    sums with adapters, which are as large."""
    matrices, experts, sums = [], 0, 0
    for root in chain.module_names(layer):
        block = chain.model.get_submodule(root)
        matrices += [module.weight.numel() for module in block.modules() if type(module) is nn.Linear]
        for holder, _, name, parameter in fused_experts(block):
            experts += parameter.numel()
            sums += parameter.numel() if f"{root}.{holder}.{name}" in tuning.parameters else 0
    return sum(matrices) + experts, max([*matrices, experts + sums], default=0)
