"""Ends a job in which a rank dies before it has joined the others, under a launcher that lets ranks die (``--with-ft ulfm``).

Before MPI is initialised nobody can outlive a death: the launcher does not report it, and the other ranks wait inside MPI's start
for ever. So each rank is started by a shell. The shell forks a child that reads from a pipe, and then becomes the rank, which alone
holds the pipe's other end. A line from the pipe says that the rank has joined. An end of the pipe without a line is a death: the
child reports it and kills the launcher, or its daemon on that host, which ends the job everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_mpi.comm.ranks.library import JOINED_VARIABLE

_SCRIPT = (
    'd=$(mktemp -d) && mkfifo "$d/p" || exit; '
    '(read -r joined < "$d/p"; [ "$joined" ] || { echo "rank $OMPI_COMM_WORLD_RANK on $(uname -n) ended before it had joined '
    'the other ranks, so all are ended: look above for its last words, and at that host for its environment" >&2; '
    "sleep 2; kill $PPID; }) & "  # a daemon passes the words on before it ends
    f'exec 9> "$d/p"; rm -r "$d"; export {JOINED_VARIABLE}=9; exec "$@"'
)


def ending_all(program: Sequence[str], mpirun_args: Sequence[str]) -> list[str]:
    """The command line ``program`` of a rank, changed so that its death before joining ends the job.

    ``mpirun_args``: the launcher's options. Without fault tolerance the launcher ends the job by itself, and ``program`` is
    returned unchanged.
    """
    return ["sh", "-c", _SCRIPT, "sh", *program] if "--with-ft" in mpirun_args else list(program)
