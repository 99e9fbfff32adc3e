"""Where a start begins: from copies in the memory of surviving ranks, from copies on hosts' disks, from a checkpoint, or from the
job.

After a death the surviving processes have copies in memory (``recovery``). A run that is started again has what is on disks and
rank 0's checkpoints. The newest state is taken, and reported. On disks the newest complete version of the state is found so:

    every host    lists the headers of its shards (its first rank reads them)
    all           choose the newest version of this run whose shards hold all tensors, if newer than the newest checkpoint
    its readers   compare checksums and job; a damaged shard is reported and left out, and all choose again
    all           the trained state goes from the readers to its holders, as always (``redistribute.move``)

A version is complete where shards with its id hold every tensor, on whichever hosts and written by however many ranks.
``state.copies`` writes the shards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, newest_good, verify
from hetero_mpi.checkpoint.directory import Shard, keep_versions, shards_on_disk
from hetero_mpi.errors import UserError
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.run_directory import append_event
from hetero_mpi.runtime.reconfigure import build_share, hand_over
from hetero_mpi.runtime.recovery import RunHistory
from hetero_mpi.runtime.resume import accept, later_aside, newest_checkpoint
from hetero_mpi.runtime.setup.context import RunContext, RunSetup, Share, TrainOptions
from hetero_mpi.runtime.setup.pending import Pending
from hetero_mpi.state.checkpointing import ANY, KINDS, LATEST, check_settings, check_shapes, check_train
from hetero_mpi.state.copies import Copies, newest_whole, supervised
from hetero_mpi.state.redistribute import Parcel, deliveries, parcels
from hetero_mpi.state.training_state import TrainingState, unpacked

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The state that an attempt goes on from: a version held in copies, or a checkpoint."""

    step: int
    having: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a parameter or constant -> the ranks that have copies of its tensors."""
    held: Copies | LocalVersion | None = None
    """This rank's copies."""
    checkpoint: Path | None = None
    """The checkpoint; None: there are copies."""


def origin(context: RunContext, history: RunHistory, options: TrainOptions, pending: Pending) -> Origin | None:
    """The newest state of the run; None: as the command line says, from a checkpoint or from the beginning. Collective over all
    ranks.
    """
    world, resumes = context.world, options.resume in (LATEST, ANY)
    if not history.losses and not resumes:
        return None
    begin = _left_by_survivors(context, history) if history.losses else None
    if history.losses:
        history.belongs_to(next((begun for begun in world.all_gather_json(history.begun) if begun is not None), None))
    known = None
    if history.losses and history.begun is not None:
        known = history.begun, begin.step if begin is not None else 0
    if not resumes and not (known is not None and supervised()):
        return begin
    found, kept_version = find_local_version(context, known, pending)
    history.keeps_on_disk(kept_version)
    if found is None:
        return begin
    history.belongs_to(found.begun)
    return Origin(found.step, having=found.having, held=found)


def _left_by_survivors(context: RunContext, history: RunHistory) -> Origin | None:
    """The newest version in memory, or a checkpoint of this run where that is newer."""
    world, tuning = context.world, context.tuning
    needed = {*tuning.trainable, *tuning.constants}
    found = newest_whole(world.all_gather_json(history.copies.inventory()), needed)
    saved: list[Any] | None = None
    newest = newest_checkpoint(context.run_dir) if world.rank == 0 and history.token is not None else None
    # A new rank 0 may find checkpoints of another run on its disk.
    if newest is not None and newest[1].get("run") == history.token:
        saved = [str(newest[0]), newest[1]["step"]]
    saved = world.broadcast_json(saved)
    if saved is not None and (found is None or saved[1] > found[0]):
        return Origin(int(saved[1]), checkpoint=Path(saved[0]))
    return Origin(found[0], having=found[1], held=history.copies) if found is not None else None


def bring_back(
    context: RunContext, history: RunHistory, report: PlanReport, begin: Origin, pending: Pending
) -> tuple[Share, TrainingState]:
    """This rank's share of the new plan, with the state of ``begin``, from copies. Collective over all ranks. Raises
    CollectiveUserError: a rank cannot build its stage; or copies on disk were made with other data.
    """
    assert begin.held is not None
    world, held, having, step = context.world, begin.held, begin.having, begin.step
    tuning = context.tuning
    with contextlib.ExitStack() as stack:
        if isinstance(held, LocalVersion):
            stood = _state_on_disk(context, stack.enter_context(held), pending)
        else:
            first = min(rank for ranks in having.values() for rank in ranks)
            stood = world.broadcast_json(held.state(step) if world.rank == first else None, root=first)
        state = TrainingState.from_dict(stood, history.state)
        share = build_share(context, report, state)
        listed = deliveries(parcels(tuning, report.plan, KINDS), lambda parcel: having[parcel.name])
        received = hand_over(context, share, listed, lambda parcel: held.tensor(step, parcel), state)
    _LOG.info("the state after step %d is back; %d bytes received", step, received)
    if not isinstance(held, LocalVersion):
        say(f"Going on after step {step}, from copies in memory")
    return share, state


def _state_on_disk(context: RunContext, held: LocalVersion, pending: Pending) -> dict[str, Any]:
    """The training state of a version on disk (``TrainingState.to_dict``), checked against the job's data and reported. Collective
    over all ranks.
    """
    world, first = context.world, held.givers[0]
    said: dict[str, Any] | None = None
    if world.rank == first:
        found = held.metadata()
        said = {key: found.get(key) for key in ("step", "job", "data_fingerprint", "training_state")}
        said["training_state"] |= {"losses": found["losses"].tolist(), "loss_scale": found["loss_scale"]}
    said = world.broadcast_json(said, root=first)
    newest: str | None = None
    with world.led("comparing the copies on disk with the job"):
        if world.rank == 0:
            accept(context, context.run_dir / "copies", said, unpacked(said["training_state"].get("reference")))
            pending.add(partial(later_aside, context.run_dir, held.step))
            good, _ = newest_good(context.run_dir / "checkpoints")
            newest = str(good) if good is not None else None
            hosts = list(dict.fromkeys(world.hosts[rank] for rank in held.givers))
            other = f"the newest checkpoint here is {good}" if good is not None else "there is no checkpoint here"
            text = f"Going on after step {held.step}, from copies on the disks of {', '.join(hosts)}; {other}"
            say(text)
            pending.add(partial(append_event, context.run_dir, "copies", text, step=held.step, hosts=hosts))
    newest = world.broadcast_json(newest)
    return {**said["training_state"], "last_checkpoint": newest, "good_checkpoint": newest}


@dataclass(frozen=True)
class ShardSource:
    """A shard, and the rank that can read it."""

    rank: int
    shard: Shard


class LocalVersion:
    """A complete version on the hosts' disks, of which this rank reads its shards. A context manager that holds the files open."""

    def __init__(self, chosen: Sequence[ShardSource], own: list[Shard]) -> None:
        shard = chosen[0].shard
        self.step, self.begun = shard.step, shard.begun
        self.having = _having(chosen)
        """Name -> the ranks that can read its tensors."""
        self.givers = sorted({source.rank for source in chosen})
        self._own = own
        self._open: dict[Path, CheckpointReader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalVersion:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, step: int, parcel: Parcel) -> torch.Tensor:
        """A parcel, from this rank's disk. See ``Copies.tensor``."""
        shard = next(shard for shard in self._own if parcel.name in shard.names)
        array, _ = self._reader(shard).read(parcel.kind, parcel.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def metadata(self) -> dict[str, Any]:
        return self._reader(self._own[0]).metadata

    def _reader(self, shard: Shard) -> CheckpointReader:
        if shard.path not in self._open:
            self._open[shard.path] = self._stack.enter_context(CheckpointReader(shard.path))
        return self._open[shard.path]


def find_local_version(
    setup: RunSetup, known: tuple[str, int] | None, pending: Pending
) -> tuple[LocalVersion | None, str | None]:
    """(the newest complete version on the present hosts, if newer than the best other state; the id of the one that is kept on the
    disks). Collective over all ranks; nobody may be writing shards.

    The id is that of the newest complete version, whether newer or not. If there is one, shards of all others are removed once the
    start is accepted.
    ``known``: (id, step) of the run that goes on, and of its best other state. None: that is the newest checkpoint, and versions of
    a run that began later than the checkpoint's are newer.
    """
    world, run_dir = setup.world, setup.run_dir
    shards, remarks = shards_on_disk(run_dir) if world.local_rank == 0 else ([], [])
    own = {shard.path: shard for shard in shards}
    rows = world.all_gather_json([[_row(shard) for shard in shards], remarks])
    for host, (_, said) in zip(world.hosts, rows, strict=True):
        say(*(f"{host}: {remark}" for remark in said))
    sources = [ShardSource(rank, _shard_of(row)) for rank, (listed, _) in enumerate(rows) for row in listed]
    if not sources:
        return None, None
    begun, above = known if known is not None else _newest_checkpoint(setup)
    latest = max(source.shard.begun for source in sources)
    if known is None and latest > (begun or ""):
        begun, above = latest, 0
    sources = _once([source for source in sources if source.shard.begun == begun])
    found, kept = _choose(setup, sources, above, own)
    if world.local_rank == 0:
        # Nobody's work is removed where nothing fits: a mistake in the job may be the reason.
        versions = [kept] if kept is not None else [shard.version_id for shard in shards]
        pending.add(partial(keep_versions, run_dir, versions, sweep=True))
    return found, kept


def _newest_checkpoint(setup: RunSetup) -> tuple[str | None, int]:
    """(id of its run, its step) of the newest checkpoint; (None, 0): there is none. Collective."""
    found: tuple[str | None, int] = None, 0
    with setup.world.led("looking for the newest checkpoint"):
        newest = newest_checkpoint(setup.run_dir) if setup.world.rank == 0 else None
        if newest is not None:
            found = newest[1].get("begun"), newest[1]["step"]
    begun, step = setup.world.broadcast_json(found)
    return begun, step


def _choose(
    setup: RunSetup, sources: list[ShardSource], above: int, own: Mapping[Path, Shard]
) -> tuple[LocalVersion | None, str | None]:
    """(the newest complete version if its step is later than ``above``, its id). All its shards have been read through."""
    world, tuning = setup.world, setup.tuning
    needed = {*tuning.trainable, *tuning.constants}
    while (chosen := newest_version(sources, needed)) is not None:
        kept = chosen[0].shard.version_id
        if chosen[0].shard.step <= above:
            return None, kept
        mine = [own[source.shard.path] for source in chosen if source.rank == world.rank]
        damaged = [[str(shard.path), reason] for shard in mine if (reason := _damage(setup, shard)) is not None]
        told = world.all_gather_json(damaged)
        if not any(told):
            return LocalVersion(chosen, mine), kept
        for host, of_rank in zip(world.hosts, told, strict=True):
            say(*(f"{host}: passed over {path}: {reason}" for path, reason in of_rank))
        bad = {(rank, path) for rank, of_rank in enumerate(told) for path, _ in of_rank}
        sources = [source for source in sources if (source.rank, str(source.shard.path)) not in bad]
    return None, None


def newest_version(sources: Sequence[ShardSource], needed: set[str]) -> list[ShardSource] | None:
    """The sources of the newest version that together hold all ``needed`` names; None: no version is complete."""
    for step in sorted({source.shard.step for source in sources}, reverse=True):
        of_step = [source for source in sources if source.shard.step == step]
        for version_id in sorted({source.shard.version_id for source in of_step}):
            chosen = [source for source in of_step if source.shard.version_id == version_id]
            if needed <= {name for source in chosen for name in source.shard.names}:
                return chosen
    return None


def _once(sources: Sequence[ShardSource]) -> list[ShardSource]:
    """``sources`` without duplicates. Hosts that share a disk list the same shards: each counts once, for the first rank that has
    it.
    """
    first: dict[tuple[str, int], ShardSource] = {}
    for source in sources:
        first.setdefault((source.shard.version_id, source.shard.writer), source)
    return list(first.values())


def _having(chosen: Sequence[ShardSource]) -> dict[str, tuple[int, ...]]:
    having: dict[str, dict[int, None]] = {}
    for source in chosen:
        for name in source.shard.names:
            having.setdefault(name, {})[source.rank] = None
    return {name: tuple(ranks) for name, ranks in having.items()}


def _damage(setup: RunSetup, shard: Shard) -> str | None:
    """Why a shard cannot be used; None: it can. Reads every byte, and compares the job."""
    reason = verify(shard.path)
    if reason is not None:
        return reason
    tuning = setup.tuning
    specs = [spec for name, spec in {**tuning.trainable, **tuning.constants}.items() if name in shard.names]
    try:
        with CheckpointReader(shard.path) as reader:
            check_train(reader, shard.path, setup.job.train)
            check_settings(reader, shard.path, setup.chain, setup.job.data.sequence_length)
            for spec in specs:
                check_shapes(reader, shard.path, tuning, spec)
    except (CheckpointError, UserError) as error:
        return str(error)
    return None


def _row(shard: Shard) -> list[Any]:
    return [str(shard.path), *astuple(shard)[1:]]


def _shard_of(row: Sequence[Any]) -> Shard:
    return Shard(Path(row[0]), row[1], row[2], row[3], row[4], tuple(row[5]))
