"""Messages of a conversation as files of records have them: under either spelling of their keys, with content in parts, calls of
tools old and new, thoughts, and whether they are learnt. Tools that a conversation may call.
"""

from __future__ import annotations

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
"""Role in a file -> role in a :class:`ChatMessage`."""
LEARNT_BY = ("train", "weight")
"""Keys of a message that say whether it is learnt, and how much; OpenAI's files have the second."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1000
"""Between them, or 0: products of three are still numbers in fp32."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its thought, as transformers knows them."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    content: str
    """Text; of a list of parts, that of all of them."""
    given: Mapping[str, Any] | None = None
    """As the file has it, where that is more than a role and a text: calls of tools, a name, content in parts."""
    trained: float | None = 1.0
    """Weight of an answer's tokens in the loss, 0: it is not learnt; None: it is learnt as what is asked is."""

    def calls(self) -> list[Mapping[str, Any]]:
        """The functions that it calls: ``name``, and mostly ``arguments``."""
        return [call.get("function", call) for call in (self.given or {}).get("tool_calls") or ()]


def messages_of(turns: Any, key: str, unread: set[str]) -> list[ChatMessage]:
    """The messages under a record's ``key``. ``unread``: is given their keys that nobody reads. Raises BadRecord."""
    if not isinstance(turns, list):
        raise BadRecord("record.messages", f"{key!r} must be a list of messages; it is {kind_name(turns)}")
    # By what stands there: files have one spelling under the key of another.
    objects = [turn for turn in turns if isinstance(turn, dict)]
    fitting = (one for one in SPELLINGS.values() if all(key in turn for turn in objects for key in one))
    spelling = next(fitting, SPELLINGS.get(key, SPELLINGS["messages"]))
    return [_message(turn, f"{key}[{index}]", spelling, unread) for index, turn in enumerate(turns)]


def turns_of(value: Any, role: Role, name: str, unread: set[str]) -> list[ChatMessage]:
    """A text of a role, or messages as they are. Raises BadRecord."""
    if isinstance(value, list | dict):
        return messages_of(value if isinstance(value, list) else [value], name, unread)
    return [ChatMessage(role, text_of(value, name))]


def tools_of(tools: Any, key: str) -> list[Mapping[str, Any]] | None:
    """A list of objects, which some files hold as JSON in a text. Raises BadRecord."""
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    found = json_of(tools)
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        what = "a text that is no JSON" if isinstance(found, str) else kind_name(found)
        raise BadRecord("record.tools", f"{key!r} must be a list of objects, or JSON of one; it is {what}")
    _check_characters(found, repr(key))
    return found


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRecord("record.text", f"{name!r} must be text; it is {kind_name(value)}")
    _check_characters(value, repr(name))
    return value


def _check_characters(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRecord("record.surrogate", f"{where} holds half a character (a lone surrogate)") from None


def json_of(value: Any) -> Any:
    """The JSON value in a text, if it holds one; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def kind_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else f"of the type {type(value).__name__}"
    return names.get(type(value), number)


def _message(turn: Any, where: str, spelling: tuple[str, str], unread: set[str]) -> ChatMessage:
    if not isinstance(turn, dict):
        raise BadRecord(
            "record.message",
            f"{where} must be an object with {spelling[0]!r} and {spelling[1]!r}; it is {kind_name(turn)}",
        )
    turn = _with_calls(turn, where, spelling)
    said = {key: value for key, value in turn.items() if value is not None}
    role, content, calls = turn.get(spelling[0]), turn.get(spelling[1]), said.get("tool_calls")
    if spelling[0] not in turn or (spelling[1] not in turn and not calls):
        has = ", ".join(map(repr, turn)) or "no keys"
        raise BadRecord("record.message", f"{where} must have {spelling[0]!r} and {spelling[1]!r}; it has {has}")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord("record.role", f"{where} has the role {role!r}; accepted are {', '.join(ROLES)}")
    text = "" if content is None else _content(content, f"{where}.{spelling[1]}")
    for key, check in _FURTHER.items():
        if key in said:
            check(said[key], f"{where}.{key}")
    trained = _trained(said, where, ROLES[role])
    further = {key: value for key, value in said.items() if key not in (*spelling, *LEARNT_BY)}
    unread |= {f"messages[].{key}" for key in further.keys() - _KNOWN if further[key] not in ("", [], {})}
    if not further and not isinstance(content, list):
        return ChatMessage(ROLES[role], text, None, trained)
    given = {"role": ROLES[role], **({} if calls and content is None else {"content": content or ""}), **further}
    _check_characters(given, where)
    return ChatMessage(ROLES[role], text, given, trained)


def _with_calls(turn: dict[str, Any], where: str, spelling: tuple[str, str]) -> dict[str, Any]:
    """The message with its call of a function, which OpenAI's older files and ShareGPT's have as such, as one of a tool."""
    called, rest = turn.get("function_call"), {key: value for key, value in turn.items() if key != "function_call"}
    if turn.get(spelling[0]) == "function_call":
        called = json_of(turn.get(spelling[1]))
        rest = {**rest, spelling[0]: "assistant", spelling[1]: None}
        if not isinstance(called, dict | list):
            raise BadRecord(
                "record.call",
                f"{where} is a call of a function: it must be JSON with 'name' and 'arguments'; it is {kind_name(called)}",
            )
    if called is None or rest.get("tool_calls"):
        return turn
    calls = called if isinstance(called, list) else [called]
    return {**rest, "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _content(content: Any, where: str) -> str:
    """The text of a message: of all its parts, where it has parts."""
    if not isinstance(content, list):
        return text_of(content, where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"of the type {kind!r}" if isinstance(part, dict) else kind_name(part)
            raise BadRecord(
                "record.content_part",
                f"{where}[{index}] must be a part of the type 'text'; it is {what}, which is not learnt here",
            )
    return "".join(text_of(part.get("text"), f"{where}[{index}].text") for index, part in enumerate(content))


def weight_of(value: Any, where: str) -> float:
    """Raises BadRecord."""
    if type(value) not in (bool, int, float) or not 0 <= value <= MOST_WEIGHT:
        shown = json.dumps(value, ensure_ascii=False, default=str)[:40]
        raise BadRecord(
            "record.weight", f"{where} must be a number from 0 to {MOST_WEIGHT:,}, or true or false; it is {shown}"
        )
    if 0 < value < LEAST_WEIGHT:
        raise BadRecord("record.weight", f"{where} must be 0, or at least {LEAST_WEIGHT:g}; it is {value:g}")
    return float(value)


def _trained(said: Mapping[str, Any], where: str, role: Role) -> float:
    """The weight of a message if it is an answer. Raises BadRecord."""
    for key in (key for key in LEARNT_BY if key in said):
        if weight_of(said[key], f"{where}.{key}") and role != "assistant":
            raise BadRecord(
                "record.trained_role",
                f"{where}.{key} asks for a {role} message to be learnt: data.train_on_prompt learns them all",
            )
    return math.prod(float(said.get(key, 1)) for key in LEARNT_BY)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise BadRecord("record.calls", f"{where} must be a list of calls; it is {kind_name(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(
                "record.calls", f'{where}[{index}] must be {{"function": {{"name": "...", "arguments": {{...}}}}}}'
            )


_FURTHER: dict[str, Callable[[Any, str], object]] = {"tool_calls": _check_calls, **dict.fromkeys(REASONING, text_of)}
"""Key of a message -> what its value must pass."""
_KNOWN = {*_FURTHER, *LEARNT_BY, "name", "tool_call_id"}
"""Keys of a message beside its role and its content that a template, or we, may read."""
