"""Texts of any length -> token ids, in pieces: of a text no more is in memory than a piece, and the ids are those of the whole.

A piece ends where a token ends whatever is around it: between words, before a line break or behind a full stop. Whether a place is
one is tried with the tokenizer itself: what stands before and behind it must give the same tokens together and apart, with much and
with little before it. The next piece is tokenised behind the last characters of this one, whose tokens are then left out, since
some tokenizers treat the beginning of a text otherwise than its middle.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hetero_mpi.data.tokenizer import beginning, encoded, in_batches

PIECE = 250_000
"""Characters of a piece; a text that has nowhere to be cut goes on until it has."""
_AROUND, _BEFORE = 400, 60
"""Characters on both sides of a place with which it is tried, and the fewer ones before it that the next piece begins with."""
_TRIED = 40
"""Places of one kind that are tried in a piece."""
_PLACES = tuple(
    re.compile(one) for one in (r"(?<=\w) (?=\w)", r"(?<=\S)\n(?=\S)", r"(?<=\n)(?=\w)", r"(?<=[.,;:!?。，！？])(?=\w)")
)
_TELL_S = 10.0

Tokens = npt.NDArray[np.int32]
Blocks = Iterable[tuple[str, bool]]
"""Texts in blocks: (a part of a text, is it the text's last)."""


class Piece(NamedTuple):
    before: str
    """The characters of the text before it that it is tokenised with; "": the text begins with it."""
    text: str
    ends: bool
    """The text ends with it."""


Split = Callable[[list[str]], list[list[Any]]]
"""Texts -> what each is split into: tokens, or what a pre-tokenizer makes of it."""


def pieces_of(blocks: Blocks, split: Split) -> Iterator[Piece]:
    """The texts in pieces, which end where the parts do that ``split`` makes."""
    before, waiting, tried = "", "", 0
    for block, ends in blocks:
        waiting += block
        while len(waiting) >= max(PIECE, 2 * tried) + _AROUND:
            place = _place(waiting, split)
            tried = 0 if place else len(waiting)  # a text without a place is tried again when it has doubled
            if place:
                yield Piece(before, waiting[:place], False)
                before, waiting = waiting[place - _BEFORE : place], waiting[place:]
        if ends:
            yield Piece(before, waiting, True)
            before, waiting, tried = "", "", 0


def _place(text: str, split: Split) -> int | None:
    """Where a piece of ``text`` may end, as late as possible; None: nowhere."""
    last = len(text) - _AROUND
    first = max(PIECE // 2, last - PIECE // 2)
    for kind in _PLACES:
        found = [match.start() for match in kind.finditer(text, first, last)]
        for place in reversed(found[-_TRIED:]):
            left, right = text[place - _AROUND : place], text[place : place + _AROUND]
            few = left[-_BEFORE:]
            much_both, few_both, much, little = split([left + right, few + right, left, few])
            behind = much_both[len(much) :]
            if much_both == much + behind and few_both == little + behind:
                return place
    return None


def ids_of(
    blocks: Blocks, engine: Tokenizer, tell: Callable[[int], None] | None = None
) -> Iterator[tuple[Tokens, bool]]:
    """Token ids of the texts, begun as the tokenizer begins texts: (ids of a piece, does the text end). All threads of the
    tokenizer work. ``tell``: is told now and then how many characters are done.
    """
    begin = beginning(engine)
    done, told = 0, time.monotonic()
    for some in in_batches(pieces_of(blocks, partial(encoded, engine)), lambda piece: len(piece.text)):
        before = encoded(engine, [piece.before for piece in some])
        whole = encoded(engine, [piece.before + piece.text for piece in some])
        for piece, lead, ids in zip(some, before, whole, strict=True):
            assert ids[: len(lead)] == lead, "a piece begins where a token does"
            first = [] if piece.before or ids[: len(begin)] == begin else begin
            yield np.array([*first, *ids[len(lead) :]], np.int32), piece.ends
            done += len(piece.text)
        if tell is not None and time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            tell(done)
