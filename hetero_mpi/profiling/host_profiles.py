"""What the ranks of a host have in common: its memory, counted once, and its NIC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_mpi.comm.links import HostFlows
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend, host_memory
from hetero_mpi.planning.types.profile import HostProfile


@dataclass(frozen=True)
class MeasuredMemory:
    """What a rank may use, and what its host has."""

    usable_bytes: int
    reason: str
    shares_host_memory: bool
    host_bytes: int
    host_reason: str


def measure_memory(world: World, backend: Backend) -> list[MeasuredMemory]:
    """Memory of every rank, before any of them has taken some. Collective.

    A CPU rank may use all of its host's memory, as every other one there may: that they fit together is for the host's own limit.
    Ranks that share a GPU divide its memory.
    """
    host, shares, sharing = host_memory(), backend.shares_host_memory(), sharing_ranks(world, backend)
    own = backend.memory(1 if shares else sharing)
    row = [own.usable_bytes, own.reason, shares, host.usable_bytes, host.reason]
    return [MeasuredMemory(*values) for values in world.all_gather_json(row)]


def sharing_ranks(world: World, backend: Backend) -> int:
    """Ranks of this host that compute on this rank's device, itself included. Collective."""
    everyone = world.all_gather_json([world.host, backend.identity()])
    return everyone.count([world.host, backend.identity()])


def host_profiles(
    hosts: Sequence[str], memories: Sequence[MeasuredMemory], flows: Sequence[HostFlows]
) -> tuple[HostProfile, ...]:
    """Every host, in the order of its first rank. ``hosts`` and ``memories``: of every rank."""
    by_host = {flow.host: flow for flow in flows}
    found = []
    for name in dict.fromkeys(hosts):
        ranks = [rank for rank, host in enumerate(hosts) if host == name]
        own = [memories[rank] for rank in ranks]
        least = min(own, key=lambda memory: memory.host_bytes)
        flow = by_host.get(name)
        found.append(
            HostProfile(
                name=name,
                memory_bytes=least.host_bytes,
                memory_reason=least.host_reason,
                shared_nic=flow.shared if flow is not None else False,
                flows_bytes_per_s=flow.together[0] if flow is not None else float("inf"),
            )
        )
    return tuple(found)
