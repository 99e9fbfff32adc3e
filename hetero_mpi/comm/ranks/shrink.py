"""After a rank's death: the ranks that are left meet, and become the world (``comm.ranks.ulfm`` says how ranks learn of a
death).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.collectives import Collectives
from hetero_mpi.comm.ranks.world import World


@dataclass(frozen=True)
class Loss:
    """The ranks that have died, and how the others were numbered before."""

    gone: tuple[tuple[int, str], ...]
    """(rank, host) of those that have died, in the old numbering."""
    before: tuple[int, ...]
    """For each rank that is left: its number in the old numbering."""


def settled(world: World, well: bool) -> bool:
    """Have all ranks that are alive come to the end of their common work, and has it gone well on all? The same answer on all.
    Collective over those that are alive. Where it is no, each of them must call ``survivors``.
    """
    if not well:
        ulfm.revoke()
    return ulfm.agree(world.comm, well)


def survivors(world: World, may_lead: bool = True) -> Loss:
    """Make ``world`` the world of the ranks that are left, numbered anew in their old order. The first rank that may lead becomes
    rank 0. Collective over them.

    Whatever was made of the old world (subsets, transports, heartbeats) can no longer be used. Ranks that die meanwhile are left
    out too.
    """
    ulfm.revoke()
    comm = world.comm
    while True:
        comm = ulfm.shrink(comm)
        try:
            met = _meet(comm, world.rank, may_lead)
            whole = True
        except ulfm.RankLost:
            whole = False
        # Some ranks may have come through where others have met the next death: all take the same way.
        if ulfm.agree(comm, whole):
            break
        ulfm.revoke()
    world.comm, world.guard, before = met
    gone = tuple((old, world.hosts[old]) for old in range(world.size) if old not in before)
    world.rank, world.size = world.comm.Get_rank(), world.comm.Get_size()
    world.hosts, world.numbers = tuple(world.hosts[old] for old in before), ()
    world.bereaved, world.activity.waits_for = True, None
    return Loss(gone, before)


def _meet(comm: Any, old_rank: int, may_lead: bool) -> tuple[Any, Any, tuple[int, ...]]:
    """(communicator, guard, old numbers in the new order) of the ranks of ``comm`` that are left."""
    rank, size = comm.Get_rank(), comm.Get_size()
    words = Collectives(comm, rank, size).all_gather_json([old_rank, may_lead])
    before = [int(old) for old, _ in words]
    leader = next((number for number, (_, may) in enumerate(words) if may), 0)
    if leader != 0:
        before.insert(0, before.pop(leader))
        comm = ulfm.made(comm, lambda: comm.Split(0, -1 if rank == leader else rank))
    return comm, ulfm.duplicate(comm), tuple(before)
