"""The shapes that a record may have, and the keys they are told by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Shape = Literal["chat", "alpaca", "prompt/completion"]

SHAPES = """\
A file holds JSON lines, one JSON array, or the rows of a parquet file: records in these shapes:
  alpaca             {"instruction": "...", "input": "...", "output": "..."}; input may be left out
  chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  chat (ShareGPT)    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  prompt/completion  {"prompt": "...", "completion": "..."}
  preference         {"prompt": "...", "chosen": "...", "rejected": "..."}, for [train] preference; texts, or lists of messages"""

SPELLINGS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a chat -> keys of its messages."""
PAIRS: dict[Shape, tuple[str, str]] = {
    "alpaca": ("instruction", "output"),
    "prompt/completion": ("prompt", "completion"),
}
PREFERENCE = ("chosen", "rejected")
FURTHER = ("input", "tools", *PREFERENCE)
"""Keys that are used beside those."""


def unrecognised(value: Mapping[str, Any]) -> str:
    """Why a record with these keys has none of the shapes, in words."""
    for shape, pair in PAIRS.items():
        missing = [key for key in pair if key not in value]
        if len(missing) == 1:
            return f"{missing[0]!r} is missing for the {shape} shape; the record has {keys_named(value)}"
    return f"no shape has these keys: {keys_named(value)}"


def keys_named(value: Mapping[str, Any]) -> str:
    """The first keys of a record, for messages to a person."""
    shown = ", ".join(repr(key) for key in list(value)[:6])
    return (shown + (", ..." if len(value) > 6 else "")) or "no keys"
