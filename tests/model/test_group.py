"""A stage that a group of ranks holds computes what one rank computes alone. Threads, no MPI."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.custom.custom_chain import CustomChain
from hetero_mpi.model.group.division import divisions, is_of_experts, key_value_heads
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.group.refusals import refusal
from hetero_mpi.model.group.tensor_division import Holding
from hetero_mpi.model.layer import quantize
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.layer.micro_batch import DESIRABLE_CODE, Comparison
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES, UNDIVIDED_FAMILIES
from hetero_mpi.model.tuning import MAGNITUDE, full_training
from tests.support.family_configs import dropout_rates, tiny_keys
from tests.support.group_cases import (
    CUTS,
    EXPERTS,
    HEADS,
    LAYERS,
    PACKABLE,
    WITH_EXPERTS,
    NamedStart,
    batch,
    group_chain,
    lora,
    run,
    set_adapters,
    whole_stages,
    widen,
)
from tests.support.stages import stage_of
from tests.support.thread_group import ThreadGroup, gradients_of, links, parameters_of

LIMIT = 1e-6
"""Of the loss, and of ||difference|| / ||gradient|| of each tensor."""
SHARES = ((3, 3), (4, 2), (3, 2, 1))
SHORT = (
    ("apertus", (3, 2, 1)),  # an activation with parameters of its own
    ("deepseek_v3", (4, 2)),  # experts beside a shared one
    ("cohere", (4, 2)),  # attention beside the MLP; norms with a weight for each head
    ("gpt_neox", (3, 2, 1)),  # one matrix of queries, keys and values; biases
    ("phi", (4, 2)),  # a head with a bias
    ("glm4", (3, 2, 1)),  # two matrices in one
    ("gpt_oss", (4, 2)),  # sinks; experts with biases
    ("olmo2", (3, 2, 1)),  # norms over all heads
    ("qwen3", (3, 3)),  # norms of heads
    ("qwen3_next", (4, 2)),  # linear attention, which everybody computes
    ("youtu", (4, 2)),  # latent attention
)
CASES = [
    pytest.param(family, shares, None, False, marks=() if (family, shares) in SHORT else pytest.mark.long)
    for family, shares in itertools.product(DIVIDED_FAMILIES, SHARES)
]
CASES += [("qwen3_moe", (4, 2), (1, 7), False), ("qwen3_moe", (4, 2), (0, 8), False)]
HEADLESS_SHORT = (
    ("cohere2_moe", (0, 6)),  # attention beside the MLP; embedding and head are one
    ("deepseek_v3", (4, 0, 2)),  # latents that everybody computes; a shared expert; a layer without experts
    ("mixtral", (6, 0)),
    ("qwen3_moe", (0, 6)),  # norms of heads; a bias that the leader adds
)
LORA_SHORT = (("gpt_neox", (4, 2)), ("qwen3", (3, 2, 1)), ("qwen3_next", (4, 2)), ("youtu", (3, 3)))
LORA_CASES = [
    pytest.param(family, shares, {}, False, marks=() if (family, shares) in LORA_SHORT else pytest.mark.long)
    for family, shares in itertools.product(DIVIDED_FAMILIES, SHARES)
]
LORA_CASES += [
    (family, shares, changed, recompute)
    for family, shares, changed in (
        ("llama", (4, 2), {"dropout": 0.3}),
        ("llama", (3, 2, 1), {"dora": True}),
        ("gpt_neox", (4, 2), {"dora": True, "dropout": 0.3}),  # biases; one matrix of queries, keys and values
        ("youtu", (4, 2), {"dora": True, "dropout": 0.3}),  # latents that everybody computes
        ("mixtral", (4, 2), {"dropout": 0.3}),
    )
    for recompute in (False, True)
]


_FP32_INSIDE = (
    "afmoe",
    "deepseek_v2",
    "flex_olmo",
    "lara_mini",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
ROUNDED = {**dict.fromkeys(_FP32_INSIDE, 1e-5), "gpt_oss": 1e-4}
"""Larger limits where much, or everything, rounds to fp32 within: norms over all heads, linear attention, routers."""


def same_bits(results: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all(torch.equal(own, first) for others in results[1:] for own, first in zip(others, results[0], strict=True))


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = LIMIT) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    # The gradient of a single number is a sum of thousands that cancel.
    limits = {name: limit if tensor.numel() > 1 else 10 * limit for name, tensor in expected.items()}
    assert not {name: error for name, error in errors.items() if not error <= limits[name]}


def check_group(
    whole: list[Stage],
    group: ThreadGroup,
    limit: float = LIMIT,
    loss_limit: float = LIMIT,
    wide: bool = True,
    outputs: bool = False,
) -> dict[str, torch.Tensor]:
    """All members have the same bits, and the loss and the gradients of one rank, which are returned. ``outputs``: and those of
    every stage; ``wide``: compute in fp64."""
    if wide:
        widen([*whole, *itertools.chain(*group.members)])
    expected, results = run(whole), group.together(run)
    assert same_bits(results)
    for place in range(len(expected)) if outputs else (2,):
        assert (results[0][place] - expected[place]).norm() <= loss_limit * expected[place].norm()
    alone = gradients_of(whole)
    require_equal(group.whole([gradients_of(own) for own in group.members], True), alone, limit)
    return alone


OF_EXPERTS = {2: (3, 5), 3: (0, 6, 2)}
for family, shares in itertools.product(WITH_EXPERTS, ((6, 0), (0, 6), (4, 0, 2))):
    short, short_again = (family, shares) in HEADLESS_SHORT, family == "exaone_moe" and shares == (6, 0)
    experts = OF_EXPERTS[len(shares)]
    CASES.append(pytest.param(family, shares, experts, False, marks=() if short else pytest.mark.long))
    if shares != (0, 6):
        CASES.append(pytest.param(family, shares, experts, True, marks=() if short_again else pytest.mark.long))


@pytest.mark.parametrize(("family", "shares", "experts", "recompute"), CASES)
def test_a_group_gives_the_gradients_of_one_rank(
    family: str, shares: tuple[int, ...], experts: tuple[int, ...] | None, recompute: bool
) -> None:
    """Experts are shared by themselves. A member with experts needs no heads, columns of MLPs, nor words: it takes part in every
    exchange, and what everybody holds has gradients of zero there. Recomputed blocks begin and stop at the same exchanges."""
    chain = group_chain(family)
    assert key_value_heads(chain) == HEADS and refusal(chain, full_training(chain), shares, experts) is None
    whole = whole_stages(chain)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(), experts=experts, recompute=recompute)
    if 0 in shares:
        held = parameters_of(group.members[shares.index(0)])
        assert {is_of_experts(chain, name) for name in held if group.divisions[name].holding is Holding.CUT} == {True}
    elif experts is not None:
        held = [parameters_of(own).get("model.layers.0.mlp.experts.down_proj", torch.empty(0)) for own in group.members]
        assert tuple(map(len, held)) == experts
    check_group(whole, group, ROUNDED.get(family, LIMIT), ROUNDED.get(family, LIMIT), outputs=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_whom_no_token_chose(recompute: bool) -> None:
    """Their member takes part in every exchange nevertheless. In fp32, by the kernels that training uses."""
    chain = group_chain("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
    whole = whole_stages(chain, spread=0.05)
    group = ThreadGroup(chain, CUTS, (3, 2, 1), NamedStart(0.05), recompute=recompute, experts=(2, 3, 3))
    for stage in (*whole, *itertools.chain(*group.members)):
        for name, parameter in stage.parameters.items():
            if name.endswith("mlp.gate.weight"):
                parameter.data[2:] = parameter.data[:2].mean(0)  # never the largest
    experts = check_group(whole, group, 1e-5, wide=False)["model.layers.0.mlp.experts.down_proj"]
    assert experts[:2].any() and not experts[2:].any()


@pytest.mark.parametrize(("family", "shares", "changed", "recompute"), LORA_CASES)
def test_a_group_gives_the_gradients_of_adapters(
    family: str, shares: tuple[int, ...], changed: dict[str, Any], recompute: bool
) -> None:
    """Masks are those of one rank, in whatever part of a layer; lengths of rows are those of whole ones."""
    chain = group_chain(family)
    tuning = lora(chain, **changed)
    assert refusal(chain, tuning, shares) is None
    whole = whole_stages(chain, tuning)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(), tuning=tuning, recompute=recompute)
    if changed:
        assert refusal(chain, tuning, (6, 0)) is not None
    else:
        start = group.whole([parameters_of(own) for own in group.members], False)
        assert all(torch.equal(start[name], value) for name, value in parameters_of(whole).items())
    for own in (*group.members, whole):
        set_adapters(own)
    check_group(whole, group, ROUNDED.get(family, LIMIT), ROUNDED.get(family, LIMIT))


def test_magnitudes_begin_with_the_lengths_of_whole_rows() -> None:
    chain = group_chain("llama", **PACKABLE, head_dim=64)
    for dtype, nf4 in (("fp32", False), ("bf16", False), ("bf16", True)):
        tuning = lora(chain, nf4=nf4, dora=True)
        whole = whole_stages(chain, tuning, dtype)
        group = ThreadGroup(chain, CUTS, (2, 1), NamedStart(), dtype, tuning)

        def started(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
            found = [own.divided.start_magnitudes(own.model) for own in stages if own.divided is not None]
            return {name: value for own in found for name, value in own.items()}

        first, second = group.together(started)
        assert len(first) == 4 * 2 and all(torch.equal(first[name], second[name]) for name in first)
        own = {name: value for stage in whole for name, value in (stage.masters or stage.parameters).items()}
        for name, value in first.items():
            torch.testing.assert_close(
                value, own[f"{name}{MAGNITUDE}"].detach(), rtol=1e-2 if dtype == "bf16" else LIMIT, atol=0.0
            )


@pytest.mark.parametrize(("shares", "recompute"), [((4, 2), False), ((0, 6), True)])
def test_the_loss_of_routers_counts_once(shares: tuple[int, ...], recompute: bool) -> None:
    chain = group_chain("mixtral", output_router_logits=True, router_aux_loss_coef=1.0)
    whole = whole_stages(chain)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(), recompute=recompute, experts=(3, 5))
    alone = check_group(whole, group, outputs=True)
    without = whole_stages(group_chain("mixtral"))
    widen(without)
    run(without)
    router = "model.layers.0.mlp.gate.weight"
    assert (alone[router] - gradients_of(without)[router]).norm() > 0.01 * alone[router].norm()


@pytest.mark.parametrize("repeated", [False, True])
def test_adapters_of_heads_that_another_member_has(repeated: bool) -> None:
    """In fp32. Of the adapters everybody has one side, which the member without heads leaves as it is."""
    chain, experts = group_chain("deepseek_v3"), (2, 6)
    tuning = lora(chain)
    whole = whole_stages(chain, tuning, spread=0.05)
    group = ThreadGroup(chain, CUTS, (6, 0), NamedStart(0.05), tuning=tuning, recompute=repeated, experts=experts)
    for own in (*group.members, whole):
        set_adapters(own)
    check_group(whole, group, 1e-5, wide=False)
    assert not any(gradient.any() for name, gradient in gradients_of(group.members[1]).items() if "self_attn" in name)


def unpacked(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import dequantize_4bit

    found = {name: parameter for stage in stages for name, parameter in stage.model.named_parameters()}
    packed = {name: one for name, one in found.items() if getattr(one, "quant_state", None) is not None}
    values = {name.replace(".base_layer", ""): dequantize_4bit(p.data, p.quant_state) for name, p in packed.items()}
    # Experts are packed flat.
    whole = {name: found.get(name.removesuffix("_nf4")) if name.endswith("_nf4") else None for name in values}
    return {n.removesuffix("_nf4"): v if whole[n] is None else v.view(whole[n].shape) for n, v in values.items()}


ADAPTED = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTED_SHORT = (
    ("deepseek_v3", (4, 0, 2), (3, 5, 0)),
    ("gpt_oss", (6, 0), (1, 7)),
    ("mixtral", (4, 2), None),
    ("qwen3_moe", (6, 0), (1, 7)),  # peft adapts a single expert as it does a matrix
)
ADAPTED_CASES = [
    pytest.param(family, shares, experts, marks=() if (family, shares, experts) in ADAPTED_SHORT else pytest.mark.long)
    for family in WITH_EXPERTS
    for shares, experts in (((4, 2), None), ((4, 0, 2), (3, 5, 0)), ((6, 0), (1, 7)), ((0, 6), (8, 0)))
]


@pytest.mark.parametrize(("family", "shares", "experts"), ADAPTED_CASES)
def test_adapters_of_experts_are_divided_with_them(
    family: str, shares: tuple[int, ...], experts: tuple[int, ...] | None
) -> None:
    chain = group_chain(family)
    tuning = lora(chain, parameters=ADAPTED)
    assert refusal(chain, tuning, shares, experts) is None
    whole = whole_stages(chain, tuning, spread=0.05)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(0.05), tuning=tuning, experts=experts)
    start = group.whole([parameters_of(own) for own in group.members], False)
    assert all(torch.equal(start[name], value) for name, value in parameters_of(whole).items())
    for own in (*group.members, whole):
        set_adapters(own, 0.1)
    widen([*whole, *itertools.chain(*group.members)])
    expected, results = run(whole), group.together(run)
    assert same_bits(results)
    torch.testing.assert_close(results[0][2], expected[2], rtol=LIMIT, atol=0.0)
    alone = gradients_of(whole)
    assert sum(gradient.norm() > 0 for name, gradient in alone.items() if ".experts." in name) >= 4
    # Of an expert by itself that no token chose there is no gradient, which the optimizer takes for zeros.
    none = [
        {n: torch.zeros_like(p) for n, p in parameters_of(own).items() if ".experts." in n} for own in group.members
    ]
    found = [{**zeros, **gradients_of(own)} for zeros, own in zip(none, group.members, strict=True)]
    require_equal(group.whole(found, True), alone, ROUNDED.get(family, LIMIT))
    # More of them are trained by whom there are more experts.
    counts = [sum(p.numel() for n, p in parameters_of(own).items() if ".experts." in n) for own in group.members]
    held = experts or (5, 3)
    assert [count * sum(held) for count in counts] == [sum(counts) * own for own in held]


@pytest.mark.parametrize(("shares", "experts"), [((2, 1), (1, 7)), ((3, 0), (0, 8))])
def test_adapters_of_packed_experts_are_divided_with_them(shares: tuple[int, ...], experts: tuple[int, ...]) -> None:
    chain = group_chain("mixtral", **PACKABLE, head_dim=64)
    tuning = lora(chain, nf4=True, double=True, parameters=ADAPTED)
    assert refusal(chain, tuning, shares, experts) is None
    whole = whole_stages(chain, tuning, spread=0.02)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(0.02), tuning=tuning, experts=experts)
    for own in (*group.members, whole):
        set_adapters(own, 0.02)
    check_group(whole, group, 1e-5, wide=False)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("family", "packed", "shares", "experts"),
    [
        ("llama", 7, (2, 1), None),
        pytest.param("glm", 6, (2, 1), None, marks=pytest.mark.slow),
        pytest.param("mixtral", 6, (2, 1), None, marks=pytest.mark.slow),
        ("mixtral", 6, (3, 0), (2, 6)),
    ],
)
def test_nf4_weights_are_those_of_one_rank(
    family: str, packed: int, shares: tuple[int, ...], experts: tuple[int, ...] | None, double: bool
) -> None:
    chain = group_chain(family, **PACKABLE, head_dim=64)
    tuning = lora(chain, nf4=True, double=double)
    assert refusal(chain, tuning, shares, experts) is None
    whole = whole_stages(chain, tuning, spread=0.02)
    group = ThreadGroup(chain, CUTS, shares, NamedStart(0.02), tuning=tuning, experts=experts)
    expected, found = unpacked(whole), group.whole([unpacked(own) for own in group.members], False)
    assert len(expected) == 4 * packed and all(torch.equal(found[name], value) for name, value in expected.items())
    for own in (*group.members, whole):
        set_adapters(own, 0.02)
    check_group(whole, group, 3e-5, wide=False)  # packed weights are multiplied in fp32: they differ by rounding


@pytest.mark.parametrize(("family", "experts"), [("llama", None), ("mixtral", (3, 5)), ("mixtral", (8, 0))])
def test_scales_that_share_scales_are_those_of_whole_tensors(
    family: str, experts: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, packed in pieces; the last scale of scales is of fewer than 256, and cuts fall within others."""
    monkeypatch.setattr(quantize, "_PIECE", 4096)
    chain, cuts = group_chain(family, **PACKABLE, head_dim=64), [(0, LAYERS)]
    tuning = lora(chain, nf4=True, double=True)
    whole = whole_stages(chain, tuning, "bf16", cuts, 0.02)
    group = ThreadGroup(chain, cuts, (2, 1), NamedStart(0.02), "bf16", tuning, experts=experts)
    expected, found = unpacked(whole), group.whole([unpacked(own) for own in group.members], False)
    assert any(value.numel() // quantize.BLOCK_SIZE % 256 for value in expected.values())
    assert expected.keys() == found.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_every_word_is_held_though_their_number_is_no_multiple_of_a_block() -> None:
    chain = group_chain("llama", **PACKABLE, head_dim=64, vocab_size=331)
    tuning = lora(chain, nf4=True)
    assert refusal(chain, tuning, (2, 1)) is None
    assert divisions(chain, tuning, (2, 1), [0])["model.embed_tokens.weight"].bounds[-1] == 331


@pytest.mark.parametrize(
    ("family", "shares", "experts", "nf4", "double"),
    [
        ("gpt_neox", (4, 2), None, False, False),
        ("llama", (2, 1), None, True, False),
        ("llama", (2, 1), None, True, True),
        ("mixtral", (0, 3), (5, 3), True, True),
    ],
)
def test_frozen_parts_are_taken_over_by_the_next_stage(
    family: str, shares: tuple[int, ...], experts: tuple[int, ...] | None, nf4: bool, double: bool
) -> None:
    chain = group_chain(family, **PACKABLE, head_dim=64) if nf4 else group_chain(family)
    tuning = lora(chain, nf4=nf4, double=double)
    group = ThreadGroup(chain, [(0, LAYERS)], shares, NamedStart(), tuning=tuning, experts=experts)
    before = group.together(run)
    kept = [stage.frozen_layers(range(LAYERS)) for (stage,) in group.members]
    again = ThreadGroup(chain, [(0, LAYERS)], shares, None, tuning=tuning, kept=kept, experts=experts)
    assert same_bits([*before, *again.together(run)])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_stage_of_the_whole_model(tied: bool) -> None:
    chain = group_chain("llama", tie_word_embeddings=tied)
    whole = whole_stages(chain, cuts=[(0, LAYERS)])
    group = ThreadGroup(chain, [(0, LAYERS)], (2, 3, 1), NamedStart())
    widen([*whole, *itertools.chain(*group.members)])
    run(whole)
    group.together(run)
    require_equal(group.whole([gradients_of(own) for own in group.members], True), gradients_of(whole))


def test_members_hold_their_parts_of_the_start() -> None:
    chain = group_chain("gpt_neox")
    (whole,) = whole_stages(chain, cuts=[(0, LAYERS)])
    group = ThreadGroup(chain, [(0, LAYERS)], (4, 2), NamedStart())
    held = [{name: p.detach() for name, p in own.parameters.items()} for (own,) in group.members]
    for name, tensor in group.whole(held, False).items():
        assert torch.equal(tensor, whole.parameters[name])
    (leader,), (other,) = group.members
    assert set(leader.parameters) == set(chain.parameters)
    assert set(chain.parameters) - set(other.parameters) == {
        f"gpt_neox.layers.{block}.{name}.bias"
        for block in range(4)
        for name in ("attention.dense", "mlp.dense_4h_to_h")
    }
    for name, parameter in other.parameters.items():
        division = group.divisions[name]
        assert parameter.shape == division.shape(chain.parameters[name].shape, 1)
        assert parameter.requires_grad == (division.holding is not Holding.WHOLE)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "nothing of the whole is kept"
    block = leader.model.gpt_neox.layers[0]
    assert (block.attention.query_key_value.out_features, block.attention.dense.in_features) == (96, 32)
    assert leader.model.lm_head.out_features == leader.model.gpt_neox.embed_in.num_embeddings == 212


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_recomputation_changes_no_bit(family: str) -> None:
    chain = group_chain(family)
    groups = [ThreadGroup(chain, CUTS, (4, 2), NamedStart(), recompute=repeated) for repeated in (False, True)]
    results = [group.together(run) for group in groups]
    assert same_bits([*results[0], *results[1]])
    kept, repeated = (group.whole([gradients_of(own) for own in group.members], True) for group in groups)
    assert all(torch.equal(kept[name], repeated[name]) for name in kept)
    assert groups[1].links[0].calls > groups[0].links[0].calls


def test_parallel_attention_and_mlp_share_one_exchange_of_the_gradient() -> None:
    calls = {}
    for family in ("llama", "cohere"):
        group = ThreadGroup(group_chain(family), CUTS, (4, 2), NamedStart())
        group.together(run)
        calls[family] = group.links[0].calls
    # Per block two sums forward; backward two, or one. Embedding, head, and the loss's maximum and sum.
    assert calls == {"llama": 4 * 4 + 4, "cohere": 4 * 3 + 4}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_runs_give_the_same_bits(dtype: str) -> None:
    chain = group_chain("qwen3")
    runs: list[Any] = []
    for _ in range(2):
        group = ThreadGroup(chain, CUTS, (3, 2, 1), NamedStart(), dtype)
        results = group.together(run)
        assert same_bits(results)
        runs.append((results, [gradients_of(own) for own in group.members]))
    (first, gradients), (second, again) = runs
    assert same_bits([*first, *second])
    assert all(torch.equal(own[name], other[name]) for own, other in zip(gradients, again, strict=True) for name in own)


def test_bf16() -> None:
    """As near to fp32 as one rank in bf16 is."""
    chain = group_chain("llama")
    group = ThreadGroup(chain, CUTS, (4, 2), NamedStart(), "bf16")
    exact, alone = whole_stages(chain), whole_stages(chain, dtype="bf16")
    losses = [run(exact)[2], run(alone)[2], group.together(run)[0][2]]
    assert losses[2].dtype == torch.float32
    assert abs(losses[2] - losses[0]) <= 2 * abs(losses[1] - losses[0]) + 1e-3
    found = group.whole([gradients_of(own) for own in group.members], True)
    expected, rounded = gradients_of(exact), gradients_of(alone)
    for name in expected:
        error, usual = ((g[name].float() - expected[name]).norm() / expected[name].norm() for g in (found, rounded))
        assert error <= 2 * usual + 1e-2, name
    assert all(stage.masters.keys() == stage.parameters.keys() for stage in group.members[0])
    norm = "model.layers.0.input_layernorm.weight"
    assert norm in group.members[0][0].masters and norm not in group.members[1][0].masters


def test_evaluation() -> None:
    """The loss, and how many targets are the likeliest words."""
    chain = group_chain("smollm3")
    tokens, targets = batch()
    alone = whole_stages(chain)
    hidden = functools.reduce(lambda x, stage: stage.evaluate(x), alone[:-1], tokens)
    with torch.no_grad():
        targets[0, :9] = alone[-1].apply(hidden).argmax(-1)[0, :9]

    def evaluated(stages: Sequence[Stage]) -> torch.Tensor:
        x = tokens
        for stage in stages:
            x = stage.evaluate(x, targets if stage.is_last else None)
        return torch.cat([x.reshape(1), stages[-1].rewards[0, 0].float()])

    group = ThreadGroup(chain, CUTS, (3, 2, 1), NamedStart())
    found = group.together(evaluated)
    assert same_bits([[one] for one in found])
    assert 9 <= found[0][1] < 20
    torch.testing.assert_close(found[0], evaluated(alone), rtol=LIMIT, atol=0.0)


@pytest.mark.parametrize("method", ["dpo", "hinge", "robust", "ipo", "simpo", "orpo", "kto"])
def test_preferences(method: Any) -> None:
    chain = group_chain("llama")
    tokens, targets = batch()
    targets[targets == IGNORED] = 7
    targets[0, 4] = IGNORED
    positions = (torch.arange(24) % 6).expand(2, 24)
    train = TrainTable(preference=method, preference_beta=0.5)
    answers = (positions > 2) * (DESIRABLE_CODE + (torch.arange(24) > 12) if method == "kto" else 1)
    comparison = Comparison(train, answers, torch.tensor([[0.3, -0.2, 0, 0], [0.1, 0, 0, 0.5]]), 0.7, 0.2)
    position = MicroBatch(0, 0, 0, 4, positions, comparison)

    def compared(stages: Sequence[Stage]) -> torch.Tensor:
        (stage,) = stages
        loss = stage.forward(position, tokens, targets)
        stage.backward(0)
        return loss

    whole = whole_stages(chain, cuts=[(0, LAYERS)])
    group = ThreadGroup(chain, [(0, LAYERS)], (4, 2), NamedStart())
    widen([*whole, *itertools.chain(*group.members)])
    torch.testing.assert_close(group.together(compared)[0], compared(whole), rtol=LIMIT, atol=0.0)
    require_equal(group.whole([gradients_of(own) for own in group.members], True), gradients_of(whole))


def test_a_head_on_the_rank_of_the_embedding_shares_its_part() -> None:
    chain = group_chain("gemma")
    for link in links(2):
        own = [DividedLayers(chain, full_training(chain), StageGroup((4, 2), link)) for _ in range(2)]
        first = stage_of(chain, 0, 2, Backend(), "fp32", NamedStart(), divided=own[0])
        embedding = first.model_parameter(chain.tied[1]) if chain.tied else None
        last = stage_of(chain, 5, LAYERS, Backend(), "fp32", NamedStart(), first_stage=first, divided=own[1])
        assert embedding is not None and last.tied_head is not None
        assert last.tied_head.data_ptr() == embedding.data_ptr() and last.tied_head.shape == embedding.shape


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NF4 = {"nf4": True}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any], tuple[int, ...], Any, str]] = [
    *(("llama", {}, None, {}, shares, None, f"model's 6; found {', '.join(map(str, shares))}")
      for shares in ((6, 0), (4, 3), (2, 2), (7, -1), ())),
    *(("mixtral", {}, None, {}, (4, 2), experts, f"model's {EXPERTS}; found {', '.join(map(str, experts))}")
      for experts in ((1, 2), (8,), (9, -1))),
    ("llama", {}, None, {}, (4, 2), (2, 2), "llama"),
    ("mixtral", {}, None, {}, (6, 0), None, "found 6, 0:"),
    ("mixtral", {}, None, {}, (6, 0), (8, 0), "found 6, 0; experts 8, 0:"),
    ("mixtral", {"num_local_experts": 2, "num_experts": 2}, None, {}, (5, 1), None, "model.layers.0.mlp.experts"),
    ("llama", {"vocab_size": 2, "num_key_value_heads": 4}, None, {}, (1, 3), None, "weight, which is sharded at 0, 0, 2"),
    ("gemma4_unified_text", {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, None, {}, (4, 2), None,
     "block 1 has 3, block 0 has 6"),
    ("llama", dropout_rates("llama"), None, {}, (4, 2), None, "attention_dropout = 0.1"),
    ("gpt_neox", {"hidden_dropout": 0.1}, None, {}, (4, 2), None, "hidden_dropout = 0.1"),
    ("mixtral", {"router_jitter_noise": 0.1}, None, {}, (4, 2), None, "router_jitter_noise = 0.1"),
    ("qwen3_next", {}, {"dropout": 0.1}, {}, (4, 2), None, "[adapter] dropout = 0.1"),
    ("llama", {}, None, {"optimizer": "adamw_8bit", "moments": {O_PROJ: "eight_bit"}}, (4, 2), None,
     f"{O_PROJ}, 48 x 96, at 0, 64, 96"),
    ("llama", {}, None, {"optimizer": "muon", "moments": {O_PROJ: "one"}}, (4, 2), None, "muon"),
    ("llama", {**PACKABLE, "head_dim": 16}, NF4, {}, (2, 1), None, "o_proj.weight, 192 x 96, at the columns 0, 64, 96"),
    ("mixtral", {"hidden_size": 24, "num_attention_heads": 12}, NF4, {}, (4, 2), None, "64 weights"),
    ("llama", {**PACKABLE, "intermediate_size": 416, "head_dim": 64}, NF4, {}, (2, 1), None, "416"),
]  # fmt: skip
"""(family, changes of its configuration, of an adapter, of full training, shares, experts, values of the reason)."""


@pytest.mark.parametrize(("family", "changed", "adapter", "tuning", "shares", "experts", "values"), REFUSED)
def test_what_cannot_be_divided_is_refused(
    family: str, changed: Any, adapter: Any, tuning: Any, shares: Any, experts: Any, values: str
) -> None:
    chain = group_chain(family, **changed)
    trained = replace(full_training(chain), **tuning) if adapter is None else lora(chain, **adapter)
    assert values in (refusal(chain, trained, shares, experts) or "")


def test_what_can_be_divided_nevertheless() -> None:
    few, llama, linear = (
        group_chain("mixtral", num_local_experts=2, num_experts=2),
        group_chain("llama"),
        group_chain("qwen3_next"),
    )
    assert refusal(few, full_training(few), (5, 1), (2, 0)) is None
    whole = replace(full_training(llama), optimizer="adamw_8bit", moments={"model.norm.weight": "eight_bit"})
    assert refusal(llama, whole, (4, 2)) is None
    assert refusal(linear, lora(linear, dropout=0.1, targets=["q_proj", "o_proj"]), (4, 2)) is None
    own = CustomChain("mine", (), {}, False, F.mse_loss, (np.zeros(1), np.zeros(1)), 0)
    assert "mine" in (refusal(own, full_training(own), (4, 2)) or ""), "layers of a user's own are refused"


OTHERS = [
    pytest.param(family, marks=() if family in ("phi3", "kimi_linear") else pytest.mark.long)
    for family in UNDIVIDED_FAMILIES
]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_refused_by_name(family: str) -> None:
    chain = TransformersChain(read_config(tiny_keys(family)))
    found = refusal(chain, full_training(chain), (4, 2)) or ""
    assert family in found and UNDIVIDED_FAMILIES[family] in found


def test_the_manual_says_which_families_are_refused_and_why() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tensor-parallelism.md").read_text()
    rows = re.findall(r"^\| (.*) \| the family (.*) \|$", text, re.MULTILINE)
    assert {name: reason for names, reason in rows for name in names.split(", ")} == UNDIVIDED_FAMILIES
