"""Describe plans as text: stages, idle ranks with reasons, batch, prediction, bottlenecks and causes of waiting."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hetero_mpi.planning.analysis.idle_time import Idling
from hetero_mpi.planning.durations import Durations, stage_s
from hetero_mpi.planning.memory import shared_parameters, slices_head, warm_ups
from hetero_mpi.planning.orders import schedule_title
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.plan import FROM_DISK, IdleRank, PipelinePlan, Plan, PlanReport, RankMemory, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.report.profile_text import device_heading, device_text
from hetero_mpi.report.table import MAX_ROWS, Column, Table
from hetero_mpi.util import units
from hetero_mpi.util.grouping import grouped
from hetero_mpi.util.terminal import wrap_text

if TYPE_CHECKING:
    from hetero_mpi.planning.decision.alternatives import Losses, Outcome  # brings the planner

MAX_STAGE_ROWS = 48
"""Maximum number of stages, or ranks, to show with a row each."""
MAX_SCREEN_ROWS = 8
"""Maximum number of stages to show in the output of ``train``."""
EVERY_STAGE = "all stages: `inspect PLAN --all`, with the plan.toml of `plan -o` or `train`"
NOT_PREDICTED = "no prediction (edited plans have none); to compute one, use `plan --profile PROFILE --plan FILE`"
_MIN_SHOWN_CHANGE = 0.0005
"""Relative change of the step time below which "no change" is shown."""
LIMITS = {
    "device": "the speed of the devices",
    "plan": "the given plan",
    "link": "links",
    "memory": "memory",
    "granularity": "granularity (whole layers, whole micro-batches)",
}
"""Maps the value of ``Losses.limit`` to its description."""


def headline(report: PlanReport) -> str:
    """Summarise a plan, as in ``3 ranks, 389 ms per step (395 ms calibrated); best single rank: rank 1, 489 ms (1.26x)``."""
    plan, best = report.plan, report.alone
    used_ranks, all_ranks = len(plan.ranks), len(report.memory) + len(report.idle)
    text = f"{used_ranks} of " * (used_ranks < all_ranks) + units.plural(max(used_ranks, all_ranks), "rank")
    text += f", {units.seconds(report.predicted_step_s)} per step"
    text += f" ({units.seconds(report.tried_step_s)} calibrated)" if report.tried_step_s is not None else ""
    if best is None or all_ranks <= 1:
        return text
    if best.step_s is None:
        return f"{text}; no single rank can run this job (rank {best.rank}, the fastest: {best.problem})"
    gain = units.ratio(best.step_s, report.predicted_step_s)
    if len(plan.ranks) == 1 and gain >= 1:
        return f"{text}: only rank {plan.ranks[0]}, as the other ranks would slow it down"
    comparison = "best single rank" if gain >= 1 else "a single rank would be faster"
    why = f": {best.problem}" if best.problem else ""
    return f"{text}; {comparison}: rank {best.rank}, {units.seconds(best.step_s)} ({gain:.2f}x){why}"


def plan_lines(source: PlanReport | Plan, profile: ClusterProfile | None, every: bool = False) -> list[str]:
    """Describe a plan: headline, table of stages, idle ranks with reasons, batch and prediction.

    Args:
        source: a plan, or a report that also has its prediction.
        profile: profile that the plan was made for. Columns that need it are omitted if it is None.
        every: print a row for every stage, without a limit.
    """
    plan, report = (source, None) if isinstance(source, Plan) else (source.plan, source)
    stages = _stages(plan, profile, report)
    lines = wrap_text("", headline(report)) if report is not None else []
    lines += [plan_title(plan, profile), *stages.lines(None if every else MAX_STAGE_ROWS)]
    lines += [f"  {note}" for note in [stage_note(plan, profile)] if note]
    if len(stages.rows) > MAX_STAGE_ROWS and not every:
        lines.append(f"  {EVERY_STAGE}")
    if report is not None:
        fullest_first = sorted(report.hosts, key=lambda host: -host.peak_bytes / max(host.usable_bytes, 1))
        shown_hosts = report.hosts if len(report.hosts) <= MAX_ROWS else fullest_first[:1]
        more = f" (the fullest of {len(report.hosts)})" if len(shown_hosts) < len(report.hosts) else ""
        lines += [
            f"  host {units.shorten(host.host)}: {units.size(host.peak_bytes)} of {units.size(host.usable_bytes)} "
            f"for all its ranks{more}"
            for host in shown_hosts
        ]
        lines += [line for reason in idle_lines(report.idle) for line in wrap_text("  ", reason)]
        lines += [line for reason in report.reasons for line in wrap_text("  because: ", reason)]
    lines += [*eager_lines(plan, profile), *(f"Batch: {line}" for line in batch_lines(plan))]
    return lines + (wrap_text("", _prediction(report, profile is None)) if report else [f"  {NOT_PREDICTED}"])


def planned_lines(report: PlanReport, profile: ClusterProfile, run_dir: Path) -> list[str]:
    """Summarise a plan for the output of ``train``; ``--verbose`` and ``inspect`` show the full ``plan_lines``."""
    stages = _stages(report.plan, profile, report).without("weights", "warm-up")
    lines = [*wrap_text("", headline(report)), plan_title(report.plan, profile), *stages.lines(MAX_SCREEN_ROWS)]
    lines += [line for reason in idle_lines(report.idle) for line in wrap_text("  ", reason)]
    lines += [*eager_lines(report.plan, profile), *(f"Batch: {line}" for line in batch_lines(report.plan))]
    lines += [line for reason in report.reasons if FROM_DISK in reason for line in wrap_text("  ", reason)]
    return lines + wrap_text("  ", f"reasons and all figures: --verbose, or `python -m hetero_mpi inspect {run_dir}`")


def eager_lines(plan: Plan, profile: ClusterProfile | None) -> list[str]:
    """List the ranks that compile blocks in general, but not under this plan, with the reason."""
    devices, eager_ranks = profile.devices if profile is not None else (), set[int]()
    for _, number, stage in plan.numbered if devices else ():
        pipeline = plan.pipelines[number]
        if stage.streamed or stage.grouped or (pipeline.split_backward and stage is not pipeline.stages[0]):
            eager_ranks.update(rank for rank in stage.ranks if devices[rank].compiled)
    reason = "blocks are not compiled: offloading, tensor parallelism or a split backward"
    return [f"  {units.ranks(sorted(eager_ranks))}: {reason}"] if eager_ranks else []


def plan_title(plan: Plan, profile: ClusterProfile | None) -> str:
    """Return the title of a plan, such as ``Plan: 4 stages in 2 pipelines, schedule 1F1B``."""
    interleaved = any(pipeline.interleaved for pipeline in plan.pipelines)
    on = f" on {units.plural(len(plan.ranks), 'rank')}" if interleaved else ""
    emulated = ", on emulated devices" if profile is not None and profile.emulated else ""
    return f"Plan: {stages_text(plan, on)}{emulated}"


def stages_text(plan: Plan, on: str = "") -> str:
    """Return text such as ``4 stages in 2 pipelines, schedule 1F1B``, with ``on`` inserted after the number of stages or copies."""
    count, ranks_text = len(plan.pipelines), units.plural(len(plan.ranks), "rank")
    stages = [len(pipeline.stages) for pipeline in plan.pipelines]
    if plan.undivided and len(plan.ranks) == count > 1:
        return f"{plan.replicas}{on}, one per rank"
    if plan.undivided:
        return f"{plan.replicas if count > 1 else 'the whole model'}{on or f' on {ranks_text}'}"
    if min(stages) > 1:
        return f"{units.plural(sum(stages), 'stage')}{on}{f' in {plan.replicas}' * (count > 1)}{schedule_text(plan)}"
    kinds = Counter(
        f"in {number} stages" if number > 1 else f"on {units.plural(len(pipeline.stages_of), 'rank')}"
        for number, pipeline in zip(stages, plan.pipelines, strict=True)
    )
    parts = ", ".join(f"{number} {kind}{' each' * (number > 1)}" for kind, number in kinds.items())
    return f"{plan.replicas}{on} ({parts}){schedule_text(plan)}"


def schedule_text(plan: Plan) -> str:
    """Return the pipelines' schedules, as in ``, schedule 1F1B``, or "" if no pipeline has several stages."""
    names = dict.fromkeys(schedule_title(pipeline) for pipeline in plan.pipelines if len(pipeline.stages) > 1)
    return f", schedule {' and '.join(names)}" if names else ""


def idle_lines(idle: Sequence[IdleRank]) -> list[str]:
    """Return a line per reason why ranks are idle, such as ``ranks 4-7 idle: a slower card than ...``."""
    alike = idle_ranks_by_reason(idle).items()
    return [f"{units.ranks(r)} {'idles' if len(r) == 1 else 'idle'}: {reason}" for reason, r in alike]


def idle_ranks_by_reason(idle: Sequence[IdleRank]) -> dict[str, list[int]]:
    """Map each reason for being idle to the ranks that it applies to, in ascending order."""
    ranks_by_reason = grouped(sorted(idle, key=lambda idle_rank: idle_rank.rank), lambda idle_rank: idle_rank.reason)
    return {reason: [idle_rank.rank for idle_rank in members] for reason, members in ranks_by_reason.items()}


def fullest_text(memory: Sequence[RankMemory]) -> str:
    """Return the peak and the budget of the rank that uses most of its budget, as in ``1.20 GB of 8.00 GB``."""
    if not memory:
        return ""
    fullest = max(memory, key=lambda rank_memory: rank_memory.peak_bytes / max(rank_memory.usable_bytes, 1))
    return f"{units.size(fullest.peak_bytes)} of {units.size(fullest.usable_bytes)}"


def heads_text(stage: StagePlan) -> str:
    """List the key/value heads, and experts if sharded, of each TP rank, as in ``5 + 3 heads, 2 + 6 experts``."""
    heads = f"{' + '.join(map(str, stage.shares))} heads"
    return heads if stage.experts is None else f"{heads}, {' + '.join(map(str, stage.experts))} experts"


def _stages(plan: Plan, profile: ClusterProfile | None, report: PlanReport | None) -> Table:
    stages = stage_table(plan, profile, report.memory if report is not None else ())
    return stages if profile is None else stages.without("micro-batches")


def stage_table(
    plan: Plan, profile: ClusterProfile | None, memory: Sequence[RankMemory],
    name: Callable[[DeviceProfile], str] = device_text,
) -> Table:  # fmt: skip
    """Build a table with a row per stage from the predicted ``memory`` of each rank, with devices formatted by ``name``."""
    scaled = Durations(plan, profile).profile if profile is not None else None
    replica, shares = "copy" if "copies" in plan.replicas else "pipeline", {pipe.sequences for pipe in plan.pipelines}
    columns = [
        Column(replica, lambda row: row.pipeline_index if len(plan.pipelines) > 1 else None),
        Column("stage", lambda row: None if plan.undivided else row.number),
        Column("rank", lambda row: _ranks_text(row.stage)),
        Column(
            device_heading(profile) if profile is not None else "device",
            lambda row: (
                ", ".join(dict.fromkeys(name(scaled.devices[rank]) for rank in row.stage.ranks)) if scaled else None
            ),
        ),
        Column("layers", lambda row: units.layers(row.stage.first, row.stage.last, plan.layers, plan.sequence_length)),
        Column("sequences", lambda row: row.pipeline.sequences if len(shares) > 1 else None),
        Column("micro-batches", lambda row: f"{row.pipeline.micro_batches} x {row.pipeline.micro_batch}"),
        Column("weights", lambda row: _parameters(row.stage, scaled) if scaled else None, units.count),
        # Memory is per rank, not per stage, so the rank's first stage shows it.
        Column("memory", lambda row: [use for use in memory if row.number in plan.of_rank(use.rank)[:1]], fullest_text),
        Column(
            "compute",
            lambda row: _micro_batch_s(row.pipeline, row.stage, plan, scaled) if scaled else None,
            units.seconds,
        ),
        Column("recompute", lambda row: _recompute_text(row.pipeline, row.stage, plan, scaled)),
        Column("warm-up", lambda row: None if plan.undivided else row.warm_up),
    ]
    depths = [depth for pipeline in plan.pipelines for depth in warm_ups(pipeline)]
    rows = [_StageRow(n, index, plan.pipelines[index], stage, depths[n]) for n, index, stage in plan.numbered]
    return Table(columns, rows)


class _StageRow(NamedTuple):
    number: int
    pipeline_index: int
    pipeline: PipelinePlan
    stage: StagePlan
    warm_up: int


def _ranks_text(stage: StagePlan) -> str:
    ranks = ", ".join(map(str, stage.ranks))
    return f"{ranks} ({heads_text(stage)})" if stage.grouped else ranks


def _recompute_text(pipeline: PipelinePlan, stage: StagePlan, plan: Plan, profile: ClusterProfile | None) -> str:
    """Return the cell of the column ``recompute``: whether backward recomputes all, none or some slices of the stage."""
    if not stage.streamed:
        sliced = profile is not None and slices_head(profile.model, pipeline, stage, plan.sequence_length)
        head = "head" * sliced
        return f"yes, {head}".removesuffix(", ") if stage.recompute else head
    slices = stage.slices(pipeline.micro_batch)
    if stage.kept_slices >= slices:
        return "no, offloaded"
    return "offloaded" + (f", {slices - stage.kept_slices} of {slices} slices" if stage.kept_slices else "")


def stage_note(plan: Plan, profile: ClusterProfile | None) -> str:
    """Return the legend of ``stage_table``, which may be empty."""
    length = plan.sequence_length
    sizes = " or ".join(dict.fromkeys(units.amount(pipe.micro_batch * length, length) for pipe in plan.pipelines))
    recompute_cells = [_recompute_text(pipe, stage, plan, profile) for pipe in plan.pipelines for stage in pipe.stages]
    repeats = "recomputation + " * any(cell.startswith(("yes", "offloaded")) for cell in recompute_cells)
    costs = ["weights: parameters", f"compute: forward + {repeats}backward of {sizes}"]
    parts = costs if profile is not None else [f"micro-batches: number x {units.row(length)}s; memory: predicted peak"]
    return "; ".join([*parts, *["warm-up: forwards before the alternation"] * (not plan.undivided)])


def _parameters(stage: StagePlan, profile: ClusterProfile) -> int:
    layers = profile.model.layers[stage.first : stage.last]
    return sum(layer.parameters for layer in layers) - shared_parameters(profile.model, stage.first, stage.last)


def _micro_batch_s(pipeline: PipelinePlan, stage: StagePlan, plan: Plan, profile: ClusterProfile) -> float:
    return sum(stage_s(profile, pipeline, stage, pipeline.size(0), plan.sequence_length, op) for op in (Op.F, Op.B))


def batch_lines(plan: Plan) -> list[str]:
    """Describe the batch: ``64 sequences = 8 micro-batches x 8 sequences, 128 tokens each: 8,192 tokens per step``."""
    row = units.row(plan.sequence_length)
    shares = []
    for pipeline in plan.pipelines:
        count, last = pipeline.micro_batches, pipeline.size(pipeline.micro_batches - 1)
        short = f" (the last: {last})" if last < pipeline.size(0) else ""
        shares.append(f"{units.plural(count, 'micro-batch')} x {units.plural(pipeline.size(0), row)}{short}")
    text = f"{units.plural(plan.global_batch, row)} = {units.join_with_counts(shares, ' + ')}"
    if row == "sample":
        return [text]
    tokens = plan.global_batch * plan.sequence_length
    return [f"{text}, {plan.sequence_length:,} tokens each: {tokens:,} tokens per step"]


def _prediction(report: PlanReport, bound: bool) -> str:
    plan = report.plan
    tokens_per_s = units.ratio(plan.global_batch * plan.sequence_length, report.predicted_step_s)
    text = f"Predicted: {units.seconds(report.predicted_step_s)} per step, {tokens_per_s:,.0f} "
    text += f"{units.unit_of(plan.sequence_length)}/s"
    if bound:
        gap = units.percent(max(0.0, units.ratio(report.predicted_step_s, report.bound_step_s) - 1))
        text += f"; lower bound of any plan: {units.seconds(report.bound_step_s)} (fluid bound; this plan {gap} more)"
    return text


def costed_plan_lines(report: PlanReport, profile: ClusterProfile, use: Mapping[int, float], lost: Losses) -> list[str]:
    """Describe a plan with its prediction and lower bound, the utilisation ``use`` of each rank, and the bottleneck."""
    lines = plan_lines(report, profile) + wrap_text("Utilisation: ", utilisation(use))
    parts = [(lost.links, "links"), (lost.memory, "memory"), (lost.granularity, "whole layers and micro-batches")]
    if lost.choice > 0:
        parts.insert(0, (lost.choice, "this plan (the planner's plan is faster)"))
    spent = ", ".join(f"{units.percent(share)} to {name}" for share, name in parts)
    against = "compared with fully busy devices, the step loses"
    return lines + wrap_text("Limited by: ", f"{LIMITS[lost.limit]}; {against} {spent}")


def utilisation(shares: Mapping[int, float]) -> str:
    """List each rank's utilisation, as in ``rank 0 84 %, rank 1 90 %``, or the range and median if there are many ranks."""
    if len(shares) <= MAX_STAGE_ROWS:
        return ", ".join(f"rank {rank} {units.percent(shares[rank])}" for rank in sorted(shares))
    idlest, busiest = min(shares, key=lambda r: shares[r]), max(shares, key=lambda r: shares[r])
    return (
        f"of {len(shares)} ranks, rank {idlest} is the least busy ({units.percent(shares[idlest])}) and rank {busiest} the busiest "
        f"({units.percent(shares[busiest])}); the median is {units.percent(statistics.median(shares.values()))}"
    )


def shared_nic_lines(step_s: float, predicted_s: float) -> list[str]:
    """Report how much longer the step takes with one shared NIC per host (``step_s``) than predicted."""
    more = units.ratio(step_s, predicted_s) - 1
    change = "no change" if abs(more) < _MIN_SHOWN_CHANGE else f"{units.percent(more)} more than predicted"
    return wrap_text("Simulated with one NIC per host ", f"for all messages to other hosts: {change}")


_CAUSES = {
    "idles": "total_s",
    "waits for activations": "activations_s",
    "gradients": "gradients_s",
    "the link": "link_s",
    "all-reduce": "sums_s",
    "TP group": "group_s",
    "step end": "end_s",
}
"""Maps a column's title to a field of ``Idling``."""


def idling_lines(step: SimulatedStep, causes: Mapping[int, Idling], memory: Sequence[RankMemory]) -> list[str]:
    """Build a table with a row per rank: the shares of the step spent computing and idling, by cause, and peak memory."""

    def share(seconds: float) -> str:
        return units.percent(units.ratio(seconds, step.step_s))

    def idle_s(field: str, rank: int) -> float:
        return float(getattr(causes[rank], field))

    columns = (
        Column("rank", int),
        Column("computes", lambda rank: step.busy_s[rank] - causes[rank].group_s, share),
        *(Column(title, partial(idle_s, field), share) for title, field in _CAUSES.items()),
        Column("memory peak", lambda rank: [peak for peak in memory if peak.rank == rank], fullest_text),
    )
    table = Table(columns, sorted(step.busy_s))
    table = table if any(cause.group_s for cause in causes.values()) else table.without("TP group")
    return [
        *table.lines(MAX_STAGE_ROWS),
        *(["  all ranks: trace.json"] if len(table.rows) > MAX_STAGE_ROWS else []),
        "  all-reduce: of gradients, with other ranks; step end: waiting for slower ranks",
    ]


def what_if_lines(answers: Sequence[Outcome], step_s: float) -> list[str]:
    """Return a heading and a line for each variant, such as ``link 0 - 1 10x faster: -18 % (410 ms per step)``."""
    lines = []
    for answer in answers:
        if answer.step_s is None:
            lines.append(f"  {answer.change}: no plan ({answer.problem})")
        else:
            change = units.ratio(answer.step_s, step_s) - 1
            effect = "no change" if abs(change) < _MIN_SHOWN_CHANGE else units.change(change)
            lines.append(f"  {answer.change}: {effect} ({units.seconds(answer.step_s)} per step)")
    heading = "What if (replanned for each change; the loss to links above counts copies, NICs and group sums too):"
    return [*wrap_text("", heading), *lines] if lines else []
