"""Records that nothing can be learnt from: so many are skipped, and more end the job."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_mpi.data.shapes import SHAPES
from hetero_mpi.errors import UserError

SHOWN = 5
"""Bad records that one error names; a wrong file would otherwise fill the terminal."""
MOST_SHOWN = 100
"""The same where many may be skipped, all of which are named."""


class BadRecord(Exception):
    """What is wrong with one record, in words; ``rest``: all that follows in its file cannot be read, so it is never skipped."""

    def __init__(self, problem: str, rest: bool = False) -> None:
        super().__init__(problem)
        self.rest = rest


@dataclass
class BadRecords:
    """The bad records of a job, in the order of the files; ``allowed`` of them are skipped (``data.skip_bad``)."""

    allowed: int = 0
    problems: list[str] = field(default_factory=list)
    """``data/a.jsonl, line 7: must be a JSON object; it is text``."""
    cut: list[str] = field(default_factory=list)
    """Places behind which the rest of a file cannot be read."""

    def add(self, source: str, problem: BadRecord) -> None:
        if self.problems and self.problems[-1].startswith(f"{source}: "):
            return  # the other record of a pair
        self.problems.append(f"{source}: {problem}")
        self.cut.extend([source] if problem.rest else [])

    def check(self, key: str) -> None:
        """Raise UserError, naming the first ones and the job's ``key``, where there are more than may be skipped."""
        count = len(self.problems)
        if count <= self.allowed and not self.cut:
            return
        limit = f" (data.skip_bad = {self.allowed:,} are skipped at most)" if self.allowed else ""
        if self.cut and count <= self.allowed:
            limit = f" ({self.cut[0]}: what follows there cannot be read, and is never skipped)"
        shown = min(max(SHOWN, self.allowed + 1), MOST_SHOWN)
        more = [f"  and {count - shown:,} more"] if count > shown else []
        named = [f"  {problem}" for problem in self.problems[:shown]]
        title = f"{key} must hold records that can be learnt from; {count:,} cannot{limit}:"
        raise UserError("\n".join([title, *named, *more, SHAPES]))

    def lines(self) -> list[str]:
        """What was skipped, for a person."""
        if not self.problems:
            return []
        count = f"{len(self.problems):,} bad record{'s' if len(self.problems) > 1 else ''}"
        shown, more = self.problems[:MOST_SHOWN], len(self.problems) - MOST_SHOWN
        named = [*(f"  {problem}" for problem in shown), *([f"  and {more:,} more"] if more > 0 else [])]
        return [f"{count} skipped (data.skip_bad = {self.allowed:,}):", *named]
