"""Pipelines that need not be alike: from crews that a search over columns found, by way of better crews, to plans.

What is estimated (``crews``) is then cut and simulated (``cutting``), and micro-batches move between pipelines until the slowest
is as fast as can be (``together``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_mpi.planning.several.crews import Crews, Roster
from hetero_mpi.planning.several.cutting import Cutter, Run
from hetero_mpi.planning.several.fleet import Fleet
from hetero_mpi.planning.several.pace import Crew, Pace
from hetero_mpi.planning.several.together import dealt, plan_of, sums_of, together_s
from hetero_mpi.planning.types.plan import Plan

FEWEST_ITEMS = 4
MOST_RANKS = 32
"""With more ranks the search would have to look at more crews than there is time for."""
LOOKS = 40_000
"""Stages that may be estimated, in all."""
DEAR = 0.35
"""Pipelines whose sums last longer than this share of their step, one item after another, had better be cut alike."""
EFFORT = 300_000
"""Forwards and backwards that may be simulated, in all."""
BUILT = 2
"""Rosters that are cut and simulated."""
DEALT = 20


def unlike(fleet: Fleet, starts: Sequence[Sequence[Crew]], fewest: int) -> tuple[float, Plan] | None:
    """The best plan found from these crews (step time, plan), ``fewest`` pipelines or more; None: none fits."""
    if fleet.items < FEWEST_ITEMS or len(fleet.devices) > MOST_RANKS or not starts:
        return None
    pace = Pace(fleet)
    crews = Crews(pace, LOOKS)
    rosters = sorted((crews.of(start) for start in starts if _cheap(pace, start)), key=lambda one: one.step_s)
    improved = [crews.improved(one) for one in rosters if one.step_s < np.inf]
    rosters = sorted(improved, key=lambda one: one.step_s)
    cutter = Cutter(fleet, EFFORT)
    best: tuple[float, list[Run]] | None = None
    for roster in rosters[:BUILT]:
        runs = _built(roster, pace, cutter)
        if runs is not None and fewest <= len(runs) <= fleet.request.max_pipelines:
            seconds = together_s(runs, cutter)
            if best is None or seconds < best[0]:
                best = seconds, runs
    return None if best is None else (best[0], plan_of(best[1], cutter))


def _cheap(pace: Pace, crews: Sequence[Crew]) -> bool:
    """Are sums short beside the step, even one after another?"""
    block, embedding, head = pace.sums_s(crews)
    fluid_s = pace.fleet.request.global_batch / float(pace.fleet.speed.sum())
    return block * pace.blocks + embedding + head <= DEAR * fluid_s


def _built(roster: Roster, pace: Pace, cutter: Cutter) -> list[Run] | None:
    sums = pace.sums_s(roster.crews)
    counts = np.floor(pace.counts(roster.crews, roster.step_s, sums)).astype(int)
    while counts.sum() > pace.batch:
        counts[int(counts.argmax())] -= 1
    crews = [crew for crew, count in zip(roster.crews, counts.tolist(), strict=True) if count > 0]
    if counts.sum() < pace.batch or not crews:
        return None
    runs = dealt(crews, counts[counts > 0].tolist(), cutter, sums_of(pace, crews), DEALT)
    return runs if all(run.cuts for run in runs) else None
