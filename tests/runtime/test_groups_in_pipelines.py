"""Groups of ranks in several pipelines, each with shares of its own, train as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import load_report, save_plan
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from tests.runtime.test_equality import IN_GROUPS, tensors
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Workshop, write_profile

pytestmark = pytest.mark.slow

RANKS, LAYERS = 4, 4


def pipeline(sequences: int, *stages: StagePlan) -> PipelinePlan:
    return PipelinePlan(stages, 1, sequences)


def plan(*pipelines: PipelinePlan) -> Plan:
    return Plan(pipelines, GLOBAL_BATCH, SEQUENCE, LAYERS)


def group(
    ranks: tuple[int, ...], shares: tuple[int, ...], first: int = 0, last: int = LAYERS, **more: Any
) -> StagePlan:
    return StagePlan(ranks, first, last, more.pop("warm_up", 0), shares=shares, **more)


PLANS = {
    "chain": plan(pipeline(4, *(StagePlan((rank,), rank, rank + 1, LAYERS - 1 - rank) for rank in range(RANKS)))),
    "unlike": plan(pipeline(3, group((0, 1), (3, 1))), pipeline(1, group((2, 3), (2, 2), state_weight=0.5))),
    "three": plan(pipeline(1, StagePlan((3,), 0, LAYERS, 0)), pipeline(3, group((0, 1, 2), (1, 1, 2)))),
    "staged": plan(
        pipeline(2, StagePlan((0,), 0, 2, 1), group((1, 2), (1, 3), 2)), pipeline(2, StagePlan((3,), 0, LAYERS, 0))
    ),
}
"""Of four ranks: one pipeline without groups; and two with groups of unlike shares, of unlike sizes, and of some layers only."""
ADAPTER = {"method": "lora", "rank": 4, "alpha": 8}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "tied": ({"tied": True}, {}),
    "dora": ({}, {"adapter": {**ADAPTER, "dora": True, "dropout": 0.2}}),
    "experts": ({**MIXTRAL, "tied": True}, {}),
    "nf4": (
        {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256},
        {"adapter": ADAPTER, "model": {"quantization": "nf4"}},
    ),
    "bf16": ({}, {"train": {"dtype": "bf16"}}),
}
"""Name -> (the model, tables of the job)."""
LIMITS = {"nf4": (IN_GROUPS, 1e-3), "bf16": (4e-3, 5e-2)}
"""How near losses and tensors are to those of one pipeline, where that is not as usual."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    found = Workshop(tmp_path_factory.mktemp("pipelines"))
    for name, one in PLANS.items():
        save_plan(one, found.directory / f"{name}.plan.toml")
    return found


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_metrics(folder / "metrics.jsonl").steps]


@pytest.mark.parametrize("case", CASES)
def test_groups_in_several_pipelines_train_as_one_process_and_resume_each_other_np4(
    workshop: Workshop, case: str
) -> None:
    """Each plan runs from the start, and goes on from the first checkpoint of the one before it."""
    config, tables = CASES[case]
    model = workshop.model(case, num_key_value_heads=4, **config)
    job = workshop.job(case, workshop.values(model), **tables)
    profile = write_profile(workshop.directory / f"{case}.made.toml", job, RANKS)

    def entry(name: str, resume: str | None = None) -> dict[str, Any]:
        from_step = checkpoint_path(workshop.directory / f"{case}-{resume}" / "checkpoints", 1) if resume else None
        run_dir = workshop.directory / (f"{case}-{name}" if resume is None else f"{case}-{resume}-{name}")
        return {
            "job": job,
            "profile": profile,
            "plan": workshop.directory / f"{name}.plan.toml",
            "run_dir": run_dir,
            "resume": from_step,
        }

    names = [name for name in PLANS if name != "staged" or "tied" not in config]  # a tied end is of no group
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    entries = {name: entry(name) for name in names} | {f"{a}-{b}": entry(b, a) for a, b in pairs}
    for name, outcome in workshop.run_entries(RANKS, entries).items():
        assert outcome.raised == ("",) * RANKS, (name, outcome)
    expected = losses(workshop.directory / f"{case}-chain")
    kept = tensors(workshop.directory / f"{case}-chain", 4)
    assert len(set(expected)) == 4
    limit, apart = LIMITS.get(case, (IN_GROUPS, 1e-4))
    for name in entries:
        folder = workshop.directory / f"{case}-{name}"
        assert load_report(folder / "plan.toml").plan.pipelines == PLANS[name.rpartition("-")[2]].pipelines
        own = losses(folder)
        assert own == pytest.approx(expected[-len(own) :], rel=limit), name
        found = tensors(folder, 4)
        assert found.keys() == kept.keys()
        for key, tensor in kept.items():
            assert np.linalg.norm(found[key] - tensor) <= apart * np.linalg.norm(tensor), (name, key)
