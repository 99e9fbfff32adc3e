"""``serve`` answers OpenAI's client as transformers' ``generate`` would, refuses in the API's form, and ends in order."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.util.errors import ExitCode
from tests.commands.test_generate import TEMPLATE, continue_with, model_with_tokenizer, written
from tests.support.long_run import Running, started
from tests.support.mpi import SHARING
from tests.support.plain_training import load_reference
from tests.support.training_cases import adapter_directory, corpus, tokenizer_directory

openai = pytest.importorskip("openai")
CASE = written("served", "llama", tuning="lora", changes=(("initializer_range", 0.4),))
TOKEN = "a-secret"
ALICE = "the-key-of-alice"
CONTEXT = 60
MESSAGES = [{"role": "user", "content": "abc defgh"}]
RENDERED = "<user>abc defgh<a>"


class Served:
    """A running service, and what it must answer."""

    def __init__(self, running: Running, tokenizer: PreTrainedTokenizerFast, model: torch.nn.Module) -> None:
        self.running, self.tokenizer, self.model = running, tokenizer, model
        self.url = found.group(0) if (found := re.search(r"http://\S+(?=/v1;)", running.text())) else ""
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0, timeout=240)

    def expected(self, text: str, tokens: int) -> str:
        """What transformers' ``generate`` adds to a text, greedily."""
        known = list(self.tokenizer(text).input_ids)
        return str(self.tokenizer.decode(continue_with(self.model, known, tokens), skip_special_tokens=True))

    def completed(self, prompt: Any, **options: Any) -> Any:
        """The choice that a completion gives."""
        options = {"temperature": 0, "max_tokens": 12, **options}
        return self.client.completions.create(model="any", prompt=prompt, **options).choices[0]

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
            return cast(dict[str, Any], json.load(answer))


@contextmanager
def service(
    ranks: int, source: Path, output: Path, options: Sequence[str] = (), launch: Sequence[str] = ()
) -> Iterator[Running]:
    """``serve`` under ``launch``, once it can be reached."""
    serve = ["serve", str(source), "--port", "0", *options]
    start = ["launch", "-np", str(ranks), *launch, "--"] if ranks else []
    command = [sys.executable, "-m", "hetero_mpi", *start, *serve]
    with started(command, {**os.environ, **SHARING}, source, output) as running:
        running.wait_for("the address", lambda: "curl" in running.text())
        running.find_ranks()
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    """A model with a chat template."""
    return model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), CASE, TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(base)


@pytest.fixture(scope="module")
def served(place: Path, base: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    """An adapter over its base, on two ranks."""
    adapter = adapter_directory(place, CASE)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    keys = place / "keys.txt"
    keys.write_text(f"# clients\n\nalice {ALICE}\nbob another-key\n")
    options = ("--token", TOKEN, "--keys", str(keys), "--context", str(CONTEXT), "--parallel", "3")
    with service(2, adapter, place / "output.txt", options) as running:
        yield Served(running, tokenizer, load_reference(CASE, base, adapter))


@pytest.mark.slow
def test_a_chat_is_answered_as_transformers_would(served: Served) -> None:
    expected = served.expected(RENDERED, 20)
    chats = served.client.chat.completions
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    answer = chats.create(**asked, user="me", presence_penalty=0, n=1)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(served.tokenizer(RENDERED).input_ids),
        20,
    )
    chunks = list(chats.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert len(chunks) > 8 and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
    parts = [{"type": "text", "text": "abc "}, {"type": "text", "text": "defgh"}]
    same = chats.create(**{**asked, "messages": [{"role": "user", "content": parts}]})
    assert same.choices[0].message.content == expected


@pytest.mark.slow
def test_a_completion_continues_texts_and_tokens_and_stops_where_it_shall(served: Served) -> None:
    prompt = "abc defgh ab cab"
    expected = served.expected(prompt, 16)
    whole = served.completed(prompt, max_tokens=None)
    assert (whole.text, whole.finish_reason) == (expected, "length"), "16 tokens unless the client says more"
    assert served.completed(list(served.tokenizer(prompt).input_ids), max_tokens=16).text == expected
    place = next(n for n in range(1, len(expected)) if expected[n].isalpha() and expected.index(expected[n]) == n)
    stop = expected[place]
    told = served.completed(prompt, max_tokens=16, stop=["not there", stop])
    assert (told.text, told.finish_reason) == (expected[:place], "stop")
    pieces = served.client.completions.create(
        model="any", prompt=prompt, temperature=0, max_tokens=16, stop=stop, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == expected[:place]


@pytest.mark.slow
def test_fields_of_other_servers_are_honoured_as_transformers_would(served: Served) -> None:
    prompt = "abc defgh ab cab"
    known = torch.tensor([served.tokenizer(prompt).input_ids])
    for asked, own in (
        ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
        ({"min_tokens": 16, "repetition_penalty": 3.0}, {"min_new_tokens": 16, "repetition_penalty": 3.0}),
    ):
        with torch.no_grad():
            whole = served.model.generate(
                input_ids=known, attention_mask=torch.ones_like(known), do_sample=False, max_new_tokens=16, **own
            )
        expected = served.tokenizer.decode(whole[0, known.shape[1] :], skip_special_tokens=True)
        assert served.completed(prompt, max_tokens=16, extra_body=asked).text == expected != served.expected(prompt, 16)
    tokens = continue_with(served.model, known[0].tolist(), 16)
    place = next(n for n in range(2, 16) if tokens[n] not in tokens[:n])
    told = served.completed(prompt, max_tokens=16, extra_body={"stop_token_ids": [tokens[place]], "ignore_eos": True})
    assert told.finish_reason == "stop"
    assert told.text == served.tokenizer.decode(tokens[:place], skip_special_tokens=True)
    drawn = [served.completed(prompt, temperature=1.0, seed=n, extra_body={"top_k": 1}).text for n in range(2)]
    assert drawn == [served.expected(prompt, 12)] * 2, "of one token only one can be drawn"
    texts = [served.completed("abc", temperature=1.0, top_p=0.95, seed=seed).text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [8, 50])
def test_answers_written_side_by_side_are_those_written_in_turn(clients: int, served: Served) -> None:
    """To the last bit of their log-probabilities, though the answers that are alone are computed beside empty rows."""
    prompts = [("abc defgh ab cab" * 2)[: 5 + 3 * (n % 8)] for n in range(clients)]

    def answer(number: int) -> tuple[str, list[float]]:
        asked = {"max_tokens": 20 + number % 8, "temperature": 1.0, "seed": number, "logprobs": 1}
        choice = served.completed(prompts[number], **asked)
        return choice.text, choice.logprobs.token_logprobs

    in_turn = [answer(number) for number in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(answer, range(clients))) == in_turn
    assert re.search(r"\b3 rows; prompts in passes", served.running.text())


def posted(served: Served, path: str, body: bytes, token: str = TOKEN) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(served.url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_what_cannot_be_answered_is_refused_in_the_form_of_the_api(served: Served) -> None:
    chat, plain = "/v1/chat/completions", "/v1/completions"
    table: list[tuple[str, Any, int, tuple[str, ...]]] = [
        (chat, b"{no", 400, ()),
        (chat, [1], 400, ()),
        (chat, {}, 400, ("messages",)),
        (chat, {"messages": MESSAGES, "temperature": "hot", "top_p": 0}, 400, ("temperature:", "top_p:")),
        (chat, {"messages": MESSAGES, "best_of": 2, "grammar": "x"}, 400, ("best_of = 2", 'grammar = "x"')),
        (plain, {"prompt": ""}, 400, ()),
        (plain, {"prompt": [5, 320]}, 400, ("319",)),
        (plain, {"prompt": ["a", 5]}, 400, ("5",)),
        (plain, {"prompt": [[1] * 60], "max_tokens": 0}, 400, ("60",)),
        (plain, {"prompt": "abc", "max_tokens": 60}, 400, ("--context 60",)),
        (plain, {"prompt": [1] * 61}, 400, ("61",)),
        ("/v1/embeddings", {}, 404, ("/v1/embeddings",)),
    ]
    for path, body, status, parts in table:
        found, answer = posted(served, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        assert found == status and all(part in answer["error"]["message"] for part in parts), (body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        served.completed("abc", max_tokens=-1)
    status, answer = posted(served, plain, b"{}", token="wrong")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0).models.list()


def likelihoods(served: Served, tokens: Sequence[int]) -> torch.Tensor:
    """log_softmax of transformers' logits, [T, V]: row t is of the token behind t."""
    with torch.no_grad():
        logits = served.model(input_ids=torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.slow
def test_log_likelihoods_of_completions_are_those_of_transformers(served: Served) -> None:
    """As evaluation harnesses ask: prompts as tokens, several at once, echoed, with one new token or none."""
    prompts = [list(served.tokenizer(text).input_ids) for text in ("abc defgh ab cab", "cab", "defgh abc")]
    for most in (0, 1):
        asked: dict[str, Any] = {"max_tokens": most, "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
        answer = served.client.completions.create(model="any", prompt=prompts, **asked)
        assert answer.usage is not None and answer.usage.completion_tokens == 3 * most
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            told = choice.logprobs
            assert told is not None and told.token_logprobs and told.top_logprobs and told.tokens and told.text_offset
            expected = likelihoods(served, prompt)
            picked = [int(expected[-1].argmax())] * most
            assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
            own = [float(row[token]) for row, token in zip(expected, [*prompt[1:], *picked], strict=False)]
            assert told.token_logprobs[1:] == pytest.approx(own, abs=1e-4) and len(own) == len(prompt) - 1 + most
            for row, two, one in zip(expected, told.top_logprobs[1:], own, strict=False):
                best = row.topk(2).values.tolist()
                assert max(two.values()) == pytest.approx(best[0], abs=1e-4) and 1 <= len(two) <= 3
                assert any(value == pytest.approx(one, abs=1e-4) for value in two.values())
            text = served.tokenizer.decode([*prompt, *picked], skip_special_tokens=True)
            assert choice.text == text == "".join(told.tokens)
            assert told.text_offset == [len("".join(told.tokens[:n])) for n in range(len(told.tokens))]
    chunks = list(
        served.client.completions.create(model="any", prompt="abc", stream=True, **{**asked, "max_tokens": 5})
    )
    streamed = [value for c in chunks if c.choices[0].logprobs for value in c.choices[0].logprobs.token_logprobs or []]
    whole = served.completed("abc", **{**asked, "max_tokens": 5})
    assert streamed == whole.logprobs.token_logprobs and "".join(c.choices[0].text for c in chunks) == whole.text


@pytest.mark.slow
def test_log_likelihoods_of_a_chat_are_those_of_transformers(served: Served) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 8, "temperature": 0.8, "seed": 2}
    choice = served.client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    known = list(served.tokenizer(RENDERED).input_ids)
    for one in choice.logprobs.content:
        row = likelihoods(served, known)[-1]
        best = row.topk(3)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        token = int((row - one.logprob).abs().argmin())
        assert float(row[token]) == pytest.approx(one.logprob, rel=1e-4)  # fp32, of logits with wide weights
        assert one.token == served.tokenizer.decode([token]) and one.bytes is not None
        assert bytes(one.bytes).decode(errors="replace") == one.token
        known.append(token)
    assert len(choice.logprobs.content) == 8
    plain = served.client.chat.completions.create(**asked).choices[0]
    assert plain.logprobs is None and plain.message.content == choice.message.content


@pytest.mark.slow
def test_several_choices_are_those_of_their_seeds(served: Served) -> None:
    asked: dict[str, Any] = {"model": "any", "temperature": 1.0, "max_tokens": 6}
    answer = served.client.completions.create(prompt=["abc", "cab"], n=2, seed=3, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    single = [served.completed(p, temperature=1.0, max_tokens=6, seed=s).text for p in ("abc", "cab") for s in (3, 4)]
    assert [choice.text for choice in answer.choices] == single and len(set(single)) > 2
    texts = ["", "", ""]
    for chunk in served.client.chat.completions.create(messages=MESSAGES, n=3, seed=5, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = served.client.chat.completions.create(messages=MESSAGES, n=3, seed=5, **asked)
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) > 1


@pytest.mark.slow
def test_a_request_of_many_answers_leaves_a_place_to_other_clients(served: Served) -> None:
    """And its answers, which rest meanwhile, stay those of their seeds."""
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    alice = openai.OpenAI(base_url=f"{served.url}/v1", api_key=ALICE, max_retries=0, timeout=240)
    expected = served.expected("abc", 12)
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(served.client.completions.create, model="any", prompt="abc", n=48, seed=3, **asked)
        served.running.wait_for("running answers", lambda: served.health()["running"] == 3)
        one = alice.completions.create(model="any", prompt="abc", max_tokens=12, temperature=0)
        left = served.health()
        assert left["running"] in (2, 3) and left["waiting"] > 5 and not many.done(), "alice's place may be free yet"
        assert one.choices[0].text == expected
        texts = [choice.text for choice in many.result().choices]
    assert texts[:4] == [served.completed("abc", seed=3 + number, **asked).text for number in range(4)]


@pytest.mark.slow
def test_a_stream_that_a_death_cuts_does_not_look_whole(base: Path, tmp_path: Path) -> None:
    asked = {"prompt": "abc", "max_tokens": 50, "n": 100, "stream": True, "ignore_eos": True}
    with service(0, base, tmp_path / "output.txt") as running:
        address = Served(running, None, None).url.removeprefix("http://")  # type: ignore[arg-type]
        client = http.client.HTTPConnection(address, timeout=120)
        client.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.read(6) == b"data: "
        running.process.kill()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


def metrics(served: Served, token: str = TOKEN) -> dict[tuple[str, ...], float]:
    """(sample's name, values of its labels by name) -> its value, as Prometheus' own parser reads them."""
    asked = urllib.request.Request(f"{served.url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
    assert ALICE not in text and TOKEN not in text
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        (s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for family in families for s in family.samples
    }


@pytest.mark.slow
def test_prometheus_reads_the_numbers_of_every_client(served: Served) -> None:
    alice = openai.OpenAI(base_url=f"{served.url}/v1", api_key=ALICE, max_retries=0, timeout=240)
    before, route = metrics(served), "/v1/completions"
    alice.completions.create(model="any", prompt="abc", max_tokens=7, temperature=0, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError):
        alice.completions.create(model="any", prompt="abc", max_tokens=1000)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=ALICE[:-1], max_retries=0).models.list()
    served.completed("abc", max_tokens=2)

    def added(*name: str) -> float:
        return metrics(served)[name] - before.get(name, 0.0)

    model = "served-adapter"
    assert added("hetero_mpi_requests_total", "alice", model, route, "200") == 1
    assert added("hetero_mpi_requests_total", "alice", model, route, "400") == 1
    assert added("hetero_mpi_requests_total", "token", model, route, "200") == 1
    assert added("hetero_mpi_generated_tokens_total", "alice", model) == 7
    assert added("hetero_mpi_prompt_tokens_total", "alice", model) == len(served.tokenizer("abc").input_ids)
    assert added("hetero_mpi_first_token_seconds_count") == added("hetero_mpi_first_token_seconds_bucket", "+Inf") == 2
    assert added("hetero_mpi_token_seconds_count") == 2 and added("hetero_mpi_token_seconds_sum") > 0
    assert metrics(served)["hetero_mpi_answers_running",] == 0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        metrics(served, "wrong")
    text = served.running.text()
    assert "length, of alice" in text and ALICE not in text and "another-key" not in text


@pytest.mark.slow
def test_the_line_at_the_start_is_a_request_that_works(served: Served) -> None:
    (model,) = served.client.models.list().data
    assert model.id == "served-adapter" and served.client.models.retrieve(model.id).id == model.id
    assert served.health() == {"status": "ok", "running": 0, "waiting": 0}, "no token is needed for this"
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    line = next(line for line in served.running.text().splitlines() if line.strip().startswith("curl "))
    command, told = ["sh", "-c", f"{line} -s"], {**os.environ, "TOKEN": TOKEN}
    answer = json.loads(subprocess.run(command, env=told, capture_output=True, timeout=120).stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
def test_a_client_that_goes_away_is_written_for_no_longer(served: Served) -> None:
    """And those who wait behind it are served. One that closes its sending side only reads its answer."""
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "abc", "max_tokens": 50, "temperature": 0, "ignore_eos": True}).encode()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"HTTP/1.1 200 OK" in answer and b'"completion_tokens": 50' in answer
    rank = served.running.ranks[1]
    rank.send_signal(signal.SIGSTOP)
    try:
        with socket.create_connection((host, int(port))) as client, ThreadPoolExecutor(1) as pool:
            client.sendall(request)
            served.running.wait_for("a running request", lambda: served.health()["running"] == 1)
            behind = pool.submit(served.completed, "abc")
            served.running.wait_for("a waiting request", lambda: served.health()["waiting"] == 1)
            client.close()
            served.running.wait_for("the end", lambda: "3 + 0 tokens" in served.running.text())
            rank.send_signal(signal.SIGCONT)
            assert behind.result().text == served.expected("abc", 12)
    finally:
        rank.send_signal(signal.SIGCONT)
    assert served.health()["running"] == 0


@pytest.mark.slow
def test_ranks_that_wait_for_requests_leave_their_cores_alone(served: Served) -> None:
    def used_s() -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in served.running.ranks.values())

    before = used_s()
    time.sleep(1.5)
    assert used_s() - before < 0.5, "a rank that spins takes 1.5 s where it has a core"


@pytest.mark.slow
def test_a_signal_ends_the_service_in_order(served: Served) -> None:
    """The last test of this service. Who waits is told, all ranks leave, and the exit code is 0."""
    running = served.running
    running.ranks[1].send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.completed, "abc", max_tokens=50)
        running.wait_for("a running request", lambda: served.health()["running"] == 1)
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.InternalServerError):
            waiting.result()
        running.ranks[1].send_signal(signal.SIGCONT)
    assert running.end() == ExitCode.DONE, running.text()
    assert "Ctrl-C" in running.text() and "Traceback" not in running.text()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 3], ids=["alone", "np3"])
def test_a_model_without_an_adapter_is_served_until_sigterm(
    ranks: int, base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Also by one process without a launcher."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with service(ranks, base, tmp_path / "output.txt") as running:
        served = Served(running, tokenizer, model)
        prompts = [("abc defgh ab cab" * 2)[: 5 + 3 * n] for n in range(6)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: served.completed(prompt, max_tokens=30).text, prompts))
        assert found == [served.expected(prompt, 30) for prompt in prompts]
        with pytest.raises(openai.BadRequestError, match="64"):
            served.completed("abc", max_tokens=64)
        (running.process if ranks == 0 else running.ranks[2]).send_signal(signal.SIGTERM)
        assert running.end() == ExitCode.DONE, running.text()


@pytest.mark.long
@pytest.mark.parametrize("recover", [False, True], ids=["plain", "recover"])
@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
def test_a_rank_that_dies_ends_the_service_and_clients_are_told_np3(
    recover: bool, idle: bool, base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    with service(3, base, tmp_path / "output.txt", launch=["--recover"] * recover) as running:
        served = Served(running, tokenizer, None)  # type: ignore[arg-type]
        served.completed("abc")
        running.ranks[2].send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.completed, "abc", max_tokens=50) if not idle else None
            if waiting is not None:
                running.wait_for("a running request", lambda: served.health()["running"] == 1)
            running.ranks[2].send_signal(signal.SIGKILL)
            if waiting is not None:
                with pytest.raises(openai.InternalServerError):
                    waiting.result()
        assert running.end() == (ExitCode.FAILED if recover else 128 + signal.SIGKILL), running.text()
        assert "rank 2" in running.text()
