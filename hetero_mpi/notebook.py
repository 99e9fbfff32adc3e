"""HTML tables of the objects that the Python API returns, for notebooks (``Displayed``)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report import plan_text
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.profile_text import link_lines, rank_table
from hetero_mpi.report.run_text import job_rows
from hetero_mpi.report.table import Table
from hetero_mpi.util import units

_View = tuple[str, Table, Sequence[str]]
"""Title, table and notes."""


def html(value: Any) -> Markup:
    """Render an object of a class in ``VIEWS``, or return "". All text is escaped, so that names cannot become markup."""
    if (view := VIEWS.get(type(value).__name__)) is None:
        return Markup()
    title, table, notes = view(value)
    headings, rows = replace(table, rows=table.rows[: plan_text.MAX_STAGE_ROWS]).html()
    more = [f"... and {len(table.rows) - len(rows):,} more"] * (len(rows) < len(table.rows))
    lines = [_each("th", (name for name, _ in headings)), *(_each("td", row) for row in rows)]
    return _each("b", [title]) + _each("table", [_each("tr", lines)]) + _each("p", [*more, *notes])


def _each(tag: str, contents: Iterable[str]) -> Markup:
    return Markup("").join(map(Markup(f"<{tag}>{{}}</{tag}>").format, contents))


def _plan(plan: Plan, memory: Any = ()) -> _View:
    return plan_text.plan_title(plan, None), plan_text.stage_table(plan, None, memory), plan_text.batch_lines(plan)


def _report(report: PlanReport) -> _View:
    title, table, notes = _plan(report.plan, report.memory)
    reasons = [*plan_text.idle_lines(report.idle), *(f"because: {reason}" for reason in report.reasons)]
    return f"Predicted: {plan_text.headline(report)}", table, [title, *notes, *reasons]


def _profile(profile: ClusterProfile) -> _View:
    title = f"{units.plural(len(profile.devices), 'rank')}; figures {profile.source}, {profile.date}"
    return title, rank_table(profile), [*link_lines(profile), *profile.notes]


def _simulation(step: Any) -> _View:
    title, table, notes = _report(step.report)
    return title, table, [f"Utilisation: {plan_text.utilisation(step.use)}", *notes]


def _run(run: PastRun) -> _View:
    from hetero_mpi.report.page.document import about, key_figures

    return run.name, Table.of_texts(("", "value", "remark"), key_figures(run)), [about(run), str(run.directory)]


def _result(result: Any) -> _View:
    losses, step_s, last = result.losses, result.step_s, result.evaluations[-1:]
    rows = [
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} in {units.plural(len(losses), 'step')}" if losses else ""),
        *(("evaluation loss", f"{evaluation.loss:.4f}{evaluation.beside()}") for evaluation in last),
        ("time per step", "not measured" if step_s is None else units.seconds(step_s)),
        ("result", result.result),
        ("checkpoint", result.checkpoint or "none"),
    ]
    return str(result.run_dir), Table.of_texts(("", "value"), rows), [f"Predicted: {plan_text.headline(result.report)}"]


def _job(job: Any) -> _View:
    return job.name, Table.of_texts(("", "setting"), job_rows(job.tables.model_dump())), [str(job.path)]


VIEWS: dict[str, Callable[[Any], _View]] = {
    "Plan": _plan, "PlanReport": _report, "ClusterProfile": _profile, "Simulation": _simulation, "PastRun": _run,
    "TrainResult": _result, "Job": _job,
}  # fmt: skip
"""Maps the name of a class to its rendering. By name, because importing ``TrainResult`` imports torch."""
