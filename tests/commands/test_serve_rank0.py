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
from hetero_mpi.inference.sampling import NOT_A_NUMBER, Sampling
from hetero_mpi.inference.source import open_source
from hetero_mpi.inference.writer import Round, Task, TextChanges
from hetero_mpi.serve.api_requests import ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import MAX_WAITING, Answer, CacheBudget, Scheduler, TokenEvent
from hetero_mpi.serve.serve import ServeOptions, _default_sampling, _print_address, check_options
from hetero_mpi.serve.served_models import ServedModel
from hetero_mpi.serve.service import Service, context_of
from hetero_mpi.serve.web.server import HttpError, Names, bound_socket
from hetero_mpi.serve.wording import StopStringFilter
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
    server = ApiServer(bound_socket("127.0.0.1", 0), {"token": TOKEN}, service, Names.for_address("127.0.0.1"))
    yield server
    server.stop(0.0)


def task(tokens: int, limit: int = 10) -> Task:
    return Task([1] * tokens, [0], limit, Sampling())


def submitted(scheduler: Scheduler, one: Task) -> Answer:
    (answer,) = scheduler.submit([one])
    return answer


def test_texts_begin_as_soon_as_there_is_room_in_the_order_of_their_requests() -> None:
    room = [CacheBudget(0, 0, 10, 1000), CacheBudget(2, 50, 1, 400)]
    scheduler = Scheduler(room, parallel=3)
    small, large = [submitted(scheduler, task(10)) for _ in range(2)], submitted(scheduler, task(51))
    behind = submitted(scheduler, task(10))
    assert list(scheduler.next_changes(0.0).begin.values()) == [small[0].task, small[1].task]
    assert scheduler.next_changes(0.0) == TextChanges({}, [], []), "nobody overtakes the large one"
    scheduler.distribute(Round({1: 7, 2: 0}))
    assert (small[0].events.get_nowait(), small[1].events.get_nowait()) == (TokenEvent(0, 7), TokenEvent(0, 0))
    change = scheduler.next_changes(0.0)
    assert list(change.begin.values()) == [large.task], "20 + 61 of 100 tokens, so that 20 more have no room"
    small[0].cancelled.set()
    change = scheduler.next_changes(0.0)
    assert (list(change.begin.values()), change.end) == ([behind.task], [1])
    scheduler.distribute(Round({3: NOT_A_NUMBER, 4: 5}))
    error = large.events.get_nowait()
    assert isinstance(error, HttpError) and error.status == 500
    scheduler.close(HttpError(503, "over"))
    assert behind.events.get_nowait() == TokenEvent(0, 5) and isinstance(behind.events.get_nowait(), HttpError)
    with pytest.raises(HttpError, match="over"):
        scheduler.submit([task(1)])


def take_rounds(scheduler: Scheduler, rounds: int) -> None:
    """Give every answer with a place its token, so often."""
    for _ in range(rounds):
        change = scheduler.next_changes(0.0)
        placed = [number for number in scheduler._cached if number not in change.rest]
        assert scheduler.counts() == {"running": len(placed), "waiting": len(scheduler._answers) - len(placed)}
        scheduler.distribute(Round(dict.fromkeys(placed, 7)))


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
    assert scheduler.counts()["waiting"] == MAX_WAITING and refused == [503] * (640 - MAX_WAITING)
    scheduler.submit([task(1)] * 128, "b")
    with pytest.raises(HttpError, match="answers are waiting"):
        scheduler.submit([task(1)] * 128, "b")


def test_a_prompt_that_memory_has_no_room_for_is_refused_with_the_numbers(model: ServedModel) -> None:
    room = [CacheBudget(0, 0, 10, 1000), CacheBudget(2, 100, 20, 800)]
    context = context_of(model.opened, None, room)
    assert context.tokens == 35
    service = Service([model], context, Scheduler(room, 1), lambda: False)
    asked = ChatRequest(messages=[{"role": "user", "content": "x" * 40}], max_tokens=5)  # type: ignore[list-item]
    with pytest.raises(HttpError) as error:
        service.tasks(asked)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert all(value in str(error.value) for value in ("rank 2", "800 B", "35 tokens", "20 B"))
    assert context_of(model.opened, 20, room).reason.endswith("--context 20")
    assert context_of(model.opened, None, []).tokens == 64


def test_text_that_may_begin_a_stop_is_held_back(model: ServedModel) -> None:
    tokenizer = model.tokenizer
    letters = list("abcabd!")
    tokens = [tokenizer(letter).input_ids[0] for letter in letters]
    wording = StopStringFilter(tokenizer, task(3, limit=7), ("abd", "zz"))
    assert [wording.add(token) for token in tokens[:6]] == ["", "", "abc", "", "", ""]
    assert (wording.finish, wording.tokens) == ("stop", 6)
    limited = StopStringFilter(tokenizer, task(3, limit=2), ("abd",))
    assert [limited.add(token) for token in tokens[:2]] == ["", "ab"]
    assert limited.finish == "length"
    stopped = StopStringFilter(tokenizer, task(3), ("abd",))
    assert [stopped.add(token) for token in (tokens[0], 0)] == ["", "a"]
    assert (stopped.finish, stopped.tokens) == ("stop", 2)
    least = StopStringFilter(tokenizer, Task([1], [0], 10, Sampling(), 2), ("a",))  # not before min_tokens
    assert [least.add(tokens["ab".index(letter)]) for letter in "aba"] == ["a", "b", ""]
    assert (least.finish, least.tokens) == ("stop", 3)


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
    with refuses("options.value", "--parallel 0"):
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
    names = ("alice\n", "a/b k\n", "alice k1\nalice k2\n", "alice k1\nbob k1\n", "token x\n", f"{'a' * 65} k\n")
    no_keys = ("alice k 1\n", "alice gr\u00fcn\n", "# alice k1\n\n")
    for text, token in (*((text, "t") for text in names), *((text, None) for text in no_keys), (no_keys[-1], "t")):
        with refuses("serve.keys") as error:
            keys(text, token)
        assert not any(key in str(error.value) for key in ("k1", "k2"))
    assert keys("token k1\n") == {"token": "k1"} == check_options(ServeOptions(Path(), keys=path))
    path.unlink()
    with refuses("serve.keys", path):
        check_options(ServeOptions(Path(), keys=path))
    os.mkfifo(path)  # a pipe is empty the second time: whoever believes it lets everybody in
    writer = threading.Thread(target=path.write_text, args=("alice k1\n",))
    writer.start()
    assert check_options(ServeOptions(Path(), host="0.0.0.0", keys=path)) == {"alice": "k1"}
    writer.join()


def test_every_key_is_compared_and_numbers_need_one(server: ApiServer) -> None:
    server.keys = {"a": "one-key", "b": "two-keys"}
    tokens = {"Bearer one-key": b"200", "bearer two-keys": b"200", "BEARER  two-keys": b"200", "Bearer two-key": b"401",
              "Bearer ": b"401", "Basic one-key": b"401"}  # fmt: skip
    for (token, status), route in itertools.product(tokens.items(), ("/metrics", "/v1/models")):
        answer = said(server, request(f"GET {route}", "Connection: close", token=token))
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
    monkeypatch.setattr("hetero_mpi.serve.service.MAX_PROMPT_LOGPROBS", 2 * 3 * 4 * 5)
    for_one = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    asked = {"prompt": [[1] * 4] * 2, "n": 3, "max_tokens": 0, "echo": True}
    for further in ({}, {"logprobs": 4}, {"logprobs": 5}, {"logprobs": 5, "echo": False}):
        parsed = parse(CompletionRequest, json.dumps({**asked, **further}).encode())
        if further != {"logprobs": 5}:
            assert len(for_one.tasks(parsed)) == 6
        else:
            with pytest.raises(HttpError, match=r"120 .* 144"):
                for_one.tasks(parsed)


@pytest.mark.parametrize(("given", "named"), [("", "TOKEN"), (TOKEN, "HETERO_MPI_TOKEN"), ("another", "TOKEN")])
def test_the_line_at_the_start_names_the_variable_that_has_the_token(
    server: ApiServer, given: str, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETERO_MPI_TOKEN", given)
    with caplog.at_level(logging.INFO):
        _print_address(server, ServeOptions(Path()), 8)
    assert f' -H "Authorization: Bearer ${named}"' in caplog.text


COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 21}, {"logprobs": False}, {"stop": ["x"] * 17}, {"stop": "x" * 1001}, {"stop": ["x", ""]}, {"stop": [1]},
    {"stop_token_ids": list(range(129))}, {"stop_token_ids": ["x"]}, {"top_k": -2}, {"min_p": 1.5}, {"repetition_penalty": 0},
    {"stream_options": {"continuous_usage_stats": True}}, {"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}},
    {"json_schema": {}}, {"use_beam_search": True}, {"skip_special_tokens": False}, {"add_special_tokens": False}, {"mirostat": 2},
    {"typical_p": 0.9}, {"grammar": "root ::= [a]"}, {"dry_multiplier": 0.8}, {"n_predict": 5}, {"n": 0}, {"n": 129}, {"echo": 0},
    {"best_of": 2}, {"tools": [{}]}, {"messages": [{"role": "user"}]}, {"max_completion_tokens": 5}, {"of_tomorrow": 1},
]  # fmt: skip
CHATS: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}}, {"continue_final_message": True}, {"add_generation_prompt": False},
    {"add_special_tokens": True}, {"reasoning_effort": "low"}, {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"top_logprobs": 2},
    {"echo": True}, {"logprobs": 0}, {"prompt": "abc"}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}] * 10_001},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "of_tomorrow": 1}]}]},
    {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
]  # fmt: skip


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        *((CompletionRequest, fields, next(iter(fields))) for fields in COMPLETIONS),
        *((ChatRequest, fields, next(iter(fields))) for fields in CHATS),
        (CompletionRequest, {"prompt": "a\ud800"}, "surrogate"),
        (CompletionRequest, {"prompt": ["\udfff"]}, "surrogate"),
        (CompletionRequest, {"temperature": float("nan")}, "NaN"),
        (CompletionRequest, {"n": 65, "prompt": ["a", "b"]}, "65"),
        (ChatRequest, tool(strict=True), "strict"),
        (ChatRequest, {"tools": [{"type": "custom"}]}, "tools.0.type"),
        (ChatRequest, tool(of_tomorrow=1), "of_tomorrow = 1"),
        (ChatRequest, {"tools": tool()["tools"] * 2}, "'f'"),
        (ChatRequest, tool(name=""), "name"),
        (ChatRequest, tool(parameters={"a": float("inf")}), "Infinity"),
        *((ChatRequest, with_arguments(a), "") for a in ("[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}', "[1]", "[]")),
        (ChatRequest, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls.0.function"),
    ],
)
def test_what_a_request_may_not_ask_for(kind: Any, fields: dict[str, Any], named: str) -> None:
    least = {"prompt": "abc"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(HttpError) as error:
        parse(kind, json.dumps({**least, **fields}).encode())
    assert error.value.status == 400 and named in str(error.value)


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
    wrong, user = b",".join([b"null"] * 1_000_000), b'{"role": "user", "content": '
    for kind, body in (
        (CompletionRequest, b'{"prompt": [' + wrong + b"]}"),
        (CompletionRequest, b'{"prompt": "a", "stop": [' + wrong + b"]}"),
        (CompletionRequest, b'{"prompt": "a", "stop_token_ids": [' + wrong + b"]}"),
        (CompletionRequest, b'{"prompt": [[' + wrong + b"]]}"),
        (CompletionRequest, b'{"prompt": [[], ' + wrong + b"]}"),
        (ChatRequest, b'{"messages": [' + wrong + b"]}"),
        (ChatRequest, b'{"messages": [' + user + b'"x"}], "tools": [' + wrong + b"]}"),
        (ChatRequest, b'{"messages": [' + user + b"[" + wrong + b"]}]}"),
        (CompletionRequest, b'{"prompt": "a"' + b"".join(b',"%d":1' % n for n in range(200_000)) + b"}"),
    ):
        with pytest.raises(HttpError) as error:
            parse(kind, body)
        assert error.value.status == 400 and len(str(error.value)) < 1000


def test_odd_values_are_answered_or_refused(model: ServedModel) -> None:
    """Of every field, at the edge or of another kind: a task or an answer of status 400, and no other error."""
    service = Service([model], context_of(model.opened, None, []), Scheduler([], 1), lambda: False)
    odd: list[Any] = [None, True, 0, -1, 2**70, 1e308, -0.0, "", "x", "\0"]
    odd += [[], [[]], [1], ["x"], [None], {}, {"a": 1}, [{}]]
    odd += [[2**80], [{"role": "user"}], [{"role": "user", "content": [[]]}], [{"role": [], "content": {}}]]
    odd += [[{"role": "user", "content": "x", "name": 5}], {"include_usage": []}, "9" * 5000, [True]]
    taken = 0
    message = {"role": "user", "content": "x"}
    for kind, own in ((CompletionRequest, {"prompt": "abc"}), (ChatRequest, {"messages": [message]})):
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
        with pytest.raises(HttpError, match="64") as error:
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
        with pytest.raises(HttpError) as error:
            stops(stop=text)
        assert error.value.status == 400
    with pytest.raises(HttpError, match="319"):
        stops(stop_token_ids=[320])
    with pytest.raises(HttpError, match="min_tokens = 17"):
        service.tasks(CompletionRequest(prompt=["abc"], min_tokens=17))


def test_defaults_are_those_of_the_generation_config(base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = tmp_path / "generation_config.json"
    config.unlink(missing_ok=True)
    plain = ServedModel("m", open_source(tmp_path)).defaults
    assert "temperature 1 " in _default_sampling(plain)
    config.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 0}))
    defaults = ServedModel("m", open_source(tmp_path)).defaults
    assert "temperature 0.6, top_k 20 " in _default_sampling(defaults)
    asked = CompletionRequest(prompt=["abc"], top_k=-1, min_p=0.1, seed=5)
    assert asked.sampling(defaults) == Sampling(0.6, 1.0, 5, 0, 0.1, 1.0)
    for wrong in ("hot", -1, []):
        config.write_text(json.dumps({"temperature": wrong}))
        with refuses("generation.value", config, "temperature"):
            ServedModel("m", open_source(tmp_path))
    config.write_text("{no")
    with refuses("model.json", config):  # known before the weights
        ServedModel("m", open_source(tmp_path))


def test_a_person_gets_a_page_of_its_own(server: ApiServer) -> None:
    """Without a token, and it asks no other host for anything."""
    page = said(server, request("GET /", "Connection: close", token="")).decode()
    head, _, text = page.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200") and "text/html" in head and "default-src 'none'" in head
    assert "<textarea" in text and "<title>m</title>" in text and "http" not in text and "@" not in text
