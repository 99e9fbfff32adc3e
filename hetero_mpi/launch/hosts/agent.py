"""Running something on another machine and hearing it: the launch agent (ssh, unless the user names another) and the host agent.

``doctor`` and the supervisor use the same launch agent as the launcher: who can start a job can examine and supervise its hosts. It
starts one program there, the host agent, which answers requests over stdin and stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.comm.ranks.versions import own_source
from hetero_mpi.util.background import lines_of

PROGRAM = "hetero_mpi.launch.host_agent"
MARK = "hetero_mpi agent: "
"""Before every answer, as a login shell may print things of its own."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""A host that is off is given up after ten seconds, not two minutes."""
_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
_PARAMETER_OPTIONS = ("--mca", "-mca", "--prtemca", "-prtemca", "--gmca", "-gmca")
_HYDRA_OPTIONS = ("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec")
_MAX_COMPLAINT_BYTES = 20_000
_HYDRA_KINDS = ("-launcher", "--launcher", "-bootstrap", "--bootstrap")


def launch_agent(
    family: str, mpirun_args: Sequence[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], list[str]]:
    """(the agent that the launcher of this MPI family will use, the launcher's options without those that name it).

    It is taken from the options, else from environment variables, else it is ssh. ``mpirun_args``: the user's options for the launcher.
    """
    agent_text, other_args = _agent_from_options(family, mpirun_args)
    if agent_text is None:
        parameters = [f"{prefix}_MCA_{parameter}" for prefix in ("PRTE", "OMPI") for parameter in _PARAMETERS]
        variables = parameters if family == OPEN_MPI else ["HYDRA_LAUNCHER_EXEC"]
        agent_text = next((environment[name] for name in variables if name in environment), "ssh")
    command = agent_text.split(":")[0]  # of Open MPI's alternatives, the first counts
    return _SSH if command.strip() in ("ssh", "ssh -x") else tuple(shlex.split(command)), other_args


def _agent_from_options(family: str, mpirun_args: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the agent that the launcher's options name, the other options)."""
    agent_text, other_args, remaining = None, list[str](), list(mpirun_args)
    while remaining:
        option, *values = remaining[:3]
        if family == OPEN_MPI and option in _PARAMETER_OPTIONS and values[:1] and values[0] in _PARAMETERS:
            agent_text, remaining = agent_text or "".join(values[1:]) or None, remaining[3:]
        elif family != OPEN_MPI and option in _HYDRA_OPTIONS:
            agent_text, remaining = agent_text or "".join(values[:1]) or None, remaining[2:]
        elif family != OPEN_MPI and option in _HYDRA_KINDS:
            remaining = remaining[2:]
        else:
            other_args.append(remaining.pop(0))
    return agent_text, other_args


def remote_command(
    agent: Sequence[str], host: str, directory: str, variables: Mapping[str, str], *words: str
) -> list[str]:
    """The command line that runs ``words`` on ``host``, in ``directory`` where it exists, with ``variables`` set."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    inner = f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(['env', *assignments, *words])}"
    # The login shell there may be any; sh is everywhere.
    return [*agent, host, shlex.join(["sh", "-c", inner])]


class AgentError(RuntimeError):
    """A host agent did not answer; the text is what it, or the launch agent, printed instead."""


class HostAgent:
    """A host agent (``PROGRAM``) on a host, started here or through the launch agent. Requests and answers are lines of JSON.

    Args:
        name: of the host, as the launch agent takes it.
        directory: to start in, if it exists; "": the path of the one here.
        variables: environment variables beside ``PYTHONPATH``, which is that of this process.
    """

    def __init__(
        self,
        agent: Sequence[str],
        name: str,
        local: bool,
        python: str = sys.executable,
        directory: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        words, directory = [python, "-m", PROGRAM], directory or os.getcwd()
        environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ} | dict(variables or {})
        if not local:
            words = remote_command(agent, name, directory, environment, *words)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        self._process: subprocess.Popen[bytes] | None = None
        """None: it could not be started here, and the complaint says why."""
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, **environment},
                cwd=directory if local and os.path.isdir(directory) else None,
                start_new_session=True,  # Ctrl-C at the terminal is for this process alone
            )
        except OSError as error:
            self._complaints.write(f"{words[0]}: {error.strerror}".encode())
        started = self._process
        self._stdin = cast(IO[bytes], started.stdin) if started is not None else io.BytesIO()
        self._lines = lines_of(cast(IO[bytes], started.stdout) if started is not None else io.BytesIO())

    def __enter__(self) -> HostAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: str, **values: Any) -> None:
        """Send a request whose answer nobody waits for; without effect where the agent has ended."""
        line = json.dumps({"ask": request, "source": own_source(), **values}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._stdin.write(line)
            self._stdin.flush()

    def ask(self, request: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises AgentError: it ends, or does not answer in time."""
        self.send(request, **values)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AgentError(self.complaint(f"no answer within {timeout_s:g} s")) from None
            if line is None:
                self._lines.put(None)
                if self._process is not None:  # what it complains of is whole then
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(max(0.0, deadline - time.monotonic()))
                raise AgentError(self.complaint("it ended without an answer"))
            if line.startswith(MARK.encode()):
                return dict(json.loads(line.decode(errors="replace").removeprefix(MARK)))

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def complaint(self, default: str) -> str:
        """The last line that the launch agent or the host agent has written to stderr; else ``default``."""
        self._complaints.seek(0)
        text = self._complaints.read(_MAX_COMPLAINT_BYTES).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), default)
        return "".join(letter for letter in last if letter.isprintable())[:300]

    def close(self) -> None:
        """End the process that was started here. What it has printed is left to its reader: others may hold that pipe open."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._complaints.close()
