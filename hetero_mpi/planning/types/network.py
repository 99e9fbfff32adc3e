"""How messages meet on the wire: NICs that a host's ranks share, and options of simulation.

The defaults are this program's own runtime: a communication thread sends while its rank computes, and every directed
pair of ranks has a link to itself, unless the profile found that a host's ranks share a NIC. Other runtimes
send from the computing stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

Resource = tuple[str, str | int, int]
"""What carries one message at a time: ``("link", source, destination)``, ``("out", host, 0)`` or ``("in", host, 0)``."""


@dataclass(frozen=True)
class Network:
    """What the profile's links do not say."""

    blocking_sends: bool = False
    """A rank computes nothing until its message has left (sends issued from the computing thread or stream)."""
    shared_nic: bool = False
    """All messages of *every* host to others pass through one NIC per host, full duplex, first come, first served;
    otherwise so where the profile says it of a host."""
    late_all_reduce: bool = False
    """Gradient all-reduces wait until a rank's backward has ended, instead of starting layer by layer while it runs."""

    def seen_by(self, profile: ClusterProfile) -> ClusterProfile:
        """The profile with every host's NIC shared, where these options say so."""
        return with_shared_nics(profile) if self.shared_nic else profile


THREADED = Network()
"""This program's runtime."""


def with_shared_nics(profile: ClusterProfile) -> ClusterProfile:
    """The same cluster, its messages between hosts passing through one NIC per host."""
    known = {host.name: host for host in profile.hosts}
    used_bytes = dict.fromkeys(known, 0)
    for device in profile.devices:
        used_bytes[device.host] = used_bytes.get(device.host, 0) + device.memory_bytes
    hosts = [known.get(name, HostProfile(name, n, "not known: that of its ranks")) for name, n in used_bytes.items()]
    return replace(profile, hosts=tuple(replace(host, shared_nic=True) for host in hosts))


def resources(profile: ClusterProfile, source: int, destination: int) -> tuple[Resource, ...]:
    """What a message from rank ``source`` to rank ``destination`` occupies from its start to its end."""
    found: list[Resource] = [("link", source, destination)]
    if profile.devices[source].host != profile.devices[destination].host:
        for rank, way in ((source, "out"), (destination, "in")):
            host = profile.host(rank)
            if host is not None and host.shared_nic:
                found.append((way, host.name, 0))
    return tuple(found)
