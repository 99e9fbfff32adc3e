"""Fields of the OpenAI, vLLM and llama.cpp APIs that have no effect here, and neutral values of unsupported fields.

An unsupported field could change the answer. It is therefore rejected unless it is listed here or has a neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.util import toml

_METADATA_FIELDS = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "prediction include_obfuscation cache_control request_id priority cache_salt cache_prompt id_slot "
    "n_keep n_discard n_cache_reuse"
)
"""Fields that describe a request's origin, or where and when it is processed."""
_DEPENDENT_FIELDS = (
    "guided_decoding_backend guided_whitespace_pattern length_penalty spaces_between_special_tokens "
    "return_tokens_as_token_ids post_sampling_probs repeat_last_n penalize_nl mirostat_tau mirostat_eta dynatemp_exponent "
    "xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers min_keep adaptive_decay "
    "parse_tool_calls preserved_tokens grammar_lazy grammar_triggers chat_format speculative.n_max speculative.n_min "
    "speculative.p_min max_repetition_pattern_size min_repetition_pattern_size"
)
"""Settings of methods that have to be selected with another field, which is unsupported."""
_IGNORED_FIELDS = frozenset([*_METADATA_FIELDS.split(), *_DEPENDENT_FIELDS.split()])
_NEUTRAL_VALUES = toml.loads(Path(__file__).with_name("neutral_values.toml").read_text(encoding="utf-8"))
"""Maps an unsupported field to the values that are accepted in addition to null."""
_EMPTY_VALUES: tuple[Any, ...] = (False, "", [], {})
"""Values of unknown fields that are accepted in addition to null."""
_MAX_LISTED = 5


def refused_fields(values: Mapping[str, Any], honoured: frozenset[str], chat: bool) -> str:
    """List the unsupported fields of a request body as text, or "" if all fields are supported."""
    defaults = {"add_special_tokens": (not chat,)}
    refused = [
        name
        for name, value in values.items()
        if name not in honoured
        and name not in _IGNORED_FIELDS
        and value is not None
        and not any(_same(value, neutral) for neutral in defaults.get(name, _NEUTRAL_VALUES.get(name, _EMPTY_VALUES)))
    ]
    texts = [f"{name[:60]} = {json.dumps(values[name])[:60]}" for name in refused[:_MAX_LISTED]]
    return ", ".join([*texts, *([f"and {len(refused) - _MAX_LISTED} more"] if len(refused) > _MAX_LISTED else [])])


def _same(value: Any, neutral: Any) -> bool:
    """Compare two JSON values like ``==``, but distinguish 0 from false and 1 from true."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
