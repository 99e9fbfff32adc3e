"""A lower bound on the step time of an instance: total work over total speed."""

from __future__ import annotations

import numpy as np

from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

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
        bounds_s.append(float(counts @ (prices[:, None] / prices.sum() * work).min(axis=0)))
    # Every used rank also spends its optimizer's fixed time, and at least one rank is used.
    return max(bounds_s) + min(device.optimizer_fixed_s for device in devices)


def _least_s(times: LayerTimes, request: PlanRequest) -> float:
    """Of one sequence, at the best micro-batch size."""
    return min(least_s(times, n * request.sequence_length, request) / n for n in set(request.micro_batch_choices))


def least_s(times: LayerTimes, tokens: int, request: PlanRequest) -> float:
    """Forward and backward of one micro-batch, in whichever way the request leaves to choose from."""
    backward = times.backward_s.at(tokens)
    may_split = request.schedule == "split" or (request.schedule == "auto" and True in request.split_choices)
    if may_split and times.input_s is not None and times.weight_s is not None:
        backward = min(backward, times.input_s.at(tokens) + times.weight_s.at(tokens))
    return times.forward_s.at(tokens) + backward
