"""What planning believes of a member of a group, beside what the member really has."""

from __future__ import annotations

import math

import pytest

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.group.division import divisions
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES
from hetero_mpi.model.tuning import Tuning, full_training
from tests.support.group_cases import HEADS, PACKABLE, WITH_EXPERTS, group_chain, lora


def chain_cost(family: str, tuned: str):  # type: ignore[no-untyped-def]
    chain = group_chain(family)
    tuning: Tuning = full_training(chain)
    if tuned == "lora":
        tuning = adapter_tuning(chain, AdapterTable(method="lora", rank=6, targets=["q_proj", "o_proj"]), False, False)
    return chain, tuning, model_cost(chain, tuning, "fp32", 16, dict.fromkeys(chain.kinds, 4000.0))


@pytest.mark.parametrize(
    ("family", "shares", "experts"),
    [
        *((family, (4, 2), None) for family in ("llama", "qwen3", "smollm3", "youtu")),
        ("mixtral", (4, 2), (1, 7)),
        ("qwen3_moe", (4, 2), (8, 0)),
        ("cohere2_moe", (6, 0), (2, 6)),
        ("deepseek_v3", (0, 6), (8, 0)),
    ],
)
def test_a_member_holds_as_many_parameters_as_planning_believes(
    family: str, shares: tuple[int, int], experts: tuple[int, int] | None
) -> None:
    chain, tuning, cost = chain_cost(family, "full")
    assert cost.heads == HEADS and cost.experts == (sum(experts) if experts is not None else None)
    parts = divisions(chain, tuning, shares, range(chain.layer_count), experts)
    specs = {**chain.parameters, **chain.constants}
    for member, share in enumerate(shares):
        believed = cost.part(share / HEADS, experts[member] / sum(experts) if experts else share / HEADS).layers
        for index in range(chain.layer_count):
            own = [name for name, spec in specs.items() if spec.layer == index]
            held = sum(math.prod(parts[name].shape(specs[name].shape, member)) for name in own)
            if index == chain.layer_count - 1 and chain.tied is not None:
                matrix = chain.tied[1]
                held += math.prod(parts[matrix].shape(specs[matrix].shape, member))
            assert believed[index].parameters == pytest.approx(held, rel=0.03), (index, member)


def test_of_adapters_the_parts_beside_cut_sides_are_divided() -> None:
    """Of q_proj (rows are cut) B, of o_proj (columns are cut) A: half of the numbers where widths are alike."""
    _, tuning, cost = chain_cost("llama", "lora")
    block = cost.layers[1]
    cut = sum(s.count for s in tuning.specs(1, 2) if ("q_proj.lora_B" in s.name or "o_proj.lora_A" in s.name))
    assert block.divided_trainable == cut and 0 < cut < block.trainable_parameters


def test_members_hold_plain_scales_though_they_were_quantised_twice() -> None:
    chain = group_chain("mixtral", **PACKABLE, head_dim=64)
    plain, twice = (
        model_cost(chain, lora(chain, nf4=True, double=double), "bf16", 16, dict.fromkeys(chain.kinds, 1.0))
        for double in (False, True)
    )
    assert twice.layers[1].parameter_bytes < 0.95 * plain.layers[1].parameter_bytes
    for share in (1 / 3, 2 / 3):
        held, expected = twice.part(share, share).layers[1], plain.part(share, share).layers[1]
        assert held.parameter_bytes == pytest.approx(expected.parameter_bytes, rel=0.002)
        assert twice.part(share, share).layers[0] == plain.part(share, share).layers[0]


def test_every_divided_family_says_what_it_divides() -> None:
    for family in DIVIDED_FAMILIES:
        _, _, cost = chain_cost(family, "full")
        assert cost.heads == HEADS and cost.layers[1].group_sums >= 1
        assert (cost.experts is not None) == (
            family in WITH_EXPERTS
        )  # without which ranks without heads are not planned
        for layer in cost.layers:
            assert 0 < layer.divided_parameters <= layer.parameters
            assert layer.divided_trainable <= min(layer.divided_parameters, layer.trainable_parameters)


def test_a_model_that_cannot_be_divided_has_no_heads() -> None:
    chain = group_chain("llama", attention_dropout=0.1)
    cost = model_cost(chain, full_training(chain), "fp32", 16, dict.fromkeys(chain.kinds, 1.0))
    assert cost.heads is None and cost.layers[1].divided_parameters == 0
