"""Where a start begins: from copies in the memory of surviving ranks, from copies on hosts' disks, from a checkpoint, or from the
job.

After a death the surviving processes have copies in memory (``recovery``). A run that is started again has what is on disks
(``local_versions``) and rank 0's checkpoints. The newest state is taken, and reported.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, newest_good
from hetero_mpi.errors import UserError
from hetero_mpi.launch.supervisor.event_log import append_event
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.build import Share
from hetero_mpi.runtime.local_versions import LocalVersion, StateToBeat, find_local_version
from hetero_mpi.runtime.reconfigure import build_share, hand_over
from hetero_mpi.runtime.recovery import RunHistory
from hetero_mpi.runtime.reference import check_reference
from hetero_mpi.runtime.resume import rate_change, tell_set_aside
from hetero_mpi.runtime.setup.setup import RunContext, TrainOptions
from hetero_mpi.state.checkpointing import ANY, KINDS, LATEST, check_data
from hetero_mpi.state.copies import newest_whole
from hetero_mpi.state.local_checkpoint import supervised
from hetero_mpi.state.redistribute import Parcel, deliveries, parcels
from hetero_mpi.state.training_state import TrainingState, unpacked

_LOG = logging.getLogger(__name__)


class Held(Protocol):
    """A version of the trained state, as far as this rank has it."""

    def tensor(self, step: int, parcel: Parcel) -> torch.Tensor:
        """A parcel as it was after ``step`` steps."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """The training state after ``step`` steps, as ``TrainingState.to_dict`` returns it."""
        ...


@dataclass(frozen=True)
class Origin:
    """The state that an attempt goes on from: a version held in copies, or a checkpoint."""

    step: int
    having: dict[str, tuple[int, ...]] | None = None
    """Name of a parameter or constant -> the ranks that have copies of its tensors."""
    held: Held | None = None
    """This rank's copies."""
    checkpoint: Path | None = None
    """The checkpoint; None: there are copies."""


def origin(context: RunContext, history: RunHistory, options: TrainOptions) -> Origin | None:
    """The newest state of the run; None: as the command line says, from a checkpoint or from the beginning. Collective over all
    ranks.
    """
    world, resumes = context.world, options.resume in (LATEST, ANY)
    if not history.losses and not resumes:
        return None
    begin = _left_by_survivors(context, history) if history.losses else None
    if history.losses:
        history.belongs_to(next((begun for begun in world.all_gather_json(history.begun) if begun is not None), None))
    known = history.losses and history.begun is not None
    if not resumes and not (known and supervised()):
        return begin
    step = begin.step if begin is not None else 0
    found, kept_version = find_local_version(
        context, lambda: StateToBeat(history.begun, step, final=True) if known else _newest_checkpoint(context.run_dir)
    )
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
    if world.rank == 0:
        checkpoint = _checkpoint_of_this_run(context.run_dir / "checkpoints", history.token)
        saved = [str(checkpoint[0]), checkpoint[1]] if checkpoint is not None else None
    saved = world.broadcast_json(saved)
    if saved is not None and (found is None or saved[1] > found[0]):
        return Origin(int(saved[1]), checkpoint=Path(saved[0]))
    return Origin(found[0], having=found[1], held=history.copies) if found is not None else None


def _checkpoint_of_this_run(directory: Path, token: str | None) -> tuple[Path, int] | None:
    """(path, step) of the newest whole checkpoint with this run's token. A new rank 0 may find checkpoints of another run on its
    disk.
    """
    path, _ = newest_good(directory)
    if path is None or token is None:
        return None
    try:
        with CheckpointReader(path) as reader:
            return (path, int(reader.metadata["step"])) if reader.metadata.get("run") == token else None
    except CheckpointError:
        return None


def _newest_checkpoint(run_dir: Path) -> StateToBeat:
    path, _ = newest_good(run_dir / "checkpoints")
    if path is None:
        return StateToBeat(None, 0)
    with CheckpointReader(path) as reader:
        return StateToBeat(reader.metadata.get("begun"), int(reader.metadata["step"]))


def bring_back(
    context: RunContext, history: RunHistory, report: PlanReport, begin: Origin
) -> tuple[Share, TrainingState]:
    """This rank's share of the new plan, with the state of ``begin``, from copies. Collective over all ranks.

    Raises:
        CollectiveUserError: a rank cannot build its stage; or copies on disk were made with other data.
    """
    assert begin.having is not None and begin.held is not None
    world, held, having, step = context.world, begin.held, begin.having, begin.step
    tuning = context.tuning
    with contextlib.ExitStack() as stack:
        if isinstance(held, LocalVersion):
            stack.enter_context(held)
            stood = _state_on_disk(context, held)
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


def _state_on_disk(context: RunContext, held: LocalVersion) -> dict[str, Any]:
    """The training state of a version on disk (``TrainingState.to_dict``), checked against the job's data and reported. Collective
    over all ranks.
    """
    world, job, first = context.world, context.job, held.givers[0]
    said, fingerprint, train = world.broadcast_json(
        [held.state(held.step), held.fingerprint(), held.train_table()] if world.rank == first else None, root=first
    )
    newest: str | None = None
    with world.led("comparing the copies on disk with the job"):
        if world.rank == 0:
            if held.step > job.train.steps:
                raise UserError(
                    f"the copies on disk were written after step {held.step}, and the job ends at [train] steps = "
                    f"{job.train.steps}: raise it, or resume from an earlier checkpoint by its name"
                )
            assert context.dataset is not None
            now, allowed = context.dataset.fingerprint(), job.checkpoint.allow_other_data
            say(*filter(None, [check_data(fingerprint, context.run_dir / "copies", now, allowed)]))
            known = said.get("reference") if fingerprint == now else None
            check_reference(job.train, context.dataset, unpacked(known) if known is not None else None)
            tell_set_aside(context.run_dir / "checkpoints", held.step)
            good, _ = newest_good(context.run_dir / "checkpoints")
            newest = str(good) if good is not None else None
            hosts = list(dict.fromkeys(world.hosts[rank] for rank in held.givers))
            other = f"the newest checkpoint here is {good}" if good is not None else "there is no checkpoint here"
            text = f"Going on after step {held.step}, from copies on the disks of {', '.join(hosts)}; {other}"
            say(text)
            say(*filter(None, [rate_change(train, job.train, held.step)]))
            append_event(context.run_dir, "copies", text, step=held.step, hosts=hosts)
    newest = world.broadcast_json(newest)
    return {**said, "last_checkpoint": newest, "good_checkpoint": newest}
