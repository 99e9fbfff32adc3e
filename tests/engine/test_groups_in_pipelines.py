"""Two pipelines with groups of unlike sizes, and a rank by itself, take the step of one rank. On threads instead of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.placement import parameter_owners
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.group.tensor_division import Division, Holding
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.training.build import divided_tensors
from tests.engine.test_trainer import batch_of
from tests.support.group_cases import LAYERS, NamedStart, group_chain, lora
from tests.support.late_copies import LateBackend
from tests.support.ranks import Threads
from tests.support.stages import slice_heads

LENGTH, BATCH = 8, 4
TRAIN = TrainTable(steps=1, global_batch=BATCH, dtype="fp32", clip_norm=None)
LIMIT = 3e-4
"""Of ||difference|| / ||gradient|| of each tensor: all is fp32."""
SHORT = (
    "apertus",
    "cohere",
    "deepseek_v3",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "mixtral",
    "olmo2",
    "phi",
    "qwen3_next",
    "youtu",
)
FAMILIES = [pytest.param(one, marks=() if one in SHORT else pytest.mark.long) for one in DIVIDED_FAMILIES]


def plan_with_groups(*, tied: bool = False) -> Plan:
    """A group of two with some layers behind a rank by itself (all layers of a tied model); one of three; and a rank by itself."""
    group = StagePlan((0, 1), 0, LAYERS, 0, shares=(4, 2))
    stages = (group,) if tied else (StagePlan((6,), 0, 2, 1), StagePlan((0, 1), 2, LAYERS, 0, shares=(4, 2)))
    three = StagePlan((2, 3, 4), 0, LAYERS, 0, shares=(1, 2, 3), state_weight=2.0)
    alone = StagePlan((5,), 0, LAYERS, 0, state_weight=0.5)
    return Plan(
        (PipelinePlan(stages, 1, 2), PipelinePlan((three,), 1, 1), PipelinePlan((alone,), 1, 1)), BATCH, LENGTH, LAYERS
    )


def stepped(
    monkeypatch: pytest.MonkeyPatch,
    chain: TransformersChain,
    plan: Plan,
    tuning: Tuning,
    backend: Callable[[], Backend] = Backend,
) -> tuple[Any, list[dict[str, torch.Tensor]], Threads]:
    """(the step decision, each rank's gradients of what it steps, the trainers after the step)."""
    threads = Threads(chain, plan, TRAIN, tuning, backend, NamedStart())
    gradients: dict[Optimizer, dict[str, torch.Tensor]] = {}
    end_step = Optimizer.end_step

    def noted(optimizer: Optimizer, step: int, scale: float | None) -> None:
        gradients[optimizer] = {name: optimizer.gradient(name).clone() for name in optimizer.targets}
        end_step(optimizer, step, scale)

    def play(trainer: Trainer) -> Any:
        result = trainer.step(0, batch_of(0, BATCH, LENGTH))
        trainer.settle()
        return result.decision

    monkeypatch.setattr(Optimizer, "end_step", noted)
    decisions = threads.together(play)
    monkeypatch.undo()
    assert all(decision == decisions[0] for decision in decisions)
    return decisions[0], [gradients.get(trainer.optimizer, {}) for trainer in threads.trainers], threads


def whole(
    parts: dict[int, torch.Tensor], division: Division | None, first: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor from the parts of its owners, by rank; every number has one."""
    if division is None or division.holding is not Holding.CUT:
        assert list(parts) == [first]
        return parts[first]
    found = torch.full(shape, torch.nan)
    for rank, part in parts.items():
        place = division.place(found, rank - first)
        place.copy_(part.reshape(place.shape))
    assert not found.isnan().any()
    return found


def require_the_step_of_one_rank(monkeypatch: pytest.MonkeyPatch, chain: TransformersChain, tuning: Tuning) -> None:
    plan = plan_with_groups(tied=chain.tied is not None)
    one = Plan((PipelinePlan((StagePlan((0,), 0, LAYERS, 0),), 1, BATCH),), BATCH, LENGTH, LAYERS)
    expected, (plain,), _ = stepped(monkeypatch, chain, one, tuning)
    found, gradients, threads = stepped(monkeypatch, chain, plan, tuning)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=LIMIT)
    owner, divided = parameter_owners(tuning, plan), divided_tensors(plan, chain, tuning)
    assert len(set(owner.values())) > 2, "several pipelines own some"
    for name, gradient in plain.items():
        first, shape = owner[name], tuple(gradient.shape)
        division = divided.get(first, {}).get(name)
        summed = whole({r: own[name] for r, own in enumerate(gradients) if name in own}, division, first, shape)
        limit = LIMIT if gradient.numel() > 1 else 10 * LIMIT
        assert (summed - gradient).norm() <= limit * gradient.norm(), name
        stages = [trainer.layers for trainer in threads.trainers]
        steppers = {r: stages[r].parameters[name].detach() for r, own in enumerate(gradients) if name in own}
        values = whole(steppers, division, first, shape)
        for trainer, held in zip(threads.trainers, stages, strict=True):
            if name in held.parameters:
                seen = trainer.divided.get(name)
                member = trainer.group.member if trainer.group is not None else 0
                part = values if seen is None else seen.part(values, member)
                assert torch.equal(held.parameters[name], part.view_as(held.parameters[name])), (name, trainer.rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_over_unlike_groups_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    chain = group_chain(family)
    require_the_step_of_one_rank(monkeypatch, chain, full_training(chain))


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3"])
def test_adapters_are_stepped_over_unlike_groups_as_by_one_rank(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    chain = group_chain(family)
    require_the_step_of_one_rank(monkeypatch, chain, lora(chain))


def test_heads_in_slices_are_stepped_as_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = group_chain("llama")
    slice_heads(monkeypatch, 4)
    require_the_step_of_one_rank(monkeypatch, chain, full_training(chain))


def test_devices_with_memory_of_their_own_sum_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end late; a segment that is collected, or spread, before its copy has ended has other numbers."""
    chain = group_chain("llama")
    plan, tuning = plan_with_groups(), full_training(chain)
    _, straight, _ = stepped(monkeypatch, chain, plan, tuning)
    _, copied, _ = stepped(monkeypatch, chain, plan, tuning, LateBackend)
    for expected, found in zip(straight, copied, strict=True):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
