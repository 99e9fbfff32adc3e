"""The WireGuard mesh between the hosts of a ``hosts.toml``: encrypted links for MPI traffic.

``mesh init`` creates keys and configurations for all hosts on this machine, and a second ``hosts.toml`` with the addresses
inside the mesh. MPI uses the network of its hosts' addresses, so a launch with that file binds MPI to the mesh. ``mesh verify``
sends messages and reads the interfaces' byte counters to test the mesh.
"""

import ipaddress
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.job.rules import as_toml, broken_keys
from hetero_mpi.launch.hosts.hosts_toml import Host, read_hosts, tables_of
from hetero_mpi.launch.hosts.interface import LocalAddress
from hetero_mpi.util.disk import atomic_write, require_regular, write_errors
from hetero_mpi.util.errors import UserError

UNREACHABLE = "none"
"""``endpoint`` of a host behind a router that blocks incoming packets, so that the host must call the others."""
_KEEPALIVE_S = 25
"""Interval of keep-alive packets in seconds; routers forget connections that are silent for longer."""
_NAME = re.compile(r"[A-Za-z0-9_=+.-]{1,15}")


class Mesh(BaseModel):
    """The table ``[mesh]`` of a hosts file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    network: str = "10.86.0.0/24"
    """Addresses inside the mesh; must not overlap the hosts' other networks."""
    interface: str = "hetero0"
    """Name of the WireGuard interface on every host (macOS assigns another name)."""
    port: Annotated[int, Field(ge=1, le=65535)] = 51820
    """UDP port on which WireGuard listens on every host; firewalls between the hosts need to allow only this port."""

    def holds(self, address: str) -> bool:
        try:
            return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(self.network)
        except ValueError:
            return False

    def local_address(self, local: Sequence[LocalAddress]) -> LocalAddress | None:
        """Return a machine's address in the mesh, or None if the mesh is down there."""
        return next((item for item in local if self.holds(item.address)), None)


@dataclass(frozen=True)
class MeshHost:
    """One machine in the mesh. Entries of the hosts file with the same address are one machine."""

    name: str
    """Name of the machine's configuration file."""
    address: str
    """Address in the hosts file."""
    mesh_address: str
    endpoint: str | None
    """ADDRESS:PORT at which other machines reach its WireGuard; None if they cannot."""


def read_mesh(path: str | Path) -> Mesh | None:
    """Return ``[mesh]`` of a hosts file, or None. Raises UserError if the file cannot be read or the table is invalid."""
    values = tables_of(Path(path)).get("mesh")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise UserError(
            "mesh.invalid", f"{path}: mesh = {as_toml(values)}: must be a table; write [mesh] and its keys below it"
        )
    problems = [
        f"{path}: [mesh] {key}{' = ' + as_toml(values[key]) if key in values else ''}: {rule}"
        for key, rule in _broken_rules(values).items()
    ]
    if problems:
        raise UserError("mesh.invalid", "\n".join(problems))
    return Mesh.model_validate(values)


def _broken_rules(values: Mapping[str, Any]) -> dict[str, str]:
    broken = broken_keys(Mesh, values)
    if "network" in values and "network" not in broken:
        try:
            ipaddress.IPv4Network(values["network"])
        except ValueError:
            broken["network"] = 'must be an IPv4 network, such as "10.86.0.0/24"'
    if "interface" in values and "interface" not in broken and not _NAME.fullmatch(values["interface"]):
        broken["interface"] = "must have 1 to 15 letters, digits and _=+.-"
    return broken


def mesh_members(hosts: Sequence[Host], mesh: Mesh, path: str | Path) -> tuple[MeshHost, ...]:
    """Return the machines of a hosts file, each with its ``mesh_address`` or the next free address in the mesh.

    Raises a UserError that lists all problems with addresses and endpoints, one per line.
    """
    machines: dict[str, Host] = {}
    for host in hosts:
        machines.setdefault(host.address, host)
    problems = list(_problems(machines, mesh))
    network = ipaddress.IPv4Network(mesh.network)
    reserved = {host.mesh_address for host in machines.values()}
    free_addresses = (str(address) for address in network.hosts() if str(address) not in reserved)
    mesh_hosts: list[MeshHost] = []
    for host in machines.values():
        address = host.mesh_address or next(free_addresses, None)
        if address is None:
            problems.append(f"[mesh] network {mesh.network} has no free address for {host.title}: choose a larger one")
            break
        endpoint = host.endpoint or f"{host.address}:{mesh.port}"
        name = _file_name(host.title, [member.name for member in mesh_hosts])
        mesh_hosts.append(MeshHost(name, host.address, address, None if endpoint == UNREACHABLE else endpoint))
    if problems:
        raise UserError("mesh.invalid", "\n".join(f"{path}: {problem}" for problem in problems))
    return tuple(mesh_hosts)


def _problems(machines: Mapping[str, Host], mesh: Mesh) -> Iterator[str]:
    if len(machines) < 2:
        yield f"a mesh needs at least two machines (this file has {len(machines)})"
    mesh_addresses = [host.mesh_address for host in machines.values() if host.mesh_address is not None]
    for host in machines.values():
        if host.mesh_address is not None and not mesh.holds(host.mesh_address):
            yield f"mesh_address {host.mesh_address} of {host.title} is not in [mesh] network {mesh.network}"
        elif mesh_addresses.count(host.mesh_address or "") > 1:
            yield f"mesh_address {host.mesh_address} of {host.title} is also another machine's"
        if host.endpoint is None and (host.address.startswith("127.") or host.address == "localhost"):
            yield f"{host.address} means the local host on every machine: write the address at which the others reach it"
        elif mesh.holds(host.address):
            yield f"address {host.address} is in [mesh] network {mesh.network}: pass `mesh init` the file with outside addresses"
    unreachable = [host.title for host in machines.values() if host.endpoint == UNREACHABLE]
    if len(unreachable) > 1:
        yield (
            f'{" and ".join(unreachable)} have endpoint = "{UNREACHABLE}", so neither can call the other: forward a UDP port of a '
            "router to its host, and set that port as its endpoint"
        )


def _file_name(title: str, used: Sequence[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", title).lstrip(".-") or "host"
    names = (name, *(f"{name}-{number}" for number in range(2, len(used) + 3)))
    return next(free for free in names if free not in used)


def init(path: Path, directory: Path) -> list[str]:
    """Write ``NAME.conf`` per machine and ``hosts.toml`` into ``directory``; return the next steps.

    Existing keys are kept. Nothing is sent. Raises UserError if the file is invalid, ``wg`` is missing, or writing fails.
    """
    hosts, mesh = read_hosts(path), read_mesh(path) or Mesh()
    mesh_hosts = mesh_members(hosts, mesh, path)
    with write_errors(directory, "choose another -o."):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = {member: _private_key(directory / f"{member.name}.conf") for member in mesh_hosts}
        public_keys = {member: _wg("pubkey", stdin_text=key) for member, key in keys.items()}
        for member, key in keys.items():
            _write(directory / f"{member.name}.conf", configuration(member, key, public_keys, mesh))
        _write(directory / "hosts.toml", hosts_inside(hosts, mesh_hosts, mesh, path))
    return _next_steps(mesh_hosts, mesh, directory)


def configuration(member: MeshHost, key: str, public_keys: Mapping[MeshHost, str], mesh: Mesh) -> str:
    """Format the WireGuard configuration file of one machine; ``public_keys`` holds the keys of all machines."""
    length = ipaddress.IPv4Network(mesh.network).prefixlen
    lines = [
        f"# {member.name}: private key of this machine. Install as /etc/wireguard/{mesh.interface}.conf, readable only by root.",
        "[Interface]",
        f"PrivateKey = {key}",
        f"Address = {member.mesh_address}/{length}",
        f"ListenPort = {mesh.port}",
    ]
    for peer, public_key in public_keys.items():
        if peer == member:
            continue
        lines += ["", f"# {peer.name}", "[Peer]", f"PublicKey = {public_key}", f"AllowedIPs = {peer.mesh_address}/32"]
        lines += [f"Endpoint = {peer.endpoint}"] if peer.endpoint is not None else []
        lines += [f"PersistentKeepalive = {_KEEPALIVE_S}"] if member.endpoint is None else []
    return "\n".join(lines) + "\n"


def hosts_inside(hosts: Sequence[Host], mesh_hosts: Sequence[MeshHost], mesh: Mesh, path: Path) -> str:
    """Format the hosts file for ``launch``, with the addresses inside the mesh."""
    import tomli_w  # local import: `launch` reads this module too

    mesh_addresses = {member.address: member.mesh_address for member in mesh_hosts}
    lines = [f"# Written by `mesh init {path}`: the same hosts by their addresses inside the mesh.", "", "[mesh]"]
    lines += [tomli_w.dumps(mesh.model_dump())]
    for host in hosts:
        settings = host.model_dump(exclude_defaults=True, exclude={"address", "name", "endpoint", "mesh_address"})
        variables = settings.pop("environment", {})
        values = {"address": mesh_addresses[host.address], "name": host.title, **settings}
        lines += ["[[host]]", tomli_w.dumps(values).rstrip()]
        lines += ["[host.environment]", tomli_w.dumps(variables).rstrip()] if variables else []
        lines += [""]
    return "\n".join(lines)


def mpi_options(
    mesh: Mesh, family: str, major: str = "5", interface: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return (launcher arguments, environment) that confine an MPI to the mesh.

    ``interface`` is this machine's interface if its name differs from the one in ``[mesh]``.
    """
    if family != OPEN_MPI:
        name = interface or mesh.interface
        return ["-iface", name], {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": name}
    shared, launcher = "sm", ["--prtemca", "prte_if_include"]
    if major == "4":
        shared, launcher = "vader", ["--mca", "oob_tcp_if_include"]
    # Without ob1, MPI may use InfiniBand through UCX or libfabric, which ignore btl_tcp_if_include.
    words = ["--mca", "pml", "ob1", "--mca", "btl", f"self,{shared},tcp", "--mca", "btl_tcp_if_include", mesh.network]
    return [*words, *launcher, mesh.network], {}


def check_bound(mesh: Mesh, hosts: Sequence[Host], local: Sequence[LocalAddress]) -> LocalAddress:
    """Return this machine's mesh address. Raises UserError if the mesh is down here or does not contain every host."""
    outside = [host.address for host in hosts if not mesh.holds(host.address)]
    if outside:
        raise UserError(
            "mesh.outside",
            f"The hosts file has a [mesh], but {', '.join(outside)} would be reached outside its network {mesh.network}: "
            "launch with the hosts.toml that `mesh init` writes, or remove [mesh] to disable it.",
        )
    mesh_address = mesh.local_address(local)
    if mesh_address is None:
        raise UserError(
            "mesh.down",
            f"The hosts file has a [mesh], but no interface of this machine has an address in {mesh.network}: start it with "
            f"`sudo wg-quick up {mesh.interface}`. Nothing was started, as messages would bypass the mesh.",
        )
    return mesh_address


def _next_steps(mesh_hosts: Sequence[MeshHost], mesh: Mesh, directory: Path) -> list[str]:
    lines = [f"  {host.name:<20} {host.mesh_address:<15} {host.endpoint or 'calls the others'}" for host in mesh_hosts]
    target = f"/etc/wireguard/{mesh.interface}.conf"
    return [
        f"Wrote {directory}: WireGuard configurations of {len(mesh_hosts)} machines, readable only by you. Nothing was sent.",
        *lines,
        "On each machine, with its own file (over ssh or a USB stick; the file holds its private key):",
        f"  sudo install -m 600 NAME.conf {target} && sudo wg-quick up {mesh.interface}",
        f"Then remove the .conf files. UDP port {mesh.port} must be open between the machines. Verify the mesh, then use it:",
        f"  python -m hetero_mpi launch --hosts {directory / 'hosts.toml'} -- mesh verify {directory / 'hosts.toml'}",
        f"  python -m hetero_mpi launch --hosts {directory / 'hosts.toml'} -- train job.toml",
    ]


def _private_key(path: Path) -> str:
    """Return the key in an existing configuration, or a new one."""
    require_regular(path)
    if path.exists():
        match = re.search(r"^PrivateKey = (\S+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match is not None:
            return match[1]
    return _wg("genkey")


def _wg(command: str, stdin_text: str = "") -> str:
    if shutil.which("wg") is None:
        raise UserError(
            "mesh.tools_missing",
            "`wg` was not found: install WireGuard's tools (`apt install wireguard-tools`, `brew install wireguard-tools`).",
        )
    answer = subprocess.run(["wg", command], input=stdin_text, capture_output=True, text=True)
    if answer.returncode != 0:
        raise UserError("mesh.command_failed", f"`wg {command}` failed: {answer.stderr.strip()}")
    return answer.stdout.strip()


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can ever read."""
    with atomic_write(path) as draft:
        draft.touch(0o600, exist_ok=False)
        draft.write_text(text, encoding="utf-8")
