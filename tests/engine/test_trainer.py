"""Steps of any plan: several pipelines, unequal shares, GPipe, 1F1B and split backward, short batches and changing lengths.

On threads instead of ranks; ``test_train_equality`` runs the program itself. One process that computes every micro-batch by
itself is what everything is held against.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hetero_mpi.data.batch import Batch, Tokens
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.placement import evaluation_shares, training_share
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.optimizer import StepDecision
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.orders import ORDERS
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.state.redistribute import set_parameter
from tests.planning import two_backwards
from tests.support.late_copies import LateBackend
from tests.support.ranks import Threads, plan_of

BATCH, LENGTH, BLOCKS, VOCABULARY = 8, 16, 3, 64
LAYERS = BLOCKS + 2
TOLERANCE = 1e-6
LAYOUTS: dict[str, list[tuple[list[int], list[int], int, int]]] = {
    "alone": [([0], [0, 5], 2, 8)],
    "pipeline": [([0, 1, 2], [0, 1, 3, 5], 2, 8)],
    "reversed, short micro-batch": [([2, 1, 0], [0, 3, 4, 5], 3, 8)],
    "data parallel, unequal": [([0], [0, 5], 2, 5), ([1], [0, 5], 1, 1), ([2], [0, 5], 2, 2)],
    "unlike pipelines": [([3, 1], [0, 2, 5], 2, 5), ([0, 2], [0, 4, 5], 1, 3)],
    "pipeline and rank": [([1], [0, 5], 3, 3), ([0, 3, 2], [0, 1, 4, 5], 2, 5)],
}
"""(ranks in chain order, boundaries, micro-batch, sequences) of each pipeline."""
SEVERAL: dict[str, list[tuple[list[int], list[int], int, int]]] = {
    "looped": [([0, 1, 0, 1], [0, 1, 2, 4, 5], 2, 8)],
    "V": [([1, 0, 0, 1], [0, 2, 3, 4, 5], 2, 8)],
    "V of three": [([0, 1, 2, 1, 0], [0, 1, 2, 3, 4, 5], 2, 8)],
    "three stages": [([1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5], 2, 8)],
    "alone, three stages": [([0, 0, 0], [0, 1, 3, 5], 2, 8)],
}
"""The same, where ranks hold several stages."""
UNLIKE_SEVERAL = [([0, 1, 0], [0, 1, 3, 5], 2, 5), ([3, 2, 2, 3], [0, 1, 2, 3, 5], 2, 3)]
BY_ITSELF = {f"alone, micro-batches of {size}": [([0], [0, 5], size, 8)] for size in (1, 3)}
TRAIN = TrainTable(steps=3, global_batch=BATCH, learning_rate=3e-3, schedule="constant", dtype="fp32", clip_norm=0.5)


def chain_of(tied: bool = False, family: str = "llama") -> TransformersChain:
    keys = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "pad_token_id": None,
    }
    return TransformersChain(read_config(keys))


@dataclass(frozen=True)
class Outcome:
    """What one step left behind."""

    decision: StepDecision
    gradients: dict[str, torch.Tensor]
    """AdamW's first moments after one step: clipped gradients, times a constant."""
    held_out: float


def batch_of(step: int, rows: int = BATCH, length: int = LENGTH) -> Batch:
    """Every third target is ignored."""
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, VOCABULARY, (rows, length), np.int32)
    targets = draw.integers(0, VOCABULARY, (rows, length), np.int32)
    targets[draw.random((rows, length)) < 0.3] = IGNORED
    return Batch(tokens, targets, int((targets != IGNORED).sum()))


def outcome_of(threads: Threads, rows: int = BATCH, length: int = LENGTH) -> Outcome:
    """One step and one evaluation. All ranks must agree, and replicas must be equal."""

    def play(trainer: Trainer) -> tuple[StepDecision, float]:
        decision = trainer.step(0, batch_of(0, rows, length)).decision
        return decision, trainer.evaluate(batch_of(9, 5))[0]

    with_all = threads.together(play)
    assert all(one == with_all[0] for one in with_all), "the ranks disagree"
    gradients: dict[str, torch.Tensor] = {}
    for trainer in threads.trainers:
        assert trainer.optimizer is not None
        for name in trainer.optimizer.targets:
            moment = trainer.optimizer.state(name)["moments1"]
            assert torch.equal(gradients.setdefault(name, moment), moment), f"replicas of {name} differ"
    return Outcome(with_all[0][0], gradients, with_all[0][1])


def distance(found: Outcome, expected: Outcome) -> float:
    """Of the gradient that differs most, in parts of its norm."""
    gradients = expected.gradients.items()
    return max(float((found.gradients[name] - gradient).norm() / gradient.norm()) for name, gradient in gradients)


def check_close(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert found.decision.loss == pytest.approx(expected.decision.loss, rel=TOLERANCE)
    assert found.decision.grad_norm == pytest.approx(expected.decision.grad_norm, rel=TOLERANCE)
    assert found.held_out == pytest.approx(expected.held_out, rel=TOLERANCE)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.norm() > 0, f"{name} has no gradient: the comparison would be empty"
        assert (found.gradients[name] - gradient).norm() / gradient.norm() <= tolerance, name


def check_same_bits(found: Outcome, expected: Outcome) -> None:
    assert (found.decision, found.held_out) == (expected.decision, expected.held_out)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def trained_once(
    layout: str,
    chain: TransformersChain,
    schedule: str = "1f1b",
    recompute: bool = False,
    tuning: Tuning | None = None,
    train: TrainTable = TRAIN,
    backend: type[Backend] = Backend,
    **batch: int,
) -> Outcome:
    layouts = {**LAYOUTS, **SEVERAL, **BY_ITSELF, "unlike, several stages": UNLIKE_SEVERAL}
    plan = plan_of(chain, layouts[layout], LENGTH, schedule, recompute)
    threads = Threads(chain, plan, train, tuning, backend)
    if tuning is not None and tuning.adapter is not None:
        # With B at its usual zero, A has no gradient; larger values make models that no fp32 arithmetic follows to 1e-6.
        for trainer in threads.trainers:
            assert trainer.layers is not None
            for name, parameter in trainer.layers.parameters.items():
                generator = torch.Generator().manual_seed(len(name) + int(name.split(".")[2]))
                value = 0.1 * torch.randn(parameter.shape, generator=generator)
                set_parameter(trainer, name, value)
    return outcome_of(threads, **batch)


CHAINS = {tied: chain_of(tied) for tied in (False, True)}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "split"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "alone"])
def test_any_plan_computes_the_same(layout: str, schedule: str, tied: bool) -> None:
    check_close(trained_once(layout, CHAINS[tied], schedule, recompute=tied), trained_once("alone", CHAINS[tied]))


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("rows", "length"), [(BATCH, 11), (5, LENGTH), (1, 7)])
def test_short_batches_and_other_lengths(layout: str, rows: int, length: int) -> None:
    """One row leaves most micro-batches of most pipelines without any."""
    found = trained_once(layout, CHAINS[True], "split", rows=rows, length=length)
    check_close(found, trained_once("alone", CHAINS[True], rows=rows, length=length))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_adapters(layout: str) -> None:
    chain = CHAINS[True]
    tuning = adapter_tuning(chain, AdapterTable(method="lora", rank=2), False, True)
    check_close(trained_once(layout, chain, "split", tuning=tuning), trained_once("alone", chain, tuning=tuning))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layout", ["reversed, short micro-batch", "unlike pipelines"])
def test_schedules_give_the_same_bits(layout: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However forwards and backwards take turns, and whether weights' gradients are put off: micro-batches add up in order."""
    expected = trained_once(layout, CHAINS[True], "1f1b", recompute)
    monkeypatch.setitem(ORDERS, "two_backwards", two_backwards)
    for schedule in ("1f1b", "gpipe", "split", "two_backwards"):
        check_same_bits(trained_once(layout, CHAINS[True], schedule, recompute), expected)


def test_another_cut_gives_the_same_bits() -> None:
    check_same_bits(trained_once("pipeline", CHAINS[True]), trained_once("alone", CHAINS[True]))


@pytest.mark.parametrize(
    ("layout", "schedule"), [("looped", "interleaved"), *itertools.product(SEVERAL, ["zbv", "dualpipev"])]
)
def test_ranks_with_several_stages_give_the_same_bits(layout: str, schedule: str) -> None:
    """In a V both ends of a tied matrix are on one rank. Short batches and copies beside included."""
    for dtype, recompute in (("fp32", True), ("bf16", False)):
        train = TRAIN.model_copy(update={"dtype": dtype})
        expected = trained_once("alone", CHAINS[True], train=train)
        check_same_bits(trained_once(layout, CHAINS[True], schedule, recompute, train=train), expected)
    expected = trained_once("alone", CHAINS[False], rows=5, length=11)
    found = trained_once(layout, CHAINS[False], schedule, backend=LateBackend, rows=5, length=11)
    check_same_bits(found, expected)


@pytest.mark.parametrize("layout", ["looped", "V"])
@pytest.mark.parametrize("nf4", [False, True])
def test_adapters_of_ranks_with_several_stages(layout: str, nf4: bool) -> None:
    tuning = adapter_tuning(CHAINS[True], AdapterTable(method="lora", rank=2), nf4, True)
    found = trained_once(layout, CHAINS[True], "zbv", tuning=tuning)
    check_same_bits(found, trained_once("alone", CHAINS[True], tuning=tuning))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_unlike_pipelines_whose_ranks_hold_several_stages(tied: bool, dtype: str) -> None:
    train = TRAIN.model_copy(update={"dtype": dtype})
    found = trained_once("unlike, several stages", CHAINS[tied], "zbv", train=train)
    check_same_bits(
        trained_once("unlike, several stages", CHAINS[tied], "dualpipev", backend=LateBackend, train=train), found
    )
    if dtype == "fp32":
        check_close(found, trained_once("alone", CHAINS[tied]))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_full_product(family: str, tied: bool, recompute: bool, adapters: bool) -> None:
    chain = chain_of(tied, family)
    table = AdapterTable(method="lora", rank=2)
    tuning = adapter_tuning(chain, table, False, True) if adapters else full_training(chain)
    for rows, length in ((BATCH, LENGTH), (3, 9)):
        expected = trained_once("alone", chain, "1f1b", recompute, tuning, rows=rows, length=length)
        # Adapters on few rows: one process with other micro-batches differs from itself by 2e-6 to 3e-6.
        alone = [trained_once(name, chain, "1f1b", recompute, tuning, rows=rows, length=length) for name in BY_ITSELF]
        tolerance = max(TOLERANCE, *(distance(one, expected) for one in alone))
        assert tolerance < 5e-6
        for layout, schedule in itertools.product(LAYOUTS, ("1f1b", "gpipe", "split")):
            found = trained_once(layout, chain, schedule, recompute, tuning, rows=rows, length=length)
            check_close(found, expected, tolerance)


# Rows


def tokens_of(rows: int) -> Tokens:
    return np.arange(1, rows + 1, dtype=np.int32)[:, None].repeat(2, axis=1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, [([1, 2, 3, 4, 5], (2, 2, 1)), ([6, 7, 8], (3,))]),
        (6, [([1, 2, 3, 4, 5], (2, 2, 1)), ([6], (1,))]),
        (3, [([1, 2, 3, -1], (2, 1, 1)), ([-1], (1,))]),
        (1, [([1, -1, -1], (1, 1, 1)), ([-1], (1,))]),
    ],
)
def test_rows_are_dealt_in_plan_order(rows: int, expected: list[tuple[list[int], tuple[int, ...]]]) -> None:
    """5 sequences in micro-batches of 2 for the first pipeline, 3 at once for the second; -1: a row of ignored targets."""
    stage = StagePlan((0,), 0, 3, 0)
    plan = Plan((PipelinePlan((stage,), 2, 5), PipelinePlan((stage,), 3, 3)), 8, 2, 3)
    for pipeline, (numbers, sizes) in enumerate(expected):
        share = training_share(plan, pipeline, Batch(tokens_of(rows), tokens_of(rows), rows))
        batch = share.batch
        found = [-1 if (targets == IGNORED).all() else int(targets[0]) for targets in batch.targets]
        assert (found, share.sizes) == (numbers, sizes)
        assert share.first_samples == ((0, 2, 4) if pipeline == 0 else (5,))
        assert np.array_equal(batch.tokens[batch.targets != IGNORED], batch.targets[batch.targets != IGNORED])


def test_held_out_rows_are_dealt_by_share() -> None:
    stage = StagePlan((0,), 0, 3, 0)
    plan = Plan((PipelinePlan((stage,), 2, 5), PipelinePlan((stage,), 3, 3)), 8, 2, 3)
    assert evaluation_shares(plan, 16) == [(0, (2, 2, 2, 2, 2)), (10, (3, 3))]
    assert evaluation_shares(plan, 5) == [(0, (2, 1)), (3, (2,))]
    assert evaluation_shares(plan, 0) == [(0, ()), (0, ())]
