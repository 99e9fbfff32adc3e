"""The trial of a plan: a few steps with made-up weights on the real ranks and links, before any weight is read.

    rehearsal    every rank by itself: what does not fit is found, and nobody waits for it
    steps        all together, as in a run; the first one is not counted
    correction   ranks, groups and links become as fast in the profile as they were
    once more    another plan by these times? It is tried too, and the one that was faster is taken

Nothing stays of it: stages, buffers and communicators are given back, no file is written, and no random number of the training is
drawn.
"""

from __future__ import annotations

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
from hetero_mpi.training.build import group_of, join, trainer_of
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

LATE = 2.0
"""Steps that take so many times what was said are enough, as soon as one counts."""
ATTEMPTS = 3
"""So many plans are tried until one fits."""
_NOTE = "corrected by"
NARROWER = 0.95
"""Where a plan did not fit, the rank has at most this share of what the plan was to take there."""


class _Lack(NamedTuple):
    """A rank whose memory did not suffice."""

    rank: int
    text: str
    used_bytes: int


def try_plan(
    context: RunContext, options: TrainOptions, planned: Planned, pending: Pending
) -> tuple[ClusterProfile, PlanReport]:
    """The profile as steps have corrected it, and the plan that was fastest in them; both as they are where nothing is tried.
    Collective. Raises CollectiveUserError: the plan does not fit, and no other one does.
    """
    profile, report = planned.profile, planned.report
    tried_step_s = _tried_before(context, options, planned)
    if tried_step_s is not None:
        report = replace(report, tried_step_s=tried_step_s)
        keep_plan(context, pending, report)
        return profile, report
    afford = _affordable(context, options, planned)
    if afford.counted == 0:
        return profile, report
    most = f", with another one {units.seconds(afford.most_s)} at most" if afford.most_s < math.inf else ""
    say(f"Trying the plan: about {units.seconds(afford.seconds)}{most if options.plan is None else ''}")
    trial = _Trial(context, afford, planned.planning_s, options.plan is not None, pending)
    profile, report = trial.best(*trial.fitting(profile, report))
    keep_plan(context, pending, report)
    if options.profile is None and context.job.profile.path is None:
        # Without what is of this hour or of this job: other programs, and how boundaries travel.
        hosts = tuple(replace(host, other_threads=0.0) for host in profile.hosts)
        keep_run_profile(context, pending, replace(profile, hosts=hosts, model=replace(profile.model, wire=None)))
    return profile, report


def _tried_before(context: RunContext, options: TrainOptions, planned: Planned) -> float | None:
    """Seconds of a step of this plan, where the resumed run has tried it on these machines. Collective."""
    tried_step_s: float | None = None
    if context.world.rank == 0 and options.resume is not None and context.job.profile.calibrate == "auto":
        with contextlib.suppress(UserError):  # no such file, or a damaged one
            earlier = load_report(context.run_dir / "plan.toml")
            machines = load_profile(profile_file(context.run_dir)).key
            if (earlier.plan, machines) == (planned.report.plan, planned.profile.key):
                tried_step_s = earlier.tried_step_s
    return context.world.broadcast_json(tried_step_s)


def _affordable(context: RunContext, options: TrainOptions, planned: Planned) -> Allowance:
    wanted, nothing = context.job.profile.calibrate, Allowance(0, 0.0)
    if wanted is False or context.job.cluster.emulate is not None:
        return nothing
    if wanted == "auto":
        if options.dry_run or context.world.size == 1:
            return nothing
        if not planned.own:
            say("The plan is not tried, as its profile is of another machine ([profile] calibrate = true tries it)")
            return nothing
    return allowance(planned.report, planned.profile, context.job.train.steps, wanted is True)


class _Trial:
    """Tries plans. All methods are collective. ``planning_s``: what planning took before. ``given``: the user's plan, which is kept
    whatever comes."""

    def __init__(
        self, context: RunContext, afford: Allowance, planning_s: float, given: bool, pending: Pending
    ) -> None:
        self._context, self._afford, self._planning_s, self._given = context, afford, planning_s, given
        self._pending = pending
        self._world, self._ends_s = context.world, time.perf_counter() + afford.most_s

    def fitting(
        self, profile: ClusterProfile, report: PlanReport
    ) -> tuple[ClusterProfile, PlanReport, StepComparison | None]:
        """A plan that fits (the given one, or one that is made for as much memory as there was), and its steps, on rank 0."""
        for attempt in range(ATTEMPTS):
            steps, lacks = self._run(profile, report)
            if not lacks:
                return profile, report, steps
            told = "; ".join(f"rank {lack.rank} on {self._world.hosts[lack.rank]} {lack.text}" for lack in lacks)
            if self._given or attempt + 1 == ATTEMPTS:
                break
            profile = _with_less_memory(profile, report, lacks)
            there = "; ".join(
                f"rank {lack.rank} with {units.size(profile.devices[lack.rank].memory_bytes)}" for lack in lacks
            )
            say(f"Tried: {told}", f"Planning anew: {there}")
            try:
                report = self._planned(profile)
            except CollectiveUserError as error:
                told, code = f"{told}\n{error}", error.exit_code
                raise CollectiveUserError("memory.exceeded", f"The plan was tried: {told}", exit_code=code) from None
        raise CollectiveUserError("memory.exceeded", f"The plan was tried: {told}")

    def best(
        self, profile: ClusterProfile, report: PlanReport, steps: StepComparison | None
    ) -> tuple[ClusterProfile, PlanReport]:
        """The profile that the steps of ``report`` have calibrated, and that plan or one that is faster by it, and was."""
        believed, first = self._believed(profile, report, steps)
        if self._given:
            return believed, first
        if not self._in_time("Planning once more", self._planning_s + self._seconds(believed, first)):
            return believed, with_reasons(first, "there was no time to plan once more")
        second = self._planned(believed)
        if second.plan == first.plan:
            return believed, replace(second, tried_step_s=first.tried_step_s)
        stays = partial(with_reasons, first, reports=(report, second))
        takes = f"takes {units.seconds(second.predicted_step_s)} per step"
        if second.predicted_step_s > (1 - MIN_GAIN_RATIO) * first.predicted_step_s:
            return believed, stays(f"by the measured times another plan {takes}", rejected=second)
        say(f"By these times another plan {takes}: trying it")
        if not self._in_time("  That", self._seconds(believed, second)):
            return believed, stays(
                f"there was no time to try another plan, which {takes} by these times", rejected=second
            )
        found, lacks = self._run(believed, second)
        if lacks:
            say("  it does not fit: the first plan stays")
            return believed, stays("another plan was tried and does not fit", rejected=second)
        faster = found is not None and steps is not None and found.clearly_below(steps)
        faster = self._world.broadcast_json(faster)
        again, other = self._believed(believed, second, found, "it is taken" if faster else "the first plan stays")
        if faster:
            return again, with_reasons(other, f"the first plan took {_tried(first)}", (report, second), first)
        return believed, stays(f"another plan was tried and took {_tried(other)}", rejected=other)

    def _seconds(self, profile: ClusterProfile, report: PlanReport) -> float:
        """Seconds that trying a plan takes, about."""
        return trial_s(report, profile, self._afford.counted)

    def _in_time(self, what: str, seconds: float) -> bool:
        """Whether ``what``, which takes about so long, ends before the time for trials does. Says so where it does not."""
        fits = bool(self._world.broadcast_json(seconds <= self._ends_s - time.perf_counter()))
        if not fits:
            say(f"{what} would take about {units.seconds(seconds)}, too long for this run: the first plan stays")
        return fits

    def _believed(
        self, profile: ClusterProfile, report: PlanReport, steps: StepComparison | None, then: str = ""
    ) -> tuple[ClusterProfile, PlanReport]:
        """The profile as the steps of a plan (on rank 0) have calibrated it, and that plan with its figures by it."""
        shared = None
        with self._world.on_leader("comparing steps with their prediction"):
            if steps is not None:
                from hetero_mpi.planning.decision.planner import complete_plan

                tried, predicted = units.seconds(steps.step_s), units.seconds(steps.predicted_s)
                others = [
                    f"{host.name}: about {host.other_threads:.1f} threads of other programs want its {host.cores:g} cores, too"
                    for host in steps.prediction.profile.hosts
                    if host.other_threads
                ]
                say(
                    f"Tried: {tried} per step ({predicted} predicted){'; ' + then if then else ''}",
                    *(f"  {text}" for text in [*steps.deviations(), *others]),
                )
                notes = [note for note in profile.notes if not note.startswith(_NOTE)]
                notes.append(f"{_NOTE} {units.plural(len(steps.steps_s), 'step')} of a plan that was tried")
                noted = replace(steps.calibrated_profile(), notes=tuple(notes))
                full = complete_plan(report.plan, noted, planning_request(self._context, noted))
                shared = [profile_to_dict(noted), plan_to_dict(replace(full, tried_step_s=steps.step_s))]
        told = self._world.broadcast_json(shared)
        return profile_from_dict(told[0]), report_from_dict(told[1])

    def _planned(self, profile: ClusterProfile) -> PlanReport:
        """The planner's plan. Raises CollectiveUserError: none fits."""
        return obtain_plan(self._context, profile, planning_request(self._context, profile), self._pending)

    def _run(self, profile: ClusterProfile, report: PlanReport) -> tuple[StepComparison | None, list[_Lack]]:
        """(its steps beside their prediction, on rank 0; the ranks that it does not fit, on all)."""
        context = replace(self._context, planned_for=profile)
        share = join(context, report)
        steps: list[StepByRank] = []
        lacks: list[_Lack] = []
        problem: CollectiveUserError | None = None
        self._world.current_action = "idle while the plan is tried"
        if share.members is not None:
            try:
                steps, lacks = _steps(context, share, self._afford)
            except CollectiveUserError as error:
                problem = error
            share.members.dissolve()
        self._world.sleeping_barrier()
        self._world.share_problem(problem)
        lacks = [_Lack(*told) for told in self._world.broadcast_json(lacks)]
        if self._world.rank > 0 or lacks:
            return None, lacks
        crowded = with_other_programs(profile, report.plan, steps)
        prediction = StepPrediction(report.plan, crowded, share.schedule)
        return StepComparison.from_steps(prediction, steps, report.predicted_step_s), lacks


def _steps(context: RunContext, share: Share, afford: Allowance) -> tuple[list[StepByRank], list[_Lack]]:
    """(the steps that count, on rank 0; the ranks that had no memory for them). Collective over the active ranks; all that it took
    is given back."""
    members, rank = share.members, context.world.rank
    assert members is not None
    group = group_of(context, members, share.plan)
    own = _batch(context, share.plan)
    built: list[Trainer] = []
    steps: list[StepByRank] = []
    with torch.random.fork_rng(devices=[]):
        start = ProfilingStart(), LossScale(1.0), group
        lacks = _lacking(members, rank, "", lambda: built.append(trainer_of(context, share, *start)))
        share = replace(share, trainer=built.pop() if built else None)
        if not lacks and share.trainer is not None:
            rehearse = partial(share.trainer.rehearse, share.trainer.shared_batch(own, False))
            lacks = _lacking(members, rank, ", each rank by itself", rehearse)
            steps = _taken(context, share, share.trainer, own, afford) if not lacks else []
            del rehearse
        share.give_up()
    context.backend.free_unused()
    return steps, lacks


def _lacking(members: World, rank: int, how: str, work: Callable[[], object]) -> list[_Lack]:
    """The active ranks that have no memory for ``work``."""
    lack = None
    with members.collective_errors(f"trying the plan{how}"):
        try:
            work()
        except OutOfMemory as error:
            lack = _Lack(rank, str(error), error.used_bytes)
    return [_Lack(*one) for one in members.all_gather_json(lack) if one]


def _taken(
    context: RunContext, share: Share, trainer: Trainer, own: Batch | None, afford: Allowance
) -> list[StepByRank]:
    """The steps that count, on rank 0."""
    members = trainer.world
    clock_s = clock_offset_s(members, context.transport)
    found: list[RankMeasurement] = []
    with watched(context, share):
        begun_s = ended_s = time.perf_counter()
        for number in range(1 + afford.counted):
            members.current_action = f"trying the plan, step {number + 1}"
            late = bool(found) and trainer.rank == 0 and ended_s - begun_s > LATE * afford.seconds
            result = trainer.step(number, trainer.shared_batch(own, False), partial(bool, late))
            begin_s, ended_s = ended_s, time.perf_counter()
            found.append(_measured(trainer.rank, result, ended_s - begin_s, clock_s))
            if result.decision.stop:
                break
        trainer.settle()
    gathered = members.gather_json([vars(step) for step in found[1:]]) or []
    return [{own["rank"]: RankMeasurement(**own) for own in together} for together in zip(*gathered, strict=True)]


def _measured(rank: int, result: StepResult, wall_s: float, clock_s: float) -> RankMeasurement:
    """``clock_s``: this rank's clock minus the common one. Of a skipped step the optimizer's part is left out."""
    events = [one for one in result.events if one.action.op is not Op.STEP or result.decision.finite]
    return RankMeasurement.from_events(rank, events, result.began_s - clock_s, wall_s, result.worked_s)


def _batch(context: RunContext, plan: Plan) -> Batch | None:
    """On rank 0, what the trial computes on: the first sequences, or of a model of the user's own one sample again and again."""
    dataset, chain = context.dataset, context.chain
    if dataset is None:
        return None
    if isinstance(dataset, Dataset):
        return dataset.batch(0, plan.global_batch)
    dtype = DTYPES[context.job.train.dtype]
    x, targets, _ = chain.example(0, chain.layer_count, plan.global_batch, plan.sequence_length, dtype)
    assert targets is not None
    return Batch(x.numpy(), targets.numpy(), chain.counted(targets.numpy()))


def _with_less_memory(profile: ClusterProfile, report: PlanReport, lacks: Sequence[_Lack]) -> ClusterProfile:
    """Ranks whose memory did not suffice have what they used, and less than the plan was to take there."""
    planned = {one.rank: one.peak_bytes for one in report.memory}
    devices = list(profile.devices)
    for lack in lacks:
        device = devices[lack.rank]
        least = min(device.memory_bytes, lack.used_bytes, planned.get(lack.rank, device.memory_bytes))
        devices[lack.rank] = replace(
            device, memory_bytes=math.floor(NARROWER * least), memory_reason="what there was when the plan was tried"
        )
    return replace(profile, devices=tuple(devices))


def _tried(report: PlanReport) -> str:
    assert report.tried_step_s is not None
    return f"{units.seconds(report.tried_step_s)} per step"
