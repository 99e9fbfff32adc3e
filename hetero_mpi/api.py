"""Python API: the commands as functions that return values (docs/python.md).

``plan``, ``simulate`` and ``load_run`` need neither MPI nor torch. ``profile``, ``train`` and ``steps`` are collective: all
processes of mpirun call them in the same order; without mpirun there is one process. An error that the user can fix is a
``UserError`` on all ranks, which can continue afterwards. Any other error aborts all ranks, since a rank that waits for a message
cannot be reached otherwise; with one rank, it is raised as well.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.commands.plan_commands import PlanQuestion, chosen_plan, plan_question
from hetero_mpi.job.load import LoadedJob, job_from_tables, load_job
from hetero_mpi.job.schema import JobConfig as Tables
from hetero_mpi.planning.schedule import Event
from hetero_mpi.planning.simulator import simulate as simulate_step
from hetero_mpi.planning.types.plan import HostMemory, Plan, PlanReport, RankMemory
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import (
    load_plan,
    load_profile,
    plan_from_dict,
    plan_to_dict,
    profile_from_dict,
    profile_to_dict,
)
from hetero_mpi.report.past_run import PastRun, read_run
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.step_iterator import Step, StepEvents, Steps, StopTraining, close_at_exit
from hetero_mpi.training.follower import Event as RunEvent
from hetero_mpi.training.follower import Reply
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.training.follower import OnEvent
    from hetero_mpi.training.result import TrainResult
    from hetero_mpi.training.signals import StopRequest

_ACTIVE_RUN = threading.Lock()
"""Lock of the active run or measurement of this program, since two cannot use MPI at the same time."""


@dataclass(frozen=True)
class Job(LoadedJob):
    """A validated, immutable job: model, data and training options. Created by ``load`` or ``build``."""

    @classmethod
    def load(cls, path: str | Path, set: Mapping[str, Any] | None = None) -> Job:
        """Read a job file.

        Args:
            path: job file (TOML); jobs/reference.toml documents every key.
            set: overrides, such as ``{"train.steps": 6}``; None empties a key.

        Raises:
            UserError: All problems of the file and the overrides.
        """
        return cls(**vars(load_job(path, settings=set)))

    @classmethod
    def build(
        cls,
        tables: Mapping[str, Mapping[str, Any]],
        name: str = "job",
        directory: str | Path = ".",
        set: Mapping[str, Any] | None = None,
    ) -> Job:
        """Build a job without a file.

        Args:
            tables: content of a job file: table -> key -> value. Paths may be ``Path``; None empties a key.
            name: value of ``{name}`` in ``output.run_dir``, without slashes.
            directory: base of the job's relative paths.
            set: overrides, as for ``load``.

        Raises:
            UserError: All problems of the job.
        """
        return cls(**vars(job_from_tables(tables, name, directory, set)))

    @property
    def tables(self) -> Tables:
        """All tables and keys with their values or defaults, such as ``tables.train.steps``."""
        return self.job


@dataclass(frozen=True)
class Simulation:
    """Predicted step of a plan, without idle ranks."""

    step_s: float
    tokens_per_s: float
    """Throughput of the global batch; samples per second for a custom model."""
    use: dict[int, float]
    """Rank -> share of the step in which it computes."""
    busy_s: dict[int, float]
    """Rank -> seconds of forward, backward and optimizer; includes tensor-parallel communication, unlike ``use``."""
    memory: tuple[RankMemory, ...]
    """Peak and usable bytes of each rank."""
    hosts: tuple[HostMemory, ...]
    """Peak and usable bytes of hosts whose memory several ranks share."""
    events: tuple[Event, ...]
    """All actions of all ranks with their start and end times."""
    report: PlanReport
    """The plan, ``report.plan``, with its prediction, lower bound and reasons."""


def profile(job: Job | str | Path, *, reprofile: bool = False) -> ClusterProfile:
    """Measure the ranks and the links between them for a job, and return the profile on all ranks. Collective.

    Args:
        job: a job, or the path of a job file, which only rank 0 reads. Rank 0's value counts.
        reprofile: ignore cached device measurements (links and free memory are always measured).

    Raises:
        UserError: Raised on all ranks.
    """
    with collective() as world:
        from hetero_mpi.commands.profile_command import measure

        return measure(world, _job_or_path(job), reprofile)


def plan(
    job: Job | str | Path, profile: ClusterProfile | str | Path, user_plan: Plan | str | Path | None = None
) -> PlanReport:
    """Plan a job for the cluster of a profile, or check ``user_plan``, with its prediction and reasons.

    Pass ``report.plan`` to ``simulate`` and ``train``. Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: No plan fits, the profile was made for another job, or the given plan does not match.
    """
    return chosen_plan(_question(job, profile), user_plan)


def simulate(job: Job | str | Path, plan: Plan | str | Path, profile: ClusterProfile | str | Path) -> Simulation:
    """Simulate a step of a plan, as the planner does to compare plans.

    Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: The plan or the profile does not match the job.
    """
    question = _question(job, profile)
    report = chosen_plan(question, plan)
    simulated = simulate_step(report.plan, question.profile)
    seconds = simulated.step_s
    return Simulation(
        step_s=seconds,
        tokens_per_s=report.plan.global_batch * report.plan.sequence_length / seconds if seconds > 0 else float("inf"),
        use=simulated.use,
        busy_s=simulated.busy_s,
        memory=report.memory,
        hosts=report.hosts,
        events=simulated.events,
        report=report,
    )


def load_run(directory: str | Path) -> PastRun:
    """Read the directory of a running, finished or crashed run: job, plan, profile, steps, evaluations, events, checkpoints.

    Needs neither MPI nor torch.

    Raises:
        UserError: The directory is not a run directory, or one of its files is corrupted.
    """
    return read_run(Path(directory))


def train(
    job: Job | str | Path,
    plan: Plan | str | Path | None = None,
    profile: ClusterProfile | str | Path | None = None,
    resume: str | Path | None = None,
    *,
    run_dir: str | Path | None = None,
    reprofile: bool = False,
    on_plan: Callable[[PlanReport], object] | None = None,
    on_step: Callable[[Step], object] | None = None,
    on_evaluate: Callable[[Evaluation], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> TrainResult:
    """Train a job to its end, as the command ``train`` does, and return the result on all ranks. Collective.

    Rank 0's arguments count, and only rank 0 reads the files that they name. The program can use MPI afterwards, and can call
    ``train`` again.

    Each rank has its own callbacks, which are called between steps with equal values on all ranks. Raise ``StopTraining`` in a
    callback to end training after the step and write the result; any other exception aborts all ranks.

    Args:
        job: a job, or the path of a job file.
        plan: a plan, or its file; None: the planner decides.
        profile: a profile, or its file; None: measure, unless the run directory has a matching profile.
        resume: checkpoint to resume from, or ``"latest"``.
        run_dir: run directory, instead of ``output.run_dir``.
        reprofile: ignore earlier measurements.
        on_plan: called with a plan before its first step, at the start and when the plan changes.
        on_step: called after each step.
        on_evaluate: called with each evaluation, before ``on_step`` of its step.
        on_checkpoint: called on all ranks with the path, on rank 0's host, of a complete checkpoint.

    Raises:
        UserError: Raised on all ranks. Its ``exit_code`` is ``ExitCode.STOPPED`` if a signal ended the run with a checkpoint.
    """
    callbacks: dict[type, Callable[[Any], object] | None] = {
        PlanReport: on_plan,
        Step: on_step,
        Evaluation: on_evaluate,
        Path: on_checkpoint,
    }

    def receive(event: RunEvent) -> Reply:
        try:
            for call in (call for kind, call in callbacks.items() if call is not None and isinstance(event, kind)):
                call(event)
        except StopTraining:
            return Reply.END
        return Reply.GO_ON

    on_event = StepEvents(receive) if any(callbacks.values()) else None
    result = _run(on_event, None, job, plan, profile, resume, run_dir, reprofile)
    assert result is not None  # a callback cannot leave the run
    return result


def steps(
    job: Job | str | Path,
    plan: Plan | str | Path | None = None,
    profile: ClusterProfile | str | Path | None = None,
    resume: str | Path | None = None,
    *,
    run_dir: str | Path | None = None,
    reprofile: bool = False,
) -> Steps:
    """Iterate over the steps of a run on all ranks: ``for step in hetero_mpi.steps(job): ...``. The first one starts it.

    Arguments, errors and metrics are those of ``train``. The loop body runs on every rank between steps. Leaving the loop on any
    rank ends the run on all ranks with a checkpoint, like a signal; continue with ``resume``.
    """

    def run(on_event: OnEvent, stop: StopRequest) -> TrainResult | None:
        return _run(on_event, stop, job, plan, profile, resume, run_dir, reprofile)

    return Steps(run, _prepare_thread)


def _prepare_thread() -> None:
    """Start MPI on the main thread for a run on another thread. Collective. Raises UserError: MPI does not allow this."""
    with collective() as world:
        close_at_exit()
        with world.collective_errors("starting a run"):
            if world.thread_level in ("single", "funneled"):
                raise UserError(
                    "mpi.thread_level",
                    "steps() calls MPI from another thread, which this MPI library does not support: use train(on_step=...), or an "
                    "MPI library with THREAD_SERIALIZED",
                )


def _run(
    on_event: OnEvent | None,
    stop: StopRequest | None,
    job: Job | str | Path,
    plan: Plan | str | Path | None,
    profile: ClusterProfile | str | Path | None,
    resume: str | Path | None,
    run_dir: str | Path | None,
    reprofile: bool,
) -> TrainResult | None:
    """Train with rank 0's arguments. All ranks receive events if any rank has callbacks."""
    with collective(stop is not None) as world:
        from hetero_mpi.training.setup.context import TrainOptions
        from hetero_mpi.training.training_run import train as train_on_ranks

        if any(world.all_gather_json(on_event is not None)):
            on_event = on_event or (lambda event: Reply.GO_ON)
        shared: dict[str, Any] | None = None
        with world.on_leader("reading plan and profile"):
            if world.rank == 0:
                given_plan = load_plan(plan) if isinstance(plan, (str, Path)) else plan
                given_profile = load_profile(profile) if isinstance(profile, (str, Path)) else profile
                shared = {
                    "plan": plan_to_dict(given_plan) if given_plan is not None else None,
                    "profile": profile_to_dict(given_profile) if given_profile is not None else None,
                    "resume": str(resume) if resume is not None else None,
                    "run_dir": str(run_dir) if run_dir is not None else None,
                    "reprofile": reprofile,
                }
        shared = world.broadcast_json(shared)
        options = TrainOptions(
            job=_job_or_path(job),
            run_dir=shared["run_dir"],
            resume=shared["resume"],
            plan=plan_from_dict(shared["plan"]) if shared["plan"] is not None else None,
            profile=profile_from_dict(shared["profile"]) if shared["profile"] is not None else None,
            reprofile=shared["reprofile"],
        )
        return train_on_ranks(world, options, on_event, stop)


def _job_or_path(job: Job | str | Path) -> Job | Path:
    return job if isinstance(job, Job) else Path(job)


@contextlib.contextmanager
def collective(run_thread: bool = False) -> Iterator[World]:
    """Enter a block that all ranks of the program run together, as ``mpi_start.collective_block``.

    Args:
        run_thread: whether the caller is the run's thread of ``step_iterator``.

    Raises:
        UserError: A run is active, or the caller is not the main thread.
    """
    # Imported here because these modules need mpi4py, and planning does not.
    from hetero_mpi.comm.ranks.mpi_start import collective_block
    from hetero_mpi.rundir.logs import setup_logging

    # bitsandbytes (imported by peft) warns about an optional kernel package that we never call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if not run_thread and threading.current_thread() is not threading.main_thread():
        text = "profile, train and steps handle signals and call MPI: call them from the main thread"
        raise UserError("api.thread", text)
    if not _ACTIVE_RUN.acquire(blocking=False):
        text = "another run of this program is active: iterate to its end, or call its close(), before the next call"
        raise UserError("run.under_way", text)
    try:
        with collective_block() as world:
            yield world
    finally:
        _ACTIVE_RUN.release()
        setup_logging(None, -1, 0)  # later messages of the program do not belong in the run's log files
        logging.captureWarnings(False)


def _question(job: Job | str | Path, profile: ClusterProfile | str | Path) -> PlanQuestion:
    """Build the planner's input from values, as ``plan_commands.ask`` does from files."""
    loaded = job if isinstance(job, Job) else Job.load(job)
    if not isinstance(profile, ClusterProfile):
        return plan_question(loaded, load_profile(profile), str(profile))
    checked = profile_from_dict(profile_to_dict(profile), "the given profile")
    return plan_question(loaded, checked)
