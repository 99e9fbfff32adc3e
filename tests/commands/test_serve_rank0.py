"""``serve`` on rank 0, without other ranks and without OpenAI's package: requests, queue, text, HTTP."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.data.tokenizer import encoded
from hetero_mpi.inference.decoding import NOT_A_NUMBER, Sampling
from hetero_mpi.inference.source import open_source
from hetero_mpi.inference.writer import Round, Task, TextChanges
from hetero_mpi.serve.api_requests import ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import MOST_WAITING, Answer, CacheRoom, News, Scheduler
from hetero_mpi.serve.serve import ServeOptions, _default_sampling, _say_address, check_options
from hetero_mpi.serve.served_models import ServedModel
from hetero_mpi.serve.service import Service, context_of
from hetero_mpi.serve.web.server import HttpError, Names, bound_socket
from hetero_mpi.serve.wording import Wording
from hetero_mpi.util.errors import UserError
from tests.commands.test_generate import TEMPLATE, model_with_tokenizer, written
from tests.support.errors import refuses
from tests.support.training_cases import corpus, tokenizer_directory

TOKEN = "a-secret"
PLAIN = "/v1/completions"
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def with_arguments(text: str) -> dict[str, Any]:
    """A conversation with a call of a tool."""
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    place = tmp_path_factory.mktemp("serve")
    return model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), written("served", "llama"), TEMPLATE)


@pytest.fixture(scope="module")
def model(base: Path) -> ServedModel:
    return ServedModel("m", open_source(base))


@pytest.fixture
def server(model: ServedModel) -> Iterator[ApiServer]:
    """A server behind which no pipeline writes."""
    service = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    server = ApiServer(bound_socket("127.0.0.1", 0), {"token": TOKEN}, service, Names.of("127.0.0.1"))
    yield server
    server.stop(0.0)


def task(tokens: int, limit: int = 10) -> Task:
    return Task([1] * tokens, [0], limit, Sampling())


def submitted(scheduler: Scheduler, one: Task) -> Answer:
    (answer,) = scheduler.submit([one])
    return answer


def test_texts_begin_as_soon_as_there_is_room_in_the_order_of_their_requests() -> None:
    room = [CacheRoom(0, 0, 10, 1000), CacheRoom(2, 50, 1, 400)]
    scheduler = Scheduler(room, parallel=3)
    small, large = [submitted(scheduler, task(10)) for _ in range(2)], submitted(scheduler, task(51))
    behind = submitted(scheduler, task(10))
    assert list(scheduler.next_changes(0.0).begin.values()) == [small[0].task, small[1].task]
    assert scheduler.next_changes(0.0) == TextChanges({}, [], []), "nobody overtakes the large one"
    scheduler.hand_out(Round({1: 7, 2: 0}))
    assert (small[0].events.get_nowait(), small[1].events.get_nowait()) == (News(0, 7), News(0, 0))
    change = scheduler.next_changes(0.0)
    assert list(change.begin.values()) == [large.task], "20 + 61 of 100 tokens, so that 20 more have no room"
    small[0].given_up.set()
    change = scheduler.next_changes(0.0)
    assert (list(change.begin.values()), change.end) == ([behind.task], [1])
    scheduler.hand_out(Round({3: NOT_A_NUMBER, 4: 5}))
    error = large.events.get_nowait()
    assert isinstance(error, HttpError) and error.status == 500
    scheduler.close(HttpError(503, "over"))
    assert behind.events.get_nowait() == News(0, 5) and isinstance(behind.events.get_nowait(), HttpError)
    with pytest.raises(HttpError, match="over"):
        scheduler.submit([task(1)])


def take_rounds(scheduler: Scheduler, rounds: int) -> None:
    """Give every answer with a place its token, so often."""
    for _ in range(rounds):
        change = scheduler.next_changes(0.0)
        placed = [number for number in scheduler._begun if number not in change.rest]
        assert scheduler.counts() == {"running": len(placed), "waiting": len(scheduler._answers) - len(placed)}
        scheduler.hand_out(Round(dict.fromkeys(placed, 7)))


@pytest.mark.parametrize(
    ("requests", "places"),
    [
        ([("", 32)], [8]),
        ([("", 32), ("", 1)], [7, 1]),
        ([("", 1)] * 8 + [("", 2)], [8 / 9] * 9),
        ([("", 1)] * 16, [1 / 2] * 16),
        ([("a", 8), ("a", 8), ("b", 8)], [2, 2, 4]),
        ([("a", 8)] * 3 + [("b", 8)], [4 / 3] * 3 + [4]),
        ([("a", 1)] * 30 + [("b", 1), ("c", 128)], [3.5 / 30] * 30 + [1, 3.5]),
    ],
)
def test_places_go_round_by_client_and_request(requests: list[tuple[str, int]], places: list[float]) -> None:
    scheduler = Scheduler([], parallel=8)
    answers = [scheduler.submit([task(1, 10_000)] * count, client) for client, count in requests]
    take_rounds(scheduler, 360)
    written = [sum(answer.written for answer in request) / 360 for request in answers]
    assert written == pytest.approx(places, abs=0.01) and sum(written) == pytest.approx(8)


def test_no_flow_of_new_requests_keeps_an_old_one_from_its_place() -> None:
    scheduler = Scheduler([], parallel=2)
    old = submitted(scheduler, task(1, 1000))
    for _ in range(100):
        scheduler.submit([task(1, 1)])
        scheduler.submit([task(1, 1)])
        take_rounds(scheduler, 1)
    assert old.written > 10


def test_waiting_requests_are_limited_together_however_many_come_at_once() -> None:
    """And a client that has filled the queue does not keep another one out of it."""
    scheduler, refused, start = Scheduler([], parallel=1), list[int](), threading.Barrier(64)

    def submit() -> None:
        start.wait()
        for _ in range(10):
            try:
                scheduler.submit([task(1)], "a")
            except HttpError as error:
                refused.append(error.status)

    threads = [threading.Thread(target=submit) for _ in range(64)]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch_s)
    assert scheduler.counts()["waiting"] == MOST_WAITING and refused == [503] * (640 - MOST_WAITING)
    scheduler.submit([task(1)] * 128, "b")
    with pytest.raises(HttpError, match="wait already"):
        scheduler.submit([task(1)] * 128, "b")


def test_a_prompt_that_memory_has_no_room_for_is_refused_with_the_numbers(model: ServedModel) -> None:
    room = [CacheRoom(0, 0, 10, 1000), CacheRoom(2, 100, 20, 800)]
    context = context_of(model.opened, None, room)
    assert context.tokens == 35
    service = Service([model], context, Scheduler(room, 1), lambda: False)
    asked = ChatRequest(messages=[{"role": "user", "content": "x" * 40}], max_tokens=5)  # type: ignore[list-item]
    with pytest.raises(HttpError, match=r"rank 2 has 800 B for keys and values, which is 35 tokens of 20 B") as error:
        service.tasks(asked)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert context_of(model.opened, 20, room).reason.endswith("--context 20")
    assert context_of(model.opened, None, []).tokens == 64


def test_text_that_may_begin_a_stop_is_held_back(model: ServedModel) -> None:
    tokenizer = model.tokenizer
    letters = list("abcabd!")
    tokens = [tokenizer(letter).input_ids[0] for letter in letters]
    wording = Wording(tokenizer, task(3, limit=7), ("abd", "zz"))
    assert [wording.add(token) for token in tokens[:6]] == ["", "", "abc", "", "", ""]
    assert (wording.finish, wording.tokens) == ("stop", 6)
    limited = Wording(tokenizer, task(3, limit=2), ("abd",))
    assert [limited.add(token) for token in tokens[:2]] == ["", "ab"]
    assert limited.finish == "length"
    stopped = Wording(tokenizer, task(3), ("abd",))
    assert [stopped.add(token) for token in (tokens[0], 0)] == ["", "a"]
    assert (stopped.finish, stopped.tokens) == ("stop", 2)


def test_a_port_in_use_and_an_open_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with refuses("serve.address"):
            bound_socket("127.0.0.1", other.getsockname()[1])
    with bound_socket("127.0.0.1", 0) as first, refuses("serve.address"):
        bound_socket("127.0.0.1", first.getsockname()[1])
    monkeypatch.delenv("HETERO_MPI_TOKEN", raising=False)
    with refuses("serve.open_address"):
        check_options(ServeOptions(Path(), host="0.0.0.0"))
    monkeypatch.setenv("HETERO_MPI_TOKEN", " from-the-environment\n")
    check_options(ServeOptions(Path(), host="0.0.0.0"))
    for token in ("two words", "gr\u00fcn", "tab\tulator"):
        with refuses("serve.keys"):
            check_options(ServeOptions(Path(), token=token))
    with pytest.raises(UserError, match="--parallel 0"):
        check_options(ServeOptions(Path(), parallel=0))


def test_a_file_of_keys_names_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_MPI_TOKEN", raising=False)
    path = tmp_path / "keys"

    def keys(text: str, token: str | None = None) -> dict[str, str]:
        path.write_text(text)
        return ServeOptions(Path(), keys=path, token=token).known_keys()

    assert keys("# mine\n\nalice k1\n  bob   k2  \n") == {"alice": "k1", "bob": "k2"}
    assert keys("alice k1\n", "t") == {"token": "t", "alice": "k1"} and ServeOptions(Path()).known_keys() == {}
    check_options(ServeOptions(Path(), host="0.0.0.0", keys=path))
    for text in ("alice\n", "a/b k\n", "alice k1\nalice k2\n", "alice k1\nbob k1\n", "token x\n", f"{'a' * 65} k\n"):
        with refuses("serve.keys") as error:
            keys(text, "t")
        assert not any(key in str(error.value) for key in ("k1", "k2"))
    for text in ("alice k 1\n", "alice gr\u00fcn\n"):
        with refuses("serve.keys"):
            keys(text)
    for token in (None, "t"):
        with refuses("serve.keys"):
            keys("# alice k1\n\n", token)
    assert keys("token k1\n") == {"token": "k1"} == check_options(ServeOptions(Path(), keys=path))
    path.unlink()
    with refuses("serve.keys"):
        check_options(ServeOptions(Path(), keys=path))


def test_keys_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe is empty the second time: whoever believes it lets everybody in."""
    monkeypatch.delenv("HETERO_MPI_TOKEN", raising=False)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("alice k1\n",))
    writer.start()
    assert check_options(ServeOptions(Path(), host="0.0.0.0", keys=pipe)) == {"alice": "k1"}
    writer.join()


def test_every_key_is_compared_and_numbers_need_one(server: ApiServer) -> None:
    server.keys = {"a": "one-key", "b": "two-keys"}
    for token, status in (("one-key", b"200"), ("two-keys", b"200"), ("two-key", b"401"), ("", b"401")):
        for route in ("/metrics", "/v1/models"):
            answer = said(server, request(f"GET {route}", "Connection: close", token=f"Bearer {token}"))
            assert answer.startswith(b"HTTP/1.1 " + status), (route, token)
    assert b"403" in said(server, request("GET /metrics", "Connection: close", "Host: elsewhere.example"))[:15]


def said(server: ApiServer, sent: bytes, longest: int = 1 << 20) -> bytes:
    """Everything that the server answers to these bytes, until it closes the connection."""
    host, port = server.server_address[:2]
    with socket.create_connection((str(host), int(port)), timeout=60) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(longest), b""))


def request(line: str, *headers: str, token: str = f"Bearer {TOKEN}") -> bytes:
    own = [] if any(header.startswith("Host:") for header in headers) else ["Host: localhost"]
    kind = [] if any(header.startswith("Content-Type:") for header in headers) else ["Content-Type: application/json"]
    return "\r\n".join([f"{line} HTTP/1.1", f"Authorization: {token}", *own, *kind, *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("line", "token", "size", "status"),
    [
        (f"POST {PLAIN}", "Bearer wrong", 20 << 20, b"401"),
        ("POST /v1/embeddings", f"Bearer {TOKEN}", 20 << 20, b"404"),
        (f"POST {PLAIN}", f"Bearer {TOKEN}", 33 << 20, b"413"),
    ],
)
def test_a_client_with_a_large_body_reads_why_it_is_refused(
    server: ApiServer, line: str, token: str, size: int, status: bytes
) -> None:
    body = bytes(min(size, 30 << 20))
    answer = said(server, request(line, f"Content-Length: {size}", token=token) + body)
    assert answer.startswith(b"HTTP/1.1 " + status) and b"Connection: close" in answer


def test_no_body_is_taken_for_a_request(server: ApiServer) -> None:
    hidden = request("GET /v1/models")
    length, chunked = f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked"
    for header in (length, chunked):
        assert said(server, request("GET /health", header) + hidden).count(b"HTTP/1.1 ") == 1, header
    for headers in ([length, chunked], [chunked], [length, "Content-Length: 0"], []):
        answer = said(server, request(f"POST {PLAIN}", *headers) + hidden)
        assert answer.startswith(b"HTTP/1.1 411") and answer.count(b"HTTP/1.1 ") == 1, headers


@pytest.mark.parametrize(
    ("path", "status"), [("/", b"200"), ("/health", b"200"), ("/v1/models", b"200"), (PLAIN, b"405"), ("/v1/x", b"404")]
)
def test_head_is_answered_as_get_without_the_content(server: ApiServer, path: str, status: bytes) -> None:
    answers = [said(server, request(f"{method} {path}", "Connection: close")) for method in ("GET", "HEAD")]
    head, end, content = answers[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and content and answers[1] == head + end
    assert (b"\r\nAllow: POST" in head) == (path == PLAIN)


def test_a_model_is_found_by_a_name_of_any_characters(server: ApiServer) -> None:
    server.models["grün, 2 bit"] = server.models["m"]
    for path, status in (("gr%C3%BCn%2C%202%20bit", b"200"), ("m", b"200"), ("x/v1/models/m", b"404")):
        answer = said(server, request(f"GET /v1/models/{path}", "Connection: close"))
        assert answer.startswith(b"HTTP/1.1 " + status), path


def test_log_likelihoods_of_prompts_are_bounded(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_mpi.serve.service.MOST_LIKELIHOODS", 2 * 3 * 4 * 5)
    for_one = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    asked = {"prompt": [[1] * 4] * 2, "n": 3, "max_tokens": 0, "echo": True}
    for further, taken in (
        ({}, True),
        ({"logprobs": 4}, True),
        ({"logprobs": 5}, False),
        ({"logprobs": 5, "echo": False}, True),
    ):
        parsed = parse(CompletionRequest, json.dumps({**asked, **further}).encode())
        if taken:
            assert len(for_one.tasks(parsed)) == 6
        else:
            with pytest.raises(HttpError, match="at most 120 log-likelihoods of prompts a request, not 144"):
                for_one.tasks(parsed)


@pytest.mark.parametrize(
    ("token", "status"), [(f"bearer {TOKEN}", b"200"), (f"BEARER  {TOKEN}", b"200"), (f"Basic {TOKEN}", b"401")]
)
def test_the_name_of_the_scheme_may_have_any_case(server: ApiServer, token: str, status: bytes) -> None:
    answer = said(server, request("GET /v1/models", "Connection: close", token=token))
    assert answer.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(("given", "named"), [("", "TOKEN"), (TOKEN, "HETERO_MPI_TOKEN"), ("another", "TOKEN")])
def test_the_line_at_the_start_names_the_variable_that_has_the_token(
    server: ApiServer, given: str, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETERO_MPI_TOKEN", given)
    with caplog.at_level(logging.INFO):
        _say_address(server, ServeOptions(Path()))
    assert f' -H "Authorization: Bearer ${named}"' in caplog.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprobs": 21}, "logprobs: .*less than or equal to 20"),
        ({"logprobs": False}, "logprobs: .*integer"),
        ({"prompt": "a\ud800"}, "half of a surrogate pair"),
        ({"prompt": ["\udfff"]}, "half of a surrogate pair"),
        ({"stop": ["x"] * 17}, "at most 16 texts"),
        ({"stop": "x" * 1001}, "1 to 1,000 characters"),
        ({"stop": ["x", ""]}, "1 to 1,000 characters"),
        ({"stop": [1]}, "a text or a list of texts"),
        ({"stop_token_ids": list(range(129))}, "at most 128 tokens"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids.0"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats = true"),
        ({"guided_choice": ["a"]}, r"guided_choice = \[\"a\"\]"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"json_schema": {}}, "json_schema"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens = false"),
        ({"add_special_tokens": False}, "add_special_tokens = false"),
        ({"mirostat": 2}, "mirostat = 2"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"grammar": "root ::= [a]"}, "grammar"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"n_predict": 5}, "n_predict = 5"),
        ({"temperature": float("nan")}, "NaN is no number of JSON"),
        ({"n": 0}, "n: .*greater than or equal to 1"),
        ({"n": 129}, "n: .*less than or equal to 128"),
        ({"n": 65, "prompt": ["a", "b"]}, "at most 128 answers"),
        ({"best_of": 2}, "best_of = 2"),
        ({"echo": 0}, "echo: .*boolean"),
        ({"tools": [{}]}, r"tools = \[\{\}\]"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages = "),
        ({"max_completion_tokens": 5}, "max_completion_tokens = 5"),
        ({"of_tomorrow": 1}, "of_tomorrow = 1"),
    ],
)
def test_what_a_completion_may_not_ask_for(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(HttpError, match=reason) as error:
        parse(CompletionRequest, json.dumps({"prompt": "abc", **fields}).encode())
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice: .*a call cannot be guaranteed"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "a call cannot be guaranteed"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "strict: .*cannot be guaranteed",
        ),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "of_tomorrow": 1}}]}, "of_tomorrow = 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "two have the name 'f'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name: .*at least 1 character"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": float("inf")}}}]},
            "no number of JSON",
        ),
        (with_arguments("[" * 100_000), "nested too deeply"),
        (with_arguments('{"a": NaN}'), "arguments: "),
        (with_arguments('{"a": "\\ud800"}'), "half of a surrogate pair"),
        (with_arguments("[1]"), "must be a JSON object"),
        ({"top_logprobs": 2}, "needs logprobs = true"),
        ({"echo": True}, "echo = true"),
        ({"logprobs": 0}, "logprobs: .*boolean"),
        ({"prompt": "abc"}, "prompt = "),
        ({"messages": []}, "messages: .*at least 1"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages: .*at most 10000"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "calls no tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}
                ]
            },
            "must be a JSON object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "of_tomorrow": 1}]}]}, "only parts"),
    ],
)
def test_what_a_chat_may_not_ask_for(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(HttpError, match=reason) as error:
        parse(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    assert error.value.status == 400


def test_what_asks_for_nothing_is_accepted() -> None:
    messages = [{"role": "user", "content": "\U0001f600"}, {"role": "assistant", "content": None, "tool_calls": []}]
    nothing = {"n": 1, "tools": [], "tool_choice": "auto", "presence_penalty": 0.0, "skip_special_tokens": True}
    told = {"user": "me", "metadata": {"a": "b"}, "store": True, "cache_prompt": True, "dry_base": 1.75, "model": "m"}
    for value in (False, None):
        fields = {"logprobs": value, "stop": ["x" * 1000] * 16, "of_tomorrow": value, **nothing, **told}
        chat = parse(ChatRequest, json.dumps({"messages": messages, "add_special_tokens": False, **fields}).encode())
        assert isinstance(chat, ChatRequest) and [message.content for message in chat.messages] == ["\U0001f600", ""]
    parse(CompletionRequest, b'{"prompt": "abc", "logprobs": null, "stop": [], "add_special_tokens": true}')


def test_what_is_wrong_a_million_times_is_told_once() -> None:
    wrong = b",".join([b"null"] * 1_000_000)
    table: list[tuple[Any, bytes, str]] = [
        (CompletionRequest, b'{"prompt": [' + wrong + b"]}", "entry 0 is null"),
        (CompletionRequest, b'{"prompt": "a", "stop": [' + wrong + b"]}", "a list of texts"),
        (CompletionRequest, b'{"prompt": "a", "stop_token_ids": [' + wrong + b"]}", "at most 128"),
        (CompletionRequest, b'{"prompt": [[' + wrong + b"]]}", "entry 0 is null"),
        (CompletionRequest, b'{"prompt": [[], ' + wrong + b"]}", "at most 128 prompts"),
        (ChatRequest, b'{"messages": [' + wrong + b"]}", "messages.0"),
        (ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + wrong + b"]}", "tools"),
        (ChatRequest, b'{"messages": [{"role": "user", "content": [' + wrong + b"]}]}", "only parts"),
        (CompletionRequest, b'{"prompt": "a"' + b"".join(b',"%d":1' % n for n in range(200_000)) + b"}", "199995 more"),
    ]
    for kind, body, reason in table:
        with pytest.raises(HttpError, match=reason) as error:
            parse(kind, body)
        assert len(str(error.value)) < 1000


def test_odd_values_are_answered_or_refused(model: ServedModel) -> None:
    """Of every field, at the edge or of another kind: a task or an answer of status 400, and no other error."""
    service = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    odd: list[Any] = [
        None,
        True,
        0,
        -1,
        2**70,
        1e308,
        "",
        "x",
        "\0",
        [],
        [[]],
        [1],
        ["x"],
        [None],
        {},
        {"a": 1},
        [{}],
        -0.0,
    ]
    odd += [[2**80], [{"role": "user"}], [{"role": "user", "content": [[]]}], [{"role": [], "content": {}}]]
    odd += [[{"role": "user", "content": "x", "name": 5}], {"include_usage": []}, "9" * 5000, [True]]
    taken = 0
    for kind, own in (
        (CompletionRequest, {"prompt": "abc"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for name, value in itertools.product([*kind.model_fields, *own, "unknown", "model"], odd):
            try:
                service.tasks(parse(kind, json.dumps({**own, name: value}).encode()))
                taken += 1
            except HttpError as error:
                assert error.status == 400 and len(str(error)) < 1500, (name, value)
    assert taken > 50


def test_a_prompt_that_is_far_too_long_is_not_tokenised_to_its_end(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    seen: list[int] = []

    def counted(engine: Any, texts: list[str], special: bool = False) -> list[list[int]]:
        seen.extend(map(len, texts))
        return encoded(engine, texts, special)

    monkeypatch.setattr("hetero_mpi.serve.service.encoded", counted)
    for asked in (
        CompletionRequest(prompt=["abc " * 500_000]),
        ChatRequest(messages=[{"role": "user", "content": "abc " * 500_000}]),  # type: ignore[list-item]
    ):
        seen.clear()
        with pytest.raises(HttpError, match="the prompt has more than 64") as error:
            service.tasks(asked)
        assert error.value.code == "context_length_exceeded" and sum(seen) < 3000


def test_stop_texts_that_are_special_tokens_stop_at_the_token(model: ServedModel) -> None:
    service = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    (end, number), *_ = model.special.items()

    def stops(**fields: Any) -> list[int]:
        return service.tasks(CompletionRequest(prompt=["abc"], **fields))[0].stops

    assert stops() == model.stops and stops(ignore_eos=True) == []
    assert stops(stop=[end, "x"], ignore_eos=True) == [number]
    assert stops(stop_token_ids=[7, 3], ignore_eos=True) == [3, 7]
    for text in (f"{end}\n", f"x{end}"):
        with pytest.raises(HttpError, match="can never come") as error:
            stops(stop=text)
        assert error.value.status == 400
    with pytest.raises(HttpError, match="ids from 0 to 319"):
        stops(stop_token_ids=[320])
    with pytest.raises(HttpError, match="min_tokens = 17"):
        service.tasks(CompletionRequest(prompt=["abc"], min_tokens=17))


def test_no_text_stops_an_answer_before_its_least_number_of_tokens(model: ServedModel) -> None:
    tokens = [model.tokenizer(letter).input_ids[0] for letter in "aba"]
    wording = Wording(model.tokenizer, Task([1], [0], 10, Sampling(), 2), ("a",))
    assert [wording.add(token) for token in tokens] == ["a", "b", ""]
    assert (wording.finish, wording.tokens) == ("stop", 3)


def test_defaults_are_those_of_the_generation_config(base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = tmp_path / "generation_config.json"
    config.unlink(missing_ok=True)
    plain = ServedModel("m", open_source(tmp_path)).defaults
    assert "temperature 1 (" in _default_sampling(plain) and "sets none" in _default_sampling(plain)
    config.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 0}))
    defaults = ServedModel("m", open_source(tmp_path)).defaults
    assert "temperature 0.6, top_k 20 (the model's generation_config.json sets" in _default_sampling(defaults)
    asked = CompletionRequest(prompt=["abc"], top_k=-1, min_p=0.1, seed=5)
    assert asked.sampling(defaults) == Sampling(0.6, 1.0, 5, 0, 0.1, 1.0)
    for wrong in ("hot", -1, []):
        config.write_text(json.dumps({"temperature": wrong}))
        with pytest.raises(UserError, match=r"generation_config\.json.*temperature"):
            ServedModel("m", open_source(tmp_path))


def test_a_person_gets_a_page_of_its_own(server: ApiServer) -> None:
    """Without a token, and it asks no other host for anything."""
    page = said(server, request("GET /", "Connection: close", token="")).decode()
    head, _, text = page.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200") and "text/html" in head and "default-src 'none'" in head
    assert "<textarea" in text and "<title>m</title>" in text and "http" not in text and "@" not in text


def test_a_generation_config_that_cannot_be_read_is_known_before_the_weights(base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text("{no")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        ServedModel("m", open_source(tmp_path))
