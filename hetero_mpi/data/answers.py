"""A conversation -> its text by a chat template, and where in the text its answers are.

The answers are found by rendering beginnings of the conversation, as generation will: an answer starts where the rendered
question with the generation prompt ends, and ends where the conversation up to it ends. Nothing is assumed about the template
but that, and it is checked for every record::

    render(system, user, generation prompt)          <|user|>Hi<|answer|>
    render(system, user, assistant)                  <|user|>Hi<|answer|>Hello<|end|>
    render(system, user, assistant, user, assistant) <|user|>Hi<|answer|>Hello<|end|><|user|>And?<|answer|>Well<|end|>
    answers                                                              ^^^^^^^^^^^^                      ^^^^^^^^^^^

Where a template marks its answers (``{% generation %}``), transformers' own marks are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.chat_template_utils import render_jinja_template

from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.printed_parts import Conversation, spoken, unprinted
from hetero_mpi.data.record_shapes import BadRecord

WAY_OUT = 'Set data.template = "plain", or tokenizer.path to a tokenizer whose chat template does'
MOST_CHARACTERS = 2**24
"""More of one conversation is no text to learn from, but a template that runs wild."""
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations become text: a Jinja chat template, with what it knows of its tokenizer. Plain values."""

    kind: Literal["chat", "plain", "none"]
    source: str
    with_tools: str | None
    """The one for records with tools, where the tokenizer has one of its own for them."""
    special: Mapping[str, Any]
    """The tokenizer's ``special_tokens_map``."""
    ours: bool = False
    """It is the plain form, or none, by whatever way it came here, and needs no process of its own."""

    def text(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None = None, asking: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """(the messages as text, [first, last) of what the template marks as answers); None: it marks nothing. Exactly as
        ``apply_chat_template`` of transformers. ``asking``: up to where the next answer begins. Raises BadRecord.
        """
        source = self.source if tools is None else self.with_tools or self.source
        marked = _MARKS.search(source) is not None
        try:
            (text,), marks = render_jinja_template(
                # As apply_chat_template does: a key that is null is none.
                [[{key: value for key, value in turn.items() if value is not None} for turn in conversation]],
                tools=None if tools is None else list(tools),
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=asking,
                **self.special,
            )
        except MemoryError:
            raise BadRecord(
                "template.memory", f"the tokenizer's chat template needs more memory than it may have. {WAY_OUT} not."
            ) from None
        except Exception as error:  # a template is a program from somebody else: it may raise anything
            roles = ", ".join(str(turn.get("role")) for turn in conversation)
            raise BadRecord(
                "template.refused",
                f"the tokenizer's chat template must accept the conversation; it refused messages of {roles}: "
                f"{type(error).__name__}: {error}. {WAY_OUT}, or change the record.",
            ) from error
        if len(text) > MOST_CHARACTERS:
            raise BadRecord(
                "template.too_long",
                f"the tokenizer's chat template prints {len(text):,} characters of one conversation, and may print "
                f"{MOST_CHARACTERS:,}. {WAY_OUT} not.",
            )
        return text, sorted({(first, last) for first, last in marks[0] if last > first}) if marked else None


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: Sequence[tuple[int, int, float | None]]
    """Its answers, ascending: [first, last) in characters, and how they are learnt (:attr:`ChatMessage.trained`)."""
    marked: bool
    """The template itself marks its answers."""
    forgotten: bool
    """Thoughts of earlier answers are left out."""


def rendered(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    begin: Callable[[], object] = lambda: None,
) -> Rendered:
    """``begin``: is called before each rendering. Raises BadRecord: the template refuses the conversation, prints less than it
    holds, or hides where its answers are.
    """

    def text_of(some: Conversation, asking: bool) -> str:
        begin()
        return template.text(some, tools, asking)[0]

    begin()
    conversation, text, marks, forgotten = _whole(template, messages, tools)
    if marks is not None:
        return Rendered(text, _marked(text, marks, messages), True, forgotten)
    whole = _Whole(text, messages, conversation, text_of, str(template.special.get("eos_token") or ""))
    return Rendered(text, whole.spans(), False, forgotten)


@dataclass(frozen=True)
class _Whole:
    """A conversation as the template gets it, and as text."""

    text: str
    messages: Sequence[ChatMessage]
    given: Conversation
    render: Callable[[Conversation, bool], str]
    """Its text; True: up to where the next answer begins."""
    final: str
    """The end token of the model, or nothing."""

    def spans(self) -> list[tuple[int, int, float | None]]:
        """:attr:`Rendered.spans`. Raises BadRecord."""
        spans: list[tuple[int, int, float | None]] = []
        for index, message in enumerate(self.messages):
            if message.role != "assistant":
                continue
            behind = spans[-1][1] if spans else 0
            found = self._answer(index, behind)
            if found is None or behind > found[0]:
                raise BadRecord(
                    "template.prefix",
                    f"the tokenizer's chat template must render the beginning of a conversation as the beginning of the "
                    f"whole; for message {index + 1} of {len(self.messages)} it does not, so that the answer cannot be "
                    f"told from the prompt. {WAY_OUT}, or split the record after each answer.",
                )
            spans.append((found[0], _without_spaces(self.text, *found, message), message.trained))
        return spans

    def _answer(self, index: int, behind: int) -> tuple[int, int] | None:
        """The answer with the spaces at its end; None where it cannot be told. ``behind``: where the answer before it ends."""
        text, message = self.text, self.messages[index]
        question = self.render(self.given[:index], True)
        closed = text if index == len(self.messages) - 1 else self.render(self.given[: index + 1], False)
        first: int | None = len(question)
        if not text.startswith(question):
            before = self.render(self.given[:index], False)
            first = _answer_begin(text, before, question, message)
            if first is None and question.startswith(before):
                first = _behind_header(text, behind, question[len(before) :], message)
        last = None if first is None else _answer_end(text, first, question, closed, message)
        if last is None and first is not None and self.final:
            # Phi-3's template ends with the end token of the model where nothing is asked, and not in between.
            last = _answer_end(text, first, question, closed.removesuffix(self.final), message)
        return None if first is None or last is None else (first, last)


def _marked(
    text: str, marks: Sequence[tuple[int, int]], messages: Sequence[ChatMessage]
) -> list[tuple[int, int, float | None]]:
    """The answers as the template marks them: with which of them is learnt."""
    trained = [message.trained for message in messages if message.role == "assistant"]
    if len(marks) != len(trained) and len(set(trained)) > 1:
        raise BadRecord(
            "template.marks",
            f"the tokenizer's chat template marks {len(marks)} answers of {len(trained)}, so that those that are not learnt cannot "
            f"be told from the others. {WAY_OUT}, or split the record after each answer.",
        )
    if spoken(messages[-1]) not in "".join(text[first:last] for first, last in marks):
        raise BadRecord(
            "template.marks",
            f"the tokenizer's chat template must mark the last answer ({{% generation %}}); it does not. {WAY_OUT}.",
        )
    if len(marks) != len(trained):
        trained = [trained[-1]] * len(marks)
    return [(first, last, learnt) for (first, last), learnt in zip(marks, trained, strict=True)]


def _whole(
    template: ChatTemplate, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Conversation, str, list[tuple[int, int]] | None, bool]:
    """(what the template gets, the text that it makes of it, its marks, are thoughts of earlier answers left out): the messages as
    they stand in the file, if it can print them so.

    Many templates cannot print content in parts, which is joined for them then, or print the arguments of a call that stand
    in the file as JSON in a text, as OpenAI's do, as JSON of that text: they get what the text holds.
    """
    given = [message.given or {"role": message.role, "content": message.content} for message in messages]
    plainer = [_plainer(message) for message in messages]
    if plainer != given:
        with suppress(BadRecord):
            text, marks = template.text(given, tools)
            lost, forgotten = unprinted(text, messages, tools)
            if lost is None and not _quoted(text, messages):
                return given, text, marks, forgotten
    text, marks = template.text(plainer, tools)
    lost, forgotten = unprinted(text, messages, tools)
    if lost is not None:
        raise BadRecord(
            "template.prints_nothing",
            f"the tokenizer's chat template prints nothing of {lost}. {WAY_OUT}, or change the record.",
        )
    return plainer, text, marks, forgotten


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


def _quoted(text: str, messages: Sequence[ChatMessage]) -> bool:
    """True: a text prints parts of a message's content as Python does, or arguments as JSON of a text."""
    parts = [(message.given or {}).get("content") for message in messages]
    arguments = [call.get("arguments") for message in messages for call in message.calls()]
    return any(isinstance(one, list) and one and str(one) in text for one in parts) or any(
        isinstance(one, str) and json.dumps(one, ensure_ascii=False) in text for one in arguments
    )


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
    said = text.find(spoken(message), len(before)) if spoken(message) else shared
    begin = min(shared, said)
    lacking = question[begin:].lstrip()
    return begin if begin > len(before) and lacking[:1] in ("", "<") else None


def _behind_header(text: str, last: int, header: str, message: ChatMessage) -> int | None:
    """Where an answer begins whose conversation so far is rendered otherwise than in the whole: behind the ``header`` that stands
    between the ``last`` answer and what the message says. None: there is none.

    Some templates (Qwen3.5's) print thoughts of the calls of tools that follow the last question only. The header may lack what
    asks for a thought: it is looked for whole, then without what begins at its last angle brackets.
    """
    said = spoken(message) or next((call["name"] for call in message.calls()), message.content.strip())
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
    said = [spoken(message), *(call["name"] for call in message.calls())]
    for place in range(alike, min(len(closed), min(map(closed.rfind, said)) + 1)):
        if closed[place] == text[begin : begin + 1] and text.startswith(closed[place:], begin):
            return begin + len(closed) - place
    return None


def _without_spaces(text: str, first: int, last: int, message: ChatMessage) -> int:
    """The end of the answer [first, last) of ``text`` without the spaces and line breaks that the template prints at its end."""
    content, answer = message.content, text[first:last]
    own = next((part for part in (content, content.strip(), spoken(message)) if part in answer), "")
    said = answer.rfind(own) + len(own) if content.strip() else 0
    return first + max(said, len(answer.rstrip()))
