"""The command ``doctor`` without mpirun: examines every host through the launch agent.

It starts a host agent on each host and tries plain TCP between the hosts, so that it can explain why MPI would not start. Only
the standard library is needed. Under mpirun the ranks examine themselves instead (``rank_checks``). The exit code is 0 if a run
would work, and 1 (``ExitCode.FAILED``) if a run would or might fail.
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
from functools import partial
from typing import TYPE_CHECKING, Any

from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, detect_launcher
from hetero_mpi.comm.ranks.versions import PACKAGE, own_source
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import CHECKS, DoctorOptions, report
from hetero_mpi.launch.doctor.diagnostics import Finding, finding_of, merge_same
from hetero_mpi.launch.doctor.host_facts import HostFacts, Target, devices_to_test
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
"""Timeouts in seconds for a host agent's start, its facts about the host (it imports torch), and its other answers."""
_SELF_TEST_S = 900.0
"""Timeout of a device's self-test in seconds. A single check that hangs is ended much sooner."""
_CONNECT_S = 5.0
"""Timeout of a connection between two hosts in seconds."""


def doctor(options: DoctorOptions) -> int:
    """Examine the hosts in the options, or the ranks under mpirun; print the findings and return the exit code.

    Raises UserError if the host file cannot be read.
    """
    if detect_launcher(os.environ, "") is None:
        return report(options, *examine_hosts(options))
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.launch.doctor.rank_checks import run_rank_doctor

    return run_guarded(lambda world: run_rank_doctor(world, options))


def examine_hosts(options: DoctorOptions) -> tuple[list[Finding], list[Target]]:
    """Return findings and facts about the hosts in the options' file (default: this machine)."""
    launcher, findings = _launcher()
    try:
        targets, unknown = targets_of(options, launcher)
    except ImportError as error:
        raise UserError("doctor.hosts", f"{error}: check this machine first (`doctor` without a host file).") from None
    agent, _ = launch_agent(launcher.family if launcher else OPEN_MPI, options.mpirun_args, os.environ)
    if not options.json:
        names = ", ".join(target.title for target in targets)
        write_text(f"doctor: examining {names} (importing torch there may take a minute)\n", sys.stderr)
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(HostAgent(agent, host.name, host.local, host.python, host.directory, host.variables))
            for host in targets
        ]
        with ThreadPoolExecutor(len(targets) or 1) as pool:
            results = list(pool.map(partial(_ask_facts, run_dir=options.run_dir), targets, agents))
            if options.self_test:
                results = list(pool.map(_with_self_tests, results, agents))
        networks = [LocalAddress(*item) for result in results if result.facts for item in result.facts.addresses]
        reachable = [(result, remote) for result, remote in zip(results, agents, strict=True) if result.facts]
        # Another commit may not support these requests.
        same_source = [(result, remote) for result, remote in reachable if _same_source(result)]
        connections = list(_connections([*same_source, *_own_side(stack, same_source)], networks))
        offsets_s = {result.title: _offset_s(remote) for result, remote in reachable}
    results = [*results, *unknown]
    findings += [finding for check in CHECKS for finding in check(results)]
    findings += _mesh(options.hosts, results) if options.hosts is not None else []
    findings += [*connections, *checks.check_clocks(offsets_s)]
    if connections:
        ranks = sum(result.ranks for result in results)
        file = f"--hosts {options.hosts}" if options.hosts else f"-np {ranks} --hostfile {options.hostfile}"
        findings.append(finding_of("links not measured", command=f"python -m hetero_mpi launch {file} -- doctor"))
    return merge_same(findings), results


def _same_source(examined: Target) -> bool:
    return examined.facts is not None and examined.facts.versions.get(PACKAGE) == own_source()


def _mesh(path: str, results: Sequence[Target]) -> list[Finding]:
    from hetero_mpi.launch.hosts.mesh import read_mesh  # imports pydantic, as `targets_of` does for a hosts file

    mesh = read_mesh(path)
    addresses = {result.title: [ip for _, ip, _ in result.facts.addresses] for result in results if result.facts}
    if not any(result.local for result in results):  # unrecognised by its address in a mesh that is down
        addresses[f"{socket.gethostname()} (here)"] = [item.address for item in local_addresses()]
    return [mesh_finding(mesh, addresses, path)] if mesh is not None else []


def mesh_finding(mesh: Mesh, addresses: Mapping[str, Sequence[str]], path: str) -> Finding:
    """Check without MPI whether the mesh is up on every host; ``addresses`` maps each host to its IPv4 addresses."""
    down = [host for host, ips in addresses.items() if not any(mesh.holds(address) for address in ips)]
    if down:
        return finding_of("mesh down", *down, network=mesh.network, interface=mesh.interface)
    return finding_of("mesh up", network=mesh.network, path=path)


def _launcher() -> tuple[Launcher | None, list[Finding]]:
    try:
        launcher = find_launcher()
    except UserError as error:
        return None, [finding_of("no launcher", error=str(error))]
    kind = "launcher" if launcher.family in (OPEN_MPI, MPICH) else "other launcher"
    return launcher, [finding_of(kind, path=launcher.path, library=launcher.library)]


def targets_of(options: DoctorOptions, launcher: Launcher | None) -> tuple[list[Target], list[Target]]:
    """Return (hosts to examine, in file order; hosts whose names do not resolve).

    Raises UserError if the file cannot be read or is invalid.
    """
    local_prefix = launcher.prefix if launcher else ""
    if options.hosts is not None:
        from hetero_mpi.launch.hosts.hosts_toml import read_hosts  # imports pydantic
        from hetero_mpi.launch.hosts.mesh import read_mesh

        mesh = read_mesh(options.hosts)
        requested = [
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
        requested = [Target(name, "", name, False, prefix=local_prefix, ranks=count) for name, count in slots.items()]
    else:
        return [Target(socket.gethostname(), "127.0.0.1", "localhost", True, prefix=local_prefix)], []
    local_ips = {item.address for item in local_addresses()}
    resolved: list[Target] = []
    unknown: list[Target] = []
    for target in requested:
        number = sum(earlier.title == target.title for earlier in resolved) + 1
        title = target.title if number == 1 else f"{target.title} ({number})"
        try:
            address = resolve(target.name)
        except UserError as error:
            unknown.append(Target(title, "", target.name, False, target.python, complaint=str(error)))
            continue
        local = address in local_ips or address.startswith("127.")
        resolved.append(replace(target, title=title, address=address, local=local))
    return resolved, unknown


def _ask_facts(target: Target, host_agent: HostAgent, run_dir: str) -> Target:
    facts, complaint = None, ""
    try:
        # An unreachable host gets a shorter timeout than the import of torch.
        host_agent.ask("clock", _START_S)
        answer = host_agent.ask("facts", _FACTS_S, directory=run_dir, prefix=target.prefix, work=target.directory)
        facts = HostFacts.from_dict(answer)
    except AgentError as error:
        complaint = str(error)
    except (KeyError, TypeError):
        complaint = f"{checks.OTHER_SOURCE}, whose answers differ; this machine has {own_source()}"
    return replace(target, facts=facts, complaint=complaint)


def _with_self_tests(examined: Target, host_agent: HostAgent) -> Target:
    """Add the results of the devices' self-tests; no change if torch is missing or the host has another commit."""
    if examined.facts is None or not _same_source(examined):
        return examined
    devices = devices_to_test(examined.facts.torch)
    results: Sequence[dict[str, Any]] = ()
    try:
        if devices:
            results = host_agent.ask("self_tests", _SELF_TEST_S * len(devices), torch=examined.facts.torch)["found"]
    except AgentError as error:
        return replace(examined, facts=None, complaint=f"self-test: {error}")
    return replace(examined, facts=replace(examined.facts, self_tests=tuple(results)))


def _connections(ends: Sequence[tuple[Target, HostAgent]], networks: Sequence[LocalAddress]) -> Iterator[Finding]:
    """Yield findings about TCP connections between all pairs of machines, each tested once whatever its entries."""
    machines = {("here" if target.local else target.address): (target, agent) for target, agent in reversed(ends)}
    ends = list(reversed(machines.values()))
    if len(ends) < 2:
        return
    with ThreadPoolExecutor(len(ends)) as pool:
        endpoints = list(pool.map(_door, ends))
        errors_by_source = list(pool.map(lambda number: _errors(ends[number][1], endpoints, number), range(len(ends))))
    errors = {(a, b): error for a, row in enumerate(errors_by_source) for b, error in row.items()}
    for (a, b), error in errors.items():
        if error:
            kind = "rejected" if "refused" in error else "no connection"
            kind += " one way" if not errors[b, a] else ""
            source, destination = ends[a][0], ends[b][0]
            values = {"source": source.title, "destination": destination.title, "error": error}
            yield finding_of(kind, network=network_of(source.address, networks), **values)
    if not any(errors.values()):
        yield finding_of("connections")


def _door(end: tuple[Target, HostAgent]) -> dict[str, Any]:
    """Make a machine listen and return its address, port and word; port 0 if it does not listen."""
    target, agent = end
    with contextlib.suppress(AgentError):
        return {"address": target.address, **agent.ask("listen", _ANSWER_S)}
    return {"address": target.address, "port": 0, "word": ""}


def _errors(agent: HostAgent, endpoints: Sequence[dict[str, Any]], source: int) -> dict[int, str]:
    """Map the number of every other machine to the connection error, or "" for success."""
    peers = [number for number in range(len(endpoints)) if number != source]
    try:
        answer = agent.ask("connect", _ANSWER_S, doors=[endpoints[peer] for peer in peers], patience_s=_CONNECT_S)
    except AgentError as error:
        return dict.fromkeys(peers, str(error))
    return dict(zip(peers, answer["errors"], strict=True))


def _own_side(
    stack: contextlib.ExitStack, reachable: Sequence[tuple[Target, HostAgent]]
) -> list[tuple[Target, HostAgent]]:
    """Return this machine with an agent if it is not among the hosts, because their daemons will connect to it."""
    if not reachable or any(target.local for target, _ in reachable):
        return []
    address = source_address(reachable[0][0].address)
    if address is None:
        return []
    target = Target(f"{socket.gethostname()} (here)", address, "localhost", True)
    return [(target, stack.enter_context(HostAgent((), target.name, True)))]


def _offset_s(host_agent: HostAgent) -> float:
    """Return the clock offset of a host in seconds, from the fastest of five answers."""
    trips = []
    with contextlib.suppress(AgentError):
        for _ in range(5):
            begin = time.time()
            remote_s = float(host_agent.ask("clock", _ANSWER_S)["unix_s"])
            end = time.time()
            trips.append((end - begin, remote_s - (begin + end) / 2))
    return min(trips, default=(0.0, 0.0))[1]
