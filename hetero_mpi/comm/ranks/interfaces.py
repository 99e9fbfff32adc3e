"""Restricts a rank under plain ``mpirun`` to the network interfaces over which its launcher already reaches the other hosts.

By default Open MPI's ranks offer each other all interfaces of their machines. An interface that leads nowhere (a VPN), or that has
the same address everywhere (Docker's bridge), ends the job or makes it hang. The parent of the ranks, the launcher's daemon, is
connected to the other hosts by then; its connections show which interfaces work.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_INCLUDE, _EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
_DEVICES = Path("/sys/class/net")


def keep_to_the_launcher_s_interfaces(environment: MutableMapping[str, str]) -> None:
    """Set Open MPI's variable for the interfaces to those over which the launcher's daemon talks. Called before MPI is initialised.

    Nothing is set in three cases: the user has chosen; the daemon talks to no other host; or another NIC of this machine is as
    fast, so that it is not known which of the two is meant for data.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environment or _INCLUDE in environment or _EXCLUDE in environment:
        return
    used, others = _interfaces_of(os.getppid())
    if not used or any(_card_speed(name) >= max(map(_card_speed, used)) for name in others if _card_speed(name) > 0):
        return
    environment[_INCLUDE] = ",".join(sorted(used))


def _interfaces_of(process: int) -> tuple[set[str], set[str]]:
    """(interfaces over which a process talks to other hosts, all others but the loopback)."""
    import psutil

    try:
        connections = psutil.Process(process).net_connections("tcp4")
    except (psutil.Error, OSError):
        return set(), set()
    talking = {one.laddr.ip for one in connections if one.status == psutil.CONN_ESTABLISHED}
    held = {name: {item.address for item in items} for name, items in psutil.net_if_addrs().items()}
    loopback = {name for name, addresses in held.items() if "127.0.0.1" in addresses}
    used = {name for name, addresses in held.items() if addresses & talking} - loopback
    return used, set(held) - used - loopback


def _card_speed(interface: str, devices: Path = _DEVICES) -> int:
    """Mbit/s of a NIC; 0 where the interface is no NIC (bridge, tunnel) or does not tell (Wi-Fi)."""
    if not (devices / interface / "device").exists():
        return 0
    try:
        return max(0, int((devices / interface / "speed").read_text()))
    except (OSError, ValueError):
        return 0
