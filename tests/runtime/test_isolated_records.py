"""Records packed into one sequence learn what they would learn with a sequence each: real runs of one and of three stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_mpi.rundir.metrics import read_metrics
from tests.support.jobs import Outcome, Workshop, once_per_ranks, write_profile
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
        packed = {"longest": {"pad": "longest"}, "seen": {"isolate": False}, "isolated": {}}
        stages = {"slices": {"streamed": True, "slice_sequences": 1}, "recompute": {"recompute": True}}
        self.entries = {name: self.made(name, ROWS, **data) for name, data in packed.items()}
        self.entries |= {name: self.made(name, ROWS, stage) for name, stage in stages.items()}
        self.entries["apart"] = self.made("apart", len(RECORDS), packing=False)

    def made(self, name: str, rows: int, stage: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
        plan = self.plan(name, self.ranks, rows, LENGTH, **(stage or {}))
        return self.entry(name, self.written, {"plan": plan}, data=data, train={"global_batch": rows})

    def numbers(self, name: str) -> np.ndarray:
        """Losses, gradient norms and the last held-out loss."""
        metrics = read_metrics(self.directory / name / "metrics.jsonl")
        steps = [value for step in metrics.steps for value in (step.loss, step.grad_norm)]
        return np.array([*steps, metrics.evaluations[-1].loss])


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(directory: Path, ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        runs = Runs(directory, ranks)
        return runs, runs.finish_entries(ranks, runs.entries)

    return once_per_ranks(tmp_path_factory, run)


@on_ranks(1, 3)
@pytest.mark.parametrize("name", ["isolated", "longest", "slices", "recompute"])
def test_isolated_records_learn_what_they_learn_apart(on: Any, ranks: int, name: str) -> None:
    runs, outcomes = on(ranks)
    assert f"{len(RECORDS)} records of" in outcomes[name].printed and f"in {ROWS} sequences" in outcomes[name].printed
    np.testing.assert_allclose(runs.numbers(name), runs.numbers("apart"), rtol=1e-6)
    assert np.abs(runs.numbers("seen") / runs.numbers("apart") - 1).max() > 1e-3
