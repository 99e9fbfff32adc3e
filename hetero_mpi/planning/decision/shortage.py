"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help."""

from __future__ import annotations

from hetero_mpi.planning.decision.remedies import TOGETHER, nothing_helps, remedies
from hetero_mpi.planning.decision.room import Closest, closest, with_hosts_divided
from hetero_mpi.planning.decision.streaming import streamable
from hetero_mpi.planning.memory import STREAMED_LAYERS, host_state_bytes, stage_memory, usable_bytes
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
        f"The one pipeline that comes closest has {count} stage{'s' if count > 1 else ''} "
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
    if request.streaming != "never" and streamable(profile) and profile.model.trained_whole:
        lines.append(_host_shortage(profile, request))
    helps = list(remedies(profile, request))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else nothing_helps())
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _host_shortage(profile: ClusterProfile, request: PlanRequest) -> str:
    """What keeps weights that are all trained from being streamed, with all that is trained in the memory of the hosts."""
    model = profile.model
    needed = host_state_bytes(model, 0, len(model.layers))
    names = sorted({device.host for device in profile.devices})
    known = {host.name: usable_bytes(host.memory_bytes, request.memory_reserve) for host in profile.hosts}
    text = f"  Streamed, weights, gradients and optimizer state take {describe_bytes(needed)} of the hosts' memory"
    there = sum(known.get(name, needed) for name in names)
    if needed > there:
        return (
            f"{text}, of which {describe_bytes(there)} are usable ([[hosts]] memory_bytes): short by {needed - there} bytes; so "
            f"much more memory of hosts would make it fit"
        )
    return f"{text}, and the devices' is too small for {STREAMED_LAYERS} layers at a time, or no way was found to divide it"


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
