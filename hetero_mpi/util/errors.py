"""User errors and exit codes.

A ``UserError`` is printed as plain text, once, without a traceback: it must state the rule, the values and the next step. Any
other exception is a bug (or a hardware fault) and is shown with rank, host and traceback.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the program, explained in ``docs/recovery.md``. A signal n that ends it at once results in 128 + n."""

    DONE = 0
    FAILED = 1
    """An exception in a rank; in ``doctor``: a run would, or may, fail."""
    USER_ERROR = 2
    """An error that only the user can fix."""
    HUNG = 74
    """The watchdog ended the job."""
    GIVEN_UP = 75
    """``launch --elastic`` does not restart the job."""
    STOPPED = 76
    """Requested by a signal: the step was finished and a checkpoint written."""


ABORT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job at once after an earlier request to stop. Others have no further effect: SLURM, or a closing terminal,
may send them after the user's own."""


@dataclass(frozen=True)
class Problem:
    """One of several faults of an error.

    Attributes:
        kind: As in ``UserError``; ``job.TABLE.KEY`` for a key of the job.
        text: The place, the values and the rule.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class UserError(ValueError):
    """An error that the user can fix.

    Args:
        kind: ``subject.fault``, such as ``records.malformed``, for comparison by programs and tests; texts may be rewritten.
        text: The rule, the values and the next step.
        exit_code: Exit code of the process; default: that of a wrong command line.
        problems: The faults, if there are several.
        values: Details for programs.
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
