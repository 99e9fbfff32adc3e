"""A dry run of a schedule: interprets all ranks' lists without computing, finds mistakes and deadlocks.

Sends are buffered (they never block), a receive blocks until its message has been sent, REDUCE, STEP and whatever a group
computes together block until every rank that takes part has come to them. A schedule that passes here cannot deadlock on a
transport with buffered sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Op, Schedule, schedule_of
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.util.errors import UserError

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
    wanted = schedule_of(plan, model)
    ranks = sorted({*schedule, *wanted})
    problems = (_rank_problems(rank, schedule.get(rank, ()), wanted.get(rank, ()), plan) for rank in ranks)
    problem = next(itertools.chain.from_iterable(problems), None)
    if problem is not None:
        rank, position, rule = problem
        raise UserError(
            "schedule.invalid",
            f"the schedule does not run the plan: {rule}\n{_lists(schedule, {rank: position})}\n"
            f"Correct rank {rank}'s list, or generate it with planning.schedule.schedule_of.",
        )
    stuck = stuck_at(schedule)
    if stuck:
        waits = "; ".join(_wait(rank, schedule[rank][stuck[rank]]) for rank in sorted(stuck))
        raise UserError(
            "schedule.deadlock",
            f"the schedule deadlocks: {waits}\n{_lists(schedule, stuck)}\n"
            f"Change the order of the actions: warm_up must not grow from one stage to the next; the order interleaved wants "
            f"ranks in a loop (zbv takes any).",
        )


def _wait(rank: int, action: Action) -> str:
    return f"rank {rank} waits at {action} for {awaited(action) or 'the other ranks'}"


def _rank_problems(rank: int, actions: Sequence[Action], wanted: Sequence[Action], plan: Plan) -> Iterator[Problem]:
    """Problems of one rank's list, which does what is ``wanted`` in whichever order the rules leave open. Only the first counts."""
    steps = [position for position, action in enumerate(actions) if action.op is Op.STEP]
    if (actions or wanted) and steps != [len(actions) - 1]:
        yield rank, len(actions), f"rank {rank} must end with its only STEP"
    possible, seen = set(map(_whole, wanted)), set[Action]()
    for position, action in enumerate(actions):
        if action.stage not in plan.of_rank(rank):
            yield rank, position, f"rank {rank} does not hold the stage of {action}"
        if action.op in WHOLE_STEP:
            continue
        whole = _whole(action)
        if whole not in possible or (whole != action and not _splits(action.stage, plan)):
            yield rank, position, f"{action} is no action of stage {action.stage} on rank {rank}"
        before = (other for other in _before(action) if other in possible or other.op is Op.I)
        missing = [str(other) for other in before if other not in seen]
        if missing:
            yield rank, position, f"{action} comes before {' and '.join(missing)}"
        if action in seen or (action.op in BACKWARDS and whole in seen):
            yield rank, position, f"{action} occurs twice"
        seen |= {action, whole} if action.op in BACKWARDS else {action}
    halves = [action._replace(op=Op.W) for action in seen if action.op is Op.I]
    for action in (*map(_whole, wanted), *sorted(halves)):
        if action not in seen and action.op not in WHOLE_STEP:
            yield rank, len(actions), f"rank {rank} never does {action}"
    yield from _reduce_problems(rank, actions, {action.layer or 0 for action in wanted if action.op is Op.REDUCE})
    yield from _order_problems(rank, actions)


def _order_problems(rank: int, actions: Sequence[Action]) -> Iterator[Problem]:
    """Each stage adds up the gradients of its micro-batches in their order: the same bits in every schedule. Of a rank's stages a
    later one ends before an earlier one: gradients are summed from the last layer to the first."""
    latest, ends = dict[int, int](), dict[int, int]()
    for position, action in enumerate(actions):
        if action.op in (Op.B, Op.W) and action.micro_batch is not None:
            if action.micro_batch < latest.get(action.stage, 0):
                yield rank, position, f"{action} adds its gradients after those of a later micro-batch"
            latest[action.stage], ends[action.stage] = action.micro_batch, position
    for early, late in itertools.pairwise(sorted(ends)):
        if ends[late] > ends[early]:
            rule = f"stage {late} ends after stage {early}: on one rank the later stage's last backward comes first"
            yield rank, ends[late], rule


def _whole(action: Action) -> Action:
    """The backward that a part of it belongs to; any other action itself."""
    return action._replace(op=Op.B) if action.op in (Op.I, Op.W) else action


def _splits(number: int, plan: Plan) -> bool:
    """True where a stage's backward may come in two parts."""
    _, index, stage = plan.numbered[number]
    return plan.pipelines[index].split_backward and stage is not plan.pipelines[index].stages[0]


def _before(action: Action) -> Sequence[Action]:
    """Actions that must come before one of a micro-batch, those of them that are its rank's."""
    op, stage, m = action.op, action.stage, action.micro_batch
    if op is Op.F:
        return Action(Op.RECV_F, stage, m), Action(Op.F, stage - 1, m)
    if op in BACKWARDS:
        return Action(Op.F, stage, m), Action(Op.RECV_B, stage, m), Action(Op.B, stage + 1, m)
    needed = {Op.W: Op.I, Op.SEND_F: Op.F, Op.SEND_B: Op.B}
    return [Action(needed[op], stage, m)] if op in needed else []


def _reduce_problems(rank: int, actions: Sequence[Action], wanted: set[int]) -> Iterator[Problem]:
    """A rank REDUCEs exactly the layers whose gradients it shares with others, after its last backward."""
    found = [(i, action.layer) for i, action in enumerate(actions) if action.op is Op.REDUCE]
    if sorted(layer for _, layer in found if layer is not None) != sorted(wanted):
        layers = ", ".join(map(str, sorted(wanted))) or "none"
        place = found[0][0] if found else len(actions) - 1
        yield rank, place, f"rank {rank} must REDUCE each of these layers once: {layers}"
    early = [i for i, _ in found if any(action.op in COMPUTE for action in actions[i:])]
    yield from ((rank, i, f"rank {rank} must REDUCE after its last backward") for i in early[:1])


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
