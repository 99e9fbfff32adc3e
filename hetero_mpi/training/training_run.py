"""The command ``train``: a run on all ranks, from its job to its result. To understand the program, start reading here."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.inference.generate import write_sample
from hetero_mpi.job.load import LoadedJob, job_to_dict
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import plan_to_dict, profile_to_dict, report_from_dict, save_plan
from hetero_mpi.report.plan_text import planned_lines
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import holds_run, is_used
from hetero_mpi.state.directory import remove_shards
from hetero_mpi.state.saving import Snapshots
from hetero_mpi.state.state import State
from hetero_mpi.training.build import change_plan
from hetero_mpi.training.follower import Follower, OnEvent
from hetero_mpi.training.loop import Loop, Training
from hetero_mpi.training.rebalance import rebalancer_of
from hetero_mpi.training.recovery import RunHistory, replicate_state, run_with_recovery
from hetero_mpi.training.reference_likelihoods import find_reference
from hetero_mpi.training.result import TrainResult
from hetero_mpi.training.run_report import (
    LiveView,
    OtherPrograms,
    draw_plan,
    final_result,
    open_display,
    save_used_profile,
    show_plan,
    write_result,
)
from hetero_mpi.training.setup.context import Pending, RunContext, Share, TrainOptions
from hetero_mpi.training.setup.data_setup import base_name
from hetero_mpi.training.setup.profile_and_plan import (
    Planned,
    Profiled,
    named_profile,
    obtain_plan,
    obtain_profile,
    planning_request,
    say_plan,
)
from hetero_mpi.training.setup.setup import lock_run_directory, look_around, read_job, set_up
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.training.start_state import check_header, find_start, load_start
from hetero_mpi.training.trial import try_plan
from hetero_mpi.training.watchdog import watched
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.errors import ExitCode

_LOG = logging.getLogger(__name__)


def train(
    world: World, options: TrainOptions, on_event: OnEvent | None = None, stop: StopRequest | None = None
) -> TrainResult | None:
    """Run a job and return its result on every rank; None after a dry run or if ``on_event`` left the run. Collective.

    Args:
        on_event: called on every rank between steps with each event of the run; its reply says how to continue.
        stop: signal handler installed by the caller; None to install one, which is possible only in the main thread.

    Raises:
        UserError: The run failed with an error that the user can correct; raised on all ranks.
    """
    with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop:
        follower = Follower(world, stop, on_event) if on_event is not None else None
        try:
            with LiveView(world) as live:
                return run_with_recovery(world, TrainingRun(world, options, stop, live, follower).run)
        except CollectiveUserError as error:
            if follower is None or not follower.has_left or error.exit_code != ExitCode.STOPPED:
                raise
            say(str(error))
            return None


@dataclass(frozen=True)
class JobToRun:
    """The result of ``resolve_job``; the same on all ranks."""

    loaded: LoadedJob
    run_dir: Path


@dataclass(frozen=True)
class FoundState:
    """The result of ``find_state``: the state from which to continue, or the result of a finished run."""

    start: State | None = None
    """None if training starts from scratch."""
    past: TrainResult | None = None


@dataclass(frozen=True)
class Calibrated:
    """The result of ``calibrate``: the profile used for predictions, and the plan with which the run begins."""

    profile: ClusterProfile
    report: PlanReport


@dataclass(frozen=True)
class Built:
    """The result of ``build``: this rank's share of the plan, including its stage, and the training state."""

    share: Share
    state: State


class TrainingRun:
    """A run, in ten collective phases. Each phase returns one result, which later phases use.

        resolve_job   connect   load_data_and_model   find_state   profile   plan   calibrate   build   train   finish
             ^                                                                                    ^       |
             |                                                          layers move: rebalancing  +-------+
             |                                                                                            |
             +--------------------------------------------------------------------------------------------+
              a rank is lost: ``run_with_recovery`` calls ``run`` again on the remaining ranks, which reuse the results
              in ``history`` (job, data, profile, trained state)

    Args:
        stop: tells whether this process has been asked to end.
        live: writes ``now.json`` and starts the live page.
        follower: reports events to the Python program that follows the run; None if there is none.
    """

    def __init__(
        self, world: World, options: TrainOptions, stop: StopRequest, live: LiveView, follower: Follower | None
    ) -> None:
        self.world, self.options, self._stop = world, options, stop
        self._live, self._follower = live, follower

    def run(self, history: RunHistory) -> TrainResult | None:
        """Run all phases and return the run's result; None for a dry run."""
        pending = Pending()
        with contextlib.ExitStack() as resources:
            job = self.resolve_job(history, resources)
            past = None if history.losses else check_header(self.world, job.loaded, job.run_dir, self.options.resume)
            if past is not None:
                return past
            transport = self.connect(job, resources)
            context = self.load_data_and_model(history, job, transport)
            found_state = FoundState() if self.options.dry_run else self.find_state(context, history, pending)
            if found_state.past is not None:
                return found_state.past
            profiled = self.profile(context, history, pending)
            planned = self.plan(context, history, profiled, pending)
            calibrated = self.calibrate(context, history, planned, pending)
            if self.options.dry_run:
                _end_dry_run(context, pending)
                return None
            context = replace(context, planned_for=calibrated.profile)
            built = self.build(context, history, calibrated.report, found_state.start)
            with self.world.collective_errors("preparing the run directory"):
                pending.carry_out()  # the start is accepted
            save_used_profile(context)
            other_programs = OtherPrograms()
            built = self.train(context, history, built)
            return self.finish(context, built, other_programs)

    def resolve_job(self, history: RunHistory, resources: contextlib.ExitStack) -> JobToRun:
        """Read the job, lock the run directory, and set up logging."""
        world = self.world
        loaded, run_dir = history.job_of(world, lambda: read_job(world, self.options))
        resources.enter_context(lock_run_directory(world, run_dir))
        continues = history.all_ranks_have(world, history.state)
        look_around(world, run_dir, waits=world.broadcast_json(world.rank == 0 and is_used(run_dir)) and not continues)
        _LOG.info("process %d on %s", os.getpid(), world.host)  # some launchers name a dead rank by its process only
        history.tell_loss(world, run_dir)
        with world.on_leader("checking the profile"):
            if world.rank == 0 and not history.losses:
                named_profile(loaded, self.options)
        return JobToRun(loaded, run_dir)

    def connect(self, job: JobToRun, resources: contextlib.ExitStack) -> MpiTransport:
        """Open the transport between the ranks."""
        threaded = job.loaded.job.cluster.communication_thread
        return resources.enter_context(MpiTransport(self.world.comm, threaded=threaded, hosts=self.world.hosts))

    def load_data_and_model(self, history: RunHistory, job: JobToRun, transport: MpiTransport) -> RunContext:
        """Open the devices, read the data (rank 0), and build the model's chain without weights."""
        return history.context_of(self.world, transport, lambda: set_up(self.world, transport, job.loaded, job.run_dir))

    def find_state(self, context: RunContext, history: RunHistory, pending: Pending) -> FoundState:
        """Find the trained state to continue from: a checkpoint, shards on hosts' disks, or copies in memory."""
        return FoundState(*find_start(context, history, self.options, pending))

    def profile(self, context: RunContext, history: RunHistory, pending: Pending) -> Profiled:
        """Measure the ranks and links, or reuse a profile that was given, cached, or kept from an earlier attempt."""
        remembered = history.known_profile(self.world)
        if remembered is not None:
            return Profiled(remembered, False, "")
        options = self.options if not history.losses else replace(self.options, profile=None)
        profiled = obtain_profile(context, options, pending)
        history.profile, history.profiled_ranks = profiled.profile, self.world.size
        return profiled

    def plan(self, context: RunContext, history: RunHistory, profiled: Profiled, pending: Pending) -> Planned:
        """Check the given plan or make one; either way, its schedule has to pass a dry run."""
        begin, user_plan = time.perf_counter(), self.options.plan
        request = planning_request(context, profiled.profile, history.profiled_ranks)
        if history.losses:  # all ranks wait for a plan for the remaining ones, so the search is short
            request, user_plan = replace(request, thorough=False), None
        report = obtain_plan(context, profiled.profile, request, pending, user_plan)
        return Planned(**vars(profiled), report=report, planning_s=time.perf_counter() - begin)

    def calibrate(self, context: RunContext, history: RunHistory, planned: Planned, pending: Pending) -> Calibrated:
        """Run the plan for a few steps with random weights and calibrate the profile; skipped after a lost rank."""
        if history.losses:
            say(*planned_lines(planned.report, planned.profile, context.run_dir))
            return Calibrated(planned.profile, planned.report)
        calibrated = Calibrated(*try_plan(context, self.options, planned, pending))
        history.profile = calibrated.profile
        say_plan(context, self.options, calibrated.profile, calibrated.report, planned.micro_batches)
        calibrated_context = replace(context, planned_for=calibrated.profile)
        pending.add(partial(draw_plan, calibrated_context, calibrated.report))
        return calibrated

    def build(self, context: RunContext, history: RunHistory, report: PlanReport, start: State | None) -> Built:
        """Build this rank's stage and move the trained state to the ranks that need it; idle ranks wait."""
        world = self.world
        world.current_action = "building the stages"
        share, state = load_start(context, history, report, start)
        if share.members is not None:
            with _errors_reach_idle_ranks(world, share):
                assert share.trainer is not None
                find_reference(context, share.members, share.trainer, state)
            world.release(_idle_ranks(world, share), None)
        else:
            world.current_action = "idle according to the plan"
            world.sleep_until_released()
        history.state = state
        return Built(share, state)

    def train(self, context: RunContext, history: RunHistory, built: Built) -> Built:
        """Train under one or more plans and return the last share and state. All ranks change plans together.

        Only the share may hold a reference to its trainer, because a change of plan needs the trainer's memory.
        """
        share, state = built.share, built.state
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stop.noting())
            training = self._training(context, history, state, stack)
            while (message := self._until_change(training, history, share, state)) is not None:
                if share.members is None:
                    history.state = state = State.from_dict(message["state"])
                share = _change_plan_and_report(training, share, report_from_dict(message["plan"]), state)
        return Built(share, state)

    def finish(self, context: RunContext, built: Built, other_programs: OtherPrograms) -> TrainResult:
        """Write the result and print the summary."""
        share, state = built.share, built.state
        if share.members is not None:
            with _errors_reach_idle_ranks(self.world, share):
                write_result(context, share, state, other_programs)
            self.world.release(_idle_ranks(self.world, share), None)
        remove_shards(context.run_dir)  # the last checkpoint holds everything
        return final_result(context, share.report, state)

    def _training(
        self, context: RunContext, history: RunHistory, state: State, stack: contextlib.ExitStack
    ) -> Training:
        """Create the parts that the steps of all plans share; ``stack`` closes them after the last step."""
        rebalancer = rebalancer_of(context, self.options.plan is not None)
        if rebalancer is not None:
            stack.callback(rebalancer.close)
        metrics, display = open_display(context, state, history.run_id or "", stack, screen=self._follower is None)
        self._live.show_run(context.job.report, context.run_dir, display)
        tokenizer = context.material.tokenizer if context.material else None
        sample = partial(write_sample, loaded=context.loaded, tokenizer=tokenizer, run_dir=context.run_dir)
        metadata = _metadata(context, history) if self.world.rank == 0 else {}
        stop_requested = lambda: self._stop() or self.world.asked()  # noqa: E731
        return Training(context, metadata, stop_requested, rebalancer, self._follower, sample, metrics, display)

    def _until_change(
        self, training: Training, history: RunHistory, share: Share, state: State
    ) -> dict[str, Any] | None:
        """Train, or sleep on an idle rank, until the plan changes (returns the new plan and the state) or training ends (None)."""
        context, rebalancer, world = training.context, training.rebalancer, self.world
        if share.members is None:
            return self._sleep(training)
        assert share.trainer is not None
        if rebalancer is not None:
            rebalancer.start_plan(share)
        with _errors_reach_idle_ranks(world, share):
            snapshots = Snapshots.for_trainer(share.trainer)
            checkpoint_metadata = training.described(share)
            with replicate_state(context, history, share.members, snapshots, state, checkpoint_metadata) as after_step:
                loop = Loop(training, share, state, after_step, snapshots)
                with watched(context, share) as watchdog:
                    show_plan(training.display, context, share.plan, watchdog)
                    done = loop.run()
            if rebalancer is not None:
                rebalancer.end_plan()
            if done:
                return None
            new_report = rebalancer.chosen() if rebalancer is not None else None
            message = {"plan": plan_to_dict(new_report), "state": state.to_dict()} if new_report is not None else None
            message = share.members.broadcast_json(message)
        world.release(_idle_ranks(world, share), None, message)
        return message

    def _sleep(self, training: Training) -> dict[str, Any] | None:
        """Implement ``_until_change`` on an idle rank."""
        self.world.current_action = "idle according to the plan"
        while True:
            message: dict[str, Any] | None = self.world.sleep_until_released(training.stop_requested)
            if message is None or "told" not in message:
                return message
            assert training.follower is not None
            training.follower.report_on_idle_rank(message["told"])


def _end_dry_run(context: RunContext, pending: Pending) -> None:
    """Write the profile, plan and figure of a dry run, unless the directory holds a run. Collective."""
    say("Dry run: stopping before weights are read")
    if context.world.broadcast_json(context.world.rank == 0 and holds_run(context.run_dir)):
        say(f"{context.run_dir} holds a run and is unchanged: --run-dir DIR keeps profile and plan of a dry run")
    else:
        pending.carry_out()


def _metadata(context: RunContext, history: RunHistory) -> dict[str, Any]:
    """Return the metadata that all checkpoints of the run share. Called on rank 0."""
    assert context.dataset is not None and context.material is not None
    return {
        "data_fingerprint": context.dataset.fingerprint(),
        "job": job_to_dict(context.job),
        "profile": profile_to_dict(context.profile),
        "model_config": context.chain.to_dict(),
        "generation_config": context.material.generation or {},
        "base_model": base_name(context.loaded),
        "seed": context.job.train.seed,
        "versions": own_versions(context.world.library),
        "run": history.token,
        "begun": history.run_id,
    }


def _change_plan_and_report(training: Training, before: Share, report: PlanReport, state: State) -> Share:
    """Change to another plan and report the change. Collective over all ranks of the job."""
    begin_s, context = time.perf_counter(), training.context
    share = change_plan(context, before, report, state)
    if context.world.rank == 0:
        with warn_on_failure("writing plan.toml"):
            save_plan(report, context.run_dir / "plan.toml")
        if training.rebalancer is not None:
            training.rebalancer.changed(state.step, before.plan, report.plan, time.perf_counter() - begin_s)
    return share


@contextlib.contextmanager
def _errors_reach_idle_ranks(world: World, share: Share) -> Iterator[None]:
    """Forward an error that all active ranks raise to the idle ranks."""
    try:
        yield
    except CollectiveUserError as error:
        world.release(_idle_ranks(world, share), error)
        raise


def _idle_ranks(world: World, share: Share) -> list[int]:
    """List the ranks that sleep under the plan of ``share``."""
    active = active_ranks(share.plan)
    return [rank for rank in range(world.size) if rank not in active]
