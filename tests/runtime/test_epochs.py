"""Runs that count epochs, and runs that end when the held-out loss stops falling: one rank and three, resumed too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_mpi.cli import main
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import assert_same_run, tensors
from tests.support.jobs import GLOBAL_BATCH, Outcome, Workshop, once_per_ranks, write_profile
from tests.support.mpi import on_ranks

pytestmark = pytest.mark.slow

PATIENCE, EVERY = 2, 2


class Runs(Workshop):
    def __init__(self, directory: Path, ranks: int) -> None:
        super().__init__(directory)
        values = self.values(self.model(blocks=2))
        del values["train"]["steps"]
        values["profile"]["path"] = str(directory / "profile.toml")
        values["checkpoint"] = {"every": 1, "keep": 100}
        rising = {"steps": 60, "learning_rate": 0.1, "evaluate_every": EVERY, "early_stopping_patience": PATIENCE}
        kept = {"every": 0, "keep": 1}
        shares = {"train": {"epochs": 0.4, "evaluate_every": 0.4}, "checkpoint": {"every": 0.3, "keep": 100}}
        self.entries = {
            "epochs": self.entry("epochs", values, **shares),
            "smaller": self.entry("smaller", values, train={"epochs": 1.1, "last_batch": "smaller"}),
            "patient": self.entry("patient", values, train=rising),
            "sparing": self.entry("sparing", values, train=rising, checkpoint=kept),
        }
        self.entries["over"] = {**self.entries["sparing"], "resume": "latest"}
        write_profile(directory / "profile.toml", self.entries["epochs"]["job"], ranks)

    def run(self, name: str) -> Path:
        return self.directory / name


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(directory: Path, ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        runs = Runs(directory, ranks)
        outcomes = runs.finish_entries(ranks, runs.entries)
        middle = checkpoint_path(runs.run("patient") / "checkpoints", ended_after(runs.run("patient")) - EVERY - 1)
        again = {**runs.entries["patient"], "run_dir": runs.run("again"), "resume": middle}
        return runs, outcomes | runs.finish_entries(ranks, {"again": again})

    return once_per_ranks(tmp_path_factory, run)


def ended_after(run: Path) -> int:
    return read_metrics(run / "metrics.jsonl").steps[-1].step


@on_ranks(1, 3, quick=(1,))
def test_epochs_are_so_many_passes(on: Any, ranks: int) -> None:
    runs, outcomes = on(ranks)
    printed = " ".join(outcomes["epochs"].printed.split())
    (sequences,) = (int(text.split()[-1]) for text in [printed.split(" training and")[0].replace(",", "")])
    steps = math.ceil(0.4 * sequences / GLOBAL_BATCH)
    assert steps > 1 and ended_after(runs.run("epochs")) == steps
    assert f"{steps} steps of {GLOBAL_BATCH} sequences are {steps * GLOBAL_BATCH / sequences:.3g} epochs" in printed
    assert f"step {steps}/{steps}, epoch {steps * GLOBAL_BATCH / sequences:.2f} loss" in printed
    evaluations = [one.step for one in read_metrics(runs.run("epochs") / "metrics.jsonl").evaluations]
    assert evaluations == [*range((every := math.ceil(0.4 * steps)), steps, every), steps], "a share of the run"
    every = math.ceil(0.3 * steps)
    assert all(
        checkpoint_path(runs.run("epochs") / "checkpoints", step).exists() for step in range(every, steps, every)
    )


@on_ranks(1, 3, quick=(1,))
def test_an_epoch_may_end_with_a_smaller_batch(on: Any, ranks: int) -> None:
    runs, outcomes = on(ranks)
    printed = " ".join(outcomes["smaller"].printed.split())
    (sequences,) = (int(text.split()[-1]) for text in [printed.split(" training and")[0].replace(",", "")])
    per_epoch, left = -(-sequences // GLOBAL_BATCH), sequences % GLOBAL_BATCH
    assert left, "the data end in the middle of a batch"
    steps = read_metrics(runs.run("smaller") / "metrics.jsonl").steps
    assert len(steps) == math.ceil(1.1 * per_epoch)
    ratios = [one.tokens * GLOBAL_BATCH / steps[0].tokens for one in steps]
    assert ratios == [left if one.step == per_epoch else GLOBAL_BATCH for one in steps]
    if ranks == 3:
        assert_same_run(runs.run("smaller"), on(1)[0].run("smaller"), 1e-6, None)


@on_ranks(1, 3, quick=(1,))
def test_a_run_ends_when_the_held_out_loss_does_not_fall(on: Any, ranks: int) -> None:
    runs, outcomes = on(ranks)
    end, metrics = ended_after(runs.run("patient")), read_metrics(runs.run("patient") / "metrics.jsonl")
    losses = [one.loss for one in metrics.evaluations]
    best = losses.index(min(losses))
    assert end < 60 and len(losses) == end // EVERY == best + 1 + PATIENCE
    assert "early stopping: the evaluation loss has not improved for 2 evaluations" in outcomes["patient"].printed
    assert json.loads((runs.run("patient") / "run.json").read_text())["last_step"] == end
    assert ended_after(runs.run("again")) == ended_after(runs.run("sparing")) == end
    assert_same_run(runs.run("again"), runs.run("patient"), step=end)


@on_ranks(1, 3, quick=(1,))
def test_the_best_checkpoint_is_kept_and_exported(on: Any, ranks: int, tmp_path: Path) -> None:
    """``sparing`` writes checkpoints at its end only, and where the loss is the lowest so far."""
    runs, _ = on(ranks)
    metrics = read_metrics(runs.run("sparing") / "metrics.jsonl")
    best = min(metrics.evaluations, key=lambda one: one.loss).step
    assert main(["export", str(runs.run("sparing")), str(tmp_path / "best"), "--best"]) == 0
    exported = load_file(tmp_path / "best" / "model.safetensors")
    for (kind, name), array in tensors(runs.run("sparing"), best).items():
        assert kind != "parameters" or torch.equal(exported[name], torch.from_numpy(array)), name
    assert not torch.equal(
        exported["model.norm.weight"],
        load_file(runs.run("sparing") / "model" / "model.safetensors")["model.norm.weight"],
    )
    assert main(["export", str(runs.run("epochs")), str(tmp_path / "none"), "--best"]) == 0, "of its last step"
