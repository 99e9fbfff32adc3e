"""Compiled blocks: one code for equal blocks, the bits of one stage in two, and eager blocks where the compiler fails."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer.compiled import CompiledForward
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import full_training
from hetero_mpi.planning.types.toml_files import load_profile
from hetero_mpi.profiling.bench import try_compiled_block
from hetero_mpi.profiling.benchmark_spec import BenchmarkSpec
from hetero_mpi.report.plan_text import eager_lines
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.reader import CheckpointReader
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.jobs import Workshop
from tests.support.planning_samples import make_profile
from tests.support.plans import pipeline, plan_of
from tests.support.stages import stage_of

ROWS, TOKENS = (4, 3, 1), 24
"""Sequences of the micro-batches, and their tokens."""
RECORDS = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)])
"""Positions of two packed records."""


def chain_of(blocks: int) -> TransformersChain:
    return TransformersChain(read_config({**tiny_keys("llama"), "num_hidden_layers": blocks}))


def stages_of(chain: TransformersChain, cuts: tuple[int, ...], kind: str, **options: Any) -> list[Stage]:
    table = AdapterTable(method="lora", rank=4, dropout=0.1 if kind == "dropout" else 0.0)
    tuning = None if kind == "full" else adapter_tuning(chain, table, kind == "nf4", True)
    start = SeededStart(3)
    return [stage_of(chain, a, b, Backend(), "fp32", start, 7, tuning, **options) for a, b in itertools.pairwise(cuts)]


def step(stages: list[Stage], packed: bool = False) -> dict[str, torch.Tensor]:
    """Losses of training and evaluation, and gradients, of three micro-batches."""
    results: dict[str, torch.Tensor] = {}
    for index, rows in enumerate(ROWS):
        tokens, targets = torch.randint(
            1, VOCABULARY, (2, rows, TOKENS), generator=torch.Generator().manual_seed(index)
        )
        positions = RECORDS.expand(rows, -1) if packed else None
        position = MicroBatch(index, 1, sum(ROWS[:index]), 100, positions)
        x = y = tokens
        for stage in stages:
            x = stage.forward(position, x, targets if stage.is_last else None)
            y = stage.evaluate(y, targets if stage.is_last else None, position)
        dy = None
        for stage in reversed(stages):
            dy = stage.backward(index, dy)
        results |= {f"loss {index}": x, f"evaluation {index}": y}
    gradients = {n: p.grad for stage in stages for n, p in stage.parameters.items() if p.grad is not None}
    return results | gradients


def assert_equal(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(results[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def compiler_counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "kind", "recompute"), [
    (2, "full", False), (2, "lora", True),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in ((4, "full", True), (4, "lora", False), (2, "nf4", False), (2, "dropout", True))),
])  # fmt: skip
def test_two_stages_have_the_bits_of_one(blocks: int, kind: str, recompute: bool) -> None:
    chain, end = chain_of(blocks), blocks + 2
    torch._dynamo.reset()
    compiler_counters().clear()
    whole = stages_of(chain, (0, end), kind, compiled=True, recompute=recompute)
    assert len(whole[0].compiled) == blocks
    results = step(whole)
    graphs = compiler_counters()["stats"]["unique_graphs"]
    assert graphs <= 6, "one sequence or several, training or evaluation, and with or without an input gradient"
    divided = stages_of(chain, (0, 1 + blocks // 2, end), kind, compiled=True, recompute=recompute)
    assert_equal(step(divided), results)
    counters = compiler_counters()
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    assert_equal(step(stages_of(chain, (0, end), kind, recompute=recompute)), results, 1e-5)
    assert not any(forward.failure for stage in (*whole, *divided) for forward in stage.compiled)


@pytest.mark.slow
def test_packed_records_are_computed_eagerly() -> None:
    chain = chain_of(2)
    eager = step(stages_of(chain, (0, 4), "full"), packed=True)
    assert_equal(step(stages_of(chain, (0, 4), "full", compiled=True), packed=True), eager)


def test_a_split_backward_keeps_its_blocks_eager() -> None:
    (stage,) = stages_of(chain_of(2), (0, 4), "full", compiled=True, split_backward=True)
    assert stage.deferred is not None and not stage.compiled


def test_a_plan_names_the_ranks_with_eager_blocks() -> None:
    profile = make_profile((1.0,) * 4)
    profile = replace(profile, devices=tuple(replace(device, compiled=device.rank < 3) for device in profile.devices))
    plan = plan_of(pipeline([0, 1, 3], [0, 1, 3, 4], schedule="split"), pipeline([2], [0, 4], streamed=True))
    assert [line.split(":")[0].strip() for line in eager_lines(plan, profile)] == ["ranks 1, 2"]


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.slow
def test_a_block_that_cannot_be_compiled_is_eager() -> None:
    block = _Branching()
    compiled = CompiledForward(block.forward, lambda: False)
    x = torch.ones(2, 3)
    assert torch.equal(compiled(x), x + 1) and compiled.failure
    assert torch.equal(compiled(-x), -x - 1)


@pytest.mark.slow
def test_a_trial_reports_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(1)
    subject = BenchmarkSpec(chain, full_training(chain), TrainTable(dtype="fp32", steps=1), 8, (1, 2), 1.0, 1, None)
    trial = try_compiled_block(subject, Backend(), compares=True)
    assert not trial.failure and min(trial.eager_s, trial.compiled_s) > 0
    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    trial = try_compiled_block(subject, Backend(), compares=True)
    assert trial.failure and not trial.faster and trial.compiled_s == 0


@pytest.mark.slow
def test_a_job_records_that_it_compiles(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    values = workshop.values(workshop.model())
    tables = {"train": {"compile": True}}
    run = workshop.entry("compiled", values, **tables)
    again = {**workshop.entry("eager", values, train={"compile": False, "steps": 5}), "run_dir": run["run_dir"]}
    eager = workshop.entry("auto", values)
    entries = {"auto": eager, "compiled": run, "again": {**again, "resume": "latest"}}
    outcomes = workshop.run_entries(2, entries, 1500, own_environment=True)
    assert all(outcome.codes == (0, 0) for outcome in outcomes.values()), outcomes
    assert "compile is false" in outcomes["again"].printed
    losses = {}
    for name, mode in (("auto", False), ("compiled", True)):
        folder = tmp_path / name
        with CheckpointReader(checkpoint_path(folder / "checkpoints", 4)) as reader:
            assert reader.metadata["job"]["train"]["compile"] is mode
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line][:4]
    assert losses["compiled"] == pytest.approx(losses["auto"], rel=1e-5)
    assert [device.compiled for device in load_profile(tmp_path / "auto" / "profile.toml").devices] == [False, False]
