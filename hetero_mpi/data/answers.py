"""Render a conversation with a chat template and locate the assistant's answers in the text.

Answers are located by rendering prefixes of the conversation: an answer starts where the rendered prompt (including the
generation prompt) ends, and it ends where the conversation up to and including that answer ends. This is the only assumption
about the template, and it is checked for every record::

    render(system, user, generation prompt)          <|user|>Hi<|answer|>
    render(system, user, assistant)                  <|user|>Hi<|answer|>Hello<|end|>
    render(system, user, assistant, user, assistant) <|user|>Hi<|answer|>Hello<|end|><|user|>And?<|answer|>Well<|end|>
    answers                                                              ^^^^^^^^^^^^                      ^^^^^^^^^^^

If the template marks its answers (``{% generation %}``), the mask that transformers derives from these marks is used instead.
"""

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
MAX_CHARACTERS = 2**24
"""Maximum length of one rendered conversation; only a runaway template produces more."""
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and its tokenizer's special tokens, as plain, serialisable values."""

    kind: Literal["chat", "plain", "none"]
    source: str
    with_tools: str | None
    """The tokenizer's separate template for records with tools; None if there is no separate one."""
    special: Mapping[str, Any]
    """The tokenizer's ``special_tokens_map``."""
    ours: bool = False
    """Whether the source is one of this program's own templates, which is trusted and rendered in this process."""

    def text(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None = None, asking: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render messages as transformers' ``apply_chat_template`` does; ``asking`` appends the generation prompt.

        Returns the text and the ranges [first, last) that the template marks as answers (None if the template has no marks).
        Raises BadRecord if the template rejects the conversation.
        """
        source = self.source if tools is None else self.with_tools or self.source
        marked = _MARKS.search(source) is not None
        try:
            (text,), marks = render_jinja_template(
                # apply_chat_template also treats a null value as an absent key.
                [[{key: value for key, value in turn.items() if value is not None} for turn in conversation]],
                tools=None if tools is None else list(tools),
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=asking,
                **self.special,
            )
        except MemoryError:
            raise BadRecord(
                "template.memory", f"the tokenizer's chat template exceeds its memory limit. {WAY_OUT} not."
            ) from None
        except Exception as error:  # a template is third-party code and may raise any exception
            roles = ", ".join(str(turn.get("role")) for turn in conversation)
            raise BadRecord(
                "template.refused",
                f"the tokenizer's chat template must accept the conversation; it rejected messages with roles {roles}: "
                f"{type(error).__name__}: {error}. {WAY_OUT}, or change the record.",
            ) from error
        if len(text) > MAX_CHARACTERS:
            raise BadRecord(
                "template.too_long",
                f"the tokenizer's chat template prints {len(text):,} characters for one conversation; the limit is "
                f"{MAX_CHARACTERS:,}. {WAY_OUT} not.",
            )
        return text, sorted({(first, last) for first, last in marks[0] if last > first}) if marked else None


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation and the location of its answers."""

    text: str
    spans: Sequence[tuple[int, int, float | None]]
    """(first, last, loss weight) of each answer in text order: characters [first, last), and :attr:`ChatMessage.trained`."""
    marked: bool
    """Whether the template itself marks its answers."""
    forgotten: bool
    """Whether the template omits the reasoning of earlier answers."""


def rendered(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    begin: Callable[[], object] = lambda: None,
) -> Rendered:
    """Render a conversation and locate its answers. ``begin`` is called before each rendering.

    Raises BadRecord if the template rejects the conversation, drops part of it, or makes its answers impossible to locate.
    """

    def text_of(conversation: Conversation, asking: bool) -> str:
        begin()
        return template.text(conversation, tools, asking)[0]

    begin()
    conversation, text, marks, forgotten = _render_checked(template, messages, tools)
    if marks is not None:
        return Rendered(text, _marked_spans(text, marks, messages), True, forgotten)
    locator = _AnswerLocator(text, messages, conversation, text_of, str(template.special.get("eos_token") or ""))
    return Rendered(text, locator.spans(), False, forgotten)


@dataclass(frozen=True)
class _AnswerLocator:
    """Locates the answers of a conversation in its rendered text."""

    text: str
    messages: Sequence[ChatMessage]
    conversation: Conversation
    render: Callable[[Conversation, bool], str]
    """Renders a conversation; the second argument says whether to append the generation prompt."""
    final: str
    """The tokenizer's end token, or "" if it has none."""

    def spans(self) -> list[tuple[int, int, float | None]]:
        """Return :attr:`Rendered.spans` of the conversation. Raises BadRecord if an answer cannot be located."""
        spans: list[tuple[int, int, float | None]] = []
        for index, message in enumerate(self.messages):
            if message.role != "assistant":
                continue
            previous_end = spans[-1][1] if spans else 0
            answer = self._answer(index, previous_end)
            if answer is None or previous_end > answer[0]:
                raise BadRecord(
                    "template.prefix",
                    f"the tokenizer's chat template must render a prefix of a conversation as a prefix of the full "
                    f"conversation; for message {index + 1} of {len(self.messages)} it does not, so the answer cannot be "
                    f"separated from the prompt. {WAY_OUT}, or split the record after each answer.",
                )
            spans.append((answer[0], _trimmed_end(self.text, *answer, message), message.trained))
        return spans

    def _answer(self, index: int, previous_end: int) -> tuple[int, int] | None:
        """Return the range of an answer including trailing whitespace, or None. ``previous_end``: end of the previous answer."""
        text, message = self.text, self.messages[index]
        question = self.render(self.conversation[:index], True)
        closed = text if index == len(self.messages) - 1 else self.render(self.conversation[: index + 1], False)
        first: int | None = len(question)
        if not text.startswith(question):
            before = self.render(self.conversation[:index], False)
            first = _answer_begin(text, before, question, message)
            if first is None and question.startswith(before):
                first = _answer_after_header(text, previous_end, question[len(before) :], message)
        last = None if first is None else _answer_end(text, first, question, closed, message)
        if last is None and first is not None and self.final:
            # Phi-3's template prints the model's end token after the conversation, but not between its messages.
            last = _answer_end(text, first, question, closed.removesuffix(self.final), message)
        return None if first is None or last is None else (first, last)


def _marked_spans(
    text: str, marks: Sequence[tuple[int, int]], messages: Sequence[ChatMessage]
) -> list[tuple[int, int, float | None]]:
    """Combine the answer ranges that the template marks with their loss weights. Raises BadRecord if they do not match."""
    trained = [message.trained for message in messages if message.role == "assistant"]
    if len(marks) != len(trained) and len(set(trained)) > 1:
        raise BadRecord(
            "template.marks",
            f"the tokenizer's chat template marks {len(marks)} answers of {len(trained)}, so untrained answers cannot be "
            f"separated from trained answers. {WAY_OUT}, or split the record after each answer.",
        )
    if spoken(messages[-1]) not in "".join(text[first:last] for first, last in marks):
        raise BadRecord(
            "template.marks",
            f"the tokenizer's chat template must mark the last answer ({{% generation %}}); it does not. {WAY_OUT}.",
        )
    if len(marks) != len(trained):
        trained = [trained[-1]] * len(marks)
    return [(first, last, learnt) for (first, last), learnt in zip(marks, trained, strict=True)]


def _render_checked(
    template: ChatTemplate, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Conversation, str, list[tuple[int, int]] | None, bool]:
    """Render the messages in a form that the template prints completely.

    The messages are passed exactly as in the file if the template prints them completely. Many templates cannot print content
    that is a list of parts, or quote tool-call arguments that are stored as a JSON string (OpenAI's form). For these templates,
    the parts are joined and the arguments are parsed.

    Returns the conversation as passed, its text, the marked ranges, and whether the reasoning of earlier answers is omitted.
    """
    originals = [message.original or {"role": message.role, "content": message.content} for message in messages]
    plain_messages = [_plain_message(message) for message in messages]
    if plain_messages != originals:
        with suppress(BadRecord):
            text, marks = template.text(originals, tools)
            missing_part, forgotten = unprinted(text, messages, tools)
            if missing_part is None and not _prints_repr(text, messages):
                return originals, text, marks, forgotten
    text, marks = template.text(plain_messages, tools)
    missing_part, forgotten = unprinted(text, messages, tools)
    if missing_part is not None:
        raise BadRecord(
            "template.prints_nothing",
            f"the tokenizer's chat template omits {missing_part}. {WAY_OUT}, or change the record.",
        )
    return plain_messages, text, marks, forgotten


def _plain_message(message: ChatMessage) -> Mapping[str, Any]:
    """Convert a message so that its content is one string and the arguments of its tool calls are objects."""
    if message.original is None:
        return {"role": message.role, "content": message.content}
    plain = dict(message.original)
    if isinstance(plain.get("content"), list):
        plain["content"] = message.content
    if message.calls():
        plain["tool_calls"] = [
            {**call, "function": _parse_arguments(call["function"])} if "function" in call else _parse_arguments(call)
            for call in plain["tool_calls"]
        ]
    return plain


def _parse_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        parsed = None
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function


def _prints_repr(text: str, messages: Sequence[ChatMessage]) -> bool:
    """Whether the text contains a list of content parts as a Python repr, or arguments as a quoted JSON string."""
    parts = [(message.original or {}).get("content") for message in messages]
    arguments = [call.get("arguments") for message in messages for call in message.calls()]
    return any(isinstance(value, list) and value and str(value) in text for value in parts) or any(
        isinstance(value, str) and json.dumps(value, ensure_ascii=False) in text for value in arguments
    )


def _answer_begin(text: str, before: str, question: str, message: ChatMessage) -> int | None:
    """Find where an answer begins if ``text`` does not start with its rendered prompt; None if it cannot be located.

    Some generation prompts (Qwen3.5's, DeepSeek-R1's) open a reasoning block that the template omits from an answer without
    reasoning. The answer then begins where the two texts diverge, and the missing part of the prompt is empty or starts with "<"
    after whitespace. ``question`` ends with the generation prompt; ``before`` is the same conversation without it.
    """
    if not text.startswith(before) or not question.startswith(before):
        return None
    divergence = next(i for i in range(len(before), len(question)) if text[i : i + 1] != question[i])
    bracket = text.rfind("<", len(before), divergence)
    if bracket >= 0 and ">" not in text[bracket:divergence]:
        divergence = bracket
    text_start = text.find(spoken(message), len(before)) if spoken(message) else divergence
    begin = min(divergence, text_start)
    missing_prompt = question[begin:].lstrip()
    return begin if begin > len(before) and missing_prompt[:1] in ("", "<") else None


def _answer_after_header(text: str, previous_end: int, header: str, message: ChatMessage) -> int | None:
    """Find where an answer begins if the messages before it are rendered differently in the full conversation; None if not found.

    Some templates (Qwen3.5's) print the reasoning of tool calls only after the last question. The answer then begins after the
    last occurrence of ``header`` (the generation prompt) between ``previous_end`` and the message's own text. The text may omit
    the reasoning block that the header opens, so the prefixes of the header that end before a "<" are tried too, longest first.
    """
    needle = spoken(message) or next((call["name"] for call in message.calls()), message.content.strip())
    ends = [position for position in range(len(header) - 1, 0, -1) if header[position] == "<"]
    headers = [header, *(header[:end] for end in ends)]
    position = text.find(needle, previous_end)
    while position >= 0:
        for candidate in headers:
            if (begin := text.rfind(candidate, previous_end, position)) >= 0:
                return begin + len(candidate)
        position = text.find(needle, position + 1)
    return None


def _answer_end(text: str, begin: int, question: str, closed: str, message: ChatMessage) -> int | None:
    """Find where the answer that begins at ``begin`` ends in ``text``; None if it cannot be located.

    ``closed`` is the rendered conversation up to and including this answer; ``question`` is its prompt. Some templates (Qwen3's)
    print an empty reasoning block only before the last answer. The answer is then the longest suffix of ``closed`` that matches
    the text at ``begin`` and contains the message's own text.
    """
    if text.startswith(closed):
        return len(closed)
    start = begin if closed.startswith(text[:begin]) else len(question) if closed.startswith(question) else len(closed)
    needles = [spoken(message), *(call["name"] for call in message.calls())]
    for position in range(start, min(len(closed), min(map(closed.rfind, needles)) + 1)):
        if closed[position] == text[begin : begin + 1] and text.startswith(closed[position:], begin):
            return begin + len(closed) - position
    return None


def _trimmed_end(text: str, first: int, last: int, message: ChatMessage) -> int:
    """Return the end of the answer ``text[first:last]`` without the whitespace that the template appends."""
    content, answer = message.content, text[first:last]
    printed_content = next((part for part in (content, content.strip(), spoken(message)) if part in answer), "")
    content_end = answer.rfind(printed_content) + len(printed_content) if content.strip() else 0
    return first + max(content_end, len(answer.rstrip()))
