"""Templates that mark their answers (``{% generation %}``): several answers in one chat are learnt as transformers' mask says, also
where a beginning of the conversation is not rendered as the beginning of the whole. And ends of answers that are not printed.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.chat_template import choose_template, tokenize_records
from hetero_mpi.data.records import Record
from tests.data.test_masks import FORMATS, Format, record, tokenizer_of
from tests.data.test_tools import answer, call, gave, records_of, user
from tests.support.errors import refuses

PHI3 = """\
{% for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n' }}{% generation %}
{{- message.content + '<|end|>\\n' }}{% endgeneration %}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
"""Closes a conversation with the end token of the model where nothing is asked."""
GPT_OSS = """\
{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|start|>assistant' }}{% generation %}
{%- if message.thinking and loop.last %}
{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}{%- endif %}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '<|channel|>commentary to=' + call.name + '<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|channel|>final<|message|>' + message.content }}{%- if loop.last and not add_generation_prompt %}
{{- '<|return|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}{%- endif %}{% endgeneration %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""Closes the last answer otherwise than those before it, and prints its thought only."""
QWEN3 = """\
{%- set asked = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'assistant' %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{%- if loop.index0 > asked.last %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- else %}{{- content }}{%- endif %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GLM45 = """\
[gMASK]<sop>{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|assistant|>' }}{% generation %}
{{- '\\n' + (message.content or '') }}{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}{%- for key, value in call.function.arguments.items() %}
{{- '\\n' + key + '=' + value | string }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}{% endgeneration %}
{%- else %}{{- ('<|observation|>' if message.role == 'tool' else '<|user|>') + '\\n' + message.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
"""Closes no answer: the next role's token ends it."""
MARKED = {
    "phi3": Format(PHI3, "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "gpt-oss": Format(GPT_OSS, "<|return|>", ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>")),
    "qwen3": Format(QWEN3, "<|im_end|>", ("<|im_start|>", "<think>", "</think>")),
}
PLAIN = [user("Hi"), answer("Hello there."), user("Why"), answer("So it is."), user("x"), answer("y")]
INLINE = [user("Hi"), answer("<think>\nOne.\n</think>\n\nHello"), user("Why"), answer("<think>\nTwo.\n</think>\n\nSo")]
THINKING = [user("Hi"), answer("Hello", reasoning_content="One."), user("Why"), answer("So", reasoning_content="Two.")]
CALLING = [
    user("1"),
    call({"a": 17}, reasoning_content="One."),
    gave("18"),
    answer("It is 18", reasoning_content="Two."),
]


def learnt(
    wanted: Format, one: Record, marked: bool = True, ends: tuple[str, ...] = ()
) -> tuple[PreTrainedTokenizerFast, Any]:
    tokenizer = tokenizer_of(wanted)
    tokenizer.chat_template = wanted.marked if marked else wanted.template
    ids = tokenizer.convert_tokens_to_ids(list(ends))
    (found,) = tokenize_records(tokenizer, choose_template(tokenizer, "chat", [one]), [one], ends=ids)
    return tokenizer, found


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *((name, PLAIN) for name in MARKED), ("qwen3", INLINE), ("qwen3", THINKING), ("gpt-oss", THINKING), ("gpt-oss", CALLING),
    ],
)  # fmt: skip
def test_several_answers_are_learnt_by_the_templates_own_marks(
    tmp_path: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    tokenizer, ours = learnt(MARKED[name], *records_of(tmp_path, {"messages": messages}))
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(value) for value in theirs["assistant_masks"]]
    last = max(index for index, value in enumerate(mask) if value) + 1
    ids, mask = list(theirs["input_ids"])[:last], mask[:last]
    if ids[-1] != tokenizer.eos_token_id:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    assert tokenizer.convert_ids_to_tokens(ours.ids) == tokenizer.convert_ids_to_tokens(ids)
    assert ours.answer.tolist() == mask and any(mask) and not all(mask)
    assert ours.forgotten == (messages in (INLINE, THINKING) or (name, messages) == ("gpt-oss", CALLING))


@pytest.mark.parametrize("name", FORMATS)
def test_marks_and_beginnings_agree(name: str) -> None:
    """What is found without marks is what is found by them, for all templates of these tests."""
    if name == "plain":
        return
    one = record("u: Why?\n\nTell me", "a: Because it is so.\n", "u: And then", "a: So it is:\n\n* one\n* two")
    found = [learnt(FORMATS[name], one, marked)[1] for marked in (False, True)]
    assert found[0].ids.tolist() == found[1].ids.tolist() and found[0].answer.tolist() == found[1].answer.tolist()


def test_an_end_token_behind_the_last_answer_only_hides_no_answer() -> None:
    one = record("u: Hi", "a: Hello", "u: Why", "a: So")
    tokenizer, ours = learnt(MARKED["phi3"], one, marked=False)
    assert tokenizer.decode(ours.ids[ours.answer]) == "Hello<|end|>So<|end|>\n<|endoftext|>"


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("name", "stops", "between", "last"),
    [
        ("glm4", (), "", "<|endoftext|>"),
        ("glm4", ("<|user|>", "<|observation|>", "<|endoftext|>"), "<|user|>", "<|user|>"),
        ("gemma", ("<end_of_turn>", "<eos>"), "<end_of_turn>", "<end_of_turn>"),
        ("gemma", ("<eos>",), "<end_of_turn>", "<end_of_turn><eos>"),
        ("llama3", ("<|end_of_text|>", "<|eot_id|>"), "<|eot_id|>", "<|eot_id|>"),
        ("command-r", ("<|END_OF_TURN_TOKEN|>",), "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("chatml", ("<|im_end|>", "<|im_start|>"), "<|im_end|>", "<|im_end|>"),
        ("phi3", ("<|end|>", "<|endoftext|>"), "<|end|>", "<|end|>"),
        ("mistral", ("</s>",), "</s>", "</s>"),
    ],
)
def test_every_answer_ends_as_the_template_closes_it_where_the_model_stops_there(
    name: str, stops: tuple[str, ...], between: str, last: str, marked: bool
) -> None:
    tokenizer, ours = learnt(FORMATS[name], record("u: Hi", "a: Hello", "u: Why", "a: So"), marked, stops)
    first, second = tokenizer.decode(ours.ids[ours.answer]).split("Hello")[1].split("So")
    assert (first.strip(), second) == (between, last)


def test_calls_end_with_the_role_of_what_the_tool_gives(tmp_path: Path) -> None:
    wanted = Format(GLM45, "<|endoftext|>", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"))
    messages = [user("1"), call({"a": 17}), gave("18"), answer("It is 18"), user("2"), call({"a": 2})]
    (one,) = records_of(tmp_path, {"messages": messages})
    tokenizer, ours = learnt(wanted, one, ends=("<|endoftext|>", "<|user|>", "<|observation|>"))
    calls = [f"<tool_call>sum\na={a}</tool_call><|observation|>" for a in (17, 2)]
    assert tokenizer.decode(ours.ids[ours.answer]) == f"\n{calls[0]}\nIt is 18<|user|>\n{calls[1]}"


def test_marks_that_cannot_be_told_apart_or_that_miss_the_answer(tmp_path: Path) -> None:
    halves = [user("Hi"), answer("Hello", train=False), user("Why"), answer("So")]
    (one,) = records_of(tmp_path, {"messages": halves})
    tokenizer, ours = learnt(MARKED["qwen3"], one)
    assert tokenizer.decode(ours.ids[ours.answer]).endswith("So<|im_end|>") and "Hello" in tokenizer.decode(
        ours.ids[ours.never]
    )
    twice = PHI3.replace(
        " + '<|end|>\\n' }}{% endgen", " }}{% endgeneration %}{% generation %}{{ '<|end|>\\n' }}{% endgen"
    )
    with refuses("template.failed"):
        learnt(Format(twice, "<|endoftext|>", MARKED["phi3"].special), one)
    empty = PHI3.replace("{% generation %}\n{{- message.content", "{{ message.content }}{% generation %}{{ ''")
    assert PHI3 not in (twice, empty)
    with refuses("template.failed"):
        learnt(Format(empty, "<|endoftext|>", MARKED["phi3"].special), one)
