"""Heads that compute their logits in slices: what that takes, where, and how a plan says it."""

from dataclasses import replace

import pytest

from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.memory import memory_of
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import HEAD_TOKENS
from hetero_mpi.report.plan_text import stage_table
from tests.support.errors import refuses
from tests.support.planning_samples import make_model, make_profile

LOGITS = 200_000.0
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


def cluster(memory_bytes: int, ranks: int = 1) -> ClusterProfile:
    return make_profile([1.0] * ranks, wordy(make_model()), memory_bytes)


def without_known_logits(profile: ClusterProfile) -> ClusterProfile:
    head = replace(profile.model.layers[-1], logits_bytes_per_token=0.0)
    return replace(profile, model=replace(profile.model, layers=(*profile.model.layers[:-1], head)))


def test_the_logits_of_a_slice_take_the_place_of_all() -> None:
    stages = StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0)
    pipeline = PipelinePlan(stages, 1, 2)
    for length, workspace, spared in ((LONG, HEAD_TOKENS * 3 * LOGITS, LONG * LOGITS), (2000, 2000 * 2 * LOGITS, 0)):
        sliced, at_once = (
            memory_of(profile, pipeline, stages[1], length, (1, 0))
            for profile in (cluster(10**10, 2), without_known_logits(cluster(10**10, 2)))
        )
        assert at_once.activations - sliced.activations == spared
        assert (at_once.workspace, sliced.workspace) == (length * 2 * LOGITS, workspace)


def test_members_of_a_group_have_logits_of_their_words() -> None:
    """With two thirds of them, of a slice; what is not logits everybody keeps."""
    head = wordy(make_model()).sliced(LONG).part(2 / 3, 2 / 3).layers[-1]
    assert head.activation_bytes_per_token == pytest.approx(300)
    assert head.workspace_bytes == pytest.approx(HEAD_TOKENS * 2 * LOGITS, abs=1)


def test_planned_memory_counts_slices_and_the_plan_says_so() -> None:
    """Three logits of all tokens take 1.8 GB, of 1,024 tokens 0.6 GB."""
    request = PlanRequest(2, LONG, (1,), recompute_choices=(False, True))
    profile = cluster(1_000_000_000)
    report = make_plan(profile, request)
    assert any("logits and losses are computed 1,024 tokens at a time" in reason for reason in report.reasons)
    assert "head" in stage_table(report.plan, profile, report.memory).html()[1][0]
    assert complete_plan(report.plan, profile, request).memory == report.memory
    with refuses("memory.exceeded"):
        make_plan(without_known_logits(profile), request)
