"""Bad input ends a run on all ranks together, with one clear text: the rule, the values, the next step.

One mpirun goes through all cases; a few true command lines show what a person sees.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import save_plan, save_profile
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.rundir.run_directory import claim
from hetero_mpi.state.directory import checkpoint_path
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Outcome, Workshop, write_profile
from tests.support.mpi import ROOT, run_bounded, run_mpi
from tests.support.planning_samples import make_model, make_profile

LAYERS = 4
"""Embedding, two blocks, head."""
Make = Callable[["Scene", str], dict[str, Any]]


class Scene(Workshop):
    """The files of all cases, good and bad."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.good_model = self.model()
        self.profile = write_profile(directory / "profile.toml", self.job("profiled", self.values(self.good_model)), 2)
        self.good_run = directory / "good-run"

    def good(self) -> dict[str, Any]:
        values = self.values(self.good_model)
        values["profile"]["path"] = str(self.profile)
        return values

    def entry(self, name: str, **tables: dict[str, Any]) -> dict[str, Any]:
        """The good job with some keys changed."""
        return {"job": self.job(name, self.good(), **tables), "run_dir": self.directory / f"{name}-run"}

    def resumed(self, name: str, **tables: dict[str, Any]) -> dict[str, Any]:
        return {**self.entry(name, **tables), "run_dir": self.good_run, "resume": "latest"}

    def planned(self, name: str, plan: Plan) -> dict[str, Any]:
        path = self.directory / f"{name}.plan.toml"
        save_plan(plan, path)
        return {**self.entry(name), "plan": path}

    def copy_of_model(self, name: str) -> Path:
        copy = self.directory / f"{name}-model"
        shutil.copytree(self.good_model, copy)
        return copy


def linked_run(scene: Scene, name: str) -> dict[str, Any]:
    """Somebody has left a link where checkpoints will be written."""
    entry = scene.entry(name)
    entry["run_dir"].mkdir()
    (entry["run_dir"] / "checkpoints").symlink_to(scene.directory)
    return entry


def linked_cache(scene: Scene, name: str) -> dict[str, Any]:
    """A relative path that a link leads elsewhere."""
    (scene.directory / "away").symlink_to("/")
    return scene.entry(name, model={"shard_cache": "away/cache"})


def plan_of(
    edges: tuple[int, ...],
    ranks: tuple[int, ...] = (0, 1),
    micro_batches: int = GLOBAL_BATCH,
    warm_up: tuple[int, ...] = (1, 1),
) -> Plan:
    parts = zip(ranks, edges[:-1], edges[1:], warm_up, strict=True)
    stages = tuple(StagePlan((rank,), first, last, depth) for rank, first, last, depth in parts)
    return Plan((PipelinePlan(stages, 1, micro_batches),), GLOBAL_BATCH, SEQUENCE, LAYERS)


def truncated_weights(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    return scene.entry(name, model={"path": str(model)})


def corrupt_header(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:20] = b"\xff" * 12
    weights.write_bytes(content)
    return scene.entry(name, model={"path": str(model)})


def missing_shard(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    names = list(load_file(model / "model.safetensors"))
    (model / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return scene.entry(name, model={"path": str(model)})


def unproven_family(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    return scene.entry(name, model={"path": str(model)})


def other_shapes(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    return scene.entry(name, model={"path": str(model)}, profile={"path": ""})


def infinite_weights(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], float("inf"))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return scene.entry(name, model={"path": str(model)})


def empty_text(scene: Scene, name: str) -> dict[str, Any]:
    for number, content in enumerate((b"  \n", b"\xff\xfe\xff")):
        (scene.directory / f"useless-{number}.txt").write_bytes(content)
    return scene.entry(name, data={"text": [str(scene.directory / "useless-*.txt")]})


def little_text(scene: Scene, name: str) -> dict[str, Any]:
    path = scene.directory / "little.txt"
    path.write_text("abc def\n")
    return scene.entry(name, data={"text": [str(path)]})


def named_profile(scene: Scene, name: str, ranks: int, blocks: int) -> dict[str, Any]:
    path = scene.directory / f"{name}.profile.toml"
    save_profile(make_profile((1.0,) * ranks, make_model(blocks)), path)
    return {**scene.entry(name), "profile": path}


def damaged_elsewhere(scene: Scene, name: str) -> dict[str, Any]:
    model = scene.copy_of_model(name)
    os.truncate(model / "model.safetensors", 5000)
    both = scene.planned(name, plan_of((0, 2, 4)))  # on a busy machine the planner may leave rank 1 idle
    return {**both, "breaks": "model_is_elsewhere", "rank": 0, "elsewhere": model}


CASES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "unknown-keys": (
        lambda s, n: s.entry(n, train={"stepz": 3, "learning_rate": "fast"}, modle={"path": "x"}, data={"packng": 1}),
        ("modle", "did you mean '[model]'?", "[train] stepz = 3", "did you mean 'steps'?", '[train] learning_rate = "fast"',
         "[data] packng = 1", "did you mean 'packing'?"),
    ),
    "missing-job": (lambda s, n: {"job": s.directory / "absent.toml"}, ("absent.toml",)),
    "missing-model": (
        lambda s, n: s.entry(n, model={"path": str(s.directory / "lama-start")}),
        ("lama-start", "llama-start"),
    ),
    "missing-tokenizer": (
        lambda s, n: s.entry(n, tokenizer={"path": str(s.directory / "no-tokenizer")}),
        ("tokenizer.json", "no-tokenizer"),
    ),
    "no-tokenizer-in-model": (
        lambda s, n: s.entry(n, tokenizer={"path": ""}),
        ("holds no tokenizer", "tokenizer.train_vocab_size"),
    ),
    "no-file": (
        lambda s, n: s.entry(n, data={"text": [str(s.directory / "absent-*.txt")]}),
        ("data.text must match at least one file", "absent-*.txt"),
    ),
    "no-usable-text": (empty_text, ("useless-0.txt: is empty", "useless-1.txt: is text in UTF-16, not UTF-8", "other files")),
    "little-text": (little_text, ("at least 2 sequence(s) of 24 tokens", "Add text", "sequence_length")),
    "truncated-weights": (truncated_weights, ("truncated-weights-model/model.safetensors", "Download it again")),
    "corrupt-header": (corrupt_header, ("corrupt-header-model/model.safetensors", "header", "Download it again")),
    "missing-shard": (missing_shard, ("1 of the 1 files", "model-00001-of-00002.safetensors", "Download them")),
    "unproven-family": (unproven_family, ("'gpt2'", "refused", "llama")),
    "other-shapes": (other_shapes, ("other-shapes-model", "mlp", "(32, 64)", "(32, 48)", "of two models")),
    "fits-nowhere": (
        lambda s, n: s.entry(n, cluster={"memory_bytes": 100_000}),
        ("does not fit in memory", "rank 0", "rank 1", "is short by", " bytes: it needs", "more ranks"),
    ),
    "plan-of-other-layers": (
        lambda s, n: s.planned(n, plan_of((0, 1, 3))),
        ("ends with layer 2", "the chain's last layer is 3"),
    ),
    "plan-of-other-rank": (
        lambda s, n: s.planned(n, plan_of((0, 1, 4), (0, 5))),
        ("names rank 5", "ranks 0 to 1"),
    ),
    "plan-of-other-batch": (
        lambda s, n: s.planned(n, plan_of((0, 1, 4), micro_batches=3)),
        ("plan-of-other-batch.plan.toml does not fit", "shares must add up to global_batch = 4", "leave --plan out"),
    ),
    "plan-of-other-length": (
        lambda s, n: s.planned(n, replace(plan_of((0, 1, 4)), sequence_length=16)),
        (f"sequence_length = 16: the job says {SEQUENCE}", "leave --plan out"),
    ),
    "plan-that-deadlocks": (
        lambda s, n: s.planned(n, plan_of((0, 1, 4), warm_up=(0, 2))),
        ("the schedule deadlocks", "rank 1 waits at 1RECV_F", "> rank 1", "leave --plan out"),
    ),
    "missing-plan": (lambda s, n: {**s.entry(n), "plan": s.directory / "absent.plan.toml"}, ("absent.plan.toml",)),
    "profile-of-3-ranks": (
        lambda s, n: named_profile(s, n, 3, 2),
        ("describes 3 ranks, this job has 2", "start 3 ranks"),
    ),
    "profile-of-other-model": (
        lambda s, n: named_profile(s, n, 2, 1),
        ("in 3 layers", "this job trains", "in 4: use a profile", "leave it out to measure"),
    ),
    "missing-profile": (
        lambda s, n: {**s.entry(n), "profile": s.directory / "absent.profile.toml"},
        ("absent.profile.toml: no such file", "no shipped profile of this name; shipped are"),
    ),
    "missing-profile-of-the-job": (
        lambda s, n: s.entry(n, profile={"path": str(s.directory / "mistyped.profile.toml")}),
        ("mistyped.profile.toml: no such file",),
    ),
    "profile-to-use-and-to-keep": (
        lambda s, n: s.entry(n, profile={"path": str(s.profile), "save_as": "kept.toml"}),
        ("save_as",),
    ),
    "nothing-to-resume": (
        lambda s, n: {**s.entry(n), "resume": "latest"},
        ("no whole checkpoint to resume from", "start without --resume"),
    ),
    "resume-missing-file": (
        lambda s, n: {**s.entry(n), "resume": str(s.directory / "absent.h5")},
        ("absent.h5: no such checkpoint", "--resume latest"),
    ),
    "resume-other-model": (
        lambda s, n: s.resumed(n, model={"path": str(s.model("deeper", blocks=3))}, profile={"path": ""}),
        ("checkpoint of another model", "it lacks 'model.layers.2.", "resume with the job that wrote it"),
    ),
    "resume-other-seed": (lambda s, n: s.resumed(n, train={"seed": 8}), ("[train] seed = 7", "says 8", "set it back")),
    "resume-other-batch": (
        lambda s, n: s.resumed(n, train={"global_batch": 2}),
        ("[train] global_batch = 4", "says 2", "set it back"),
    ),
    "resume-beyond-the-end": (
        lambda s, n: s.resumed(n, train={"steps": 2}),
        ("after step 4", "[train] steps = 2", "raise it"),
    ),
    "infinite-weights": (
        infinite_weights,
        ("step 1: the loss is nan", "there is no good checkpoint", "lower [train] learning_rate"),
    ),
    "run-directory-link": (
        linked_run,
        ("run directory", "checkpoints is a link that leads out of it, to", "Remove the link"),
    ),
    "shard-cache-link": (
        linked_cache,
        ("[model] shard_cache = \"away/cache\"", "leads out of the job file's directory", "absolute path"),
    ),
    "run-directory-in-use": (
        lambda s, n: s.entry(n),
        ("one run at a time", f"process {os.getpid()}", "--run-dir"),
    ),
    "long-sequences": (
        lambda s, n: s.entry(n, data={"sequence_length": 100}),
        ("[data] sequence_length = 100", "positions for 64 tokens", "shorten"),
    ),
    "no-such-device": (
        lambda s, n: s.entry(n, cluster={"device": "cuda"}, profile={"path": ""}),
        ("device 'cuda' is asked for", "offers cpu", 'set device = "auto"'),
    ),
    "damaged-before-loading": (damaged_elsewhere, ("rank 0 on ", "damaged-before-loading-model/model.safetensors")),
}  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("bad-input"))


@pytest.fixture(scope="module")
def outcomes(scene: Scene) -> dict[str, Outcome]:
    entries = {"good": {**scene.entry("good"), "run_dir": scene.good_run}}
    entries |= {name: make(scene, name) for name, (make, _) in CASES.items()}
    entries["learning-rate"] = {
        **scene.resumed("learning-rate", train={"steps": 20, "learning_rate": 1e30}),
        "resume": checkpoint_path(scene.good_run / "checkpoints", 3),
        "run_dir": scene.directory / "learning-rate-run",
    }
    entries["lost"] = {
        **scene.resumed("lost", train={"steps": 9}),
        "resume": checkpoint_path(scene.good_run / "checkpoints", 3),
        "run_dir": scene.directory / "lost-run",
        "breaks": "loss_is_no_number_in_step_2",
    }
    entries["damaged-newest"] = {
        **scene.resumed("damaged-newest", train={"steps": 5}),
        "damage": checkpoint_path(scene.good_run / "checkpoints", 4),
    }
    entries["damaged-named"] = {
        **scene.resumed("damaged-named"),
        "resume": checkpoint_path(scene.good_run / "checkpoints", 2),
        "damage": checkpoint_path(scene.good_run / "checkpoints", 2),
    }
    entries["good-again"] = scene.entry("good-again")
    with ExitStack() as stack:
        stack.enter_context(claim(scene.directory / "run-directory-in-use-run"))
        return scene.run_entries(2, entries)


def check_ended_together(outcome: Outcome, parts: tuple[str, ...]) -> None:
    assert outcome.raised == ("CollectiveUserError",) * 2, outcome
    assert outcome.codes == (2, 2)
    assert outcome.texts[0] == outcome.texts[1]
    for part in parts:
        assert part in outcome.texts[0]
    assert "Traceback" not in outcome.texts[0]
    assert outcome.printed_elsewhere == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_all_ranks_with_a_clear_text_np2(outcomes: dict[str, Outcome], name: str) -> None:
    if name == "no-such-device" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    check_ended_together(outcomes[name], CASES[name][1])


@pytest.mark.slow
def test_a_good_job_runs_before_and_after_all_the_bad_ones_np2(outcomes: dict[str, Outcome], scene: Scene) -> None:
    for name in ("good", "good-again"):
        assert outcomes[name].raised == ("", ""), outcomes[name]
    first, again = (read_metrics(run / "metrics.jsonl") for run in (scene.good_run, scene.directory / "good-again-run"))
    assert len(again.steps) == 4
    # The resumed run has written lines of its own over those of its steps.
    assert [step.loss for step in first.steps][:4] == [step.loss for step in again.steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [("lost", "step 5: the loss is nan"), ("learning-rate", "gradients were not finite in 10 steps in a row, ")],
)
def test_a_lost_run_names_step_and_last_good_checkpoint_np2(
    outcomes: dict[str, Outcome], scene: Scene, name: str, cause: str
) -> None:
    # Step 4 was good, so the checkpoint it started from is; whether the one written after it is, nobody knows.
    good = checkpoint_path(scene.good_run / "checkpoints", 3)
    parts = (cause, f"the last good checkpoint is {good}", f"--resume {good}", "learning_rate")
    check_ended_together(outcomes[name], parts)
    lines = (scene.directory / f"{name}-run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["non_finite"] is True


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_a_remark_np2(outcomes: dict[str, Outcome], scene: Scene) -> None:
    outcome = outcomes["damaged-newest"]
    assert outcome.raised == ("", ""), outcome
    newest, used = (checkpoint_path(scene.good_run / "checkpoints", step) for step in (4, 3))
    assert f"passed over {newest}" in outcome.printed
    assert f"Resuming from {used}, after step 3" in outcome.printed
    named = checkpoint_path(scene.good_run / "checkpoints", 2)
    check_ended_together(outcomes["damaged-named"], (str(named), "damaged", "Resume from an older checkpoint"))


def test_a_person_sees_the_problems_once_and_nothing_else_np2(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npath = "nowhere"\n[data]\ntext = ["*.txt"]\n[train]\nstepz = 3\nglobal_batch = 0\n')
    result = run_mpi(2, ["-m", "hetero_mpi", "train", str(job)])
    assert result.returncode == 2
    assert result.stdout == ""
    for part in ("[train] stepz = 3", "did you mean 'steps'?", "[train] global_batch = 0"):
        assert result.stderr.count(part) == 1, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_person_sees_why_a_run_was_lost_np2(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    entry = infinite_weights(scene, "lost")
    result = run_mpi(2, ["-m", "hetero_mpi", "train", str(entry["job"]), "--run-dir", str(entry["run_dir"])])
    assert result.returncode == 2
    assert (result.stdout + result.stderr).count("step 1: the loss is nan; there is no good checkpoint") == 1
    assert "Traceback" not in result.stderr and "MPI_A" not in result.stderr, "nobody had to abort"


@pytest.mark.slow
def test_an_unexpected_error_on_one_rank_ends_all_np3(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    job = workshop.job("job", workshop.values(workshop.model()), plan={"allow_idle": False})  # rank 1 has a stage
    profile = write_profile(tmp_path / "profile.toml", job, 3)
    entry = {"job": job, "profile": profile, "run_dir": tmp_path / "run", "breaks": "forward_fails_on_rank_1"}
    (tmp_path / "list.json").write_text(json.dumps([entry], default=str))
    arguments = ["tests/programs/train_outcomes.py", str(tmp_path / "list.json"), str(tmp_path / "out.json")]
    result = run_mpi(3, arguments, timeout_s=60)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert output.count("rank 1/3 on ") == output.count("failed while training step 2:") == 1, output
    assert output.count("Traceback") == output.count("RuntimeError: the device fell off the bus") == 1
    assert not (tmp_path / "run" / "model").exists()


_FAILS = """
import sys

def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "{name}":
        sys.setprofile(None)
        raise RuntimeError("here")

sys.setprofile(enter)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("find_start", "starting"), ("find_reference", "building the stages")])
def test_a_rank_that_fails_before_the_first_step_names_its_action(tmp_path: Path, name: str, told: str) -> None:
    workshop = Workshop(tmp_path)
    job = workshop.job("job", workshop.values(workshop.model()))
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails" / "sitecustomize.py").write_text(_FAILS.format(name=name))
    words = ["train", str(job), "--run-dir", str(tmp_path / "run")]
    words += ["--profile", str(write_profile(tmp_path / "profile.toml", job, 1))]
    paths = f"{tmp_path / 'fails'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = run_bounded([sys.executable, "-m", "hetero_mpi", *words], environment, 120)
    assert result.returncode == 1 and f"failed while {told}:\n" in result.stderr, result.stderr


@pytest.mark.slow
def test_a_rank_without_memory_ends_all_and_says_what_to_change_np2(tmp_path: Path) -> None:
    """Rank 1's process may grow no more from its second step on: a limit of the kernel, met by torch's own allocator."""
    workshop = Workshop(tmp_path)
    # Activations of 12 MB, of which a forward makes more than a C library keeps for later use.
    values = workshop.values(workshop.model(intermediate_size=1 << 15))
    job = workshop.job("job", values, train={"micro_batch": GLOBAL_BATCH})
    stages = (StagePlan((0,), 0, 1, 0), StagePlan((1,), 1, LAYERS, 0))
    plan = Plan((PipelinePlan(stages, GLOBAL_BATCH, GLOBAL_BATCH),), GLOBAL_BATCH, SEQUENCE, LAYERS)
    save_plan(plan, tmp_path / "plan.toml")
    entry = {
        "job": job,
        "run_dir": tmp_path / "run",
        "plan": tmp_path / "plan.toml",
        "profile": write_profile(tmp_path / "profile.toml", job, 2),
        "breaks": "memory_is_limited_on_rank_1",
    }
    (tmp_path / "list.json").write_text(json.dumps([entry], default=str))
    arguments = ["tests/programs/train_outcomes.py", str(tmp_path / "list.json"), str(tmp_path / "out.json")]
    result = run_mpi(2, arguments, timeout_s=120)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    # Mostly its forward; backward where that still found what an earlier step had left.
    assert len(re.findall(r"ran out of memory in 1[FB]0 \(step 2\): ", output)) == 1, output
    for part in (
        "rank 1/2 on ",
        "were used at the peak",
        " predicted of ",
        "[train] micro_batch",
        "[plan] memory_reserve",
    ):
        assert part in output, output
    assert "Traceback" not in output
