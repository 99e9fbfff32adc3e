"""A model of which a layer is larger than every rank is trained by two ranks together, as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.planning.types.toml_files import load_report
from hetero_mpi.report.run_files.metrics import read_metrics
from tests.support.small_jobs import Workshop
from tests.training.test_equality import IN_GROUPS

WORDS = 20_000
ENOUGH, LITTLE = 10**9, 10_700_000
"""Bytes of a rank. Embedding and head are one matrix of 640,000 numbers, in all 12.8 MB with gradients and moments."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("grouped"))


def entry(workshop: Workshop, name: str, memory_bytes: int, **plan: Any) -> dict[str, Any]:
    values = workshop.values(workshop.model("words", tied=True, vocab_size=WORDS, num_key_value_heads=2))
    tables = {
        "cluster": {"memory_bytes": memory_bytes},
        "plan": {"pipelines": "auto", **plan},
        "train": {"global_batch": 1},
    }
    return {"job": workshop.job(name, values, **tables), "run_dir": workshop.directory / name}


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_metrics(folder / "metrics.jsonl").steps]


def test_a_layer_larger_than_every_rank_is_trained_by_two_of_them_np2(workshop: Workshop) -> None:
    named = {
        "refused": entry(workshop, "refused", LITTLE, groups=False, stream=False),
        "grouped": entry(workshop, "grouped", LITTLE),
    }
    outcomes = workshop.run_entries(2, named)
    assert outcomes["refused"].raised == ("CollectiveUserError",) * 2, outcomes["refused"]
    assert "the model does not fit in memory on these ranks" in outcomes["refused"].texts[0]
    assert outcomes["grouped"].raised == ("",) * 2, outcomes["grouped"]
    report = load_report(workshop.directory / "grouped" / "plan.toml")
    assert [stage.ranks for _, _, stage in report.plan.numbered] == [(0, 1)]
    assert "no plan without ranks that hold a stage together fits in memory" in report.reasons
    alone = workshop.run_entries(1, {"alone": entry(workshop, "alone", ENOUGH)})
    assert alone["alone"].raised == ("",), alone
    expected, found = (losses(workshop.directory / name) for name in ("alone", "grouped"))
    assert found == pytest.approx(expected, rel=IN_GROUPS) and len(set(expected)) == 4
