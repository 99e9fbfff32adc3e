"""Two real hosts, as network namespaces of this machine: the launcher picks the interface, the transport crosses it.

Each host has a name of its own and, beside the cable to the other, a bridge with one and the same address on both, such
as Docker makes: an MPI library that chose it would wait for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi import ROOT, launcher_or_skip, run_bounded

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
    """Two namespaces, a veth pair between them, a decoy bridge in each."""
    for name in HOSTS:
        ip("netns", "add", name)
    ip("link", "add", "cable0", "netns", HEAD, "type", "veth", "peer", "name", "cable0", "netns", OTHER)
    for name, address in HOSTS.items():
        ip("-n", name, "link", "add", "docker0", "type", "bridge")
        for interface, own in (("lo", "127.0.0.1/8"), ("cable0", f"{address}/24"), ("docker0", "172.17.0.1/16")):
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


def test_launcher_and_transport_between_two_hosts(two_hosts: tuple[Path, Path]) -> None:
    hostfile, agent = two_hosts
    programs = ROOT / "tests" / "programs"
    options = f"--mca plm_rsh_agent {agent} --mca btl tcp,self --mca pml ob1"
    start = f'hostname {HEAD}; exec "$@"'
    command = ["ip", "netns", "exec", HEAD, "unshare", "--uts", "bash", "-c", start, "start"]
    command += [
        sys.executable,
        str(programs / "comm_launch.py"),
        "2",
        str(hostfile),
        options,
        str(programs / "comm_world.py"),
    ]
    result = run_bounded(command, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert "10.79.13.2 is reached through cable0 (10.79.13.0/24)" in result.stderr
    views = json.loads(result.stdout)
    assert [view["hosts"] for view in views] == [[HEAD, OTHER]] * 2
    assert [view["local_size"] for view in views] == [1, 1]
    assert [link["same_host"] for link in views[0]["links"]] == [False, False]
