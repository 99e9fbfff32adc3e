"""What a model costs, as planning's plain numbers: from shapes alone, plus the activation bytes measured on a device."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_mpi.model.chain import Chain
from hetero_mpi.planning.cost import LayerCost, ModelCost

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GRADIENT_BYTES = 4
"""Gradients are added up in fp32, whatever the compute dtype."""
ADAM_BYTES = 8
"""Two fp32 moments."""


def model_cost(chain: Chain, dtype: str, sequence_length: int, activation_bytes: Mapping[str, float]) -> ModelCost:
    """The cost of every item of the chain.

    Args:
        chain: the model.
        dtype: compute dtype.
        sequence_length: tokens per sequence for which ``activation_bytes`` holds.
        activation_bytes: kind -> bytes kept from forward to backward, per token.
    """
    master_bytes = 0 if dtype == "fp32" else 4
    tied = chain.parameters[chain.tied[1]].count if chain.tied is not None else 0
    layers = []
    for item, kind in enumerate(chain.kinds):
        own = sum(spec.count for spec in chain.specs(item, item + 1))
        copy = tied if item == chain.items - 1 else 0
        head = item == chain.items - 1
        layers.append(
            LayerCost(
                kind=kind,
                parameters=own + copy,
                trainable_parameters=own,
                # The head's copy of a tied matrix has a gradient but neither moments nor a master of its own.
                parameter_bytes=(own + copy) * BYTES[dtype] + copy * GRADIENT_BYTES,
                activation_bytes_per_token=activation_bytes[kind],
                # Backward holds the gradients of one item's activations; the head those of its fp32 logits, twice.
                workspace_bytes_per_token=2.0 * chain.config.vocab_size * 4 if head else activation_bytes[kind],
                boundary_bytes_per_token=0 if head else chain.config.hidden_size * BYTES[dtype],
            )
        )
    return ModelCost(
        model_type=chain.config.model_type,
        dtype=dtype,
        sequence_length=sequence_length,
        tied=chain.tied is not None,
        state_bytes_per_trainable_parameter=GRADIENT_BYTES + ADAM_BYTES + master_bytes,
        layers=tuple(layers),
        tied_bytes=tied * GRADIENT_BYTES,
    )
