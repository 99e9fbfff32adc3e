"""The launch agent: the program that runs a command on another machine, ssh unless the user says otherwise.

The supervisor reaches hosts through the one that the launcher uses, so that whoever can start a job can supervise it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hetero_mpi.comm.library import OPEN_MPI

_SSH = ("ssh", "-o", "BatchMode=yes")
_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
_PARAMETER_OPTIONS = ("--mca", "-mca", "--prtemca", "-prtemca", "--gmca", "-gmca")
_HYDRA_OPTIONS = ("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec")
_HYDRA_KINDS = ("-launcher", "--launcher", "-bootstrap", "--bootstrap")


def launch_agent(family: str, given: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The agent that the launcher of this MPI family will use: from its options, its environment variables, or ssh.

    Args:
        given: the user's options for the launcher.
    """
    named = _open_mpi(given, environment) if family == OPEN_MPI else _mpich(given, environment)
    if named is None or named.split(":")[0].strip() in ("ssh", "ssh -x"):
        return _SSH
    # Open MPI takes alternatives, separated by colons, and uses the first that is there.
    return tuple(shlex.split(named.split(":")[0]))


def _open_mpi(given: Sequence[str], environment: Mapping[str, str]) -> str | None:
    for option, parameter, value in zip(given, given[1:], given[2:], strict=False):
        if option in _PARAMETER_OPTIONS and parameter in _PARAMETERS:
            return value
    names = [f"{prefix}_MCA_{parameter}" for prefix in ("PRTE", "OMPI") for parameter in _PARAMETERS]
    return next((environment[name] for name in names if name in environment), None)


def _mpich(given: Sequence[str], environment: Mapping[str, str]) -> str | None:
    for option, value in pairwise(given):
        if option in _HYDRA_OPTIONS:
            return value
    return environment.get("HYDRA_LAUNCHER_EXEC")


def remote_command(
    agent: Sequence[str], host: str, directory: str, variables: Mapping[str, str], *words: str
) -> list[str]:
    """The words that run a command on ``host``, in ``directory`` where it is there, with ``variables`` set."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    inner = f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(['env', *assignments, *words])}"
    # The login shell there may be any; sh is everywhere.
    return [*agent, host, shlex.join(["sh", "-c", inner])]


def without_agent(family: str, given: Sequence[str]) -> list[str]:
    """The user's options for the launcher, less those that name a launch agent."""
    kept, rest = [], list(given)
    while rest:
        if family == OPEN_MPI and rest[0] in _PARAMETER_OPTIONS and rest[1:2] and rest[1] in _PARAMETERS:
            rest = rest[3:]
        elif family != OPEN_MPI and rest[0] in (*_HYDRA_OPTIONS, *_HYDRA_KINDS):
            rest = rest[2:]
        else:
            kept.append(rest.pop(0))
    return kept
