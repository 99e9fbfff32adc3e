"""Where a start begins: with the job's own weights, from a checkpoint, from shards on hosts' disks, or from copies in memory.

All of these are versions of the trained state, which lie in parts at one rank or several (``state.checkpoint.directory.Part``):
rank 0 has checkpoints, the first rank of every host the shards on its disk, and after a loss the remaining ranks have copies in
memory. The newest version that is whole is taken, and reported:

    check_header  compares the header of the checkpoint with the job, before devices are opened and data are read
    find_start    finds the newest whole version; its readers compare checksums and job: a damaged shard is reported and left out,
                  and all choose again. Then the job's data are compared. Nothing has been measured yet
    begin         builds the stages of the plan, and moves the state from its readers to its holders (``redistribute.move``)

What a start writes, or moves aside, waits until it is accepted (``Pending``).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.job.load import LoadedJob, job_to_dict
from hetero_mpi.job.plan_request import micro_batch_choices
from hetero_mpi.job.rules import as_toml
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
from hetero_mpi.state.checkpoint import KINDS, CheckpointError, CheckpointReader, newest_good, set_aside, verify
from hetero_mpi.state.checkpoint.directory import (
    SHARDS_NAME,
    Part,
    keep_versions,
    new_run_id,
    newest_readable,
    newest_version,
    remove_shards,
    shards_on_disk,
)
from hetero_mpi.state.checkpoint.opening import damage_named
from hetero_mpi.state.redistribute import deliveries, parcels
from hetero_mpi.state.stored_state import (
    ANY,
    LATEST,
    VersionReader,
    check_data,
    check_fits,
    check_length,
    check_steps,
    check_train,
    find_checkpoint,
    rate_change,
    step_change,
    supervised,
)
from hetero_mpi.state.training_state import TrainingState, unpacked
from hetero_mpi.training.build import start_adapter, start_layers, start_magnitudes
from hetero_mpi.training.reconfigure import build_share, hand_over
from hetero_mpi.training.recovery import RunHistory
from hetero_mpi.training.reference_likelihoods import check_reference
from hetero_mpi.training.result import TrainResult, finished, shared
from hetero_mpi.training.setup.context import Pending, RunContext, Share, TrainOptions
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartState:
    """Where a start begins; the same on all ranks."""

    parts: tuple[Part, ...] = ()
    """Parts of the version that it goes on from; none: it begins anew."""
    state: dict[str, Any] = field(default_factory=dict)
    """The training state then, as ``TrainingState.to_dict`` returns it."""

    @property
    def having(self) -> dict[str, tuple[int, ...]]:
        """Name of a parameter or constant -> the ranks that can read its tensors."""
        found: dict[str, dict[int, None]] = {}
        for part in self.parts:
            for name in part.names:
                found.setdefault(name, {})[part.rank] = None
        return {name: tuple(ranks) for name, ranks in found.items()}


# -------------------------------------------------------------------------------------------------- before anything is measured
def check_header(world: World, loaded: LoadedJob, run_dir: Path, resume: str | None) -> TrainResult | None:
    """Look at the header of the checkpoint before anything is read or measured; the result of a run that is finished, and None
    where there is something to do. Collective. Raises CollectiveUserError: what the header says does not fit the job, or there is
    no checkpoint.
    """
    if resume is None:
        return None
    shards = any(world.all_gather_json(world.local_rank == 0 and bool(shards_on_disk(run_dir)[0])))
    past: TrainResult | None = None
    with world.led("looking at the checkpoint"):
        if world.rank == 0:
            newest = resume in (LATEST, ANY)
            path = newest_readable(run_dir / "checkpoints") if newest else Path(resume)
            if (path is None and resume == LATEST and not shards) or (path is not None and not path.exists()):
                find_checkpoint(run_dir, resume)  # says what is there instead
            with contextlib.suppress(CheckpointError):  # a damaged one is told, or passed over, when all of it is read
                if path is not None:
                    with CheckpointReader(path) as reader:
                        past = _look(reader, path, loaded, run_dir)
    return shared(world, past)


def _look(reader: CheckpointReader, path: Path, loaded: LoadedJob, run_dir: Path) -> TrainResult | None:
    train, step = loaded.job.train, reader.metadata["step"]
    check_train(reader, path, train)
    check_length(reader, path, loaded.job.data.sequence_length)
    if train.epochs is not None:
        return None  # how many steps they are is not known before the data are read
    check_steps(path, step, train)
    if _described(reader.metadata["job"]) != _described(job_to_dict(loaded.job)):
        return None  # whether it is the same run shows when model and data are there
    return finished(reader.metadata, path, loaded.job, run_dir)


def _described(job: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job that decide what is trained, on what and how; but for the dtype, which may have to be settled yet."""
    told = {table: job.get(table) for table in ("model", "adapter", "tokenizer", "data", "train")}
    return {**told, "train": {**(told["train"] or {}), "dtype": None}}


def find_start(
    context: RunContext, history: RunHistory, options: TrainOptions, pending: Pending
) -> tuple[StartState, TrainResult | None]:
    """(where this start begins, the result of a run that is finished). Collective over all ranks; nobody may be writing shards.
    Raises CollectiveUserError: there is no such state, or this run would not continue it.
    """
    world, resume, run_dir = context.world, options.resume, context.run_dir
    begun, kept = None, None
    if history.losses:
        begun = next((one for one in world.all_gather_json(history.begun) if one is not None), None)
    parts = _in_memory(world, history, begun) + _checkpoint(context, history, resume, begun)
    if resume in (LATEST, ANY) or (begun is not None and supervised()):
        shards = _shards(world, run_dir)
        latest = begun or max((part.begun for part in (*parts, *shards)), default="")
        parts, kept = _undamaged(context, parts + [shard for shard in shards if shard.begun == latest])
        if world.local_rank == 0 and shards:
            # Nobody's work is removed where nothing fits: a mistake in the job may be the reason.
            stay = {shard.version_id for shard in shards} if kept is None else {kept}
            pending.add(partial(keep_versions, run_dir, stay, sweep=True))
    elif not history.losses:
        pending.add(partial(remove_shards, run_dir))  # of a run that this one does not continue
    chosen = newest_version(parts, _needed(context))
    start, past = _accepted(context, history, chosen, pending) if chosen else (StartState(), None)
    if past is None and not history.shared(world, history.state):
        _make_room(context, options, bool(chosen), pending)
    if begun is None:
        begun = chosen[0].begun if chosen and resume in (LATEST, ANY) else ""
        begun = world.broadcast_json(begun or new_run_id(_earlier_runs(world, run_dir)))
    history.begun, history.kept_version = begun, kept
    return start, past


def _needed(context: RunContext) -> set[str]:
    return {*context.tuning.trainable, *context.tuning.constants}


def _in_memory(world: World, history: RunHistory, begun: str | None) -> list[Part]:
    """The versions that ranks have in memory from an earlier attempt. Collective."""
    own = [version.part(world.rank, begun or "").to_row() for version in history.versions]
    return [Part.from_row(row) for rows in world.all_gather_json(own) for row in rows]


def _checkpoint(context: RunContext, history: RunHistory, resume: str | None, begun: str | None) -> list[Part]:
    """Rank 0's checkpoint: the one that is named, or the newest whole one; after deaths the newest of this run. Collective. Raises
    CollectiveUserError: the one that is named is not there, or damaged. ``begun``: of the run, after deaths: a new rank 0 may find
    checkpoints of another run on its disk.
    """
    found: list[list[Any]] = []
    with context.world.led("opening the checkpoint"):
        if context.world.rank == 0:
            path: Path | None = None
            if history.losses and history.token is not None:
                path, _ = newest_good(context.run_dir / "checkpoints")
                path = path if path is not None and _metadata(path).get("run") == history.token else None
            if path is None and resume in (LATEST, ANY):
                path, skipped = newest_good(context.run_dir / "checkpoints")
                say(*(f"passed over {damaged}: {reason}" for damaged, reason in skipped))
            elif path is None and resume is not None:
                path, _ = find_checkpoint(context.run_dir, resume)
            said = _metadata(path) if path is not None else {}
            foreign = begun is not None and resume in (LATEST, ANY) and said.get("begun") not in (None, begun)
            if path is not None and not foreign:
                part = Part(0, path, "", said["step"], said.get("begun") or "", 0, frozenset(_needed(context)))
                found.append(part.to_row())
    return [Part.from_row(row) for row in context.world.broadcast_json(found)]


def _metadata(path: Path) -> dict[str, Any]:
    with CheckpointReader(path) as reader:
        return reader.metadata


def _shards(world: World, run_dir: Path) -> list[Part]:
    """The shards on all hosts. Collective. Hosts that share a disk list the same ones: each counts once, for the first rank."""
    shards, remarks = shards_on_disk(run_dir, world.rank) if world.local_rank == 0 else ([], [])
    rows = world.all_gather_json([[shard.to_row() for shard in shards], remarks])
    for host, (_, said) in zip(world.hosts, rows, strict=True):
        say(*(f"{host}: {remark}" for remark in said))
    found: dict[tuple[str, int], Part] = {}
    for shard in (Part.from_row(row) for listed, _ in rows for row in listed):
        found.setdefault((shard.version_id, shard.writer), shard)
    return list(found.values())


def _earlier_runs(world: World, run_dir: Path) -> list[str]:
    """Ids of the runs of which there is a trace on any host. Collective."""
    own = [str(shard.begun) for shard in shards_on_disk(run_dir)[0]] if world.local_rank == 0 else []
    if world.rank == 0:
        own.append(str(run_json(run_dir / RUN_NAME).get("run_id")))
    return [run_id for of_rank in world.all_gather_json(own) for run_id in of_rank]


def _undamaged(context: RunContext, parts: list[Part]) -> tuple[list[Part], str | None]:
    """(the parts but for shards of the newest version that cannot be used, the id of the newest whole version on disks).
    Collective.
    """
    world, needed = context.world, _needed(context)
    while True:
        own = [part for part in newest_version(parts, needed) if part.is_shard and part.rank == world.rank]
        damaged = [[str(shard.path), reason] for shard in own if (reason := _damage(context, shard)) is not None]
        told = world.all_gather_json(damaged)
        if not any(told):
            on_disk = newest_version([part for part in parts if part.is_shard], needed)
            return parts, on_disk[0].version_id if on_disk else None
        for host, of_rank in zip(world.hosts, told, strict=True):
            say(*(f"{host}: passed over {path}: {reason}" for path, reason in of_rank))
        bad = {(rank, path) for rank, of_rank in enumerate(told) for path, _ in of_rank}
        parts = [part for part in parts if (part.rank, str(part.path)) not in bad]


def _damage(context: RunContext, shard: Part) -> str | None:
    """Why a shard cannot be used; None: it can. Reads every byte, and compares the job."""
    assert shard.path is not None
    reason = verify(shard.path)
    if reason is None:
        try:
            _check_fits(context, shard.path, shard.names)
        except UserError as error:
            return str(error)
    return reason


def _check_fits(context: RunContext, path: Path, names: frozenset[str] | None = None) -> None:
    job = context.job
    with CheckpointReader(path) as reader:
        check_fits(reader, path, context.chain, context.tuning, job.train, job.data.sequence_length, names)


def _accepted(
    context: RunContext, history: RunHistory, chosen: list[Part], pending: Pending
) -> tuple[StartState, TrainResult | None]:
    """(the start that goes on from a version, after that was compared with the job; the result of a run that is finished).
    Collective. Raises CollectiveUserError: this run would not continue the version.
    """
    world, first, past = context.world, chosen[0], None
    with VersionReader(world.rank, chosen, history.versions) as reader:
        said = world.broadcast_json(reader.metadata() if world.rank == first.rank else None, root=first.rank)
    if first.path is None:
        return StartState(tuple(chosen), said["state"]), None
    state = said["state"]
    with world.led("comparing the stored state with the job"):
        if world.rank == 0:
            where = context.run_dir / SHARDS_NAME if first.is_shard else first.path
            if not first.is_shard:
                _check_fits(context, first.path)
            if not _same_data(context, where, said):
                state["reference"] = None
            if first.is_shard:
                state |= _newest_named(context, chosen, pending)
            else:
                state["last_checkpoint"] = str(first.path)
                past = finished(_metadata(first.path), first.path, context.job, context.run_dir)
                if past is None:
                    say(f"Resuming from {first.path}, after step {first.step}")
            pending.add(partial(set_later_aside, context.run_dir, first.step))
    return StartState(tuple(chosen), world.broadcast_json(state)), shared(world, past)


def _newest_named(context: RunContext, chosen: list[Part], pending: Pending) -> dict[str, Any]:
    """Report that the run goes on from shards; the training state's entries for the newest whole checkpoint. On rank 0."""
    world, step = context.world, chosen[0].step
    good, _ = newest_good(context.run_dir / "checkpoints")
    hosts = list(dict.fromkeys(world.hosts[part.rank] for part in chosen))
    other = f"the newest checkpoint here is {good}" if good is not None else "there is no checkpoint here"
    text = f"Going on after step {step}, from copies on the disks of {', '.join(hosts)}; {other}"
    say(text)
    pending.add(partial(append_event, context.run_dir, "copies", text, step=step, hosts=hosts))
    newest = str(good) if good is not None else None
    return {"last_checkpoint": newest, "good_checkpoint": newest}


def _same_data(context: RunContext, path: Path, said: Mapping[str, Any]) -> bool:
    """Refuse a stored state that this run would not continue; else report what is other than then, and return whether the data are
    the same. On rank 0.

    Args:
        path: where the state is.
        said: as ``VersionReader.metadata`` returns it.
    """
    train, step = context.job.train, said["state"]["step"]
    assert context.dataset is not None
    then, now = said["data_fingerprint"], context.dataset.fingerprint()
    say(*filter(None, [check_data(then, path, now, context.job.checkpoint.allow_other_data)]))
    check_reference(train, context.dataset, unpacked(said["state"]["reference"]) if then == now else None)
    check_steps(path, step, train)
    with damage_named(path, "metadata/job"):
        changes = [told(said["job"]["train"], train, step) for told in (rate_change, step_change)]
        changes.append(_other_change(said["job"], context, step))
    say(*filter(None, changes))
    return then == now


def _other_change(then: Mapping[str, Any], context: RunContext, step: int) -> str | None:
    """A remark if the job has changed the dropout of an adapter, the place of its base, whose weights are in no checkpoint, or the
    sequences that masks are drawn for; else None. ``then``: the job's tables when the state after ``step`` steps was written.
    """
    job, told = context.job, []
    if job.adapter.method != "none":
        dropout, base = then["adapter"].get("dropout", 0.0), then["model"].get("path")
        if job.adapter.dropout != dropout:
            told.append(f"[adapter] dropout is {as_toml(job.adapter.dropout)}, was {as_toml(dropout)}")
        if job.model.path != base and job.model.path is not None and base is not None:
            text = f'[model] path is "{job.model.path}", was "{base}"'
            told.append(f"{text}: the run goes on as it was only if the weights there are the same")
    if context.tuning.uses_dropout(context.chain):
        sizes = then["train"].get("micro_batch", "auto"), job.train.micro_batch
        before, now = (micro_batch_choices(job.train.global_batch, size, 1, True)[0][0] for size in sizes)
        if now != before:
            text = f"dropout masks are drawn for {now} sequences at a time, were for {before}"
            told.append(f"{text} ([train] micro_batch)")
    return f"From step {step + 1} on {'; '.join(told)}" if told and step < job.train.steps else None


def _make_room(context: RunContext, options: TrainOptions, found: bool, pending: Pending) -> None:
    """Move an earlier run in the run directory aside, once this start is accepted, unless this one continues it. Collective.
    ``found``: there is a state to go on from. Raises CollectiveUserError: there is none, but there must be; or this run reads files
    of the earlier one.
    """
    resume, run_dir, job = options.resume, context.run_dir, context.job
    with context.world.led("looking at the run directory"):
        if context.world.rank != 0:
            return
        if resume == LATEST and not found:
            find_checkpoint(run_dir, resume)  # says what is there instead
        if resume == ANY and not found:
            say("There is no checkpoint, and no whole copy of the trained state: beginning anew")
        named = Path(resume) if resume not in (None, LATEST, ANY) else None
        if found and (named is None or named.resolve().is_relative_to(run_dir.resolve())):
            return
        own = [job.model.path, job.adapter.path, job.tokenizer.path]
        read = [context.loaded.resolve(text) for text in own if text is not None]
        read += [path for path in (options.plan, options.profile) if isinstance(path, Path)]
        if holds_run(run_dir):
            refuse_files_of_run(run_dir, read)
            pending.add_first(
                lambda: say(f"The earlier run in {run_dir} is in {set_run_aside(run_dir, own_event)} now, whole")
            )


def set_later_aside(run_dir: Path, step: int) -> None:
    """Move checkpoints of steps after ``step`` aside, with a copy of the metrics of those steps. On rank 0."""
    try:
        aside = set_aside(run_dir / "checkpoints", step)
    except OSError as error:
        raise UserError(
            "resume.not_archived",
            f"{run_dir} holds checkpoints of after step {step}, which could not be moved aside ({error.strerror}): make room "
            f"there, or move them yourself",
        ) from None
    if aside is not None:
        for name in ("metrics.jsonl", "steps.jsonl"):
            with contextlib.suppress(OSError):  # not there, or no room for a copy
                shutil.copy2(run_dir / name, aside / name)
        say(f"Checkpoints of an earlier run from after step {step} are in {aside} now")


# ------------------------------------------------------------------------------------------------------------- under the plan
def begin(
    context: RunContext, history: RunHistory, report: PlanReport, start: StartState
) -> tuple[Share, TrainingState]:
    """This rank's share of the plan, with the state to begin with. Collective over all ranks. Raises CollectiveUserError: a rank
    cannot build its stage, or start weights cannot be read.
    """
    world, job, begun_s = context.world, context.job, time.perf_counter()
    if not start.parts:
        state = TrainingState.initial(job.train.dtype)
        share = build_share(context, report, state, brought=context.chain.start_is_sent)
        share = replace(share, seconds={"build": time.perf_counter() - begun_s})
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
    state = TrainingState.from_dict(start.state, history.state)
    share = build_share(context, report, state)
    share = replace(share, seconds={"build": time.perf_counter() - begun_s})
    world.doing = "bringing back the trained state"
    having = start.having
    listed = deliveries(parcels(context.tuning, report.plan, KINDS), lambda parcel: having[parcel.name])
    with VersionReader(world.rank, start.parts, history.versions) as reader:
        received = hand_over(context, share, listed, reader.tensor, state)
    _LOG.info("the state after step %d is back; %d bytes received", state.step, received)
    if start.parts[0].path is None:
        say(f"Going on after step {state.step}, from copies in memory")
    return share, state
