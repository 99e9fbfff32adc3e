"""What the disks of hosts still hold of a run that is started again: the newest copies that are whole (``shelf`` writes them).

    every host    offers the headers of its pieces (its first rank reads them)
    all           the newest generation of this run of which all tensors are on offer, if newer than the newest checkpoint
    its givers    compare checksums and job; a piece that is damaged is named and no longer on offer, and all choose again
    all           the trained state goes from the givers to its holders, as always (``redistribute.move``)

A generation counts as whole where pieces of one id hold every tensor, on whichever hosts; how many ranks wrote it does not matter.
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
from hetero_mpi.checkpoint.local_shards import Piece, keep_generations, pieces_on_disk
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.setup.setup import RunSetup
from hetero_mpi.state.checkpointing import KINDS, check_settings, check_shapes
from hetero_mpi.state.redistribute import Parcel


@dataclass(frozen=True)
class Offer:
    """A piece that a rank can read."""

    rank: int
    piece: Piece


@dataclass(frozen=True)
class Standard:
    """What copies must beat."""

    begun: str | None
    """The run that the best other state belongs to (``checkpoint.local_shards.new_lineage``); None: there is none."""
    step: int
    """Copies of that run that are not newer are of no use."""
    final: bool = False
    """That run goes on and no other. If not, the one begun last does: copies of it beat the state of an earlier one."""


class OnDisk:
    """A whole generation on the disks of hosts; gives what this rank has of it. A context manager, as files are open meanwhile."""

    def __init__(self, chosen: Sequence[Offer], own: list[Piece]) -> None:
        piece = chosen[0].piece
        self.step, self.generation, self.begun = piece.step, piece.generation, piece.begun
        self.having = _having(chosen)
        """Name -> the ranks that can give its tensors."""
        self.givers = sorted({offer.rank for offer in chosen})
        self._own = own
        self._open: dict[Path, CheckpointReader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OnDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, step: int, parcel: Parcel) -> torch.Tensor:
        """A parcel, from this rank's disk. As ``Copies.tensor``."""
        piece = next(piece for piece in self._own if parcel.name in piece.names)
        array, _ = self._reader(piece).read(parcel.kind, parcel.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def state(self, step: int) -> dict[str, Any]:
        """Where the run stood, as ``TrainingState.to_dict`` says it."""
        said = self._metadata()
        return {**said["books"], "losses": [float(loss) for loss in said["losses"]], "loss_scale": said["loss_scale"]}

    def fingerprint(self) -> str | None:
        """Of the data that the run was with."""
        found: str | None = self._metadata().get("data_fingerprint")
        return found

    def train_table(self) -> dict[str, Any]:
        """``[train]`` of the job that the run was with."""
        found: dict[str, Any] = self._metadata()["job"]["train"]
        return found

    def _metadata(self) -> dict[str, Any]:
        return self._reader(self._own[0]).metadata

    def _reader(self, piece: Piece) -> CheckpointReader:
        if piece.path not in self._open:
            self._open[piece.path] = self._stack.enter_context(CheckpointReader(piece.path))
        return self._open[piece.path]


def look_on_disks(setup: RunSetup, standard: Callable[[], Standard]) -> tuple[OnDisk | None, str | None]:
    """The newest generation that is whole on the hosts there are, if it beats ``standard``; and the id of the one that stays on
    the disks meanwhile, beaten or not. If there is one, pieces of others are removed. Collective over all ranks; nobody may be
    writing pieces.

    Args:
        standard: called on rank 0, if there are any pieces.
    """
    world, run_dir = setup.world, setup.run_dir
    pieces, remarks = pieces_on_disk(run_dir) if world.local_rank == 0 else ([], [])
    own = {piece.path: piece for piece in pieces}
    rows = world.all_gather_json([[_row(piece) for piece in pieces], remarks])
    for host, (_, said) in zip(world.hosts, rows, strict=True):
        say(*(f"{host}: {remark}" for remark in said))
    offers = [Offer(rank, _piece(row)) for rank, (listed, _) in enumerate(rows) for row in listed]
    if not offers:
        return None, None
    beaten: Standard | None = None
    with world.led("looking for the newest checkpoint"):
        if world.rank == 0:
            beaten = standard()
    begun, above, final = world.broadcast_json(
        [beaten.begun, beaten.step, beaten.final] if beaten is not None else None
    )
    latest = max(offer.piece.begun for offer in offers)
    if not final and latest > (begun or ""):
        begun, above = latest, 0
    offers = _once([offer for offer in offers if offer.piece.begun == begun])
    found, kept = _choose(setup, offers, above, own)
    if world.local_rank == 0:
        # Nobody's work is removed where nothing fits: a mistake in the job may be the reason.
        keep_generations(run_dir, [kept] if kept is not None else [piece.generation for piece in pieces], sweep=True)
    world.agree(None)  # nobody writes before all have swept
    return found, kept


def _choose(
    setup: RunSetup, offers: list[Offer], above: int, own: Mapping[Path, Piece]
) -> tuple[OnDisk | None, str | None]:
    """The newest whole generation of those on offer, read through if it is of a later step than ``above``; and its id."""
    world, tuning = setup.world, setup.tuning
    needed = {*tuning.trainable, *tuning.constants}
    while (chosen := newest_generation(offers, needed)) is not None:
        kept = chosen[0].piece.generation
        if chosen[0].piece.step <= above:
            return None, kept
        mine = [own[offer.piece.path] for offer in chosen if offer.rank == world.rank]
        damaged = [[str(piece.path), reason] for piece in mine if (reason := _damage(setup, piece)) is not None]
        told = world.all_gather_json(damaged)
        if not any(told):
            return OnDisk(chosen, mine), kept
        for host, of_rank in zip(world.hosts, told, strict=True):
            say(*(f"{host}: passed over {path}: {reason}" for path, reason in of_rank))
        bad = {(rank, path) for rank, of_rank in enumerate(told) for path, _ in of_rank}
        offers = [offer for offer in offers if (offer.rank, str(offer.piece.path)) not in bad]
    return None, None


def newest_generation(offers: Sequence[Offer], needed: set[str]) -> list[Offer] | None:
    """The offers of the newest generation that together hold all ``needed`` names; None: there is no such generation."""
    for step in sorted({offer.piece.step for offer in offers}, reverse=True):
        of_step = [offer for offer in offers if offer.piece.step == step]
        for generation in sorted({offer.piece.generation for offer in of_step}):
            chosen = [offer for offer in of_step if offer.piece.generation == generation]
            if needed <= {name for offer in chosen for name in offer.piece.names}:
                return chosen
    return None


def _once(offers: Sequence[Offer]) -> list[Offer]:
    """Hosts that share a disk offer the same pieces: each counts once, for the first rank that has it."""
    first: dict[tuple[str, int], Offer] = {}
    for offer in offers:
        first.setdefault((offer.piece.generation, offer.piece.writer), offer)
    return list(first.values())


def _having(chosen: Sequence[Offer]) -> dict[str, tuple[int, ...]]:
    having: dict[str, tuple[int, ...]] = {}
    for offer in chosen:
        for name in offer.piece.names:
            if offer.rank not in having.get(name, ()):
                having[name] = (*having.get(name, ()), offer.rank)
    return having


def _damage(setup: RunSetup, piece: Piece) -> str | None:
    """Why a piece cannot be used, if it cannot: every byte is read, and the job compared."""
    reason = verify(piece.path)
    if reason is not None:
        return reason
    tuning = setup.tuning
    specs = {name: spec for name, spec in {**tuning.trainable, **tuning.constants}.items() if name in piece.names}
    try:
        with CheckpointReader(piece.path) as reader:
            check_settings(reader, piece.path, setup.chain, setup.job.train, setup.job.data.sequence_length)
            for name, spec in specs.items():
                check_shapes(reader, piece.path, name, spec, KINDS if name in tuning.trainable else KINDS[:1])
    except (CheckpointError, UserError) as error:
        return str(error)
    return None


def _row(piece: Piece) -> list[Any]:
    return [str(piece.path), piece.generation, piece.step, piece.begun, piece.writer, list(piece.names)]


def _piece(row: Sequence[Any]) -> Piece:
    path, generation, step, begun, writer, names = row
    return Piece(Path(path), generation, step, begun, writer, tuple(names))
