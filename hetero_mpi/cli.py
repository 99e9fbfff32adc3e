"""The command line: one sub-command, one short function, which imports its modules itself and is given the options by name.

``python -m hetero_mpi COMMAND`` and ``hetero-mpi COMMAND`` are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi import __version__
from hetero_mpi.errors import ExitCode, UserError
from hetero_mpi.shipped import absent_packages, pip_argument
from hetero_mpi.text import fitted, folded, printable

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.job.load import LoadedJob

    Commands = argparse._SubParsersAction["_Parser"]

Add = Callable[..., argparse.Action]
"""``add_argument`` of a command's parser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return ExitCode.USER_ERROR
    given = vars(parser().parse_args(words))
    run = given.pop("run")
    try:
        _refuse_undecodable(given.values())
        with _packages_there():
            return int(run(**given))
    except UserError as error:
        print(fitted(printable(str(error)), sys.stderr), file=sys.stderr)
        return error.exit_code


def _refuse_undecodable(given: Iterable[Any]) -> None:
    """Refuse a working directory that has gone, and paths with bytes that are no UTF-8, at which a run would fail at its end."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been removed: cd to one that is there") from None
    words = (one for value in given for one in (value if isinstance(value, list) else [value]))
    for path in (here, *(str(one) for one in words if isinstance(one, (str, Path)))):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"paths must be UTF-8, since tokenizers and other libraries open no others; {path!r} is not. Rename the folder or "
                f"file (convmv -f latin1 -t utf8 does so), or work elsewhere"
            ) from None


class _Help(argparse.HelpFormatter):
    """Breaks lines between words only."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return folded(" ".join(text.split()), width, indent="")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(folded(" ".join(text.split()), width, indent, indent))


class _Parser(argparse.ArgumentParser):
    """Names the nearest word for a mistyped command or option. Its sub-commands' parsers are of this class too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "formatter_class": _Help})

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


@contextlib.contextmanager
def _packages_there(all_of_them: bool = False) -> Iterator[None]:
    """A block that imports packages this project is installed with; ``all_of_them``: it needs every one.

    :raises UserError: some are missing here: all of them by name, and how to install them.
    """
    try:
        if all_of_them and (missing := absent_packages()):
            raise ModuleNotFoundError(name=missing[0])
        yield
    except ModuleNotFoundError as error:
        missing = absent_packages()
        if (error.name or "").partition(".")[0] not in missing:
            raise
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise UserError(
            f"This Python ({sys.executable}) lacks {names}: run `{shlex.quote(sys.executable)} -m pip install {pip_argument()}`, "
            "or the Python into which this project was installed, such as .venv/bin/python"
        ) from None


def _show(*lines: str, end: str = "\n", whole: bool = False) -> int:
    """Print what a command has found out. Who reads only the beginning (``| head``) has seen enough: that ends the program.

    ``whole``: no line is broken, since the text is of a format.
    """
    text = printable("\n".join(lines))
    try:
        print(text if whole else fitted(text), end=end, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    return 0


# On all ranks.


def _on_all_ranks(command: Callable[[World], int]) -> int:
    """Join the other ranks and run ``command``, which imports its modules itself; any failure ends all ranks."""
    with _packages_there(all_of_them=True):
        from hetero_mpi.comm.ranks.mpi_start import run_guarded

    # bitsandbytes (through peft) warns of an optional kernel package that we never call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return run_guarded(command)


def _read_early(world: World, path: Path, overrides: Sequence[str]) -> LoadedJob | Path:
    """The job, read by rank 0 before anybody imports torch: a mistake in its file is told within a second. Collective."""
    from hetero_mpi.job.load import load_job

    job: LoadedJob | Path = path
    with world.led("reading the job"):
        if world.rank == 0:
            job = load_job(path, overrides)
    return job


def _eager_imports(world: World | None = None) -> AbstractContextManager[None]:
    from hetero_mpi.model.eager_imports import eager_imports

    if world is not None:
        world.doing = "importing torch and transformers"
    return eager_imports()


def _train(job: Path, overrides: Sequence[str], schedule: str | None, **options: Any) -> int:
    def command(world: World) -> int:
        loaded = _read_early(world, job, _with_schedule(overrides, schedule))
        with _eager_imports(world):
            from hetero_mpi.runtime.run import train
            from hetero_mpi.runtime.setup.context import TrainOptions

        return train(world, TrainOptions(loaded, **options))

    return _on_all_ranks(command)


def _generate(**options: Any) -> int:
    def command(world: World) -> int:
        with _eager_imports(world):
            from hetero_mpi.runtime.generate.generate import GenerateOptions, generate

        return generate(world, GenerateOptions(**options))

    return _on_all_ranks(command)


def _serve(**options: Any) -> int:
    def command(world: World) -> int:
        with _eager_imports(world):
            from hetero_mpi.runtime.serve.serve import ServeOptions, serve

        return serve(world, ServeOptions(**options))

    return _on_all_ranks(command)


def _profile(job: Path, overrides: Sequence[str], output: Path, reprofile: bool) -> int:
    def command(world: World) -> int:
        loaded = _read_early(world, job, overrides)
        with _eager_imports(world):
            from hetero_mpi.commands.profile import profile

        return profile(world, loaded, output, reprofile)

    return _on_all_ranks(command)


def _mesh_verify(hosts: Path) -> int:
    from hetero_mpi.launch.wireguard.check import verify_command

    return _on_all_ranks(lambda world: verify_command(world, hosts))


# On one machine.


def _launch(**options: Any) -> int:
    with _packages_there(all_of_them=True):  # told here, once, instead of by every rank
        from hetero_mpi.launch import command

    return command.main(argparse.Namespace(**options), lambda words: parser().parse_args(words))


def _doctor(mpirun_args: str, **options: Any) -> int:
    from hetero_mpi.launch.doctor.checks import DoctorOptions
    from hetero_mpi.launch.doctor.examine import doctor

    return doctor(DoctorOptions(mpirun_args=tuple(shlex.split(mpirun_args)), **options))


def _mesh_init(hosts: Path, output: Path) -> int:
    from hetero_mpi.launch.wireguard import mesh

    return _show(*mesh.init(hosts, output))


def _export(source: Path, target: Path, merge: bool, best: bool, gguf: str | None, push: str | None) -> int:
    with _packages_there(all_of_them=True), _eager_imports():
        from hetero_mpi.commands import export
        from hetero_mpi.commands.gguf import write_gguf

    _show(export.export(source, target, merge, best))
    if gguf is not None:
        _show(write_gguf(target, gguf, shlex.join(["python", "-m", "hetero_mpi", *sys.argv[1:]])))
    return _show(export.push(target, push)) if push is not None else 0


# Anywhere, without torch and MPI.


def _with_schedule(overrides: Sequence[str], schedule: str | None) -> tuple[str, ...]:
    """``--schedule`` is short for a key of the job."""
    return (*overrides, *([] if schedule is None else [f"plan.schedule={schedule}"]))


def _plan(job: Path | None, overrides: Sequence[str], schedule: str | None, as_json: bool, **options: Any) -> int:
    from hetero_mpi.commands import plan as offline

    text = offline.plan(job, _with_schedule(overrides, schedule), as_json=as_json, **options)
    return _show(text, whole=as_json)


def _simulate(
    job: Path | None, overrides: Sequence[str], schedule: str | None, blocking_sends: bool, shared_nic: bool, **options: Any
) -> int:  # fmt: skip
    from hetero_mpi.commands import plan as offline
    from hetero_mpi.planning.types.network import Network

    network = Network(blocking_sends=blocking_sends, shared_nic=shared_nic)
    return _show(*offline.simulation(job, _with_schedule(overrides, schedule), network=network, **options))


def _inspect(file: Path, output: Path | None, every: bool) -> int:
    from hetero_mpi.commands import plan as offline

    return _show(*offline.inspect(file, output, every))


def _report(run_dir: Path, output: Path | None, share: bool) -> int:
    from hetero_mpi.commands import runs

    return _show(*runs.report(run_dir, output, share))


def _compare(runs: list[Path]) -> int:
    from hetero_mpi.commands.runs import compare

    return _show(*compare(runs))


def _cache(empty: bool) -> int:
    from hetero_mpi.commands.cache import cache

    return _show(*cache(empty))


def _baseline(job: Path | None, overrides: Sequence[str], profile: Path) -> int:
    from hetero_mpi.commands import runs

    return _show(*runs.baseline(job, tuple(overrides), profile))


def _init(name: str | None, directory: Path) -> int:
    from hetero_mpi.commands import init as new_job

    return _show(*(new_job.listed() if name is None else new_job.init(name, directory)))


def _reference(markdown: bool, commands: bool) -> int:
    from hetero_mpi.commands.reference import commands_page, job_page, reference_text

    text = commands_page(parser()) if commands else job_page() if markdown else reference_text()
    return _show(text, end="", whole=True)


# Their options.


def parser() -> argparse.ArgumentParser:
    about = "Train language models over whatever mixed machines you have, in one MPI job."
    top = _Parser(prog="hetero-mpi", description=about)
    top.add_argument("--version", action="version", version=f"hetero_mpi {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = "copy a job and its data to start from; without a name: what there is"
    add = _command(commands, "init", _init, text).add_argument
    add("name", nargs="?", metavar="NAME", help="of a job that comes with the program, such as quickstart")
    where = "the job goes into DIR/jobs (default: here)"
    add("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help=where)

    _add_train(commands)
    _add_generate(commands)
    _add_serve(commands)
    text = "start ranks with the launcher that belongs to the loaded MPI library"
    add_launch_options(_command(commands, "launch", _launch, text))
    _add_doctor(commands)
    _add_mesh(commands)
    _add_offline_commands(commands)
    _add_looking_back(commands)

    text = "turn a run or a checkpoint into a Hugging Face or PEFT directory"
    add = _command(commands, "export", _export, text).add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory or checkpoint file")
    add("target", type=Path, metavar="OUT", help="directory to write")
    add("--merge", action="store_true", help="add the adapter to its base weights: a whole model")
    add("--best", action="store_true", help="of a run, the checkpoint with the lowest held-out loss, not the newest")
    types, gguf = (
        ("auto", "f32", "f16", "bf16", "q8_0"),
        "write a Modelfile for Ollama, too, and by llama.cpp's converter a GGUF file",
    )
    add("--gguf", nargs="?", const="auto", choices=types, help=gguf)
    add("--push", metavar="ORG/NAME", help="upload OUT to the Hugging Face hub, too, as a private model")

    text = "show what this machine keeps for later starts: token ids, times of devices"
    add = _command(commands, "cache", _cache, text).add_argument
    add("--empty", action="store_true", help="remove it; whatever is needed is made again")

    text = "print a job file that documents every key, or the pages of reference"
    form = _command(commands, "reference", _reference, text).add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, which is docs/job.md")
    form.add_argument("--commands", action="store_true", help="all commands and options as Markdown: docs/commands.md")
    return top


def _command(commands: Commands, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    """Declare a command; returns its parser."""
    command = commands.add_parser(name, help=text)
    command.set_defaults(run=run)
    return command


def _add_set(add: Add) -> None:
    text = "override a key of the job; may be repeated"
    add("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE", help=text)


def _add_schedule(add: Add) -> None:
    from hetero_mpi.planning.orders import SCHEDULES

    text = f"instead of [plan] schedule: {', '.join(SCHEDULES)}"
    add("--schedule", choices=list(SCHEDULES), metavar="NAME", help=text)


def _add_train(commands: Commands) -> None:
    text = "train a model: mpirun -np 3 python -m hetero_mpi train job.toml"
    add = _command(commands, "train", _train, text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML); jobs/reference.toml documents every key")
    _add_set(add)
    add("--run-dir", metavar="DIR", help="run directory, instead of [output] run_dir")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="latest|any|PATH",
        help="continue from a checkpoint; any: from the beginning where there is none",
    )
    plan = "use this plan (edited by hand, say), or that of a run, instead of planning"
    add("--plan", type=Path, metavar="FILE|RUN", help=plan)
    profile = "use this profile, that of a run, or the shipped one so called; do not measure"
    add("--profile", type=Path, metavar="FILE|NAME|RUN", help=profile)
    add("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    add("--dry-run", action="store_true", help="validate, profile, plan and predict, then stop")
    add("--verbose", action="store_true", help="show the whole profile and plan, with the reasons")
    _add_schedule(add)


def _add_generate(commands: Commands) -> None:
    text = "continue a prompt; under mpirun the model is split over the ranks"
    add = _command(commands, "generate", _generate, text).add_argument
    _add_source(add)
    add("--prompt", required=True, metavar="TEXT")
    most = "at most so many (by default 128, or what the model's positions allow)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token")
    fewest = "draw from the fewest tokens that together have probability P"
    add("--top-p", type=float, default=1.0, metavar="P", help=fewest)
    add("--seed", type=int, default=0, metavar="N", help="seed of the draws (default 0)")
    add("--raw", action="store_true", help="continue the prompt as it is, without a chat template")


def _add_source(add: Add) -> None:
    source = "run directory, Hugging Face model directory or PEFT adapter directory"
    add("source", type=Path, metavar="RUN_OR_DIR", help=source)


def _add_serve(commands: Commands) -> None:
    text = "answer over HTTP as OpenAI's API does; under mpirun the model is split over the ranks"
    add = _command(commands, "serve", _serve, text).add_argument
    _add_source(add)
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="of rank 0 to listen on (default %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="(default %(default)s; 0: any free one)")
    token = "clients must show it; needed for other addresses than this machine's own (or HETERO_MPI_TOKEN)"
    add("--token", metavar="TEXT", help=token)
    most = "tokens of a request with its answer (default: what the model's positions and the memory allow)"
    add("--context", type=int, metavar="N", help=most)
    side = "so many answers are written side by side at most (default %(default)s)"
    add("--parallel", type=int, default=8, metavar="N", help=side)
    other = "a name under which it may be asked beside this machine's own, as behind a proxy; may be repeated"
    add("--allow-host", action="append", default=[], metavar="NAME", help=other)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``launch``. Every rank parses them too, so nothing of the launcher is imported here."""
    add = parser.add_argument
    add("-np", "-n", dest="ranks", type=int, metavar="N", help="ranks (--hosts: all slots; SLURM: all tasks)")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", metavar="FILE", help="machines, one per line: `name slots=2` or `name:2`")
    unlike = "unlike machines (TOML): each with its own Python, device, directory"
    hosts.add_argument("--hosts", metavar="FILE", help=unlike)
    add("--print", dest="print_only", action="store_true", help="print the command line, run nothing")
    add("--verbose", action="store_true", help="show the command line, and the reasons for its options")
    further = 'further options for the launcher, e.g. --mpirun-args="--tag-output"'
    add("--mpirun-args", default="", metavar="TEXT", help=further)
    python = (
        "in a heterogeneous SLURM job: the Python of its first, second, ... component; may be repeated (docs/slurm.md)"
    )
    add("--slurm-python", action="append", default=[], metavar="PYTHON", help=python)
    recover = "when a rank dies, the others go on in the same processes (Open MPI 5; docs/recovery.md)"
    add("--recover", action="store_true", help=recover)
    _add_elastic(parser)
    add("program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run, e.g. `-- train job.toml`")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions

    usual = ElasticOptions(ranks=1, hostfile=None)
    group = parser.add_argument_group("surviving lost machines (docs/recovery.md)")
    stay = "stay beside the job: when a machine or a rank dies, start again on the machines that are left"
    group.add_argument("--elastic", action="store_true", help=stay)
    for field, option, metavar, text in (
        ("max_restarts", "--max-restarts", "N", "start again so often"),
        ("min_ranks", "--min-ranks", "N", "do not go on with fewer ranks"),
        ("heartbeat_timeout_s", "--heartbeat-timeout", "SECONDS", "a machine not heard of for so long is dead"),
        ("probe_timeout_s", "--probe-timeout", "SECONDS", "wait so long for machines to answer before a start"),
    ):
        default, told = getattr(usual, field), f"{text} (default %(default)g)"
        group.add_argument(option, dest=field, type=type(default), default=default, metavar=metavar, help=told)


def _add_doctor(commands: Commands) -> None:
    text = "is everything in place for a run? Exit code 0: yes; 1: a run would, or may, fail"
    doctor = _command(commands, "doctor", _doctor, text)
    files = doctor.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="look at these hosts too, as for launch")
    files.add_argument("--hosts", metavar="FILE", help="look at the entries of this hosts.toml, as for launch")
    add = doctor.add_argument
    add("--json", action="store_true", help="print one JSON object")
    test = "let every GPU (or the CPU) compute and copy, and compare with the CPU"
    add("--selftest", dest="self_test", action="store_true", help=test)
    add("--run-dir", default="runs", metavar="DIR", help="where runs will go (default %(default)s)")
    add("--mpirun-args", default="", metavar="TEXT", help="as for launch: may name a launch agent")


def _add_mesh(commands: Commands) -> None:
    mesh = commands.add_parser("mesh", help="private links between hosts, by WireGuard (docs/wireguard.md)")
    actions = mesh.add_subparsers(title="actions", required=True, metavar="ACTION")
    text = "write keys and WireGuard configurations for the machines of a hosts.toml"
    add = _command(actions, "init", _mesh_init, text).add_argument
    add("hosts", type=Path, metavar="HOSTS", help="hosts.toml with the addresses outside of the mesh")
    where = "where to (default %(default)s)"
    add("-o", "--output", type=Path, default=Path("mesh"), metavar="DIR", help=where)
    text = "under a launcher: do MPI's messages go through the mesh? Exit code 1: no"
    add = _command(actions, "verify", _mesh_verify, text).add_argument
    add("hosts", type=Path, metavar="HOSTS", help="the hosts.toml that `mesh init` wrote")


def _add_offline_commands(commands: Commands) -> None:
    """``profile`` and what can be asked of its file without the cluster: ``inspect``, ``plan``, ``simulate``."""
    text = "measure these ranks and their links: mpirun -np 3 ... profile job.toml"
    add = _command(commands, "profile", _profile, text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML)")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="profile to write (TOML)")
    add("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    _add_set(add)

    add = _command(commands, "inspect", _inspect, "show a profile, a plan or a checkpoint").add_argument
    file = "what it is, is seen by its content; a shipped profile's name; or a run: all three"
    add("file", type=Path, metavar="FILE|NAME|RUN", help=file)
    add("-o", "--output", type=Path, metavar="PNG", help="a profile's picture (default: beside it)")
    add("--all", dest="every", action="store_true", help="a row for each of many ranks, hosts and links")

    add = _command(commands, "plan", _plan, "plan a job for the cluster of a profile; needs no cluster").add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="write the plan, to be edited and given to train")
    add("--explain", action="store_true", help="also answer what-if questions, by planning again")
    add("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    _add_question(add)

    text = "predict a step: timeline, trace, why ranks wait; needs no cluster"
    add = _command(commands, "simulate", _simulate, text).add_argument
    where = "where pictures and trace go (default: RUN_DIR/simulation)"
    add("-o", "--output", type=Path, metavar="DIR", help=where)
    add("--blocking-sends", action="store_true", help="as if ranks computed nothing while they send")
    add("--shared-nic", action="store_true", help="as if all messages of a host passed through one NIC")
    _add_question(add)


def _add_question(add: Add) -> None:
    """Of ``plan`` and ``simulate``: the job, the cluster, and how it is to be planned."""
    add("job", type=Path, nargs="?", metavar="JOB", help="job file (TOML); left out: the profile's own model")
    profile = "of the cluster, and the model: a file, a run, or the name of a shipped one"
    add("--profile", type=Path, required=True, metavar="FILE|NAME|RUN", help=profile)
    plan = "this plan, or that of a run, instead of the planner's"
    add("--plan", dest="given", type=Path, metavar="FILE|RUN", help=plan)
    _add_schedule(add)
    _add_set(add)


def _add_looking_back(commands: Commands) -> None:
    """``report``, ``compare`` and ``baseline``: what a run was like, and what it was good for."""
    text = "write a run's report: one HTML file; train does so at its end"
    add = _command(commands, "report", _report, text).add_argument
    add("run_dir", type=Path, metavar="RUN", help="run directory")
    add("-o", "--output", type=Path, metavar="FILE", help="(default: RUN/report.html)")
    share = "for others: without names of hosts and users, without absolute paths (RUN/report-shared.html)"
    add("--share", action="store_true", help=share)

    text = "runs side by side: jobs, plans, speed, loss after equally many tokens"
    add = _command(commands, "compare", _compare, text).add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directories")

    text = "was it worth adding the other devices? The best one alone, same tokens"
    add = _command(commands, "baseline", _baseline, text).add_argument
    job = "job file (TOML); left out: the run's, or the profile's own model"
    add("job", type=Path, nargs="?", metavar="JOB", help=job)
    profile = "a profile, or a run, whose measured times count"
    add("--profile", type=Path, required=True, metavar="FILE|NAME|RUN", help=profile)
    _add_set(add)
