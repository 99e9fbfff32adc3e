"""The launcher's command line for the entries of a ``hosts.toml``: one part per entry, with its own Python.

    mpirun OPTIONS --host rtx:1 -np 1 /a/bin/python -m hetero_mpi ... : --host mac:1 -np 1 /b/bin/python -m hetero_mpi ...

Both launchers number the ranks through the parts. One address may occur several times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI
from hetero_mpi.errors import UserError
from hetero_mpi.launch.hosts.agent import launch_agent
from hetero_mpi.launch.hosts.hosts_toml import Host
from hetero_mpi.launch.hosts.interface import LocalAddress, choose_interface, local_addresses, resolve
from hetero_mpi.launch.hosts.mesh import Mesh, check_bound, mpi_options
from hetero_mpi.launch.launcher.launcher import CommandLine, Launcher, add_mpich, add_open_mpi, ending_all, summary
from hetero_mpi.launch.launcher.relay import relay_script, write_relay

Shares = Sequence[tuple[Host, int]]
"""(entry, its number of ranks) of the entries that take part."""


def hosts_command(
    launcher: Launcher,
    shares: Shares,
    program_args: Sequence[str],
    mpirun_args: Sequence[str] = (),
    mesh: Mesh | None = None,
    find: Callable[[str], str] | None = None,
) -> CommandLine:
    """The command line for ``python -m hetero_mpi PROGRAM_ARGS`` on ``shares``.

    Args:
        mesh: the private links that MPI is to be kept to.
        find: function from a host's name to its address; "" where only the launch agent knows it. By default the network is asked.

    :raises UserError: an address that does not resolve or lies outside ``mesh``, a mesh that is not up here, or a launcher that is
        neither Open MPI's nor MPICH's.
    """
    if launcher.family not in (OPEN_MPI, MPICH):
        raise UserError(f"--hosts is for Open MPI and MPICH, and mpi4py loads {launcher.library}: use --hostfile.")
    ranks = sum(count for _, count in shares)
    addresses = {host.address: (find or resolve)(host.address) for host, _ in shares}
    local = local_addresses()
    choice = choose_interface(filter(None, addresses.values()), local)
    command = CommandLine(
        [str(launcher.path)], summary(launcher, ranks, [(host.title, count) for host, count in shares])
    )
    prefixes = _other_prefixes(launcher, shares, {item.address for item in local}, addresses)
    given = _bound(command, launcher, mesh, shares, local) if mesh is not None else []
    given += _add_relay(command, launcher, prefixes, list(mpirun_args)) if prefixes else list(mpirun_args)
    if launcher.family == OPEN_MPI:
        add_open_mpi(command, launcher, ranks, False, choice, given)
        command.arguments += given
        parts = [_open_mpi_part(host, count, program_args, prefixes.get(host.address), given) for host, count in shares]
    else:
        add_mpich(command, choice)
        command.arguments += [*given, "-hosts", _host_list(shares)]
        parts = [_mpich_part(host, count, program_args) for host, count in shares]
    for number, part in enumerate(parts):
        command.arguments += [":", *part] if number else part
    return command


def _bound(
    command: CommandLine, launcher: Launcher, mesh: Mesh, shares: Shares, local: Sequence[LocalAddress]
) -> list[str]:
    """The launcher's options that keep MPI inside the mesh, where the choice of the interface alone does not."""
    own = check_bound(mesh, [host for host, _ in shares], local)
    arguments, variables = mpi_options(mesh, launcher.family, launcher.library.major, own.interface)
    reason = "the hosts file has a [mesh], around which no message may go"
    if launcher.family == MPICH:
        command.add(reason, **variables)  # and its option -iface comes with the choice of the interface
        return []
    command.reasons.append(f"{' '.join(arguments)}: {reason}")
    return arguments


def prefix_of(host: Host, launcher: Launcher) -> str:
    """The directory in which the launcher looks for MPI on a host."""
    if host.prefix is not None:
        return host.prefix
    if launcher.path.parent == Path(sys.prefix) / "bin" and host.python is not None:
        return str(Path(host.python).parent.parent)
    return launcher.prefix


def _open_mpi_part(
    host: Host, count: int, program_args: Sequence[str], prefix: str | None, given: Sequence[str]
) -> list[str]:
    # Open MPI's -x reaches the ranks of all parts, whichever it stands in: `env` sets what is for one alone.
    elsewhere = {} if prefix is None else {"OPAL_PREFIX": prefix}  # the library looks for its parts below it
    variables = [f"{name}={value}" for name, value in {**elsewhere, **host.variables()}.items()]
    words = ["--host", f"{host.address}:{count}", "-np", str(count)]
    words += ["--wdir", host.directory] if host.directory is not None else []
    program = [*(["env", *variables] if variables else []), host.executable, "-m", "hetero_mpi", *program_args]
    return [*words, *ending_all(program, given)]


def _mpich_part(host: Host, count: int, program_args: Sequence[str]) -> list[str]:
    words = ["-np", str(count)]
    for name, value in host.variables().items():
        words += ["-env", name, value]
    words += ["-wdir", host.directory] if host.directory is not None else []
    return [*words, host.executable, "-m", "hetero_mpi", *program_args]


def _host_list(shares: Shares) -> str:
    """MPICH fills the hosts of its list in order; the same one twice in a row is one with more slots."""
    groups = groupby(shares, key=lambda share: share[0].address)
    return ",".join(f"{address}:{sum(count for _, count in group)}" for address, group in groups)


def _other_prefixes(launcher: Launcher, shares: Shares, own: set[str], addresses: dict[str, str]) -> dict[str, str]:
    """Host -> prefix of its MPI, of other hosts on which MPI is installed elsewhere than here."""
    prefixes: dict[str, str] = {}
    for host, _ in shares:
        there, address = prefix_of(host, launcher), addresses[host.address]
        if there != launcher.prefix and address not in own and not address.startswith("127."):
            prefixes.setdefault(host.address, there)  # a host has one daemon, which serves all its entries
    return prefixes


def _add_relay(command: CommandLine, launcher: Launcher, prefixes: dict[str, str], given: list[str]) -> list[str]:
    """Make the relay script the launch agent. Returns the user's options without the agent that the script now calls."""
    here = launcher.prefix
    agent, others = launch_agent(launcher.family, given, os.environ)
    relay = str(write_relay(relay_script(agent, here, prefixes)))
    reason = "MPI is installed elsewhere on " + ", ".join(f"{host} ({there})" for host, there in prefixes.items())
    if launcher.family == MPICH:
        command.add(reason, "-launcher", "ssh", "-launcher-exec", relay)
    else:
        # The other hosts' daemons must not start one another: this agent is only here.
        option, name = launcher.agent_option
        command.add(reason, option, f"{name}_agent", relay, option, f"{name}_no_tree_spawn", "1", "--prefix", here)
    return others
