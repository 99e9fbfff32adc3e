"""as zbv, with backward in two parts only where another rank would wait for it in one (after DualPipeV, Lian et al. 2025)

On many devices a backward in two parts takes longer than in one, so each that stays whole is time won. DualPipeV proper computes a
forward and a backward at once, which pays where a device has links of its own to hide: one action at a time is computed here.
"""

from hetero_mpi.planning.orders.zbv import Computed, list_scheduled
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    return list_scheduled(pipeline, sparing=True)
