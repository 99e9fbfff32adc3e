"""The sections of the page of a run, made from a ``PastRun``; empty where it has nothing for them. ``page.html`` lays them out."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from hetero_mpi.objectives import learns_from
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.report.figures.architecture import architecture
from hetero_mpi.report.figures.curves import Series, StepMark, line_chart
from hetero_mpi.report.figures.style import svg
from hetero_mpi.report.figures.timeline import MOST_LANES, Panel, timeline
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.plan_text import headline, idle_lines, schedule_text, stage_note, stage_table
from hetero_mpi.report.profile_text import finite_bandwidth, place_text
from hetero_mpi.report.run_text import job_rows, next_steps, worth_adding
from hetero_mpi.report.table import Column, Table, least_most
from hetero_mpi.rundir.line_files import METRICS_NAME, STEPS_NAME
from hetero_mpi.rundir.metrics import Evaluation, StepMetrics
from hetero_mpi.rundir.rank_steps import Traffic, last_usage, sums, traffic
from hetero_mpi.rundir.run_directory import SAMPLE_NAME, TRACE_NAME
from hetero_mpi.util import units

USAGE_NOTE = "Shares of the time since training began, or since the plan last changed."
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
GROUP_NOTE = " In a group, exchanges are spread over the computing; they are drawn behind it."
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
    ("exchange_s", "exchange in the group", "exchange"),
    ("group_wait_s", "waiting in the group", "faint"),
    ("end_s", "waiting for the batch and the others", "send"),
)
"""(field of Usage or a part of it, its name, its colour role). In a group the rank that spent the least time in exchanges is taken
not to have waited in them."""
_MOST_LINKS = 40
FILES = {
    "model": "the trained model, for AutoModelForCausalLM.from_pretrained",
    "adapter": "the trained adapter, for PeftModel.from_pretrained",
    SAMPLE_NAME: "the text that the trained model wrote",
    "checkpoints": "what a run is resumed from",
    TRACE_NAME: "a few steps of all ranks, for https://ui.perfetto.dev",
    METRICS_NAME: "a line for each step",
    STEPS_NAME: "what each rank did in a few steps",
    "plan.toml": "the plan, for --plan",
    "profile.toml": "the measured devices and links, for --profile",
    "logs": "what each rank printed",
}
"""File or folder of a run directory -> what it holds."""


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
    """A figure that keeps its size, and scrolls where the page is narrower; the page says so."""
    table: Table | None = None
    remarks: Sequence[str] = ()
    points: Sequence[str] = ()
    text: str = ""
    """A text, with its lines as they are."""

    @property
    def told(self) -> bool:
        return bool(self.charts or self.picture or self.table or self.remarks or self.points or self.text)


def job(run: PastRun) -> Section:
    """The job: method, model, data, optimizer."""
    rows = job_rows(run.job, run.profile.model.dtype if run.profile is not None else "")
    return Section("The job", table=Table.of_texts(("", "asked for"), rows))


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
    """Loss, held-out loss, learning rate, gradient norm, and seconds measured and predicted, over steps."""
    steps, evaluations, happened = run.metrics.steps, run.metrics.evaluations, marks(run)
    expected = [step for step in steps if step.predicted_step_s > 0]
    loss = [
        *_series(steps, {"loss": ("training", "accent")}),
        *_series(evaluations, {"loss": ("held out", "warm")}, dots=True),
    ]
    for place, name in enumerate(evaluations[-1].sets or () if evaluations else ()):
        points = tuple((e.step, e.sets[name]) for e in evaluations if e.sets and name in e.sets)
        loss.append(Series(name, points, ("good", "violet", "alert")[place % 3], dots=True))
    step_s = _series(steps, {"step_s": ("measured", "accent")})
    step_s += _series(expected, {"predicted_step_s": ("predicted", "warm")}, dashed=True)
    records = learns_from(str(run.setting("train", "preference")))
    what = {None: "loss, nats per token", "labels": "loss per answer", "pairs": "loss per pair"}[records]
    accuracy = _series(evaluations, {"token_accuracy": ("token accuracy", "warm")})
    rate = _series(steps, {"lr": ("learning rate", "good")})
    norm = _series(steps, {"grad_norm": ("gradient norm", "violet")})
    charts = [
        line_chart(what, loss, marks=happened),
        line_chart("held-out token accuracy", accuracy, marks=happened),
        *(line_chart(label, _series(steps, named)) for label, named in _REWARDS.items()),
        line_chart(
            f"time per step{', emulated' * run.emulated}", step_s, units.seconds, from_zero=True, marks=happened
        ),
        line_chart("learning rate", rate, from_zero=True),
        line_chart("norm of the gradients, before clipping", norm, from_zero=True),
    ]
    return Section(
        "Learning and speed", MARKS_NOTE if happened else "", charts=[one for one in charts if one is not None]
    )


_REWARDS = {
    "rewards": {"chosen_reward": ("chosen", "good"), "rejected_reward": ("rejected", "alert")},
    "reward margin": {"reward_margin": ("margin", "accent")},
    "share of pairs with the higher reward for the chosen answer": {"reward_accuracy": ("accuracy", "accent")},
}
"""Charts of preferences: label, and metric -> (name, colour)."""


def _series(
    steps: Sequence[StepMetrics | Evaluation], named: Mapping[str, tuple[str, str]], dots: bool = False, dashed: bool = False
) -> list[Series]:  # fmt: skip
    """The metrics over steps, where they are known. ``named``: metric -> (name, colour)."""
    found = []
    for key, (name, colour) in named.items():
        points = tuple((step.step, value) for step in steps if (value := getattr(step, key)) is not None)
        found += [Series(name, points, colour, dots, dashed)] if points else []
    return found


def usage(run: PastRun) -> Section:
    """A row per rank: the shares of what it spent its time on, as a bar and as figures; and the predicted share of computing."""
    use = run.predicted.use if run.predicted is not None else {}
    shares = _shares_of_time(run, use)
    kinds = [one for one in SPENT if any(spent[one[0]] >= 0.0005 for spent in shares.values())]

    def spent(rank: int) -> list[float]:
        return [shares.get(rank, {}).get(field, 0.0) for field, _, _ in kinds]

    mark = Markup('<i class="key" style="background:var(--{})"></i>\N{NO-BREAK SPACE}{}')
    keys = [mark.format(colour, name) for _, name, colour in kinds]
    columns = (
        Column("rank", int),
        Column("device", partial(place_text, run.profile), left=True),
        Column("", lambda rank: _bar(spent(rank), kinds) if kinds else None, left=True),
        Column("computing, predicted", use.get, units.percent),
        *(Column(name, lambda rank, place=place: spent(rank)[place], units.percent) for place, name in enumerate(keys)),  # type: ignore[misc]
    )
    return Section("What the ranks do", USAGE_NOTE, times=True, table=Table(columns, sorted(shares or use)))


def _shares_of_time(run: PastRun, ranks: Mapping[int, float]) -> dict[int, dict[str, float]]:
    """Rank -> share of its time, by the fields of ``SPENT``."""
    used = {
        rank: one for rank, one in last_usage(run.rank_steps).items() if one.seconds > 0 and rank in (ranks or [rank])
    }
    group_of = {rank: stage.ranks for _, _, stage in (run.plan.numbered if run.plan else ()) for rank in stage.ranks}
    shares = {}
    for rank, own in used.items():
        least_s = min(used[one].group_s for one in group_of.get(rank, ()) if one in used) if rank in group_of else 0.0
        seconds = {**vars(own), "end_s": own.end_s, "exchange_s": least_s, "group_wait_s": own.group_s - least_s}
        shares[rank] = {field: seconds[field] / own.seconds for field, _, _ in SPENT}
    return shares


def _bar(shares: Sequence[float], kinds: Sequence[tuple[str, str, str]]) -> Markup:
    """A bar of the shares of these kinds, of ``SPENT``, in their colours, with texts under the pointer."""
    part = Markup('<i style="width:{:.1f}%;background:var(--{})" title="{}"></i>')
    told = zip(shares, kinds, strict=True)
    parts = [part.format(100 * share, colour, f"{name}: {share * 100:.1f} %") for share, (_, name, colour) in told]
    return Markup('<span class="bar">{}</span>').format(Markup("").join(parts))


def memory(run: PastRun) -> Section:
    """A row per rank: predicted and measured peak of memory, and its limit."""
    # What an emulated rank holds is the model that stands in for the profile's: no measurement of this plan.
    usage = {} if run.emulated else last_usage(run.rank_steps)
    peaks = {rank: used.peak_bytes for rank, used in usage.items() if used.peak_bytes}
    rows = run.report.memory if run.report is not None else ()
    devices = run.profile.devices if run.profile is not None else ()
    cpu_rows = [row for row in rows if devices and devices[row.rank].backend == "cpu"]
    uncounted = [peaks[row.rank] - row.peak_bytes for row in cpu_rows if peaks.get(row.rank, 0) > row.peak_bytes]
    columns = (
        Column("rank", "rank"),
        Column("device", lambda row: place_text(run.profile, row.rank), left=True),
        Column("predicted", "peak_bytes", units.size),
        Column("measured", lambda row: peaks.get(row.rank), units.size),
        Column("usable", "usable_bytes", units.size),
        Column("why so much", lambda row: devices[row.rank].memory_reason if devices else None, left=True),
    )
    remarks = [PROCESS_NOTE.format(least_most(uncounted, units.size))] if uncounted else []
    return Section("Memory", MEMORY_NOTE, times=True, table=Table(columns, rows), remarks=remarks)


def step(run: PastRun) -> Section:
    """The timeline of a step, predicted above measured."""
    panels, measured = [], run.recorded
    if run.predicted is not None:
        panels.append(Panel(f"predicted: {units.seconds(run.predicted.step_s)}", run.predicted.events))
    if measured:
        last_s = max(event.end_s for event in measured)
        panels.append(Panel(f"measured, step {measured[0].step}: {units.seconds(last_s)}", measured))
    labels = {device.rank: device.name for device in run.profile.devices} if run.profile is not None else {}
    drawn = timeline(panels, labels, MOST_LANES) if panels else None
    label = "timeline of a step: " + ", ".join(panel.title for panel in panels)
    remarks = ["No step was recorded under this plan."] if panels and not measured else []
    note = STEP_NOTE + GROUP_NOTE * any(event.exchanged_s for one in panels for event in one.events)
    return Section("A step", note, times=True, picture=_picture(drawn, label), remarks=remarks)


def links(run: PastRun) -> Section:
    """A row per directed pair of ranks: bytes of a step, and speeds."""
    predicted, profile = run.predicted, run.profile
    if run.plan is None or profile is None or predicted is None:
        return Section("Links")
    expected, seen = traffic(predicted.events, run.plan), traffic(run.recorded, run.plan)
    if run.emulated:  # a message stands for the one of the profile's model
        seen = {pair: replace(real, bytes=expected.get(pair, real).bytes) for pair, real in seen.items()}

    def of(known: Mapping[tuple[int, int], Traffic], field: str) -> Callable[[tuple[int, int]], Any]:
        return lambda pair: getattr(known.get(pair), field, None)

    columns = (
        Column("ranks", "{0[0]} → {0[1]}".format, left=True),
        Column("hosts", lambda pair: " → ".join(profile.devices[rank].host for rank in pair), left=True),
        Column("messages", of(seen | expected, "messages")),
        Column("bytes, predicted", of(expected, "bytes"), units.size),
        Column("bytes, measured", of(seen, "bytes"), units.size),
        Column("link", lambda pair: profile.link(*pair).bytes_per_s, units.bandwidth),
        Column("while under way", of(seen, "bytes_per_s"), finite_bandwidth),
        Column("link busy, predicted", of(expected, "seconds"), partial(_share_text, predicted.step_s)),
    )
    pairs = sorted({*expected, *seen})
    remarks = [f"And {len(pairs) - _MOST_LINKS} more pairs."] if len(pairs) > _MOST_LINKS else []
    remarks += _all_reduce_text(sums(predicted.events), sums(run.recorded))
    table = Table(columns, pairs[:_MOST_LINKS])
    return Section("Links", LINKS_NOTE if pairs else "", True, table=table, remarks=remarks)


def _share_text(step_s: float, seconds: float) -> str:
    return units.percent(seconds / step_s) if step_s > 0 else ""


def _all_reduce_text(expected: Mapping[int, float], seen: Mapping[int, float]) -> list[str]:
    if not expected:
        return []
    longest = units.seconds(max(expected.values()))
    waited = f"; measured, ranks wait up to {units.seconds(max(seen.values()))} for it" if seen else ""
    return [f"Gradient all-reduce: {len(expected)} ranks, up to {longest} of a step predicted{waited}."]


def topology(run: PastRun) -> Section:
    """The figure of the plan."""
    drawn = None
    if run.report is not None and run.profile is not None:
        drawn = architecture(run.report, run.profile, run.name, run.predicted.use if run.predicted is not None else {})
    return Section("Where everything is", times=True, picture=_picture(drawn, f"architecture: {run.name}"))


def plan(run: PastRun) -> Section:
    """Stages, reasons and idle ranks."""
    if run.report is None:
        return Section("The plan, and why")
    stages = stage_table(run.report.plan, run.profile, (), lambda device: f"{device.name}, {device.host}")
    note = f"{stage_note(run.report.plan, run.profile).capitalize()}."
    points = _reasons(run.report)
    if run.report.alone is not None and run.profile is not None and len(run.profile.devices) > 1:
        worth = worth_adding([run.report.alone], run.report, run.profile, run.median_step_s())
        points.append(f"Was it worth adding the others? {worth}")
    return Section("The plan, and why", note, times=True, table=stages, points=points)


def _reasons(report: PlanReport) -> list[str]:
    schedule = schedule_text(report.plan).removeprefix(", schedule")
    found = [f"Predicted: {headline(report)}.", *([f"Schedule{schedule}."] if schedule else [])]
    found += [f"Because: {reason}" for reason in report.reasons]
    return found + [line[:1].upper() + line[1:] for line in idle_lines(report.idle)]


def checkpoints(run: PastRun) -> Section:
    """The checkpoints that a run can be resumed from."""
    columns = (
        Column("after step", "step"),
        Column("size", "bytes", units.size),
        Column("written", "unix_s", moment, left=True),
    )
    return Section("Checkpoints", table=Table(columns, run.checkpoints))


def happenings(run: PastRun) -> Section:
    """Starts, recoveries, changes of plan and restarts, by time."""
    columns = Column("when", "unix_s", moment, left=True), Column("what", "event"), Column("", "text")
    return Section("What happened", table=Table(columns, run.happenings))


def files(run: PastRun, linked: bool) -> Section:
    """The files of the run, with links where the page lies beside them."""
    name = Markup('<a href="{0}">{0}</a>') if linked else Markup("{0}")

    def size(file: str) -> int | None:
        return (run.directory / file).stat().st_size if (run.directory / file).is_file() else None

    columns = Column("file", name.format, left=True), Column("size", size, units.size), Column("", FILES.get)
    rows = [file for file in FILES if (run.directory / file).exists()]
    return Section(f"Files in {run.place}", table=Table(columns, rows))


def next_commands(run: PastRun) -> Section:
    """The commands that a person may type next."""
    return Section("Next", points=[Markup("<code>{}</code><br>{}").format(*one) for one in next_steps(run)])


def _picture(figure: Figure | None, label: str) -> Markup | None:
    return Markup(svg(figure, label, page=True)) if figure is not None else None


def moment(unix_s: float) -> str:
    """Local time; of a file's number that is no time of any calendar, that."""
    try:
        return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s} s, no time"
