"""Fields of requests that the servers of OpenAI, vLLM and llama.cpp know: those that change nothing here, and the values of others
that ask for nothing.

A field may change the answer, so one that is not honoured is refused, unless it is listed here as changing nothing, or its value
asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_WHOSE = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "prediction include_obfuscation cache_control request_id priority cache_salt cache_prompt id_slot "
    "n_keep n_discard n_cache_reuse"
)
"""Fields that say whose a request is, and where and when it is computed."""
_OF_REFUSED = (
    "guided_decoding_backend guided_whitespace_pattern length_penalty spaces_between_special_tokens "
    "return_tokens_as_token_ids post_sampling_probs repeat_last_n penalize_nl mirostat_tau mirostat_eta dynatemp_exponent "
    "xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers min_keep adaptive_decay "
    "parse_tool_calls preserved_tokens grammar_lazy grammar_triggers chat_format speculative.n_max speculative.n_min "
    "speculative.p_min max_repetition_pattern_size min_repetition_pattern_size"
)
"""Settings of methods that are refused by a field of their own."""
_CHANGE_NOTHING = frozenset([*_WHOSE.split(), *_OF_REFUSED.split()])
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({}, []),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # vLLM
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_min_count": (0,),
    # llama.cpp
    "n_predict": (-1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "n_cmpl": (1,),
    "t_max_predict_ms": (0, -1),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "samplers": (),
    "grammar": ("",),
    "json_schema": (),
    "lora": ([],),
    "response_fields": ([],),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "reasoning_format": ("none",),
    "reasoning_in_content": (False,),
    "reasoning_budget": (-1,),
    "thinking_forced_open": (False,),
}
"""Field -> the values that are accepted all the same, beside null."""
_EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values that are accepted of a field that nobody knows, beside null."""
_TOLD = 5


def refused_fields(values: Mapping[str, Any], honoured: frozenset[str], chat: bool) -> str:
    """The fields of a request's body that are asked for and not honoured, in words; empty: none."""
    own = {"add_special_tokens": (not chat,)}
    found = [
        name
        for name, value in values.items()
        if name not in honoured
        and name not in _CHANGE_NOTHING
        and value is not None
        and not any(_same(value, one) for one in own.get(name, _ASKS_FOR_NOTHING.get(name, _EMPTY)))
    ]
    told = [f"{name[:60]} = {json.dumps(values[name])[:60]}" for name in found[:_TOLD]]
    return ", ".join([*told, *([f"and {len(found) - _TOLD} more"] if len(found) > _TOLD else [])])


def _same(value: Any, other: Any) -> bool:
    """Equal, and of one kind: to JSON 0 is not false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
