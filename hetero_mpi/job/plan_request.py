"""A job as planning sees it. Needs neither torch nor MPI: the offline commands ask the planner as a run does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.rules import LARGEST_AUTO, MOST_MICRO_BATCHES
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import MEMORY_GIVEN, PlanRequest
from hetero_mpi.planning.types.sizes import COPY_BYTES

INDIFFERENCE = 0.005
"""Measured times are not exact to half a per cent: no plan is preferred for less."""


def micro_batch_choices(global_batch: int, wanted: int | str, ranks: int, dropout: bool) -> tuple[tuple[int, ...], str]:
    """Sequences per micro-batch the planner may choose from, and why in words.

    With dropout the masks depend on the composition of the micro-batches, so the machines may not decide it.
    """
    if isinstance(wanted, int):
        return (wanted,), f"micro-batch {wanted}: as the job says"
    divisors = [
        d for d in range(1, global_batch + 1) if global_batch % d == 0 and global_batch // d <= MOST_MICRO_BATCHES
    ]
    if dropout:
        chosen = max([d for d in divisors if 4 * d <= global_batch], default=1)
        return (chosen,), f"micro-batch {chosen}: fixed, since dropout masks depend on it"
    limit = min(LARGEST_AUTO, max(1, global_batch // ranks))
    choices = tuple(d for d in divisors if d <= limit)
    return choices, f"micro-batch: the planner's choice among {', '.join(map(str, choices))}"


def timed_micro_batches(global_batch: int, wanted: int | str, ranks: int, dropout: bool) -> tuple[int, ...]:
    """All that the planner may choose from, those of a rank by itself included, increasing."""
    counts = (ranks, 1)
    return tuple(sorted({size for n in counts for size in micro_batch_choices(global_batch, wanted, n, dropout)[0]}))


def request_of(loaded: LoadedJob, ranks: int, dropout: bool, versions: int = 0) -> PlanRequest:
    """The job as planning sees it.

    Args:
        ranks, dropout: of which the choice of micro-batches depends.
        versions: how many copies of its own state a rank keeps for itself and, as many, for others (``state.peer_replicas``).
    """
    job = loaded.job
    snapshots = 1 if job.checkpoint.background and job.checkpoint.every else 0
    trains_all = job.adapter.method == "none"
    wanted = job.train.global_batch if job.plan.pipelines == "auto" else job.plan.pipelines
    choices, alone = (
        micro_batch_choices(job.train.global_batch, job.train.micro_batch, count, dropout)[0] for count in (ranks, 1)
    )
    return PlanRequest(
        global_batch=job.train.global_batch,
        sequence_length=job.data.sequence_length,
        micro_batch_choices=choices,
        alone_micro_batch_choices=alone,
        mask_sequences=choices[0] if dropout else None,
        max_pipelines=wanted,
        split_choices=(False, True) if trains_all else (False,),
        schedule=job.plan.schedule,
        stages_per_rank=job.plan.stages_per_rank,
        groups=job.plan.groups,
        streaming={False: "never", "auto": "auto", True: "shorter"}[job.plan.stream],
        recompute_choices=(False, True) if job.train.recompute == "auto" else (job.train.recompute,),
        allow_idle=job.plan.allow_idle,
        thorough=job.plan.thorough,
        memory_reserve=job.plan.memory_reserve,
        indifference=INDIFFERENCE,
        copy_bytes_per_trainable_parameter=COPY_BYTES * (snapshots + 2 * versions),
    )


def within_timed(request: PlanRequest, profile: ClusterProfile) -> PlanRequest:
    """``request`` without micro-batches that are larger than any rank has timed; the smallest choice stays.

    Profiles without samples are derived, and their lines go on.
    """
    largest = _largest_timed(profile)
    if largest is None:
        return request

    def timed(choices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in choices if size <= largest) or choices[:1]

    return replace(
        request,
        micro_batch_choices=timed(request.micro_batch_choices),
        alone_micro_batch_choices=timed(request.alone_micro_batch_choices),
    )


def timed_choices(request: PlanRequest, profile: ClusterProfile) -> tuple[PlanRequest, tuple[str, ...]]:
    """``within_timed``, and a remark where that leaves some out."""
    within = within_timed(request, profile)
    out = {*request.micro_batch_choices, *request.alone_micro_batch_choices}
    out -= {*within.micro_batch_choices, *within.alone_micro_batch_choices}
    text = f"micro-batch: none of {', '.join(map(str, sorted(out)))}, which the profile did not time"
    return within, (text,) if out else ()


def _largest_timed(profile: ClusterProfile) -> int | None:
    """Sequences; None: nothing was timed."""
    curves = [times.forward_s for device in profile.devices for times in device.layers.values()]
    counts = [curve.sample_tokens[-1] for curve in curves if curve.sample_tokens]
    return max(counts) // profile.model.sequence_length if counts else None


def with_memory(profile: ClusterProfile, given_bytes: int | None) -> ClusterProfile:
    """The profile with the job's ``[cluster] memory_bytes``, if it gives any.

    They hold for every rank. A host has them for each rank that computes in its memory. Hosts without such a rank keep their own:
    what GPUs stream lies there.
    """
    if given_bytes is None:
        return profile
    devices = tuple(replace(device, memory_bytes=given_bytes, memory_reason=MEMORY_GIVEN) for device in profile.devices)
    sharing = Counter(device.host for device in devices if device.shares_host_memory)

    def given(host: HostProfile) -> HostProfile:
        ranks = sharing[host.name]
        reason = MEMORY_GIVEN if ranks == 1 else f"{MEMORY_GIVEN} to each of {ranks}"
        return replace(host, memory_bytes=given_bytes * ranks, memory_reason=reason) if ranks else host

    return replace(profile, devices=devices, hosts=tuple(map(given, profile.hosts)))
