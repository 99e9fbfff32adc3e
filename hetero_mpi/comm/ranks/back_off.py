"""Back-off for polling: how long to yield and to sleep between two looks, so that polling takes no core from a rank that computes.

A polling rank may share its core with the very rank it waits for. So it first yields the core after every look, which costs nothing
where nobody else wants it. Later it sleeps between looks, longer and longer.
"""

from __future__ import annotations

import os
import time

YIELD_S = 200e-6
"""After an event the next looks follow at once, with a yield between them, for this long."""
SLEEP_SHARE = 0.1
SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3
"""After that it sleeps between looks for a share of the time since the event, within these limits. So an event is noticed a tenth
late at most, and long waits cost nothing. (Linux sleeps 50 us longer than asked.)
"""


class Pause:
    """The pause between two looks."""

    def __init__(self, longest_s: float = LONGEST_SLEEP_S, yield_s: float = YIELD_S) -> None:
        self._longest_s, self._yield_s = longest_s, yield_s
        self._last_event_s = time.perf_counter()

    def reset(self) -> None:
        self._last_event_s = time.perf_counter()

    def rest(self) -> None:
        """Yield, or sleep as long as is due."""
        quiet_s = time.perf_counter() - self._last_event_s
        if quiet_s < self._yield_s:
            os.sched_yield()
        else:
            time.sleep(min(max(SLEEP_SHARE * quiet_s, SHORTEST_SLEEP_S), self._longest_s))
