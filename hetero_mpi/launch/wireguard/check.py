"""Checks that MPI's messages go through the private mesh: messages are sent between each two hosts while interfaces count bytes.

The MPI library's settings are no proof, as it may use another network without saying so. So every interface is read, and a way
where fewer bytes passed the mesh than were sent is a failure. The address is no proof either: its interface must be a tunnel.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.pairs import quiet_rounds
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.errors import ExitCode
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity, lines_of, would_fail
from hetero_mpi.launch.hosts.interface import local_addresses
from hetero_mpi.launch.wireguard.mesh import Mesh, read_mesh

MESSAGE_BYTES = 1 << 22
"""Bytes sent each way between each two hosts: far more than other traffic in that time."""
_THERE, _BACK = 101, 102
_NO_LINK_LAYER = 0xFFFE
"""ARPHRD_NONE: Linux's interface type of WireGuard, and of tunnels made by a program (tun)."""
_SUBJECT = "mesh"


@dataclass(frozen=True)
class Passed:
    """What one end of a pair counted while ``MESSAGE_BYTES`` went each way: bytes (sent, received) by interface."""

    host: str
    other: str
    interface: str
    """The mesh's interface on that host."""
    counted: Mapping[str, Sequence[int]]


def verify(world: World, transport: Transport, mesh: Mesh) -> list[Finding]:
    """Findings about hosts without the mesh, and about pairs whose messages do not go through it; on every rank. Collective.

    ``transport`` must be idle.
    """
    own = mesh.own(local_addresses())
    ends = world.all_gather_json([own.interface, is_tunnel(own.interface)] if own is not None else [None, False])
    interfaces = [interface for interface, _ in ends]
    hosts = tuple(dict.fromkeys(world.hosts))
    without = [host for host in hosts if interfaces[world.hosts.index(host)] is None]
    if without:
        text = f"no interface has an address in {mesh.network}: whatever is sent from here does not go through the mesh"
        return [Finding(_SUBJECT, Severity.FAILS, text, f"there: sudo wg-quick up {mesh.interface}", tuple(without))]
    bare = [host for host in hosts if not ends[world.hosts.index(host)][1]]
    if bare:
        names = ", ".join(dict.fromkeys(interfaces[world.hosts.index(host)] for host in bare))
        text = f"{names} has the address in {mesh.network} and is no tunnel: nothing is encrypted there"
        remedy = f"give [mesh] a network that nothing else uses, and start it there: sudo wg-quick up {mesh.interface}"
        return [Finding(_SUBJECT, Severity.FAILS, text, remedy, tuple(bare))]
    if len(hosts) == 1:
        return [Finding(_SUBJECT, Severity.NOTE, "all ranks are on one host: no message needs the mesh")]
    leaders = [world.hosts.index(host) for host in hosts]
    seen: list[Passed] = []
    for pairs in quiet_rounds(hosts):
        partner = {leaders[a]: leaders[b] for a, b in pairs} | {leaders[b]: leaders[a] for a, b in pairs}
        before = _counters()
        world.meet_asleep()
        if world.rank in partner:
            _exchange(transport, world.rank, partner[world.rank])
        world.meet_asleep()  # what was sent has arrived everywhere
        if world.rank in partner:
            after = _counters()
            counted = {
                name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in {*before} & {*after}
            }
            other = world.hosts[partner[world.rank]]
            seen.append(Passed(world.host, other, interfaces[world.rank], counted))
        world.meet_asleep()  # nobody begins the next round before all have read their counters
    gathered = world.all_gather_json([vars(own) for own in seen])
    return findings_of([Passed(**values) for ranks_own in gathered for values in ranks_own], mesh)


def is_tunnel(interface: str) -> bool:
    """Can an interface be WireGuard's, in the kernel or in user space? Unlike a cable or Wi-Fi, such a one has no link layer."""
    if sys.platform == "darwin":
        return interface.startswith("utun")
    try:
        return int(Path("/sys/class/net", interface, "type").read_text()) == _NO_LINK_LAYER
    except OSError:
        return True  # not to be known here


def findings_of(passed: Sequence[Passed], mesh: Mesh, message_bytes: int = MESSAGE_BYTES) -> list[Finding]:
    """Findings from the counters: one for each way that went outside the mesh, or a single one where all is well."""
    findings = []
    for one in passed:
        sent, received = one.counted.get(one.interface, (0, 0))
        if min(sent, received) < message_bytes:
            rest = {name: max(both) for name, both in one.counted.items() if name != one.interface}
            busiest = max(rest, key=lambda name: rest[name], default=None)
            text = f"with {one.other}: of {_megabytes(message_bytes)} each way, {_megabytes(sent)} left and {_megabytes(received)} "
            text += f"came through {one.interface}"
            text += f"; {_megabytes(rest[busiest])} passed {busiest}" if busiest is not None else ""
            remedy = (
                "MPI is not bound to the mesh: start with `launch --hosts` and the hosts.toml that `mesh init` wrote"
            )
            findings.append(Finding(_SUBJECT, Severity.FAILS, text, remedy, (one.host,)))
    if findings:
        return findings
    hosts = len({one.host for one in passed})
    text = f"{_megabytes(message_bytes)} each way between each two of {hosts} hosts passed WireGuard's interfaces ({mesh.network})"
    return [Finding(_SUBJECT, Severity.FINE, text)]


def mesh_of(world: World, path: str | Path) -> Mesh | None:
    """``[mesh]`` of a hosts file that rank 0 has; the other hosts need not. Collective. Raises UserError: as ``read_mesh`` does."""
    values = None
    with world.led("reading the hosts file"):
        if world.rank == 0:
            mesh = read_mesh(path)
            values = mesh.model_dump() if mesh is not None else None
    values = world.broadcast_json(values)
    return Mesh.model_validate(values) if values is not None else None


def verify_command(world: World, path: Path) -> int:
    """Run ``mesh verify`` under a launcher: print the findings and return the exit code. Collective.

    :raises UserError: the hosts file cannot be read, or has no mesh.
    """
    mesh = mesh_of(world, path)
    if mesh is None:
        raise CollectiveUserError(f"{path} has no [mesh]: verify the hosts.toml that `mesh init` wrote.")
    world.doing = "sending messages through the mesh"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        findings = verify(world, transport, mesh)
    if world.rank == 0:
        print("\n".join(lines_of(findings)))
    return int(ExitCode.FAILED if would_fail(findings) else ExitCode.DONE)


def _exchange(transport: Transport, rank: int, peer: int) -> None:
    """Send a message and, when it has arrived, one back; the lower rank begins."""
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    if rank < peer:
        back = transport.post_receive(peer, _BACK, np.empty_like(message))
        transport.wait(transport.send(peer, _THERE, message))
        transport.wait(back)
    else:
        transport.wait(transport.post_receive(peer, _THERE, np.empty_like(message)))
        transport.wait(transport.send(peer, _BACK, message))


def _counters() -> dict[str, tuple[int, int]]:
    """Bytes (sent, received) of every interface since this machine started."""
    import psutil

    return {name: (item.bytes_sent, item.bytes_recv) for name, item in psutil.net_io_counters(pernic=True).items()}


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.1f} MB"
