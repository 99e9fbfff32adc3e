"""``serve`` and calls of tools: conversations are transformers' to the token, and what a model writes comes to OpenAI's client as
calls. What the model writes is given here; the rest is the real one.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AddedToken

from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.inference.writer import Round
from hetero_mpi.serve.api_requests import ChatRequest, parse
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import Scheduler
from hetero_mpi.serve.served_models import ServedModel, served_models
from hetero_mpi.serve.service import Service, context_of
from hetero_mpi.serve.web.server import HttpError, Names, bound_socket
from hetero_mpi.serve.wording import HERMES, LLAMA, MISTRAL, CallForm, call_form
from tests.commands.test_generate import TEMPLATE, model_with_tokenizer, written
from tests.data.test_tools import DEEPSEEK, QWEN
from tests.data.test_tools import LLAMA as LLAMA_TEMPLATE
from tests.support.training_cases import corpus, tokenizer_directory

openai = pytest.importorskip("openai")
MISTRAL_TEMPLATE = """\
{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}{%- endfor %}"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA_TEMPLATE, "mistral": MISTRAL_TEMPLATE, "deepseek": DEEPSEEK}
CASE = written("tools", "llama", changes=(("max_position_embeddings", 2048), ("vocab_size", 400)))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
USER = {"role": "user", "content": "ab cab"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    """One with each template; Mistral's marker is a special token."""
    place = tmp_path_factory.mktemp("tools")
    path = model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), CASE, TEMPLATE)
    found = {}
    for name, template in {**TEMPLATES, "none": TEMPLATE}.items():
        own = place / name
        own.mkdir()
        for file in path.iterdir():
            (own / file.name).symlink_to(file)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
            (own / file).unlink(missing_ok=True)
        tokenizer = load_tokenizer(path)
        if name == "mistral":
            tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)], special_tokens=True)
        tokenizer.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        save_tokenizer(tokenizer, own)
        (found[name],) = served_models(own, [])
    return found


def service_of(model: ServedModel) -> Service:
    return Service([model], context_of(model.opened, None, []), Scheduler([], 4), lambda: False)


@contextlib.contextmanager
def writing(model: ServedModel, text: str) -> Iterator[Any]:
    """OpenAI's client of a server that answers every request by ``text``."""
    service, over = service_of(model), threading.Event()
    server = ApiServer(bound_socket("127.0.0.1", 0), {}, service, Names.for_address("127.0.0.1"))
    tokens = [*model.tokenizer(text, add_special_tokens=False).input_ids, model.stops[0]]

    def write() -> None:
        left: dict[int, list[int]] = {}
        while not over.is_set():
            change = service.scheduler.next_changes(0.0 if left else 0.02)
            left |= {number: list(tokens) for number in change.begin}
            for number in change.end:
                left.pop(number, None)
            service.scheduler.distribute(Round({number: rest.pop(0) for number, rest in left.items()}))
            left = {number: rest for number, rest in left.items() if rest}

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60).chat.completions
    finally:
        over.set()
        thread.join()
        server.stop(1.0)


HERMES_TEXT = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
WRITTEN = {
    "qwen": (HERMES_TEXT, "I look.\n", [("weather", {"city": "Köln"}), ("time", {})]),
    "llama": ('{"name": "weather", "parameters": {"city": "a;b"}}', None, [("weather", {"city": "a;b"})]),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a"}}, {"name": "time", "arguments": {}}]',
        None,
        [("weather", {"city": "a"}), ("time", {})],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_come_as_calls_whole_and_in_pieces_and_go_back_into_the_conversation(
    models: dict[str, ServedModel], name: str
) -> None:
    model, (text, said, calls) = models[name], WRITTEN[name]
    with writing(model, text) as chats:
        asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS}
        choice = chats.create(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", said)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == calls
        (only,) = chats.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
        assert only.function.name == "weather"
        chunks = [chunk.choices[0] for chunk in chats.create(**asked, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (said or "")
        assert chunks[-1].finish_reason == "tool_calls"
        told = [(c.index, c.function.name, json.loads(c.function.arguments)) for c in chunks[-1].delta.tool_calls]
        assert told == [(n, *one) for n, one in enumerate(calls)]
        unwanted = chats.create(**asked, tool_choice="none").choices[0]
        assert unwanted.finish_reason == "stop" and unwanted.message.tool_calls is None
        assert unwanted.message.content == text.removeprefix("[TOOL_CALLS]"), "text, without special tokens"
    conversation = [
        USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "12"},
    ]
    body = json.dumps({"messages": conversation, "tools": TOOLS}).encode()
    (task,) = service_of(model).tasks(parse(ChatRequest, body))
    for call in conversation[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    conversation[1].setdefault("content", "")
    expected = model.tokenizer.apply_chat_template(
        conversation, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert task.prompt == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", '<tool_call>\n{"name": "weather", "arguments": {"city": \n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
        ("qwen", "a < b <tool"),
        ("qwen", '<tool_call>\n{"name": "time", "arguments": {"a": NaN}}\n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "time", "arguments": {"a": "\\ud800"}}\n</tool_call>'),
        ("llama", '{"city": "a"}'),
        ("llama", '{"name": "weather", "parameters": 5}'),
        ("none", HERMES_TEXT),
    ],
)
def test_what_is_no_call_is_text(models: dict[str, ServedModel], name: str, text: str) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS if name != "none" else []}
    with writing(models[name], text) as chats:
        choice = chats.create(**asked).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        assert "".join(c.choices[0].delta.content or "" for c in chats.create(**asked, stream=True)) == text


CALL = '<tool_call>\n{"name": "sql", "arguments": {"q": "%s"}}\n</tool_call>'
THOUGHT = "<think>I write <tool_call> now</think>\n\n"
BROKEN = "<tool_call>broken</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "outside", "called"),
    [
        (HERMES, THOUGHT + CALL % "1", THOUGHT, [{"q": "1"}]),
        (HERMES, "A `<tool_call>` block follows.\n" + CALL % "1", "A `<tool_call>` block follows.\n", [{"q": "1"}]),
        (HERMES, CALL % "x </tool_call> y", "", [{"q": "x </tool_call> y"}]),
        (HERMES, '<tool_call>\n{"name": "now"}\n</tool_call>', "", [{}]),
        (HERMES, '<tool_call>{"name": "now", "arguments": null}', "", [{}]),
        (HERMES, '<tool_call>{"name": "sql", "arguments": "{\\"q\\": \\"a\\"}"}</tool_call>', "", [{"q": "a"}]),
        (HERMES, CALL % "a" + "\n" + BROKEN + CALL % "b", BROKEN, [{"q": "a"}, {"q": "b"}]),
        (HERMES, CALL % "a" + "\nDone.", "Done.", [{"q": "a"}]),
        (LLAMA, '{"name": "sql", "parameters": {"q": "a; b"}}; {"name": "now", "parameters": {}}', "", [{"q": "a; b"}, {}]),
        (LLAMA, '{"name": "sql", "arguments": {"q": "a"}}', "", [{"q": "a"}]),
        (MISTRAL, 'I look. [TOOL_CALLS] [{"name": "sql", "arguments": {"q": "a"}}, {"name": "now"}]', "I look. ",
         [{"q": "a"}, {}]),
    ],
)  # fmt: skip
def test_calls_are_found_beside_text_and_imperfect_calls(
    form: CallForm, text: str, outside: str, called: list[dict[str, str]]
) -> None:
    kept, calls = form.split(text, ["sql", "now"])
    assert kept == outside and [call["arguments"] for call in calls] == called
    assert kept.startswith(text[: form.start_position(text)]) or form.start_position(text) > len(kept)


def test_a_template_that_prints_no_tools_refuses_them(models: dict[str, ServedModel]) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}
    given = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "12"},
    ]
    for fields in ({"tools": TOOLS}, {"messages": [USER, *given]}):
        with pytest.raises(HttpError) as error:
            service_of(models["none"]).tasks(parse(ChatRequest, json.dumps({"messages": [USER], **fields}).encode()))
        assert error.value.status == 400
    (task,) = service_of(models["deepseek"]).tasks(
        parse(ChatRequest, json.dumps({"messages": [USER, *given]}).encode())
    )
    assert '{"a": 1}' in models["deepseek"].tokenizer.decode(task.prompt), (
        "arguments that a template takes as text only"
    )


def test_forms_are_known_by_their_templates() -> None:
    forms = [call_form(TEMPLATES[name]) for name in ("qwen", "llama", "mistral", "deepseek")]
    assert forms == [HERMES, LLAMA, MISTRAL, None]
    for other in ("<tool_call>\n<function=", "<tool_call>{{name}}<arg_key>", "[TOOL_CALLS]{{name}}[ARGS]", TEMPLATE):
        assert call_form(other) is None
