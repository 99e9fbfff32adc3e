"""Draw the architecture of a plan: hosts, devices, layers per stage, pipelines, links and idle ranks.

::

    pipeline 0: 16 sequences = 8 micro-batches x 2
    +- alpha --------------------------+             +- beta ------------+
    | [rank 0  stage 0] -> [rank 1   ] | -118 MB/s-> | [rank 2  stage 2] |
    | [blocks 0-3     ]    [blocks 4 ] |   0.2 ms    | [blocks 5, head ] |
    +----------------------------------+             +-------------------+

Tensor-parallel ranks are drawn side by side in the box of their stage, each with its shard.
Each pipeline is a strip; long strips continue in the next row, and short strips share a row.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from matplotlib.figure import Figure

from hetero_mpi.planning.schedule import reduced_layers
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.figures.style import Sheet, drawn, host_colours, width_of
from hetero_mpi.report.plan_text import fullest_text, heads_text, idle_ranks_by_reason
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.util import units

MAX_ROW_WIDTH = 1080.0
"""Maximum width of a row in pixels, which is the width of the report page."""
_BOX_WIDTH, _BOX_HEIGHT = 172.0, 104.0
_MEMBER_SIZE = 240.0
"""Preferred width in pixels of a tensor-parallel rank in the box of its stage."""
_GAP_SIZE = 74.0
"""Gap in pixels between two boxes, for an arrow and its labels."""
_PADDING_SIZE = 10.0
"""Padding in pixels between a host's box and the boxes inside it."""
_HEADER_SIZE = 20.0
"""Height in pixels of a host's name at the top of its box."""
_MARGIN_SIZE = 24.0
_ROW = _BOX_HEIGHT + _HEADER_SIZE + 2 * _PADDING_SIZE
_IDLE_WIDTH, _IDLE_HEIGHT = 412.0, 60.0
_MAX_DIRECTION_RATIO = 0.1
"""Relative difference in bandwidth above which the two directions of a link are labelled separately."""


@dataclass(frozen=True)
class _StageBox:
    """The box of a pipeline stage on ``rank``, or on the tensor-parallel group that ``rank`` leads."""

    number: int
    stage: StagePlan
    rank: int
    host: str

    @property
    def width(self) -> float:
        count = len(self.stage.ranks)
        return min(count * _MEMBER_SIZE, MAX_ROW_WIDTH - 2 * _MARGIN_SIZE - 60) if count > 1 else _BOX_WIDTH


@drawn
def architecture(
    report: PlanReport, profile: ClusterProfile, title: str, busy: Mapping[int, float] | None = None
) -> Figure:
    """Draw a plan. ``busy`` maps each rank to the fraction of the predicted step during which it computes."""
    plan, sheet = report.plan, Sheet()
    y = _heading(sheet, report, profile, title)
    colours = host_colours([device.host for device in profile.devices])
    painter = _Painter(sheet, report, profile, colours, busy or {})
    x, widest, row_bottom = _MARGIN_SIZE, 0.0, y
    for index, pipeline in enumerate(plan.pipelines):
        rows = _rows([
            _StageBox(number, stage, stage.ranks[0], profile.devices[stage.ranks[0]].host)
            for number, of, stage in plan.numbered
            if of == index
        ])  # fmt: skip
        label = _pipeline_label(index, pipeline, plan)
        width = max(max(_row_width(row) for row in rows), width_of(label, 12))
        if x > _MARGIN_SIZE and x + width > MAX_ROW_WIDTH - _MARGIN_SIZE:
            x, y = _MARGIN_SIZE, row_bottom
        if label:
            sheet.text(x, y + 12, label, 12, "soft")
        bottom = painter.strip(rows, x, y + (20 if label else 0))
        row_bottom = max(row_bottom, bottom + 14) if x > _MARGIN_SIZE else bottom + 14
        x += width + 36
        widest = max(widest, x - 36)
    y = row_bottom
    if report.idle:
        y, right = painter.idle(y + 4)
        widest = max(widest, right)
    width = max(widest, 640.0) + _MARGIN_SIZE
    return sheet.finished(width, _footer(sheet, plan, profile, y, width))


def _heading(sheet: Sheet, report: PlanReport, profile: ClusterProfile, title: str) -> float:
    hosts = len({device.host for device in profile.devices})
    facts = f"{len(report.plan.ranks)} of {units.plural(len(profile.devices), 'rank')} on {hosts} host{'s' if hosts > 1 else ''}"
    facts += f", {units.plural(report.plan.global_batch, units.row(report.plan.sequence_length))} per step"
    facts += f", {units.seconds(report.predicted_step_s)} predicted"
    sheet.text(_MARGIN_SIZE, 34, title, 17, bold=True, width=MAX_ROW_WIDTH / 2)
    sheet.text(_MARGIN_SIZE, 54, facts, 12, "soft")
    if profile.emulated:
        sheet.text(_MARGIN_SIZE, 72, "EMULATED: devices and links of a profile, imitated by other machines", 12, "warm")
    return 92.0 if profile.emulated else 74.0


def _footer(sheet: Sheet, plan: Plan, profile: ClusterProfile, y: float, width: float) -> float:
    kind = "emulated" if profile.emulated else profile.source.split(" (")[0]
    lines = []
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        lines.append(
            f"links: bandwidth and latency from stage to stage, {kind}"
            f" (there / back where they differ by more than {units.percent(_MAX_DIRECTION_RATIO)})"
        )
    sums = len(reduced_layers(plan, profile.model))
    if sums and len(plan.pipelines) > 1:
        lines.append(f"a step ends with a gradient all-reduce of {sums} layers over {plan.replicas}")
    for line in lines:
        for part in textwrap.wrap(line, int((width - 2 * _MARGIN_SIZE) / (0.55 * 11))):
            sheet.text(_MARGIN_SIZE, y + 14, part, 11, "soft")
            y += 16
    return y + 18


def _pipeline_label(index: int, pipeline: PipelinePlan, plan: Plan) -> str:
    if len(plan.pipelines) > 1:
        name = "copy" if len(pipeline.stages) == 1 else "pipeline"
        share = units.plural(pipeline.sequences, units.row(plan.sequence_length))
        return f"{name} {index}: {share}, {pipeline.micro_batch} at a time"
    return f"{units.plural(pipeline.micro_batches, 'micro-batch')} of {pipeline.micro_batch}"


def _rows(boxes: Sequence[_StageBox]) -> list[list[_StageBox]]:
    """Split the boxes of a strip into rows that fit on the page."""
    rows: list[list[_StageBox]] = [[]]
    for box in boxes:
        if rows[-1] and _row_width([*rows[-1], box]) > MAX_ROW_WIDTH - 2 * _MARGIN_SIZE - 40:
            rows.append([])
        rows[-1].append(box)
    return rows


def _row_width(row: Sequence[_StageBox]) -> float:
    changes = sum(a.host != b.host for a, b in pairwise(row))
    return sum(box.width for box in row) + (len(row) - 1) * _GAP_SIZE + 2 * _PADDING_SIZE * (changes + 1)


@dataclass
class _Painter:
    """Draws pipelines and idle ranks on a sheet."""

    sheet: Sheet
    report: PlanReport
    profile: ClusterProfile
    colours: Mapping[str, str]
    busy: Mapping[int, float]

    def strip(self, rows: Sequence[Sequence[_StageBox]], x: float, y: float) -> float:
        """Draw the rows of a pipeline with the upper left corner at (x, y), and return the lower edge."""
        before: _StageBox | None = None
        below = x, y
        for row in rows:
            box_x = x
            middle = y + _HEADER_SIZE + _PADDING_SIZE + _BOX_HEIGHT / 2
            for host, group in groupby(row, key=lambda box: box.host):
                boxes = list(group)
                width = _row_width(boxes)
                self._host(host, box_x, y, width)
                inner_x = box_x + _PADDING_SIZE
                for box in boxes:
                    if before is not None:
                        begin = inner_x - _GAP_SIZE - (0 if before.host == box.host else 2 * _PADDING_SIZE)
                        self._link(before, box, begin, inner_x, middle, below if before not in row else None)
                    self._box(box, inner_x, y + _HEADER_SIZE + _PADDING_SIZE)
                    before, below = box, (inner_x + box.width / 2, middle + _BOX_HEIGHT / 2)
                    inner_x += box.width + _GAP_SIZE
                box_x += width + _GAP_SIZE
            y += _ROW + (24 if len(rows) > 1 else 0)
        return y - (24 if len(rows) > 1 else 0)

    def idle(self, y: float) -> tuple[float, float]:
        """Draw the idle ranks from ``y`` downwards, and return (lower edge, right edge)."""
        self.sheet.text(_MARGIN_SIZE, y + 12, "idle according to the plan", 12, "soft")
        y, x, right = y + 20, _MARGIN_SIZE, _MARGIN_SIZE
        for reason, ranks in idle_ranks_by_reason(self.report.idle).items():
            if x + _IDLE_WIDTH > MAX_ROW_WIDTH - _MARGIN_SIZE:
                x, y = _MARGIN_SIZE, y + _IDLE_HEIGHT + 8
            name = f"{units.ranks(ranks)}  {units.join_with_counts((place_text(self.profile, rank) for rank in ranks), '; ')}"
            self.sheet.box(x, y, _IDLE_WIDTH, _IDLE_HEIGHT, "paper", "faint", dashed=True, title=f"{name}: {reason}")
            self.sheet.text(x + 10, y + 18, name, 12, "soft", bold=True, width=_IDLE_WIDTH - 20)
            for line, text in enumerate(textwrap.wrap(reason, int((_IDLE_WIDTH - 20) / (0.56 * 10.5)))[:2]):
                self.sheet.text(x + 10, y + 35 + 14 * line, text, 10.5, "soft")
            right = max(right, x + _IDLE_WIDTH)
            x += _IDLE_WIDTH + 12
        return y + _IDLE_HEIGHT + 14, right

    def _host(self, host: str, x: float, y: float, width: float) -> None:
        self.sheet.box(x, y, width, _ROW, self.colours[host], "faint", radius=10)
        self.sheet.text(x + _PADDING_SIZE, y + 18, host, 11.5, "soft", bold=True, width=width - 2 * _PADDING_SIZE)

    def _box(self, box: _StageBox, x: float, y: float) -> None:
        stage, sheet, inside = box.stage, self.sheet, box.width - 20
        device, ranks = self.profile.devices[box.rank], units.ranks(stage.ranks)
        about = heads_text(stage) if stage.grouped else f"{device.name} ({device.backend})"
        sheet.box(x, y, box.width, _BOX_HEIGHT, "surface", "faint", title=about)
        sheet.text(x + 10, y + 19, ranks, 13, bold=True, width=inside - 60)
        stage_text = "" if self.report.plan.undivided else f"stage {box.number}"
        sheet.text(x + box.width - 10, y + 19, stage_text, 11, "soft", "right")
        layers = _short(stage, self.report.plan)
        layers += " (recompute)" if stage.recompute else ""
        if stage.grouped:
            begin = width_of(ranks, 13, bold=True) + 14
            sheet.text(x + 10 + begin, y + 19, layers, 11.5, "accent", bold=True, width=inside - begin - 60)
            each = inside / len(stage.ranks)
            for index, rank in enumerate(stage.ranks):
                self._member(stage, index, rank, x + 10 + each * index, y, each)
            return
        sheet.text(x + 10, y + 36, units.device_name(device.name, 24), 11.5, width=inside)
        sheet.text(x + 10, y + 53, layers, 11.5, "accent", bold=True, width=inside)
        self._bars(box.rank, x + 10, y, inside)

    def _member(self, stage: StagePlan, index: int, rank: int, x: float, y: float, width: float) -> None:
        """Draw a tensor-parallel rank with its shard inside the box of its stage."""
        device = self.profile.devices[rank]
        share = f"{stage.shares[index]}/{sum(stage.shares)} heads, {100 * stage.share(index):.0f} % of columns"
        share += f", {stage.experts[index]}/{sum(stage.experts)} experts" if stage.experts else ""
        about = f"{device.name} ({device.backend}): {share}"
        self.sheet.box(x, y + 25, width - 3, 75, "paper", "faint", title=about)
        name = f"rank {rank}: {units.device_name(device.name, 24)}"
        self.sheet.text(x + 7, y + 39, name, 10.5, bold=True, width=width - 17)
        self.sheet.text(x + 7, y + 54, share, 9.5, "accent", width=width - 17)
        self._bars(rank, x + 7, y, width - 17)

    def _bars(self, rank: int, x: float, y: float, width: float) -> None:
        if (share := self.busy.get(rank)) is not None:
            self._bar(x, y + 70, width, "busy", share, units.percent(share), "good")
        if memory_rows := [row for row in self.report.memory if row.rank == rank]:
            of = max(row.peak_bytes / max(row.usable_bytes, 1) for row in memory_rows)
            self._bar(x, y + 90, width, "memory", of, fullest_text(memory_rows), "violet")

    def _bar(self, x: float, y: float, inside: float, name: str, share: float, text: str, colour: str) -> None:
        self.sheet.text(x, y, name, 10, "soft")
        self.sheet.text(x + inside, y, text, 10, "soft", "right", width=inside - 42)
        self.sheet.box(x, y + 3.5, inside, 4, "faint", radius=2)
        self.sheet.box(x, y + 3.5, inside * min(max(share, 0.0), 1.0), 4, colour, radius=2)

    def _link(
        self, before: _StageBox, box: _StageBox, begin: float, end: float, y: float, below: tuple[float, float] | None
    ) -> None:  # fmt: skip
        """Draw the arrow to ``box``. An arrow from the previous row starts at the point ``below`` and runs between the rows."""
        speed, delay, unlike = self._speed(before.rank, box.rank)
        if below is not None:
            top = y - _BOX_HEIGHT / 2 - _HEADER_SIZE - _PADDING_SIZE - 14
            mid_x = end + box.width / 2
            self.sheet.arrow(below, (below[0], top - 4), (mid_x, top - 4), (mid_x, y - _BOX_HEIGHT / 2))
            self.sheet.text(mid_x + 8, top + 9, f"from rank {before.rank}: {speed}{delay and ', '}{delay}", 10, "ink")
            return
        self.sheet.arrow((begin + 3, y), (end - 2, y))
        middle = (begin + end) / 2
        for line, part in enumerate(reversed(speed.split(" / "))):
            text = part + (" /" if unlike and line else "")
            self.sheet.text(middle, y - 7 - 12 * line, text, 10, "ink", "center")
        self.sheet.text(middle, y + 16, delay, 10, "soft", "center")

    def _speed(self, before: int, after: int) -> tuple[str, str, bool]:
        """Return the bandwidth and latency of the link between two ranks, as text, and whether its two directions differ."""
        if before == after:
            return "no message", "", False
        forward_link, backward_link = self.profile.link(before, after), self.profile.link(after, before)
        forward, backward = (link.bytes_per_s for link in (forward_link, backward_link))
        unlike = abs(forward - backward) > _MAX_DIRECTION_RATIO * max(forward, backward)
        also = f" / {units.bandwidth(backward)}" if unlike else ""
        return units.bandwidth(forward) + also, units.seconds(forward_link.latency_s), unlike


def _short(stage: StagePlan, plan: Plan) -> str:
    """Describe a stage's layers in few characters."""
    if stage.last - stage.first == plan.layers:
        return "the whole model"
    layers = units.layers(stage.first, stage.last, plan.layers, plan.sequence_length)
    return layers.replace("embedding", "emb.") if len(layers) > 22 else layers
