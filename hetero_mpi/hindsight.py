"""The commands that look back at runs: ``report``, ``compare`` and ``baseline``. Neither torch nor MPI is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetero_mpi.errors import UserError
from hetero_mpi.job import LoadedJob, load_job
from hetero_mpi.offline import ask
from hetero_mpi.planning.changes import restricted
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.planner import make_plan
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.tables import rank_classes
from hetero_mpi.report import units
from hetero_mpi.report.comparison import Single, baseline_lines, comparison_lines
from hetero_mpi.report.page.document import REPORT_NAME, write_report
from hetero_mpi.report.past_run import PastRun, read_run
from hetero_mpi.training.request import micro_batch_choices, request_of


def report(run: Path, output: Path | None) -> list[str]:
    """Write a run's report, by default into its directory. Returns the lines to print."""
    written = write_report(read_run(run), output if output is not None else run / REPORT_NAME)
    return [f"Report: {written}"]


def compare(runs: list[Path]) -> list[str]:
    """Runs side by side.

    Raises:
        UserError: fewer than two, or one is no run.
    """
    if len(runs) < 2:
        raise UserError(f"compare needs two runs or more (got {len(runs)}): compare RUN RUN")
    return comparison_lines([read_run(run) for run in runs])


def baseline(job: Path, overrides: tuple[str, ...], source: Path) -> list[str]:
    """Was it worth adding the other devices? The best single device of a profile, or of a run's, against all together.

    Args:
        source: a profile, or the directory of a run, whose plan and measured times are then what is compared.

    Raises:
        UserError: the job and the profile do not fit each other, or nothing can do the job.
    """
    run = read_run(source) if source.is_dir() else None
    loaded, profile, request, remarks = _asked(job, overrides, source, run)
    plan = run.plan if run is not None and run.plan is not None else make_plan(profile, request)
    # Alone, a device may take larger micro-batches than a pipeline could.
    choices = request.micro_batch_choices
    if len(choices) > 1:
        choices = micro_batch_choices(request.global_batch, loaded.job.train.micro_batch, 1, dropout=False)[0]
    singles = [
        _single(profile, members[0], replace(request, micro_batch_choices=choices)) for members in rank_classes(profile)
    ]
    tokens = plan.global_batch * plan.sequence_length
    return baseline_lines(singles, plan, profile, tokens, run, [*remarks, *_sharing(profile)])


def _asked(
    job: Path, overrides: tuple[str, ...], source: Path, run: PastRun | None
) -> tuple[LoadedJob, ClusterProfile, PlanRequest, tuple[str, ...]]:
    """The job and the profile, which must fit each other; a job that emulates stands in for the profile's model."""
    if run is not None and run.profile is not None and run.profile.emulated:
        loaded = load_job(job, overrides)
        train = loaded.job.train
        choices, reason = micro_batch_choices(train.global_batch, train.micro_batch, len(run.profile.devices), False)
        request = replace(request_of(loaded, choices), sequence_length=run.profile.model.sequence_length)
        _check_batch(request, run.plan, source)
        return loaded, run.profile, request, (reason,)
    question = ask(job, overrides, source if run is None else source / "profile.toml")
    _check_batch(question.request, run.plan if run is not None else None, source)
    return question.loaded, question.profile, question.request, question.remarks


def _check_batch(request: PlanRequest, plan: Plan | None, source: Path) -> None:
    if plan is not None and plan.global_batch != request.global_batch:
        raise UserError(
            f"the same tokens are compared: {source} took {plan.global_batch} sequences per step, the job says "
            f"{request.global_batch}; add --set train.global_batch={plan.global_batch}"
        )


def _single(profile: ClusterProfile, rank: int, request: PlanRequest) -> Single:
    """The best plan for one device by itself."""
    device = profile.devices[rank]
    devices = list(profile.devices)
    devices[rank] = replace(device, layers={kind: _alone(device, kind) for kind in device.layers})
    name = f"{device.name}, {device.host}"
    try:
        plan = make_plan(
            restricted(replace(profile, devices=tuple(devices)), [rank]), replace(request, max_pipelines=1)
        )
    except UserError as error:
        problem = str(error).splitlines()[0]
        short = f"does not fit into its {units.size(device.memory_bytes)}" if "fit in memory" in problem else problem
        return Single(rank, name, None, short)
    return Single(rank, name, plan.predicted_step_s)


def _alone(device: DeviceProfile, kind: str) -> LayerTimes:
    """Times while all other ranks were still, where that was measured too."""
    alone = device.alone.get(kind)
    return device.layers[kind] if alone is None else LayerTimes(alone.forward_s, alone.backward_s)


def _sharing(profile: ClusterProfile) -> list[str]:
    hosts = [device.host for device in profile.devices if device.backend == "cpu"]
    crowded = sorted({host for host in hosts if hosts.count(host) > 1})
    if not crowded:
        return []
    return [
        f"The CPU ranks on {', '.join(crowded)} share its cores: one process alone could use all of them, which this "
        "prediction does not know. `launch -np 1 -- train JOB --run-dir DIR` measures it, and `compare` then tells."
    ]
