"""A head that computes some tokens at a time gives the loss and the gradients of one that computes all at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.inference.decoding import Decoder
from hetero_mpi.inference.sampling import Sampling
from hetero_mpi.inference.writer import Task, Writer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.layer.loss import Routed
from hetero_mpi.model.layer.micro_batch import Comparison
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.supported import PROVEN_FAMILIES
from hetero_mpi.model.tuning import Tuning, nothing_trained
from hetero_mpi.planning.types import sizes
from tests.model.test_all_families import UNLIKE
from tests.model.test_group import check_group, require_equal
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.group_cases import NamedStart, batch, group_chain, lora, set_adapters, whole_stages
from tests.support.operations import Operations
from tests.support.ranks import LoopbackNetwork
from tests.support.stages import slice_heads, stage_of, streamed_stage_of
from tests.support.thread_group import ThreadGroup, gradients_of

FAMILIES = [
    pytest.param(family, marks=() if family in (*UNLIKE, "cohere", "phi") else pytest.mark.long)
    for family in PROVEN_FAMILIES
]
TOKENS = 7
"""Of a slice; of 48 the last is short, and slices reach over the ends of sequences."""
WIDTH = 24


def alone(
    chain: TransformersChain, build: Any = stage_of, tuning: Tuning | None = None, dtype: str = "fp32", **options: Any
) -> Stage:
    given: Any = chain, 0, chain.layer_count, Backend(), dtype, NamedStart(0.05)
    stage: Stage = build(*given, tuning=tuning, **options)
    return stage


def trained(stage: Stage, **changed: Any) -> list[torch.Tensor]:
    """The loss of a micro-batch that goes there and back, that of an evaluation, and what this counts."""
    tokens, targets = batch()
    routed = Routed(torch.tensor([24, 9]), 0.5) if stage.chain.routers is not None else None  # type: ignore[attr-defined]
    position = MicroBatch(0, 0, 0, 33, routed=routed, **changed)
    loss = stage.forward(position, tokens, targets)
    stage.backward(0)
    return [loss, stage.evaluate(tokens, targets), stage.rewards[0, 0].float()]


def require_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_change_no_number(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Of any family: what a class makes of a head's output (caps, scales, biases) it makes of a slice's."""
    chain = TransformersChain(read_config(tiny_keys(family)))
    sliced, whole = alone(chain), alone(chain)
    expected = trained(whole)
    slice_heads(monkeypatch, TOKENS)
    require_alike(trained(sliced), expected)
    # Sums of rounded numbers in another order.
    require_equal(gradients_of([sliced]), gradients_of([whole]), 1e-4)


def test_slices_of_weighted_targets_and_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = group_chain("llama")
    tokens, targets = batch()
    targets[1, 9:] = 5
    positions, weights = (torch.arange(24) % 6).expand(2, 24), torch.rand((2, 24))
    answers, references = (positions > 2).int(), torch.tensor([[0.3, -0.2, 0, 0], [0.1, 0, 0, 0.5]])
    comparison = Comparison(TrainTable(preference="dpo", preference_beta=0.5), answers, references, 0.7, 0.2)
    for given in ({"weights": weights}, {"positions": positions, "comparison": comparison}):
        found = []
        for head_tokens in (TOKENS, 48):
            slice_heads(monkeypatch, head_tokens)
            stage = alone(chain, recompute=True)
            loss = stage.forward(MicroBatch(0, 0, 0, 4, **given), tokens, targets)  # type: ignore[arg-type]
            stage.backward(0)
            found.append(([loss, *stage.rewards.values()], gradients_of([stage])))
        require_alike(found[0][0], found[1][0])
        require_equal(found[0][1], found[1][1], 1e-5)


def test_a_streamed_stage_slices_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = group_chain("llama")
    for tuning in (None, lora(chain)):
        stages = [alone(chain, build, tuning, slice_sequences=1) for build in (streamed_stage_of, stage_of)]
        results = []
        for stage, head_tokens in zip(stages, (TOKENS, 48), strict=True):
            if tuning is not None:
                set_adapters([stage], 0.05)
            slice_heads(monkeypatch, head_tokens)
            results.append(trained(stage))
        require_alike(*results)
        require_equal(gradients_of(stages[:1]), gradients_of(stages[1:]), 1e-5)


@pytest.mark.parametrize(("family", "shares"), [("cohere", (4, 2)), ("llama", (3, 2, 1)), ("phi", (4, 2))])
def test_a_groups_head_computes_in_slices(
    monkeypatch: pytest.MonkeyPatch, family: str, shares: tuple[int, ...]
) -> None:
    chain = group_chain(family)
    cuts = [(0, 3), (3, chain.layer_count)]
    whole, group = whole_stages(chain, cuts=cuts), ThreadGroup(chain, cuts, shares, NamedStart())
    slice_heads(monkeypatch, TOKENS)
    check_group(whole, group, outputs=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_split_backward_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    chain = group_chain("llama")
    slice_heads(monkeypatch, TOKENS)
    whole, split = (alone(chain, dtype=dtype, split_backward=parts) for parts in (False, True))
    for index in range(2):
        outputs = [stage.forward(MicroBatch(index, 0, 0, 33), *batch()) for stage in (whole, split)]
        assert torch.equal(*outputs)
        whole.backward(index)
        split.backward_input(index)
    for index in range(2):
        split.backward_weights(index)
    gradients = gradients_of([whole]), gradients_of([split])
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = group_chain("llama", hidden_size=WIDTH)
    tokens, targets = batch()
    seen = {}
    for head_tokens in (TOKENS, 48):
        slice_heads(monkeypatch, head_tokens)
        stage = alone(chain, tuning=lora(chain))
        with Operations() as operations:
            stage.forward(MicroBatch(0, 0, 0, 33), tokens, targets)
            stage.backward(0)
            stage.evaluate(tokens, targets)
        shapes = [shape for _, shape, _ in operations.calls if shape[-1:] == (VOCABULARY,)]
        seen[head_tokens] = max(math.prod(shape) for shape in shapes if math.prod(shape[:-1]) != WIDTH)
    assert seen == {TOKENS: TOKENS * VOCABULARY, 48: targets.numel() * VOCABULARY}


def test_products_of_a_frozen_head_are_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences of one slice each, a CPU would copy the head's matrix."""
    chain = group_chain("llama")
    slice_heads(monkeypatch, TOKENS)
    stage = alone(chain, tuning=lora(chain), dtype="bf16")
    with Operations() as operations:
        trained(stage)
        with Decoder(stage) as decoder:
            decoder.step(batch()[0][:1], rows=2)
    products = {name for name, shape, _ in operations.calls if shape[-1:] == (VOCABULARY,)}
    assert "mm" in products and "bmm" not in products


def test_the_head_computes_for_the_last_piece_of_a_prompt_alone() -> None:
    stage = alone(group_chain("llama"), tuning=nothing_trained())
    rows: list[int] = []
    stage.model.get_output_embeddings().register_forward_hook(lambda _, given, made: rows.append(made.shape[1]))
    writer = Writer(0, [0], [0], LoopbackNetwork(1).transports[0], stage.chain, [stage], 4)
    assert len(list(writer.tokens(Task(list(range(1, 11)), [], 2, Sampling())))) == 2
    assert rows == [0, 0, 1, 1]


def test_logits_are_sliced_beyond_500_megabytes() -> None:
    assert [sizes.in_slices(2e5, tokens) for tokens in (1024, 2500, 2501)] == [False, False, True]
    assert not sizes.in_slices(1e6, 1024)
