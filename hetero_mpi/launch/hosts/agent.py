"""Run commands on other hosts through the launch agent (by default ssh), and talk to host agents.

``doctor`` and the supervisor use the launcher's launch agent, so a user who can start a job can also examine and supervise its
hosts. They start one program there, the host agent, which answers requests over stdin and stdout.
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
"""Prefix of every answer, because a login shell may print lines too."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""This ssh gives up on an unreachable host after ten seconds instead of two minutes."""
_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
_PARAMETER_OPTIONS = ("--mca", "-mca", "--prtemca", "-prtemca", "--gmca", "-gmca")
_HYDRA_OPTIONS = ("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec")
_MAX_COMPLAINT_BYTES = 20_000
_HYDRA_KINDS = ("-launcher", "--launcher", "-bootstrap", "--bootstrap")


def launch_agent(
    family: str, mpirun_args: Sequence[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return (launch agent of this MPI family's launcher, launcher options without those that select an agent).

    Options take precedence over environment variables; the default is ssh. ``mpirun_args``: the user's launcher options.
    """
    agent_text, other_args = _agent_from_options(family, mpirun_args)
    if agent_text is None:
        parameters = [f"{prefix}_MCA_{parameter}" for prefix in ("PRTE", "OMPI") for parameter in _PARAMETERS]
        variables = parameters if family == OPEN_MPI else ["HYDRA_LAUNCHER_EXEC"]
        agent_text = next((environment[name] for name in variables if name in environment), "ssh")
    command = agent_text.split(":")[0]  # of Open MPI's alternatives, the first counts
    return _SSH if command.strip() in ("ssh", "ssh -x") else tuple(shlex.split(command)), other_args


def _agent_from_options(family: str, mpirun_args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (launch agent selected by the launcher's options, the other options)."""
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
    """Build the command that runs ``words`` on ``host`` with ``variables`` set, in ``directory`` if it exists there."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    inner = f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(['env', *assignments, *words])}"
    # The remote login shell may be any; sh exists everywhere.
    return [*agent, host, shlex.join(["sh", "-c", inner])]


class AgentError(RuntimeError):
    """A host agent did not answer; the message is the output of the host agent or the launch agent."""


class HostAgent:
    """A host agent (``PROGRAM``), started locally or through the launch agent. Requests and answers are JSON lines.

    Args:
        name: Name of the host for the launch agent.
        directory: Working directory, if it exists on the host; "" for the local one's path.
        variables: Environment variables in addition to ``PYTHONPATH``, which is inherited.
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
        """None if the start failed locally; ``complaint`` then returns the reason."""
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, **environment},
                cwd=directory if local and os.path.isdir(directory) else None,
                start_new_session=True,  # shields the agent from Ctrl-C at the terminal
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
        """Send a request without waiting for the answer; does nothing if the agent has ended."""
        line = json.dumps({"ask": request, "source": own_source(), **values}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._stdin.write(line)
            self._stdin.flush()

    def ask(self, request: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises AgentError if the agent ends or does not answer in time."""
        self.send(request, **values)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AgentError(self.complaint(f"no answer within {timeout_s:g} s")) from None
            if line is None:
                self._lines.put(None)
                if self._process is not None:  # its complaint is complete then
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(max(0.0, deadline - time.monotonic()))
                raise AgentError(self.complaint("it ended without an answer"))
            if line.startswith(MARK.encode()):
                return dict(json.loads(line.decode(errors="replace").removeprefix(MARK)))

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def complaint(self, default: str) -> str:
        """Return the last line that the launch agent or the host agent wrote to stderr, or ``default``."""
        self._complaints.seek(0)
        text = self._complaints.read(_MAX_COMPLAINT_BYTES).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), default)
        return "".join(letter for letter in last if letter.isprintable())[:300]

    def close(self) -> None:
        """End the local process. Its output pipe is left to the reading thread, as other processes may keep it open."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._complaints.close()
