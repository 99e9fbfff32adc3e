"""Clusters of hundreds of ranks in tables that a person reads: the first rows, how many more there are, and all where asked for."""

from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.report.plan_text import plan_lines, planned_lines, utilisation
from hetero_mpi.report.profile_text import inspection_lines, profile_lines
from hetero_mpi.report.table import least_most
from hetero_mpi.util import units
from hetero_mpi.util.terminal import MAX_COLUMNS
from tests.support.planning_samples import SEQUENCE, noisy_profile

SCREEN = 100
"""Lines that one scrolls through."""


@pytest.fixture(scope="module")
def profile() -> ClusterProfile:
    return noisy_profile(25)


def planned(profile: ClusterProfile) -> PlanReport:
    """Pipelines of four ranks each over the first 192."""
    pipelines = tuple(
        PipelinePlan(
            tuple(StagePlan((4 * p + s,), (0, 10, 20, 30)[s], (10, 20, 30, 42)[s], 3 - s) for s in range(4)), 1, 4
        )
        for p in range(48)
    )
    plan = Plan(pipelines, 192, SEQUENCE, 42)
    return PlanReport(plan, 1.0, 0.7, memory=predict_memory(plan, profile))


def test_a_profile_of_two_hundred_unlike_ranks(profile: ClusterProfile) -> None:
    lines = inspection_lines(profile)
    text = "\n".join(lines)
    assert len(lines) < SCREEN and max(map(len, lines)) <= MAX_COLUMNS
    assert "  ... and 184 more" in text and "  ... and 9 more" in text
    assert "Curves of the first 4 of 200 different devices; `inspect FILE --all`" in text and "Rank 4: " not in text
    assert "Links: 12 of 39,800 with the worst linear fit; all: --all" in text
    assert len(profile_lines(profile)) < 25


@pytest.mark.parametrize("hosts", [3, pytest.param(25, marks=pytest.mark.long)])
def test_every_rank_and_link_can_be_asked_for(hosts: int) -> None:
    text = "\n".join(inspection_lines(noisy_profile(hosts), every=True))
    last = 8 * hosts - 1
    assert f"Rank {last}: " in text and f"{last} -> {last // 2}" in text and f"node{hosts - 1:02}" in text


def test_a_plan_of_two_hundred_ranks(profile: ClusterProfile) -> None:
    report = planned(profile)
    lines = plan_lines(report, profile)
    assert len(lines) < 40 and max(map(len, lines)) <= MAX_COLUMNS
    assert "  ... and 176 more" in lines and any("`inspect PLAN --all`" in line for line in lines)
    assert "  ... and 184 more" in planned_lines(report, profile, Path("run"))
    assert "  ... and 176 more" in plan_lines(report, None)
    assert len(plan_lines(report, None, every=True)) > 192


@pytest.mark.long
def test_planning_and_simulating_for_two_hundred_ranks(
    profile: ClusterProfile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.toml"
    save_profile(profile, path)
    for command in (["inspect", str(path)], ["plan", "--profile", str(path)], ["simulate", "--profile", str(path)]):
        more = ["-o", str(tmp_path / "out")] if command[0] == "simulate" else []
        assert main([*command, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < SCREEN, command
    assert "all ranks: trace.json" in "\n".join(lines)


def test_figures_of_many() -> None:
    assert (
        least_most([3, 1, 2], "{:.0f}".format) == "1 to 3"
        and least_most([1.01, 1.02], "{:.0f}".format) == "1"
        and least_most([], "{:.0f}".format) == ""
    )
    assert units.join_with_counts(["a", "b", "a"], " + ") == "2 x (a) + b"
    assert utilisation({0: 0.5, 1: 0.75}) == "rank 0 50 %, rank 1 75 %"
    assert utilisation({r: r / 100 for r in range(1, 100)}).startswith("of 99 ranks, rank 1 is the least busy ")
