"""Adafactor and Muon: the libraries' own steps, what they keep, and who counts it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.adapters.adapter_tuning import with_moments
from hetero_mpi.model.group.refusals import refusal
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.types.moments import FACTORED, ONE, TWO, moment_tensors, saved_bytes
from hetero_mpi.state.reader import verify
from hetero_mpi.state.writer import CheckpointWriter
from tests.engine.test_trainer import LENGTH
from tests.model.test_eight_bit import CHAIN, LAYOUTS, Threads, plan_of, take
from tests.support.checkpoint_samples import told
from tests.support.errors import refuses

OPTIMIZERS = "adafactor", "muon"
SHAPES = (40, 24), (24, 40), (3, 8, 16), (50,)


def tuned(optimizer: str) -> Tuning:
    return with_moments(full_training(CHAIN), CHAIN, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_have_the_bits_of_the_libraries_own(optimizer: str) -> None:
    torch.manual_seed(3)
    start = [torch.randn(shape) for shape in SHAPES]
    own, plain = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    matrices = [p.dim() == 2 for p in own]
    ways = [FACTORED if optimizer == "adafactor" else ONE if matrix else TWO for matrix in matrices]
    train = TrainTable(optimizer=optimizer, weight_decay=0.1)  # type: ignore[arg-type]
    ours = LibraryOptimizers(train, False, [(p, True, way, 1.0) for p, way in zip(own, ways, strict=True)])
    if optimizer == "adafactor":
        theirs = [Adafactor(plain, lr=1.0, weight_decay=0.1, scale_parameter=False, relative_step=False)]
    else:
        alone = [p for p, matrix in zip(plain, matrices, strict=True) if matrix]
        rest = [p for p, matrix in zip(plain, matrices, strict=True) if not matrix]
        theirs = [torch.optim.Muon(alone, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
        theirs += [torch.optim.AdamW(rest, lr=1.0, betas=(train.beta1, train.beta2), eps=1e-8, weight_decay=0.1)]
    for step in range(3):
        rate = 1e-3 * (step + 1)
        for mine, other in zip(own, plain, strict=True):
            mine.grad, other.grad = (torch.randn(mine.shape) for _ in range(2))
            other.grad = mine.grad.clone()
        ours.step(rate)
        for one in theirs:
            for group in one.param_groups:
                group["lr"] = rate
            one.step()
        if step == 1:  # as a checkpoint brings it back
            states = [{kind: tensor.clone() for kind, tensor in ours.state(p).items()} for p in own]
            ours = LibraryOptimizers(train, False, [(p, True, way, 1.0) for p, way in zip(own, ways, strict=True)])
            for p, way, state in zip(own, ways, states, strict=True):
                expected = moment_tensors(way, tuple(p.shape))
                found = {k: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in state.items()}
                assert found == expected
                ours.restore(p, state, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(own, plain, strict=True))


def test_muon_takes_matrices_inside_of_blocks() -> None:
    names = set(tuned("muon").moments)
    matrices = {name for name, spec in CHAIN.parameters.items() if ".layers." in name and len(spec.shape) == 2}
    assert names == matrices and names < CHAIN.parameters.keys()
    assert tuned("adafactor").moments.keys() == CHAIN.parameters.keys()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plan_counts_what_is_kept(optimizer: str) -> None:
    tuning = tuned(optimizer)
    train = TrainTable(steps=4, global_batch=8, learning_rate=3e-3, dtype="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    threads = Threads(CHAIN, plan_of(CHAIN, LAYOUTS["pipeline"], LENGTH), train, tuning)
    take(threads, range(1))
    cost = model_cost(CHAIN, tuning, "fp32", LENGTH, dict.fromkeys(CHAIN.kinds, 0.0))
    for trainer in threads.trainers:
        assert trainer.optimizer is not None
        states = [trainer.optimizer.state(name) for name in trainer.optimizer.targets]
        found = sum(tensor.nbytes for state in states for tensor in state.values())
        stage = trainer.stages[0]
        assert found == pytest.approx(cost.owned_bytes(stage.first, stage.last))
    adamw = model_cost(CHAIN, full_training(CHAIN), "fp32", LENGTH, dict.fromkeys(CHAIN.kinds, 0.0))
    saved = sum(saved_bytes(way, CHAIN.parameters[name].shape) for name, way in tuning.moments.items())
    assert adamw.owned_bytes(0, 5) - cost.owned_bytes(0, 5) == saved > 0
    assert cost.optimizer == optimizer and max(layer.workspace_bytes for layer in cost.layers) > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_groups_that_cut_matrices_are_refused(optimizer: str) -> None:
    assert f'optimizer = "{optimizer}"' in str(refusal(CHAIN, tuned(optimizer), (1, 1)))
    assert refusal(CHAIN, full_training(CHAIN), (1, 1)) is None


def test_a_checkpoint_holds_what_its_optimizer_keeps(tmp_path: Path) -> None:
    def written(optimizer: str, **shapes: tuple[int, ...]) -> str | None:
        path = tmp_path / "step.h5"
        with CheckpointWriter(path, told(1, job={"train": {"optimizer": optimizer}, "data": {}})) as writer:
            for kind, shape in {"parameters": (6, 4), **shapes}.items():
                writer.write(kind, "a.weight", np.ones(shape, np.float32), "float32")
        return verify(path)

    assert written("adafactor", moments1=(6,), moments2=(4,)) is None
    assert written("muon", moments1=(6, 4)) is None
    for optimizer, shapes in (("adamw", ((6, 4),)), ("adamw", ((6,), (4,))), ("adafactor", ((4,), (6,)))):
        assert written(optimizer, **{f"moments{n}": shape for n, shape in enumerate(shapes, 1)}) is not None
    with (
        refuses("checkpoint.not_finite", "parameters/a.weight"),
        CheckpointWriter(tmp_path / "bad.h5", told(1)) as writer,
    ):
        writer.write("moments2", "a.weight", np.ones((4,), np.float32), "float32")
        writer.write("parameters", "a.weight", np.full((6, 4), np.inf, np.float32), "float32")
