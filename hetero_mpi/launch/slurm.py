"""Launching inside a SLURM job: the number of ranks, and the command line for a heterogeneous job.

In a homogeneous job only the number of ranks is needed, as both launchers find the nodes. In a heterogeneous job (several kinds
of nodes, ``#SBATCH hetjob``) launchers see only the first component. Its nodes are then listed individually, and this module,
run as a program, is the launch agent that reaches each node by ``srun`` in the node's component.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.launch.hosts.interface import resolve
from hetero_mpi.launch.launcher.command_line import CommandLine, hosts_command, prefix_of, write_cached
from hetero_mpi.launch.launcher.launcher import Launcher
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host

_AGENT = """#!/bin/sh
# AGENT [OPTIONS] HOST COMMAND...: runs a launcher's command on a node of this SLURM job. Written by `hetero_mpi launch`.
exec {python} -m hetero_mpi.launch.slurm "$@"
"""


_NOT_IN_A_STEP = "run `launch` in the batch script itself (or in `salloc`), not under `srun`."
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True)
class Component:
    """Nodes of one kind and the number of tasks on each, which may be 0; a homogeneous job has one component."""

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]


def is_heterogeneous(environment: Mapping[str, str]) -> bool:
    """Whether the SLURM job has several components."""
    return int(environment.get("SLURM_HET_SIZE", "1")) > 1


def components(environment: Mapping[str, str]) -> tuple[Component, ...]:
    """Return the components of the current SLURM job (none outside SLURM). Raises UserError if variables are missing."""
    if "SLURM_JOB_ID" not in environment:
        return ()
    groups = range(int(environment["SLURM_HET_SIZE"])) if is_heterogeneous(environment) else ()
    suffixes = [f"_HET_GROUP_{group}" for group in groups] or [""]
    components_of_job = []
    for suffix in suffixes:
        names = (f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}")
        missing = [name for name in names if name not in environment]
        if missing:
            raise UserError(
                "slurm.variables",
                f"This is inside SLURM job {environment['SLURM_JOB_ID']}, but without {' and '.join(missing)}: {_NOT_IN_A_STEP}",
            )
        nodes, tasks = _expand(environment[names[0]]), tasks_per_node(environment[names[1]])
        if len(nodes) != len(tasks):
            raise UserError(
                "slurm.nodes",
                f"{names[0]} has {len(nodes)} nodes, but {names[1]} is {environment[names[1]]!r}: {_NOT_IN_A_STEP}",
            )
        requested = environment.get(f"SLURM_NTASKS{suffix}") or environment.get(f"SLURM_NPROCS{suffix}") or sum(tasks)
        components_of_job.append(Component(nodes, _distributed(tasks, int(requested))))
    return tuple(components_of_job)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Expand SLURM's short form of tasks per node.

    >>> tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(
                "slurm.tasks_per_node", f"SLURM's tasks per node, {text!r}, cannot be parsed: pass `-np` to launch."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _distributed(most: Sequence[int], tasks: int) -> tuple[int, ...]:
    """Distribute at most ``tasks`` tasks as ``srun`` does: one per node, then up to ``most`` on each node in turn."""
    counts = [int(node < tasks) for node in range(len(most))]
    for node, count in enumerate(counts):
        counts[node] += min(max(most[node] - count, 0), max(tasks - sum(counts), 0))
    return tuple(counts)


def _expand(nodes: str) -> tuple[str, ...]:
    """Expand ``n[1-2],big`` to n1, n2, big."""
    if not re.search(r"[\[,]", nodes):
        return (nodes,)
    try:
        answer = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "").strip() or f"{error} (if it was not found, load SLURM's commands)"
        raise UserError("slurm.scontrol", f"`scontrol show hostnames {nodes}` failed: {reason}") from error
    return tuple(answer.stdout.split())


def check_slurm_job(environment: Mapping[str, str]) -> None:
    """Raise UserError if SLURM's variables are those of a job that has ended, as in an old tmux or Jupyter shell."""
    job = environment.get("SLURM_JOB_ID")
    state = None if job is None else _job_field(job, "%T")
    if state is not None and state not in _RUNNING:
        raise UserError(
            "slurm.no_such_job",
            f"this shell has the variables of SLURM job {job}, which is not running{state and f' (it is {state})'}. Unset them "
            '(in bash: `unset "${!SLURM_@}"`), or start in a new allocation (salloc, sbatch)',
        )


def check_slurm_tasks(ranks: int, tasks_of_nodes: Sequence[int], mpirun_args: Sequence[str]) -> None:
    """Raise UserError if there are more ranks than SLURM tasks. ``mpirun_args``: the user's launcher options."""
    tasks = sum(tasks_of_nodes)
    if 0 < tasks < ranks and not any("oversubscribe" in option for option in mpirun_args) and shutil.which("squeue"):
        raise UserError(
            "slurm.too_few_tasks",
            f"{ranks} ranks need {ranks} tasks, but this SLURM job has {tasks}: request --ntasks={ranks} "
            f"--ntasks-per-node={math.ceil(ranks / len(tasks_of_nodes))} (options of sbatch and salloc, before the script), or "
            f"start {tasks} rank{'s' if tasks > 1 else ''}; --mpirun-args=--oversubscribe lets ranks share cores",
        )


def resubmission(environment: Mapping[str, str]) -> str | None:
    """Return the command that submits this job's batch script again; None outside a batch job."""
    job = environment.get("SLURM_JOB_ID")
    command = None if job is None else _job_field(job, "%o")
    if not command or command == "(null)":
        return None
    array = f"--array={environment['SLURM_ARRAY_TASK_ID']} " if "SLURM_ARRAY_TASK_ID" in environment else ""
    return f"sbatch --chdir={shlex.quote(os.getcwd())} {array}{command}"


def _job_field(job: str, field: str) -> str | None:
    """Query a field of a SLURM job, in squeue's format; "" if SLURM has no such job, None if SLURM cannot be queried."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["squeue", "--noheader", "--states=all", "--jobs", job, "--format", field]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if answer.returncode == 0:
            return answer.stdout.strip().partition("\n")[0]
        if "Invalid job id" in answer.stderr:
            return ""
    return None


def entries(job_components: Sequence[Component], pythons: Sequence[str]) -> tuple[Host, ...]:
    """Return the nodes of a heterogeneous job as entries of a hosts file.

    ``pythons`` has one Python per component; the last one is used for all remaining components. The default is this Python.
    """
    from hetero_mpi.launch.hosts.hosts_toml import Host

    if len(pythons) > len(job_components):
        raise UserError(
            "slurm.pythons",
            f"--slurm-python was passed {len(pythons)} times, but the job has {len(job_components)} components.",
        )
    hosts = []
    for number, component in enumerate(job_components):
        python = str(Path(pythons[min(number, len(pythons) - 1)]).absolute()) if pythons else None
        for node, tasks in zip(component.nodes, component.tasks, strict=True):
            hosts.append(Host(address=node, slots=tasks, python=python))
    return tuple(hosts)


def heterogeneous_command(
    launcher: Launcher, hosts: Sequence[Host], ranks: int | None, program: Sequence[str], mpirun_args: Sequence[str]
) -> CommandLine:
    """Build the command line for ``python -m hetero_mpi PROGRAM`` on ``hosts``; if ``ranks`` is None, on all tasks."""
    from hetero_mpi.launch.hosts.hosts_toml import ranks_of

    script = _AGENT.format(python=sys.executable)
    agent = str(write_cached("launch-agent", ".sh", script, "for the launch agent of SLURM jobs"))
    if launcher.family == OPEN_MPI:
        # Open MPI's SLURM support sees only the first component.
        options = ["--prtemca", "ras", "^slurm", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent]
        if all(prefix_of(host, launcher) == launcher.prefix for host in hosts):  # otherwise `hosts_command` adds these
            options += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]  # daemons in job steps cannot start others
            options += ["--prefix", launcher.prefix] if "--prefix" not in mpirun_args else []
    else:
        options = ["-rmk", "user", "-launcher", "ssh", "-launcher-exec", agent]
    shares = ranks_of(hosts, ranks, "the SLURM job")
    return hosts_command(launcher, shares, program, [*options, *mpirun_args], resolve_host=_address)


def _address(node: str) -> str:
    """Resolve a node's address; "" if its name does not resolve, as SLURM may use another name for the node."""
    try:
        return resolve(node)
    except UserError:
        return ""


def step_command(host: str, command: Sequence[str], job_components: Sequence[Component]) -> list[str]:
    """Build the ``srun`` command that runs ``command`` on a node. Raises UserError if the node is not in the job."""
    group = next((number for number, component in enumerate(job_components) if host in component.nodes), None)
    if group is None:
        nodes = ", ".join(node for component in job_components for node in component.nodes)
        raise UserError("slurm.foreign_node", f"{host} is not a node of this SLURM job (nodes: {nodes or 'none'}).")
    groups = [f"--het-group={group}"] if len(job_components) > 1 else []
    # The daemon's step also holds its ranks: all cores, GPUs and memory of the job on the node.
    step = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--mpi=none"]
    return ["srun", *groups, *step, "sh", "-c", " ".join(command)]


def agent(arguments: Sequence[str]) -> None:
    """Run ``[OPTIONS] HOST COMMAND...``, as ssh would. Does not return."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words.pop(0)
    command = step_command(words[0], words[1:], components(os.environ))
    # Variables of this step, or of the first component, would restrict the new step.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_STEP_VARS)}
    os.execvpe(command[0], command, environment)


_STEP_VARS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE")


if __name__ == "__main__":
    agent(sys.argv[1:])
