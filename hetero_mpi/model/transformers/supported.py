"""Families that give the same results when split over ranks, and why others are rejected: the content of docs/models.md.

``tests/family_trial.py`` compares every causal-LM family of transformers that declares a pipeline plan with the unsplit model,
forward and backward. ``tests/model/test_all_families.py`` checks that the lists match. Only such a trial may add a family.
"""

DIVIDED_FAMILIES = (
    *("afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "beam", "cohere", "cohere2", "cohere2_moe"),
    *("cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone"),
    *("exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "glm"),
    *("glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "helium", "hy_v3"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "lara_mini", "llama", "mellum"),
    *("minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2"),
    *("olmo3", "olmo_hybrid", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("qwen3_next", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"),
    *("youtu",),
)
"""Families whose layers all support tensor parallelism, tested by ``tests/model/test_group.py``."""

_INDEXED = "has an indexer, which reads all heads"
_ONE_NAME = "uses one module name for linear and full attention"

UNDIVIDED_FAMILIES = {
    "axk1": "has a norm inside its MLPs, before the point where a group would sum",
    "axk2": _INDEXED,
    "bailing_hybrid": _ONE_NAME,
    "codegen": "stores queries, keys and values in one matrix, split into four parts",
    "deepseek_v32": _INDEXED,
    "doge": "computes masks from the values of all heads",
    "dots3_note_text": _INDEXED,
    "gemma4_text": "has experts directly in its blocks, next to MLPs",
    "inkling_text": "mixes keys and values of neighbouring tokens (short convolutions)",
    "kimi_linear": _ONE_NAME,
    "longcat_flash": "has two attention layers and two MLPs in each block",
    "mimo_v2_flash": "has different numbers of key/value heads in some blocks",
    "minimax": _ONE_NAME,
    "phi3": "stores queries, keys and values one after the other in one matrix",
}
"""Maps supported families without tensor parallelism to the reason, phrased to follow the family's name."""

PROVEN_FAMILIES = tuple(sorted((*DIVIDED_FAMILIES, *UNDIVIDED_FAMILIES)))
"""Values of ``model_type`` that are supported."""

MASKED_FAMILIES = ("afmoe", "gpt_oss")
"""Supported families that use positions only for embeddings, so that packed records need ready-made attention masks."""

ROUTER_LOSS_FAMILIES = (
    *("ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "laguna", "lara_mini", "mellum", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
"""Families whose router loss is transformers' ``load_balancing_loss_func``."""

_STATE = "carries a state from token to token (linear attention)"
_INDEXER = "selects the attended tokens with an indexer, which reads all records of a sequence"

LEAKING_FAMILIES = {
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text"), _INDEXER),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "lara_mini", "minimax", "olmo_hybrid"), _STATE),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _STATE),
    "doge": "makes its own mask from the values of all tokens of a sequence",
    "inkling_text": "mixes keys and values of neighbouring tokens (short convolutions)",
}
"""Maps supported families whose packed records affect each other to the reason, phrased to follow the family's name."""

PADDING_FAMILIES = ("axk2", "deepseek_v32", "doge", "dots3_note_text")
"""Supported families that select attended tokens among all tokens, so that padding changes results, as it does in transformers."""

_COMPOSITE = "is multimodal; only its text part, {}, is a chain of blocks"
_NO_TEXT_PART = "is multimodal, and its text part, {}, is not supported either"
_STREAMS = "keeps several residual streams (hyper-connections), collapsed by parameters outside its pipeline plan"

REFUSED_FAMILIES = {
    "deepseek_v4": f"{_STREAMS}, and routes by token ids, which later stages do not have",
    "dots3_note": _COMPOSITE.format("dots3_note_text"),
    "gemma3": _COMPOSITE.format("gemma3_text"),
    "gemma3n": _NO_TEXT_PART.format("gemma3n_text"),
    "gemma3n_text": "feeds per-layer embeddings of the token ids and several residual streams into every block",
    "gemma4": _COMPOSITE.format("gemma4_text"),
    "gemma4_unified": _COMPOSITE.format("gemma4_unified_text"),
    "glm_moe_dsa": "passes positions selected by its indexer from block to block, in addition to hidden states",
    "hrm_text": "runs its blocks in cycles, and its pipeline plan lists modules that it does not have",
    "hy_v4": f"{_STREAMS}, and passes selected positions from block to block",
    "phi4_multimodal": "has vision and audio encoders inside its text model",
    "qwen3_5": _COMPOSITE.format("qwen3_5_text"),
    "qwen3_5_moe": _COMPOSITE.format("qwen3_5_moe_text"),
}
"""Maps each rejected ``model_type`` to the reason, phrased to follow the family's name."""
