"""Lower bounds on the step time: of an instance, of so many pipelines, and of one pipeline.

An instance cannot take less than its total work over its total speed (``fluid_bound_s``). Pipelines wait until they are filled, and
for the sums of their gradients (``filling_bounds_s``): that says of a cluster with groups, before it is searched, which numbers of
pipelines are worth it.

The bound of one pipeline (``cycle_bound_s``) is near to its simulation: what its stages make one another wait for.
Once its warm-up is over a stage does forwards and backwards in turn. With k_i micro-batches in flight at stage i, and no more than
as many behind it, that ties every two stages i <= j together in a cycle: the forward of a micro-batch passes from i to j; after
it, j does the backward of the one k_j - 1 earlier, which passes back to i; and after that i does the forward of the one k_i -
k_j + 1 later. So many micro-batches take as long as all stages from i to j and their messages do, there and back. (The cycles of
a timed event graph, whose largest mean is its period: Baccelli, Cohen, Olsder & Quadrat, Synchronization and Linearity, 1992,
chapter 2.)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hetero_mpi.planning.contention import worth_of_all
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES

Seconds = Sequence[float]
SHORTEST_S = 1e-30
"""No work is taken to be shorter: what takes no time has no speed."""


def usable_devices(profile: ClusterProfile) -> list[DeviceProfile]:
    """The devices that offer the model's compute dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def fluid_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Total work over total speed: no plan over these ranks is faster. Infinite: no rank offers the model's dtype.

    Layers are taken to be divisible at will among the ranks; memory, messages and the filling of the pipeline to cost
    nothing; every rank computes each kind of layer at whichever micro-batch size suits it best.

    For any prices y >= 0 of the ranks' time with sum(y) = 1, all ranks' time up to T is worth T, and a layer of kind k costs at
    least ``min over r of y_r work_rk``: so T is no less than the sum of these over all layers. The best of a few prices is taken:
    by the ranks' speeds at the whole model, and at each kind of layer. Where ranks differ alike at all kinds, that is exact.
    Ranks that share cores have no more time together than the cores.
    """
    devices, layers = usable_devices(profile), profile.model.layers
    if not devices:
        return float("inf")
    kinds = list(dict.fromkeys(layers))
    counts = np.array([layers.count(layer) for layer in kinds])
    work = np.array(
        [
            [
                request.global_batch * _least_s(device.layers[layer.kind], request)
                + device.optimizer_s_per_parameter * layer.trainable_parameters
                for layer in kinds
            ]
            for device in devices
        ]
    )
    bounds_s = []
    for reference_s in (work @ counts, *work.T):
        prices = 1 / np.maximum(reference_s, SHORTEST_S)
        worth = worth_of_all(profile, {device.rank: price for device, price in zip(devices, prices, strict=True)})
        bounds_s.append(float(counts @ (prices[:, None] / worth * work).min(axis=0)))
    # Every used rank also spends its optimizer's fixed time, and at least one rank is used.
    return max(bounds_s) + min(device.optimizer_fixed_s for device in devices)


def _least_s(times: LayerTimes, request: PlanRequest) -> float:
    """Seconds of one sequence, at the best micro-batch size."""
    return min(least_s(times, n * request.sequence_length, request) / n for n in set(request.micro_batch_choices))


def least_s(times: LayerTimes, tokens: int, request: PlanRequest) -> float:
    """Forward and backward of one micro-batch, in whichever way the request leaves to choose from."""
    backward = times.backward_s.at(tokens)
    may_split = request.schedule == "split" or (request.schedule == "auto" and True in request.split_choices)
    if may_split and times.input_s is not None and times.weight_s is not None:
        backward = min(backward, times.input_s.at(tokens) + times.weight_s.at(tokens))
    return times.forward_s.at(tokens) + backward


def filling_bounds_s(profile: ClusterProfile, request: PlanRequest) -> dict[int, float]:
    """Number of pipelines -> no plan of so many, whose micro-batches are alike, takes less, were layers divisible at will and
    messages from stage to stage free.

    A stage has its first micro-batch when all stages before it have computed it forward, and these go on for as long as it takes
    them backward after its last one. So with M micro-batches in a step of T seconds the first stage computes T / M of each at the
    most, and every further one 1 - 1 / M times as much as the one before. There are as many first stages as pipelines.

    Each has a micro-batch at least. Several sum gradients when a stage's last backward has begun: it has T less these seconds for
    all but one of M. They pass between hosts where no host has a rank for each.
    """
    model, devices, min_micro_batch = profile.model, usable_devices(profile), min(request.micro_batch_choices)
    max_count = min(request.max_pipelines, len(devices), request.global_batch // min_micro_batch)
    links = [(a.host == b.host, profile.link(a.rank, b.rank)) for a, b in itertools.permutations(devices, 2)]
    near, far = (max((k.bytes_per_s for local, k in links if local <= limit), default=math.inf) for limit in (1, 0))
    gradients = GRADIENT_BYTES * sum(layer.trainable_parameters for layer in model.layers)
    max_host_ranks = max(Counter(device.host for device in devices).values())
    bound_by_count = dict.fromkeys(range(1, max_count + 1), math.inf)
    for size in request.micro_batch_choices:
        tokens, count = size * request.sequence_length, -(-request.global_batch // size)
        chains = sorted(
            sum(
                device.layers[layer.kind].forward_s.at(tokens) + device.layers[layer.kind].backward_s.at(tokens)
                for layer in model.layers
            )
            for device in devices
        )
        speeds = [1 / max(chain_s, SHORTEST_S) for chain_s in chains]
        for number in range(1, min(max_count, count) + 1):
            decay = 1 - 1 / (count - number + 1)
            filled = count / sum(decay ** (position // number) * speed for position, speed in enumerate(speeds))
            sums_s = (1 - 1 / number) * gradients / (near if number <= max_host_ranks else far)
            summed = number * max(0.0, sums_s * speeds[-1] - 1)
            least_s = max(filled, 1 / speeds[number - 1], (count + summed) / sum(speeds))
            bound_by_count[number] = min(bound_by_count[number], least_s)
    return bound_by_count


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
