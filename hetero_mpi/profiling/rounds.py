"""Repetitions in turns: each round runs layers once in every way, with every number of sequences that is timed.

What else a machine does for a moment, and how warm it is, then falls on all of them alike, and not on one point of one curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.profiling.timings import TimingSamples

SHARE_S = 0.3
"""So long all repetitions of one way with one number of sequences take at most, after the first. A first one of half of it is long
enough to count, on devices that need not warm up."""
LONGEST_S = 5.0
"""Numbers of sequences but the smallest are left out where one repetition would take longer. Calls are nothing beside work there,
so that larger micro-batches would gain nothing."""


@dataclass(frozen=True)
class Way:
    """One way to run layers: whole or as a member of a group, with recompute, with a split backward."""

    run: Callable[[int, TimingSamples], None]
    """One repetition with so many sequences."""
    forget: Callable[[], None]
    """Gives up what a repetition that failed for want of memory has left."""
    rows: tuple[int, ...]
    """Sequences per micro-batch to time, increasing."""
    samples: TimingSamples
    repeats: int
    ends: bool = False
    """Time only the smallest number and the largest that takes no longer than ``SHARE_S``: what is close to another way needs no
    more."""


@dataclass
class _Lap:
    way: Way
    rows: int
    pass_s: float
    """Seconds of one repetition."""
    done: int = 0
    spent_s: float = 0.0

    def goes_on(self) -> bool:
        wanted = self.done < self.way.repeats and self.spent_s + self.pass_s <= SHARE_S
        return self.done == 0 or wanted

    def count(self, fits: bool) -> None:
        """One more repetition was begun. ``fits``: it had memory enough; else it is the last."""
        self.done = self.done + 1 if fits else self.way.repeats
        self.spent_s += self.pass_s


class TimingRounds:
    """Times layers on one device.

    Args:
        clock: seconds.
        warms_up: must the device run a shape once before it runs it as fast as later, however long that takes?
    """

    def __init__(self, clock: Callable[[], float], warms_up: bool) -> None:
        self._clock, self._warms_up = clock, warms_up

    def time(self, ways: Sequence[Way]) -> None:
        """Fill the samples of ``ways``. Numbers of sequences for which the device has no memory are left out.

        :raises RuntimeError, MemoryError: there is none for the smallest.
        """
        laps = [lap for way in ways for lap in self._begun(way)]
        while laps := [lap for lap in laps if lap.goes_on()]:
            for lap in laps:
                lap.count(self._seconds(lap.way, lap.rows, lap.way.samples) is not None)

    def _begun(self, way: Way) -> list[_Lap]:
        """One lap for each number of sequences that is timed, after a repetition that warms up."""
        laps: list[_Lap] = []
        for rows in way.rows:
            if laps:
                expected_s = laps[0].pass_s * rows / laps[0].rows
                later = [more for more in way.rows if more > rows and expected_s / rows * more <= SHARE_S]
                if expected_s > (SHARE_S if way.ends else LONGEST_S):
                    break
                if way.ends and later:
                    continue
            unused = TimingSamples()
            pass_s = self._seconds(way, rows, unused)
            if pass_s is None:
                break
            counts = pass_s > SHARE_S / 2 and not self._warms_up
            if counts:
                way.samples.update(unused)
            elif not laps:  # what came first of all was slower than the others will be
                pass_s = self._seconds(way, rows, way.samples) or pass_s
            laps.append(_Lap(way, rows, pass_s))
            if counts or len(laps) == 1:
                laps[-1].count(True)
        return laps

    def _seconds(self, way: Way, rows: int, samples: TimingSamples) -> float | None:
        """Of one repetition; None where memory was short for more than the smallest number of sequences."""
        begin = self._clock()
        try:
            way.run(rows, samples)
            return self._clock() - begin
        except (RuntimeError, MemoryError) as error:
            if rows == way.rows[0] or not is_out_of_memory(error):
                raise
        way.forget()  # here nothing refers to what the failed repetition had got any more
        return None
