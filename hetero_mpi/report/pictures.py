"""Pictures: the timeline of a step, and what a profile measured. matplotlib is imported only when one is drawn.

A timeline is made of ``Event``s, so that predicted and measured steps are drawn by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.errors import UserError
from hetero_mpi.planning.codec import encode
from hetero_mpi.planning.profile import ClusterProfile, Curve, DeviceProfile
from hetero_mpi.planning.schedule import COMPUTE, Event, Op
from hetero_mpi.report import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK, FAINT = "#333333", "#d9d9d9"
STYLES = {
    "forward": "#4c78a8",
    "backward": "#f2b36b",
    "input gradients": "#f7cf9c",
    "weight gradients": "#d98a3d",
    "optimizer": "#6a9f58",
    "send": "#9aa5b1",
    "sum of gradients": "#8c6bb1",
}
"""What a bar of the timeline is, and its colour."""
KINDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradients",
    Op.W: "weight gradients",
    Op.SEND_F: "send",
    Op.SEND_B: "send",
    Op.REDUCE: "sum of gradients",
    Op.STEP: "optimizer",
}
PLACES = {"send": (0.22, 0.1), "sum of gradients": (0.33, 0.1)}
"""Where in its lane what passes beside computing is drawn: (top, height), below the middle."""
COMPUTING = (-0.38, 0.58)
"""Where computing is."""
LINES = ("#4c78a8", "#e0812c", "#6a9f58", "#8c6bb1", "#b8524a", "#7a7a7a")
"""Colours of devices in the curves; more devices are not told apart."""
MOST_CURVES = 4
"""Layer kinds drawn at most: the first ones of the chain."""
WRITTEN_CELLS = 8
"""A heat map of so many ranks has its figures written into the cells."""
NUMBERED_BARS = 400
"""A timeline of so many bars has the micro-batches written into those that are wide enough."""
PIXELS_PER_INCH = 130


def timeline(
    events: Sequence[Event], stem: str | Path, title: str = "", labels: Mapping[int, str] | None = None
) -> tuple[Path, Path]:
    """Draw one step: a lane per rank in pipeline order, computing above, sends and sums of gradients below;
    ``stem.png`` and ``stem.svg``.

    ``events``: of one step; receives are not drawn, since waiting is what is left white. ``labels``: names of ranks.
    """
    assert len({event.step for event in events}) == 1, "a timeline shows one step"
    ranks = _in_pipeline_order(events)
    last_s = max(event.end_s for event in events)
    factor, unit = _time_unit(last_s)
    figure = _figure(12, 1.3 + len(ranks) * (0.62 if len(ranks) <= 8 else 0.27))
    axes = figure.add_subplot()
    for lane, rank in enumerate(ranks):
        _draw_lane(axes, lane, [event for event in events if event.rank == rank], factor)
    shown = [event for event in events if event.action.op in COMPUTE]
    if len(shown) <= NUMBERED_BARS:
        _write_numbers(axes, shown, {rank: lane for lane, rank in enumerate(ranks)}, factor, last_s)
    names = labels or {}
    axes.set_yticks(
        range(len(ranks)), [_lane_name(rank, names) for rank in ranks], fontsize=9 if len(ranks) <= 8 else 7
    )
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, last_s * factor)
    axes.set_xlabel(f"time since the step began ({unit})")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=24)
    _legend(axes, {KINDS[event.action.op] for event in events if event.action.op in KINDS})
    return _save(figure, Path(f"{stem}.png")), _save(figure, Path(f"{stem}.svg"))


def profile_picture(profile: ClusterProfile, path: str | Path) -> Path:
    """Draw a profile: seconds over tokens of every layer kind and device, bandwidth and latency of every link."""
    kinds = list(dict.fromkeys(layer.kind for layer in profile.model.layers))[:MOST_CURVES]
    heights = [4.0, 4.4][: 2 if profile.links else 1]
    figure = _figure(max(10.0, 3.6 * len(kinds)), sum(heights) + 0.4)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    devices = _distinct(profile)
    panels = parts[0, 0].subplots(1, len(kinds), squeeze=False)[0]
    for kind, axes in zip(kinds, panels, strict=True):
        _draw_curves(axes, kind, devices)
    panels[0].set_ylabel("time per micro-batch")
    lines, names = panels[0].get_legend_handles_labels()
    parts[0, 0].legend(lines, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if profile.links:
        left, right = parts[1, 0].subplots(1, 2)
        speeds = {(link.source, link.destination): link.bytes_per_s for link in profile.links}
        waits = {(link.source, link.destination): link.latency_s for link in profile.links}
        _heat_map(parts[1, 0], left, len(profile.devices), speeds, "link bandwidth", "Blues", units.bandwidth)
        _heat_map(parts[1, 0], right, len(profile.devices), waits, "link latency", "Oranges", units.seconds)
    figure.suptitle(
        f"{profile.model.model_type}, {profile.model.dtype}, {len(profile.devices)} ranks; {profile.source}, {profile.date}",
        x=0.01, ha="left", fontsize=11, color=INK,
    )  # fmt: skip
    return _save(figure, Path(path))


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=PIXELS_PER_INCH)
    except OSError as error:
        raise UserError(
            f"{path}: the picture cannot be written ({error.strerror}); name another place with -o"
        ) from error
    return path


def _in_pipeline_order(events: Sequence[Event]) -> list[int]:
    """Ranks by the first stage they work for."""
    first: dict[int, int] = {}
    for event in events:
        first[event.rank] = min(first.get(event.rank, event.action.stage), event.action.stage)
    return sorted(first, key=lambda rank: (first[rank], rank))


def _time_unit(longest_s: float) -> tuple[float, str]:
    """(factor, unit) that brings ``longest_s`` to a readable size."""
    return next(((f, unit) for f, unit in ((1.0, "s"), (1e3, "ms")) if longest_s * f >= 1), (1e6, "us"))


def _draw_lane(axes: Axes, lane: int, events: Sequence[Event], factor: float) -> None:
    """One rank: a tall bar per computation, flat ones below per send and sum."""
    for kind, colour in STYLES.items():
        spans = [
            (event.start_s * factor, (event.end_s - event.start_s) * factor)
            for event in events
            if KINDS.get(event.action.op) == kind
        ]
        top, height = PLACES.get(kind, COMPUTING)
        if spans:
            # A white edge parts one bar from the next; a send may be so short that its edge is all there is to see.
            edge = colour if kind in PLACES else "white"
            axes.broken_barh(spans, (lane + top, height), facecolors=colour, edgecolors=edge, linewidth=0.4)


def _write_numbers(axes: Axes, events: Sequence[Event], lanes: Mapping[int, int], factor: float, last_s: float) -> None:
    for event in events:
        if event.end_s - event.start_s >= 0.012 * last_s:
            middle = (event.start_s + event.end_s) / 2 * factor
            axes.text(
                middle, lanes[event.rank] - 0.09, str(event.action.micro_batch),
                ha="center", va="center", fontsize=7, color="white" if event.action.op in (Op.F, Op.W) else INK,
            )  # fmt: skip


def _lane_name(rank: int, labels: Mapping[int, str]) -> str:
    name = labels.get(rank, "")
    return f"rank {rank}{'  ' if name else ''}{units.device_name(name, 28)}"


def _legend(axes: Axes, present: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=kind) for kind, colour in STYLES.items() if kind in present]
    axes.legend(
        handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(-0.005, 1.0), frameon=False, fontsize=8
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _distinct(profile: ClusterProfile) -> list[tuple[str, DeviceProfile]]:
    """Devices with equal curves once, as (their ranks and name, one of them)."""
    groups: dict[str, list[DeviceProfile]] = {}
    for device in profile.devices:
        groups.setdefault(repr(encode(device.layers)), []).append(device)
    return [(f"{_ranks([d.rank for d in members])} {members[0].name[:24]}", members[0]) for members in groups.values()]


def _ranks(ranks: Sequence[int]) -> str:
    """``0, 1, 2`` or, of many, ``0-7``/``0, 2, ... (12 ranks)``."""
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)} ranks)"


def _draw_curves(axes: Axes, kind: str, devices: Sequence[tuple[str, DeviceProfile]]) -> None:
    """Forward solid, backward dashed; bars are the spread between the quartiles."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for index, (name, device) in enumerate(devices):
        colour = LINES[min(index, len(LINES) - 1)]
        known = len(devices) <= len(LINES) or index < len(LINES) - 1
        label = f"rank {name}" if known else ("others" if index == len(LINES) - 1 else None)
        _draw_curve(axes, device.layers[kind].forward_s, colour, "-", label)
        _draw_curve(axes, device.layers[kind].backward_s, colour, "--", None)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    counts = sorted({t for _, d in devices for t in d.layers[kind].forward_s.tokens})
    axes.set_xticks(_apart(counts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.set_title(f"{kind} (line: forward, dashes: backward)", loc="left", fontsize=9, color=INK)
    axes.set_xlabel("tokens per micro-batch")
    axes.grid(color=FAINT, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _apart(counts: Sequence[int]) -> list[int]:
    """Those of ``counts`` whose labels have room beside each other on a logarithmic axis."""
    chosen: list[int] = []
    least = max(1.6, (counts[-1] / counts[0]) ** 0.2)
    for count in counts:
        if not chosen or count >= least * chosen[-1]:
            chosen.append(count)
    return chosen


def _draw_curve(axes: Axes, curve: Curve, colour: str, line: str, label: str | None) -> None:
    points = [
        (t, s, v)
        for t, s, v in zip(curve.tokens, curve.seconds, curve.spread or [0.0] * len(curve.tokens), strict=True)
    ]
    points = [point for point in points if point[1] > 0]  # a logarithmic axis has no zero
    if not points:
        return
    tokens, seconds, spread = zip(*points, strict=True)
    # Below by the same factor as above: a spread of more than the median must not lead under zero.
    above = [second * width / 2 for second, width in zip(seconds, spread, strict=True)]
    below = [second - second / (1 + width / 2) for second, width in zip(seconds, spread, strict=True)]
    axes.errorbar(
        tokens, seconds, yerr=(below, above) if any(above) else None,
        color=colour, linestyle=line, linewidth=1.2, marker="o", markersize=3, capsize=2, label=label,
    )  # fmt: skip


def _heat_map(
    part: SubFigure, axes: Axes, count: int, values: Mapping[tuple[int, int], float], title: str, colours: str,
    text: Callable[[float], str],
) -> None:  # fmt: skip
    """A cell per directed link, sender by receiver; logarithmic colours, unless all are alike."""
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter

    cells = np.full((count, count), np.nan)
    for pair, value in values.items():
        cells[pair] = value if math.isfinite(value) and value > 0 else np.nan  # nothing and no limit stay white
    known = cells[np.isfinite(cells)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    norm: Any = LogNorm(low, high) if high > 1.05 * low else Normalize(0, 2 * high)
    image = axes.imshow(cells, norm=norm, cmap=colours)
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.tick_params(labelsize=8, length=0)
    if count <= 16:
        axes.set_xticks(range(count))
        axes.set_yticks(range(count))
    for side in axes.spines.values():
        side.set_visible(False)
    if count > WRITTEN_CELLS:
        bar = part.colorbar(image, ax=axes, shrink=0.8, format=FuncFormatter(lambda value, _: text(value)))
        bar.ax.tick_params(labelsize=8)
        return
    for (row, column), value in values.items():
        dark = not np.isnan(cells[row, column]) and float(norm(value)) > 0.6
        axes.text(column, row, text(value), ha="center", va="center", fontsize=8, color="white" if dark else INK)
