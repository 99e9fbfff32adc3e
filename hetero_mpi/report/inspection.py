"""Tables of ``inspect`` and ``simulate``: a profile with its residuals, why ranks wait, and what limits a plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_mpi.planning.analysis.idle_time import Idling
from hetero_mpi.planning.analysis.what_if import NO_CHANGE, Losses, WhatIf
from hetero_mpi.planning.types.plan import PlanReport, RankMemory
from hetero_mpi.planning.types.profile import ANY_HOST, ClusterProfile, Curve, DeviceProfile, LinkProfile
from hetero_mpi.planning.types.request import Network
from hetero_mpi.report import units
from hetero_mpi.report.alike import (
    MOST_ROWS,
    MOST_STAGES,
    device_text,
    fullest_text,
    grouped,
    host_rows,
    link_rows,
    mean_idling,
    utilisation,
)
from hetero_mpi.report.lines import table, wrapped
from hetero_mpi.report.tables import plan_lines, profile_lines

ALL = "Like ranks share a row; `inspect FILE --all` shows every one"
MOST_CLASSED = 240
"""With more links than these (those of 16 ranks), classes of links are shown as well."""
MOST_LINKS = 12
"""Largest number of links listed one by one; of more, those that fit their line worst."""

_CURVE_HEADERS = (
    "layer", "tokens", "forward", "timed", "spread", "backward", "timed", "spread", "again", "input", "weights"
)  # fmt: skip
TOGETHER = "all flows out", "all copies in"
"""Of a host: of its ranks to other hosts, and of its memory to its devices."""
LIMITS = {
    "device": "the speed of the devices",
    "link": "links",
    "memory": "memory",
    "granularity": "granularity (whole layers, whole micro-batches)",
}
"""The values of ``Losses.limit``, in words."""


def residuals(link: LinkProfile) -> list[float]:
    """Relative error of ``latency_s + bytes / bytes_per_s`` at each sample of a link."""
    samples = zip(link.sample_bytes, link.sample_s, strict=True)
    return [(link.latency_s + size / link.bytes_per_s) / seconds - 1 for size, seconds in samples if seconds > 0]


def inspection_lines(profile: ClusterProfile, every: bool = False) -> list[str]:
    """A profile in full: summary, every curve with its spread, hosts, and every link (or the worst ones) with its residuals.

    ``every``: leave nothing out, however many ranks, hosts and links there are.
    """
    lines = profile_lines(profile)
    devices = distinct_devices(profile)
    few = every or len(devices) <= MOST_ROWS
    if not few:
        lines += ["", ALL]
        devices = [_middle(like) for like in grouped(profile.devices, device_text).values()]
    for ranks, device in devices:
        of = "" if few else f"; the curves of rank {device.rank}, the median of {len(ranks)}"
        name = f"{device.name} ({device.backend}), {units.size(device.memory_bytes)} usable"
        lines += ["", *wrapped("", f"{units.ranks(ranks).capitalize()}: {name}{of}")]
        lines += table(_CURVE_HEADERS, _curve_rows(device))
        if any(times.recompute_s or times.input_s for times in device.layers.values()):
            lines.append("  again: backward that repeats the forward; input, weights: backward in two parts")
        in_host = device.host_optimizer_s_per_parameter
        also = "" if in_host is None else f" ({units.seconds(in_host * 1e6)} in host memory, of streamed stages)"
        lines.append(f"  optimizer: {units.seconds(device.optimizer_fixed_s)} + "
                     f"{units.seconds(device.optimizer_s_per_parameter * 1e6)} per million trained parameters{also}")  # fmt: skip
        lines.append(f"  copies: to the host {units.bandwidth(device.device_to_host_bytes_per_s)}, "
                     f"from it {units.bandwidth(device.host_to_device_bytes_per_s)}, "
                     f"latency {units.seconds(device.copy_latency_s)}")  # fmt: skip
    return [*lines, *_host_table(profile, every), *_link_table(profile, every)]


def _middle(devices: Sequence[DeviceProfile]) -> tuple[list[int], DeviceProfile]:
    """(ranks of ``devices``, the device of median speed)."""

    def slowness(device: DeviceProfile) -> float:
        return sum(times.forward_s.seconds[-1] + times.backward_s.seconds[-1] for times in device.layers.values())

    return [device.rank for device in devices], sorted(devices, key=slowness)[len(devices) // 2]


def costed_plan_lines(
    report: PlanReport, profile: ClusterProfile, busy_s: Mapping[int, float], lost: Losses
) -> list[str]:
    """A plan with its prediction and bound, the utilisation of every rank, and what limits the plan."""
    lines = plan_lines(report, profile)
    step_s = report.predicted_step_s
    lines += wrapped("Utilisation: ", utilisation({rank: _share(seconds, step_s) for rank, seconds in busy_s.items()}))
    parts = [(lost.links, "links"), (lost.memory, "memory"), (lost.granularity, "whole layers and micro-batches")]
    if lost.choice > 0:
        parts.insert(0, (lost.choice, "this plan (the planner's own is faster)"))
    spent = ", ".join(f"{units.percent(share)} to {name}" for share, name in parts)
    lines += wrapped(
        "Limited by: ", f"{LIMITS[lost.limit]}; against devices that are always busy, the step loses {spent}"
    )
    return lines


def network_lines(network: Network, step_s: float, predicted_s: float) -> list[str]:
    """The differences between the simulated network and this program's, and what they cost; empty where there are none."""
    said = []
    if network.blocking_sends:
        said.append("a rank computes nothing while it sends")
    if network.shared_nic:
        said.append("all messages of a host to others pass through one NIC")
    if not said:
        return []
    more = _share(step_s, predicted_s) - 1
    change = "no change" if abs(more) < 0.0005 else f"{units.percent(more)} more than predicted"
    return wrapped("Simulated so that ", f"{' and '.join(said)}: {change}")


def idling_lines(
    step_s: float,
    busy_s: Mapping[int, float],
    causes: Mapping[int, Idling],
    memory: Sequence[RankMemory] = (),
    labels: Mapping[int, str] | None = None,
) -> list[str]:
    """A row per rank, in shares of the step: computing, and idling by cause; and its peak of memory.

    Of many ranks, those with the same label (their device) share a row, with means and the fullest memory.
    """
    many = len(busy_s) > MOST_STAGES
    groups = grouped(sorted(busy_s), lambda rank: (labels or {}).get(rank, "") if many else str(rank))
    who, device, peak = ("ranks", "device", "fullest memory") if many else ("rank", "", "memory peak")
    causes_of = ("waits for activations", "gradients", "the link", "all-reduce", "the end")
    headers = (who, device, "computes", "idles", *causes_of, peak)
    peaks = {one.rank: one for one in memory}
    rows = []
    for name, ranks in groups.items():
        cause = mean_idling([causes[rank] for rank in ranks])
        busy = sum(busy_s[rank] for rank in ranks) / len(ranks)
        parts = (cause.total_s, cause.activations_s, cause.gradients_s, cause.link_s, cause.sums_s, cause.end_s)
        shares = (units.percent(_share(seconds, step_s)) for seconds in (busy, *parts))
        names = (str(len(ranks)), name) if many else (name, "")
        rows.append((*names, *shares, fullest_text([peaks[rank] for rank in ranks if rank in peaks])))
    return [
        *table(headers, rows),
        *(["  on average; every rank by itself: trace.json"] if many else []),
        "  all-reduce: of gradients, with other ranks; the end: done, while others are not",
    ]


def what_if_lines(answers: Sequence[WhatIf], step_s: float) -> list[str]:
    """``what if link 0 - 1 10x faster: -18 % (410 ms per step)``"""
    lines = []
    for answer in answers:
        if answer.step_s is None:
            lines.append(f"  {answer.change}: no plan ({answer.problem})")
        else:
            change = _share(answer.step_s, step_s) - 1
            effect = "no change" if abs(change) < NO_CHANGE else units.change(change)
            lines.append(f"  {answer.change}: {effect} ({units.seconds(answer.step_s)} per step)")
    return ["What if (planned again for each):", *lines] if lines else []


def distinct_devices(profile: ClusterProfile) -> list[tuple[list[int], DeviceProfile]]:
    """Devices that differ in more than rank and host, each with the ranks that have such a device."""

    def figures(device: DeviceProfile) -> str:
        return repr(replace(device, rank=0, host="", memory_reason=""))

    return [([device.rank for device in like], like[0]) for like in grouped(profile.devices, figures).values()]


def _curve_rows(device: DeviceProfile) -> list[tuple[str, ...]]:
    rows = []
    for kind, times in device.layers.items():
        more = (times.recompute_s, times.input_s, times.weight_s)
        both = (times.forward_s, times.backward_s)
        tokens = sorted({count for curve in both for count in curve.sample_tokens or curve.tokens})
        for count in tokens:
            cells = [*_sample(times.forward_s, count), *_sample(times.backward_s, count)]
            cells += [_sample(curve, count)[0] for curve in more]
            rows.append((kind if count == tokens[0] else "", f"{count:,}", *cells))
    return rows


def _sample(curve: Curve | None, tokens: int) -> tuple[str, str, str]:
    """(seconds of the line, by how much longer the median of the samples is, their spread) at one token count; empty where it was
    not measured."""
    if curve is None or tokens not in (curve.sample_tokens or curve.tokens):
        return "", "", ""
    line_s = curve.at(tokens)
    if not curve.samples or line_s <= 0:
        return units.seconds(line_s), "", ""
    place = curve.sample_tokens.index(tokens)
    longer = units.change(statistics.median(curve.samples[place]) / line_s - 1)
    return units.seconds(line_s), longer, units.percent(curve.spread[place])


def _host_table(profile: ClusterProfile, every: bool) -> list[str]:
    """What the ranks of each host share, where the profile says so."""
    if len(profile.hosts) > MOST_ROWS and not every:
        return ["", "Hosts", *table(("hosts", "ranks of each", "NIC", *TOGETHER), host_rows(profile))]
    rows = []
    for host in profile.hosts:
        ranks = [device.rank for device in profile.devices if device.host == host.name]
        sharing = [device.rank for device in profile.devices if device.host == host.name and device.shares_host_memory]
        measured = math.isfinite(host.flows_bytes_per_s)
        nic = "shared" if host.shared_nic else "not shared" if measured else ""
        size, reason = (units.size(host.memory_bytes), host.memory_reason) if sharing else ("", "")
        speed = units.bandwidth(host.flows_bytes_per_s) if measured else ""
        copies = units.bandwidth(host.copies_bytes_per_s) if math.isfinite(host.copies_bytes_per_s) else ""
        rows.append((host.name, units.numbers(ranks), units.numbers(sharing), size, nic, speed, copies, reason))
    if not rows:
        return []
    headers = ("host", "ranks", "in its memory", "memory", "NIC", *TOGETHER, "why so much memory")
    return ["", "Hosts", *table(headers, rows)]


def _link_table(profile: ClusterProfile, every: bool) -> list[str]:
    links, classes = len(profile.links) or len(profile.host_links), list[str]()
    if links > MOST_CLASSED and not every:
        columns = ("where", "between", "links", "latency", "bandwidth")
        classes = ["", f"Links in classes, of {links:,}", *table(columns, link_rows(profile))]
    if not profile.links:
        return classes or _host_link_table(profile)
    errors = {(link.source, link.destination): residuals(link) for link in profile.links}
    worst = {pair: max(map(abs, found), default=0.0) for pair, found in errors.items()}
    listed = sorted(
        profile.links, key=lambda link: (-worst[link.source, link.destination], link.source, link.destination)
    )
    shown = sorted(listed if every else listed[:MOST_LINKS], key=lambda link: (link.source, link.destination))
    rows = []
    for link in shown:
        found = errors[link.source, link.destination]
        middle = units.percent(statistics.median(map(abs, found))) if found else ""
        rows.append((
            f"{link.source} -> {link.destination}", "same host" if link.same_host else "", units.seconds(link.latency_s),
            units.bandwidth(link.bytes_per_s), middle, units.percent(worst[link.source, link.destination]) if found else "",
            str(len(found)) if found else "",
        ))  # fmt: skip
    what = (
        "Links"
        if len(rows) == len(profile.links)
        else f"Links: the {len(rows)} of {len(profile.links)} that fit a line worst"
    )
    headers = ("link", "where", "latency", "bandwidth", "residual (median)", "(worst)", "samples")
    return [
        *classes,
        "",
        what,
        *table(headers, rows),
        "  residual: how far latency + bytes / bandwidth is from a measured message",
    ]


def _host_link_table(profile: ClusterProfile) -> list[str]:
    """Links that the profile gives by pairs of hosts."""
    rows = []
    for link in profile.host_links:
        ends = "any other two hosts" if link.source == ANY_HOST else f"{link.source} -> {link.destination}"
        where = "inside a host" if link.same_host else ends
        rows.append((where, units.seconds(link.latency_s), units.bandwidth(link.bytes_per_s)))
    return ["", "Links", *table(("where", "latency", "bandwidth"), rows)] if rows else []


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
