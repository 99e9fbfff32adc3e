"""Describe runs side by side, for ``compare``: job differences, plans, speed, and loss after the same number of tokens."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.plan_text import stages_text
from hetero_mpi.report.run_text import devices_text
from hetero_mpi.report.table import Table
from hetero_mpi.rundir.metrics import StepMetrics
from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrap_text

_LOSS_WINDOW_RATIO = 0.05
"""The loss is averaged over this last fraction of the tokens."""
_TOO_FEW = "too few steps"
_MAX_RUN_COLUMNS = 4
"""Maximum number of compared runs that always have a column each; more have a row each if that takes fewer columns."""
_MAX_VALUE = 40
_IRRELEVANT = {("output", "run_dir")}


def comparison_lines(runs: Sequence[PastRun]) -> list[str]:
    """Compare runs in a table: job differences, plan, speed, and loss after the same number of tokens."""
    rows = [tuple(map(_shortened, row)) for row in comparison_rows(runs)]
    headings, *cells = comparison_table([("", *run_names(runs)), *rows])
    lines = Table.of_texts(headings, cells).lines()
    return lines + [line for remark in comparison_remarks(runs) for line in wrap_text("  ", remark)]


def _shortened(cell: str) -> str:
    """Cut a table or list of the job to a column's width."""
    return f"{cell[: _MAX_VALUE - 3]}..." if cell[:1] in ("{", "[") and len(cell) > _MAX_VALUE else cell


def comparison_table(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Arrange rows with a column per run so that more than ``_MAX_RUN_COLUMNS`` runs have a row each, unless rows are more."""
    return list(zip(*rows, strict=True)) if len(rows[0]) > max(_MAX_RUN_COLUMNS + 1, len(rows)) else rows


def comparison_rows(runs: Sequence[PastRun]) -> list[tuple[str, ...]]:
    """Return the rows that compare runs, each as (label, value for each run)."""
    tokens = min(sum(step.tokens for step in run.metrics.steps) for run in runs)
    speeds = [run.median_tokens_per_s() for run in runs]
    unit = units.unit_of(runs[0].setting("data", "sequence_length"))
    trained = f"{units.count(tokens)} {unit}{' of the stand-in' * all(run.emulated for run in runs)}"
    evaluation_losses = [run.metrics.evaluations[-1].loss if run.metrics.evaluations else math.nan for run in runs]
    rows = [(key, *values) for key, values in job_differences([run.job for run in runs])]
    return [
        *rows,
        ("devices", *(devices_text(run.profile) for run in runs)),
        ("plan", *(_plan(run.report) for run in runs)),
        ("steps done", *(f"{run.metrics.steps[-1].step:,}" if run.metrics.steps else "none" for run in runs)),
        ("step, predicted", *(units.seconds(run.report.predicted_step_s) if run.report else "" for run in runs)),
        ("step, median", *(units.seconds(run.median_step_s() or 0) if run.warm_steps else _TOO_FEW for run in runs)),
        (f"{unit}/s, median", *(f"{speed:,.0f}" if speed is not None else _TOO_FEW for speed in speeds)),
        ("speed", *(f"{speed / speeds[0]:.2f}x" if speed and speeds[0] else "" for speed in speeds)),
        (f"loss after {trained}", *(_loss(loss_after(run.metrics.steps, tokens)) for run in runs)),
        ("evaluation loss, last", *map(_loss, evaluation_losses)),
    ]  # fmt: skip


def run_names(runs: Sequence[PastRun]) -> list[str]:
    """Return a different name for each run: that of its job or, if several runs share it, its directory."""
    by_job = len({run.name for run in runs}) == len(runs)
    names = [run.name if by_job else str(run.directory) for run in runs]
    return [f"{name}{' (emulated)' if run.emulated else ''}" for name, run in zip(names, runs, strict=True)]


def comparison_remarks(runs: Sequence[PastRun]) -> list[str]:
    remarks = []
    if any(run.emulated for run in runs):
        remarks.append("emulated: times and speeds are of emulated devices, losses of the small stand-in model")
    if len({_model(run.profile) for run in runs}) > 1:
        remarks.append("the models differ: losses and tokens per second are not comparable")
    return remarks


def loss_after(steps: Sequence[StepMetrics], tokens: int) -> float:
    """Return the mean training loss over the last 5 % of the first ``tokens`` tokens, or NaN if there are no steps."""
    tokens_done, recent = 0, []
    for step in steps:
        if tokens_done >= tokens:
            break
        tokens_done += step.tokens
        recent.append((tokens_done, step.loss))
    losses = [loss for at, loss in recent if at > (1 - _LOSS_WINDOW_RATIO) * tokens]
    return statistics.fmean(losses) if losses else math.nan


def job_differences(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """List the keys whose values differ between the jobs, as (``table.key``, value in each job)."""
    keys = dict.fromkeys(
        (name, key) for job in jobs for name, values in job.items() if isinstance(values, Mapping) for key in values
    )
    differences = []
    for name, key in keys:
        settings = (table.get(key) if isinstance(table := job.get(name), Mapping) else None for job in jobs)
        values = tuple("empty" if value is None else str(value) for value in settings)
        if len(set(values)) > 1 and (name, key) not in _IRRELEVANT:
            differences.append((f"{name}.{key}", values))
    return differences


def _plan(report: PlanReport | None) -> str:
    if report is None:
        return ""
    return f"{stages_text(report.plan)}{f', {len(report.idle)} idle' if report.idle else ''}"


def _model(profile: ClusterProfile | None) -> tuple[object, ...]:
    if profile is None:
        return ()
    return profile.model.model_type, tuple(layer.parameters for layer in profile.model.layers)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "unknown"
