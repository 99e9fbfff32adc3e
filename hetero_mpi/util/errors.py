"""The errors a person can act on, and the exit codes.

Anything raised as ``UserError`` is printed as plain text, once, without a traceback: it must state the rule, the values
and the next step. Everything else is a defect of this program (or of a machine) and is shown with rank, host and traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the program; ``docs/recovery.md`` explains each. A signal n that ends it at once makes it 128 + n."""

    DONE = 0
    FAILED = 1
    """An exception in a rank; of ``doctor``: a run would, or may, fail."""
    USER_ERROR = 2
    """Something that only the user can put right."""
    HUNG = 74
    """The watchdog ended the job."""
    GIVEN_UP = 75
    """``launch --elastic`` does not start the job again."""
    STOPPED = 76
    """A signal asked for it: the step was finished and a checkpoint written."""


ABORT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job at once if it has been asked to end before. Others have no further effect: SLURM, or a terminal that
closes, may send them after a user's own.
"""


@dataclass(frozen=True)
class Problem:
    """One of several faults that an error names.

    Attributes:
        kind: as of ``UserError``; of a key of the job ``job.TABLE.KEY``.
        text: the place, the values and the rule.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class UserError(ValueError):
    """Something the user can put right.

    Args:
        kind: ``subject.fault``, such as ``records.malformed``, which programs and tests compare; texts may be rewritten.
        text: the rule, the values and the next step.
        exit_code: what the process ends with, as for a wrong command line unless it is given.
        problems: the faults, of an error that names several.
        values: what a program may want to know of the fault.
    """

    exit_code: int = ExitCode.USER_ERROR

    def __init__(
        self,
        kind: str,
        text: str,
        *,
        exit_code: int = ExitCode.USER_ERROR,
        problems: Sequence[Problem] = (),
        **values: Any,
    ) -> None:
        super().__init__(text)
        self.kind, self.exit_code, self.problems, self.values = kind, int(exit_code), tuple(problems), values

    @property
    def kinds(self) -> frozenset[str]:
        """The error's kind and those of its problems."""
        return frozenset({self.kind, *(problem.kind for problem in self.problems)})
