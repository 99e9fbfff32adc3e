"""What the metadata of a checkpoint must be before anybody uses them: a file may say anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MOST_BYTES = 64 << 20
"""All texts and arrays of the metadata together; a profile with every link between 256 ranks has some 26 MB."""
MOST_VALUES = 1 << 22
"""Values in a JSON text: each takes up to a hundred times its length in memory."""
REQUIRED = ("step", "updates", "losses", "loss_scale", "job")
"""Without these nothing can go on from a checkpoint."""
REQUIRED_OF_PIECES = ("begun", "rank", "names", "books")
"""A rank's copy, which says its generation, must hold these too."""


def check_size(text: bytes) -> None:
    """Raises ValueError for a JSON text with more values than any checkpoint's."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def check_metadata(found: Mapping[str, Any]) -> None:
    """Raises ValueError with the key, its value and what it must be."""
    required = (*REQUIRED, *(REQUIRED_OF_PIECES if "generation" in found else ()))
    lacking = [key for key in required if key not in found]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} missing from the metadata")
    _check(found, "", {key: rule for key, rule in _RULES.items() if key in found})
    _check(found["job"], "job.", {"train": _TABLE, "data": _TABLE})
    if "books" in found:
        _check(found["books"], "books.", _BOOKS)
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
    return isinstance(value, list) and len(value) == 2 and _is_positive(value[0]) and _is_count(value[1])


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_losses(value: Any) -> bool:
    """Skipped steps may have losses that are not finite."""
    return isinstance(value, np.ndarray) and value.dtype == np.float64 and value.ndim == 1


_COUNT: _Rule = _is_count, "a whole number, 0 or more"
_TABLE: _Rule = lambda value: isinstance(value, dict), "a table"
_TEXT: _Rule = lambda value: isinstance(value, str), "a text"
_TEXT_OR_NONE: _Rule = _is_text_or_none, "a text, or nothing"
_RULES: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "losses": (_are_losses, "a list of float64 numbers"),
    "loss_scale": (_is_scale, "a positive number and a count"),
    "held_out_loss": (_is_number, "a number"),
    "job": _TABLE,
    "model_config": _TABLE,
    "versions": _TABLE,
    "base_model": _TEXT_OR_NONE,
    "data_fingerprint": _TEXT,
    "run": _TEXT_OR_NONE,
    "begun": _TEXT_OR_NONE,
    "generation": _TEXT,
    "rank": _COUNT,
    "names": (lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"),
    "books": _TABLE,
}
_BOOKS: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "loss_scale": (lambda value: value is None or _is_scale(value), "a positive number and a count"),
    "skipped": _COUNT,
    "skips_in_a_row": _COUNT,
    "last_checkpoint": _TEXT_OR_NONE,
    "good_checkpoint": _TEXT_OR_NONE,
}
