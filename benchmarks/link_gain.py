"""What does a faster link between home machines gain? Plans for the clusters of ``profiles/`` that have two or three hosts.

    python benchmarks/link_gain.py [--only NAME] [--json FILE] [--check]

Links between hosts get the speed of the kind (``LINKS``), those inside of a host stay. The table, which ``docs/links.md`` shows,
has predicted seconds per step of the planner's own plan, and how many ranks it uses; the last column is the best device alone.
``--check`` exits 1 where a faster link makes a step longer by more than 1 %.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.commands.plan_commands import ask  # noqa: E402
from hetero_mpi.planning.decision.decide import best_alone  # noqa: E402
from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402

PROFILES = ("homelab-5090-strix-halo", "homelab-m4max-2titanx", "zorse-2xa6000-2xw6800", "zorse-2xl4-a6000-p40")
LINKS = {
    "Wi-Fi, 300 Mbit/s": (2e-3, 37e6),
    "1 GbE": (1e-4, 117e6),
    "2.5 GbE": (1e-4, 293e6),
    "10 GbE": (5e-5, 1.17e9),
    "Thunderbolt, 16 Gbit/s": (5e-5, 2.05e9),
}
"""Kind -> latency, seconds (assumed), and bytes per second: what TCP carries of a cable's bits, for the last one as measured by
others (``docs/links.md``)."""


@dataclass(frozen=True)
class Cell:
    profile: str
    link: str
    step_s: float
    used: int
    alone_s: float


def cells(name: str) -> Iterator[Cell]:
    question = ask(None, (), ROOT / "profiles" / f"{name}.toml")
    alone = best_alone(question.profile, question.request)
    for kind, (latency_s, bytes_per_s) in LINKS.items():
        links = tuple(
            link if link.same_host else replace(link, latency_s=latency_s, bytes_per_s=bytes_per_s)
            for link in question.profile.links
        )
        report = make_plan(replace(question.profile, links=links), question.request)
        used = len({rank for _, _, stage in report.plan.numbered for rank in stage.ranks})
        yield Cell(name, kind, report.predicted_step_s, used, (alone.step_s if alone else None) or math.inf)


def table(found: list[Cell], names: Sequence[str] = PROFILES) -> list[str]:
    """The rows of a Markdown table."""
    lines = [f"| cluster | {' | '.join(LINKS)} | best device alone |", "| --- |" + " --- |" * (len(LINKS) + 1)]
    for name in names:
        row = [cell for cell in found if cell.profile == name]
        times = [f"{cell.step_s:.3g} s ({cell.used})" for cell in row]
        alone = f"{row[0].alone_s:.3g} s" if row[0].alone_s < math.inf else "does not fit"
        lines.append(f"| {' | '.join([name, *times, alone])} |")
    return lines


def main() -> int:
    parser = parser_of(__doc__, only=PROFILES[0])
    parser.add_argument("--only", default="", metavar="NAME", help="only clusters whose name contains this")
    arguments = parser.parse_args()
    names = [name for name in PROFILES if arguments.only in name]
    found = [cell for name in names for cell in cells(name)]
    print("\n".join(table(found, names)))
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(cell) for cell in found], indent=1))
    pairs = itertools.pairwise(found)
    longer = [
        after for before, after in pairs if before.profile == after.profile and after.step_s > 1.01 * before.step_s
    ]
    for cell in longer:
        print(f"longer with {cell.link}: {cell.profile}")
    return int(arguments.check and bool(longer))


if __name__ == "__main__":
    sys.exit(main())
