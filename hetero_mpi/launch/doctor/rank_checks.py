"""``doctor`` under mpirun: every rank examines itself, and messages are timed over MPI as training sends them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_mpi.comm.links import LinkSamples, measure_links
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.errors import ExitCode
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import CHECKS, DoctorOptions, report
from hetero_mpi.launch.doctor.links import Link, check_links
from hetero_mpi.launch.doctor.probe import HostFacts, fault_tolerance, gather, self_tests, try_torch
from hetero_mpi.launch.doctor.probe_client import Examined
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity, merged, would_fail
from hetero_mpi.launch.hosts.interface import LocalAddress

_MESSAGES_BYTES = (1024, 65_536, 4_194_304)
_REPEATS = 3


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
    world.doing = "timing messages between ranks"
    threaded = world.thread_level in ("multiple", "serialized")
    with MpiTransport(world.comm, threaded=threaded) as transport:
        samples = measure_links(world, transport, _MESSAGES_BYTES, _REPEATS)
        through_mesh = _verify_mesh(world, transport, options)
    links = [_link(world, own) for own in samples]
    findings = [Finding("launcher", Severity.FINE, f"{world.library} started {world.size} ranks that see each other")]
    findings += [finding for check in CHECKS if check is not checks.check_interfaces for finding in check(places)]
    findings += _interfaces_of(places)
    findings += through_mesh
    findings += check_links(links, "MPI messages, as training sends them")
    offsets_s = {host: clocks_s[world.hosts.index(host)] - clocks_s[0] for host in dict.fromkeys(world.hosts)}
    return merged([*findings, *checks.check_clocks(offsets_s)]), places


def _verify_mesh(world: World, transport: Transport, options: DoctorOptions) -> list[Finding]:
    """Do messages go through the mesh of the hosts file, if it has one? Collective."""
    if options.hosts is None:
        return []
    from hetero_mpi.launch.wireguard.check import mesh_of, verify  # brings pydantic, which a host may lack

    mesh = mesh_of(world, options.hosts)
    return verify(world, transport, mesh) if mesh is not None else []


def _gather_places(world: World, options: DoctorOptions) -> list[Examined]:
    """Facts about every Python of every host, once each. Only the first of its ranks imports torch."""
    from mpi4py import MPI

    world.doing = "looking at this host"
    pythons = world.all_gather_json([world.host, sys.prefix])
    facts = gather(options.run_dir, deeply=False)
    mpi = {"library": MPI.Get_library_version(), "threads": world.thread_level, "fault_tolerance": fault_tolerance()}
    first = pythons.index([world.host, sys.prefix]) == world.rank
    facts = replace(facts, mpi=mpi, torch=try_torch() if first else {})
    if options.self_test:
        world.doing = "testing this host's devices"
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


def _link(world: World, samples: LinkSamples) -> Link:
    """A measured link: its latency is that of the smallest message, its bandwidth that of the largest; no line is fitted."""
    source, destination = _rank(world, samples.source), _rank(world, samples.destination)
    bytes_per_s = samples.sample_bytes[-1] / samples.sample_s[-1]
    return Link(source, destination, samples.sample_s[0], bytes_per_s, same_host=samples.same_host)


def _rank(world: World, rank: int) -> str:
    return f"rank {rank} ({world.hosts[rank]})"


def _interfaces_of(places: Sequence[Examined]) -> Iterator[Finding]:
    """What MPI was told about interfaces. Under mpirun it has already chosen, and messages pass."""
    if len({place.facts.host for place in places if place.facts}) < 2:
        return
    facts = places[0].facts
    assert facts is not None
    told = {name: value for name, value in facts.variables.items() if name in checks.INTERFACE_VARIABLES}
    names = sorted({interface for interface, _, _ in facts.addresses if interface != "lo"})
    if told:
        text = ", ".join(f"{name}={value}" for name, value in told.items())
        yield Finding("interfaces", Severity.FINE, f"MPI keeps to what it was told: {text}")
    elif len(names) > 1:
        text = f"MPI chooses among {', '.join(names)} by itself, and may choose wrongly or hang"
        known = [LocalAddress(*item) for place in places if place.facts for item in place.facts.addresses]
        counts = Counter(str(item.network) for item in known if not item.interface.startswith(checks.INSIDE))
        remedy = (
            "`launch --hostfile` derives the interface from the hosts' addresses; by hand: --mca btl_tcp_if_include "
        )
        remedy += ",".join(network for network, count in counts.items() if count == max(counts.values()))
        yield Finding("interfaces", Severity.NOTE, text, remedy, (places[0].title,))
