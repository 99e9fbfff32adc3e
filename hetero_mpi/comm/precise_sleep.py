"""Sleeping until a moment, more precisely than the operating system wakes a process.

A sleeping process wakes about 0.1 ms late (timer slack, and the way back onto a core), nearly always by the same amount. That
amount is measured once and subtracted. Where a core is free, the rest is spent polling the clock. Where ranks share cores there is
no polling, as it would take time from a rank that computes.
"""

from __future__ import annotations

import statistics
import time

_TRIALS, _TRIAL_S = 9, 1e-3
_MOST_S = 5e-4
"""Upper limit of the measured oversleep, seconds: on a busy machine a longer one is an accident."""


class Sleeper:
    """Waits until moments of ``time.perf_counter``. ``spare_core``: the last fraction of a millisecond may be spent polling."""

    def __init__(self, spare_core: bool) -> None:
        self.spare_core = spare_core
        self.late_s = min(_MOST_S, statistics.median(_oversleep_s() for _ in range(_TRIALS)))
        """How much later than asked a sleep ends here."""

    def until(self, moment_s: float) -> None:
        """Return at ``moment_s``; at once where that has passed."""
        # A core's spinner begins early, so that an accidentally late waking is still in time.
        early_s = self.late_s * (1.5 if self.spare_core else 1.0)
        left_s = moment_s - time.perf_counter() - early_s
        if left_s > 0:
            time.sleep(left_s)
        while self.spare_core and time.perf_counter() < moment_s:
            pass


def _oversleep_s() -> float:
    begin = time.perf_counter()
    time.sleep(_TRIAL_S)
    return time.perf_counter() - begin - _TRIAL_S
