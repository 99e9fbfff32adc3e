"""Processor seconds of ``python -m hetero_mpi plan`` for every shipped profile, as a user types it.

    python benchmarks/plan_seconds.py [--only NAME] [--explain] [--json FILE] [--check]

Each command is a process of its own, so imports are counted: about a second. Printed are the profile, its devices, the step that is
predicted, and the seconds.

``--check``: no profile takes more than 5 s, and none of up to 8 devices with ``--explain`` more than 2 s.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.planning.types.toml_files import load_profile  # noqa: E402

MAX_S, MAX_EXPLAINED_S, FEW = 5.0, 2.0, 8


def main() -> int:
    parser = parser_of(__doc__, only="homelab-5090")
    parser.add_argument("--only", default="", metavar="NAME", help="only profiles whose name contains this")
    parser.add_argument("--explain", action="store_true", help="with the answers to what-if questions")
    arguments = parser.parse_args()
    rows = []
    print(f"{'profile':<36}{'devices':>8}{'step':>12}{'processor':>12}")
    for file in sorted((ROOT / "profiles").glob("*.toml")):
        if arguments.only in file.stem:
            devices = len(load_profile(file).devices)
            seconds, step_s = planned(file, arguments.explain)
            rows.append({"profile": file.stem, "devices": devices, "step_s": step_s, "processor_s": seconds})
            print(f"{file.stem:<36}{devices:>8}{step_s:>10.4g} s{seconds:>10.1f} s", flush=True)
    if not rows:
        parser.error(f"no profile has {arguments.only!r} in its name")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    too_slow = [
        row
        for row in rows
        if row["processor_s"] > (MAX_EXPLAINED_S if arguments.explain and row["devices"] <= FEW else MAX_S)
    ]
    return int(arguments.check and bool(too_slow))


def planned(file: Path, explain: bool) -> tuple[float, float]:
    """Processor seconds of the command, and the step that it predicts, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "hetero_mpi", "plan", "--profile", str(file), "--json", *["--explain"] * explain]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, float(json.loads(printed)["step_s"])


if __name__ == "__main__":
    sys.exit(main())
