"""A record of which a template prints less than it holds is refused in words; thoughts of earlier answers are counted."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hetero_mpi.data.chat_template import choose_template, tokenize_records
from hetero_mpi.data.record_shapes import BadRecords
from hetero_mpi.data.records import Record
from tests.data.test_masks import FORMATS, record, tokenizer_of
from tests.data.test_tools import FORMATS as TOOL_FORMATS
from tests.data.test_tools import answer, call, gave, records_of, user
from tests.support.errors import refuses

CHATML = FORMATS["chatml"].template
SAID = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
ANSWERED = "{{ message.content + '<|im_end|>' }}"
CUT = ANSWERED.replace("message.content", "message.content.split('</think>')[-1]")
KEPT_LAST = "{% if loop.last %}" + ANSWERED + "{% else %}" + CUT + "{% endif %}"
APART = (
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content|trim + '\n</think>\n\n' }}{% endif %}"
)
SYSTEMLESS = "{% if message.role == 'system' %}{% elif message.role == 'assistant' %}"
THOUGHT = "<think>the crew counts</think>blue"


def outcome(template: str, *values: Any) -> list[Any]:
    """What is kept of the records, and what is said of the others."""
    tokenizer, bad = tokenizer_of(FORMATS["chatml"]), BadRecords(len(values))
    tokenizer.chat_template = template
    found = list(tokenize_records(tokenizer, choose_template(tokenizer, "chat"), values, bad))
    return [
        [(tokenizer.decode(one.ids[one.answer]), one.forgotten) for one in found],
        [str(problem) for problem in bad.problems],
    ]


def test_thoughts() -> None:
    assert ANSWERED in CHATML and SAID in CHATML
    one, two = record("u: red", f"a: {THOUGHT}"), record("u: red", f"a: {THOUGHT}", "u: green", f"a: {THOUGHT}")
    plain = record("u: red", "a: blue")
    for asking in ("", "<think>\n"):  # a template may ask for the thought that it leaves out
        template = CHATML.replace(ANSWERED, CUT).replace(
            "assistant\n' }}{% endif", f"assistant\n{asking}' }}}}{{% endif"
        )
        kept, lost = outcome(template, one, two, plain)
        assert [text for text, _ in kept] == ["blue<|im_end|>"]
        assert all("'the crew counts'" in problem for problem in lost)
    kept, lost = outcome(CHATML.replace(ANSWERED, KEPT_LAST), one, two)
    assert kept == [(THOUGHT + "<|im_end|>", False), ("blue<|im_end|>" + THOUGHT + "<|im_end|>", True)] and not lost
    assert outcome(CHATML, one, two)[0][1] == ((THOUGHT + "<|im_end|>") * 2, False)


def test_thoughts_in_keys_of_their_own() -> None:
    template = CHATML.replace(ANSWERED, "{% if loop.last %}" + APART + "{% endif %}" + ANSWERED)
    for key in ("reasoning_content", "thinking", "reasoning"):
        messages = [
            user("red"),
            answer("blue", **{key: "the crew"}),
            user("green"),
            answer("grey", **{key: " the birds"}),
        ]
        kept, lost = outcome(template, *read(messages))
        assert kept == [("blue<|im_end|><think>\nthe birds\n</think>\n\ngrey<|im_end|>", True)] and not lost
        assert "message 4 of 4 ('the birds')" in outcome(CHATML, *read(messages))[1][0]


def read(messages: list[dict[str, Any]], **keys: Any) -> tuple[Record, ...]:
    with TemporaryDirectory() as directory:
        return records_of(Path(directory), {"messages": messages, **keys})


@pytest.mark.parametrize(
    ("old", "new", "said", "expected"),
    [
        ("{% if message.role == 'assistant' %}", SYSTEMLESS, ("s: Be brief", "u: a", "a: b"),
         "system's text, in message 1 of 3 ('Be brief')"),
        (SAID, "{{ message.content[:3] }}", ("u: red green", "a: b"), "the user's text, in message 1 of 2 ('red green')"),
        (SAID, "{% if loop.index0 != 2 %}" + SAID + "{% endif %}", ("u: red", "a: b", "u: red", "a: c"), "in message 3 of 4"),
        (ANSWERED, "{{ message.content|upper }}", ("u: red", "a: green"), "the assistant's text, in message 2 of 2"),
    ],
)  # fmt: skip
def test_messages_that_are_not_printed(old: str, new: str, said: tuple[str, ...], expected: str) -> None:
    assert old in CHATML
    kept, lost = outcome(CHATML.replace(old, new), record(*said))
    assert not kept and expected in lost[0], lost


PLUS = {"name": "plus", "description": "Adds two", "parameters": {"properties": {"first": {}}}}
ADD = [{"type": "function", "function": PLUS}]
RESULT = [user("1"), call({"first": "one"}), gave("three"), answer("It is.")]
NUMBER = [user("1"), call({"first": 17}), gave("three"), answer("It is.")]


@pytest.mark.parametrize(
    ("old", "new", "messages", "expected"),
    [
        ("{{- tool | tojson }}", "{{- tool.function.name }}", RESULT, "'Adds two'"),
        ("{{- tool | tojson }}", "{{- tool.function.description }}", RESULT, "'plus'"),
        ("{{- tool | tojson }}", "plus: Adds two", [user("x"), answer("y")], "'first'"),
        ("{{- call.arguments | tojson }}", "", RESULT, "'sum', in message 2 of 4 ('first')"),
        ("{{- call.arguments | tojson }}", "first", NUMBER, "'sum', in message 2 of 4 ('17')"),
        ("\\n' + message.content + '\\n</tool_response>", "\\n</tool_response>", RESULT, "message 3"),
    ],
)  # fmt: skip
def test_tools_that_are_not_printed(old: str, new: str, messages: Any, expected: str) -> None:
    wanted = TOOL_FORMATS["qwen"]
    assert old in wanted.template
    tokenizer = tokenizer_of(wanted)
    (one,) = read(messages, tools=ADD)
    tokenizer.chat_template = wanted.template.replace(old, new)
    with refuses("template.failed", expected):
        list(tokenize_records(tokenizer, choose_template(tokenizer, "chat"), [one]))
    for written in ("| tojson(indent=2)", "| tojson(ensure_ascii=True, separators=(',', ':'))"):  # as it likes
        tokenizer.chat_template = wanted.template.replace("| tojson", written)
        assert len(list(tokenize_records(tokenizer, choose_template(tokenizer, "chat"), [one]))) == 1
