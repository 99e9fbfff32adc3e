"""several stages per rank, weight gradients put off in the last backwards only (after DualPipeV, Lian et al. 2025)

While a rank has forwards left its backwards come in one part, which on many devices is faster than two; once it has none, whoever
waits has nothing to do but to wait for gradients, and those of the weights are put off as in ``zbv``. DualPipeV proper computes a
forward and a backward at once, which pays where a device has links of its own to hide: one action at a time is computed here.
"""

from __future__ import annotations

from hetero_mpi.planning.orders.zbv import Computed, list_scheduled
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    return list_scheduled(pipeline, at_the_end=True)
