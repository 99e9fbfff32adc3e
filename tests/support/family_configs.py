"""A sound tiny configuration for every causal-LM family of transformers that declares ``base_model_pp_plan``.

One general rule (``SIZES``, used where the family has such a key; every kind of block appears), and a short table of
exceptions where that is not enough.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

BLOCKS = 4
VOCABULARY = 320
SLIDING_WINDOW = 8
"""Shorter than the sequences, so that masks matter."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 32,
    "sliding_window": SLIDING_WINDOW,
    "sliding_window_size": SLIDING_WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "initializer_range": 0.2,  # large enough that every gradient is far from rounding noise
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    # factors that are 1, and switches that are off, by default: a rank that applied one twice would not be noticed
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "mup_enabled": True,
    # mixtures of experts
    "is_moe": True,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 64,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # multi-head latent attention, indexed attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # linear attention
    "block_size": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LISTS = ("layer_types", "mlp_layer_types")
"""Per-block kinds: every kind of the family's defaults appears, in turns."""

_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
"""Latent attention: every head has its own keys, and ``head_dim`` is that of the rotary part."""
_WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "head_dim": 12}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT,
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * BLOCKS,
        "rope_parameters": {"full_attention": _DEFAULT_ROPE},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "doge": {"num_experts": 16, "keep_window_size": 8},  # as many as a square has fields
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {"01": _WIDE, "03": _WIDE}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "top_k_experts": 2, "enable_moe_block": True},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 4},
    "kimi_linear": _LATENT,
    "longcat_flash": {**_LATENT, "num_layers": BLOCKS, "zero_expert_num": 2},
    "minicpm3": _LATENT,
    "sarvam_mla": _LATENT,
    "youtu": _LATENT,
}
"""model_type -> keys that the general rule does not get right."""


def families() -> list[str]:
    """Every causal-LM ``model_type`` whose own configuration has a pipeline plan, sorted."""
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return [name for name in names if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)]


def tiny_keys(family: str) -> dict[str, Any]:
    """The keys of a ``config.json`` for ``family``, without dropout."""
    defaults = CONFIG_MAPPING[family]()
    known = defaults.to_dict()
    keys = {name: value for name, value in SIZES.items() if name in known or name in type(defaults).attribute_map}
    keys |= dict.fromkeys(dropout_rates(family), 0.0)
    for name in LISTS:
        kinds = list(dict.fromkeys(known.get(name) or []))
        if kinds == ["full_attention"] and "sliding_window" in known:
            kinds = ["sliding_attention", "full_attention"]
        if kinds:
            keys[name] = [kinds[index % len(kinds)] for index in range(BLOCKS)]
    return {"model_type": family, **keys, **EXCEPTIONS.get(family, {})}


def dropout_rates(family: str) -> dict[str, float]:
    """Every key that makes ``family`` draw random numbers in training -> 0.1."""
    known = CONFIG_MAPPING[family]().to_dict()
    return {
        name: 0.1
        for name, value in known.items()
        if ("dropout" in name or "_pdrop" in name or "jitter" in name)
        and "classifier" not in name
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
