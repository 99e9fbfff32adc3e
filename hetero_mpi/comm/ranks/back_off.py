"""How to poll for something without taking a core from those who compute.

Who polls may be alone on a core, or may share it with the very rank whose message it waits for. So it gives up the core after
every look for a while (free, where nobody wants it), and then sleeps between looks, the longer nothing happens, the longer.
"""

from __future__ import annotations

import os
import time

YIELD_S = 200e-6
"""Look again at once, after yielding the core, for this long after something has happened ..."""
SLEEP_SHARE = 0.1
SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3
"""... then sleep between looks for this share of the time since then, within these limits: what comes is noticed at most
a tenth late, and long waits cost nothing. (Linux lets a sleeper sleep 50 us more than asked.)"""


class Pause:
    """What to do between two looks."""

    def __init__(self, longest_s: float = LONGEST_SLEEP_S, yield_s: float = YIELD_S) -> None:
        self._longest_s, self._yield_s = longest_s, yield_s
        self._last_event_s = time.perf_counter()

    def reset(self) -> None:
        self._last_event_s = time.perf_counter()

    def rest(self) -> None:
        """Yield or sleep, as long as is fit."""
        quiet_s = time.perf_counter() - self._last_event_s
        if quiet_s < self._yield_s:
            os.sched_yield()
        else:
            time.sleep(min(max(SLEEP_SHARE * quiet_s, SHORTEST_SLEEP_S), self._longest_s))
