"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help."""

from __future__ import annotations

from hetero_mpi.planning.decision.remedies import TOGETHER, nothing_helps, remedies
from hetero_mpi.planning.decision.room import Closest, closest, with_hosts_divided
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.tables import rank_usable_bytes, shared_memories
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.words import describe_bytes, describe_layers

MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""


def explain_shortage(profile: ClusterProfile, request: PlanRequest) -> str:
    """The message for a model that fits nowhere."""
    divided = next(with_hosts_divided(profile))
    found = closest(divided, request)
    count = len(found.ranks)
    lines = [
        "the model does not fit in memory on these ranks "
        f"(sequences of {request.sequence_length} tokens, {profile.model.dtype}). "
        f"The split that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {found.micro_batch}:"
    ]
    short = _short_ranks(found, divided, request)
    told = sorted(short, reverse=True)[:MOST_RANKS]
    lines += [text for lacking, text in short if (lacking, text) in told]
    if len(short) > len(told):
        rest = len(short) - len(told)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    for host, ranks in shared_memories(profile):
        listed = ", ".join(map(str, ranks))
        lines.append(
            f"  ranks {listed} share the memory of host {host.name}, {describe_bytes(host.memory_bytes)}, here divided evenly"
        )
    helps = list(remedies(profile, request))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else nothing_helps())
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _short_ranks(found: Closest, profile: ClusterProfile, request: PlanRequest) -> list[tuple[int, str]]:
    """(bytes lacking, a line about it) of every rank that the closest split asks too much of, in its order."""
    result, tokens = [], found.micro_batch * request.sequence_length
    for i, rank in enumerate(found.ranks):
        first, last, model = found.cuts[i], found.cuts[i + 1], profile.model_on(rank)
        ways = (
            stage_memory(model, first, last, tokens, found.in_flight[i], again) for again in request.recompute_choices
        )
        parts = min(ways, key=lambda way: way.total)
        usable = rank_usable_bytes(profile, rank, request.memory_reserve)
        if parts.total > usable:
            text = (
                f"  rank {rank} ({profile.devices[rank].name}) with "
                f"{describe_layers(first, last, len(model.layers))} is short by {parts.total - usable} bytes: "
                f"it needs {describe_bytes(parts.total)} (parameters {describe_bytes(parts.parameters)}, "
                f"optimizer state and gradients {describe_bytes(parts.state)}, "
                f"activations {describe_bytes(parts.activations)}, workspace {describe_bytes(parts.workspace)}, "
                f"buffers {describe_bytes(parts.staging)}) and may use "
                f"{describe_bytes(usable)}"
            )
            result.append((parts.total - usable, text))
    return result
