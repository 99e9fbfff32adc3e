"""Runs beside each other (``compare``), a plan beside the best single device (``baseline``): tables, a sentence about the gain."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_mpi import units
from hetero_mpi.planning.types.plan import Alone, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.plan_text import schedule_text
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.report.run_files.metrics import StepMetrics
from hetero_mpi.report.table import Table
from hetero_mpi.terminal import wrapped

HARDLY = 1.1
"""Gains up to this factor are within the error of predictions and the variation of machines."""
_WINDOW = 0.05
"""The loss after so many tokens is the mean over this share of them, the last ones."""
_FEW = "too few steps"
_IRRELEVANT = {("output", "run_dir")}


def comparison_lines(runs: Sequence[PastRun]) -> list[str]:
    """A table with a column per run: differences between the jobs, plans, speed, and the loss after equally many tokens."""
    tokens = min(sum(step.tokens for step in run.metrics.steps) for run in runs)
    speeds = [run.median_tokens_per_s() for run in runs]
    held_out = [run.metrics.evaluations[-1].loss if run.metrics.evaluations else math.nan for run in runs]
    rows = [(key, *values) for key, values in job_differences([run.job for run in runs])]
    rows += [
        ("devices", *(_devices(run.profile) for run in runs)),
        ("plan", *(_plan(run.report) for run in runs)),
        ("steps done", *(f"{run.metrics.steps[-1].step:,}" if run.metrics.steps else "none" for run in runs)),
        ("step, predicted", *(units.seconds(run.report.predicted_step_s) if run.report else "" for run in runs)),
        ("step, median", *(units.seconds(run.median_step_s() or 0) if run.warm_steps else _FEW for run in runs)),
        ("tokens/s, median", *(f"{speed:,.0f}" if speed is not None else _FEW for speed in speeds)),
        ("speed", *(f"{speed / speeds[0]:.2f}x" if speed and speeds[0] else "" for speed in speeds)),
        (f"loss after {units.count(tokens)} tokens", *(_loss(loss_after(run.metrics.steps, tokens)) for run in runs)),
        ("held-out loss, last", *map(_loss, held_out)),
        ("energy", *("not measured" for _ in runs)),
    ]  # fmt: skip
    by_job = len({run.name for run in runs}) == len(runs)
    names = [run.name if by_job else str(run.directory) for run in runs]
    names = [f"{name}{' (emulated)' if run.emulated else ''}" for name, run in zip(names, runs, strict=True)]
    lines = Table.of_texts(("", *names), rows).lines()
    if any(run.emulated for run in runs):
        lines += wrapped(
            "  ",
            "emulated: times and speeds are those of a profile's devices, imitated; losses are of the model that stood in",
        )
    if len({_model(run.profile) for run in runs}) > 1:
        lines += wrapped("  ", "the models differ: neither losses nor tokens per second can be compared")
    return lines


def loss_after(steps: Sequence[StepMetrics], tokens: int) -> float:
    """Mean training loss over the last twentieth of the first ``tokens`` tokens (at least one step); NaN without any."""
    seen, recent = 0, []
    for step in steps:
        if seen >= tokens:
            break
        seen += step.tokens
        recent.append((seen, step.loss))
    kept = [loss for at, loss in recent if at > (1 - _WINDOW) * tokens]
    return statistics.fmean(kept) if kept else math.nan


def job_differences(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """(``table.key``, its value in each job) of the keys that are not the same in all."""
    keys = dict.fromkeys(
        (name, key) for job in jobs for name, values in job.items() if isinstance(values, Mapping) for key in values
    )
    found = []
    for name, key in keys:
        tables = (job.get(name) for job in jobs)
        values = tuple(_value(table.get(key) if isinstance(table, Mapping) else None) for table in tables)
        if len(set(values)) > 1 and (name, key) not in _IRRELEVANT:
            found.append((f"{name}.{key}", values))
    return found


def baseline_lines(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, tokens: int, run: PastRun | None, remarks: Sequence[str]
) -> list[str]:  # fmt: skip
    """A table of each kind of device alone and of all together, and a sentence that says whether the others were worth adding.

    ``singles``: a prediction for each kind of device. ``run``: one under the plan, whose measured times are shown too.
    """
    kind = ", emulated" if profile.emulated else ""
    timed = [
        (f"rank {one.rank} alone", place_text(profile, one.rank), one.step_s, one.problem or f"predicted{kind}")
        for one in singles
    ]
    together = f"{len(report.plan.ranks)} of {len(profile.devices)} ranks"
    timed.append((together, _devices(profile), report.predicted_step_s, f"predicted{kind}"))
    measured = run.median_step_s() if run is not None else None
    if run is not None and measured is not None:
        how = f"measured{kind}, median of {len(run.warm_steps)} steps"
        timed.append((together, f"run {run.name}", measured, how))
    rows = [
        (who, device, *((units.seconds(step_s), f"{tokens / step_s:,.0f}") if step_s else ("", "")), how)
        for who, device, step_s, how in timed
    ]
    table = Table.of_texts(("", "device", "step", "tokens/s", ""), rows)
    lines = [f"The same {tokens:,} tokens per step{kind}:", *table.lines(), ""]
    lines += ["Was it worth adding the others?", *wrapped("  ", worth_adding(singles, report, profile, measured)), ""]
    return [*lines, *(line for remark in remarks for line in wrapped("", remark))]


def worth_adding(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, measured_s: float | None
) -> str:
    """A sentence about the gain over the best single device. ``measured_s``: per step of all devices together, where known."""
    if len(singles) == 1 and len(report.memory) + len(report.idle) <= 1:
        return "There is one device only: nothing was added."
    able = [one for one in singles if one.step_s is not None]
    if not able:
        return "Yes: no single device can do this job at all."
    best = min(able, key=lambda one: (one.step_s or 0.0, one.rank))
    assert best.step_s is not None
    if len(report.plan.ranks) == 1:
        return f"No: the plan itself uses rank {report.plan.ranks[0]} alone, since the others would only slow it down."
    promised = best.step_s / report.predicted_step_s if report.predicted_step_s > 0 else math.nan
    gain = best.step_s / measured_s if measured_s else promised
    answer = "No" if gain < 1 else "Hardly" if gain < HARDLY else "Yes"
    what = "measured" if measured_s else "predicted"
    text = f"{answer}: together they are {gain:.2f} times as fast ({what}) as "
    text += f"{place_text(profile, best.rank)} alone would be (predicted)"
    if measured_s and math.isfinite(promised):
        text += f"; the prediction was {promised:.2f} times"
    return text + "."


def _devices(profile: ClusterProfile | None) -> str:
    if profile is None:
        return ""
    counts = Counter(device.name for device in profile.devices)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _plan(report: PlanReport | None) -> str:
    if report is None:
        return ""
    plan = report.plan
    stages, pipelines = len(plan.numbered), len(plan.pipelines)
    text = f"{stages} stage{'s' if stages > 1 else ''}"
    text += f" in {pipelines} pipelines" if pipelines > 1 else ""
    return (
        f"{text}{schedule_text(plan).replace(', schedule', ',')}{f', {len(report.idle)} idle' if report.idle else ''}"
    )


def _model(profile: ClusterProfile | None) -> tuple[object, ...]:
    if profile is None:
        return ()
    return profile.model.model_type, tuple(layer.parameters for layer in profile.model.layers)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not known"


def _value(value: Any) -> str:
    return "empty" if value is None else str(value)
