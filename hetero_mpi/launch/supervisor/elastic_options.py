"""The options of ``launch --elastic``, and the hosts that they select."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_mpi.commands.options import HEARTBEAT_TIMEOUT_S, MAX_RESTARTS, PROBE_TIMEOUT_S
from hetero_mpi.launch.hosts.hostfile import HostEntry, check_slots, read_hostfile, slots_by_host
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host


@dataclass(frozen=True)
class ElasticOptions:
    ranks: int
    hostfile: str | None
    hosts_file: str | None = None
    """A hosts.toml, used instead of a host file."""
    mpirun_args: tuple[str, ...] = ()
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    max_restarts: int = MAX_RESTARTS
    min_ranks: int = 1
    probe_timeout_s: float = PROBE_TIMEOUT_S
    verbose: bool = False
    """Print the command of every start, with the reasons for its options."""

    def check(self) -> None:
        """Raise UserError if a number is out of range, or inside a SLURM job."""
        if "SLURM_JOB_ID" in os.environ:
            raise UserError(
                "elastic.slurm",
                "--elastic does not work inside a SLURM job: SLURM ends the whole allocation when it loses a node, including this "
                "process. Requeue the job instead, with `#SBATCH --requeue` and `train --resume`: see docs/recovery.md.",
            )
        if not 1 <= self.min_ranks <= self.ranks:
            raise UserError("elastic.min_ranks", f"--min-ranks must be 1 to -np {self.ranks}, not {self.min_ranks}.")
        if self.max_restarts < 0:
            raise UserError("elastic.max_restarts", f"--max-restarts must be at least 0, not {self.max_restarts}.")
        if not 2 <= self.heartbeat_timeout_s <= 3600:
            raise UserError(
                "elastic.heartbeat",
                f"--heartbeat-timeout must be from 2 to 3600 seconds, not {self.heartbeat_timeout_s:g}.",
            )

    def hosts(self) -> tuple[HostEntry, ...]:
        """Return all hosts that may take part. Raises UserError if the host file is missing or lacks slots."""
        path = self.hosts_file or self.hostfile
        if path is None:
            return (HostEntry("localhost", self.ranks),)
        listed = [HostEntry(host.address, host.slots) for host in self.entries()] or read_hostfile(path)
        if unknown := [entry.name for entry in listed if entry.slots is None]:
            raise UserError(
                "elastic.slots",
                f"--elastic needs the number of ranks of every host: write `{unknown[0]} slots=1` "
                f"(or more) for {unknown[0]} in {path}.",
            )
        entries = tuple(HostEntry(name, slots) for name, slots in slots_by_host(listed).items())
        check_slots(entries, self.ranks, path)
        return entries

    def entries(self) -> tuple[Host, ...]:
        """Return the entries of the hosts file, if one is used. Raises UserError if it is unreadable or invalid."""
        if self.hosts_file is None:
            return ()
        from hetero_mpi.launch.hosts.hosts_toml import read_hosts  # imports pydantic

        return read_hosts(self.hosts_file)
