"""Turn conversations into text, and the text into token ids with a mask of the answers; also tokenise prompts.

The text comes from a Jinja chat template: the tokenizer's own, or the plain form below. The module ``answers`` locates answers
in the text. A tool call is an answer; a tool's result is not. A message with ``train: false`` is an answer without loss.

Character positions of answers are mapped to tokens through the offsets of one encoding of the complete text. The prompt's tokens
are those that encoding the prompt alone yields, as at inference; the remaining tokens are the answer. Offsets suffice if a
token ends at the boundary. Otherwise the prompt is encoded again, starting at the last special token before the boundary,
since no merge crosses a special token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
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
from hetero_mpi.data.tokenizer import (
    beginning,
    document_token_ids,
    encoded,
    end_token,
    faults_named,
    in_batches,
    own_tokens_only,
)
from hetero_mpi.util.errors import UserError

Template = Literal["auto", "chat", "plain", "none"]
"""Values of ``data.template``."""

PLAIN_FORM = (
    "{%- for message in messages %}"
    '{{- "" if loop.first else "\\n\\n" }}'
    '{{- {"system": "## About", "user": "## Task", "assistant": "## Answer"}[message.role] + "\\n" }}'
    "{{- message.content }}"
    '{{- eos_token if message.role == "assistant" else "" }}'
    "{%- endfor %}"
    '{{- "\\n\\n## Answer\\n" if add_generation_prompt else "" }}'
)
"""The plain form: a heading above every message, an end token after every answer, and an empty line between messages. The special
tokens that the tokenizer prepends to every text are added in front."""
_JOINED = "{%- for message in messages %}{{- message.content }}{%- endfor %}"

# A template may print today's date, which would change the data of a run that is resumed tomorrow. This fixed date is the
# fallback of Llama's templates. It is a macro because transformers passes no functions to templates.
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


_USER, _ANSWER = ChatMessage("user", "What time is it?"), ChatMessage("assistant", "It is noon.")
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "time", "arguments": {}}}],
}
_TOOL = {
    "type": "function",
    "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_CHAT_EXAMPLE = Record((_USER, _ANSWER, _USER, _ANSWER), "chat", "an example")
_TOOL_EXAMPLE = Record(
    (_USER, ChatMessage("assistant", "", _CALL), ChatMessage("tool", "12:00"), _ANSWER), "chat", "an example", [_TOOL]
)
"""Example conversations whose first answer reveals how a template ends an answer."""


@dataclass(frozen=True)
class Tokenized:
    record: Record
    ids: npt.NDArray[np.int32]
    """int32 [n]."""
    answer: npt.NDArray[np.bool_]
    """bool [n]: true for tokens of trained answers, including their end tokens."""
    never: npt.NDArray[np.bool_]
    """bool [n]: true for tokens of answers that are excluded from the loss even when training on prompts."""
    weight: npt.NDArray[np.float32]
    """float32 [n]: loss weight of each token."""
    forgotten: bool = False
    """Whether the template omits the reasoning of earlier answers."""


def has_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def choose_template(
    tokenizer: PreTrainedTokenizerFast, template: Template, records: Iterable[Record] = ()
) -> ChatTemplate:
    """Select the template according to ``data.template``.

    "auto" selects the tokenizer's chat template if it has one, else the plain form, but chat records require an explicit "plain".
    Raises UserError if a required chat template is missing, or if the selected template cannot render the ``records``.
    """
    special = tokenizer.special_tokens_map
    if template == "none":
        pair = ["user", "assistant"]
        dialogue = next((r for r in records if [turn.role for turn in r.messages] not in ([], pair)), None)
        if dialogue is not None:
            raise UserError(
                "template.conversation_without_template",
                f'data.template = "none" trains on completions, but {dialogue.source} is a conversation: set a chat template',
            )
        return ChatTemplate("none", _prefix_source(tokenizer) + _JOINED, None, special, ours=True)
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
        return ChatTemplate("plain", _prefix_source(tokenizer) + PLAIN_FORM, None, special, ours=True)
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
    ours = PLAIN_FORM in sources[0] and {*sources} <= {PLAIN_FORM, _prefix_source(tokenizer) + PLAIN_FORM}
    source, with_tools = ((FROZEN_DATE if "strftime_now" in source else "") + source for source in sources)
    return ChatTemplate("chat", source, with_tools, special, ours)


def _prefix_source(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return template source that prints the tokens that the tokenizer prepends to every text (Llama, Gemma)."""
    begin = beginning(own_tokens_only(tokenizer))
    if begin == [tokenizer.bos_token_id]:
        return "{{- bos_token }}"
    return f"{{{{- {json.dumps(''.join(tokenizer.convert_ids_to_tokens(begin)))} }}}}" if begin else ""


def render_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, template: Template | None) -> list[int]:
    """Tokenise a user's prompt, formatted as in training, up to the start of the answer.

    ``template`` is ``data.template`` for a job with records, and None for a job with plain text, where the prompt starts a document
    (an empty prompt becomes an end token, unless the tokenizer prepends tokens to every text).
    Raises UserError as ``choose_template`` does, and if the template rejects the prompt.
    """
    backend = own_tokens_only(tokenizer)
    if template is None:
        return document_token_ids(backend, [prompt])[0] or [end_token(tokenizer)]
    conversation = [{"role": "user", "content": prompt}]
    return encoded(backend, [messages_text(choose_template(tokenizer, template), conversation, "the prompt")])[0]


def messages_text(
    template: ChatTemplate,
    conversation: Sequence[Mapping[str, Any]],
    source: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render a conversation with the generation prompt. Raises UserError if the template rejects it."""
    try:
        return rendered_prompt(template, conversation, tools)
    except BadRecord as problem:
        raise UserError("template.failed", f"{source}: {problem}") from problem


def plain_texts(records: Iterable[Record]) -> Iterator[str]:
    """Yield each record's text in the plain form without special tokens, for training a tokenizer."""
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
    """Tokenise records in order and mask their answers.

    Only the template prints special tokens; the tokenizer adds none, so none is duplicated. The mask equals the assistant mask
    that transformers computes (or would compute if the template had ``{% generation %}`` marks): an answer includes its end
    token, or whatever closes it (Gemma's end of turn), but not the line breaks that follow. A stop token (the end token or one
    of ``ends``) directly after an answer belongs to that answer. Tokens after the last trained answer are dropped. If the last
    answer ends without a stop token, the one that the template prints before a further message is appended, else the end token.

    A record that the template rejects or prints incompletely, or whose answers cannot be located, is added to ``bad``.
    Raises UserError once more records are bad than may be skipped.
    """
    backend, end = own_tokens_only(tokenizer), end_token(tokenizer)
    stops = {end, *ends}
    closing = cache(lambda calls: _closing_token(backend, template, stops, calls) or end)
    for tokenised, group in groupby(records, lambda record: record.shape == "tokens"):
        if tokenised:
            yield from (_given_tokens(record, len(tokenizer)) for record in group)
            continue
        for batch in in_batches(_render_records(template, group, bad), lambda pair: len(pair[1].text)):
            yield from _tokenized(backend, end, stops, closing, batch)


def _given_tokens(record: Record, vocabulary: int) -> Tokenized:
    ids, answer = np.array(record.ids), np.array(record.targets)
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise UserError("records.token_ids", f"{record.source}: 'input_ids' exceed a vocabulary of {vocabulary:,}")
    return Tokenized(record, ids.astype(np.int32), answer, ~answer, np.full(len(ids), record.weight, np.float32))


def _closing_token(backend: Tokenizer, template: ChatTemplate, stops: Collection[int], calls: bool) -> int | None:
    """Return the stop token that the template prints after an answer (or tool calls) before a further message, or None."""
    (rendered,) = rendered_records(template, [_TOOL_EXAMPLE if calls else _CHAT_EXAMPLE])
    if isinstance(rendered, BadRecord):
        return None
    (marks,) = answer_tokens(backend, [rendered])
    following = marks.ids[marks.spans[0][1]]
    return following if following in stops else None


def _render_records(
    template: ChatTemplate, records: Iterable[Record], bad: BadRecords | None
) -> Iterator[tuple[Record, Rendered]]:
    for batch in in_batches(records, lambda record: 100 + sum(len(message.content) for message in record.messages)):
        for record, rendered in zip(batch, rendered_records(template, batch), strict=True):
            if isinstance(rendered, Rendered):
                yield record, rendered
                continue
            if bad is None or not bad.allowed:
                raise UserError("template.failed", f"{record.source}: {rendered}") from rendered
            bad.add(record.source, rendered)
            bad.check("the data")


def _tokenized(
    backend: Tokenizer,
    end: int,
    stops: Collection[int],
    closing: Callable[[bool], int],
    batch: Sequence[tuple[Record, Rendered]],
) -> Iterator[Tokenized]:
    """Tokenise a batch of rendered records in one call, which keeps all threads of the tokenizer busy."""
    for (record, rendered), marks in zip(batch, answer_tokens(backend, [text for _, text in batch]), strict=True):
        ids = list(marks.ids)
        answer, never = np.zeros((2, len(ids)), dtype=np.bool_)
        weight = np.ones(len(ids) + 1, np.float32)
        for (first, last), (*_, learnt) in zip(marks.spans, rendered.spans, strict=True):
            if not rendered.marked:
                # Drop whatever the template prints after its end token.
                last = next((index + 1 for index in range(last - 1, first - 1, -1) if ids[index] == end), last)
            if first < last < len(ids) and ids[last] in stops and ids[last - 1] not in stops:
                last += 1
            if learnt is not None:
                (answer if learnt else never)[first:last] = True
                weight[first:last] = learnt
        # Tokens after the last answer are context of no target.
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
    """Token range [first, last) of each answer."""


def answer_tokens(engine: Tokenizer, rendered: Sequence[Rendered]) -> list[Marks]:
    """Tokenise rendered records and locate their answers in the tokens. Raises UserError if ``engine`` fails on a text.

    ``engine`` is the result of ``own_tokens_only``. If the full encoding starts with the tokens of the text before a boundary, the
    answer starts after these tokens. A token that a merge stretches across the boundary belongs to the answer, so no part of an
    answer is lost. If the template marks an answer, its range holds every overlapping token, as transformers' mask does.
    """
    with faults_named("the tokenizer cannot tokenise the records"):
        tokens_by_text = [
            _Offsets(e) for e in engine.encode_batch([entry.text for entry in rendered], add_special_tokens=False)
        ]
        exact = _resolved_boundaries(engine, rendered, tokens_by_text)
    return [
        Marks(
            tokens.ids,
            [
                tokens.overlapping(first, last)
                if entry.marked
                else (exact.get((n, first), tokens.ending_after(first)), exact.get((n, last), tokens.starting_at(last)))
                for first, last, _ in entry.spans
            ],
        )
        for n, (entry, tokens) in enumerate(zip(rendered, tokens_by_text, strict=True))
    ]


def _resolved_boundaries(
    engine: Tokenizer, rendered: Sequence[Rendered], tokens_by_text: Sequence[_Offsets]
) -> dict[tuple[int, int], int]:
    """Resolve boundaries that are ambiguous by offsets: map (text number, character) to the number of tokens before it."""
    edges = [(n, edge) for n, r in enumerate(rendered) if not r.marked for edge in {e for s in r.spans for e in s[:2]}]
    # Some tokenizers drop trailing spaces of a text.
    last = {rendered[n].text[edge - 1 : edge] for n, edge in edges}
    bare, *suffixed = engine.encode_batch(["a", *("a" + letter for letter in last)], add_special_tokens=False)
    dropped = {letter for letter, encoding in zip(last, suffixed, strict=True) if encoding.ids == bare.ids}
    added = engine.get_added_tokens_decoder().items()
    special = [number for number, token in added if not token.normalized and not token.single_word]
    restarts = {n: np.flatnonzero(np.isin(tokens_by_text[n].ids, special)) for n in {n for n, _ in edges}}
    pieces: list[tuple[int, int, int]] = []  # text, boundary, first token of the piece to encode
    for n, edge in edges:
        if not tokens_by_text[n].is_boundary(edge) or rendered[n].text[edge - 1 : edge] in dropped:
            before = np.searchsorted(tokens_by_text[n].starts[restarts[n]], edge)
            pieces.append((n, edge, int(restarts[n][before - 1]) if before else 0))
    texts = [rendered[n].text[tokens_by_text[n].starts[token] if token else 0 : edge] for n, edge, token in pieces]
    return {
        (n, edge): token + len(piece.ids)
        for (n, edge, token), piece in zip(pieces, engine.encode_batch(texts, add_special_tokens=False), strict=True)
        if tokens_by_text[n].ids[token : token + len(piece.ids)] == piece.ids
    }


class _Offsets:
    """Tokens of a text and their character offsets. Lookups use running maxima, since offsets may move backwards."""

    def __init__(self, encoding: Encoding) -> None:
        self.ids: list[int] = encoding.ids
        flat = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(self.ids))
        self.starts, self._ends = flat[::2], flat[1::2]
        self._started, self._ended = np.maximum.accumulate(self.starts), np.maximum.accumulate(self._ends)
        self._still_started = np.minimum.accumulate(self.starts[::-1])[::-1]

    def ending_after(self, position: int) -> int:
        """Return the index of the first token that ends after a character position, or the number of tokens if none does."""
        return int(np.searchsorted(self._ended, position, side="right"))

    def starting_at(self, position: int) -> int:
        """Return the index of the first token that begins at or after a character position."""
        return int(np.searchsorted(self._started, position))

    def is_boundary(self, position: int) -> bool:
        """Whether a character position is a token boundary: no token crosses it and no zero-width token lies there."""
        first = self.ending_after(position)
        return first == self.starting_at(position) and (
            first == 0 or bool(self._ends[first - 1] > self.starts[first - 1])
        )

    def overlapping(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of tokens that overlap the characters [first, last); (0, 0) if there are none."""
        begin, end = self.ending_after(first), int(np.searchsorted(self._still_started, last))
        inside = begin + np.flatnonzero((self._ends[begin:end] > first) & (self.starts[begin:end] < last))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
