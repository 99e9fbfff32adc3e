"""The launcher's command line for a number of ranks and a host file, or for the entries of a ``hosts.toml``.

For a ``hosts.toml`` the command line has one part per entry, with the entry's own Python. Both launchers number the ranks
across the parts, and an address may occur several times::

    mpirun OPTIONS --host rtx:1 -np 1 /a/bin/python -m hetero_mpi ... : --host mac:1 -np 1 /b/bin/python -m hetero_mpi ...

Launchers start their daemon on every host by its local path, and accept one prefix for all hosts. If MPI is installed in
different places, a shell script between the launcher and ssh (the relay) inserts each host's own prefix into the command. The
script is cached under a name derived from its content, so that a command line printed earlier still finds it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.comm.ranks.library import JOINED_VARIABLE, MPICH, OPEN_MPI
from hetero_mpi.launch.hosts.agent import launch_agent
from hetero_mpi.launch.hosts.hostfile import check_slots, format_hostfile, read_hostfile
from hetero_mpi.launch.hosts.interface import InterfaceChoice, LocalAddress, choose_interface, local_addresses, resolve
from hetero_mpi.launch.launcher.launcher import AS_ROOT, Launcher
from hetero_mpi.util import units
from hetero_mpi.util.disk import atomic_write, cache_folder, write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.host_limits import usable_cores

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host  # bring pydantic, which a plain launch does not need
    from hetero_mpi.launch.hosts.mesh import Mesh

    Shares = Sequence[tuple[Host, int]]
    """Entries that take part, each as (entry, number of its ranks)."""

_SCRIPT = Path(__file__).with_name("agent.sh").read_text(encoding="utf-8")


@dataclass
class CommandLine:
    """A command to run: its arguments, extra environment variables, and the reasons for both."""

    arguments: list[str]
    summary: str
    """Description of ranks, hosts and MPI library."""
    environment: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str, *arguments: str, **environment: str) -> None:
        """Add an automatic choice, but leave variables as they are if the user has set them."""
        new = {name: value for name, value in environment.items() if name not in os.environ}
        if arguments or new:
            self.arguments.extend(arguments)
            self.environment.update(new)
            words = [f"{name}={value}" for name, value in new.items()] + ([shlex.join(arguments)] if arguments else [])
            self.reasons.append(f"{' '.join(words)}: {reason}")

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.arguments)])


def summary(launcher: Launcher, ranks: int, hosts: Sequence[tuple[str, int | None]]) -> str:
    """Format ``3 ranks on rtx (2), titan (1), by Open MPI 5.0.11``; ``hosts`` are names and slots, filled in order."""
    counts: dict[str, int] = {}
    remaining = ranks
    for name, slots in hosts:
        ranks_here = min(remaining, slots or 0)
        counts[name], remaining = counts.get(name, 0) + ranks_here, remaining - ranks_here
    if any(slots is None for _, slots in hosts):  # the launcher decides
        where = ", ".join(counts)
    else:
        where = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    default_place = "the nodes of this SLURM job" if "SLURM_JOB_ID" in os.environ else "this machine"
    text = f"{units.plural(ranks, 'rank')} on {where or default_place}, by {launcher.library}"
    if (where or default_place) == "this machine" and ranks > 2 * usable_cores():
        text += f"; they share {units.plural(usable_cores(), 'core')}, so fewer ranks (-np {usable_cores()}) are usually faster"
    return text


def _loopback_warning(addresses: Collection[str]) -> str:
    """Return a warning, to follow the summary, if only some of the typed addresses are loopback addresses; else ""."""
    loopback = [address for address in addresses if re.match(r"(.*@)?(127\.|localhost$)", address)]
    mixed = 0 < len(loopback) < len(addresses)
    return f"; WARNING: {loopback[0]}: write the address at which the other hosts reach that machine" if mixed else ""


def build_command(
    launcher: Launcher, np: int, hostfile: str | None, program: Sequence[str], mpirun_args: Sequence[str] = ()
) -> CommandLine:
    """Build the launcher's command line that runs ``program`` (a Python and its arguments) on ``np`` ranks."""
    entries = read_hostfile(hostfile) if hostfile is not None else ()
    summary_text = summary(launcher, np, [(entry.name, entry.slots) for entry in entries])
    summary_text += _loopback_warning([entry.name for entry in entries])
    command = CommandLine([str(launcher.path), "-np", str(np)], summary_text)
    choice = None
    if hostfile is not None:
        check_slots(entries, np, hostfile)
        choice = choose_interface([resolve(entry.name) for entry in entries], local_addresses())
        content = format_hostfile(entries, launcher.family)
        copy = write_cached("hosts", ".txt", content, "for host files in the form that the launcher reads")
        option = "--hostfile" if launcher.family == OPEN_MPI else "-f"
        command.add(f"{hostfile} as {launcher.family}'s launcher reads it", option, str(copy))
    if launcher.family == OPEN_MPI:
        add_open_mpi(command, launcher, np, hostfile is None, choice, list(mpirun_args))
    elif launcher.family == MPICH:
        add_mpich(command, choice)
    command.arguments += [*mpirun_args, *guard_join(program, mpirun_args)]
    return command


# A launcher that tolerates lost ranks (--with-ft ulfm) does not report a rank lost before MPI is initialised, and the other ranks
# wait in MPI's start forever. Therefore a shell starts each rank: it forks a child that reads from a pipe and then becomes the
# rank, the only holder of the pipe's other end. A line from the pipe means that the rank has joined. If the pipe ends without a
# line, the child reports the loss and kills the launcher, or its daemon on that host, which ends the job everywhere.
_JOIN_GUARD = (
    'd=$(mktemp -d) && mkfifo "$d/p" || exit; '
    '(read -r joined < "$d/p"; [ "$joined" ] || { echo "rank $OMPI_COMM_WORLD_RANK on $(uname -n) ended before it joined '
    'the other ranks; ending the job. See its output above, and check the environment on that host" >&2; '
    "sleep 2; kill $PPID; }) & "  # time for a daemon to forward the message
    f'exec 9> "$d/p"; rm -r "$d"; export {JOINED_VARIABLE}=9; exec "$@"'
)


def guard_join(program: Sequence[str], mpirun_args: Sequence[str]) -> list[str]:
    """Wrap a rank's command line so that losing the rank before it joins ends the job, even with fault tolerance."""
    return ["sh", "-c", _JOIN_GUARD, "sh", *program] if "--with-ft" in mpirun_args else list(program)


def add_open_mpi(
    command: CommandLine,
    launcher: Launcher,
    np: int,
    single_machine: bool,
    choice: InterfaceChoice | None,
    mpirun_args: list[str],
) -> None:
    """Add Open MPI's options for any program. ``mpirun_args``: the user's own options, which take precedence."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.add("Open MPI requires confirmation to run as root", **AS_ROOT)
    cores = physical_cores()
    if single_machine and np > cores and "SLURM_JOB_ID" not in os.environ:
        command.add(f"{np} ranks share {cores} cores", "--oversubscribe", OMPI_MCA_mpi_yield_when_idle="1")
    if not any("bind-to" in argument for argument in mpirun_args):
        command.add("a rank has several compute threads and a communication thread", "--bind-to", "none")
    if choice is None:
        return
    networks = ",".join(choice.networks)
    if "btl_tcp_if_include" not in " ".join(mpirun_args):
        command.add(choice.reason, "--mca", "btl_tcp_if_include", networks)
    if "prte_if_include" not in " ".join(mpirun_args) and launcher.prrte:
        command.add("the same networks for the launcher's own connections", "--prtemca", "prte_if_include", networks)
    _start_daemons_from_here(command, launcher, mpirun_args)
    if launcher.path.parent == Path(sys.prefix) / "bin" and "--prefix" not in [*mpirun_args, *command.arguments]:
        command.add("the path of Open MPI on the other hosts", "--prefix", sys.prefix)
    if "PYTHONPATH" in os.environ:
        command.add("the module search path for the other hosts", "-x", "PYTHONPATH")


def _start_daemons_from_here(command: CommandLine, launcher: Launcher, mpirun_args: list[str]) -> None:
    """Make the launcher start all daemons itself, as Open MPI 5.0's tree spawning crashes between CPU types.

    This costs nothing, as Open MPI starts up to 64 hosts directly in any case, and only this machine needs to log in to the
    others.
    """
    if "no_tree_spawn" in " ".join([*mpirun_args, *command.arguments]):
        return
    option, name = launcher.agent_option
    reason = "only this machine starts daemons, as tree spawning crashes between CPU types (x86-64, ARM)"
    command.add(reason, option, f"{name}_no_tree_spawn", "1")


def add_mpich(command: CommandLine, choice: InterfaceChoice | None) -> None:
    """Add MPICH's options for any program."""
    if choice is None:
        return
    interface = choice.interfaces[0]
    reason = f"{choice.reason} (the interface must have this name on every host)"
    command.add(reason, "-iface", interface, FI_TCP_IFACE=interface)
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        command.reasons.append("UCX_NET_DEVICES is unchanged: this machine has InfiniBand devices")
    else:
        command.add("UCX must use the same interface", UCX_NET_DEVICES=interface)


def physical_cores() -> int:
    """Number of usable physical cores (Open MPI's default slots on a single machine), or fewer under a quota."""
    import psutil

    return int(min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores()))


def hosts_command(
    launcher: Launcher,
    shares: Shares,
    program_args: Sequence[str],
    mpirun_args: Sequence[str] = (),
    mesh: Mesh | None = None,
    resolve_host: Callable[[str], str] | None = None,
) -> CommandLine:
    """Build the command line for ``python -m hetero_mpi PROGRAM_ARGS`` on ``shares``.

    Args:
        mesh: The encrypted links to which MPI is confined.
        resolve_host: Maps a host name to its address, or to "" if only the launch agent knows it; default: DNS.

    Raises:
        UserError: if an address does not resolve or is not in ``mesh``, the mesh is down here, or the launcher is unknown.
    """
    if launcher.family not in (OPEN_MPI, MPICH):
        raise UserError(
            "launch.hosts_launcher",
            f"--hosts supports Open MPI and MPICH, but mpi4py loads {launcher.library}: use --hostfile.",
        )
    ranks = sum(count for _, count in shares)
    addresses = {host.address: (resolve_host or resolve)(host.address) for host, _ in shares}
    local = local_addresses()
    choice = choose_interface(filter(None, addresses.values()), local)
    where = summary(launcher, ranks, [(host.title, count) for host, count in shares]) + _loopback_warning(addresses)
    command = CommandLine([str(launcher.path)], where)
    prefixes = _other_prefixes(launcher, shares, {item.address for item in local}, addresses)
    args = _mesh_options(command, launcher, mesh, shares, local) if mesh is not None else []
    args += _add_relay(command, launcher, prefixes, list(mpirun_args)) if prefixes else list(mpirun_args)
    if launcher.family == OPEN_MPI:
        add_open_mpi(command, launcher, ranks, False, choice, args)
        command.arguments += args
        parts = [_open_mpi_part(host, count, program_args, prefixes.get(host.address), args) for host, count in shares]
    else:
        add_mpich(command, choice)
        command.arguments += [*args, "-hosts", _host_list(shares)]
        parts = [_mpich_part(host, count, program_args) for host, count in shares]
    for number, part in enumerate(parts):
        command.arguments += [":", *part] if number else part
    return command


def _mesh_options(
    command: CommandLine, launcher: Launcher, mesh: Mesh, shares: Shares, local: Sequence[LocalAddress]
) -> list[str]:
    """Return the launcher options that confine MPI to the mesh, if the choice of interface does not suffice."""
    from hetero_mpi.launch.hosts.mesh import check_bound, mpi_options

    mesh_address = check_bound(mesh, [host for host, _ in shares], local)
    arguments, variables = mpi_options(mesh, launcher.family, launcher.library.major, mesh_address.interface)
    reason = "the hosts file has a [mesh], which all messages must use"
    if launcher.family == MPICH:
        command.add(reason, **variables)  # -iface is added with the choice of the interface
        return []
    command.reasons.append(f"{' '.join(arguments)}: {reason}")
    return arguments


def prefix_of(host: Host, launcher: Launcher) -> str:
    """Return the directory in which the launcher looks for MPI on a host."""
    if host.prefix is not None:
        return host.prefix
    if launcher.path.parent == Path(sys.prefix) / "bin" and host.python is not None:
        return str(Path(host.python).parent.parent)
    return launcher.prefix


def _open_mpi_part(
    host: Host, count: int, program_args: Sequence[str], prefix: str | None, mpirun_args: Sequence[str]
) -> list[str]:
    # Open MPI applies -x to the ranks of all parts: `env` sets variables for a single part.
    prefix_variable = {} if prefix is None else {"OPAL_PREFIX": prefix}  # the library loads its components from there
    variables = [f"{name}={value}" for name, value in {**prefix_variable, **host.variables()}.items()]
    words = ["--host", f"{host.address}:{count}", "-np", str(count)]
    words += ["--wdir", host.directory] if host.directory is not None else []
    program = [*(["env", *variables] if variables else []), host.executable, "-m", "hetero_mpi", *program_args]
    return [*words, *guard_join(program, mpirun_args)]


def _mpich_part(host: Host, count: int, program_args: Sequence[str]) -> list[str]:
    words = ["-np", str(count)]
    for name, value in host.variables().items():
        words += ["-env", name, value]
    words += ["-wdir", host.directory] if host.directory is not None else []
    return [*words, host.executable, "-m", "hetero_mpi", *program_args]


def _host_list(shares: Shares) -> str:
    """Format MPICH's host list, which it fills in order; consecutive entries of one host are merged."""
    groups = groupby(shares, key=lambda share: share[0].address)
    return ",".join(f"{address}:{sum(count for _, count in group)}" for address, group in groups)


def _other_prefixes(launcher: Launcher, shares: Shares, local: set[str], addresses: dict[str, str]) -> dict[str, str]:
    """Map each host where MPI is installed elsewhere than here to its MPI prefix."""
    prefixes: dict[str, str] = {}
    for host, _ in shares:
        host_prefix, address = prefix_of(host, launcher), addresses[host.address]
        if host_prefix != launcher.prefix and address not in local and not address.startswith("127."):
            prefixes.setdefault(host.address, host_prefix)  # one daemon per host serves all its entries
    return prefixes


def _add_relay(command: CommandLine, launcher: Launcher, prefixes: dict[str, str], mpirun_args: list[str]) -> list[str]:
    """Make the relay script the launch agent; return the user's options without the agent that the script calls."""
    prefix = launcher.prefix
    agent, other_args = launch_agent(launcher.family, mpirun_args, os.environ)
    purpose = "for the launch agent of hosts with different MPI prefixes"
    relay = str(write_cached("launch-agent", ".sh", relay_script(agent, prefix, prefixes), purpose))
    reason = "MPI is installed elsewhere on " + ", ".join(f"{host} ({path})" for host, path in prefixes.items())
    if launcher.family == MPICH:
        command.add(reason, "-launcher", "ssh", "-launcher-exec", relay)
    else:
        # The other hosts' daemons must not start one another, as they lack this agent.
        option, name = launcher.agent_option
        command.add(reason, option, f"{name}_agent", relay, option, f"{name}_no_tree_spawn", "1", "--prefix", prefix)
    return other_args


def relay_script(agent: Sequence[str], prefix: str, prefixes: Mapping[str, str]) -> str:
    """Format the relay script for the local MPI's ``prefix`` and the ``prefixes`` of the other hosts."""
    # Escaped for sed between ``#``: a replacement, a basic regular expression.
    replacements = {host: re.sub(r"[\\&#]", r"\\\g<0>", host_prefix) for host, host_prefix in prefixes.items()}
    pattern = re.sub(r"[\\.\[\]*^$#]", r"\\\g<0>", prefix)
    cases = "\n".join(f"  {shlex.quote(host)}) there={shlex.quote(to)} ;;" for host, to in replacements.items())
    local_prefix, rest = shlex.quote(f"s#{pattern}" + r'\([/:;" ]\)#'), shlex.quote(r"\1#g")
    return _SCRIPT.format(cases=cases, here=local_prefix, rest=rest, agent=shlex.join(agent))


def write_cached(name: str, ending: str, text: str, purpose: str) -> Path:
    """Write a file for the launcher into the cache folder, under a name derived from its content; return its path.

    Raises UserError if the cache folder is not writable.
    """
    folder = cache_folder()
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}{ending}"
    with write_errors(folder, f"set XDG_CACHE_HOME to a directory that you can write to, {purpose}"):
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o755)
    return path
