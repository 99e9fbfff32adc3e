"""Lower bounds on the step time of so many pipelines: they wait until they are filled, and for the sums of their gradients.

They say of a cluster with groups, before it is searched, which numbers of pipelines are worth it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

from hetero_mpi.planning.bounds import SHORTEST_S, usable_devices
from hetero_mpi.planning.types.cost import GRADIENT_BYTES
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest


def filling_bounds_s(profile: ClusterProfile, request: PlanRequest) -> dict[int, float]:
    """Number of pipelines -> no plan of so many, whose micro-batches are alike, takes less, were layers divisible at will and
    messages from stage to stage free.

    A stage has its first micro-batch when all stages before it have computed it forward, and these go on for as long as it takes
    them backward after its last one. So with M micro-batches in a step of T seconds the first stage computes T / M of each at the
    most, and every further one 1 - 1 / M times as much as the one before. There are as many first stages as pipelines.

    Each has a micro-batch at least. Several sum gradients when a stage's last backward has begun: it has T less these seconds for
    all but one of M. They pass between hosts where no host has a rank for each.
    """
    model, devices, least = profile.model, usable_devices(profile), min(request.micro_batch_choices)
    most = min(request.max_pipelines, len(devices), request.global_batch // least)
    links = [(a.host == b.host, profile.link(a.rank, b.rank)) for a, b in itertools.permutations(devices, 2)]
    near, far = (max((x.bytes_per_s for here, x in links if here <= some), default=math.inf) for some in (True, False))
    gradients = GRADIENT_BYTES * sum(layer.trainable_parameters for layer in model.layers)
    together = max(Counter(device.host for device in devices).values())
    found = dict.fromkeys(range(1, most + 1), math.inf)
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
        for number in range(1, min(most, count) + 1):
            later = 1 - 1 / (count - number + 1)
            filled = count / sum(later ** (place // number) * speed for place, speed in enumerate(speeds))
            sums_s = (1 - 1 / number) * gradients / (near if number <= together else far)
            summed = number * max(0.0, sums_s * speeds[-1] - 1)
            least_s = max(filled, 1 / speeds[number - 1], (count + summed) / sum(speeds))
            found[number] = min(found[number], least_s)
    return found
