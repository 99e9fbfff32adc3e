"""The parts of trained tensors that several ranks hold under a plan, and their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hetero_mpi.model.group.division import Division, divisions
from hetero_mpi.model.held_layers import Segment, SharedPart
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.plan import Plan, StagePlan

Divided = Mapping[int, Mapping[str, Division]]
"""The first rank of each group -> name -> the division of every tensor of its stage."""


def divided_tensors(plan: Plan, chain: LayerChain, tuning: Tuning) -> Divided:
    """How the groups of a plan divide tensors."""
    return {
        stage.ranks[0]: divisions(language(chain), tuning, stage.shares, range(stage.first, stage.last), stage.experts)
        for _, _, stage in plan.numbered
        if stage.grouped
    }


def shared_parts(
    rank: int, plan: Plan, tuning: Tuning, divided: Divided, owner: Mapping[str, int]
) -> dict[SharedPart, list[list[Segment]]]:
    """The sums of gradients in a step of all ranks, the last layer's first: of each the segments that every one of its ranks
    owns, as ``rank`` sees them; nothing where it takes no part.

    A tensor that groups cut is summed in segments, from any cut of any pipeline to the next. The owner's stage steps it, cut as it
    is there.
    """
    found: dict[SharedPart, list[list[Segment]]] = {}
    for layer in reversed(range(plan.layers)):
        stages = [stage for _, _, stage in plan.numbered if stage.first <= layer < stage.last]
        for spec in tuning.specs(layer, layer + 1):
            ends, cut = _held(spec.name, stages, divided)
            owning = next(stage.ranks for stage in stages if owner[spec.name] in stage.ranks)
            for begin, end in pairwise(sorted({bound for own in ends.values() for bound in own})):
                ranks = tuple(sorted(one for one, (low, high) in ends.items() if low <= begin < end <= high))
                if len(ranks) > 1:
                    owned = found.setdefault(SharedPart(layer, ranks), [[] for _ in ranks])
                    if rank in ranks:
                        place = ranks.index(next(one for one in owning if one in ranks))
                        owned[place].append(_segment(spec.name, cut, ends[rank], begin, end))
    return found


def _segment(name: str, cut: Division | None, own: tuple[int, int], begin: int, end: int) -> Segment:
    """The segment from ``begin`` to ``end`` as a rank with the range ``own`` sees it."""
    if cut is None or own == (begin, end):
        return Segment(name)
    return Segment(name, cut.dim, cut.pieces, begin - own[0], end - begin)


def _held(
    name: str, stages: Sequence[StagePlan], divided: Divided
) -> tuple[dict[int, tuple[int, int]], Division | None]:
    """(rank -> its range of the dimension in which groups cut a tensor, or (0, 1); how one of them cuts it, if one does)."""
    divisions = [divided[stage.ranks[0]][name] if stage.grouped else None for stage in stages]
    cut = next((one for one in divisions if one is not None and one.cut), None)
    ends = {}
    for stage, division in zip(stages, divisions, strict=True):
        for member, rank in enumerate(stage.ranks):
            if division is not None and division.cut:
                ends[rank] = division.bounds[member], division.bounds[member + 1]
            elif division is None or division.exists(member):
                ends[rank] = 0, cut.bounds[-1] if cut is not None else 1
    return ends, cut
