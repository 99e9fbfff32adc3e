"""several stages per rank in a loop, alternating forwards and backwards (Narayanan et al. 2021, arXiv:2104.04473).

Ranks 0 to p - 1 hold stages 0 to p - 1, then p to 2p - 1, and so on. Micro-batches run in groups of at least p, of nearly equal
size, larger groups first: a rank computes a group on its first stage, then on its next one. Rank r begins with ``2 (p - r - 1)``
forwards plus one group per additional stage; then forwards and backwards alternate. Two ranks with two stages each::

    clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
    rank 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
    rank 1   . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .
"""

from itertools import accumulate, pairwise, zip_longest

from hetero_mpi.planning.orders.zbv import Computed
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = False


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    count = len(pipeline.stages_of)
    groups = max(1, pipeline.micro_batches // count)
    sizes = [len(range(index, pipeline.micro_batches, groups)) for index in range(groups)]
    ends = [*accumulate(sizes, initial=0)]
    actions_by_rank: dict[int, list[Computed]] = {}
    for index, (rank, positions) in enumerate(pipeline.stages_of.items()):
        forwards, backwards = (
            [(op, position, m) for bounds in pairwise(ends) for position in order for m in range(*bounds)]
            for op, order in (("F", positions), ("B", positions[::-1]))
        )
        depth = min(2 * (count - index - 1) + (len(positions) - 1) * sizes[0], len(forwards))
        actions: list[Computed] = forwards[:depth]
        for forward, backward in zip_longest(forwards[depth:], backwards):
            actions += (backward,) if forward is None else (forward, backward)
        actions_by_rank[rank] = actions
    return actions_by_rank
