"""A start into the directory of a run that is refused, or has nothing to do, leaves every byte and every time there as it was."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.planning.types.toml_files import load_plan, load_profile, save_plan, save_profile
from hetero_mpi.state.directory import checkpoint_path
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Outcome, Workshop
from tests.support.mpi import ROOT, run_bounded

pytestmark = pytest.mark.slow

RANKS = 3


def fingerprint(directory: Path) -> dict[str, tuple[str, int]]:
    """Every file and directory -> its content's hash and the time of its last change."""
    found = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(directory))] = hashlib.sha256(content).hexdigest(), path.stat().st_mtime_ns
    return found


class Scene(Workshop):
    """A run of four steps that has come to its end, and its copy whose checkpoints are damaged."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run, self.broken = directory / "run", directory / "broken"
        self.good = self.job("good", self.values(self.model()))
        self.outcome = self.run_entries(RANKS, {"good": {"job": self.good, "run_dir": self.run}})["good"]
        shutil.copytree(self.run, self.broken)
        for path in (self.broken / "checkpoints").iterdir():
            path.write_bytes(path.read_bytes()[:-100])
        narrow = load_profile(self.run / "profile.toml")
        self.narrow = directory / "narrow.toml"
        save_profile(replace(narrow, model=replace(narrow.model, sequence_length=8)), self.narrow)
        plan = load_plan(self.run / "plan.toml")
        self.active = plan.ranks[-1]
        self.wrong_plan = directory / "wrong.plan.toml"
        save_plan(replace(plan, global_batch=2 * GLOBAL_BATCH), self.wrong_plan)

    def changed(
        self, name: str, run: Path | None = None, more: dict[str, Any] | None = None, **tables: Any
    ) -> dict[str, Any]:
        """An entry: the good job with changes, into the run's directory. ``more``: further options."""
        made = self.entry(name, self.values(self.model()), more, **tables)
        return {**made, "run_dir": run or self.run}

    def resumed(self, name: str, **tables: Any) -> dict[str, Any]:
        """As ``changed``, from the newest checkpoint."""
        return self.changed(name, more=RESUMED, **tables)


RESUMED = {"resume": "latest"}
REFUSED: dict[str, tuple[Callable[[Scene, str], dict[str, Any]], str]] = {
    "fewer-steps": (lambda s, n: s.resumed(n, train={"steps": 3}), "written after step 4"),
    "other-seed": (lambda s, n: s.resumed(n, train={"seed": 8}), "[train] seed = 7"),
    "other-length": (lambda s, n: s.resumed(n, data={"sequence_length": 16}), "sequence_length = 24"),
    "other-data": (
        lambda s, n: s.resumed(n, train={"steps": 6}, data={"evaluation_fraction": 0.2}),
        "was written with different data",
    ),
    "other-model": (
        lambda s, n: s.resumed(n, model={"path": str(s.model("deeper", blocks=3))}, train={"steps": 6}),
        "checkpoint of another model",
    ),
    "other-model-of-a-finished-run": (
        lambda s, n: s.resumed(n, model={"path": str(s.model("wider", hidden_size=64))}),
        "checkpoint of another model",
    ),
    "damaged": (lambda s, n: s.changed(n, run=s.broken, more=RESUMED), "no valid checkpoint to resume from"),
    "no-such-checkpoint": (
        lambda s, n: s.changed(n, more={"resume": str(s.directory / "no.h5")}),
        "no such checkpoint",
    ),
    "no-model": (lambda s, n: s.changed(n, model={"path": str(s.directory / "absent")}), "absent"),
    "no-data": (lambda s, n: s.changed(n, data={"text": [str(s.directory / "absent.txt")]}), "absent.txt"),
    "no-adapter": (
        lambda s, n: s.changed(n, adapter={"method": "lora", "path": str(s.directory / "absent")}),
        "absent",
    ),
    "no-memory": (lambda s, n: s.changed(n, cluster={"memory_bytes": 100_000}), "memory"),
    "no-memory-when-tried": (
        lambda s, n: s.changed(
            n,
            profile={"calibrate": True},
            more={"breaks": "memory_lacks_in_the_trial", "rank": s.active, "times": 9, "plan": s.run / "plan.toml"},
        ),
        "ran out of memory in",
    ),
    "wrong-plan": (lambda s, n: s.changed(n, more={"plan": s.wrong_plan}), "does not fit this job"),
    "no-plan": (lambda s, n: s.changed(n, more={"plan": s.directory / "absent.toml"}), "absent.toml"),
    "wrong-profile": (lambda s, n: s.changed(n, more={"profile": s.narrow}), "8 tokens per sequence"),
    "its-own-files": (lambda s, n: s.changed(n, model={"path": str(s.run / "model")}), "this run reads"),
    "cannot-load": (lambda s, n: s.changed(n, more={"breaks": "loading_fails", "rank": s.active}), "the shelf is full"),
    "cannot-load-to-resume": (
        lambda s, n: s.changed(n, more={**RESUMED, "breaks": "loading_fails", "rank": s.active}, train={"steps": 6}),
        "the shelf is full",
    ),
    "cannot-load-an-earlier-one": (
        lambda s, n: s.changed(
            n, more={"resume": checkpoint_path(s.run / "checkpoints", 2), "breaks": "loading_fails", "rank": s.active}
        ),
        "the shelf is full",
    ),
}
UNCHANGED: dict[str, tuple[Callable[[Scene, str], dict[str, Any]], str]] = {
    "finished": (lambda s, n: s.changed(n, more=RESUMED), "the run is already finished: all 4 steps"),
    "finished-by-name": (
        lambda s, n: s.changed(n, more={"resume": checkpoint_path(s.run / "checkpoints", 4)}),
        "the run is already finished",
    ),
    "finished-otherwise": (
        lambda s, n: s.resumed(n, train={"learning_rate": 0.123}),
        "[train] learning_rate is 0.123, was ",
    ),
    "finished-or-anew": (lambda s, n: s.changed(n, more={"resume": "any"}), "the run is already finished"),
    "dry": (lambda s, n: s.changed(n, more={"dry_run": True}), "holds a run and is unchanged"),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("refused"))


@pytest.fixture(scope="module")
def outcomes(scene: Scene) -> tuple[dict[str, Outcome], list[dict[str, tuple[str, int]]]]:
    """How all starts ended; the two directories before and after them."""
    entries = {name: make(scene, name) for name, (make, _) in {**REFUSED, **UNCHANGED}.items()}
    before = [fingerprint(scene.run), fingerprint(scene.broken)]
    found = scene.run_entries(RANKS, entries, 400)
    return found, [*before, fingerprint(scene.run), fingerprint(scene.broken)]


def test_nothing_is_written(outcomes: tuple[dict[str, Outcome], list[dict[str, tuple[str, int]]]]) -> None:
    _, (run, broken, run_after, broken_after) = outcomes
    changed = {name for name in {*run, *run_after} if run.get(name) != run_after.get(name)}
    assert not changed and broken == broken_after


@pytest.mark.parametrize("name", [*REFUSED, *UNCHANGED])
def test_the_reason_is_said_and_nothing_to_do_is_no_error(name: str, outcomes: tuple[dict[str, Outcome], Any]) -> None:
    outcome, refused = outcomes[0][name], name in REFUSED
    assert set(outcome.codes) == {2 if refused else 0}, outcome
    assert {**REFUSED, **UNCHANGED}[name][1] in (outcome.texts[0] if refused else outcome.printed), outcome


HEADER = ("fewer-steps", "other-seed", "other-length", "finished", "no-such-checkpoint")
"""Told by the header of the checkpoint, before devices and data are looked at."""


@pytest.mark.parametrize("name", [*HEADER, "other-data", "other-model", "damaged"])
def test_checkpoints_are_looked_at_before_anything_is_measured(
    name: str, outcomes: tuple[dict[str, Outcome], Any]
) -> None:
    printed = outcomes[0][name].printed
    assert "Profil" not in printed and not (name in HEADER and "hetero_mpi" in printed)


def test_a_supervised_start_with_nothing_to_do_leaves_all_as_it_was(scene: Scene, outcomes: Any) -> None:
    """Real processes, which end, with a supervisor that notes what happens."""
    before = fingerprint(scene.run)
    words = ["launch", "-np", "2", "--elastic", "--", "train", str(scene.good), "--run-dir", str(scene.run), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = run_bounded([sys.executable, "-m", "hetero_mpi", *words], environment, 240)
    assert result.returncode == 0 and "already finished" in result.stdout, result.stdout + result.stderr
    assert fingerprint(scene.run) == before


def test_a_result_that_is_missing_is_written_all_the_same(scene: Scene, outcomes: Any) -> None:
    copy = scene.directory / "without-result"
    shutil.copytree(scene.run, copy)
    shutil.rmtree(copy / "model")
    outcome = scene.run_entries(RANKS, {"again": {"job": scene.good, "run_dir": copy, "resume": "latest"}})["again"]
    assert set(outcome.codes) == {0} and "already finished" not in outcome.printed
    assert (copy / "model" / "config.json").exists()


def test_more_steps_go_on(scene: Scene, outcomes: Any) -> None:
    copy = scene.directory / "further"
    shutil.copytree(scene.run, copy)
    entry = {"job": scene.good, "run_dir": copy, "resume": "latest", "set": ["train.steps=5"]}
    outcome = scene.run_entries(RANKS, {"further": entry})["further"]
    assert set(outcome.codes) == {0} and "step 5/5" in outcome.printed
    log = (copy / "logs" / "rank-0000.log").read_text()
    assert log.startswith((scene.run / "logs" / "rank-0000.log").read_text())
    assert log.count("Resuming from") == 1, "lines that waited are written once the start is accepted"
    assert SEQUENCE == 24


def test_an_adapter_goes_on_over_its_base_in_the_same_form_and_other_places_are_told(scene: Scene) -> None:
    lora, values, run = {"method": "lora", "rank": 2}, scene.values(scene.model()), scene.directory / "lora"
    other = shutil.copytree(scene.model(), scene.directory / "moved")
    first = scene.job("lora", values, adapter=lora, train={"steps": 2})
    packed = scene.job("packed", values, adapter=lora, model={"quantization": "nf4"})
    changed = {"adapter": {**lora, "dropout": 0.5}, "train": {"micro_batch": 2}}
    moved = scene.job("elsewhere", values, model={"path": str(other)}, **changed)
    resumed = {"run_dir": run, "resume": "latest"}
    entries = {"first": {"job": first, "run_dir": run}, "packed": {"job": packed, **resumed}}
    entries["other-masks"] = {"job": moved, **resumed, "plan": run / "plan.toml"}
    outcomes = scene.run_entries(1, {**entries, "moved": {"job": moved, **resumed}})
    assert outcomes["first"].codes == (0,), outcomes["first"]
    assert '[model] quantization = "none", but this job has "nf4"' in outcomes["packed"].texts[0], outcomes["packed"]
    told = f'From step 3 on, [adapter] dropout is 0.5, was 0.0; [model] path is "{other}", was "{scene.model()}"'
    assert outcomes["moved"].codes == (0,) and told in outcomes["moved"].printed, outcomes["moved"]
    assert "dropout masks are drawn for 2 sequences at a time, previously 1" in outcomes["moved"].printed
    assert outcomes["other-masks"].codes == (2,), outcomes["other-masks"]
    assert "[train] micro_batch = 1" in outcomes["other-masks"].texts[0], outcomes["other-masks"]
