"""User errors and exit codes.

A ``UserError`` is printed once, as plain text without a traceback, so it must state the rule, the values and the next step. Any
other exception is a bug (or a hardware fault) and is printed with rank, host and traceback.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the program (see ``docs/recovery.md``). If signal n ends the program at once, the exit code is 128 + n."""

    DONE = 0
    FAILED = 1
    """A rank raised an exception or, for ``doctor``, a run would fail or might fail."""
    USER_ERROR = 2
    """An error that only the user can fix."""
    HUNG = 74
    """The watchdog ended the job."""
    GIVEN_UP = 75
    """``launch --elastic`` decided not to restart the job."""
    STOPPED = 76
    """A signal requested the end: the run finished the step and wrote a checkpoint."""


ABORT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job at once if it has already been asked to stop. Other signals then have no effect, because SLURM or a
closing terminal may send them after the user's own signal."""


@dataclass(frozen=True)
class Problem:
    """One of several problems that a single ``UserError`` reports.

    Attributes:
        kind: As in ``UserError``, or ``job.TABLE.KEY`` for a key of the job.
        text: The location, the values and the rule.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class UserError(ValueError):
    """An error that the user can fix.

    Args:
        kind: Stable identifier ``subject.fault``, such as ``records.malformed``, for programs and tests; ``text`` may change.
        text: The rule, the values and the next step.
        exit_code: Exit code of the process. The default is the one for a wrong command line.
        problems: The individual problems, if there are several.
        values: Details for programs that handle the error.
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
        return frozenset({self.kind, *(problem.kind for problem in self.problems)})


def require(is_valid: bool, kind: str, name: str, expected: str, value: object) -> None:
    """Raise a UserError of this kind about the argument ``name`` of a Python program unless its value is valid."""
    if not is_valid:
        raise UserError(kind, f"{name}: must be {expected}, not {type(value).__name__}")
