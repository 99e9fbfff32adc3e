"""How messages meet on the wire, and what it costs to sum gradients that several pipelines hold: options of simulation.

The defaults are this program's own runtime: a communication thread sends while its rank computes, and every directed
pair of ranks has a link to itself. Other runtimes send from the computing stream; in other clusters the ranks of a host
queue for one network card.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from hetero_mpi.planning.memory import GRADIENT_BYTES
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile

Resource = tuple[str, str | int, int]
"""What carries one message at a time: ``("link", source, destination)``, ``("out", host, 0)`` or ``("in", host, 0)``."""


@dataclass(frozen=True)
class Network:
    """What the profile's links do not say."""

    blocking_sends: bool = False
    """A rank computes nothing until its message has left (sends issued from the computing thread or stream)."""
    shared_nic: bool = False
    """All messages between two hosts pass through one card per host, full duplex, first come, first served."""

    def resources(self, profile: ClusterProfile, source: int, destination: int) -> tuple[Resource, ...]:
        """What a message from rank ``source`` to rank ``destination`` occupies from its start to its end."""
        link: Resource = ("link", source, destination)
        sender, receiver = profile.devices[source].host, profile.devices[destination].host
        if not self.shared_nic or sender == receiver:
            return (link,)
        return link, ("out", sender, 0), ("in", receiver, 0)


THREADED = Network()
"""This program's runtime on links of their own."""


def replica_ranks(plan: Plan, item: int) -> tuple[int, ...]:
    """The ranks that hold ``item``, one per pipeline, in plan order."""
    return tuple(
        stage.ranks[0] for pipeline in plan.pipelines for stage in pipeline.stages if stage.first <= item < stage.last
    )


def ring_s(profile: ClusterProfile, ranks: tuple[int, ...], size_bytes: float) -> float:
    """Seconds to sum ``size_bytes`` over ``ranks`` in a ring: 2 (n - 1) rounds, each as long as its slowest message.

    Every round moves 1/n of the bytes from each rank to the next (Patarasuk & Yuan 2009: no all-reduce moves fewer).
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    neighbours = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    return 2 * (count - 1) * max(profile.transfer_s(a, b, size_bytes / count) for a, b in neighbours)


def replica_sync_s(plan: Plan, profile: ClusterProfile, first: int, last: int) -> float:
    """Seconds to sum the gradients of the items [first, last) over all pipelines; 0 when there is one pipeline.

    Items held by the same ranks travel together; where pipelines are cut differently, one ring follows the other.
    Rings of different stages are taken not to hinder each other.
    """
    total = 0.0
    for ranks, items in groupby(range(first, last), lambda item: replica_ranks(plan, item)):
        trainable = sum(profile.model.layers[item].trainable_parameters for item in items)
        total += ring_s(profile, ranks, GRADIENT_BYTES * trainable)
    return total
