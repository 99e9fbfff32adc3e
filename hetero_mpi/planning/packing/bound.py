"""A lower bound on the step time that knows links, sums of gradients, filling, memory, whole blocks and whole sequences.

For a step time T it is asked whether pipelines could share the global batch at all. A relaxation of "which ranks in which
pipelines" answers, in which every constraint is one that every plan obeys (``counted``). If even so the batch does not fit, T is a
lower bound.

What a pipeline with a share S of the sequences obeys, stage by stage (chain order; c: least seconds per sequence, forward and
backward; A: forwards, backwards and messages of one micro-batch through all stages before; R: the same through the stage itself and
all later ones):

* ``A + S c + optimizer <= T``, where c is without the gradients of the weights if they may be put off, and
  ``S c + tail + optimizer <= T``, c with them. The tail is the sum of the gradients of the stage's first layer, which no
  backward hides; the optimizer includes new values that the next forward waits for;
* a sum over P ranks leaves every host with fewer than P ranks; that there are two pipelines is all that is known of P;
* with k sequences in flight at most, the forward of sequence i + k begins after the backward of i has ended:
  ``A + ceil(S / k) R + optimizer <= T``;
* the first backward begins A and R - backward after the step did, when no more than k forwards have been done. After the last
  forward, R - forward and A pass while no more than k backwards are left. What lies between takes ``(S - k)`` forwards and
  backwards at least: ``A + (S - k) c + 2 R - forward - backward + optimizer <= T``;
* all S sequences pass the link to a stage, one after the other, and the last of them has R before it: ``A + S message + R
  + optimizer <= T``, where one message is counted once;
* parameters, state, workspace and one micro-batch fit into memory.

Micro-batches may have any sizes, whichever suits best at each place.
"""

from __future__ import annotations

import math

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.packing.counted import Counted, Shares
from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

GROWTH = 3
"""Each step away from a known plan's time is so many times as large as the one before."""
TOLERANCE = 0.001
"""The search for the largest step time that can be shown ends within this share of it."""


def packing_bound_s(profile: ClusterProfile, request: PlanRequest, known_s: float) -> float:
    """No plan of as many pipelines as the request allows is faster; within a ``TOLERANCE`` of what the relaxation can show.

    ``known_s``: some plan's step time, where the search begins.
    """
    low_s = fluid_bound_s(profile, request)
    if not profile.model.layers[1:-1] or not low_s < known_s or math.isinf(known_s):
        return low_s
    return _search(Facts(profile, request), low_s, known_s)


def _search(facts: Facts, low_s: float, known_s: float) -> float:
    counted = Counted(facts)
    # One pipeline, or any number of them: at least two sum their gradients.
    cases = [Shares(counted, 1)]
    if min(len(facts.cluster.devices), facts.request.max_pipelines, facts.request.global_batch) > 1:
        cases.append(Shares(counted, 2))
    high_s, share = known_s, TOLERANCE / 2
    while high_s > low_s * (1 + TOLERANCE):
        # What is known is near: the steps away from it grow until one is impossible.
        middle_s = max(math.sqrt(low_s * high_s), high_s * (1 - share))
        share *= GROWTH
        if any(case.possible(middle_s) for case in cases):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s
