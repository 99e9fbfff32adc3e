"""Present a run on rank 0: progress display, ``run.json``, ``now.json``, ``architecture.png``, live page and final results.

The final results are the model or adapter, a sample, ``report.html``, ``trace.json`` and the summary. A failing report does not
fail the run.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.emulation.emulated_cluster import punctuality_lines
from hetero_mpi.inference.generate import write_sample
from hetero_mpi.job.load import job_to_dict
from hetero_mpi.job.schema import ReportTable
from hetero_mpi.objectives import learns_from
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.report.past_run import read_run
from hetero_mpi.report.progress import ProgressDisplay, overview
from hetero_mpi.report.run_text import final_lines
from hetero_mpi.report.trace import save_run_trace
from hetero_mpi.rundir.logs import say, write_line
from hetero_mpi.rundir.metrics import MetricsWriter, Trackers, measured_step_s
from hetero_mpi.rundir.present import Present, write_present
from hetero_mpi.rundir.run_directory import REPORT_NAME, TRACE_NAME, describe_run, note_step
from hetero_mpi.state.state import State
from hetero_mpi.training.result import TrainResult, save_adapter, save_model, share_result
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.training.setup.data_setup import base_name
from hetero_mpi.training.watchdog import Watchdog
from hetero_mpi.util import units
from hetero_mpi.util.background import Background, BestEffort, start_module, start_unattended, warn_on_failure
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.host_limits import allowed_cores
from hetero_mpi.util.shipped import USED_PROFILE


def draw_plan(context: RunContext, report: PlanReport) -> None:
    """Draw the plan to ``architecture.png`` and ``.svg`` on rank 0 before training."""
    if context.world.rank != 0 or not context.job.report.write:
        return
    with warn_on_failure("drawing architecture.png"):
        from hetero_mpi.report.figures.architecture import architecture  # loads matplotlib
        from hetero_mpi.report.figures.style import save

        profile = context.profile
        figure = architecture(report, profile, context.loaded.name, simulate(report.plan, profile).use)
        for kind in ("png", "svg"):
            save(figure, context.run_dir / f"architecture.{kind}", f"architecture: {context.loaded.name}")


def save_used_profile(context: RunContext) -> None:
    """Save the profile used for planning on rank 0 if it differs from ``profile.toml``, in a file that later runs ignore."""
    if context.world.rank != 0:
        return
    used, measured = context.run_dir / USED_PROFILE, None
    with warn_on_failure(f"writing {used.name}"):
        with contextlib.suppress(UserError):
            measured = load_profile(context.run_dir / "profile.toml")
        if measured == context.profile:
            used.unlink(missing_ok=True)
        else:
            save_profile(context.profile, used)


def open_metrics(context: RunContext, step: int, run_id: str) -> MetricsWriter:
    """Open the metrics files of a run that starts after ``step`` steps, and describe the run in ``run.json``."""
    loaded = context.loaded
    with warn_on_failure("writing run.json"):
        job_file = str(loaded.directory / loaded.path.name)  # of use in any working directory
        about = loaded.name, job_file, job_to_dict(loaded.job), own_versions(context.world.library)
        skipped = context.material.skipped_records if context.material is not None else 0
        describe_run(context.run_dir, *about, context.world.size, step, skipped, run_id)
    trackers = Trackers(loaded.job.report.trackers, context.run_dir, job_to_dict(loaded.job))
    return MetricsWriter(context.run_dir / "metrics.jsonl", step, trackers)


def open_display(
    context: RunContext, state: State, run_id: str, stack: contextlib.ExitStack, screen: bool
) -> tuple[MetricsWriter | None, ProgressDisplay | None]:
    """Open the metrics and progress display on rank 0; returns (None, None) elsewhere. ``screen``: whether to use the screen."""
    if context.world.rank != 0:
        return None, None
    metrics = stack.enter_context(open_metrics(context, state.step, run_id))
    unit = units.unit_of(context.job.data.sequence_length)
    train = context.job.train
    per_epoch = context.steps_per_epoch if train.epochs is not None else None
    progress = ProgressDisplay(train.steps, state.step, unit=unit, steps_per_epoch=per_epoch, screen=screen)
    display = stack.enter_context(progress)
    return metrics, display


def show_plan(display: ProgressDisplay | None, context: RunContext, plan: Plan, watchdog: Watchdog | None) -> None:
    """Show a plan on the display before its steps, with the standings of the ranks if there is a watchdog."""
    if display is None:
        return
    with warn_on_failure("showing the plan"):
        standings = watchdog.standings if watchdog is not None else dict
        display.show(overview(plan, context.profile, context.loaded.name), standings)


WRITE_INTERVAL_S = 0.5
_MAX_PAGE_EXIT_S = 5.0
"""Time to wait for the live page's process to exit, so that it can still show the end of the run."""


class LiveView:
    """Writes ``now.json`` on rank 0 during all attempts of a run, and the report if the run fails on all ranks.

    If requested, a separate process serves the live page. It exits when its pipe closes, and thus whenever rank 0 exits.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._report_table, self._run_dir = ReportTable(), Path()
        self._display: ProgressDisplay | None = None
        self._page: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._writing: Background[None] | None = None
        self._write = BestEffort("writing now.json", self._write_present)

    def show_run(self, report_table: ReportTable, run_dir: Path, display: ProgressDisplay | None) -> None:
        """Start showing the run once its start has been accepted. ``display``: None on ranks other than 0."""
        if display is None:
            return
        self._report_table, self._run_dir, self._display = report_table, run_dir, display
        if report_table.watch is not False and self._page is None:
            port = [str(report_table.watch)] if report_table.watch is not True else []
            with warn_on_failure("starting the live page"):  # an interrupt of the terminal is not for it
                process_options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "start_new_session": True}
                self._page = start_module("hetero_mpi.serve.live_page", str(run_dir), *port, **process_options)
                start_unattended("passing on the page's address", self._print_page_output)
        if self._writing is None and (report_table.write or self._page is not None):
            with warn_on_failure("reporting what the ranks do"):
                self._writing = Background("reporting what the ranks do", self._write_until_stopped)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._writing is not None:
            self._stop.set()
            self._writing.finish()
            is_shared_error = isinstance(error, CollectiveUserError)
            self._write(str(error) if is_shared_error else f"{kind.__name__}: {error}" if kind is not None else "")
            if is_shared_error:
                write_files(self._run_dir, self._report_table)
        if self._page is not None and self._page.stdin is not None:
            with warn_on_failure("ending the live page"), contextlib.suppress(subprocess.TimeoutExpired):
                self._page.stdin.close()
                self._page.wait(_MAX_PAGE_EXIT_S)

    def _write_until_stopped(self) -> None:
        while not self._stop.wait(WRITE_INTERVAL_S):
            self._write(None)

    def _write_present(self, ended: str | None) -> None:
        assert self._display is not None
        ranks = {str(rank): now for rank, now in self._display.standings().items()}
        write_present(self._run_dir, Present(time.time(), self._world.current_action, ended, ranks))

    def _print_page_output(self) -> None:
        """Print the output of the live page's process, which is not logged because it contains the access token."""
        assert self._page is not None and self._page.stdout is not None
        for line in self._page.stdout:
            write_line(line.decode(errors="replace").rstrip())


def write_files(run_dir: Path, report_table: ReportTable) -> None:
    """Write ``report.html`` and ``trace.json``. Called on rank 0."""
    if report_table.write:
        with warn_on_failure("writing the report"):
            from hetero_mpi.report.page.document import write_report  # loads matplotlib

            run = read_run(run_dir)
            write_report(run, run_dir / REPORT_NAME)
            save_run_trace(run, run_dir / TRACE_NAME)


def write_result(context: RunContext, share: Share, state: State, other_programs: OtherPrograms) -> None:
    """Write the result and print the summary. Collective over the active ranks.

    Raises:
        UserError: Rank 0 cannot write the result; the message names the newest checkpoint.
    """
    try:
        assert share.members is not None and share.trainer is not None
        other_programs_text = other_programs.summary(share.members)
        if share.emulation is not None:
            say(*punctuality_lines(share.members, share.emulation))
        share.members.current_action = "writing the result"
        job, material = context.job, context.material
        tokenizer, generation = (material.tokenizer, material.generation) if material is not None else (None, None)
        result_directory = _result_directory(context)
        if context.tuning.full:
            save_model(share.trainer, result_directory, job.output.shard_bytes, tokenizer, generation)
        else:
            save_adapter(share.trainer, result_directory, base_name(context.loaded), tokenizer)
        write_sample(share.trainer, context.loaded, tokenizer, context.run_dir)
        if context.world.rank == 0:
            with warn_on_failure("writing run.json"):
                note_step(context.run_dir, "result_step", state.step)
            write_files(context.run_dir, context.job.report)
            with warn_on_failure("printing the summary"):
                _print_summary(context, share.report, state, result_directory, other_programs_text)
    except CollectiveUserError:
        raise
    except (UserError, OSError) as error:
        newest = state.newest_checkpoint
        checkpoint_text = f"{newest} is complete: `--resume` continues from it" if newest else "there is no checkpoint"
        reason = str(error)
        if not isinstance(error, UserError):
            reason = f"the result cannot be written ({error.strerror or error})"
        raise UserError("run.result_unwritable", f"{reason}; {checkpoint_text}") from error


def final_result(context: RunContext, report: PlanReport, state: State) -> TrainResult:
    """Return the run's result as broadcast from rank 0. Collective over all ranks of the job."""
    result = TrainResult(
        run_dir=context.run_dir,
        losses=tuple(state.losses),
        evaluations=tuple(state.evaluations),
        step_s=measured_step_s(state.metrics),
        report=report,
        profile=context.profile,
        result=_result_directory(context),
        checkpoint=state.newest_checkpoint,
        skipped=state.skipped,
    )
    shared_result = share_result(context.world, result if context.world.rank == 0 else None)
    assert shared_result is not None
    return shared_result


def _result_directory(context: RunContext) -> Path:
    return context.run_dir / ("model" if context.tuning.full else "adapter")


_REFERENCE_POINT_NOTE = "KTO's reference point needs another forward pass per step, which predictions omit"


def _print_summary(context: RunContext, report: PlanReport, state: State, result_directory: Path, notes: str) -> None:
    assert context.dataset is not None
    written = {result_directory.name: result_directory}
    if state.newest_checkpoint is not None:
        written["checkpoint"] = state.newest_checkpoint
    for what, name in {"report": REPORT_NAME, "trace": TRACE_NAME}.items() if context.job.report.write else ():
        if (context.run_dir / name).exists():
            written[what] = context.run_dir / name
    written |= {"metrics": context.run_dir / "metrics.jsonl", "logs": context.run_dir / "logs"}
    entropy = context.dataset.unigram_entropy()
    changes, records = context.job.cluster.speed_changes(), learns_from(context.job.train.preference)
    notes = "; ".join(filter(None, [notes, _REFERENCE_POINT_NOTE if records == "labels" else ""]))
    compared_unit = {None: "", "labels": "answer", "pairs": "pair"}[records]
    figures = state.metrics, state.evaluations, entropy, written, changes, compared_unit, notes
    say(*final_lines(report, context.profile, *figures))
    if context.material is not None and context.material.skipped_records:
        skipped = context.material.skipped_records
        say(f"{skipped} bad records were skipped (data.skip_bad); they are listed at the start of the log")
    if state.skipped:
        say(f"{units.plural(state.skipped, 'step')} skipped, because of gradients that were not finite")


MIN_OTHER_CORES = 0.25
"""Load by other programs, in cores, above which it is reported."""
MIN_BUSY_SHARE = 0.85
"""Utilization above which processes are assumed to wait for cores."""

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""CPU times that do not count as busy. Guest times are already part of other times; stolen time counts as busy."""


class OtherPrograms:
    """Measures the load that other programs put on this rank's host, starting at construction."""

    def __init__(self) -> None:
        self._now = BestEffort("measuring other programs", _cpu_seconds)
        self._began = self._now()

    def summary(self, world: World) -> str:
        """Describe the load on each slowed host: ``other programs took about 0.8 of 2 cores``; "" if none. Collective."""
        ended, host_row = self._now(), None
        if ended is not None and self._began is not None:
            passed_s, own_s, *cores_s = (now - then for now, then in zip(ended, self._began, strict=False))
            host_row = [world.host, allowed_cores(), passed_s, own_s, cores_s]
        rows, texts = [row for row in world.all_gather_json(host_row) if row is not None], []
        for host in dict.fromkeys(row[0] for row in rows):
            host_rows = [row for row in rows if row[0] == host]
            usable = {core for row in host_rows for core in row[1]}
            _, _, passed_s, _, busy_s = host_rows[0]
            if not passed_s > 0 or max(usable) >= len(busy_s):
                continue
            used_cores = sum(busy_s[core] for core in usable) / passed_s
            other_cores = used_cores - sum(row[3] for row in host_rows) / passed_s
            if other_cores > MIN_OTHER_CORES and used_cores > MIN_BUSY_SHARE * len(usable):
                host_text = f" on {host}" if len(set(world.hosts)) > 1 else ""
                texts.append(f"about {other_cores:.1f} of {len(usable)} cores{host_text}")
        return f"other programs took {', '.join(texts)}" if texts else ""


def _cpu_seconds() -> list[float]:
    """Return the wall-clock time, this process's CPU time, and the busy time of each core, in seconds."""
    cores = (core._asdict().items() for core in psutil.cpu_times(percpu=True))
    busy_s = (sum(seconds for name, seconds in core if name not in _NOT_BUSY) for core in cores)
    return [time.perf_counter(), time.process_time(), *busy_s]
