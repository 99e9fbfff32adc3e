"""Robust fits of layer times: a line per curve, pooled over ranks with the same hardware.

A micro-batch takes ``a + b * tokens`` seconds: call overhead plus work. Samples scatter around that line, independently and
jointly (load bursts, rising clocks), so a planner that trusted every sample would pick plans for the luckiest ones.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from hetero_mpi.planning.types.cluster_changes import SECONDS, STEP_SECONDS
from hetero_mpi.planning.types.profile import TABLES, ClusterProfile, Curve, DeviceProfile, LayerTimes
from hetero_mpi.util.grouping import grouped

MIN_NOISE = 0.03
"""Minimum relative error assumed for a point."""
OUTLIER_NOISE_RATIO = 4.0
"""Points that deviate from the line by more than this multiple of the noise are outliers."""
MIN_OUTLIER_POINTS = 4
"""Minimum number of points for rejecting outliers; at most one in this many points is rejected."""
MIN_BENT_POINTS = 3
"""A bent line needs at least this many points off by ``BENT_NOISE_RATIO`` times the noise, and must halve the error."""
BENT_NOISE_RATIO = 2.0
MIN_DIFFERENCE = 0.08
"""Ranks are always pooled if their times differ by less than this fraction; room temperature alone causes as much."""
MAX_STANDARD_ERRORS = 3.0
"""Maximum difference between pooled ranks in standard errors."""
MAX_DIFFERENCE = 0.5
"""Maximum relative difference between pooled ranks."""
POOLED_FIGURES = (
    *SECONDS,
    *STEP_SECONDS,
    "host_optimizer_s_per_parameter",
    "copy_latency_s",
    "device_to_host_bytes_per_s",
    "host_to_device_bytes_per_s",
)
"""Device figures that are pooled in addition to the tables if they agree within ``MAX_DIFFERENCE``."""


class _Point(NamedTuple):
    """Median time of the repetitions at one token count."""

    tokens: int
    seconds: float


def sigma_of(deviations: Iterable[float]) -> float:
    """Robust standard deviation from absolute deviations (median / 0.674), or 0 if there are none."""
    values = list(deviations)
    return statistics.median(values) / 0.674 if values else 0.0


def median_error(sigma: float, count: float) -> float:
    """Standard error of the median of ``count`` normally distributed values."""
    return 1.25 * sigma / math.sqrt(count)


def fitted_curve(samples: Mapping[int, Sequence[float]], noise: float = 0.0) -> Curve:
    """Fit a curve to the median times; ``noise`` is a lower bound on the relative error of a point."""
    counts = sorted(samples)
    points = [_Point(count, statistics.median(samples[count])) for count in counts]
    knots = _knots(points, max(noise, _noise_of(samples.values())))
    tokens, seconds = zip(*knots, strict=True)
    return Curve(tokens, seconds, tuple(counts), tuple(tuple(samples[count]) for count in counts))


def _noise_of(samples: Iterable[Sequence[float]]) -> float:
    """Relative standard error of the medians, from the scatter of the repetitions; at least ``MIN_NOISE``."""
    errors = []
    for times in samples:
        middle = statistics.median(times)
        if len(times) > 2 and middle > 0:
            errors.append(median_error(sigma_of(abs(seconds - middle) for seconds in times), len(times)) / middle)
    return max(MIN_NOISE, statistics.median(errors) if errors else 0.0)


def _knots(points: Sequence[_Point], noise: float, certain: Collection[int] = ()) -> list[_Point]:
    """Fit a straight or bent line to sorted ``points`` and return its knots; ``certain`` tokens deviate significantly."""
    counts = sorted({point.tokens for point in points})
    if len(counts) == 1:
        return [_Point(counts[0], statistics.median(point.seconds for point in points))]
    ends = [counts[0], counts[-1]]
    points = [point for point in points if point.seconds > 0]  # others were too short for the clock
    if not points:  # no gradient reaches the layer
        return [_Point(count, 0.0) for count in ends]
    middles = _middles(points)
    # The median of several ranks is surer than one of them.
    spread = max(MIN_NOISE, min(noise, median_error(noise, len(points) / len(middles))))
    straight = _line(middles, ends)
    if len(middles) > MIN_BENT_POINTS + 1 and (certain or _count_far(straight, middles, spread) >= MIN_BENT_POINTS):
        between = {round(math.sqrt(a * b)) for a, b in itertools.pairwise(counts)} | {*counts}
        bent = [_line(middles, [ends[0], count, ends[1]]) for count in sorted(between - {*ends})]
        best = min((line for line in bent if line), key=lambda line: _scatter(line, middles), default=straight)
        if _scatter(best, middles) < min(BENT_NOISE_RATIO * spread, _scatter(straight, middles) / 2):
            return best
    far = _outliers(points, noise)
    return _line([point for point in points if point not in far or point.tokens in certain], ends)


def _middles(points: Sequence[_Point]) -> list[_Point]:
    """Median of the sorted ``points`` at each token count."""
    groups = itertools.groupby(points, key=lambda point: point.tokens)
    return [_Point(count, statistics.median(seconds for _, seconds in same)) for count, same in groups]


def _line(points: Sequence[_Point], knots: Sequence[int]) -> list[_Point]:
    """Fit a line (2 knots) or bent line (3 knots) by relative least squares; a bent line that would fall gives []."""
    x = np.array([point.tokens for point in points], dtype=float)
    y = np.array([point.seconds for point in points])
    if len(knots) == 2:
        shapes = {(0, 1): np.stack([np.ones_like(x), x], axis=1), (1,): x[:, None], (0,): np.ones_like(x)[:, None]}
        best, least_error = np.zeros(2), math.inf
        for pick, shape in shapes.items():
            candidate = np.zeros(2)
            candidate[[*pick]] = np.linalg.lstsq(shape / y[:, None], np.ones_like(y), rcond=None)[0]
            error = float(np.sum(((candidate[0] + candidate[1] * x) / y - 1) ** 2))
            if candidate.min() >= 0 and error < least_error:
                best, least_error = candidate, error
        return [_Point(count, float(best[0] + best[1] * count)) for count in knots]
    hats = np.stack([np.interp(x, knots, row) for row in np.eye(len(knots))], axis=1)
    heights = np.linalg.lstsq(hats / y[:, None], np.ones_like(y), rcond=None)[0]
    if heights[0] > heights[1]:
        level = np.stack([hats[:, 0] + hats[:, 1], hats[:, 2]], axis=1)
        heights = np.linalg.lstsq(level / y[:, None], np.ones_like(y), rcond=None)[0][[0, 0, 1]]
    if heights[0] <= 0 or heights[2] < heights[1]:
        return []
    return [_Point(count, float(height)) for count, height in zip(knots, heights, strict=True)]


def _outliers(points: Sequence[_Point], noise: float) -> list[_Point]:
    """Return the outliers among sorted ``points``, relative to the line that is close to most of them."""
    middles = _middles(points)
    if len(points) < MIN_OUTLIER_POINTS or len(middles) < 2:
        return []
    ends = [middles[0].tokens, middles[-1].tokens]
    lines = [_line(pair, ends) for pair in itertools.combinations(middles, 2)]
    best = min(lines, key=lambda line: statistics.median(map(abs, _errors(line, points))))
    errors = [abs(error) for error in _errors(best, points)]
    # What most points scatter is noise too, whatever was known of it.
    limit = OUTLIER_NOISE_RATIO * max(noise, sigma_of(errors))
    limit = max(limit, sorted(errors)[-1 - len(points) // MIN_OUTLIER_POINTS])
    # A point at an end may be far from a line through the others, which is not known well there.
    full_errors = [abs(error) for error in _errors(_line(points, ends), points)]
    rows = zip(points, errors, full_errors, strict=True)
    return [point for point, error, full_error in rows if error > limit and full_error > BENT_NOISE_RATIO * noise]


def _errors(line: Sequence[_Point], points: Sequence[_Point]) -> list[float]:
    curve = Curve(*zip(*line, strict=True))
    return [math.log(seconds / max(curve.at(tokens), 1e-12)) for tokens, seconds in points]


def _scatter(line: Sequence[_Point], points: Sequence[_Point]) -> float:
    return math.sqrt(statistics.fmean(error * error for error in _errors(line, points)))


def _count_far(line: Sequence[_Point], points: Sequence[_Point], noise: float) -> int:
    return sum(abs(error) > BENT_NOISE_RATIO * noise for error in _errors(line, points))


def pooled(profile: ClusterProfile) -> ClusterProfile:
    """Refit the curves to their samples, with one curve for ranks with the same hardware that agree within the noise.

    Ranks have the same hardware if their devices and dtypes are equal and their hosts have equal devices. Curves without
    samples count as exact and are kept. Other measured figures become the median of the pooled ranks.
    """
    device_by_rank: dict[int, DeviceProfile] = {}
    for like in like_ranks(profile):
        for agreeing in _agreeing([profile.devices[rank] for rank in like]):
            knots, figures = _common_figures(agreeing)
            for device in agreeing:
                tables: dict[str, dict[str, LayerTimes]] = {name: dict(getattr(device, name)) for name in TABLES}
                for (table, kind, part), curve in _sampled_curves(device).items():
                    tokens, seconds = zip(*knots[table, kind, part], strict=True)
                    fitted = replace(curve, tokens=tokens, seconds=seconds)
                    tables[table][kind] = replace(tables[table][kind], **{part: fitted})
                device_by_rank[device.rank] = replace(device, **tables, **figures)  # type: ignore[arg-type]
    return replace(profile, devices=tuple(device_by_rank[rank] for rank in range(len(profile.devices))))


def like_ranks(profile: ClusterProfile) -> list[list[int]]:
    """Group ranks that have the same device on hosts with the same devices."""
    by_host = grouped(profile.devices, lambda device: device.host)
    names = {host: tuple(sorted(f"{d.backend} {d.name}" for d in devices)) for host, devices in by_host.items()}

    def kind(rank: int) -> tuple[object, ...]:
        device = profile.devices[rank]
        return device.backend, device.name, device.dtypes, device.shares_host_memory, names[device.host]

    return list(grouped(range(len(profile.devices)), kind).values())


_CurveKey = tuple[str, str, str]
"""(table, layer kind, part)"""


def _sampled_curves(device: DeviceProfile) -> dict[_CurveKey, Curve]:
    keys = (
        (table, kind, part.name) for table in TABLES for kind in getattr(device, table) for part in fields(LayerTimes)
    )
    curve_by_key = {key: getattr(getattr(device, key[0])[key[1]], key[2]) for key in keys}
    return {key: curve for key, curve in curve_by_key.items() if curve is not None and curve.samples}


def _points(curve: Curve) -> list[_Point]:
    return [_Point(*pair) for pair in zip(curve.sample_tokens, map(statistics.median, curve.samples), strict=True)]


def _agreeing(like: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """Sort devices by speed and split them into groups that differ by no more than the noise."""
    curves_by_device = [_sampled_curves(device) for device in like]
    keys = [key for key in curves_by_device[0] if all(key in curves for curves in curves_by_device)]
    if len(like) == 1 or not keys:
        return [[device] for device in like]
    levels = np.array([[_level(curves[key]) for key in keys] for curves in curves_by_device])
    levels -= np.median(levels, axis=0)
    # Points of a curve, and of a separately timed table, may share noise.
    names = list(dict.fromkeys(table for table, _, _ in keys))
    tables = [np.median(levels[:, [key[0] == name for key in keys]], axis=1) for name in names]
    device_levels = np.mean(tables, axis=0)
    error = max(_error(levels), _error(np.stack(tables, axis=1)))
    max_gap = math.log1p(min(MAX_DIFFERENCE, max(MIN_DIFFERENCE, MAX_STANDARD_ERRORS * error)))
    agreeing_groups: list[list[DeviceProfile]] = []
    first = -math.inf
    for index in np.argsort(device_levels, kind="stable"):
        if device_levels[index] - first > max_gap:
            agreeing_groups.append([])
            first = float(device_levels[index])
        agreeing_groups[-1].append(like[index])
    return agreeing_groups


def _error(levels: Any) -> float:
    """Standard error of the difference between two ranks, from the scatter of ``levels`` [rank, curve] within ranks."""
    ranks, count = levels.shape
    rest = np.abs(levels - np.median(levels, axis=1, keepdims=True)) * math.sqrt(ranks / (ranks - 1))
    return math.sqrt(2) * median_error(sigma_of(rest.ravel()), count)


def _level(curve: Curve) -> float:
    """Median of the logarithms of a curve's sampled times."""
    return statistics.median(math.log(max(1e-12, seconds)) for _, seconds in _points(curve))


def _common_figures(agreeing: Sequence[DeviceProfile]) -> tuple[dict[_CurveKey, Sequence[_Point]], dict[str, float]]:
    """Pool the devices' samples and return the knots of the fitted curves, and the median figures."""
    points: dict[_CurveKey, list[_Point]] = {}
    for device in agreeing:
        for key, curve in _sampled_curves(device).items():
            points.setdefault(key, []).extend(_points(curve))
    noise = max(MIN_NOISE, _scatter_of([curve for device in agreeing for curve in _sampled_curves(device).values()]))
    figures = {}
    for name in POOLED_FIGURES:
        values = [getattr(device, name) for device in agreeing]
        if points and None not in values and max(values) <= (1 + MAX_DIFFERENCE) * min(values):
            figures[name] = statistics.median(values)
    timed = {key: sorted(point for point in key_points if point.seconds > 0) for key, key_points in points.items()}
    certain = _significant_counts(list(timed.values()), noise / math.sqrt(len(agreeing)))
    return {key: _knots(sorted(key_points), noise, certain) for key, key_points in points.items()}, figures


def _significant_counts(curves: Sequence[Sequence[_Point]], noise: float) -> set[int]:
    """Token counts at which the curves jointly deviate from their lines by more than the noise."""
    errors: dict[int, list[float]] = {}
    for points in curves:
        middles = _middles(points)
        if len(middles) > 2:
            line = _line(middles, [middles[0].tokens, middles[-1].tokens])
            for point, error in zip(middles, _errors(line, middles), strict=True):
                errors.setdefault(point.tokens, []).append(error)
    limits = {count: BENT_NOISE_RATIO * max(MIN_NOISE, median_error(noise, len(row))) for count, row in errors.items()}
    return {count for count, row in errors.items() if abs(statistics.median(row)) > limits[count]}


def _scatter_of(curves: Sequence[Curve]) -> float:
    """Relative noise of a point: its residual, less the deviation common to curves with the same token counts."""
    errors_by_tokens: dict[tuple[int, ...], list[list[float]]] = {}
    for curve in curves:
        points = _points(curve)
        if len(points) > 2 and min(point.seconds for point in points) > 0:
            line = _line(points, [points[0].tokens, points[-1].tokens])
            errors_by_tokens.setdefault(curve.sample_tokens, []).append(_errors(line, points))
    residuals: list[float] = []
    for errors in errors_by_tokens.values():
        if len(errors) > 2:
            rest = np.abs(np.array(errors) - np.median(errors, axis=0))
            # A line takes two of a curve's points, and the median one of the curves.
            free = (1 - 2 / len(errors[0])) * (1 - 1 / len(errors))
            residuals += [float(residual) / math.sqrt(free) for residual in rest.ravel()]
    return sigma_of(residuals)
