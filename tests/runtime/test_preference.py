"""Runs that learn preferences: equal to TRL's trainers, packed or not, on one rank and on three, and resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.checkpoint import checkpoint_path
from hetero_mpi.report.run_files.metrics import read_metrics
from tests.support.jobs import Outcome, Workshop
from tests.support.mpi import ROOT

pytestmark = pytest.mark.slow

LENGTH = 128
STEPS = 3
PAIRS = [
    ("grass", "green", "red as a rose"),
    ("sky", "blue and far", "low"),
    ("two and two", "4", "5, as some say"),
    ("why", "so it is", "no"),
    ("snow", "white", "black"),
    ("name a month", "May", "Monday"),
]
PACKED = 4
"""Sequences that the pairs are packed into, all of which are one step."""
ON_RANKS = pytest.mark.parametrize(
    "ranks", [pytest.param(1, id="np1", marks=pytest.mark.long), pytest.param(3, id="np3")]
)
METHODS = {"dpo": {}, "orpo": {}, "adapter": {"adapter": {"method": "lora", "rank": 4, "alpha": 8.0}}}


class Runs(Workshop):
    """Name -> a job that learns all pairs in every step, and is evaluated on them."""

    def __init__(self, directory: Path, ranks: int) -> None:
        super().__init__(directory)
        self.ranks = ranks
        records = directory / "pairs.jsonl"
        lines = ({"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS)
        records.write_text("\n".join(map(json.dumps, lines)))
        self.model_path = self.model(blocks=2, tied=True, max_position_embeddings=LENGTH)
        self.written = self.values(self.model_path)
        self.written["data"] = {"records": [str(records)], "evaluation": [str(records)], "template": "plain"}
        self.written["data"]["sequence_length"] = LENGTH
        self.written["train"] |= {"steps": STEPS, "preference_beta": 0.3, "weight_decay": 0.1}
        self.written["profile"]["path"] = str(directory / "profile.toml")
        self.written["train"].pop("micro_batch")
        self.start = start_adapter(directory, self.model_path)
        self.entries = {}
        for name in METHODS:
            self.entries[name] = self.entry(name, name, PACKED)
            self.entries[f"{name} apart"] = self.entry(f"{name} apart", name, len(PAIRS), packing=False)
        self.entries["streamed"] = self.entry("streamed", "dpo", PACKED, {"streamed": True, "slice_sequences": 1})
        others = directory / "others.jsonl"
        others.write_text(
            "\n".join(map(json.dumps, [{"prompt": p, "chosen": r, "rejected": c} for p, c, r in PAIRS[:2]]))
        )
        files = {"records": [str(records), str(others)], "weights": [1.0, 3.0], "evaluation": ""}
        self.entries["mixed"] = self.entry("mixed", "dpo", 2, packing=False, held_out=0.0, **files)
        self.entries["short"] = self.entry("short", "dpo", 2, steps=1)
        for name in ("dpo", "orpo"):
            self.entries[f"jobs-{name}"] = self.shipped(name)
        self.entries["longest"] = self.entry("longest", "orpo", len(PAIRS), packing=False, pad="longest")

    def entry(
        self, name: str, method: str, rows: int, stage: dict[str, Any] | None = None, steps: int = STEPS, **data: Any
    ) -> dict[str, Any]:
        plan = self.plan(name, self.ranks, rows, LENGTH, **(stage or {}))
        tables: dict[str, Any] = {key: dict(value) for key, value in METHODS[method].items()}
        if "adapter" in tables:
            tables["adapter"]["path"] = str(self.start)
            tables["profile"] = {"path": str(self.directory / "adapter.profile.toml")}
        train = {"global_batch": rows, "steps": steps, "preference": "orpo" if method == "orpo" else "dpo"}
        tables["profile"] = {**tables.get("profile", {}), "trial": name in METHODS}  # it changes no bit
        job = self.job(name, self.written, data=data, train=train, **tables)
        return {"job": job, "run_dir": self.run(name), "plan": plan}

    def shipped(self, name: str) -> dict[str, Any]:
        """A job of jobs/, in small."""
        small = {
            "model.path": str(self.model_path),
            "tokenizer.path": str(self.tokenizer),
            "data.sequence_length": LENGTH,
            "train.steps": 2,
            "train.global_batch": 2,
            "train.warmup_steps": 0,
            "profile.repeats": 1,
            "report.write": False,
        }
        given = [f"{key}={json.dumps(value)}" for key, value in small.items()]
        return {"job": ROOT / "jobs" / f"{name}.toml", "run_dir": self.run(f"jobs-{name}"), "set": given}

    def run(self, name: str) -> Path:
        return self.directory / name

    def numbers(self, name: str) -> np.ndarray:
        """Losses, gradient norms and the last held-out loss."""
        metrics = read_metrics(self.run(name) / "metrics.jsonl")
        steps = [value for step in metrics.steps for value in (step.loss, step.grad_norm)]
        return np.array([*steps, metrics.evaluations[-1].loss])

    def result(self, name: str) -> dict[str, torch.Tensor]:
        adapter = self.run(name) / "adapter" / "adapter_model.safetensors"
        return load_file(adapter if adapter.exists() else self.run(name) / "model" / "model.safetensors")


def start_adapter(directory: Path, model: Path) -> Path:
    """An adapter that has learnt something: the reference of a run that begins with it."""
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.02)
    adapted.save_pretrained(directory / "start")
    return directory / "start"


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[int, tuple[Runs, dict[str, Outcome]]] = {}

    def run(ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        if ranks not in done:
            runs = Runs(tmp_path_factory.mktemp(f"np{ranks}"), ranks)
            outcomes = runs.run_entries(ranks, runs.entries)
            failed = {name: outcome.texts for name, outcome in outcomes.items() if any(outcome.raised)}
            assert not failed, failed
            again = {
                f"{name} again": {
                    **runs.entries[name],
                    "run_dir": runs.run(f"{name} again"),
                    "resume": checkpoint_path(runs.run(name) / "checkpoints", 1),
                }
                for name in ("dpo", "adapter")
            }
            longer = runs.entry("longer", "dpo", 2) | {"resume": checkpoint_path(runs.run("short") / "checkpoints", 1)}
            done[ranks] = runs, outcomes | runs.run_entries(ranks, {**again, "longer": longer})
        return done[ranks]

    return run


@ON_RANKS
@pytest.mark.parametrize(
    ("name", "other"), [(f"{name}", f"{name} apart") for name in METHODS] + [("streamed", "dpo"), ("longest", "orpo")]
)
def test_pairs_of_one_sequence_learn_what_they_learn_apart(on: Any, ranks: int, name: str, other: str) -> None:
    runs, _ = on(ranks)
    np.testing.assert_allclose(runs.numbers(name), runs.numbers(other), rtol=2e-6)


@ON_RANKS
@pytest.mark.parametrize("name", ["dpo", "adapter"])
def test_resumed_runs_keep_the_reference_of_the_beginning(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    assert "Reference of the preferences: " in outcomes[name].printed
    assert "Reference of the preferences: " not in outcomes[f"{name} again"].printed
    whole, again = runs.result(name), runs.result(f"{name} again")
    assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)


@ON_RANKS
def test_more_steps_than_the_reference_was_computed_for_are_refused(on: Any, ranks: int) -> None:
    _, outcomes = on(ranks)
    assert outcomes["longer"].raised == ("CollectiveUserError",) * ranks
    text = outcomes["longer"].texts[0]
    assert "no margin of the reference model for 2 rows of preferences" in text and "steps, global_batch, seed" in text


@ON_RANKS
def test_of_mixed_data_sets_all_pairs_that_are_drawn_have_a_reference(on: Any, ranks: int) -> None:
    """An epoch of them holds some pairs more than once, and others not at all."""
    runs, _ = on(ranks)
    losses = [step.loss for step in read_metrics(runs.run("mixed") / "metrics.jsonl").steps]
    assert len(losses) == STEPS and np.isfinite(losses).all() and abs(losses[0] - np.log(2)) < 1e-6


@ON_RANKS
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_the_shipped_jobs(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    assert (
        "24 pairs of answers from 1 files" in outcomes[f"jobs-{name}"].printed
        and "(per pair)" in outcomes[f"jobs-{name}"].printed
    )
    assert ("lean more to the chosen answer" in outcomes[f"jobs-{name}"].printed) == (name == "dpo")
    base = AutoModelForCausalLM.from_pretrained(runs.model_path)
    adapted = PeftModel.from_pretrained(base, runs.run(f"jobs-{name}") / "adapter")
    learnt = [value for key, value in adapted.state_dict().items() if "lora_B" in key]
    assert learnt and all(value.abs().max() > 0 for value in learnt)


@ON_RANKS
@pytest.mark.parametrize("name", METHODS)
def test_equals_trl(on: Any, ranks: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is in the extra `trl`")
    runs, _ = on(ranks)
    losses, weights = by_trl(runs, name, tmp_path)
    np.testing.assert_allclose(
        [step.loss for step in read_metrics(runs.run(name) / "metrics.jsonl").steps], losses, rtol=1e-6, atol=1e-6
    )
    own = runs.result(name)
    assert own.keys() <= weights.keys()
    start = load_file(
        runs.start / "adapter_model.safetensors" if name == "adapter" else runs.model_path / "model.safetensors"
    )
    for key, value in own.items():
        moved = (weights[key] - start[key]).abs().max()
        assert moved > 1e-3 or value.numel() < 100
        assert (value - weights[key]).abs().max() < 1e-3 * 3e-3 * STEPS, key  # of what steps can move


def by_trl(runs: Runs, name: str, directory: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss of each step, weights afterwards) of TRL's own trainer in this process."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config, trainer = (ORPOConfig, ORPOTrainer) if name == "orpo" else (DPOConfig, DPOTrainer)
    losses: list[float] = []

    class Noted(trainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            losses.append(float(loss))
            return loss

    asked = [f"## Task\n{prompt}\n\n## Answer\n" for prompt, _, _ in PAIRS]
    rows = {"prompt": asked, "chosen": [pair[1] for pair in PAIRS], "rejected": [pair[2] for pair in PAIRS]}
    model: Any = AutoModelForCausalLM.from_pretrained(runs.model_path, dtype=torch.float32)
    if name == "adapter":
        model = PeftModel.from_pretrained(model, runs.start, is_trainable=True)
    job = runs.written["train"]
    arguments = config(
        output_dir=str(directory),
        per_device_train_batch_size=len(PAIRS),
        max_steps=STEPS,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=job["weight_decay"],
        max_grad_norm=1.0,
        beta=job["preference_beta"],
        max_length=LENGTH,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(runs.tokenizer)
    learner = Noted(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
    learner.train()
    learner.model.save_pretrained(directory / "result", safe_serialization=True)
    file = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
    return losses, load_file(directory / "result" / file)
