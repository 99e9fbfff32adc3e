"""The errors a person can act on.

Anything raised as ``UserError`` is printed as plain text, once, without a traceback: it must state the rule, the values
and the next step. Everything else is a defect of this program (or of a machine) and is shown with rank, host and traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right. The message holds the rule, the values and the next step.

    ``exit_code`` is what the process ends with (2, as for a wrong command line, unless a sub-class says otherwise).
    """

    exit_code = 2
