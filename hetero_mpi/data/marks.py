"""Answers in characters -> answers in tokens, by the offsets of one encoding of the whole text.

Where a text is asked for up to an answer, its tokens are those of that beginning alone; what the whole has more is the answer.
The offsets tell this wherever tokens end at the edge. Elsewhere the beginning is encoded: from the last special token before the
edge, as nothing reaches over one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Encoding, Tokenizer

from hetero_mpi.data.answers import Rendered
from hetero_mpi.data.tokenizer import faults_named


@dataclass(frozen=True)
class Marks:
    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    """The tokens [first, last) of each answer."""


def marks_of(engine: Tokenizer, rendered: Sequence[Rendered]) -> list[Marks]:
    """``engine``: of :func:`own_tokens_only`. Raises UserError when it cannot tokenise the texts.

    An edge lies behind the tokens of the text before it, where the whole begins with these. Where a merge reaches over it, the
    token across it belongs to the answer, so that no part of it is left out. Of answers that the template marks these are the
    tokens that lie in them, if only in part: transformers' mask.
    """
    with faults_named("the tokenizer cannot tokenise the records"):
        wholes = [
            _Offsets(one) for one in engine.encode_batch([one.text for one in rendered], add_special_tokens=False)
        ]
        known = _known_edges(engine, rendered, wholes)
    return [
        Marks(
            whole.ids,
            [
                whole.overlapping(first, last)
                if one.marked
                else (known.get((n, first), whole.ending_behind(first)), known.get((n, last), whole.beginning_at(last)))
                for first, last, _ in one.spans
            ],
        )
        for n, (one, whole) in enumerate(zip(rendered, wholes, strict=True))
    ]


def _known_edges(
    engine: Tokenizer, rendered: Sequence[Rendered], wholes: Sequence[_Offsets]
) -> dict[tuple[int, int], int]:
    """(which text, edge in characters) -> tokens before it, of the edges that offsets do not tell and encoding does."""
    edges = [
        (n, edge) for n, one in enumerate(rendered) if not one.marked for edge in {e for s in one.spans for e in s[:2]}
    ]
    # Some tokenizers drop spaces at the end of a text.
    last = {rendered[n].text[edge - 1 : edge] for n, edge in edges}
    bare, *behind = engine.encode_batch(["a", *("a" + one for one in last)], add_special_tokens=False)
    dropped = {one for one, encoding in zip(last, behind, strict=True) if encoding.ids == bare.ids}
    added = engine.get_added_tokens_decoder().items()
    special = [number for number, token in added if not token.normalized and not token.single_word]
    restarts = {n: np.flatnonzero(np.isin(wholes[n].ids, special)) for n in {n for n, _ in edges}}
    pieces: list[tuple[int, int, int]] = []  # which text, edge, first token of what is encoded
    for n, edge in edges:
        if not wholes[n].parted(edge) or rendered[n].text[edge - 1 : edge] in dropped:
            before = np.searchsorted(wholes[n].starts[restarts[n]], edge)
            pieces.append((n, edge, int(restarts[n][before - 1]) if before else 0))
    texts = [rendered[n].text[wholes[n].starts[token] if token else 0 : edge] for n, edge, token in pieces]
    return {
        (n, edge): token + len(piece.ids)
        for (n, edge, token), piece in zip(pieces, engine.encode_batch(texts, add_special_tokens=False), strict=True)
        if wholes[n].ids[token : token + len(piece.ids)] == piece.ids
    }


class _Offsets:
    """The tokens of a text, and where they lie in it. Of offsets that go back and forth the furthest so far counts."""

    def __init__(self, encoding: Encoding) -> None:
        self.ids: list[int] = encoding.ids
        flat = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(self.ids))
        self.starts, self._ends = flat[::2], flat[1::2]
        self._started, self._ended = np.maximum.accumulate(self.starts), np.maximum.accumulate(self._ends)
        self._still_started = np.minimum.accumulate(self.starts[::-1])[::-1]

    def ending_behind(self, place: int) -> int:
        """The first token that ends behind a character; the number of tokens, if none does."""
        return int(np.searchsorted(self._ended, place, side="right"))

    def beginning_at(self, place: int) -> int:
        """The first token that begins at a character or behind it."""
        return int(np.searchsorted(self._started, place))

    def parted(self, place: int) -> bool:
        """Does no token reach over the place, and none without width lie there?"""
        first = self.ending_behind(place)
        return first == self.beginning_at(place) and (
            first == 0 or bool(self._ends[first - 1] > self.starts[first - 1])
        )

    def overlapping(self, first: int, last: int) -> tuple[int, int]:
        """The tokens [first, last) that lie in the characters [first, last), if only in part."""
        begin, end = self.ending_behind(first), int(np.searchsorted(self._still_started, last))
        inside = begin + np.flatnonzero((self._ends[begin:end] > first) & (self.starts[begin:end] < last))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
