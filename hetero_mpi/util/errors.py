"""The errors a person can act on, and the exit codes.

Anything raised as ``UserError`` is printed as plain text, once, without a traceback: it must state the rule, the values
and the next step. Everything else is a defect of this program (or of a machine) and is shown with rank, host and traceback.
"""

from __future__ import annotations

import signal
from enum import IntEnum


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


AT_ONCE = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job at once if it has been asked to end before. Others have no further effect: SLURM, or a terminal that
closes, may send them after a user's own.
"""


class UserError(ValueError):
    """Something the user can put right. The message holds the rule, the values and the next step.

    ``exit_code`` is what the process ends with (2, as for a wrong command line, unless a sub-class says otherwise).
    """

    exit_code: int = ExitCode.USER_ERROR
