"""Conversations with tools, content in parts and messages that are not learnt: the text is transformers', and so are the targets.

The templates are written after the formats that families of models document, with their answers marked
(``{% generation %}``); without the marks they are what a model directory brings.
"""

import copy
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED
from hetero_mpi.data.chat_template import Tokenized, choose_template, tokenize_records
from hetero_mpi.data.dataset import SequenceSettings
from hetero_mpi.data.record_sequences import RecordSequences
from hetero_mpi.data.records import Record, read_records
from tests.data.test_masks import FORMATS as MASKS
from tests.data.test_masks import Format, tokenizer_of
from tests.support.errors import refuses

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{% generation %}
{%- if loop.last and not message.tool_calls %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- if loop.index0 or message.content %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif message.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Answers of tools in one turn, a thought before the last answer only."""
LLAMA = """\
{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set said = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set said = '' %}{%- endif %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is defined and tools is not none %}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
{%- endif %}
{{- said + '<|eot_id|>' }}
{%- for message in messages %}{%- if message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- elif message.role == 'assistant' %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% generation %}
{%- if 'tool_calls' in message %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
"""A call in place of the content; what a tool gave as JSON."""
DEEPSEEK = """\
{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}{{- '<User>' + message.content + '<Assistant>' }}
{%- elif message.role == 'tool' %}{{- '<output>' + message.content + '<output_end>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}{% generation %}
{%- for call in message.tool_calls %}{{- '<call>' + call.type + ' ' + call.function.name + '\\n' + call.function.arguments }}
{%- endfor %}{{- eos_token }}{% endgeneration %}
{%- elif message.role == 'assistant' %}{% generation %}{{- message.content + eos_token }}{% endgeneration %}
{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"""
"""Arguments are JSON in a text; nothing asks for an answer."""
QWEN_THINKING = QWEN.replace(
    "{%- if loop.last and not message.tool_calls %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}", ""
).replace(
    "%}{{- '<|im_start|>assistant\\n' }}{%- endif %}", "%}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""Asks for a thought, which no answer has: calls begin with the same letter."""
QWEN_LATEST = QWEN.replace(
    "{%- if loop.last and not message.tool_calls %}",
    "{%- if 'user' not in messages[loop.index0 :] | map(attribute='role') %}",
)
"""Prints thoughts of all answers that follow the last question, calls included."""
CHATML = MASKS["chatml"].marked
PARTS = CHATML.replace("message.content", "text").replace(
    "{% if message.role == 'assistant' %}",
    "{% if message.content is string %}{% set text = message.content %}{% else %}{% set parts = namespace(text='') %}"
    "{% for part in message.content %}{% set parts.text = parts.text + '[' + part.text | trim + ']' %}{% endfor %}"
    "{% set text = parts.text %}{% endif %}{% if message.role == 'assistant' %}",
)
"""Prints content in parts in a way of its own."""
FORMATS = {
    "qwen": Format(QWEN, "<|im_end|>", ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")),
    "qwen-thinking": Format(
        QWEN_THINKING, "<|im_end|>", ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
    "qwen-in-letters": Format(QWEN_THINKING, "<|im_end|>", ("<|im_start|>",)),
    "qwen-latest": Format(
        QWEN_LATEST, "<|im_end|>", ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
    "llama": Format(LLAMA, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), "<|begin_of_text|>"),
    "deepseek": Format(DEEPSEEK, "<eos>", ("<User>", "<Assistant>", "<call>", "<output>"), "<bos>"),
    **{name: MASKS[name] for name in ("chatml", "glm4")},
    "parts": Format(PARTS, "<|im_end|>", ("<|im_start|>",)),
}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def call(arguments: Any, content: Any = None, **keys: Any) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "sum", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **keys}


def gave(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "name": "sum", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
CALLING = [
    SYSTEM,
    user("1 and 2"),
    call({"a": "1, 2"}),
    gave("3"),
    answer("It is 3."),
    user("Why"),
    answer("So it is."),
]
TWICE = [user("1, 2"), call({"a": "Grün"}, "I add."), gave("3"), gave("4"), call({"a": "x"}), gave("5"), answer("5")]
PIECES = [
    user([{"type": "text", "text": "1 "}, {"type": "text", "text": "2"}]),
    answer([{"type": "text", "text": "3"}]),
]
HALVES = [
    user("Hi"), answer("Hello", train=False), user("Why"), answer("So it is.", weight=1), user("x"), answer("y", weight=0)
]  # fmt: skip
TEXT_CALLS = [user("1"), call('{"a": "1"}'), gave("3"), answer("It is 3")]


def records_of(directory: Path, *values: dict[str, Any]) -> tuple[Record, ...]:
    path = directory / "a.jsonl"
    path.write_text("\n".join(json.dumps(value, ensure_ascii=False) for value in values))
    return read_records([str(path)]).records


def tokenized(name: str, record: Record) -> tuple[PreTrainedTokenizerFast, Tokenized]:
    tokenizer = tokenizer_of(FORMATS[name])
    tokenizer.chat_template = FORMATS[name].template
    (ours,) = tokenize_records(tokenizer, choose_template(tokenizer, "chat", [record]), [record])
    return tokenizer, ours


def theirs(
    tokenizer: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], tools: Any
) -> tuple[list[int], list[bool]]:
    """transformers' tokens up to the last answer that is learnt, and its mask of those answers that are."""
    found = tokenizer.apply_chat_template(
        copy.deepcopy(messages), tools=tools, chat_template=FORMATS[name].marked, tokenize=True,
        return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    runs = [(learnt, len(list(group))) for learnt, group in groupby(map(bool, found["assistant_masks"]))]
    trained = iter([one.get("train", one.get("weight", True)) for one in messages if one["role"] == "assistant"])
    mask = [value for learnt, length in runs for value in [bool(learnt and next(trained))] * length]
    last = max(index for index, learnt in enumerate(mask) if learnt) + 1
    return list(found["input_ids"])[:last], mask[:last]


@pytest.mark.parametrize(
    ("name", "messages", "tools"),
    [
        ("qwen", CALLING, TOOLS), ("qwen", CALLING, None), ("qwen", TWICE, TOOLS), ("qwen", [*TWICE, user("x"), answer("y")], []),
        ("qwen-latest", CALLING, TOOLS), ("qwen-latest", [*TWICE, user("x"), answer("y")], TOOLS),
        ("qwen-thinking", CALLING, TOOLS), ("qwen-thinking", TWICE, None), ("qwen-in-letters", TWICE, TOOLS),
        ("qwen-in-letters", [user("Hi"), answer("<i>Hello</i>"), user("x"), answer("<t>y")], None),
        ("llama", CALLING, TOOLS), ("llama", CALLING, []), ("deepseek", CALLING[1:5], None) , ("deepseek", TEXT_CALLS, None),
        ("chatml", HALVES, None), ("qwen", HALVES, None), ("glm4", HALVES, None), ("llama", HALVES[:4], TOOLS),
        ("parts", PIECES, None),
        ("qwen", [SYSTEM, answer("Hello")], None), ("chatml", [SYSTEM, answer("Hello"), answer("Hello you")], None),
        ("chatml", [user("Hi"), answer("Hello", name="sum")], None),
    ],
)  # fmt: skip
def test_text_and_targets_are_transformers(
    tmp_path: Path, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    if name == "deepseek":  # prints arguments as they stand
        messages = json.loads(json.dumps(messages).replace('{"a": "1, 2"}', '"{}"'))
    for written in (tools, None if tools is None else json.dumps(tools)):
        (record,) = records_of(tmp_path, {"messages": messages, **({} if written is None else {"tools": written})})
        tokenizer, ours = tokenized(name, record)
        ids, mask = theirs(tokenizer, name, messages, tools)
        assert tokenizer.convert_ids_to_tokens(ours.ids) == tokenizer.convert_ids_to_tokens(ids)
        assert ours.answer.tolist() == mask


@pytest.mark.parametrize(
    ("name", "messages", "plainer"),
    [
        ("chatml", PIECES, [user("1 2"), answer("3")]),
        ("qwen", TEXT_CALLS, [user("1"), call({"a": "1"}), gave("3"), answer("It is 3")]),
    ],
)
def test_what_a_template_cannot_print_is_made_plain(
    tmp_path: Path, name: str, messages: list[dict[str, Any]], plainer: list[dict[str, Any]]
) -> None:
    """Parts are joined for a template that takes texts only; arguments in a text are opened for one that would quote them again."""
    found = [tokenized(name, *records_of(tmp_path, {"messages": some}))[1] for some in (messages, plainer)]
    assert found[0].ids.tolist() == found[1].ids.tolist() and found[0].answer.tolist() == found[1].answer.tolist()
    tokenizer, _ = tokenized(name, *records_of(tmp_path, {"messages": messages}))
    assert theirs(tokenizer, name, plainer, None)[0] == found[0].ids.tolist()


def test_answers_that_are_not_learnt_are_not_learnt_with_the_prompts(tmp_path: Path) -> None:
    (record,) = records_of(tmp_path, {"messages": HALVES[:4]})
    tokenizer, _ = tokenized("chatml", record)
    form = choose_template(tokenizer, "chat")
    targets = [
        RecordSequences(tokenizer, form, SequenceSettings(60, False, 0.0, 0), train_on_prompt)
        .rows([record], "data.records")
        .targets[0]
        for train_on_prompt in (False, True)
    ]
    learnt = [tokenizer.decode(some[some != IGNORED]) for some in targets]
    assert learnt[0] == "So it is.<|im_end|>"
    assert learnt[1] == "user\nHi<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\n" + (
        "So it is.<|im_end|>"
    )  # fmt: skip


def test_records_of_which_nothing_is_learnt_are_counted(tmp_path: Path) -> None:
    masked = {"messages": [user("Hi"), answer("Hello", train=False)]}
    path = tmp_path / "b.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [masked, {"messages": [SYSTEM]}, {"messages": [user("Hi"), answer("y")]}]))
    )
    lines = read_records([str(path)]).lines()
    assert len(lines) == 3 and f"{path}, line 2" in lines[1] and f"{path}, line 1" in lines[2]
    path.write_text(json.dumps(masked))
    with refuses("records.nothing_to_learn"):
        read_records([str(path)])


def test_templates_without_tools(tmp_path: Path) -> None:
    """A call that a template leaves out is refused: an empty answer would be learnt."""
    (record,) = records_of(tmp_path, {"messages": [user("1"), call({"a": "1"}, "I add."), gave("3"), answer("3")]})
    with refuses("template.failed", "a.jsonl, line 1: ", "'sum'"):
        tokenized("chatml", record)
    tokenizer = tokenizer_of(FORMATS["chatml"])
    with refuses("template.tools"):
        choose_template(tokenizer, "plain", [record])


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    values = {"messages": CALLING, "tools": TOOLS}, {"messages": HALVES}
    records = records_of(tmp_path, *values)
    tokenizer = tokenizer_of(FORMATS["qwen"])
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN}
    found = tokenize_records(tokenizer, choose_template(tokenizer, "chat", records), records)
    for one, value in zip(found, values, strict=True):
        text = tokenizer.apply_chat_template(value["messages"], tools=value.get("tools"), tokenize=False)
        assert text.startswith(tokenizer.decode(one.ids)) and len(one.ids) > 20
