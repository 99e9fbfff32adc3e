"""A rank that runs out of memory: told with what was predicted, what was used, what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hetero_mpi import units
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.memory import is_out_of_memory
from hetero_mpi.errors import UserError
from hetero_mpi.planning.types.plan import RankMemory


class OutOfMemory(UserError):
    """A rank has no memory left. ``used_bytes``: what it used at most before."""

    def __init__(self, message: str, used_bytes: int) -> None:
        super().__init__(message)
        self.used_bytes = used_bytes


@contextlib.contextmanager
def memory_explained(doing: Callable[[], str], predicted: RankMemory | None, backend: Backend) -> Iterator[None]:
    """A block whose shortage of memory becomes an ``OutOfMemory`` (of this rank alone: who ends the job names rank and host).

    ``doing``: says what ran, such as an action. ``predicted``: of this rank, where it is known.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        peak_bytes = backend.peak_bytes()
        used = f"{units.size(peak_bytes)} were used at the peak"
        if predicted is not None:
            used += f", {units.size(predicted.peak_bytes)} predicted of {units.size(predicted.usable_bytes)} usable"
        first = next(iter(str(error).strip().splitlines()), "no memory left")
        raise OutOfMemory(
            f"ran out of memory in {doing()}: {used} ({first}). Lower [train] micro_batch or [data] sequence_length, "
            f"set [train] recompute = true, or let the planner give this rank less: raise [plan] memory_reserve, or set [cluster] "
            f"memory_bytes to what its ranks really have",
            peak_bytes,
        ) from error
