"""``generation_config.json``: the settings that transformers' ``generate()`` uses with a model, including its end tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.model.files.model_files import GENERATION, read_json
from hetero_mpi.util.errors import UserError

_NUMBER = (int, float), "a number"
_COUNT = (int,), "a whole number"
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "num_beams", "bos_token_id", "pad_token_id"), _COUNT),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), _COUNT),
    "do_sample": ((bool,), "true or false"),
}


def read_generation(directory: Path | None) -> dict[str, Any] | None:
    """Read a model directory's ``generation_config.json``; return None if it is absent. Raises UserError if invalid."""
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
    """Return the tokens in ``eos_token_id``, if any. ``path`` names the file in errors. Raises UserError if they are invalid."""
    value = keys.get("eos_token_id")
    tokens: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise UserError(
            "generation.value",
            f"{path}: eos_token_id = {value!r} must be a token id, or a list of token ids; correct it",
        )
    return list(tokens)


def model_stops(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> list[int]:
    """Return the end tokens in ``generation_config.json``, else those in ``config.json``. Raises UserError if invalid."""
    if generation is not None and "eos_token_id" in generation:
        return end_tokens(generation, GENERATION)
    return end_tokens(config, "config.json")


def with_end(ends: Sequence[int], end: int | None) -> int | list[int] | None:
    """Return a value of ``eos_token_id`` that adds ``end``, if not None, to ``ends``."""
    both = list(dict.fromkeys([*ends, *([] if end is None else [end])]))
    return both[0] if len(both) == 1 else both or None
