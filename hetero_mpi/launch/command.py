"""The sub-command ``launch -np N [--hostfile F] [--print] -- train job.toml``."""

from __future__ import annotations

import argparse
import shlex

from hetero_mpi.errors import UserError
from hetero_mpi.launch.launcher import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``launch``."""
    parser.add_argument("-np", "-n", dest="ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--hostfile", metavar="FILE", help="machines, one per line: `name slots=2` or `name:2`")
    parser.add_argument("--print", dest="print_only", action="store_true", help="print the command line, run nothing")
    parser.add_argument(
        "--mpirun-args",
        default="",
        metavar="TEXT",
        help='further options for the launcher, e.g. --mpirun-args="--tag-output"',
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run, e.g. `-- train job.toml`"
    )


def main(namespace: argparse.Namespace) -> int:
    """Run ``launch``. Returns the launcher's exit code.

    :raises UserError: no command after ``--``, or what ``launcher.launch`` raises.
    """
    program = list(namespace.program)
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise UserError("launch needs a command to run: `python -m hetero_mpi launch -np 3 -- train job.toml`.")
    return launch(
        namespace.ranks, namespace.hostfile, program, shlex.split(namespace.mpirun_args), namespace.print_only
    )
