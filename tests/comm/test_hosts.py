"""Two real hosts, as network namespaces of this machine: the launcher picks the interface, the transport crosses it.

Each host has a name of its own and, beside the cable to the other, a bridge with one and the same address on both, such
as Docker makes (an MPI library that chose it would wait for ever), and one with an address that the other cannot reach, such as a
VPN's (an MPI library that chose it would end).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_mpi.comm.ranks import library
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded

HEAD, OTHER = f"a{os.getpid()}", f"b{os.getpid()}"
HOSTS = {HEAD: "10.79.13.1", OTHER: "10.79.13.2"}
AGENT = """#!/bin/bash
# Stands in for ssh: AGENT HOST COMMAND... runs the command in the host's namespace, under the host's name.
while [[ $1 == -* ]]; do shift; done
case $1 in {cases} esac
shift
exec ip netns exec $name unshare --uts bash -c "hostname $name; $*"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def lay_cable() -> None:
    """Two namespaces, a veth pair between them, two decoys in each."""
    for name in HOSTS:
        ip("netns", "add", name)
    ip("link", "add", "cable0", "netns", HEAD, "type", "veth", "peer", "name", "cable0", "netns", OTHER)
    for number, (name, address) in enumerate(HOSTS.items()):
        decoys = {"docker0": "172.17.0.1/16", "vpn0": f"10.5{number}.0.7/24"}
        for decoy in decoys:
            ip("-n", name, "link", "add", decoy, "type", "bridge")
        for interface, own in {"lo": "127.0.0.1/8", "cable0": f"{address}/24", **decoys}.items():
            if interface != "lo":
                ip("-n", name, "address", "add", own, "dev", interface)
            ip("-n", name, "link", "set", interface, "up")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(host file, launch agent); skipped where namespaces cannot be made."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "bash")):
        pytest.skip("two hosts on one machine need root, ip and unshare")
    if launcher_or_skip().family != "Open MPI":
        pytest.skip("the launch agent is written for Open MPI's launcher")
    hostfile, agent = tmp_path / "hosts", tmp_path / "agent"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in HOSTS.values()))
    cases = " ".join(f"{address}) name={name};;" for name, address in HOSTS.items())
    agent.write_text(AGENT.format(cases=cases))
    agent.chmod(0o755)
    try:
        try:
            lay_cable()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield hostfile, agent
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_head(*words: str) -> list[str]:
    """A command on the first host."""
    start = f'hostname {HEAD}; exec "$@"'
    return ["ip", "netns", "exec", HEAD, "unshare", "--uts", "bash", "-c", start, "start", *words]


def mpi_options(agent: Path) -> str:
    return f"--mca plm_rsh_agent {agent} --mca btl tcp,self --mca pml ob1"


def test_launcher_and_transport_between_two_hosts(two_hosts: tuple[Path, Path]) -> None:
    hostfile, agent = two_hosts
    programs = ROOT / "tests" / "programs"
    command = on_head(
        sys.executable,
        str(programs / "comm_launch.py"),
        "2",
        str(hostfile),
        mpi_options(agent),
        str(programs / "comm_world.py"),
    )
    result = run_bounded(command, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert "10.79.13.2 is reached through cable0 (10.79.13.0/24)" in result.stderr
    views = json.loads(result.stdout)
    assert [view["hosts"] for view in views] == [[HEAD, OTHER]] * 2
    assert [view["local_size"] for view in views] == [1, 1]
    assert [link["same_host"] for link in views[0]["links"]] == [False, False]


def test_plain_mpirun_between_two_hosts_needs_no_options(two_hosts: tuple[Path, Path]) -> None:
    """Without a word about interfaces, MPI's own choice hangs or ends between these hosts: ranks keep to the launcher's way."""
    hostfile, agent = two_hosts
    root = ["--allow-run-as-root", "--prefix", sys.prefix, "-x", "PYTHONPATH", "--mca", "plm_rsh_agent", str(agent)]
    command = [str(launcher_or_skip().path), *root, "-hostfile", str(hostfile), "-np", "2"]
    command += [sys.executable, str(ROOT / "tests" / "programs" / "comm_world.py"), "sums"]
    result = run_bounded(
        on_head(*command), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout_s=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ({"cable0": 1000, "wlan0": 0, "docker0": 0}, "cable0"),
        ({"cable0": 10_000, "eth1": 1000}, "cable0"),
        ({"cable0": 1000, "ib0": 100_000}, None),  # nobody knows which one is meant for data
        ({"eth1": 1000}, None),  # the launcher talks to no other host
    ],
)
def test_ranks_keep_to_the_interface_of_the_launcher_s_daemon(
    speeds: dict[str, int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"cable0"} & set(speeds)
    monkeypatch.setattr(library, "_interfaces_of", lambda process: (used, set(speeds) - used))
    monkeypatch.setattr(library, "_nic_speed", speeds.__getitem__)
    environment = {"OMPI_COMM_WORLD_SIZE": "2"}
    library.restrict_to_launcher_interfaces(environment)
    assert environment.get("OMPI_MCA_btl_tcp_if_include") == told
    for chosen in ({"OMPI_MCA_btl_tcp_if_exclude": "x"}, {"OMPI_MCA_btl_tcp_if_include": "x"}):
        asked = {"OMPI_COMM_WORLD_SIZE": "2", **chosen}
        library.restrict_to_launcher_interfaces(asked)
        assert asked == {"OMPI_COMM_WORLD_SIZE": "2", **chosen}, "the user has said it"


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_dies_before_it_joins_ends_a_recovering_job(
    two_hosts: tuple[Path, Path], tmp_path: Path, victim: int
) -> None:
    """The launcher, told that ranks may die, says nothing of it; here it dies before its first line of ours."""
    hostfile, agent = two_hosts
    (tmp_path / "broken").mkdir()
    dies = f'import os\nif os.environ.get("OMPI_COMM_WORLD_RANK") == "{victim}": os.kill(os.getpid(), 9)\n'
    (tmp_path / "broken" / "sitecustomize.py").write_text(dies)
    launch = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", "--hostfile", str(hostfile), "--recover"]
    command = on_head(*launch, f"--mpirun-args={mpi_options(agent)}", "--", "train", "job.toml")
    paths = f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"
    result = run_bounded(command, {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout_s=60)
    assert result.returncode not in (0, 2), result.stderr
    host = (HEAD, OTHER)[victim]
    assert f"rank {victim} on {host} ended before it joined the other ranks" in result.stderr, result.stderr
    assert result.stderr.count("ended before it joined") - result.stderr.count("echo ") == 1, result.stderr
