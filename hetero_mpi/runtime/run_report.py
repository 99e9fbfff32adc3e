"""What rank 0 shows and writes during a run: the screen, ``run.json``, ``architecture.png``, ``trace.json`` and ``report.html``.

Failures here do not end a run: they are reported, and training goes on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.errors import ExitCode, UserError
from hetero_mpi.job.load import job_to_dict
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.report import units
from hetero_mpi.report.past_run import REPORT_NAME, USED_PROFILE, describe_run, predicted_step, read_run
from hetero_mpi.report.progress import Now, ProgressDisplay, overview
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.metrics import MetricsWriter
from hetero_mpi.report.run_files.trackers import Trackers
from hetero_mpi.report.trace import save_run_trace
from hetero_mpi.runtime.setup.setup import RunContext
from hetero_mpi.runtime.watchdog import Standing, Watchdog

TRACE_NAME = "trace.json"
_COMPUTING = re.compile(r"\d+[FBIW]\d+")
_LONG_S = 10.0
"""Seconds in one place after which a rank's line shows the time."""


def draw_plan(context: RunContext, report: PlanReport) -> None:
    """``architecture.png`` and ``.svg`` of the plan. On rank 0, before training."""
    if context.world.rank != 0 or not context.job.report.write:
        return
    with unharmed("architecture.png", Exception):
        from hetero_mpi.report.figures.architecture import architecture  # loads matplotlib
        from hetero_mpi.report.figures.style import save

        profile = context.profile
        simulation = predicted_step(report.plan, profile)
        busy = {
            rank: seconds / simulation.step_s for rank, seconds in simulation.busy_s.items() if simulation.step_s > 0
        }
        figure = architecture(report, profile, context.loaded.name, busy)
        for kind in ("png", "svg"):
            save(figure, context.run_dir / f"architecture.{kind}", f"architecture: {context.loaded.name}")


def keep_profile(context: RunContext) -> None:
    """Save the profile that the plans are made for, where it is not the one in ``profile.toml``. On rank 0.

    It may have been given by name, or lack ranks that have died. It has a name of its own so that no later run reuses it as a
    measurement.
    """
    if context.world.rank != 0:
        return
    used, measured = context.run_dir / USED_PROFILE, None
    with contextlib.suppress(UserError):
        measured = load_profile(context.run_dir / "profile.toml")
    with unharmed(used.name):
        if measured == context.profile:
            used.unlink(missing_ok=True)
        else:
            save_profile(context.profile, used)


def open_metrics(context: RunContext, step: int) -> MetricsWriter:
    """Open the metrics of a run that starts after ``step`` steps, and describe the run in ``run.json``."""
    loaded = context.loaded
    with unharmed("run.json"):
        describe_run(
            context.run_dir,
            loaded.name,
            str(loaded.path),
            job_to_dict(loaded.job),
            own_versions(context.world.library),
            context.world.size,
            step,
            context.material.skipped_records if context.material is not None else 0,
        )
    trackers = Trackers(loaded.job.report.trackers, context.run_dir, job_to_dict(loaded.job))
    return MetricsWriter(context.run_dir / "metrics.jsonl", step, trackers)


def show_plan(display: ProgressDisplay | None, context: RunContext, plan: Plan, watchdog: object) -> None:
    """Show a plan on the screen before it is run, and what each rank does (where there is a watchdog)."""
    if display is None:
        return
    standings = (lambda: _now(watchdog.standings())) if isinstance(watchdog, Watchdog) else dict
    display.show(overview(plan, context.profile, context.loaded.name), standings)


@contextlib.contextmanager
def reported(context: RunContext) -> Iterator[None]:
    """A block after which ``report.html`` and ``trace.json`` are written, if the run ends normally or by a signal."""
    try:
        yield
    except CollectiveUserError as error:
        if error.exit_code == ExitCode.STOPPED:
            write_files(context)
        raise
    write_files(context)


def write_files(context: RunContext) -> None:
    """``report.html`` and ``trace.json``, on rank 0."""
    if context.world.rank == 0 and context.job.report.write:
        with unharmed("the report", Exception):
            from hetero_mpi.report.page.document import write_report  # loads matplotlib

            run = read_run(context.run_dir)
            write_report(run, context.run_dir / REPORT_NAME)
            save_run_trace(run, context.run_dir / TRACE_NAME)


def files_of(context: RunContext) -> dict[str, Path]:
    """The files to look at: what -> path."""
    files = {"report": REPORT_NAME, "trace": TRACE_NAME} if context.job.report.write else {}
    return {what: context.run_dir / name for what, name in files.items() if (context.run_dir / name).exists()}


def _now(standings: dict[int, Standing]) -> dict[int, Now]:
    return {rank: Now(_words(standing), standing.computed) for rank, standing in standings.items()}


def _words(standing: Standing) -> str:
    place = standing.at.rsplit(", ", 1)[-1]
    text = f"computes {place}" if _COMPUTING.fullmatch(place) else place
    text = f"waits for {standing.waits_for}" if standing.waits_for else text
    return f"{text}, for {units.seconds(standing.still_s)}" if standing.still_s >= _LONG_S else text
