"""Draw a profile: time over tokens for each layer kind and device, and the bandwidth and latency of the links."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile
from hetero_mpi.report.figures.style import COLOURS, INK, drawn, fitted, key
from hetero_mpi.report.profile_text import distinct_devices, layer_name
from hetero_mpi.util import units

LINES = tuple(COLOURS[role][0] for role in ("accent", "warm", "good", "violet", "alert", "soft"))
"""Colours of the devices' curves. If there are more devices, the remaining ones share the last colour."""
MAX_LAYER_KINDS = 4
"""Maximum number of layer kinds to draw, in the order in which they occur in the model."""
MAX_LABELLED_RANKS = 8
"""Maximum number of ranks for which heat maps have numbers in their cells."""


@drawn
def profile_picture(profile: ClusterProfile) -> Figure:
    """Draw the curves of the devices and, below them, heat maps of the links."""
    kinds = list(dict.fromkeys(layer.kind for layer in profile.model.layers))[:MAX_LAYER_KINDS]
    heights = [4.4, 5.2][: 2 if profile.links else 1]
    figure = Figure(figsize=(max(12.0, 4.4 * len(kinds)), sum(heights) + 0.5), dpi=72, layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    devices = [
        (f"{units.ranks(ranks)}: {units.device_name(device.name, 28)}", device)
        for ranks, device in distinct_devices(profile)
    ]
    panels = parts[0, 0].subplots(1, len(kinds), squeeze=False)[0]
    for kind, axes in zip(kinds, panels, strict=True):
        _draw_curves(axes, kind, devices)
        axes.set_title(layer_name(kind, profile.model.sequence_length))
        axes.set_xlabel(f"{units.unit_of(profile.model.sequence_length)} per micro-batch")
    panels[0].set_ylabel("time per micro-batch\n(points: medians timed; bars: middle half)")
    named, _ = panels[0].get_legend_handles_labels()
    ways = [key("ink", "forward", thick=False), key("ink", "backward", dashed=True, thick=False)]
    parts[0, 0].legend(handles=[*named, *ways], loc="outside lower center", ncols=4, handlelength=2.4)
    if profile.links:
        left_axes, right_axes = parts[1, 0].subplots(1, 2)
        speeds = {(link.source, link.destination): link.bytes_per_s for link in profile.links}
        waits = {(link.source, link.destination): link.latency_s for link in profile.links}
        _heat_map(parts[1, 0], left_axes, len(profile.devices), speeds, "link bandwidth", "Blues", units.bandwidth)
        _heat_map(parts[1, 0], right_axes, len(profile.devices), waits, "link latency", "Oranges", units.seconds)
    about = f"{profile.model.model_type}, {profile.model.dtype}, {units.plural(len(profile.devices), 'rank')}"
    title = fitted(f"{about}; {profile.date}, {profile.source}", 12, figure.bbox.width - 20, bold=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    return figure


def _draw_curves(axes: Axes, kind: str, devices: Sequence[tuple[str, DeviceProfile]]) -> None:
    """Draw the forward (solid) and backward (dashed) curves of one layer kind for all devices."""
    for index, (name, device) in enumerate(devices):
        colour = LINES[min(index, len(LINES) - 1)]
        has_own_colour = len(devices) <= len(LINES) or index < len(LINES) - 1
        label = name if has_own_colour else ("others" if index == len(LINES) - 1 else None)
        _draw_curve(axes, device.layers[kind].forward_s, colour, "-", label)
        _draw_curve(axes, device.layers[kind].backward_s, colour, "--", None)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    curves = [device.layers[kind].forward_s for _, device in devices]
    counts = sorted({count for curve in curves for count in curve.sample_tokens or curve.tokens})
    axes.set_xticks(_apart(counts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _apart(counts: Sequence[int]) -> list[int]:
    """Select the token counts whose labels do not overlap on a logarithmic axis."""
    selected: list[int] = []
    least = max(1.6, (counts[-1] / counts[0]) ** 0.2)
    for count in counts:
        if not selected or count >= least * selected[-1]:
            selected.append(count)
    return selected


def _draw_curve(axes: Axes, curve: Curve, colour: str, line: str, label: str | None) -> None:
    """Draw the planner's curve, and the timed medians as points with quartiles as error bars."""
    if min(curve.seconds) <= 0:  # a logarithmic axis has no zero
        return
    tokens = np.geomspace(curve.tokens[0], curve.tokens[-1], 33)
    axes.plot(tokens, [curve.at(count) for count in tokens], color=colour, linestyle=line, linewidth=1.2, label=label)
    if not curve.samples:
        axes.plot(curve.tokens, curve.seconds, color=colour, linestyle="none", marker="o", markersize=3)
    timed = [
        row for row in zip(curve.sample_tokens, map(median, curve.samples), curve.spread, strict=True) if row[1] > 0
    ]
    for count, middle, width in timed:
        # Use the same factor below as above, since a spread above the median would reach below zero.
        ends = (middle - middle / (1 + width / 2),), (middle * width / 2,)
        axes.errorbar(count, middle, yerr=ends, color=colour, marker="o", markersize=3, capsize=2)


def _heat_map(
    part: SubFigure, axes: Axes, count: int, values: Mapping[tuple[int, int], float], title: str, colours: str,
    text: Callable[[float], str],
) -> None:  # fmt: skip
    """Draw a heat map of directed links, by sender and receiver, with a logarithmic colour scale unless values are equal."""
    cells = np.full((count, count), np.nan)
    for pair, value in values.items():
        cells[pair] = value if math.isfinite(value) and value > 0 else np.nan  # missing and unlimited values stay white
    finite_cells = cells[np.isfinite(cells)]
    low, high = (float(finite_cells.min()), float(finite_cells.max())) if finite_cells.size else (1.0, 1.0)
    norm: Any = LogNorm(low, high) if high > 1.05 * low else Normalize(0, 2 * high)
    image = axes.imshow(cells, norm=norm, cmap=colours)
    axes.set_title(f"{title} (darker: higher)")
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.grid(visible=False)
    if count <= 16:
        axes.set_xticks(range(count))
        axes.set_yticks(range(count))
    axes.spines[:].set_visible(False)
    if count > MAX_LABELLED_RANKS:
        part.colorbar(image, ax=axes, shrink=0.8, format=FuncFormatter(lambda value, _: text(value)))
        return
    for (row, column), value in values.items():
        dark = not np.isnan(cells[row, column]) and float(norm(value)) > 0.6
        look: Any = {"size": 8 if count < 7 else 7, "color": "white" if dark else INK}
        axes.text(column, row, text(value), ha="center", va="center", **look)
