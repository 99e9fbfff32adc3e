"""``hetero_mpi.Trainer``: a data set in memory with the arguments of other trainers, which train the same."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hetero_mpi
from hetero_mpi.cli import main
from hetero_mpi.interop.trainer_events import TrainerEvents, link_checkpoints
from hetero_mpi.interop.trainer_inputs import rows_file
from hetero_mpi.rundir.run_directory import set_run_aside
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.step_iterator import Step
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
    return hetero_mpi.Trainer("model", args, train_dataset=rows, **more)._job(False, {}).tables


def refused(args: Any, *values: str, kind: str = "trainer.argument", rows: Any = ROWS, **more: Any) -> None:
    with refuses(kind, *values):
        hetero_mpi.Trainer("model", args, train_dataset=rows, **more)


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


def test_arguments_for_gpus_are_taken_on_cpus() -> None:
    before, args = torch.backends.fp32_precision, TrainingArguments("out", bf16=True, tf32=True)
    assert (job_of(args).train.dtype, torch.backends.fp32_precision) == ("bf16", before)


def test_text_rows_are_learnt_as_they_are_and_chats_as_trl_learns_them() -> None:
    job = job_of({"dataset_text_field": "body"}, [{"body": "Grass is green"}])
    assert (job.data.documents, job.data.keys, job.data.records) == ("record", {"text": "body"}, None)
    chat = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}]
    assert job_of({}, chat).data.train_on_prompt == "chats"
    assert job_of({"assistant_only_loss": True}, chat).data.train_on_prompt is False


def test_a_prompt_as_text_beside_a_chat_changes_no_template() -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for keys, value in ((["messages"], chat), *product((["completion"], ["chosen", "rejected"]), (chat, "!"))):
        template = "none" if value == "!" else "auto"
        assert job_of({}, [{"prompt": "?", **dict.fromkeys(keys, value)}]).data.template == template


def test_each_argument_that_is_not_taken_is_named_with_the_reason() -> None:
    args = TrainingArguments(
        "out", use_cpu=True, label_smoothing_factor=0.1, lr_scheduler_type="polynomial", gradient_checkpointing=True,
        dataloader_drop_last=True, metric_for_best_model="bleu", load_best_model_at_end=True, eval_strategy="steps",
    )  # fmt: skip
    names = ("dataloader_drop_last", "label_smoothing_factor", "lr_scheduler_type", "metric_for_best_model")
    given = {"compute_metrics": len, "ref_model": "other", "quantization_config": {"load_in_8bit": True}}
    refused(args, *names, *given, eval_dataset=ROWS, **given)
    refused({"learning_rates": 1, "truncation_mode": "keep_end"}, "args: learning_rates", "args: truncation_mode")
    assert job_of({"max_length": 20}, max_seq_length=None, ref_model="model").data.sequence_length == 19
    given = {"gradient_checkpointing": True, "log_level": "info", "run_name": "mine", "logging_steps": 3}
    given["model_init_kwargs"] = {"torch_dtype": "auto", "quantization_config": None}
    about = "\n".join(hetero_mpi.Trainer("model", given, train_dataset=ROWS).notes)
    assert "gradient_checkpointing" in about and "log_level, run_name" in about and "torch_dtype" in about
    trainer = hetero_mpi.DPOTrainer("model", None, {}, train_dataset=ROWS)
    for name, shown in (("control", "evaluate"), ("get_train_dataloader", "train_dataset"), ("optimizer", "optim")):
        with pytest.raises(AttributeError, match=f"DPOTrainer.*'{name}'.*{shown}"):
            getattr(trainer, name)
    kind: Any = type("Mine", (hetero_mpi.Trainer,), {"compute_loss": print, "log": print})
    with refuses("trainer.argument", "Mine: compute_loss"):
        kind("model", {}, train_dataset=ROWS)
    with refuses("trainer.not_trained", "save_model"):
        trainer.save_model()
    assert not [name for name in dir(trainer) if name.startswith("_")], "Python suggests them"
    usual = {"revision": "main", "trust_remote_code": False, "attn_implementation": None, "dtype": None}
    assert hetero_mpi.Trainer("model", {"model_init_kwargs": usual}, train_dataset=ROWS).notes == []
    refused({"model_init_kwargs": {"revision": "v2"}}, "model_init_kwargs", "revision")
    with refuses("trainer.argument", "DPOTrainer", "SFTConfig"):
        hetero_mpi.DPOTrainer("model", args=type("SFTConfig", (), {})(), train_dataset=ROWS)


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
    [([4, 2], "embedding"), ({"model.embed_tokens": [2, 4]}, "embedding"), ({"lm_head": [2, 4]}, "head"),
     ({"embed_tokens": [2, 4], "lm_head": [4, 2]}, "both")],
)  # fmt: skip
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


def test_before_training_there_is_a_model_to_look_at() -> None:
    Path("model").mkdir()
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | {"num_hidden_layers": 2, "num_attention_heads": 2}
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 16, **sizes}))
    rank = {"r": 2, "target_modules": ["q_proj"]}
    trainer = hetero_mpi.Trainer("model", {}, train_dataset=ROWS, peft_config=LoraConfig(**rank))
    assert trainer.model.get_nb_trainable_parameters()[0] == 2 * 2 * (8 + 8) and trainer.model is trainer.model
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"meta"}, "no weights"
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    assert hetero_mpi.Trainer(base, {}, train_dataset=ROWS).model is base
    loaded = hetero_mpi.Trainer(
        base,
        {},
        train_dataset=ROWS,
        peft_config=LoraConfig(**rank),
        tokenizer=(named := SimpleNamespace(save_pretrained=len)),
    )
    assert loaded.model.get_nb_trainable_parameters()[0] == 64 and loaded.tokenizer is loaded.processing_class is named
    assert not hasattr(base, "peft_config") and loaded.train_dataset is ROWS and loaded.eval_dataset is None


def test_what_prevents_an_upload_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = hetero_mpi.Trainer("model", {"push_to_hub": True}, train_dataset=ROWS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no-token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with refuses("trainer.push", "HF_TOKEN"):
        trainer.train()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refuses("trainer.push", "HF_HUB_OFFLINE"):
        trainer.train()


@pytest.mark.slow
def test_other_trainers_have_the_same_losses_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's SFTTrainer on texts, chats and completions (cut, by an adapter), DPOTrainer (with dropout), transformers' Trainer."""
    pytest.importorskip("trl", reason="TRL is in the extra `trl`")
    program = ["-m", "tests.programs.dataset_trainer", str(tmp_path), "theirs"]
    require_success(run_within(600, [sys.executable, *program], os.environ, ROOT))
    found = {case: json.loads((tmp_path / f"{case}.json").read_text()) for case in
             ("texts", "chats", "completions", "pairs", "still", "plain")}  # fmt: skip
    for case, (theirs, ours) in found.items():
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0, atol=2e-6, err_msg=case)
        np.testing.assert_allclose(ours["evaluations"], theirs["evaluations"], rtol=0, atol=2e-6, err_msg=case)
        assert len(ours["losses"]) == (3 if case == "plain" else 4) and ours["losses"][-1] < ours["losses"][0]
    # five sets of rows, a model, two adapters and a tokenizer
    assert main(["cache"]) == 0 and "data of Python programs: 9, " in capsys.readouterr().out


@pytest.mark.slow
def test_scripts_of_other_trainers_run_on_two_ranks_as_in_plain_python(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is in the extra `trl`")
    program = ["-m", "tests.programs.dataset_trainer", str(tmp_path), "scripts"]
    require_success(run_within(600, [sys.executable, *program], os.environ, ROOT))
    alone = json.loads((tmp_path / "scripts-0.json").read_text())
    finish_mpi(2, program, 600)
    first, other = (json.loads((tmp_path / f"scripts-{rank}.json").read_text()) for rank in (0, 1))
    assert first[:3] == other[:3] and other[4][0] == [], "only rank 0 calls callbacks"
    np.testing.assert_allclose(np.hstack(first[:3]), np.hstack(alone[:3]), rtol=0, atol=2e-6)
    lora, formatted, preferences, tokens, (seen, steps, resumed, best) = first
    assert lora[1] == 2 and len(preferences) == 4 and preferences[-1] > 0
    assert abs(formatted[0] - formatted[1]) < 2e-6 and formatted[-1] < formatted[0], "evaluated before and after"
    assert tokens[2:] == ["export.push_failed", True] and {"eval_a_loss", "eval_b_loss"} <= tokens[1].keys()
    assert (steps, resumed, best[0], best[2]) == (5, 8, best[1], 4.0)
    assert [line for line in seen if line[0] != "save"] == [line for line in alone[4][0] if line[0] != "save"]
    assert [step for name, step in seen if name == "evaluate"] == [2, 4] and seen[-2:] == [
        ["save", 5],
        ["train_end", 5],
    ]
    for file in ("train_results.json", "trainer_state.json"):
        assert json.loads((tmp_path / "tokens" / file).read_text())


def file_of(rows: Any, args: Any = None, **more: Any) -> list[Any]:
    """What ``train`` would read."""
    trainer = hetero_mpi.Trainer("model", args, train_dataset=rows, **more)
    data = trainer._ready(trainer._tests).tables.data
    (path,) = data.evaluation or data.records or data.text or ()
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_the_import_prints_no_hint_at_other_packages() -> None:
    code = "import hetero_mpi, peft, bitsandbytes; hetero_mpi.DPOTrainer"
    assert "kernels" not in require_success(run_within(100, [sys.executable, "-c", code], os.environ, ROOT)).stderr


def test_rows_that_come_once_are_all_there_every_time() -> None:
    rows = [{"prompt": "a", "completion": f" {n}"} for n in range(5)]
    assert file_of(iter(rows)) == rows and file_of(ROWS, eval_dataset=iter(rows)) == rows
    assert len(file_of(iter(rows), args={"max_steps": 1, "per_device_train_batch_size": 2})) == 2


def test_a_stored_object_may_have_an_empty_file() -> None:
    assert Path(rows_file([])).read_bytes() == b""


def test_a_column_that_is_none_is_not_there() -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "prompt": None}, {"text": "b", "prompt": None}]
    assert job_of({}, rows).data.text is not None and file_of(rows) == rows


def test_rows_of_tokens_come_without_padding_and_texts_from_a_function() -> None:
    rows = [{"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}]
    assert file_of(rows) == [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    assert job_of({}, rows).data.template == "none"
    assert job_of(TrainingArguments("out", use_cpu=True), rows * 2).data.sequence_length == 2
    refused({}, "row 0", kind="trainer.labels", rows=[rows[0] | {"labels": [0, 6, 7, 0]}])
    masked = [{"input_ids": [5, 6], "completion_mask": [0, 1]}]
    assert file_of(masked, data_collator=lambda batch: {key: np.array([batch[0][key]]) for key in batch[0]}) == [
        {"input_ids": [5, 6], "labels": [-100, 6]}
    ]
    assert file_of(ROWS, formatting_func=lambda row: row["prompt"]) == [{"text": "The grass is"}]
    by_batch = lambda rows: [*rows["prompt"]] if isinstance(rows["prompt"], list) else []  # noqa: E731
    assert file_of(ROWS, formatting_func=by_batch) == [{"text": "The grass is"}]
    refused({}, "data_collator", kind="trainer.data_collator", data_collator=len)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("rows", "shown"),
    [("rows.jsonl", "str"), (Path("rows.jsonl"), "PosixPath"), (5, "int"), (["a"], "str"), ([], ""), ([{"text": None}], "")],
)  # fmt: skip
def test_what_is_no_data_set_is_refused(name: str, rows: Any, shown: str) -> None:
    given = {"rows": rows} if name == "train_dataset" else {"eval_dataset": rows}
    refused({}, f"{name}: ", shown, kind="trainer.dataset", **given)


def test_callbacks_are_removed_by_object_or_class_and_logs_are_added() -> None:
    first, second = TrainerCallback(), EarlyStoppingCallback()
    trainer = hetero_mpi.Trainer("model", {}, train_dataset=ROWS, callbacks=[first, second])
    assert [trainer.pop_callback(EarlyStoppingCallback) for _ in range(2)] == [second, None]
    trainer.remove_callback(first)
    trainer.log({"mine": 1.0})
    assert (trainer.callback_handler.callbacks, trainer.state.log_history[0]["mine"]) == ([], 1.0)


def test_checkpoints_are_found_as_transformers_finds_them() -> None:
    paths = [checkpoint_path(Path("checkpoints"), step) for step in (8, 16)]
    Path("checkpoints").mkdir()
    for path in paths:
        path.touch()
        link_checkpoints(Path())
    found = Path(get_last_checkpoint("."))
    assert found.name == "checkpoint-16" and [*found.iterdir()] == [found / paths[1].name]
    paths[1].unlink()
    Path("checkpoint-4").mkdir()
    link_checkpoints(Path())
    assert {path.name for path in Path().glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    set_run_aside(Path(), lambda event: False)
    assert [path.name for path in Path().glob("checkpoint*")] == ["checkpoint-4"], "of another program"
    assert Path(get_last_checkpoint("set-aside-1"), paths[0].name).exists()


def test_epochs_are_counted_as_the_run_counts_them() -> None:
    events, seen = TrainerEvents(None, 1, False, 3), list[str]()
    kinds = {f"on_epoch_{when}": lambda *_, when=when, **__: seen.append(when) for when in ("begin", "end")}
    kinds["on_save"] = lambda _, args, state, *__, **___: seen.append(f"saved {state.global_step}, {state.epoch:.2f}")
    events.callbacks.append(type("Follower", (TrainerCallback,), kinds)())
    for step in (1, 2, 3):
        for saved in {2: (2,), 3: (1, 3)}.get(step, ()):
            events.on_checkpoint(Path(f"step-{saved:08d}.h5"))
        events.on_step(Step(step, 1.0, 1.0, 1e-3, 8, 8.0, 1.0, 1.0, epoch=step / 1.5), [])
    assert [line["epoch"] for line in events.state.log_history] == [1 / 1.5, 2 / 1.5, 2.0]
    assert seen == ["begin", "end", "saved 2, 1.33", "begin", "end", "saved 1, 0.67", "saved 3, 2.00"]
    assert events.state.global_step == 3


def test_arguments_of_a_wrong_kind_are_refused() -> None:
    for size in ("x", 0, None, 1.5):
        refused({"per_device_train_batch_size": size}, "per_device_train_batch_size", kind="trainer.value")
    refused({}, "train", kind="trainer.dataset", rows={"train": ROWS})
    refused({}, "str", kind="trainer.callback", callbacks=["x"])
    refused({5: 1}, "5")
    with refuses("trainer.model", "dict"):
        hetero_mpi.Trainer({})
    refused(type("GRPOConfig", (TrainingArguments,), {})("out", use_cpu=True), "GRPOConfig")
    refused({}, "int", kind="trainer.processing_class", processing_class=5)
    refused({}, "peft_config", peft_config={"r": 8})
    with refuses("trainer.dataset", "row 1"):
        file_of([*ROWS, "a"])
    assert job_of({"output_dir": None}).output.run_dir == str(Path("trainer_output").absolute())
