"""Ranks that die before they have joined the others, in a job whose launcher lets ranks die (``--with-ft ulfm``).

Until MPI is initialised nobody outlives anybody: the launcher says nothing of such a death, and the other ranks wait inside
MPI's start for ever. So a shell stands at every rank's begin, on every host. It leaves a child behind that reads from a pipe,
and becomes the rank, which alone holds the other end. A word from there says that the rank has joined; an end without a word is
a death, which the child tells. Then it ends the launcher, or its daemon on that host, which ends the job everywhere.
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
    """The words of ``program``, a rank's command, such that its death before it has joined the others ends the job.

    ``mpirun_args``: the launcher's options. Without fault tolerance it ends the job by itself, and ``program`` stays as it is.
    """
    return ["sh", "-c", _SCRIPT, "sh", *program] if "--with-ft" in mpirun_args else list(program)
