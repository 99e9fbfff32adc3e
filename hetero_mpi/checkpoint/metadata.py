"""The rules for the metadata of a checkpoint, which are checked before anything uses them, as a file may say anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MOST_BYTES = 64 << 20
"""Largest size of all texts and arrays of the metadata together; a profile with every link between 256 ranks has some 26 MB."""
MOST_VALUES = 1 << 22
"""Largest number of values in a JSON text: in memory each takes up to a hundred times its length."""
REQUIRED = ("step", "updates", "losses", "loss_scale", "job")
"""Keys of every checkpoint: without them nothing can go on from it."""
REQUIRED_OF_SHARDS = ("begun", "rank", "names", "training_state")
"""Further keys of a local shard, which is told by its ``version_id``."""


def check_size(text: bytes) -> None:
    """Refuse a JSON text with more values than any checkpoint has. Raises ValueError."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def check_metadata(found: Mapping[str, Any]) -> None:
    """Check all keys. Raises ValueError with the key, its value and the rule."""
    required = (*REQUIRED, *(REQUIRED_OF_SHARDS if "version_id" in found else ()))
    lacking = [key for key in required if key not in found]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} missing from the metadata")
    _check(found, "", {key: rule for key, rule in _RULES.items() if key in found})
    _check(found["job"], "job.", {"train": _TABLE, "data": _TABLE})
    if "training_state" in found:
        _check(found["training_state"], "training_state.", _TRAINING_STATE)
    step, updates, losses = found["step"], found["updates"], len(found["losses"])
    if updates > step or losses != step:
        raise ValueError(f"step = {step} with {updates} updates and {losses} losses: must have as many losses")


_Rule = tuple[Callable[[Any], bool], str]


def _check(found: Mapping[str, Any], before: str, rules: Mapping[str, _Rule]) -> None:
    for key, (fits, rule) in rules.items():
        if not fits(found.get(key)):
            said = repr(found.get(key))
            raise ValueError(f"{before}{key} = {said if len(said) < 80 else said[:77] + '...'}: must be {rule}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_scale(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _is_number(value[0]) and 0 < value[0] < math.inf and _is_count(value[1])


def _is_array(value: Any, dtype: type[np.generic], dimensions: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == dimensions


_COUNT: _Rule = _is_count, "a whole number, 0 or more"
_TABLE: _Rule = lambda value: isinstance(value, dict), "a table"
_TEXT: _Rule = lambda value: isinstance(value, str), "a text"
_TEXT_OR_NONE: _Rule = lambda value: value is None or isinstance(value, str), "a text, or nothing"
_NUMBER_OR_NONE: _Rule = lambda value: value is None or _is_number(value), "a number, or nothing"
_RULES: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "losses": (
        lambda value: _is_array(value, np.float64, 1),
        "a list of float64 numbers",
    ),  # infinite or NaN: steps skipped
    "loss_scale": (_is_scale, "a positive number and a count"),
    "held_out_loss": (_is_number, "a number"),
    "lowest_loss": _NUMBER_OR_NONE,
    "higher_in_a_row": _COUNT,
    "reference": (lambda value: value is None or _is_array(value, np.float32, 2), "a table of float32 numbers"),
    "job": _TABLE,
    "model_config": _TABLE,
    "generation_config": _TABLE,
    "versions": _TABLE,
    "base_model": _TEXT_OR_NONE,
    "data_fingerprint": _TEXT,
    "run": _TEXT_OR_NONE,
    "begun": _TEXT_OR_NONE,
    "version_id": _TEXT,
    "rank": _COUNT,
    "names": (lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"),
    "training_state": _TABLE,
}
_TRAINING_STATE: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "loss_scale": (lambda value: value is None or _is_scale(value), "a positive number and a count"),
    "skipped": _COUNT,
    "skips_in_a_row": _COUNT,
    "lowest_loss": _NUMBER_OR_NONE,
    "higher_in_a_row": _COUNT,
    "last_checkpoint": _TEXT_OR_NONE,
    "good_checkpoint": _TEXT_OR_NONE,
}
