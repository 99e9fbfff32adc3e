"""Groups that divide tokens between the shares of layers: what that takes, what it costs, and when the planner chooses it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_mpi.errors import UserError
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.group_costs import hidden_sum_s, sum_s
from hetero_mpi.planning.memory import memory_of, ranged_costs
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.report.plan_text import heads_text
from tests.support.planning_samples import make_model, make_profile

LONG, HEADS, KEPT = 1000, 8, 2000.0
REQUEST = PlanRequest(2, LONG, (1,), recompute_choices=(False, True), groups=True)


def cluster(memory_bytes: int, ranks: int = 2) -> ClusterProfile:
    """Ranks of one host. Blocks keep 2,000 bytes a token, of which members divide half; hidden states have 100."""
    model = make_model(8)
    parts = {"divided_activations": 0.5, "divided_workspace": 0.5, "group_sums": 2}
    kept = {"activation_bytes_per_token": KEPT, "workspace_bytes_per_token": KEPT}
    blocks = (replace(layer, **kept, **parts, divided_parameters=400) for layer in model.layers[1:-1])
    ends = (replace(layer, divided_parameters=1000, group_sums=1) for layer in (model.layers[0], model.layers[-1]))
    embedding, head = ends
    model = replace(model, layers=(embedding, *blocks, head), heads=HEADS)
    profile = make_profile([1.0] * ranks, model, memory_bytes, bytes_per_s=1e6)
    return replace(profile, devices=tuple(replace(device, host="box") for device in profile.devices))


def plan_of(stage: StagePlan) -> Plan:
    return Plan((PipelinePlan((stage,), 1, 2),), 2, LONG, 10)


def group(**changed: object) -> StagePlan:
    return replace(StagePlan((0, 1), 0, 10, 0, shares=(6, 2), divide_tokens=True), **changed)  # type: ignore[arg-type]


def test_a_member_keeps_its_range_of_what_all_compute() -> None:
    """Half of a block's bytes are divided; of the others, 200 a token are hidden states that enter attention and MLP."""
    for share in (0.75, 0.25):
        part = cluster(10**9).model.part(share, share)
        block = ranged_costs(part, share).layers[1]
        assert block.activation_bytes_per_token == pytest.approx(share * KEPT + (1 - share) * 200)
        assert block.workspace_bytes_per_token == pytest.approx(share * KEPT + (1 - share) * 200 + 2 * 100)
        assert ranged_costs(part, share).layers[0] == part.layers[0]


def test_repeated_blocks_keep_ranges_of_their_inputs_and_rows_are_as_long_as_the_longest() -> None:
    profile = cluster(10**9)
    for member, share in enumerate((0.75, 0.25)):
        whole, ranged = (
            memory_of(profile, plan_of(one).pipelines[0], one, LONG, (2, 0), member)
            for one in (group(divide_tokens=False, recompute=True), group(recompute=True))
        )
        assert whole.activations - ranged.activations == pytest.approx(2 * 8 * 100 * LONG * (1 - share), abs=2)
        assert ranged.staging == pytest.approx(1.5 * whole.staging)


def test_sums_of_ranges_go_in_two_halves() -> None:
    """As many bytes where ranges are alike, longer rows where they are not; copies of a range more in either way."""
    profile = cluster(10**9)
    assert hidden_sum_s(profile, (0, 1), LONG, 0.5) == pytest.approx(hidden_sum_s(profile, (0, 1), LONG))
    assert hidden_sum_s(profile, (0, 1), LONG, 0.75) == pytest.approx(sum_s(profile, (0, 1), 1.5 * 100 * LONG))
    copying = [replace(one, device_to_host_bytes_per_s=1e6, copy_latency_s=0.1) for one in profile.devices]
    cards = replace(profile, devices=tuple(copying))
    more_s = hidden_sum_s(cards, (0, 1), LONG, 0.5) - hidden_sum_s(cards, (0, 1), LONG)
    assert more_s == pytest.approx(2 * 0.1 + 0.5 * 100 * LONG / 1e6)


def test_the_planner_divides_tokens_where_the_group_does_not_fit_otherwise() -> None:
    roomy = make_plan(cluster(10**9), REQUEST)
    assert not any(stage.divide_tokens for _, _, stage in roomy.plan.numbered)
    narrow = cluster(4_400_000)
    found = make_plan(narrow, REQUEST)
    ((_, _, stage),) = found.plan.numbered
    assert stage.grouped and stage.divide_tokens and heads_text(stage).endswith("heads and tokens")
    assert any("as much of every sequence between attention and MLPs" in reason for reason in found.reasons)
    assert complete_plan(found.plan, narrow, REQUEST).predicted_step_s == found.predicted_step_s
    with pytest.raises(UserError, match="short by"):
        complete_plan(plan_of(replace(stage, divide_tokens=False)), narrow, REQUEST)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (group(ranks=(0,), shares=()), "divide_tokens = true and one rank"),
        (group(shares=(8, 0)), "asks for heads on every rank"),
    ],
)
def test_rules(stage: StagePlan, text: str) -> None:
    with pytest.raises(UserError, match=text):
        complete_plan(plan_of(stage), cluster(10**9), REQUEST)


def test_linear_attention_is_refused() -> None:
    profile = cluster(10**9)
    linear = replace(profile.model.layers[3], group_sums=1)
    model = replace(profile.model, layers=(*profile.model.layers[:3], linear, *profile.model.layers[4:]))
    with pytest.raises(UserError, match="which linear attention is not; leave it out"):
        complete_plan(plan_of(group()), replace(profile, model=model), REQUEST)
