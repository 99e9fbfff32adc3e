"""Dry run of a schedule: interpret every rank's action list without computing, to find errors and deadlocks.

Sends are buffered. A receive blocks until its message is sent; REDUCE, STEP and tensor-parallel operations block until all
participants arrive. A schedule that passes cannot deadlock on a transport with buffered sends.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_mpi.planning.schedule import COMPUTE, RECEIVES, WHOLE_STEP, Action, Op, Schedule, schedule_of
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import WARM_UP, Plan
from hetero_mpi.util.errors import UserError

BACKWARDS = (Op.B, Op.I)
"""Operations that compute the input gradient for which the previous stage waits."""
MAX_CONTEXT_ACTIONS = 5
"""Actions shown before and after the position at which a rank is stuck."""
MAX_SHOWN_RANKS = 16
Problem = tuple[int, int, str]
"""(rank, position in its action list, violated rule)"""


def awaited(action: Action) -> Action | None:
    """Return the send whose message ``action`` receives, or None if it is not a receive."""
    return action.other_end() if action.op in RECEIVES else None


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Map each deadlocked rank to the position at which it blocks; empty if all lists complete."""
    position, sent = dict.fromkeys(schedule, 0), set[Action]()
    ranks_by_point: dict[object, set[int]] = {}
    for rank, actions in schedule.items():
        for action in actions:
            if action.op in WHOLE_STEP or action.op in COMPUTE:
                ranks_by_point.setdefault(_meeting_point(action), set()).add(rank)
    arrived: dict[object, set[int]] = {point: set() for point in ranks_by_point}
    progressed = True
    while progressed:
        progressed = False
        for rank in sorted(schedule):
            for action in schedule[rank][position[rank] :]:
                message = awaited(action)
                if message is not None:
                    if message not in sent:
                        break
                elif action.op in WHOLE_STEP or action.op in COMPUTE:
                    meeting_point = _meeting_point(action)
                    progressed |= rank not in arrived[meeting_point]
                    arrived[meeting_point].add(rank)
                    if arrived[meeting_point] != ranks_by_point[meeting_point]:
                        break
                else:
                    sent.add(action)
                position[rank] += 1
                progressed = True
    return {rank: stuck_position for rank, stuck_position in position.items() if stuck_position < len(schedule[rank])}


def _meeting_point(action: Action) -> object:
    """Return the key that is equal for actions that ranks perform jointly."""
    return action if action.op in COMPUTE else (action.op, action.layer)


def validate(schedule: Schedule, plan: Plan, model: ModelCost) -> None:
    """Check that the schedule runs the plan.

    Each rank runs only its own stages. On each stage every micro-batch has one forward and then one backward (possibly split),
    with receives before and sends after them. Gradients accumulate in micro-batch order, a rank's later stages finish first,
    and sends match receives. The holders of a shared layer reduce it once, every rank ends with one STEP, and nothing
    deadlocks.

    Raises:
        UserError: if a rule is violated; the message shows the action lists and where each rank is stuck.
    """
    # What every order must do, in an order that all pipelines can have: the plan's own may leave actions out.
    plain = (replace(pipeline, order=WARM_UP, split_backward=False) for pipeline in plan.pipelines)
    expected = schedule_of(replace(plan, pipelines=tuple(plain)), model)
    ranks = sorted({*schedule, *expected})
    problems = (_rank_problems(rank, schedule.get(rank, ()), expected.get(rank, ()), plan) for rank in ranks)
    problem = next(itertools.chain.from_iterable(problems), None)
    if problem is not None:
        rank, position, rule = problem
        order = next(pipeline.order for pipeline in plan.pipelines if rank in pipeline.stages_of)
        source = f"rank {rank}'s list, or generate it with planning.schedule.schedule_of"
        if schedule == schedule_of(plan, model):
            source = f"hetero_mpi/planning/orders/{order}.py, which makes these lists"
        raise UserError(
            "schedule.invalid",
            f"the schedule does not run the plan: {rule}\n{_format_lists(schedule, {rank: position})}\n"
            f"Correct {source}.",
        )
    stuck = stuck_at(schedule)
    if stuck:
        actions = {rank: schedule[rank][stuck[rank]] for rank in sorted(stuck)}
        waits = "; ".join(f"rank {r} waits at {a} for {awaited(a) or 'the other ranks'}" for r, a in actions.items())
        raise UserError(
            "schedule.deadlock",
            f"the schedule deadlocks: {waits}\n{_format_lists(schedule, stuck)}\n"
            f"Change the order of the actions: warm_up must not grow from one stage to the next; the order interleaved needs "
            f"every rank equally often, in one sequence, such as 0, 1, 0, 1 (zbv accepts any).",
        )


def _rank_problems(rank: int, actions: Sequence[Action], expected: Sequence[Action], plan: Plan) -> Iterator[Problem]:
    """Yield the problems of one rank's list; ``expected`` holds its actions, unsplit. The first is reported."""
    steps = [position for position, action in enumerate(actions) if action.op is Op.STEP]
    if (actions or expected) and steps != [len(actions) - 1]:
        yield rank, len(actions), f"rank {rank} must end with its only STEP"
    allowed, done_actions, reduced = set(expected), set[Action](), None
    for position, action in enumerate(actions):
        if action.stage not in plan.of_rank(rank):
            yield rank, position, f"rank {rank} does not hold the stage of {action}"
        full_action = _full_action(action)
        if full_action not in allowed or (full_action != action and not _may_split(action.stage, plan)):
            yield rank, position, f"{action} is not an action of stage {action.stage} on rank {rank}"
        requirements = (required for required in _prerequisites(action) if required in allowed or required.op is Op.I)
        missing = [str(required) for required in requirements if required not in done_actions]
        if missing:
            yield rank, position, f"{action} comes before {' and '.join(missing)}"
        if action in done_actions or (action.op in BACKWARDS and full_action in done_actions):
            yield rank, position, f"{action} occurs twice"
        if action.op in COMPUTE and reduced is not None:
            yield rank, position, f"{reduced} comes before {action}: a rank must REDUCE after its last backward"
        reduced = action if action.op is Op.REDUCE else reduced
        done_actions |= {action, full_action} if action.op in BACKWARDS else {action}
    halves = [action._replace(op=Op.W) for action in done_actions if action.op is Op.I]
    for action in (*expected, *sorted(halves)):
        if action not in done_actions:
            yield rank, len(actions), f"rank {rank} never does {action}"
    yield from _order_problems(rank, actions)


def _order_problems(rank: int, actions: Sequence[Action]) -> Iterator[Problem]:
    """Check that gradients accumulate in micro-batch order (for bit-identical sums) and that later stages finish first."""
    latest, ends = dict[int, int](), dict[int, int]()
    for position, action in enumerate(actions):
        if action.op in (Op.B, Op.W) and action.micro_batch is not None:
            if action.micro_batch < latest.get(action.stage, 0):
                yield rank, position, f"{action} follows a later micro-batch: {action.op.value} must be in order"
            latest[action.stage], ends[action.stage] = action.micro_batch, position
    for early, late in itertools.pairwise(sorted(ends)):
        if ends[late] > ends[early]:
            rule = f"stage {late} ends after stage {early}: on one rank the later stage's last backward comes first"
            yield rank, ends[late], rule


def _full_action(action: Action) -> Action:
    """Return the full backward to which I or W belongs, or any other action unchanged."""
    return action._replace(op=Op.B) if action.op in (Op.I, Op.W) else action


def _may_split(number: int, plan: Plan) -> bool:
    """Whether the plan splits the backward of this stage (never that of a pipeline's first stage)."""
    _, index, stage = plan.numbered[number]
    return plan.pipelines[index].split_backward and stage is not plan.pipelines[index].stages[0]


def _prerequisites(action: Action) -> Sequence[Action]:
    """Return the actions that must come before ``action`` if they run on the same rank."""
    op, stage, m = action.op, action.stage, action.micro_batch
    if op is Op.F:
        return Action(Op.RECV_F, stage, m), Action(Op.F, stage - 1, m)
    if op in BACKWARDS:
        return Action(Op.F, stage, m), Action(Op.RECV_B, stage, m), Action(Op.B, stage + 1, m)
    producer = {Op.W: Op.I, Op.SEND_F: Op.F, Op.SEND_B: Op.B}
    return [Action(producer[op], stage, m)] if op in producer else []


def _format_lists(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Format the action lists around the ``stuck`` positions (rank -> position), and mark those ranks with ``>``."""
    middle = min(stuck.values())
    ranks = sorted(schedule.keys() | stuck.keys())
    shown_ranks = sorted(sorted(ranks, key=lambda rank: (rank not in stuck, rank))[:MAX_SHOWN_RANKS])
    rows = []
    for rank in shown_ranks:
        position, cells = stuck.get(rank, middle), [*map(str, schedule.get(rank, ())), "(end)"]
        if rank in stuck:
            cells[position] = f"[{cells[position]}]"
        begin, end = max(0, position - MAX_CONTEXT_ACTIONS), position + MAX_CONTEXT_ACTIONS + 1
        around = ["..."] * (begin > 0) + cells[begin:end] + ["..."] * (end < len(cells))
        rows.append(f"{'>' if rank in stuck else ' '} rank {rank}  {' '.join(around)}")
    hidden_count = len(ranks) - len(shown_ranks)
    return "\n".join(rows) + (f"\n... and {hidden_count} more ranks" if hidden_count else "")
