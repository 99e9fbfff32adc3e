"""Finds the newest complete version of the trained state on the hosts' disks, when a run is started again.

    every host    lists the headers of its shards (its first rank reads them)
    all           choose the newest version of this run whose shards hold all tensors, if newer than the newest checkpoint
    its readers   compare checksums and job; a damaged shard is reported and left out, and all choose again
    all           the trained state goes from the readers to its holders, as always (``redistribute.move``)

A version is complete where shards with its id hold every tensor, on whichever hosts and written by however many ranks.
``state.local_checkpoint`` writes the shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, verify
from hetero_mpi.checkpoint.local_shards import Shard, keep_versions, shards_on_disk
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.setup.setup import RunSetup
from hetero_mpi.state.checkpointing import check_settings, check_shapes, check_train
from hetero_mpi.state.redistribute import Parcel


@dataclass(frozen=True)
class ShardSource:
    """A shard, and the rank that can read it."""

    rank: int
    shard: Shard


@dataclass(frozen=True)
class StateToBeat:
    """The best other state, which a version on disk must be newer than."""

    begun: str | None
    """The id of its run (``checkpoint.local_shards.new_run_id``); None: there is no such state."""
    step: int
    """Its step. Versions of the same run must have a later one."""
    final: bool = False
    """The run goes on with this id and no other. If not, versions of a run that began later beat this state."""


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

    def state(self, step: int) -> dict[str, Any]:
        """The training state, as ``TrainingState.to_dict`` returns it."""
        said = self._metadata()
        return {
            **said["training_state"],
            "losses": [float(loss) for loss in said["losses"]],
            "loss_scale": said["loss_scale"],
        }

    def fingerprint(self) -> str | None:
        """The fingerprint of the run's data."""
        found: str | None = self._metadata().get("data_fingerprint")
        return found

    def train_table(self) -> dict[str, Any]:
        """``[train]`` of the run's job."""
        found: dict[str, Any] = self._metadata()["job"]["train"]
        return found

    def _metadata(self) -> dict[str, Any]:
        return self._reader(self._own[0]).metadata

    def _reader(self, shard: Shard) -> CheckpointReader:
        if shard.path not in self._open:
            self._open[shard.path] = self._stack.enter_context(CheckpointReader(shard.path))
        return self._open[shard.path]


def find_local_version(setup: RunSetup, to_beat: Callable[[], StateToBeat]) -> tuple[LocalVersion | None, str | None]:
    """(the newest complete version on the present hosts if it beats ``to_beat``, the id of the one that is kept on the disks).
    Collective over all ranks; nobody may be writing shards.

    The id is that of the newest complete version, whether it beats or not. If there is one, shards of all others are removed.

    Args:
        to_beat: called on rank 0, if there are any shards.
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
    beaten: StateToBeat | None = None
    with world.led("looking for the newest checkpoint"):
        if world.rank == 0:
            beaten = to_beat()
    begun, above, final = world.broadcast_json(
        [beaten.begun, beaten.step, beaten.final] if beaten is not None else None
    )
    latest = max(source.shard.begun for source in sources)
    if not final and latest > (begun or ""):
        begun, above = latest, 0
    sources = _once([source for source in sources if source.shard.begun == begun])
    found, kept = _choose(setup, sources, above, own)
    if world.local_rank == 0:
        # Nobody's work is removed where nothing fits: a mistake in the job may be the reason.
        keep_versions(run_dir, [kept] if kept is not None else [shard.version_id for shard in shards], sweep=True)
    world.agree(None)  # nobody writes before all have swept
    return found, kept


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
    having: dict[str, tuple[int, ...]] = {}
    for source in chosen:
        for name in source.shard.names:
            if source.rank not in having.get(name, ()):
                having[name] = (*having.get(name, ()), source.rank)
    return having


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
    return [str(shard.path), shard.version_id, shard.step, shard.begun, shard.writer, list(shard.names)]


def _shard_of(row: Sequence[Any]) -> Shard:
    path, version_id, step, begun, writer, names = row
    return Shard(Path(path), version_id, step, begun, writer, tuple(names))
