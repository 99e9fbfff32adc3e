"""Which samples make up a step: a function of the step alone, so that a resumed run needs no state to go on."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hetero_mpi.data.batch import Indices

Parts = tuple[tuple[int, int], ...]
"""Of each data set: (samples that it has, samples that an epoch takes from it)."""


def batch_indices(step: int, global_batch: int, samples: int, seed: int, parts: Parts = (), stream: int = 0) -> Indices:
    """The samples of one step, int64 [global_batch]: ``global_batch`` positions of an endless stream of epochs.

    ``step`` counts from 0 (the number of steps already done). Each epoch is a permutation of its own, every sample
    once, so that a batch may end one epoch and begin the next::

        samples = 5, global_batch = 3      epoch 0      | epoch 1
        stream                             3 0 4  1 2   | 4  0 2 1 ...
        step                               0      1          2

    ``parts``: the samples are those of several data sets, one set after the other, and an epoch takes from each its number,
    which all together are ``samples``. ``stream``: key of the first epoch's permutation.
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(positions, samples)
    indices = np.empty(global_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order = _mixed(parts, seed, int(epoch)) if parts else permutation(samples, seed, stream + int(epoch))
        indices[here] = order[offsets[here]]
    return indices


def parts_of(sizes: Sequence[int], weights: Sequence[float]) -> Parts:
    """What an epoch takes from data sets of these sizes: as many samples as they have together, shared out by weight.

    Rounded down, and the rest given to the largest remainders. A share may be 0.
    """
    total = sum(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    takes = [int(share) for share in exact]
    for number in sorted(range(len(takes)), key=lambda number: takes[number] - exact[number])[: total - sum(takes)]:
        takes[number] += 1
    return tuple(zip(sizes, takes, strict=True))


@functools.lru_cache(maxsize=2)
def _mixed(parts: Parts, seed: int, epoch: int) -> Indices:
    """The samples of one epoch in their order: each data set goes on in an endless stream of its own, where the last epoch stopped.

    So a set that gives more than it has repeats itself, and one that gives less gives other samples in the next epoch.
    """
    chosen, first = [], 0
    for number, (size, take) in enumerate(parts, start=1):
        chosen.append(first + batch_indices(epoch, take, size, seed, stream=number << 48))
        first += size
    together = np.concatenate(chosen)
    return together[permutation(len(together), seed, epoch)]


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
