"""Convert a job into a ``PlanRequest``, without torch or MPI, so that offline commands and runs plan in the same way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.rules import MAX_AUTO_MICRO_BATCH, MAX_MICRO_BATCHES
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import COPY_BYTES

MEMORY_GIVEN = "given as [cluster] memory_bytes"
"""``memory_reason`` of a budget set by the job."""
INDIFFERENCE_RATIO = 0.005
"""Relative gain below which two plans count as equally fast, since measured times vary by more than half a percent."""


def micro_batch_choices(global_batch: int, size: int | str, ranks: int, dropout: bool) -> tuple[tuple[int, ...], str]:
    """Return the micro-batch sizes (in sequences) that the planner may choose from, and the reason as text.

    Dropout masks depend on which sequences share a micro-batch, so with dropout the size must not depend on the machines.
    """
    if isinstance(size, int):
        return (size,), f"micro-batch {size}: set by the job"
    sizes = [d for d in range(1, global_batch + 1) if global_batch % d == 0 and global_batch // d <= MAX_MICRO_BATCHES]
    if dropout:
        fixed = max([d for d in sizes if 4 * d <= global_batch], default=1)
        return (fixed,), f"micro-batch {fixed}: fixed, since dropout masks depend on it"
    limit = min(MAX_AUTO_MICRO_BATCH, max(1, global_batch // ranks))
    choices = tuple(d for d in sizes if d <= limit)
    return choices, f"micro-batch: the planner's choice among {', '.join(map(str, choices))}"


def timed_micro_batches(global_batch: int, requested: int | str, ranks: int, dropout: bool) -> tuple[int, ...]:
    """Return all micro-batch sizes that the planner may choose for a single rank or for all ranks, in ascending order."""
    counts = (ranks, 1)
    return tuple(sorted({size for n in counts for size in micro_batch_choices(global_batch, requested, n, dropout)[0]}))


def build_plan_request(loaded: LoadedJob, ranks: int, dropout: bool, versions: int = 0) -> PlanRequest:
    """Build the planner's request from a job.

    Args:
        ranks, dropout: number of ranks and whether dropout is used, which determine the micro-batch choices.
        versions: number of copies that each rank keeps of its state, and likewise of a peer's state (``state.peer_replicas``).
    """
    job = loaded.job
    snapshots = 1 if job.checkpoint.background and job.checkpoint.every else 0
    trains_all = job.adapter.method == "none"
    max_pipelines = job.train.global_batch if job.plan.pipelines == "auto" else job.plan.pipelines
    choices, alone_choices = (
        micro_batch_choices(job.train.global_batch, job.train.micro_batch, count, dropout)[0] for count in (ranks, 1)
    )
    return PlanRequest(
        global_batch=job.train.global_batch,
        sequence_length=job.data.sequence_length,
        micro_batch_choices=choices,
        alone_micro_batch_choices=alone_choices,
        mask_sequences=choices[0] if dropout else None,
        max_pipelines=max_pipelines,
        split_choices=(False, True) if trains_all else (False,),
        schedule=job.plan.schedule,
        stages_per_rank=job.plan.stages_per_rank,
        groups=job.plan.tensor_parallel,
        streaming={False: "never", "auto": "auto", True: "shorter"}[job.plan.offload],
        recompute_choices=(False, True) if job.train.recompute == "auto" else (job.train.recompute,),
        allow_idle=job.plan.allow_idle,
        thorough=job.plan.thorough,
        memory_reserve=job.plan.memory_reserve,
        indifference=INDIFFERENCE_RATIO,
        copy_bytes_per_trainable_parameter=COPY_BYTES * (snapshots + 2 * versions),
    )


def limit_to_timed(request: PlanRequest, profile: ClusterProfile) -> PlanRequest:
    """Remove micro-batch sizes from ``request`` that are larger than any timed size, but keep at least the smallest.

    A profile without samples was derived rather than measured; its cost curves extrapolate, so all sizes stay.
    """
    max_sequences = _largest_timed(profile)
    if max_sequences is None:
        return request

    def timed(choices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in choices if size <= max_sequences) or choices[:1]

    return replace(
        request,
        micro_batch_choices=timed(request.micro_batch_choices),
        alone_micro_batch_choices=timed(request.alone_micro_batch_choices),
    )


def timed_choices(request: PlanRequest, profile: ClusterProfile) -> tuple[PlanRequest, tuple[str, ...]]:
    """Return the result of ``limit_to_timed``, and a remark if it removed any choices."""
    limited = limit_to_timed(request, profile)
    dropped = {*request.micro_batch_choices, *request.alone_micro_batch_choices}
    dropped -= {*limited.micro_batch_choices, *limited.alone_micro_batch_choices}
    text = f"micro-batch: not {', '.join(map(str, sorted(dropped)))}: the profile has no timings for these sizes"
    return limited, (text,) if dropped else ()


def _largest_timed(profile: ClusterProfile) -> int | None:
    """Return the largest timed micro-batch in sequences, or None if the profile has no timings."""
    curves = [times.forward_s for device in profile.devices for times in device.layers.values()]
    counts = [curve.sample_tokens[-1] for curve in curves if curve.sample_tokens]
    return max(counts) // profile.model.sequence_length if counts else None


def with_memory_budget(profile: ClusterProfile, limit_bytes: int | None) -> ClusterProfile:
    """Replace the memory budgets in the profile by ``limit_bytes``, the job's ``[cluster] memory_bytes``, unless it is None.

    The budget applies to every rank. A host's budget is the sum over the ranks that compute in its memory. Hosts without such
    ranks keep their measured budget, which is used for weights that GPU stages offload.
    """
    if limit_bytes is None:
        return profile
    devices = tuple(replace(device, memory_bytes=limit_bytes, memory_reason=MEMORY_GIVEN) for device in profile.devices)
    ranks_by_host = Counter(device.host for device in devices if device.shares_host_memory)

    def with_budget(host: HostProfile) -> HostProfile:
        ranks = ranks_by_host[host.name]
        reason = MEMORY_GIVEN if ranks == 1 else f"{MEMORY_GIVEN} to each of {ranks}"
        return replace(host, memory_bytes=limit_bytes * ranks, memory_reason=reason) if ranks else host

    return replace(profile, devices=devices, hosts=tuple(map(with_budget, profile.hosts)))
