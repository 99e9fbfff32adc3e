"""Times of layers, optimizer steps, copies and disk reads on one device, in seconds, from its profile."""

from functools import reduce
from operator import add

from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes

STEP_BYTES = 46
"""Bytes read and written per parameter in an optimizer step: norm 4, clipping 8, AdamW 28, rounding 6."""


def compute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int, op: Op) -> float:
    """Seconds to run operation ``op`` (``F``, ``B``, ``I`` or ``W``) through the layers [first, last)."""
    of_kind = {kind: layer_s(times, op, tokens) for kind, times in device.layers.items()}
    return reduce(add, (of_kind[layer.kind] for layer in profile.model.layers[first:last]), overhead_s(device, op))


def whole_model_s(profile: ClusterProfile, device: DeviceProfile, tokens: int | None = None) -> float:
    """Seconds for forward and backward of ``tokens`` (default: one sequence) through all layers on ``device``."""
    tokens = profile.model.sequence_length if tokens is None else tokens
    return sum(compute_s(profile, device, 0, len(profile.model.layers), tokens, op) for op in (Op.F, Op.B))


def layer_s(times: LayerTimes, op: Op, tokens: int) -> float:
    """Seconds to run ``op`` through one layer; without a measured split, ``I`` is the full backward and ``W`` is 0."""
    if op is Op.F:
        return times.forward_s.at(tokens)
    if op is Op.W:
        return times.weight_s.at(tokens) if times.weight_s is not None else 0.0
    curve = times.input_s if op is Op.I and times.input_s is not None else times.backward_s
    return curve.at(tokens)


def overhead_s(device: DeviceProfile, op: Op) -> float:
    if op is Op.F:
        return device.forward_overhead_s
    return 0.0 if op is Op.W else device.backward_overhead_s


def repeated_s(times: LayerTimes, tokens: int) -> float:
    """Seconds that recomputation adds to a layer's backward, or the layer's forward time if not measured."""
    if times.recompute_s is None:
        return times.forward_s.at(tokens)
    return max(0.0, times.recompute_s.at(tokens) - times.backward_s.at(tokens))


def recompute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int) -> float:
    """Seconds that a stage's backward spends recomputing the blocks among its layers [first, last)."""
    layers = profile.model.layers
    of_kind = {kind: repeated_s(times, tokens) for kind, times in device.layers.items()}
    return reduce(add, (of_kind[layer.kind] for layer in layers[max(1, first) : min(last, len(layers) - 1)]), 0.0)


def optimizer_s(profile: ClusterProfile, device: DeviceProfile, parameters: float, streamed: bool = False) -> float:
    """Seconds of one optimizer step over ``parameters``, in host memory for offloaded stages of full fine-tuning."""
    in_host_memory = streamed and profile.model.trained_whole and not device.shares_host_memory
    each_s = host_optimizer_s(device) if in_host_memory else device.optimizer_s_per_parameter
    return device.optimizer_fixed_s + each_s * parameters


def host_optimizer_s(device: DeviceProfile) -> float:
    """Seconds per parameter of the optimizer in host memory; estimated from the copy bandwidth if not measured."""
    if device.host_optimizer_s_per_parameter is not None:
        return device.host_optimizer_s_per_parameter
    return STEP_BYTES / device.host_to_device_bytes_per_s


def disk_s(profile: ClusterProfile, device: DeviceProfile, size_bytes: int) -> float:
    """Seconds to read ``size_bytes`` from the disk of the device's host; 0 if the disk was not measured."""
    host = profile.host(device.rank)
    return size_bytes / host.disk_bytes_per_s if host is not None and host.disk_bytes_per_s else 0.0


def offload_s(device: DeviceProfile, model: ModelCost, layer: int) -> float:
    """Seconds to copy an offloaded layer's gradients off the device in full fine-tuning; 0 for adapters."""
    if device.shares_host_memory or not model.trained_whole:
        return 0.0
    return device.copy_latency_s + model.gradient_bytes(layer) / device.device_to_host_bytes_per_s


def weights_s(device: DeviceProfile, size_bytes: int) -> float:
    """Seconds to copy weights from host memory to the device; 0 if the device computes in host memory."""
    if device.shares_host_memory or not size_bytes:
        return 0.0
    return device.copy_latency_s + size_bytes / device.host_to_device_bytes_per_s
