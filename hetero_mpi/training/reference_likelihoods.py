"""Reference log-probabilities for preference learning (DPO, IPO, KTO): the initial model's log-probability of each answer.

They are computed before the first step and stored in checkpoints, because a resumed run no longer has the initial model.
"""

import time

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.batch import Indices
from hetero_mpi.data.dataset import Dataset, DataSource
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.objectives import learns_from, objective
from hetero_mpi.rundir.logs import say
from hetero_mpi.state.state import State
from hetero_mpi.training.setup.context import RunContext
from hetero_mpi.util.errors import UserError

_REPORT_INTERVAL_S = 30.0
"""Interval between progress reports."""


def check_reference(train: TrainTable, dataset: DataSource, reference: NDArray[np.float32] | None) -> None:
    """Raise UserError if a resumed state lacks rows that the run needs. ``reference``: None if missing or for other data."""
    if not _has_reference(train):
        return
    missing = _needed_rows(train, dataset)
    if reference is not None:
        missing = missing[np.isnan(reference[missing]).any(axis=1)]
    if len(missing):
        raise UserError(
            "resume.no_reference",
            f"the checkpoint has no reference log-probabilities for {len(missing):,} preference rows, which its run did not need, "
            f"and the model that the run started from is gone. Use the same data and the same [train] preference, steps, "
            f"global_batch, seed and evaluate_sequences, or start a new run from this run's result ([model] path, "
            f"or [adapter] path)",
        )


def find_reference(context: RunContext, members: World, trainer: Trainer, state: State) -> None:
    """Compute reference log-probabilities if the run needs them and has none yet. Collective over the active ranks."""
    train, dataset = context.job.train, context.dataset
    if not _has_reference(train) or state.reference is not None:
        return
    members.current_action = "computing reference log-probabilities"
    needed_rows = _needed_rows(train, dataset) if dataset is not None else np.zeros(0, np.int64)
    count = int(members.broadcast_json(len(needed_rows)))
    say(f"Computing reference log-probabilities: {count:,} rows with the initial model")
    logprobs_by_batch, reported_s = [], time.monotonic()
    for first in range(0, count, trainer.plan.global_batch):
        batch_rows = needed_rows[first : first + trainer.plan.global_batch]
        batch = dataset.gather(batch_rows) if isinstance(dataset, Dataset) else None
        logprobs_by_batch.append(trainer.likelihoods(trainer.shared_batch(batch, context.job.data.pad == "longest")))
        if time.monotonic() > reported_s + _REPORT_INTERVAL_S:
            reported_s = time.monotonic()
            say(f"  {first + len(batch_rows):,} of {count:,} rows")
    full_reference: list[NDArray[np.float32]] | None = None
    if isinstance(dataset, Dataset):
        full_reference = [np.full((len(dataset.tokens), dataset.records_per_row), np.nan, np.float32)]
        full_reference[0][needed_rows] = np.concatenate(logprobs_by_batch)
    state.set_reference(members.broadcast_arrays(full_reference)[0])


def _has_reference(train: TrainTable) -> bool:
    """Whether the objective needs reference log-probabilities."""
    compared_by = objective(train.preference)
    return compared_by is not None and compared_by.reference


def _needed_rows(train: TrainTable, dataset: DataSource) -> Indices:
    """Return the indices of the dataset's rows that a run compares, ascending. Called on rank 0."""
    assert isinstance(dataset, Dataset)
    steps = train.steps if dataset.parts else min(train.steps, -(-len(dataset.train) // train.global_batch))
    rows = [dataset.numbers(step, train.global_batch, train.last_batch == "smaller") for step in range(steps)]
    needed_rows = np.concatenate([*rows, dataset.held_out[: train.evaluate_sequences]])
    return np.unique([needed_rows, needed_rows + (learns_from(train.preference) == "labels")])
