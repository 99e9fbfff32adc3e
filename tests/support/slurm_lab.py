"""A SLURM cluster of two nodes on this machine: a real controller, two node daemons, one partition for each, nothing installed.

    with SlurmLab(directory) as lab:
        job = lab.submit("script.sbatch", "argument")

All daemons have files, ports and keys of their own, and are ended with the block. Skips the test, with the reason, where that
cannot be.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.mpi import ROOT
from tests.support.processes import wait_until

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
NODES = ("n1", "n2")
CREDENTIAL_S = 5
"""SLURM holds a requeued job back for as long as its credential lives: two minutes, if one does not say otherwise."""
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={credential}
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=n1 NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=2000
NodeName=n2 NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=2000
PartitionName=both Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=first Nodes=n1 MaxTime=INFINITE State=UP
PartitionName=second Nodes=n2 MaxTime=INFINITE State=UP
"""


class SlurmLab:
    """The cluster. Its nodes are named n1 and n2, its partitions ``both`` (the default), ``first`` and ``second``."""

    def __init__(self, directory: Path) -> None:
        missing = [tool for tool in TOOLS if _found(tool) is None]
        if missing:
            pytest.skip(f"a SLURM cluster on one machine needs {', '.join(missing)}: apt-get install slurm-wlm munge")
        if os.geteuid() != 0:
            pytest.skip("a SLURM cluster on one machine needs root")
        self.directory = directory
        directory.mkdir(mode=0o755)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of whoever submits, and so of the jobs."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI_", "PMI"))}
        path = f"{own.get('PATH', '')}:/usr/sbin:/sbin"
        configuration = str(self.directory / "slurm.conf")
        return {**own, "PATH": path, "SLURM_CONF": configuration, "PYTHONPATH": str(ROOT), **(more or {})}

    def __enter__(self) -> SlurmLab:
        ports = free_ports(3)
        values = {"controller": ports[0], "n1": ports[1], "n2": ports[2], "credential": CREDENTIAL_S}
        text = _CONFIGURATION.format(host=socket.gethostname(), directory=self.directory, **values)
        (self.directory / "slurm.conf").write_text(text)
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            files = [f"--{option}={self.directory}/munge.{ending}" for option, ending in names.items()]
            self._start("munged", "--foreground", "--force", *files)
            wait_until(lambda: (self.directory / "munge.socket").exists(), "munged is up", text=self.logs)
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                (self.directory / f"spool-{node}").mkdir()
                # Equal host names would make an MPI library believe in one host.
                self._start("slurmd", "-D", "-N", node, host=node)
            wait_until(self._ready, "the nodes are idle", text=self.logs)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if len(self._daemons) > 1:
            for job in self.command("squeue", "--noheader", "--format=%A", check=False).split():
                self.command("scancel", "--full", "--signal=KILL", job, check=False)
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, tool: str, *options: str, host: str | None = None) -> None:
        found = _found(tool)
        assert found is not None
        named = [] if host is None else ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
        output = (self.directory / f"{tool}.out").open("ab")
        self._daemons.append(
            subprocess.Popen(
                [*named, found, *options],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        )
        output.close()

    def _ready(self) -> bool:
        for daemon in self._daemons:
            if daemon.poll() is not None:
                pytest.skip(f"{daemon.args[0]} does not run here:\n{self.logs()}")  # type: ignore[index]
        states = self.command("sinfo", "--noheader", "--Node", "--partition=both", "--format=%T", check=False)
        return states.split() == ["idle"] * len(NODES)

    def command(self, *words: str, check: bool = True) -> str:
        """What a SLURM command prints."""
        result = subprocess.run(
            words,
            env=self.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert not check or result.returncode == 0, f"{words}: {result.stderr}{self.logs()}"
        return result.stdout

    def submit(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """``sbatch WORDS`` from the repository's root; the job's number."""
        result = subprocess.run(
            ["sbatch", "--parsable", *words], env=self.environment(env), cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().split(";")[0]

    def fields(self, job: str) -> dict[str, str]:
        """``JobState``, ``ExitCode``, ``Restarts``, ... of a job (of the first component of a heterogeneous one)."""
        text = self.command("scontrol", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", text.split("\n\n")[0]))

    def wait_for(self, job: str, states: Sequence[str], patience_s: float, text: Callable[[], str]) -> dict[str, str]:
        """The job's fields once it is in one of ``states``; ``text`` is shown if that does not happen."""

        def reached() -> bool:
            state = self.fields(job)["JobState"]
            if state == "PENDING":
                # Where nothing else happens, the scheduler does not notice that a requeued job's time to wait is over.
                self.command("scontrol", "update", f"JobId={job}", "Nice=0", check=False)
            return state in states

        self.until(reached, f"job {job} became {states}", text, patience_s)
        return self.fields(job)

    def until(self, holds: Callable[[], bool], what: str, text: Callable[[], str], patience_s: float) -> None:
        """Wait until it holds; the test fails with ``text`` if that takes longer."""
        wait_until(holds, what, patience_s, text)

    def logs(self) -> str:
        """Ends of the daemons' logs, for the person who reads why a test failed."""
        files = sorted(self.directory.glob("*.log")) or sorted(self.directory.glob("*.out"))
        return "".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
