"""How far profiles of one machine differ that are made while other programs come and go.

    python benchmarks/profile_rounds.py [--job jobs/quickstart.toml] [--ranks 3] [--profiles 10] [--json FILE] [--check]

Profiles are made one after the other, beside 0, 1 and 2 busy processes in turn. Of every kind of layer and part: the longest over
the shortest time of the ten, for the number of tokens and the rank where that is largest; and its share of a micro-batch's time.
``--check``: at most 1.15 for all that take a hundredth of that time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import MAX_RUN_S, busy, parser_of  # noqa: E402

from hetero_mpi.planning.types.profile import ClusterProfile, LayerTimes  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_profile  # noqa: E402
from tests.support.processes import run_within  # noqa: E402

BAR = 1.15
LEAST_SHARE = 0.01
LOADS = (0, 1, 2)


def main() -> int:
    """Make the profiles, and print how far they differ."""
    parser = parser_of(__doc__, ranks=1, profiles=1)
    parser.add_argument("--job", default=str(ROOT / "jobs" / "quickstart.toml"), help="whose model is measured")
    parser.add_argument("--ranks", type=int, default=3, help="that measure at a time")
    parser.add_argument("--profiles", type=int, default=10, help="so many are made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profiles = [
            _profiled(arguments.job, arguments.ranks, LOADS[number % len(LOADS)], Path(folder) / f"{number}.toml")
            for number in range(arguments.profiles)
        ]
    worst, rows = 1.0, []
    print("layer, part: longest over shortest time, share of a micro-batch's forward and backward")
    for kind in dict.fromkeys(layer.kind for layer in profiles[0].model.layers):
        for part in (field.name for field in fields(LayerTimes)):
            found = _differences(profiles, kind, part)
            if found:
                ratio, share = found
                worst = max(worst, ratio if share >= LEAST_SHARE else 1.0)
                rows.append([kind, part, ratio, share])
                print(f"  {kind}, {part}: {ratio:.2f}, {100 * share:.1f} %")
    print(f"worst of those that take at least {100 * LEAST_SHARE:.0f} %: {worst:.2f} (bar {BAR})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(arguments.check and worst > BAR)


def _profiled(job: str, ranks: int, load: int, path: Path) -> ClusterProfile:
    """A profile made beside so many busy processes."""
    words = ["launch", "-np", str(ranks), "--", "profile", job, "-o", str(path), "--reprofile"]
    with busy(load):
        done = run_within(MAX_RUN_S, [sys.executable, "-m", "hetero_mpi", *words], os.environ, Path.cwd())
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    took = next((line.strip() for line in done.stdout.splitlines() if "layers took" in line), "")
    print(f"{path.stem}: {load} busy processes besides, load {os.getloadavg()[0]:.1f}, {took}", flush=True)
    return load_profile(path)


def _differences(profiles: list[ClusterProfile], kind: str, part: str) -> tuple[float, float] | None:
    """(longest over shortest time, share of a micro-batch's time) of a curve at its ends; None where there is no such curve."""
    number = Counter(layer.kind for layer in profiles[0].model.layers)
    ratios, shares = [], []
    for rank in range(len(profiles[0].devices)):
        tables = [profile.devices[rank].layers for profile in profiles]
        curves = [getattr(table[kind], part) for table in tables]
        if None in curves:
            return None
        for tokens in (curves[0].sample_tokens[0], curves[0].sample_tokens[-1]) if curves[0].samples else ():
            times = [curve.at(tokens) for curve in curves]
            if min(times) > 0:
                whole_s = sum(
                    number[name] * (one.forward_s.at(tokens) + one.backward_s.at(tokens))
                    for name, one in tables[0].items()
                )
                ratios.append(max(times) / min(times))
                shares.append(number[kind] * max(times) / whole_s)
    return (max(ratios), max(shares)) if ratios else None


if __name__ == "__main__":
    sys.exit(main())
