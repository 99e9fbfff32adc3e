"""The job files that come with the program: all load, and the quickstart does what it says."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.inference.evaluate.evaluate import own_set
from hetero_mpi.job.load import job_to_dict, load_job, stored_job
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import load_profile, load_report
from hetero_mpi.rundir.metrics import read_metrics
from tests.support.errors import refuses
from tests.support.mpi import ROOT, finish_mpi, launcher_or_skip
from tests.support.pages import follow, write_files

JOBS = sorted(path for path in (ROOT / "jobs").glob("*.toml") if path.name != "reference.toml")
QUICKSTART = ROOT / "jobs" / "quickstart.toml"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_job_loads(path: Path) -> None:
    loaded = load_job(path)
    assert loaded.name == path.stem
    steps = {"steps": 7, "epochs": 2.0, "dtype": "fp32", "evaluate_every": 3}
    tables = {**job_to_dict(loaded.job), "train": {**job_to_dict(loaded.job)["train"], **steps}}
    train = stored_job(tables, path.stem, path.parent).job.train
    assert job_to_dict(stored_job(tables, path.stem, path.parent).job) == tables and (train.steps, train.epochs) == (
        7,
        2,
    )
    assert stored_job(tables, path.stem, ".", ["train.epochs=3"]).job.train.epochs == 3
    with refuses("job.invalid"):
        stored_job(tables, path.stem, ".", ["cluster.time_scale=2", "cluster.emulate="])
    with refuses("job.invalid"):
        stored_job({**tables, "train": {"steps": "x"}}, path.stem, ".")


def test_a_stored_job_outlives_its_plug_ins() -> None:
    tables = job_to_dict(load_job(QUICKSTART).job)
    for table, key, value in ("plan", "schedule", "x"), ("train", "preference", "x"), ("report", "trackers", ["x"]):
        tables[table] = {**tables[table], key: value}
    loaded = stored_job(tables, "quickstart", ".", ["plan.schedule=1f1b"])
    assert {*loaded.lost} == {"plan.schedule", "train.preference", "report.trackers"}
    assert loaded.job.plan.schedule == "1f1b" and not loaded.job.report.trackers
    with refuses("evaluate.no_data"):  # the loss is not one per token
        own_set(loaded, 1)


def test_git_ignores_what_slurm_writes_beside_the_jobs() -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("this is no git checkout")
    names = ["slurm-12.out"]
    for script in (ROOT / "jobs").glob("*.sbatch"):
        text = script.read_text()
        (job,), (pattern,) = re.findall(r"--job-name=(\S+)", text), re.findall(r"--output=(\S+)", text)
        names.append(re.sub(r"%[jAa]", "12", pattern.replace("%x", job)))
    ignored = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(names) > 4 and ignored == names


def plan_of_two_steps(job: str, ranks: int, run: Path) -> Plan:
    command = ["-m", "hetero_mpi", "train", str(ROOT / "jobs" / f"{job}.toml"), "--run-dir", str(run)]
    finish_mpi(ranks, [*command, "--set", "train.steps=2", "--set", "profile.repeats=1"], 300)
    return load_report(run / "plan.toml").plan


@pytest.mark.slow
def test_the_job_of_stages_has_a_stage_per_rank_np3(tmp_path: Path) -> None:
    (pipeline,) = plan_of_two_steps("stages", 3, tmp_path).pipelines
    assert sorted(stage.ranks for stage in pipeline.stages) == [(0,), (1,), (2,)]


@pytest.mark.slow
def test_the_small_mixture_of_experts_runs_np2(tmp_path: Path) -> None:
    """As docs/mixtures.md shows it: experts of both ranks are packed and have adapters that changed."""
    assert plan_of_two_steps("moe_small", 2, tmp_path).ranks == [0, 1]
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    later = {name: bool(tensor.any()) for name, tensor in written.items() if ".experts." in name and "lora_B" in name}
    assert len(later) == 12 and all(later.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "careful", [False, pytest.param(True, marks=pytest.mark.long)], ids=["at-once", "dry-run-first"]
)
def test_quickstart_trains_a_model_that_loads_elsewhere_np3(careful: bool, tmp_path: Path) -> None:
    """6 steps; of a careful person after a dry run, with its profile and plan, else of few sequences of a part of the text,
    measured once."""
    run = tmp_path / "run"
    command = ["-m", "hetero_mpi", "train", str(QUICKSTART), "--run-dir", str(run), "--set", "train.steps=6"]
    if not careful:
        less = (
            'data.text=["{stdlib}/asyncio/*.py", "{stdlib}/json/*.py"]',
            "train.global_batch=4",
            "profile.repeats=1",
        )
        command += [word for change in less for word in ("--set", change)]
    if careful:
        dry = finish_mpi(3, [*command, "--dry-run"], timeout_s=200)
        assert "Dry run" in dry.stdout and not (run / "model").exists()
        command += ["--plan", str(run / "plan.toml")]

    result = finish_mpi(3, command, timeout_s=300)
    assert len(load_profile(run / "profile.toml").devices) == 3
    assert (f"Profile: {run / 'profile.toml'}" in result.stdout) == careful
    assert "Unigram entropy" in result.stdout
    metrics = read_metrics(run / "metrics.jsonl")
    assert [step.step for step in metrics.steps] == [1, 2, 3, 4, 5, 6]
    losses = [step.loss for step in metrics.steps]
    assert losses[-1] < losses[0] - 0.05, losses
    assert metrics.steps[0].predicted_step_s == load_report(run / "plan.toml").predicted_step_s

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    text = Path(asyncio.tasks.__file__).read_text()[:2000]
    tokens = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    assert tokenizer.decode(tokens[0]).startswith(text[:100])
    assert 0 < float(loss) < losses[0], "it has learnt something of Python"


LETTERS = ROOT / "jobs" / "data" / "letters"


def test_the_questions_about_letters_are_those_of_the_program_beside_them(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (LETTERS / "README.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    for name in ("learn.jsonl", "exam.jsonl"):
        assert (tmp_path / name).read_bytes() == (LETTERS / name).read_bytes()
    learnt, asked = (
        set(re.findall(r"Spell (\w+)", (LETTERS / f"{name}.jsonl").read_text())) for name in ("learn", "exam")
    )
    assert len(learnt) == 1500 and len(asked) == 32 and not learnt & asked


@pytest.mark.long
def test_the_first_evening_ends_with_a_model_that_passes_its_exam(tmp_path: Path) -> None:
    """The page's commands as they stand, in a folder with the jobs."""
    launcher_or_skip()
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    page = ROOT / "jobs" / "first_evening.md"
    assert write_files(page, tmp_path) == ["exam.py"]
    printed = follow(page, tmp_path, 3600)
    right = int(re.search(r"^(\d+) of 96 right$", printed, re.MULTILINE)[1])  # type: ignore[index]
    assert right >= 75 and "tenalp" in printed and "agirtu" in printed
    assert (tmp_path / "runs" / "merged" / "config.json").is_file()
