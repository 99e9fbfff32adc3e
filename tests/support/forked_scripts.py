"""Python programs run in processes forked from one that has imported torch and transformers: importing them takes longer than most
of what the programs do at their smallest sizes."""

import argparse
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["hetero_mpi.engine.executor"])


def run_script(
    script: Path, arguments: Sequence[str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT ARGUMENTS`` in ``folder``; its exit code and its whole output.

    Raises:
        subprocess.TimeoutExpired: It did not end in time; all its processes are ended.
    """
    return _forked(_run, script, [arguments], folder, timeout_s)


def read_arguments(
    script: Path, given: Sequence[Sequence[str]], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Let a script read each of several lists of arguments and do nothing else: exit code 0 where it understands all."""
    return _forked(_read, script, given, folder, timeout_s)


def _forked(
    work: Callable[[str, Sequence[str]], None],
    script: Path,
    given: Sequence[Sequence[str]],
    folder: Path,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    output = folder / f"{script.stem}.out"
    process = _FORKS.Process(target=_begin, args=(work, str(script), given, output, dict(os.environ)))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        forked = psutil.Process(process.pid)
        for running in (*forked.children(recursive=True), forked):
            running.kill()
        process.join()
        raise subprocess.TimeoutExpired(str(script), timeout_s, output.read_text())
    return subprocess.CompletedProcess(str(script), process.exitcode, output.read_text(), "")


def _begin(
    work: Callable[[str, Sequence[str]], None],
    script: str,
    given: Sequence[Sequence[str]],
    output: Path,
    environment: dict[str, str],
) -> None:
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(output.parent)
    sys.path.insert(0, str(Path(script).parent))
    for arguments in given:
        work(script, arguments)


def _run(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


class _Understood(Exception):
    """The arguments have been read."""


def _read(script: str, arguments: Sequence[str]) -> None:
    read = argparse.ArgumentParser.parse_args

    def read_only(parser: argparse.ArgumentParser, *own: object) -> None:
        read(parser, *own)
        raise _Understood

    argparse.ArgumentParser.parse_args = read_only
    try:
        _run(script, arguments)
    except _Understood:
        return
    finally:
        argparse.ArgumentParser.parse_args = read
    sys.exit(f"{script} reads no arguments")
