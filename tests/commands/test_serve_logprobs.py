"""``serve``: where tokens lie in the text of an answer, and which of its bytes they are, whole and in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.inference.sampling import Scored
from hetero_mpi.serve.api_requests import ApiRequest, ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.scheduler import Scheduler, TokenEvent
from hetero_mpi.serve.served_models import ServedModel, served_models
from hetero_mpi.serve.service import Service, context_of
from tests.commands.test_generate import model_with_tokenizer, written
from tests.support.training_cases import corpus, tokenizer_directory

CASE = written("likely", "llama", changes=(("max_position_embeddings", 512), ("vocab_size", 400)))
TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
TEXTS = ("ab cab", " red \u00e9t\u00e9 \U0001f600 bird", "漢字 and\n\U0001f389\U0001f389", "a<s>b<|end|>c")


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: what is in no word is bytes, and a text's first space is not shown."""
    words = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcderdint"]
    engine = Tokenizer(models.BPE({w: n for n, w in enumerate(dict.fromkeys(words))}, [], byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|end|>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Service:
    place = tmp_path_factory.mktemp("likely")
    path = model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), CASE)
    tokenizer = load_tokenizer(path) if request.param == "byte-level" else with_byte_fallback()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, special)
    tokenizer.chat_template = TEMPLATE
    save_tokenizer(tokenizer, path)
    (model,) = served_models(path, [])
    return Service([model], context_of(model.opened, None, []), Scheduler([], 4), lambda: False)


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False).input_ids)


def answered(service: Service, asked: ApiRequest, tokens: list[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the answer as a whole, the same in chunks) of a model that writes ``tokens``."""
    (task,) = service.tasks(asked)
    echoed = task.prompt[1:] if task.echo else []
    events = [TokenEvent(0, None, [Scored(token, -1.0) for token in echoed])]
    events += [TokenEvent(0, token, [Scored(token, -0.5, ((token, -0.5), (7, -2.0)))]) for token in tokens]
    found = []
    for streamed in (False, True):
        (choice,), bodies = service.choices(asked, [task]), service.bodies(asked, [task])
        texts, chunks = [], []
        for event in events:
            if choice.finish is None:
                texts.append(choice.add(event, asked.limit == 0))
                if streamed and (texts[-1] or not chunks):
                    chunks.append(bodies.chunk(choice, texts[-1])["choices"][0])
        assert choice.finish is not None
        last = bodies.chunk(choice, None)["choices"][0] if streamed else bodies.response(["".join(texts)], [choice])
        found.append([*chunks, last] if streamed else last["choices"][0])
    return found[0], found[1]


def asked_of(kind: Any, **fields: Any) -> ApiRequest:
    return parse(kind, json.dumps({"seed": 1, **fields}).encode())


def written_tokens(model: ServedModel, seed: int) -> list[int]:
    """Words, parts of characters and special tokens; 30."""
    draw = random.Random(seed)
    found = [token for _ in range(9) for token in ids_of(model, draw.choice(TEXTS))]
    return [token if draw.random() < 0.8 else draw.randrange(len(model.tokenizer)) for token in found][:30]


@pytest.mark.parametrize("stop", [[], ["b"], ["\U0001f600"], ["ird", "字 a"]])
def test_bytes_of_a_chat_join_to_its_content(service: Service, stop: list[str]) -> None:
    model = service.model
    for seed in range(20):
        tokens = [token for token in written_tokens(model, seed) if token not in model.stops]
        fields = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 2, "stop": stop}
        whole, chunks = answered(service, asked_of(ChatRequest, **fields, max_tokens=len(tokens)), tokens)
        content, told = whole["message"]["content"], whole["logprobs"]["content"]
        joined = b"".join(bytes(one["bytes"]) for one in told)
        if "\N{REPLACEMENT CHARACTER}" not in content:
            assert joined == content.encode()
        elif model.tokenizer.unk_token is None:  # the other one writes a sign for each byte
            assert joined.decode(errors="replace") == content
        assert [one for chunk in chunks for one in chunk["logprobs"]["content"]] == told
        text, known = "", b""
        for chunk in chunks:  # tokens come with the text that they show
            text += chunk["delta"].get("content", "")
            known += b"".join(bytes(one["bytes"]) for one in chunk["logprobs"]["content"])
            assert "\N{REPLACEMENT CHARACTER}" in content or text.encode().startswith(known)
        assert text == content


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("most", [0, 30])
@pytest.mark.parametrize("prompt", TEXTS)
def test_offsets_are_places_in_the_text(service: Service, prompt: str, most: int, echo: bool, as_ids: bool) -> None:
    if not (most or echo):
        return
    model = service.model
    tokens = [token for token in written_tokens(model, len(prompt)) if token not in model.stops]
    given = list(model.tokenizer(prompt).input_ids) if as_ids else prompt
    fields = {"prompt": given, "echo": echo, "logprobs": 1, "max_tokens": most}
    whole, chunks = answered(service, asked_of(CompletionRequest, **fields), tokens[: max(1, most)] * 3)
    text, told = whole["text"], whole["logprobs"]
    starts = told["text_offset"]
    assert starts == sorted(starts) and starts[0] == 0
    pieces = [text[first:last] for first, last in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text
    shown = [(token, piece.strip(" ")) for token, piece in zip(told["tokens"], pieces, strict=True)]
    parts = "\N{REPLACEMENT CHARACTER}"
    wrong = [
        one for one in shown if one[0].strip(" ") != one[1] and one[0] not in model.special and parts not in one[0]
    ]
    assert not [one for one in wrong if parts not in one[1]]
    for name in ("tokens", "text_offset"):
        assert [one for chunk in chunks for one in chunk["logprobs"][name]] == told[name]


def test_a_token_at_which_the_answer_stops_shows_nothing(service: Service) -> None:
    model = service.model
    (letter,) = ids_of(model, "ab")[-1:]
    fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "stop_token_ids": [letter]}
    whole, _ = answered(service, asked_of(ChatRequest, **fields), [*ids_of(model, "a"), letter])
    assert whole["logprobs"]["content"][-1]["bytes"] == [] and whole["finish_reason"] == "stop"
    cut = {**fields, "stop_token_ids": None, "stop": ["b"]}
    tokens = ids_of(model, "cab")
    whole, _ = answered(service, asked_of(ChatRequest, **cut, max_tokens=len(tokens)), tokens)
    assert b"".join(bytes(one["bytes"]) for one in whole["logprobs"]["content"]).strip() == b"ca"


def test_parts_of_characters_have_their_own_bytes(service: Service) -> None:
    text = "\u00e9\U0001f600漢"
    fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    tokens = ids_of(service.model, text)
    whole, _ = answered(service, asked_of(ChatRequest, **fields, max_tokens=len(tokens)), tokens)
    told = [bytes(one["bytes"]) for one in whole["logprobs"]["content"]]
    assert b"".join(told).strip() == text.encode() and max(map(len, told)) < 3
