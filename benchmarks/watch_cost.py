"""What do viewers of the live page cost a run? The quickstart on a rank, with `--watch`, in turn without viewers and with many.

    python benchmarks/watch_cost.py [--viewers 20] [--seconds 8] [--rounds 12] [--json FILE] [--check]

Its steps are of 4 sequences, so that there are many. A viewer asks once a second for what has changed, as a browser does, over a
connection of its own. Rank and page share one core, and the viewers have the others: what the page takes, the rank lacks, and what
the viewers take themselves is not counted. Each round has a part without viewers and one with them, in turns of order; the first
seconds of a part are left out.

Compared is the share of that core that the page's process takes, with viewers less without: a run that leaves no core free loses so
much of one of them. Bar: 2 %. Beside it stand the ratios of the processor time that rank and page take per step, and of the parts'
median step times, with viewers and without, which other programs on the machine change by more than that.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import MAX_RUN_S, parser_of, skip  # noqa: E402

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.rundir.metrics import read_metrics  # noqa: E402
from tests.support.processes import end_tree  # noqa: E402

MOST = 0.02
LEFT_OUT_S = 2.0
"""At the beginning of each part: first everything is drawn and sent."""


def view(host: str, token: str, stop: threading.Event, received: list[int]) -> None:
    """One viewer, until ``stop``; ``received``: gets the bytes of each answer."""
    connection, version = http.client.HTTPConnection(host, timeout=60), 0
    while not stop.wait(1.0):
        connection.request("GET", f"/changes/{version}", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse().read()
        version = json.loads(answer)["version"]
        received.append(len(answer))
    connection.close()


def main() -> int:
    parser = parser_of(__doc__, viewers=1, seconds=2.0, rounds=1)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        skip("the viewers need a core of their own: give this program two or more")
    os.sched_setaffinity(0, others)
    with tempfile.TemporaryDirectory() as folder:
        run, output = Path(folder) / "run", Path(folder) / "output.txt"
        job = [str(ROOT / "jobs" / "quickstart.toml"), "--run-dir", str(run), "--set", "train.steps=100000"]
        words = [
            sys.executable,
            "-m",
            "hetero_mpi",
            "train",
            *job,
            "--set",
            "sample.prompt=",
            "--set",
            "train.global_batch=4",
            "--watch",
            "0",
        ]
        command = build_command(find_launcher(), 1, None, words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **command.environment}
        with output.open("w") as stream:
            started = psutil.Popen(
                ["taskset", "-c", str(own), *command.arguments], env=environment, cwd=ROOT, stdout=stream, stderr=stream
            )
        try:
            deadline = time.monotonic() + MAX_RUN_S
            while (said := re.search(r"(http://\S+)/#(\S+)", output.read_text())) is None:
                if started.poll() is not None or time.monotonic() > deadline:
                    sys.exit(output.read_text())
                time.sleep(0.5)
            found = rounds(run, started, urlsplit(said[1]).netloc, said[2], options)
        finally:
            end_tree(started)
    shares = [one["watched_page"] - one["alone_page"] for one in found]
    both, steps = ([one[f"watched_{what}"] / one[f"alone_{what}"] for one in found] for what in ("cpu_s", "step_s"))
    alone_s, kb = (median(one[name] for one in found) for name in ("alone_cpu_s", "watched_kb"))
    print(
        f"{options.viewers} viewers, {options.rounds} rounds: the page takes {median(shares):.2%} of a core "
        f"({min(shares):.2%} to {max(shares):.2%}); with viewers {median(both):.3f} ({min(both):.3f} to {max(both):.3f}) of the "
        f"{alone_s * 1000:.0f} ms of processor time per step, {median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f}) of its "
        f"time; {kb:.1f} kB/s go to each viewer"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    return int(options.check and median(shares) > MOST)


def processor_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def rounds(
    run: Path, launcher: psutil.Process, host: str, token: str, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Of each round what was measured ``alone`` and ``watched``: median seconds per step, processor seconds of rank and page per
    step, those of the page per second, and kB/s to a viewer."""
    children = launcher.children(recursive=True)
    page = [one for one in children if any("live_page" in word for word in one.cmdline())]
    ranks = [one for one in children if "train" in one.cmdline()]
    found = []
    for number in range(options.rounds):
        own = dict[str, float]()
        for part in ("alone", "watched") if number % 2 == 0 else ("watched", "alone"):
            stop, received = threading.Event(), list[int]()
            count = options.viewers if part == "watched" else 0
            viewers = [threading.Thread(target=view, args=(host, token, stop, received)) for _ in range(count)]
            for viewer in viewers:
                viewer.start()
            time.sleep(LEFT_OUT_S)
            begun = len(read_metrics(run / "metrics.jsonl").steps)
            of_rank_s, of_page_s = processor_s(ranks), processor_s(page)
            received.clear()
            time.sleep(options.seconds)
            steps = read_metrics(run / "metrics.jsonl").steps[begun:]
            of_rank_s, of_page_s = processor_s(ranks) - of_rank_s, processor_s(page) - of_page_s
            own[f"{part}_step_s"] = median(one.step_s for one in steps)
            own[f"{part}_cpu_s"] = (of_rank_s + of_page_s) / len(steps)
            own[f"{part}_page"] = of_page_s / options.seconds
            own[f"{part}_kb"] = sum(received) / options.seconds / options.viewers / 1000
            stop.set()
            for viewer in viewers:
                viewer.join()
        found.append(own)
        print(
            f"round {number + 1}: {own['alone_cpu_s'] * 1000:.1f} ms per step without, {own['watched_cpu_s'] * 1000:.1f} ms with",
            flush=True,
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
