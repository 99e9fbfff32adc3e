"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data. All ranks profile together. Rank 0 plans and broadcasts the plan. Then each rank builds its own
layers and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hetero_mpi import units
from hetero_mpi.checkpoint.directory import remove_shards
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.data.batch import steps_per_epoch
from hetero_mpi.emulation.emulation_check import check_emulated_times
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.errors import ExitCode, UserError
from hetero_mpi.job.load import job_to_dict
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.toml_files import plan_to_dict, profile_to_dict, report_from_dict, save_plan
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import MetricsWriter
from hetero_mpi.report.run_files.run_directory import holds_run, is_used
from hetero_mpi.runtime.follower import Follower, OnEvent
from hetero_mpi.runtime.generate.generate import write_sample
from hetero_mpi.runtime.live_view import LiveView
from hetero_mpi.runtime.loop import Loop, Training
from hetero_mpi.runtime.rebalance import rebalancer_of
from hetero_mpi.runtime.reconfigure import change
from hetero_mpi.runtime.recovery import RunHistory, beside_steps, plan_again, run_with_recovery
from hetero_mpi.runtime.reference_likelihoods import find_reference
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.run_report import (
    OtherPrograms,
    draw_plan,
    keep_profile,
    leave_result,
    open_metrics,
    outcome,
    reported,
    show_plan,
)
from hetero_mpi.runtime.setup.context import Pending, RunContext, Share, TrainOptions
from hetero_mpi.runtime.setup.data_setup import base_name
from hetero_mpi.runtime.setup.profile_and_plan import plan_run, say_plan
from hetero_mpi.runtime.setup.setup import claimed, look_around, read_job, set_up
from hetero_mpi.runtime.signals import StopRequest
from hetero_mpi.runtime.start_state import StartState, begin, check_header, find_start
from hetero_mpi.runtime.trial import try_plan
from hetero_mpi.runtime.watchdog import watched
from hetero_mpi.state.saving import Snapshots
from hetero_mpi.state.training_state import TrainingState

_LOG = logging.getLogger(__name__)


def train(world: World, options: TrainOptions) -> int:
    """Run a job and return the exit code. Collective; raises as ``run_job``."""
    run_job(world, options)
    return ExitCode.DONE


def run_job(
    world: World, options: TrainOptions, on_event: OnEvent | None = None, stop: StopRequest | None = None
) -> TrainResult | None:
    """Run a job and return its result on every rank (None for a dry run, and for a run that its program has left). Collective.

    Args:
        on_event: called on every rank between the steps with each event of the run; its reply says how to continue.
        stop: the handler of signals, where the caller has installed one; None: installed here, which needs the main thread.

    Raises:
        UserError: an error the user can correct; the same on all ranks.
    """
    with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop, LiveView(world) as live:
        follower = Follower(world, stop, on_event) if on_event is not None else None
        try:
            return run_with_recovery(world, lambda history: _attempt(world, options, stop, history, live, follower))
        except CollectiveUserError as error:
            if follower is None or not follower.left or error.exit_code != ExitCode.STOPPED:
                raise
            say(str(error))
            return None


def _attempt(
    world: World,
    options: TrainOptions,
    stop: StopRequest,
    history: RunHistory,
    live: LiveView,
    follower: Follower | None,
) -> TrainResult | None:
    """One attempt at the whole run, with what earlier attempts have left in ``history``."""
    loaded, run_dir = history.job_of(world, lambda: read_job(world, options))
    with claimed(world, run_dir):
        goes_on = history.shared(world, history.state)
        look_around(world, run_dir, waits=world.broadcast_json(world.rank == 0 and is_used(run_dir)) and not goes_on)
        _LOG.info("process %d on %s", os.getpid(), world.host)  # some launchers name a dead rank by its process only
        history.tell_loss(world, run_dir)
        past = check_header(world, loaded, run_dir, options.resume) if not history.losses else None
        if past is not None:
            return past
        threaded = loaded.job.cluster.communication_thread
        with MpiTransport(world.comm, threaded=threaded, hosts=world.hosts) as transport:
            context = history.context_of(world, transport, lambda: set_up(world, transport, loaded, run_dir))
            return _train(context, options, stop, history, live, follower)


def _train(
    context: RunContext,
    options: TrainOptions,
    stop: StopRequest,
    history: RunHistory,
    live: LiveView,
    follower: Follower | None,
) -> TrainResult | None:
    world, pending, start = context.world, Pending(), StartState()
    if not options.dry_run:
        start, past = find_start(context, history, options, pending)
        if past is not None:
            return past
    report = _planned(context, options, history, pending)
    if options.dry_run:
        _end_dry_run(context, pending)
        return None
    context = replace(context, planned_for=history.profile)
    world.doing = "building the stages"
    share, state = begin(context, history, report, start)
    if share.members is not None:
        with _passed_on(world, share):
            assert share.trainer is not None
            if not history.losses:
                _check_emulated_times(share)
            find_reference(context, share.members, share.trainer, state)
        world.release(_idle_ranks(world, share), None)
    else:
        world.doing = "idle, by the plan"
        world.sleep_until_released()
    with world.together("beginning in the run directory"):
        pending.carry_out()
    history.state = state
    metadata = {**_metadata(context), "run": history.token, "begun": history.begun} if world.rank == 0 else {}
    keep_profile(context)
    with reported(context, live), contextlib.ExitStack() as stack:
        stack.enter_context(stop.noting())
        rebalancer = rebalancer_of(context, options.plan is not None)
        if rebalancer is not None:
            stack.callback(rebalancer.close)
        shown = _open_display(context, state, stack, screen=follower is None)
        live.begin(context.job.report, context.run_dir, shown[1])
        others = OtherPrograms()
        asked, tokenizer = lambda: stop() or world.asked(), context.material.tokenizer if context.material else None
        sample = partial(write_sample, loaded=context.loaded, tokenizer=tokenizer, run_dir=context.run_dir)
        training = Training(context, metadata, asked, rebalancer, follower, sample, *shown)
        share, state = _train_to_the_end(training, history, share, state)
    if share.members is not None:
        with _passed_on(world, share):
            _leave_result(context, share, state, others)
        world.release(_idle_ranks(world, share), None)
    remove_shards(context.run_dir)  # the last checkpoint holds everything
    return outcome(context, share.report, state)


def _planned(context: RunContext, options: TrainOptions, history: RunHistory, pending: Pending) -> PlanReport:
    """The plan; the profile that it was made for is in the history. Collective."""
    world, profile = context.world, history.known_profile(context.world)
    if profile is not None:
        return plan_again(context, history, profile, pending)
    given = options if not history.losses else replace(options, profile=None, plan=None)
    planned = plan_run(context, given, pending)
    profile, report = planned.profile, planned.report
    history.profile, history.profiled_ranks = profile, world.size
    if not history.losses:  # else all of them wait for it
        profile, report = try_plan(context, options, planned, pending)
        history.profile = profile
    say_plan(context, options, profile, report, planned.micro_batches)
    pending.add(partial(draw_plan, replace(context, planned_for=profile), report))
    return report


def _leave_result(context: RunContext, share: Share, state: TrainingState, others: OtherPrograms) -> None:
    """As ``leave_result``. Raises UserError: rank 0 cannot write it; with the newest checkpoint."""
    try:
        leave_result(context, share, state, others)
    except CollectiveUserError:
        raise
    except (UserError, OSError) as error:
        newest = state.newest_checkpoint
        left = f"{newest} is whole: `--resume` goes on from it" if newest else "there is no checkpoint"
        why = (
            str(error) if isinstance(error, UserError) else f"the result cannot be written ({error.strerror or error})"
        )
        raise UserError(f"{why}; {left}") from error


def _end_dry_run(context: RunContext, pending: Pending) -> None:
    """Keep profile, plan and picture for a look, in a directory that holds no run. Collective."""
    say("Dry run: stopping before any weight is read")
    if context.world.broadcast_json(context.world.rank == 0 and holds_run(context.run_dir)):
        say(f"{context.run_dir} holds a run and stays as it is: --run-dir DIR keeps profile and plan of a dry run")
    else:
        pending.carry_out()


def _check_emulated_times(share: Share) -> None:
    """Check the times of an emulated run before its first step. Collective over the active ranks."""
    if share.emulation is not None and share.members is not None and share.trainer is not None:
        share.members.doing = "checking the emulated times"
        check_emulated_times(share.trainer, share.members, share.emulation, share.report.predicted_step_s)


def _metadata(context: RunContext) -> dict[str, Any]:
    """The metadata that all checkpoints of the run share; each adds its plan."""
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
    }


def _train_to_the_end(
    training: Training, history: RunHistory, share: Share, state: TrainingState
) -> tuple[Share, TrainingState]:
    """Take the steps of a run over all its plans; returns the share that took the last one, and the state after it. Collective over
    all ranks of the job. Nobody else may hold the trainer of ``share``: a change of plan needs its memory.

    Active ranks train until rank 0 wants another plan. Idle ranks sleep until then. All ranks change together.
    """
    while (word := _until_change(training, history, share, state)) is not None:
        if share.members is None:
            history.state = state = TrainingState.from_dict(word["state"])
        share = _changed(training, share, report_from_dict(word["plan"]), state)
    return share, state


def _until_change(training: Training, history: RunHistory, share: Share, state: TrainingState) -> dict[str, Any] | None:
    """Train, or sleep on an idle rank, until another plan is due; returns that plan and the state, on all ranks. None: the run is
    over. Collective over all ranks of the job.
    """
    context, rebalancer, world = training.context, training.rebalancer, training.context.world
    if share.members is None:
        world.doing = "idle, by the plan"
        word: dict[str, Any] | None
        while (word := world.sleep_until_released(training.asked)) is not None and "told" in word:
            assert training.follower is not None
            training.follower.hear(word["told"])
        return word
    assert share.trainer is not None
    if rebalancer is not None:
        rebalancer.begin(share)
    with _passed_on(world, share):
        snapshots = Snapshots.of(share.trainer)
        described = training.described(share)
        with beside_steps(context, history, share.members, snapshots, state, described) as beside:
            loop = Loop(training, share, state, beside, snapshots)
            with watched(context, share) as watchdog:
                show_plan(training.display, context, share.plan, watchdog)
                done = loop.run()
        if rebalancer is not None:
            rebalancer.end()
        if done:
            return None
        chosen = rebalancer.chosen() if rebalancer is not None else None
        word = {"plan": plan_to_dict(chosen), "state": state.to_dict()} if chosen is not None else None
        word = share.members.broadcast_json(word)
    world.release(_idle_ranks(world, share), None, word)
    return word


def _changed(training: Training, before: Share, report: PlanReport, state: TrainingState) -> Share:
    """Change to another plan, and report it. Collective over all ranks of the job."""
    begin_s, context = time.perf_counter(), training.context
    share = change(context, before, report, state)
    if context.world.rank == 0:
        with unharmed("plan.toml"):
            save_plan(report, context.run_dir / "plan.toml")
        if training.rebalancer is not None:
            training.rebalancer.changed(state.step, before.plan, report.plan, time.perf_counter() - begin_s)
    return share


@contextlib.contextmanager
def _passed_on(world: World, share: Share) -> Iterator[None]:
    """A block of the active ranks. An error that they all end with is raised on the sleeping ranks too."""
    try:
        yield
    except CollectiveUserError as error:
        world.release(_idle_ranks(world, share), error)
        raise


def _idle_ranks(world: World, share: Share) -> list[int]:
    """Ranks that sleep while the plan of ``share`` lasts."""
    active = active_ranks(share.plan)
    return [rank for rank in range(world.size) if rank not in active]


def _open_display(
    context: RunContext, state: TrainingState, stack: contextlib.ExitStack, screen: bool
) -> tuple[MetricsWriter | None, ProgressDisplay | None]:
    """The metrics and the screen of the steps, on rank 0; nothing elsewhere. ``screen``: no program prints between them."""
    if context.world.rank != 0:
        return None, None
    metrics = stack.enter_context(open_metrics(context, state.step))
    unit = units.unit_of(context.job.data.sequence_length)
    train, per_epoch = context.job.train, None
    if train.epochs is not None and context.dataset is not None:
        per_epoch = steps_per_epoch(len(context.dataset.train), train.global_batch, train.last_batch == "smaller")
    shown = ProgressDisplay(train.steps, state.step, unit=unit, steps_per_epoch=per_epoch, screen=screen)
    display = stack.enter_context(shown)
    return metrics, display
