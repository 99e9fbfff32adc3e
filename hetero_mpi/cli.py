"""The command line: a command is parsed (``commands.options``), its function is called with its options by name, and what it has
found out is printed. Modules are imported by what needs them, when it needs them.

``python -m hetero_mpi COMMAND`` and ``hetero-mpi COMMAND`` are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.commands.options import parser
from hetero_mpi.util.errors import ExitCode, UserError
from hetero_mpi.util.shipped import absent_packages, pip_argument
from hetero_mpi.util.terminal import fit_to_terminal, printable, write_text

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.job.load import LoadedJob


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is spelt out, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return ExitCode.USER_ERROR
    given = vars(parser().parse_args(words))
    module, _, function = given.pop("run").partition(":")
    try:
        _refuse_undecodable(given.values())
        with _packages_there():
            found = getattr(import_module(f"hetero_mpi.{module}"), function)(**given)
            return int(found) if isinstance(found, int) else _show(found)
    except UserError as error:
        write_text(f"{error}\n", sys.stderr)
        return error.exit_code


def _refuse_undecodable(given: Iterable[Any]) -> None:
    """Refuse a working directory that has gone, and paths with bytes that are no UTF-8, at which a run would fail at its end."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "cli.working_directory", "the working directory has been removed: cd to one that is there"
        ) from None
    words = (one for value in given for one in (value if isinstance(value, list) else [value]))
    for path in (here, *(str(one) for one in words if isinstance(one, (str, Path)))):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UserError(
                "cli.path_encoding",
                f"paths must be UTF-8, since tokenizers and other libraries open no others; {path!r} is not. Rename the folder or "
                f"file (convmv -f latin1 -t utf8 does so), or work elsewhere",
            ) from None


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
            "cli.packages_missing",
            f"This Python ({sys.executable}) lacks {names}: run `{shlex.quote(sys.executable)} -m pip install {pip_argument()}`, "
            "or the Python into which this project was installed, such as .venv/bin/python",
        ) from None


def _show(found: str | Iterable[str]) -> int:
    """Print what a command has found out: lines, fitted to the terminal, as they come; or a text of a format, as it is.

    Who reads only the beginning (``| head``) has seen enough: that ends the program.
    """
    try:
        if isinstance(found, str):
            print(printable(found), end="" if found.endswith("\n") else "\n", flush=True)
        else:
            for line in found:
                print(fit_to_terminal(printable(line)), flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    return 0


# Commands of all ranks


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
    with world.on_leader("reading the job"):
        if world.rank == 0:
            job = load_job(path, overrides)
    return job


@contextlib.contextmanager
def _eager_imports(world: World | None = None) -> Iterator[None]:
    from hetero_mpi.model.eager_imports import eager_imports

    if world is not None:
        world.current_action = "importing torch and transformers"
    with eager_imports():
        yield
    if world is not None:
        world.current_action = "starting"


def train(job: Path, overrides: Sequence[str], **options: Any) -> int:
    def command(world: World) -> int:
        loaded = _read_early(world, job, overrides)
        with _eager_imports(world):
            from hetero_mpi.training.setup.context import TrainOptions
            from hetero_mpi.training.training_run import train

        train(world, TrainOptions(loaded, **options))
        return ExitCode.DONE

    return _on_all_ranks(command)


def generate(**options: Any) -> int:
    return _with_model("inference.generate", options)


def serve(**options: Any) -> int:
    return _with_model("serve.serve", options)


def evaluate(**options: Any) -> int:
    return _with_model("inference.evaluate.evaluate", options)


def _with_model(module: str, options: dict[str, Any]) -> int:
    """Run a module's function of its own name on all ranks, with the options as its class of options, such as ``ServeOptions``."""
    name = module.rpartition(".")[2]

    def command(world: World) -> int:
        with _eager_imports(world):
            found = import_module(f"hetero_mpi.{module}")
        return int(getattr(found, name)(world, getattr(found, f"{name.title()}Options")(**options)))

    return _on_all_ranks(command)


def profile(job: Path, overrides: Sequence[str], output: Path, reprofile: bool) -> int:
    def command(world: World) -> int:
        loaded = _read_early(world, job, overrides)
        with _eager_imports(world):
            from hetero_mpi.commands.profile_command import profile

        return profile(world, loaded, output, reprofile)

    return _on_all_ranks(command)


def mesh_verify(hosts: Path) -> int:
    from hetero_mpi.launch.doctor.rank_checks import verify_mesh_command

    return _on_all_ranks(lambda world: verify_mesh_command(world, hosts))


# Commands of one machine


def launch(**options: Any) -> int:
    with _packages_there(all_of_them=True):  # told here, once, instead of by every rank
        from hetero_mpi.launch import launch

    return launch.main(argparse.Namespace(**options), lambda words: parser().parse_args(words))


def doctor(mpirun_args: str, **options: Any) -> int:
    from hetero_mpi.launch.doctor.checks import DoctorOptions
    from hetero_mpi.launch.doctor.examine import doctor

    return doctor(DoctorOptions(mpirun_args=tuple(shlex.split(mpirun_args)), **options))


def export(source: Path, target: Path, merge: bool, best: bool, gguf: str | None, push: str | None) -> Iterator[str]:
    with _packages_there(all_of_them=True), _eager_imports():
        from hetero_mpi.interop.export import export, push_directory
        from hetero_mpi.interop.gguf import write_gguf

    yield export(source, target, merge, best, gguf is not None)
    if gguf is not None:
        yield write_gguf(target, gguf, shlex.join(["python", "-m", "hetero_mpi", *sys.argv[1:]]))
    if push is not None:
        yield push_directory(target, push)
