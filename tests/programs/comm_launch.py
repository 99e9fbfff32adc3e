"""Start a program with the package's own launcher: ``comm_launch.py NP HOSTFILE "OPTIONS" PROGRAM ARGS...``."""

from __future__ import annotations

import shlex
import sys

from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.launch.launcher.launcher import find_launcher
from hetero_mpi.launch.launcher.launcher_process import run_command

np, hostfile, options, *program = sys.argv[1:]
command = build_command(find_launcher(), int(np), hostfile, [sys.executable, *program], shlex.split(options))
print(*command.reasons, sep="\n", file=sys.stderr, flush=True)
sys.exit(run_command(command))
