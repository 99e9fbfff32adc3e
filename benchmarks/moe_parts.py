"""Two published mixtures of experts and the time that a card's data sheet gives a block of theirs, for ``make_profiles`` and
``moe_machines``.

Shapes are those of the models' own ``config.json``; bytes are the program's (``model/model_cost.py``). The time of a block is

* its operations / (the sheet's dense peak * ``Card.peak_share``), of experts only those that a token uses, and
* the bytes of all experts that pass the card's memory / (the sheet's speed * ``MEMORY_EFFICIENCY``): experts in 4 bits are read,
  written in the compute dtype and read again by the product, in forward, in its repeat, and in backward; adapters on experts
  also write and read a copy with the adapter added, and a gradient of every expert.

``moe_machines.py`` prints this beside what others measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from profile_parts import BYTES, EMBEDDING_SHARE, LORA_LAUNCH_S, NF4_BYTES, SIZES, Card

from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import Curve, LayerTimes
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD

MEMORY_EFFICIENCY = 0.7
"""Assumed."""
SOURCE = "derived from data sheets and from the shape that the model's own config.json gives"
STATED = (
    "Job: LoRA of rank 8 on attention over NF4, Qwen3-30B-A3B, sequences of 512.",
    "Times: operations / (60 % of the data-sheet dense peak, 95 % of GeForce cards'), and bytes of experts that pass the memory / "
    "(its data-sheet speed * 0.7), at least 1.65 ms per layer and pass. Every micro-batch unpacks all experts of a layer, and "
    "again in backward.",
)
SEQUENCE = 512
RANK = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@dataclass(frozen=True)
class Mixture:
    """A model all of whose blocks have experts."""

    family: str
    hidden: int
    blocks: int
    heads: int
    key_heads: int
    head_size: int
    experts: int
    chosen: int
    width: int
    vocabulary: int
    keys: Mapping[str, Any]
    """What else its configuration says."""

    @property
    def expert_weights(self) -> int:
        """Of all experts of a block."""
        return 3 * self.experts * self.hidden * self.width

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * self.head_size * (self.heads + self.key_heads)

    @property
    def inside_experts(self) -> int:
        """Numbers that a token makes in the experts it uses."""
        return self.chosen * (2 * self.hidden + 4 * self.width)

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_size,
            "num_experts_per_tok": self.chosen,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            **self.keys,
        }


QWEN3_30B = Mixture(
    "qwen3_moe", 2048, 48, 32, 4, 128, 128, 8, 768, 151936, {"num_experts": 128, "moe_intermediate_size": 768}
)
GPT_OSS_20B = Mixture(
    "gpt_oss", 2880, 24, 64, 8, 64, 32, 4, 2880, 201088, {"num_local_experts": 32, "intermediate_size": 2880}
)
QWEN3_235B = Mixture(
    "qwen3_moe", 4096, 94, 64, 4, 128, 128, 8, 1536, 151936, {"num_experts": 128, "moe_intermediate_size": 1536}
)
MODELS = {"Qwen3-30B-A3B": QWEN3_30B, "gpt-oss-20b": GPT_OSS_20B}


@dataclass(frozen=True)
class Way:
    """How it is fine-tuned: LoRA of rank ``RANK`` on attention, and on the experts or not."""

    nf4: bool
    adapted_experts: bool
    dtype: str = "bf16"


def cost_of(model: Mixture, way: Way, sequence: int = SEQUENCE) -> ModelCost:
    """By the program's own calculation; what a block keeps for backward, and needs while it runs, by formula."""
    from transformers import AutoConfig

    from hetero_mpi.job.training_tables import AdapterTable
    from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
    from hetero_mpi.model.model_cost import model_cost
    from hetero_mpi.model.transformers.chain import TransformersChain

    chain = TransformersChain(AutoConfig.for_model(model.family, **model.config()))
    parameters = EXPERTS if way.adapted_experts else []
    table = AdapterTable(method="lora", rank=RANK, alpha=2 * RANK, targets=ATTENTION, parameters=parameters)
    size, wide = BYTES[way.dtype], 2 * model.head_size * (model.heads + model.key_heads)
    # Packed experts are computed again in backward: what is inside them is not kept.
    kept = size * (8 * model.hidden + wide + (0 if way.nf4 else model.inside_experts))
    found = {kind: float(kept) for kind in chain.kinds} | {EMBEDDING: 0.0, HEAD: 2.0 * size * model.hidden}
    return model_cost(chain, adapter_tuning(chain, table, way.nf4, way.nf4), way.dtype, sequence, found)


def times_of(
    card: Card,
    model: Mixture,
    way: Way,
    kinds: Collection[str],
    heads: float = 1.0,
    experts: float = 1.0,
    rest: float = 1.0,
    sequence: int = SEQUENCE,
) -> dict[str, LayerTimes]:
    """Times of every kind of layer on a card.

    Args:
        kinds: of blocks and both ends; all blocks take the same time.
        heads: a member of a group has this share of the heads, and of words.
        experts: and this share of the experts.
        rest: the rate of all but experts, as a share of the card's.
    """
    size, tokens = BYTES[way.dtype], tuple(n * sequence for n in SIZES)
    per_s, bytes_per_s = card.peak * card.peak_share, card.memory_bytes_per_s * MEMORY_EFFICIENCY
    attention = heads / rest * (2.0 * model.attention_weights + 2.0 * sequence * model.head_size * model.heads)
    used = experts * 2.0 * model.expert_weights * model.chosen / model.experts
    held = experts * model.expert_weights
    read_bytes = held * size
    more_bytes = held * ((NF4_BYTES + size) * way.nf4 + 3 * size * way.adapted_experts)
    # Backward reads the experts once more, repeats forward where they are packed, and makes gradients of adapted ones.
    repeats = int(way.nf4)
    made_bytes = 3 * held * size * way.adapted_experts

    def curve(operations: float, of_experts: float, times_read: int, moved: float) -> Curve:
        """``of_experts``: operations, whose rate on a processor was measured with the reading of the weights."""

        def experts_s(count: int) -> float:
            parts = of_experts * count / per_s, times_read * read_bytes / bytes_per_s
            return max(parts) if card.backend == "cpu" else sum(parts)

        seconds = (max(LORA_LAUNCH_S, operations * t / per_s + experts_s(t) + moved / bytes_per_s) for t in tokens)
        return Curve(tokens, tuple(round(one, 8) for one in seconds))

    block = LayerTimes(
        curve(attention, used, 1, more_bytes),
        curve(
            attention,
            used * (1 + repeats + way.adapted_experts),
            1 + repeats,
            repeats * more_bytes + made_bytes,
        ),
    )
    ends = heads / rest * 2.0 * model.hidden * model.vocabulary
    head = LayerTimes(curve(ends, 0.0, 0, 0.0), curve(ends, 0.0, 0, 0.0))
    small = EMBEDDING_SHARE * ends
    embedding = LayerTimes(curve(small, 0.0, 0, 0.0), curve(small, 0.0, 0, 0.0))
    return {**dict.fromkeys(sorted(kinds), block), EMBEDDING: embedding, HEAD: head}
