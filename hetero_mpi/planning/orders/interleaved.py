"""several stages per rank in a loop, alternating forwards and backwards (Narayanan et al. 2021, arXiv:2104.04473).

Ranks 0 to p - 1 hold stages 0 to p - 1, then p to 2p - 1, and so on. Micro-batches run in groups of at least p, of nearly equal
size, larger groups first: a rank computes a group on its first stage, then on its next one. Rank r begins with ``2 (p - r - 1)``
forwards plus one group per additional stage; then forwards and backwards alternate. Two ranks with two stages each::

    clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
    rank 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
    rank 1   . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .
"""

from hetero_mpi.planning.orders.zbv import Computed
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = False


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    count = len(pipeline.stages_of)
    groups = max(1, pipeline.micro_batches // count)
    sizes = [len(range(index, pipeline.micro_batches, groups)) for index in range(groups)]
    group_of = [index for index, size in enumerate(sizes) for _ in range(size)]
    actions_by_rank: dict[int, list[Computed]] = {}
    for index, (rank, positions) in enumerate(pipeline.stages_of.items()):
        pairs = [(position, m) for m in range(pipeline.micro_batches) for position in positions]
        forwards = sorted(pairs, key=lambda pair: (group_of[pair[1]], pair[0], pair[1]))
        backwards = sorted(pairs, key=lambda pair: (group_of[pair[1]], -pair[0], pair[1]))
        depth = min(2 * (count - index - 1) + (len(positions) - 1) * sizes[0], len(pairs))
        actions: list[Computed] = [("F", *pair) for pair in forwards[:depth]]
        for turn, backward in enumerate(backwards):
            actions += [("F", *pair) for pair in forwards[depth + turn : depth + turn + 1]]
            actions.append(("B", *backward))
        actions_by_rank[rank] = actions
    return actions_by_rank
