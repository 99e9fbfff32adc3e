"""Conversations -> text -> tokens, and which of the tokens are answers; the same for a prompt that wants an answer.

The text is made by a Jinja chat template: the tokenizer's own, or the plain form below. Which tokens are answers is
found by rendering beginnings of the conversation, as generation will: an answer starts where the rendered question
with the generation prompt ends, and ends where the conversation up to it ends. Nothing is assumed about the template
but that, and it is checked for every record::

    render(system, user, generation prompt)          <|user|>Hi<|answer|>
    render(system, user, assistant)                  <|user|>Hi<|answer|>Hello<|end|>
    render(system, user, assistant, user, assistant) <|user|>Hi<|answer|>Hello<|end|><|user|>And?<|answer|>Well<|end|>
    answers                                                              ^^^^^^^^^^^^                      ^^^^^^^^^^^

A call of a tool is an answer, and what the tool gave is none. Messages that say ``train: false`` are answers of which
nothing is learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.record_files import BadRecord, BadRecords
from hetero_mpi.data.records import ChatMessage, Record
from hetero_mpi.data.tokenizer import encoded, end_token, faults_named, in_batches, own_tokens_only
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
"""The plain form: a heading over every message, the end token behind every answer, an empty line between messages. A tokenizer
that begins every text with a special token gets it in front."""

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
    with_tools: str | None = None
    """The one for records with tools, where the tokenizer has one of its own for them."""


@dataclass(frozen=True)
class Tokenized:
    record: Record
    ids: npt.NDArray[np.int32]
    """int32 [n]."""
    answer: npt.NDArray[np.bool_]
    """bool [n]: whether the token belongs to an answer that is learnt, its end token included."""
    never: npt.NDArray[np.bool_]
    """bool [n]: whether it belongs to an answer that is not learnt, not even with the prompts."""


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
        calling = next((record for record in records if record.needs_tools()), None)
        if calling is not None:
            raise UserError(
                f"records with tools need a chat template that can print them, and the plain form cannot ({calling.source} "
                f'has tools). Set data.template = "chat" and tokenizer.path to a tokenizer with such a template.'
            )
        # As Llama's and Gemma's tokenizers begin every text with their beginning token.
        begin = tokenizer.bos_token_id
        begins = begin is not None and encoded(own_tokens_only(tokenizer), ["a"], special=True)[0][:1] == [begin]
        return Form("plain", ("{{- bos_token }}" if begins else "") + PLAIN_FORM)
    if not has_template(tokenizer):
        raise UserError(f'data.template = "chat" needs a tokenizer with a chat template; this one has none. {REMEDY}')
    try:
        sources = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])]
    except ValueError as error:
        raise UserError(
            f'data.template = "{template}": the tokenizer\'s chat template cannot be chosen: {error}'
        ) from None
    return Form("chat", *((FROZEN_DATE if "strftime_now" in source else "") + source for source in sources))


def render_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, template: Template | None) -> list[int]:
    """Token ids of a user's prompt, wrapped as training wrapped it, up to where the answer begins.

    ``template`` is ``data.template`` of a job with records, and None for a job with text, whose prompt is simply the
    beginning of a document (an empty one begins after an end token). Raises UserError as :func:`choose_form` does.
    """
    backend = own_tokens_only(tokenizer)
    if template is None:
        return encoded(backend, [prompt])[0] or [end_token(tokenizer)]
    form = choose_form(tokenizer, template)
    return render_messages(tokenizer, backend, form, [{"role": "user", "content": prompt}], "the prompt")


def render_messages(
    tokenizer: PreTrainedTokenizerFast,
    backend: Tokenizer,
    form: Form,
    conversation: Sequence[Mapping[str, Any]],
    source: str,
) -> list[int]:
    """Token ids of a conversation up to where the next answer begins.

    ``backend``: of :func:`own_tokens_only`. Raises UserError when the template refuses the conversation.
    """
    try:
        text = _render(tokenizer, form, conversation, asking=True)
    except BadRecord as problem:
        raise UserError(f"{source}: {problem}") from problem
    return encoded(backend, [text])[0]


def plain_texts(records: Iterable[Record]) -> Iterator[str]:
    """The records' text in the plain form without special tokens, to train a tokenizer on."""
    headings = {"system": "## About", "user": "## Task", "assistant": "## Answer", "tool": "## Result"}
    for record in records:
        yield "\n\n".join(f"{headings[message.role]}\n{message.content}" for message in record.messages)


def tokenize_records(
    tokenizer: PreTrainedTokenizerFast, form: Form, records: Iterable[Record], bad: BadRecords | None = None
) -> Iterator[Tokenized]:
    """Every record as tokens, in order, with its answers marked.

    The template alone decides on special tokens: the tokenizer adds none, so none is doubled. What is learnt is what
    transformers' masks of assistant tokens hold where a template marks its answers (``{% generation %}``): an answer with the
    end token, or what else the template closes it with (Gemma's end of turn), and not the line breaks behind that. Where
    a template closes the last message with something else, the end token follows. What stands behind the last answer that
    is learnt is left out.

    A record that the template refuses, or in which answers cannot be told from prompts, goes to ``bad``. Raises UserError
    when no more may be skipped.
    """
    backend, end = own_tokens_only(tokenizer), end_token(tokenizer)
    rendered = _all_rendered(tokenizer, form, records, bad)
    for some in in_batches(rendered, lambda one: len(one.text) * (1 + len(one.spans))):
        yield from _tokenized(backend, end, some)


@dataclass(frozen=True)
class _Rendered:
    """A record as text; ``spans`` are its answers, [first, last) in characters, ascending."""

    record: Record
    text: str
    spans: tuple[tuple[int, int], ...]

    def edges(self) -> list[int]:
        """Where answers begin or end, in characters, ascending, each once."""
        return sorted({edge for span in self.spans for edge in span})


def _all_rendered(
    tokenizer: PreTrainedTokenizerFast, form: Form, records: Iterable[Record], bad: BadRecords | None
) -> Iterator[_Rendered]:
    for record in records:
        try:
            yield _rendered(tokenizer, form, record)
        except BadRecord as problem:
            if bad is None or not bad.allowed:
                raise UserError(f"{record.source}: {problem}") from problem
            bad.add(record.source, problem)
            bad.check("the data")


def _rendered(tokenizer: PreTrainedTokenizerFast, form: Form, record: Record) -> _Rendered:
    messages = record.messages
    conversation, text = _whole(tokenizer, form, record)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        question = _render(tokenizer, form, conversation[:index], record.tools, asking=True)
        closed = text
        if index < len(messages) - 1:
            closed = _render(tokenizer, form, conversation[: index + 1], record.tools)
        first: int | None = len(question)
        if not text.startswith(question):
            before = _render(tokenizer, form, conversation[:index], record.tools)
            first = _answer_begin(text, before, question, message)
            if first is None and question.startswith(before):
                first = _behind_header(text, spans[-1][1] if spans else 0, question[len(before) :], message)
        last = None if first is None else _answer_end(text, first, question, closed, message)
        if first is None or last is None or (spans and spans[-1][1] > first):
            raise BadRecord(
                f"the tokenizer's chat template must render the beginning of a conversation as the beginning "
                f"of the whole; for message {index + 1} of {len(messages)} it does not, so that the answer cannot be "
                f"told from the prompt. {WAY_OUT}, or split the record after each answer."
            )
        spans.append((first, _without_spaces(text, first, last, message.content)))
    return _Rendered(record, text, tuple(spans))


def _whole(tokenizer: PreTrainedTokenizerFast, form: Form, record: Record) -> tuple[Sequence[Mapping[str, Any]], str]:
    """(what the template gets, the text that it makes of it): the messages as they stand in the file, if it can print them so.

    Many templates cannot print content in parts, which is joined for them then, or print the arguments of a call that stand
    in the file as JSON in a text, as OpenAI's do, as JSON of that text: they get what the text holds.
    """
    given = [message.given or {"role": message.role, "content": message.content} for message in record.messages]
    plainer = [_plainer(message) for message in record.messages]
    try:
        text = _render(tokenizer, form, given, record.tools)
    except BadRecord:
        if plainer == given:
            raise
        text = None
    if plainer != given and (text is None or _garbled(text, record.messages)):
        given, text = plainer, _render(tokenizer, form, plainer, record.tools)
    assert text is not None
    lost = [call["name"] for message in record.messages for call in message.calls() if call["name"] not in text]
    if lost:
        raise BadRecord(f"the tokenizer's chat template prints nothing of the call of {lost[0]!r}. {WAY_OUT}.")
    return given, text


def _plainer(message: ChatMessage) -> Mapping[str, Any]:
    """The message with its content as one text, and arguments of calls as objects."""
    if message.given is None:
        return {"role": message.role, "content": message.content}
    found = dict(message.given)
    if isinstance(found.get("content"), list):
        found["content"] = message.content
    if message.calls():
        found["tool_calls"] = [
            {**call, "function": _opened(call["function"])} if "function" in call else _opened(call)
            for call in found["tool_calls"]
        ]
    return found


def _opened(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    try:
        opened = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        opened = None
    return {**function, "arguments": opened} if isinstance(opened, dict) else function


def _garbled(text: str, messages: Sequence[ChatMessage]) -> bool:
    """Does a text lack a part of a message's content, print parts as Python does, or arguments as JSON of a text?"""
    for message in messages:
        content = (message.given or {}).get("content")
        parts = content if isinstance(content, list) else []
        if parts and (str(parts) in text or any(part["text"].strip() not in text for part in parts)):
            return True
        arguments = [call.get("arguments") for call in message.calls()]
        if any(isinstance(one, str) and json.dumps(one, ensure_ascii=False) in text for one in arguments):
            return True
    return False


def _answer_begin(text: str, before: str, question: str, message: ChatMessage) -> int | None:
    """Where in ``text`` an answer begins that does not begin as its ``question`` ends; None when that is not to be told.

    Some templates (Qwen3.5's, DeepSeek-R1's) ask by the beginning of a thought, which they leave out of an answer that has none.
    Then it begins where both part: what it lacks are line breaks and what begins with an angle bracket. ``before``: the
    conversation up to it, without the request to answer.
    """
    if not text.startswith(before) or not question.startswith(before):
        return None
    shared = next(place for place in range(len(before), len(question)) if text[place : place + 1] != question[place])
    opened = text.rfind("<", len(before), shared)
    if opened >= 0 and ">" not in text[opened:shared]:
        shared = opened
    said = text.find(message.content.strip(), len(before)) if message.content.strip() else shared
    begin = min(shared, said)
    lacking = question[begin:].lstrip()
    return begin if begin > len(before) and lacking[:1] in ("", "<") else None


def _behind_header(text: str, last: int, header: str, message: ChatMessage) -> int | None:
    """Where an answer begins whose conversation so far is rendered otherwise than in the whole: behind the ``header`` that stands
    between the ``last`` answer and what the message says. None: there is none.

    Some templates (Qwen3.5's) print thoughts of the calls of tools that follow the last question only. The header may lack what
    asks for a thought: it is looked for whole, then without what begins at its last angle brackets.
    """
    said = message.content.strip() or message.calls()[0]["name"]
    headers = [
        header[:end]
        for end in (len(header), *(place for place in range(len(header) - 1, 0, -1) if header[place] == "<"))
    ]
    place = text.find(said, last)
    while place >= 0:
        for part in headers:
            if (begin := text.rfind(part, last, place)) >= 0:
                return begin + len(part)
        place = text.find(said, place + 1)
    return None


def _answer_end(text: str, begin: int, question: str, closed: str, message: ChatMessage) -> int | None:
    """Where in ``text`` the answer ends that begins at ``begin``; None when that is not to be told.

    ``closed`` is the conversation that ends with this answer, to the ``question``. Some templates (Qwen3's) print an empty
    thought in front of the last answer only; then the answer is the longest end of ``closed`` that the text goes on with, and
    that holds what the message says.
    """
    if text.startswith(closed):
        return len(closed)
    alike = begin if closed.startswith(text[:begin]) else len(question) if closed.startswith(question) else len(closed)
    said = [message.content.strip(), *(call["name"] for call in message.calls())]
    for place in range(alike, min(map(closed.rfind, said)) + 1):
        if closed[place] == text[begin] and text.startswith(closed[place:], begin):
            return begin + len(closed) - place
    return None


def _without_spaces(text: str, first: int, last: int, content: str) -> int:
    """The end of the answer [first, last) of ``text`` without the spaces and line breaks that the template prints at its end."""
    own = next((part for part in (content, content.strip()) if part in text[first:last]), "")
    said = first + text[first:last].rfind(own) + len(own) if content.strip() else first
    return max(said, len(text[:last].rstrip()))


def _render(
    tokenizer: PreTrainedTokenizerFast,
    form: Form,
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    asking: bool = False,
) -> str:
    """The messages as text; ``asking``: up to where the next answer begins. Raises BadRecord when the template refuses them."""
    try:
        return str(
            tokenizer.apply_chat_template(
                list(conversation),
                tools=tools,
                chat_template=form.source if tools is None else form.with_tools or form.source,
                add_generation_prompt=asking,
                tokenize=False,
            )
        )
    except Exception as error:  # a template is a program from somebody else: it may raise anything
        roles = ", ".join(message["role"] for message in conversation)
        raise BadRecord(
            f"the tokenizer's chat template must accept the conversation; it refused messages of {roles}: "
            f"{type(error).__name__}: {error}. {WAY_OUT}, or change the record."
        ) from error


def _tokenized(backend: Tokenizer, end: int, waiting: Sequence[_Rendered]) -> Iterator[Tokenized]:
    """Tokenises the texts and all their beginnings at one go, so that all threads of the tokenizer have work."""
    texts = [text for one in waiting for text in (one.text, *(one.text[:edge] for edge in one.edges()))]
    with faults_named("the tokenizer cannot tokenise the records"):
        encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
    for rendered in waiting:
        whole = next(encodings)
        beginnings = {edge: next(encodings).ids for edge in rendered.edges()}
        ids = list(whole.ids)
        answer, never = np.zeros((2, len(ids)), dtype=np.bool_)
        trained = [message.trained for message in rendered.record.messages if message.role == "assistant"]
        for span, learnt in zip(rendered.spans, trained, strict=True):
            first, last = _tokens_of(whole, beginnings, span)
            # Without what the template prints behind its end token, if it has one.
            last = next((index + 1 for index in range(last - 1, first - 1, -1) if ids[index] == end), last)
            (answer if learnt else never)[first:last] = True
        # What stands behind the last answer is nobody's context: the record ends with the end token, the template's or,
        # where it closes answers with something else, ours.
        final = int(np.flatnonzero(answer)[-1]) if answer.any() else -1
        ids, answer, never = ids[: final + 1], answer[: final + 1], never[: final + 1]
        if trained[-1] and (final < 0 or ids[final] != end):
            ids, answer, never = [*ids, end], np.append(answer, True), np.append(never, False)
        yield Tokenized(rendered.record, np.array(ids, dtype=np.int32), answer, never)


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
