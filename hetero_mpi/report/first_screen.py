"""What ``train`` says before the first step, a line for each thing: what was measured, who holds what, how long a step will be.

All else is in ``tables``: for ``--verbose``, ``inspect`` and the log.
"""

from __future__ import annotations

from pathlib import Path

from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report import units
from hetero_mpi.report.alike import least_most
from hetero_mpi.report.lines import table, wrapped
from hetero_mpi.report.tables import batch_lines, block_s, headline, idle_lines, plan_title, stage_table

FEW = 8
"""Up to so many stages each has a row."""


def measured_lines(profile: ClusterProfile) -> list[str]:
    """How fast the ranks and links of a profile are; of an emulated one also what it emulates."""
    ranks, tokens = len(profile.devices), profile.model.sequence_length
    blocks = [sum(block_s(profile, device, op) for op in (Op.F, Op.B)) for device in profile.devices]
    text = f"{units.plural(ranks, 'rank')}; forward and backward of one block over {tokens:,} tokens take "
    text += least_most(blocks, units.seconds)
    links = profile.told_links()
    if links:
        slowest = min(link.bytes_per_s for link in links)
        text += (
            f"; links take {least_most([link.latency_s for link in links], units.seconds)}, {units.bandwidth(slowest)}"
        )
        text += " or more"
    lines = wrapped(f"{profile.source.capitalize()}: ", text)
    return lines + [line for note in profile.notes if profile.emulated for line in wrapped("  ", note)]


def planned_lines(report: PlanReport, profile: ClusterProfile, run_dir: Path) -> list[str]:
    """The headline, who holds what, who idles, the batch, and where more is said."""
    lines = wrapped("", headline(report))
    lines += [plan_title(report.plan, profile)]
    headers, rows = stage_table(report.plan, profile, report.memory, len(report.plan.numbered) > FEW)
    kept = [place for place, name in enumerate(headers) if name not in ("weights", "micro-batches", "warm-up")]
    lines += table([headers[place] for place in kept], [[row[place] for place in kept] for row in rows])
    for line in idle_lines(report.idle):
        lines += wrapped("  ", line)
    lines += [f"Batch: {line}" for line in batch_lines(report.plan)]
    return lines + wrapped("  ", f"why, and all figures: --verbose, or `python -m hetero_mpi inspect {run_dir}`")
