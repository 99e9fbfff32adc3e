"""A plan is tried before it counts: with real ranks, and what is decided from made-up steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.profile import HostProfile
from hetero_mpi.planning.types.toml_files import load_profile, load_report, save_plan, save_profile
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.training.setup.context import TrainOptions
from hetero_mpi.training.setup.profile_and_plan import Planned
from hetero_mpi.training.trial import _earlier_step_s
from hetero_mpi.util import units
from hetero_mpi.util.shipped import USED_PROFILE
from tests.stand_in_gpu import THROUGH, build
from tests.support.jobs import Outcome, Workshop, write_profile
from tests.support.planning_samples import make_profile, reported
from tests.support.plans import pipeline, plan_of

pytestmark = pytest.mark.slow

RANKS, LAYERS = 3, 6
LONG: dict[str, Any] = {"train": {"steps": 1000}}
TRIED: dict[str, Any] = {"calibrate": True}
LORA = {"method": "lora", "rank": 4, "dropout": 0.1}


PLANS = {
    "line": plan_of(pipeline([2, 0, 1], [0, 1, 4, 6])),
    "two": plan_of(pipeline([0, 1], [0, 2, 6], 1, 3), pipeline([2], [0, 6], 1, 1)),
    "streamed": plan_of(pipeline([1, 2], [0, 3, 6], streamed=True)),
    "group": plan_of(pipeline([{0: 1, 1: 1}, 2], [0, 3, 6])),
}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "line": ("line", {}),
    "two-lora": ("two", {"adapter": LORA}),
    "streamed-nf4": ("streamed", {"adapter": LORA, "model": {"quantization": "nf4"}}),
    "group": ("group", {}),
    "half": ("line", {"train": {"dtype": "fp16", "wire": "int8"}}),
}


class Shop(Workshop):
    """Runs of one model; each job is named as its run directory."""

    def __init__(self, directory: Path, through: Sequence[str] = ()) -> None:
        super().__init__(directory, through)
        for name, one in PLANS.items():
            save_plan(one, directory / f"{name}.toml")
        self.whole = self.model(blocks=LAYERS - 2, num_attention_heads=4, num_key_value_heads=2)

    def entry(self, name: str, options: dict[str, Any] | None = None, **tables: Any) -> dict[str, Any]:
        made = super().entry(f"{name}.job", self.values(self.whole), options, **tables)
        return {**made, "run_dir": self.directory / name}

    def losses(self, name: str) -> list[tuple[float, float]]:
        return [(step.loss, step.grad_norm) for step in read_metrics(self.directory / name / "metrics.jsonl").steps]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("trial"))


@pytest.mark.parametrize(
    ("key", "step_s", "other_plan", "used", "tried_step_s"),
    [
        ("sample", 2.5, False, False, 2.5),
        ("sample", 2.5, False, True, 2.5),
        ("sample", None, False, False, None),
        ("sample", 2.5, True, False, None),
        ("of other machines", 2.5, False, False, None),
        ("of other machines", 2.5, False, True, None),
        ("beside other programs", 2.5, False, True, None),
        (None, 2.5, False, False, None),
    ],
)
def test_the_tried_time_of_a_resumed_run_is_that_of_its_profile(
    key: str | None, step_s: float | None, other_plan: bool, used: bool, tried_step_s: float | None, tmp_path: Path
) -> None:
    """``key``: of the profile that the earlier start was planned with, measured or ``used``; or that it was slowed down."""
    profile = make_profile()
    save_plan(replace(reported(PLANS["line"]), tried_step_s=step_s), tmp_path / "plan.toml")
    if key is not None:
        hosts = (HostProfile(profile.devices[0].host, 10**9, "free", other_threads=1.5),)
        earlier = replace(profile, hosts=hosts) if key == "beside other programs" else replace(profile, key=key)
        save_profile(earlier, tmp_path / (USED_PROFILE if used else "profile.toml"))
    context: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, broadcast_json=lambda value: value),
        job=SimpleNamespace(profile=SimpleNamespace(calibrate="auto")),
        run_dir=tmp_path,
    )
    report = reported(PLANS["two" if other_plan else "line"])
    planned = Planned(profile, True, "", report, 0.0)
    assert _earlier_step_s(context, TrainOptions(Path("job.toml"), resume="latest"), planned) == tried_step_s


@pytest.fixture(scope="module")
def given(shop: Shop) -> dict[str, Outcome]:
    """Every job with a plan given by hand, tried and not."""
    entries = {}
    for name, (of, tables) in JOBS.items():
        for trial in (True, False):
            options = {"plan": shop.directory / f"{of}.toml"}
            own = {**tables, "profile": {"calibrate": trial}}
            made = entries[f"{name}-{trial}"] = shop.entry(f"{name}-{trial}", options=options, **own)
            if name != "line":  # which is measured
                made["profile"] = write_profile(shop.directory / f"{name}.profile.toml", made["job"], RANKS)
    return shop.run_entries(RANKS, entries)


@pytest.mark.parametrize("name", JOBS)
def test_a_trial_changes_no_bit_of_the_training_np3(shop: Shop, given: dict[str, Outcome], name: str) -> None:
    for outcome in (given[f"{name}-True"], given[f"{name}-False"]):
        assert outcome.raised == ("",) * RANKS, outcome.texts
    assert shop.losses(f"{name}-True") == shop.losses(f"{name}-False")
    assert "Calibration result: " not in given[f"{name}-False"].printed
    told = re.findall(
        r"^Calibration run .*: about .*\nCalibration result: .* per step \(.* predicted\)$",
        given[f"{name}-True"].printed,
        re.M,
    )
    assert len(told) == 1, given[f"{name}-True"].printed


def test_a_given_plan_is_tried_and_kept_with_a_corrected_profile_np3(shop: Shop, given: dict[str, Outcome]) -> None:
    for name, (of, _) in JOBS.items():
        run = shop.directory / f"{name}-True"
        report = load_report(run / "plan.toml")
        assert report.plan == PLANS[of] and report.tried_step_s is not None
        profile = load_profile(run / ("profile.toml" if name == "line" else USED_PROFILE))
        assert sum(note.startswith("corrected by 1 step") for note in profile.notes) == 1
    untried = load_report(shop.directory / "line-False" / "plan.toml")
    assert untried.tried_step_s is None


@pytest.fixture(scope="module")
def chosen(shop: Shop, given: dict[str, Outcome]) -> dict[str, Outcome]:
    """Plans of the planner, and runs that go on."""
    measured = load_profile(shop.directory / "line-False" / "profile.toml")
    fast, other = shop.directory / "fast.toml", shop.directory / "other.toml"
    save_profile(with_slowness(measured, {2: 0.05}), fast)  # rank 2 gets most layers
    save_profile(replace(measured, key="another"), other)
    (shop.directory / "line-True" / USED_PROFILE).unlink(missing_ok=True)  # if other programs slowed it down
    lacks, line = {"breaks": "memory_lacks_in_the_trial"}, {"plan": shop.directory / "line.toml"}
    all_ranks = {"plan": {"allow_idle": False}}
    entries = {
        "slow": shop.entry("slow", profile=TRIED, **all_ranks, options={"profile": fast, "breaks": "rank_2_is_slow"}),
        "lacks-once": shop.entry("lacks-once", profile=TRIED, **all_ranks, options={**lacks, "rank": 0, "times": 1}),
        "lacks-always": shop.entry(
            "lacks-always", profile=TRIED, **all_ranks, options={**lacks, "rank": 0, "times": 9}
        ),
        "lacks-given": shop.entry("lacks-given", profile=TRIED, options={**line, **lacks, "rank": 1, "times": 9}),
        "dry": shop.entry("dry", profile=TRIED, options={"dry_run": True}),
        "dry-auto": shop.entry("dry-auto", options={"dry_run": True}, **LONG),
        "hurried": shop.entry(
            "hurried", profile=TRIED, options={"dry_run": True, "breaks": "there_is_no_time_for_another_plan"}
        ),
        "short": shop.entry("short"),
        "other": shop.entry("other", options={"profile": other, "dry_run": False}),
        "goes-on": {
            **shop.entry("goes-on", train={"steps": 6}, options=line),
            "run_dir": shop.directory / "line-True",
            "resume": "latest",
        },
    }
    return shop.run_entries(RANKS, entries)


def test_another_plan_is_taken_where_it_was_faster_np3(shop: Shop, chosen: dict[str, Outcome]) -> None:
    printed, run = chosen["slow"].printed, shop.directory / "slow"
    assert chosen["slow"].raised == ("",) * RANKS, chosen["slow"].texts
    first, second = re.findall(r"^Calibration result: (.*)$", printed, re.M)
    assert " predicted" in first and second.endswith("; using it"), printed
    assert re.search(r"^  rank 2 \(.*\): .*forward .* times as long as predicted$", printed, re.M), printed
    report, used = load_report(run / "plan.toml"), load_profile(run / USED_PROFILE)
    assert sum(2 in ranks for ranks in holders(report.plan).values()) == 1
    assert re.match(r"calibration run: .* per step; the first plan took .* per step$", report.reasons[0])
    assert (
        report.tried_step_s is not None
        and f"Calibration result: {units.seconds(report.tried_step_s)} per step" in printed
    )
    assert used.devices[2].layers["embedding"].forward_s.seconds > used.devices[0].layers["embedding"].forward_s.seconds


def test_no_other_plan_is_looked_for_where_there_is_no_time_np3(shop: Shop, chosen: dict[str, Outcome]) -> None:
    printed = chosen["hurried"].printed
    assert re.search(
        r"^Calibration run .*: about 100 ms, or about 0 s with a second plan\nCalibration result: .*\n(  .*\n)*"
        r"Keeping the first plan: planning again would take about .*, too long for this run$",
        printed,
        re.M,
    ), printed
    report = load_report(shop.directory / "hurried" / "plan.toml")
    assert report.tried_step_s is not None
    assert report.reasons[0].startswith("calibration run: ") and report.reasons[0].endswith("no time to plan again")
    assert {one.reason for one in report.idle} <= {"there was no time to plan again"}


def test_what_does_not_fit_is_planned_anew_with_what_was_there_np3(shop: Shop, chosen: dict[str, Outcome]) -> None:
    once, always = chosen["lacks-once"], chosen["lacks-always"]
    assert once.raised == ("",) * RANKS, once.texts
    told = re.search(
        r"^Calibration failed: rank 0 on \S+ ran out .* in \dF0: (.*)\nPlanning again .*: rank 0 with .*$",
        once.printed,
        re.M,
    )
    assert told is not None and "predicted of" in told[1] and "HIP out of memory" in told[1], once.printed
    used = load_profile(shop.directory / "lacks-once" / "profile.toml")
    assert used.devices[0].memory_reason == "memory available in the calibration run"
    assert used.devices[0].memory_bytes < used.devices[1].memory_bytes / 10
    assert set(always.raised) == {"CollectiveUserError"} and len(set(always.texts)) == 1
    assert always.texts[0].startswith("Calibration failed: rank 0 on ") and "memory" in always.texts[0]


def test_a_given_plan_that_does_not_fit_is_refused_by_name_np3(shop: Shop, chosen: dict[str, Outcome]) -> None:
    refused = chosen["lacks-given"]
    assert set(refused.codes) == {2} and len(set(refused.texts)) == 1
    assert re.match(r"Calibration failed: rank 1 on \S+ ran out of memory in \dF0: ", refused.texts[0])


def test_when_a_plan_is_not_tried_np3(shop: Shop, chosen: dict[str, Outcome]) -> None:
    assert "Calibration result: " in chosen["dry"].printed, "true: a dry run, too"
    for name in ("dry-auto", "short", "other", "goes-on"):
        assert chosen[name].raised == ("",) * RANKS, chosen[name].texts
        assert "Trying" not in chosen[name].printed
    assert "No calibration run: the profile was measured elsewhere" in chosen["other"].printed
    assert load_report(shop.directory / "line-True" / "plan.toml").tried_step_s is not None, (
        "kept by the run that goes on"
    )
    assert "not tried" not in chosen["short"].printed


@pytest.mark.long
def test_on_gpus_beside_a_cpu_np3(tmp_path: Path) -> None:
    """NF4, streamed and in a group: the trial runs, changes no bit, leaves nothing on the device, and names what does not
    fit."""
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    shop = Shop(tmp_path, THROUGH)
    clean = {"breaks": "a_small_device_is_left_clean", "room": None}
    entries = {}
    for name in ("streamed-nf4", "group"):
        of, tables = JOBS[name]
        for trial in (True, False):
            own = {**tables, "profile": {"calibrate": trial}}
            options = {"plan": tmp_path / f"{of}.toml", **clean}
            entries[f"{name}-{trial}"] = shop.entry(f"{name}-{trial}", options=options, **own)
    small = {"plan": tmp_path / "line.toml", **clean, "room": 10_000}
    entries["small"] = shop.entry("small", profile=TRIED, options=small)
    found = shop.run_entries(RANKS, entries, timeout_s=400)
    refused = found.pop("small")
    assert {outcome.codes for outcome in found.values()} == {(0, 0, 0)}, found
    for name in ("streamed-nf4", "group"):
        assert shop.losses(f"{name}-True") == shop.losses(f"{name}-False")
        assert "Calibration result: " in found[f"{name}-True"].printed
    assert set(refused.codes) == {2} and len(set(refused.texts)) == 1
    assert re.match(
        r"Calibration failed: rank 1 on \S+ ran out of memory in \d[FB]\d: .* predicted of .*CUDA", refused.texts[0]
    )
