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

from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import save_plan, save_profile
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.rundir.run_directory import claim
from hetero_mpi.state.directory import checkpoint_path
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Outcome, Workshop, write_profile
from tests.support.mpi import ROOT, run_bounded, run_mpi
from tests.support.planning_samples import make_model, make_profile
from tests.support.plans import pipeline, plan_of, write_plan

LAYERS = 4
"""Embedding, two blocks, head."""
Make = Callable[["Scene", str], dict[str, Any]] | dict[str, Any]
"""How a case's entry is made: a function, or keys of the job and of the entry; ``{here}``: the directory."""


class Scene(Workshop):
    """The files of all cases, good and bad."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.good_model = self.model()
        self.profile = write_profile(directory / "profile.toml", self.job("profiled", self.values(self.good_model)), 2)
        self.good_run = directory / "good-run"
        (directory / "little.txt").write_text("abc def\n")

    def good(self) -> dict[str, Any]:
        values = self.values(self.good_model)
        values["profile"]["path"] = str(self.profile)
        return values

    def changed(self, name: str, **tables: dict[str, Any]) -> dict[str, Any]:
        """The good job with some keys changed."""
        return {**self.entry(name, self.good(), **tables), "run_dir": self.directory / f"{name}-run"}

    def resumed(self, name: str, step: int | None = None, **tables: dict[str, Any]) -> dict[str, Any]:
        """Into the good run's directory; or from its checkpoint after ``step`` steps."""
        if step is None:
            return {**self.changed(name, **tables), "run_dir": self.good_run, "resume": "latest"}
        return {**self.changed(name, **tables), "resume": checkpoint_path(self.good_run / "checkpoints", step)}

    def planned(self, name: str, plan: Plan) -> dict[str, Any]:
        path = self.directory / f"{name}.plan.toml"
        save_plan(plan, path)
        return {**self.changed(name), "plan": path}

    def made(self, name: str) -> dict[str, Any]:
        """The entry of a case."""
        make = CASES[name][0]
        if callable(make):
            return make(self, name)
        keys = json.loads(json.dumps(make).replace("{here}", str(self.directory)))
        options = {key: keys.pop(key) for key in ("plan", "profile_file", "resume", "job") if key in keys}
        if "profile_file" in options:
            options["profile"] = options.pop("profile_file")
        return {**self.changed(name, **keys), **options}

    def with_model(self, name: str, damage: Callable[[Path], None], **tables: dict[str, Any]) -> dict[str, Any]:
        """The good job on a damaged copy of its model."""
        copy = shutil.copytree(self.good_model, self.directory / f"{name}-model")
        damage(copy)
        return self.changed(name, model={"path": str(copy)}, **tables)


def linked_run(scene: Scene, name: str) -> dict[str, Any]:
    """Somebody has left a link where checkpoints will be written."""
    entry = scene.changed(name)
    entry["run_dir"].mkdir()
    (entry["run_dir"] / "checkpoints").symlink_to(scene.directory)
    return entry


def linked_cache(scene: Scene, name: str) -> dict[str, Any]:
    """A relative path that a link leads elsewhere."""
    (scene.directory / "away").symlink_to("/")
    return scene.changed(name, model={"shard_cache": "away/cache"})


def two_stages(edges: tuple[int, ...], ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Plan:
    return replace(plan_of(pipeline(ranks, edges)), layers=LAYERS, **changes)


def deadlocking() -> Plan:
    plan = two_stages((0, 1, 4))
    stages = (replace(stage, warm_up=2 * place) for place, stage in enumerate(plan.pipelines[0].stages))
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))


WEIGHTS = "model.safetensors"


def truncate(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 100)


def corrupt_header(model: Path) -> None:
    content = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(content[:8] + b"\xff" * 12 + content[20:])


def lose_shard(model: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(model / WEIGHTS), "model-00001-of-00002.safetensors")}
    (model / WEIGHTS).unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def configure(**keys: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


def make_infinite(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], float("inf"))
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def empty_text(scene: Scene, name: str) -> dict[str, Any]:
    for number, content in enumerate((b"  \n", b"\xff\xfe\xff")):
        (scene.directory / f"useless-{number}.txt").write_bytes(content)
    return scene.changed(name, data={"text": [str(scene.directory / "useless-*.txt")]})


def named_profile(scene: Scene, name: str, ranks: int, blocks: int) -> dict[str, Any]:
    path = scene.directory / f"{name}.profile.toml"
    save_profile(make_profile((1.0,) * ranks, make_model(blocks)), path)
    return {**scene.changed(name), "profile": path}


def damaged_elsewhere(scene: Scene, name: str) -> dict[str, Any]:
    model = shutil.copytree(scene.good_model, scene.directory / f"{name}-model")
    os.truncate(model / WEIGHTS, 5000)
    both = scene.planned(name, two_stages((0, 2, 4)))  # on a busy machine the planner may leave rank 1 idle
    return {**both, "breaks": "model_is_elsewhere", "rank": 0, "elsewhere": model}


CASES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "unknown-keys": (
        {"train": {"stepz": 3, "learning_rate": "fast"}, "modle": {"path": "x"}, "data": {"packng": 1}},
        ("modle", "'[model]'", "[train] stepz = 3", "[train] steps = 3", '[train] learning_rate = "fast"',
         "[data] packng = 1", "[data] packing = "),
    ),
    "missing-job": ({"job": "{here}/absent.toml"}, ("absent.toml",)),
    "missing-model": ({"model": {"path": "{here}/lama-start"}}, ("lama-start", "llama-start")),
    "missing-tokenizer": ({"tokenizer": {"path": "{here}/no-tokenizer"}}, ("tokenizer.json", "no-tokenizer")),
    "no-tokenizer-in-model": ({"tokenizer": {"path": ""}}, ("holds no tokenizer", "tokenizer.train_vocab_size")),
    "no-file": ({"data": {"text": ["{here}/absent-*.txt"]}}, ("data.text must match a file", "absent-*.txt")),
    "no-usable-text": (empty_text, ("useless-0.txt: is empty", "useless-1.txt: is text in UTF-16, not UTF-8", "other files")),
    "little-text": ({"data": {"text": ["{here}/little.txt"]}},
                    ("at least 2 sequences of 24 tokens", "Add text", "sequence_length")),
    "truncated-weights": (lambda s, n: s.with_model(n, truncate),
         ("truncated-weights-model/model.safetensors", "Download it again")),
    "corrupt-header": (lambda s, n: s.with_model(n, corrupt_header),
         ("corrupt-header-model/model.safetensors", "header", "Download it again")),
    "missing-shard": (lambda s, n: s.with_model(n, lose_shard),
         ("1 of the 1 files", "model-00001-of-00002.safetensors", "Download them")),
    "unproven-family": (lambda s, n: s.with_model(n, configure(model_type="gpt2")), ("'gpt2'", "not supported", "llama")),
    "other-shapes": (lambda s, n: s.with_model(n, configure(intermediate_size=48), profile={"path": ""}),
         ("other-shapes-model", "mlp", "(32, 64)", "(32, 48)", "to two models")),
    "fits-nowhere": ({"cluster": {"memory_bytes": 100_000}},
                     ("does not fit in memory", "rank 0", "rank 1", "is short by", "B: it needs", "more ranks")),
    "plan-of-other-layers": (lambda s, n: s.planned(n, two_stages((0, 1, 3))),
         ("ends with layer 2", "the chain's last layer is 3")),
    "plan-of-other-rank": (lambda s, n: s.planned(n, two_stages((0, 1, 4), (0, 5))),
         ("names rank 5", "ranks 0 to 1")),
    "plan-of-other-batch": (
         lambda s, n: s.planned(n, replace(two_stages((0, 1, 4)), pipelines=(pipeline([0, 1], [0, 1, 4], 1, 3),))),
         ("plan-of-other-batch.plan.toml does not fit", "shares must add up to global_batch = 4", "omit it (--plan)")),
    "plan-of-other-length": (lambda s, n: s.planned(n, two_stages((0, 1, 4), sequence_length=16)),
         (f"sequence_length = 16: the job has {SEQUENCE}", "omit it (--plan)")),
    "plan-that-deadlocks": (lambda s, n: s.planned(n, deadlocking()),
         ("the schedule deadlocks", "rank 1 waits at 1RECV_F", "> rank 1", "omit it (--plan)")),
    "missing-plan": ({"plan": "{here}/absent.plan.toml"}, ("absent.plan.toml",)),
    "profile-of-3-ranks": (lambda s, n: named_profile(s, n, 3, 2),
         ("describes 3 ranks, this job has 2", "start 3 ranks")),
    "profile-of-other-model": (lambda s, n: named_profile(s, n, 2, 1),
         ("in 3 layers", "this job trains", "in 4: use another profile", "omit the profile to measure")),
    "missing-profile": ({"profile_file": "{here}/absent.profile.toml"},
                        ("absent.profile.toml: no such file", "no shipped profile of this name; shipped profiles:")),
    "missing-profile-of-the-job": ({"profile": {"path": "{here}/mistyped.profile.toml"}}, ("mistyped.profile.toml: no such file",)),
    "profile-to-use-and-to-keep": ({"profile": {"path": "{here}/profile.toml", "save_as": "kept.toml"}}, ("save_as",)),
    "nothing-to-resume": ({"resume": "latest"}, ("no valid checkpoint to resume from", "start without resuming")),
    "resume-missing-file": ({"resume": "{here}/absent.h5"}, ("absent.h5: no such checkpoint", "--resume latest")),
    "resume-other-model": (lambda s, n: s.resumed(n, model={"path": str(s.model("deeper", blocks=3))}, profile={"path": ""}),
         ("checkpoint of another model", "it lacks 'model.layers.2.", "resume with the job that wrote it")),
    "resume-other-seed": (lambda s, n: s.resumed(n, train={"seed": 8}), ("[train] seed = 7", "has 8", "old value")),
    "resume-other-batch": (lambda s, n: s.resumed(n, train={"global_batch": 2}),
         ("[train] global_batch = 4", "has 2", "old value")),
    "resume-beyond-the-end": (lambda s, n: s.resumed(n, train={"steps": 2}),
         ("after step 4", "[train] steps = 2", "raise it")),
    "infinite-weights": (lambda s, n: s.with_model(n, make_infinite),
         ("step 1: the loss is nan", "there is no good checkpoint", "lower [train] learning_rate")),
    "run-directory-link": (linked_run,
         ("its run directory", "checkpoints is a link to", "Remove the link")),
    "shard-cache-link": (linked_cache,
         ("[model] shard_cache = \"away/cache\"", "points outside the job file's directory", "absolute path")),
    "run-directory-in-use": ({}, ("one run at a time", f"process {os.getpid()}", "--run-dir")),
    "long-sequences": ({"data": {"sequence_length": 100}},
                       ("[data] sequence_length = 100", "positions for 64 tokens", "lower it")),
    "no-such-device": ({"cluster": {"device": "cuda"}, "profile": {"path": ""}},
                       ("device 'cuda' is not available", "supports cpu", 'set device = "auto"')),
    "damaged-before-loading": (damaged_elsewhere, ("rank 0 on ", "damaged-before-loading-model/model.safetensors")),
}  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("bad-input"))


@pytest.fixture(scope="module")
def outcomes(scene: Scene) -> dict[str, Outcome]:
    entries = {"good": {**scene.changed("good"), "run_dir": scene.good_run}}
    entries |= {name: scene.made(name) for name in CASES}
    entries["learning-rate"] = scene.resumed("learning-rate", 3, train={"steps": 20, "learning_rate": 1e30})
    entries["lost"] = {**scene.resumed("lost", 3, train={"steps": 9}), "breaks": "loss_is_no_number_in_step_2"}
    second, newest = (checkpoint_path(scene.good_run / "checkpoints", step) for step in (2, 4))
    entries["damaged-newest"] = {**scene.resumed("damaged-newest", train={"steps": 5}), "damage": newest}
    entries["damaged-named"] = {**scene.resumed("damaged-named"), "resume": second, "damage": second}
    entries["good-again"] = scene.changed("good-again")
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
    assert f"skipped {newest}" in outcome.printed
    assert f"Resuming from {used}, after step 3" in outcome.printed
    named = checkpoint_path(scene.good_run / "checkpoints", 2)
    check_ended_together(outcomes["damaged-named"], (str(named), "damaged", "Resume from an older checkpoint"))


def test_a_person_sees_the_problems_once_and_nothing_else_np2(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npath = "nowhere"\n[data]\ntext = ["*.txt"]\n[train]\nstepz = 3\nglobal_batch = 0\n')
    result = run_mpi(2, ["-m", "hetero_mpi", "train", str(job)])
    assert result.returncode == 2
    assert result.stdout == ""
    for part in ("[train] stepz = 3", "[train] steps = 3", "[train] global_batch = 0"):
        assert result.stderr.count(part) == 1, result.stderr
    assert "Traceback" not in result.stderr


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
    made = pipeline([0, 1], [0, 1, LAYERS], GLOBAL_BATCH)
    plan = write_plan(tmp_path / "plan.toml", replace(made, stages=tuple(replace(s, warm_up=0) for s in made.stages)))
    entry = {
        "job": job,
        "run_dir": tmp_path / "run",
        "plan": plan,
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
