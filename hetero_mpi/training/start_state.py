"""Start a run from the job's weights, a checkpoint, shards on the hosts' disks, or copies in memory.

A version of the trained state has sources on one or more ranks (``directory.Source``): rank 0 reads checkpoints, the first rank of
each host reads its shards, and after a loss the remaining ranks have copies in memory. A run resumes from the newest complete
version:

    check_header  compares the checkpoint header with the job before devices are opened and data is read
    find_start    finds the newest complete version, skipping damaged shards, and compares it with the job and its data
    load_start    builds the stages of the plan and moves the state from its readers to its holders (``redistribute.move``)

Files are written and archived only once the start is accepted (``Pending``).
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.job.load import LoadedJob, job_to_dict
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import (
    RUN_NAME,
    append_event,
    holds_run,
    own_event,
    refuse_files_of_run,
    run_json,
    set_run_aside,
)
from hetero_mpi.state.directory import (
    ANY,
    LATEST,
    SHARDS_NAME,
    Source,
    find_checkpoint,
    keep_versions,
    newest_good,
    newest_readable,
    remove_shards,
    set_later_aside,
    shards_on_disk,
    supervised,
)
from hetero_mpi.state.hdf5 import KINDS, CheckpointError, damage_named
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.state.redistribute import tensor_shards, transfers
from hetero_mpi.state.resume_checks import (
    check_data,
    check_fits,
    check_length,
    check_steps,
    check_train,
    other_change,
    rate_change,
    step_change,
)
from hetero_mpi.state.state import State, StateReader, gather_sources, new_run_id, newest_version, share_state
from hetero_mpi.training.build import build_share, move_trained_state, start_adapter, start_layers, start_magnitudes
from hetero_mpi.training.recovery import RunHistory
from hetero_mpi.training.reference_likelihoods import check_reference
from hetero_mpi.training.result import TrainResult, past_result, share_past_result
from hetero_mpi.training.setup.context import Pending, RunContext, Share, TrainOptions
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------- before anything is measured
def check_header(world: World, loaded: LoadedJob, run_dir: Path, resume: str | None) -> TrainResult | None:
    """Check the checkpoint header before data is read; returns the result if the run is finished, else None. Collective.

    Raises:
        CollectiveUserError: The header does not match the job, or there is no checkpoint.
    """
    if resume is None:
        return None
    shards = any(world.all_gather_json(world.local_rank == 0 and bool(shards_on_disk(run_dir)[0])))
    past: TrainResult | None = None
    with world.on_leader("reading the checkpoint"):
        if world.rank == 0:
            newest = resume in (LATEST, ANY)
            path = newest_readable(run_dir / "checkpoints") if newest else Path(resume)
            if (path is None and resume == LATEST and not shards) or (path is not None and not path.exists()):
                find_checkpoint(run_dir, resume)  # its error lists the existing checkpoints
            with contextlib.suppress(CheckpointError):  # a full read reports or skips a damaged checkpoint
                if path is not None:
                    with CheckpointReader(path) as reader:
                        past = _read_past_result(reader, path, loaded, run_dir)
    return share_past_result(world, past)


def _read_past_result(reader: CheckpointReader, path: Path, loaded: LoadedJob, run_dir: Path) -> TrainResult | None:
    train, step = loaded.job.train, reader.metadata["step"]
    check_train(reader, path, train)
    check_length(reader, path, loaded.job.data.sequence_length)
    if train.epochs is not None:
        return None  # the number of steps depends on the data
    check_steps(path, step, train)
    if _described(reader.metadata["job"]) != _described(job_to_dict(loaded.job)):
        return None  # compared once model and data are available
    return past_result(reader.metadata, path, loaded.job, run_dir)


def _described(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's tables on model, data and training, without dtype and compile, which may still be unresolved."""
    tables = {table: job.get(table) for table in ("model", "adapter", "tokenizer", "data", "train")}
    return {**tables, "train": {**(tables["train"] or {}), "dtype": None, "compile": None}}


def find_start(
    context: RunContext, history: RunHistory, options: TrainOptions, pending: Pending
) -> tuple[State | None, TrainResult | None]:
    """Return the state to resume from and the result of a finished run, each None if there is none. Collective.

    No rank may be writing shards meanwhile. Raises CollectiveUserError if there is no state to resume from, or if this run would
    not continue it.
    """
    world, resume, run_dir = context.world, options.resume, context.run_dir
    run_id, version, newest = None, None, resume in (LATEST, ANY)
    if history.losses:
        run_id = next((value for value in world.all_gather_json(history.run_id) if value is not None), None)
    with_shards = newest or (run_id is not None and supervised())
    sources = _sources(context, history, resume, run_id, with_shards)
    if with_shards:
        latest = run_id or max((source.run_id for source in sources), default="")
        version_ids = {source.version_id for source in sources if source.is_shard}
        usable = [source for source in sources if not source.is_shard or source.run_id == latest]
        sources, version = _undamaged(context, usable)
        if world.local_rank == 0 and version_ids:
            # If no version fits, all stay: the job may contain a mistake.
            pending.add(partial(keep_versions, run_dir, version_ids if version is None else {version}, sweep=True))
    elif not history.losses:
        pending.add(partial(remove_shards, run_dir))  # of another run
    newest_sources = newest_version(sources, _needed_names(context))
    start, past = _accepted(context, history, newest_sources, pending) if newest_sources else (None, None)
    if past is None and not history.all_ranks_have(world, history.state):
        _archive_earlier_run(context, options, bool(newest_sources), pending)
    if run_id is None:
        run_id = newest_sources[0].run_id if newest_sources and newest else ""
        run_id = world.broadcast_json(run_id or new_run_id(_earlier_runs(world, run_dir)))
    history.run_id, history.kept_version = run_id, version
    return start, past


def _needed_names(context: RunContext) -> frozenset[str]:
    return frozenset({*context.tuning.trainable, *context.tuning.constants})


def _sources(
    context: RunContext, history: RunHistory, resume: str | None, run_id: str | None, with_shards: bool
) -> list[Source]:
    """Find the sources of all ranks. Collective. Raises CollectiveUserError if the named checkpoint is missing or damaged."""
    world = context.world
    local_sources = [version.source(world.rank, run_id or "") for version in history.versions]
    with world.on_leader("opening the checkpoint"):
        if world.rank == 0:
            local_sources += _checkpoint(context, history, resume, run_id)
    if with_shards:
        shards, skipped = shards_on_disk(context.run_dir, world.rank) if world.local_rank == 0 else ([], [])
        local_sources += shards
        _report_skipped(world, skipped)
    return gather_sources(world, local_sources)


def _checkpoint(context: RunContext, history: RunHistory, resume: str | None, run_id: str | None) -> list[Source]:
    """Find rank 0's checkpoint: the named or newest valid one; after a loss, the newest of this run if there is one.

    A new rank 0 may have checkpoints of another run. Raises UserError if the named checkpoint is missing or damaged.
    """
    newest, after_loss = resume in (LATEST, ANY), bool(history.losses) and history.token is not None
    path, skipped = newest_good(context.run_dir / "checkpoints") if newest or after_loss else (None, [])
    if not (after_loss and path is not None and _metadata(path).get("run") == history.token):
        if newest:
            say(*(f"skipped {damaged}: {reason}" for damaged, reason in skipped))
        else:
            path = find_checkpoint(context.run_dir, resume) if resume is not None else None
    if path is None:
        return []
    metadata = _metadata(path)
    if run_id is not None and newest and metadata.get("begun") not in (None, run_id):
        return []
    return [Source(0, path, "", metadata["step"], metadata.get("begun") or "", 0, _needed_names(context))]


def _metadata(path: Path) -> dict[str, Any]:
    with CheckpointReader(path) as reader:
        return reader.metadata


def _report_skipped(world: World, local_skips: Sequence[tuple[Path, str]]) -> set[tuple[int, str]]:
    """Report the files that any rank skipped, with reasons; returns their (rank, path). Collective."""
    rows = world.all_gather_json([[str(path), reason] for path, reason in local_skips])
    for host, of_rank in zip(world.hosts, rows, strict=True):
        say(*(f"{host}: skipped {path}: {reason}" for path, reason in of_rank))
    return {(rank, path) for rank, of_rank in enumerate(rows) for path, _ in of_rank}


def _earlier_runs(world: World, run_dir: Path) -> list[str]:
    """Collect the ids of earlier runs from all hosts. Collective."""
    local_run_ids = [shard.run_id for shard in shards_on_disk(run_dir)[0]] if world.local_rank == 0 else []
    if world.rank == 0:
        local_run_ids.append(str(run_json(run_dir / RUN_NAME).get("run_id")))
    return [run_id for of_rank in world.all_gather_json(local_run_ids) for run_id in of_rank]


def _undamaged(context: RunContext, sources: list[Source]) -> tuple[list[Source], str | None]:
    """Return the sources without unusable shards, and the id of the newest complete version in shards. Collective."""
    world, names = context.world, _needed_names(context)
    while True:
        local = [source for source in newest_version(sources, names) if source.is_shard and source.rank == world.rank]
        damaged = [
            (shard.path, reason)
            for shard in local
            if shard.path and (reason := _damage(context, shard.path, shard.names))
        ]
        unusable = _report_skipped(world, damaged)
        if not unusable:
            on_disk = newest_version([source for source in sources if source.is_shard], names)
            return sources, on_disk[0].version_id if on_disk else None
        sources = [source for source in sources if (source.rank, str(source.path)) not in unusable]


def _damage(context: RunContext, path: Path, names: frozenset[str]) -> str | None:
    """Return the reason why a shard is unusable, or None. Verifies the complete file and compares it with the job."""
    reason = verify(path)
    if reason is None:
        try:
            _check_fits(context, path, names)
        except UserError as error:
            return str(error)
    return reason


def _check_fits(context: RunContext, path: Path, names: frozenset[str] | None = None) -> None:
    job = context.job
    with CheckpointReader(path) as reader:
        check_fits(reader, path, context.chain, context.tuning, job.train, job.data.sequence_length, names)


def _accepted(
    context: RunContext, history: RunHistory, sources: list[Source], pending: Pending
) -> tuple[State, TrainResult | None]:
    """Compare a version with the job; returns its state and the result if the run is finished, else None. Collective."""
    world, first, past = context.world, sources[0], None
    with StateReader(world.rank, sources, history.versions) as reader:
        reads = world.rank == first.rank
        state = share_state(world, reader.state() if reads else None, first.rank)
        origin = world.broadcast_json(reader.origin() if reads else None, root=first.rank)
    if first.path is not None:
        with world.on_leader("comparing the stored state with the job"):
            if world.rank == 0:
                where = context.run_dir / SHARDS_NAME if first.is_shard else first.path
                if not first.is_shard:
                    _check_fits(context, first.path)
                same_data = _same_data(context, where, state, origin)
                good = _report_resume_from_shards(context, sources, pending) if first.is_shard else None
                newest = good if first.is_shard else first.path
                if not first.is_shard:
                    past = past_result(_metadata(first.path), first.path, context.job, context.run_dir)
                    if past is None:
                        say(f"Resuming from {first.path}, after step {first.step}")
                reference = state.reference if same_data else None
                state = replace(state, reference=reference, newest_checkpoint=newest, good_checkpoint=good)
                pending.add(partial(set_later_aside, context.run_dir, first.step))
        state, past = share_state(world, state if world.rank == 0 else None), share_past_result(world, past)
    return replace(state.after(history.state), sources=tuple(sources)), past


def _report_resume_from_shards(context: RunContext, sources: list[Source], pending: Pending) -> Path | None:
    """Report that the run resumes from shards; returns the newest valid checkpoint or None. Called on rank 0."""
    world, step = context.world, sources[0].step
    good, _ = newest_good(context.run_dir / "checkpoints")
    hosts = list(dict.fromkeys(world.hosts[source.rank] for source in sources))
    newest = f"the newest local checkpoint is {good}" if good is not None else "there is no local checkpoint"
    text = f"Continuing after step {step}, from copies on the disks of {', '.join(hosts)}; {newest}"
    say(text)
    pending.add(partial(append_event, context.run_dir, "copies", text, step=step, hosts=hosts))
    return good


def _same_data(context: RunContext, path: Path, state: State, origin: Mapping[str, Any]) -> bool:
    """Reject a stored state that this run would not continue, and report changes; returns whether the data is the same.

    Called on rank 0. ``path``: where the state is stored, for messages. ``origin``: the result of ``StateReader.origin``.
    """
    job, step = context.job, state.step
    assert context.dataset is not None
    then, now = origin.get("data_fingerprint"), context.dataset.fingerprint()
    say(*filter(None, [check_data(then, path, now, job.checkpoint.allow_other_data)]))
    check_reference(job.train, context.dataset, state.reference if then == now else None)
    check_steps(path, step, job.train)
    with damage_named(path, "metadata/job"):
        changes = [describe(origin["job"]["train"], job.train, step) for describe in (rate_change, step_change)]
        changes.append(other_change(origin["job"], job, context.tuning, context.chain, step))
    say(*filter(None, changes))
    return then == now


def _archive_earlier_run(context: RunContext, options: TrainOptions, has_state: bool, pending: Pending) -> None:
    """Schedule the archiving of an earlier run in the run directory, unless this run continues it. Collective.

    Raises CollectiveUserError if the state to resume from is missing, or if this run reads files of the earlier one.
    """
    resume, run_dir, job = options.resume, context.run_dir, context.job
    with context.world.on_leader("checking the run directory"):
        if context.world.rank != 0:
            return
        if resume == LATEST and not has_state:
            find_checkpoint(run_dir, resume)  # raises an error that names the existing checkpoints
        if resume == ANY and not has_state:
            say("No checkpoint and no complete copy of the trained state: starting from the beginning")
        named_path = Path(resume) if resume not in (None, LATEST, ANY) else None
        if has_state and (named_path is None or named_path.resolve().is_relative_to(run_dir.resolve())):
            return
        start_paths = [job.model.path, job.adapter.path, job.tokenizer.path]
        input_paths = [context.loaded.resolve(text) for text in start_paths if text is not None]
        input_paths += [path for path in (options.plan, options.profile) if isinstance(path, Path)]
        if holds_run(run_dir):
            refuse_files_of_run(run_dir, input_paths)
            pending.add_first(
                lambda: say(f"Moved the earlier run from {run_dir} to {set_run_aside(run_dir, own_event)}")
            )


# ------------------------------------------------------------------------------------------------------------- under the plan
def load_start(
    context: RunContext, history: RunHistory, report: PlanReport, start: State | None
) -> tuple[Share, State]:
    """Build this rank's share of the plan and load the state from which the run starts. Collective over all ranks.

    Raises CollectiveUserError if a rank cannot build its stage or read its weights.
    """
    world, job, begun_s = context.world, context.job, time.perf_counter()
    state = start or State.initial(job.train.dtype)
    share = build_share(context, report, state, state_moves=start is not None or context.chain.start_is_sent)
    share = replace(share, seconds={"build": time.perf_counter() - begun_s})
    if start is None:
        problem: CollectiveUserError | None = None
        if share.members is not None and share.trainer is not None:
            try:
                if job.adapter.path is not None:
                    start_adapter(context, share.members, share.trainer)
                elif context.chain.start_is_sent:
                    start_layers(context, share.members, share.trainer)
                elif job.adapter.dora:
                    start_magnitudes(share.trainer)
            except CollectiveUserError as error:
                problem = error
        world.share_problem(problem)
        return share, state
    world.current_action = "restoring the trained state"
    readers = start.readers()
    listed = transfers(tensor_shards(context.tuning, report.plan, KINDS), lambda shard: readers[shard.name])
    with StateReader(world.rank, start.sources, history.versions) as reader:
        received = move_trained_state(context, share, listed, reader.tensor, state)
    _LOG.info("restored the state after step %d; %d bytes received", state.step, received)
    if start.sources[0].path is None:
        say(f"Continuing after step {state.step}, from copies in memory")
    return share, state
