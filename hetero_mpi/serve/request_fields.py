"""Fields of the OpenAI, vLLM and llama.cpp APIs that have no effect here, and neutral values of unsupported fields.

An unsupported field could change the answer. It is therefore rejected unless it is listed here or has a neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.util import toml

_FIELDS = toml.loads(Path(__file__).with_name("request_fields.toml").read_text(encoding="utf-8"))
_IGNORED_FIELDS = frozenset([*_FIELDS["metadata"], *_FIELDS["dependent"]])
_NEUTRAL_VALUES = _FIELDS["neutral"]
"""Maps an unsupported field to the values that are accepted in addition to null."""
_EMPTY_VALUES: tuple[Any, ...] = (False, "", [], {})
"""Values of unknown fields that are accepted in addition to null."""
_MAX_LISTED = 5


def refused_fields(values: Mapping[str, Any], honoured: frozenset[str], chat: bool) -> str:
    """List the unsupported fields of a request body as text, or "" if all fields are supported."""
    defaults = _NEUTRAL_VALUES | {"add_special_tokens": (not chat,)}
    refused = [
        name
        for name, value in values.items()
        if name not in honoured | _IGNORED_FIELDS
        and not (value is None or any(_same(value, neutral) for neutral in defaults.get(name, _EMPTY_VALUES)))
    ]
    texts = [f"{name[:60]} = {json.dumps(values[name])[:60]}" for name in refused[:_MAX_LISTED]]
    return ", ".join([*texts, *([f"and {len(refused) - _MAX_LISTED} more"] if len(refused) > _MAX_LISTED else [])])


def _same(value: Any, neutral: Any) -> bool:
    """Compare two JSON values like ``==``, but distinguish 0 from false and 1 from true."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
