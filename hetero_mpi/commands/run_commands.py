"""The commands that read existing runs: ``report``, ``compare``, ``baseline``. Imports neither torch nor MPI."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetero_mpi.commands.plan_commands import ask
from hetero_mpi.job.load import load_job, stored_job
from hetero_mpi.job.plan_request import build_plan_request, micro_batch_choices
from hetero_mpi.planning.decision.decide import time_alone
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.report.comparison_text import comparison_lines
from hetero_mpi.report.past_run import PastRun, anonymous, read_run, runs_in
from hetero_mpi.report.run_text import baseline_lines
from hetero_mpi.rundir.run_directory import REPORT_NAME, SHARED_NAME
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


def report(run_dir: Path, output: Path | None, share: bool = False) -> list[str]:
    """Write a run's report, by default to its directory, and return the lines to print.

    If ``share`` is true, the report omits host names, user names and absolute paths.
    """
    from hetero_mpi.report.page.document import write_report  # loads matplotlib

    run = read_run(run_dir)
    default = run_dir / (SHARED_NAME if share else REPORT_NAME)
    written = write_report(anonymous(run) if share else run, output if output is not None else default)
    return [f"Report: {written}"]


def compare(runs: list[Path], output: Path | None = None) -> list[str]:
    """Compare runs side by side, and write a page with their curves to ``output``.

    Raises:
        UserError: For fewer than two runs, if a directory neither is a run nor contains runs, or if ``output`` cannot be written.
    """
    directories = [directory for path in runs for directory in (runs_in(path) or [path])]
    if len(directories) < 2:
        count = units.plural(len(directories), "run")
        raise UserError(
            "compare.too_few_runs", f"compare needs at least two runs (got {count}): compare RUN RUN, or compare DIR"
        )
    compared = [read_run(directory) for directory in directories]
    lines = comparison_lines(compared)
    if output is None:
        return lines
    from hetero_mpi.report.page.comparison import comparison_html  # loads matplotlib
    from hetero_mpi.report.page.document import write_page

    return [*lines, f"Page: {write_page(comparison_html(compared, output), output)}"]


def baseline(job: Path | None, overrides: Sequence[str], profile: Path | None) -> list[str]:
    """Compare each kind of device of a profile, used alone, with all devices together.

    Args:
        job: the job. None stands for the run's job, or for a job that trains the profile's model.
        profile: a profile, or a run directory, whose profile, plan and measured times are then used.

    Raises:
        UserError: If the job and the profile do not match, or if there is no plan that fits.
    """
    run = read_run(profile) if profile is not None and profile.is_dir() else None
    cluster, request, remarks = _planning_inputs(job, overrides, profile, run)
    report = run.report if run is not None and run.report is not None else make_plan(cluster, request)
    singles = [time_alone(cluster, request, members[0]) for members in rank_classes(cluster)]
    tokens = report.plan.global_batch * report.plan.sequence_length
    return baseline_lines(singles, report, cluster, tokens, run, [*remarks, *_thread_remarks(cluster)])


def _planning_inputs(
    job: Path | None, overrides: Sequence[str], source: Path | None, run: PastRun | None
) -> tuple[ClusterProfile, PlanRequest, tuple[str, ...]]:
    """Return the profile, the planning request and remarks. A run on emulated devices is planned for its profile's own model."""
    if run is not None and run.profile is not None and run.profile.emulated:
        loaded = load_job(job, overrides) if job else stored_job(run.job, run.name, run.directory, overrides)
        train, ranks, sequence_length = loaded.job.train, len(run.profile.devices), run.profile.model.sequence_length
        _, reason = micro_batch_choices(train.global_batch, train.micro_batch, ranks, False)
        request = replace(build_plan_request(loaded, ranks, False), sequence_length=sequence_length)
        inputs: tuple[ClusterProfile, PlanRequest, tuple[str, ...]] = run.profile, request, (reason,)
    else:
        question = ask(job, overrides, source)
        inputs = question.profile, question.request, question.remarks
    if run is not None:
        _check_batch(inputs[1], run.report, run.directory)
    return inputs


def _check_batch(request: PlanRequest, report: PlanReport | None, source: Path) -> None:
    if report is not None and (batch := report.plan.global_batch) != request.global_batch:
        raise UserError(
            "baseline.global_batch",
            f"the global batch of {source}, {batch} sequences, differs from the job's, {request.global_batch}; to compare equal "
            f"numbers of tokens, add --set train.global_batch={batch}",
        )


def _thread_remarks(profile: ClusterProfile) -> list[str]:
    """Remark for each host with several CPU ranks that the prediction of a single rank uses only its share of the threads."""
    cpu_devices = [device for device in profile.devices if device.backend == "cpu"]
    cpu_ranks_by_host = Counter(device.host for device in cpu_devices)
    threads = {device.host: device.threads for device in cpu_devices if cpu_ranks_by_host[device.host] > 1}
    return [
        f"The prediction of a single rank on {host} uses {units.plural(rank_threads, 'thread')}, its share of the cores; one "
        "process could use all cores. To measure that, run `launch -np 1 -- train JOB --run-dir DIR`, then `compare`."
        for host, rank_threads in sorted(threads.items())
    ]
