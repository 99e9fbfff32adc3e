"""The command ``train``: from a job file to a trained model, on all ranks.

Rank 0 reads the job and the data, profiles with all others, plans, and tells everybody; then each rank builds its own layers
and runs its own actions. Ranks that the plan leaves idle sleep until the end.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

import hetero_mpi
from hetero_mpi.checkpoint import CheckpointReader, set_aside
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.versions import MUST_MATCH, own_versions
from hetero_mpi.comm.world import CollectiveUserError, World
from hetero_mpi.device.backend import Backend, best_dtype, open_backend, own_cores, set_threads
from hetero_mpi.errors import UserError
from hetero_mpi.job import Job, LoadedJob, job_from_dict, job_to_dict, load_job, run_directory
from hetero_mpi.model.adapter_files import check_adapter
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.families import read_config
from hetero_mpi.model.tuning import Tuning, tuning_of
from hetero_mpi.model.weights import SeededStart, Start
from hetero_mpi.planning.files import plan_to_dict, profile_to_dict
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.profiling.cluster import Subject
from hetero_mpi.report.logs import say, setup_logging
from hetero_mpi.report.metrics import MetricsWriter
from hetero_mpi.report.progress import Progress
from hetero_mpi.report.run_directory import claim
from hetero_mpi.report.summary import final_lines
from hetero_mpi.report.tables import plan_lines, profile_lines
from hetero_mpi.training.files import FileSupply, open_files
from hetero_mpi.training.loop import Loop, LoopResult
from hetero_mpi.training.material import Material, model_directory, prepare
from hetero_mpi.training.planned import Given, micro_batch_choices, obtain_plan, obtain_profile, request_of
from hetero_mpi.training.sample import write_sample
from hetero_mpi.training.saving import (
    RunState,
    check_fits,
    find_checkpoint,
    load_adapter,
    restore,
    save_adapter,
    save_model,
)
from hetero_mpi.training.trainer import Trainer, active_ranks


@dataclass(frozen=True)
class Options:
    """The command line of ``train``."""

    job: Path
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: str | None = None
    plan: Path | None = None
    profile: Path | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Setting:
    """What every rank knows before planning."""

    world: World
    transport: Transport
    loaded: LoadedJob
    run_dir: Path
    material: Material | None
    """On rank 0 only."""
    chain: Chain
    tuning: Tuning
    backend: Backend
    cores: float
    """CPU cores this rank can count on; under 1 ranks share cores."""
    threads: int

    @property
    def job(self) -> Job:
        return self.loaded.job


def train(world: World, options: Options) -> int:
    """Run a job. Collective; returns the exit code.

    Raises:
        UserError: anything the user can put right, on all ranks together.
    """
    loaded, run_dir = _read_job(world, options)
    with _claimed(world, run_dir):
        setup_logging(run_dir, world.rank, world.size)
        transformers_logging.disable_progress_bar()  # rank 0 alone talks, and says what it loads
        world.check_versions(own_versions(world.library), MUST_MATCH)
        transport = MpiTransport(world.comm, threaded=loaded.job.cluster.communication_thread)
        with transport:
            setting = _set_up(world, transport, loaded, run_dir)
            _train(setting, options)
    return 0


def _train(setting: Setting, options: Options) -> None:
    world = setting.world
    profile, plan, schedule = _plan(setting, Given(options.profile, options.plan))
    if options.dry_run:
        say("Dry run: stopping before any weight is read")
        return
    active = active_ranks(plan)
    members = world.subset(active)
    if members is None:
        world.doing = "idle, by the plan"
        world.sleep_until_released()
        return
    problem: CollectiveUserError | None = None
    try:
        _train_active(setting, members, profile, plan, schedule, options)
    except CollectiveUserError as error:
        problem = error
    world.release([rank for rank in range(world.size) if rank not in active], problem)
    if problem is not None:
        raise problem


def _train_active(
    setting: Setting, world: World, profile: ClusterProfile, plan: Plan, schedule: Schedule, options: Options
) -> None:
    """The part of a run that idle ranks sleep through. ``world`` holds the active ranks."""
    rank = setting.world.rank
    with contextlib.ExitStack() as stack:
        checkpoint, reader, state = _open_checkpoint(setting, world, options, stack)
        trainer = _build(setting, world, plan, schedule, resuming=checkpoint is not None)
        if checkpoint is not None:
            world.doing = "restoring the checkpoint"
            restore(trainer, reader, state)
        elif setting.job.adapter.path is not None:
            _start_adapter(setting, world, trainer)
    metadata = _metadata(setting, plan, profile) if rank == 0 else {}
    dataset = setting.material.dataset if setting.material is not None else None
    loop = Loop(trainer, setting.job, plan, dataset, setting.run_dir / "checkpoints", metadata, state, checkpoint)
    with contextlib.ExitStack() as stack:
        metrics = display = None
        if rank == 0:
            metrics = stack.enter_context(MetricsWriter(setting.run_dir / "metrics.jsonl", state.step))
            display = stack.enter_context(Progress(setting.job.train.steps, state.step))
        result = loop.run(metrics, display)
    world.doing = "writing the result"
    tokenizer = setting.material.tokenizer if setting.material is not None else None
    if setting.tuning.full:
        save_model(trainer, setting.run_dir / "model", setting.job.output.shard_bytes, tokenizer)
    else:
        base = model_directory(setting.loaded)
        save_adapter(trainer, setting.run_dir / "adapter", str(base) if base is not None else None, tokenizer)
    write_sample(trainer, setting.loaded, tokenizer, setting.run_dir)
    if rank == 0:
        _say_end(setting, plan, profile, result)


def _read_job(world: World, options: Options) -> tuple[LoadedJob, Path]:
    """Rank 0 reads the job file; everybody gets the job. Only rank 0 need have the file."""
    shared: dict[str, Any] | None = None
    with world.together("reading the job"):
        if world.rank == 0:
            loaded = load_job(options.job, options.overrides)
            shared = {
                "job": job_to_dict(loaded.job),
                "path": str(loaded.path),
                "name": loaded.name,
                "directory": str(loaded.directory),
                "run_dir": str(run_directory(loaded, options.run_dir)),
            }
    shared = world.broadcast_json(shared)
    loaded = LoadedJob(job_from_dict(shared["job"]), Path(shared["path"]), shared["name"], Path(shared["directory"]))
    return loaded, Path(shared["run_dir"])


@contextlib.contextmanager
def _claimed(world: World, run_dir: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with world.together("claiming the run directory"):
            if world.rank == 0:
                stack.enter_context(claim(run_dir))
        yield


def _set_up(world: World, transport: Transport, loaded: LoadedJob, run_dir: Path) -> Setting:
    """Devices, data (rank 0) and the model's shape."""
    job, material = loaded.job, None
    cores = share_of_cores(world)
    threads = job.cluster.threads if isinstance(job.cluster.threads, int) else default_threads(cores)
    set_threads(threads)
    with world.together("opening the device"):
        backend = open_backend(job.cluster.device, world.local_rank)
    _say_ranks(world, backend, threads)
    loaded = _with_dtype(world, loaded, backend)
    job = loaded.job
    with world.together("preparing the data"):
        if world.rank == 0:
            material = prepare(loaded)
    keys = world.broadcast_json(material.config if material is not None else None)
    with world.together("reading the model's configuration"):
        chain = Chain(read_config(keys))
        tuning = tuning_of(job, chain)
    if material is not None:
        dataset = material.dataset
        say(*material.notes)
        say(f"data: {len(dataset.train):,} training and {len(dataset.held_out):,} held-out sequences of "
            f"{job.data.sequence_length} tokens")  # fmt: skip
    parameters = sum(spec.count for spec in chain.parameters.values())
    say(f"model: {chain.config.model_type}, {chain.blocks} blocks, {parameters:,} parameters, {job.train.dtype}")
    return Setting(world, transport, loaded, run_dir, material, chain, tuning, backend, cores, threads)


def _with_dtype(world: World, loaded: LoadedJob, backend: Backend) -> LoadedJob:
    """The job with its compute dtype settled, which must be one value for all ranks."""
    ranks = [(name, dtypes) for name, dtypes in world.all_gather_json([backend.name, list(backend.dtypes())])]
    wanted: str = loaded.job.train.dtype
    if wanted == "auto":
        wanted, reason = best_dtype(ranks)
        say(f"dtype {wanted}: {reason}")
    lacking = [f"rank {rank} ({name})" for rank, (name, dtypes) in enumerate(ranks) if wanted not in dtypes]
    if lacking:
        say(f"{', '.join(lacking)} cannot compute in {wanted} and will idle")
    table = loaded.job.train.model_copy(update={"dtype": wanted})
    return replace(loaded, job=loaded.job.model_copy(update={"train": table}))


def share_of_cores(world: World) -> float:
    """Cores this rank can count on: every core it may run on counts 1 / the ranks of this host that may run on it."""
    everyone = world.all_gather_json([world.host, own_cores()])
    users = Counter(core for host, cores in everyone if host == world.host for core in cores)
    return sum(1 / users[core] for core in own_cores())


def default_threads(cores: float) -> int:
    """Threads under "auto": what the user's environment says, else one for each whole core."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else max(1, int(cores))


def _say_ranks(world: World, backend: Backend, threads: int) -> None:
    rows = world.all_gather_json([world.host, backend.name, backend.description(), threads])
    say(f"hetero_mpi {hetero_mpi.__version__}, {world.library}, {world.size} rank{'s' if world.size > 1 else ''}")
    for rank, (host, name, description, count) in enumerate(rows):
        say(f"  rank {rank}: {host}, {name} ({description}), {count} thread{'s' if count > 1 else ''}")


def _plan(setting: Setting, given: Given) -> tuple[ClusterProfile, Plan, Schedule]:
    world, job = setting.world, setting.job
    choices, reason = micro_batch_choices(
        job.train.global_batch, job.train.micro_batch, world.size, setting.tuning.uses_dropout(setting.chain)
    )
    subject = Subject(
        setting.chain,
        setting.tuning,
        job.train,
        job.data.sequence_length,
        choices,
        setting.cores,
        setting.threads,
        job.cluster.memory_bytes,
    )
    profile = obtain_profile(
        world, setting.transport, setting.backend, setting.loaded, subject, setting.run_dir, given, say
    )
    say(*profile_lines(profile))
    plan, schedule = obtain_plan(world, profile, request_of(setting.loaded, choices), setting.run_dir, given)
    say(*plan_lines(plan, profile), reason)
    return profile, plan, schedule


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
    with world.together("opening the checkpoint"):
        if world.rank == 0:
            path, remarks = find_checkpoint(setting.run_dir, options.resume)
            say(*remarks)
            reader = stack.enter_context(CheckpointReader(path))
            check_fits(reader, path, setting.tuning, setting.job.train, setting.job.data.sequence_length)
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


def _build(setting: Setting, world: World, plan: Plan, schedule: Schedule, resuming: bool) -> Trainer:
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
        )


def _start_adapter(setting: Setting, world: World, trainer: Trainer) -> None:
    """Load the adapter the job starts from; only rank 0 needs its files."""
    assert setting.job.adapter.path is not None
    directory = setting.loaded.resolve(setting.job.adapter.path) if setting.world.rank == 0 else None
    with world.together("reading the adapter"):
        if directory is not None:
            check_adapter(directory, setting.tuning)
    load_adapter(trainer, directory)


def _open_files(setting: Setting, world: World, plan: Plan, directory: Path) -> FileSupply:
    cache = setting.job.model.shard_cache
    cache_root = setting.loaded.resolve(cache) if cache is not None else None
    return open_files(world, setting.world.rank, setting.transport, setting.chain, plan, directory, cache_root)


def _metadata(setting: Setting, plan: Plan, profile: ClusterProfile) -> dict[str, Any]:
    return {
        "job": job_to_dict(setting.job),
        "plan": plan_to_dict(plan),
        "profile": profile_to_dict(profile),
        "model_config": setting.chain.config.to_dict(),
        "base_model": str(base) if (base := model_directory(setting.loaded)) is not None else None,
        "seed": setting.job.train.seed,
        "versions": own_versions(setting.world.library),
    }


def _say_end(setting: Setting, plan: Plan, profile: ClusterProfile, result: LoopResult) -> None:
    assert setting.material is not None
    written = {"model": setting.run_dir / "model"}
    if result.last_checkpoint is not None:
        written["checkpoint"] = result.last_checkpoint
    written |= {"metrics": setting.run_dir / "metrics.jsonl", "logs": setting.run_dir / "logs"}
    entropy = setting.material.dataset.unigram_entropy()
    say(*final_lines(plan, profile, result.steps, result.evaluations, entropy, written))
    if result.skipped:
        say(f"{result.skipped} steps were skipped, since their gradients were not finite")
