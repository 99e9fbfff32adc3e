"""Members of a group that divide tokens between the shares of layers compute what one rank computes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hetero_mpi.model.group.division import Holding, heads_of
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.decision.rules import may_divide_tokens
from hetero_mpi.planning.types.plan import StagePlan
from tests.model.test_group import LIMIT, ROUNDED, require_equal, same_bits
from tests.support.group_cases import (
    CUTS,
    LAYERS,
    PACKABLE,
    VOCABULARY,
    NamedStart,
    group_chain,
    lora,
    run,
    set_adapters,
    whole_stages,
    widen,
)
from tests.support.thread_group import ThreadGroup, gradients_of

LINEAR = ("lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with linear attention, which everybody computes on all tokens."""
SHORT = ("cohere", "deepseek_v3", "gpt_neox", "gpt_oss", "llama", "olmo2", "youtu")
"""Attention beside the MLP; experts beside a shared one; one matrix of all; sinks; dense; norms over heads; latents."""
CASES = [
    pytest.param(family, shares, recompute, marks=() if family in SHORT else pytest.mark.long)
    for family in DIVIDED_FAMILIES
    if family not in LINEAR
    for shares, recompute in (((5, 1), False), ((3, 2, 1), True))
]


def both(
    chain: TransformersChain, shares: tuple[int, ...], tuning: Tuning | None = None, **options: Any
) -> tuple[list[Stage], ThreadGroup]:
    whole = whole_stages(chain, tuning)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(), tuning=tuning, divide_tokens=True, **options)
    if tuning is not None:
        for own in (*group.members, whole):
            set_adapters(own)
    widen([*whole, *itertools.chain(*group.members)])
    return whole, group


def require_same(
    whole: list[Stage],
    group: ThreadGroup,
    limit: float,
    pass_: Callable[[Sequence[Stage]], list[torch.Tensor]] = run,
) -> None:
    expected, results = pass_(whole), group.together(pass_)
    assert same_bits(results)
    for own, alone in zip(results[0], expected, strict=True):
        assert (own - alone).norm() <= limit * alone.norm()
    require_equal(group.whole([gradients_of(own) for own in group.members], True), gradients_of(whole), limit)


@pytest.mark.parametrize(("family", "shares", "recompute"), CASES)
def test_ranges_give_the_gradients_of_one_rank(family: str, shares: tuple[int, ...], recompute: bool) -> None:
    whole, group = both(group_chain(family), shares, recompute=recompute)
    require_same(whole, group, ROUNDED.get(family, LIMIT))
    norms = [name for name, one in group.divisions.items() if "norm" in name and one.held is Holding.SUMMED]
    assert all(
        own.parameters[name].requires_grad for own in group.members[1] for name in norms if name in own.parameters
    )


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gpt_neox", {"dora": True, "dropout": 0.3}),
        ("llama", {"dropout": 0.3}),
        ("mixtral", {"dropout": 0.3}),
        ("youtu", {}),
    ],
)
def test_ranges_give_the_gradients_of_adapters(family: str, changed: dict[str, Any]) -> None:
    chain = group_chain(family)
    whole, group = both(chain, (4, 2), lora(chain, **changed), recompute=True, head_tokens=7)
    require_same(whole, group, LIMIT)


def test_ranges_of_one_sequence_and_of_fewer_tokens_than_members() -> None:
    for length in (25, 2):
        tokens = torch.arange(length).view(1, length) % VOCABULARY

        def one(stages: Sequence[Stage], tokens: torch.Tensor = tokens) -> list[torch.Tensor]:
            x = tokens
            for stage in stages:
                x = stage.forward(MicroBatch(0, 0, 0, 9), x, tokens if stage.is_last else None)
            gradient = None
            for stage in reversed(stages):
                gradient = stage.backward(0, gradient)
            return [x, stages[0].evaluate(tokens)]

        whole, group = both(group_chain("llama"), (3, 2, 1))
        require_same(whole, group, LIMIT, one)


def test_packed_weights_and_narrow_numbers() -> None:
    """Ranges differ from one rank by no more than shares alone do."""
    chain = group_chain("llama", **PACKABLE, head_dim=64)
    tuning, errors = lora(chain, nf4=True, double=True), {}
    whole = whole_stages(chain, tuning, "bf16", spread=0.02)
    set_adapters(whole, 0.02)
    run(whole)
    expected = gradients_of(whole)
    for ranges in (False, True):
        group = ThreadGroup(chain, CUTS, (2, 1), NamedStart(0.02), "bf16", tuning, divide_tokens=ranges)
        for own in group.members:
            set_adapters(own, 0.02)
        assert same_bits(group.together(run))
        found = group.whole([gradients_of(own) for own in group.members], True)
        errors[ranges] = max(float((found[name] - one).norm() / one.norm()) for name, one in expected.items())
    assert errors[True] < max(1.5 * errors[False], 0.01)


def test_members_keep_their_ranges() -> None:
    """Bytes that backward of repeated blocks waits for, of inputs of blocks: in proportion to heads."""
    chain, kept = group_chain("llama"), {}
    for ranges in (False, True):
        group = ThreadGroup(chain, [(0, LAYERS)], (5, 1), NamedStart(), recompute=True, divide_tokens=ranges)

        def forward(stages: Sequence[Stage]) -> int:
            shapes: list[torch.Size] = []

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                shapes.append(tensor.shape)
                return tensor

            tokens = torch.arange(24).view(1, 24)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                stages[0].forward(MicroBatch(0, 0, 0, 24), tokens, tokens)
            return sum(shape[1] for shape in shapes if len(shape) == 3 and shape[2] == 48)

        kept[ranges] = group.together(forward)
    less = [before - after for before, after in zip(kept[False], kept[True], strict=True)]
    assert less == [chain.blocks * (24 - 20), chain.blocks * (24 - 4)]


def test_which_models_may_divide_tokens() -> None:
    stage = StagePlan((0, 1), 0, LAYERS, 0, shares=(4, 2), divide_tokens=True)
    for family in DIVIDED_FAMILIES:
        chain = group_chain(family)
        cost = model_cost(chain, full_training(chain), "fp32", 16, dict.fromkeys(chain.kinds, 4000.0))
        assert may_divide_tokens(stage, cost) is (family not in LINEAR), family
        assert all(heads_of(chain, block) is not None for block in range(chain.blocks)) is (family not in LINEAR)
