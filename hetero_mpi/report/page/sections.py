"""The sections of the run report, made from a ``PastRun``; empty where it has nothing for them. ``report.html`` lays them out."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from hetero_mpi.planning.schedule import Event
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report import units
from hetero_mpi.report.alike import least_most, place_text
from hetero_mpi.report.figures.architecture import architecture
from hetero_mpi.report.figures.charts import RankUsage, Series, StepMark, line_chart
from hetero_mpi.report.figures.charts import usage as usage_bars
from hetero_mpi.report.figures.style import svg
from hetero_mpi.report.figures.timeline import MOST_LANES, Panel, timeline
from hetero_mpi.report.page.job import job_rows
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.run_files.measured import last_usage, sums, traffic
from hetero_mpi.report.tables import headline, holders_text, idle_lines, layers_text, schedule_text

USAGE_NOTE = (
    "Shares of the time since training began, or since the plan last changed. "
    "The thin bar is the prediction: computing, and the rest."
)
MEMORY_NOTE = (
    "Highest memory of each rank. The prediction counts weights, gradients, optimizer state, activations and buffers of messages. "
    "A GPU rank measures what is allocated on the device; a CPU rank the whole process."
)
PROCESS_NOTE = (
    "The processes of the CPU ranks held {} more than predicted: for the most part Python, PyTorch and the MPI library, which "
    "every process needs whatever it trains, on rank 0 also the data."
)
STEP_NOTE = (
    "One step as simulated and one as measured, on one time axis, or on one each where one is over three times as long. "
    "What is left empty is waiting; the dashed line is the end of the step. "
    "Clocks of several hosts were compared once, at the start."
)
LINKS_NOTE = "Messages between stages in one step. The speed while under way includes queueing behind other messages."
MARKS_NOTE = (
    "Upright lines: deaths (red), and changes of plan or later starts (violet). Under the pointer they say what happened; "
    "so does the end of this page."
)
_LOSSES = ("ranks-lost", "silent", "broken", "memory")
"""Events of a loss. A later start, or one of ``_GOING_ON``, tells the step at which the run went on."""
_GOING_ON = ("recovered", "first-step")
SPENT = (
    ("computing_s", "computing", "forward"),
    ("activations_s", "waiting for activations", "backward"),
    ("gradients_s", "waiting for gradients", "input-gradients"),
    ("copies_s", "copying", "copy"),
    ("sums_s", "gradient all-reduce", "all-reduce"),
    ("end_s", "waiting for the batch and the others", "send"),
)
"""(field of Usage, its name, its colour role)."""
_MOST_LINKS = 40


@dataclass(frozen=True)
class Table:
    """A table of texts: headers and rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int]
    """Columns aligned to the right."""

    @classmethod
    def of(cls, headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table | None:
        """A table without the columns that are empty in all rows; None where no column is left."""
        kept = [column for column in range(len(headers)) if any(row[column] for row in rows)]
        cells = [[row[column] for column in kept] for row in (headers, *rows)]
        return (
            cls(cells[0], cells[1:], [place for place, column in enumerate(kept) if column in right]) if kept else None
        )


@dataclass(frozen=True)
class Section:
    """A heading, and the contents below it in this order."""

    title: str
    note: str = ""
    times: bool = False
    """It has times, which are labelled where they are emulated."""
    charts: Sequence[Markup] = ()
    """Figures side by side, as wide as there is room."""
    picture: Markup | None = None
    """A figure that keeps its size, and scrolls where the page is narrower."""
    table: Table | None = None
    remarks: Sequence[str] = ()
    points: Sequence[str] = ()
    text: str = ""
    """A text, with its lines as they are."""

    @property
    def told(self) -> bool:
        return bool(self.charts or self.picture or self.table or self.remarks or self.points or self.text)


def key_figures(run: PastRun) -> list[tuple[str, str, str]]:
    """(what, figure, remark) of the figures at the top."""
    found = []
    steps, evaluations = run.metrics.steps, run.metrics.evaluations
    if steps:
        found.append(("loss", f"{steps[-1].loss:.4f}", f"from {steps[0].loss:.4f} at step {steps[0].step}"))
    if evaluations:
        found.append(("held-out loss", f"{evaluations[-1].loss:.4f}", f"at step {evaluations[-1].step}"))
    seconds, speed = run.median_step_s(), run.median_tokens_per_s()
    kind = "emulated" if run.emulated else "median"
    if speed is not None:
        found.append(("tokens per second", f"{speed:,.0f}", kind))
    if seconds is not None:
        remark = kind
        if run.report is not None:
            predicted_s = run.report.predicted_step_s
            remark = f"{units.seconds(predicted_s)} predicted ({units.change(seconds / predicted_s - 1)})"
        found.append(("time per step", units.seconds(seconds), remark))
    if steps:
        total_s = sum(step.step_s for step in steps)
        tokens = sum(step.tokens for step in steps)
        remark = f"in {units.seconds(total_s)} of steps"
        if run.emulated:  # what a second is worth is told of the profile's model, what was learnt of the stand-in
            stood_for = sum(step.tokens_per_s * step.step_s for step in steps)
            remark = f"the stand-in's; for {units.count(stood_for)} {remark}, emulated"
        found.append(("learnt from", f"{units.count(tokens)} tokens", remark))
    return found


def job(run: PastRun) -> Section:
    """The job: method, model, data, optimizer."""
    return Section("The job", table=Table.of(("", "asked for"), job_rows(run)))


def sample(run: PastRun) -> Section:
    """The text that the trained model wrote at the end."""
    return Section("What the trained model writes", text=run.sample.strip())


def marks(run: PastRun) -> list[StepMark]:
    """Deaths and changes of plan, as marks in the charts. A death is marked at the step from which the run went on."""
    found, lost = [], list[str]()
    for one in run.happenings:
        resumed = one.event == "training" and one.step is not None and one.step > 0
        if one.event in _LOSSES:
            lost.append(one.text)
        elif one.step is not None and (resumed or one.event == "rebalanced" or (lost and one.event in _GOING_ON)):
            text = f"after step {one.step}: {'; '.join([*lost, one.text])}"
            found.append(StepMark(one.step, text, "alert" if lost else "violet"))
            lost = lost if one.event == "rebalanced" else []
    return found


def learning(run: PastRun) -> Section:
    """Loss, held-out loss, learning rate and gradient norm over steps."""
    steps, happened = run.metrics.steps, marks(run)
    loss = [Series("training", tuple((s.step, s.loss) for s in steps), "accent")]
    held_out = tuple((e.step, e.loss) for e in run.metrics.evaluations)
    if held_out:
        loss.append(Series("held out", held_out, "warm", dots=True))
    rate = [Series("learning rate", tuple((s.step, s.lr) for s in steps), "good")]
    norm = [Series("gradient norm", tuple((s.step, s.grad_norm) for s in steps), "violet")]
    what = "loss, nats per token" if run.setting("train", "preference") in (None, "none") else "loss per pair"
    charts = [
        *_chart(what, loss, from_zero=False, marks=happened),
        *_chart("learning rate", rate),
        *_chart("norm of the gradients, before clipping", norm),
    ]
    return Section("Learning", MARKS_NOTE if happened else "", charts=charts)


def _chart(label: str, series: Sequence[Series], **form: Any) -> list[Markup]:
    """A chart, as ``line_chart`` draws it; none without points."""
    drawn = _picture(line_chart(label, series, **{"from_zero": True, **form}), label)
    return [drawn] if drawn else []


def speed(run: PastRun) -> Section:
    """Tokens per second; seconds per step, measured and predicted."""
    steps, happened = run.metrics.steps, marks(run)
    rate = [Series("tokens per second", tuple((s.step, s.tokens_per_s) for s in steps), "accent")]
    step_s = [Series("measured", tuple((s.step, s.step_s) for s in steps), "accent")]
    expected = tuple((s.step, s.predicted_step_s) for s in steps if s.predicted_step_s > 0)
    if expected:
        step_s.append(Series("predicted", expected, "warm", dashed=True))
    charts = [
        *_chart("tokens per second", rate, marks=happened),
        *_chart("time per step", step_s, y_text=units.seconds, marks=happened),
    ]
    return Section("Speed", MARKS_NOTE if happened else "", times=True, charts=charts)


def usage(run: PastRun, predicted: SimulatedStep | None) -> Section:
    """A bar per rank: what it spent its time on, and the predicted share of computing."""
    busy = _busy(predicted)
    spent = {
        rank: tuple((name, getattr(used, field) / used.seconds, colour) for field, name, colour in SPENT)
        for rank, used in last_usage(run.rank_steps).items()
        if used.seconds > 0
    }
    ranks = [
        RankUsage(f"rank {rank}", place_text(run.profile, rank), spent.get(rank, ()), busy.get(rank))
        for rank in sorted(spent or busy)
    ]
    drawn = usage_bars(ranks) if ranks else None
    return Section("What the ranks do", USAGE_NOTE, times=True, picture=_picture(drawn, "what the ranks do"))


def _busy(predicted: SimulatedStep | None) -> dict[int, float]:
    """Rank -> predicted share of the step in which it computes."""
    if predicted is None or predicted.step_s <= 0:
        return {}
    return {rank: seconds / predicted.step_s for rank, seconds in predicted.busy_s.items()}


def memory(run: PastRun) -> Section:
    """A row per rank: predicted and measured peak of memory, and its limit."""
    used = last_usage(run.rank_steps)
    rows, uncounted = [], []
    for known in run.report.memory if run.report is not None else ():
        # What an emulated rank holds is the model that stands in for the profile's: no measurement of this plan.
        peak = used[known.rank].peak_bytes if known.rank in used and not run.emulated else 0
        if run.profile is not None and run.profile.devices[known.rank].backend == "cpu" and peak > known.peak_bytes:
            uncounted.append(peak - known.peak_bytes)
        rows.append(
            (
                str(known.rank),
                place_text(run.profile, known.rank),
                units.size(known.peak_bytes),
                units.size(peak) if peak else "",
                units.size(known.usable_bytes),
                run.profile.devices[known.rank].memory_reason if run.profile is not None else "",
            )
        )
    headers = ("rank", "device", "predicted", "measured", "usable", "why so much")
    remarks = [PROCESS_NOTE.format(least_most(uncounted, units.size))] if uncounted else []
    table = Table.of(headers, rows, right=(0, 2, 3, 4))
    return Section("Memory", MEMORY_NOTE, times=True, table=table, remarks=remarks)


def step(run: PastRun, predicted: SimulatedStep | None, measured: Sequence[Event], number: int) -> Section:
    """The timeline of a step, predicted above measured."""
    panels = []
    if predicted is not None:
        panels.append(Panel(f"predicted: {units.seconds(predicted.step_s)}", predicted.events))
    if measured:
        last_s = max(event.end_s for event in measured)
        panels.append(Panel(f"measured, step {number}: {units.seconds(last_s)}", measured))
    labels = {device.rank: device.name for device in run.profile.devices} if run.profile is not None else {}
    drawn = timeline(panels, labels, MOST_LANES) if panels else None
    label = "timeline of a step: " + ", ".join(panel.title for panel in panels)
    remarks = ["No step was recorded under this plan."] if panels and not measured else []
    return Section("A step", STEP_NOTE, times=True, picture=_picture(drawn, label), remarks=remarks)


def links(run: PastRun, predicted: SimulatedStep | None, measured: Sequence[Event]) -> Section:
    """A row per directed pair of ranks: bytes of a step, and speeds."""
    section = Section("Links", LINKS_NOTE, times=True)
    if run.plan is None or run.profile is None or predicted is None:
        return section
    expected, seen = traffic(predicted.events, run.plan), traffic(measured, run.plan)
    rows = []
    for pair in sorted({*expected, *seen})[:_MOST_LINKS]:
        there, real, link = expected.get(pair), seen.get(pair), run.profile.link(*pair)
        busy = units.percent(there.seconds / predicted.step_s) if there is not None and predicted.step_s > 0 else ""
        if real is not None and there is not None and run.emulated:
            real = replace(real, bytes=there.bytes)  # the message stands for the one of the profile's model
        under_way = real is not None and math.isfinite(real.bytes_per_s)
        rows.append(
            (
                f"{pair[0]} → {pair[1]}",
                f"{run.profile.devices[pair[0]].host} → {run.profile.devices[pair[1]].host}",
                str(there.messages if there is not None else real.messages if real is not None else 0),
                units.size(there.bytes) if there is not None else "",
                units.size(real.bytes) if real is not None else "",
                units.bandwidth(link.bytes_per_s),
                units.bandwidth(real.bytes_per_s) if real is not None and under_way else "",
                busy,
            )
        )
    headers = (
        "ranks",
        "hosts",
        "messages",
        "bytes, predicted",
        "bytes, measured",
        "link",
        "while under way",
        "link busy, predicted",
    )
    more = len({*expected, *seen}) - len(rows)
    remarks = [f"And {more} more pairs."] if more > 0 else []
    remarks += _all_reduce_text(sums(predicted.events), sums(measured))
    table = Table.of(headers, rows, right=(2, 3, 4, 5, 6, 7))
    return replace(section, note=LINKS_NOTE if table else "", table=table, remarks=remarks)


def _all_reduce_text(expected: Mapping[int, float], seen: Mapping[int, float]) -> list[str]:
    if not expected:
        return []
    longest = units.seconds(max(expected.values()))
    waited = f"; measured, ranks wait up to {units.seconds(max(seen.values()))} for it" if seen else ""
    return [f"Gradient all-reduce: {len(expected)} ranks, up to {longest} of a step predicted{waited}."]


def topology(run: PastRun, predicted: SimulatedStep | None) -> Section:
    """The figure of the plan."""
    drawn = None
    if run.report is not None and run.profile is not None:
        drawn = architecture(run.report, run.profile, run.name, _busy(predicted))
    return Section("Where everything is", times=True, picture=_picture(drawn, f"architecture: {run.name}"))


def plan(run: PastRun) -> Section:
    """Stages, reasons, idle ranks, and the gap to the bound where it is close."""
    section = Section("The plan, and why", times=True)
    if run.report is None:
        return section
    return replace(section, table=_stages(run.report.plan, run.profile), points=_reasons(run.report))


def _stages(plan: Plan, profile: ClusterProfile | None) -> Table | None:
    rows = []
    several = len(plan.pipelines) > 1
    for number, index, stage in plan.numbered:
        pipeline = plan.pipelines[index]
        rows.append(
            (
                str(index) if several else "",
                str(number),
                holders_text(stage),
                ", ".join(dict.fromkeys(place_text(profile, rank) for rank in stage.ranks)),
                layers_text(stage.first, stage.last, plan.layers),
                f"{pipeline.micro_batches} x {pipeline.micro_batch}",
                str(stage.warm_up),
                "streamed" if stage.streamed else "yes" if stage.recompute else "",
            )
        )
    headers = ("pipeline", "stage", "rank", "device", "layers", "micro-batches", "warm-up", "recompute")
    return Table.of(headers, rows, right=(0, 1, 2, 6))


def _reasons(report: PlanReport) -> list[str]:
    schedule = schedule_text(report.plan).removeprefix(", schedule")
    found = [f"Predicted: {headline(report)}.", *([f"Schedule{schedule}."] if schedule else [])]
    found += [f"Because: {reason}" for reason in report.reasons]
    return found + [line[:1].upper() + line[1:] for line in idle_lines(report.idle)]


def checkpoints(run: PastRun) -> Section:
    """The checkpoints that a run can be resumed from."""
    rows = [(str(one.step), units.size(one.bytes), _moment(one.unix_s)) for one in run.checkpoints]
    return Section("Checkpoints", table=Table.of(("after step", "size", "written"), rows, right=(0, 1)))


def happenings(run: PastRun) -> Section:
    """Starts, recoveries, changes of plan and restarts, by time."""
    rows = [(_moment(one.unix_s), one.event, one.text) for one in run.happenings]
    return Section("What happened", table=Table.of(("when", "what", ""), rows))


def _picture(figure: Figure | None, label: str) -> Markup | None:
    return Markup(svg(figure, label, page=True)) if figure is not None else None


def _moment(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
