"""What would make a model fit: changes of the job or the cluster, each planned for again before it is suggested.

A change whose costs are known (micro-batch, sequence length, recompute, reserve, more ranks) is verified as it stands. A change
that would need another profile (dtype, adapters, 4 bits) is verified on costs estimated from this one, and the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hetero_mpi.planning.decision.decide import decide, fits
from hetero_mpi.planning.types.cluster_changes import with_copy_of
from hetero_mpi.planning.types.cost import EIGHT_BIT_SAVING, LayerCost, ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

MORE_RANKS = 8
TOGETHER = "together"
"""How a row of changes begins."""
SHORTEST_SEQUENCE = 32
NF4_BYTES = 0.5625
"""Bytes per packed weight, scales without double quantisation included."""
ADAPTER_SHARE = 0.01
"""Parameters of rank-16 adapters on all matrices of a block, in parts of the block's own (0.3 to 1 % in models of 1B and more)."""


def remedies(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Single changes that make it fit; when there are none, the shortest row of changes that does together."""
    found = False
    for text in (
        _streaming(profile, request),
        _recompute(profile, request),
        _smaller_micro_batch(profile, request),
        _shorter(profile, request),
        _no_reserve(profile, request),
        _in_bf16(profile, request),
        _moments(profile, request),
        _adapters(profile, request, packed=False),
        _adapters(profile, request, packed=True),
        _more_ranks(profile, request),
    ):
        if text is not None:
            found = True
            yield text
    if not found:
        yield from _together(profile, request)


def nothing_helps() -> str:
    return (
        "None of these alone makes it fit, nor all that the job can change together: recompute, the smallest micro-batch, shorter "
        f"sequences, bf16 where it is offered, LoRA over NF4, no memory reserve, {MORE_RANKS} more ranks like the largest. Use a "
        "smaller model, or ranks with more memory."
    )


def _verified(profile: ClusterProfile, request: PlanRequest, text: str) -> str | None:
    return text if fits(profile, request) else None


def _streaming(profile: ClusterProfile, request: PlanRequest) -> str | None:
    if request.streaming != "never":
        return None
    changed = replace(request, streaming="auto")
    if decide(profile, changed) is None:
        return None
    what = (
        "weights and their state kept in host memory, and streamed"
        if profile.model.trained_whole
        else "frozen weights streamed"
    )
    return f'{what} from host memory: plan.stream = "auto"'


def _recompute(profile: ClusterProfile, request: PlanRequest) -> str | None:
    if True in request.recompute_choices:
        return None
    changed = replace(request, recompute_choices=(False, True))
    return _verified(profile, changed, 'repeating forwards instead of keeping activations: train.recompute = "auto"')


def _smaller_micro_batch(profile: ClusterProfile, request: PlanRequest) -> str | None:
    smaller = [b for b in range(1, min(request.micro_batch_choices)) if request.global_batch % b == 0]
    tries = (
        _verified(
            profile, replace(request, micro_batch_choices=(b,)), f"smaller micro-batches: train.micro_batch = {b}"
        )
        for b in reversed(smaller)
    )
    return next(filter(None, tries), None)


def _shorter(profile: ClusterProfile, request: PlanRequest) -> str | None:
    length = request.sequence_length // 2
    while length >= min(SHORTEST_SEQUENCE, max(1, request.sequence_length // 2)):
        text = _verified(
            profile, replace(request, sequence_length=length), f"shorter sequences: data.sequence_length = {length}"
        )
        if text is not None or length == 1:
            return text
        length //= 2
    return None


def _no_reserve(profile: ClusterProfile, request: PlanRequest) -> str | None:
    if request.memory_reserve <= 0:
        return None
    return _verified(profile, replace(request, memory_reserve=0.0), "keeping no memory free: plan.memory_reserve = 0.0")


def _in_bf16(profile: ClusterProfile, request: PlanRequest) -> str | None:
    if profile.model.dtype != "fp32":
        return None
    changed = replace(profile, model=in_bf16(profile.model))
    return _verified(
        changed, request, 'half the bytes per value: train.dtype = "bf16" (estimated from the fp32 figures)'
    )


def _moments(profile: ClusterProfile, request: PlanRequest) -> str | None:
    no_kernel = any(device.backend == "mps" for device in profile.devices)
    if profile.model.eight_bit or not profile.model.trained_whole or no_kernel:
        return None
    changed = replace(profile, model=in_eight_bit(profile.model))
    text = 'moments in 8 bits: train.optimizer = "adamw_8bit" (estimated from this profile\'s figures)'
    return _verified(changed, request, text)


def _adapters(profile: ClusterProfile, request: PlanRequest, packed: bool) -> str | None:
    model = profile.model
    if not model.trained_whole and (not packed or is_packed(model)):
        return None
    names = [
        *(['model.quantization = "nf4"'] if packed else []),
        *(['adapter.method = "lora"'] if model.trained_whole else []),
    ]
    what = {
        (True, True): "adapters over weights in 4 bits",
        (True, False): "weights in 4 bits",
        (False, True): "adapters only",
    }
    text = f"{what[packed, model.trained_whole]}: {' and '.join(names)} (estimated from this profile's figures)"
    return _verified(replace(profile, model=with_adapters(model, packed)), request, text)


def _more_ranks(profile: ClusterProfile, request: PlanRequest) -> str | None:
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    for count in range(1, MORE_RANKS + 1):
        if fits(with_more_ranks(profile, count), request):
            return f"{count} more rank{'s' if count > 1 else ''} like rank {largest.rank} ({largest.name})"
    return None


def _together(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Recompute, the smallest micro-batch, LoRA over NF4 and shorter sequences, one after the other until it fits."""
    texts: list[str] = []
    if True not in request.recompute_choices:
        request = replace(request, recompute_choices=(False, True))
        texts.append('train.recompute = "auto"')
    if min(request.micro_batch_choices) > 1:
        request = replace(request, micro_batch_choices=(1,))
        texts.append("train.micro_batch = 1")
    if len(texts) > 1 and fits(profile, request):
        yield f"{TOGETHER}: {', '.join(texts)}"
        return
    estimated = ""
    model = profile.model
    if model.trained_whole or not is_packed(model):
        profile = replace(profile, model=with_adapters(model, packed=True))
        texts += ['model.quantization = "nf4"', *(['adapter.method = "lora"'] if model.trained_whole else [])]
        estimated = " (4 bits and adapters estimated from this profile's figures)"
        if fits(profile, request):
            yield f"{TOGETHER}: {', '.join(texts)}{estimated}"
            return
    shorter = _shorter(profile, request)
    if shorter is not None:
        yield f"{TOGETHER}: {', '.join([*texts, shorter.partition(': ')[2]])}{estimated}"


def is_packed(model: ModelCost) -> bool:
    return any(layer.parameter_bytes < 1.5 * layer.parameters for layer in model.layers[1:-1])


def with_adapters(model: ModelCost, packed: bool) -> ModelCost:
    """Estimated costs with LoRA on all blocks, which are packed in NF4 if ``packed``; embedding and head are frozen."""
    size = {"fp32": 4, "bf16": 2, "fp16": 2}[model.dtype]

    def frozen(index: int, layer: LayerCost) -> LayerCost:
        if not 0 < index < len(model.layers) - 1:
            return replace(layer, trainable_parameters=0, eight_bit_saving_bytes=0.0)
        own = layer.parameters - (0 if model.trained_whole else layer.trainable_parameters)
        adapters = math.ceil(ADAPTER_SHARE * own) if model.trained_whole else layer.trainable_parameters
        held = math.ceil(own * (NF4_BYTES if packed else size)) + size * adapters
        # One matrix at a time is unpacked: a third of a block at most.
        unpacked = math.ceil(size * own / 3) if packed else layer.workspace_bytes
        return replace(
            layer,
            parameters=own + adapters,
            trainable_parameters=adapters,
            eight_bit_saving_bytes=0.0,
            parameter_bytes=held,
            workspace_bytes=max(layer.workspace_bytes, unpacked),
        )

    layers = tuple(frozen(index, layer) for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, tied=False, tied_bytes=0)


def in_bf16(model: ModelCost) -> ModelCost:
    """The fp32 model's costs with 2 bytes per value and an fp32 master weight; workspaces (fp32 logits) stay."""
    layers = tuple(
        replace(
            layer,
            parameter_bytes=math.ceil(layer.parameter_bytes / 2),
            activation_bytes_per_token=layer.activation_bytes_per_token / 2,
            boundary_bytes_per_token=math.ceil(layer.boundary_bytes_per_token / 2),
        )
        for layer in model.layers
    )
    state = model.state_bytes_per_trainable_parameter + 4
    return replace(model, dtype="bf16", layers=layers, state_bytes_per_trainable_parameter=state)


def in_eight_bit(model: ModelCost) -> ModelCost:
    """The costs with the moments of all layers but the embedding in 8 bits."""
    embedding, *others = model.layers
    packed = (replace(x, eight_bit_saving_bytes=EIGHT_BIT_SAVING * x.trainable_parameters) for x in others)
    return replace(model, layers=(embedding, *packed))


def with_more_ranks(profile: ClusterProfile, count: int) -> ClusterProfile:
    """The cluster with ``count`` more ranks like the one with the most memory, linked as that one is."""
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    for _ in range(count):
        profile = with_copy_of(profile, largest.rank)
    return profile
