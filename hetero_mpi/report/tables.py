"""The tables before the first step: the machines as profiled, the plan with its reasons, the batch arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hetero_mpi.planning.durations import Durations, compute_s, stage_s
from hetero_mpi.planning.memory import shared_parameters
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.plan_report import HostMemory, IdleRank, PlanReport, RankMemory
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LinkProfile
from hetero_mpi.planning.words import describe_layers, ratio
from hetero_mpi.report import units
from hetero_mpi.report.alike import (
    EVERY_STAGE,
    MOST_ROWS,
    MOST_STAGES,
    device_text,
    fullest_text,
    grouped,
    least_most,
    rank_rows,
)
from hetero_mpi.report.lines import table, wrapped

NOT_PREDICTED = "nothing is predicted in this file; `plan --profile PROFILE --plan FILE` works it out"


def profile_lines(profile: ClusterProfile) -> list[str]:
    """A row per rank with device, memory and speed, and the links between ranks.

    With more than ``MOST_ROWS`` ranks, ranks of a host that look alike share a row; if those rows are still too many, ranks of one
    kind of device do.
    """
    ranks, tokens = len(profile.devices), profile.model.sequence_length
    own_s = {device.rank: [block_s(profile, device, op) for op in (Op.F, Op.B)] for device in profile.devices}

    def looks(device: DeviceProfile) -> tuple[str, ...]:
        texts = (*map(units.seconds, own_s[device.rank]), units.size(device.memory_bytes), device.memory_reason)
        return str(device.rank) if ranks <= MOST_ROWS else "", device.host, device_text(device), *texts

    rows = rank_rows(profile, own_s, looks, units.numbers)
    if len(rows) > MOST_ROWS:
        rows = rank_rows(profile, own_s, device_text, _how_many)
    lines = [f"Ranks: {ranks}, {profile.mpi_library}; figures {profile.source}, {profile.date}"]
    lines += table(("rank", *_places(profile), "forward", "backward", "memory", "why so much"), rows)
    lines += wrapped("  ", f"forward and backward: one block, one sequence of {tokens:,} tokens, {profile.model.dtype}")
    lines += _link_lines(profile)
    for note in profile.notes:
        lines += wrapped("  ", note)
    return lines


def _how_many(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0]}"


def headline(report: PlanReport) -> str:
    """``3 ranks, 389 ms per step (395 ms when tried); the best one alone, rank 1, 489 ms (1.26x)``: the gain over the best single
    device."""
    plan, best = report.plan, report.alone
    used, there = len(plan.ranks), len(report.memory) + len(report.idle)
    text = f"{units.plural(used, 'rank')}" if used >= there else f"{used} of {units.plural(there, 'rank')}"
    text += f", {units.seconds(report.predicted_step_s)} per step"
    text += f" ({units.seconds(report.tried_step_s)} when tried)" if report.tried_step_s is not None else ""
    if best is None or there <= 1:
        return text
    if best.step_s is None:
        return f"{text}; no rank can do it alone (rank {best.rank}: {best.problem})"
    gain = ratio(best.step_s, report.predicted_step_s)
    if len(plan.ranks) == 1 and gain >= 1:
        return f"{text}: rank {plan.ranks[0]} alone, which the others would only slow down"
    what = "the best one alone" if gain >= 1 else "one alone would be faster"
    why = f": {best.problem}" if best.problem else ""
    return f"{text}; {what}, rank {best.rank}, {units.seconds(best.step_s)} ({gain:.2f}x){why}"


def plan_lines(told: PlanReport | Plan, profile: ClusterProfile | None, every: bool = False) -> list[str]:
    """A plan as lines: headline, a table of stages with memory and utilisation, idle ranks with reasons, the batch, the prediction.

    Args:
        told: a plan without a report has no prediction.
        profile: for which the plan was made; None: what needs it is left out.
        every: a row for each stage, however many there are.
    """
    plan, report = (told, None) if isinstance(told, Plan) else (told.plan, told)
    many = len(plan.numbered) > MOST_STAGES and not every
    lines = wrapped("", headline(report)) if report is not None else []
    lines += [plan_title(plan, profile)]
    lines += table(*stage_table(plan, profile, report.memory if report is not None else (), many))
    tokens = " or ".join(dict.fromkeys(f"{one.micro_batch * plan.sequence_length:,}" for one in plan.pipelines))
    shown = f"weights: parameters; compute: forward + backward of {tokens} tokens; " if profile is not None else ""
    lines.append(f"  {shown}warm-up: micro-batches ahead of the first backward")
    if many:
        lines.append(f"  {EVERY_STAGE}")
    if report is not None:
        lines += host_lines(report.hosts)
        for line in idle_lines(report.idle):
            lines += wrapped("  ", line)
        for reason in report.reasons:
            lines += wrapped("  because: ", reason)
    lines += [f"Batch: {line}" for line in batch_lines(plan)]
    lines += wrapped("", _prediction(report, profile is None)) if report is not None else [f"  {NOT_PREDICTED}"]
    return lines


def plan_title(plan: Plan, profile: ClusterProfile | None) -> str:
    """``Plan: 4 stages in 2 pipelines, schedule 1F1B``."""
    interleaved = any(pipeline.interleaved for pipeline in plan.pipelines)
    on = f" on {units.plural(len(plan.ranks), 'rank')}" if interleaved else ""
    pipelines = "" if len(plan.pipelines) == 1 else f" in {len(plan.pipelines)} pipelines"
    emulated = " on emulated devices" if profile is not None and profile.emulated else ""
    return f"Plan: {units.plural(len(plan.numbered), 'stage')}{on}{pipelines}{emulated}{schedule_text(plan)}"


def schedule_text(plan: Plan) -> str:
    """``, schedule 1F1B``: the pipelines' schedules, and how they differ from these; empty without pipelines of several stages."""
    names = dict.fromkeys(_schedule_text(pipeline) for pipeline in plan.pipelines if len(pipeline.stages) > 1)
    return f", schedule {' and '.join(names)}" if names else ""


def _schedule_text(pipeline: PipelinePlan) -> str:
    count, last = pipeline.micro_batches, len(pipeline.stages) - 1
    if pipeline.interleaved:
        return f"{pipeline.order} ({max(map(len, pipeline.held.values()))} stages per rank)"
    if pipeline.order != WARM_UP:
        return pipeline.order
    depths = [min(stage.warm_up, count) for stage in pipeline.stages]
    classic = [min(last - place, count) for place in range(last + 1)]
    if min(depths) >= count - 1 and count > 1:
        name = "GPipe"
    else:
        name = "1F1B" if depths == classic else "1F1B with its own warm-up depths"
    return f"{name}, split backward" if pipeline.split_backward else name


def idle_lines(idle: Sequence[IdleRank]) -> list[str]:
    """``ranks 4-7 idle: a slower card than ...``, one line per reason."""
    alike = idle_alike(idle).items()
    return [f"{units.ranks(r)} {'idles' if len(r) == 1 else 'idle'}: {reason}" for reason, r in alike]


def idle_alike(idle: Sequence[IdleRank]) -> dict[str, list[int]]:
    """Reason -> the ranks that idle for it, in their order."""
    alike = grouped(sorted(idle, key=lambda one: one.rank), lambda one: one.reason)
    return {reason: [one.rank for one in members] for reason, members in alike.items()}


def host_lines(hosts: Sequence[HostMemory]) -> list[str]:
    """``host alpha: 12.0 of 60.0 GB for its ranks together``; of many hosts only the fullest."""
    fullest_first = sorted(hosts, key=lambda host: -host.peak_bytes / max(host.usable_bytes, 1))
    shown = hosts if len(hosts) <= MOST_ROWS else fullest_first[:1]
    more = f" (the fullest of {len(hosts)})" if len(shown) < len(hosts) else ""
    return [
        f"  host {units.shortened(host.host)}: {units.size(host.peak_bytes)} of {units.size(host.usable_bytes)} "
        f"for its ranks together{more}"
        for host in shown
    ]


def _places(profile: ClusterProfile) -> tuple[str, str]:
    """Headings of the columns for hosts and devices. They say so where ranks are emulated."""
    return ("emulated host", "emulated device") if profile.emulated else ("host", "device")


def layers_text(first: int, last: int, layers: int) -> str:
    """Layers [first, last) of a chain of ``layers``, in words: ``embedding, blocks 0-3``."""
    return describe_layers(first, last, layers).replace(" + ", ", ")


def holders_text(stage: StagePlan) -> str:
    """``2``; of a group its ranks and what each has of every layer: ``0, 1 (5 + 3 heads)``."""
    ranks = ", ".join(map(str, stage.ranks))
    return f"{ranks} ({heads_text(stage)})" if stage.grouped else ranks


def heads_text(stage: StagePlan) -> str:
    """Key/value heads of each rank of a group, and experts where they were shared out: ``5 + 3 heads, 2 + 6 experts``."""
    heads = f"{' + '.join(map(str, stage.shares))} heads"
    return heads if stage.experts is None else f"{heads}, {' + '.join(map(str, stage.experts))} experts"


def stage_table(
    plan: Plan, profile: ClusterProfile | None, memory: Sequence[RankMemory], many: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and rows of stages. ``many``: stages on one kind of device (without a profile: of as many layers) share a row."""
    profile = Durations(plan, profile).profile if profile is not None else None
    groups: dict[object, list[tuple[PipelinePlan, StagePlan]]] = {}
    for number, index, stage in plan.numbered:
        kind = (_devices(stage, profile) or stage.last - stage.first) if many else number
        groups.setdefault(kind, []).append((plan.pipelines[index], stage))
    rows: list[tuple[str, ...]] = []
    told: set[int] = set()
    for (first, stage), *others in groups.values():
        held = [(first, stage), *others]
        stages = [one for _, one in held]
        # A rank's memory is that of all its stages: it stands beside the first.
        fresh = {rank for one in stages for rank in one.ranks} - told
        told |= fresh
        weights = compute = micro_batches = ""
        if profile is not None:
            weights = least_most([_parameters(one, profile) for one in stages], units.count)
            compute = least_most([_micro_batch_s(*one, plan, profile) for one in held], units.seconds)
        else:
            micro_batches = least_most([pipeline.micro_batches for pipeline, _ in held], "{:.0f}".format)
            micro_batches += "" if many else f" x {first.micro_batch}"
        pipeline = str(plan.pipelines.index(first)) if len(plan.pipelines) > 1 else ""
        who = ("", str(len(held)), "") if many else (pipeline, str(len(rows)), holders_text(stage))
        rows.append((
            *who,
            _devices(stage, profile),
            least_most([one.last - one.first for one in stages], "{:.0f}".format) if many
            else layers_text(stage.first, stage.last, plan.layers),
            micro_batches,
            weights,
            fullest_text([known for known in memory if known.rank in fresh]),
            compute,
            _recomputes(stages, many),
            least_most([one.warm_up for one in stages], "{:.0f}".format),
        ))  # fmt: skip
    names = (
        ("", "stages", "", "layers each", "fullest memory")
        if many
        else ("pipeline", "stage", "rank", "layers", "memory")
    )
    device = _places(profile)[1] if profile is not None else ""
    headers = (*names[:3], device, names[3], "micro-batches", "weights", names[4], "compute", "recompute", "warm-up")
    return headers, rows


def _recomputes(stages: Sequence[StagePlan], many: bool) -> str:
    """How many of the stages recompute forwards, and how many stream their weights (and recompute too)."""
    found = {
        "yes": sum(one.recompute and not one.streamed for one in stages),
        "streamed": sum(one.streamed for one in stages),
    }
    if not many:
        return next((word for word, count in found.items() if count), "")
    return ", ".join(f"{count} {word if word == 'streamed' else 'of them'}" for word, count in found.items() if count)


def _devices(stage: StagePlan, profile: ClusterProfile | None) -> str:
    """The devices of a stage's ranks; "" without a profile."""
    known = [device_text(profile.devices[rank]) for rank in stage.ranks] if profile is not None else []
    return ", ".join(dict.fromkeys(known))


def _parameters(stage: StagePlan, profile: ClusterProfile) -> int:
    layers = profile.model.layers[stage.first : stage.last]
    return sum(layer.parameters for layer in layers) - shared_parameters(profile.model, stage.first, stage.last)


def _micro_batch_s(pipeline: PipelinePlan, stage: StagePlan, plan: Plan, profile: ClusterProfile) -> float:
    return sum(stage_s(profile, pipeline, stage, pipeline.size(0), plan.sequence_length, op) for op in (Op.F, Op.B))


def batch_lines(plan: Plan) -> list[str]:
    """``64 sequences = 8 micro-batches x 8 sequences, 128 tokens each: 8,192 tokens per step``."""
    shares: dict[str, int] = {}
    row = "sample" if units.unit_of(plan.sequence_length) == "samples" else "sequence"
    for pipeline in plan.pipelines:
        count, last = pipeline.micro_batches, pipeline.size(pipeline.micro_batches - 1)
        short = f" (the last: {last})" if last < pipeline.size(0) else ""
        share = f"{units.plural(count, 'micro-batch')} x {units.plural(pipeline.size(0), row)}{short}"
        shares[share] = shares.get(share, 0) + 1
    parts = [share if many == 1 else f"{many} x ({share})" for share, many in shares.items()]
    text = f"{units.plural(plan.global_batch, row)} = {' + '.join(parts)}"
    if row == "sample":
        return [text]
    tokens = plan.global_batch * plan.sequence_length
    return [f"{text}, {plan.sequence_length:,} tokens each: {tokens:,} tokens per step"]


def _prediction(report: PlanReport, bound: bool) -> str:
    plan = report.plan
    tokens_per_s = ratio(plan.global_batch * plan.sequence_length, report.predicted_step_s)
    text = f"Predicted: {units.seconds(report.predicted_step_s)} per step, {tokens_per_s:,.0f} "
    text += f"{units.unit_of(plan.sequence_length)}/s"
    return f"{text}; {_bound_text(report)}" if bound else text


def _bound_text(report: PlanReport) -> str:
    """``no plan could take less than 380 ms (fluid bound; this one 2.4 % more)``."""
    gap = units.percent(max(0.0, ratio(report.predicted_step_s, report.bound_step_s) - 1))
    return f"no plan could take less than {units.seconds(report.bound_step_s)} (fluid bound; this one {gap} more)"


def _link_lines(profile: ClusterProfile) -> list[str]:
    links = profile.told_links()
    if not links:
        return []
    latencies = [link.latency_s for link in links]
    bandwidths = [link.bytes_per_s for link in links]
    # The link that would take longest over what the blocks send: neither latency nor bandwidth says that alone.
    boundary = profile.model.most_sent_bytes_per_token * profile.model.sequence_length

    def message_s(link: LinkProfile) -> float:
        return link.latency_s + boundary / link.bytes_per_s

    slowest = max(links, key=lambda link: (message_s(link), link.source, link.destination))
    return [
        f"  {units.plural(len(links), 'link')}{'' if profile.links else ' from host to host'} (least, median, most): "
        f"latency {', '.join(units.seconds(value) for value in _spread(latencies))}; "
        f"bandwidth {', '.join(units.bandwidth(value) for value in _spread(bandwidths))}",
        f"  slowest: rank {slowest.source} -> rank {slowest.destination}, "
        f"{units.seconds(message_s(slowest))} for one sequence's activations ({units.size(boundary)})",
    ]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def block_s(profile: ClusterProfile, device: DeviceProfile, op: Op) -> float:
    """Mean seconds of a block (kinds may differ) over one sequence."""
    layers = len(profile.model.layers)
    total = compute_s(profile, device, 1, layers - 1, profile.model.sequence_length, op)
    return total / max(layers - 2, 1)
