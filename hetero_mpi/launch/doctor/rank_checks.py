"""``doctor`` and ``mesh verify`` under mpirun: every rank examines itself, messages are timed as training sends them, and counted.

That MPI's messages go through a private mesh is seen by sending some between each two hosts while interfaces count bytes. The MPI
library's settings are no proof, as it may use another network without saying so: a way where fewer bytes passed the mesh than were
sent is a failure. The address is no proof either: its interface must be a tunnel.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetero_mpi.comm.links import LinkSamples, measure_links, round_robin_per_host
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import CHECKS, DoctorOptions, report
from hetero_mpi.launch.doctor.diagnostics import Finding, Severity, found, lines_of, merged, would_fail
from hetero_mpi.launch.doctor.host_facts import Examined, HostFacts, fault_tolerance, gather, self_tests, try_torch
from hetero_mpi.launch.hosts.interface import LocalAddress, local_addresses
from hetero_mpi.util import units
from hetero_mpi.util.errors import ExitCode
from hetero_mpi.util.terminal import write_text

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.mesh import Mesh  # brings pydantic, which a host may lack

_MESSAGES_BYTES = (1024, 65_536, 4_194_304)
_REPEATS = 3
SLOW_BYTES_PER_S = 40e6
"""Bandwidth below which a link is called slow: between 100 Mbit/s and 1 Gbit/s. A bad cable or Wi-Fi gives less."""
LONG_S = 2e-3
"""Latency above which a link is called slow, seconds: a local cable is faster."""
ASYMMETRY = 3.0
MANY = 12
"""More links than this are not listed one by one."""
INTERFACE_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES")
MESSAGE_BYTES = 1 << 22
"""Bytes sent each way between each two hosts: far more than other traffic in that time."""
_THERE, _BACK = 101, 102
_NO_LINK_LAYER = 0xFFFE
"""ARPHRD_NONE: Linux's interface type of WireGuard, and of tunnels made by a program (tun)."""


def examine_together(world: World, options: DoctorOptions) -> int:
    """Examine, print on rank 0, and return the exit code. Collective."""
    findings, places = examine_ranks(world, options)
    fails = world.broadcast_json(would_fail(findings) if world.rank == 0 else None)
    if world.rank == 0:
        report(options, findings, places)
    return int(ExitCode.FAILED if fails else ExitCode.DONE)


def examine_ranks(world: World, options: DoctorOptions) -> tuple[list[Finding], list[Examined]]:
    """Findings about the ranks of this job; complete on rank 0. Collective."""
    places = _gather_places(world, options)
    world.barrier()
    clocks_s = world.all_gather_json(time.time())  # apart by some ms: seconds are what matters
    world.current_action = "timing messages between ranks"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        samples = measure_links(world, transport, _MESSAGES_BYTES, _REPEATS)
        mesh = mesh_of(world, options.hosts) if options.hosts is not None else None
        through_mesh = verify_mesh(world, transport, mesh) if mesh is not None else []
    findings = [found("ranks", library=world.library, ranks=world.size)]
    findings += [finding for check in CHECKS if check is not checks.check_interfaces for finding in check(places)]
    findings += _interfaces_of(places)
    findings += through_mesh
    findings += check_links(samples, world.hosts)
    offsets_s = {host: clocks_s[world.hosts.index(host)] - clocks_s[0] for host in dict.fromkeys(world.hosts)}
    return merged([*findings, *checks.check_clocks(offsets_s)]), places


def _gather_places(world: World, options: DoctorOptions) -> list[Examined]:
    """Facts about every Python of every host, once each. Only the first of its ranks imports torch."""
    from mpi4py import MPI

    world.current_action = "looking at this host"
    pythons = world.all_gather_json([world.host, sys.prefix])
    facts = gather(options.run_dir, deeply=False)
    mpi = {"library": MPI.Get_library_version(), "threads": world.thread_level, "fault_tolerance": fault_tolerance()}
    first = pythons.index([world.host, sys.prefix]) == world.rank
    facts = replace(facts, mpi=mpi, torch=try_torch() if first else {})
    if options.self_test:
        world.current_action = "testing this host's devices"
        facts = replace(facts, self_tests=tuple(self_tests(facts.torch)))
    everyone = world.all_gather_json([facts.to_dict(), facts.variables.get("HETERO_MPI_DEVICE", "auto")])
    places = []
    for rank, (host, prefix) in enumerate(pythons):
        if pythons.index([host, prefix]) == rank:
            several = len({other for name, other in pythons if name == host}) > 1
            title = f"{host} ({prefix})" if several else host
            values, device = everyone[rank]
            place = Examined(
                title, "", host, host == pythons[0][0], values["python"], facts=HostFacts.from_dict(values)
            )
            places.append(replace(place, ranks=pythons.count([host, prefix]), device=device))
    return places


def _interfaces_of(places: Sequence[Examined]) -> Iterator[Finding]:
    """The interfaces that MPI was told. Under mpirun it has already chosen, and messages pass."""
    if len({place.facts.host for place in places if place.facts}) < 2:
        return
    facts = places[0].facts
    assert facts is not None
    told = [f"{name}={value}" for name, value in facts.variables.items() if name in INTERFACE_VARIABLES]
    names = sorted({interface for interface, _, _ in facts.addresses if interface != "lo"})
    if told:
        yield found("interface told", told=", ".join(told))
    elif len(names) > 1:
        known = [LocalAddress(*item) for place in places if place.facts for item in place.facts.addresses]
        counts = Counter(str(item.network) for item in known if not item.interface.startswith(checks.INSIDE))
        networks = ",".join(network for network, count in counts.items() if count == max(counts.values()))
        yield found("interface not told", places[0].title, names=", ".join(names), networks=networks)


def check_links(links: Sequence[LinkSamples], hosts: Sequence[str]) -> Iterator[Finding]:
    """Links and their speed; of many, those that are too slow and the slowest. ``hosts``: of all ranks."""
    speeds = {(link.source, link.destination): link.sample_bytes[-1] / link.sample_s[-1] for link in links}
    shown = [_speed(link, speeds, hosts) for link in links]
    if len(links) > MANY:
        slowest = list(speeds.values()).index(min(speeds.values()))
        shown = [own for number, own in enumerate(shown) if own.severity is Severity.SLOW or number == slowest]
        yield found("many links", count=len(links))
    yield from shown


def _speed(link: LinkSamples, speeds: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> Finding:
    """A link's latency is that of the smallest message, its bandwidth that of the largest; no line is fitted."""
    latency_s, bytes_per_s = link.sample_s[0], speeds[link.source, link.destination]
    source, destination = (f"rank {rank} ({hosts[rank]})" for rank in (link.source, link.destination))
    speed = f"{units.bandwidth(bytes_per_s)} ({bytes_per_s * 8 / 1e9:.2g} Gbit/s), {units.seconds(latency_s)}"
    text = f"{source} -> {destination}: {speed} (MPI messages, as training sends them)"
    slower = speeds.get((link.destination, link.source), bytes_per_s) / bytes_per_s
    if bytes_per_s < SLOW_BYTES_PER_S:
        return found("slow memory" if link.same_host else "slow link", link=text)
    if link.same_host:
        return found("link", link=text)
    if slower > ASYMMETRY:
        return found("uneven link", link=text, slower=slower)
    return found("far link" if latency_s > LONG_S else "link", link=text)


@dataclass(frozen=True)
class Passed:
    """The bytes that one end of a pair counted while ``MESSAGE_BYTES`` went each way: (sent, received) by interface."""

    host: str
    other: str
    interface: str
    """The mesh's interface on that host."""
    counted: Mapping[str, Sequence[int]]


def verify_mesh(world: World, transport: Transport, mesh: Mesh) -> list[Finding]:
    """Findings about hosts without the mesh, and about pairs whose messages do not go through it; on every rank. Collective.

    ``transport`` must be idle.
    """
    own = mesh.own(local_addresses())
    ends = world.all_gather_json([own.interface, is_tunnel(own.interface)] if own is not None else [None, False])
    interfaces = [interface for interface, _ in ends]
    hosts = tuple(dict.fromkeys(world.hosts))
    without = [host for host in hosts if interfaces[world.hosts.index(host)] is None]
    if without:
        return [found("mesh down", *without, network=mesh.network, interface=mesh.interface)]
    bare = [host for host in hosts if not ends[world.hosts.index(host)][1]]
    if bare:
        names = ", ".join(dict.fromkeys(interfaces[world.hosts.index(host)] for host in bare))
        return [found("no tunnel", *bare, names=names, network=mesh.network, interface=mesh.interface)]
    if len(hosts) == 1:
        return [found("mesh not needed")]
    leaders = [world.hosts.index(host) for host in hosts]
    seen: list[Passed] = []
    for pairs in round_robin_per_host(hosts):
        partner = {leaders[a]: leaders[b] for a, b in pairs} | {leaders[b]: leaders[a] for a, b in pairs}
        before = _counters()
        world.sleeping_barrier()
        if world.rank in partner:
            _exchange(transport, world.rank, partner[world.rank])
        world.sleeping_barrier()  # what was sent has arrived everywhere
        if world.rank in partner:
            after = _counters()
            counted = {
                name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in {*before} & {*after}
            }
            other = world.hosts[partner[world.rank]]
            seen.append(Passed(world.host, other, interfaces[world.rank], counted))
        world.sleeping_barrier()  # nobody begins the next round before all have read their counters
    gathered = world.all_gather_json([vars(own) for own in seen])
    return mesh_findings([Passed(**values) for ranks_own in gathered for values in ranks_own], mesh)


def is_tunnel(interface: str) -> bool:
    """Can an interface be WireGuard's, in the kernel or in user space? Unlike a cable or Wi-Fi, such a one has no link layer."""
    if sys.platform == "darwin":
        return interface.startswith("utun")
    try:
        return int(Path("/sys/class/net", interface, "type").read_text()) == _NO_LINK_LAYER
    except OSError:
        return True  # not to be known here


def mesh_findings(passed: Sequence[Passed], mesh: Mesh, message_bytes: int = MESSAGE_BYTES) -> list[Finding]:
    """Findings from the counters: one for each way that went outside the mesh, or a single one where all is well."""
    size, findings = _megabytes(message_bytes), []
    for one in passed:
        sent, received = one.counted.get(one.interface, (0, 0))
        if min(sent, received) < message_bytes:
            rest = {name: max(both) for name, both in one.counted.items() if name != one.interface}
            busiest = max(rest, key=lambda name: rest[name], default=None)
            others = f"; {_megabytes(rest[busiest])} passed {busiest}" if busiest is not None else ""
            values = {"sent": _megabytes(sent), "received": _megabytes(received), "others": others}
            values |= {"other": one.other, "interface": one.interface, "size": size}
            findings.append(found("around the mesh", one.host, **values))
    return findings or [found("mesh", size=size, hosts=len({one.host for one in passed}), network=mesh.network)]


def mesh_of(world: World, path: str | Path) -> Mesh | None:
    """``[mesh]`` of a hosts file that rank 0 has; the other hosts need not. Collective. Raises UserError: as ``read_mesh`` does."""
    from hetero_mpi.launch.hosts.mesh import Mesh, read_mesh

    values = None
    with world.on_leader("reading the hosts file"):
        if world.rank == 0:
            mesh = read_mesh(path)
            values = mesh.model_dump() if mesh is not None else None
    values = world.broadcast_json(values)
    return Mesh.model_validate(values) if values is not None else None


def verify_mesh_command(world: World, path: Path) -> int:
    """Run ``mesh verify`` under a launcher: print the findings and return the exit code. Collective.

    :raises UserError: the hosts file cannot be read, or has no mesh.
    """
    mesh = mesh_of(world, path)
    if mesh is None:
        raise CollectiveUserError(
            "doctor.no_mesh", f"{path} has no [mesh]: verify the hosts.toml that `mesh init` wrote."
        )
    world.current_action = "sending messages through the mesh"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        findings = verify_mesh(world, transport, mesh)
    if world.rank == 0:
        write_text("\n".join([*lines_of(findings), ""]), sys.stdout)
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
