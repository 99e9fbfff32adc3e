"""Batches that change from step to step, as ranks and the plain loop of the equality tests see them."""

import numpy as np

from hetero_mpi.data.batch import IGNORED, Batch

CHANGES = ((5, 16), (8, 24), (2, 11))
"""(rows, tokens per sequence) of the steps' batches where they change; 24 tokens are all."""


def changed(batch: Batch, step: int) -> Batch:
    """The first rows and tokens of a batch only."""
    rows, length = CHANGES[step % len(CHANGES)]
    targets = batch.targets[:rows, :length]
    return Batch(batch.tokens[:rows, :length], targets, int(np.count_nonzero(targets != IGNORED)))
