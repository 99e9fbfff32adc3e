"""What the run report says of the job, its sample, and what happened; and how it draws figures that are far apart."""

import json
import math
import re
import time
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch

from hetero_mpi.planning.types.plan import Alone, RankMemory
from hetero_mpi.report.figures.architecture import architecture
from hetero_mpi.report.figures.curves import HOVER_STEPS, Series, StepMark, line_chart
from hetero_mpi.report.figures.style import COLOURS, svg
from hetero_mpi.report.page import sections
from hetero_mpi.report.page.document import key_figures, report_html
from hetero_mpi.report.past_run import anonymous, read_run
from hetero_mpi.report.run_text import job_rows, next_steps, worth_adding
from hetero_mpi.rundir.metrics import Evaluation
from tests.support.past_runs import JOB, cluster, make_run, planned


def rows_of(directory: Path, job: dict[str, Any]) -> dict[str, str]:
    profile = cluster(1)
    run = read_run(make_run(directory, planned(profile), profile, steps=2, job=job))
    return dict(job_rows(run.job, profile.model.dtype))


def test_methods_are_told_apart(tmp_path: Path) -> None:
    full = {"model": {"quantization": "none"}, "adapter": {"method": "none"}}
    assert rows_of(tmp_path / "full", full)["method"] == "full fine-tuning"
    plain = {"model": {"quantization": "none"}, "adapter": {"method": "lora", "rank": 4}}
    assert rows_of(tmp_path / "lora", plain)["method"] == "LoRA, rank 4"


def test_a_job_of_which_little_is_known_is_no_error(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a", JOB)["optimizer"] == "AdamW, peak learning rate 0.003"
    odd = {"train": {"learning_rate": {"a": 1}}, "data": {"held_out": "x"}, "model": [1]}
    assert "held out" not in rows_of(tmp_path / "b", odd).get("data", "")
    (tmp_path / "b" / "run.json").write_text("{")
    assert not sections.job(read_run(tmp_path / "b")).has_content


def test_deaths_and_changes_of_plan_are_marked_in_the_charts(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "a", planned(profile), profile)
    assert sections.marks(read_run(run)) == [], "of the first start and of what came before it there is nothing to mark"
    assert "Vertical lines" not in report_html(read_run(run))
    told: tuple[dict[str, Any], ...] = (
        {"event": "rebalanced", "text": "layer 1 moves", "step": 20},
        {"event": "copies", "text": "from copies", "step": 29},
        {"event": "ranks-lost", "text": "Died: rank <1>"},
        {"event": "recovered", "text": "1.06 s after it was noticed", "step": 31},
        {"event": "first-step", "text": "of a start without a death", "step": 40},
    )
    now = time.time()
    lines = [json.dumps({"unix_s": now + 60 + place, **one}) for place, one in enumerate(told)]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(run)
    assert sections.marks(found) == [
        StepMark(20, "after step 20: layer 1 moves", "violet"),
        StepMark(31, "after step 31: Died: rank <1>; 1.06 s after it was noticed", "alert"),
    ]
    section = sections.learning(found)
    with_marks = [chart for chart in section.charts if "<title>after step 31: Died: rank &lt;1&gt;" in chart]
    assert len(with_marks) == 2 and "Vertical lines" in section.note, "over the loss, and over the time per step"
    assert all("<title>after step 20: layer 1 moves</title>" in chart for chart in with_marks)


def test_rewards_have_charts(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(
        tmp_path / "a", planned(profile), profile, job={**JOB, "train": {**JOB["train"], "preference": "kto"}}
    )
    found = read_run(run)
    plain = len(sections.learning(found).charts)
    told = {"chosen_reward": 0.5, "rejected_reward": -0.5, "reward_margin": 1.0}
    steps = tuple(replace(step, **told) for step in found.metrics.steps)
    charts = sections.learning(replace(found, metrics=replace(found.metrics, steps=steps))).charts
    assert len(charts) == plain + 2
    assert "loss per answer" in charts[0] and all(name in charts[1] for name in ("rewards", "chosen", "rejected"))


def test_a_resumed_start_is_marked_with_the_loss_before_it(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "a", planned(profile), profile)
    now = time.time()
    (run / "events.jsonl").write_text(
        json.dumps({"unix_s": now + 1, "event": "silent", "text": "no word from beta"}) + "\n"
    )
    values = json.loads((run / "run.json").read_text())
    values["starts"] += [{"unix_s": now + 2, "step": 30, "ranks": 1}, {"unix_s": now + 3, "step": 40, "ranks": 2}]
    (run / "run.json").write_text(json.dumps(values))
    assert sections.marks(read_run(run)) == [
        StepMark(30, "after step 30: no word from beta; training resumed after step 30 on 1 rank", "alert"),
        StepMark(40, "after step 40: training resumed after step 40 on 2 ranks", "violet"),
    ]


def y_ticks(chart: str) -> list[dict[float, float]]:
    """Pixel -> value of the ticks of each y axis, from the upper axis to the lower."""
    found = list[dict[float, float]]()
    for pixel, value in re.findall(r'<text x="60.0" y="([\d.]+)"[^>]*>([\d.,]+)<', chart):
        if not found or float(pixel) > min(found[-1]):
            found.append({})
        found[-1][float(pixel)] = float(value.replace(",", ""))
    return found


def test_a_chart_has_readings_and_a_logarithmic_axis_without_a_script() -> None:
    noise = tuple((float(step), 10.0 ** (step / 100) * (1 + 0.1 * (step % 2))) for step in range(201))
    chart = line_chart("loss", [Series("loss", noise, "accent", noisy=True)])
    assert chart is not None
    readings = re.findall(r">step (\d+)<tspan [^>]*>loss ([\d.]+)</tspan>", chart)
    assert HOVER_STEPS / 2 < len(readings) <= HOVER_STEPS
    values = dict(noise)
    assert all(float(value) == pytest.approx(values[float(step)], rel=1e-3) for step, value in readings)
    linear, logarithmic = re.findall(r'<g class="(?:linear|log)".*?</g>', chart)
    assert 'display="none"' not in linear[:40] and 'display="none"' in logarithmic[:40]

    def heights(layer: str, kind: str) -> list[float]:
        path = re.search(rf'<path d="M([^"]*)"[^>]*class="{kind}"', layer)
        assert path is not None
        return [float(point.split()[1]) for point in path[1].split("L")]

    ticks = {value: pixel for pixel, value in y_ticks(logarithmic)[0].items()}
    assert {1.0, 10.0, 100.0} <= ticks.keys()
    assert ticks[1.0] - ticks[10.0] == pytest.approx(ticks[10.0] - ticks[100.0], abs=0.2)
    raw, smooth = heights(logarithmic, "raw"), heights(logarithmic, "smooth")
    assert raw[100] == pytest.approx(ticks[10.0] - 4, abs=0.2), "labels stand 4 pixels lower"
    assert max(map(abs, np.diff(smooth, 2))) < 0.4 * max(map(abs, np.diff(raw, 2)))
    negative = line_chart("loss", [Series("loss", ((1.0, 0.0), (2.0, -1.0)), "accent")])
    assert 'class="log"' not in str(negative), "there is no logarithm of a negative value"


def test_the_memory_of_a_process_is_explained(tmp_path: Path) -> None:
    """Only CPU ranks measure their process; what an emulated rank holds is no measurement of its plan."""
    profile = cluster(2)
    report = planned(profile)
    run = read_run(make_run(tmp_path / "a", report, profile))

    def remarks(backends: tuple[str, ...], source: str = "measured") -> str:
        own = tuple(replace(one, backend=kind) for one, kind in zip(profile.devices, backends, strict=True))
        memory = tuple(RankMemory(rank, 100_000_000 * (rank + 1), 10**9) for rank in range(2))
        changed = replace(profile, devices=own, source=source)
        return " ".join(sections.memory(replace(run, report=replace(report, memory=memory), profile=changed)).remarks)

    assert remarks(("cpu", "cpu")).startswith(
        "The processes of the CPU ranks used 300 MB to 400 MB more than predicted"
    )
    assert "used 300 MB more" in remarks(("cuda", "cpu"))
    assert remarks(("cuda", "cuda")) == "" == remarks(("cpu", "cpu"), "emulated, measured")


def test_the_arrow_to_the_next_row_starts_at_its_device() -> None:
    profile = cluster(16)
    figure = architecture(planned(profile), profile, "a job")
    figure.draw_without_rendering()
    surface = to_rgba(COLOURS["surface"][0])
    boxes = [patch.get_bbox() for patch in figure.axes[0].patches if patch.get_facecolor() == surface]
    arrows = [patch.get_path().vertices for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(boxes) == 16 and len(arrows) == 15
    for number, (before, corners) in enumerate(zip(boxes, arrows, strict=False)):
        assert before.padded(5).contains(*corners[0]), f"arrow {number} starts at {corners[0]}, not at {before}"


def test_idle_ranks_with_one_reason_share_a_box() -> None:
    profile = cluster(6)
    report = planned(profile, 2)
    reasons = ("too slow", "too slow", "no link", "too slow")
    idle = tuple(replace(one, reason=why) for one, why in zip(report.idle, reasons, strict=True))
    figure = architecture(replace(report, idle=idle), profile, "a job")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in said if text.startswith("rank") and "  " in text] == [
        "ranks 2, 3, 5  card 2, host1; card 3, host1; card 5, host2",
        "rank 4  card 4, host2",
    ]
    assert said.count("too slow") == 1 and said.count("no link") == 1
    assert "<title>ranks 2, 3, 5  card 2, host1; card 3, host1; card 5, host2: too slow</title>" in svg(figure, "a job")


def test_the_page_says_what_to_type_next(tmp_path: Path) -> None:
    """It depends on what the run has left: an unfinished one is resumed, a model is used."""
    profile = cluster(2)
    run = make_run(tmp_path / "a run", planned(profile), profile, steps=20)

    def commands(**job: Any) -> list[str]:
        return [command for command, _ in next_steps(read_run(run) if not job else replace(read_run(run), job=job))]

    place, program = f"'{run}'", "python -m hetero_mpi"
    others = [f"{program} baseline --profile {place}", f"{program} compare {place} OTHER"]
    resume = f"{program} train 'a run.toml' --run-dir {place} --resume"
    assert commands() == [resume, *others], "20 of 60 steps are done"
    (run / "adapter").mkdir()
    used = [f'{program} generate {place} --prompt "..."', f"{program} serve {place}"]
    assert commands(train={"steps": 20}) == [*used, f"{program} export {place} OUT", *others]
    assert f"{program} export {place} OUT --merge" in commands(train={"steps": 20}, adapter={"method": "lora"})
    assert commands(train={"steps": 20}, model={"factory": "a.py:b"}) == others, "no text comes from it"
    page = report_html(read_run(run))
    assert f"<code>{resume}</code>" in unescape(page) and f"<code>{resume}</code>" not in page
    shared = report_html(anonymous(read_run(run)))
    assert str(run) not in shared and "--run-dir '.../a run' --resume" in unescape(shared)


def test_perplexity_is_that_of_tokens(tmp_path: Path) -> None:
    profile = cluster(1)
    run = read_run(make_run(tmp_path / "a", planned(profile), profile, steps=20))

    def tile(loss: float, **job: Any) -> list[str]:
        metrics = replace(run.metrics, evaluations=(Evaluation(20, loss),))
        return [
            figure for what, figure, _ in key_figures(replace(run, metrics=metrics, job=job)) if what == "perplexity"
        ]

    assert tile(math.log(12.5)) == ["12.50"] and tile(math.log(54_321)) == ["54.3 k"]
    assert tile(2.0, train={"preference": "dpo"}) == [] == tile(2.0, model={"factory": "a.py:b"})
    routed = replace(run.metrics.steps[0], router_loss=0.1)
    assert replace(run, metrics=replace(run.metrics, steps=(routed,))).perplexity() is None, (
        "the routers' is in the loss"
    )
    assert replace(run, metrics=replace(run.metrics, evaluations=())).perplexity() is None


def test_the_page_answers_whether_the_others_were_worth_adding(tmp_path: Path) -> None:
    profile = cluster(2)
    report = planned(profile)
    run = read_run(make_run(tmp_path / "a", replace(report, alone=Alone(0, 3 * report.predicted_step_s)), profile))
    (told,) = [point for point in sections.plan(run).points if "devices help" in point]
    measured_s = run.median_step_s()
    assert measured_s is not None and run.report is not None
    answer = worth_adding([Alone(0, 3 * report.predicted_step_s)], report, profile, measured_s)
    assert told == f"Do the other devices help? {answer}" and answer.startswith("Yes: all devices together are 2.8")
    assert not any("worth" in point for point in sections.plan(replace(run, report=report)).points), (
        "nothing to compare with"
    )


def test_ranks_without_a_stage_now_have_no_row(tmp_path: Path) -> None:
    """Records of a rank that has died are older than the plan."""
    profile = cluster(3)
    report = planned(profile)
    run = read_run(make_run(tmp_path / "a", report, profile))
    fewer = planned(profile, 2)
    table = sections.usage(replace(run, report=fewer)).table
    assert table is not None and list(table.rows) == [0, 1]
