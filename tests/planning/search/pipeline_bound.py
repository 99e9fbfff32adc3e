"""What one pipeline of whole layers cannot beat: a closer bound than the fluid one, to hold plans against."""

from dataclasses import replace

from hetero_mpi.planning.bounds import fluid_bound_s, least_s, usable_devices
from hetero_mpi.planning.memory import usable_bytes
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest


def pipeline_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """What one pipeline of whole layers cannot beat, whatever its links and warm-up: at or over ``fluid_bound_s``.

    The largest of three, at the best micro-batch size:

    * the fluid bound;
    * whole blocks: a rank that holds n of them works n times a block's time per micro-batch, so that T is at least the L-th
      smallest of all such times (L blocks; a rank holds no more of them than fit);
    * filling: stage s cannot begin before the first micro-batch has passed all stages before it and come back after it, so
      that ``M c_s <= T - sum over j < s of c_j``. With speeds v in descending order that allows at most
      ``T/M * sum over j of v_j (1 - 1/M)^j`` work, on no more ranks than layers: the sum is linear in every c, so that each
      stage is either as long as it may be or empty, and by rearrangement the fastest goes first.
    """
    return min(_pipeline_s(profile, request, micro_batch) for micro_batch in request.micro_batch_choices)


def _pipeline_s(profile: ClusterProfile, request: PlanRequest, micro_batch: int) -> float:
    model, devices = profile.model, usable_devices(profile)
    fluid = fluid_bound_s(profile, replace(request, micro_batch_choices=(micro_batch,), max_pipelines=1))
    blocks = model.layers[1:-1]
    if not blocks or not devices or fluid == float("inf"):
        return fluid
    tokens = micro_batch * request.sequence_length
    count = request.global_batch // micro_batch

    def seconds(device: DeviceProfile, kind: str) -> float:
        return least_s(device.layers[kind], tokens, request)

    kinds = {layer.kind for layer in blocks}
    state = model.state_bytes_per_trainable_parameter
    held = min(layer.parameter_bytes + layer.trainable_parameters * state for layer in blocks)
    longest: list[float] = []
    for device in devices:
        room = usable_bytes(device.memory_bytes, request.memory_reserve) / max(held, 1.0)
        shortest = min(seconds(device, kind) for kind in kinds)
        longest += [count * n * shortest for n in range(1, 1 + min(len(blocks), int(room)))]
    whole = sorted(longest)[len(blocks) - 1] if len(longest) >= len(blocks) else float("inf")
    times = [seconds(device, blocks[0].kind) for device in devices]
    if min(times) <= 0 or request.schedule == "split" or True in request.split_choices:
        return max(fluid, whole)  # weight gradients need not wait for the pipeline to fill
    work = sum(
        min(seconds(device, layer.kind) / block for device, block in zip(devices, times, strict=True))
        for layer in model.layers
    )
    speeds = sorted((1 / block for block in times), reverse=True)[: len(model.layers)]
    filled = work * count / sum(speed * (1 - 1 / count) ** place for place, speed in enumerate(speeds))
    return max(fluid, whole, filled)
