"""The writes of a start into the run directory, held back until the start is accepted: one that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from hetero_mpi.report.run_files.logs import write_waiting_logs

Write = Callable[[], object]


class Pending:
    """The writes of this rank, in their order."""

    def __init__(self) -> None:
        self._writes: list[Write] = []

    def add(self, write: Write) -> None:
        self._writes.append(write)

    def add_first(self, write: Write) -> None:
        """Add a write that makes room for the others."""
        self._writes.insert(0, write)

    def carry_out(self) -> None:
        """The start is accepted: carry out all writes, once. Raises UserError: as they do."""
        write_waiting_logs()
        writes, self._writes = self._writes, []
        for write in writes:
            write()
