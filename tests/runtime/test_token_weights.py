"""Weights of targets: the loss is their weighted mean over the global batch, under every plan, packed or not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_mpi.data.batch import IGNORED, Batch
from hetero_mpi.data.chat_template import choose_template
from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.record_sequences import RecordSequences, build_record_sequences
from hetero_mpi.data.records import read_records
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import evaluation, losses
from tests.support.errors import refuses
from tests.support.jobs import GLOBAL_BATCH, Workshop
from tests.support.mpi import on_ranks
from tests.support.plans import pipeline, write_plan
from tests.support.training_cases import tokenizer_directory

LENGTH, STEPS = 64, 3


TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def with_template(tokenizer: Path) -> Path:
    loaded = load_tokenizer(tokenizer)
    loaded.chat_template = TEMPLATE
    save_tokenizer(loaded, tokenizer)
    return tokenizer


def conversation(number: int, **further: Any) -> dict[str, Any]:
    """Two answers, of which the first one counts a quarter."""
    turns = [
        ("user", "abc def"),
        ("assistant", f"abcd {number}"),
        ("user", "gh"),
        ("assistant", "ef ab" * (number % 3 + 1)),
    ]
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    messages[1]["weight"] = 0.25
    return {"messages": messages, **further}


def records_file(path: Path, count: int = 40) -> Path:
    kinds = ({}, {"weight": 2}, {"weight": 0.5})
    lines = [conversation(number, **kinds[number % 3]) for number in range(count)]
    lines.append(conversation(0, weight=0))
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def dataset_of(path: Path, tokenizer: Path, packing: bool, prompts: bool = False, held_out: float = 0.1) -> Dataset:
    loaded, found = load_tokenizer(tokenizer), read_records([str(path)])
    template = choose_template(loaded, "chat", found.records)
    sequences = RecordSequences(loaded, template, SequenceSettings(LENGTH, packing, held_out, 7), prompts)
    return build_record_sequences([("data.records", found.records)], sequences)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "corpus.txt").write_text("abc def gh ab cd\n" * 9)
    return with_template(tokenizer_directory(place, place / "corpus.txt"))


def test_each_token_has_the_weight_of_its_message_and_its_record(tokenizer: Path, tmp_path: Path) -> None:
    path, loaded = tmp_path / "r.jsonl", load_tokenizer(tokenizer)
    path.write_text("\n".join(map(json.dumps, [conversation(1, weight=2), conversation(2)])))
    for prompts in (False, True):
        rows = dataset_of(path, tokenizer, False, prompts, 0.0)
        assert rows.weights is not None
        for row, factor in ((0, 2.0), (1, 1.0)):
            counted = rows.targets[row] != IGNORED
            weights, words = rows.weights[row][counted], rows.targets[row][counted]
            runs = [list(run) for _, run in itertools.groupby(zip(weights, words, strict=True), lambda pair: pair[0])]
            # Of all that the template prints, the weight of an answer is that of its text and its end alone. No record's first
            # token is a target, nor what is printed behind the last answer.
            asked, between = ("u>abc def<a>", "\n<u>gh<a>") if prompts else ("", "")
            last = f"{between}{'ef ab' * (2 if row == 0 else 3)}<|end|>"
            expected = [(factor, asked), (0.25 * factor, f"abcd {row + 1}<|end|>"), (factor, last)]
            assert [(run[0][0], loaded.decode([word for _, word in run])) for run in runs] == expected[not prompts :]
        assert "loss weights range from 0.25 to 2" in rows.notes[-1]
    packed = dataset_of(path, tokenizer, True, False, 0.0)
    assert packed.weights is not None and len(packed.tokens) <= 2
    assert packed.weights[packed.targets != IGNORED].sum() == pytest.approx(
        rows_sum(dataset_of(path, tokenizer, False, False, 0.0))
    )


def rows_sum(rows: Dataset) -> float:
    assert rows.weights is not None
    return float(rows.weights[rows.targets != IGNORED].sum())


def test_records_without_weights_have_none_and_odd_ones_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "weight": 1}) + "\n")
    assert dataset_of(path, tokenizer, False, False, 0.0).weights is None
    for weight in ("2", -1, float("inf"), [1], 1001):
        path.write_text(json.dumps({"prompt": "a", "completion": "b", "weight": weight}) + "\n")
        with refuses("record.weight"):
            read_records([str(path)])
    pair = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "weight": 0.5}], "rejected": "c"}
    path.write_text(json.dumps(pair) + "\n")
    with refuses("record.weight_in_preference"):
        read_records([str(path)], preference="pairs")
    whole: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for values, compared in ((whole, "pairs"), ({"prompt": "a", "completion": "b", "label": True}, "labels")):
        path.write_text(json.dumps({**values, "weight": 2}) + "\n")
        with refuses("record.weight_in_preference"):
            read_records([str(path)], preference=compared)  # type: ignore[arg-type]
        lines = [json.dumps({**values, "weight": weight}) for weight in (0, 1)]
        path.write_text("\n".join(lines) + "\n")
        found = read_records([str(path)], preference=compared)  # type: ignore[arg-type]
        assert len(found.untrained) == 1 and len(found.records) == (2 if compared == "pairs" else 1)
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "weight": 1e-300}) + "\n")
    with refuses("record.weight"):
        read_records([str(path)])
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "weight": 0}) + "\n")
    with refuses("records.nothing_to_learn"):
        read_records([str(path)])


def plain_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(batch.tokens).long()).logits.float()
    words = torch.from_numpy(batch.targets).long()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none")
    assert batch.weighed is not None
    weights = torch.from_numpy(batch.weighed.weights).flatten() * (words.flatten() != IGNORED)
    return (losses * weights).sum() / weights.sum()


PLANS = {
    "one": [pipeline([0, 1, 2], [0, 1, 3, 4], 2)],
    "two": [pipeline([0, 1], [0, 2, 4], 1, 3), pipeline([2], [0, 4], 1, 1)],
    "group": [pipeline([{0: 1, 1: 1}], [0, 4], 2)],
}
"""Of three ranks."""


@pytest.mark.slow
@on_ranks(1, 3)
def test_the_loss_is_the_weighted_mean_under_every_plan(ranks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    place = Workshop(tmp_path)
    with_template(place.tokenizer)
    base, records = place.model("base", blocks=2), records_file(tmp_path / "r.jsonl")
    names = ["one"] if ranks == 1 else ["one", "two", "group"]
    entries: dict[str, dict[str, Any]] = {}
    for packing in (False, True):
        values = place.values(base)
        keys = {
            "sequence_length": LENGTH,
            "evaluation_fraction": 0.1,
            "template": "chat",
            "packing": packing,
            "isolate": False,
        }
        values["data"] = {"records": [str(records)], **keys}
        values["train"] |= {
            "steps": STEPS,
            "dtype": "fp32",
            "micro_batch": "auto",
            "clip_norm": 1.0,
            "weight_decay": 0.0,
        }
        job = place.job(f"packed-{packing}", values)
        for name in names:
            made = PLANS[name] if ranks > 1 else [pipeline([0], [0, 4], 2)]
            plan = write_plan(tmp_path / f"{name}.plan.toml", *made, length=LENGTH)
            entries[f"{name}-{packing}"] = {"job": job, "plan": plan, "run_dir": tmp_path / f"{name}-{packing}"}
        resume = checkpoint_path(tmp_path / f"{names[-1]}-{packing}" / "checkpoints", 1)
        again = {"run_dir": tmp_path / f"again-{packing}", "resume": resume}
        entries[f"again-{packing}"] = {**entries[f"one-{packing}"], **again}
    place.finish_entries(ranks, entries)
    for packing in (False, True):
        data = dataset_of(records, place.tokenizer, packing)
        model = AutoModelForCausalLM.from_pretrained(base)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.95), 1e-8, weight_decay=0.0)
        expected = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = plain_loss(model, data.batch(step, GLOBAL_BATCH))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            expected.append(loss.item())
        with torch.no_grad():
            held_out = plain_loss(model, next(data.held_out_batches(64))).item()
        for name in names:
            run = tmp_path / f"{name}-{packing}"
            assert losses(run) == pytest.approx(expected, rel=1e-6 if name != "group" else 3e-6), name
            assert evaluation(run) == pytest.approx(held_out, rel=1e-5)
        assert losses(tmp_path / f"again-{packing}") == pytest.approx(expected[1:], rel=3e-6)
