"""Jobs under ``launch --elastic``, on one host or on hosts with networks of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from hetero_mpi.rundir.metrics import read_metrics
from tests.support.equality import losses
from tests.support.jobs import Workshop
from tests.support.long_run import Running, started
from tests.support.mpi import ROOT, launcher_or_skip, require_success, run_bounded
from tests.support.rack import Rack

STEPS = 60
PATIENCE_S = 240


class Elastic(Workshop):
    """One job, always cut over all its ranks, and commands that supervise it."""

    def __init__(
        self, directory: Path, steps: int = STEPS, replicate_every: int | str = "auto", text: Path | None = None
    ) -> None:
        super().__init__(directory)
        values = self.values(self.model(blocks=2))
        if text is not None:
            values["data"]["text"] = [str(text)]
        # One pipeline with fixed micro-batches computes the same bits however it is cut.
        plan = {"allow_idle": False, "pipelines": 1}
        self.steps = steps
        checkpoint = {"every": 1, "keep": 2, "replicate_every": replicate_every}
        self.file = self.job("job", values, train={"steps": steps}, plan=plan, checkpoint=checkpoint)

    def command(self, run: Path, ranks: int, *options: str) -> list[str]:
        start = [sys.executable, "-m", "hetero_mpi", "launch", "-np", str(ranks), "--elastic", *options]
        return [*start, "train", str(self.file), "--run-dir", str(run)]

    def straight_losses(self) -> list[float]:
        """Of an undisturbed run, on one rank."""
        run = self.directory / "straight"
        command = [sys.executable, "-m", "hetero_mpi", "train", str(self.file), "--run-dir", str(run)]
        require_success(run_bounded(command, environment(), PATIENCE_S))
        return losses(run)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    # The kernel's count of processes it killed for lack of memory is the host's: other tests let it kill some.
    found = [event for line in lines if (event := json.loads(line))["event"] != "memory"]
    return [event for event in found if not names or event["event"] in names]


def ranks_under(process: psutil.Process) -> list[psutil.Process]:
    """The ranks among a process's children, by what launchers tell them."""
    found = []
    for child in process.children(recursive=True):
        try:
            if {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & child.environ().keys() and "train" in child.cmdline():
                found.append(child)
        except (psutil.Error, OSError):
            continue
    return found


class Supervised(Running):
    """A supervisor at work."""

    def until_step(self, step: int, start: int) -> None:
        """Until that start of the job has done so many steps."""
        path = self.run / "metrics.jsonl"

        def there() -> bool:
            starts = [event["start"] for event in events(self.run, "first-step")]
            return start in starts and len(read_metrics(path).steps) >= step

        self.wait_for(f"step {step} of start {start}", there)


def supervised(command: Sequence[str], run: Path) -> AbstractContextManager[Supervised]:
    """A supervisor that is ended, with all below it, at the end of the block."""
    return started(list(command), environment(), run, run.with_name(f"{run.name}.out"), Supervised)


def tell(run: Path, what: str, killed_s: float) -> None:
    """Print the time from a death to the next step, and its parts."""
    after = [event for event in events(run) if event["unix_s"] > killed_s]
    noticed = next(event for event in after if event["event"] in ("broken", "silent"))
    started = next(event for event in after if event["event"] == "start")
    stepped = next(event for event in after if event["event"] == "first-step")
    times = [event["unix_s"] - killed_s for event in (noticed, started, stepped)]
    print(
        f"{what}: noticed after {times[0]:.1f} s, started again after {times[1]:.1f} s, next step after {times[2]:.1f} s"
    )


class Cluster(Rack):
    """Three hosts with a slot each; the supervisor runs on hA, the first rank on the first of ``order``."""

    def __init__(
        self,
        directory: Path,
        order: Sequence[str] = ("hA", "hB", "hC"),
        own: Path | None = None,
        full: Sequence[str] = (),
    ) -> None:
        launcher = launcher_or_skip()
        super().__init__(directory, ("hA", "hB", "hC"), own, full)
        self.hostfile = directory / "hosts"
        self.hostfile.write_text("".join(f"{self.addresses[name]} slots=1\n" for name in order))
        mpich = f"-launcher ssh -launcher-exec {self.agent}"
        open_mpi = f"--mca plm_rsh_agent {self.agent} --mca btl tcp,self --mca pml ob1"
        self.mpirun_args = mpich if launcher.family == "MPICH" else open_mpi

    def start(self, job: Elastic, run: Path, *options: str) -> AbstractContextManager[Supervised]:
        given = ["--hostfile", str(self.hostfile), f"--mpirun-args={self.mpirun_args}", *options]
        # MPICH's other network library, UCX, takes hosts of one kernel for one machine.
        variables = ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}", "MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=tcp"]
        words = shlex.join([*variables, *job.command(run, 3, *given)])
        seen = self.disks["hA"] / run.name if run.parent == self.own else run
        return supervised([str(self.agent), self.addresses["hA"], f"cd {ROOT} && exec {words}"], seen)

    def ranks(self, name: str) -> list[psutil.Process]:
        return ranks_under(self.login(name))

    def orphans(self) -> list[str]:
        """Ranks and launchers that still run anywhere."""
        left = []
        for name in self.running():
            for process in self.login(name).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    command = process.cmdline()
                    if process.status() != psutil.STATUS_ZOMBIE and {"train", "prted"} & {
                        Path(w).name for w in command
                    }:
                        left.append(f"{name}: {shlex.join(command)}")
        return left


def hosts_of_starts(run: Path, rack: Rack) -> list[list[str]]:
    names = {address: name for name, address in rack.addresses.items()}
    return [[names[host] for host in event["hosts"]] for event in events(run, "start")]
