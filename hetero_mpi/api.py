"""Python API: the commands as functions that return values (docs/python.md).

``plan``, ``simulate`` and ``load_run`` need neither MPI nor torch. ``profile``, ``train`` and ``steps`` are collective: all
processes started by mpirun call them in the same order; without mpirun there is one process. An error that the user can fix raises
a ``UserError`` on all ranks, which can continue afterwards. Any other error aborts all ranks, since there is no other way to reach
a rank that is waiting for a message. In a job with a single rank, such an error is simply raised.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.commands.plan_commands import PlanQuestion, chosen_plan, plan_question
from hetero_mpi.job.load import LoadedJob, job_from_tables, load_job
from hetero_mpi.job.schema import JobConfig as Tables
from hetero_mpi.planning.simulator import SimulatedStep
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
from hetero_mpi.util.errors import ExitCode, UserError, require

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.training.follower import OnEvent
    from hetero_mpi.training.result import TrainResult
    from hetero_mpi.training.signals import StopRequest

_ACTIVE_RUN = threading.Lock()
"""Held during a run or measurement of this program, because two cannot use MPI at the same time."""
GivenPlan = Plan | PlanReport | str | Path


@dataclass(frozen=True, repr=False)
class Job(LoadedJob):
    """A validated, immutable job with its model, data and training options. Create it with ``load`` or ``build``."""

    @classmethod
    def load(cls, path: str | Path, set: Mapping[str, Any] | None = None) -> Job:
        """Read a job file.

        Args:
            path: Job file (TOML). jobs/reference.toml documents every key.
            set: Overrides, such as ``{"train.steps": 6}``. The value None clears a key.

        Raises:
            UserError: If the file or an override is invalid; lists all problems.
        """
        return cls(**vars(load_job(_argument("path", path, Path), settings=set)))

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
            tables: The contents of a job file, as table -> key -> value. Paths may be ``Path``. The value None clears a key.
            name: Replaces ``{name}`` in ``output.run_dir``; must not contain slashes.
            directory: Directory to which relative paths in the job refer.
            set: Overrides, as in ``load``.

        Raises:
            UserError: If the job is invalid; lists all problems.
        """
        return cls(**vars(job_from_tables(tables, name, directory, set)))

    @property
    def tables(self) -> Tables:
        """All tables of the job with the value or default of every key, such as ``tables.train.steps``."""
        return self.job


@dataclass(frozen=True, repr=False)
class Simulation(SimulatedStep):
    """The simulated step of a plan. Idle ranks are not included."""

    tokens_per_s: float
    """Throughput in tokens per second, or in samples per second for a custom model."""
    memory: tuple[RankMemory, ...]
    """Peak and usable memory of each rank, in bytes."""
    hosts: tuple[HostMemory, ...]
    """Peak and usable memory, in bytes, of each host whose memory several ranks share."""
    report: PlanReport
    """The plan (``report.plan``) with its prediction, lower bound and reasons."""


def profile(job: Job | str | Path, *, reprofile: bool = False) -> ClusterProfile:
    """Measure the ranks and the links between them for a job, and return the profile on all ranks. Collective.

    Args:
        job: A job, or the path of a job file, which only rank 0 reads. The other ranks' values are ignored.
        reprofile: Ignore cached device measurements. Links and free memory are always measured.

    Raises:
        UserError: On all ranks, for an error that the user can fix.
    """
    with collective() as world:
        from hetero_mpi.commands.profile_command import measure

        with world.on_leader("reading the arguments"):
            job = _argument("job", job, Path, Job) if world.rank == 0 else Path()
        return measure(world, job, reprofile)


def plan(job: Job | str | Path, profile: ClusterProfile | str | Path, user_plan: GivenPlan | None = None) -> PlanReport:
    """Find the best plan for a job on a profiled cluster, or check ``user_plan``; return it with its prediction and reasons.

    Pass the result to ``simulate`` or ``train``. Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: If no plan fits, the profile was made for another job, or ``user_plan`` does not match the job.
    """
    return chosen_plan(
        _question(job, profile), user_plan and _argument("user_plan", user_plan, load_plan, Plan, PlanReport)
    )


def simulate(job: Job | str | Path, plan: GivenPlan, profile: ClusterProfile | str | Path) -> Simulation:
    """Simulate a step of a plan, as the planner does to compare plans.

    Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: If the plan or the profile does not match the job.
    """
    question = _question(job, profile)
    report = chosen_plan(question, plan and _argument("plan", plan, load_plan, Plan, PlanReport))
    step, plan = simulate_step(report.plan, question.profile), report.plan
    tokens_per_s = plan.global_batch * plan.sequence_length / step.step_s if step.step_s > 0 else float("inf")
    return Simulation(**vars(step), tokens_per_s=tokens_per_s, memory=report.memory, hosts=report.hosts, report=report)


def load_run(directory: str | Path) -> PastRun:
    """Read the directory of a running, finished or crashed run: job, plan, profile, steps, evaluations, events, checkpoints.

    Needs neither MPI nor torch.

    Raises:
        UserError: If the directory is not a run directory, or one of its files is corrupted.
    """
    return read_run(_argument("directory", directory, Path))


def train(
    job: Job | str | Path,
    plan: GivenPlan | None = None,
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
    """Train a job to completion, as the command ``train`` does, and return the result on all ranks. Collective.

    All ranks use the arguments of rank 0, which alone reads the files that they name. The program can use MPI afterwards, and can
    call ``train`` again.

    Each rank has its own callbacks, which are called between steps with equal values on all ranks. Raise ``StopTraining`` in a
    callback to end training after the step and write the result. Any other exception aborts all ranks.

    Args:
        job: A job, or the path of a job file.
        plan: A plan, or the path of a plan file. If None, the planner chooses one.
        profile: A profile, or its path. If None, the ranks are measured unless the run directory has a matching profile.
        resume: Checkpoint to resume from, or ``"latest"``.
        run_dir: Run directory to use instead of ``output.run_dir``.
        reprofile: Ignore earlier measurements.
        on_plan: Called with each plan before its first step, both at the start and whenever the plan changes.
        on_step: Called after each step.
        on_evaluate: Called with each evaluation, before ``on_step`` is called for the same step.
        on_checkpoint: Called on all ranks when a checkpoint is complete, with its path on rank 0's host.

    Raises:
        UserError: On all ranks. Its ``exit_code`` is ``ExitCode.STOPPED`` if a signal ended the run with a checkpoint.
    """
    callbacks: dict[type, Callable[[Any], object] | None] = {PlanReport: on_plan, Step: on_step}
    callbacks |= {Evaluation: on_evaluate, Path: on_checkpoint}

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
    plan: GivenPlan | None = None,
    profile: ClusterProfile | str | Path | None = None,
    resume: str | Path | None = None,
    *,
    run_dir: str | Path | None = None,
    reprofile: bool = False,
) -> Steps:
    """Iterate over the steps of a run on all ranks: ``for step in hetero_mpi.steps(job): ...``. The first step starts the run.

    Arguments, errors and metrics are those of ``train``. The loop body runs on every rank between steps. Leaving the loop on any
    rank ends the run on all ranks with a checkpoint, as a signal does; ``resume`` continues from it.
    """

    def run(on_event: OnEvent, stop: StopRequest) -> TrainResult | None:
        return _run(on_event, stop, job, plan, profile, resume, run_dir, reprofile)

    return Steps(run, _prepare_thread)


def _prepare_thread() -> None:
    """Start MPI on the main thread, for use by the run's thread. Collective. Raises UserError if MPI does not allow this."""
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
    plan: GivenPlan | None,
    profile: ClusterProfile | str | Path | None,
    resume: str | Path | None,
    run_dir: str | Path | None,
    reprofile: bool,
) -> TrainResult | None:
    """Train with rank 0's arguments. If any rank has callbacks, events are sent to all ranks."""
    with collective(stop is not None) as world:
        from hetero_mpi.training.setup.context import TrainOptions
        from hetero_mpi.training.training_run import train as train_on_ranks

        if any(world.all_gather_json(on_event is not None)):
            on_event = on_event or (lambda event: Reply.GO_ON)
        read_job, shared = Path(), dict[str, Any]()
        with world.on_leader("reading the arguments"):
            if world.rank == 0:
                read_job = _argument("job", job, Path, Job)
                shared = {"resume": resume and str(resume), "run_dir": run_dir and str(run_dir), "reprofile": reprofile}
                if plan is not None:
                    shared["plan"] = plan_to_dict(_argument("plan", plan, load_plan, Plan, PlanReport))
                if profile is not None:
                    shared["profile"] = profile_to_dict(_argument("profile", profile, load_profile, ClusterProfile))
        shared = world.broadcast_json(shared)
        readers: dict[str, Callable[[Any], Any]] = {"plan": plan_from_dict, "profile": profile_from_dict}
        shared |= {key: readers[key](shared[key]) for key in readers if key in shared}
        return train_on_ranks(world, TrainOptions(read_job, **shared), on_event, stop)


def _argument(name: str, value: Any, read: Callable[[Any], Any], *kinds: type) -> Any:
    """Return an argument of one of ``kinds``, or what ``read`` makes of a path. Raises UserError for another type."""
    if isinstance(value, (str, PathLike)):
        return read(value)
    expected = f"a {kinds[0].__name__} or the path of its file" if kinds else "the path of a file"
    require(isinstance(value, kinds), "api.argument", name, expected, value)
    return value


@contextlib.contextmanager
def collective(run_thread: bool = False) -> Iterator[World]:
    """Enter a block that all ranks of the program run together (``mpi_start.collective_block``).

    Args:
        run_thread: Whether the caller is the thread on which ``step_iterator`` executes a run.

    Raises:
        UserError: If another run is active, or the caller is neither that thread nor the main thread.
    """
    # Imported here because these modules need mpi4py, and planning does not.
    from hetero_mpi.comm.ranks.leave import Interrupted
    from hetero_mpi.comm.ranks.mpi_start import collective_block
    from hetero_mpi.rundir.logs import setup_logging

    if not run_thread and threading.current_thread() is not threading.main_thread():
        text = "profile, train and steps handle signals and call MPI: call them from the main thread"
        raise UserError("api.thread", text)
    if not _ACTIVE_RUN.acquire(blocking=False):
        text = "another run of this program is active: iterate to its end, or call its close(), before the next call"
        raise UserError("run.under_way", text)
    try:
        with collective_block() as world:
            yield world
    except Interrupted as error:  # by a job with a single rank; several ranks end at once
        raise UserError("run.stopped", str(error), exit_code=ExitCode.STOPPED) from None
    finally:
        _ACTIVE_RUN.release()
        setup_logging(None, -1, 0)  # later messages of the program do not belong in the run's log files
        logging.captureWarnings(False)


def _question(job: Job | str | Path, profile: ClusterProfile | str | Path) -> PlanQuestion:
    """Build the planner's input from a job and a profile, either of which may be the path of a file."""
    loaded = _argument("job", job, Job.load, Job)
    read: ClusterProfile = _argument("profile", profile, load_profile, ClusterProfile)
    if read is not profile:
        return plan_question(loaded, read, str(profile))
    return plan_question(loaded, profile_from_dict(profile_to_dict(read), "the given profile"))
