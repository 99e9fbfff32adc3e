"""A profile as text: the ranks and links in a few lines (``profile_lines``), or all that was measured (``inspection_lines``)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from hetero_mpi.planning.device_times import compute_s
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.profile import (
    ANY_HOST,
    ClusterProfile,
    Curve,
    DeviceProfile,
    HostProfile,
    LinkProfile,
)
from hetero_mpi.report.table import MOST_ROWS, Column, Table, grouped, least_most
from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrapped

LONGEST_DEVICE, LONGEST_HOST = 26, 20
"""Characters of a device's or host's name in a table; some CPUs' names are sentences."""
ALL = "`inspect FILE --all` shows every rank, host and link"
MOST_CURVES = 4
"""Devices whose curves are shown where more than ``MOST_ROWS`` differ."""
MOST_LINKS = 12
"""Largest number of links listed one by one; of more, those that fit their line worst."""


def device_text(device: DeviceProfile) -> str:
    """``cuda RTX 4090``: backend and name of a device."""
    name = device.name if device.name.lower().startswith(device.backend) else f"{device.backend} {device.name}"
    return units.device_name(name, LONGEST_DEVICE)


def place_text(profile: ClusterProfile | None, rank: int) -> str:
    """``RTX 4090, alpha``: a rank's device and host; empty where the profile does not tell."""
    if profile is None or not 0 <= rank < len(profile.devices):
        return ""
    return f"{profile.devices[rank].name}, {profile.devices[rank].host}"


def device_heading(profile: ClusterProfile) -> str:
    return "emulated device" if profile.emulated else "device"


def block_s(profile: ClusterProfile, device: DeviceProfile, op: Op) -> float:
    """Mean seconds of a block (kinds may differ) over one sequence."""
    layers = len(profile.model.layers)
    total = compute_s(profile, device, 1, layers - 1, profile.model.sequence_length, op)
    return total / max(layers - 2, 1)


def measured_lines(profile: ClusterProfile) -> list[str]:
    """How fast the ranks and links of a profile are; of an emulated one also what it emulates."""
    ranks, tokens = len(profile.devices), profile.model.sequence_length
    blocks = [sum(block_s(profile, device, op) for op in (Op.F, Op.B)) for device in profile.devices]
    text = f"{units.plural(ranks, 'rank')}; forward and backward of one block over {units.amount(tokens, tokens)} take "
    text += least_most(blocks, units.seconds)
    if links := profile.told_links():
        text += f"; links take {least_most([link.latency_s for link in links], units.seconds)}, "
        text += f"{units.bandwidth(min(link.bytes_per_s for link in links))} or more"
    lines = wrapped(f"{profile.source.capitalize()}: ", text)
    return lines + [line for note in profile.notes if profile.emulated for line in wrapped("  ", note)]


def profile_lines(profile: ClusterProfile, every: bool = False) -> list[str]:
    """A row per rank with device, memory and speed, and the links between ranks. ``every``: of all ranks, however many."""
    tokens = profile.model.sequence_length
    lines = [f"Ranks: {len(profile.devices)}, {profile.mpi_library}; figures {profile.source}, {profile.date}"]
    lines += rank_table(profile).lines(None if every else MOST_ROWS)
    lines += wrapped("  ", f"forward and backward: one block, one {units.rows_of(tokens, '')}, {profile.model.dtype}")
    lines += _link_lines(profile)
    return lines + [line for note in profile.notes for line in wrapped("  ", note)]


def rank_table(profile: ClusterProfile) -> Table:
    columns = (
        Column("rank"),
        Column("emulated host" if profile.emulated else "host", left=True),
        Column(device_heading(profile), left=True),
        Column("forward", units.seconds),
        Column("backward", units.seconds),
        Column("memory", units.size),
        Column("why so much", left=True),
    )
    rows = []
    for device in profile.devices:
        times = (block_s(profile, device, op) for op in (Op.F, Op.B))
        host = units.shortened(device.host, LONGEST_HOST)
        rows.append((device.rank, host, device_text(device), *times, device.memory_bytes, device.memory_reason))
    return Table(columns, rows)


def _link_lines(profile: ClusterProfile) -> list[str]:
    links = profile.told_links()
    if not links:
        return []
    # The link that would take longest over what the blocks send: neither latency nor bandwidth says that alone.
    boundary = profile.model.most_sent_bytes_per_token * profile.model.sequence_length

    def message_s(link: LinkProfile) -> float:
        return link.latency_s + boundary / link.bytes_per_s

    def spread(values: Sequence[float]) -> tuple[float, float, float]:
        return min(values), statistics.median(values), max(values)

    slowest = max(links, key=lambda link: (message_s(link), link.source, link.destination))
    return [
        f"  {units.plural(len(links), 'link')}{'' if profile.links else ' from host to host'} (least, median, most): "
        f"latency {', '.join(map(units.seconds, spread([link.latency_s for link in links])))}; "
        f"bandwidth {', '.join(map(units.bandwidth, spread([link.bytes_per_s for link in links])))}",
        f"  slowest: rank {slowest.source} -> rank {slowest.destination}, "
        f"{units.seconds(message_s(slowest))} for one sequence's activations ({units.size(boundary)})",
    ]


def inspection_lines(profile: ClusterProfile, every: bool = False) -> list[str]:
    """A profile in full: summary, every curve with its spread, hosts, and every link (or the worst ones) with its residuals.

    ``every``: leave nothing out, however many ranks, hosts and links there are.
    """
    lines, most = profile_lines(profile, every), None if every else MOST_ROWS
    devices = distinct_devices(profile)
    if most is not None and len(devices) > most:
        lines += ["", f"Curves of the first {MOST_CURVES} of {len(devices)} unlike devices; {ALL}"]
        devices = devices[:MOST_CURVES]
    for ranks, device in devices:
        name = f"{device.name} ({device.backend}), {units.size(device.memory_bytes)} usable"
        lines += ["", *wrapped("", f"{units.ranks(ranks).capitalize()}: {name}")]
        lines += _curve_table(device).lines()
        if any(times.recompute_s or times.input_s for times in device.layers.values()):
            lines.append("  again: backward that repeats the forward; input, weights: backward in two parts")
        in_host = device.host_optimizer_s_per_parameter
        also = "" if in_host is None else f" ({units.seconds(in_host * 1e6)} in host memory, of streamed stages)"
        lines.append(f"  optimizer: {units.seconds(device.optimizer_fixed_s)} + "
                     f"{units.seconds(device.optimizer_s_per_parameter * 1e6)} per million trained parameters{also}")  # fmt: skip
        lines.append(f"  copies: to the host {units.bandwidth(device.device_to_host_bytes_per_s)}, "
                     f"from it {units.bandwidth(device.host_to_device_bytes_per_s)}, "
                     f"latency {units.seconds(device.copy_latency_s)}")  # fmt: skip
    hosts = _host_table(profile)
    return [*lines, *(["", "Hosts", *hosts.lines(most)] if hosts.rows else []), *_links(profile, every)]


def distinct_devices(profile: ClusterProfile) -> list[tuple[list[int], DeviceProfile]]:
    """Devices that differ in more than rank and host, each with the ranks that have such a device."""

    def figures(device: DeviceProfile) -> str:
        return repr(replace(device, rank=0, host="", memory_reason=""))

    return [([device.rank for device in like], like[0]) for like in grouped(profile.devices, figures).values()]


def _curve_table(device: DeviceProfile) -> Table:
    """The seconds of every layer kind by tokens: those that planning uses, how much longer was timed, and the spread of that."""
    timed = Column("timed", units.change), Column("spread", units.percent)
    times = [Column(name, units.seconds) for name in ("forward", "backward", "again", "input", "weights")]
    columns = (Column("layer"), Column("tokens", "{:,}".format), times[0], *timed, times[1], *timed, *times[2:])
    rows = []
    for kind, own in device.layers.items():
        both, more = (own.forward_s, own.backward_s), (own.recompute_s, own.input_s, own.weight_s)
        tokens = sorted({count for curve in both for count in curve.sample_tokens or curve.tokens})
        for count in tokens:
            cells = [cell for curve in both for cell in _sample(curve, count)]
            cells += [_sample(curve, count)[0] for curve in more]
            rows.append((kind if count == tokens[0] else None, count, *cells))
    return Table(columns, rows)


def _sample(curve: Curve | None, tokens: int) -> tuple[float | None, float | None, float | None]:
    """(seconds of the line, by which share the median of the samples is longer, their spread) at one token count; None where it was
    not measured."""
    if curve is None or tokens not in (curve.sample_tokens or curve.tokens):
        return None, None, None
    line_s = curve.at(tokens)
    if not curve.samples or line_s <= 0:
        return line_s, None, None
    place = curve.sample_tokens.index(tokens)
    return line_s, statistics.median(curve.samples[place]) / line_s - 1, curve.spread[place]


def _host_table(profile: ClusterProfile) -> Table:
    """A row per host: the memory, NIC and copies that its ranks share, where the profile says so."""

    def nic(host: HostProfile) -> str:
        return "shared" if host.shared_nic else "not shared" if math.isfinite(host.flows_bytes_per_s) else ""

    columns = (
        Column("host", left=True),
        Column("ranks", units.numbers),
        Column("in its memory", units.numbers),
        Column("memory", units.size),
        Column("NIC", left=True),
        Column("all flows out", units.bandwidth),  # of its ranks to other hosts
        Column("all copies in", units.bandwidth),  # of its memory to its devices
        Column("disk reads", units.bandwidth),  # of weights for which there is no memory
        Column("why so much memory", left=True),
    )
    rows = []
    for host in profile.hosts:
        own = [device for device in profile.devices if device.host == host.name]
        sharing = [device.rank for device in own if device.shares_host_memory]
        memory = (host.memory_bytes, host.memory_reason) if sharing else (None, None)
        speeds = (
            value if math.isfinite(value) else None for value in (host.flows_bytes_per_s, host.copies_bytes_per_s)
        )
        ranks = [device.rank for device in own]
        rows.append((host.name, ranks, sharing, memory[0], nic(host), *speeds, host.disk_bytes_per_s, memory[1]))
    return Table(columns, rows)


def residuals(link: LinkProfile) -> list[float]:
    """Relative error of ``latency_s + bytes / bytes_per_s`` at each sample of a link."""
    samples = zip(link.sample_bytes, link.sample_s, strict=True)
    return [(link.latency_s + size / link.bytes_per_s) / seconds - 1 for size, seconds in samples if seconds > 0]


def _links(profile: ClusterProfile, every: bool) -> list[str]:
    """Links, of many those that fit a line worst; or links as they are given by pairs of hosts."""
    if not profile.links:
        links = _host_link_table(profile)
        return ["", "Links", *links.lines(None if every else MOST_ROWS)] if links.rows else []
    table = _link_table(profile)
    rows, what = list(table.rows), "Links"
    if len(rows) > MOST_LINKS and not every:
        worst_first = sorted(range(len(rows)), key=lambda place: (-(rows[place][5] or 0.0), place))
        what = f"Links: the {MOST_LINKS} of {len(rows):,} that fit a line worst"
        rows = [rows[place] for place in sorted(worst_first[:MOST_LINKS])]
    lines = ["", what, *replace(table, rows=rows).lines()]
    return [*lines, "  residual: how far latency + bytes / bandwidth is from a measured message"]


def _link_table(profile: ClusterProfile) -> Table:
    columns = (
        Column("link", left=True),
        Column("where"),
        Column("latency", units.seconds),
        Column("bandwidth", units.bandwidth),
        Column("residual (median)", units.percent),
        Column("(worst)", units.percent),
        Column("samples"),
    )
    rows = []
    for link in sorted(profile.links, key=lambda link: (link.source, link.destination)):
        found = [abs(one) for one in residuals(link)]
        errors = (statistics.median(found), max(found), len(found)) if found else (None, None, None)
        where = "inside a host" if link.same_host else "between hosts"
        name = f"{link.source} -> {link.destination}"
        rows.append((name, where, link.latency_s, link.bytes_per_s, *errors))
    return Table(columns, rows)


def _host_link_table(profile: ClusterProfile) -> Table:
    """Links that the profile gives by pairs of hosts."""
    rows = []
    for link in profile.host_links:
        ends = "any other two hosts" if link.source == ANY_HOST else f"{link.source} -> {link.destination}"
        rows.append(("inside a host" if link.same_host else ends, link.latency_s, link.bytes_per_s))
    return Table((Column("where"), Column("latency", units.seconds), Column("bandwidth", units.bandwidth)), rows)
