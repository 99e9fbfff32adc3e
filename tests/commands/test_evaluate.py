"""``evaluate``: losses and accuracy are those of training and of transformers in one process; tasks give lm-evaluation-harness' own
results on the same model.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from hetero_mpi.data.chat_template import render_prompt
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.inference.evaluate import evaluate
from hetero_mpi.inference.evaluate.evaluate import EvaluateOptions, _check, patterns_by_name
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.rundir.run_directory import EVALUATION_NAME
from hetero_mpi.util.errors import ExitCode
from tests.commands.test_generate import model_with_tokenizer, written
from tests.support.errors import refuses
from tests.support.mpi import run_bounded, run_mpi
from tests.support.plain_training import set_training
from tests.support.training_cases import corpus, tokenizer_directory

CASE = written("evaluated", "llama", changes=(("initializer_range", 0.2), ("max_position_embeddings", 256)))
RECORDS: list[dict[str, Any]] = [
    {"prompt": "ab cab " * (1 + n % 3), "completion": f"cab {'abc' * (n % 4)} de", "weight": 0.5 + n % 2}
    for n in range(20)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    return model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), CASE)


@pytest.fixture(scope="module")
def records(place: Path) -> Path:
    path = place / "held.jsonl"
    for name, some in (("held", RECORDS), ("first", RECORDS[:5]), ("rest", RECORDS[5:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in some))
    return path


@pytest.fixture(scope="module")
def run(place: Path, base: Path, records: Path) -> Path:
    """A run with packed records that has ended, and its evaluation data."""
    (place / "job.toml").write_text(
        f"""
model.path = "{base}"
data.records = ["{records}"]
data.evaluation = ["{records}"]
data.sequence_length = 96
data.cache = false
data.evaluation_sets = {{ first = ["{place_of(records, "first")}"], rest = ["{place_of(records, "rest")}"] }}
train = {{ epochs = 0.5, global_batch = 2, micro_batch = 1, dtype = "fp32", learning_rate = 3e-3, seed = 3 }}
cluster.threads = 1
profile = {{ repeats = 1, largest_message_bytes = 65536 }}
output.run_dir = "{place / "run"}"
"""
    )
    hetero_mpi(2, "train", str(place / "job.toml"))
    return place / "run"


def hetero_mpi(ranks: int, *words: str) -> str:
    done = run_mpi(ranks, ["-m", "hetero_mpi", *words], timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def place_of(records: Path, name: str) -> Path:
    return records.with_name(f"{name}.jsonl")


def in_one_process(model_dir: Path) -> tuple[float, float, int]:
    """(loss, accuracy, targets) of the records, each by itself and with its weight, by transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), load_tokenizer(model_dir)
    set_training(model, False)
    losses, weights, right = list[float](), list[float](), 0
    for record in RECORDS:
        prompt = render_prompt(tokenizer, record["prompt"], "plain")
        answer = [*tokenizer(record["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double(), -1)
        for row, token in zip(rows[len(prompt) - 1 :], answer, strict=False):
            losses.append(-float(row[token]) * record["weight"])
            weights.append(record["weight"])
            right += int(row.argmax()) == token
    return math.fsum(losses) / math.fsum(weights), right / len(losses), len(losses)


@pytest.mark.slow
def test_losses_are_those_of_the_run_and_of_transformers(run: Path, base: Path, records: Path) -> None:
    shown = hetero_mpi(3, "evaluate", str(run))
    ended = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in reversed(ended) if "evaluation_loss" in line)
    last = line["evaluation_loss"]
    own = json.loads((run / EVALUATION_NAME).read_text())["held out"]
    loss, accuracy, tokens = in_one_process(run / "model")
    assert own["loss"] == pytest.approx(last, abs=1e-6) and own["loss"] == pytest.approx(loss, abs=1e-5)
    assert (own["tokens"], own["accuracy"]) == (tokens, pytest.approx(accuracy))
    assert (line["token_accuracy"], line["perplexity"]) == pytest.approx((accuracy, math.exp(last)))
    assert own["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5) and f"{own['loss']:.4f}" in shown
    data = [word for name in ("held", "first", "rest") for word in ("--data", f"{name}={place_of(records, name)}")]
    hetero_mpi(2, "evaluate", str(run), *data, "--limit", "100")
    found = json.loads((run / EVALUATION_NAME).read_text())
    assert list(found) == ["held out", "held", "first", "rest"] and found["held out"] == own
    assert found["held"] == pytest.approx({**own, "sequences": 20})
    assert line["sets"] == pytest.approx({name: found[name]["loss"] for name in ("first", "rest")}, abs=1e-6)
    assert found["first"]["tokens"] + found["rest"]["tokens"] == tokens and found["first"] != found["rest"]
    (read,) = [one for one in read_metrics(run / "metrics.jsonl").evaluations if one.step == line["step"]]
    assert read.sets == line["sets"] and f", first {line['sets']['first']:.4f}, rest " in read.beside()
    hetero_mpi(1, "evaluate", str(base), "--data", str(records), "-o", str(run.parent / "of-base"))
    loss, accuracy, tokens = in_one_process(base)
    own = json.loads((run.parent / "of-base" / EVALUATION_NAME).read_text())["held"]
    assert own["loss"] == pytest.approx(loss, abs=1e-5) and own["accuracy"] == pytest.approx(accuracy)


def test_sets_have_names_of_their_own() -> None:
    assert patterns_by_name(["a=x/*.jsonl", "data/b.jsonl"]) == {"a": "x/*.jsonl", "b": "data/b.jsonl"}
    for words in (["b=x", "c/b.jsonl"], ["=x"], ["a="], [""]):
        with refuses("evaluate.set", words[-1]):
            patterns_by_name(words)


def test_a_place_that_cannot_be_written_is_known_before_the_weights(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _check(EvaluateOptions(tmp_path, output=tmp_path / "new" / "place"))
    for place in ("file", "file/x"):
        with refuses("file.unwritable", tmp_path / "file"):
            _check(EvaluateOptions(tmp_path, output=tmp_path / place))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    (tmp_path / EVALUATION_NAME).mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / EVALUATION_NAME).write_text('{"held out": {')
    for place, kind in ((tmp_path, "file.not_regular"), (tmp_path / "damaged", "file.unwritable")):
        with refuses(kind, EVALUATION_NAME):
            _check(EvaluateOptions(tmp_path, output=place))
    assert (tmp_path / "damaged" / EVALUATION_NAME).read_text() == '{"held out": {'


def test_options_of_the_harness_are_read_before_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    with refuses("evaluate.arguments", "--x 'y"):
        evaluate.Harness("tiny", None, None, 8, "--x 'y")
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    with refuses("evaluate.package_missing", "lm-eval"):
        evaluate.Harness("tiny", None, None, 8, "")


def rows_of(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}*.jsonl")
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: int(row["doc_id"]))


def samples(folder: Path, task: str = "") -> list[tuple[str, list[tuple[float, bool]]]]:
    """(question, [(log-likelihood, is it the greedy one) of each choice]) of every example."""
    return [
        (row["doc"]["question"], [(float(one[0][0]), str(one[0][1]) == "True") for one in row["resps"]])
        for row in rows_of(folder, task)
    ]


CHOICE = """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{ metric: acc }, { metric: acc_norm }]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{ metric: word_perplexity }]
"""


def write_task(folder: Path, name: str, examples: list[dict[str, Any]], rest: str) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in examples))
    head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{ data_files: {{ test: {data} }} }}\ntest_split: test"
    (folder / f"{name}.yaml").write_text(head + rest)


def result_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


@pytest.mark.slow
def test_tasks_give_what_the_harness_gives_on_the_same_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    for name in ("HETERO_MPI_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "of-others")  # the harness has a key of its own
    choices = ["ab cab", "de", " cab abc", "defgh"]
    examples = [{"question": "abc " * (1 + n % 5) + "ab", "choices": choices, "answer": n % 4} for n in range(12)]
    write_task(tmp_path, "tiny", examples, CHOICE)
    further = f"--include_path {tmp_path} --log_samples"
    shown = hetero_mpi(
        2, "evaluate", str(run), "--tasks", "tiny", "--limit", "10", "-o", str(tmp_path), "--lm-eval-args", further
    )
    theirs = tmp_path / "theirs"
    words = ["run", "--model", "hf", "--model_args", f"pretrained={run / 'model'},dtype=float32", "--tasks", "tiny"]
    words += ["--limit", "10", "--output_path", str(theirs), "--device", "cpu", *further.split()]
    done = subprocess.run([sys.executable, "-m", "lm_eval", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours = tmp_path / "lm-eval"
    assert result_of(ours)["tiny"] == pytest.approx(result_of(theirs)["tiny"]) and "|tiny|" in shown.replace(" ", "")
    for (question, own), (same, other) in zip(samples(ours), samples(theirs), strict=True):
        assert question == same and [greedy for _, greedy in own] == [greedy for _, greedy in other]
        assert [value for value, _ in own] == pytest.approx([value for value, _ in other], abs=1e-4)
    assert "tokens in" not in shown, "no line for each request"


@pytest.mark.slow
def test_tasks_whose_data_cannot_be_fetched_end_without_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    words = ["run", "--model", "dummy", "--tasks", "hellaswag", "--limit", "1"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run_bounded([sys.executable, "-m", "hetero_mpi.inference.evaluate.harness_model", *words], offline, 300)
    assert done.returncode == ExitCode.FAILED and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.strip().endswith(" ".join(words)), "what fills the cache"


@pytest.mark.slow
def test_tasks_begin_texts_as_the_tokenizer_does(place: Path, tmp_path: Path) -> None:
    """Once: with answers to a context, to none, and of whole texts."""
    pytest.importorskip("lm_eval")
    case = written("begun", "llama", changes=(("initializer_range", 0.2), ("vocab_size", 400)))
    base = model_with_tokenizer(tmp_path, tokenizer_directory(tmp_path, corpus(place)), case)
    tokenizer = load_tokenizer(base)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, special)
    save_tokenizer(tokenizer, base)
    questions = ["abc ab", "de", ""]
    examples = [{"question": one, "choices": [" cab", " abc"], "answer": 0} for one in questions]
    write_task(tmp_path, "chosen", examples, CHOICE)
    write_task(tmp_path, "rolling", examples[:2], ROLLING)
    further = f"--include_path {tmp_path} --log_samples"
    hetero_mpi(1, "evaluate", str(base), "--tasks", "chosen,rolling", "-o", str(tmp_path), "--lm-eval-args", further)
    model = AutoModelForCausalLM.from_pretrained(base).eval()

    def by_hand(context: str, answer: str) -> float:
        ids, first = tokenizer(context + answer).input_ids, len(tokenizer(context).input_ids)
        assert ids[0] == tokenizer.bos_token_id
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        return sum(float(rows[place - 1, ids[place]]) for place in range(first, len(ids)))

    for question, found in samples(tmp_path, "chosen"):
        expected = [by_hand(question, answer) for answer in (" cab", " abc")]
        assert [value for value, _ in found] == pytest.approx(expected, abs=1e-4), question
    for row in rows_of(tmp_path, "rolling"):
        assert float(row["resps"][0][0]) == pytest.approx(by_hand("", row["doc"]["question"]), abs=1e-4)
