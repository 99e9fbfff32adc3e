"""several stages per rank in a loop, a forward and a backward in turn (Narayanan et al. 2021, arXiv:2104.04473)

Ranks 0 to p - 1 hold stages 0 to p - 1, then p to 2p - 1, and so on. Micro-batches pass in groups of p: a rank computes a
group on its first stage, then on its next one. Rank r begins with ``2 (p - r - 1)`` forwards and p for each of its further stages;
then a forward and a backward take turns. A last group of fewer micro-batches than ranks may deadlock; the dry run says so.
"""

from __future__ import annotations

from hetero_mpi.planning.orders.zbv import Computed
from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = False


def interleaving(pipeline: PipelinePlan) -> dict[int, list[Computed]]:
    """See ``orders.Interleaving``."""
    count = len(pipeline.held)
    found: dict[int, list[Computed]] = {}
    for index, (rank, places) in enumerate(pipeline.held.items()):
        pairs = [(place, m) for m in range(pipeline.micro_batches) for place in places]
        forwards = sorted(pairs, key=lambda pair: (pair[1] // count, pair[0], pair[1]))
        backwards = sorted(pairs, key=lambda pair: (pair[1] // count, -pair[0], pair[1]))
        depth = min(2 * (count - index - 1) + (len(places) - 1) * count, len(pairs))
        listed: list[Computed] = [("F", *pair) for pair in forwards[:depth]]
        for turn, backward in enumerate(backwards):
            listed += [("F", *pair) for pair in forwards[depth + turn : depth + turn + 1]]
            listed.append(("B", *backward))
        found[rank] = listed
    return found
