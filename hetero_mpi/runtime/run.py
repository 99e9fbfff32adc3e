"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data. All ranks profile together. Rank 0 plans and broadcasts the plan. Then each rank builds its own
layers and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

from transformers.utils import logging as transformers_logging

from hetero_mpi.checkpoint.local_shards import remove_shards
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.errors import ExitCode
from hetero_mpi.job.load import job_to_dict
from hetero_mpi.planning.types.toml_files import profile_to_dict
from hetero_mpi.report.run_files.logs import say, setup_logging
from hetero_mpi.report.run_files.set_aside import EarlierRun
from hetero_mpi.runtime.build import Share, build, start_adapter, start_layers
from hetero_mpi.runtime.emulation_check import check_emulated_times
from hetero_mpi.runtime.finalise import leave_result, outcome
from hetero_mpi.runtime.origin import bring_back, origin
from hetero_mpi.runtime.plan_loop import Steps, asked_of, idle_ranks, open_display, passed_on
from hetero_mpi.runtime.rebalance import rebalancer_of
from hetero_mpi.runtime.reconfigure import join
from hetero_mpi.runtime.recovery import RunHistory, outlive, plan_again
from hetero_mpi.runtime.reference import find_reference
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.resume import earlier_run, make_room, open_checkpoint, run_id_of
from hetero_mpi.runtime.run_report import draw_plan, keep_profile, reported
from hetero_mpi.runtime.setup.material import model_directory
from hetero_mpi.runtime.setup.setup import RunContext, RunSetup, TrainOptions, claimed, plan_run, read_job, set_up
from hetero_mpi.runtime.signals import StopRequest
from hetero_mpi.state.checkpointing import ANY, LATEST, restore
from hetero_mpi.state.training_state import TrainingState

_LOG = logging.getLogger(__name__)


def train(world: World, options: TrainOptions) -> int:
    """Run a job and return the exit code. Collective; raises as ``run_job``."""
    run_job(world, options)
    return ExitCode.DONE


def run_job(world: World, options: TrainOptions) -> TrainResult | None:
    """Run a job and return its result on every rank (None for a dry run). Collective.

    Raises:
        UserError: an error the user can correct; the same on all ranks.
    """
    with StopRequest() as stop:
        return outlive(world, lambda history: _attempt(world, options, stop, history))


def _attempt(world: World, options: TrainOptions, stop: StopRequest, history: RunHistory) -> TrainResult | None:
    """One attempt at the whole run, with what earlier attempts have left in ``history``."""
    loaded, run_dir = history.job_of(world, lambda: read_job(world, options))
    with claimed(world, run_dir):
        setup_logging(run_dir, world.rank, world.size)
        transformers_logging.disable_progress_bar()  # rank 0 alone talks, and says what it loads
        _LOG.info("process %d on %s", os.getpid(), world.host)  # some launchers name a dead rank by its process only
        history.tell_loss(world, run_dir)
        world.check_versions(own_versions(world.library))
        threaded = loaded.job.cluster.communication_thread
        with MpiTransport(world.comm, threaded=threaded, hosts=world.hosts) as transport:
            setup = history.setup_of(world, transport, lambda: set_up(world, transport, loaded, run_dir))
            return _train(setup, options, stop, history)


def _train(setup: RunSetup, options: TrainOptions, stop: StopRequest, history: RunHistory) -> TrainResult | None:
    world = setup.world
    anew = not options.dry_run and not history.shared(world, history.state)
    earlier = earlier_run(setup, options) if anew else None
    profile = history.known_profile(world)
    if profile is not None:
        report = plan_again(setup, history, profile)
    else:
        profile, report = plan_run(setup, options if not history.losses else replace(options, profile=None, plan=None))
        history.measured(profile, world.size)
        draw_plan(RunContext.of(setup, profile), report)
    if options.dry_run:
        say("Dry run: stopping before any weight is read")
        return None
    context = RunContext.of(setup, profile)
    begin = origin(context, history, options)
    if begin is not None and begin.having is not None:
        share, state = bring_back(context, history, report, begin)
        if not history.losses:
            _check_emulated_times(share)
    else:
        share, state = join(context, report), TrainingState.initial(context.job.train.dtype)
        if share.members is not None:
            with passed_on(world, share):
                resume = str(begin.checkpoint) if begin is not None else options.resume
                share, state = _start(context, history, share, replace(options, resume=resume), earlier)
    if share.members is not None:
        with passed_on(world, share):
            assert share.trainer is not None
            find_reference(context, share.members, share.trainer, state)
    history.stands_at(state)
    metadata = {**_metadata(context), "run": history.token, "begun": history.begun} if world.rank == 0 else {}
    keep_profile(context)
    with reported(context), contextlib.ExitStack() as stack:
        stack.enter_context(stop.noting())
        rebalancer = rebalancer_of(context, options.plan is not None)
        if rebalancer is not None:
            stack.callback(rebalancer.close)
        steps = Steps(
            context, history, metadata, asked_of(world, stop), open_display(context, state, stack), rebalancer
        )
        share, state = steps.take(share, state)
    if share.members is not None:
        with passed_on(world, share):
            leave_result(context, share, state)
        world.release(idle_ranks(world, share), None)
    remove_shards(context.run_dir)  # the last checkpoint holds everything
    return outcome(context, share.report, state)


def _start(
    context: RunContext, history: RunHistory, share: Share, options: TrainOptions, earlier: EarlierRun | None
) -> tuple[Share, TrainingState]:
    """The active ranks' shares with their trainers: from initial weights, an adapter or a checkpoint. Collective over them.

    ``earlier``: the earlier run in the directory. It is moved aside once this run has been accepted.
    """
    assert share.members is not None
    members = share.members
    with contextlib.ExitStack() as stack:
        reader, state = open_checkpoint(context, members, options, stack)
        make_room(context, members, earlier)
        history.belongs_to(history.begun or (run_id_of(reader, options) if members.rank == 0 else None))
        if not history.losses and options.resume not in (LATEST, ANY):
            remove_shards(context.run_dir)  # copies there are of a run that this one, accepted now, does not continue
        begin = time.perf_counter()
        resumed = state.newest_checkpoint is not None
        brought = resumed or context.chain.start_is_sent
        share = replace(
            build(context, share, brought, state.loss_scale), seconds={"build": time.perf_counter() - begin}
        )
        trainer = share.trainer
        assert trainer is not None
        if resumed:
            members.doing = "restoring the checkpoint"
            restore(trainer, reader, state.updates)
        elif context.job.adapter.path is not None:
            start_adapter(context, members, trainer)
        elif context.chain.start_is_sent:
            start_layers(context, members, trainer)
    _check_emulated_times(share)
    return share, state


def _check_emulated_times(share: Share) -> None:
    """Check the times of an emulated run before its first step. Collective over the active ranks."""
    if share.emulation is not None and share.members is not None and share.trainer is not None:
        share.members.doing = "checking the emulated times"
        check_emulated_times(share.trainer, share.members, share.emulation, share.report.predicted_step_s)


def _metadata(context: RunContext) -> dict[str, Any]:
    """The metadata that all checkpoints of the run share; each adds its plan."""
    assert context.dataset is not None
    return {
        "data_fingerprint": context.dataset.fingerprint(),
        "job": job_to_dict(context.job),
        "profile": profile_to_dict(context.profile),
        "model_config": context.chain.to_dict(),
        "base_model": str(base) if (base := model_directory(context.loaded)) is not None else None,
        "seed": context.job.train.seed,
        "versions": own_versions(context.world.library),
    }
