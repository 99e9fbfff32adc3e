"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help.

Each change of the job or the cluster is planned for again before it is suggested. One whose costs are known (micro-batch, sequence
length, recompute, reserve, more ranks) is verified as it stands. One that would need another profile (dtype, adapters, 4 bits) is
verified on costs estimated from this one, and the text says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hetero_mpi.planning.decision.alternatives import Alternative
from hetero_mpi.planning.decision.decide import decide, fits, streamable
from hetero_mpi.planning.decision.shortage import closest, with_hosts_divided
from hetero_mpi.planning.memory import host_state_bytes, memory_of, rank_usable_bytes, shared_memories, usable_bytes
from hetero_mpi.planning.types.cluster_changes import (
    in_bf16,
    is_packed,
    with_adapters,
    with_copy_of,
    with_optimizer,
)
from hetero_mpi.planning.types.plan import PipelinePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import STREAMED_LAYERS
from hetero_mpi.util import units

MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""
MORE_RANKS = 8
TOGETHER = "together"
"""How a row of changes begins."""
SHORTEST_SEQUENCE = 32
LORA = 'adapter.method = "lora"'
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


def remedies(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Single changes that make it fit; when there are none, the shortest row of changes that does together."""
    now, helped = Alternative("", profile, request), False
    for changes in _changes(now).values():
        change = next((one for one in changes if _fits(one, now)), None)
        if change is not None:
            helped = True
            yield change.text
    if not helped:
        yield from _together(now)


def _fits(change: Alternative, now: Alternative) -> bool:
    if change.request.streaming != now.request.streaming:
        return decide(change.profile, change.request) is not None
    return fits(change.profile, change.request)


def _changes(now: Alternative) -> dict[str, Iterable[Alternative]]:
    """Kind -> the further changes that there may be, the least one first."""
    profile, request, model = now.profile, now.request, now.profile.model
    whole, half = model.trained_whole, request.sequence_length // 2
    sizes = [n for n in range(min(request.micro_batch_choices) - 1, 0, -1) if request.global_batch % n == 0]
    lengths = [half >> n for n in range(half.bit_length()) if half >> n >= min(SHORTEST_SEQUENCE, half)]
    streamed = "weights and their state kept in host memory, and streamed" if whole else "frozen weights streamed"
    kept, again = "repeating forwards instead of keeping activations", (False, True)
    eight_bits = whole and model.optimizer == "adamw" and all(device.backend != "mps" for device in profile.devices)
    packed, lora = ("adapters over weights in 4 bits", [LORA]) if whole else ("weights in 4 bits", [])
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    larger = enumerate(accumulate([largest.rank] * MORE_RANKS, with_copy_of, initial=profile))
    like = f"like rank {largest.rank} ({largest.name})"
    return {
        "streaming": [now.asking(f"{streamed} from host memory", 'plan.stream = "auto"', streaming="auto")]
        * (request.streaming == "never"),
        "recompute": [now.asking(kept, 'train.recompute = "auto"', recompute_choices=again)]
        * (True not in request.recompute_choices),
        "micro-batch": [
            now.asking("smaller micro-batches", f"train.micro_batch = {n}", micro_batch_choices=(n,)) for n in sizes
        ],
        "length": [now.asking("shorter sequences", f"data.sequence_length = {n}", sequence_length=n) for n in lengths],
        "reserve": [now.asking("keeping no memory free", "plan.memory_reserve = 0.0", memory_reserve=0.0)]
        * (request.memory_reserve > 0),
        "bf16": [now.costing("half the bytes per value", ['train.dtype = "bf16"'], in_bf16(model), "the fp32 figures")]
        * (model.dtype == "fp32"),
        "8 bits": [
            now.costing("moments in 8 bits", ['train.optimizer = "adamw_8bit"'], with_optimizer(model, "adamw_8bit"))
        ]
        * eight_bits,
        "adapters": [now.costing("adapters only", [LORA], with_adapters(model, packed=False))] * whole,
        "4 bits": [now.costing(packed, ['model.quantization = "nf4"', *lora], with_adapters(model, packed=True))]
        * (whole or not is_packed(model)),
        "ranks": (
            replace(now, name=f"{units.plural(count, 'more rank')} {like}", profile=copied)
            for count, copied in larger
            if count
        ),
    }


def _together(now: Alternative) -> Iterator[str]:
    """Recompute, the smallest micro-batch, LoRA over NF4 and shorter sequences, one after the other until it fits."""
    for kind in ("recompute", "micro-batch", "4 bits", "length"):
        changes, last = [*_changes(now)[kind]], kind == "length"
        for change in changes if last else changes[-1:]:
            if len(change.settings) > 1 and fits(change.profile, change.request):
                yield f"{TOGETHER}: {', '.join(change.settings)}{change.estimated}"
                return
            now = now if last else change
