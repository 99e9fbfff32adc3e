"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data, profiles with all others, plans, and tells everybody; then each rank builds its own layers
and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

from transformers.utils import logging as transformers_logging

from hetero_mpi.checkpoint.local_shards import clear_shelf
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.versions import MUST_MATCH, own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.errors import ExitCode
from hetero_mpi.job.load import job_to_dict
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import profile_to_dict
from hetero_mpi.report.run_files.logs import say, setup_logging
from hetero_mpi.report.run_files.set_aside import EarlierRun
from hetero_mpi.runtime.build import build, start_adapter, start_layers
from hetero_mpi.runtime.emulation_check import rehearse
from hetero_mpi.runtime.finalise import leave_result, outcome
from hetero_mpi.runtime.loop import Books
from hetero_mpi.runtime.origin import bring_back, origin
from hetero_mpi.runtime.plan_loop import Steps, asked_of, idle_ranks, open_display, passed_on
from hetero_mpi.runtime.rebalance import rebalancer_of
from hetero_mpi.runtime.reconfigure import Share, join
from hetero_mpi.runtime.recovery import Past, known_profile, outlive, plan_again, remember, renewed, tell
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.resume import earlier_run, lineage, make_room, open_checkpoint
from hetero_mpi.runtime.run_report import draw_plan, keep_profile, reported
from hetero_mpi.runtime.setup.material import model_directory
from hetero_mpi.runtime.setup.profile_and_plan import Given
from hetero_mpi.runtime.setup.setup import Setting, TrainOptions, claimed, plan_run, read_job, set_up
from hetero_mpi.runtime.signals import StopRequest
from hetero_mpi.state.checkpointing import ANY, LATEST, RunState, restore

_LOG = logging.getLogger(__name__)


def train(world: World, options: TrainOptions) -> int:
    """The command: run a job. Collective; returns the exit code. Raises: as ``run_job``."""
    run_job(world, options)
    return ExitCode.DONE


def run_job(world: World, options: TrainOptions) -> TrainResult | None:
    """Run a job. Collective; returns what it has come to, on every rank (None: a dry run).

    Raises:
        UserError: anything the user can put right, on all ranks together.
    """
    with StopRequest() as stop:
        return outlive(world, lambda past: _attempt(world, options, stop, past))


def _attempt(world: World, options: TrainOptions, stop: StopRequest, past: Past) -> TrainResult | None:
    """The whole run, from what is left of earlier attempts on."""
    if not past.shared(world, past.job):
        past.job = read_job(world, options)
    assert past.job is not None
    loaded, run_dir = past.job
    with claimed(world, run_dir):
        setup_logging(run_dir, world.rank, world.size)
        transformers_logging.disable_progress_bar()  # rank 0 alone talks, and says what it loads
        _LOG.info("process %d on %s", os.getpid(), world.host)  # some launchers name a dead rank by its process only
        tell(world, past, run_dir)
        world.check_versions(own_versions(world.library), MUST_MATCH)
        threaded = loaded.job.cluster.communication_thread
        with MpiTransport(world.comm, threaded=threaded, hosts=world.hosts) as transport:
            if past.shared(world, past.setting):
                setting = renewed(past, world, transport)
            else:
                setting = set_up(world, transport, loaded, run_dir)
                remember(past, setting)
            return _train(setting, options, stop, past)


def _train(setting: Setting, options: TrainOptions, stop: StopRequest, past: Past) -> TrainResult | None:
    world = setting.world
    anew = not options.dry_run and not past.shared(world, past.books)
    earlier = earlier_run(setting, options) if anew else None
    profile = known_profile(past, world)
    if profile is not None:
        plan = plan_again(setting, past, profile)
    else:
        given = Given(options.profile, options.plan, options.reprofile)
        past.profiled_ranks = world.size
        profile, plan, _ = plan_run(setting, given if not past.losses else Given(None, None, options.reprofile))
        draw_plan(setting, profile, plan)
    past.profile = profile
    if options.dry_run:
        say("Dry run: stopping before any weight is read")
        return None
    begin = origin(setting, past, options)
    if begin is not None and begin.having is not None:
        share, books = bring_back(setting, past, profile, plan, begin)
        if not past.losses:
            _rehearse(share)
    else:
        share, books = join(setting, profile, plan), Books.opened(RunState(0, [], 0))
        if share.members is not None:
            with passed_on(world, share):
                resume = str(begin.checkpoint) if begin is not None else options.resume
                books = _start(setting, past, profile, share, replace(options, resume=resume), earlier)
    past.books = books
    metadata = {**_metadata(setting, profile), "run": past.token, "begun": past.begun} if world.rank == 0 else {}
    keep_profile(setting, profile)
    with reported(setting), contextlib.ExitStack() as stack:
        stack.enter_context(stop.noting())
        rebalancer = rebalancer_of(setting, profile, options.plan is not None)
        if rebalancer is not None:
            stack.callback(rebalancer.close)
        steps = Steps(setting, past, metadata, asked_of(world, stop), open_display(setting, books, stack), rebalancer)
        share = steps.take(share, books)
    books = past.books
    if share.members is not None:
        with passed_on(world, share):
            leave_result(setting, share, profile, books.result)
        world.release(idle_ranks(world, share), None)
    clear_shelf(setting.run_dir)  # the last checkpoint holds everything
    return outcome(setting, profile, share.plan, books)


def _start(
    setting: Setting,
    past: Past,
    profile: ClusterProfile,
    share: Share,
    options: TrainOptions,
    earlier: EarlierRun | None,
) -> Books:
    """Build the active ranks' shares: anew, from an adapter or from a checkpoint. Collective over them.

    ``earlier``: the run in the directory that makes room for this one, which is accepted by then.
    """
    assert share.members is not None
    members, schedule = share.members, schedule_of(share.plan, profile.model)
    with contextlib.ExitStack() as stack:
        checkpoint, reader, state = open_checkpoint(setting, members, options, stack)
        make_room(setting, members, earlier)
        past.begun = past.begun or (lineage(reader, options) if members.rank == 0 else None)
        if not past.losses and options.resume not in (LATEST, ANY):
            clear_shelf(setting.run_dir)  # copies there are of a run that this one, accepted now, does not continue
        begin = time.perf_counter()
        brought = checkpoint is not None or setting.chain.start_is_sent
        trainer = build(setting, members, share.own_plan, schedule, share.emulation, brought)
        share.seconds = {"build": time.perf_counter() - begin}
        if checkpoint is not None:
            members.doing = "restoring the checkpoint"
            restore(trainer, reader, state)
        elif setting.job.adapter.path is not None:
            start_adapter(setting, members, trainer)
        elif setting.chain.start_is_sent:
            start_layers(setting, members, trainer)
    share.trainer = trainer
    _rehearse(share)
    return Books.opened(state, checkpoint)


def _rehearse(share: Share) -> None:
    """Before the first step of an emulated run. Collective over the active ranks."""
    if share.emulation is not None and share.members is not None and share.trainer is not None:
        share.members.doing = "rehearsing"
        rehearse(share.trainer, share.members, share.emulation)


def _metadata(setting: Setting, profile: ClusterProfile) -> dict[str, Any]:
    """What every checkpoint says of the run, besides the plan of its moment."""
    assert setting.material is not None
    return {
        "data_fingerprint": setting.material.dataset.fingerprint(),
        "job": job_to_dict(setting.job),
        "profile": profile_to_dict(profile),
        "model_config": setting.chain.to_dict(),
        "base_model": str(base) if (base := model_directory(setting.loaded)) is not None else None,
        "seed": setting.job.train.seed,
        "versions": own_versions(setting.world.library),
    }
