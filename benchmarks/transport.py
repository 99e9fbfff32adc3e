"""How fast is the transport beside raw MPI in C? Bandwidth and latency over message sizes, between two ranks.

    cmake -B build && cmake --build build          # once: builds benchmarks/transport.c against the MPI that is found
    python benchmarks/transport.py [--c-program build/transport_c] [--rounds 3] [--settings shared 1gbit 10gbit]
                                   [--json FILE] [--check]

Settings: shared memory of one host, and links of 1 and 10 Gbit/s between two network namespaces (needs root). The C program and
ours take turns, ``--rounds`` times; ratios are taken within a round, and medians over rounds. Latency is half a round trip,
bandwidth that of a stream with four messages under way. ``--check`` exits 1 where our bandwidth is under 0.9 of C's from
1 MiB on a link, under 0.8 from 16 MiB in shared memory, or where we add 150 us or more to a message of up to 4 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of, skip  # noqa: E402
from two_hosts import Start, same_host, two_hosts, why_not  # noqa: E402

from tests.support.processes import run_within  # noqa: E402

RATES = {"shared": None, "1gbit": 1e9, "10gbit": 1e10}
"""Bits per second of the link; None: one host."""
SIZES = (1, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
SMALL_BYTES, ADDED_BAR_S = 4 << 10, 150e-6
BARS = {"shared": (16 << 20, 0.8), "1gbit": (1 << 20, 0.9), "10gbit": (1 << 20, 0.9)}
"""From this size on, at least this share of C's bandwidth."""
WINDOW, TRIPS = 4, 31
KEYS = ("latency_s", "bytes_per_s")
DATA, ANSWER = 1, 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> int:
    arguments = _arguments()
    if arguments.rank:
        return _rank(arguments.rank)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are taken down all the same
    if not arguments.c_program.exists():
        skip(
            f"{arguments.c_program}, which ours is compared with, is not there. "
            "Build it with `cmake -B build && cmake --build build` (C compiler, mpi.h)."
        )
    obstacle = why_not()
    results = {}
    for setting in arguments.settings:
        if RATES[setting] is not None and obstacle is not None:
            print(f"\n{setting}: skipped, {obstacle}")
            continue
        results[setting] = _compare(setting, arguments.c_program, arguments.rounds)
        _print(setting, results[setting])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    missed = [line for setting, rows in results.items() for line in _missed(setting, rows)]
    ratios = [(row["bandwidth_ratio"], setting, row["bytes"]) for setting, row in _judged(results)]
    if ratios:
        worst, setting, size = min(ratios)
        print(f"\nbars missed: {'; '.join(missed) or 'none'}")
        print(f"lowest share of C's bandwidth among those with a bar: {worst:.3f} ({setting}, {size} bytes)")
    return int(arguments.check and bool(missed))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=1, settings=["shared"])
    parser.add_argument("--c-program", type=Path, default=ROOT / "build" / "transport_c", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of both programs")
    parser.add_argument("--settings", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(setting: str, c_program: Path, rounds: int) -> list[dict[str, Any]]:
    """A row per size: medians of both, the median ratio of bandwidths, the median difference of latencies."""
    rate = RATES[setting]
    words = [f"{size}x{_count(size, rate)}" for size in SIZES]
    seen: list[tuple[list[dict[str, float]], list[dict[str, float]]]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        start: Start = same_host if rate is None else stack.enter_context(two_hosts(rate, Path(folder)))
        for _ in range(rounds):
            raw = _run(start([str(c_program.resolve()), *words]))
            ours = _run(start([sys.executable, str(Path(__file__).resolve()), "--rank", *words]))
            seen.append((raw, ours))
    rows = []
    for index, size in enumerate(SIZES):
        pairs = [(raw[index], ours[index]) for raw, ours in seen]
        rows.append(
            {
                "bytes": size,
                "raw": [raw for raw, _ in pairs],
                "ours": [ours for _, ours in pairs],
                "bandwidth_ratio": median(ours["bytes_per_s"] / raw["bytes_per_s"] for raw, ours in pairs),
                "added_latency_s": median(ours["latency_s"] - raw["latency_s"] for raw, ours in pairs),
            }
        )
    return rows


def _count(size: int, rate: float | None) -> int:
    """Messages of a stream: half a second's worth of the link, or of 2 GB/s in shared memory."""
    return max(2 * WINDOW, min(500, int((rate / 8 if rate else 2e9) / 2 / size)))


def _run(command: list[str]) -> list[dict[str, float]]:
    done = run_within(300, command, {**os.environ, **ENVIRONMENT}, ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != len(SIZES):
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return lines


def _print(setting: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{setting}\n{'bytes':>10} {'C latency':>11} {'ours':>9} {'added':>9} {'C MB/s':>9} {'ours':>9} {'ratio':>6}"
    )
    for row in rows:
        latency, bandwidth = ([median(one[key] for one in row[who]) for who in ("raw", "ours")] for key in KEYS)
        print(
            f"{row['bytes']:>10} {latency[0] * 1e6:>8.1f} us {latency[1] * 1e6:>6.1f} us {row['added_latency_s'] * 1e6:>6.1f} us"
            f" {bandwidth[0] / 1e6:>9.1f} {bandwidth[1] / 1e6:>9.1f} {row['bandwidth_ratio']:>6.3f}"
        )


def _judged(results: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The rows whose bandwidth has a bar."""
    return [(setting, row) for setting, rows in results.items() for row in rows if row["bytes"] >= BARS[setting][0]]


def _missed(setting: str, rows: list[dict[str, Any]]) -> list[str]:
    bar = BARS[setting][1]
    slow = [row for _, row in _judged({setting: rows}) if row["bandwidth_ratio"] < bar]
    late = [row for row in rows if row["bytes"] <= SMALL_BYTES and row["added_latency_s"] >= ADDED_BAR_S]
    return [
        f"{setting} {row['bytes']} bytes: {row['bandwidth_ratio']:.3f} of C's bandwidth (bar {bar})" for row in slow
    ] + [f"{setting} {row['bytes']} bytes: {row['added_latency_s'] * 1e6:.0f} us added (bar 150)" for row in late]


def _rank(words: list[str]) -> int:
    """One of our two ranks: does what ``transport.c`` does."""
    from hetero_mpi.comm import huge_pages
    from hetero_mpi.comm.mpi_transport import MpiTransport
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.comm.ranks.world import World

    def program(world: World) -> int:
        for word in words:
            size, count = map(int, word.split("x"))
            buffers = [huge_pages.empty(size) for _ in range(WINDOW)]
            for buffer in buffers:
                buffer.fill(world.rank)
            with MpiTransport(world.comm) as transport:
                latency_s = _median_trip(transport, buffers, world.rank)
                for messages in (WINDOW, count):
                    world.barrier()
                    bytes_per_s = _throughput(transport, buffers, messages, world.rank)
            if world.rank == 0:
                print(json.dumps({"bytes": size, "latency_s": latency_s, "bytes_per_s": bytes_per_s}), flush=True)
        return 0

    return run_guarded(program)


def _median_trip(transport: Any, buffers: list[Any], rank: int) -> float:
    peer, seconds = 1 - rank, []
    for _ in range(TRIPS + 2):
        receive = transport.post_receive(peer, DATA, buffers[1])
        begin = time.perf_counter()
        if rank == 1:
            transport.wait(receive)
        send = transport.send(peer, DATA, buffers[0])
        transport.wait(receive)
        transport.wait(send)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:]) / 2


def _throughput(transport: Any, buffers: list[Any], count: int, rank: int) -> float:
    requests: list[Any] = []
    begin = time.perf_counter()
    for message in range(count):
        if message >= WINDOW:
            transport.wait(requests[message - WINDOW])
        move = transport.send if rank == 0 else transport.post_receive
        requests.append(move(1 - rank, DATA, buffers[message % WINDOW]))
    for request in requests[-WINDOW:]:
        transport.wait(request)
    move = transport.post_receive if rank == 0 else transport.send
    transport.wait(move(1 - rank, ANSWER, np.zeros(1, np.uint8)))
    return buffers[0].size * count / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
