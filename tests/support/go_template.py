"""The part of Go's ``text/template`` that Modelfiles here use, over the variables that Ollama gives (its ``template.go``)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, str]


def ollama_renders(template: str, messages: Sequence[Message]) -> str:
    """The prompt that Ollama makes of a conversation: system messages are also given joined, neighbours of one role as one."""
    collated: list[Message] = []
    for message in messages:
        if collated and collated[-1]["role"] == message["role"]:
            collated[-1] = {**message, "content": collated[-1]["content"] + "\n\n" + message["content"]}
        else:
            collated.append(dict(message))
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    tokens = [token for token in re.split(r"(\{\{.*?\}\})", template, flags=re.DOTALL) if token]
    return "".join(_block(iter(tokens), {".System": system, ".Messages": collated}, {}, True))


def _block(tokens: Iterator[str], root: dict[str, Any], dot: dict[str, Any], live: bool) -> list[str]:
    """What stands up to the ``end`` or ``else`` of a block, which is kept in ``root[""]``."""
    found: list[str] = []
    for token in tokens:
        if not token.startswith("{{"):
            found.append(token)
            continue
        action = token[2:-2].strip()
        if action == "end" or action.startswith("else"):
            root[""] = action
            break
        if action.startswith("range $i, $_ := .Messages"):
            body = list(_body(tokens))
            for index, message in enumerate(root[".Messages"] if live else ()):
                inner = {"$i": index, ".Role": message["role"], ".Content": message["content"]}
                found += _block(iter(body), root, inner, True)
        elif action.startswith("if "):
            found += _branches(action[3:], tokens, root, dot, live)
        elif live:
            found.append(str(_value(action, root, dot)))
    return found if live else []


def _branches(
    condition: str, tokens: Iterator[str], root: dict[str, Any], dot: dict[str, Any], live: bool
) -> list[str]:
    taken, found = False, []
    while True:
        holds = live and not taken and (condition == "" or bool(_value(condition, root, dot)))
        found += _block(tokens, root, dot, holds)
        taken |= holds
        if root[""] == "end":
            return found
        condition = root[""].removeprefix("else").strip().removeprefix("if ").strip()


def _body(tokens: Iterator[str]) -> Iterator[str]:
    depth = 1
    for token in tokens:
        words = token[2:-2].split() if token.startswith("{{") else []
        depth += (words[:1] in (["if"], ["range"])) - (words == ["end"])
        if depth == 0:
            return
        yield token


def _value(text: str, root: dict[str, Any], dot: dict[str, Any]) -> Any:
    parts: list[str] = re.findall(r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\"[^\"]*\"|\S+", text)
    if len(parts) == 1:
        return _single(parts[0], root, dot)
    arguments = [_value(part, root, dot) for part in parts[1:]]
    match parts[0]:
        case "eq":
            return arguments[0] == arguments[1]
        case "and":
            return arguments[0] and arguments[1]
        case "not":
            return not arguments[0]
        case "len":
            return len(arguments[0])
        case "slice":
            return arguments[0][arguments[1] :]
    raise AssertionError(f"no function of Go's templates that is known here: {text}")


def _single(part: str, root: dict[str, Any], dot: dict[str, Any]) -> Any:
    if part.startswith("("):
        return _value(part[1:-1], root, dot)
    if part.startswith('"'):
        return part[1:-1]
    if part.isdigit():
        return int(part)
    return root[part[1:]] if part.startswith("$.") else dot[part] if part in dot else root[part]
