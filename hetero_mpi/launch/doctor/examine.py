"""The command ``doctor`` without mpirun: it examines every host through the launch agent.

It starts a host agent on each and tries plain TCP between them, so that it can say why MPI would not start. Only the standard
library is needed. Under mpirun the ranks examine themselves instead (``rank_checks``). Exit code: 0 if a run would work, 1
(``ExitCode.FAILED``) if one would, or may, fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, detect_launcher
from hetero_mpi.comm.ranks.versions import PACKAGE, own_source
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import CHECKS, DoctorOptions, report
from hetero_mpi.launch.doctor.diagnostics import Finding, found, merged
from hetero_mpi.launch.doctor.host_facts import Examined, HostFacts, devices_to_test
from hetero_mpi.launch.hosts.agent import AgentError, HostAgent, launch_agent
from hetero_mpi.launch.hosts.hostfile import read_hostfile, slots_by_host
from hetero_mpi.launch.hosts.interface import LocalAddress, local_addresses, network_of, resolve, source_address
from hetero_mpi.launch.launcher.command_line import prefix_of
from hetero_mpi.launch.launcher.launcher import Launcher, find_launcher
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import write_text

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.mesh import Mesh

_START_S, _FACTS_S, _ANSWER_S = 60.0, 300.0, 30.0
"""Time limits of a host agent, seconds: to start, to examine its host (it imports torch), and to answer anything else."""
_SELF_TEST_S = 900.0
"""Time limit for the self-test of a device, seconds. A single check that hangs is ended long before."""
_CONNECT_S = 5.0
"""Time limit for a connection between two hosts, seconds."""


def doctor(options: DoctorOptions) -> int:
    """Examine the hosts that the options name, or the ranks under mpirun; print the findings; return the exit code.

    :raises UserError: a host file that cannot be read.
    """
    if detect_launcher(os.environ, "") is None:
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
        raise UserError(
            "doctor.hosts", f"{error}: ask about this machine alone first (`doctor` without a host file)."
        ) from None
    agent, _ = launch_agent(launcher.family if launcher else OPEN_MPI, options.mpirun_args, os.environ)
    if not options.json:
        names = ", ".join(target.title for target in targets)
        write_text(f"doctor: asking {names} (importing torch there may take a minute)\n", sys.stderr)
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(HostAgent(agent, one.name, one.local, one.python, one.directory, one.variables))
            for one in targets
        ]
        with ThreadPoolExecutor(len(targets) or 1) as pool:
            places = list(pool.map(lambda target, asked: _ask_facts(target, asked, options.run_dir), targets, agents))
            if options.self_test:
                places = list(pool.map(_with_self_tests, places, agents))
        known = [LocalAddress(*item) for place in places if place.facts for item in place.facts.addresses]
        alive = [(place, asked) for place, asked in zip(places, agents, strict=True) if place.facts]
        # Another commit may know no such requests.
        alike = [(place, asked) for place, asked in alive if _same_source(place)]
        connections = list(_connections([*alike, *_own_side(stack, alike)], known))
        offsets_s = {place.title: _offset_s(asked) for place, asked in alive}
    places = [*places, *unknown]
    findings += [finding for check in CHECKS for finding in check(places)]
    findings += _mesh(options.hosts, places) if options.hosts is not None else []
    findings += [*connections, *checks.check_clocks(offsets_s)]
    if connections:
        ranks = sum(place.ranks for place in places)
        file = f"--hosts {options.hosts}" if options.hosts else f"-np {ranks} --hostfile {options.hostfile}"
        findings.append(found("links not measured", command=f"python -m hetero_mpi launch {file} -- doctor"))
    return merged(findings), places


def _same_source(place: Examined) -> bool:
    return place.facts is not None and place.facts.versions.get(PACKAGE) == own_source()


def _mesh(path: str, places: Sequence[Examined]) -> list[Finding]:
    from hetero_mpi.launch.hosts.mesh import read_mesh  # brings pydantic, as `targets_of` does for a hosts file

    mesh = read_mesh(path)
    own = {place.title: [address for _, address, _ in place.facts.addresses] for place in places if place.facts}
    if not any(place.local for place in places):  # by the address in a mesh that is down, this machine is not known
        own[f"{socket.gethostname()} (here)"] = [item.address for item in local_addresses()]
    return [mesh_finding(mesh, own, path)] if mesh is not None else []


def mesh_finding(mesh: Mesh, addresses: Mapping[str, Sequence[str]], path: str) -> Finding:
    """The finding whether the mesh is up on every host, without MPI. ``addresses``: host -> the IPv4 addresses that it reports."""
    without = [host for host, own in addresses.items() if not any(mesh.holds(address) for address in own)]
    if without:
        return found("mesh down", *without, network=mesh.network, interface=mesh.interface)
    return found("mesh up", network=mesh.network, path=path)


def _launcher() -> tuple[Launcher | None, list[Finding]]:
    try:
        launcher = find_launcher()
    except UserError as error:
        return None, [found("no launcher", error=str(error))]
    kind = "launcher" if launcher.family in (OPEN_MPI, MPICH) else "other launcher"
    return launcher, [found(kind, path=launcher.path, library=launcher.library)]


def targets_of(options: DoctorOptions, launcher: Launcher | None) -> tuple[list[Examined], list[Examined]]:
    """The hosts to examine, in the order of the file; and those whose names have no address.

    :raises UserError: the file cannot be read, or breaks rules.
    """
    here = launcher.prefix if launcher else ""
    if options.hosts is not None:
        from hetero_mpi.launch.hosts.hosts_toml import read_hosts  # these bring pydantic
        from hetero_mpi.launch.hosts.mesh import read_mesh

        mesh = read_mesh(options.hosts)
        wanted = [
            Examined(
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
        wanted = [Examined(name, "", name, False, prefix=here, ranks=count) for name, count in slots.items()]
    else:
        return [Examined(socket.gethostname(), "127.0.0.1", "localhost", True, prefix=here)], []
    return _with_addresses(wanted)


def _with_addresses(wanted: Sequence[Examined]) -> tuple[list[Examined], list[Examined]]:
    own = {item.address for item in local_addresses()}
    found: list[Examined] = []
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


def _ask_facts(target: Examined, asked: HostAgent, run_dir: str) -> Examined:
    facts, complaint = None, ""
    try:
        # A host that is off need not be waited for as long as one that imports torch.
        asked.ask("clock", _START_S)
        answer = asked.ask("facts", _FACTS_S, directory=run_dir, prefix=target.prefix, work=target.directory)
        facts = HostFacts.from_dict(answer)
    except AgentError as error:
        complaint = str(error)
    except (KeyError, TypeError):
        complaint = f"{checks.OTHER_SOURCE}, whose answers are not understood; here: {own_source()}"
    return replace(target, facts=facts, complaint=complaint)


def _with_self_tests(place: Examined, asked: HostAgent) -> Examined:
    """``place`` with the results of its devices' self-tests; unchanged where there is no torch, or a commit without self-tests."""
    if place.facts is None or not _same_source(place):
        return place
    devices = devices_to_test(place.facts.torch)
    results: Sequence[dict[str, Any]] = ()
    try:
        if devices:
            results = asked.ask("self_tests", _SELF_TEST_S * len(devices), torch=place.facts.torch)["found"]
    except AgentError as error:
        return replace(place, facts=None, complaint=f"self-test: {error}")
    return replace(place, facts=replace(place.facts, self_tests=tuple(results)))


def _connections(ends: Sequence[tuple[Examined, HostAgent]], known: Sequence[LocalAddress]) -> Iterator[Finding]:
    """Findings about TCP connections between each two machines. Each is asked once, whatever entries it has."""
    machines = {("here" if target.local else target.address): (target, agent) for target, agent in reversed(ends)}
    ends = list(reversed(machines.values()))
    if len(ends) < 2:
        return
    with ThreadPoolExecutor(len(ends)) as pool:
        doors = list(pool.map(_door, ends))
        found_out = list(pool.map(lambda number: _errors(ends[number][1], doors, number), range(len(ends))))
    errors = {(a, b): error for a, own in enumerate(found_out) for b, error in own.items()}
    for (a, b), error in errors.items():
        if error:
            kind = "rejected" if "refused" in error else "no connection"
            kind += " one way" if not errors[b, a] else ""
            source, destination = ends[a][0], ends[b][0]
            values = {"source": source.title, "destination": destination.title, "error": error}
            yield found(kind, network=network_of(source.address, known), **values)
    if not any(errors.values()):
        yield found("connections")


def _door(end: tuple[Examined, HostAgent]) -> dict[str, Any]:
    """The address, port and word of a machine that listens; without a port where it does not."""
    target, agent = end
    with contextlib.suppress(AgentError):
        return {"address": target.address, **agent.ask("listen", _ANSWER_S)}
    return {"address": target.address, "port": 0, "word": ""}


def _errors(agent: HostAgent, doors: Sequence[dict[str, Any]], own: int) -> dict[int, str]:
    """Number of every other machine -> why it cannot be connected to; "": it can."""
    others = [number for number in range(len(doors)) if number != own]
    try:
        answer = agent.ask("connect", _ANSWER_S, doors=[doors[other] for other in others], patience_s=_CONNECT_S)
    except AgentError as error:
        return dict.fromkeys(others, str(error))
    return dict(zip(others, answer["errors"], strict=True))


def _own_side(
    stack: contextlib.ExitStack, alive: Sequence[tuple[Examined, HostAgent]]
) -> list[tuple[Examined, HostAgent]]:
    """This machine with an agent on it, where it is not among the hosts, as their daemons connect to it; else nothing."""
    if not alive or any(target.local for target, _ in alive):
        return []
    address = source_address(alive[0][0].address)
    if address is None:
        return []
    target = Examined(f"{socket.gethostname()} (here)", address, "localhost", True)
    return [(target, stack.enter_context(HostAgent((), target.name, True)))]


def _offset_s(asked: HostAgent) -> float:
    """Difference of a host's clock from ours, seconds: from the fastest answer of five."""
    trips = []
    with contextlib.suppress(AgentError):
        for _ in range(5):
            begin = time.time()
            there = float(asked.ask("clock", _ANSWER_S)["unix_s"])
            end = time.time()
            trips.append((end - begin, there - (begin + end) / 2))
    return min(trips, default=(0.0, 0.0))[1]
