"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data, profiles with all others, plans, and tells everybody; then each rank builds its own layers
and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hetero_mpi.checkpoint import CheckpointReader, set_aside
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.versions import MUST_MATCH, own_versions
from hetero_mpi.comm.world import CollectiveUserError, World
from hetero_mpi.errors import ExitCode, UserError
from hetero_mpi.job import job_to_dict
from hetero_mpi.model.adapter_files import check_adapter
from hetero_mpi.model.hub import is_hub_id
from hetero_mpi.model.weights import SeededStart, Start
from hetero_mpi.planning.files import plan_to_dict, profile_to_dict
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.report.logs import say, setup_logging
from hetero_mpi.report.metrics import MetricsWriter
from hetero_mpi.report.progress import Progress
from hetero_mpi.report.summary import final_lines
from hetero_mpi.training.emulation import Emulation, emulate, punctuality_lines
from hetero_mpi.training.files import FileSupply, open_files
from hetero_mpi.training.loop import Loop, LoopResult
from hetero_mpi.training.material import model_directory
from hetero_mpi.training.places import active_ranks
from hetero_mpi.training.planned import Given
from hetero_mpi.training.rehearsal import rehearse
from hetero_mpi.training.sample import write_sample
from hetero_mpi.training.saving import (
    RunState,
    check_data,
    check_fits,
    find_checkpoint,
    load_adapter,
    restore,
    save_adapter,
    save_model,
)
from hetero_mpi.training.setup import Options, Setting, claimed, plan_run, read_job, set_up
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.training.trainer import Trainer
from hetero_mpi.training.watchdog import Lookout, Watchdog, limit_s

_LOG = logging.getLogger(__name__)


def train(world: World, options: Options) -> int:
    """Run a job. Collective; returns the exit code.

    Raises:
        UserError: anything the user can put right, on all ranks together.
    """
    loaded, run_dir = read_job(world, options)
    with StopRequest() as stop, claimed(world, run_dir):
        setup_logging(run_dir, world.rank, world.size)
        transformers_logging.disable_progress_bar()  # rank 0 alone talks, and says what it loads
        _LOG.info("process %d on %s", os.getpid(), world.host)  # some launchers name a dead rank by its process only
        world.check_versions(own_versions(world.library), MUST_MATCH)
        transport = MpiTransport(world.comm, threaded=loaded.job.cluster.communication_thread)
        with transport:
            setting = set_up(world, transport, loaded, run_dir)
            _train(setting, options, stop)
    return ExitCode.DONE


def _train(setting: Setting, options: Options, stop: StopRequest) -> None:
    world = setting.world
    profile, plan, schedule = plan_run(setting, Given(options.profile, options.plan, options.reprofile))
    if options.dry_run:
        say("Dry run: stopping before any weight is read")
        return
    emulation = None
    if setting.job.cluster.emulate is not None:
        emulation = emulate(world, setting.transport, setting.loaded, setting.chain, profile, plan, setting.cores)
    active = active_ranks(plan)
    members = world.subset(active)
    if members is None:
        world.doing = "idle, by the plan"
        with stop.noting():
            world.sleep_until_released(stop)
        return
    problem: CollectiveUserError | None = None
    try:
        _train_active(setting, members, profile, plan, schedule, options, emulation, stop)
    except CollectiveUserError as error:
        problem = error
    world.release([rank for rank in range(world.size) if rank not in active], problem)
    if problem is not None:
        raise problem


def _train_active(
    setting: Setting,
    world: World,
    profile: ClusterProfile,
    plan: Plan,
    schedule: Schedule,
    options: Options,
    emulation: Emulation | None,
    stop: StopRequest,
) -> None:
    """The part of a run that idle ranks sleep through. ``world`` holds the active ranks."""
    rank = setting.world.rank
    own_plan = emulation.stand_in_plan if emulation is not None else plan
    with contextlib.ExitStack() as stack:
        checkpoint, reader, state = _open_checkpoint(setting, world, options, stack)
        trainer = _build(setting, world, own_plan, schedule, emulation, resuming=checkpoint is not None)
        if checkpoint is not None:
            world.doing = "restoring the checkpoint"
            restore(trainer, reader, state)
        elif setting.job.adapter.path is not None:
            _start_adapter(setting, world, trainer)
    if emulation is not None:
        world.doing = "rehearsing"
        rehearse(trainer, world, emulation)
    metadata = _metadata(setting, plan, profile) if rank == 0 else {}
    dataset = setting.material.dataset if setting.material is not None else None
    asked = _asked(setting.world, stop)
    directory = setting.run_dir / "checkpoints"
    loop = Loop(trainer, setting.job, own_plan, dataset, directory, metadata, state, checkpoint, asked)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.noting())
        metrics = display = None
        if rank == 0:
            metrics = stack.enter_context(MetricsWriter(setting.run_dir / "metrics.jsonl", state.step))
            display = stack.enter_context(Progress(setting.job.train.steps, state.step))
        stack.enter_context(_watchdog(setting, world, trainer))
        result = loop.run(metrics, display)
    if emulation is not None:
        say(*punctuality_lines(world, emulation))
    world.doing = "writing the result"
    result_directory = _write_result(setting, trainer)
    if rank == 0:
        _say_end(setting, plan, profile, result, result_directory)


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


def _open_checkpoint(
    setting: Setting, world: World, options: Options, stack: contextlib.ExitStack
) -> tuple[Path | None, CheckpointReader | None, RunState]:
    """(path, open file on rank 0, where the run stands) of the checkpoint to resume from; nothing when starting anew."""
    checkpoints = setting.run_dir / "checkpoints"
    if options.resume is None:
        if world.rank == 0:
            _set_aside(checkpoints, 0)
        return None, None, RunState(0, [], 0)
    reader, shared = None, None
    with world.led("opening the checkpoint"):
        if world.rank == 0:
            path, remarks = find_checkpoint(setting.run_dir, options.resume)
            say(*remarks)
            reader = stack.enter_context(CheckpointReader(path))
            check_fits(reader, path, setting.tuning, setting.job.train, setting.job.data.sequence_length)
            assert setting.material is not None
            fingerprint = setting.material.dataset.fingerprint()
            say(*filter(None, [check_data(reader, path, fingerprint, setting.job.checkpoint.allow_other_data)]))
            step, losses = int(reader.metadata["step"]), [float(loss) for loss in reader.metadata["losses"]]
            if step > setting.job.train.steps:
                raise UserError(
                    f"{path} was written after step {step}, and the job ends at [train] steps = {setting.job.train.steps}: "
                    f"raise it, or resume from an earlier checkpoint"
                )
            say(f"Resuming from {path}, after step {step}")
            _set_aside(checkpoints, step)
            shared = {"path": str(path), "step": step, "losses": losses, "updates": int(reader.metadata["updates"])}
            shared["loss_scale"] = reader.metadata["loss_scale"]
    shared = world.broadcast_json(shared)
    return (
        Path(shared["path"]),
        reader,
        RunState(
            shared["step"],
            list(shared["losses"]),
            shared["updates"],
            (shared["loss_scale"][0], shared["loss_scale"][1]),
        ),
    )


def _set_aside(checkpoints: Path, step: int) -> None:
    aside = set_aside(checkpoints, step)
    if aside is not None:
        say(f"Checkpoints of an earlier run from after step {step} are in {aside} now")


def _build(
    setting: Setting, world: World, plan: Plan, schedule: Schedule, emulation: Emulation | None, resuming: bool
) -> Trainer:
    """This rank's trainer, with its start weights unless they come from a checkpoint."""
    start: Start | None = None
    files: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    directory = model_directory(setting.loaded)
    needs_start = not (resuming and setting.tuning.full)  # an adapter's checkpoint does not hold the model
    if needs_start and directory is None:
        start = SeededStart(setting.job.train.seed)
    elif needs_start and directory is not None:
        files = supply = _open_files(setting, world, plan, directory)
        start = supply.start
        world.doing = "sending the model's files to ranks without them"
        supply.serve()
    with world.together("loading weights"), files:
        return Trainer(
            setting.world.rank,
            world,
            setting.transport,
            setting.chain,
            setting.tuning,
            plan,
            schedule,
            setting.backend,
            setting.job.train,
            start,
            emulation,
        )


def _start_adapter(setting: Setting, world: World, trainer: Trainer) -> None:
    """Load the adapter the job starts from; only rank 0 needs its files."""
    assert setting.job.adapter.path is not None
    directory = setting.loaded.resolve(setting.job.adapter.path) if setting.world.rank == 0 else None
    with world.led("reading the adapter"):
        if directory is not None:
            check_adapter(directory, setting.tuning)
    load_adapter(trainer, directory)


def _open_files(setting: Setting, world: World, plan: Plan, directory: Path) -> FileSupply:
    cache = setting.job.model.shard_cache
    cache_root = setting.loaded.resolve(cache) if cache is not None else None
    return open_files(world, setting.world.rank, setting.transport, setting.chain, plan, directory, cache_root)


def _metadata(setting: Setting, plan: Plan, profile: ClusterProfile) -> dict[str, Any]:
    assert setting.material is not None
    return {
        "data_fingerprint": setting.material.dataset.fingerprint(),
        "job": job_to_dict(setting.job),
        "plan": plan_to_dict(plan),
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
    written |= {"metrics": setting.run_dir / "metrics.jsonl", "logs": setting.run_dir / "logs"}
    entropy = setting.material.dataset.unigram_entropy()
    say(*final_lines(plan, profile, result.steps, result.evaluations, entropy, written))
    if result.skipped:
        say(f"{result.skipped} steps were skipped, since their gradients were not finite")
