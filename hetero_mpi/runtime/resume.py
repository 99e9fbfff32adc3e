"""Resuming: the checkpoint that a run goes on from is found, compared with the job and its data, and opened on rank 0."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.checkpoint import CheckpointReader, newest_good, set_aside
from hetero_mpi.checkpoint.directory import new_run_id
from hetero_mpi.checkpoint.opening import damage_named
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import TrainTable
from hetero_mpi.job.rules import as_toml
from hetero_mpi.launch.supervisor.event_log import own_event
from hetero_mpi.model.optimizer import learning_rate
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.set_aside import EarlierRun
from hetero_mpi.runtime.reference import check_reference
from hetero_mpi.runtime.setup.setup import RunSetup, TrainOptions
from hetero_mpi.state.checkpointing import ANY, LATEST, check_data, check_fits, find_checkpoint
from hetero_mpi.state.training_state import TrainingState, packed

_RATE = ("steps", "learning_rate", "schedule", "warmup_steps")
"""Keys of ``[train]`` that determine the learning rate of a step."""


def open_checkpoint(
    setup: RunSetup, world: World, options: TrainOptions, stack: contextlib.ExitStack
) -> tuple[CheckpointReader | None, TrainingState]:
    """(open file on rank 0, training state) of the checkpoint to resume from; without one (None, the initial state). Collective."""
    reader, shared = None, None
    with world.led("opening the checkpoint"):
        if world.rank == 0 and options.resume is not None:
            if options.resume == ANY and newest_checkpoint(setup.run_dir) is None:
                say("There is no checkpoint, and no whole copy of the trained state: beginning anew")
                _set_aside(setup, EarlierRun.found(setup.run_dir, _read(setup, options)))
            else:
                path, remarks = find_checkpoint(setup.run_dir, options.resume)
                say(*remarks)
                reader = stack.enter_context(CheckpointReader(path))
                job, said = setup.job, reader.metadata
                check_fits(reader, path, setup.chain, setup.tuning, job.train, job.data.sequence_length)
                reference = accept(setup, path, said, said.get("reference"))
                say(f"Resuming from {path}, after step {said['step']}")
                keys = "step", "updates", "loss_scale", "lowest_loss", "higher_in_a_row"
                shared = {key: said.get(key) for key in keys} | {"last_checkpoint": str(path)}
                shared |= {"reference": packed(reference), "losses": [float(loss) for loss in said["losses"]]}
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


def make_room(setup: RunSetup, members: World, earlier: EarlierRun | None) -> None:
    """Move the earlier run aside, which is known on rank 0. Collective over ``members``. Raises CollectiveUserError: it cannot be
    moved.
    """
    with members.led("moving the earlier run aside"):
        _set_aside(setup, earlier)


def _read(setup: RunSetup, options: TrainOptions) -> list[Path]:
    job = setup.job
    named = [
        setup.loaded.resolve(text)
        for text in (job.model.path, job.adapter.path, job.tokenizer.path)
        if text is not None
    ]
    return named + [path for path in (options.plan, options.profile) if isinstance(path, Path)]


def _set_aside(setup: RunSetup, earlier: EarlierRun | None) -> None:
    if earlier is not None:
        say(f"The earlier run in {setup.run_dir} is in {earlier.set_aside(own_event)} now, whole")


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
    """Refuse a state that this run would not continue; else report what is other than then, and move checkpoints of later steps
    aside, with the metrics of those steps. On rank 0.

    Args:
        path: where the state is.
        said: of its metadata ``step``, ``job`` and ``data_fingerprint``.
        reference: its margins of the reference model (``TrainingState``).

    Returns:
        ``reference``; None where the data are other ones now.
    """
    train, step, checkpoints = setup.job.train, said["step"], setup.run_dir / "checkpoints"
    assert setup.dataset is not None
    then, now = said.get("data_fingerprint"), setup.dataset.fingerprint()
    say(*filter(None, [check_data(then, path, now, setup.job.checkpoint.allow_other_data)]))
    reference = reference if then == now else None
    check_reference(train, setup.dataset, reference)
    if step > train.steps:
        raise UserError(
            f"{path} was written after step {step}, and the job ends at [train] steps = {train.steps}: raise it, or resume from an "
            f"earlier checkpoint by its name"
        )
    with damage_named(path, "metadata/job"):
        warning = rate_change(said["job"]["train"], train, step)
    say(*filter(None, [warning]))
    aside = set_aside(checkpoints, step)
    if aside is not None:
        for name in ("metrics.jsonl", "steps.jsonl"):
            with contextlib.suppress(OSError):  # not there, or no room for a copy
                shutil.copy2(setup.run_dir / name, aside / name)
        say(f"Checkpoints of an earlier run from after step {step} are in {aside} now")
    return reference


def newest_checkpoint(run_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """(path, metadata) of the newest whole checkpoint, if there is one."""
    path, _ = newest_good(run_dir / "checkpoints")
    if path is None:
        return None
    with CheckpointReader(path) as reader:
        return path, reader.metadata
