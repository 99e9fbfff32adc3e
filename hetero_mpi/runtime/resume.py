"""Resuming: the checkpoint that a run goes on from is found, compared with the job and its data, and opened on rank 0."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, newest_good, set_aside
from hetero_mpi.checkpoint.directory import new_run_id, newest_readable, shards_on_disk
from hetero_mpi.checkpoint.opening import damage_named
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import LoadedJob, job_to_dict
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.schema import TrainTable
from hetero_mpi.model.optimizer import learning_rate
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.run_directory import EarlierRun, own_event
from hetero_mpi.runtime.finished import finished, shared
from hetero_mpi.runtime.reference import check_reference
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.setup.context import RunSetup, TrainOptions
from hetero_mpi.runtime.setup.pending import Pending
from hetero_mpi.state.checkpointing import (
    ANY,
    LATEST,
    check_data,
    check_fits,
    check_length,
    check_train,
    find_checkpoint,
)
from hetero_mpi.state.training_state import TrainingState, packed

_RATE = ("steps", "learning_rate", "schedule", "warmup_steps")
"""Keys of ``[train]`` that determine the learning rate of a step."""


@dataclass(frozen=True)
class Accepted:
    """A checkpoint that this run may go on from."""

    path: Path
    reference: NDArray[np.float32] | None
    """Its margins of the reference model (``TrainingState``); None: it has none, or the data are other ones now."""


def look_first(world: World, loaded: LoadedJob, run_dir: Path, resume: str | None) -> TrainResult | None:
    """Look at the header of the checkpoint before anything is read or measured; the result of a run that is finished, and None
    where there is something to do. Collective. Raises CollectiveUserError: what the header says does not fit the job, or there is
    no checkpoint.
    """
    if resume is None:
        return None
    copies = _copies(world, run_dir)
    past: TrainResult | None = None
    with world.led("looking at the checkpoint"):
        if world.rank == 0:
            newest = resume in (LATEST, ANY)
            path = newest_readable(run_dir / "checkpoints") if newest else Path(resume)
            if (path is None and resume == LATEST and not copies) or (path is not None and not path.exists()):
                find_checkpoint(run_dir, resume)  # says what is there instead
            with contextlib.suppress(CheckpointError):  # a damaged one is told, or passed over, when all of it is read
                if path is not None:
                    with CheckpointReader(path) as reader:
                        past = _look(reader, path, loaded, run_dir)
    return shared(world, past)


def _copies(world: World, run_dir: Path) -> bool:
    """Are there copies of the trained state on the disk of any host? Collective."""
    return any(world.all_gather_json(world.local_rank == 0 and bool(shards_on_disk(run_dir)[0])))


def _look(reader: CheckpointReader, path: Path, loaded: LoadedJob, run_dir: Path) -> TrainResult | None:
    train, step = loaded.job.train, reader.metadata["step"]
    check_train(reader, path, train)
    check_length(reader, path, loaded.job.data.sequence_length)
    if train.epochs is not None:
        return None  # how many steps they are is not known before the data are read
    _check_steps(path, step, train)
    if _described(reader.metadata["job"]) != _described(job_to_dict(loaded.job)):
        return None  # whether it is the same run shows when model and data are there
    return finished(reader.metadata, path, loaded.job, run_dir)


def _described(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a job says of what is trained, on what and how; but for the dtype, which may have to be settled yet."""
    told = {table: job.get(table) for table in ("model", "adapter", "tokenizer", "data", "train")}
    return {**told, "train": {**(told["train"] or {}), "dtype": None}}


def accept_checkpoint(setup: RunSetup, options: TrainOptions) -> tuple[Accepted | None, TrainResult | None]:
    """(on rank 0 the whole checkpoint that this run goes on from, the result of a run that is finished), before anything is
    measured. Collective. Raises CollectiveUserError: there is none, or this run would not continue it.

    Without a whole checkpoint it is (None, None) where the run may begin anew, or have copies on disks.
    """
    resume, run_dir = options.resume, setup.run_dir
    if resume is None:
        return None, None
    found: Accepted | None = None
    past: TrainResult | None = None
    otherwise = resume == ANY or (resume == LATEST and _copies(setup.world, run_dir))
    with setup.world.led("opening the checkpoint"):
        if setup.world.rank == 0 and (there := _found(run_dir, resume, otherwise)) is not None:
            found = _accepted(setup, *there)
            with CheckpointReader(found.path) as reader:
                past = finished(reader.metadata, found.path, setup.job, run_dir)
    return found, shared(setup.world, past)


def _found(run_dir: Path, resume: str, otherwise: bool) -> tuple[Path, list[str]] | None:
    """As ``find_checkpoint``; without a whole checkpoint None, if there is something else to begin with."""
    try:
        return find_checkpoint(run_dir, resume)
    except UserError:
        if otherwise:
            return None
        raise


def _accepted(setup: RunSetup, path: Path, remarks: Sequence[str]) -> Accepted:
    say(*remarks)
    with CheckpointReader(path) as reader:
        job, said = setup.job, reader.metadata
        check_fits(reader, path, setup.chain, setup.tuning, job.train, job.data.sequence_length)
        return Accepted(path, accept(setup, path, said, said.get("reference")))


def open_checkpoint(
    setup: RunSetup,
    world: World,
    options: TrainOptions,
    accepted: Accepted | None,
    stack: contextlib.ExitStack,
    pending: Pending,
) -> tuple[CheckpointReader | None, TrainingState]:
    """(open file on rank 0, training state) of the checkpoint to resume from; without one (None, the initial state). Collective.

    ``accepted``: what ``accept_checkpoint`` has found, on rank 0; None: it is looked for now.
    """
    reader, shared = None, None
    with world.led("opening the checkpoint"):
        if world.rank == 0 and (resume := options.resume) is not None:
            there = None if accepted is not None else _found(setup.run_dir, resume, resume == ANY)
            if accepted is None and there is None:
                say("There is no checkpoint, and no whole copy of the trained state: beginning anew")
                make_room(setup, EarlierRun.found(setup.run_dir, _read(setup, options)), pending)
            else:
                accepted = _accepted(setup, *there) if there is not None else accepted
                assert accepted is not None
                reader = stack.enter_context(CheckpointReader(accepted.path))
                said = reader.metadata
                pending.add(partial(later_aside, setup.run_dir, said["step"]))
                say(f"Resuming from {accepted.path}, after step {said['step']}")
                keys = "step", "updates", "loss_scale", "lowest_loss", "higher_in_a_row"
                shared = {key: said.get(key) for key in keys} | {"last_checkpoint": str(accepted.path)}
                shared |= {"reference": packed(accepted.reference), "losses": [float(loss) for loss in said["losses"]]}
    shared = world.broadcast_json(shared)
    if shared is None:
        return None, TrainingState.initial(setup.job.train.dtype)
    return reader, TrainingState.from_dict(shared)


def earlier_run(setup: RunSetup, options: TrainOptions) -> EarlierRun | None:
    """The earlier run in the run directory that must be moved aside; None where this run continues it. On rank 0. Collective.
    Raises CollectiveUserError: this run reads files of that one.
    """
    resume = options.resume
    named = Path(resume) if resume not in (None, LATEST, ANY) else None
    goes_on = resume is not None and (named is None or named.resolve().is_relative_to(setup.run_dir.resolve()))
    found = None
    with setup.world.led("looking at the run directory"):
        if setup.world.rank == 0 and not goes_on:
            found = EarlierRun.found(setup.run_dir, _read(setup, options))
    return found


def make_room(setup: RunSetup, earlier: EarlierRun | None, pending: Pending) -> None:
    """Move the earlier run aside, which is known on rank 0, once this start is accepted."""

    def move() -> None:
        assert earlier is not None
        say(f"The earlier run in {setup.run_dir} is in {earlier.set_aside(own_event)} now, whole")

    if earlier is not None:
        pending.add_first(move)


def _read(setup: RunSetup, options: TrainOptions) -> list[Path]:
    job = setup.job
    named = [
        setup.loaded.resolve(text)
        for text in (job.model.path, job.adapter.path, job.tokenizer.path)
        if text is not None
    ]
    return named + [path for path in (options.plan, options.profile) if isinstance(path, Path)]


def run_id_of(reader: CheckpointReader | None, options: TrainOptions) -> str:
    """The id of this run: the checkpoint's where it goes on from the newest; a new one where the checkpoint was named or there is
    none.
    """
    found = reader.metadata.get("begun") if reader is not None and options.resume in (LATEST, ANY) else None
    return found or new_run_id()


def rate_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """A warning if the job has changed the learning rate of the next step; None if it is the same.

    Args:
        then: ``[train]`` when the state after ``step`` steps was written.
        train: ``[train]`` now.
    """
    old = learning_rate(train.model_copy(update={key: then[key] for key in _RATE}), step)
    new = learning_rate(train, step)
    if step >= train.steps or math.isclose(old, new, rel_tol=1e-9):
        return None
    changed = [f"{key} is {as_toml(getattr(train, key))}, was {as_toml(then[key])}" for key in _RATE]
    changed = [text for text, key in zip(changed, _RATE, strict=True) if getattr(train, key) != then[key]]
    kept = ", ".join(f"{key} = {as_toml(then[key])}" for key in _RATE if getattr(train, key) != then[key])
    remedy = f"set {kept} again to go on as before"
    share = new / train.learning_rate
    if share > 0:
        remedy += f", or learning_rate = {old / share:.4g} to begin this schedule at the old value"
    return (
        f"Warning: the learning rate jumps from {old:.4g} to {new:.4g} at step {step + 1}, since [train] {', '.join(changed)}: "
        f"it is a function of the step and of these; {remedy}"
    )


def accept(
    setup: RunSetup, path: Path, said: Mapping[str, Any], reference: NDArray[np.float32] | None
) -> NDArray[np.float32] | None:
    """Refuse a state that this run would not continue; else report what is other than then. On rank 0.

    Args:
        path: where the state is.
        said: of its metadata ``step``, ``job`` and ``data_fingerprint``.
        reference: its margins of the reference model (``TrainingState``).

    Returns:
        ``reference``; None where the data are other ones now.
    """
    train, step = setup.job.train, said["step"]
    assert setup.dataset is not None
    then, now = said.get("data_fingerprint"), setup.dataset.fingerprint()
    say(*filter(None, [check_data(then, path, now, setup.job.checkpoint.allow_other_data)]))
    reference = reference if then == now else None
    check_reference(train, setup.dataset, reference)
    _check_steps(path, step, train)
    with damage_named(path, "metadata/job"):
        warning = rate_change(said["job"]["train"], train, step)
    say(*filter(None, [warning]))
    return reference


def _check_steps(path: Path, step: int, train: TrainTable) -> None:
    if step > train.steps:
        raise UserError(
            f"{path} was written after step {step}, and the job ends at [train] steps = {train.steps}: raise it, or resume from an "
            f"earlier checkpoint by its name"
        )


def later_aside(run_dir: Path, step: int) -> None:
    """Move checkpoints of steps after ``step`` aside, with a copy of the metrics of those steps. On rank 0."""
    aside = set_aside(run_dir / "checkpoints", step)
    if aside is not None:
        for name in ("metrics.jsonl", "steps.jsonl"):
            with contextlib.suppress(OSError):  # not there, or no room for a copy
                shutil.copy2(run_dir / name, aside / name)
        say(f"Checkpoints of an earlier run from after step {step} are in {aside} now")


def newest_checkpoint(run_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """(path, metadata) of the newest whole checkpoint, if there is one."""
    path, _ = newest_good(run_dir / "checkpoints")
    if path is None:
        return None
    with CheckpointReader(path) as reader:
        return path, reader.metadata
