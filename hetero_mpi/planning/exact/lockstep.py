"""Many pipelines that run the same lists of actions, simulated side by side in arrays: what the exact search is made of.

The lists of a pipeline depend on its number of stages and micro-batches, its warm-up depths and whether backward is split;
who holds which items only changes how long the actions take. So one pass over the lists, in an order in which every message
is sent before it is received, times all splits of a chain over all orders of ranks at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.dry_run import awaited
from hetero_mpi.planning.memory import holdings
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, schedule_of
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan

Table = NDArray[np.float64]

_NOTHING = ModelCost("none", "fp32", 1, False, 0.0, (LayerCost("item", 0, 0, 0, 0.0, 0.0, 0),))
"""No item of it is trained, so that a schedule holds forwards, backwards and messages only."""


@dataclass(frozen=True)
class Lists:
    """The actions of all stages, merged so that each comes after what it waits for."""

    actions: tuple[tuple[Op, int, int], ...]
    """(operation, stage, micro-batch); sends and computing, each computing action with the stage's own clock in order."""
    holdings: tuple[tuple[tuple[int, int], ...], ...]
    """Per stage: the most micro-batches in flight and awaiting their weight gradients (``memory.holdings``)."""


@lru_cache(maxsize=20_000)
def lists_of(warm_up: tuple[int, ...], micro_batches: int, split: bool) -> Lists:
    """What ``schedule_of`` gives one pipeline; ``warm_up`` must not grow from one stage to the next."""
    stages = tuple(StagePlan((i,), i, i + 1, depth) for i, depth in enumerate(warm_up))
    plan = Plan((PipelinePlan(stages, 1, micro_batches, split),), micro_batches, 1, len(stages))
    schedule = schedule_of(plan, _NOTHING)
    merged: list[tuple[Op, int, int]] = []
    sent: set[Action] = set()
    place = [0] * len(stages)
    while any(place[i] < len(schedule[i]) - 1 for i in range(len(stages))):
        before = len(merged)
        for i in range(len(stages)):
            while place[i] < len(schedule[i]) - 1:
                action = schedule[i][place[i]]
                message = awaited(action)
                if message is not None and message not in sent:
                    break
                sent.add(action)
                assert action.micro_batch is not None
                merged.append((action.op, i, action.micro_batch))
                place[i] += 1
        assert len(merged) > before, "warm-up depths that do not grow cannot deadlock"
    return Lists(tuple(merged), tuple(holdings(schedule[i]) for i in range(len(stages))))


@lru_cache(maxsize=1000)
def depths(stages: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Every warm-up that does not grow from stage to stage, once per set of action lists.

    All micro-batches ahead of the first backward and all but one are the same lists; a lone stage, for which nobody waits,
    gains nothing from any depth.
    """
    if stages == 1:
        return ((0,),)
    shallow = itertools.combinations_with_replacement(range(micro_batches), stages)
    return tuple(sorted(warm_up[::-1] for warm_up in shallow))


@dataclass(frozen=True)
class Seconds:
    """Durations of the actions, as [stage, pipeline]; messages as [stage they leave upstream end of, pipeline]."""

    forward: Table
    backward: Table
    """Input part only, where backward is split and the stage is not the first."""
    weight: Table
    """Zero where nothing is split."""
    out: Table
    home: Table


def run(lists: Lists, seconds: Seconds) -> tuple[Table, Table]:
    """(when each stage has done its last backward, when that action began), as [stage, pipeline].

    The same additions in the same order as ``simulator.simulate`` on a network whose links are independent.
    """
    stages, many = seconds.forward.shape
    clock, begun = [np.zeros(many) for _ in range(stages)], [np.zeros(many) for _ in range(stages)]
    free: dict[tuple[Op, int], Table] = {}
    arrival: dict[tuple[Op, int, int], Table] = {}
    own = {Op.F: seconds.forward, Op.B: seconds.backward, Op.I: seconds.backward, Op.W: seconds.weight}
    for op, s, m in lists.actions:
        if op in COMPUTE:
            if op is Op.B or op is Op.W:
                begun[s] = clock[s]
            clock[s] = clock[s] + own[op][s]
        elif op is Op.RECV_F:
            clock[s] = np.maximum(clock[s], arrival.pop((Op.SEND_F, s - 1, m)))
        elif op is Op.RECV_B:
            clock[s] = np.maximum(clock[s], arrival.pop((Op.SEND_B, s + 1, m)))
        else:
            takes = seconds.out[s] if op is Op.SEND_F else seconds.home[s - 1]
            start = np.maximum(clock[s], free[op, s]) if (op, s) in free else clock[s]
            arrival[op, s, m] = free[op, s] = start + takes
    return np.array(clock), np.array(begun)
