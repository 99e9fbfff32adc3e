"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help.

Each change of the job or the cluster is planned for again before it is suggested. One whose costs are known (micro-batch, sequence
length, recompute, reserve, more ranks) is verified as it stands. One that would need another profile (dtype, adapters, 4 bits) is
verified on costs estimated from this one, and the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hetero_mpi.planning.decision.decide import decide, fits, streamable
from hetero_mpi.planning.decision.shortage import closest, with_hosts_divided
from hetero_mpi.planning.memory import host_state_bytes, memory_of, rank_usable_bytes, shared_memories, usable_bytes
from hetero_mpi.planning.types.cluster_changes import with_copy_of
from hetero_mpi.planning.types.cost import DTYPE_BYTES, EIGHT_BIT_SAVING, STREAMED_LAYERS, LayerCost, ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units

MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""
MORE_RANKS = 8
TOGETHER = "together"
"""How a row of changes begins."""
SHORTEST_SEQUENCE = 32
NF4_BYTES = 0.5625
"""Bytes per packed weight, scales without double quantisation included."""
ADAPTER_SHARE = 0.01
"""Parameters of rank-16 adapters on all matrices of a block, in parts of the block's own (0.3 to 1 % in models of 1B and more)."""
LORA = 'adapter.method = "lora"'
ESTIMATED = " (estimated from this profile's figures)"
NOTHING_HELPS = (
    "None of these alone makes it fit, nor all that the job can change together: recompute, the smallest micro-batch, shorter "
    f"sequences, bf16 where it is offered, LoRA over NF4, no memory reserve, {MORE_RANKS} more ranks like the largest. Use a "
    "smaller model, or ranks with more memory."
)


def explain_shortage(profile: ClusterProfile, request: PlanRequest) -> str:
    """The message for a model that fits nowhere."""
    divided = next(with_hosts_divided(profile))
    (pipeline,) = closest(divided, request).plan.pipelines
    count = len(pipeline.stages)
    lines = [
        "the model does not fit in memory on these ranks "
        f"({units.rows_of(request.sequence_length)}, {profile.model.dtype}). "
        f"The one pipeline that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {pipeline.micro_batch}:"
    ]
    short = _short_ranks(pipeline, divided, request)
    told = sorted(short, reverse=True)[:MOST_RANKS]
    lines += [text for lacking, text in short if (lacking, text) in told]
    if len(short) > len(told):
        rest = len(short) - len(told)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    for host, ranks in shared_memories(profile):
        listed = ", ".join(map(str, ranks))
        lines.append(
            f"  ranks {listed} share the memory of host {host.name}, {units.size(host.memory_bytes)}, here divided evenly"
        )
    if request.streaming != "never" and streamable(profile):
        lines += _host_shortage(profile, request)
    helps = list(remedies(profile, request))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else NOTHING_HELPS)
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _host_shortage(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """The reason why weights are not streamed, with all that is trained in the memory of the hosts."""
    model, whole = profile.model, profile.model.trained_whole
    if not whole and all(device.shares_host_memory for device in profile.devices):
        return  # mapped files take no memory that must be there
    needed = int(host_state_bytes(model, 0, len(model.layers)))
    names = sorted({device.host for device in profile.devices})
    known = {host.name: usable_bytes(host.memory_bytes, request.memory_reserve) for host in profile.hosts}
    what = "weights, gradients and optimizer state" if whole else "frozen weights"
    text = f"  Streamed, {what} take {units.size(needed)} of the hosts' memory"
    there = sum(known.get(name, needed) for name in names)
    if needed > there:
        other = "would make it fit (what is trained is not kept on disks, since each step writes all of it)"
        if not whole:
            other = "would make it fit, or a disk whose speed is measured: [model] shard_cache, or TMPDIR, on one"
        yield (
            f"{text}, of which {units.size(there)} are usable ([[hosts]] memory_bytes): short by {needed - there} bytes; so "
            f"much more memory of hosts {other}"
        )
    elif whole:
        yield f"{text}, and the devices' is too small for {STREAMED_LAYERS} layers at a time, or no way was found to divide it"


def _short_ranks(pipeline: PipelinePlan, profile: ClusterProfile, request: PlanRequest) -> list[tuple[int, str]]:
    """(bytes lacking, a line about it) of every rank that the closest split asks too much of, in its order."""
    result = []
    for stage in pipeline.stages:
        (rank,), holding = stage.ranks, (stage.warm_up + 1, 0)
        ways = (replace(stage, recompute=again) for again in request.recompute_choices)
        needs = (memory_of(profile, pipeline, way, request.sequence_length, holding) for way in ways)
        parts, usable = min(needs, key=lambda one: one.total), rank_usable_bytes(profile, rank, request.memory_reserve)
        if parts.total > usable:
            text = (
                f"  rank {rank} ({profile.devices[rank].name}) with "
                f"{units.layers(stage.first, stage.last, len(profile.model.layers))} is short by "
                f"{parts.total - usable} bytes: "
                f"it needs {units.size(parts.total)} (parameters {units.size(parts.parameters)}, "
                f"optimizer state and gradients {units.size(parts.state)}, "
                f"activations {units.size(parts.activations)}, workspace {units.size(parts.workspace)}, "
                f"buffers {units.size(parts.staging)}) and may use {units.size(usable)}"
            )
            result.append((parts.total - usable, text))
    return result


class _Change(NamedTuple):
    """A changed job or cluster, and what to say of it."""

    what: str
    settings: tuple[str, ...]
    """Keys of the job with their new values."""
    profile: ClusterProfile
    request: PlanRequest
    estimated: str = ""

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.what, " and ".join(self.settings)))) + self.estimated

    def fits(self) -> bool:
        return fits(self.profile, self.request)

    def asking(self, what: str, setting: str, **changes: Any) -> _Change:
        """The change to another request."""
        return _Change(what, (setting,), self.profile, replace(self.request, **changes))

    def costing(self, what: str, settings: tuple[str, ...], model: ModelCost, estimated: str = ESTIMATED) -> _Change:
        """The change to a model of other costs."""
        return _Change(what, settings, replace(self.profile, model=model), self.request, estimated)


def remedies(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Single changes that make it fit; when there are none, the shortest row of changes that does together."""
    now, found = _Change(TOGETHER, (), profile, request), False
    for kind in _kinds(now):
        for change in kind:
            streams = change.request.streaming != request.streaming
            if decide(change.profile, change.request) is not None if streams else change.fits():
                found = True
                yield change.text
                break
    if not found:
        yield from _together(now)


def _kinds(now: _Change) -> Iterator[Iterable[_Change]]:
    """The possible changes of every kind, the least one first."""
    model, whole = now.profile.model, now.profile.model.trained_whole
    if now.request.streaming == "never":
        what = "weights and their state kept in host memory, and streamed" if whole else "frozen weights streamed"
        yield [now.asking(f"{what} from host memory", 'plan.stream = "auto"', streaming="auto")]
    yield _recompute(now)
    yield _smaller_micro_batches(now)
    yield _shorter(now)
    if now.request.memory_reserve > 0:
        yield [now.asking("keeping no memory free", "plan.memory_reserve = 0.0", memory_reserve=0.0)]
    if model.dtype == "fp32":
        setting, guess = ('train.dtype = "bf16"',), " (estimated from the fp32 figures)"
        yield [now.costing("half the bytes per value", setting, in_bf16(model), guess)]
    if (
        whole and model.optimizer == "adamw" and all(device.backend != "mps" for device in now.profile.devices)
    ):  # no kernel
        yield [
            now.costing("moments in 8 bits", ('train.optimizer = "adamw_8bit"',), with_optimizer(model, "adamw_8bit"))
        ]
    if whole:
        yield [now.costing("adapters only", (LORA,), with_adapters(model, packed=False))]
    yield _four_bits(now)
    yield _more_ranks(now)


def _recompute(now: _Change) -> Iterator[_Change]:
    if True not in now.request.recompute_choices:
        what = "repeating forwards instead of keeping activations"
        yield now.asking(what, 'train.recompute = "auto"', recompute_choices=(False, True))


def _smaller_micro_batches(now: _Change) -> Iterator[_Change]:
    for size in range(min(now.request.micro_batch_choices) - 1, 0, -1):
        if now.request.global_batch % size == 0:
            yield now.asking("smaller micro-batches", f"train.micro_batch = {size}", micro_batch_choices=(size,))


def _shorter(now: _Change) -> Iterator[_Change]:
    length = now.request.sequence_length // 2
    shortest = min(SHORTEST_SEQUENCE, max(1, length))
    while length >= shortest:
        yield now.asking("shorter sequences", f"data.sequence_length = {length}", sequence_length=length)
        length //= 2


def _four_bits(now: _Change) -> Iterator[_Change]:
    model, whole = now.profile.model, now.profile.model.trained_whole
    if whole or not is_packed(model):
        settings = ('model.quantization = "nf4"', *([LORA] if whole else []))
        what = "adapters over weights in 4 bits" if whole else "weights in 4 bits"
        yield now.costing(what, settings, with_adapters(model, packed=True))


def _more_ranks(now: _Change) -> Iterator[_Change]:
    profile = now.profile
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    for count in range(1, MORE_RANKS + 1):
        profile = with_copy_of(profile, largest.rank)
        what = f"{count} more rank{'s' if count > 1 else ''} like rank {largest.rank} ({largest.name})"
        yield _Change(what, (), profile, now.request)


def _together(row: _Change) -> Iterator[str]:
    """Recompute, the smallest micro-batch, LoRA over NF4 and shorter sequences, one after the other until it fits."""
    estimated = ""
    for kind in (_recompute, _smaller_micro_batches, _four_bits, _shorter):
        changes, last = [*kind(row)], kind is _shorter
        for change in changes if last else changes[-1:]:
            longer = change._replace(settings=row.settings + change.settings)
            if change.estimated:
                estimated = " (4 bits and adapters estimated from this profile's figures)"
            if len(longer.settings) > 1 and longer.fits():
                yield f"{TOGETHER}: {', '.join(longer.settings)}{estimated}"
                return
            row = row if last else longer


def is_packed(model: ModelCost) -> bool:
    return any(layer.parameter_bytes < 1.5 * layer.parameters for layer in model.layers[1:-1])


def with_adapters(model: ModelCost, packed: bool) -> ModelCost:
    """Estimated costs with LoRA on all blocks, which are packed in NF4 if ``packed``; embedding and head are frozen."""
    size = DTYPE_BYTES[model.dtype]

    def frozen(index: int, layer: LayerCost) -> LayerCost:
        if not 0 < index < len(model.layers) - 1:
            return replace(layer, trainable_parameters=0, moments_saving_bytes=0.0)
        own = layer.parameters - (0 if model.trained_whole else layer.trainable_parameters)
        adapters = math.ceil(ADAPTER_SHARE * own) if model.trained_whole else layer.trainable_parameters
        held = math.ceil(own * (NF4_BYTES if packed else size)) + size * adapters
        # One matrix at a time is unpacked: a third of a block at most.
        unpacked = math.ceil(size * own / 3) if packed else layer.workspace_bytes
        return replace(
            layer,
            parameters=own + adapters,
            trainable_parameters=adapters,
            moments_saving_bytes=0.0,
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
            logits_bytes_per_token=layer.logits_bytes_per_token / 2,
            boundary_bytes_per_token=math.ceil(layer.boundary_bytes_per_token / 2),
        )
        for layer in model.layers
    )
    state = model.state_bytes_per_trainable_parameter + 4
    return replace(model, dtype="bf16", layers=layers, state_bytes_per_trainable_parameter=state)


_SAVED = {"adamw_8bit": EIGHT_BIT_SAVING, "adafactor": 8.0, "muon": 4.0}
"""Bytes of a parameter that an optimizer keeps less than AdamW."""


def with_optimizer(model: ModelCost, optimizer: str) -> ModelCost:
    """The costs with another optimizer than AdamW, as if it kept the same of every parameter behind the embedding."""
    embedding, *others = model.layers
    saving = (replace(x, moments_saving_bytes=_SAVED[optimizer] * x.trainable_parameters) for x in others)
    return replace(model, layers=(embedding, *saving), optimizer=optimizer)
