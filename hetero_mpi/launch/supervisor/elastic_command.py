"""The command line of one start under ``launch --elastic``: the user's, for the present hosts, from the newest state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.launch.hosts.hostfile import format_hostfile
from hetero_mpi.launch.hosts.processes import VARIABLE
from hetero_mpi.launch.launcher.launcher import CommandLine, Launcher, build_command
from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions
from hetero_mpi.launch.supervisor.heartbeat_server import WatchedHost

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host

RESUME = "any"
"""The value for ``train --resume``: the newest state, or the beginning where there is none."""


@dataclass(frozen=True)
class Commands:
    """Makes the command lines of all starts.

    Args:
        program: the words after ``python -m hetero_mpi``, as the user gave them.
        scratch: directory for host files.
        entries: of the hosts file, if there is one.
    """

    options: ElasticOptions
    launcher: Launcher
    program: tuple[str, ...]
    run_dir: Path
    scratch: Path
    entries: tuple[Host, ...] = ()

    def of_start(
        self, start: str, watched: Sequence[WatchedHost], ranks: int, complete: bool, resume: bool
    ) -> CommandLine:
        """The command line of one start.

        Args:
            start: its name, which all its processes bear.
            watched: the hosts, the leader's first.
            complete: are these all hosts of the job?
            resume: from the newest state; else as the user's command line says.
        """
        words = list(self.program)
        if resume:
            words = [*without_option(words, "--resume", needs_value=False), "--resume", RESUME]
        if not complete:
            for option in ("--plan", "--profile"):  # made for all hosts
                words = without_option(words, option)
        given = list(self.options.mpirun_args)
        if self.launcher.family == OPEN_MPI:
            given += ["-x", VARIABLE]
        if self.entries:
            command = self._of_entries(watched, ranks, words, given)
        else:
            program = [sys.executable, "-m", "hetero_mpi", *words]
            command = build_command(self.launcher, ranks, self._hostfile(start, watched), program, given)
        command.environment[VARIABLE] = start
        return command

    def _hostfile(self, start: str, watched: Sequence[WatchedHost]) -> str | None:
        if self.options.hostfile is None:
            return None
        path = self.scratch / f"hosts-{start}"
        path.write_text(format_hostfile([host.entry for host in watched], self.launcher.family), encoding="utf-8")
        return str(path)

    def _of_entries(
        self, watched: Sequence[WatchedHost], ranks: int, words: list[str], given: list[str]
    ) -> CommandLine:
        """Of the entries on hosts that answer, the leader's host first, as ``watched`` has it."""
        from hetero_mpi.launch.hosts.hosts_toml import ranks_of  # brings pydantic
        from hetero_mpi.launch.launcher.hosts_command import hosts_command
        from hetero_mpi.launch.wireguard.mesh import read_mesh

        path = self.options.hosts_file
        assert path is not None, "entries come from a hosts file"
        there = [entry for host in watched for entry in self.entries if entry.address == host.name]
        # Rank 0 may start in another directory than this process, which looks for the run's files here.
        words = [*without_option(words, "--run-dir"), "--run-dir", str(self.run_dir)]
        return hosts_command(self.launcher, ranks_of(there, ranks, path), words, given, read_mesh(path))


def without_option(words: Sequence[str], option: str, needs_value: bool = True) -> list[str]:
    """A command line without an option and its value. ``needs_value`` False: a word after it that begins with "-" is not its
    value.
    """
    kept: list[str] = []
    skip = False
    for word in words:
        if skip and (needs_value or not word.startswith("-")):
            skip = False
            continue
        skip = word == option
        if not skip and not word.startswith(f"{option}="):
            kept.append(word)
    return kept
