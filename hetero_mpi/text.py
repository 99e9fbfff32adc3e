"""Text of anybody's on a person's terminal: the one place where it is made harmless."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it, what turns the direction of text, and what no encoding can write."""


def printable(text: str) -> str:
    """``text`` with such characters spelt out (``\\x1b``). Names in files may hold any; lines and tabs stay."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
