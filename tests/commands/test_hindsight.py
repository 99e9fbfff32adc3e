"""Looking back at runs: comparisons and baselines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.commands import run_commands
from hetero_mpi.planning.types.plan import Alone
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.report.comparison_text import comparison_rows, job_differences, loss_after
from hetero_mpi.report.page.document import write_report
from hetero_mpi.report.past_run import read_run
from hetero_mpi.report.run_text import worth_adding
from tests.report.test_run_files import ODD_LINES
from tests.support.errors import refuses
from tests.support.past_runs import JOB, cluster, make_run, planned
from tests.support.planning_samples import JOB_TOML

ROOT = Path(__file__).parents[2]


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster(3)
    changed = {**JOB, "train": {**JOB["train"], "learning_rate": 1e-3}}
    first = make_run(tmp_path / "first", planned(profile), profile)
    second = make_run(tmp_path / "second", planned(profile, 2), profile, steps=30, slower=2.0, job=changed)
    assert main(["compare", str(first), str(second)]) == 0
    rows = {line[2:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert "first" in " ".join(rows[""]) and rows["train.learning_rate"] == ["0.003", "0.001"]
    assert rows["loss after 2.40 k tokens"][0] == rows["loss after 2.40 k tokens"][1], "equal losses at equal tokens"
    assert "train.steps" not in rows
    with refuses("compare.too_few_runs"):
        run_commands.compare([first])


def test_all_runs_of_a_directory_have_one_page(tmp_path: Path) -> None:
    profile = cluster(2)
    runs = [make_run(tmp_path / "runs" / name, planned(profile), profile) for name in "abcde"]
    (tmp_path / "runs" / "notes").mkdir()
    write_report(read_run(runs[1]), runs[1] / "report.html")
    page = tmp_path / "pages" / "all.html"
    page.parent.mkdir()
    lines = run_commands.compare([tmp_path / "runs"], page)
    assert lines[0].split() == list("abcde"), "a column for each run, as runs are fewer than what is compared"
    many = run_commands.compare([*runs, *runs, *runs])
    assert [line.split()[0].rpartition("/")[2] for line in many[1:16]] == 3 * list("abcde"), "a row for each run"
    html = page.read_text()
    assert {*re.findall(r'<a href="([^"]*)">', html)} == {"../runs/b/report.html"} and html.count("<svg") == 4
    assert [html.count(f">{run.name} ") for run in runs] == [html.count(f">{runs[0].name} ")] * 5 > [100] * 5, (
        "values on hovering"
    )
    with refuses("compare.too_few_runs"):
        run_commands.compare([runs[0]])
    with refuses("run.not_a_run"):
        run_commands.compare([tmp_path / "runs", page.parent])


def test_only_emulated_runs_are_compared_after_tokens_of_the_stand_in(tmp_path: Path) -> None:
    profiles = cluster(2, source="emulated, measured"), cluster(2)
    runs = [read_run(make_run(tmp_path / str(i), planned(profile), profile)) for i, profile in enumerate(profiles)]
    assert any("stand-in" in label for label, *_ in comparison_rows(runs[:1]))
    assert not any("stand-in" in label for label, *_ in comparison_rows(runs))


def test_the_loss_after_equally_many_tokens(tmp_path: Path) -> None:
    profile = cluster(2)
    steps = read_run(make_run(tmp_path / "a", planned(profile), profile)).metrics.steps
    assert loss_after(steps, steps[0].tokens) == steps[0].loss
    assert loss_after(steps, 40 * steps[0].tokens) == pytest.approx((steps[38].loss + steps[39].loss) / 2)
    assert job_differences([{"a": {"x": 1, "y": None}}, {"a": {"x": 1, "y": 2}}]) == [("a.y", ("empty", "2"))]


@pytest.mark.parametrize(
    ("alone_s", "together_s", "measured_s", "expected"),
    [
        (2.0, 1.0, None, "Yes 2.00 card"),
        (2.0, 1.0, 1.9, "Hardly 1.05 measured"),
        (2.0, 1.0, 2.5, "No 0.80"),
        (0.9, 1.0, 0.5, "No 0.90 predicted"),
        (None, 1.0, None, "Yes"),
    ],
)
def test_the_answer_is_honest(
    alone_s: float | None, together_s: float, measured_s: float | None, expected: str
) -> None:
    profile = cluster(2)
    plan = replace(planned(profile), predicted_step_s=together_s)
    singles = [Alone(0, alone_s), Alone(1, None, "too small")]
    answer, first = worth_adding(singles, plan, profile, measured_s), expected.split()[0]
    assert answer.startswith(first) and all(value in answer for value in expected.split())
    assert "rank 0" in worth_adding([Alone(0, 1.0)], planned(cluster(3), 1), cluster(3), 1.0), "others are idle"


def test_the_baseline_of_a_profile_and_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB_TOML)
    profile = cluster(3)
    save_profile(profile, tmp_path / "p.toml")
    assert main(["baseline", str(tmp_path / "job.toml"), "--profile", str(tmp_path / "p.toml")]) == 0
    said = capsys.readouterr().out
    assert "80 tokens" in said and "rank 0 alone" in said and "\n  Yes: " in said
    run = make_run(tmp_path / "run", planned(profile), profile)
    assert main(["baseline", str(tmp_path / "job.toml"), "--profile", str(run)]) == 0
    assert "58 steps" in capsys.readouterr().out
    with refuses("baseline.global_batch"):
        run_commands.baseline(tmp_path / "job.toml", ("train.global_batch=4",), run)


def test_looking_back_needs_neither_torch_nor_mpi() -> None:
    absent = "import sys\nfor name in ('torch', 'mpi4py', 'matplotlib'): sys.modules[name] = None\n"
    program = f"{absent}import hetero_mpi.commands.run_commands"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_runs_with_odd_files_are_compared_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster(2)
    runs = [make_run(tmp_path / name, planned(profile), profile) for name in ("first", "second")]
    for name in ("metrics.jsonl", "steps.jsonl", "events.jsonl"):
        with (runs[1] / name).open("a") as file:
            file.writelines(f"{text}\n" for text in ODD_LINES)
    odd = {"starts": [7, {}, {"step": "x"}], "job": {"train": 3, "data": []}, "versions": [], "name": "\x1b[31mred"}
    (runs[1] / "run.json").write_text(json.dumps(odd))
    assert main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[31mred" in shown
    assert main(["report", str(runs[1])]) == 0
