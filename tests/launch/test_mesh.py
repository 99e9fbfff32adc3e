"""Private links: what ``mesh init`` writes, that launching keeps to it, and real WireGuard between hosts of their own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.cli import main
from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, MpiLibrary
from hetero_mpi.launch.doctor.diagnostics import Severity
from hetero_mpi.launch.doctor.examine import mesh_finding
from hetero_mpi.launch.doctor.rank_checks import PairTraffic, mesh_findings
from hetero_mpi.launch.hosts.hosts_toml import ranks_of, read_hosts
from hetero_mpi.launch.hosts.interface import LocalAddress
from hetero_mpi.launch.hosts.mesh import Mesh, configuration, init, mesh_members, read_mesh
from hetero_mpi.launch.launcher import command_line as building
from hetero_mpi.launch.launcher.command_line import CommandLine, hosts_command
from hetero_mpi.launch.launcher.launcher import Launcher
from tests.support.errors import refuses
from tests.support.mpi import ROOT, launcher_or_skip, require_success
from tests.support.rack import Rack

pytestmark = pytest.mark.slow

HOSTS = """
[[host]]
address = "192.168.1.10"
name = "rtx"
slots = 2

[[host]]
address = "192.168.1.10"
name = "rtx, AMD card"
python = "/b/bin/python"
environment = { HSA_OVERRIDE_GFX_VERSION = "11.0.0" }

[[host]]
address = "titan.lan"
endpoint = "home.example.org:4000"

[[host]]
address = "laptop.lan"
endpoint = "none"
mesh_address = "10.86.0.77"
"""


def write(directory: Path, text: str = HOSTS) -> Path:
    path = directory / "hosts.toml"
    path.write_text(text)
    return path


def test_machines_of_the_mesh(tmp_path: Path) -> None:
    """Two entries of one machine are one member; addresses are given, or the next free ones."""
    path = write(tmp_path)
    found = mesh_members(read_hosts(path), Mesh(), path)
    assert [(member.name, member.mesh_address, member.endpoint) for member in found] == [
        ("rtx", "10.86.0.1", "192.168.1.10:51820"),
        ("titan.lan", "10.86.0.2", "home.example.org:4000"),
        ("laptop.lan", "10.86.0.77", None),
    ]
    public = {member: f"public-{member.name}" for member in found}
    own, titan, laptop = configuration(found[0], "secret", public, Mesh()).partition("\n")[2].split("\n\n")
    assert own.split("\n") == ["[Interface]", "PrivateKey = secret", "Address = 10.86.0.1/24", "ListenPort = 51820"]
    keys = ["PublicKey = public-titan.lan", "AllowedIPs = 10.86.0.2/32", "Endpoint = home.example.org:4000"]
    assert titan.split("\n") == ["# titan.lan", "[Peer]", *keys]
    keys = ["PublicKey = public-laptop.lan", "AllowedIPs = 10.86.0.77/32"]  # without an endpoint: it calls this one
    assert laptop.strip().split("\n") == ["# laptop.lan", "[Peer]", *keys]
    behind_a_router = configuration(found[2], "secret", public, Mesh())
    assert behind_a_router.count("PersistentKeepalive = 25") == 2


A, B = '[[host]]\naddress = "a"\n', '[[host]]\naddress = "b"\n'
NO_WAY, NINE = 'endpoint = "none"\n', 'mesh_address = "10.86.0.9"\n'
NARROW = '[mesh]\nnetwork = "10.86.0.0/31"\n'


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (A, ["1"]),
        (A.replace('"a"', '"localhost"') + B, ["localhost"]),
        (A + NO_WAY + B + NO_WAY, ["a and b"]),
        ('[[host]]\naddress = "10.86.0.9"\nmesh_address = "10.0.0.1"\n' + B, ["10.0.0.1 of 10.86.0.9", "10.86.0.9"]),
        (A + NINE + B + NINE, ["10.86.0.9 of a", "10.86.0.9 of b"]),
        (NARROW + HOSTS, ["10.86.0.77 of laptop.lan"]),
        (A + B + A.replace('"a"', '"c"') + NARROW, ["for c"]),
    ],
)
def test_hosts_that_make_no_mesh(tmp_path: Path, text: str, values: list[str]) -> None:
    path = write(tmp_path, text)
    with refuses("mesh.invalid") as refusal:
        mesh_members(read_hosts(path), read_mesh(path) or Mesh(), path)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(values) and all(part in line for part, line in zip(values, lines, strict=True)), lines


def test_problems_of_the_mesh_table(tmp_path: Path) -> None:
    path = write(tmp_path, '[mesh]\nnetwork = "ten"\ninterface = "much too long a name"\nport = 0\nkey = 1\n' + HOSTS)
    with refuses("mesh.invalid", path, "port = 0", "key = 1", 'network = "ten"', 'interface = "much') as refusal:
        read_mesh(path)
    assert len(str(refusal.value).splitlines()) == 4
    with refuses("hosts.invalid", 'endpoint = "nowhere"'):
        read_hosts(write(tmp_path, '[[host]]\naddress = "a"\nendpoint = "nowhere"\n'))


def wg_or_skip() -> None:
    if shutil.which("wg") is None:
        pytest.skip("keys are made by `wg`: apt-get install wireguard-tools")


def test_init_writes_secrets_for_their_owner_alone(tmp_path: Path) -> None:
    wg_or_skip()
    directory = tmp_path / "mesh"
    before = os.umask(0)
    try:
        told = init(write(tmp_path), directory)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in directory.iterdir()}
    assert sorted(files) == ["hosts.toml", "laptop.lan.conf", "rtx.conf", "titan.lan.conf"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files.values())
    keys = {name: re.findall(r"^PrivateKey = (\S+)$", path.read_text(), re.M) for name, path in files.items()}
    secrets = [found[0] for name, found in keys.items() if name.endswith(".conf")]
    assert len(set(secrets)) == 3 and not any(secret in "\n".join(told) for secret in secrets)
    for path in files.values():
        others = set(secrets) - set(keys[path.name])
        assert not any(secret in path.read_text() for secret in others), f"{path.name} holds another machine's secret"
    public = subprocess.run(["wg", "pubkey"], input=keys["rtx.conf"][0], capture_output=True, text=True).stdout.strip()
    assert all(f"PublicKey = {public}" in files[name].read_text() for name in ("titan.lan.conf", "laptop.lan.conf"))

    inside = read_hosts(files["hosts.toml"])
    assert [host.address for host in inside] == ["10.86.0.1", "10.86.0.1", "10.86.0.2", "10.86.0.77"]
    assert (inside[0].slots, inside[1].python, inside[1].title) == (2, "/b/bin/python", "rtx, AMD card")
    assert inside[1].environment == {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"} and read_mesh(files["hosts.toml"]) == Mesh()

    (directory / "titan.lan.conf").unlink()
    init(tmp_path / "hosts.toml", directory)
    again = {name: re.findall(r"^PrivateKey = (\S+)$", path.read_text(), re.M) for name, path in files.items()}
    assert again["rtx.conf"] == keys["rtx.conf"] and again["titan.lan.conf"] != keys["titan.lan.conf"]


def test_without_wireguard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses("mesh.tools_missing"):
        init(write(tmp_path), tmp_path / "mesh")


INSIDE = '[mesh]\n[[host]]\naddress = "10.86.0.1"\n[[host]]\naddress = "10.86.0.2"\n'
ETH, WG = LocalAddress("eth0", "192.168.1.10", "255.255.255.0"), LocalAddress("hetero0", "10.86.0.1", "255.255.255.0")


def command_line(directory: Path, family: str, local: tuple[LocalAddress, ...], text: str = INSIDE) -> CommandLine:
    version = "5.0.11" if family == OPEN_MPI else "5.0.2"
    launcher = Launcher(Path("/opt/bin/mpirun"), family, MpiLibrary(family, family, version))
    path = write(directory, text)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("OMPI_", "FI_", "UCX_", "MPIR_")):
                patch.delenv(name)
        patch.setattr(building, "local_addresses", lambda: local)
        return hosts_command(launcher, ranks_of(read_hosts(path), None, path), ["train"], (), read_mesh(path))


def test_launch_keeps_inside_the_mesh(tmp_path: Path) -> None:
    open_mpi = shlex.join(command_line(tmp_path, OPEN_MPI, (ETH, WG)).arguments)
    for option in (
        "--mca pml ob1",
        "--mca btl self,sm,tcp",
        "--mca btl_tcp_if_include 10.86.0.0/24",
        "--prtemca prte_if_include 10.86.0.0/24",
    ):
        assert open_mpi.count(option.split()[1] + " ") == 1 and option in open_mpi, open_mpi
    mpich = command_line(tmp_path, MPICH, (ETH, WG))
    assert "-iface hetero0" in shlex.join(mpich.arguments)
    expected = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "hetero0"}
    assert mpich.environment.items() >= expected.items()


def test_launch_refuses_to_go_around_the_mesh(tmp_path: Path) -> None:
    with refuses("mesh.down"):
        command_line(tmp_path, OPEN_MPI, (ETH,))
    outside = INSIDE.replace("10.86.0.2", "192.168.1.11")
    with refuses("mesh.outside"):
        command_line(tmp_path, OPEN_MPI, (ETH, WG), outside)


@pytest.mark.parametrize(
    ("counted", "severity", "told"),
    [
        ({"wg": (100, 100), "eth0": (110, 110)}, Severity.FINE, "0.0 MB"),
        ({"wg": (5, 100), "eth0": (110, 110)}, Severity.FAILS, "eth0"),
        ({"wg": (100, 5), "eth0": (0, 0)}, Severity.FAILS, "with b"),
        ({"eth0": (100, 100)}, Severity.FAILS, "eth0"),
    ],
)
def test_what_the_counters_say(counted: dict[str, tuple[int, int]], severity: Severity, told: str) -> None:
    whole = PairTraffic("b", "a", "wg", {"wg": (100, 100)})
    findings = mesh_findings([PairTraffic("a", "b", "wg", counted), whole], Mesh(), message_bytes=100)
    assert [finding.severity for finding in findings] == [severity] and told in findings[0].text
    assert findings[0].where == (() if severity is Severity.FINE else ("a",)) and bool(findings[0].remedy) == bool(
        findings[0].where
    )


def test_what_the_doctor_says_of_a_mesh_without_ranks() -> None:
    up = {"a": ["127.0.0.1", "10.86.0.1"], "b": ["10.86.0.2"]}
    assert mesh_finding(Mesh(), up, "mesh/hosts.toml").severity is Severity.NOTE
    down = mesh_finding(Mesh(), {**up, "c": ["192.168.1.12"]}, "mesh/hosts.toml")
    assert (down.severity, down.where) == (Severity.FAILS, ("c",))


class Tunnelled:
    """A rack of two hosts with WireGuard between them, and the agent that reaches them by all their addresses."""

    def __init__(self, rack: Rack, directory: Path) -> None:
        self.rack, self.directory = rack, directory
        self.outer = directory / "hosts.toml"
        entries = [f'[[host]]\naddress = "{address}"\nname = "{name}"\n' for name, address in rack.addresses.items()]
        self.outer.write_text("".join(entries))
        assert main(["mesh", "init", str(self.outer), "-o", str(directory / "mesh")]) == 0
        self.inner = directory / "mesh" / "hosts.toml"
        inside = [host.address for host in read_hosts(self.inner)]
        cases = " ".join(f"{a}) set -- {b} ;;" for a, b in zip(inside, rack.addresses.values(), strict=True))
        self.agent = directory / "agent-inside"
        self.agent.write_text(
            "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift; command=$*; set -- $host\n"
            f'case $host in {cases} esac\nexec {rack.agent} $1 "$command"\n'
        )
        self.agent.chmod(0o755)

    def on(self, name: str, command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        words = [str(self.rack.agent), self.rack.addresses[name], f"cd {ROOT}; {command}"]
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)

    def up(self, name: str) -> None:
        """What `wg-quick up` does, with WireGuard in user space: no kernel module is asked for."""
        source = self.directory / "mesh" / f"{name}.conf"
        address = next(line.split(" = ")[1] for line in source.read_text().splitlines() if line.startswith("Address"))
        place = self.directory / name / "hetero0.conf"
        place.parent.mkdir()
        shutil.copy(source, place)
        result = self.on(
            name,
            "set -e; mkdir -p /var/run/wireguard; mount -t tmpfs none /var/run/wireguard; ulimit -n 1024; "
            "setsid wireguard-go -f hetero0 > /dev/null 2>&1 & "
            "for i in $(seq 100); do wg show hetero0 > /dev/null 2>&1 && break; sleep 0.05; done; "
            f"wg setconf hetero0 <(wg-quick strip {place}) && ip address add {address} dev hetero0 && "
            "ip link set hetero0 mtu 1420 up",
        )
        if result.returncode != 0:
            pytest.skip(f"WireGuard does not run in user space here: {result.stderr}")

    def launched(self, hosts: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """A command from the first host, on ranks started by ``hosts``."""
        option = shlex.quote(f"--mpirun-args=--mca plm_ssh_agent {self.agent}")
        command = shlex.join(["--", *words])
        return self.on("first", f"{sys.executable} -m hetero_mpi launch --hosts {hosts} {option} {command}")

    def verify(self, hosts: Path) -> subprocess.CompletedProcess[str]:
        """`mesh verify` of the mesh, likewise."""
        return self.launched(hosts, "mesh", "verify", str(self.inner))

    def doctor(self, hosts: Path | None) -> list[dict[str, Any]]:
        """What `doctor` finds of the mesh: without ranks, or on those that ``hosts`` starts."""
        words = ["doctor", "--hosts", str(self.inner), "--json"]
        if hosts is None:
            agent = shlex.quote(f"--mpirun-args=--mca plm_ssh_agent {self.agent}")
            result = self.on("first", f"{sys.executable} -m hetero_mpi {shlex.join(words)} {agent}")
        else:
            result = self.launched(hosts, *words)
        assert result.stdout.startswith("{"), result.stderr
        report = json.loads(result.stdout)
        assert result.returncode == int(report["would_fail"])
        return [finding for finding in report["findings"] if finding["subject"] == "mesh"]


@pytest.fixture
def tunnelled(tmp_path: Path) -> Iterator[Tunnelled]:
    wg_or_skip()
    if shutil.which("wireguard-go") is None:
        pytest.skip("WireGuard in user space: apt-get install wireguard-go")
    if launcher_or_skip().family != OPEN_MPI:
        pytest.skip("the launch agent is written for Open MPI's launcher")
    with Rack(tmp_path / "rack", ("first", "second")) as rack:
        yield Tunnelled(rack, tmp_path)


def test_messages_go_through_wireguard_or_it_is_told(tunnelled: Tunnelled) -> None:
    before = tunnelled.verify(tunnelled.inner)
    assert before.returncode == 2 and "sudo wg-quick up hetero0" in before.stderr, before.stderr
    for name in ("first", "second"):
        tunnelled.up(name)
    inside = require_success(tunnelled.verify(tunnelled.inner))
    assert "4.2 MB in each direction, between each pair of 2 hosts, used WireGuard (10.86.0.0/24)" in flat(
        inside.stdout
    )
    shown = tunnelled.on("second", "wg show hetero0 transfer").stdout.split()
    assert all(int(number) > 4_000_000 for number in shown[1:3]), f"WireGuard itself has counted them: {shown}"

    outside = tunnelled.verify(tunnelled.outer)
    assert outside.returncode == 1, outside.stdout + outside.stderr
    text = flat(outside.stdout)
    assert re.search(
        r"FAIL mesh first: with second: of 4\.2 MB in each direction, hetero0 sent 0\.\d MB and received 0\.\d MB", text
    ), text
    assert re.search(r"; 4\.\d MB passed cable0", text) and "A run would fail: 2 findings" in text


@pytest.mark.long
def test_the_doctor_sends_messages_through_the_mesh_too(tunnelled: Tunnelled) -> None:
    """Without ranks it can say no more than that the mesh is up, and how the rest is seen."""
    for name in ("first", "second"):
        tunnelled.up(name)
    (asked,) = tunnelled.doctor(None)
    assert asked["severity"] == "note" and "mesh verify" in asked["remedy"]
    (inside,) = tunnelled.doctor(tunnelled.inner)
    assert inside["severity"] == "ok" and "used WireGuard" in inside["text"]
    outside = tunnelled.doctor(tunnelled.outer)
    assert [(finding["severity"], *finding["where"]) for finding in outside] == [("FAIL", "first"), ("FAIL", "second")]
    assert all("passed cable0" in finding["text"] for finding in outside)
    assert tunnelled.on("second", "ip link delete hetero0").returncode == 0
    (half,) = tunnelled.doctor(tunnelled.outer)
    assert half["severity"] == "FAIL" and half["where"] == ["second"] and "wg-quick up" in half["remedy"]


@pytest.mark.long
def test_a_cable_with_the_address_of_the_mesh_is_none(tunnelled: Tunnelled) -> None:
    """Bytes go where they are expected, and nothing is encrypted."""
    for name, address in (("first", "10.86.0.1"), ("second", "10.86.0.2")):
        assert tunnelled.on(name, f"ip address add {address}/24 dev cable0").returncode == 0
    result = tunnelled.verify(tunnelled.inner)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "first, second: cable0 has the address in 10.86.0.0/24 but is not a tunnel" in flat(result.stdout)


def flat(text: str) -> str:
    return " ".join(text.split())
