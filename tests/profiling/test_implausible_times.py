"""Times that cannot be right: impossible ones are refused, implausible ones are said, and a run does not keep them for others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.errors import UserError
from hetero_mpi.planning.analysis.plausible import doubts, profile_doubts
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.report.tables import doubt_remarks, profile_lines
from tests.support.mpi import ROOT
from tests.support.planning_samples import make_model, make_profile, with_spread
from tests.support.small_jobs import Workshop

KINDS = ["embedding", *["block"] * 6, "head"]
TOKENS = (128, 256, 512)


def table(
    forward: tuple[float, ...] = (0.01, 0.018, 0.03), spread: tuple[float, ...] = (0.6, 0.2, 0.1)
) -> dict[str, LayerTimes]:
    """Of a rank whose blocks take most of the time."""
    curves = Curve(TOKENS, forward), Curve(TOKENS, (0.02, 0.036, 0.06))
    block = LayerTimes(*(with_spread(curve, *spread) for curve in curves))
    end = LayerTimes(Curve(TOKENS, (1e-4, 5e-5, 3e-4)), with_spread(Curve(TOKENS, (2e-4, 2e-5, 4e-4)), 9.0))
    return {"embedding": end, "block": block, "head": end}


def test_noise_is_no_reason_to_doubt() -> None:
    """Falling and scattered times of what hardly counts, and blocks whose repetitions lie apart by half of their time."""
    assert doubts(table(), KINDS) == []
    assert doubts(table((0.01, 0.0095, 0.0094)), KINDS) == [], "a device that is not busy takes as long for more"
    assert doubts(table((0.01, 0.018, 0.05)), KINDS) == [], "out of the caches"


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        ((0.1, 0.018, 0.03), "block, forward_s: 0.1 s with 128 tokens, but 18 ms with 256"),
        ((0.01, 0.018, 1e-4), "block, forward_s: 18 ms with 256 tokens, but 0.1 ms with 512"),
        ((1e-4, 0.018, 0.03), "block, forward_s: 0.1 ms with 128 tokens, but 18 ms with 256"),
        ((0.01, 0.018, 1e5), "block, forward_s: 18 ms with 256 tokens, but 1e+05 s with 512"),
    ],
)
def test_a_curve_that_is_out_of_line_is_named(forward: tuple[float, ...], told: str) -> None:
    assert doubts(table(forward), KINDS) == [told]


def test_repetitions_that_lie_far_apart_are_named() -> None:
    (doubt,) = doubts(table(spread=(1.23, 0.2, 0.1)), KINDS)
    assert doubt == "block, backward_s: 20 ms with 128 tokens is the middle of repetitions that differ by 123 % of it"


def two_ranks(**block: Curve) -> ClusterProfile:
    """``block``: curves of rank 1's blocks."""
    profile = make_profile([1.0, 1.0], make_model(2), 10**7, 0.0, 100.0)
    slow = profile.devices[1]
    layers = {**slow.layers, "block": replace(slow.layers["block"], **block)}
    return replace(profile, devices=(profile.devices[0], replace(slow, layers=layers)))


@pytest.mark.parametrize(
    ("curve", "told"),
    [
        (Curve((10, 20), (0.0, 1.0)), "forward_s = [0.0, 1.0]: a layer takes some time"),
        (Curve((10,), (0.0,)), "forward_s = [0.0]: a layer takes some time"),
        (Curve((10, 20), (1.0, 1e30)), "forward_s = [1.0, 1e+30]: no layer takes more than 1,000,000 s"),
    ],
)
def test_impossible_times_are_refused(tmp_path: Path, curve: Curve, told: str) -> None:
    save_profile(two_ranks(forward_s=curve), tmp_path / "p.toml")
    with pytest.raises(UserError) as caught:
        load_profile(tmp_path / "p.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'p.toml'}: devices[1].layers.block.{told}")


def test_where_nothing_is_done_nothing_takes_no_time(tmp_path: Path) -> None:
    """No gradient reaches a frozen embedding, and a layer without matrices has no weight part."""
    nothing = Curve((10,), (0.0,))
    profile = two_ranks(input_s=Curve((10,), (1.0,)), weight_s=nothing)
    save_profile(profile, tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml") == profile
    with pytest.raises(UserError, match=r"layers\.block\.backward_s = \[0\.0\]"):
        save_profile(two_ranks(backward_s=nothing), tmp_path / "p.toml")
        load_profile(tmp_path / "p.toml")
    frozen = replace(profile.model, layers=tuple(replace(one, trainable_parameters=0) for one in profile.model.layers))
    save_profile(replace(two_ranks(backward_s=nothing), model=frozen), tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml").model == frozen


def test_implausible_times_are_said_with_rank_and_file() -> None:
    profile = two_ranks(forward_s=Curve((10, 20, 40), (50.0, 1.0, 1.0)))
    told = "rank 1 (x1): block, forward_s: 50 s with 10 tokens, but 1 s with 20"
    assert profile_doubts(profile) == [told]
    first, what_to_do = doubt_remarks(profile, "my.toml")
    assert first == f"implausible times in my.toml: {told}" and what_to_do.endswith("correct it")
    assert "(--reprofile)" in doubt_remarks(replace(profile, source="measured"))[-1]
    assert any(told in line for line in profile_lines(profile))


@pytest.mark.parametrize(
    ("name", "what"), [("halved", "half of the heads"), ("without_experts", "none of the experts")]
)
def test_implausible_times_of_a_member_of_a_group_are_said(name: str, what: str) -> None:
    profile, told = two_ranks(), two_ranks(forward_s=Curve((10, 20, 40), (50.0, 1.0, 1.0))).devices[1].layers
    device = replace(profile.devices[1], halved=profile.devices[1].layers, without_experts=profile.devices[1].layers)
    assert profile_doubts(replace(profile, devices=(profile.devices[0], device))) == []
    doubtful = replace(device, **{name: told})
    assert profile_doubts(replace(profile, devices=(profile.devices[0], doubtful))) == [
        f"rank 1 (x1): with {what}: block, forward_s: 50 s with 10 tokens, but 1 s with 20"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_published_measurements_are_plausible(path: Path) -> None:
    assert profile_doubts(load_profile(path)) == []


def test_what_misled_a_run_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsteady times are measured anew by the next run; after a run that took a thousandth of what was predicted none are kept."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    shop = Workshop(tmp_path)
    values = shop.values(shop.model())
    job = shop.job("job", values)
    other = shop.job("other", values, data={"sequence_length": 16}, checkpoint={"every": 0})
    run = {"job": job, "run_dir": tmp_path / "run", "dry_run": True}
    done = shop.run_entries(
        1,
        {
            "unsteady": {**run, "breaks": "times_are_unsteady"},
            "next": run,
            "misled": {"job": other, "run_dir": tmp_path / "misled", "breaks": "times_are_a_thousandfold"},
        },
        own_environment=True,
    )
    assert [one.codes for one in done.values()] == [(0,)] * 3, done
    unsteady, following, misled = (one.printed for one in done.values())
    assert "implausible times of rank 0, measured once more: " in unsteady
    assert "implausible times of rank 0, used all the same, but not kept for other runs: " in unsteady
    words = " ".join(unsteady.split())
    assert re.search(r"implausible times in this profile: rank 0 .* machines are quiet \(--reprofile\)", words)
    assert "profile.toml has implausible times: measured again" in following and "Profiling 1 rank" in following
    assert "the machines are faster than when they were measured: measure again (--reprofile)" in misled
    assert "these device times are not kept for other runs" in misled
    assert len(list((cache / "hetero_mpi" / "profiles").rglob("*.json"))) == 1, "those of the plausible run alone"


def test_implausible_times_of_a_member_of_a_group_are_measured_once_more_np2(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    job = shop.job("job", shop.values(shop.model()), profile={"cache": False})
    run = {"job": job, "run_dir": tmp_path / "run", "dry_run": True, "breaks": "member_times_are_unsteady"}
    (done,) = shop.run_entries(2, {"unsteady": run}).values()
    assert done.codes == (0, 0), done
    for then in ("measured once more", "used all the same, but not kept for other runs"):
        assert f"implausible times of rank 1, {then}: with half of the heads: " in done.printed
