"""The command line: ``python -m hetero_mpi COMMAND`` or ``hetero-mpi COMMAND``.

``main`` parses a command (``commands.options``), calls the command's function with the options as keyword arguments, and prints
the result. The functions import the modules they need only when called, to keep start-up fast.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
    """Run a command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters outside its encoding, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return ExitCode.USER_ERROR
    try:
        with _require_packages():
            options = vars(parser().parse_args(words))
            module, _, function = options.pop("run").partition(":")
            _check_paths(options.values())
            output = getattr(import_module(f"hetero_mpi.{module}"), function)(**options)
            return int(output) if isinstance(output, int) else _print_output(output)
    except UserError as error:
        write_text(f"{error}\n", sys.stderr)
        return error.exit_code


def _check_paths(options: Iterable[Any]) -> None:
    """Reject a deleted working directory and paths that are not UTF-8, which would otherwise make a run fail only at the end."""
    try:
        working_directory = os.getcwd()
    except FileNotFoundError:
        text = "the working directory has been removed: cd to an existing directory"
        raise UserError("cli.working_directory", text) from None
    words = (word for value in options for word in (value if isinstance(value, list) else [value]))
    for path in (working_directory, *(str(word) for word in words if isinstance(word, (str, Path)))):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UserError(
                "cli.path_encoding",
                f"path {path!r} is not UTF-8, which tokenizers and other libraries require. Rename the directory or file (for "
                f"example, with convmv -f latin1 -t utf8), or use another directory",
            ) from None


@contextlib.contextmanager
def _require_packages(need_all: bool = False) -> Iterator[None]:
    """Report packages that a block fails to import. ``need_all`` reports missing packages before the block runs.

    Raises UserError if packages are missing, with all their names and how to install them.
    """
    try:
        if need_all and (missing := absent_packages()):
            raise ModuleNotFoundError(name=missing[0])
        yield
    except ModuleNotFoundError as error:
        missing = absent_packages()
        if (error.name or "").partition(".")[0] not in missing:
            raise
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise UserError(
            "cli.packages_missing",
            f"This Python ({sys.executable}) is missing packages: {names}. Run `{shlex.quote(sys.executable)} -m pip install "
            f"{pip_argument()}`, or use the Python in which hetero_mpi is installed, such as .venv/bin/python",
        ) from None


def _print_output(output: str | Iterable[str]) -> int:
    """Print a command's output: a string unchanged, or lines as they arrive, wrapped to the width of the terminal.

    Exits quietly if the reader closes the pipe early (``| head``).
    """
    try:
        if isinstance(output, str):
            print(printable(output), end="" if output.endswith("\n") else "\n", flush=True)
        else:
            for line in output:
                print(fit_to_terminal(printable(line)), flush=True)
    except BrokenPipeError:
        # Flushing the rest of the buffer at interpreter exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    return 0


# Commands on all ranks


def _on_all_ranks(command: Callable[[World], int]) -> int:
    """Join the other ranks and run ``command``, which imports the modules it needs. A failure on any rank aborts all ranks."""
    with _require_packages(need_all=True):
        from hetero_mpi.comm.ranks.mpi_start import run_guarded

    return run_guarded(command)


def _read_job_early(
    world: World, path: Path, overrides: Sequence[str], plan: Path | None = None, profile: Path | None = None
) -> LoadedJob | Path:
    """Read the job on rank 0 before any rank imports torch, so that errors in its files are reported at once. Collective."""
    from hetero_mpi.job.load import load_job
    from hetero_mpi.planning.types.toml_files import load_plan, load_profile

    job: LoadedJob | Path = path
    with world.on_leader("reading the job"):
        if world.rank == 0:
            job = load_job(path, overrides)
            for read, file in ((load_plan, plan), (load_profile, profile)):
                if file is not None:
                    read(file)
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
        loaded = _read_job_early(world, job, overrides, options["plan"], options["profile"])
        with _eager_imports(world):
            from hetero_mpi.training.setup.context import TrainOptions
            from hetero_mpi.training.training_run import train

        train(world, TrainOptions(loaded, **options))
        return ExitCode.DONE

    return _on_all_ranks(command)


def _run_with_model(module: str, **options: Any) -> int:
    """Run a module's function of the same name on all ranks, such as ``serve`` with its ``ServeOptions``."""
    name = module.rpartition(".")[2]

    def command(world: World) -> int:
        with _eager_imports(world):
            loaded_module = import_module(f"hetero_mpi.{module}")
        return int(getattr(loaded_module, name)(world, getattr(loaded_module, f"{name.title()}Options")(**options)))

    return _on_all_ranks(command)


generate = partial(_run_with_model, "inference.generate")
serve = partial(_run_with_model, "serve.serve")
evaluate = partial(_run_with_model, "inference.evaluate.evaluate")


def profile(job: Path, overrides: Sequence[str], output: Path, reprofile: bool) -> int:
    def command(world: World) -> int:
        loaded = _read_job_early(world, job, overrides)
        with _eager_imports(world):
            from hetero_mpi.commands.profile_command import profile

        return profile(world, loaded, output, reprofile)

    return _on_all_ranks(command)


def mesh_verify(hosts: Path) -> int:
    from hetero_mpi.launch.doctor.rank_checks import verify_mesh_command

    return _on_all_ranks(lambda world: verify_mesh_command(world, hosts))


# Commands on one machine


def launch(**options: Any) -> int:
    with _require_packages(need_all=True):  # report once, instead of on every rank
        from hetero_mpi.launch import launch

    return launch.main(argparse.Namespace(**options), lambda words: parser().parse_args(words))


def doctor(mpirun_args: str, **options: Any) -> int:
    from hetero_mpi.launch.doctor.checks import DoctorOptions
    from hetero_mpi.launch.doctor.examine import doctor

    return doctor(DoctorOptions(mpirun_args=tuple(shlex.split(mpirun_args)), **options))


def export(source: Path, target: Path, merge: bool, best: bool, gguf: str | None, push: str | None) -> Iterator[str]:
    with _require_packages(need_all=True), _eager_imports():
        from hetero_mpi.interop.export import export, push_directory
        from hetero_mpi.interop.gguf import write_gguf

    yield export(source, target, merge, best, gguf)
    if gguf is not None:
        yield write_gguf(target, gguf, shlex.join(["python", "-m", "hetero_mpi", *sys.argv[1:]]))
    if push is not None:
        yield push_directory(target, push)
