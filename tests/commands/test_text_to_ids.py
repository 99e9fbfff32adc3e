"""Every place that turns text into token ids, with tokenizers that begin texts with one token, with two, or with none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.chat_template import choose_template, render_prompt
from hetero_mpi.data.dataset import SequenceSettings
from hetero_mpi.data.record_sequences import RecordSequences
from hetero_mpi.data.records import read_records
from hetero_mpi.data.text_sequences import Corpus, build_sequences
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from hetero_mpi.inference.evaluate.evaluate import set_of_files
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.serve.api_requests import ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.scheduler import Scheduler
from hetero_mpi.serve.served_models import ServedModel
from hetero_mpi.serve.service import Service, context_of
from tests.commands.test_generate import model_with_tokenizer, written
from tests.support.training_cases import corpus, tokenizer_directory

CASE = written("text-to-ids", "llama", changes=(("vocab_size", 400),))
TEXT, ANSWER = "ab cab abc", " cab de"
BEGINNINGS = {"none": (), "one": ("<s>",), "two": ("[gMASK]", "<sop>"), "one-and-an-end": ("<s>",)}
CHAT = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Place:
    """A model's directory, and one of files."""

    opened: Opened
    files: Path

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.opened.tokenizer

    def write(self, name: str, content: Any) -> str:
        path = self.files / name
        path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
        return str(path)


@pytest.fixture(scope="module", params=BEGINNINGS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp(request.param)
    path = model_with_tokenizer(folder, tokenizer_directory(folder, corpus(folder)), CASE)
    tokenizer, begin = load_tokenizer(path), BEGINNINGS[request.param]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "[gMASK]", "<sop>"]})
    tokenizer.bos_token = "<s>"
    around = [*begin, "$A", *([tokenizer.eos_token] if request.param.endswith("end") else [])]
    special = [(text, tokenizer.convert_tokens_to_ids(text)) for text in around if text != "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(" ".join(around), None, special)
    save_tokenizer(tokenizer, path)
    opened = open_source(path)
    assert opened.tokenizer("a").input_ids[: len(begin)] == opened.tokenizer.convert_tokens_to_ids(list(begin))
    return Place(opened, folder)


def of_text(place: Place, content: Any = TEXT, **options: Any) -> list[int]:
    documents = Corpus([place.write("a.txt", content)], **options)
    return learnt(build_sequences(documents, place.tokenizer, SequenceSettings(40, False, 0.0, 0)).tokens[0], place)


def of_records(place: Place, record: dict[str, Any], template: Any, preference: Any = None) -> list[int]:
    records = read_records([place.write("a.jsonl", record)], preference=preference).records
    settings = SequenceSettings(40, False, 0.0, 0)
    chosen = choose_template(place.tokenizer, template, records)
    rows = RecordSequences(place.tokenizer, chosen, settings, preference=preference).rows(records, "data.records")
    return learnt(rows.tokens[0], place)


def learnt(tokens: Any, place: Place) -> list[int]:
    """Up to the first end token."""
    ids = [int(token) for token in tokens]
    return ids[: ids.index(place.tokenizer.eos_token_id)]


def served(place: Place, kind: Any, **fields: Any) -> list[int]:
    model = ServedModel("m", place.opened)
    service = Service([model], context_of(place.opened, None, []), Scheduler([], 4), lambda: False)
    return service.tasks(parse(kind, json.dumps(fields).encode()))[0].prompt


def evaluated(place: Place, name: str, content: Any) -> list[int]:
    text, *_ = set_of_files(place.opened, None, place.write(name, content), 9)
    return [*text.task.prompt, *text.task.given][:-1]  # without the end token


RAW: dict[str, Callable[[Place], list[int]]] = {
    "text": of_text,
    "lines": lambda place: of_text(place, documents="line"),
    "texts in records": lambda place: of_text(place, {"text": TEXT}, documents="record"),
    "evaluate --data": lambda place: evaluated(place, "b.txt", f"{TEXT} " * 20)[: len(of_text(place))],
    "generate": lambda place: place.opened.prompt_tokens(TEXT, raw=True),
    "sample": lambda place: render_prompt(place.tokenizer, TEXT, None),
    "/v1/completions": lambda place: served(place, CompletionRequest, prompt=TEXT),
    "echo": lambda place: served(place, CompletionRequest, prompt=TEXT, echo=True, logprobs=1, max_tokens=0),
    "begun already": lambda place: served(place, CompletionRequest, prompt="".join(begin_of(place)) + TEXT),
}
WITH_ANSWER: dict[str, Callable[[Place], list[int]]] = {
    "completion": lambda place: of_records(place, {"prompt": TEXT, "completion": ANSWER}, "none"),
    "preference": lambda place: of_records(place, {"prompt": TEXT, "chosen": ANSWER, "rejected": "a"}, "none", "pairs"),
    "label": lambda place: of_records(place, {"prompt": TEXT, "completion": ANSWER, "label": True}, "none"),
}


def begin_of(place: Place) -> list[str]:
    return list(BEGINNINGS[place.files.name.removesuffix("0")])


@pytest.mark.parametrize("name", RAW)
def test_texts_begin_as_the_tokenizer_begins_them(place: Place, name: str) -> None:
    tokens = place.tokenizer.convert_ids_to_tokens(RAW[name](place))
    assert tokens == [*begin_of(place), *place.tokenizer.tokenize(TEXT)]


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_prompts_with_answers_begin_so_too(place: Place, name: str) -> None:
    tokens = place.tokenizer.convert_ids_to_tokens(WITH_ANSWER[name](place))
    assert tokens == [*begin_of(place), *place.tokenizer.tokenize(TEXT + ANSWER)]


def test_the_plain_form_begins_so_too(place: Place) -> None:
    record = {"prompt": TEXT, "completion": ANSWER}
    asked = place.tokenizer.convert_ids_to_tokens(render_prompt(place.tokenizer, TEXT, "plain"))
    assert asked == [*begin_of(place), *place.tokenizer.tokenize(f"## Task\n{TEXT}\n\n## Answer\n")]
    for ids in (of_records(place, record, "plain"), evaluated(place, "b.jsonl", record)):
        assert place.tokenizer.convert_ids_to_tokens(ids)[: len(asked)] == asked


def test_a_chat_template_alone_decides(place: Place) -> None:
    tokenizer, talk = place.tokenizer, [{"role": "user", "content": TEXT}, {"role": "assistant", "content": ANSWER}]
    for begin in ("", "<s>"):
        tokenizer.chat_template = begin + CHAT
        text = f"{begin}<u>{TEXT}"
        found = [
            render_prompt(tokenizer, TEXT, "chat"),
            served(
                Place(Opened(**{**vars(place.opened), "template": "chat"}), place.files), ChatRequest, messages=talk[:1]
            ),
            of_records(place, {"messages": talk}, "chat"),
        ]
        for ids in found:
            assert tokenizer.decode(ids).startswith(text) and tokenizer.decode(ids).count("<s>") == bool(begin)
    tokenizer.chat_template = None


@pytest.mark.parametrize("template", [None, CHAT, "<s>" + CHAT])
def test_the_harness_asks_as_serve_answers(place: Place, template: str | None, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from hetero_mpi.inference.evaluate.harness_model import HarnessModel

    tokenizer = place.tokenizer
    tokenizer.chat_template = template
    save_tokenizer(tokenizer, tmp_path)
    tokenizer.chat_template = None
    model = HarnessModel(
        base_url="http://127.0.0.1:9/v1/completions",
        model="m",
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
    )
    text, begin = TEXT, begin_of(place)
    if template is not None:
        text = str(model.apply_chat_template([{"role": "user", "content": TEXT}]))
        begin = []
    context, answer = model._encode_pair(text, ANSWER)
    assert tokenizer.convert_ids_to_tokens(context) == [*begin, *tokenizer.tokenize(text)]
    assert tokenizer.convert_ids_to_tokens(answer) == tokenizer.tokenize(ANSWER)
    (batch,) = model.tok_encode((text,), add_special_tokens=model.add_bos_token)
    assert batch == context


def test_a_tokenizer_that_a_job_trains_begins_texts_with_nothing() -> None:
    tokenizer = train_bpe([TEXT], 300)
    assert tokenizer(TEXT).input_ids == tokenizer(TEXT, add_special_tokens=False).input_ids
