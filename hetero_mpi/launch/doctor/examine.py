"""The command ``doctor`` without mpirun: it examines every host through the launch agent.

It starts a probe on each host and tries plain TCP between them, so that it can say why MPI would not start. Only the standard
library is needed. Under mpirun the ranks examine themselves instead (``rank_checks``). Exit code: 0 if a run would work, 1
(``ExitCode.FAILED``) if one would, or may, fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_mpi.comm.pairs import rounds
from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, launched_as
from hetero_mpi.comm.ranks.versions import PACKAGE, own_source
from hetero_mpi.errors import UserError
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import CHECKS, DoctorOptions, report
from hetero_mpi.launch.doctor.links import SLOW_BYTES_PER_S, Link, check_links
from hetero_mpi.launch.doctor.probe import HostFacts, devices_to_test
from hetero_mpi.launch.doctor.probe_client import Examined, Probe, ProbeError, Target
from hetero_mpi.launch.hosts.agent import launch_agent
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity, merged
from hetero_mpi.launch.hosts.hostfile import read_hostfile, slots_by_host
from hetero_mpi.launch.hosts.interface import LocalAddress, local_addresses, network_of, resolve, source_address
from hetero_mpi.launch.launcher.launcher import Launcher, find_launcher
from hetero_mpi.terminal import fitted

_START_S, _FACTS_S, _ANSWER_S = 60.0, 300.0, 30.0
"""Time limits of a probe, seconds: to start, to examine its host (it imports torch), and to answer anything else."""
_SELF_TEST_S = 900.0
"""Time limit for the self-test of a device, seconds. A single check that hangs is ended long before."""
_MESH_S, _KNOCK_S = 5.0, 3.0
"""Seconds that a probe may take to start where nothing answers at the host's address in a mesh; and for which that is tried."""
_CONNECT_S = 5.0
"""Time limit for a connection between two hosts, seconds."""


def doctor(options: DoctorOptions) -> int:
    """Examine the hosts that the options name, or the ranks under mpirun; print the findings; return the exit code.

    :raises UserError: a host file that cannot be read.
    """
    if launched_as(os.environ, "") is None:
        return report(options, *examine_hosts(options))
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.launch.doctor.rank_checks import examine_together

    return run_guarded(lambda world: examine_together(world, options))


def examine_hosts(options: DoctorOptions) -> tuple[list[Finding], list[Examined]]:
    """Findings about the hosts of the options' file (without a file: this machine), and the facts about them."""
    launcher, findings = _launcher()
    try:
        targets, unknown = targets_of(options, launcher)
    except ImportError as error:
        raise UserError(f"{error}: ask about this machine alone first (`doctor` without a host file).") from None
    agent, _ = launch_agent(launcher.family if launcher else OPEN_MPI, options.mpirun_args, os.environ)
    if not options.json:
        names = ", ".join(target.title for target in targets)
        text = f"doctor: asking {names} (importing torch there may take a minute)"
        print(fitted(text, sys.stderr), file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(Probe(target, agent)) for target in targets]
        with ThreadPoolExecutor(len(targets) or 1) as pool:
            places = list(pool.map(lambda target, probe: _ask_facts(target, probe, options.run_dir), targets, probes))
            if options.self_test:
                places = list(pool.map(_with_self_tests, places, probes))
        known = [place.facts for place in places if place.facts]
        alive = [(target, probe) for target, probe, place in zip(targets, probes, places, strict=True) if place.facts]
        # Another commit may speak otherwise over sockets, and would pass for a firewall.
        alike = [pair for pair, facts in zip(alive, known, strict=True) if facts.versions.get(PACKAGE) == own_source()]
        links = _connect([*alike, *_own_side(stack, alike)], known)
        offsets_s = {target.title: _offset_s(probe) for target, probe in alive}
    places = [*places, *unknown]
    findings += [finding for check in CHECKS for finding in check(places)]
    findings += _mesh(options.hosts, places) if options.hosts is not None else []
    findings += [*check_links(links, "TCP, ephemeral ports"), *checks.check_clocks(offsets_s)]
    return merged(findings), places


def _mesh(path: str, places: Sequence[Examined]) -> list[Finding]:
    from hetero_mpi.launch.wireguard.mesh import (  # bring pydantic, as `targets_of` does for a hosts file
        check_up,
        read_mesh,
    )

    mesh = read_mesh(path)
    own = {place.title: [address for _, address, _ in place.facts.addresses] for place in places if place.facts}
    if not any(place.local for place in places):  # by the address in a mesh that is down, this machine is not known
        own[f"{socket.gethostname()} (here)"] = [item.address for item in local_addresses()]
    return [check_up(mesh, own, path)] if mesh is not None else []


def _launcher() -> tuple[Launcher | None, list[Finding]]:
    try:
        launcher = find_launcher()
    except UserError as error:
        return None, [Finding("launcher", Severity.FAILS, str(error))]
    if launcher.family not in (OPEN_MPI, MPICH):
        text = f"{launcher.path} of {launcher.library}: `launch` knows Open MPI and MPICH only"
        remedy = "start with that launcher itself: MPIEXEC -n 3 python -m hetero_mpi ..."
        return launcher, [Finding("launcher", Severity.NOTE, text, remedy)]
    text = f"{launcher.path} belongs to the loaded library, {launcher.library}"
    return launcher, [Finding("launcher", Severity.FINE, text)]


def targets_of(options: DoctorOptions, launcher: Launcher | None) -> tuple[list[Target], list[Examined]]:
    """The hosts to examine, in the order of the file; and those whose names have no address.

    :raises UserError: the file cannot be read, or breaks rules.
    """
    here = launcher.prefix if launcher else ""
    if options.hosts is not None:
        from hetero_mpi.launch.hosts.hosts_toml import read_hosts  # these bring pydantic
        from hetero_mpi.launch.launcher.hosts_command import prefix_of
        from hetero_mpi.launch.wireguard.mesh import read_mesh

        mesh = read_mesh(options.hosts)
        wanted = [
            Target(
                title=host.title,
                address="",
                name=host.address,
                local=False,
                python=host.executable,
                prefix=prefix_of(host, launcher) if launcher else host.prefix or "",
                directory=host.directory or "",
                variables=host.variables(),
                ranks=host.slots,
                device=host.device,
                mesh=mesh if mesh is not None and mesh.holds(host.address) else None,
            )
            for host in read_hosts(options.hosts)
        ]
    elif options.hostfile is not None:
        slots = slots_by_host(read_hostfile(options.hostfile))
        wanted = [Target(name, "", name, False, prefix=here, ranks=count) for name, count in slots.items()]
    else:
        return [Target(socket.gethostname(), "127.0.0.1", "localhost", True, prefix=here)], []
    return _with_addresses(wanted)


def _with_addresses(wanted: Sequence[Target]) -> tuple[list[Target], list[Examined]]:
    own = {item.address for item in local_addresses()}
    found: list[Target] = []
    unknown: list[Examined] = []
    for target in wanted:
        number = sum(other.title == target.title for other in found) + 1
        title = target.title if number == 1 else f"{target.title} ({number})"
        try:
            address = resolve(target.name)
        except UserError as error:
            unknown.append(Examined(title, "", target.name, False, target.python, complaint=str(error)))
            continue
        local = address in own or address.startswith("127.")
        found.append(replace(target, title=title, address=address, local=local))
    return found, unknown


def _ask_facts(target: Target, probe: Probe, run_dir: str) -> Examined:
    facts, complaint = None, ""
    try:
        # A host that is off need not be waited for as long as one that imports torch.
        probe.ask("clock", _start_s(target))
        answer = probe.ask("facts", _FACTS_S, directory=run_dir, prefix=target.prefix, work=target.directory)
        facts = HostFacts.from_dict(answer)
    except ProbeError as error:
        complaint = str(error)
    except (KeyError, TypeError):
        complaint = f"{checks.OTHER_SOURCE}, whose answers are not understood; here: {own_source()}"
    return Examined(**vars(target), facts=facts, complaint=complaint)


def _with_self_tests(place: Examined, probe: Probe) -> Examined:
    """``place`` with the results of its devices' self-tests; unchanged where there is no torch, or a commit without self-tests."""
    if place.facts is None or place.facts.versions.get(PACKAGE) != own_source():
        return place
    devices = devices_to_test(place.facts.torch)
    try:
        found = (
            probe.ask("self_tests", _SELF_TEST_S * len(devices), torch=place.facts.torch)["found"] if devices else ()
        )
    except ProbeError as error:
        return replace(place, facts=None, complaint=f"self-test: {error}")
    return replace(place, facts=replace(place.facts, self_tests=tuple(found)))


def _start_s(target: Target) -> float:
    """Seconds that a probe may take to start; few for a host in a mesh that is down here or there."""
    if target.mesh is None or target.local:
        return _START_S
    return _START_S if target.mesh.own(local_addresses()) is not None and _answers(target.address) else _MESH_S


def _answers(address: str) -> bool:
    """Does a machine answer at an address, if only with a refusal? A firewall that drops packets gives no answer."""
    try:
        socket.create_connection((address, 22), _KNOCK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _own_side(stack: contextlib.ExitStack, alive: Sequence[tuple[Target, Probe]]) -> list[tuple[Target, Probe]]:
    """This machine with a probe on it, where it is not among the hosts, as their daemons connect to it; else nothing."""
    if not alive or any(target.local for target, _ in alive):
        return []
    address = source_address(alive[0][0].address)
    if address is None:
        return []
    target = Target(f"{socket.gethostname()} (here)", address, "localhost", True)
    return [(target, stack.enter_context(Probe(target, ())))]


def _connect(alive: Sequence[tuple[Target, Probe]], facts: Sequence[HostFacts] = ()) -> list[Link]:
    """TCP links between each two machines. Pairs that share no machine are tried at once, the two directions of a pair in turn.

    Pairs may share more than machines (Wi-Fi, the line between two sites), so links that are slow then are measured again, alone.
    """
    machines = {("here" if target.local else target.address): (target, probe) for target, probe in reversed(alive)}
    ends = [_End(target, probe) for target, probe in reversed(machines.values())]
    links: dict[tuple[int, int], Link] = {}
    with ThreadPoolExecutor(max(1, len(ends) // 2)) as pool:
        for pairs in rounds(len(ends)):
            found = pool.map(lambda a, b: (_link(ends[a], ends[b]), _link(ends[b], ends[a])), *zip(*pairs, strict=True))
            for (a, b), (there, back) in zip(pairs, found, strict=True):
                links[a, b], links[b, a] = there, back
    slow = [pair for pair, link in links.items() if not link.error and link.bytes_per_s < SLOW_BYTES_PER_S]
    for a, b in slow if len(ends) > 3 else ():  # of fewer machines, no two pairs were measured at once
        links[a, b] = max(links[a, b], _link(ends[a], ends[b]), key=lambda link: link.bytes_per_s)
    known = [LocalAddress(*item) for own in facts for item in own.addresses]
    addresses = {end.target.title: network_of(end.target.address, known) for end in ends}
    return [replace(links[pair], network=addresses[links[pair].source]) for pair in sorted(links)]


@dataclass
class _End:
    """A machine while links are measured; it takes part in one link at a time."""

    target: Target
    probe: Probe
    listener: dict[str, Any] = field(default_factory=dict)
    """Port and token of its listener; empty before it listens."""


def _link(source: _End, destination: _End) -> Link:
    try:
        destination.listener = destination.listener or destination.probe.ask("listen", _ANSWER_S)
        values = {"address": destination.target.address, "patience_s": _CONNECT_S, **destination.listener}
        speed = source.probe.ask("connect", _ANSWER_S, **values)
    except ProbeError as error:
        speed = {"error": str(error)}
    return Link(source.target.title, destination.target.title, **speed)


def _offset_s(probe: Probe) -> float:
    """Difference of a host's clock from ours, seconds: from the fastest answer of five."""
    trips = []
    with contextlib.suppress(ProbeError):
        for _ in range(5):
            asked = time.time()
            there = float(probe.ask("clock", _ANSWER_S)["unix_s"])
            answered = time.time()
            trips.append((answered - asked, there - (asked + answered) / 2))
    return min(trips, default=(0.0, 0.0))[1]
