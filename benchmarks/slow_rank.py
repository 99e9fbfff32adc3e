"""Makes one rank of a job slower than the machine is: its process gets a share of a core's time only (Linux control groups, root).

Every period of 6 ms the process may compute for so long, then it waits for the next: whatever it computes, waits for or polls
takes as many times longer as it would on a slower core.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 6_000
_ROOT = Path("/sys/fs/cgroup")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
"""Where Open MPI, MPICH and torchrun say which rank a process is."""


def why_not() -> str | None:
    """The reason why no rank can be slowed down here; None: it can."""
    if os.geteuid() != 0:
        return "slowing a rank down needs root (a control group)"
    if not _parent().exists() or not os.access(_parent(), os.W_OK):
        return "no control group for processor time can be made here"
    return None


@contextmanager
def slowed(rank: int, times: float) -> Iterator[list[str]]:
    """What to put before the command of every rank, so that ``rank`` is ``times`` slower while the block lasts."""
    group = _parent() / f"slow-rank-{os.getpid()}"
    group.mkdir()
    quota = round(PERIOD_US / times)
    try:
        if _is_version_2():
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        own = "".join(f"${{{name}:-" for name in _RANKS) + "}" * len(_RANKS)
        # A file, since torchrun replaces $$ in the words of a command.
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
            script.write(f'set -e\nif [ "{own}" = {rank} ]; then echo $$ > {group}/cgroup.procs; fi\nexec "$@"\n')
            script.flush()
            yield ["sh", script.name]
    finally:
        group.rmdir()


def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _parent() -> Path:
    return _ROOT if _is_version_2() else _ROOT / "cpu"
