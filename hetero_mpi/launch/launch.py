"""The subcommand ``launch [-np N] [--hostfile F | --hosts F.toml] [--print | --elastic] -- train job.toml``."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from hetero_mpi.comm.ranks.library import detect_launcher
from hetero_mpi.launch import slurm
from hetero_mpi.launch.launcher.command_line import CommandLine, build_command, hosts_command
from hetero_mpi.launch.launcher.launcher import find_launcher, recovery_options
from hetero_mpi.launch.launcher.launcher_process import MAX_RANK_EXIT_CODE, STOP_TEXTS, print_lines, start
from hetero_mpi.launch.supervisor.elastic import Supervisor, without_option
from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions
from hetero_mpi.util.errors import ExitCode, UserError

_EXPLAINED_CODES = (ExitCode.DONE, ExitCode.USER_ERROR, ExitCode.HUNG)
"""Exit codes after which the job itself has printed what to do next."""


def main(namespace: argparse.Namespace, parse: Callable[[Sequence[str]], argparse.Namespace]) -> int:
    """Run ``launch``; return the exit code of the launcher or the supervisor. ``parse`` is the program's command-line parser.

    Raises UserError if the command is missing or the host file has too few slots, and as ``find_launcher`` and ``Supervisor``
    do.
    """
    if (launched := detect_launcher(os.environ, "")) is not None and launched.size > 1:
        if launched.rank > 0:
            return ExitCode.USER_ERROR  # rank 0 reports it
        raise UserError(
            "launch.nested",
            f"{launched.launcher} started {launched.size} processes of `launch`, which starts all ranks itself: run it once, "
            "without another launcher (under SLURM: in the batch script itself, or in `salloc`).",
        )
    program = list(namespace.program)
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise UserError(
            "launch.no_command", "launch needs a command to run: `python -m hetero_mpi launch -np 3 -- train job.toml`."
        )
    if namespace.ranks is not None and namespace.ranks < 1:
        raise UserError("launch.ranks", f"-np must be at least 1, not {namespace.ranks}.")
    if not program[0].startswith("-"):
        parse(program)  # report typing errors once, not on every rank
    slurm.check_slurm_job(os.environ)
    mpirun_args = shlex.split(namespace.mpirun_args)
    if namespace.recover:
        recovery_args = recovery_options(find_launcher())
        if namespace.verbose:
            print(f"launch: {shlex.join(recovery_args)}: the job continues after the loss of ranks", file=sys.stderr)
        mpirun_args = [*recovery_args, *mpirun_args]
    if namespace.hosts is not None and (namespace.print_only or not namespace.elastic):
        return _launch_on_hosts(namespace, program, mpirun_args)
    if namespace.hostfile is None and not namespace.elastic and slurm.is_heterogeneous(os.environ):
        entries = slurm.entries(slurm.components(os.environ), namespace.slurm_python)
        command = slurm.heterogeneous_command(find_launcher(), entries, namespace.ranks, program, mpirun_args)
        return _start(namespace, command, program)
    if namespace.slurm_python:
        raise UserError("launch.slurm_python", "--slurm-python is for heterogeneous SLURM jobs (`#SBATCH hetjob`) only")
    if namespace.ranks is None and namespace.hosts is not None:
        namespace.ranks = sum(host.slots for host in ElasticOptions(1, None, namespace.hosts).entries())
    components = slurm.components(os.environ) if namespace.ranks is None or namespace.hostfile is None else ()
    tasks = [count for component in components for count in component.tasks]
    if namespace.ranks is None:
        namespace.ranks = sum(tasks) or None
    if namespace.ranks is None:
        raise UserError(
            "launch.ranks_unknown", "launch needs the number of ranks: add, for example, `-np 3`, or use --hosts."
        )
    if namespace.elastic:
        values = {**vars(namespace), "hosts_file": namespace.hosts, "mpirun_args": tuple(mpirun_args)}
        options = ElasticOptions(**{field.name: values[field.name] for field in fields(ElasticOptions)})
        options.check()
        if not namespace.print_only:
            return _supervise(options, program, parse)
    if namespace.hostfile is None:
        slurm.check_slurm_tasks(namespace.ranks, tasks, mpirun_args)
    words = [sys.executable, "-m", "hetero_mpi", *program]
    command = build_command(find_launcher(), namespace.ranks, namespace.hostfile, words, mpirun_args)
    if min(tasks, default=0) > 0 and sum(tasks) < sum(slurm.tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"])):
        # Otherwise launchers fill the first nodes.
        command.environment["SLURM_TASKS_PER_NODE"] = ",".join(map(str, tasks))
    return _start(namespace, command, program)


def _start(namespace: argparse.Namespace, command: CommandLine, program: Sequence[str]) -> int:
    doctor = ["python", "-m", "hetero_mpi", "doctor"]
    for option, file in (("--hostfile", namespace.hostfile), ("--hosts", namespace.hosts)):
        doctor += [option, file] if file is not None else []
    is_dry_run = program[0] == "train" and "--dry-run" in program
    asked_text = STOP_TEXTS.get("dry run" if is_dry_run else program[0])
    code = start(command, namespace.print_only, namespace.verbose, asked_text, shlex.join(doctor))
    if program[0] == "train" and not is_dry_run and code not in _EXPLAINED_CODES and code <= MAX_RANK_EXIT_CODE:
        resume_words = [*without_option(program, "--resume", needs_value=False), "--resume", "any"]
        launch_args = sys.argv[1 : -len(program)] if sys.argv[-len(program) :] == program else ["launch", "...", "--"]
        command_line = shlex.join(["python", "-m", "hetero_mpi", *launch_args, *resume_words])
        text = f"the run has not finished (exit code {code}). To resume from its newest state or, without one, restart"
        submit = slurm.resubmission(os.environ)
        text += ", with the former options of sbatch (a requeued job goes on by itself)" if submit else ""
        print_lines([f"{text}:", submit or command_line])
    return code


def _launch_on_hosts(namespace: argparse.Namespace, program: list[str], mpirun_args: list[str]) -> int:
    # Import pydantic, which a plain launch does not need.
    from hetero_mpi.launch.hosts.hosts_toml import ranks_of, read_hosts
    from hetero_mpi.launch.hosts.mesh import read_mesh

    shares = ranks_of(read_hosts(namespace.hosts), namespace.ranks, namespace.hosts)
    command = hosts_command(find_launcher(), shares, program, mpirun_args, read_mesh(namespace.hosts))
    return _start(namespace, command, program)


def _supervise(
    options: ElasticOptions, program: list[str], parse: Callable[[Sequence[str]], argparse.Namespace]
) -> int:
    from hetero_mpi.job.load import load_job, run_directory  # imports pydantic, which a plain launch does not need

    if program[0] != "train":
        raise UserError(
            "elastic.command", f"--elastic is for `train`, which can resume from a checkpoint; `{program[0]}` cannot."
        )
    training = parse(program)
    loaded = load_job(training.job, training.overrides)
    run_dir = run_directory(loaded, training.run_dir)
    return Supervisor(options, find_launcher(), program, run_dir, trains=not training.dry_run).run()
