"""The command line: one sub-command, one short function, which imports its modules itself.

``python -m hetero_mpi COMMAND`` and ``hetero-mpi COMMAND`` are the same.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi import __version__
from hetero_mpi.errors import UserError
from hetero_mpi.text import printable

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.job.load import LoadedJob


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    namespace = parser().parse_args(arguments)
    try:
        return int(namespace.run(namespace))
    except UserError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.exit_code


class _Parser(argparse.ArgumentParser):
    """Names the nearest word for a mistyped command or option. Its sub-commands' parsers are of this class too."""

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        namespace, rest = super().parse_known_args(*arguments, **named)
        for word in rest:
            if word.startswith("-"):
                self.error(f"unknown option: {word}{_nearest(word.partition('=')[0], self._option_string_actions)}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + _nearest(str(value), action.choices or ())) from None


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _show(text: str, end: str = "\n") -> None:
    """Print what a command has found out. Who reads only the beginning (``| head``) has seen enough: that ends the program."""
    try:
        print(printable(text), end=end, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _train(namespace: argparse.Namespace) -> int:
    def command(world: World) -> int:
        job = _read_early(world, namespace.job, _overrides(namespace))
        with _eager_imports():
            from hetero_mpi.runtime.run import train
            from hetero_mpi.runtime.setup.setup import TrainOptions

        options = TrainOptions(
            job=job,
            run_dir=namespace.run_dir,
            resume=namespace.resume,
            plan=namespace.plan,
            profile=namespace.profile,
            dry_run=namespace.dry_run,
            reprofile=namespace.reprofile,
        )
        return train(world, options)

    return _on_all_ranks(command)


def _generate(namespace: argparse.Namespace) -> int:
    def command(world: World) -> int:
        with _eager_imports():
            from hetero_mpi.runtime.generate.generate import GenerateOptions, generate

        options = GenerateOptions(
            source=namespace.source,
            prompt=namespace.prompt,
            max_new_tokens=namespace.max_new_tokens,
            temperature=namespace.temperature,
            top_p=namespace.top_p,
            seed=namespace.seed,
            raw=namespace.raw,
        )
        return generate(world, options)

    return _on_all_ranks(command)


def _profile(namespace: argparse.Namespace) -> int:
    def command(world: World) -> int:
        job = _read_early(world, namespace.job, tuple(namespace.set))
        with _eager_imports():
            from hetero_mpi.commands.profile import ProfileOptions, profile

        return profile(world, ProfileOptions(job, namespace.output, namespace.reprofile))

    return _on_all_ranks(command)


def _inspect(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import plan as offline

    _show("\n".join(offline.inspect(namespace.file, namespace.output, namespace.all)))
    return 0


def _plan(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import plan as offline

    text = offline.plan(
        namespace.job,
        _overrides(namespace),
        namespace.profile,
        namespace.plan,
        namespace.output,
        namespace.explain,
        namespace.json,
    )
    _show(text)
    return 0


def _simulate(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import plan as offline
    from hetero_mpi.planning.types.network import Network

    lines = offline.simulation(
        namespace.job,
        _overrides(namespace),
        namespace.profile,
        namespace.plan,
        namespace.output,
        Network(blocking_sends=namespace.blocking_sends, shared_nic=namespace.shared_nic),
    )
    _show("\n".join(lines))
    return 0


def _report(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import runs

    _show("\n".join(runs.report(namespace.directory, namespace.output)))
    return 0


def _compare(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import runs

    _show("\n".join(runs.compare(namespace.runs)))
    return 0


def _baseline(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import runs

    _show("\n".join(runs.baseline(namespace.job, tuple(namespace.set), namespace.profile)))
    return 0


def _overrides(namespace: argparse.Namespace) -> tuple[str, ...]:
    """``--set``, and ``--schedule``, which is short for a key of the job."""
    named = () if namespace.schedule is None else (f"plan.schedule={namespace.schedule}",)
    return (*namespace.set, *named)


def _add_schedule(command: argparse.ArgumentParser) -> None:
    from hetero_mpi.planning.orders import SCHEDULES

    command.add_argument("--schedule", choices=list(SCHEDULES), help="instead of [plan] schedule")


def _read_early(world: World, path: Path, overrides: tuple[str, ...]) -> LoadedJob | Path:
    """The job, read by rank 0 before anybody imports torch: a mistake in its file is told within a second. Collective."""
    from hetero_mpi.job.load import load_job

    job: LoadedJob | Path = path
    with world.led("reading the job"):
        if world.rank == 0:
            job = load_job(path, overrides)
    world.doing = "importing torch and transformers"
    return job


def _on_all_ranks(command: Callable[[World], int]) -> int:
    """Join the other ranks and run ``command``, which imports its modules itself; any failure ends all ranks."""
    from hetero_mpi.comm.ranks.mpi_start import run_guarded

    # bitsandbytes (through peft) warns of an optional kernel package that we never call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

    def guarded(world: World) -> int:
        world.doing = "importing torch and transformers"
        return command(world)

    return run_guarded(guarded)


def _eager_imports() -> AbstractContextManager[None]:
    from hetero_mpi.model.eager_imports import eager_imports

    return eager_imports()


def _launch(namespace: argparse.Namespace) -> int:
    from hetero_mpi.launch import command

    return command.main(namespace, lambda words: parser().parse_args(words))


def _doctor(namespace: argparse.Namespace) -> int:
    from hetero_mpi.launch.doctor.doctor_report import DoctorOptions
    from hetero_mpi.launch.doctor.examine import doctor

    given = tuple(shlex.split(namespace.mpirun_args))
    options = DoctorOptions(
        namespace.hostfile, namespace.hosts, given, namespace.run_dir, namespace.json, namespace.selftest
    )
    return doctor(options)


def _mesh_init(namespace: argparse.Namespace) -> int:
    from hetero_mpi.launch.wireguard import mesh

    _show("\n".join(mesh.init(namespace.hosts, namespace.output)))
    return 0


def _mesh_verify(namespace: argparse.Namespace) -> int:
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.launch.wireguard.check import verify_command

    return run_guarded(lambda world: verify_command(world, namespace.hosts))


def _export(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands.export import export

    _show(export(namespace.source, namespace.target, namespace.merge))
    return 0


def _init(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands import init as new_job

    _show("\n".join(new_job.listed() if namespace.name is None else new_job.init(namespace.name, namespace.directory)))
    return 0


def _reference(namespace: argparse.Namespace) -> int:
    from hetero_mpi.commands.reference import reference_text
    from hetero_mpi.commands.reference_pages import commands_page, job_page

    if namespace.commands:
        text = commands_page(parser())
    else:
        text = job_page() if namespace.markdown else reference_text()
    _show(text, end="")
    return 0


def parser() -> argparse.ArgumentParser:
    from hetero_mpi.launch.options import add_arguments

    top = _Parser(
        prog="hetero-mpi", description="Train language models over whatever mixed machines you have, in one MPI job."
    )
    top.add_argument("--version", action="version", version=f"hetero_mpi {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="copy a job and its data to start from; without a name: what there is")
    init.add_argument(
        "name", nargs="?", metavar="NAME", help="of a job that comes with the program, such as quickstart"
    )
    init.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the job goes into DIR/jobs (default: here)",
    )
    init.set_defaults(run=_init)

    _add_ranks_commands(commands)

    launch = commands.add_parser("launch", help="start ranks with the launcher that belongs to the loaded MPI library")
    add_arguments(launch)
    launch.set_defaults(run=_launch)

    _add_doctor(commands)
    _add_mesh(commands)
    _add_offline_commands(commands)
    _add_looking_back(commands)

    export = commands.add_parser("export", help="turn a run or a checkpoint into a Hugging Face or PEFT directory")
    export.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory or checkpoint file")
    export.add_argument("target", type=Path, metavar="OUT", help="directory to write")
    export.add_argument("--merge", action="store_true", help="add the adapter to its base weights: a whole model")
    export.set_defaults(run=_export)

    reference = commands.add_parser(
        "reference", help="print a job file that documents every key, or the pages of reference"
    )
    form = reference.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, which is docs/job.md")
    form.add_argument("--commands", action="store_true", help="all commands and options as Markdown: docs/commands.md")
    reference.set_defaults(run=_reference)
    return top


def _add_ranks_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """``train`` and ``generate``: what runs on all ranks together."""
    train = commands.add_parser("train", help="train a model: mpirun -np 3 python -m hetero_mpi train job.toml")
    train.add_argument("job", type=Path, metavar="JOB", help="job file (TOML); jobs/reference.toml documents every key")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a key of the job; may be repeated",
    )
    train.add_argument("--run-dir", metavar="DIR", help="run directory, instead of [output] run_dir")
    train.add_argument("--resume", nargs="?", const="latest", metavar="latest|PATH", help="continue from a checkpoint")
    train.add_argument(
        "--plan", type=Path, metavar="FILE", help="use this plan (edited by hand, say) instead of planning"
    )
    train.add_argument(
        "--profile",
        type=Path,
        metavar="FILE|NAME",
        help="use this profile, or the shipped one so called; do not measure",
    )
    train.add_argument("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    train.add_argument("--dry-run", action="store_true", help="validate, profile, plan and predict, then stop")
    _add_schedule(train)
    train.set_defaults(run=_train)

    generate = commands.add_parser("generate", help="continue a prompt; under mpirun the model is split over the ranks")
    generate.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_DIR",
        help="run directory, Hugging Face model directory or PEFT adapter directory",
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="at most so many (by default 128, or what the model's positions allow)",
    )
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token"
    )
    generate.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest tokens that together have probability P",
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws (default 0)")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    generate.set_defaults(run=_generate)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor", help="is everything in place for a run? Exit code 0: yes; 1: a run would fail"
    )
    files = doctor.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="look at these hosts too, as for launch")
    files.add_argument("--hosts", metavar="FILE", help="look at the entries of this hosts.toml, as for launch")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--selftest", action="store_true", help="let every GPU (or the CPU) compute and copy, and compare with the CPU"
    )
    doctor.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs will go (default %(default)s)")
    doctor.add_argument("--mpirun-args", default="", metavar="TEXT", help="as for launch: may name a launch agent")
    doctor.set_defaults(run=_doctor)


def _add_mesh(commands: argparse._SubParsersAction[_Parser]) -> None:
    mesh = commands.add_parser("mesh", help="private links between hosts, by WireGuard (docs/wireguard.md)")
    actions = mesh.add_subparsers(title="actions", required=True, metavar="ACTION")
    init = actions.add_parser("init", help="write keys and WireGuard configurations for the machines of a hosts.toml")
    init.add_argument("hosts", type=Path, metavar="HOSTS", help="hosts.toml with the addresses outside of the mesh")
    init.add_argument(
        "-o", "--output", type=Path, default=Path("mesh"), metavar="DIR", help="where to (default %(default)s)"
    )
    init.set_defaults(run=_mesh_init)
    verify = actions.add_parser(
        "verify", help="under a launcher: do MPI's messages go through the mesh? Exit code 1: no"
    )
    verify.add_argument("hosts", type=Path, metavar="HOSTS", help="the hosts.toml that `mesh init` wrote")
    verify.set_defaults(run=_mesh_verify)


def _add_offline_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """``profile`` and what can be asked of its file without the cluster: ``inspect``, ``plan``, ``simulate``."""
    profile = commands.add_parser(
        "profile", help="measure these ranks and their links: mpirun -np 3 ... profile job.toml"
    )
    profile.add_argument("job", type=Path, metavar="JOB", help="job file (TOML)")
    profile.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="profile to write (TOML)")
    profile.add_argument("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    profile.set_defaults(run=_profile)

    inspect = commands.add_parser("inspect", help="show a profile, a plan or a checkpoint")
    inspect.add_argument(
        "file", type=Path, metavar="FILE", help="what it is, is seen by its content; or a shipped profile's name"
    )
    inspect.add_argument("-o", "--output", type=Path, metavar="PNG", help="a profile's picture (default: beside it)")
    inspect.add_argument("--all", action="store_true", help="a row for each of many ranks, hosts and links")
    inspect.set_defaults(run=_inspect)

    plan = commands.add_parser("plan", help="plan a job for the cluster of a profile; needs no cluster")
    plan.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the plan, to be edited and given to train"
    )
    plan.add_argument("--explain", action="store_true", help="also answer what-if questions, by planning again")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan.set_defaults(run=_plan)

    simulate = commands.add_parser("simulate", help="predict a step: timeline, trace, why ranks wait; needs no cluster")
    simulate.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="where pictures and trace go (default: RUN_DIR/simulation)"
    )
    simulate.add_argument("--blocking-sends", action="store_true", help="as if ranks computed nothing while they send")
    simulate.add_argument(
        "--shared-nic", action="store_true", help="as if all messages of a host passed through one NIC"
    )
    simulate.set_defaults(run=_simulate)

    for command in (plan, simulate):
        command.add_argument(
            "job", type=Path, nargs="?", metavar="JOB", help="job file (TOML); left out: the profile's own model"
        )
        command.add_argument(
            "--profile",
            type=Path,
            required=True,
            metavar="FILE|NAME",
            help="of the cluster, and the model: a file, or the name of a shipped one",
        )
        command.add_argument("--plan", type=Path, metavar="FILE", help="this plan, instead of the planner's")
        _add_schedule(command)
    for command in (profile, plan, simulate):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="TABLE.KEY=VALUE",
            help="override a key of the job; may be repeated",
        )


def _add_looking_back(commands: argparse._SubParsersAction[_Parser]) -> None:
    """``report``, ``compare`` and ``baseline``: what a run was like, and what it was good for."""
    report = commands.add_parser("report", help="write a run's report: one HTML file; train does so at its end")
    report.add_argument("directory", type=Path, metavar="RUN", help="run directory")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="(default: RUN/report.html)")
    report.set_defaults(run=_report)

    compare = commands.add_parser(
        "compare", help="runs side by side: jobs, plans, speed, loss after equally many tokens"
    )
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    compare.set_defaults(run=_compare)

    baseline = commands.add_parser(
        "baseline", help="was it worth adding the other devices? The best one alone, same tokens"
    )
    baseline.add_argument(
        "job",
        type=Path,
        nargs="?",
        metavar="JOB",
        help="job file (TOML); left out: the run's, or the profile's own model",
    )
    baseline.add_argument(
        "--profile",
        type=Path,
        required=True,
        metavar="FILE|NAME|RUN",
        help="a profile, or a run, whose measured times count",
    )
    baseline.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a key of the job; may be repeated",
    )
    baseline.set_defaults(run=_baseline)
