"""Records packed into one sequence learn what they would learn with a sequence each: real runs of one and of three stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_mpi.rundir.metrics import read_metrics
from tests.support.jobs import Outcome, Workshop, write_profile
from tests.support.mpi import on_ranks

pytestmark = pytest.mark.slow

LENGTH = 96
RECORDS = [
    ("grass", "green"),
    ("sky", "blue and far"),
    ("two and two", "4"),
    ("why", "so it is"),
    ("snow", "white"),
] * 2
ROWS = 4
"""Sequences that they are packed into, all of which are one step."""


class Runs(Workshop):
    """Name -> a job that learns all records in every step, and is evaluated on them."""

    def __init__(self, directory: Path, ranks: int) -> None:
        super().__init__(directory)
        self.ranks = ranks
        records = directory / "records.jsonl"
        lines = ({"prompt": prompt, "completion": answer} for prompt, answer in RECORDS)
        records.write_text("\n".join(map(json.dumps, lines)))
        self.written = self.values(self.model(blocks=2, tied=True, max_position_embeddings=LENGTH))
        self.written["data"] = {"records": [str(records)], "evaluation": [str(records)], "template": "plain"}
        self.written["data"]["sequence_length"] = LENGTH
        self.written["train"]["steps"] = 3
        self.written["profile"]["path"] = str(directory / "profile.toml")
        self.written["train"].pop("micro_batch")
        write_profile(directory / "profile.toml", self.job("profiled", self.written), ranks)
        self.entries = {
            "isolated": self.entry("isolated", ROWS),
            "longest": self.entry("longest", ROWS, pad="longest"),
            "slices": self.entry("slices", ROWS, stage={"streamed": True, "slice_sequences": 1}),
            "recompute": self.entry("recompute", ROWS, stage={"recompute": True}),
            "apart": self.entry("apart", len(RECORDS), packing=False),
            "seen": self.entry("seen", ROWS, isolate=False),
        }

    def entry(self, name: str, rows: int, stage: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
        plan = self.plan(name, self.ranks, rows, LENGTH, **(stage or {}))
        job = self.job(name, self.written, data=data, train={"global_batch": rows})
        return {"job": job, "run_dir": self.run(name), "plan": plan}

    def run(self, name: str) -> Path:
        return self.directory / name

    def numbers(self, name: str) -> np.ndarray:
        """Losses, gradient norms and the last held-out loss."""
        metrics = read_metrics(self.run(name) / "metrics.jsonl")
        steps = [value for step in metrics.steps for value in (step.loss, step.grad_norm)]
        return np.array([*steps, metrics.evaluations[-1].loss])


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[int, tuple[Runs, dict[str, Outcome]]] = {}

    def run(ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        if ranks not in done:
            runs = Runs(tmp_path_factory.mktemp(f"np{ranks}"), ranks)
            done[ranks] = runs, runs.run_entries(ranks, runs.entries)
        return done[ranks]

    return run


@on_ranks(1, 3)
@pytest.mark.parametrize("name", ["isolated", "longest", "slices", "recompute"])
def test_isolated_records_learn_what_they_learn_apart(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    for run in (name, "apart", "seen"):
        assert outcomes[run].raised == ("",) * ranks, outcomes[run].texts
    assert f"{len(RECORDS)} records of" in outcomes[name].printed and f"in {ROWS} sequences" in outcomes[name].printed
    np.testing.assert_allclose(runs.numbers(name), runs.numbers("apart"), rtol=1e-6)
    assert np.abs(runs.numbers("seen") / runs.numbers("apart") - 1).max() > 1e-3
