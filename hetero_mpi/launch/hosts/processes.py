"""The processes of one start of a job on this machine: they are found by an environment variable, and killed.

A launcher that is killed, or that lost its connections, leaves ranks behind which hold devices and ports. A rank may also be stuck
in a system call of its driver. So the processes get SIGKILL until none is left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hetero_mpi.report.run_files.run_directory import START_VARIABLE

_DAEMONS = ("prted", "prterun", "orted", "hydra_pmi_proxy", "hydra_bstrap_proxy")
"""Parents of ranks that may lack the variable: the programs that launchers start on other machines."""
_PATIENCE_S = 5.0


def end_starts(supervisor: str, keep: str | None = None) -> None:
    """Kill every process on this machine of the supervisor's starts, except those of the start ``keep``.

    A process that the kernel holds (state D) may stay; after five seconds it is given up.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (found := set(_members(supervisor, keep))) and time.monotonic() <= deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, 9)
        time.sleep(0.02)


def _members(supervisor: str, keep: str | None) -> Iterator[int]:
    """Ids of those processes, and of the launchers' daemons above them. Zombies are not among them."""
    import psutil

    for process in psutil.process_iter():
        try:
            name = process.environ().get(START_VARIABLE)
            if name is None or name == keep or name.partition(".")[0] != supervisor or process.pid == os.getpid():
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            yield process.pid
            parent = process.parent()
            if parent is not None and parent.name() in _DAEMONS:
                yield parent.pid
        except (psutil.Error, OSError):
            continue  # it has just gone, or belongs to somebody else
