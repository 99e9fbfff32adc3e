"""Heads that compute some tokens at a time: what that takes, what it costs, and when the planner chooses it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.durations import duration
from hetero_mpi.planning.memory import memory_of, sliced_costs
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.report.plan_text import stage_table
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_model, make_profile

LOGITS = 20_000.0
"""Bytes of a token."""
LONG = 3000


def wordy(model: ModelCost) -> ModelCost:
    """``model`` with many words: the head keeps its logits and computes with two tensors as large."""
    head = replace(
        model.layers[-1],
        activation_bytes_per_token=300 + LOGITS,
        workspace_bytes_per_token=2 * LOGITS,
        logits_bytes_per_token=LOGITS,
        divided_activations=LOGITS / (300 + LOGITS),
        divided_workspace=1.0,
    )
    return replace(model, layers=(*model.layers[:-1], head))


def plan_of(*stages: StagePlan, sequence: int = LONG) -> Plan:
    return Plan((PipelinePlan(stages, 1, 2),), 2, sequence, 4)


def cluster(memory_bytes: int, ranks: int = 1) -> ClusterProfile:
    return make_profile([1.0] * ranks, wordy(make_model()), memory_bytes)


def test_the_logits_of_a_slice_take_the_place_of_all() -> None:
    profile, whole = cluster(10**9), StagePlan((0,), 0, 4, 0)
    sliced = replace(whole, head_tokens=100)
    parts = [memory_of(profile, plan_of(one).pipelines[0], one, LONG, (1, 0)) for one in (whole, sliced)]
    assert parts[0].activations - parts[1].activations == LONG * LOGITS
    assert (parts[0].workspace, parts[1].workspace) == (LONG * 2 * LOGITS, 100 * 3 * LOGITS)
    longer = replace(whole, head_tokens=2 * LONG)
    assert memory_of(profile, plan_of(longer).pipelines[0], longer, LONG, (1, 0)).workspace == LONG * 3 * LOGITS


def test_members_of_a_group_have_logits_of_their_words() -> None:
    """With two thirds of them, of a slice of 100 tokens; what is not logits everybody keeps."""
    head = sliced_costs(wordy(make_model()).part(2 / 3, 2 / 3), 100).layers[-1]
    assert head.activation_bytes_per_token == pytest.approx(300)
    assert head.workspace_bytes == pytest.approx(100 * 2 * LOGITS, abs=1)
    assert sliced_costs(wordy(make_model()), 100).part(2 / 3, 2 / 3).layers[-1] == head


@pytest.mark.parametrize("streamed", [False, True])
def test_backward_repeats_the_head(streamed: bool) -> None:
    profile = cluster(10**9, 2)
    first, last = StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0, streamed=streamed)
    for op, more_s in ((Op.F, 0.0), (Op.B, 0.5)):
        whole_s, sliced_s = (
            duration(Action(op, 1, 0), plan_of(first, stage, sequence=SEQUENCE), profile)
            for stage in (last, replace(last, head_tokens=5))
        )
        assert sliced_s - whole_s == pytest.approx(more_s)


def test_the_planner_slices_heads_where_nothing_fits_otherwise() -> None:
    request = PlanRequest(2, LONG, (1,), recompute_choices=(False, True))
    roomy = make_plan(cluster(10**9), request)
    assert [stage.head_tokens for _, _, stage in roomy.plan.numbered] == [None]
    narrow = cluster(120_000_000)  # three logits of all tokens take 180 MB, of 1,024 tokens 61 MB
    found = make_plan(narrow, request)
    assert [stage.head_tokens for _, _, stage in found.plan.numbered] == [1024]
    assert found.predicted_step_s == pytest.approx(roomy.predicted_step_s * 10.3 / 9.3, rel=0.1)
    assert any("logits and losses are computed 1,024 tokens at a time" in reason for reason in found.reasons)
    assert "head" in stage_table(found.plan, narrow, found.memory).html()[1][0]
    assert complete_plan(found.plan, narrow, request).predicted_step_s == found.predicted_step_s
    unsliced = replace(narrow.model.layers[-1], logits_bytes_per_token=0.0)
    model = replace(narrow.model, layers=(*narrow.model.layers[:-1], unsliced))
    with refuses("memory.exceeded"):
        make_plan(replace(narrow, model=model), request)


def test_heads_without_known_logits_stay_whole_in_equal_clusters_too() -> None:
    """Each cluster has a model object of its own: the answer for the first one is no answer about the others."""
    request = PlanRequest(2, LONG, (1,))
    for _ in range(2):
        profile = make_profile([1.0], make_model(), 50_000_000)
        assert sliced_costs(profile.model, 1024) is profile.model
        assert [stage.head_tokens for _, _, stage in make_plan(profile, request).plan.numbered] == [None]


def test_heads_that_leave_room_for_larger_shares_are_sliced_where_that_is_faster() -> None:
    """Without, forwards are repeated."""
    model = wordy(make_model())
    blocks = [replace(layer, activation_bytes_per_token=40_000.0) for layer in model.layers[1:-1]]
    model = replace(model, layers=(model.layers[0], *blocks, model.layers[-1]))
    profile = make_profile([1.0], model, 350_000_000)
    request = PlanRequest(2, LONG, (1,), recompute_choices=(False, True))
    (_, _, stage), *_ = make_plan(profile, request).plan.numbered
    assert (stage.recompute, stage.head_tokens) == (False, 1024)
    by_hand = plan_of(StagePlan((0,), 0, 4, 0, recompute=True))
    assert complete_plan(by_hand, profile, request).predicted_step_s > make_plan(profile, request).predicted_step_s


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (
            (StagePlan((0,), 0, 4, 0, head_tokens=0),),
            "head_tokens = 0: is of stages that hold the head, and at least 1",
        ),
        ((StagePlan((0,), 0, 2, 1, head_tokens=9), StagePlan((1,), 2, 4, 0)), "is of stages that hold the head"),
    ],
)
def test_rules(stages: tuple[StagePlan, ...], text: str) -> None:
    with pytest.raises(UserError, match=text):
        complete_plan(plan_of(*stages), cluster(10**9, 2), PlanRequest(2, LONG, (1,)))


def test_what_cannot_be_sliced_is_refused_with_the_reason() -> None:
    profile = make_profile([1.0, 1.0], make_model(), 10**9)
    stages = StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0, head_tokens=9)
    with pytest.raises(UserError, match="does not say how large logits are"):
        complete_plan(plan_of(*stages), profile, PlanRequest(2, LONG, (1,)))
    split = replace(plan_of(*stages), pipelines=(PipelinePlan(stages, 1, 2, split_backward=True),))
    with pytest.raises(UserError, match="leave out split_backward"):
        complete_plan(split, cluster(10**9, 2), PlanRequest(2, LONG, (1,)))
