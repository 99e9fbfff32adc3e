"""``OUT theirs``: trains by TRL's and transformers' trainers and by ours, in one process, and writes ``OUT/CASE.json``.

``OUT scripts``: runs scripts as users of those trainers write them, with another import, on any number of ranks.
"""

import io
import json
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from mpi4py import MPI
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip
from transformers.trainer_utils import get_last_checkpoint

from hetero_mpi import DPOTrainer, SFTTrainer, UserError
from hetero_mpi import Trainer as OurTrainer
from tests.support.jobs import Workshop

trl: Any = import_module("trl")
TEMPLATE = "{% for one in messages %}[{{ one.role }}] {{ one.content }}{{ eos_token }}{% endfor %}"
WORDS = ["the", "grass", "grows", "where", "rain", "has", "fallen", "and", "nobody", "walks", "over", "it", "at night"]
RANK = MPI.COMM_WORLD.Get_rank()
QUICK = {"profile.repeats": 1, "profile.largest_message_bytes": 4096, "cluster.threads": 1, "report.write": False}
QUICK |= {"plan.pipelines": 1}


def said(number: int) -> tuple[str, str]:
    return " ".join(WORDS[number % 5 : 4 + number % 5]), " " + " ".join(WORDS[-3 - number % 4 :])


class Cases:
    """The smallest of models, and the rows of every kind."""

    def __init__(self, out: Path) -> None:
        self.out = out
        workshop = Workshop(out)
        self.model = workshop.model(max_position_embeddings=256)
        self.tokenizer = AutoTokenizer.from_pretrained(workshop.tokenizer)
        self.tokenizer.chat_template = TEMPLATE

    def arguments(self, kind: type, case: str, **more: Any) -> Any:
        given: dict[str, Any] = {
            "use_cpu": True, "bf16": False, "learning_rate": 2e-3, "weight_decay": 0.01, "seed": 3, "logging_steps": 1,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 4, "report_to": "none",
            "save_strategy": "no", "warmup_steps": 1, "disable_tqdm": True,
        }  # fmt: skip
        return kind(output_dir=str(self.out / case), **(given | more))

    def started(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def ours(self, rows: Any, args: Any, test: Any = None, start: Any = None, **more: Any) -> dict[str, Any]:
        kind = DPOTrainer if rows is PAIRS else OurTrainer
        given = {"train_dataset": rows, "eval_dataset": test, "processing_class": self.tokenizer}
        trainer = kind(start or self.model, args=args, **given, set=QUICK, **more)
        result = trainer.train()
        if start is not None:
            check_updated(start, result.result)
        if test is not None:
            trainer.save_model(self.out / "saved")
            saved = [folder / "model.safetensors" for folder in (self.out / "saved", result.result)]
            assert trainer.evaluate()["eval_loss"] == result.evaluations[-1].loss
            assert RANK > 0 or saved[0].read_bytes() == saved[1].read_bytes()
        return {"losses": result.losses, "evaluations": [one.loss for one in result.evaluations]}


def check_updated(model: Any, result: Path) -> None:
    """Compare a model that was passed to a trainer with the result."""
    if isinstance(model, PeftModel):
        own, saved = get_peft_model_state_dict(model), load_file(result / "adapter_model.safetensors")
    else:
        own, saved = model.state_dict(), AutoModelForCausalLM.from_pretrained(result).state_dict()
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)


def of(trainer: Any) -> dict[str, Any]:
    """What one of their trainers logs."""
    trainer.train()
    logged = trainer.state.log_history
    return {
        name: [line[key] for line in logged if key in line]
        for name, key in (("losses", "loss"), ("evaluations", "eval_loss"))
    }


def texts(cases: Cases) -> Iterator[dict[str, Any]]:
    rows = Dataset.from_list([{"text": "".join(said(number))} for number in range(8)])
    args: Any = cases.arguments(dict, "texts", max_length=96, eval_strategy="epoch")
    args = trl.SFTConfig(**args, eos_token=cases.tokenizer.eos_token)
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": cases.tokenizer}
    yield of(trl.SFTTrainer(cases.started(), args, **given))
    yield cases.ours(rows, args, rows)


def chats(cases: Cases) -> Iterator[dict[str, Any]]:
    """All of a chat is learnt there unless asked otherwise."""
    asked = [{"role": "user", "content": said(number)[0]} for number in range(10)]
    rows = Dataset.from_list(
        [{"messages": [asked[number], {"role": "assistant", "content": said(number)[1]}]} for number in range(10)]
    )
    args = cases.arguments(
        trl.SFTConfig, "chats", max_length=96, per_device_train_batch_size=10, gradient_accumulation_steps=1,
        eos_token=cases.tokenizer.eos_token, lr_scheduler_type="cosine",
    )  # fmt: skip
    yield of(trl.SFTTrainer(cases.started(), args, train_dataset=rows, processing_class=cases.tokenizer))
    yield cases.ours(rows, args)


def adapted(cases: Cases, name: str, config: LoraConfig) -> PeftModel:
    """A model with the same new adapter each time."""
    start = cases.out / name
    if not start.exists():
        torch.manual_seed(1)
        get_peft_model(cases.started(), config).save_pretrained(start)
    return PeftModel.from_pretrained(cases.started(), start, is_trainable=True)


def completions(cases: Cases) -> Iterator[dict[str, Any]]:
    """By an adapter that is there already; some rows are longer than they may be."""
    rows = Dataset.from_list([{"prompt": said(number)[0], "completion": said(number)[1]} for number in range(8)])
    args = cases.arguments(trl.SFTConfig, "completions", max_length=40, eos_token=cases.tokenizer.eos_token)
    model = partial(
        adapted, cases, "start", LoraConfig(r=4, lora_alpha=12, rank_pattern={"v_proj": 2}, task_type="CAUSAL_LM")
    )
    yield of(trl.SFTTrainer(model(), args, train_dataset=rows, processing_class=cases.tokenizer))
    yield cases.ours(rows, args, start=model())


PAIRS = Dataset.from_list(
    [{"prompt": said(number)[0], "chosen": said(number)[1], "rejected": said(number + 1)[1]} for number in range(8)]
)


def pairs(cases: Cases) -> Iterator[dict[str, Any]]:
    args = cases.arguments(trl.DPOConfig, "pairs", beta=0.3, max_length=96)
    given = {"train_dataset": PAIRS, "processing_class": cases.tokenizer}
    yield of(trl.DPOTrainer(cases.started(), cases.started(), args, **given))
    yield cases.ours(PAIRS, args, ref_model=str(cases.model))


def still(cases: Cases) -> Iterator[dict[str, Any]]:
    """Pairs by an adapter, whose dropout is off there."""
    args = cases.arguments(trl.DPOConfig, "still", beta=0.3, max_length=96)
    model = partial(adapted, cases, "still", LoraConfig(r=4, lora_dropout=0.5, task_type="CAUSAL_LM"))
    yield of(trl.DPOTrainer(model(), args=args, train_dataset=PAIRS, processing_class=cases.tokenizer))
    yield cases.ours(PAIRS, args, start=model())


def plain(cases: Cases) -> Iterator[dict[str, Any]]:
    """transformers' own trainer, whose rows are tokens already."""
    ids = [cases.tokenizer("".join(said(number)) + cases.tokenizer.eos_token)["input_ids"] for number in range(8)]
    rows = Dataset.from_list([{"input_ids": one, "labels": one} for one in ids])
    args = cases.arguments(TrainingArguments, "plain", max_steps=3, optim="adamw_torch")
    padded = DataCollatorForSeq2Seq(cases.tokenizer)
    yield of(Trainer(cases.started(), args, train_dataset=rows, data_collator=padded))
    yield cases.ours(rows, args, start=cases.started(), data_collator=padded)


def chats_by_lora(cases: Cases) -> Any:
    asked = [[{"role": "user", "content": said(n)[0]}, {"role": "assistant", "content": said(n)[1]}] for n in range(12)]
    dataset = Dataset.from_dict({"messages": asked}).train_test_split(test_size=4, seed=0)
    args = cases.arguments(trl.SFTConfig, "lora", eval_strategy="epoch", save_strategy="epoch", num_train_epochs=2)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"train_dataset": dataset["train"], "eval_dataset": dataset["test"], "tokenizer": cases.tokenizer}
    trainer = SFTTrainer(str(cases.model), args=args, peft_config=config, set=QUICK, **given)
    result = trainer.train()
    trainer.save_model(str(cases.out / "lora-saved"))
    trainer.accelerator.wait_for_everyone()
    assert trainer.accelerator.is_main_process == (RANK == 0)
    if trainer.accelerator.is_main_process:
        saved = AutoPeftModelForCausalLM.from_pretrained(cases.out / "lora-saved")
        own, again = trainer.model.state_dict(), saved.state_dict()
        assert trainer.model is trainer.model and all(torch.equal(own[name], again[name]) for name in own)
    trainer.end()
    return [result.training_loss, result.global_step, trainer.evaluate()["eval_loss"]]


def formatted(cases: Cases) -> Any:
    dataset = Dataset.from_dict({"question": [said(n)[0] for n in range(8)], "answer": [said(n)[1] for n in range(8)]})
    args = cases.arguments(trl.SFTConfig, "formatted", max_steps=2, optim="adamw_torch")
    model = cases.started()
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=dataset, processing_class=cases.tokenizer, set=QUICK,
        formatting_func=lambda row: f"### Question: {row['question']}\n ### Answer: {row['answer']}",
    )  # fmt: skip
    with redirect_stdout(io.StringIO()) as printed:
        before = trainer.evaluate(dataset)["eval_loss"]
    assert printed.getvalue().count("\n") == (RANK == 0), "no lines of a training run"
    trainer.train()
    trainer.save_model()
    if RANK == 0:
        AutoModelForCausalLM.from_pretrained(cases.out / "formatted")
    return [
        before,
        *[line["loss"] for line in trainer.state.log_history if "loss" in line],
        trainer.evaluate(dataset)["eval_loss"],
    ]


def preferences(cases: Cases) -> Any:
    args = cases.arguments(trl.DPOConfig, "dpo", beta=0.1, num_train_epochs=2, eval_strategy="steps", eval_steps=1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": cases.tokenizer}
    trainer = DPOTrainer(model=cases.started(), ref_model=None, args=args, peft_config=config, set=QUICK, **given)
    trainer.train()
    assert RANK > 0 or base_of(cases.out / "dpo") == cases.model, "not a private copy"
    changed = cases.started()
    changed.get_parameter("model.norm.weight").data.mul_(2)
    args.output_dir, args.max_steps = str(cases.out / "changed"), 1
    other = DPOTrainer(model=changed, args=args, peft_config=config, set=QUICK, **given)
    other.train()
    assert RANK > 0 or base_of(cases.out / "changed").parent == cases.out / "changed", "beside the adapter"
    return [line[key] for line in trainer.state.log_history for key in line if key.endswith("rewards/margins")]


def base_of(run: Path) -> Path:
    return Path(json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"])


def tokens(cases: Cases) -> Any:
    cases.tokenizer.pad_token = cases.tokenizer.eos_token
    rows = Dataset.from_dict({"text": ["".join(said(n)) for n in range(10)]}).train_test_split(test_size=2, seed=1)
    rows = rows.map(lambda batch: cases.tokenizer(batch["text"]), batched=True, remove_columns=["text"])
    args = cases.arguments(TrainingArguments, "tokens", num_train_epochs=1, eval_strategy="epoch", hub_model_id="a/b")
    collator = DataCollatorForLanguageModeling(tokenizer=cases.tokenizer, mlm=False)
    given = {
        "train_dataset": rows["train"],
        "eval_dataset": {"a": rows["test"], "b": rows["train"]},
        "data_collator": collator,
    }
    trainer = OurTrainer(model=cases.started(), args=args, set=QUICK, **given)
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    try:
        trainer.push_to_hub()
    except UserError as error:
        return [metrics["train_loss"], trainer.evaluate(), error.kind, math.isfinite(metrics["train_runtime"])]


class Follower(TrainerCallback):
    """Notes what it is called for, and ends the run at a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 5


for name in ("train_begin", "epoch_begin", "epoch_end", "log", "evaluate", "save", "train_end"):
    setattr(
        Follower,
        f"on_{name}",
        lambda self, args, state, control, name=name, **_: self.seen.append([name, state.global_step]),
    )


def stopped_and_resumed(cases: Cases) -> Any:
    rows = Dataset.from_dict({"text": ["".join(said(n)) for n in range(16)]})
    more = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "metric_for_best_model": "eval_loss",
    }
    args = cases.arguments(trl.SFTConfig, "stopped", load_best_model_at_end=True, greater_is_better=False, **more)
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": cases.tokenizer, "set": QUICK}
    follower = Follower()
    trainer = SFTTrainer(
        cases.model, args, callbacks=[follower, EarlyStoppingCallback(early_stopping_patience=2)], **given
    )
    first = trainer.train()
    trainer = SFTTrainer(cases.model, args, **given)
    second = trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    assert second.losses[: len(first.losses)] == first.losses and second.result.name == "best"
    assert trainer.state.best_model_checkpoint == f"{args.output_dir}/checkpoint-{trainer.state.best_global_step}"
    best = [trainer.state.best_metric, trainer.evaluate()["eval_loss"]]
    finished = SFTTrainer(cases.model, args, **given)
    assert finished.train(resume_from_checkpoint=True).losses == second.losses
    best.append(finished.evaluate()["epoch"])
    return [follower.seen, first.global_step, second.global_step, best]


SCRIPTS = (chats_by_lora, formatted, preferences, tokens, stopped_and_resumed)

if __name__ == "__main__":
    cases = Cases(Path(sys.argv[1]))
    for case in (texts, chats, completions, pairs, still, plain) if sys.argv[2] == "theirs" else ():
        (cases.out / f"{case.__name__}.json").write_text(json.dumps(list(case(cases))))
    if sys.argv[2] == "scripts":
        (cases.out / f"scripts-{RANK}.json").write_text(json.dumps([script(cases) for script in SCRIPTS]))
