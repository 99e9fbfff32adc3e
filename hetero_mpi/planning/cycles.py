"""A lower bound on how long one pipeline takes, near to its simulation: what its stages make one another wait for.

Once its warm-up is over a stage does forwards and backwards in turn. With k_i micro-batches in flight at stage i, and no more than
as many behind it, that ties every two stages i <= j together in a cycle: the forward of a micro-batch passes from i to j; after
it, j does the backward of the one k_j - 1 earlier, which passes back to i; and after that i does the forward of the one k_i -
k_j + 1 later. So many micro-batches take as long as all stages from i to j and their messages do, there and back. (The cycles of
a timed event graph, whose largest mean is its period: Baccelli, Cohen, Olsder & Quadrat, Synchronization and Linearity, 1992,
chapter 2.)
"""

from __future__ import annotations

from collections.abc import Sequence

Seconds = Sequence[float]


def cycle_bound_s(
    forward_s: Seconds,
    backward_s: Seconds,
    out_s: Seconds,
    back_s: Seconds,
    warm_up: Sequence[int],
    micro_batches: int,
) -> float:
    """``simulator.spans_s`` of these (its arguments; backward whole) has no end before this; ``warm_up`` does not grow.

    The largest, over stages i < j (A: forward, backward and messages of one micro-batch through all stages before i; R: the same
    through i and all behind it; M: micro-batches), of

    * ``A + M (F_i + B_i)``: i computes them all;
    * ``A + (M - 1) message + R``: they all pass the link behind i, in either direction;
    * ``A + (k_j - 1) F_i + n C + r F_i + R``: the cycle of i and j (C its seconds) is passed n times as soon as k_j - 1 forwards
      are done, r are left then, and the last one must still pass to the end and back.
    """
    stages = len(forward_s)
    compute_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    hops_s = [out + back for out, back in zip(out_s, back_s, strict=False)]
    flying = [min(depth, micro_batches - 1) + 1 for depth in warm_up]
    left_s = sum(compute_s) + sum(hops_s[: stages - 1])
    before_s = bound_s = 0.0
    for i in range(stages):
        ahead_s, own_s = forward_s[i], compute_s[i]
        bound_s = max(bound_s, before_s + micro_batches * own_s)
        if i + 1 == stages:
            break
        bound_s = max(bound_s, before_s + (micro_batches - 1) * max(out_s[i], back_s[i]) + left_s)
        around_s = own_s
        for j in range(i + 1, stages):
            around_s += compute_s[j] + hops_s[j - 1]
            behind = flying[j]
            times, rest = divmod(micro_batches - behind, flying[i] - behind + 1)
            bound_s = max(bound_s, before_s + (behind - 1 + rest) * ahead_s + times * around_s + left_s)
        through_s = own_s + hops_s[i]
        before_s, left_s = before_s + through_s, left_s - through_s
    return bound_s
