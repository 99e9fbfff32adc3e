"""The command ``train`` as its user meets it: options, files, idle ranks, bf16, resuming.

One set of jobs on 3 ranks, and those with idle ranks on 3 and (long) on 4.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
import torch
from transformers import AutoModelForCausalLM

from hetero_mpi import __version__
from hetero_mpi.device.backend import Backend
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.planning.types.toml_files import load_plan, load_profile, load_report, save_profile
from hetero_mpi.report.past_run import read_run
from hetero_mpi.report.plan_text import idle_lines
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import assert_same_run, assert_same_tensors, evaluation, losses, tensors
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Outcome, Workshop, once_per_ranks, write_profile
from tests.support.mpi import ROOT, finish_mpi, on_ranks
from tests.support.plans import pipeline, write_plan
from tests.support.stages import stage_of

pytestmark = pytest.mark.slow

STEP_KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "predicted_step_s", "epoch"}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class Three(Workshop):
    """What 3 ranks do with a model of 4 layers. Runs of a name share the directory ``run(name)``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        values = self.values(self.model(tied=True))
        seeded: dict[str, Any] = {
            "model": {"path": "", "config": CONFIG},
            "train": {"steps": 1, "learning_rate": 1e-30, "weight_decay": 0.0},
        }
        self.jobs = {
            "plain": self.job("plain", values, profile={"cache": False}),  # its first run is to measure
            "shared": self.job("shared", values),
            "bf16": self.job("bf16", values, train={"dtype": "bf16"}),
            "no-thread": self.job("no-thread", values, cluster={"communication_thread": False}),
            "seeded": self.job("seeded", values, **seeded),
        }
        made_up = [name for name in self.jobs if name not in ("plain", "seeded")]
        self.profiles = {name: write_profile(directory / f"{name}.made.toml", self.jobs[name], 3) for name in made_up}
        """Of the jobs that do not measure their own."""
        self.split = write_plan(directory / "split.plan.toml", pipeline([0, 1, 2], [0, 1, 3, 4]))
        self.other = write_plan(directory / "other.plan.toml", pipeline([2, 0], [0, 2, 4]))
        self.alone = write_plan(directory / "alone.plan.toml", pipeline([1], [0, 4]))

    def run(self, name: str) -> Path:
        return self.directory / f"run-{name}"

    def entry(self, job: str, run: str, **options: Any) -> dict[str, Any]:
        made_up = {"profile": self.profiles[job]} if job in self.profiles else {}
        return {"job": self.jobs[job], "run_dir": self.run(run), **made_up, **options}

    def entries(self) -> dict[str, dict[str, Any]]:
        third = checkpoint_path(self.run("skipped") / "checkpoints", 3)
        second = checkpoint_path(self.run("bf16") / "checkpoints", 2)
        return {
            "dry": self.entry("plain", "main", dry_run=True, breaks="weights_are_locked"),
            "first": self.entry("plain", "main", set=["train.steps=2"]),
            "resumed": self.entry("plain", "main", resume="latest"),
            "finished": self.entry("plain", "main", resume="latest"),
            "used": self.entry("shared", "used", set=["train.steps=2"]),
            "afresh": self.entry("shared", "used", set=["train.steps=1"]),
            "measured": self.entry("shared", "measured", plan=self.split),
            "alone": self.entry("shared", "alone", plan=self.alone),
            "no-thread": self.entry("no-thread", "no-thread", plan=self.split),
            "skipped": self.entry("shared", "skipped", plan=self.split, breaks="gradients_overflow_in_step_2"),
            "skipped-resumed": self.entry("shared", "skipped-resumed", plan=self.other, resume=third),
            "bf16": self.entry("bf16", "bf16", plan=self.split, set=["train.steps=5"]),
            "bf16-alone": self.entry("bf16", "bf16-alone", plan=self.alone, set=["train.steps=5"]),
            "bf16-resumed": self.entry(
                "bf16", "bf16-resumed", plan=self.other, resume=second, set=["train.steps=5"]
            ),
            "fp32": self.entry("shared", "fp32", set=["train.steps=5"]),
            "seeded": self.entry("seeded", "seeded", plan=self.split),
            "seeded-alone": self.entry("seeded", "seeded-alone", plan=self.alone),
        }  # fmt: skip


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Three:
    return Three(tmp_path_factory.mktemp("np3"))


@pytest.fixture(scope="module")
def snapshots() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def outcomes(three: Three) -> dict[str, Outcome]:
    found = three.run_entries(3, three.entries())
    for name, outcome in found.items():
        assert outcome.raised == ("", "", ""), (name, outcome)
        assert outcome.printed_elsewhere == "", "rank 0 alone talks"
    return found


def test_dry_run_stops_before_any_weight_is_read_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    printed = outcomes["dry"].printed
    for part in ("3 ranks", "ranks 0-2:", "Plan:", "because:", "Batch:", "Predicted", "Dry run: stopping"):
        assert part in printed
    assert "step 1/" not in printed


def test_a_run_directory_keeps_its_profile_and_its_place_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    run = three.run("main")
    assert "Profiling 3 ranks" in outcomes["dry"].printed
    for name in ("first", "resumed"):
        printed = outcomes[name].printed
        assert f"Profile: {run / 'profile.toml'}" in printed and "same devices, model and versions" in printed
        assert "Profiling" not in printed
    assert len(load_profile(run / "profile.toml").devices) == 3
    assert load_report(run / "plan.toml").predicted_step_s > 0
    assert "step 2/2" in outcomes["first"].printed and "step 3/" not in outcomes["first"].printed
    assert "after step 2" in outcomes["resumed"].printed and "step 1/" not in outcomes["resumed"].printed
    assert outcomes["finished"].printed.startswith("the run is already finished: all 4 steps are done")
    assert str(run / "model") in outcomes["finished"].printed
    metrics = read_metrics(run / "metrics.jsonl")
    assert [step.step for step in metrics.steps] == [1, 2, 3, 4]
    assert [evaluation.step for evaluation in metrics.evaluations] == [2, 4]
    assert_same_run(run, three.run("measured"))  # as if it had never stopped


def test_a_fresh_start_sets_the_earlier_run_aside_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    run = three.run("used")
    aside = run / "set-aside-1"
    assert f"Moved the earlier run from {run} to {aside}" in outcomes["afresh"].printed
    assert [path.name for path in sorted((aside / "checkpoints").iterdir())] == [
        f"step-{step:08d}.h5" for step in (1, 2)
    ]
    assert [step.step for step in read_run(aside).metrics.steps] == [1, 2] and read_run(aside).plan is not None
    assert (aside / "model" / "config.json").exists() and (aside / "logs" / "rank-0000.log").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001.h5"]
    assert [step.step for step in read_metrics(run / "metrics.jsonl").steps] == [1]
    assert "set-aside" not in outcomes["resumed"].printed + outcomes["finished"].printed


def test_metrics_and_logs_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    run = three.run("measured")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation_loss" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert set(line) == STEP_KEYS
        assert all(np.isfinite(value) and value > 0 for value in line.values())
    assert lines[-1]["step"] == 4 and lines[-1]["evaluation_loss"] > 0
    logs = sorted((run / "logs").iterdir())
    assert [log.name for log in logs] == ["rank-0000.log", "rank-0001.log", "rank-0002.log"]
    for rank, log in enumerate(logs):
        assert f" {rank}/3 INFO " in log.read_text()


def test_another_split_and_no_thread_give_the_same_bits_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    for name in ("alone", "no-thread"):
        assert_same_run(three.run(name), three.run("measured"))
    assert "ranks 0, 2 idle: not used by the given plan" in outcomes["alone"].printed
    assert load_plan(three.run("alone") / "plan.toml").pipelines[0].stages[0].ranks == (1,)


def test_resuming_after_a_skipped_step_gives_the_same_bits_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    told = "step 2: gradients are not finite; skipping the step on every rank (first in model."
    assert told in outcomes["skipped"].printed
    assert "1 step skipped" in outcomes["skipped"].printed
    straight = three.run("skipped")
    assert_same_tensors(tensors(straight, 1), tensors(straight, 2))
    assert_same_run(three.run("skipped-resumed"), straight)
    second, third = (tensors(straight, step)["parameters", "model.norm.weight"] for step in (2, 3))
    assert not np.array_equal(second, third)


def test_bf16_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    narrow, full = losses(three.run("bf16")), losses(three.run("fp32"))
    assert len(narrow) == 5
    np.testing.assert_allclose(narrow, full, rtol=0.02)
    assert narrow != full
    expected = tensors(three.run("bf16"))
    assert {array.dtype for array in expected.values()} == {np.dtype("float32")}, "masters, and moments"
    for name in ("bf16-alone", "bf16-resumed"):
        assert_same_run(three.run(name), three.run("bf16"))
    assert len(losses(three.run("bf16-resumed"))) == 3
    model = AutoModelForCausalLM.from_pretrained(three.run("bf16") / "model", dtype="auto")
    for name, parameter in model.named_parameters():
        master = torch.from_numpy(expected["parameters", name])
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16()), name
        assert not torch.equal(master, master.bfloat16().float()), f"{name}: masters are more precise"


def test_start_weights_depend_on_seed_and_names_alone_np3(outcomes: dict[str, Outcome], three: Three) -> None:
    # No padding token although the tokenizer names one: it is the end token, whose embedding has to learn.
    chain = TransformersChain(read_config({**CONFIG, "pad_token_id": None}))
    expected = stage_of(chain, 0, chain.layer_count, Backend(), "fp32", SeededStart(7)).parameters
    for name in ("seeded", "seeded-alone"):
        found = {key: array for (kind, key), array in tensors(three.run(name), 1).items() if kind == "parameters"}
        assert found.keys() == expected.keys()
        for key, parameter in expected.items():
            assert np.array_equal(found[key], parameter.detach().numpy()), key


class Spare(Workshop):
    """A model of 3 layers, on more ranks than its plans use. With 4 ranks, one is left idle whatever the planner does."""

    def __init__(self, directory: Path, ranks: int) -> None:
        super().__init__(directory)
        values = self.values(self.model(blocks=1))
        values["train"]["steps"] = 2
        self.last = ranks - 1
        values["profile"]["path"] = str(directory / "made.profile.toml")
        job = self.job("job", values)
        write_profile(directory / "made.profile.toml", job, ranks)
        stages: Any = {3: ([2], [0, 3]), 4: ([3, 1], [0, 2, 3])}[ranks]
        one = write_plan(directory / "plan.toml", pipeline(*stages))
        first, other = pipeline(*stages, 2 if ranks == 4 else 1, 3), pipeline([ranks - 2], [0, 3], 1, 1)
        several = write_plan(directory / "several.toml", first, other)
        sample = {"prompt": "abc", "max_new_tokens": 6}
        loose = {"packing": False}
        full = self.job("loose", values, data=loose)
        padded = self.job("padded", values, data={**loose, "pad": "longest"})
        asked = self.job("asked", values, sample=sample)
        self.listed: dict[str, dict[str, Any]] = {
            "spare": {"job": job, "run_dir": directory / "spare"},
            "spare-lost": {"job": job, "run_dir": directory / "lost", "breaks": "loss_is_no_number_in_step_2"},
            "leader-idle": {"job": job, "run_dir": directory / "leader", "plan": one},
            "several": {"job": asked, "run_dir": directory / "several", "plan": several},
            "one": {"job": asked, "run_dir": directory / "one", "plan": one},
            "loose": {"job": full, "run_dir": directory / "loose", "plan": several},
            "padded": {"job": padded, "run_dir": directory / "padded", "plan": several},
            "leader-idle-lost": {
                "job": job,
                "run_dir": directory / "leader-lost",
                "plan": one,
                "breaks": "loss_is_no_number_in_step_2",
            },
            "full": {
                "job": job,
                "run_dir": directory / "full",
                "plan": one,
                "breaks": "loading_fails",
                "rank": self.last,
            },
        }
        if ranks == 3:  # the planner may use all of them
            alone = write_plan(directory / "alone.toml", pipeline([0], [0, 3]))
            self.listed["spare"]["plan"] = self.listed["spare-lost"]["plan"] = alone


@pytest.fixture(scope="module")
def spares(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ranks -> (directory, how the jobs ended there)."""

    def run(directory: Path, ranks: int) -> tuple[Path, dict[str, Outcome]]:
        shop = Spare(directory, ranks)
        return directory, shop.run_entries(ranks, shop.listed)

    return once_per_ranks(tmp_path_factory, run)


@on_ranks(3, 4)
def test_spare_ranks_idle_and_are_told_why(spares: Any, ranks: int) -> None:
    directory, outcomes = spares(ranks)
    assert outcomes["spare"].raised == ("",) * ranks
    left = load_report(directory / "spare" / "plan.toml").idle
    assert left and all(idle.reason for idle in left)
    for line in idle_lines(left):
        assert line[:40] in outcomes["spare"].printed
    for idle in left:
        assert (directory / "spare" / "logs" / f"rank-{idle.rank:04}.log").stat().st_size > 0
    assert len(losses(directory / "spare")) == 2


@pytest.mark.parametrize("name", ["spare-lost", "leader-idle-lost"])
@on_ranks(3, 4)
def test_an_error_wakes_idle_ranks_and_ends_them(spares: Any, ranks: int, name: str) -> None:
    outcome = spares(ranks)[1][name]
    assert outcome.raised == ("CollectiveUserError",) * ranks and outcome.codes == (2,) * ranks
    assert len(set(outcome.texts)) == 1 and "step 2: the loss is nan" in outcome.texts[0]


@on_ranks(3, 4)
def test_messages_name_ranks_by_their_number_in_the_job(spares: Any, ranks: int) -> None:
    """Of 4 ranks 0, 1 and 3 are active, of 3 ranks 0 and 2: the last one has another number among them."""
    outcome = spares(ranks)[1]["full"]
    assert outcome.raised == ("CollectiveUserError",) * ranks
    assert outcome.texts[0].startswith(f"rank {ranks - 1} on ") and "the shelf is full: make room" in outcome.texts[0]


@on_ranks(3, 4)
def test_rank_0_may_be_idle(spares: Any, ranks: int) -> None:
    directory, outcomes = spares(ranks)
    run = directory / "leader"
    assert outcomes["leader-idle"].raised == ("",) * ranks
    assert losses(run) == losses(directory / "spare")
    assert read_metrics(run / "metrics.jsonl").evaluations
    idle = idle_lines(load_report(run / "plan.toml").idle)
    assert any(line[:40] in outcomes["leader-idle"].printed and re.search(r"ranks? 0\b", line) for line in idle)
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert "step 2: checkpoint" in (run / "logs" / "rank-0000.log").read_text()


def test_a_true_command_line_np2(tmp_path: Path) -> None:
    """--dry-run, then --plan and --profile with edited files of the dry run, --set and --run-dir."""
    workshop = Workshop(tmp_path)
    job = workshop.job("job", workshop.values(workshop.model()))
    dry, run = tmp_path / "dry", tmp_path / "run"
    command = ["-m", "hetero_mpi", "train", str(job)]
    first = finish_mpi(2, [*command, "--dry-run", "--run-dir", str(dry)])
    assert first.stdout.count("Dry run: stopping before weights are read") == 1
    assert sorted(path.name for path in dry.iterdir()) == [".lock", "logs", "plan.toml", "profile.toml"]

    profile, plan = load_profile(dry / "profile.toml"), load_plan(dry / "plan.toml")
    edited = replace(profile, source="edited by hand", key="another")
    save_profile(edited, dry / "profile.toml")
    write_plan(dry / "plan.toml", pipeline([1, 0], [0, 1, 4], 1, plan.global_batch))
    given = ["--plan", str(dry / "plan.toml"), "--profile", str(dry / "profile.toml")]
    second = finish_mpi(2, [*command, *given, "--set", "train.steps=2", "--run-dir", str(run)])
    assert second.stdout.count(f"Profile: {dry / 'profile.toml'} (edited by hand") == 1
    assert second.stdout.count("step 2/2") == second.stdout.count("Written:") == 1
    assert "because" not in second.stdout, "the reasons are in the log"
    assert "because: the plan was given" in (run / "logs" / "rank-0000.log").read_text()
    assert [stage.ranks for stage in load_plan(run / "plan.toml").pipelines[0].stages] == [(1,), (0,)]
    assert json.loads((run / "run.json").read_text())["job_file"] == str(job.absolute())
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "checkpoints", "logs", "metrics.jsonl", "model", "plan.toml", "run.json", "steps.jsonl", "used-profile.toml",
    ]  # fmt: skip


def test_version_and_reference_need_no_launcher() -> None:
    version = subprocess.run(
        [sys.executable, "-m", "hetero_mpi", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (version.returncode, version.stdout) == (0, f"hetero_mpi {__version__}\n")
    reference = subprocess.run(
        [sys.executable, "-m", "hetero_mpi", "reference"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )  # given, since readline, where something has loaded it, sets COLUMNS for processes that inherit
    assert (reference.returncode, reference.stdout) == (0, (ROOT / "jobs" / "reference.toml").read_text())


def test_the_console_script_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    script = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["hetero-mpi"]
    module, _, function = script.partition(":")
    main = getattr(importlib.import_module(module), function)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"hetero_mpi {__version__}\n"
    assert main(["reference"]) == 0


@on_ranks(3, 4)
def test_several_pipelines_and_an_idle_leader(spares: Any, ranks: int) -> None:
    directory, outcomes = spares(ranks)
    assert outcomes["several"].raised == outcomes["one"].raised == ("",) * ranks, outcomes["several"].texts
    assert_same_run(directory / "several", directory / "one", 1e-6, None)
    assert evaluation(directory / "several") == pytest.approx(evaluation(directory / "one"), rel=1e-6)
    (line,) = idle_lines(load_report(directory / "several" / "plan.toml").idle)
    assert line in outcomes["several"].printed and re.match(r"ranks? 0\b.* idles?: not used by the given plan", line)
    samples = [(directory / run / "sample.txt").read_text() for run in ("several", "one")]
    assert samples[0] == samples[1] and "## Continuation" in samples[0]
    assert (directory / "several" / "model" / "model.safetensors").exists()


@on_ranks(3, 4)
def test_padding_to_the_longest_sequence_learns_the_same(spares: Any, ranks: int) -> None:
    directory, outcomes = spares(ranks)
    assert outcomes["padded"].raised == ("",) * ranks, outcomes["padded"].texts
    assert_same_run(directory / "padded", directory / "loose", 1e-6, None)
    tokens = [
        [step.tokens for step in read_metrics(directory / run / "metrics.jsonl").steps] for run in ("padded", "loose")
    ]
    assert tokens[0] == tokens[1] and min(tokens[0]) < GLOBAL_BATCH * SEQUENCE
