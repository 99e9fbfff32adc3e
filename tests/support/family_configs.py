"""A sound tiny configuration for every causal-LM family of transformers that declares ``base_model_pp_plan``.

One general rule (``SIZES``, used where the family has such a key; every kind of block appears), and a short table of
exceptions where that is not enough.
"""

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

BLOCKS = 4
VOCABULARY = 320
SLIDING_WINDOW = 8
"""Shorter than the sequences, so that masks matter."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": BLOCKS,
    "initializer_range": 0.2,  # large enough that every gradient is far from rounding noise
    **dict.fromkeys(("hidden_size", "original_max_position_embeddings"), 32),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_attention_heads", "linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "max_window_layers"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), SLIDING_WINDOW),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "use_sliding_window": True,
    # factors that are 1, and switches that are off, by default: a rank that applied one twice would not be noticed
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "mup_enabled": True,
    # mixtures of experts
    "is_moe": True,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 16),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    # multi-head latent attention, indexed attention, linear attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "index_block_size"), 4),
    "qk_head_dim": 12,
    **dict.fromkeys(("index_n_heads", "index_topk_blocks", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "index_topk", "block_size"), 8),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
}
LISTS = ("layer_types", "mlp_layer_types")
"""Per-block kinds: every kind of the family's defaults appears, in turns."""

_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
"""Latent attention: every head has its own keys, and ``head_dim`` is that of the rotary part."""
_WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "head_dim": 12}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    **{family: {"rotary_dim": 4} for family in ("codegen", "gptj")},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * BLOCKS,
        "rope_parameters": {"full_attention": _DEFAULT_ROPE},
    },
    "doge": {"num_experts": 16, "keep_window_size": 8},  # as many as a square has fields
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {"01": _WIDE, "03": _WIDE}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "top_k_experts": 2, "enable_moe_block": True},
    "longcat_flash": {**_LATENT, "num_layers": BLOCKS, "zero_expert_num": 2},
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
