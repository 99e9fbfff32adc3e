"""``doctor`` and ``mesh verify`` under mpirun: every rank examines itself, and messages are timed as in training.

The mesh is verified by sending messages between every two hosts while counting the bytes on each interface. The MPI library's
settings prove nothing, as it may silently use another network; it is a failure if the mesh carried fewer bytes in a direction
than were sent. An address in the mesh's network proves nothing either: its interface must be a tunnel.
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
from hetero_mpi.launch.doctor.diagnostics import Finding, Severity, finding_of, lines_of, merge_same, would_fail
from hetero_mpi.launch.doctor.host_facts import HostFacts, Target, fault_tolerance, gather, self_tests, try_torch
from hetero_mpi.launch.hosts.interface import LocalAddress, local_addresses
from hetero_mpi.util import units
from hetero_mpi.util.errors import ExitCode
from hetero_mpi.util.terminal import write_text

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.mesh import Mesh  # imports pydantic, which a host may lack

_MESSAGES_BYTES = (1024, 65_536, 4_194_304)
_REPEAT_COUNT = 3
MIN_BYTES_PER_S = 40e6
"""Links below this bandwidth, between 100 Mbit/s and 1 Gbit/s, are reported as slow (a bad cable, Wi-Fi)."""
MAX_LATENCY_S = 2e-3
"""Links above this latency in seconds are reported; a local cable is faster."""
MAX_ASYMMETRY_RATIO = 3.0
MAX_LISTED_LINKS = 12
"""Maximum number of links that are all listed individually."""
INTERFACE_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES")
MESSAGE_BYTES = 1 << 22
"""Bytes sent each way between every two hosts, far more than other traffic during that time."""
_REQUEST_TAG = 101
_REPLY_TAG = 102
_ARPHRD_NONE_CODE = 0xFFFE
"""Interface type that Linux assigns to WireGuard and to tunnels in user space (tun)."""


def run_rank_doctor(world: World, options: DoctorOptions) -> int:
    """Examine the ranks, print the findings on rank 0, and return the exit code. Collective."""
    findings, targets = examine_ranks(world, options)
    run_would_fail = world.broadcast_json(would_fail(findings) if world.rank == 0 else None)
    if world.rank == 0:
        report(options, findings, targets)
    return int(ExitCode.FAILED if run_would_fail else ExitCode.DONE)


def examine_ranks(world: World, options: DoctorOptions) -> tuple[list[Finding], list[Target]]:
    """Return findings about the ranks of this job, complete on rank 0, and the targets. Collective."""
    targets = _gather_targets(world, options)
    world.barrier()
    clocks_s = world.all_gather_json(time.time())  # some ms apart, but only seconds matter
    world.current_action = "timing messages between ranks"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        samples = measure_links(world, transport, _MESSAGES_BYTES, _REPEAT_COUNT)
        mesh = mesh_of(world, options.hosts) if options.hosts is not None else None
        through_mesh = verify_mesh(world, transport, mesh) if mesh is not None else []
    findings = [finding_of("ranks", library=world.library, ranks=units.plural(world.size, "connected rank"))]
    findings += [finding for check in CHECKS if check is not checks.check_interfaces for finding in check(targets)]
    findings += _interfaces_of(targets)
    findings += through_mesh
    findings += check_links(samples, world.hosts)
    offsets_s = {host: clocks_s[world.hosts.index(host)] - clocks_s[0] for host in dict.fromkeys(world.hosts)}
    return merge_same([*findings, *checks.check_clocks(offsets_s)]), targets


def _gather_targets(world: World, options: DoctorOptions) -> list[Target]:
    """Gather facts about every Python on every host once; only the first of its ranks imports torch."""
    from mpi4py import MPI

    world.current_action = "examining this host"
    pythons = world.all_gather_json([world.host, sys.prefix])
    facts = gather(options.run_dir, deeply=False)
    mpi = {"library": MPI.Get_library_version(), "threads": world.thread_level, "fault_tolerance": fault_tolerance()}
    first = pythons.index([world.host, sys.prefix]) == world.rank
    facts = replace(facts, mpi=mpi, torch=try_torch() if first else {})
    if options.self_test:
        world.current_action = "testing this host's devices"
        facts = replace(facts, self_tests=tuple(self_tests(facts.torch)))
    gathered = world.all_gather_json([facts.to_dict(), facts.variables.get("HETERO_MPI_DEVICE", "auto")])
    targets = []
    for rank, (host, prefix) in enumerate(pythons):
        if pythons.index([host, prefix]) == rank:
            several_pythons = len({other_prefix for name, other_prefix in pythons if name == host}) > 1
            title = f"{host} ({prefix})" if several_pythons else host
            values, device = gathered[rank]
            target = Target(title, "", host, host == pythons[0][0], values["python"], facts=HostFacts.from_dict(values))
            targets.append(replace(target, ranks=pythons.count([host, prefix]), device=device))
    return targets


def _interfaces_of(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report the interfaces set for MPI. Under mpirun MPI has already chosen, and messages arrive."""
    if len({target.facts.host for target in targets if target.facts}) < 2:
        return
    facts = targets[0].facts
    assert facts is not None
    settings = [f"{name}={value}" for name, value in facts.variables.items() if name in INTERFACE_VARIABLES]
    names = sorted({interface for interface, _, _ in facts.addresses if interface != "lo"})
    if settings:
        yield finding_of("interface told", told=", ".join(settings))
    elif len(names) > 1:
        addresses = [LocalAddress(*item) for target in targets if target.facts for item in target.facts.addresses]
        counts = Counter(str(item.network) for item in addresses if not item.interface.startswith(checks.VIRTUAL_NICS))
        networks = ",".join(network for network, count in counts.items() if count == max(counts.values()))
        yield finding_of("interface not told", targets[0].title, names=", ".join(names), networks=networks)


def check_links(links: Sequence[LinkSamples], hosts: Sequence[str]) -> Iterator[Finding]:
    """Report links and their speeds; of many links, only slow ones and the slowest. ``hosts``: host of each rank."""
    speeds = {(link.source, link.destination): link.sample_bytes[-1] / link.sample_s[-1] for link in links}
    findings = [_speed(link, speeds, hosts) for link in links]
    if len(links) > MAX_LISTED_LINKS:
        slowest = list(speeds.values()).index(min(speeds.values()))
        findings = [f for n, f in enumerate(findings) if f.severity is Severity.SLOW or n == slowest]
        yield finding_of("many links", count=len(links))
    yield from findings


def _speed(link: LinkSamples, speeds: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> Finding:
    """Rate a link by the latency of the smallest message and the bandwidth of the largest, without fitting a line."""
    latency_s, bytes_per_s = link.sample_s[0], speeds[link.source, link.destination]
    source, destination = (f"rank {rank} ({hosts[rank]})" for rank in (link.source, link.destination))
    speed = f"{units.bandwidth(bytes_per_s)} ({bytes_per_s * 8 / 1e9:.2g} Gbit/s), {units.seconds(latency_s)}"
    text = f"{source} -> {destination}: {speed} (MPI messages, as in training)"
    slower = speeds.get((link.destination, link.source), bytes_per_s) / bytes_per_s
    if bytes_per_s < MIN_BYTES_PER_S:
        return finding_of("slow memory" if link.same_host else "slow link", link=text)
    if link.same_host:
        return finding_of("link", link=text)
    if slower > MAX_ASYMMETRY_RATIO:
        return finding_of("uneven link", link=text, slower=slower)
    return finding_of("far link" if latency_s > MAX_LATENCY_S else "link", link=text)


@dataclass(frozen=True)
class PairTraffic:
    """Bytes counted at one end of a pair of hosts while ``MESSAGE_BYTES`` were sent each way."""

    host: str
    peer_host: str
    interface: str
    """Interface of the mesh on ``host``."""
    counted: Mapping[str, Sequence[int]]


def verify_mesh(world: World, transport: Transport, mesh: Mesh) -> list[Finding]:
    """Find hosts without the mesh and pairs of hosts whose messages bypass it; same result on all ranks. Collective.

    ``transport`` must be idle.
    """
    local = mesh.local_address(local_addresses())
    ends = world.all_gather_json([local.interface, is_tunnel(local.interface)] if local is not None else [None, False])
    interfaces = [interface for interface, _ in ends]
    hosts = tuple(dict.fromkeys(world.hosts))
    down = [host for host in hosts if interfaces[world.hosts.index(host)] is None]
    if down:
        return [finding_of("mesh down", *down, network=mesh.network, interface=mesh.interface)]
    unencrypted = [host for host in hosts if not ends[world.hosts.index(host)][1]]
    if unencrypted:
        names = ", ".join(dict.fromkeys(interfaces[world.hosts.index(host)] for host in unencrypted))
        return [finding_of("no tunnel", *unencrypted, names=names, network=mesh.network, interface=mesh.interface)]
    if len(hosts) == 1:
        return [finding_of("mesh not needed")]
    leaders = [world.hosts.index(host) for host in hosts]
    traffic: list[PairTraffic] = []
    for pairs in round_robin_per_host(hosts):
        partner = {leaders[a]: leaders[b] for a, b in pairs} | {leaders[b]: leaders[a] for a, b in pairs}
        before = _counters()
        world.sleeping_barrier()
        if world.rank in partner:
            _exchange(transport, world.rank, partner[world.rank])
        world.sleeping_barrier()  # all messages have arrived
        if world.rank in partner:
            after = _counters()
            nics = before.keys() & after.keys()
            counted = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in nics}
            partner_host = world.hosts[partner[world.rank]]
            traffic.append(PairTraffic(world.host, partner_host, interfaces[world.rank], counted))
        world.sleeping_barrier()  # all counters are read before the next round
    gathered = world.all_gather_json([vars(local) for local in traffic])
    return mesh_findings([PairTraffic(**values) for rank_rows in gathered for values in rank_rows], mesh)


def is_tunnel(interface: str) -> bool:
    """Whether an interface may be WireGuard's, in kernel or user space: it has no link layer, unlike a cable or Wi-Fi."""
    if sys.platform == "darwin":
        return interface.startswith("utun")
    try:
        return int(Path("/sys/class/net", interface, "type").read_text()) == _ARPHRD_NONE_CODE
    except OSError:
        return True  # unknown on this system


def mesh_findings(traffic: Sequence[PairTraffic], mesh: Mesh, message_bytes: int = MESSAGE_BYTES) -> list[Finding]:
    """Derive findings from the counters: one for each end of a pair that bypasses the mesh, or a single positive one."""
    size, findings = _megabytes(message_bytes), []
    for pair in traffic:
        sent, received = pair.counted.get(pair.interface, (0, 0))
        if min(sent, received) < message_bytes:
            bytes_by_nic = {name: max(counts) for name, counts in pair.counted.items() if name != pair.interface}
            busiest = max(bytes_by_nic, key=lambda name: bytes_by_nic[name], default=None)
            elsewhere = f"; {_megabytes(bytes_by_nic[busiest])} passed {busiest}" if busiest is not None else ""
            values = {"sent": _megabytes(sent), "received": _megabytes(received), "others": elsewhere}
            values |= {"other": pair.peer_host, "interface": pair.interface, "size": size}
            findings.append(finding_of("around the mesh", pair.host, **values))
    return findings or [finding_of("mesh", size=size, hosts=len({pair.host for pair in traffic}), network=mesh.network)]


def mesh_of(world: World, path: str | Path) -> Mesh | None:
    """Return ``[mesh]`` of a hosts file that only rank 0 reads. Collective. Raises UserError like ``read_mesh``."""
    from hetero_mpi.launch.hosts.mesh import Mesh, read_mesh

    with world.on_leader("reading the hosts file"):
        mesh = read_mesh(path) if world.rank == 0 else None
    values = world.broadcast_json(mesh.model_dump() if mesh is not None else None)
    return Mesh.model_validate(values) if values is not None else None


def verify_mesh_command(world: World, path: Path) -> int:
    """Run ``mesh verify`` under a launcher: print the findings and return the exit code. Collective.

    Raises UserError if the hosts file cannot be read or has no mesh.
    """
    mesh = mesh_of(world, path)
    if mesh is None:
        raise CollectiveUserError("doctor.no_mesh", f"{path} has no [mesh]: pass the hosts.toml that `mesh init` wrote")
    world.current_action = "sending messages through the mesh"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        findings = verify_mesh(world, transport, mesh)
    if world.rank == 0:
        write_text("\n".join([*lines_of(findings), ""]), sys.stdout)
    return int(ExitCode.FAILED if would_fail(findings) else ExitCode.DONE)


def _exchange(transport: Transport, rank: int, peer: int) -> None:
    """Send a message and, once it has arrived, one back; the lower rank sends first."""
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    if rank < peer:
        back = transport.post_receive(peer, _REPLY_TAG, np.empty_like(message))
        transport.wait(transport.send(peer, _REQUEST_TAG, message))
        transport.wait(back)
    else:
        transport.wait(transport.post_receive(peer, _REQUEST_TAG, np.empty_like(message)))
        transport.wait(transport.send(peer, _REPLY_TAG, message))


def _counters() -> dict[str, tuple[int, int]]:
    """Return the bytes (sent, received) on every interface since this machine started."""
    import psutil

    return {name: (item.bytes_sent, item.bytes_recv) for name, item in psutil.net_io_counters(pernic=True).items()}


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.1f} MB"
