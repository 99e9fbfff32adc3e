"""``generation_config.json``: how transformers' ``generate()`` writes text with a model, and the tokens at which it stops."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.model.files.model_files import GENERATION, read_json
from hetero_mpi.util.errors import UserError

_NUMBER = (int, float), "a number"
_COUNT = (int,), "a whole number"
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "top_k": _COUNT,
    "max_length": _COUNT,
    "max_new_tokens": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "num_beams": _COUNT,
    "bos_token_id": _COUNT,
    "pad_token_id": _COUNT,
    "do_sample": ((bool,), "true or false"),
}


def read_generation(directory: Path | None) -> dict[str, Any] | None:
    """Keys of a model directory's ``generation_config.json``; None without one. Raises UserError: unreadable or invalid."""
    path = directory / GENERATION if directory is not None else None
    if path is None or not path.exists():
        return None
    keys = read_json(path, "")
    for key, (types, rule) in _TYPES.items():
        value = keys.get(key)
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise UserError(
                "generation.value", f"{path}: {key} = {value!r} must be {rule}; correct it, or remove the file"
            )
    end_tokens(keys, path)
    return keys


def end_tokens(keys: Mapping[str, Any], path: Path | str) -> list[int]:
    """Tokens of ``eos_token_id``: one, several or none. ``path``: file of the keys, for messages. Raises UserError: invalid."""
    value = keys.get("eos_token_id")
    tokens: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise UserError(
            "generation.value",
            f"{path}: eos_token_id = {value!r} must be the number of a token, or a list of them; correct it",
        )
    return list(tokens)


def model_stops(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> list[int]:
    """End tokens of ``generation_config.json``, else of ``config.json``. Raises UserError: invalid tokens."""
    if generation is not None and "eos_token_id" in generation:
        return end_tokens(generation, GENERATION)
    return end_tokens(config, "config.json")


def with_end(ends: Sequence[int], end: int | None) -> int | list[int] | None:
    """``eos_token_id`` with one more token."""
    both = list(dict.fromkeys([*ends, *([] if end is None else [end])]))
    return both[0] if len(both) == 1 else both or None
