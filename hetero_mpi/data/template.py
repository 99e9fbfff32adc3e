"""Conversations -> text -> tokens, and which of the tokens are answers; the same for a prompt that wants an answer.

The text is made by a Jinja chat template: the tokenizer's own, or the plain form below. Which tokens are answers is
found by rendering beginnings of the conversation, as generation will: an answer starts where the rendered question
with the generation prompt ends, and ends where the conversation up to it ends. Nothing is assumed about the template
but that, and it is checked for every record::

    render(system, user, generation prompt)          <|user|>Hi<|answer|>
    render(system, user, assistant)                  <|user|>Hi<|answer|>Hello<|end|>
    render(system, user, assistant, user, assistant) <|user|>Hi<|answer|>Hello<|end|><|user|>And?<|answer|>Well<|end|>
    answers                                                              ^^^^^^^^^^^^                      ^^^^^^^^^^^
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.records import ChatMessage, Record
from hetero_mpi.data.tokenizer import BATCH_CHARACTERS, encoded, end_token, faults_named, own_tokens_only
from hetero_mpi.errors import UserError

Template = Literal["auto", "chat", "plain"]
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
"""The plain form: a heading over every message, the end token behind every answer, an empty line between messages::

    ## Task
    Say hello.

    ## Answer
    Hello.<end>

A tokenizer that begins every text with a special token gets it in front.
"""

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
WAY_OUT = 'Set data.template = "plain", or tokenizer.path to a tokenizer whose chat template does'


@dataclass(frozen=True)
class Form:
    """How conversations become text."""

    kind: Literal["chat", "plain"]
    source: str
    """The Jinja chat template."""


@dataclass(frozen=True)
class Tokenized:
    record: Record
    ids: npt.NDArray[np.int32]
    """int32 [n]."""
    answer: npt.NDArray[np.bool_]
    """bool [n]: whether the token belongs to an answer, its end token included."""


def has_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def choose_form(tokenizer: PreTrainedTokenizerFast, template: Template, records: Iterable[Record] = ()) -> Form:
    """The form that ``data.template`` asks for.

    "auto" is the chat template where there is one, else the plain form; chat records are not put into the plain form
    unasked. Raises UserError when a chat template is needed and missing.
    """
    if template == "plain" or (template == "auto" and not has_template(tokenizer)):
        chat = next((record for record in records if record.shape == "chat"), None)
        if template == "auto" and chat is not None:
            raise UserError(
                f"chat records need a tokenizer with a chat template; this one has none ({chat.source} is a chat). {REMEDY}"
            )
        begin = "{{- bos_token }}" if _begins_texts(tokenizer) else ""
        return Form("plain", begin + PLAIN_FORM)
    if not has_template(tokenizer):
        raise UserError(f'data.template = "chat" needs a tokenizer with a chat template; this one has none. {REMEDY}')
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f'data.template = "{template}": the tokenizer\'s chat template cannot be chosen: {error}'
        ) from None
    return Form("chat", (FROZEN_DATE if "strftime_now" in source else "") + source)


def render_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, template: Template | None) -> list[int]:
    """Token ids of a user's prompt, wrapped as training wrapped it, up to where the answer begins.

    ``template`` is ``data.template`` of a job with records, and None for a job with text, whose prompt is simply the
    beginning of a document (an empty one begins after an end token). Raises UserError as :func:`choose_form` does.
    """
    backend = own_tokens_only(tokenizer)
    if template is None:
        return encoded(backend, [prompt])[0] or [end_token(tokenizer)]
    form = choose_form(tokenizer, template)
    text = _render(tokenizer, form, (ChatMessage("user", prompt),), "the prompt", asking=True)
    return encoded(backend, [text])[0]


def plain_texts(records: Iterable[Record]) -> Iterator[str]:
    """The records' text in the plain form without special tokens, to train a tokenizer on."""
    headings = {"system": "## About", "user": "## Task", "assistant": "## Answer"}
    for record in records:
        yield "\n\n".join(f"{headings[message.role]}\n{message.content}" for message in record.messages)


def tokenize_records(tokenizer: PreTrainedTokenizerFast, form: Form, records: Iterable[Record]) -> Iterator[Tokenized]:
    """Every record as tokens, in order, with its answers marked.

    The template alone decides on special tokens: the tokenizer adds none, so none is doubled. What is learnt is what
    transformers' masks of assistant tokens hold where a template marks its answers (``{% generation %}``): an answer with the
    end token, or what else the template closes it with (Gemma's end of turn), and not the line breaks behind that. Where
    a template closes the last answer with something else, the end token follows. So every record ends with the end token.

    Raises UserError when the template fails, or when answers cannot be told from prompts in what it renders.
    """
    backend = own_tokens_only(tokenizer)
    end = end_token(tokenizer)
    waiting: list[_Rendered] = []
    characters = 0
    for record in records:
        waiting.append(_rendered(tokenizer, form, record))
        characters += len(waiting[-1].text) * (1 + len(waiting[-1].spans))
        if characters >= BATCH_CHARACTERS:
            yield from _tokenized(backend, end, waiting)
            waiting, characters = [], 0
    yield from _tokenized(backend, end, waiting)


@dataclass(frozen=True)
class _Rendered:
    """A record as text; ``spans`` are its answers, [first, last) in characters, ascending."""

    record: Record
    text: str
    spans: tuple[tuple[int, int], ...]

    def edges(self) -> list[int]:
        """Where answers begin or end, in characters, ascending, each once."""
        return sorted({edge for span in self.spans for edge in span})


def _rendered(tokenizer: PreTrainedTokenizerFast, form: Form, record: Record) -> _Rendered:
    messages, source = record.messages, record.source
    text = _render(tokenizer, form, messages, source)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        question = _render(tokenizer, form, messages[:index], source, asking=True)
        closed = text if index == len(messages) - 1 else _render(tokenizer, form, messages[: index + 1], source)
        last = _answer_end(text, question, closed, message.content)
        last = None if last is None else _without_spaces(text, len(question), last, message.content)
        if last is None or (spans and spans[-1][1] > len(question)):
            raise UserError(
                f"{source}: the tokenizer's chat template must render the beginning of a conversation as the beginning "
                f"of the whole; for message {index + 1} of {len(messages)} it does not, so that the answer cannot be "
                f"told from the prompt. {WAY_OUT}, or split the record after each answer."
            )
        spans.append((len(question), last))
    return _Rendered(record, text, tuple(spans))


def _answer_end(text: str, question: str, closed: str, content: str) -> int | None:
    """Where in ``text`` the answer ends that begins behind ``question``; None when that is not to be told.

    ``closed`` is the conversation that ends with this answer. Some templates (Qwen3's) print an empty thought in front
    of the last answer only; then the answer is found by its content and by what follows that in ``closed``.
    """
    if not text.startswith(question) or not closed.startswith(question):
        return None
    if text.startswith(closed):
        return len(closed)
    content = content.strip()
    thought, found, close = closed[len(question) :].rpartition(content)
    if not found:
        return None
    for between in (thought, ""):
        answer = between + content + close
        if text.startswith(answer, len(question)):
            return len(question) + len(answer)
    return None


def _without_spaces(text: str, first: int, last: int, content: str) -> int:
    """The end of the answer [first, last) of ``text`` without the spaces and line breaks that the template prints at its end."""
    own = next((part for part in (content, content.strip()) if part in text[first:last]), "")
    return max(first + text[first:last].rfind(own) + len(own), len(text[:last].rstrip()))


def _render(
    tokenizer: PreTrainedTokenizerFast, form: Form, messages: Sequence[ChatMessage], source: str, asking: bool = False
) -> str:
    """The messages as text; ``asking``: up to where the next answer begins."""
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation, chat_template=form.source, add_generation_prompt=asking, tokenize=False
            )
        )
    except Exception as error:  # a template is a program from somebody else: it may raise anything
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"{source}: the tokenizer's chat template must accept the conversation; it refused messages of {roles}: "
            f"{type(error).__name__}: {error}. {WAY_OUT}, or change the record."
        ) from error


def _tokenized(backend: Tokenizer, end: int, waiting: Sequence[_Rendered]) -> Iterator[Tokenized]:
    """Tokenises the texts and all their beginnings at one go, so that all threads of the tokenizer have work."""
    texts: list[str] = []
    for rendered in waiting:
        texts.append(rendered.text)
        texts.extend(rendered.text[:edge] for edge in rendered.edges())
    with faults_named("the tokenizer cannot tokenise the records"):
        encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
    for rendered in waiting:
        whole = next(encodings)
        beginnings = {edge: next(encodings).ids for edge in rendered.edges()}
        ids = list(whole.ids)
        answer = np.zeros(len(ids) + 1, dtype=np.bool_)
        for span in rendered.spans:
            first, last = _tokens_of(whole, beginnings, span)
            answer[first : _behind_end(ids, first, last, end)] = True
        # What stands behind the last answer is nobody's context: the record ends with the end token, the template's or,
        # where it closes answers with something else, ours.
        final = int(np.flatnonzero(answer)[-1]) if answer.any() else -1
        ids, answer = ids[: final + 1], answer[: final + 1]
        if final < 0 or ids[final] != end:
            ids, answer = [*ids, end], np.append(answer, True)
        yield Tokenized(rendered.record, np.array(ids, dtype=np.int32), answer)


def _tokens_of(whole: Encoding, beginnings: Mapping[int, Sequence[int]], span: tuple[int, int]) -> tuple[int, int]:
    """The tokens [first, last) of an answer, given in characters of the whole text, that end ``beginnings`` before them.

    Normally these are the first tokens of the whole. Where a merge reaches over an edge they are not; then the token
    across it belongs to the answer, so that no part of it is left out.
    """
    first, last = span
    tokens = len(whole.ids)
    if whole.ids[: len(beginnings[first])] == list(beginnings[first]):
        begin = len(beginnings[first])
    else:
        begin = next((index for index, (_, behind) in enumerate(whole.offsets) if behind > first), tokens)
    if whole.ids[: len(beginnings[last])] == list(beginnings[last]):
        return begin, len(beginnings[last])
    return begin, next((index for index, (start, _) in enumerate(whole.offsets) if start >= last), tokens)


def _behind_end(ids: Sequence[int], first: int, last: int, end: int) -> int:
    """The end of the answer [first, last) without what the template prints behind its end token, if it has one."""
    return next((index + 1 for index in range(last - 1, first - 1, -1) if ids[index] == end), last)


def _begins_texts(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer begins every text with its beginning token, as Llama's and Gemma's do."""
    begin = tokenizer.bos_token_id
    return begin is not None and encoded(own_tokens_only(tokenizer), ["a"], special=True)[0][:1] == [begin]
