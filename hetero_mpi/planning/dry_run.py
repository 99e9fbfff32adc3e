"""A dry run of a schedule: interprets all ranks' lists without computing, finds mistakes and deadlocks, draws grids.

Sends are buffered (they never block), a receive blocks until its message has been sent, REDUCE and STEP block until
every rank that takes part has come to them. A schedule that passes here cannot deadlock on a transport with buffered
sends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hetero_mpi.errors import UserError
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Op, Schedule, reduced_layers, stages
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import Plan

SENDER_OF = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, +1)}
"""What a receive waits for: the operation, and the stage that does it, relative to the receiver."""
CONTEXT = 5
"""Actions shown before and after the place where a rank is stuck."""
ROWS = 16
"""Ranks shown at most."""


def awaited(action: Action) -> Action | None:
    """The send whose message ``action`` receives; None when it is not a receive."""
    if action.op not in SENDER_OF:
        return None
    op, offset = SENDER_OF[action.op]
    return Action(op, action.stage + offset, action.micro_batch)


@dataclass
class DryRunProgress:
    """How far the ranks came, each forward and (part of a) backward taking one clock and everything else none."""

    position: dict[int, int]
    """rank -> number of its actions done."""
    computed: dict[int, list[tuple[int, Action]]] = field(default_factory=dict)
    """rank -> (clock, forward or backward) in order."""
    stuck: tuple[int, ...] = ()


def interpret(schedule: Schedule) -> DryRunProgress:
    """Runs all lists as far as they go."""
    progress = DryRunProgress(dict.fromkeys(schedule, 0), {rank: [] for rank in schedule})
    clock = dict.fromkeys(schedule, 0)
    sent: dict[Action, int] = {}
    meeting: dict[tuple[Op, int | None], set[int]] = {}
    for rank, actions in schedule.items():
        for action in actions:
            if action.op in WHOLE_STEP:
                meeting.setdefault((action.op, action.layer), set()).add(rank)
    arrived: dict[tuple[Op, int | None], set[int]] = {of: set() for of in meeting}
    moved = True
    while moved:
        moved = False
        for rank in sorted(schedule):
            actions = schedule[rank]
            while progress.position[rank] < len(actions):
                action = actions[progress.position[rank]]
                message = awaited(action)
                if message is not None:
                    if message not in sent:
                        break
                    clock[rank] = max(clock[rank], sent[message])
                elif action.op in WHOLE_STEP:
                    here = action.op, action.layer
                    if rank not in arrived[here]:
                        arrived[here].add(rank)
                        moved = True
                    if arrived[here] != meeting[here]:
                        break
                elif action.op in COMPUTE:
                    progress.computed[rank].append((clock[rank], action))
                    clock[rank] += 1
                else:
                    sent[action] = clock[rank]
                progress.position[rank] += 1
                moved = True
    progress.stuck = tuple(rank for rank in sorted(schedule) if progress.position[rank] < len(schedule[rank]))
    return progress


def validate(schedule: Schedule, plan: Plan, model: ModelCost) -> None:
    """Raises ``UserError``, with every rank's list and the place where it is stuck, unless the schedule runs the plan.

    Checked: each stage's own ranks run it; every micro-batch has exactly one forward and, after it, one backward on
    every stage (in two parts where backward is split), with its inputs received before and its outputs sent after; sends
    match receives; gradients held more than once are summed once, by exactly the ranks that hold them; every rank ends
    with one STEP; nothing deadlocks.
    """
    problems = _list_problems(schedule, plan, model)
    if problems:
        rank, position, rule = problems[0]
        raise UserError(
            f"the schedule does not run the plan: {rule}\n{_lists(schedule, {rank: position})}\n"
            f"Correct rank {rank}'s list, or generate it with planning.schedule.schedule_of."
        )
    progress = interpret(schedule)
    if progress.stuck:
        waits = "; ".join(_wait(rank, schedule[rank][progress.position[rank]]) for rank in progress.stuck)
        raise UserError(
            f"the schedule deadlocks: {waits}\n{_lists(schedule, {r: progress.position[r] for r in progress.stuck})}\n"
            f"Change the order of the actions (warm_up must not grow from one stage to the next)."
        )


def _wait(rank: int, action: Action) -> str:
    message = awaited(action)
    return f"rank {rank} waits at {action}" + (f" for {message}" if message is not None else " for the other ranks")


def _list_problems(schedule: Schedule, plan: Plan, model: ModelCost) -> list[tuple[int, int, str]]:
    """What is wrong with the lists one by one, as (rank, position, rule)."""
    problems: list[tuple[int, int, str]] = []
    numbered = stages(plan)
    held: dict[int, set[int]] = {}
    for number, _, stage in numbered:
        for rank in stage.ranks:
            held.setdefault(rank, set()).add(number)
    for rank in sorted(schedule.keys() | held.keys()):
        actions = schedule.get(rank, ())
        for position, action in enumerate(actions):
            if action.stage not in held.get(rank, set()):
                problems.append((rank, position, f"rank {rank} does not hold the stage of {action}"))
        if actions or rank in held:
            steps = [position for position, action in enumerate(actions) if action.op is Op.STEP]
            if steps != [len(actions) - 1]:
                problems.append((rank, len(actions), f"rank {rank} must end with its only STEP"))
    for number, index, stage in numbered:
        pipeline = plan.pipelines[index]
        before = _wanted(stage is pipeline.stages[0], stage is pipeline.stages[-1], pipeline.split_backward)
        for rank in stage.ranks:
            own = [(i, action) for i, action in enumerate(schedule.get(rank, ())) if action.stage == number]
            problems += _stage_problems(rank, number, own, before, pipeline.micro_batches)
    return problems or _reduce_problems(schedule, plan, model)


def _wanted(first: bool, last: bool, split_backward: bool) -> dict[Op, tuple[Op, ...]]:
    """What a stage does for every micro-batch -> what must come before it."""
    split = split_backward and not first
    backward = Op.I if split else Op.B
    before: dict[Op, tuple[Op, ...]] = {
        Op.F: () if first else (Op.RECV_F,),
        backward: (Op.F,) if last else (Op.F, Op.RECV_B),
    }
    if split:
        before |= {Op.W: (Op.I,)}
    if not first:
        before |= {Op.RECV_F: (), Op.SEND_B: (backward,)}
    if not last:
        before |= {Op.RECV_B: (), Op.SEND_F: (Op.F,)}
    return before


def _stage_problems(
    rank: int, number: int, own: list[tuple[int, Action]], before: dict[Op, tuple[Op, ...]], micro_batches: int
) -> list[tuple[int, int, str]]:
    """One stage on one rank: what must be there exactly once, and what must come before what."""
    problems: list[tuple[int, int, str]] = []
    seen: Counter[Action] = Counter()
    for position, action in own:
        if action.op in WHOLE_STEP:
            continue
        m = action.micro_batch
        if action.op not in before or m is None or not 0 <= m < micro_batches:
            problems.append(
                (rank, position, f"{action} is no action of stage {number} ({micro_batches} micro-batches)")
            )
            continue
        missing = [str(Action(op, number, m)) for op in before[action.op] if not seen[Action(op, number, m)]]
        if missing:
            problems.append((rank, position, f"{action} comes before {' and '.join(missing)}"))
        seen[action] += 1
        if seen[action] > 1:
            problems.append((rank, position, f"{action} occurs twice"))
    absent = [Action(op, number, m) for m in range(micro_batches) for op in before if not seen[Action(op, number, m)]]
    problems += [(rank, own[-1][0] if own else 0, f"rank {rank} never does {action}") for action in absent]
    return problems


def _reduce_problems(schedule: Schedule, plan: Plan, model: ModelCost) -> list[tuple[int, int, str]]:
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
    """The ranks' lists, each around its own place, one below the other; the rows of ``stuck`` (rank -> position) marked
    with ``>``. Of very many ranks, stuck ones come first."""
    middle = min(stuck.values())
    ranks = sorted(schedule.keys() | stuck.keys())
    shown = sorted(sorted(ranks, key=lambda rank: (rank not in stuck, rank))[:ROWS])
    before = min(CONTEXT, max(stuck.get(rank, middle) for rank in shown))
    rows = []
    for rank in shown:
        actions, place = schedule.get(rank, ()), stuck.get(rank, middle)
        cells = [str(action) for action in actions] + (["(end)"] if stuck.get(rank) == len(actions) else [])
        if rank in stuck:
            cells[place] = f"[{cells[place]}]"
        begin, end = max(0, place - before), place + CONTEXT + 1
        row = [""] * (before - place) + ["..." if begin else "", *cells[begin:end]]
        rows.append([f"{'>' if rank in stuck else ' '} rank {rank}", *row, *(["..."] if len(cells) > end else [])])
    left = len(ranks) - len(shown)
    return _aligned(rows) + (f"\n... and {left} more ranks" if left else "")


def _aligned(rows: list[list[str]]) -> str:
    """Columns of equal width, the first to the left, the others to the right."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(widths[i + 1]) for i, cell in enumerate(row[1:]))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
