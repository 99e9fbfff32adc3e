"""Calibration run of a plan: a few steps with randomly initialised weights on the actual ranks and links.

    rehearsal    each rank alone: finds ranks that run out of memory
    steps        all ranks together, as in training; the first step is a warm-up
    calibration  the measured times of ranks, groups and links replace the profiled ones
    replanning   if the calibrated profile suggests another plan, it is run too, and the faster plan is used

It takes place before weights are read. All stages, buffers and communicators are released afterwards, and the random state of
the training is unchanged.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from hetero_mpi.comm.links import clock_offset_s
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.data.batch import Batch
from hetero_mpi.data.dataset import Dataset
from hetero_mpi.device.backend import DTYPES
from hetero_mpi.engine.memory_trial import OutOfMemory
from hetero_mpi.engine.trainer import StepResult, Trainer
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.planning.analysis.calibration import Allowance, allowance, trial_s, with_reasons
from hetero_mpi.planning.analysis.step_comparison import (
    MIN_GAIN_RATIO,
    RankMeasurement,
    StepByRank,
    StepComparison,
    StepPrediction,
    with_other_programs,
)
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import (
    load_profile,
    load_report,
    plan_to_dict,
    profile_from_dict,
    profile_to_dict,
    report_from_dict,
)
from hetero_mpi.profiling.bench import ProfilingStart
from hetero_mpi.rundir.logs import say
from hetero_mpi.training.build import group_of, join_plan, trainer_of
from hetero_mpi.training.setup.context import Pending, RunContext, Share, TrainOptions
from hetero_mpi.training.setup.profile_and_plan import (
    Planned,
    keep_plan,
    keep_run_profile,
    obtain_plan,
    planning_request,
)
from hetero_mpi.training.watchdog import watched
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import profile_file

MAX_SLOWDOWN = 2.0
"""Stop the calibration early once its steps have taken this many times the predicted time."""
MAX_ATTEMPTS = 3
"""Maximum number of plans to run until one fits in memory."""
_NOTE = "corrected by"
RETRY_MEMORY_RATIO = 0.95
"""Fraction of the used or planned memory to which a rank's budget is reduced after the rank ran out of memory."""


class _Shortage(NamedTuple):
    """A rank that ran out of memory."""

    rank: int
    text: str
    used_bytes: int


def try_plan(
    context: RunContext, options: TrainOptions, planned: Planned, pending: Pending
) -> tuple[ClusterProfile, PlanReport]:
    """Return the calibrated profile and the fastest plan; both are unchanged if there is no calibration run. Collective.

    Raises:
        CollectiveUserError: No plan fits the memory budgets.
    """
    profile, report = planned.profile, planned.report
    tried_step_s = _earlier_step_s(context, options, planned)
    if tried_step_s is not None:
        report = replace(report, tried_step_s=tried_step_s)
        keep_plan(context, pending, report)
        return profile, report
    allowed = _calibration_allowance(context, options, planned)
    if allowed.counted == 0:
        return profile, report
    is_limited = allowed.most_s < math.inf and options.plan is None
    limit_text = f", or about {units.seconds(allowed.most_s)} with a second plan" if is_limited else ""
    say(f"Calibration run of the plan: about {units.seconds(allowed.seconds)}{limit_text}")
    calibration_run = _CalibrationRun(context, allowed, planned, options.plan is not None, pending)
    profile, report = calibration_run.best(*calibration_run.fitting(profile, report))
    keep_plan(context, pending, report)
    if options.profile is None and context.job.profile.path is None:
        # Without values of this moment or job: the load by other programs, and the wire dtype.
        hosts = tuple(replace(host, other_threads=0.0) for host in profile.hosts)
        keep_run_profile(context, pending, replace(profile, hosts=hosts, model=replace(profile.model, wire=None)))
    return profile, report


def _earlier_step_s(context: RunContext, options: TrainOptions, planned: Planned) -> float | None:
    """Return the step time that the resumed run measured for this plan, or None if it has to be measured again. Collective.

    It is valid only with the profile that the earlier start calibrated with it. A resumed run plans from another one if the user
    names a profile, or if other programs slowed the earlier start down: their load may have gone, or still be there.
    """
    tried_step_s: float | None = None
    if context.world.rank == 0 and options.resume is not None and context.job.profile.calibrate == "auto":
        with contextlib.suppress(UserError):  # no such file, or a damaged one
            earlier = load_report(context.run_dir / "plan.toml")
            calibrated = load_profile(profile_file(context.run_dir))
            if (earlier.plan, calibrated) == (planned.report.plan, planned.profile):
                tried_step_s = earlier.tried_step_s
    return context.world.broadcast_json(tried_step_s)


def _calibration_allowance(context: RunContext, options: TrainOptions, planned: Planned) -> Allowance:
    setting, no_steps = context.job.profile.calibrate, Allowance(0, 0.0)
    if setting is False or context.job.cluster.emulate is not None:
        return no_steps
    if setting == "auto":
        if options.dry_run or context.world.size == 1:
            return no_steps
        if not planned.is_measured_here:
            say("No calibration run: the profile was measured elsewhere ([profile] calibrate = true forces one)")
            return no_steps
    return allowance(planned.report, planned.profile, context.job.train.steps, setting is True)


class _CalibrationRun:
    """Runs plans for calibration. All methods are collective. ``has_user_plan``: whether the plan is the user's, and fixed."""

    def __init__(
        self, context: RunContext, allowed: Allowance, planned: Planned, has_user_plan: bool, pending: Pending
    ) -> None:
        self._context, self._allowed, self._pending = context, allowed, pending
        self._initial, self._has_user_plan = planned, has_user_plan
        self._world, self._began_s, self._most_s = context.world, time.perf_counter(), allowed.most_s

    def fitting(
        self, profile: ClusterProfile, report: PlanReport
    ) -> tuple[ClusterProfile, PlanReport, StepComparison | None]:
        """Find a plan that fits in memory; returns its profile, the plan and, on rank 0, its measured steps."""
        for attempt in range(MAX_ATTEMPTS):
            steps, short = self._run(profile, report)
            if not short:
                return profile, report, steps
            problem = "; ".join(f"rank {lack.rank} on {self._world.hosts[lack.rank]} {lack.text}" for lack in short)
            if self._has_user_plan or attempt + 1 == MAX_ATTEMPTS:
                break
            profile = _with_less_memory(profile, report, short)
            budgets_text = "; ".join(
                f"rank {lack.rank} with {units.size(profile.devices[lack.rank].memory_bytes)}" for lack in short
            )
            say(f"Calibration failed: {problem}", f"Planning again with less memory: {budgets_text}")
            try:
                report = self._planned(profile)
            except CollectiveUserError as error:
                problem, code = f"{problem}\n{error}", error.exit_code
                raise CollectiveUserError("memory.exceeded", f"Calibration failed: {problem}", exit_code=code) from None
        raise CollectiveUserError("memory.exceeded", f"Calibration failed: {problem}")

    def best(
        self, profile: ClusterProfile, report: PlanReport, steps: StepComparison | None
    ) -> tuple[ClusterProfile, PlanReport]:
        """Return the calibrated profile, and the faster of the given plan and a plan made for that profile."""
        better, first = self._calibrated(profile, report, steps)
        if self._has_user_plan:
            return better, first
        # Training takes as long as the measured steps say, and so does the share of it for calibration.
        self._most_s *= first.predicted_step_s / self._initial.report.predicted_step_s
        if not self._in_time("planning again", self._initial.planning_s + self._seconds(better, first)):
            return better, with_reasons(first, "there was no time to plan again")
        second = self._planned(better)
        if second.plan == first.plan:
            return better, replace(second, tried_step_s=first.tried_step_s)
        keep = partial(with_reasons, first, reports=(report, second))
        seconds, first_seconds = map(units.seconds, (second.predicted_step_s, first.predicted_step_s))
        takes_text = f"takes {seconds} per step instead of {first_seconds}"
        if second.predicted_step_s > (1 - MIN_GAIN_RATIO) * first.predicted_step_s:
            return better, keep(f"with the measured times, another plan {takes_text}", rejected=second)
        say(f"With these times, another plan {takes_text}: running it too")
        if not self._in_time("running it", self._seconds(better, second)):
            return better, keep(f"no time to run another plan, which {takes_text} with these times", rejected=second)
        timed, lacks = self._run(better, second)
        if lacks:
            say("  it does not fit in memory: keeping the first plan")
            return better, keep("another plan was run, but does not fit in memory", rejected=second)
        faster = timed is not None and steps is not None and timed.clearly_below(steps)
        faster = self._world.broadcast_json(faster)
        decision_text = "; using it" if faster else "; keeping the first plan"
        profile_then, timed_second = self._calibrated(better, second, timed, decision_text)
        if faster:
            outcome = f"the first plan took {_measured_text(first)}"
            return profile_then, with_reasons(timed_second, outcome, (report, second), first)
        return better, keep(f"another plan was run and took {_measured_text(timed_second)}", rejected=timed_second)

    def _seconds(self, profile: ClusterProfile, report: PlanReport) -> float:
        """Estimate how long a calibration run of a plan takes, in seconds."""
        return trial_s(report, profile, self._allowed.counted)

    def _in_time(self, action: str, seconds: float) -> bool:
        """Whether an action that takes about ``seconds`` fits in the time limit; tells the user if it does not."""
        fits = bool(self._world.broadcast_json(time.perf_counter() + seconds <= self._began_s + self._most_s))
        if not fits:
            say(f"Keeping the first plan: {action} would take about {units.seconds(seconds)}, too long for this run")
        return fits

    def _calibrated(
        self, profile: ClusterProfile, report: PlanReport, steps: StepComparison | None, decision_text: str = ""
    ) -> tuple[ClusterProfile, PlanReport]:
        """Return the profile calibrated by rank 0's measured ``steps`` of a plan, and that plan with new predictions."""
        values = None
        with self._world.on_leader("comparing measured and predicted step times"):
            if steps is not None:
                from hetero_mpi.planning.decision.planner import complete_plan

                measured_s, predicted_s = units.seconds(steps.step_s), units.seconds(steps.predicted_s)
                other_programs = [
                    f"{host.name}: other programs are running about {host.other_threads:.1f} threads on its {host.cores:g} cores"
                    for host in steps.prediction.profile.hosts
                    if host.other_threads
                ]
                result_text = f"Calibration result: {measured_s} per step ({predicted_s} predicted){decision_text}"
                say(result_text, *(f"  {text}" for text in [*steps.deviations(), *other_programs]))
                notes = [note for note in profile.notes if not note.startswith(_NOTE)]
                notes.append(f"{_NOTE} {units.plural(len(steps.steps_s), 'step')} of a calibration run")
                noted = replace(steps.calibrated_profile(), notes=tuple(notes))
                completed = complete_plan(report.plan, noted, planning_request(self._context, noted))
                values = [profile_to_dict(noted), plan_to_dict(replace(completed, tried_step_s=steps.step_s))]
        values = self._world.broadcast_json(values)
        return profile_from_dict(values[0]), report_from_dict(values[1])

    def _planned(self, profile: ClusterProfile) -> PlanReport:
        """Make a plan for the profile. Raises CollectiveUserError if no plan fits."""
        return obtain_plan(self._context, profile, planning_request(self._context, profile), self._pending)

    def _run(self, profile: ClusterProfile, report: PlanReport) -> tuple[StepComparison | None, list[_Shortage]]:
        """Run a plan; returns rank 0's comparison of the steps with their prediction, and the ranks that ran out of memory."""
        context = replace(self._context, planned_for=profile)
        share = join_plan(context, report)
        steps: list[StepByRank] = []
        short: list[_Shortage] = []
        problem: CollectiveUserError | None = None
        self._world.current_action = "idle during the calibration run"
        if share.members is not None:
            try:
                steps, short = _steps(context, share, self._allowed)
            except CollectiveUserError as error:
                problem = error
            share.members.dissolve()
        self._world.sleeping_barrier()
        self._world.share_problem(problem)
        short = [_Shortage(*fields) for fields in self._world.broadcast_json(short)]
        if self._world.rank > 0 or short:
            return None, short
        crowded = with_other_programs(profile, report.plan, steps)
        prediction = StepPrediction(report.plan, crowded, share.schedule)
        return StepComparison.from_steps(prediction, steps, report.predicted_step_s), short


def _steps(context: RunContext, share: Share, allowed: Allowance) -> tuple[list[StepByRank], list[_Shortage]]:
    """Take the steps of a calibration run; returns rank 0's measured steps and the ranks that ran out of memory. Collective."""
    members, rank = share.members, context.world.rank
    assert members is not None
    group = group_of(context, members, share.plan)
    batch = _batch(context, share.plan)
    built: list[Trainer] = []
    steps: list[StepByRank] = []
    with torch.random.fork_rng(devices=[]):
        start = ProfilingStart(), LossScale(1.0), group
        short = _ranks_out_of_memory(members, rank, "", lambda: built.append(trainer_of(context, share, *start)))
        share = replace(share, trainer=built.pop() if built else None)
        if not short and share.trainer is not None:
            rehearse = partial(share.trainer.rehearse, share.trainer.shared_batch(batch, False))
            short = _ranks_out_of_memory(members, rank, ", each rank on its own", rehearse)
            steps = _timed_steps(context, share, share.trainer, batch, allowed) if not short else []
            del rehearse
        share.release_trainer()
    context.backend.free_unused()
    return steps, short


def _ranks_out_of_memory(members: World, rank: int, how: str, work: Callable[[], object]) -> list[_Shortage]:
    """Run ``work`` on all active ranks and return those that ran out of memory. Collective."""
    lack = None
    with members.collective_errors(f"running the plan{how}"):
        try:
            work()
        except OutOfMemory as error:
            lack = _Shortage(rank, str(error), error.used_bytes)
    return [_Shortage(*fields) for fields in members.all_gather_json(lack) if fields]


def _timed_steps(
    context: RunContext, share: Share, trainer: Trainer, batch: Batch | None, allowed: Allowance
) -> list[StepByRank]:
    """Take the steps and return the measurements of those after the warm-up; empty on ranks other than 0."""
    members = trainer.world
    clock_s = clock_offset_s(members, context.transport)
    measurements: list[RankMeasurement] = []
    with watched(context, share):
        first_step_s = ended_s = time.perf_counter()
        for number in range(1 + allowed.counted):
            members.current_action = f"calibration run, step {number + 1}"
            late = bool(measurements) and trainer.rank == 0 and ended_s - first_step_s > MAX_SLOWDOWN * allowed.seconds
            result = trainer.step(number, trainer.shared_batch(batch, False), partial(bool, late))
            begin_s, ended_s = ended_s, time.perf_counter()
            measurements.append(_measured(trainer.rank, result, ended_s - begin_s, clock_s))
            if result.decision.stop:
                break
        trainer.settle()
    gathered = members.gather_json([vars(step) for step in measurements[1:]]) or []
    return [{batch["rank"]: RankMeasurement(**batch) for batch in together} for together in zip(*gathered, strict=True)]


def _measured(rank: int, result: StepResult, wall_s: float, clock_s: float) -> RankMeasurement:
    """Return a step's measurement, without the optimizer if the step was skipped. ``clock_s``: this rank's clock offset."""
    events = [event for event in result.events if event.action.op is not Op.STEP or result.decision.finite]
    return RankMeasurement.from_events(rank, events, result.began_s - clock_s, wall_s, result.worked_s)


def _batch(context: RunContext, plan: Plan) -> Batch | None:
    """Return the batch of the calibration run: that of the first step, or an example of a custom model. None unless rank 0."""
    dataset, chain = context.dataset, context.chain
    if dataset is None:
        return None
    if isinstance(dataset, Dataset):
        return dataset.batch(0, plan.global_batch)
    dtype = DTYPES[context.job.train.dtype]
    x, targets, _ = chain.example(0, chain.layer_count, plan.global_batch, plan.sequence_length, dtype)
    assert targets is not None
    return Batch(x.numpy(), targets.numpy(), chain.counted(targets.numpy()))


def _with_less_memory(profile: ClusterProfile, report: PlanReport, short: Sequence[_Shortage]) -> ClusterProfile:
    """Reduce the memory budgets of ranks that ran out of memory to just below what they used or were planned to use."""
    planned = {memory.rank: memory.peak_bytes for memory in report.memory}
    devices = list(profile.devices)
    for lack in short:
        device = devices[lack.rank]
        least = min(device.memory_bytes, lack.used_bytes, planned.get(lack.rank, device.memory_bytes))
        reason, budget_bytes = "memory available in the calibration run", math.floor(RETRY_MEMORY_RATIO * least)
        devices[lack.rank] = replace(device, memory_bytes=budget_bytes, memory_reason=reason)
    return replace(profile, devices=tuple(devices))


def _measured_text(report: PlanReport) -> str:
    assert report.tried_step_s is not None
    return f"{units.seconds(report.tried_step_s)} per step"
