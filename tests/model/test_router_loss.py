"""The loss of routers does not depend on how the model and the batch are cut. (``test_all_families`` has transformers' own.)"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hetero_mpi.data.batch import Batch
from hetero_mpi.device.backend import Backend
from hetero_mpi.model.layer.loss import IGNORED, Routed, Routers, _Join, _Split
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import full_training
from tests.family_trial import LIMIT
from tests.model.test_split_backward import NormalStart, chain_of
from tests.support.errors import refuses
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.stages import stage_of, streamed_stage_of

LENGTHS, TOKENS = (24, 9, 0, 16), 24
"""Tokens of each sequence up to the last that is learnt; none of the third one, as of a row that only keeps a micro-batch going."""
ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


@pytest.fixture(scope="module")
def chain() -> TransformersChain:
    return chain_of("mixtral", **ROUTED)


def stages_of(chain: TransformersChain, dtype: str, *cuts: int, streamed: bool = False, **options: Any) -> list[Stage]:
    made = streamed_stage_of if streamed else stage_of
    bounds = pairwise((0, *cuts, chain.layer_count))
    return [made(chain, first, last, Backend(), dtype, NormalStart(), 7, **options) for first, last in bounds]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(
        1, VOCABULARY, (2, len(LENGTHS), TOKENS), generator=torch.Generator().manual_seed(3)
    )
    targets[torch.arange(TOKENS) >= torch.tensor(LENGTHS).unsqueeze(1)] = IGNORED
    return tokens, targets


def step(stages: list[Stage], *rows: slice) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the micro-batches, of which all forwards come first, and the gradients. The mean of routers' losses is noted."""
    tokens, targets = batch()
    losses = []
    for index, own in enumerate(rows):
        routed = Routed(torch.tensor(LENGTHS)[own], 1 / 3)
        x, position = tokens[own], MicroBatch(index, 0, own.start, 49, routed=routed)
        for stage in stages:
            x = stage.forward(position, x, targets[own] if stage.is_last else None)
        losses.append(float(x))
    assert stages[-1].routers is not None
    seen = dict(stages[-1].routers.seen)
    for index in range(len(rows)):
        gradient = None
        for stage in reversed(stages):
            gradient = stage.backward(index, gradient)
    assert stages[-1].routers.seen == seen
    gradients = {n: p.grad for stage in stages for n, p in stage.parameters.items() if p.grad is not None}
    assert any(name.endswith("gate.weight") for name in gradients)
    return [*losses, float(sum(seen.values()))], gradients


def require_same_bits(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_stages_give_the_bits_of_one(chain: TransformersChain, dtype: str) -> None:
    """Recomputed and streamed ones too: the sums travel in fp32 whatever the dtype."""
    rows, slices = (slice(0, 2), slice(2, 4)), {"slice_sequences": 2}
    expected = step(stages_of(chain, dtype), *rows)
    require_same_bits(step(stages_of(chain, dtype, 1, 3, 5), *rows), expected)
    require_same_bits(step(stages_of(chain, dtype, 2, recompute=True), *rows), expected)
    require_same_bits(step(stages_of(chain, dtype, 3, streamed=True, **slices), *rows), expected)
    require_same_bits(step(stages_of(chain, dtype, 3, split_backward=True), *rows), expected)


def test_micro_batches_change_nothing(chain: TransformersChain) -> None:
    """The sum over micro-batches is the same; slices of a micro-batch are noted one by one."""
    whole = step(stages_of(chain, "fp32", 3), slice(0, 4))
    for found in (
        step(stages_of(chain, "fp32", 3), *(slice(i, i + 1) for i in range(4))),
        step(stages_of(chain, "fp32", 3, slice_sequences=1), slice(0, 4)),
    ):
        assert sum(found[0][:-1]) == pytest.approx(sum(whole[0][:-1]), rel=LIMIT)
        assert found[0][-1] == pytest.approx(whole[0][-1], rel=LIMIT)
        for name, gradient in whole[1].items():
            assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_loss_is_that_of_the_targets_and_of_the_routers(chain: TransformersChain) -> None:
    stages = stages_of(chain, "fp32", 3)
    (total, of_routers), _ = step(stages, slice(0, 4))
    plain = stages_of(chain_of("mixtral"), "fp32", 3)
    tokens, targets = batch()
    x = tokens
    for stage in plain:
        x = stage.forward(MicroBatch(0, 0, 0, 49), x, targets if stage.is_last else None)
    assert total == pytest.approx(float(x) + 0.1 * of_routers, rel=LIMIT) and 2 < of_routers < 4
    held_out = tokens
    routed = Routed(torch.tensor(LENGTHS), 49 / 3)
    for stage in stages:
        whole = MicroBatch(0, 0, 0, 1, routed=routed)
        held_out = stage.evaluate(held_out, targets if stage.is_last else None, whole)
    assert float(held_out) == pytest.approx(49 * total, rel=LIMIT)


def test_records_packed_into_a_row_share_its_loss(chain: TransformersChain) -> None:
    """As transformers computes it of a row with positions."""
    tokens, targets = (tensor[:1] for tensor in batch())
    positions = torch.cat([torch.arange(7), torch.arange(17)]).unsqueeze(0)
    (whole,) = stages_of(chain, "fp32")
    expected = whole.model(input_ids=tokens, position_ids=positions, output_router_logits=True).aux_loss
    alone = whole.model(input_ids=tokens, output_router_logits=True).aux_loss
    stages, routed = stages_of(chain, "fp32", 2, 4), Routed(torch.tensor([TOKENS]), 1.0)
    x = tokens
    for stage in stages:
        x = stage.forward(MicroBatch(0, 0, 0, 49, positions, routed=routed), x, targets if stage.is_last else None)
    assert stages[-1].routers is not None
    found = float(stages[-1].routers.seen[0, 0])
    assert found == pytest.approx(float(expected), rel=LIMIT) != pytest.approx(float(alone), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [4, 20])
def test_sums_keep_every_bit(dtype: torch.dtype, experts: int) -> None:
    """Also those that are no number in the narrow dtype, forward and backward."""
    routers, generator = Routers(("gate",), 0, experts, 2, 0.1), torch.Generator().manual_seed(1)
    numbers = torch.randint(-(2**31), 2**31, (3, 2 * experts), generator=generator, dtype=torch.int32).float()
    numbers[0, :2] = torch.tensor([0x00018000, 0x3F80FF81], dtype=torch.int32).view(torch.float32)
    hidden = torch.randn((3, 5, 32), generator=generator).to(dtype).requires_grad_(True)
    sums = numbers.clone().requires_grad_(True)
    joined = _Join.apply(hidden, sums, routers)
    assert joined.shape == (3, 5 + routers.places(32), 32)
    leaf = joined.detach().requires_grad_(True)
    parts = _Split.apply(leaf, routers)
    assert torch.equal(parts[0], hidden) and torch.equal(parts[1].view(torch.int32), numbers.view(torch.int32))
    torch.autograd.backward(parts, (hidden.detach() * 2, numbers.flip(1)))
    torch.autograd.backward(joined, leaf.grad)
    assert torch.equal(hidden.grad, hidden.detach() * 2)
    assert torch.equal(sums.grad.view(torch.int32), numbers.flip(1).contiguous().view(torch.int32))


def test_messages_are_as_long_as_planning_counts(chain: TransformersChain) -> None:
    cost = model_cost(chain, full_training(chain), "bf16", TOKENS, dict.fromkeys(chain.kinds, 1.0))
    position = MicroBatch(0, 0, 0, 1, routed=Routed(torch.tensor([TOKENS]), 1.0))
    sent = stages_of(chain, "bf16", 3)[0].forward(position, batch()[0][:1])
    assert sent.nbytes == (TOKENS + 1) * 32 * 2
    assert sent.nbytes <= cost.layers[2].boundary_bytes_per_token * TOKENS < sent.nbytes + 2 * TOKENS


def test_rows_count_up_to_the_last_that_is_learnt() -> None:
    targets = np.array([[1, IGNORED, 2, IGNORED], [IGNORED] * 4, [IGNORED, IGNORED, IGNORED, 5]], np.int32)
    assert Batch(targets, targets, 3).lengths.tolist() == [3, 0, 4]


def test_other_families_are_refused() -> None:
    for family in ("deepseek_v3", "doge", "llama"):
        with refuses("model.router_loss"):
            read_config({**tiny_keys(family), "output_router_logits": True})
