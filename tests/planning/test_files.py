"""Curves, profile and plan files: what a person edits is read back exactly, and every mistake is named."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.types.plan import IdleRank, PlanReport, RankMemory
from hetero_mpi.planning.types.profile import Curve
from hetero_mpi.planning.types.toml_files import (
    load_plan,
    load_profile,
    load_report,
    plan_from_dict,
    plan_to_dict,
    profile_from_dict,
    profile_to_dict,
    report_from_dict,
    save_plan,
    save_profile,
)
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import make_plan_of, make_profile, random_instance, with_split


def test_curve_is_piecewise_linear_and_extended_by_its_end_segments() -> None:
    curve = Curve((10, 20, 40), (1.0, 3.0, 4.0))
    assert [curve.at(t) for t in (10, 15, 20, 30, 40, 60)] == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert curve.at(7.5) == 0.75 and curve.at(1) == 0.1, "no less than their share of the first sample"
    assert Curve((10, 20), (2.0, 3.0)).at(5) == 1.5
    assert Curve((10,), (2.0,)).at(5) == 1.0, "one sample: through the origin"


def test_no_sample_makes_others_free() -> None:
    falling = Curve((10, 20, 40), (1e30, 1.0, 0.5))
    assert [falling.at(t) for t in (10, 20, 40)] == [1e30, 1.0, 0.5], "samples as they are, whatever stands beside them"
    assert falling.at(400) == 0.5, "more tokens do not take less than the last sample"


@pytest.mark.parametrize(
    ("tokens", "seconds"), [((10, 10), (1.0, 2.0)), ((), ()), ((1, 2), (1.0,)), ((0, 1), (1.0, 2.0))]
)
def test_curve_refuses_samples_that_make_no_function(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with refuses("profile.curve", "tokens"):
        Curve(tokens, seconds)


def test_profile_survives_toml_and_json(tmp_path: Path) -> None:
    profile, _ = random_instance(seed=1, ranks=3, layers=5)
    odd = replace(profile, notes=('quotes " and \\ and \x7f\n', "ü"), versions={"a b.c": "1", "torch": "2"})
    save_profile(odd, tmp_path / "new" / "p.toml")
    assert load_profile(tmp_path / "new" / "p.toml") == odd
    assert profile_from_dict(json.loads(json.dumps(profile_to_dict(odd), allow_nan=False))) == odd
    assert math.isinf(load_profile(tmp_path / "new" / "p.toml").devices[0].device_to_host_bytes_per_s)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.toml"], "no temporary file is left"


def test_plan_survives_toml_and_json(tmp_path: Path) -> None:
    plan = make_plan_of((0, 2, 4), (1, 0), 4)
    report = PlanReport(
        plan,
        predicted_step_s=1e-7,
        bound_step_s=math.inf,
        memory=(RankMemory(1, 10**12, 2),),
        idle=(IdleRank(2, "slow"),),
        reasons=("a long sentence that goes on a line of its own", "short"),
    )
    save_plan(report, tmp_path / "plan.toml")
    assert load_report(tmp_path / "plan.toml") == report and load_plan(tmp_path / "plan.toml") == plan
    assert report_from_dict(json.loads(json.dumps(plan_to_dict(report), allow_nan=False))) == report


def test_a_plan_that_nobody_can_count_is_refused_with_all_its_problems(tmp_path: Path) -> None:
    plan, path = make_plan_of((0, 2, 4), (1, 0), 4), tmp_path / "plan.toml"
    save_plan(PlanReport(plan, 1.0, 0.5), path)
    text = path.read_text().replace("micro_batch = 1", "micro_batch = 0").replace("ranks = [0]", "ranks = []")
    path.write_text(text.replace("bound_step_s", "bond_step_s"))
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert str(caught.value).splitlines() == [
        f"{path}: pipelines[0].micro_batch = 0: must be at least 1",
        f"{path}: pipelines[0].stages[1].ranks = []: a stage needs a rank",
        f"{path}: report.bond_step_s = 0.5: unknown key; did you mean bound_step_s?",
        f"{path}: report.bound_step_s: missing key",
    ]


def test_a_plan_is_read_without_what_is_predicted_of_it(tmp_path: Path) -> None:
    plan, path = make_plan_of((0, 2, 4), (1, 0), 4), tmp_path / "plan.toml"
    save_plan(PlanReport(plan, 1.0, 0.5), path)
    text = path.read_text()
    path.write_text(text.replace("split_backward = false\n", ""))
    assert load_report(path).predicted_step_s == 1.0, "the same plan, with a default left out"
    path.write_text(text.replace("warm_up = 1", "warm_up = 0", 1))
    with refuses("plan.no_report"):
        load_report(path)
    path.write_text(text.partition("\n[report]")[0])
    assert load_plan(path) == plan == plan_from_dict(json.loads(json.dumps(plan_to_dict(plan))))
    with refuses("plan.no_report", "[report]"):
        load_report(path)


def test_figures_of_one_curve_stay_on_one_line(tmp_path: Path) -> None:
    save_profile(make_profile(), tmp_path / "p.toml")
    assert "forward_s = { tokens = [10], seconds = [0.1] }" in (tmp_path / "p.toml").read_text()


def test_a_hand_written_plan_may_leave_out_what_planning_fills_in(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        "schema_version = 3\nglobal_batch = 2\nsequence_length = 10\nlayers = 4\n"
        "[[pipelines]]\nmicro_batch = 1\nsequences = 2\n"
        "stages = [{ ranks = [0], first = 0, last = 2, warm_up = 1 }, "
        "{ ranks = [1], first = 2, last = 4, warm_up = 0 }]\n"
    )
    assert load_plan(tmp_path / "plan.toml") == make_plan_of((0, 2, 4), (0, 1), 2)


@pytest.mark.parametrize(("changes", "count", "expected"), [
    ({'name = "x1"': "nam = 7", "latency_s = 0.0": 'latency_s = "fast"',
      "tokens = [10], seconds = [0.1]": "tokens = [10, 5], seconds = [0.1, 0.2]"}, None,
     ("devices[0].nam = 7: unknown key; did you mean name?", "devices[0].name: missing key",
      "strictly increasing (tokens: [10, 5])", "copy_latency_s = 'fast': must be a number")),
    # A mistyped key hides what ranks and links are, but not that other numbers are impossible.
    ({"same_host": "samehost", "memory_bytes = 10000000": "memory_bytes = -1", "optimizer_fixed_s = 0.0": "optimizer_fixed_s = -1"},
     4, ("links[0].samehost = False: unknown key; did you mean same_host?", "memory_bytes = -1: must not be negative",
         "optimizer_fixed_s = -1: must not be negative")),
])  # fmt: skip
def test_all_problems_of_a_profile_are_listed_with_file_key_and_value(
    tmp_path: Path, changes: dict[str, str], count: int | None, expected: tuple[str, ...]
) -> None:
    path = tmp_path / "p.toml"
    save_profile(make_profile(), path)
    for old, changed in changes.items():
        path.write_text(path.read_text().replace(old, changed, 1))
    with pytest.raises(UserError) as caught:
        load_profile(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines) and len(lines) == (count or len(lines))
    assert all(any(part in line for line in lines) for part in expected), lines


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bytes_per_s = 100.0", "bytes_per_s = 0.0", "links[0].bytes_per_s = 0.0: a speed must be at least"),
        ("bytes_per_s = 100.0", "bytes_per_s = 1e-300", "links[0].bytes_per_s = 1e-300: a speed must be at least"),
        ("memory_bytes = 10000000", "memory_bytes = -1", "devices[0].memory_bytes = -1: must not be negative"),
        ("rank = 1", "rank = 0", "devices.rank = [0, 0]"),
        ("source = 1\n", "source = 0\n", "missing the link 1 -> 0"),
        ("schema_version = 3", "schema_version = 9", "version 3"),
        ("memory_bytes = 10000000", "memory_bytes = 1e7", "without a decimal point"),
        ("[devices.layers.head]", "[devices.layers.tail]", "no times for head"),
        ("[devices.layers.head]", "[devices.layers.tail]", "devices[0].layers.tail: the model has no such layer"),
        ("latency_s = 0.0", "latency_s = inf", "latency_s = inf: must be finite"),
        (
            "parameters = 1000",
            "parameters = 1000000000000000000000",
            "parameters = 1000000000000000000000: must be at most",
        ),
        ("tied = false", "tied = false\nheads = 8", "model.heads = 8: give layers divided_parameters"),
        ("tied = false", "tied = false\nheads = 1000000000000", "model.heads = 1000000000000: must be 1 to 10,000"),
        (
            "divided_trainable = 0",
            "divided_trainable = 1001",
            "divided_trainable = 1001: must be at most its trainable_parameters = 1000",
        ),
        (
            "divided_activations = 0.0",
            "divided_activations = 1.5",
            "divided_activations = 1.5: must be at most 1",
        ),
        ("tied = false", "tied = false\nexperts = 0", "model.experts = 0: must be 1 to 10,000"),
        (
            "seconds = [0.1] }",
            "seconds = [0.1], samples = [[0.1]] }",
            "the same length (they have 0 and 1); both may be omitted",
        ),
        (
            "0.1] }",
            "0.1], samples = [[]], sample_tokens = [8] }",
            "forward_s.samples: every entry of sample_tokens needs",
        ),
        (
            "0.1] }",
            "0.1], samples = [[1.0], [2.0]], sample_tokens = [8, 8] }",
            "sample_tokens = [8, 8]: must be positive",
        ),
        (
            "same_host = false",
            "same_host = true",
            "links[0] (0 -> 1).same_host = true: the ranks are on host0 and host1",
        ),
        ("sample_bytes = []", "sample_bytes = [8]", "links[0] (0 -> 1): sample_bytes and sample_s must have the same"),
        ("shares_host_memory = false", "shares_host_memory = true", "this needs a [[hosts]] table with name = 'host0'"),
        ("hosts = []", 'hosts = [{ name = "x", memory_bytes = 1, memory_reason = "" }]', "hosts.name = 'x': no device"),
        ('backend = "cpu"', 'backend = "gpu"', "devices[0].backend = 'gpu': must be cpu, cuda, mps, rocm or xpu"),
        ('dtype = "fp32"', 'dtype = "float"', "model.dtype = 'float': must be fp32, bf16 or fp16"),
        ('kind = "head"', 'kind = "block"', "kind = 'block': must be 'head' at this end of the chain"),
        ("notes = []", "notes = [", "not valid TOML"),
    ],
)
def test_edits_that_make_no_cluster_are_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "p.toml"
    save_profile(make_profile(bytes_per_s=100.0), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_profile(path)
    assert expected in str(caught.value)


def test_both_parts_of_a_split_backward_are_given_or_neither(tmp_path: Path) -> None:
    profile = with_split(make_profile())
    save_profile(profile, tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml") == profile
    block = profile.devices[1].layers["block"]
    half = {**profile.devices[1].layers, "block": replace(block, weight_s=None)}
    save_profile(
        replace(profile, devices=(profile.devices[0], replace(profile.devices[1], layers=half))), tmp_path / "p.toml"
    )
    with refuses("file.invalid"):
        load_profile(tmp_path / "p.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refuses("file.unreadable", "nowhere.toml"):
        load_plan(tmp_path / "nowhere.toml")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_plan_of((0, 2, 4), (1, 0), 4), make_plan_of((0, 4), (0,), 4)
    save_plan(old, tmp_path / "plan.toml")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_plan(new, tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == old
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
