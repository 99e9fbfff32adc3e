"""Which way reduce-scatters and all-gathers take between the ranks of a group. Pure, since the planner prices the same way.

Direct exchange takes one hop, but of h ranks on one host every one sends to every rank elsewhere: ``h (n - h)`` of 1/n of the
bytes leave the host, through its one NIC. A ring that visits host after host leaves each host once per hop: ``n - 1`` of 1/n
(Patarasuk & Yuan 2009). So::

    8 ranks, bytes that leave a host    alone on it    2 on it    4 on it
    direct                              7/8            12/8       16/8
    around the ring                     7/8            7/8        7/8
"""

from __future__ import annotations

from collections.abc import Sequence


def ring_of(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks in the order of the ring, or None where they exchange directly.

    A ring where some host holds several of the ranks and another host holds others; there, host after host, in the order of
    their lowest ranks. The order in which ``ranks`` are given does not matter.
    """
    here: dict[str, list[int]] = {}
    for rank, host in sorted(zip(ranks, hosts, strict=True)):
        here.setdefault(host, []).append(rank)
    if len(here) in (1, len(ranks)):
        return None
    return tuple(rank for members in here.values() for rank in members)
