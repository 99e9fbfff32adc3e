"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data, profiles with all others, plans, and tells everybody; then each rank builds its own layers
and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.versions import MUST_MATCH, own_versions
from hetero_mpi.comm.world import CollectiveUserError, World
from hetero_mpi.errors import ExitCode
from hetero_mpi.job import job_to_dict
from hetero_mpi.model.hub import is_hub_id
from hetero_mpi.planning.files import plan_from_dict, plan_to_dict, profile_to_dict, save_plan
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.report.logs import say, setup_logging
from hetero_mpi.report.metrics import MetricsWriter
from hetero_mpi.report.progress import Progress
from hetero_mpi.report.summary import final_lines
from hetero_mpi.training.building import build, start_adapter
from hetero_mpi.training.changing import Share, change, join
from hetero_mpi.training.emulation import punctuality_lines
from hetero_mpi.training.loop import Books, Loop, LoopResult
from hetero_mpi.training.material import model_directory
from hetero_mpi.training.places import active_ranks
from hetero_mpi.training.planned import Given
from hetero_mpi.training.rebalancing import Rebalancer, rebalancer_of
from hetero_mpi.training.recording import Recorder
from hetero_mpi.training.recovery import (
    Past,
    beside_steps,
    bring_back,
    known_profile,
    origin,
    outlive,
    plan_again,
    remember,
    renewed,
    tell,
)
from hetero_mpi.training.rehearsal import rehearse
from hetero_mpi.training.resuming import open_checkpoint
from hetero_mpi.training.sample import write_sample
from hetero_mpi.training.saving import (
    RunState,
    restore,
    save_adapter,
    save_model,
)
from hetero_mpi.training.setup import Options, Setting, claimed, plan_run, read_job, set_up
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.training.telling import draw_plan, files_of, keep_profile, open_metrics, reported, show_plan
from hetero_mpi.training.trainer import Trainer
from hetero_mpi.training.watchdog import Lookout, Watchdog, limit_s

_LOG = logging.getLogger(__name__)


def train(world: World, options: Options) -> int:
    """Run a job. Collective; returns the exit code.

    Raises:
        UserError: anything the user can put right, on all ranks together.
    """
    with StopRequest() as stop:
        return outlive(world, lambda past: _attempt(world, options, stop, past))


def _attempt(world: World, options: Options, stop: StopRequest, past: Past) -> int:
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
            _train(setting, options, stop, past)
    return ExitCode.DONE


def _train(setting: Setting, options: Options, stop: StopRequest, past: Past) -> None:
    world = setting.world
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
        return
    begin = origin(setting, past)
    if begin is not None and begin.having is not None:
        share, books = bring_back(setting, past, profile, plan, begin)
    else:
        share, books = join(setting, profile, plan), Books.opened(RunState(0, [], 0))
        if share.members is not None:
            with _passed_on(world, share):
                resume = str(begin.checkpoint) if begin is not None else options.resume
                books = _start(setting, profile, share, replace(options, resume=resume))
    past.books = books
    metadata = {**_metadata(setting, profile), "run": past.token} if world.rank == 0 else {}
    keep_profile(setting, profile)
    with reported(setting), contextlib.ExitStack() as stack:
        stack.enter_context(stop.noting())
        rebalancer = rebalancer_of(setting, profile, options.plan is not None)
        if rebalancer is not None:
            stack.callback(rebalancer.close)
        shown = _shown(setting, books, stack)
        asked = _asked(world, stop)
        while (word := _until_change(setting, past, share, books, metadata, asked, shown, rebalancer)) is not None:
            if share.members is None:
                past.books = books = Books.from_dict(word["books"])
            share = _changed(setting, profile, share, plan_from_dict(word["plan"]), books, rebalancer)
    if share.members is not None:
        with _passed_on(world, share):
            _end(setting, share, profile, books.result)
        world.release(_idle(world, share), None)


def _changed(
    setting: Setting, profile: ClusterProfile, before: Share, plan: Plan, books: Books, rebalancer: Rebalancer | None
) -> Share:
    """Go over to another plan, and tell. Collective over all ranks of the job."""
    begin = time.perf_counter()
    share = change(setting, profile, before, plan, books)
    if setting.world.rank == 0:
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            save_plan(plan, setting.run_dir / "plan.toml")
        if rebalancer is not None:
            rebalancer.changed(books.state.step, before.plan, plan, time.perf_counter() - begin)
    return share


def _idle(world: World, share: Share) -> list[int]:
    active = active_ranks(share.plan)
    return [rank for rank in range(world.size) if rank not in active]


@contextlib.contextmanager
def _passed_on(world: World, share: Share) -> Iterator[None]:
    """A block of the active ranks: what they end with, the sleeping ranks end with too."""
    try:
        yield
    except CollectiveUserError as error:
        world.release(_idle(world, share), error)
        raise


def _start(setting: Setting, profile: ClusterProfile, share: Share, options: Options) -> Books:
    """Build the active ranks' shares: anew, from an adapter or from a checkpoint. Collective over them."""
    assert share.members is not None
    members, schedule = share.members, schedule_of(share.plan, profile.model)
    with contextlib.ExitStack() as stack:
        checkpoint, reader, state = open_checkpoint(setting, members, options, stack)
        begin = time.perf_counter()
        trainer = build(setting, members, share.own_plan, schedule, share.emulation, resuming=checkpoint is not None)
        share.seconds = {"build": time.perf_counter() - begin}
        if checkpoint is not None:
            members.doing = "restoring the checkpoint"
            restore(trainer, reader, state)
        elif setting.job.adapter.path is not None:
            start_adapter(setting, members, trainer)
    if share.emulation is not None:
        members.doing = "rehearsing"
        rehearse(trainer, members, share.emulation)
    share.trainer = trainer
    return Books.opened(state, checkpoint)


_Shown = tuple[MetricsWriter | None, Progress | None]


def _shown(setting: Setting, books: Books, stack: contextlib.ExitStack) -> _Shown:
    """Where steps are told, on rank 0."""
    if setting.world.rank != 0:
        return None, None
    metrics = stack.enter_context(open_metrics(setting, books.state.step))
    return metrics, stack.enter_context(Progress(setting.job.train.steps, books.state.step))


def _until_change(
    setting: Setting,
    past: Past,
    share: Share,
    books: Books,
    metadata: dict[str, Any],
    asked: Callable[[], bool],
    shown: _Shown,
    rebalancer: Rebalancer | None,
) -> dict[str, Any] | None:
    """Take steps, or sleep on an idle rank, until another plan is due, which all ranks are told; None: the run is over.

    Collective over all ranks of the job.
    """
    world = setting.world
    if share.members is None:
        world.doing = "idle, by the plan"
        word: dict[str, Any] | None = world.sleep_until_released(asked)
        return word
    assert share.trainer is not None and past.profile is not None
    if rebalancer is not None:
        rebalancer.begin(share)
    dataset = setting.material.dataset if setting.material is not None else None
    described = {**metadata, "plan": plan_to_dict(share.plan)}
    directory = setting.run_dir / "checkpoints"
    with _passed_on(world, share):
        with beside_steps(setting, past, share.trainer, books) as beside:
            loop = Loop(
                share.trainer,
                setting.job,
                share.own_plan,
                dataset,
                directory,
                described,
                books,
                asked,
                rebalancer,
                beside,
            )
            loop.record = Recorder(
                share.trainer,
                share.members,
                setting.transport,
                setting.run_dir,
                books.state.step,
                setting.job.train.steps,
            )
            with _watchdog(setting, share.members, share.trainer) as watchdog:
                show_plan(shown[1], setting, past.profile, share.plan, watchdog)
                done = loop.run(*shown)
        if rebalancer is not None:
            rebalancer.end()
        if done:
            return None
        plan = rebalancer.chosen() if rebalancer is not None else None
        word = {"plan": plan_to_dict(plan), "books": books.to_dict()} if plan is not None else None
        word = share.members.broadcast_json(word)
    world.release(_idle(world, share), None, word)
    return word


def _end(setting: Setting, share: Share, profile: ClusterProfile, result: LoopResult) -> None:
    """What the run leaves behind. Collective over the active ranks."""
    assert share.members is not None and share.trainer is not None
    if share.emulation is not None:
        say(*punctuality_lines(share.members, share.emulation))
    share.members.doing = "writing the result"
    result_directory = _write_result(setting, share.trainer)
    if setting.world.rank == 0:
        _say_end(setting, share.plan, profile, result, result_directory)


def _asked(everybody: World, stop: StopRequest) -> Callable[[], bool]:
    """Whether this rank has been asked to end the run; on rank 0 also, whether an idle rank has."""

    def asked() -> bool:
        return stop() or everybody.asked()

    return asked


def _watchdog(setting: Setting, world: World, trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    cluster = setting.job.cluster
    scale = cluster.time_scale if cluster.emulate is not None else 1.0
    limit = limit_s(cluster.watchdog_s, scale * trainer.plan.predicted_step_s)
    if limit == 0 or not cluster.communication_thread or world.thread_level != "multiple":
        return contextlib.nullcontext()
    assert isinstance(setting.transport, MpiTransport)
    lookout = Lookout(world, trainer, setting.transport)
    return Watchdog(world, limit, lookout.look, lookout.forgive)


def _metadata(setting: Setting, profile: ClusterProfile) -> dict[str, Any]:
    """What every checkpoint says of the run, besides the plan of its moment."""
    assert setting.material is not None
    return {
        "data_fingerprint": setting.material.dataset.fingerprint(),
        "job": job_to_dict(setting.job),
        "profile": profile_to_dict(profile),
        "model_config": setting.chain.config.to_dict(),
        "base_model": str(base) if (base := model_directory(setting.loaded)) is not None else None,
        "seed": setting.job.train.seed,
        "versions": own_versions(setting.world.library),
    }


def _write_result(setting: Setting, trainer: Trainer) -> Path:
    """The model or the adapter, and a sample where the job asks for one. Collective; returns the directory."""
    job, tokenizer = setting.job, setting.material.tokenizer if setting.material is not None else None
    directory = setting.run_dir / ("model" if setting.tuning.full else "adapter")
    if setting.tuning.full:
        save_model(trainer, directory, job.output.shard_bytes, tokenizer)
    else:
        save_adapter(trainer, directory, _base_model(setting), tokenizer)
    write_sample(trainer, setting.loaded, tokenizer, setting.run_dir)
    return directory


def _base_model(setting: Setting) -> str | None:
    """What an adapter is said to belong to: the hub id where the job gives one, which travels, else the directory."""
    path = setting.job.model.path
    if path is not None and is_hub_id(path, setting.loaded.resolve(path)):
        return path
    directory = model_directory(setting.loaded)
    return str(directory) if directory is not None else None


def _say_end(setting: Setting, plan: Plan, profile: ClusterProfile, result: LoopResult, result_directory: Path) -> None:
    assert setting.material is not None
    written = {result_directory.name: result_directory}
    if result.last_checkpoint is not None:
        written["checkpoint"] = result.last_checkpoint
    written |= files_of(setting) | {"metrics": setting.run_dir / "metrics.jsonl", "logs": setting.run_dir / "logs"}
    entropy = setting.material.dataset.unigram_entropy()
    say(*final_lines(plan, profile, result.steps, result.evaluations, entropy, written))
    if result.skipped:
        say(f"{result.skipped} steps were skipped, since their gradients were not finite")
