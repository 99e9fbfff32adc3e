"""What do viewers of the live page cost a run? The quickstart on two ranks, with `--watch`, in turn without viewers and with many.

    python benchmarks/watch_cost.py [--viewers 20] [--seconds 20] [--rounds 8] [--json FILE] [--check]

A viewer asks once a second for what has changed, as a browser does, over a connection of its own. Each round has a part without
viewers and one with them, in turns of order; the first seconds of a part are left out. Printed is the median over the rounds of the
ratio of the parts' median step times, with the least and the greatest. The viewers are on the same machine, so their own time is
part of the cost. Bar: 2 %.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.report.run_files.metrics import read_metrics  # noqa: E402

MOST = 1.02
LEFT_OUT_S = 3.0
"""At the beginning of each part: first everything is drawn and sent."""


def view(host: str, token: str, stop: threading.Event, received: list[int]) -> None:
    """One viewer, until ``stop``; ``received``: gets the bytes of each answer."""
    connection, version = http.client.HTTPConnection(host, timeout=60), 0
    while not stop.wait(1.0):
        connection.request("GET", f"/changes?after={version}", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse().read()
        version = json.loads(answer)["version"]
        received.append(len(answer))
    connection.close()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, output = Path(folder) / "run", Path(folder) / "output.txt"
        job = [str(ROOT / "jobs" / "quickstart.toml"), "--run-dir", str(run), "--set", "train.steps=100000"]
        words = [sys.executable, "-m", "hetero_mpi", "train", *job, "--set", "sample.prompt=", "--watch", "0"]
        command = build_command(find_launcher(), 2, None, words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **command.environment}
        with output.open("w") as stream:
            started = subprocess.Popen(command.arguments, env=environment, cwd=ROOT, stdout=stream, stderr=stream)
        try:
            while (said := re.search(r"(http://\S+)/#(\S+)", output.read_text())) is None:
                if started.poll() is not None:
                    sys.exit(output.read_text())
                time.sleep(0.5)
            found = rounds(run, urlsplit(said[1]).netloc, said[2], options)
        finally:
            started.terminate()
            started.wait()
    ratios = [watched / alone for alone, watched, _ in found]
    kilobytes = sum(size for *_, size in found) / len(found) / options.viewers / options.seconds / 1000
    print(
        f"{options.viewers} viewers, {options.rounds} rounds of {options.seconds:g} s and {options.seconds:g} s: "
        f"{median(alone for alone, *_ in found) * 1000:.0f} ms per step without, ratio {median(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f}), {kilobytes:.0f} kB/s to each"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    return int(options.check and median(ratios) > MOST)


def rounds(run: Path, host: str, token: str, options: argparse.Namespace) -> list[tuple[float, float, int]]:
    """Of each round: median seconds per step without viewers and with them, and the bytes that these received."""
    found = []
    for number in range(options.rounds):
        medians, received = dict[bool, float](), list[int]()
        for watched in (False, True) if number % 2 == 0 else (True, False):
            stop = threading.Event()
            arguments = host, token, stop, received
            viewers = [threading.Thread(target=view, args=arguments) for _ in range(options.viewers * watched)]
            for viewer in viewers:
                viewer.start()
            time.sleep(LEFT_OUT_S)
            begun = len(read_metrics(run / "metrics.jsonl").steps)
            time.sleep(options.seconds)
            medians[watched] = median(one.step_s for one in read_metrics(run / "metrics.jsonl").steps[begun:])
            stop.set()
            for viewer in viewers:
                viewer.join()
        found.append((medians[False], medians[True], sum(received)))
        print(
            f"round {number + 1}: {medians[False] * 1000:.1f} ms without, {medians[True] * 1000:.1f} ms with",
            flush=True,
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
