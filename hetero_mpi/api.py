"""The package's functions for Python programs: what the commands do, as values that a program goes on with (docs/python.md).

``plan``, ``simulate`` and ``load_run`` need neither MPI nor torch. ``profile``, ``train`` and ``steps`` are collective: every
process that mpirun started calls them, in the same order; without mpirun there is one. What a user can put right is raised as
``UserError``, by all ranks alike, after which all may go on; anything else ends all ranks, as one that is left behind in a message
could not be reached in any other way. Where there is one rank, it raises that too.
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

_UNDER_WAY = threading.Lock()
"""Held while a run or a measurement of this program is under way; a second one cannot use MPI at the same time."""


@dataclass(frozen=True)
class Job(LoadedJob):
    """A validated job: what is to be trained, on which data, how. Made by ``load`` or ``build``, and never changed."""

    @classmethod
    def load(cls, path: str | Path, set: Mapping[str, Any] | None = None) -> Job:
        """Read a job file.

        Args:
            path: the file (TOML); jobs/reference.toml shows every key.
            set: changes, ``{"train.steps": 6}``; None empties a key.

        Raises:
            UserError: with all problems of the file and the changes.
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
        """A job without a file.

        Args:
            tables: what a job file would hold: table -> key -> value. Paths may be ``Path``; None empties a key.
            name: what ``{name}`` stands for in ``output.run_dir``, one word.
            directory: where the job's relative paths start.
            set: changes, as for ``load``.

        Raises:
            UserError: with all problems.
        """
        return cls(**vars(job_from_tables(tables, name, directory, set)))

    @property
    def tables(self) -> Tables:
        """All tables with all their keys, defaults filled in: ``tables.train.steps``."""
        return self.job


@dataclass(frozen=True)
class Simulation:
    """A predicted step of a plan. Ranks that the plan leaves idle are in no table."""

    step_s: float
    tokens_per_s: float
    """Counted in the global batch; for a model made of layers, samples per second."""
    use: dict[int, float]
    """Rank -> share of the step in which it computes."""
    busy_s: dict[int, float]
    """Rank -> seconds of forward, backward and optimizer; in a group with its exchanges, which ``use`` leaves out."""
    memory: tuple[RankMemory, ...]
    """Peak and usable bytes of each rank."""
    hosts: tuple[HostMemory, ...]
    """The same of hosts whose memory several ranks share."""
    events: tuple[Event, ...]
    """Every action of every rank with its times."""
    report: PlanReport
    """``report.plan``, the plan, with its prediction, bound and reasons."""


def profile(job: Job | str | Path, *, reprofile: bool = False) -> ClusterProfile:
    """Measure the ranks and the links between them for a job. Collective; every rank gets the same profile.

    Args:
        job: a job, or the path of a job file, which only rank 0 reads. Rank 0's counts.
        reprofile: measure devices that were measured before, too (links and free memory are always measured).

    Raises:
        UserError: the same on all ranks.
    """

    with collective() as world:
        from hetero_mpi.commands.profile_command import measure

        return measure(world, _named(job), reprofile)


def plan(
    job: Job | str | Path, profile: ClusterProfile | str | Path, given: Plan | str | Path | None = None
) -> PlanReport:
    """The planner's plan of a job for the cluster of a profile, or one that is given, checked; with its prediction and reasons.

    ``report.plan`` is the plan, which ``simulate`` and ``train`` take.

    Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: nothing fits, the profile was not made for this job, or the given plan does not fit.
    """
    return chosen_plan(_question(job, profile), given)


def simulate(job: Job | str | Path, plan: Plan | str | Path, profile: ClusterProfile | str | Path) -> Simulation:
    """A step of a plan, predicted: the simulation that the planner compares plans by.

    Needs neither MPI nor torch, and is not collective.

    Raises:
        UserError: the plan or the profile does not fit the job.
    """
    question = _question(job, profile)
    report = chosen_plan(question, plan)
    step = simulate_step(report.plan, question.profile)
    seconds = step.step_s
    return Simulation(
        step_s=seconds,
        tokens_per_s=report.plan.global_batch * report.plan.sequence_length / seconds if seconds > 0 else float("inf"),
        use=step.use,
        busy_s=step.busy_s,
        memory=report.memory,
        hosts=report.hosts,
        events=step.events,
        report=report,
    )


def load_run(directory: str | Path) -> PastRun:
    """A run as its directory tells of it, during the run, after it and after a crash: job, plan, profile, steps, evaluations,
    events, checkpoints. Needs neither MPI nor torch.

    Raises:
        UserError: it is not the directory of a run, or a file of it is damaged.
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
    """Train a job to its end, as the command ``train`` does. Collective; every rank gets the same result.

    Rank 0's arguments count, and only rank 0 reads files that they name. MPI may be used afterwards, by another ``train`` too.

    Callbacks are each rank's own, and are called on every rank that has one, with the same values, between two steps. One that
    raises ``StopTraining`` ends training after the step, and the result is written; any other exception ends all ranks.

    Args:
        job: a job, or the path of a job file.
        plan: how to split the work; None: the planner decides.
        profile: what the cluster can do; None: it is measured, unless the run directory has a profile that fits.
        resume: a checkpoint to go on from, or ``"latest"``.
        run_dir: where results go, instead of ``output.run_dir``.
        reprofile: measure, whatever was measured before.
        on_plan: called with a plan before its first step, at the start and when the plan changes.
        on_step: called after each step.
        on_evaluate: called with a held-out loss, before ``on_step`` of the step it was measured after.
        on_checkpoint: called with the path of a checkpoint once it is whole, on rank 0's host.

    Raises:
        UserError: the same on all ranks. Its ``exit_code`` is ``ExitCode.STOPPED`` where a signal has asked for the end: the run
            has left a checkpoint.
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
    """The steps of a run, to be iterated over by all ranks: ``for step in hetero_mpi.steps(job): ...``. Arguments, errors and
    numbers are those of ``train``; the run begins with the first step that is asked for.

    The body runs on every rank between two steps. To leave the loop, on any rank, ends the run on all of them with a checkpoint, as
    a signal does; ``resume`` goes on from there.
    """

    def run(on_event: OnEvent, stop: StopRequest) -> TrainResult | None:
        return _run(on_event, stop, job, plan, profile, resume, run_dir, reprofile)

    return Steps(run, _prepare_thread)


def _prepare_thread() -> None:
    """Begin MPI on the main thread for a run on a thread of its own. Collective. Raises UserError: MPI allows no such thread."""
    with collective() as world:
        close_at_exit()
        with world.collective_errors("beginning a run"):
            if world.thread_level in ("single", "funneled"):
                raise UserError(
                    "mpi.thread_level",
                    "steps() works on a thread of its own, which this MPI library does not allow: use train(on_step=...), or an "
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
    """A run by rank 0's arguments. Callbacks of one rank are enough for events to be sent to all."""
    with collective(stop is not None) as world:
        from hetero_mpi.training.setup.context import TrainOptions
        from hetero_mpi.training.training_run import train as train_on_ranks

        if any(world.all_gather_json(on_event is not None)):
            on_event = on_event or (lambda event: Reply.GO_ON)
        shared: dict[str, Any] | None = None
        with world.on_leader("reading plan and profile"):
            if world.rank == 0:
                own_plan = load_plan(plan) if isinstance(plan, (str, Path)) else plan
                own_profile = load_profile(profile) if isinstance(profile, (str, Path)) else profile
                shared = {
                    "plan": plan_to_dict(own_plan) if own_plan is not None else None,
                    "profile": profile_to_dict(own_profile) if own_profile is not None else None,
                    "resume": str(resume) if resume is not None else None,
                    "run_dir": str(run_dir) if run_dir is not None else None,
                    "reprofile": reprofile,
                }
        shared = world.broadcast_json(shared)
        options = TrainOptions(
            job=_named(job),
            run_dir=shared["run_dir"],
            resume=shared["resume"],
            plan=plan_from_dict(shared["plan"]) if shared["plan"] is not None else None,
            profile=profile_from_dict(shared["profile"]) if shared["profile"] is not None else None,
            reprofile=shared["reprofile"],
        )
        return train_on_ranks(world, options, on_event, stop)


def _named(job: Job | str | Path) -> Job | Path:
    return job if isinstance(job, Job) else Path(job)


@contextlib.contextmanager
def collective(run_thread: bool = False) -> Iterator[World]:
    """A block that all ranks of the program run together, as ``mpi_start.collective_block``.

    Args:
        run_thread: this is the thread of a run whose program waits (``step_iterator``).

    Raises:
        UserError: a run is under way, or another thread calls than the main one.
    """
    # Imported here: these bring mpi4py, without which plans can be made.
    from hetero_mpi.comm.ranks.mpi_start import collective_block
    from hetero_mpi.rundir.logs import setup_logging

    # bitsandbytes (through peft) warns of an optional kernel package that we never call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if not run_thread and threading.current_thread() is not threading.main_thread():
        raise UserError(
            "api.thread", "profile, train and steps handle signals and talk to MPI: call them from the main thread"
        )
    if not _UNDER_WAY.acquire(blocking=False):
        raise UserError(
            "run.under_way",
            "a run of this program is under way: iterate to its end, or close() it, before the next call",
        )
    try:
        with collective_block() as world:
            yield world
    finally:
        _UNDER_WAY.release()
        setup_logging(None, -1, 0)  # a run's log files are the run's; what the program logs is its own
        logging.captureWarnings(False)


def _question(job: Job | str | Path, profile: ClusterProfile | str | Path) -> PlanQuestion:
    """A job and a profile that fits it, as the planner is asked. As ``plan_commands.ask``, of values."""
    loaded = job if isinstance(job, Job) else Job.load(job)
    if not isinstance(profile, ClusterProfile):
        return plan_question(loaded, load_profile(profile), str(profile))
    checked = profile_from_dict(profile_to_dict(profile), "the given profile")
    return plan_question(loaded, checked)
