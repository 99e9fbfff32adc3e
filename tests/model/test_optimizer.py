"""The common step decision and fp16's loss scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.optimizer import LossScale, Optimizer, StepDecider, _block_norms, learning_rate
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.supported import PROVEN_FAMILIES
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.state.resume_checks import rate_change
from tests.support.family_configs import tiny_keys
from tests.support.stages import stage_of


def test_the_decision_does_not_depend_on_who_fills_which_slot() -> None:
    """Three ranks or one: the same bits, though the squares are of very unlike size."""
    squares = {f"p{i}": 10.0 ** (7 - i) / 3 for i in range(14)}
    losses = {0: 2.0**53, 1: 1.0, 2: 1.0, 3: -(2.0**53)}  # in any other order another sum
    decider = StepDecider(list(squares), clip_norm=1.0, micro_batches=4)
    alone = decider.decide(decider.fill(squares, losses))
    names, heads = list(squares), ({0: losses[0], 1: losses[1]}, {}, {2: losses[2], 3: losses[3]})
    shares = [decider.fill({n: squares[n] for n in names[i::3]}, heads[i]) for i in range(3)]
    together = decider.decide(shares[2] + shares[0] + shares[1])
    assert together == alone
    assert alone.grad_norm == pytest.approx(math.sqrt(sum(squares.values())))
    assert alone.scale == pytest.approx(1 / alone.grad_norm) and alone.finite and alone.loss == 0.0


def test_gradients_within_the_norm_are_not_scaled() -> None:
    decider = StepDecider(["a"], clip_norm=10.0)
    assert decider.decide(decider.fill({"a": 4.0}, {0: 1.0})).scale == 1.0
    assert StepDecider(["a"], None).decide(decider.fill({"a": 4e8}, {0: 1.0})).scale == 1.0


@pytest.mark.parametrize("square, loss", [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_is_seen(square: float, loss: float) -> None:
    decider = StepDecider(["a", "b"], clip_norm=1.0)
    assert not decider.decide(decider.fill({"a": square, "b": 1.0}, {0: loss})).finite


def test_scaled_gradients_give_the_same_decision() -> None:
    decider = StepDecider(["a", "b"], clip_norm=0.5)
    plain = decider.decide(decider.fill({"a": 9.0, "b": 16.0}, {0: 1.0}))
    scaled = decider.decide(decider.fill({"a": 9.0 * 1024**2, "b": 16.0 * 1024**2}, {0: 1.0}), loss_scale=1024.0)
    assert scaled.grad_norm == plain.grad_norm == 5.0
    assert scaled.scale * 1024 == pytest.approx(plain.scale)


def test_loss_scale_halves_on_overflow_and_doubles_after_patience() -> None:
    scale = LossScale.for_dtype(torch.float16)
    assert scale.value == 65536.0
    scale.update(finite=False)
    assert (scale.value, scale.good_steps) == (32768.0, 0)
    for _ in range(LossScale.PATIENCE - 1):
        scale.update(finite=True)
    assert scale.value == 32768.0
    scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (65536.0, 0)
    for dtype in (torch.float32, torch.bfloat16):
        wide = LossScale.for_dtype(dtype)
        wide.update(finite=False)
        assert wide.value == 1.0, "wide exponents need no scale"


@pytest.mark.parametrize(("steps", "longest"), [(20, 2), (100, 10), (1000, 10)])
def test_a_warm_up_that_is_a_share_may_have_a_longest(steps: int, longest: int) -> None:
    train = TrainTable(steps=steps, warmup_steps=0.1, max_warmup_steps=10, learning_rate=1.0, schedule="constant")
    assert [learning_rate(train, step) for step in range(longest + 1)] == [
        step / longest for step in range(longest + 1)
    ]


@pytest.mark.parametrize("warm_up", [0, 1, 7, 0.1, 0.31])
@pytest.mark.parametrize(
    ("keys", "name", "theirs"),
    [
        ({}, "cosine", {}),
        ({}, "linear", {}),
        ({}, "constant_with_warmup", {}),
        ({"min_learning_rate_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({}, "cosine_with_restarts", {}),
        ({"cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"decay_steps": 9}, "warmup_stable_decay", {"num_decay_steps": 9}),
        ({"decay_steps": 0.3, "decay": "linear"}, "warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear"}),
        ({"decay_steps": 12, "decay": "1-sqrt", "min_learning_rate_ratio": 0.25}, "warmup_stable_decay",
         {"num_decay_steps": 12, "decay_type": "1-sqrt", "min_lr_ratio": 0.25}),
    ],
)  # fmt: skip
def test_schedules_with_settings_are_those_of_transformers(
    keys: dict[str, Any], name: str, theirs: dict[str, Any], warm_up: float
) -> None:
    ours = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(name, name)
    train = TrainTable(steps=30, warmup_steps=warm_up, learning_rate=3e-4, schedule=ours, **keys)  # type: ignore[arg-type]
    steps = TrainingArguments(warmup_steps=warm_up).get_warmup_steps(30)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    schedule = get_scheduler(name, optimizer, steps, 30, scheduler_specific_kwargs=theirs).lr_lambdas[0]
    assert [learning_rate(train, step) for step in range(31)] == pytest.approx(
        [3e-4 * schedule(step) for step in range(31)], rel=1e-15
    )


def test_a_line_may_end_above_zero_and_a_decay_has_no_more_steps_than_warm_up_leaves() -> None:
    line = TrainTable(steps=10, learning_rate=1.0, schedule="linear", min_learning_rate_ratio=0.5)
    assert [learning_rate(line, step) for step in (0, 5, 10)] == [1.0, 0.75, 0.5]
    decay = TrainTable(
        steps=10, warmup_steps=6, decay_steps=9, learning_rate=1.0, schedule="warmup_stable_decay", decay="linear"
    )
    assert [learning_rate(decay, step) for step in (3, 6, 8, 10)] == [0.5, 1.0, 0.5, 0.0]


def test_norms_of_all_parameters_are_added_by_one_call() -> None:
    chain = TransformersChain(read_config(tiny_keys("llama")))
    optimizer = Optimizer(stage_of(chain, 1, 3, Backend(), "fp32", SeededStart(1)), TrainTable(steps=1))
    exact = {name: float(optimizer.gradient(name).normal_().double().square().sum()) for name in optimizer.targets}
    with torch.profiler.profile() as profile:
        assert optimizer.squared_norms() == pytest.approx(exact, rel=1e-6)
    large = [name for name in exact if optimizer.targets[name].numel() > 4096]
    assert [event.name for event in profile.events()].count("aten::linalg_vector_norm") == len(large) < len(exact)


@pytest.mark.parametrize("shape", [(7,), (4096,), (4097,), (513, 1001), (1100, 1000)])
def test_a_short_vector_has_the_norm_of_a_long_one(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    short = _block_norms(gradient)
    assert short.ndim == 1 and short.numel() <= 4096
    assert float(short.double().norm()) == pytest.approx(float(gradient.double().norm()), rel=1e-7)
    gradient.view(-1)[-1] = math.inf
    assert _block_norms(gradient).norm().isinf()
    gradient.view(-1)[0] = math.nan
    assert _block_norms(gradient).norm().isnan()


def test_the_first_non_finite_parameter_is_named_and_the_run_stops_if_any_rank_says_so() -> None:
    decider = StepDecider(["embedding", "z", "a", "head"], clip_norm=1.0)
    broken = decider.fill({"embedding": float("nan"), "z": float("inf")}, {0: 2.0})
    fine = decider.fill({"a": 1.0, "head": 1.0}, {})
    decision = decider.decide(broken + fine)
    assert (decision.finite, decision.first_non_finite, decision.stop) == (False, "z", False)
    assert decider.decide(decider.fill({"a": 1e308, "z": 1e308}, {0: 2.0})).first_non_finite is None, (
        "only the sum is too large"
    )
    asked = decider.decide(fine + decider.fill({}, {0: 2.0}, stop=True))
    assert asked.stop and asked.finite and asked.first_non_finite is None
    assert asked.loss == decider.decide(fine + decider.fill({}, {0: 2.0})).loss == 2.0


def decayed_by_trainer(family: str) -> set[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(tiny_keys(family)))
    return set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_decays_is_what_transformers_decays_in_every_family() -> None:
    for family in PROVEN_FAMILIES:
        chain = TransformersChain(read_config(tiny_keys(family)))
        ours = {name for name in chain.parameters if chain.decays(name)}
        assert ours == decayed_by_trainer(family) & set(chain.parameters), family
        assert ours


def test_the_optimizer_decays_neither_wide_biases_nor_spares_what_is_narrow() -> None:
    """The experts of gpt-oss have biases of two dimensions, its attention sinks have one."""
    chain = TransformersChain(read_config(tiny_keys("gpt_oss")))
    stage = stage_of(chain, 0, chain.layer_count, Backend(), "fp32", SeededStart(1))
    optimizer = Optimizer(stage, TrainTable(weight_decay=0.25))
    library = optimizer.library
    decays = {id(p): group["weight_decay"] for group in library.groups for p in group["params"]}
    found = {name: decays[id(target)] for name, target in optimizer.targets.items()}
    assert set(found.values()) == {0.0, 0.25}
    assert {name for name, decay in found.items() if decay} == decayed_by_trainer("gpt_oss") & set(found)


def test_a_resume_that_changes_the_learning_rate_says_so_and_how_to_keep_it() -> None:
    """Twenty steps of a cosine were meant to end at 30, and now at 100."""
    now = TrainTable(steps=100, learning_rate=6e-4)
    then = {**now.model_dump(), "steps": 30}
    text = rate_change(then, now, 20) or ""
    assert all(
        value in text for value in ("0.00015", "0.0005427", "step 21", "steps = 30", "learning_rate = 0.0001658")
    )
    kept = learning_rate(now.model_copy(update={"learning_rate": 0.0001658}), 20)
    assert kept == pytest.approx(1.5e-4, rel=1e-3)
    assert rate_change(then, now.model_copy(update={"steps": 30}), 20) is None
    for keys in (
        {"min_learning_rate_ratio": 0.1},
        {"warmup_steps": 0.2},
        {"schedule": "cosine_with_restarts", "cycles": 2},
        {"learning_rate": 1e-3, "schedule": "linear"},
    ):
        changed = rate_change(then, now.model_copy(update={"steps": 30, **keys}), 20)
        assert changed is not None and all(f"{key} is " in changed for key in keys)
    assert rate_change({**then, "schedule": "constant"}, now.model_copy(update={"schedule": "constant"}), 20) is None
