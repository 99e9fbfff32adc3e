"""The options of ``launch``. Every rank's command line is parsed with them too, so nothing of the launcher is imported here."""

from __future__ import annotations

import argparse

from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``launch``."""
    parser.add_argument(
        "-np", "-n", dest="ranks", type=int, metavar="N", help="ranks (--hosts: all slots; SLURM: all tasks)"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", metavar="FILE", help="machines, one per line: `name slots=2` or `name:2`")
    hosts.add_argument(
        "--hosts", metavar="FILE", help="unlike machines (TOML): each with its own Python, device, directory"
    )
    parser.add_argument("--print", dest="print_only", action="store_true", help="print the command line, run nothing")
    parser.add_argument("--verbose", action="store_true", help="show the command line, and the reasons for its options")
    parser.add_argument(
        "--mpirun-args",
        default="",
        metavar="TEXT",
        help='further options for the launcher, e.g. --mpirun-args="--tag-output"',
    )
    parser.add_argument(
        "--slurm-python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="in a heterogeneous SLURM job: the Python of its first, second, ... component; may be repeated (docs/slurm.md)",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        help="when a rank dies, the others go on in the same processes (Open MPI 5; docs/recovery.md)",
    )
    _add_elastic(parser)
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run, e.g. `-- train job.toml`"
    )


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    usual = ElasticOptions(ranks=1, hostfile=None)
    group = parser.add_argument_group("surviving lost machines (docs/recovery.md)")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="stay beside the job: when a machine or a rank dies, start again on the machines that are left",
    )
    for field, option, metavar, text in (
        ("max_restarts", "--max-restarts", "N", "start again so often"),
        ("min_ranks", "--min-ranks", "N", "do not go on with fewer ranks"),
        ("heartbeat_timeout_s", "--heartbeat-timeout", "SECONDS", "a machine not heard of for so long is dead"),
        ("probe_timeout_s", "--probe-timeout", "SECONDS", "wait so long for machines to answer before a start"),
    ):
        default, told = getattr(usual, field), f"{text} (default %(default)g)"
        group.add_argument(option, dest=field, type=type(default), default=default, metavar=metavar, help=told)
