"""When nothing fits: which memory is short by how much at the plan that comes closest, and which changes would help."""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi.planning.decision.remedies import TOGETHER, nothing_helps, remedies
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.single.optimum import Space
from hetero_mpi.planning.single.room import (
    Closest,
    Shortages,
    closest,
    few_classes,
    least_in_flight,
    with_hosts_divided,
)
from hetero_mpi.planning.tables import shared_memories
from hetero_mpi.planning.words import describe_bytes, describe_items

MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""


def explain_shortage(space: Space) -> str:
    """The message for a model that fits nowhere."""
    profile = next(with_hosts_divided(space.profile))
    divided = replace(space, profile=profile)
    found = closest(few_classes(divided))
    instance, count = found.instance, len(found.order)
    lines = [
        "the model does not fit in memory on these ranks "
        f"(sequences of {space.request.sequence_length} tokens, {space.profile.model.dtype}). "
        f"The split that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {instance.micro_batch}:"
    ]
    short = _short_ranks(found, divided)
    told = sorted(short, reverse=True)[:MOST_RANKS]
    lines += [text for lacking, text in short if (lacking, text) in told]
    if len(short) > len(told):
        rest = len(short) - len(told)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    for host, ranks in shared_memories(space.profile):
        listed = ", ".join(map(str, ranks))
        lines.append(
            f"  ranks {listed} share the memory of host {host.name}, {describe_bytes(host.memory_bytes)}, here divided evenly"
        )
    helps = list(remedies(space))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else nothing_helps())
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _short_ranks(found: Closest, space: Space) -> list[tuple[int, str]]:
    """(bytes lacking, a line about it) of every rank that the closest split asks too much of, in its order."""
    instance, result = found.instance, []
    cuts = Shortages(instance).cuts(found.order)
    for i, rank in enumerate(instance.ranks(found.order)):
        depth = least_in_flight(instance, len(found.order) - i)
        kind, stage = found.order[i], (cuts[i], cuts[i + 1])
        recompute = min(instance.choices, key=lambda choice: instance.need_bytes(kind, depth, choice)[stage])
        parts = stage_memory(space.profile.model_on(rank), cuts[i], cuts[i + 1], instance.tokens, depth, recompute)
        usable = instance.usable[found.order[i]]
        if parts.total > usable:
            text = (
                f"  rank {rank} ({space.profile.devices[rank].name}) with "
                f"{describe_items(cuts[i], cuts[i + 1], instance.items)} is short by {parts.total - usable} bytes: "
                f"it needs {describe_bytes(parts.total)} (parameters {describe_bytes(parts.parameters)}, "
                f"optimizer state and gradients {describe_bytes(parts.state)}, "
                f"activations {describe_bytes(parts.activations)}, workspace {describe_bytes(parts.workspace)}, "
                f"buffers {describe_bytes(parts.staging)}) and may use "
                f"{describe_bytes(usable)}"
            )
            result.append((parts.total - usable, text))
    return result
