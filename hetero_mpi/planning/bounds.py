"""Lower bounds on step time: of an instance, by number of replicas, and of one pipeline.

An instance takes at least its total work over its total speed (``fluid_bound_s``). Replicas also fill their pipelines and
reduce gradients (``filling_bounds_s``), which prunes the number of replicas before a search.

``cycle_bound_s`` is close to a pipeline's simulation. In steady state a stage alternates forwards and backwards. With k_i
micro-batches in flight at stage i, never more at later stages, stages i <= j form a cycle: a forward passes from i to j, j then
does the backward of the micro-batch k_j - 1 earlier, which passes back to i, and i then does the forward k_i - k_j + 1 later.
These micro-batches take one round trip through the stages and messages from i to j (the mean of a cycle of a timed event graph;
the maximum is its period: Baccelli, Cohen, Olsder & Quadrat, Synchronization and Linearity, 1992, chapter 2).
"""

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
"""Minimum work, so that every speed is finite."""


def usable_devices(profile: ClusterProfile) -> list[DeviceProfile]:
    """Devices that support the model's compute dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def fluid_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Total work over total speed: a lower bound for every plan. Infinite: no rank supports the model's dtype.

    Relaxation: layers are divisible; memory, messages and pipeline fill are free; every rank uses its best micro-batch size for
    each kind of layer.

    For prices y >= 0 of the ranks' time with sum(y) = 1, all ranks' time up to T is worth T, and a layer of kind k costs at
    least ``min over r of y_r work_rk``, so T is at least the sum over layers. The bound is the best of several prices: by speed
    on the full model and on each kind of layer (exact for proportional ranks). Ranks sharing cores are limited by the cores.
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
    """Seconds of one sequence at the best micro-batch size."""
    return min(least_s(times, n * request.sequence_length, request) / n for n in set(request.micro_batch_choices))


def least_s(times: LayerTimes, tokens: int, request: PlanRequest) -> float:
    """Seconds of forward and backward of one micro-batch, split where the request allows it and it is faster."""
    backward = times.backward_s.at(tokens)
    may_split = request.schedule == "split" or (request.schedule == "auto" and True in request.split_choices)
    if may_split and times.input_s is not None and times.weight_s is not None:
        backward = min(backward, times.input_s.at(tokens) + times.weight_s.at(tokens))
    return times.forward_s.at(tokens) + backward


def filling_bounds_s(profile: ClusterProfile, request: PlanRequest) -> dict[int, float]:
    """Number of replicas -> lower bound in seconds for plans with equal micro-batches, if layers were divisible and stage messages
    free.

    A stage starts after all earlier stages have computed their first forward, and these continue for as long as their backwards
    take after its last one. So with M micro-batches in a step of T seconds a first stage computes at most T / M of each, and
    every further stage 1 - 1 / M times the previous one. Each replica has at least one micro-batch and one first stage.
    Gradient all-reduces start with a stage's last backward, and cross hosts unless one host has a rank for each replica.
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
    """Lower bound on the end of ``outline.spans_s`` with unsplit backward, for a ``warm_up`` that does not grow.

    The maximum over stages i < j (A: forward, backward and messages of a micro-batch before stage i; R: from i on; M:
    micro-batches) of

    * ``A + M (F_i + B_i)``: i computes all micro-batches;
    * ``A + (M - 1) message + R``: all cross the link behind i, in either direction;
    * ``A + (k_j - 1) F_i + n C + r F_i + R``: n cycles of i and j (C seconds each) after k_j - 1 forwards, r forwards
    left, then the last micro-batch passes to the end and back.
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
