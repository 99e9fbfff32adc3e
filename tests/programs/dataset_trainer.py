"""Trains what TRL's and transformers' trainers train, by their own arguments: ``OUT theirs`` both, in one process; ``OUT ours``
``hetero_mpi.Trainer`` alone, on any number of ranks. Writes ``OUT/CASE-RANK.json``: losses and evaluations of who was there.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from mpi4py import MPI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import hetero_mpi
from tests.support.jobs import Workshop

trl: Any = import_module("trl")
TEMPLATE = "{% for one in messages %}[{{ one.role }}] {{ one.content }}{{ eos_token }}{% endfor %}"
WORDS = [
    "the",
    "grass",
    "grows",
    "where",
    "rain",
    "has",
    "fallen",
    "and",
    "nobody",
    "walks",
    "over",
    "it",
    "at",
    "night",
]
CUT = 40
"""Tokens, of which some rows have more."""
RANK = MPI.COMM_WORLD.Get_rank()
QUICK = {
    "profile.repeats": 1,
    "profile.largest_message_bytes": 4096,
    "cluster.threads": 1,
    "report.write": False,
    "plan.pipelines": 1,
}


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
        given: dict[str, Any] = {"use_cpu": True, "bf16": False, "learning_rate": 2e-3, "weight_decay": 0.01, "seed": 3}
        given |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 4}
        given |= {
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "warmup_steps": 1,
            "disable_tqdm": True,
        }
        return kind(output_dir=str(self.out / case), **(given | more))

    def started(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def ours(self, case: str, rows: Any, args: Any, test: Any = None, peft: Any = None, **set: Any) -> dict[str, Any]:
        trainer = hetero_mpi.Trainer(
            self.model,
            rows,
            args,
            eval_dataset=test,
            processing_class=self.tokenizer,
            peft_config=peft,
            set=QUICK | set,
        )
        result = trainer.train()
        if test is not None:
            assert trainer.evaluate() == result.evaluations[-1]
            trainer.save_model(self.out / "saved")
            assert (
                RANK > 0
                or (self.out / "saved" / "model.safetensors").read_bytes()
                == (result.result / "model.safetensors").read_bytes()
            )
        return {"losses": result.losses, "evaluations": [one.loss for one in result.evaluations]}


def of(trainer: Any) -> dict[str, Any]:
    """What one of their trainers logs."""
    trainer.train()
    logged = trainer.state.log_history
    return {
        name: [line[key] for line in logged if key in line]
        for name, key in (("losses", "loss"), ("evaluations", "eval_loss"))
    }


def texts(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    rows = Dataset.from_list([{"text": "".join(said(number)) if RANK == 0 else "not rank 0's"} for number in range(8)])
    args: Any = cases.arguments(dict, "texts", max_length=96, eval_strategy="epoch")
    if theirs:
        args = trl.SFTConfig(**args, eos_token=cases.tokenizer.eos_token)
        given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": cases.tokenizer}
        yield of(trl.SFTTrainer(cases.started(), args, **given))
    yield cases.ours("texts", rows, args, rows)


def cut(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    """Completions that are longer than a row may be."""
    rows = [{"prompt": said(number)[0], "completion": said(number)[1]} for number in range(8)]
    args = cases.arguments(trl.SFTConfig, "cut", max_length=CUT, eos_token=cases.tokenizer.eos_token)
    if theirs:
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": cases.tokenizer}
        yield of(trl.SFTTrainer(cases.started(), args, **given))
    yield cases.ours("cut", rows, args)


def chats(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    """All of a chat is learnt there unless asked otherwise."""
    asked = [{"role": "user", "content": said(number)[0]} for number in range(10)]
    rows = Dataset.from_list(
        [{"messages": [asked[number], {"role": "assistant", "content": said(number)[1]}]} for number in range(10)]
    )
    args = cases.arguments(
        trl.SFTConfig, "chats", max_length=96, per_device_train_batch_size=10, gradient_accumulation_steps=1,
        eos_token=cases.tokenizer.eos_token, lr_scheduler_type="cosine",
    )  # fmt: skip
    if theirs:
        yield of(trl.SFTTrainer(cases.started(), args, train_dataset=rows, processing_class=cases.tokenizer))
    yield cases.ours("chats", rows, args)


def completions(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    """By an adapter, with the same start."""
    rows = [{"prompt": said(number)[0], "completion": said(number)[1]} for number in range(8)]
    args = cases.arguments(trl.SFTConfig, "completions", max_length=96, eos_token=cases.tokenizer.eos_token)
    config = LoraConfig(r=4, lora_alpha=12, rank_pattern={"v_proj": 2}, task_type="CAUSAL_LM")
    start = cases.out / "adapter-start"
    if theirs:
        torch.manual_seed(1)
        get_peft_model(cases.started(), config).save_pretrained(start)
        model = PeftModel.from_pretrained(cases.started(), start, is_trainable=True)
        yield of(trl.SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=cases.tokenizer))
    yield cases.ours("completions", rows, args, peft=config, **{"adapter.path": str(start)})


def pairs(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    rows = [
        {"prompt": said(number)[0], "chosen": said(number)[1], "rejected": said(number + 1)[1]} for number in range(8)
    ]
    args = cases.arguments(trl.DPOConfig, "pairs", beta=0.3, max_length=96)
    if theirs:
        yield of(
            trl.DPOTrainer(
                cases.started(),
                cases.started(),
                args,
                train_dataset=Dataset.from_list(rows),
                processing_class=cases.tokenizer,
            )
        )
    yield cases.ours("pairs", rows, args)


def still(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    """Pairs by an adapter, whose dropout is off there."""
    rows = [
        {"prompt": said(number)[0], "chosen": said(number)[1], "rejected": said(number + 1)[1]} for number in range(8)
    ]
    args = cases.arguments(trl.DPOConfig, "still", beta=0.3, max_length=96)
    config, start = LoraConfig(r=4, lora_dropout=0.5, task_type="CAUSAL_LM"), cases.out / "still-start"
    if theirs:
        torch.manual_seed(1)
        get_peft_model(cases.started(), config).save_pretrained(start)
        model = PeftModel.from_pretrained(cases.started(), start, is_trainable=True)
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": cases.tokenizer}
        yield of(trl.DPOTrainer(model, args=args, **given))
    yield cases.ours("still", rows, args, peft=config, **{"adapter.path": str(start)})


def plain(cases: Cases, theirs: bool) -> Iterator[dict[str, Any]]:
    """transformers' own trainer, whose rows are tokens already."""
    rows = [{"text": "".join(said(number))} for number in range(8)]
    args = cases.arguments(TrainingArguments, "plain", max_steps=3, optim="adamw_torch")
    if theirs:
        ids = [cases.tokenizer(row["text"] + cases.tokenizer.eos_token)["input_ids"] for row in rows]
        tokens = Dataset.from_list([{"input_ids": one, "labels": one} for one in ids])
        padded = DataCollatorForSeq2Seq(cases.tokenizer)
        yield of(Trainer(cases.started(), args, train_dataset=tokens, data_collator=padded))
    yield cases.ours("plain", rows, args, **{"data.sequence_length": 64})


def main(out: Path, theirs: bool) -> None:
    cases = Cases(out)
    for case in (texts, cut, chats, completions, pairs, still, plain) if theirs else (texts,):
        found = list(case(cases, theirs))
        (out / f"{case.__name__}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "theirs")
