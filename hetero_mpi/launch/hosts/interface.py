"""Choose the network for MPI: the one that contains the addresses in the host file.

By default, MPI libraries choose among all interfaces of a machine (Docker bridges, VPNs, Wi-Fi) and may hang on a wrong one.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_mpi.util.errors import UserError


@dataclass(frozen=True)
class LocalAddress:
    """An IPv4 address of this machine."""

    interface: str
    address: str
    netmask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.netmask}", strict=False)


@dataclass(frozen=True)
class InterfaceChoice:
    """The networks that MPI should use, such as ``10.77.0.0/24``, and this machine's interfaces in them."""

    networks: tuple[str, ...]
    interfaces: tuple[str, ...]
    reason: str


def local_addresses() -> tuple[LocalAddress, ...]:
    """Return the IPv4 addresses of this machine's interfaces."""
    import psutil

    return tuple(
        LocalAddress(interface, item.address, item.netmask)
        for interface, items in psutil.net_if_addrs().items()
        for item in items
        if item.family == socket.AF_INET and item.netmask
    )


def resolve(name: str) -> str:
    """Return the IPv4 address of a host name, which may have a user. Raises UserError if there is none."""
    try:
        return str(socket.getaddrinfo(name.rpartition("@")[2], None, family=socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UserError(
            "hosts.no_address",
            f"The host `{name}` in the host file has no address ({error}): check the name, or write its IPv4 address.",
        ) from error


def network_of(address: str, local: Iterable[LocalAddress]) -> str:
    """Return the narrowest subnet of ``local`` that contains an IPv4 address, or else the address itself as a subnet."""
    holder = _holder(address, local)
    return str(holder.network if holder is not None else ipaddress.IPv4Network(address))


def _holder(address: str, local: Iterable[LocalAddress]) -> LocalAddress | None:
    """Return the local address with the narrowest subnet around an address; a default route's may contain everything."""
    holders = [item for item in local if ipaddress.IPv4Address(address) in item.network]
    return max(holders, key=lambda item: item.network.prefixlen, default=None)


def choose_interface(addresses: Iterable[str], local: Sequence[LocalAddress]) -> InterfaceChoice | None:
    """Return the networks that contain the other hosts' IPv4 ``addresses``; None if all are this machine's own.

    For a host behind a router, the address itself is added, with the interface that leads to it.
    """
    local_ips = {item.address for item in local}
    networks: dict[str, None] = {}
    interfaces: dict[str, None] = {}
    reasons = []
    for address in dict.fromkeys(addresses):
        if address in local_ips or ipaddress.IPv4Address(address).is_loopback:
            continue
        holder = _holder(address, local)
        if holder is None:
            source = source_address(address)
            holder = next((item for item in local if item.address == source), None)
            networks[f"{address}/32"] = None
        if holder is not None:
            networks[str(holder.network)] = None
            interfaces[holder.interface] = None
            reasons.append(f"{address} is reached through {holder.interface} ({holder.network})")
    if not interfaces:
        return None
    return InterfaceChoice(tuple(networks), tuple(interfaces), "; ".join(reasons))


def source_address(address: str) -> str | None:
    """Return the local address from which the kernel sends to ``address``; None if there is no route.

    Connecting a UDP socket queries the routing table without sending anything.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
