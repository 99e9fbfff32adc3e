"""The reference of a run that learns preferences by DPO: what the model that it begins with thinks of every pair.

Before the first step the pairs that the run will need go once through the pipeline. Their margins are part of the training state:
checkpoints hold them, and a resumed run does not have the first model any more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.order import Indices, batch_indices
from hetero_mpi.data.sequences import Dataset
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.setup.setup import RunContext
from hetero_mpi.state.training_state import TrainingState


def find_reference(context: RunContext, members: World, trainer: Trainer, state: TrainingState) -> None:
    """Compute the margins of the first model, if the run learns by DPO and begins now. Collective over the active ranks.

    Raises:
        CollectiveUserError: a resumed run needs pairs whose margins its checkpoint does not hold.
    """
    if context.job.train.preference != "dpo":
        return
    missing = None
    with members.led("looking for the reference of the preferences"):
        if members.rank == 0:
            missing = _missing(context, state)
    count = members.broadcast_json(len(missing) if missing is not None else None)
    if count:
        members.doing = "computing the reference of the preferences"
        _compute(context, members, trainer, state, missing, count)


def _missing(context: RunContext, state: TrainingState) -> Indices:
    """The rows of the dataset whose margins the run needs and does not have. On rank 0."""
    train, dataset = context.job.train, context.dataset
    assert isinstance(dataset, Dataset)
    samples = len(dataset.train)
    steps = range(min(train.steps, -(-samples // train.global_batch)))
    orders = [dataset.train[batch_indices(step, train.global_batch, samples, train.seed)] for step in steps]
    needed = np.unique(np.concatenate([*orders, dataset.held_out[: train.evaluate_sequences]]))
    known = state.reference
    missing = needed if known is None else needed[np.isnan(known[needed]).any(axis=1)]
    if state.step > 0 and len(missing):
        raise UserError(
            f"the checkpoint has no margin of the reference model for {len(missing):,} rows of preferences, as its run needed "
            f"fewer, and the model which that run began with is gone. Lower [train] steps to that run's, or begin a new run "
            f"from this one's result ([model] path, or [adapter] path)"
        )
    return missing


def _compute(
    context: RunContext, members: World, trainer: Trainer, state: TrainingState, missing: Indices | None, count: int
) -> None:
    rows, dataset = trainer.plan.global_batch, context.dataset
    found: NDArray[np.float32] | None = None
    if missing is not None:
        assert isinstance(dataset, Dataset)
        found = np.full((len(dataset.tokens), dataset.pairs_per_row), np.nan, np.float32)
        say(f"Reference of the preferences: {count:,} rows through the model that the run begins with")
    for first in range(0, count, rows):
        own = None
        if missing is not None:
            assert isinstance(dataset, Dataset)
            own = dataset.gather(missing[first : first + rows])
            own = own.trimmed() if context.job.data.pad == "longest" else own
        margins = trainer.margins(trainer.shared_batch(own))
        if found is not None and missing is not None:
            found[missing[first : first + rows]] = margins
    (shared,) = members.broadcast_arrays([found] if found is not None else None)
    state.set_reference(shared)
