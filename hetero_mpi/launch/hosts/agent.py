"""The launch agent: the program that runs a command on another machine; ssh, unless the user names another.

The supervisor uses the same agent as the launcher, so that everyone who can start a job can supervise it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from hetero_mpi.comm.ranks.library import OPEN_MPI

_SSH = ("ssh", "-o", "BatchMode=yes")
_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
_PARAMETER_OPTIONS = ("--mca", "-mca", "--prtemca", "-prtemca", "--gmca", "-gmca")
_HYDRA_OPTIONS = ("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec")
_COMPLAINT_BYTES = 20_000
_HYDRA_KINDS = ("-launcher", "--launcher", "-bootstrap", "--bootstrap")


def launch_agent(
    family: str, given: Sequence[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], list[str]]:
    """(the agent that the launcher of this MPI family will use, the launcher's options without those that name it).

    It is taken from the options, else from environment variables, else it is ssh. ``given``: the user's options for the launcher.
    """
    named, kept = _named(family, given)
    if named is None:
        parameters = [f"{prefix}_MCA_{parameter}" for prefix in ("PRTE", "OMPI") for parameter in _PARAMETERS]
        variables = parameters if family == OPEN_MPI else ["HYDRA_LAUNCHER_EXEC"]
        named = next((environment[name] for name in variables if name in environment), "ssh")
    first = named.split(":")[0]  # Open MPI takes alternatives, separated by colons, and uses the first that is there
    return _SSH if first.strip() in ("ssh", "ssh -x") else tuple(shlex.split(first)), kept


def _named(family: str, given: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the agent that the launcher's options name, the other options)."""
    named, kept, rest = None, list[str](), list(given)
    while rest:
        option, *values = rest[:3]
        if family == OPEN_MPI and option in _PARAMETER_OPTIONS and values[:1] and values[0] in _PARAMETERS:
            named, rest = named or "".join(values[1:]) or None, rest[3:]
        elif family != OPEN_MPI and option in _HYDRA_OPTIONS:
            named, rest = named or "".join(values[:1]) or None, rest[2:]
        elif family != OPEN_MPI and option in _HYDRA_KINDS:
            rest = rest[2:]
        else:
            kept.append(rest.pop(0))
    return named, kept


def remote_command(
    agent: Sequence[str], host: str, directory: str, variables: Mapping[str, str], *words: str
) -> list[str]:
    """The command line that runs ``words`` on ``host``, in ``directory`` where it exists, with ``variables`` set."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    inner = f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(['env', *assignments, *words])}"
    # The login shell there may be any; sh is everywhere.
    return [*agent, host, shlex.join(["sh", "-c", inner])]


class Helper:
    """A Python module of this package running on a host, here or through the launch agent, with a pipe to its stdin.

    Args:
        name: of the host, as the agent takes it.
        directory: to start in, if it exists; "": the path of the one here.
        variables: environment variables beside ``PYTHONPATH``, which is that of this process.
        stdout: as ``subprocess.Popen`` takes it.
    """

    def __init__(
        self,
        agent: Sequence[str],
        name: str,
        local: bool,
        python: str,
        module: str,
        directory: str = "",
        variables: Mapping[str, str] | None = None,
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        words, directory = [python, "-m", module], directory or os.getcwd()
        own = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ} | dict(variables or {})
        if not local:
            words = remote_command(agent, name, directory, own, *words)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        self.process: subprocess.Popen[bytes] | None = None
        """None: it could not be started here, and the complaint says why."""
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=self._complaints,
                env={**os.environ, **own},
                cwd=directory if local and os.path.isdir(directory) else None,
                start_new_session=True,  # Ctrl-C at the terminal is for this process alone
            )
        except OSError as error:
            self._complaints.write(f"{words[0]}: {error.strerror}".encode())

    def write(self, line: bytes) -> None:
        """Write a line to its stdin; without effect where it has ended."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(line)
                self.process.stdin.flush()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end. ``complaint`` has nothing to tell afterwards."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def complaint(self, otherwise: str) -> str:
        """The last line that the agent or the process has written to stderr; else ``otherwise``."""
        self._complaints.seek(0)
        text = self._complaints.read(_COMPLAINT_BYTES).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), otherwise)
        return "".join(letter for letter in last if letter.isprintable())[:300]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in filter(None, (self.process.stdin, self.process.stdout)):
                with contextlib.suppress(OSError):
                    stream.close()
        self._complaints.close()
