"""A dry run of a schedule: interprets all ranks' lists without computing, finds mistakes and deadlocks.

Sends are buffered (they never block), a receive blocks until its message has been sent, REDUCE, STEP and whatever a group
computes together block until every rank that takes part has come to them. A schedule that passes here cannot deadlock on a
transport with buffered sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetero_mpi.errors import UserError
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Op, Schedule, reduced_layers
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan

SENDER_OF = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, +1)}
"""Receive -> the operation that it waits for, and the stage that does it, relative to the receiver."""
BACKWARDS = (Op.B, Op.I)
"""A whole backward, or the part of it that another stage waits for."""
CONTEXT = 5
"""Actions shown before and after the place where a rank is stuck."""
ROWS = 16
"""Ranks shown at most."""
Problem = tuple[int, int, str]
"""The rank of a list, the position in it, and the rule that is broken."""


def awaited(action: Action) -> Action | None:
    """The send whose message ``action`` receives; None when it is not a receive."""
    if action.op not in SENDER_OF:
        return None
    op, offset = SENDER_OF[action.op]
    return Action(op, action.stage + offset, action.micro_batch)


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Rank -> the position in its list at which it waits for ever. Empty: all lists run to their ends."""
    position, sent = dict.fromkeys(schedule, 0), set[Action]()
    meeting: dict[object, set[int]] = {}
    for rank, actions in schedule.items():
        for action in actions:
            if action.op in WHOLE_STEP or action.op in COMPUTE:
                meeting.setdefault(_place_of_meeting(action), set()).add(rank)
    arrived: dict[object, set[int]] = {place: set() for place in meeting}
    moved = True
    while moved:
        moved = False
        for rank in sorted(schedule):
            for action in schedule[rank][position[rank] :]:
                message = awaited(action)
                if message is not None:
                    if message not in sent:
                        break
                elif action.op in WHOLE_STEP or action.op in COMPUTE:
                    here = _place_of_meeting(action)
                    moved |= rank not in arrived[here]
                    arrived[here].add(rank)
                    if arrived[here] != meeting[here]:
                        break
                else:
                    sent.add(action)
                position[rank] += 1
                moved = True
    return {rank: at for rank, at in position.items() if at < len(schedule[rank])}


def _place_of_meeting(action: Action) -> object:
    """The same for actions that ranks do together: a layer's sum, the step, what a group computes."""
    return action if action.op in COMPUTE else (action.op, action.layer)


def validate(schedule: Schedule, plan: Plan, model: ModelCost) -> None:
    """Raises ``UserError``, with every rank's list and the place where it is stuck, unless the schedule runs the plan.

    Checked: each stage's own ranks run it; every micro-batch has exactly one forward and, after it, one backward on
    every stage (where backward is split, it may come in two parts), with its inputs received before and its outputs sent after,
    or computed before on the same rank; gradients of a stage are added in the order of its micro-batches; of a rank's stages the
    later ones end first; sends match receives; gradients held more than once are summed once, by exactly the ranks that hold
    them; every rank ends with one STEP; nothing deadlocks.
    """
    problems = _list_problems(schedule, plan, model)
    if problems:
        rank, position, rule = problems[0]
        raise UserError(
            f"the schedule does not run the plan: {rule}\n{_lists(schedule, {rank: position})}\n"
            f"Correct rank {rank}'s list, or generate it with planning.schedule.schedule_of."
        )
    stuck = stuck_at(schedule)
    if stuck:
        waits = "; ".join(_wait(rank, schedule[rank][stuck[rank]]) for rank in sorted(stuck))
        raise UserError(
            f"the schedule deadlocks: {waits}\n{_lists(schedule, stuck)}\n"
            f"Change the order of the actions: warm_up must not grow from one stage to the next; the order interleaved wants "
            f"ranks in a loop (zbv takes any)."
        )


def _wait(rank: int, action: Action) -> str:
    return f"rank {rank} waits at {action} for {awaited(action) or 'the other ranks'}"


def _list_problems(schedule: Schedule, plan: Plan, model: ModelCost) -> list[Problem]:
    """Problems of the lists one by one."""
    problems: list[Problem] = []
    for rank in sorted({*schedule, *plan.ranks}):
        actions, held = schedule.get(rank, ()), plan.of_rank(rank)
        for position, action in enumerate(actions):
            if action.stage not in held:
                problems.append((rank, position, f"rank {rank} does not hold the stage of {action}"))
        steps = [position for position, action in enumerate(actions) if action.op is Op.STEP]
        if (actions or held) and steps != [len(actions) - 1]:
            problems.append((rank, len(actions), f"rank {rank} must end with its only STEP"))
    first = 0
    for pipeline in plan.pipelines:
        for rank, places in pipeline.held.items():
            problems += _rank_problems(rank, schedule.get(rank, ()), pipeline, first, places)
        first += len(pipeline.stages)
    return problems or _reduce_problems(schedule, plan, model)


def _rank_problems(
    rank: int, actions: Sequence[Action], pipeline: PipelinePlan, first: int, places: Sequence[int]
) -> list[Problem]:
    """One rank's stages: what must be there exactly once, and what must come before what. ``first``: its pipeline's first stage."""
    problems: list[Problem] = []
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        m, place = action.micro_batch, action.stage - first
        if action.op in WHOLE_STEP or place not in places:
            continue
        if m is None or not 0 <= m < pipeline.micro_batches or action.op not in _possible(pipeline, place, rank):
            rule = f"{action} is no action of stage {action.stage} ({pipeline.micro_batches} micro-batches)"
            problems.append((rank, position, rule))
            continue
        missing = [str(of[0]) for of in _before(action, pipeline, place) if not seen & set(of)]
        if missing:
            problems.append((rank, position, f"{action} comes before {' and '.join(missing)}"))
        if action in seen or (action.op in BACKWARDS and seen & set(_any(BACKWARDS, action.stage, m))):
            problems.append((rank, position, f"{action} occurs twice"))
        seen.add(action)
    for place in places:
        for m in range(pipeline.micro_batches):
            possible = _possible(pipeline, place, rank)
            number, backward = first + place, Op.B if Op.I not in possible else Op.I
            halves = Action(Op.I, number, m) in seen
            wanted = [op for op in possible if op not in (*BACKWARDS, Op.W)] + [Op.W] * halves
            absent = [one for one in (Action(op, number, m) for op in wanted) if one not in seen]
            absent += [] if seen & set(_any(BACKWARDS, number, m)) else [Action(backward, number, m)]
            at = max((i for i, action in enumerate(actions) if action.stage == number), default=0)
            problems += [(rank, at, f"rank {rank} never does {action}") for action in absent]
    return problems or _order_problems(rank, actions)


def _order_problems(rank: int, actions: Sequence[Action]) -> list[Problem]:
    """Each stage adds up the gradients of its micro-batches in their order: the same bits in every schedule. Of a rank's stages a
    later one ends before an earlier one: gradients are summed from the last layer to the first."""
    problems, latest, ends = [], dict[int, int](), dict[int, int]()
    for position, action in enumerate(actions):
        if action.op in (Op.B, Op.W) and action.micro_batch is not None:
            if action.micro_batch < latest.get(action.stage, 0):
                problems.append((rank, position, f"{action} adds its gradients after those of a later micro-batch"))
            latest[action.stage], ends[action.stage] = action.micro_batch, position
    for early, late in pairwise(sorted(ends)):
        if ends[late] > ends[early]:
            rule = f"stage {late} ends after stage {early}: on one rank the later stage's last backward comes first"
            problems.append((rank, ends[late], rule))
    return problems


def _possible(pipeline: PipelinePlan, place: int, rank: int) -> tuple[Op, ...]:
    """Operations of a rank of a stage for a micro-batch. The first rank of a group sends; it hands on what it receives."""
    first, last, leads = place == 0, place == len(pipeline.stages) - 1, rank == pipeline.stages[place].ranks[0]
    before = not first and not pipeline.together(place - 1)
    behind = not last and not pipeline.together(place)
    return (
        *((Op.RECV_F,) * before),
        Op.F,
        *((Op.SEND_F,) * (behind and leads)),
        *((Op.RECV_B,) * behind),
        Op.B,
        *((Op.I, Op.W) if pipeline.split_backward and not first else ()),
        *((Op.SEND_B,) * (before and leads)),
    )


def _any(ops: Sequence[Op], stage: int, micro_batch: int | None) -> tuple[Action, ...]:
    return tuple(Action(op, stage, micro_batch) for op in ops)


def _before(action: Action, pipeline: PipelinePlan, place: int) -> list[tuple[Action, ...]]:
    """Actions that must come before one of a micro-batch on its rank: one of each entry."""
    op, stage, m = action.op, action.stage, action.micro_batch
    if op is Op.F:
        if place == 0:
            return []
        return [_any([Op.F], stage - 1, m) if pipeline.together(place - 1) else _any([Op.RECV_F], stage, m)]
    if op in BACKWARDS:
        own = [_any([Op.F], stage, m)]
        if place == len(pipeline.stages) - 1:
            return own
        return [*own, _any(BACKWARDS, stage + 1, m) if pipeline.together(place) else _any([Op.RECV_B], stage, m)]
    ops = {Op.W: [Op.I], Op.SEND_F: [Op.F], Op.SEND_B: BACKWARDS}
    return [_any(ops[op], stage, m)] if op in ops else []


def _reduce_problems(schedule: Schedule, plan: Plan, model: ModelCost) -> list[Problem]:
    """Every rank REDUCEs exactly the layers whose gradients it shares with others, after its last backward."""
    summed = reduced_layers(plan, model)
    problems = []
    for rank in sorted(schedule):
        actions = schedule[rank]
        found = [(i, action.layer) for i, action in enumerate(actions) if action.op is Op.REDUCE]
        wanted = {layer for layer, ranks in summed.items() if rank in ranks}
        if sorted(layer for _, layer in found if layer is not None) != sorted(wanted):
            place = found[0][0] if found else len(actions) - 1
            layers = ", ".join(map(str, sorted(wanted))) or "none"
            problems.append((rank, place, f"rank {rank} must REDUCE each of these layers once: {layers}"))
        early = [i for i, _ in found if any(action.op in COMPUTE for action in actions[i:])]
        problems += [(rank, i, f"rank {rank} must REDUCE after its last backward") for i in early[:1]]
    return problems


def _lists(schedule: Schedule, stuck: dict[int, int]) -> str:
    """The ranks' lists, each around its own place; those of ``stuck`` (rank -> position) are marked with ``>``. Of very many ranks,
    stuck ones come first."""
    middle = min(stuck.values())
    ranks = sorted(schedule.keys() | stuck.keys())
    shown = sorted(sorted(ranks, key=lambda rank: (rank not in stuck, rank))[:ROWS])
    rows = []
    for rank in shown:
        place, cells = stuck.get(rank, middle), [*map(str, schedule.get(rank, ())), "(end)"]
        if rank in stuck:
            cells[place] = f"[{cells[place]}]"
        begin, end = max(0, place - CONTEXT), place + CONTEXT + 1
        around = ["..."] * (begin > 0) + cells[begin:end] + ["..."] * (end < len(cells))
        rows.append(f"{'>' if rank in stuck else ' '} rank {rank}  {' '.join(around)}")
    left = len(ranks) - len(shown)
    return "\n".join(rows) + (f"\n... and {left} more ranks" if left else "")
