"""Runs that learn preferences: equal to TRL's trainers, packed or not, on one rank and on three, and resumed to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.rundir.metrics import Rewards, read_metrics
from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import losses
from tests.support.family_configs import tiny_keys
from tests.support.jobs import Outcome, Workshop, once_per_ranks, write_profile
from tests.support.mpi import ROOT
from tests.support.plans import pipeline, write_plan

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
EPSILON = 1e-4
"""AdamW's; with a smaller one, gradients that are rounding alone would move weights as much as others do."""
PACKED = 4
"""Sequences that the pairs are packed into, all of which are one step."""
ON_RANKS = pytest.mark.parametrize(
    "ranks", [pytest.param(1, id="np1", marks=pytest.mark.long), pytest.param(3, id="np3")]
)
METHODS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "conservative": {"train": {"preference_smoothing": 0.1}},
    "hinge": {"train": {"preference": "hinge"}},
    "robust": {"train": {"preference": "robust", "preference_smoothing": 0.1}},
    "ipo": {"train": {"preference": "ipo"}},
    "simpo": {"train": {"preference": "simpo", "preference_margin": 0.4, "preference_smoothing": 0.1}},
    "orpo": {"train": {"preference": "orpo"}},
    "kto": {"train": {"preference": "kto", "desirable_weight": 1.2, "undesirable_weight": 0.7}},
    "adapter": {"adapter": {"method": "lora", "rank": 4, "alpha": 8.0}},
}
"""Name -> tables of its job, beside those of DPO."""
LABELLED = [
    (prompt, chosen if number % 3 else rejected, number % 3 > 0)
    for number, (prompt, chosen, rejected) in enumerate(PAIRS)
]
KTO_PACKED = 2
"""Sequences that these are packed into."""
ROUTERS = {"dpo": "dpo routers", "simpo": "simpo routers"}
"""Method -> its run with a mixture of experts whose routers have a loss."""
REWARDS = {
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "kl": "kl",
}
"""Here -> in TRL's log."""


class Runs(Workshop):
    """Name -> a job that learns all pairs in every step, and is evaluated on them."""

    def __init__(self, directory: Path, ranks: int) -> None:
        super().__init__(directory)
        self.ranks = ranks
        records = directory / "pairs.jsonl"
        lines = ({"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS)
        records.write_text("\n".join(map(json.dumps, lines)))
        self.labels = directory / "labels.jsonl"
        singles = ({"prompt": prompt, "completion": text, "label": label} for prompt, text, label in LABELLED)
        self.labels.write_text("\n".join(map(json.dumps, singles)))
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        self.model_path = self.model(blocks=2, tied=True, max_position_embeddings=LENGTH, **heads)
        self.experts = mixture(directory, self.model_path)
        self.written = self.values(self.model_path)
        self.written["data"] = {"records": [str(records)], "evaluation": [str(records)], "template": "plain"}
        self.written["data"]["sequence_length"] = LENGTH
        self.written["train"] |= {"steps": STEPS, "preference_beta": 0.3, "weight_decay": 0.1, "epsilon": EPSILON}
        self.written["train"].pop("micro_batch")
        self.start = start_adapter(directory, self.model_path)
        others = directory / "others.jsonl"
        swapped = [{"prompt": p, "chosen": r, "rejected": c} for p, c, r in PAIRS[:2]]
        others.write_text("\n".join(map(json.dumps, swapped)))
        files = {"records": [str(records), str(others)], "weights": [1.0, 3.0], "evaluation": ""}
        apart: dict[str, Any] = {"rows": len(PAIRS), "packing": False}
        self.entries = {}
        for name in METHODS:
            self.entries[name] = self.made(name, name, KTO_PACKED if name == "kto" else PACKED)
            self.entries[f"{name} apart"] = self.made(f"{name} apart", name, **apart)
        self.entries["streamed"] = self.made("streamed", "dpo", PACKED, {"streamed": True, "slice_sequences": 1})
        self.entries["kto streamed"] = self.made("kto streamed", "kto", KTO_PACKED, {"streamed": True})
        for shape in SHAPES if ranks == 3 else ():
            self.entries[f"kto {shape}"] = self.made(f"kto {shape}", "kto", **apart, shape=shape)
        for method, name in ROUTERS.items():
            self.entries[name] = self.made(name, method, **apart, model=self.experts)
        self.entries["mixed"] = self.made("mixed", "dpo", 2, packing=False, evaluation_fraction=0.0, **files)
        self.entries["short"] = self.made("short", "dpo", 2, steps=1)
        self.entries |= {f"jobs-{name}": self.shipped(name) for name in ("dpo", "orpo")}
        self.entries["longest"] = self.made("longest", "orpo", **apart, pad="longest")

    def made(
        self,
        name: str,
        method: str,
        rows: int,
        stage: dict[str, Any] | None = None,
        steps: int = STEPS,
        model: Path | None = None,
        shape: str = "",
        **data: Any,
    ) -> dict[str, Any]:
        plan = self.plan(name, self.ranks, rows, LENGTH, **(stage or {}))
        if shape:
            write_plan(plan, *SHAPES[shape], length=LENGTH)
        tables: dict[str, Any] = {key: dict(value) for key, value in METHODS[method].items()}
        if "adapter" in tables:
            tables["adapter"]["path"] = str(self.start)
        if model is not None:
            tables["model"] = {"path": str(model)}
        if method == "kto":
            data = {"records": [str(self.labels)], "evaluation": [str(self.labels)], **data}
        train = {"global_batch": rows, "steps": steps, "preference": "dpo", **tables.pop("train", {})}
        tables["profile"] = {"calibrate": name in METHODS}  # it changes no bit
        entry = self.entry(name, self.written, {"plan": plan}, data=data, train=train, **tables)
        kind = "experts" if model is not None else "adapter" if "adapter" in tables else "whole"
        entry["profile"] = self.directory / f"{kind}.profile.toml"
        if not entry["profile"].exists():
            write_profile(entry["profile"], entry["job"], self.ranks)
        return entry

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
        """Losses, gradient norms, rewards and the last held-out loss with its rewards."""
        metrics = read_metrics(self.run(name) / "metrics.jsonl")
        steps = [value for step in metrics.steps for value in (step.loss, step.grad_norm, *rewards(step).values())]
        return np.array([*steps, metrics.evaluations[-1].loss, *rewards(metrics.evaluations[-1]).values()])

    def result(self, name: str) -> dict[str, torch.Tensor]:
        adapter = self.run(name) / "adapter" / "adapter_model.safetensors"
        return load_file(adapter if adapter.exists() else self.run(name) / "model" / "model.safetensors")


SHAPES = {
    "pipelines": [pipeline([rank], [0, 4], 1, 2) for rank in range(3)],
    "group": [pipeline([{0: 2, 1: 1, 2: 1}], [0, 4], 2, 6)],
    "several stages": [pipeline([0, 1, 2, 0], range(5), 2, 6, "zbv")],
}
"""Name -> pipelines of three ranks for six sequences."""


def rewards(line: Rewards) -> dict[str, float]:
    """Those that a line of the metrics has."""
    return {name: value for name in REWARDS if (value := getattr(line, name)) is not None}


def mixture(directory: Path, like: Path) -> Path:
    """A mixture of experts whose routers have a loss."""
    keys = {**tiny_keys("mixtral"), "vocab_size": json.loads((like / "config.json").read_text())["vocab_size"]}
    keys |= {"num_hidden_layers": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    keys |= {"initializer_range": 0.2, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
    keys |= {name: json.loads((like / "config.json").read_text())[name] for name in ("bos_token_id", "eos_token_id")}
    torch.manual_seed(1)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "experts")
    return directory / "experts"


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


def assert_equal(runs: Runs, name: str, other: str) -> None:
    """Rewards are differences of sums that are a hundred times as large."""
    np.testing.assert_allclose(runs.numbers(name), runs.numbers(other), rtol=5e-6, atol=2e-6)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(directory: Path, ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        runs = Runs(directory, ranks)
        outcomes = runs.finish_entries(ranks, runs.entries)

        def after_one(name: str, entry: dict[str, Any], of: str) -> dict[str, Any]:
            return {**entry, "run_dir": runs.run(name), "resume": checkpoint_path(runs.run(of) / "checkpoints", 1)}

        again = {name: after_one(f"{name} again", runs.entries[name], name) for name in ("dpo", "kto", "adapter")}
        later = {f"{name} again": entry for name, entry in again.items()}
        later["longer"] = after_one("longer", runs.made("longer", "dpo", 2), "short")
        return runs, outcomes | runs.run_entries(ranks, later)

    return once_per_ranks(tmp_path_factory, run)


@ON_RANKS
@pytest.mark.parametrize(
    ("name", "other"),
    [(f"{name}", f"{name} apart") for name in METHODS]
    + [("streamed", "dpo"), ("longest", "orpo"), ("kto streamed", "kto")],
)
def test_pairs_of_one_sequence_learn_what_they_learn_apart(on: Any, ranks: int, name: str, other: str) -> None:
    runs, _ = on(ranks)
    assert_equal(runs, name, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_point_is_the_same_under_other_plans(on: Any, shape: str) -> None:
    runs, _ = on(3)
    assert_equal(runs, f"kto {shape}", "kto apart")


@ON_RANKS
@pytest.mark.parametrize("name", ["dpo", "kto", "adapter"])
def test_resumed_runs_keep_the_reference_of_the_beginning(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    assert "Computing reference log-probabilities: " in outcomes[name].printed
    assert "Computing reference log-probabilities: " not in outcomes[f"{name} again"].printed
    whole, again = runs.result(name), runs.result(f"{name} again")
    assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)


@ON_RANKS
def test_more_steps_than_the_reference_was_computed_for_are_refused(on: Any, ranks: int) -> None:
    _, outcomes = on(ranks)
    assert outcomes["longer"].raised == ("CollectiveUserError",) * ranks
    text = outcomes["longer"].texts[0]
    assert "no reference log-probabilities for 2 preference rows" in text and "steps, global_batch, seed" in text


@ON_RANKS
def test_of_mixed_data_sets_all_pairs_that_are_drawn_have_a_reference(on: Any, ranks: int) -> None:
    """An epoch of them holds some pairs more than once, and others not at all."""
    runs, _ = on(ranks)
    found = losses(runs.run("mixed"))
    assert len(found) == STEPS and np.isfinite(found).all() and abs(found[0] - np.log(2)) < 1e-6


@ON_RANKS
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_the_shipped_jobs(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    assert (
        "24 pairs of answers from 1 file" in outcomes[f"jobs-{name}"].printed
        and "(per pair)" in outcomes[f"jobs-{name}"].printed
    )
    told = re.findall(r"evaluation loss .*, reward margin .*, accuracy \d+ %", outcomes[f"jobs-{name}"].printed)
    assert told and "(per pair), reward margin" in outcomes[f"jobs-{name}"].printed
    base = AutoModelForCausalLM.from_pretrained(runs.model_path)
    adapted = PeftModel.from_pretrained(base, runs.run(f"jobs-{name}") / "adapter")
    learnt = [value for key, value in adapted.state_dict().items() if "lora_B" in key]
    assert learnt and all(value.abs().max() > 0 for value in learnt)


@ON_RANKS
@pytest.mark.parametrize("name", [*METHODS, *ROUTERS.values()])
def test_equals_trl(on: Any, ranks: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is in the extra `trl`")
    runs, _ = on(ranks)
    expected, told, weights = by_trl(runs, name, tmp_path)
    steps = read_metrics(runs.run(name) / "metrics.jsonl").steps
    np.testing.assert_allclose([step.loss for step in steps], expected, rtol=1e-6, atol=1e-6)
    for step, log in zip(steps, told, strict=True):
        own = rewards(step)
        assert own.keys() == {key for key, of_trl in REWARDS.items() if of_trl in log}
        np.testing.assert_allclose(list(own.values()), [log[REWARDS[key]] for key in own], rtol=1e-5, atol=1e-6)
    own = runs.result(name)
    assert own.keys() <= weights.keys()
    model = runs.experts if name in ROUTERS.values() else runs.model_path
    start = load_file(runs.start / "adapter_model.safetensors" if name == "adapter" else model / "model.safetensors")
    for key, value in own.items():
        moved = (weights[key] - start[key]).abs().max()
        assert moved > 1e-3 or value.numel() < 100
        assert (value - weights[key]).abs().max() < 1e-3 * 3e-3 * STEPS, key  # of what steps can move


def by_trl(
    runs: Runs, name: str, directory: Path
) -> tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]:
    """(loss of each step, its log, weights afterwards) of TRL's own trainer in this process."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    method, routers = name.removesuffix(" routers"), name in ROUTERS.values()
    keys, flipped = METHODS[method].get("train", {}), METHODS[method].get("train", {}).get("preference_smoothing", 0.0)
    weights = {key: keys[key] for key in ("desirable_weight", "undesirable_weight") if key in keys}
    # Its "sigmoid" knows no smoothing, but its "robust" is a sum of the loss and the flipped loss; so the smoothed one is, too.
    parts = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - flipped), 2 * flipped - 1]}
    simple = {"cpo_alpha": 0.0, "simpo_gamma": keys.get("preference_margin")}
    config, trainer, own = {
        "conservative": (DPOConfig, DPOTrainer, {**parts, "label_smoothing": flipped}),
        "hinge": (DPOConfig, DPOTrainer, {"loss_type": "hinge"}),
        "robust": (DPOConfig, DPOTrainer, {"loss_type": "robust", "label_smoothing": flipped}),
        "ipo": (DPOConfig, DPOTrainer, {"loss_type": "ipo"}),
        "simpo": (CPOConfig, CPOTrainer, {**simple, "loss_type": "simpo", "label_smoothing": flipped}),
        "orpo": (ORPOConfig, ORPOTrainer, {}),
        "kto": (KTOConfig, KTOTrainer, weights),
    }.get(method, (DPOConfig, DPOTrainer, {}))
    found: list[float] = []

    class Noted(trainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            found.append(float(loss))
            return loss

    def asked(prompts: Sequence[str]) -> list[str]:
        return [f"## Task\n{prompt}\n\n## Answer\n" for prompt in prompts]

    prompts, first, second = (list(column) for column in zip(*(LABELLED if method == "kto" else PAIRS), strict=True))
    names = ("completion", "label") if method == "kto" else ("chosen", "rejected")
    rows = {"prompt": asked(prompts), names[0]: first, names[1]: second}
    model: Any = AutoModelForCausalLM.from_pretrained(runs.experts if routers else runs.model_path, dtype=torch.float32)
    if name == "adapter":
        model = PeftModel.from_pretrained(model, runs.start, is_trainable=True)
    job = runs.written["train"]
    pieces = len(PAIRS) if routers else 1  # a router's loss is that of one pair
    arguments = config(
        output_dir=str(directory),
        per_device_train_batch_size=len(PAIRS) // pieces,
        gradient_accumulation_steps=pieces,
        max_steps=STEPS,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        adam_epsilon=EPSILON,
        weight_decay=job["weight_decay"],
        max_grad_norm=1.0,
        beta=job["preference_beta"],
        max_length=LENGTH,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        **own,
    )
    tokenizer = AutoTokenizer.from_pretrained(runs.tokenizer)
    learner = Noted(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
    learner.train()
    learner.model.save_pretrained(directory / "result", safe_serialization=True)
    file = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
    means = np.array(found).reshape(STEPS, pieces).mean(axis=1)
    log = [line for line in learner.state.log_history if "loss" in line]
    return means.tolist(), log, load_file(directory / "result" / file)
