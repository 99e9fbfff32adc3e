"""Describe profiles as text: a summary of ranks and links (``profile_lines``) or all measurements (``inspection_lines``)."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from hetero_mpi.planning.device_times import compute_s
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.profile import (
    ANY_HOST,
    ClusterProfile,
    Curve,
    DeviceProfile,
    HostLinkProfile,
    HostProfile,
    LinkProfile,
)
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD
from hetero_mpi.report.table import MAX_ROWS, Column, Table, least_most
from hetero_mpi.util import units
from hetero_mpi.util.grouping import grouped
from hetero_mpi.util.terminal import wrap_text

LONGEST_DEVICE, LONGEST_HOST = 26, 20
"""Maximum number of characters of device and host names in a table, since some CPU names are very long."""
ALL = "`inspect FILE --all` shows every rank, host and link"
MAX_CURVE_DEVICES = 4
"""Number of devices whose curves are shown if there are more than ``MAX_ROWS`` different devices."""
MAX_LINK_ROWS = 12
"""Maximum number of links to list; if there are more, only those with the worst fit are listed."""


def device_text(device: DeviceProfile) -> str:
    """Return a device's backend and name, such as ``cuda RTX 4090``."""
    name = device.name if device.name.lower().startswith(device.backend) else f"{device.backend} {device.name}"
    return units.device_name(name, LONGEST_DEVICE)


def place_text(profile: ClusterProfile | None, rank: int) -> str:
    """Return a rank's device and host, such as ``RTX 4090, alpha``, or "" if they are unknown."""
    if profile is None or not 0 <= rank < len(profile.devices):
        return ""
    return f"{profile.devices[rank].name}, {profile.devices[rank].host}"


def device_heading(profile: ClusterProfile) -> str:
    return "emulated device" if profile.emulated else "device"


def block_s(profile: ClusterProfile, device: DeviceProfile, op: Op) -> float:
    """Return the mean time per block, in seconds, for one sequence."""
    layers = len(profile.model.layers)
    total = compute_s(profile, device, 1, layers - 1, profile.model.sequence_length, op)
    return total / max(layers - 2, 1)


_ONE_LAYER = {"tokens": "one block", "samples": "one inner layer (mean)"}


def layer_name(kind: str, sequence_length: int) -> str:
    """Return a layer kind's name for the reader: the first and last layer of a custom model are no embedding and head."""
    return {EMBEDDING: "first layer", HEAD: "last layer"}.get(kind, kind) if sequence_length == 1 else kind


def measured_lines(profile: ClusterProfile) -> list[str]:
    """Summarise the speed of a profile's ranks and links. For an emulated profile, its notes follow."""
    ranks, tokens = len(profile.devices), profile.model.sequence_length
    blocks = [sum(block_s(profile, device, op) for op in (Op.F, Op.B)) for device in profile.devices]
    text = f"{units.plural(ranks, 'rank')}; forward and backward of {_ONE_LAYER[units.unit_of(tokens)]} "
    text += f"over {units.amount(tokens, tokens)} take {least_most(blocks, units.seconds)}"
    if links := profile.described_links():
        text += f"; links take {least_most([link.latency_s for link in links], units.seconds)}, "
        text += f"{units.bandwidth(min(link.bytes_per_s for link in links))} or more"
    lines = wrap_text(f"{units.capitalise(profile.source)}: ", text)
    return lines + [line for note in profile.notes if profile.emulated for line in wrap_text("  ", note)]


def profile_lines(profile: ClusterProfile, every: bool = False) -> list[str]:
    """Return a table with a row per rank (device, speed, memory) and a summary of the links. ``every`` removes the row limit."""
    tokens = profile.model.sequence_length
    library = "" if profile.mpi_library in ("", "none") else f", {profile.mpi_library}"
    lines = [f"Ranks: {len(profile.devices)}{library}; figures {profile.source}, {profile.date}"]
    lines += rank_table(profile).lines(None if every else MAX_ROWS)
    text = f"forward and backward: {_ONE_LAYER[units.unit_of(tokens)]}, one {units.rows_of(tokens, '')}, {profile.model.dtype}; "
    lines += wrap_text("  ", text + "memory: usable, of which plans keep [plan] memory_reserve (default 5 %) free")
    lines += link_lines(profile)
    return lines + [line for note in profile.notes for line in wrap_text("  ", note)]


def rank_table(profile: ClusterProfile) -> Table:
    host = "emulated host" if profile.emulated else "host"
    columns = (
        Column("rank", "rank"),
        Column(host, lambda device: units.shorten(device.host, LONGEST_HOST), align_left=True),
        Column(device_heading(profile), device_text, align_left=True),
        Column("forward", lambda device: block_s(profile, device, Op.F), units.seconds),
        Column("backward", lambda device: block_s(profile, device, Op.B), units.seconds),
        Column("memory", "memory_bytes", units.size),
        Column("memory source", "memory_reason", align_left=True),
    )
    return Table(columns, profile.devices)


def link_lines(profile: ClusterProfile) -> list[str]:
    links = profile.described_links()
    if not links:
        return []
    # The slowest link for the blocks' messages depends on both latency and bandwidth.
    boundary = profile.model.most_sent_bytes_per_token * profile.model.sequence_length

    def message_s(link: LinkProfile) -> float:
        return link.latency_s + boundary / link.bytes_per_s

    def spread(values: Sequence[float]) -> tuple[float, float, float]:
        return min(values), statistics.median(values), max(values)

    slowest = max(links, key=lambda link: (message_s(link), link.source, link.destination))
    return [
        f"  {units.plural(len(links), 'link')}{'' if profile.links else ' from host to host'} (min, median, max): "
        f"latency {', '.join(map(units.seconds, spread([link.latency_s for link in links])))}; "
        f"bandwidth {', '.join(map(units.bandwidth, spread([link.bytes_per_s for link in links])))}",
        f"  slowest: rank {slowest.source} -> rank {slowest.destination}, "
        f"{units.seconds(message_s(slowest))} for the activations of one {units.row(profile.model.sequence_length)} "
        f"({units.size(boundary)})",
    ]


def inspection_lines(profile: ClusterProfile, every: bool = False) -> list[str]:
    """Describe a profile in full: a summary, curves with their spread, hosts, and links with residuals.

    If ``every`` is true, all ranks, hosts and links are printed; otherwise the worst links if there are many.
    """
    lines, most = profile_lines(profile, every), None if every else MAX_ROWS
    devices = distinct_devices(profile)
    if most is not None and len(devices) > most:
        lines += ["", f"Curves of the first {MAX_CURVE_DEVICES} of {len(devices)} different devices; {ALL}"]
        devices = devices[:MAX_CURVE_DEVICES]
    for ranks, device in devices:
        name = f"{device.name} ({device.backend}), {units.size(device.memory_bytes)} usable"
        lines += ["", *wrap_text("", f"{units.capitalise(units.ranks(ranks))}: {name}")]
        lines += _curve_table(device, profile.model.sequence_length).lines()
        lines.append(f"  forward, backward: of so many {units.unit_of(profile.model.sequence_length)}, as plans assume")
        if any(times.recompute_s or times.input_s for times in device.layers.values()):
            lines.append("  recompute: backward with recomputation; input, weights: split backward")
        if any(times.forward_s.samples for times in device.layers.values()):
            lines.append("  timed: median relative to the planner's curve; spread: middle half relative to the median")
        in_host = device.host_optimizer_s_per_parameter
        also = "" if in_host is None else f" ({units.seconds(in_host * 1e6)} in host memory, for offloaded stages)"
        lines.append(f"  optimizer: {units.seconds(device.optimizer_fixed_s)} + "
                     f"{units.seconds(device.optimizer_s_per_parameter * 1e6)} per million trained parameters{also}")  # fmt: skip
        lines.append(f"  copies: to the host {units.bandwidth(device.device_to_host_bytes_per_s)}, "
                     f"from the host {units.bandwidth(device.host_to_device_bytes_per_s)}, "
                     f"latency {units.seconds(device.copy_latency_s)}")  # fmt: skip
    hosts, legend = _host_table(profile), "  in its memory: ranks that compute in the host's memory, which they share"
    return [*lines, *(["", "Hosts", *hosts.lines(most), legend] if hosts.rows else []), *_links(profile, every)]


def distinct_devices(profile: ClusterProfile) -> list[tuple[list[int], DeviceProfile]]:
    """Group the ranks whose devices have the same measurements, as (ranks, device of the first rank)."""
    groups = grouped(profile.devices, lambda device: repr(vars(replace(device, rank=0, host="", memory_reason=""))))
    return [([device.rank for device in like], like[0]) for like in groups.values()]


def _curve_table(device: DeviceProfile, sequence_length: int) -> Table:
    """Build a table of seconds by layer kind and tokens: the planner's value, the timed median relative to it, and the spread."""
    sampled = (("timed", units.change), ("spread", units.percent))
    forms: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("layer", str), (units.unit_of(sequence_length), "{:,}".format),
        ("forward", units.seconds), *sampled, ("backward", units.seconds), *sampled,
        ("recompute", units.seconds), ("input", units.seconds), ("weights", units.seconds),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for kind, times in device.layers.items():
        main_curves = times.forward_s, times.backward_s
        further_curves = times.recompute_s, times.input_s, times.weight_s
        tokens = sorted({count for curve in main_curves for count in curve.sample_tokens or curve.tokens})
        for count in tokens:
            cells = [cell for curve in main_curves for cell in _sample(curve, count)]
            cells += [_sample(curve, count)[0] for curve in further_curves]
            rows.append((layer_name(kind, sequence_length) if count == tokens[0] else None, count, *cells))
    return Table([Column(title, itemgetter(index), form) for index, (title, form) in enumerate(forms)], rows)


def _sample(curve: Curve | None, tokens: int) -> tuple[float | None, float | None, float | None]:
    """Return the curve's seconds at ``tokens``, the relative excess of the samples' median, and their spread; None if unknown."""
    if curve is None or tokens not in (curve.sample_tokens or curve.tokens):
        return None, None, None
    line_s = curve.at(tokens)
    if not curve.samples or line_s <= 0:
        return line_s, None, None
    index = curve.sample_tokens.index(tokens)
    return line_s, statistics.median(curve.samples[index]) / line_s - 1, curve.spread[index]


def finite_bandwidth(bytes_per_s: float) -> str:
    return units.bandwidth(bytes_per_s) if math.isfinite(bytes_per_s) else ""


def _host_table(profile: ClusterProfile) -> Table:
    """Build a table with a row per host: the memory, NIC, and copy bandwidth that its ranks share."""

    def ranks(host: HostProfile) -> list[int]:
        return [device.rank for device in profile.devices if device.host == host.name]

    def sharing(host: HostProfile) -> list[int]:
        return [rank for rank in ranks(host) if profile.devices[rank].shares_host_memory]

    def nic(host: HostProfile) -> str:
        return "shared" if host.shared_nic else "not shared" if math.isfinite(host.flows_bytes_per_s) else ""

    columns = (
        Column("host", "name", align_left=True),
        Column("ranks", ranks, units.numbers),
        Column("in its memory", sharing, units.numbers),
        Column("memory", lambda host: host.memory_bytes or None, units.size),
        Column("NIC", nic, align_left=True),
        Column("all flows out", "flows_bytes_per_s", finite_bandwidth),  # from its ranks to other hosts
        Column("all copies in", "copies_bytes_per_s", finite_bandwidth),  # from its memory to its devices
        Column("disk reads", "disk_bytes_per_s", finite_bandwidth),  # of weights offloaded to disk
        Column("memory source", "memory_reason", align_left=True),
    )
    return Table(columns, profile.hosts)


def residuals(link: LinkProfile) -> list[float]:
    """Return the absolute relative error of ``latency_s + bytes / bytes_per_s`` for each sample of a link."""
    samples = zip(link.sample_bytes, link.sample_s, strict=True)
    return [abs((link.latency_s + size / link.bytes_per_s) / seconds - 1) for size, seconds in samples if seconds > 0]


def _links(profile: ClusterProfile, every: bool) -> list[str]:
    """Describe the links between ranks, or only the worst fits if there are many. Without them, describe links between hosts."""
    if not profile.links:
        by_hosts = Table((Column("where", _host_link_ends), *_SPEED), profile.host_links)
        return ["", "Links", *by_hosts.lines(None if every else MAX_ROWS)] if by_hosts.rows else []
    links, title = sorted(profile.links, key=lambda link: (link.source, link.destination)), "Links"
    if len(links) > MAX_LINK_ROWS and not every:
        worst_first = sorted(links, key=lambda link: -max(residuals(link), default=0.0))
        which = " with the worst linear fit" if any(link.sample_s for link in links) else ""
        title = f"Links: {MAX_LINK_ROWS} of {len(links):,}{which}; all: --all"
        links = [link for link in links if link in worst_first[:MAX_LINK_ROWS]]
    columns = (
        Column("link", lambda link: f"{link.source} -> {link.destination}", align_left=True),
        Column("where", lambda link: "inside a host" if link.same_host else "between hosts"),
        *_SPEED,
        Column(
            "residual (median)",
            lambda link: statistics.median(errors) if (errors := residuals(link)) else None,
            units.percent,
        ),
        Column("(worst)", lambda link: max(residuals(link), default=None), units.percent),
        Column("samples", lambda link: len(residuals(link)) or None),
    )
    lines = ["", title, *Table(columns, links).lines()]
    legend = "  residual: relative error of latency + bytes / bandwidth for a measured message"
    return [*lines, *[legend] * any(link.sample_s for link in links)]


_SPEED = Column("latency", "latency_s", units.seconds), Column("bandwidth", "bytes_per_s", units.bandwidth)


def _host_link_ends(link: HostLinkProfile) -> str:
    if link.same_host:
        return "inside a host"
    return "any other two hosts" if link.source == ANY_HOST else f"{link.source} -> {link.destination}"
