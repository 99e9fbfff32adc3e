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
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from hetero_mpi.comm.links import clock_offset_s
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.data.batch import Batch
from hetero_mpi.data.dataset import Dataset
from hetero_mpi.device.backend import DTYPES
from hetero_mpi.engine.memory_trial import OutOfMemory
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.planning.analysis.correction import LEAST_GAIN, Allowance, allowance, corrected, explained, trial_s
from hetero_mpi.planning.fit import median_error
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
from hetero_mpi.training.measuring import (
    Expected,
    MeasuredSteps,
    OwnStep,
    Together,
    compared,
    from_dict,
    own_step,
    to_dict,
    with_others,
)
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


@dataclass(frozen=True)
class _Lack:
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
        keep_run_profile(context, pending, _of_the_machines(profile))
    return profile, report


def _tried_before(context: RunContext, options: TrainOptions, planned: Planned) -> float | None:
    """Seconds of a step of this plan, where the resumed run has tried it on these machines. Collective."""
    tried_step_s: float | None = None
    if context.world.rank == 0 and options.resume is not None and context.job.profile.trial == "auto":
        with contextlib.suppress(UserError):  # no such file, or a damaged one
            earlier = load_report(context.run_dir / "plan.toml")
            machines = load_profile(profile_file(context.run_dir)).key
            if (earlier.plan, machines) == (planned.report.plan, planned.profile.key):
                tried_step_s = earlier.tried_step_s
    return context.world.broadcast_json(tried_step_s)


def _affordable(context: RunContext, options: TrainOptions, planned: Planned) -> Allowance:
    wanted, nothing = context.job.profile.trial, Allowance(0, 0.0)
    if wanted is False or context.job.cluster.emulate is not None:
        return nothing
    if wanted == "auto":
        if options.dry_run or context.world.size == 1:
            return nothing
        if not planned.own:
            say("The plan is not tried, as its profile is of another machine ([profile] trial = true tries it)")
            return nothing
    return allowance(planned.report, planned.profile, context.job.train.steps, wanted is True)


def _of_the_machines(profile: ClusterProfile) -> ClusterProfile:
    """Without what is of this hour or of this job: other programs, and how boundaries travel."""
    hosts = tuple(replace(host, other_threads=0.0) for host in profile.hosts)
    return replace(profile, hosts=hosts, model=replace(profile.model, wire=None))


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
    ) -> tuple[ClusterProfile, PlanReport, MeasuredSteps | None]:
        """A plan that fits (the given one, or one that is made for as much memory as there was), and its steps, on rank 0."""
        for attempt in range(ATTEMPTS):
            found, lacks = self._run(profile, report)
            if not lacks:
                return profile, report, found
            told = "; ".join(f"rank {lack.rank} on {self._world.hosts[lack.rank]} {lack.text}" for lack in lacks)
            if self._given or attempt + 1 == ATTEMPTS:
                raise CollectiveUserError("memory.exceeded", f"The plan was tried: {told}")
            profile = _with_less_memory(profile, report, lacks)
            there = "; ".join(
                f"rank {lack.rank} with {units.size(profile.devices[lack.rank].memory_bytes)}" for lack in lacks
            )
            say(f"Tried: {told}", f"Planning anew: {there}")
            report = self._planned(profile, told)
        raise AssertionError("unreachable")

    def best(
        self, profile: ClusterProfile, report: PlanReport, steps: MeasuredSteps | None
    ) -> tuple[ClusterProfile, PlanReport]:
        """The profile that the steps of ``report`` have corrected, and that plan or one that is faster by it, and was."""
        believed, first = self._believed(profile, report, steps)
        if self._given:
            return believed, first
        if not self._in_time("Planning once more", self._planning_s + self._seconds(believed, first)):
            return believed, explained(first, "there was no time to plan once more")
        second = self._planned(believed)
        if second.plan == first.plan:
            return believed, replace(second, tried_step_s=first.tried_step_s)
        stays = partial(explained, first, said=(report, second))
        takes = f"takes {units.seconds(second.predicted_step_s)} per step"
        if second.predicted_step_s > (1 - LEAST_GAIN) * first.predicted_step_s:
            return believed, stays(f"by the measured times another plan {takes}", other=second)
        say(f"By these times another plan {takes}: trying it")
        if not self._in_time("  That", self._seconds(believed, second)):
            return believed, stays(f"there was no time to try another plan, which {takes} by these times", other=second)
        found, lacks = self._run(believed, second)
        if lacks:
            say("  it does not fit: the first plan stays")
            return believed, stays("another plan was tried and does not fit", other=second)
        faster = found is not None and steps is not None and clearly_faster(found, steps)
        faster = self._world.broadcast_json(faster)
        again, other = self._believed(believed, second, found, "it is taken" if faster else "the first plan stays")
        if faster:
            return again, explained(other, f"the first plan took {_tried(first)}", (report, second), first)
        return believed, stays(f"another plan was tried and took {_tried(other)}", other=other)

    def _seconds(self, profile: ClusterProfile, report: PlanReport) -> float:
        """Seconds that trying a plan takes, about."""
        return trial_s(report, profile, self._afford.counted)

    def _in_time(self, what: str, seconds: float) -> bool:
        """Whether ``what``, which takes about so long, ends before the time for trials does. Says so where it does not.
        Collective."""
        left_s = self._ends_s - time.perf_counter()
        fits = bool(self._world.broadcast_json(seconds <= left_s))
        if not fits:
            say(f"{what} would take about {units.seconds(seconds)}, too long for this run: the first plan stays")
        return fits

    def _believed(
        self, profile: ClusterProfile, report: PlanReport, steps: MeasuredSteps | None, then: str = ""
    ) -> tuple[ClusterProfile, PlanReport]:
        """The profile as the steps of a plan (on rank 0) have corrected it, and that plan with its figures by it."""
        shared: list[Any] | None = None
        with self._world.led("comparing steps with their prediction"):
            if steps is not None:
                tried, predicted = units.seconds(steps.step_s), units.seconds(report.predicted_step_s)
                say(f"Tried: {tried} per step ({predicted} predicted){'; ' + then if then else ''}")
                hosts = [device.host for device in profile.devices]
                say(
                    *(
                        f"  {text}"
                        for text in [*steps.far(hosts, report.predicted_step_s), *_others_text(steps.profile)]
                    )
                )
                better = corrected(steps.profile, report.plan, steps.measured)
                noted = replace(
                    better, notes=(*(note for note in profile.notes if not note.startswith(_NOTE)), _note(steps))
                )
                shared = [profile_to_dict(noted), plan_to_dict(self._anew(noted, report, steps.step_s))]
        told = self._world.broadcast_json(shared)
        return profile_from_dict(told[0]), report_from_dict(told[1])

    def _anew(self, profile: ClusterProfile, report: PlanReport, tried_s: float) -> PlanReport:
        """The same plan with its figures by another profile."""
        from hetero_mpi.planning.decision.planner import complete_plan

        full = complete_plan(report.plan, profile, planning_request(self._context, profile))
        return replace(full, tried_step_s=tried_s)

    def _planned(self, profile: ClusterProfile, lacking: str = "") -> PlanReport:
        """The planner's plan. Raises CollectiveUserError: none fits; with ``lacking``, what did not."""
        try:
            return obtain_plan(self._context, profile, planning_request(self._context, profile), self._pending)
        except CollectiveUserError as error:
            if not lacking:
                raise
            raise CollectiveUserError(
                "memory.exceeded", f"The plan was tried: {lacking}\n{error}", exit_code=error.exit_code
            ) from None

    def _run(self, profile: ClusterProfile, report: PlanReport) -> tuple[MeasuredSteps | None, list[_Lack]]:
        """(what its steps came to, on rank 0; the ranks that it does not fit, on all)."""
        context = replace(self._context, planned_for=profile)
        share = join(context, report)
        steps: list[Together] = []
        lacks: list[_Lack] = []
        problem: CollectiveUserError | None = None
        self._world.doing = "idle while the plan is tried"
        if share.members is not None:
            try:
                steps, lacks = _steps(context, share, self._afford)
            except CollectiveUserError as error:
                problem = error
            share.members.dissolve()
        self._world.meet_asleep()
        self._world.share_problem(problem)
        lacks = [_Lack(**told) for told in self._world.broadcast_json([asdict(lack) for lack in lacks])]
        if self._world.rank > 0 or lacks:
            return None, lacks
        return compared(Expected(report.plan, with_others(profile, report.plan, steps), share.schedule), steps), lacks


def _steps(context: RunContext, share: Share, afford: Allowance) -> tuple[list[Together], list[_Lack]]:
    """(the steps that count, on rank 0; the ranks that had no memory for them). Collective over the active ranks; all that it took
    is given back."""
    members = share.members
    assert members is not None
    group = group_of(context, members, share.plan)
    own = _batch(context, share.plan)
    lack: _Lack | None = None
    with torch.random.fork_rng(devices=[]):
        with members.together("trying the plan"):
            try:
                share = replace(share, trainer=trainer_of(context, share, ProfilingStart(), LossScale(1.0), group))
            except OutOfMemory as error:
                lack = _Lack(context.world.rank, str(error), error.used_bytes)
        steps, lacks = list[Together](), _lacking(members, lack)
        if not lacks and share.trainer is not None:
            steps, lacks = _taken(context, share, share.trainer, own, afford)
        share.give_up()
    context.backend.free_unused()
    return steps, lacks


def _taken(
    context: RunContext, share: Share, trainer: Trainer, own: Batch | None, afford: Allowance
) -> tuple[list[Together], list[_Lack]]:
    members, lack = trainer.world, None
    batch = trainer.shared_batch(own, False)
    with members.together("trying the plan, each rank by itself"):
        try:
            trainer.rehearse(batch)
        except OutOfMemory as error:
            lack = _Lack(trainer.rank, str(error), error.used_bytes)
    if lacks := _lacking(members, lack):
        return [], lacks
    clock_s = clock_offset_s(members, context.transport)
    found: list[OwnStep] = []
    with watched(context, share):
        begun_s = ended_s = time.perf_counter()
        for number in range(1 + afford.counted):
            members.doing = f"trying the plan, step {number + 1}"
            late = bool(found) and trainer.rank == 0 and ended_s - begun_s > LATE * afford.seconds
            result = trainer.step(number, trainer.shared_batch(own, False), partial(bool, late))
            begin_s, ended_s = ended_s, time.perf_counter()
            found.append(own_step(trainer, result, ended_s - begin_s, clock_s))
            if result.decision.stop:
                break
        trainer.settle()
    gathered = members.gather_json([to_dict(step) for step in found[1:]]) or []
    steps: list[Together] = [
        {own.rank: own for own in map(from_dict, together)} for together in zip(*gathered, strict=True)
    ]
    return steps, []


def _lacking(members: World, own: _Lack | None) -> list[_Lack]:
    return [_Lack(**lack) for lack in members.all_gather_json(asdict(own) if own is not None else None) if lack]


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


def _others_text(profile: ClusterProfile) -> list[str]:
    return [
        f"{host.name}: about {host.other_threads:.1f} threads of other programs want its {host.cores:g} cores, too"
        for host in profile.hosts
        if host.other_threads
    ]


def _note(steps: MeasuredSteps) -> str:
    return f"{_NOTE} {units.plural(len(steps.steps_s), 'step')} of a plan that was tried"


def _tried(report: PlanReport) -> str:
    assert report.tried_step_s is not None
    return f"{units.seconds(report.tried_step_s)} per step"


def clearly_faster(one: MeasuredSteps, other: MeasuredSteps) -> bool:
    """Whether a step of ``one`` is shorter by more than the steps of both scatter."""
    errors = [_error(steps.steps_s) for steps in (one, other)]
    return math.log(other.step_s / one.step_s) > max(LEAST_GAIN, math.hypot(*errors))


def _error(steps_s: Sequence[float]) -> float:
    """Standard error of the median of the steps' logarithms; 0 of a single one."""
    logs = [math.log(seconds) for seconds in steps_s]
    return median_error(statistics.stdev(logs), len(logs)) if len(logs) > 1 else 0.0
