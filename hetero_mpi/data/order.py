"""Which samples make up a step: a function of the step alone, so that a resumed run needs no state to go on."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def batch_indices(step: int, global_batch: int, samples: int, seed: int) -> Indices:
    """The samples of one step, int64 [global_batch]: ``global_batch`` positions of an endless stream of epochs.

    ``step`` counts from 0 (the number of steps already done). Each epoch is a permutation of its own, every sample
    once, so that a batch may end one epoch and begin the next::

        samples = 5, global_batch = 3      epoch 0      | epoch 1
        stream                             3 0 4  1 2   | 4  0 2 1 ...
        step                               0      1          2
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(positions, samples)
    indices = np.empty(global_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permutation(samples, seed, int(epoch))[offsets[here]]
    return indices


@functools.lru_cache(maxsize=2)
def permutation(samples: int, seed: int, stream: int) -> Indices:
    """A permutation of ``range(samples)`` keyed by (seed, stream), int64 [samples], read-only.

    Sorts Philox's raw output (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) instead of calling
    ``Generator.permutation``, whose results may change between numpy versions: a resumed run must see the same order.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(samples), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
