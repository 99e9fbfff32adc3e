"""The sentences that go with a plan: why this one, what was beaten by how much, what limits it, why a rank is idle."""

from __future__ import annotations

import math
from dataclasses import replace

from hetero_mpi.planning.optimum import Optimum, Space, added
from hetero_mpi.planning.plan import IdleRank, Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import Op, stages
from hetero_mpi.planning.search import ROUNDING, Candidate, Effort, classic, evaluate
from hetero_mpi.planning.simulator import Simulation, simulate

IDLE_EFFORT = 100_000
"""Effort for trying to use the ranks that a plan leaves out."""
UNTRIED = "the search over many ranks found no faster pipeline with it (not simulated one by one)"
BUSY = 0.85
"""From this share of the step on, a rank or link is what limits the plan."""


def describe_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def ratio(numerator: float, denominator: float) -> float:
    """1 for 0 / 0: a profile edited to zero seconds must not break a sentence."""
    return numerator / denominator if denominator > 0 else 1.0


def describe_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def describe_items(first: int, last: int, items: int) -> str:
    """``embedding + blocks 0-3``."""
    blocks = range(max(first, 1) - 1, min(last, items - 1) - 1)
    parts = ["embedding"] if first == 0 else []
    if len(blocks) == 1:
        parts.append(f"block {blocks[0]}")
    elif blocks:
        parts.append(f"blocks {blocks[0]}-{blocks[-1]}")
    return " + ".join(parts + (["head"] if last == items else []))


def reasons(plan: Plan, found: Optimum, simulation: Simulation) -> tuple[str, ...]:
    """Why ``plan``, the optimum, is the plan."""
    space = found.space
    best = found.best
    assert best is not None
    lines = [
        f"{len(best.order)} of {len(space.profile.devices)} ranks, {best.instance.micro_batches} micro-batches of "
        f"{best.instance.micro_batch} = global batch {space.request.global_batch}",
        _single_rank(best, space),
        _even_split(best),
        _depth(best),
        what_limits(plan, space.profile, simulation),
        _gap(plan, found),
    ]
    return tuple(line for line in lines if line)


def _single_rank(best: Candidate, space: Space) -> str:
    """The best plan of one rank, compared."""
    items = len(space.profile.model.layers)
    alone: Candidate | None = None
    for outlook in space.outlooks:
        for kind in range(len(space.classes)):
            candidate = evaluate(outlook.instance, (kind,), (0, items))
            alone = candidate if candidate.beats(alone) else alone
    if len(best.order) == 1:
        return ""
    if alone is None:
        return "no rank can hold the whole model alone"
    rank = alone.instance.ranks(alone.order)[0]
    return f"rank {rank} alone: {_slower(alone.step_s, best.step_s)}"


def _slower(seconds: float, best_s: float) -> str:
    if seconds <= best_s * (1 + ROUNDING):
        return f"as fast ({describe_seconds(seconds)} per step)"
    return f"{ratio(seconds, best_s):.2f}x slower ({describe_seconds(seconds)} per step)"


def _even_split(best: Candidate) -> str:
    """The same ranks with equally many items each."""
    count, items = len(best.order), best.instance.items
    cuts = tuple(round(i * items / count) for i in range(count + 1))
    if count == 1 or cuts == best.cuts:
        return ""
    even = evaluate(best.instance, best.order, cuts)
    verdict = "does not fit in memory" if even.step_s == math.inf else _slower(even.step_s, best.step_s)
    return f"the same ranks with equally many items each: {verdict}"


def _depth(best: Candidate) -> str:
    shallow = evaluate(best.instance, best.order, best.cuts, classic(len(best.order), best.instance.micro_batches))
    if shallow.warm_up == best.warm_up:
        return ""
    return (
        f"deeper warm-up {list(best.warm_up)} instead of {list(shallow.warm_up)}, to hide the links: "
        f"the shallow one is {_slower(shallow.step_s, best.step_s)}"
    )


def what_limits(plan: Plan, profile: ClusterProfile, simulation: Simulation | None = None) -> str:
    """The busiest stage or link, when it is busy nearly all the time; else what keeps all of them waiting.

    ``simulation``: the plan's, where it is at hand.
    """
    result = simulation or simulate(plan, profile)
    numbered = stages(plan)
    rank = max(sorted(result.busy_s), key=lambda r: result.busy_s[r])
    number, _, stage = next(entry for entry in numbered if rank in entry[2].ranks)
    held = describe_items(stage.first, stage.last, plan.items)
    busiest = (
        f"stage {number} (rank {rank}: {held}) computes {ratio(result.busy_s[rank], result.step_s):.0%} of the step"
    )
    links: dict[tuple[int, int], float] = {}
    for event in result.events:
        if event.action.op in (Op.SEND_F, Op.SEND_B):
            peer = numbered[event.action.stage + (1 if event.action.op is Op.SEND_F else -1)][2].ranks[0]
            links[event.rank, peer] = links.get((event.rank, peer), 0.0) + event.end_s - event.start_s
    link = max(sorted(links), key=lambda pair: links[pair], default=None)
    if link is not None and links[link] > result.busy_s[rank] and links[link] >= BUSY * result.step_s:
        return f"limited by the link {link[0]} -> {link[1]}, busy {links[link] / result.step_s:.0%} of the step"
    if result.busy_s[rank] >= BUSY * result.step_s:
        return f"limited by compute: {busiest}"
    count = max(pipeline.micro_batches for pipeline in plan.pipelines)
    return (
        f"limited by filling and draining {len(numbered)} stages with {count} micro-batches: {busiest}, "
        f"more than any other; a larger global batch would use the ranks better"
    )


def _gap(plan: Plan, found: Optimum) -> str:
    def over(bound_s: float) -> str:
        return f"{describe_seconds(bound_s)} (+{max(0.0, ratio(plan.predicted_step_s, bound_s) - 1):.1%})"

    text = f"predicted {describe_seconds(plan.predicted_step_s)}; all ranks always busy: {over(plan.bound_step_s)}"
    if found.exhaustive:
        text += f"; no split into whole items can be under {over(found.bound_s)}"
    return text


def idle_ranks(best: Candidate, space: Space) -> tuple[IdleRank, ...]:
    """Every rank that ``best`` leaves out, and why."""
    used = set(best.instance.ranks(best.order))
    kinds = {rank: kind for kind, members in enumerate(space.classes) for rank in members}
    known: dict[int, Candidate | None] = {}
    effort = Effort(IDLE_EFFORT)
    result = []
    for device in space.profile.devices:
        if device.rank in used:
            continue
        if device.rank not in kinds:
            offered = "/".join(device.dtypes) or "nothing"
            reason = f"its device does not offer {space.profile.model.dtype} (it offers {offered})"
        elif len(best.order) == best.instance.items:
            reason = f"{best.instance.items} items of work, {len(space.profile.devices)} ranks"
        else:
            kind = kinds[device.rank]
            if kind not in known and effort.left > 0:
                known[kind] = added(best, kind, space, effort)
            reason = _why_not(device.rank, known[kind], best) if kind in known else UNTRIED
            if kind in known and known[kind] is None:
                reason += _with_recompute(best, kind, space)
        result.append(IdleRank(device.rank, reason))
    return tuple(result)


def _with_recompute(best: Candidate, kind: int, space: Space) -> str:
    """Whether one more rank of class ``kind`` fits when forwards may be repeated, found by planning for it."""
    if True in space.request.recompute_choices:
        return ""
    again = Space(space.profile, replace(space.request, recompute_choices=(False, True)), space.classes)
    sizes = [outlook.instance.micro_batch for outlook in space.outlooks]
    instance = again.outlooks[sizes.index(best.instance.micro_batch)].instance
    larger = added(evaluate(instance, best.order, best.cuts, best.warm_up), kind, again, Effort(IDLE_EFFORT))
    if larger is None:
        return ", nor with recompute"
    return f'; with train.recompute = "auto" it fits: {describe_seconds(larger.step_s)} per step'


def _why_not(rank: int, larger: Candidate | None, best: Candidate) -> str:
    if larger is None:
        return f"no split that uses rank {rank} too was found to fit in memory"
    if describe_seconds(larger.step_s) == describe_seconds(best.step_s):
        return f"using rank {rank} too would not shorten the step ({describe_seconds(best.step_s)} either way)"
    return (
        f"using rank {rank} too would take {describe_seconds(larger.step_s)} per step instead of "
        f"{describe_seconds(best.step_s)}"
    )
