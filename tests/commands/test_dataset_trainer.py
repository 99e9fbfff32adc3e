"""``hetero_mpi.Trainer``: a data set in memory with the arguments of other trainers, which train the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from transformers import TrainingArguments

import hetero_mpi
from hetero_mpi.cli import main
from tests.support.errors import refuses
from tests.support.mpi import ROOT, finish_mpi, require_success
from tests.support.processes import run_within

ROWS = [{"prompt": "The grass is", "completion": " green"}]
SHORT: dict[str, Any] = {"data.sequence_length": 64}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def job_of(args: Any, rows: Any = ROWS, **more: Any) -> Any:
    """The tables of the job that ``train`` would run."""
    return hetero_mpi.Trainer("model", rows, args, **more)._job(Path("rows.jsonl"), None, None).tables


def refused(args: Any, *values: str, kind: str = "trainer.argument", rows: Any = ROWS, **more: Any) -> None:
    with refuses(kind, *values):
        hetero_mpi.Trainer("model", rows, args, **more)


def test_arguments_become_keys_of_a_job() -> None:
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=1e-4, bf16=False,
        lr_scheduler_type="cosine", max_steps=7, save_strategy="epoch", logging_steps=5, seed=11,
    )  # fmt: skip
    job = job_of(args, ROWS * 14, set=SHORT)
    train = job.train
    assert (train.global_batch, train.learning_rate, train.steps, train.epochs, train.seed) == (6, 1e-4, 7, None, 11)
    assert (train.schedule, train.dtype, train.last_batch, train.weight_decay) == ("cosine", "fp32", "smaller", 0.0)
    assert job.checkpoint.every == 3, "an epoch of 14 rows in batches of 6"
    assert (job.data.template, job.data.packing, job.data.sequence_length) == ("none", False, 64)
    assert job.output.run_dir == str(Path("out").absolute())


def test_text_rows_are_learnt_as_they_are_and_chats_as_trl_learns_them() -> None:
    job = job_of({"dataset_text_field": "body"}, [{"body": "Grass is green"}])
    assert (job.data.documents, job.data.keys, job.data.records) == ("record", {"text": "body"}, None)
    chat = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}]
    assert job_of({}, chat).data.train_on_prompt == "chats"
    assert job_of({"assistant_only_loss": True}, chat).data.train_on_prompt is False


def test_each_argument_that_is_not_taken_is_named_with_the_reason() -> None:
    args = TrainingArguments(
        "out", use_cpu=True, label_smoothing_factor=0.1, push_to_hub=True, lr_scheduler_type="polynomial",
        gradient_checkpointing=True, load_best_model_at_end=False, dataloader_drop_last=True,
    )  # fmt: skip
    refused(
        args,
        "dataloader_drop_last",
        "label_smoothing_factor",
        "lr_scheduler_type",
        "push_to_hub",
        "export RUN OUT --push",
    )
    refused({"learning_rates": 1}, "args: learning_rates")
    trainer = hetero_mpi.Trainer(
        "model", ROWS, {"gradient_checkpointing": True, "logging_steps": 3, "run_name": "mine"}
    )
    about = "\n".join(trainer.notes)
    assert "gradient_checkpointing" in about and "logging_steps, run_name" in about


def test_an_adapter_s_arguments() -> None:
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["v_proj", "q_proj"], layers_to_transform=1, alpha_pattern={"q_proj": 3}
    )
    adapter = job_of({}, peft_config=config).adapter
    assert (adapter.method, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 4, 6.0, 0.0)
    assert (adapter.targets, adapter.layers, adapter.alpha_pattern) == (["q_proj", "v_proj"], [1], {"q_proj": 3.0})
    odd = LoraConfig(target_modules="all-linear", bias="all", init_lora_weights="gaussian")
    refused({}, "peft_config.init_lora_weights", "peft_config.bias", peft_config=odd)
    refused({}, "target_modules", peft_config=LoraConfig(target_modules=".*q_proj"))
    assert job_of({}, peft_config=LoraConfig(r=2)).adapter.targets == "family"


def test_preferences_are_learnt_without_dropout() -> None:
    rows, config = [{"prompt": "a", "chosen": "b", "rejected": "c"}], LoraConfig(lora_dropout=0.1)
    job = job_of({"beta": 0.1, "max_length": 12}, rows, peft_config=config)
    assert (job.train.dropout, job.adapter.dropout, job.data.sequence_length) == (False, 0.0, 23)
    job = job_of({"beta": 0.1, "disable_dropout": False}, rows, peft_config=config)
    assert (job.train.dropout, job.adapter.dropout) == (True, 0.1)
    job = job_of({"max_length": 12}, peft_config=config)
    assert (job.train.dropout, job.adapter.dropout, job.data.sequence_length) == (True, 0.1, 11)


@pytest.mark.parametrize(
    ("rows", "tokens_in"),
    [
        ([4, 2], "embedding"),
        ({"model.embed_tokens": [2, 4]}, "embedding"),
        ({"lm_head": [2, 4]}, "head"),
        ({"embed_tokens": [2, 4], "lm_head": [4, 2]}, "both"),
    ],
)
def test_what_an_adapter_begins_with_and_what_is_trained_beside_it(rows: Any, tokens_in: str) -> None:
    further: dict[str, Any] = {"modules_to_save": ["norm"], "trainable_token_indices": rows}
    config = LoraConfig(target_modules="all-linear", init_lora_weights="pissa_niter_4", **further)
    adapter = job_of({}, peft_config=config).adapter
    assert (adapter.start, adapter.modules_to_save) == ("pissa_niter_4", ["norm"])
    assert (sorted(adapter.tokens or []), adapter.tokens_in) == ([2, 4], tokens_in)


def test_what_is_not_trained_so_beside_an_adapter_is_refused() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    for shown, further in (
        ("embed_tokens", {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}}),
        ("embed_tokens", {"trainable_token_indices": {"wpe": [1]}}),
        ("ensure_weight_tying", {"modules_to_save": ["lm_head"]}),
    ):
        refused({}, shown, peft_config=LoraConfig(target_modules="all-linear", **further))
    config = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], ensure_weight_tying=True)
    assert job_of({}, peft_config=config).adapter.modules_to_save == ["lm_head"]


def test_models_and_rows_that_are_not_taken() -> None:
    for rows in ([], [{"input_ids": [1]}]):
        refused({}, "dataset: ", kind="trainer.dataset", rows=rows)
    with refuses("trainer.model", "LoraConfig"):
        hetero_mpi.Trainer(LoraConfig(), ROWS)  # type: ignore[arg-type]
    refused(type("GRPOConfig", (), {})(), "GRPOConfig")


@pytest.mark.slow
def test_other_trainers_have_the_same_losses_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's SFTTrainer on texts, chats and completions (cut, by an adapter), DPOTrainer (with dropout), transformers' Trainer."""
    pytest.importorskip("trl", reason="TRL is in the extra `trl`")
    pytest.importorskip("datasets")
    program = ["-m", "tests.programs.dataset_trainer", str(tmp_path)]
    require_success(run_within(600, [sys.executable, *program, "theirs"], os.environ, ROOT))
    found = {case: json.loads((tmp_path / f"{case}-0.json").read_text()) for case in
             ("texts", "cut", "chats", "completions", "pairs", "still", "plain")}  # fmt: skip
    for case, (theirs, ours) in found.items():
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0, atol=2e-6, err_msg=case)
        np.testing.assert_allclose(ours["evaluations"], theirs["evaluations"], rtol=0, atol=2e-6, err_msg=case)
        assert len(ours["losses"]) == (3 if case == "plain" else 4) and ours["losses"][-1] < ours["losses"][0]
    alone = found["texts"][1]
    finish_mpi(2, [*program, "ours"], 300)
    for rank in (0, 1):
        (two,) = json.loads((tmp_path / f"texts-{rank}.json").read_text())
        np.testing.assert_allclose(two["losses"], alone["losses"], rtol=0, atol=2e-6)
    # four kinds of rows, and the tokenizer
    assert main(["cache"]) == 0 and "data of Python programs: 5, " in capsys.readouterr().out


def file_of(rows: Any, **more: Any) -> list[Any]:
    """What ``train`` would read."""
    data = hetero_mpi.Trainer("model", rows, {}, **more)._ready().tables.data
    (path,) = data.evaluation or data.records or data.text or ()
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rows_that_come_once_are_all_there_every_time() -> None:
    rows = [{"prompt": "a", "completion": f" {n}"} for n in range(5)]
    assert file_of(iter(rows)) == rows and file_of(ROWS, eval_dataset=iter(rows)) == rows
    trainer = hetero_mpi.Trainer("model", iter(rows), {})
    assert trainer._ready().tables.data.records == trainer._ready().tables.data.records


def test_a_column_that_is_none_is_not_there() -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "prompt": None}, {"text": "b", "prompt": None}]
    assert job_of({}, rows).data.text is not None and file_of(rows) == rows


@pytest.mark.parametrize("name", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ("rows.jsonl", "str"),
        (Path("rows.jsonl"), "PosixPath"),
        ({"train": ROWS}, "dict"),
        (5, "int"),
        (["a"], "str"),
        ([], ""),
        ([{"text": None}], ""),
    ],
)
def test_what_is_no_data_set_is_refused(name: str, rows: Any, shown: str) -> None:
    given = {"rows": rows} if name == "dataset" else {"eval_dataset": rows}
    refused({}, f"{name}: ", shown, kind="trainer.dataset", **given)


def test_arguments_of_a_wrong_kind_are_refused() -> None:
    for size in ("x", 0, None, 1.5):
        args = {"per_device_train_batch_size": size, "save_strategy": "epoch"}
        refused(args, "per_device_train_batch_size", kind="trainer.value")
    refused({5: 1}, "5")
    refused({}, "int", kind="trainer.processing_class", processing_class=5)
    refused({}, "peft_config", peft_config={"r": 8})
    with refuses("trainer.dataset", "row 1"):
        file_of([*ROWS, "a"])
    assert job_of({"output_dir": None}).output.run_dir == str(Path("trainer_output").absolute())
