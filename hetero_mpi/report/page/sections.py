"""Build the sections of a run's page from a ``PastRun``. A section with no data is empty; ``page.html`` lays sections out."""

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
from hetero_mpi.report.figures.curves import Series, StepMark, line_chart, plain
from hetero_mpi.report.figures.style import svg
from hetero_mpi.report.figures.timeline import MAX_LANES, Panel, timeline
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.plan_text import headline, idle_lines, stage_note, stage_table, stages_text
from hetero_mpi.report.profile_text import finite_bandwidth, place_text
from hetero_mpi.report.run_text import job_rows, next_steps, worth_adding
from hetero_mpi.report.table import Column, Table, least_most
from hetero_mpi.rundir.line_files import METRICS_NAME, STEPS_NAME
from hetero_mpi.rundir.metrics import Evaluation, StepMetrics
from hetero_mpi.rundir.rank_steps import Traffic, last_usage, traffic
from hetero_mpi.rundir.run_directory import SAMPLE_NAME, TRACE_NAME
from hetero_mpi.util import units

USAGE_NOTE = "Shares of the time since training began or the plan last changed."
MEMORY_NOTE = (
    "Peak memory of each rank. The prediction includes weights, gradients, optimizer state, activations and message buffers. "
    "GPU ranks measure memory allocated on the device; CPU ranks measure the memory of the process."
)
PROCESS_NOTE = (
    "The processes of the CPU ranks used {} more than predicted: mostly Python, PyTorch and the MPI library, which every process "
    "needs, and on rank 0 the data."
)
STEP_NOTE = (
    "A simulated and a measured step, on one time axis. "
    "Gaps are waiting; the dashed line is the end of the step. "
    "Clocks of different hosts were synchronised once, at the start."
)
GROUP_NOTE = " Tensor-parallel communication interleaves with computation; it is drawn after the computation."
LINKS_NOTE = "Messages between stages in one step. The transfer speed includes queueing behind other messages."
MARKS_NOTE = (
    "Vertical lines: lost ranks (red), and plan changes or restarts (violet). Hover over a line for details, or see the "
    "events at the end of this page."
)
_LOSSES = ("ranks-lost", "silent", "broken", "memory")
"""Events that report a loss. The next start or event in ``_GOING_ON`` tells the step from which the run continued."""
_GOING_ON = ("recovered", "first-step")
SPENT = (
    ("computing_s", "computing", "forward"),
    ("activations_s", "waiting for activations", "backward"),
    ("gradients_s", "waiting for gradients", "input-gradients"),
    ("copies_s", "copying", "copy"),
    ("sums_s", "gradient all-reduce", "all-reduce"),
    ("exchange_s", "tensor-parallel communication", "exchange"),
    ("group_wait_s", "waiting in the TP group", "faint"),
    ("end_s", "waiting for the batch and other ranks", "send"),
)
"""Activities as (field of ``_shares_of_time``, name, colour role). The rank of a TP group with the least communication time is
assumed not to have waited for its peers."""
_MAX_LINKS = 40
FILES = {
    "model": "trained model, for AutoModelForCausalLM.from_pretrained",
    "adapter": "trained adapter, for PeftModel.from_pretrained",
    SAMPLE_NAME: "sample text of the trained model",
    "checkpoints": "checkpoints, for --resume",
    TRACE_NAME: "trace of some steps on all ranks, for https://ui.perfetto.dev",
    METRICS_NAME: "metrics, a line per step",
    STEPS_NAME: "actions of each rank in some steps",
    "plan.toml": "plan, for --plan",
    "profile.toml": "measured devices and links, for --profile",
    "logs": "output of each rank",
}
"""Maps the files and directories of a run directory to descriptions."""


@dataclass(frozen=True)
class Section:
    """A section of the page. Its contents appear in the order of the fields."""

    title: str
    note: str = ""
    times: bool = False
    """Whether the section contains times, which are labelled if they are emulated."""
    charts: Sequence[Markup] = ()
    """Figures shown side by side, scaled to fit the page."""
    picture: Markup | None = None
    """Figure of fixed size, which scrolls if it is wider than the page."""
    table: Table | None = None
    remarks: Sequence[str] = ()
    points: Sequence[str] = ()
    text: str = ""
    """Preformatted text."""

    @property
    def has_content(self) -> bool:
        return bool(self.charts or self.picture or self.table or self.remarks or self.points or self.text)


def job(run: PastRun) -> Section:
    """Summarise the job: method, model, data, optimizer and other settings."""
    rows = job_rows(run.job, run.profile.model.dtype if run.profile is not None else "")
    return Section("Job", table=Table.of_texts(("", "setting"), rows))


def sample(run: PastRun) -> Section:
    return Section("Sample of the trained model", text=run.sample.strip())


def marks(run: PastRun) -> list[StepMark]:
    """Return chart marks for lost ranks and plan changes. A loss is marked at the step from which the run continued."""
    step_marks, loss_texts = [], list[str]()
    for happening in run.happenings:
        resumed = happening.event == "training" and happening.step is not None and happening.step > 0
        if happening.event in _LOSSES:
            loss_texts.append(happening.text)
        elif happening.step is not None and (
            resumed or happening.event == "rebalanced" or (loss_texts and happening.event in _GOING_ON)
        ):
            text = f"after step {happening.step}: {'; '.join([*loss_texts, happening.text])}"
            step_marks.append(StepMark(happening.step, text, "alert" if loss_texts else "violet"))
            loss_texts = loss_texts if happening.event == "rebalanced" else []
    return step_marks


def learning(run: PastRun) -> Section:
    """Plot the losses, evaluation accuracy, step time, learning rate and gradient norm over steps, and preference rewards."""
    steps, evaluations, events = run.metrics.steps, run.metrics.evaluations, marks(run)
    expected = [step for step in steps if step.predicted_step_s > 0]
    loss = [
        *_series(steps, {"loss": ("training", "accent")}, noisy=True),
        *_series(evaluations, {"loss": ("evaluation", "warm")}, dots=True),
    ]
    for index, name in enumerate(evaluations[-1].sets or () if evaluations else ()):
        points = tuple((e.step, e.sets[name]) for e in evaluations if e.sets and name in e.sets)
        loss.append(Series(name, points, ("good", "violet", "alert")[index % 3], dots=True))
    step_s = _series(steps, {"step_s": ("measured", "accent")}, noisy=True)
    step_s += _series(expected, {"predicted_step_s": ("predicted", "warm")}, dashed=True)
    records = learns_from(str(run.setting("train", "preference")))
    token_label = "loss per sample" if run.setting("data", "sequence_length") == 1 else "loss, nats per token"
    loss_label = {None: token_label, "labels": "loss per answer", "pairs": "loss per pair"}[records]
    accuracy = _series(evaluations, {"token_accuracy": ("token accuracy", "warm")})
    rate = _series(steps, {"lr": ("learning rate", "good")})
    norm = _series(steps, {"grad_norm": ("gradient norm", "violet")}, noisy=True)
    charts = [
        line_chart(loss_label, loss, marks=events),
        line_chart("evaluation token accuracy, %", accuracy, lambda share: plain(100 * share), marks=events),
        *(line_chart(label, _series(steps, named, noisy=True)) for label, named in _REWARDS.items()),
        line_chart(f"time per step{', emulated' * run.emulated}", step_s, units.seconds, from_zero=True, marks=events),
        line_chart("learning rate", rate, from_zero=True),
        line_chart("gradient norm before clipping", norm, from_zero=True),
    ]
    return Section("Loss and speed", MARKS_NOTE if events else "", charts=[chart for chart in charts if chart])


_REWARDS = {
    "rewards": {"chosen_reward": ("chosen", "good"), "rejected_reward": ("rejected", "alert")},
    "reward margin": {"reward_margin": ("margin", "accent")},
    "reward accuracy: share of pairs whose chosen answer has the higher reward": {
        "reward_accuracy": ("accuracy", "accent")
    },
}
"""Charts for preference training: maps the label of a chart to its metrics, and each metric to (name, colour)."""


def _series(
    steps: Sequence[StepMetrics | Evaluation], labels: Mapping[str, tuple[str, str]], noisy: bool = False, **form: bool
) -> list[Series]:  # fmt: skip
    """Return a series of known values over steps for each metric in ``labels``, which maps metrics to (name, colour)."""
    series = []
    for key, (name, colour) in labels.items():
        points = tuple((step.step, value) for step in steps if (value := getattr(step, key)) is not None)
        series += [Series(name, points, colour, noisy=noisy, **form)] if points else []
    return series


def usage(run: PastRun) -> Section:
    """Build a table with a row per rank: shares of time by activity, as a bar and as numbers, and predicted utilisation."""
    use = run.predicted.use if run.predicted is not None else {}
    shares = _shares_of_time(run, use)
    kinds = [activity for activity in SPENT if any(spent[activity[0]] >= 0.0005 for spent in shares.values())]

    def spent(rank: int) -> list[float]:
        return [shares.get(rank, {}).get(field, 0.0) for field, _, _ in kinds]

    mark = Markup('<i class="key" style="background:var(--{})"></i>\N{NO-BREAK SPACE}{}')
    keys = [mark.format(colour, name) for _, name, colour in kinds]
    columns = (
        Column("rank", int),
        Column("device", partial(place_text, run.profile), align_left=True),
        Column("", lambda rank: _bar(spent(rank), kinds) if kinds else None, align_left=True),
        Column("computing, predicted", use.get, units.percent),
        *(Column(name, lambda rank, index=index: spent(rank)[index], units.percent) for index, name in enumerate(keys)),  # type: ignore[misc]
    )
    return Section("Utilisation of the ranks", USAGE_NOTE, times=True, table=Table(columns, sorted(shares or use)))


def _shares_of_time(run: PastRun, ranks: Mapping[int, float]) -> dict[int, dict[str, float]]:
    """Map each rank to the shares of its time by activity, under the field names in ``SPENT``."""
    usage_by_rank = {rank: usage for rank, usage in last_usage(run.rank_steps).items() if usage.seconds > 0}
    usage_by_rank = {rank: usage for rank, usage in usage_by_rank.items() if rank in (ranks or [rank])}
    group_of = {rank: stage.ranks for _, _, stage in (run.plan.numbered if run.plan else ()) for rank in stage.ranks}
    shares = {}
    for rank, usage in usage_by_rank.items():
        peers = [usage_by_rank[peer].group_s for peer in group_of.get(rank, ()) if peer in usage_by_rank]
        least_s = min(peers) if peers else 0.0
        seconds = {**vars(usage), "end_s": usage.end_s, "exchange_s": least_s, "group_wait_s": usage.group_s - least_s}
        shares[rank] = {field: seconds[field] / usage.seconds for field, _, _ in SPENT}
    return shares


def _bar(shares: Sequence[float], kinds: Sequence[tuple[str, str, str]]) -> Markup:
    """Draw a stacked bar of shares of time by activity (entries of ``SPENT``), with tooltips."""
    part = Markup('<i style="width:{:.1f}%;background:var(--{})" title="{}"></i>')
    pairs = zip(shares, kinds, strict=True)
    parts = [part.format(100 * share, colour, f"{name}: {units.percent(share)}") for share, (_, name, colour) in pairs]
    return Markup('<span class="bar">{}</span>').format(Markup("").join(parts))


def memory(run: PastRun) -> Section:
    """Build a table with a row per rank: predicted and measured peak memory, and memory budget."""
    # An emulated rank holds the small stand-in model, so its memory does not measure this plan.
    usage = {} if run.emulated else last_usage(run.rank_steps)
    peaks = {rank: used.peak_bytes for rank, used in usage.items() if used.peak_bytes}
    rows = run.report.memory if run.report is not None else ()
    devices = run.profile.devices if run.profile is not None else ()
    cpu_rows = [row for row in rows if devices and devices[row.rank].backend == "cpu"]
    uncounted = [peaks[row.rank] - row.peak_bytes for row in cpu_rows if peaks.get(row.rank, 0) > row.peak_bytes]
    columns = (
        Column("rank", "rank"),
        Column("device", lambda row: place_text(run.profile, row.rank), align_left=True),
        Column("predicted", "peak_bytes", units.size),
        Column("measured", lambda row: peaks.get(row.rank), units.size),
        Column("usable", "usable_bytes", units.size),
        Column("memory source", lambda row: devices[row.rank].memory_reason if devices else None, align_left=True),
    )
    remarks = [PROCESS_NOTE.format(least_most(uncounted, units.size))] if uncounted else []
    return Section("Memory", MEMORY_NOTE, times=True, table=Table(columns, rows), remarks=remarks)


def step(run: PastRun) -> Section:
    """Draw the timeline of a step: the predicted one and, below it, the measured one."""
    panels, measured = [], run.recorded
    if run.predicted is not None:
        panels.append(Panel(f"predicted: {units.seconds(run.predicted.step_s)}", run.predicted.events))
    if measured:
        last_s = max(event.end_s for event in measured)
        panels.append(Panel(f"measured, step {measured[0].step}: {units.seconds(last_s)}", measured))
    labels = {device.rank: device.name for device in run.profile.devices} if run.profile is not None else {}
    figure = timeline(panels, labels, MAX_LANES) if panels else None
    label = "timeline of a step: " + ", ".join(panel.title for panel in panels)
    remarks = ["No step was recorded under this plan."] if panels and not measured else []
    note = STEP_NOTE + GROUP_NOTE * any(event.exchanged_s for step_panel in panels for event in step_panel.events)
    return Section("Timeline of a step", note, times=True, picture=_picture(figure, label), remarks=remarks)


def links(run: PastRun) -> Section:
    """Build a table with a row per directed pair of ranks: messages and bytes per step, and speeds."""
    predicted, profile = run.predicted, run.profile
    if run.plan is None or profile is None or predicted is None:
        return Section("Links")
    expected, measured = traffic(predicted.events, run.plan), traffic(run.recorded, run.plan)
    if run.emulated:  # a message of the stand-in represents a message of the profile's model
        measured = {pair: replace(real, bytes=expected.get(pair, real).bytes) for pair, real in measured.items()}

    def field_of(traffic_by_pair: Mapping[tuple[int, int], Traffic], field: str) -> Callable[[tuple[int, int]], Any]:
        return lambda pair: getattr(traffic_by_pair.get(pair), field, None)

    share_text = lambda seconds: units.percent(units.ratio(seconds, predicted.step_s))  # noqa: E731
    columns = (
        Column("ranks", "{0[0]} → {0[1]}".format, align_left=True),
        Column("hosts", lambda pair: " → ".join(profile.devices[rank].host for rank in pair), align_left=True),
        Column("messages", field_of(measured | expected, "messages")),
        Column("bytes, predicted", field_of(expected, "bytes"), units.size),
        Column("bytes, measured", field_of(measured, "bytes"), units.size),
        Column("link", lambda pair: profile.link(*pair).bytes_per_s, units.bandwidth),
        Column("transfer speed", field_of(measured, "bytes_per_s"), finite_bandwidth),
        Column("link busy, predicted", field_of(expected, "seconds"), share_text),
    )
    pairs = sorted({*expected, *measured})
    remarks = [f"And {len(pairs) - _MAX_LINKS} more pairs."] if len(pairs) > _MAX_LINKS else []
    table = Table(columns, pairs[:_MAX_LINKS])
    return Section("Links", LINKS_NOTE if pairs else "", True, table=table, remarks=remarks)


def topology(run: PastRun) -> Section:
    """Draw the architecture of the plan."""
    figure = None
    if run.report is not None and run.profile is not None:
        figure = architecture(run.report, run.profile, run.name, run.predicted.use if run.predicted is not None else {})
    return Section("Architecture", times=True, picture=_picture(figure, f"architecture: {run.name}"))


def plan(run: PastRun) -> Section:
    """Build the section about the plan: its stages, the reasons for it, and idle ranks."""
    if run.report is None:
        return Section("Plan and reasons")
    stages = stage_table(run.report.plan, run.profile, (), lambda device: f"{device.name}, {device.host}")
    note = f"{units.capitalise(stage_note(run.report.plan, run.profile))}.".removeprefix(".")
    points = _reasons(run.report)
    if run.report.alone is not None and run.profile is not None and len(run.profile.devices) > 1:
        worth = worth_adding([run.report.alone], run.report, run.profile, run.median_step_s())
        points.append(f"Do the other devices help? {worth}")
    return Section("Plan and reasons", note, times=True, table=stages, points=points)


def _reasons(report: PlanReport) -> list[str]:
    points = [f"Predicted: {headline(report)}.", f"Plan: {stages_text(report.plan)}."]
    return points + [units.capitalise(line) for line in (*report.reasons, *idle_lines(report.idle))]


def checkpoints(run: PastRun) -> Section:
    columns = (
        Column("after step", "step"),
        Column("size", "bytes", units.size),
        Column("written", "unix_s", moment, align_left=True),
    )
    return Section("Checkpoints", table=Table(columns, run.checkpoints))


def happenings(run: PastRun) -> Section:
    """Build a table of the run's events, such as starts, lost ranks and plan changes, in chronological order."""
    columns = Column("time", "unix_s", moment, align_left=True), Column("event", "event"), Column("", "text")
    return Section("Events", table=Table(columns, run.happenings))


def files(run: PastRun, linked: bool) -> Section:
    """Build a table of the run's files, with links to them if ``linked``."""
    name = Markup('<a href="{0}">{0}</a>') if linked else Markup("{0}")

    def size(file: str) -> int | None:
        return (run.directory / file).stat().st_size if (run.directory / file).is_file() else None

    custom = run.setting("model", "factory") is not None
    texts = FILES | ({"model": "trained weights of your layers (state dict)"} if custom else {})
    columns = Column("file", name.format, align_left=True), Column("size", size, units.size), Column("", texts.get)
    rows = [file for file in FILES if (run.directory / file).exists()]
    return Section(f"Files in {run.typed_directory}", table=Table(columns, rows))


def next_commands(run: PastRun) -> Section:
    return Section("Next steps", points=[Markup("<code>{}</code><br>{}").format(*pair) for pair in next_steps(run)])


def _picture(figure: Figure | None, label: str) -> Markup | None:
    return Markup(svg(figure, label, page=True)) if figure is not None else None


def moment(unix_s: float) -> str:
    """Format a Unix timestamp as local time, or as a number of seconds if it is not a valid date."""
    try:
        return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s} s (invalid time)"
