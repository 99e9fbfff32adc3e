"""Conversations -> text -> tokens, and which of the tokens are answers; the same for a prompt that wants an answer.

The text is made by a Jinja chat template: the tokenizer's own, or the plain form below. ``answers`` finds the answers in it.
A call of a tool is an answer, and what the tool gave is none. Messages that say ``train: false`` are answers of which
nothing is learnt.

Answers in characters become answers in tokens by the offsets of one encoding of the whole text. Where a text is asked for up to
an answer, its tokens are those of that beginning alone; what the whole has more is the answer. The offsets tell this wherever
tokens end at the edge. Elsewhere the beginning is encoded: from the last special token before it, as nothing reaches over one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.answers import ChatTemplate, Rendered
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.record_shapes import BadRecord, BadRecords
from hetero_mpi.data.records import Record
from hetero_mpi.data.template_process import rendered_prompt, rendered_records
from hetero_mpi.data.tokenizer import beginning, begun, encoded, end_token, faults_named, in_batches, own_tokens_only
from hetero_mpi.util.errors import UserError

Template = Literal["auto", "chat", "plain", "none"]
"""``data.template`` of a job."""

PLAIN_FORM = (
    "{%- for message in messages %}"
    '{{- "" if loop.first else "\\n\\n" }}'
    '{{- {"system": "## About", "user": "## Task", "assistant": "## Answer"}[message.role] + "\\n" }}'
    "{{- message.content }}"
    '{{- eos_token if message.role == "assistant" else "" }}'
    "{%- endfor %}"
    '{{- "\\n\\n## Answer\\n" if add_generation_prompt else "" }}'
)
"""The plain form: a heading over every message, the end token behind every answer, an empty line between messages. A tokenizer
that begins every text with a special token gets it in front."""
_JOINED = "{%- for message in messages %}{{- message.content }}{%- endfor %}"

# A template may print today's date; then a run resumed tomorrow would learn other data than it began with. The date is
# the one Llama's templates fall back to. A macro, because transformers hands no functions through to templates.
FROZEN_DATE = (
    "{%- macro strftime_now(format) -%}{{- format"
    '|replace("%-d", "26")|replace("%d", "26")|replace("%-m", "7")|replace("%m", "07")|replace("%b", "Jul")'
    '|replace("%B", "July")|replace("%Y", "2024")|replace("%y", "24")|replace("%A", "Friday")|replace("%a", "Fri")'
    '|replace("%H", "12")|replace("%M", "00")|replace("%S", "00") -}}{%- endmacro %}{{- "" }}'
)

REMEDY = (
    'Set data.template = "plain", or tokenizer.path to a tokenizer that has one (chat_template in its '
    "tokenizer_config.json, or chat_template.jinja)."
)


_ASKED, _ANSWER = ChatMessage("user", "What time is it?"), ChatMessage("assistant", "It is noon.")
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "time", "arguments": {}}}],
}
_TOOL = {
    "type": "function",
    "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_TALKING = Record((_ASKED, _ANSWER, _ASKED, _ANSWER), "chat", "an example")
_CALLING = Record(
    (_ASKED, ChatMessage("assistant", "", _CALL), ChatMessage("tool", "12:00"), _ANSWER), "chat", "an example", [_TOOL]
)
"""Conversations whose first answer shows how a template closes answers."""


@dataclass(frozen=True)
class Tokenized:
    record: Record
    ids: npt.NDArray[np.int32]
    """int32 [n]."""
    answer: npt.NDArray[np.bool_]
    """bool [n]: whether the token belongs to an answer that is learnt, its end token included."""
    never: npt.NDArray[np.bool_]
    """bool [n]: whether it belongs to an answer that is not learnt, not even with the prompts."""
    weight: npt.NDArray[np.float32]
    """float32 [n], of the token in the loss."""
    forgotten: bool = False
    """The template leaves out thoughts of earlier answers."""


def has_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def choose_template(
    tokenizer: PreTrainedTokenizerFast, template: Template, records: Iterable[Record] = ()
) -> ChatTemplate:
    """The form that ``data.template`` asks for.

    "auto" is the chat template where there is one, else the plain form; chat records are not put into the plain form
    unasked. Raises UserError when a chat template is needed and missing.
    """
    special = tokenizer.special_tokens_map
    if template == "none":
        talk = next((one for one in records if [turn.role for turn in one.messages] != ["user", "assistant"]), None)
        if talk is not None:
            raise UserError(
                "template.conversation_without_template",
                f'data.template = "none" learns completions of prompts, and {talk.source} is a conversation: take a chat template',
            )
        return ChatTemplate("none", _begin(tokenizer) + _JOINED, None, special, ours=True)
    if template == "plain" or (template == "auto" and not has_template(tokenizer)):
        chat = next((record for record in records if record.shape == "chat"), None)
        if template == "auto" and chat is not None:
            raise UserError(
                "template.missing",
                f"chat records need a tokenizer with a chat template; this one has none ({chat.source} is a chat). {REMEDY}",
            )
        calling = next((record for record in records if record.needs_tools()), None)
        if calling is not None:
            raise UserError(
                "template.tools",
                f"records with tools need a chat template that can print them, and the plain form cannot ({calling.source} "
                f'has tools). Set data.template = "chat" and tokenizer.path to a tokenizer with such a template.',
            )
        return ChatTemplate("plain", _begin(tokenizer) + PLAIN_FORM, None, special, ours=True)
    if not has_template(tokenizer):
        raise UserError(
            "template.missing",
            f'data.template = "chat" needs a tokenizer with a chat template; this one has none. {REMEDY}',
        )
    try:
        sources = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])]
    except ValueError as error:
        raise UserError(
            "template.choice", f'data.template = "{template}": the tokenizer\'s chat template cannot be chosen: {error}'
        ) from None
    ours = PLAIN_FORM in sources[0] and {*sources} <= {PLAIN_FORM, _begin(tokenizer) + PLAIN_FORM}
    source, with_tools = ((FROZEN_DATE if "strftime_now" in source else "") + source for source in sources)
    return ChatTemplate("chat", source, with_tools, special, ours)


def _begin(tokenizer: PreTrainedTokenizerFast) -> str:
    """The beginning of a template that prints the tokens with which the tokenizer begins every text, as Llama's and Gemma's do."""
    begin = beginning(own_tokens_only(tokenizer))
    if begin == [tokenizer.bos_token_id]:
        return "{{- bos_token }}"
    return f"{{{{- {json.dumps(''.join(tokenizer.convert_ids_to_tokens(begin)))} }}}}" if begin else ""


def render_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, template: Template | None) -> list[int]:
    """Token ids of a user's prompt, wrapped as training wrapped it, up to where the answer begins.

    ``template`` is ``data.template`` of a job with records, and None for a job with text, whose prompt is simply the
    beginning of a document (an empty one begins after an end token, where the tokenizer has none that begins texts).
    Raises UserError as :func:`choose_template` does, and when the template refuses the prompt.
    """
    backend = own_tokens_only(tokenizer)
    if template is None:
        return begun(backend, [prompt])[0] or [end_token(tokenizer)]
    asked = [{"role": "user", "content": prompt}]
    return encoded(backend, [messages_text(choose_template(tokenizer, template), asked, "the prompt")])[0]


def messages_text(
    template: ChatTemplate,
    conversation: Sequence[Mapping[str, Any]],
    source: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A conversation as text, up to where the next answer begins. Raises UserError when the template refuses it."""
    try:
        return rendered_prompt(template, conversation, tools)
    except BadRecord as problem:
        raise UserError("template.failed", f"{source}: {problem}") from problem


def plain_texts(records: Iterable[Record]) -> Iterator[str]:
    """The records' text in the plain form without special tokens, to train a tokenizer on."""
    headings = {"system": "## About", "user": "## Task", "assistant": "## Answer", "tool": "## Result"}
    for record in records:
        yield "\n\n".join(f"{headings[message.role]}\n{message.content}" for message in record.messages)


def tokenize_records(
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate,
    records: Iterable[Record],
    bad: BadRecords | None = None,
    ends: Collection[int] = (),
) -> Iterator[Tokenized]:
    """Every record as tokens, in order, with its answers marked.

    The template alone decides on special tokens: the tokenizer adds none, so none is doubled. What is learnt is what
    transformers' masks of assistant tokens hold, or would hold if the template marked its answers (``{% generation %}``): an
    answer with the end token, or what else the template closes it with (Gemma's end of turn), and not the line breaks behind
    that. Where a template closes an answer with nothing and what follows is one of ``ends``, at which the model stops, it belongs
    to the answer; the last answer ends as if another message followed. What stands behind the last answer that is learnt is
    left out. The end token follows only where the template closes that answer with no token at which the model stops.

    A record that the template refuses or does not print whole, or in which answers cannot be told from prompts, goes to ``bad``.
    Raises UserError when no more may be skipped.
    """
    backend, end = own_tokens_only(tokenizer), end_token(tokenizer)
    stops, rendered = {end, *ends}, _all_rendered(template, records, bad)
    closing = cache(lambda calls: _closing(backend, template, stops, calls) or end)
    for some in in_batches(rendered, lambda one: len(one[1].text)):
        yield from _tokenized(backend, end, stops, closing, some)


def _closing(backend: Tokenizer, template: ChatTemplate, stops: Collection[int], calls: bool) -> int | None:
    """The one of ``stops`` that the template prints behind an answer, or behind calls, that another message follows."""
    (rendered,) = rendered_records(template, [_CALLING if calls else _TALKING])
    if isinstance(rendered, BadRecord):
        return None
    (marks,) = marks_of(backend, [rendered])
    following = marks.ids[marks.spans[0][1]]
    return following if following in stops else None


def _all_rendered(
    template: ChatTemplate, records: Iterable[Record], bad: BadRecords | None
) -> Iterator[tuple[Record, Rendered]]:
    for some in in_batches(records, lambda record: 100 + sum(len(message.content) for message in record.messages)):
        for record, found in zip(some, rendered_records(template, some), strict=True):
            if isinstance(found, Rendered):
                yield record, found
                continue
            if bad is None or not bad.allowed:
                raise UserError("template.failed", f"{record.source}: {found}") from found
            bad.add(record.source, found)
            bad.check("the data")


def _tokenized(
    backend: Tokenizer,
    end: int,
    stops: Collection[int],
    closing: Callable[[bool], int],
    waiting: Sequence[tuple[Record, Rendered]],
) -> Iterator[Tokenized]:
    """Tokenises the texts at one go, so that all threads of the tokenizer have work."""
    for (record, rendered), marks in zip(waiting, marks_of(backend, [one for _, one in waiting]), strict=True):
        ids = list(marks.ids)
        answer, never = np.zeros((2, len(ids)), dtype=np.bool_)
        weight = np.ones(len(ids) + 1, np.float32)
        for (first, last), (*_, learnt) in zip(marks.spans, rendered.spans, strict=True):
            if not rendered.marked:
                # Without what the template prints behind its end token, if it has one.
                last = next((index + 1 for index in range(last - 1, first - 1, -1) if ids[index] == end), last)
            if first < last < len(ids) and ids[last] in stops and ids[last - 1] not in stops:
                last += 1
            if learnt is not None:
                (answer if learnt else never)[first:last] = True
                weight[first:last] = learnt
        # What stands behind the last answer is nobody's context.
        final = int(np.flatnonzero(answer)[-1]) if answer.any() else -1
        ids, answer, never = ids[: final + 1], answer[: final + 1], never[: final + 1]
        if record.messages[-1].trained and (final < 0 or ids[final] not in stops):
            closed = closing(bool(record.messages[-1].calls()))
            ids, answer, never = [*ids, closed], np.append(answer, True), np.append(never, False)
            weight[final + 1] = record.messages[-1].trained
        weight = record.weight * weight[: len(ids)]
        yield Tokenized(record, np.array(ids, dtype=np.int32), answer, never, weight, rendered.forgotten)


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
        """True: no token reaches over the place, and none without width lies there."""
        first = self.ending_behind(place)
        return first == self.beginning_at(place) and (
            first == 0 or bool(self._ends[first - 1] > self.starts[first - 1])
        )

    def overlapping(self, first: int, last: int) -> tuple[int, int]:
        """The tokens [first, last) that lie in the characters [first, last), if only in part."""
        begin, end = self.ending_behind(first), int(np.searchsorted(self._still_started, last))
        inside = begin + np.flatnonzero((self._ends[begin:end] > first) & (self.starts[begin:end] < last))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
