"""A job whose model is larger than its ranks' memory is streamed, and gives the bits of one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.checkpoint import checkpoint_path
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import load_plan, save_plan
from hetero_mpi.report.run_files.metrics import read_metrics
from tests.support.small_jobs import Outcome, Workshop

MEMORY = 3_000_000
"""Bytes of each of two ranks: too few for half of the model's 5 MB."""
ADAPTER = {"method": "lora", "rank": 2, "dropout": 0.1}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("streamed"))


def entry(workshop: Workshop, name: str, memory_bytes: int, table: dict[str, Any], **more: Any) -> dict[str, Any]:
    model = workshop.model("wide", 8, hidden_size=128, intermediate_size=384)
    values = workshop.values(model)
    tables = {"adapter": ADAPTER, "cluster": {"memory_bytes": memory_bytes}, "plan": table}
    return {"job": workshop.job(name, values, **tables), "run_dir": workshop.directory / name, **more}


def run(workshop: Workshop, **entries: dict[str, Any]) -> dict[str, Outcome]:
    return workshop.run_entries(2, entries)


def losses(workshop: Workshop, name: str) -> list[float]:
    return [step.loss for step in read_metrics(workshop.directory / name / "metrics.jsonl").steps]


def without_streaming(plan: Plan, path: Path) -> Path:
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, streamed=False) for stage in pipeline.stages)
    save_plan(replace(plan, pipelines=(replace(pipeline, stages=stages),)), path)
    return path


def test_a_model_that_fits_in_no_other_way(workshop: Workshop) -> None:
    found = run(
        workshop,
        streamed=entry(workshop, "streamed", MEMORY, {}),
        refused=entry(workshop, "refused", MEMORY, {"stream": False}),
    )
    assert found["streamed"].codes == (0, 0), found["streamed"].texts[0]
    assert "does not fit in memory" in found["refused"].texts[0]
    plan = load_plan(workshop.directory / "streamed" / "plan.toml")
    assert any(stage.streamed for stage in plan.pipelines[0].stages)
    assert "streams" in found["streamed"].printed and "from mapped files" in found["streamed"].printed

    resident = without_streaming(plan, workshop.directory / "resident.plan.toml")
    half = checkpoint_path(workshop.directory / "streamed" / "checkpoints", 2)
    roomy = 100 * MEMORY
    others = run(
        workshop,
        resident=entry(workshop, "resident", roomy, {}, plan=resident),
        resumed=entry(workshop, "resumed", roomy, {}, plan=resident, resume=half),
    )
    assert {outcome.codes for outcome in others.values()} == {(0, 0)}, others
    assert losses(workshop, "streamed") == losses(workshop, "resident")
    assert losses(workshop, "streamed")[2:] == losses(workshop, "resumed")
