"""A streamed stage gives the bits of a resident one that computes in slices as large."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.tuning import Tuning
from tests.model.test_all_families import UNLIKE
from tests.model.test_split_backward import NormalStart, chain_of
from tests.support.errors import refuses
from tests.support.family_configs import VOCABULARY, dropout_rates
from tests.support.mpi import ROOT
from tests.support.stages import stage_of, streamed_stage_of
from tests.support.tiers import slow_unless

ROWS, SLICE, TOKENS = (4, 4, 3), 2, 24
"""Sequences of the micro-batches, of which the last is short; sequences of a slice; tokens of a sequence."""
LORA = AdapterTable(method="lora", rank=4, alpha=8.0)


def build(
    chain: TransformersChain,
    streamed: tuple[bool, ...],
    tuning: Tuning | None,
    dtype: str,
    folder: Path | None,
    kept: int = 0,
) -> list[Stage]:
    """One stage for each entry of ``streamed``, with as many layers each as there are. ``kept``: slices that streamed ones keep."""
    cuts = [round(i * chain.layer_count / len(streamed)) for i in range(len(streamed) + 1)]
    found: list[Stage] = []
    for i, is_streamed in enumerate(streamed):
        given: Any = chain, cuts[i], cuts[i + 1], Backend(), dtype, NormalStart(), 7, tuning
        found.append(
            streamed_stage_of(*given, slice_sequences=SLICE, kept_slices=kept, folder=folder)
            if is_streamed
            else stage_of(*given, recompute=True, slice_sequences=SLICE)
        )
    return found


def step(stages: list[Stage]) -> dict[str, torch.Tensor]:
    """Losses, gradients and the inputs' gradients of a step; the trained values after it; the loss of held-out rows."""
    optimizers = [Optimizer(stage, TrainTable(steps=1)) for stage in stages]
    found: dict[str, torch.Tensor] = {}
    batches = []
    for index, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(index)
        tokens, targets = torch.randint(1, VOCABULARY, (2, rows, TOKENS), generator=generator)
        targets[0, 3:7] = IGNORED
        batches.append((MicroBatch(index, 4, sum(ROWS[:index]), 200), tokens, targets))
    for position, x, targets in batches:
        for stage in stages:
            x = stage.forward(position, x, targets if stage.is_last else None)
        found[f"loss {position.index}"] = x
    for index in range(len(ROWS)):
        gradient: torch.Tensor | None = None
        for stage in reversed(stages):
            finished: list[int] = []
            gradient = stage.backward(index, gradient, finished.append if index == len(ROWS) - 1 else None)
            if gradient is not None:
                found[f"gradient {stage.first} {index}"] = gradient.clone()
            assert finished == sorted(finished, reverse=True)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        found |= {name: optimizer.gradient(name).clone() for name in optimizer.targets}
        optimizer.step(0, 1.0)
        found |= {f"{name} stepped": value.detach().clone() for name, value in stage.parameters.items()}
    x, targets = batches[0][1:]
    for stage in stages:
        x = stage.evaluate(x, targets if stage.is_last else None)
    return {**found, "held out": x}


def require_same_bits(
    chain: TransformersChain, tuning: Tuning | None, dtype: str, folder: Path | None, *streamed: bool
) -> None:
    resident = step(build(chain, (False,) * len(streamed), tuning, dtype, folder))
    assert any(tensor.norm() > 0 for name, tensor in resident.items() if "gradient" in name or "weight" in name)
    for kept in (0, 1, 2) if len(streamed) == 1 else (0, 1):
        found = step(build(chain, streamed, tuning, dtype, folder, kept))
        assert found.keys() == resident.keys()
        for name, tensor in resident.items():
            assert torch.equal(found[name], tensor), (
                f"{name}, {kept} kept: {(found[name] - tensor).norm() / tensor.norm()}"
            )


@pytest.mark.parametrize("family", UNLIKE)
def test_full_training_of_unlike_families(family: str) -> None:
    require_same_bits(chain_of(family), None, "fp32", None, True, True)


@pytest.mark.parametrize("streamed", [(True,), (True, False), (False, True), (True, True, True)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_neighbours_dtypes_tied_heads_and_dropout(streamed: tuple[bool, ...], dtype: str) -> None:
    tied = streamed[0] is (dtype == "fp32")
    chain = chain_of("granite", tie_word_embeddings=tied, **dropout_rates("granite"))
    require_same_bits(chain, None, dtype, None, *streamed)


@pytest.mark.parametrize(
    ("mapped", "dtype", "nf4"),
    [
        pytest.param(*case, marks=slow_unless(case in ((True, "bf16", True), (False, "fp32", False))))
        for case in itertools.product([False, True], ["fp32", "bf16"], [False, True])
    ],
)
def test_adapters_over_weights_in_mapped_files(mapped: bool, dtype: str, nf4: bool, tmp_path: Path) -> None:
    chain = chain_of("llama")
    tuning = adapter_tuning(chain, LORA.model_copy(update={"dropout": 0.1}), nf4, True)
    require_same_bits(chain, tuning, dtype, tmp_path if mapped else None, True, False, True)
    assert not list(tmp_path.iterdir()), "the files have no names"


def test_frozen_weights_are_in_mapped_files(tmp_path: Path) -> None:
    chain = chain_of("llama")
    stage = build(chain, (True,), adapter_tuning(chain, LORA, True, True), "bf16", tmp_path)[0]
    assert isinstance(stage, StreamedStage)
    frozen = {name: p.untyped_storage().data_ptr() for name, p in stage.model.named_parameters() if not p.requires_grad}
    blocks = {layer.block.untyped_storage().data_ptr() for layer in stage.weights.layers.values()}
    assert set(frozen.values()) == blocks and len(blocks) == chain.layer_count
    assert stage.weights.bytes >= sum(p.nbytes for p in stage.model.parameters() if not p.requires_grad)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chain = chain_of("llama")
    with refuses("offload.unwritable"):
        build(chain, (True,), adapter_tuning(chain, LORA, False, True), "fp32", tmp_path / "file")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by themselves")
def test_gradients_of_full_training_leave_the_process_on_a_cpu() -> None:
    program = textwrap.dedent("""
        from pathlib import Path
        from hetero_mpi.model.eager_imports import eager_imports

        with eager_imports():
            import torch
            from hetero_mpi.device.backend import Backend
            from hetero_mpi.job.training_tables import TrainTable
            from hetero_mpi.model.optimizer import Optimizer
            from hetero_mpi.model.stage import MicroBatch
            from tests.model.test_split_backward import NormalStart, chain_of
            from tests.support.stages import streamed_stage_of

        def resident():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

        torch.set_num_threads(1)
        chain = chain_of("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
        stage = streamed_stage_of(chain, 0, chain.layer_count, Backend(), "fp32", NormalStart())
        optimizer = Optimizer(stage, TrainTable(steps=2))
        before, tokens = resident(), torch.ones((1, 8), dtype=torch.int64)
        for step in range(2):
            stage.forward(MicroBatch(0, step, 0, 8), tokens, tokens)
            stage.backward(0)
            optimizer.end_step(step, 1.0)
        print(resident() - before, 4 * sum(p.numel() for p in stage.parameters.values()))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    grown, weights = map(int, done.stdout.split())
    assert grown < 2.3 * weights, "both moments, and nothing of the gradients"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves what they keep")
def test_freed_gradients_are_kept_for_the_next_step() -> None:
    program = """import psutil, torch; from hetero_mpi.device.backend import keep_freed_memory; keep_freed_memory()
before = psutil.Process().memory_info().rss
gradients = [torch.ones(5_000_000) for _ in range(10)]
while gradients: gradients.pop()
print(psutil.Process().memory_info().rss - before)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 100_000_000, "of 200 MB"
