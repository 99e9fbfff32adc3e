"""as zbv, with backward split only where another rank would wait for an unsplit one (after DualPipeV, Lian et al. 2025).

On many devices a split backward takes longer, so splitting fewer backwards saves time. The original DualPipeV overlaps a forward
with a backward, which pays off if devices communicate within a pass; here each rank computes one pass at a time.
"""

from hetero_mpi.planning.orders.zbv import Computed, list_scheduled
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    return list_scheduled(pipeline, sparing=True)
