"""A lower bound on the step time that knows links, sums of gradients, filling, memory, whole blocks and whole sequences.

For a step time T it is asked whether pipelines could share the global batch at all. A relaxation of "which ranks in which
pipelines" answers, in which every constraint is one that every plan obeys. If even so the batch does not fit, T is a lower
bound. In small clusters whole pipelines are counted (``counted``); where there are too many unlike ranks for that, fractions
of pipelines may be formed (``fractions``).

What a pipeline with a share S of the sequences obeys, stage by stage (chain order; c: least seconds per sequence, forward and
backward; A: forwards, backwards and messages of one micro-batch through all stages before; R: the same through the stage itself and
all later ones):

* ``A + S c + optimizer <= T`` (the plan bound of ``bounds``), where c is without the gradients of the weights if they may be put
  off, and ``rho A + S c + tail + optimizer <= T``, c with them, where rho is the share of A that lies before: backwards of
  earlier stages need not wait for weights and sums. The tail are the sums of the stage's items that the last backward cannot
  hide: the less, the larger the last micro-batch is;
* the last backward of an earlier stage comes after those of all stages behind it: if a stage cannot have sent its last gradient
  before ``load`` has passed since its first micro-batch arrived (``S c``, or whatever the inequalities below say of stages behind
  it, and the way there and back), then ``rho A + load + tail + optimizer <= T`` (``whole``);
* a sum over P ranks leaves every host with fewer than P ranks, and every host without a rank in some pipeline, and wherever the
  pipelines hold unlike blocks on a host. A block that is summed between hosts has a holder in the pipeline with the largest share,
  of a P-th of the batch at least, and its sum follows that much work: if that takes longer than T, all pipelines hold the same
  blocks on the host. If it does not, all do so, or every pipeline has a stage with such a block's sum;
* with k micro-batches in flight at most, the forward of micro-batch i + k begins after the backward of i has ended. So the
  forward of the last one begins after ``ceil(M / k) - 1`` round trips (M: micro-batches of the share), and after r - 1 forwards
  if r are left then: ``A + ceil(M / k) R + (r - 1) forward + optimizer <= T``;
* the first backward begins A and R - backward after the step did, when no more than k forwards have been done. After the last
  forward, R - forward and A pass while no more than k backwards are left. What lies between takes ``(M - k)`` forwards and
  backwards at least: ``A + (M - k) c + 2 R - forward - backward + optimizer <= T``, c of a micro-batch here; and with rho A
  instead of A, the tail, too;
* all S sequences pass the link to a stage, one after the other, and the last of them has R before it: ``A + S message + R
  + optimizer <= T``, where one message is counted once;
* parameters, state, workspace and one micro-batch fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.changes import with_free_links, with_plenty_of_memory
from hetero_mpi.planning.packing.cases import Packing, packing
from hetero_mpi.planning.packing.counted import classes_apart
from hetero_mpi.planning.packing.fractions import fractions_bound_s
from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.request import PlanRequest

CAUSES = ("granularity", "filling", "memory", "links", "sums")
"""What keeps a step longer than the fluid bound, in the order in which it is taken into account."""


@dataclass(frozen=True)
class Forced:
    """Bounds that know more and more: seconds over the fluid bound that each cause adds to those before it."""

    fluid_s: float
    added_s: dict[str, float]

    @property
    def bound_s(self) -> float:
        return self.fluid_s + sum(self.added_s.values())


def packing_bound_s(profile: ClusterProfile, request: PlanRequest, known_s: float, closely: bool = True) -> float:
    """No plan of as many pipelines as the request allows is faster; within a ``TOLERANCE`` of what the relaxation can show.

    ``known_s``: some plan's step time, where the search begins. Not ``closely``: quicker, and less tight (``cases.packing``).
    """
    return _from(fluid_bound_s(profile, request), profile, request, known_s, closely=closely).bound_s


def packing_of(profile: ClusterProfile, request: PlanRequest, known_s: float) -> Packing:
    """The bound, and pipelines that look as if they could do the batch in little more: what a planner may try.

    ``pipelines`` are empty where nothing faster than ``known_s`` looks possible, or whole pipelines could not be counted.
    """
    low_s = fluid_bound_s(profile, request)
    return _from(low_s, profile, request, known_s)


def forced(profile: ClusterProfile, request: PlanRequest, known_s: float) -> Forced:
    """What forces the bound over the fluid bound. A cause is charged with what it adds to those before it in ``CAUSES``:
    what two of them cost only together counts as the later one's.

    *granularity*: whole blocks, whole sequences and whole pipelines. *filling*: no stage has work from the first to the last
    moment. *memory*: repeated forwards, and too few micro-batches in flight. *links*: messages between stages. *sums*: of
    gradients, between pipelines.
    """
    fluid_s = last_s = fluid_bound_s(profile, request)
    added_s = {}
    for cause, (seen, filling, sums) in zip(CAUSES, _views(profile), strict=True):
        bound_s = _from(last_s, seen, request, known_s, filling, sums).bound_s
        added_s[cause], last_s = bound_s - last_s, bound_s
    return Forced(fluid_s, added_s)


def _views(profile: ClusterProfile) -> Iterator[tuple[ClusterProfile, bool, bool]]:
    """(the cluster as far as it is seen; does filling cost time? do sums?), one for every cause."""
    unlinked = with_free_links(profile)
    roomy = with_plenty_of_memory(unlinked)
    yield from ((roomy, False, False), (roomy, True, False), (unlinked, True, False), (profile, True, False))
    yield profile, True, True


def _from(
    low_s: float,
    profile: ClusterProfile,
    request: PlanRequest,
    known_s: float,
    filling: bool = True,
    sums: bool = True,
    closely: bool = True,
) -> Packing:
    """``low_s``: a bound that is known already."""
    if not profile.model.layers[1:-1] or not low_s < known_s or math.isinf(known_s):
        return Packing(low_s, known_s)
    facts = classes_apart(Facts(profile, request, True, filling, sums))
    if facts is not None:
        found = packing(facts, low_s, known_s, closely)
        numbered = [device.rank for device in facts.fleet.devices]
        pipelines = tuple((tuple(numbered[i] for i in ranks), share) for ranks, share in found.pipelines)
        return replace(found, pipelines=pipelines)
    return Packing(fractions_bound_s(Facts(profile, request, False, filling, sums), low_s, known_s), known_s)
