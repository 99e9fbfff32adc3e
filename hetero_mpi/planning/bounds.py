"""Lower bounds on the step time: for any plan, per number of replicas, and for a single pipeline.

No plan is faster than the total work divided by the total speed (``fluid_bound_s``). Replicas must also fill their pipelines
and reduce gradients (``filling_bounds_s``), which prunes replica counts before a search.

``cycle_bound_s`` is close to a pipeline's simulated time. In steady state a stage alternates forwards and backwards. Let k_i be
the number of micro-batches in flight at stage i; it never grows from one stage to the next. Stages i <= j then form a cycle: a
forward passes from i to j, j runs the backward of the micro-batch k_j-1 earlier, that gradient returns to i, and i runs the
forward of the micro-batch k_i-k_j+1 later. One round trip through the stages and messages from i to j thus advances by
k_i-k_j+1 micro-batches (the mean of a cycle in a timed event graph, whose period is the maximum over cycles: Baccelli, Cohen,
Olsder & Quadrat, Synchronization and Linearity, 1992, chapter 2).
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
"""Minimum seconds of work, which keeps every speed finite."""


def usable_devices(profile: ClusterProfile) -> list[DeviceProfile]:
    """Return the devices that support the model's compute dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def fluid_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Lower-bound the step time of every plan by total work over total speed; infinite if no rank supports the dtype.

    The relaxation makes layers divisible, ignores memory, messages and pipeline fill, and lets every rank use its best
    micro-batch size for each layer kind. By LP duality, price each rank's time at y_r >= 0 with sum(y) = 1. All ranks' time up
    to T is then worth T, and a layer of kind k costs at least ``min over r of y_r work_rk``, so T is at least the sum of these
    costs over layers. The result is the best bound over several price vectors: by speed on the full model and on each layer
    kind (exact for proportional ranks). Ranks that share cores are limited by the cores.
    """
    devices, layers = usable_devices(profile), profile.model.layers
    if not devices:
        return float("inf")
    kinds, sizes = list(dict.fromkeys(layers)), set(request.micro_batch_choices)
    counts = np.array([layers.count(layer) for layer in kinds])
    work = np.array(
        [
            [
                request.global_batch
                * min(least_s(device.layers[layer.kind], n * request.sequence_length, request) / n for n in sizes)
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


def least_s(times: LayerTimes, tokens: int, request: PlanRequest) -> float:
    """Seconds for the forward and backward of one micro-batch, with a split backward if that is allowed and faster."""
    backward = times.backward_s.at(tokens)
    may_split = request.schedule == "split" or (request.schedule == "auto" and True in request.split_choices)
    if may_split and times.input_s is not None and times.weight_s is not None:
        backward = min(backward, times.input_s.at(tokens) + times.weight_s.at(tokens))
    return times.forward_s.at(tokens) + backward


def filling_bounds_s(profile: ClusterProfile, request: PlanRequest) -> dict[int, float]:
    """Map each number of replicas to a lower bound on the step time in seconds.

    The bound assumes equal micro-batches, divisible layers and free messages between stages. A stage starts only after the
    first forward of all earlier stages, and these still run their backwards after its last one. So with M micro-batches in a
    step of T seconds, the first stage spends at most T / M on each, and every later stage 1 - 1 / M times as much as the one
    before. Each replica has at least one micro-batch and one first stage. Gradient all-reduces start with a stage's last
    backward, and cross hosts unless one host has a rank for each replica.
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
    forward_s: Seconds, backward_s: Seconds, out_s: Seconds, back_s: Seconds, warm_up: Sequence[int], micro_batches: int
) -> float:
    """Lower-bound the end times of ``outline.spans_s`` for an unsplit backward and a non-increasing ``warm_up``.

    Let A be the time of a micro-batch's forward, backward and messages before stage i, R that time from stage i on, and M the
    number of micro-batches. The bound is the maximum over stages i < j of

    * ``A + M (F_i + B_i)``: stage i computes all micro-batches;
    * ``A + (M - 1) message + R``: all micro-batches cross the link after stage i, in the slower direction;
    * ``A + (k_j - 1) F_i + n C + r F_i + R``: k_j - 1 forwards, n cycles of stages i and j (C seconds each), the r remaining
      forwards, and the way of the last micro-batch to the end and back.
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
            waiting, each = micro_batches - behind, flying[i] - behind + 1
            end_s = before_s + (behind - 1 + waiting % each) * ahead_s + waiting // each * around_s + left_s
            bound_s = end_s if end_s > bound_s else bound_s
        through_s = own_s + hops_s[i]
        before_s, left_s = before_s + through_s, left_s - through_s
    return bound_s
