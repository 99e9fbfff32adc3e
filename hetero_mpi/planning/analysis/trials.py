"""How long the trial of a plan may be, and what the report of a plan says that was tried. Pure; ``runtime.trial`` tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero_mpi import units
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.plan import Alone, IdleRank, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile

SHARE = 0.05
"""The trial of a plan takes at most this share of what the run is predicted to take ..."""
LONG_S, LONG_SHARE = 60.0, 0.15
"""... or this one, where the run takes longer than so many seconds; so much also where another plan is looked for and tried."""
MOST_COUNTED, LEAST_COUNTED = 5, 1
"""Steps that count. Before them come the rehearsal and a first one of all ranks together."""
_UNCOUNTED = 2
_PARAMETERS_PER_S = 1e8
"""How fast weights are made up, roughly: 8 billion in 80 s."""
LEAST_GAIN = 0.03
"""Another plan is tried where it would be faster by this share: predictions are not better than that."""
_NOT_FOUND = "by the times of the trial, the search found no faster plan with it"


@dataclass(frozen=True)
class Allowance:
    """How long a trial may be."""

    counted: int
    """Steps that count; 0: the plan is not tried."""
    seconds: float
    """Length of a trial, about."""
    most_s: float = math.inf
    """No other plan is looked for and tried where that would end later than so many seconds after the first one's trial began."""


def allowance(report: PlanReport, profile: ClusterProfile, steps: int, wanted: bool) -> Allowance:
    """``steps``: those that the run takes. ``wanted``: whatever it takes."""
    run_s = steps * report.predicted_step_s
    seconds = partial(trial_s, report, profile)
    for share, least_s in ((SHARE, 0.0), (LONG_SHARE, LONG_S)):
        for counted in range(MOST_COUNTED, LEAST_COUNTED - 1, -1):
            if run_s >= least_s and seconds(counted) <= share * run_s:
                return Allowance(counted, seconds(counted), math.inf if wanted else LONG_SHARE * run_s)
    return Allowance(LEAST_COUNTED, seconds(LEAST_COUNTED)) if wanted else Allowance(0, 0.0)


def trial_s(report: PlanReport, profile: ClusterProfile, counted: int) -> float:
    """Seconds of a trial of which so many steps count, about."""
    return _building_s(report.plan, profile) + (_UNCOUNTED + counted) * report.predicted_step_s


def _building_s(plan: Plan, profile: ClusterProfile) -> float:
    held: dict[int, float] = {}
    for layer, ranks in holders(plan).items():
        for rank in ranks:
            held[rank] = held.get(rank, 0.0) + profile.model.layers[layer].parameters
    return max(held.values()) / _PARAMETERS_PER_S


def explained(
    taken: PlanReport, told: str, said: Sequence[PlanReport] = (), other: PlanReport | None = None
) -> PlanReport:
    """A plan that was tried, with reasons that belong to its figures as they were corrected.

    Args:
        taken: as ``planner.complete_plan`` has it for the corrected profile.
        told: what came of looking for another plan.
        said: plans as the planner gave them by unlike profiles: what it said of all of them still holds.
        other: the plan that was not taken.
    """
    reasons, idle = list[str](), list[IdleRank]()
    if said:
        reasons = [one for one in said[0].reasons if all(one in report.reasons for report in said)]
        idle = [one for one in said[0].idle if all(one in report.idle for report in said)]
    held, why = {one.rank: one.reason for one in idle}, list[IdleRank]()
    for one in taken.idle:
        beyond = told if other is None or one.rank in other.plan.ranks else _NOT_FOUND
        why.append(IdleRank(one.rank, held.get(one.rank, beyond)))
    own = taken.reasons[1:]
    first = f"tried: {units.seconds(taken.expected_step_s)} per step; {told}"
    return replace(
        taken,
        alone=_alone(taken, told, other),
        idle=tuple(why),
        reasons=(first, *own, *(one for one in reasons if one not in own)),
    )


def _alone(taken: PlanReport, told: str, other: PlanReport | None) -> Alone | None:
    """The best rank alone; where that is the ``other`` plan, as it was tried, and why it is not taken where it would be faster."""
    best = taken.alone
    if best is None or best.step_s is None:
        return best
    step_s = best.step_s
    if other is not None and other.tried_step_s is not None and other.plan.ranks == [best.rank]:
        step_s = other.tried_step_s
    return replace(best, step_s=step_s, problem=told if step_s < taken.predicted_step_s else "")
