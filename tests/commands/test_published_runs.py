"""The published runs: read as they stand, predicted without a constant of their own, within the bar."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import profile_parts as parts  # noqa: E402
import published_runs as runs  # noqa: E402
import published_sheets as sheets  # noqa: E402

from hetero_mpi.planning.dry_run import validate  # noqa: E402
from hetero_mpi.planning.schedule import schedule_of  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from tests.support.planning_samples import make_model, make_plan_of, make_profile  # noqa: E402


@pytest.fixture(scope="module")
def times() -> runs.Times:
    return runs.read_times(runs.DATA / "sailor_opt350m_layers.csv")


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "published_runs.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_check_passes_and_prints_the_figure_last(tmp_path: Path) -> None:
    done = start("--check", "--json", str(tmp_path / "raw.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "raw.json").read_text())
    means, lines = raw["mean_absolute_errors"], done.stdout.splitlines()
    assert list(means) == ["constants", "held out"]
    for line, (use, (shared, apart)) in zip(lines[-2:], means.items(), strict=True):
        assert line.startswith(f"mean absolute error of the step time, {use}: {100 * shared:.1f} % with a NIC per node")
        assert f", {100 * apart:.1f} % with one per link" in line
        own = [row for row in raw["rows"] if row["use"] == use]
        assert shared == pytest.approx(sum(abs(row["error"]) for row in own) / 4) and max(shared, apart) < 0.08
    assert [row["run"] for row in raw["rows"] if row["use"] == "constants"] == ["N2_D1", "N4_D2", "N4_D4", "N6_D2"]
    assert [row["run"] for row in raw["rows"] if row["use"] == "held out"] == ["N2_D2", "N4_D1", "N6_D3", "N6_D6"]


def test_the_document_has_the_figures_that_the_benchmark_prints() -> None:
    """Every row's errors, with a NIC per node and with one per link, and the means."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for line in start().stdout.splitlines()[2:]:
        if line.startswith("mean"):
            shared, apart = line.split(": ")[1].split(" % with")[0], line.split(" NIC per node, ")[1].split(" % ")[0]
            assert f"{shared} %" in text and f"{apart} %" in text, line
        else:
            name, *_ = line.split()
            errors = [part for part in line.split() if part[0] in "+-" and len(part) > 1]
            assert f"| {name} | " in text and f"| {errors[0]} % | {errors[1]} % |" in text, line


def test_other_runs_in_the_publications_columns(tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text(
        "file,model,stages,dp,mbs,gbs,real_s,red_grads_s,max_mem_bytes,layers_per_stage,gpu_per_stage\n"
        "a/b/plan_config_X.json,OPT-350M,2,2,1,6,,,,10|16,RTX-3090x1+Titan-RTXx4|RTX-3090x2+RTX-2080x4\n"
        "y.json,OPT-350M,1,1,4,8,1.0,,,26,RTX-3090x1\n"
    )
    assert start("--runs", str(table)).returncode == 0
    missed = start("--runs", str(table), "--check")
    assert missed.returncode == 1 and "(bar: 8 %, NIC per node)" in missed.stdout.splitlines()[-1]
    table.write_text("run,micro_batch,global_batch,layers,nodes\nz,2,8,26,RTX-9090x8\n")
    unknown = start("--runs", str(table))
    assert unknown.returncode != 0 and "RTX-9090x8: no measured layer times" in unknown.stderr


def test_one_node_alone_takes_what_its_layers_take(times: runs.Times) -> None:
    """26 layers, 4 micro-batches of 2 sequences, no messages: the sum of the published times."""
    run = runs.Run("alone", 2, 8, (26,), ((runs.Node("RTX-3090", 8),),), 0.0, 0.0, 0)
    rows = {
        kind: next(r for r in times["RTX-3090", 8, kind] if r[0] == 2)
        for kind in ("embedding", "first_block", "block", "head")
    }
    forward_backward = sum(
        n * sum(rows[k][1:3]) for k, n in (("embedding", 1), ("first_block", 1), ("block", 23), ("head", 1))
    )
    expected = 4 * forward_backward + 26 * times["RTX-3090", 8, "block"][0][3]
    assert runs.predict(run, times).predicted_s == pytest.approx(expected)
    uneven = runs.plan_of(runs.Run("", 2, 14, (26,), ((runs.Node("RTX-3090", 4),) * 3,), 0.0, 0.0, 0))
    assert [pipeline.micro_batches for pipeline in uneven.pipelines] == [3, 2, 2]


def test_late_activations_by_hand() -> None:
    """Stage 0 takes 1.1 s forward and 2.2 s backward, stage 1 1.5 and 3.0 s, a message 1 s: the second activation waits for the
    first gradient, and a round trip shows."""
    plan, profile = make_plan_of((0, 2, 4), (0, 1), 2), make_profile(bytes_per_s=1000.0)
    schedule = runs.gradients_first(plan, profile.model)
    assert simulate(plan, profile, schedule).step_s == pytest.approx(16.3)


def test_gradients_first_swaps_only_where_a_gradient_is_awaited_next() -> None:
    plan, model = make_plan_of((0, 2, 4), (0, 1), 3), make_model()
    lists = runs.gradients_first(plan, model)
    validate(lists, plan, model)
    assert " ".join(str(action) for action in lists[0]) == (
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2 0STEP"
    )
    assert lists[1] == schedule_of(plan, model)[1]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_gradients_first_ends_with_few_micro_batches_too(stages: int, count: int) -> None:
    """With no more micro-batches than stages the last activation of a stage belongs to its warm-up."""
    node = runs.Node("RTX-3090", 8)
    run = runs.Run("few", 2, 2 * count, (26 - stages + 1, *[1] * (stages - 1)), ((node,),) * stages, 0.0, 0.0, 0)
    plan, model = runs.plan_of(run), runs.model_cost()
    schedule = runs.gradients_first(plan, model)
    validate(schedule, plan, model)
    assert (schedule != schedule_of(plan, model)) == (count > 1 and stages > 1)


def test_rules_for_data_sheets_are_within_their_bars_and_in_the_document() -> None:
    rows = [*sheets.lora_rows(), *sheets.block_rows(), *sheets.memory_rows()]
    assert not [row for row in rows if row.missed]
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for kind in {row.kind for row in rows}:
        assert f"| {kind} | {sheets.summary(rows, kind, 'fitted')} | {sheets.summary(rows, kind, 'held out')} |" in text


NAMES = "LORA_LAUNCH_S LORA_TRAFFIC TRAFFIC GRADIENT_TRAFFIC FRAMEWORK_BYTES ALLOCATOR_SHARE PEAK_SHARE"


@pytest.mark.parametrize("name", NAMES.split())
def test_another_constant_is_farther_from_the_fitted_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def error() -> float:
        rows = [*sheets.lora_rows(), *sheets.block_rows()]
        return sum(row.error**2 for row in rows if row.use == "fitted" and not row.kind.endswith(("a10g", "4090")))

    before, constant = error(), getattr(parts, name)
    for changed in (0.6 * constant, 1.6 * constant):
        monkeypatch.setattr(parts, name, changed)
        if name == "PEAK_SHARE":
            monkeypatch.setattr(sheets, "A100", replace(sheets.A100, peak_share=changed))
        assert error() > before
