"""Parse the messages and tools of a conversation record.

Files differ in the keys of messages and in how they store content parts, tool calls, reasoning and loss weights.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetero_mpi.data.record_shapes import SPELLINGS, BadRecord

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
    "developer": "system",
}
"""Maps the role in a file to the role in a :class:`ChatMessage`."""
LEARNT_BY = ("train", "weight")
"""Keys for the loss weight of a message; OpenAI's files use ``weight``."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1000
"""Bounds of a nonzero weight, chosen so that the product of three weights is a normal number in fp32."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning in a message, as in transformers."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    content: str
    """The text; if the content is a list of parts, their concatenation."""
    original: Mapping[str, Any] | None = None
    """The message as in the file if it has more than a role and a string (tool calls, a name, content parts), else None."""
    trained: float | None = 1.0
    """Loss weight of an answer's tokens: 0 excludes them from the loss; None marks an answer that is part of a prompt."""

    def calls(self) -> list[Mapping[str, Any]]:
        """Return the function calls of the message: objects with ``name`` and usually ``arguments``."""
        return [call.get("function", call) for call in (self.original or {}).get("tool_calls") or ()]


def messages_of(turns: Any, key: str, unread: set[str]) -> list[ChatMessage]:
    """Parse the messages under a record's ``key`` and add their unused keys to ``unread``. Raises BadRecord."""
    if not isinstance(turns, list):
        raise BadRecord("record.messages", f"{key!r} must be a list of messages; it is {kind_name(turns)}")
    # Decide by the keys that are present: some files use one spelling under the other's key.
    objects = [turn for turn in turns if isinstance(turn, dict)]
    spellings = (pair for pair in SPELLINGS.values() if all(key in turn for turn in objects for key in pair))
    spelling = next(spellings, SPELLINGS.get(key, SPELLINGS["messages"]))
    return [_parse_message(turn, f"{key}[{index}]", spelling, unread) for index, turn in enumerate(turns)]


def turns_of(value: Any, role: Role, name: str, unread: set[str]) -> list[ChatMessage]:
    """Parse messages, or one string as a message with the given role. Raises BadRecord."""
    if isinstance(value, list | dict):
        return messages_of(value if isinstance(value, list) else [value], name, unread)
    return [ChatMessage(role, text_of(value, name))]


def tools_of(tools: Any, key: str) -> list[Mapping[str, Any]] | None:
    """Parse a list of tool objects, or a JSON string that holds such a list. Raises BadRecord."""
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    parsed = json_of(tools)
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        what = "text that is not valid JSON" if isinstance(parsed, str) else kind_name(parsed)
        raise BadRecord("record.tools", f"{key!r} must be a list of objects, or JSON with such a list; it is {what}")
    _check_characters(parsed, repr(key))
    return parsed


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRecord("record.text", f"{name!r} must be text; it is {kind_name(value)}")
    _check_characters(value, repr(name))
    return value


def _check_characters(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRecord("record.surrogate", f"{where} contains a lone surrogate (half a character)") from None


def json_of(value: Any) -> Any:
    """Parse a JSON string; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def kind_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}"
    return names.get(type(value), number)


def _parse_message(turn: Any, where: str, spelling: tuple[str, str], unread: set[str]) -> ChatMessage:
    if not isinstance(turn, dict):
        raise BadRecord(
            "record.message",
            f"{where} must be an object with {spelling[0]!r} and {spelling[1]!r}; it is {kind_name(turn)}",
        )
    turn = _with_calls(turn, where, spelling)
    values = {key: value for key, value in turn.items() if value is not None}
    role, content, calls = turn.get(spelling[0]), turn.get(spelling[1]), values.get("tool_calls")
    if spelling[0] not in turn or (spelling[1] not in turn and not calls):
        has = ", ".join(map(repr, turn)) or "no keys"
        raise BadRecord("record.message", f"{where} must have {spelling[0]!r} and {spelling[1]!r}; it has {has}")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord("record.role", f"{where} has the role {role!r}; supported roles: {', '.join(ROLES)}")
    text = "" if content is None else _content_text(content, f"{where}.{spelling[1]}")
    for key, check in _VALIDATORS.items():
        if key in values:
            check(values[key], f"{where}.{key}")
    trained = _loss_weight(values, where, ROLES[role])
    extra = {key: value for key, value in values.items() if key not in (*spelling, *LEARNT_BY)}
    unread |= {f"messages[].{key}" for key in extra.keys() - _USED_KEYS if extra[key] not in ("", [], {})}
    if not extra and not isinstance(content, list):
        return ChatMessage(ROLES[role], text, None, trained)
    original = {"role": ROLES[role], **({} if calls and content is None else {"content": content or ""}), **extra}
    _check_characters(original, where)
    return ChatMessage(ROLES[role], text, original, trained)


def _with_calls(turn: dict[str, Any], where: str, spelling: tuple[str, str]) -> dict[str, Any]:
    """Convert a ``function_call``, as in older OpenAI files and ShareGPT, to ``tool_calls``."""
    functions, rest = turn.get("function_call"), {key: value for key, value in turn.items() if key != "function_call"}
    if turn.get(spelling[0]) == "function_call":
        functions = json_of(turn.get(spelling[1]))
        rest = {**rest, spelling[0]: "assistant", spelling[1]: None}
        if not isinstance(functions, dict | list):
            raise BadRecord(
                "record.call",
                f"{where} is a function call: it must be JSON with 'name' and 'arguments'; it is {kind_name(functions)}",
            )
    if functions is None or rest.get("tool_calls"):
        return turn
    calls = functions if isinstance(functions, list) else [functions]
    return {**rest, "tool_calls": [{"type": "function", "function": function} for function in calls]}


def _content_text(content: Any, where: str) -> str:
    """Return the text of a message, concatenating its parts. Raises BadRecord."""
    if not isinstance(content, list):
        return text_of(content, where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"of type {kind!r}" if isinstance(part, dict) else kind_name(part)
            raise BadRecord(
                "record.content_part",
                f"{where}[{index}] must be a part of type 'text'; it is {what}, which is not supported",
            )
    return "".join(text_of(part.get("text"), f"{where}[{index}].text") for index, part in enumerate(content))


def weight_of(value: Any, where: str) -> float:
    """Parse a loss weight. Raises BadRecord."""
    if type(value) not in (bool, int, float) or not 0 <= value <= MOST_WEIGHT:
        value_text = json.dumps(value, ensure_ascii=False, default=str)[:40]
        raise BadRecord(
            "record.weight", f"{where} must be a number from 0 to {MOST_WEIGHT:,}, or true or false; it is {value_text}"
        )
    if 0 < value < LEAST_WEIGHT:
        raise BadRecord("record.weight", f"{where} must be 0, or at least {LEAST_WEIGHT:g}; it is {value:g}")
    return float(value)


def _loss_weight(values: Mapping[str, Any], where: str, role: Role) -> float:
    """Return the loss weight of a message. Raises BadRecord if a message that is not an answer requests a loss."""
    for key in (key for key in LEARNT_BY if key in values):
        if weight_of(values[key], f"{where}.{key}") and role != "assistant":
            raise BadRecord(
                "record.trained_role",
                f"{where}.{key} requests a loss on a {role} message: data.train_on_prompt enables it for all prompts",
            )
    return math.prod(float(values.get(key, 1)) for key in LEARNT_BY)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise BadRecord("record.calls", f"{where} must be a list of calls; it is {kind_name(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(
                "record.calls", f'{where}[{index}] must be {{"function": {{"name": "...", "arguments": {{...}}}}}}'
            )


_VALIDATORS: dict[str, Callable[[Any, str], object]] = {"tool_calls": _check_calls, **dict.fromkeys(REASONING, text_of)}
"""Maps keys of a message to validators of their values."""
_USED_KEYS = {*_VALIDATORS, *LEARNT_BY, "name", "tool_call_id"}
"""Keys of a message besides role and content that a template or this program may use."""
