"""How much of a transfer hides under computation? Messages of 16 MiB from one rank to another while both multiply matrices.

    python benchmarks/overlap.py [--rounds 5] [--settings shared 1gbit] [--json FILE] [--check]

Settings: shared memory of one host, and a link of 1 Gbit/s between two network namespaces (needs root). Per round, in turn: the
transfer alone (t), the computation alone (c, made to last 1.5 t), and both together (b). Hidden is the share
of the transfer that took no time of its own, (t + c - b) / t. What the link allows is all of it where cores are to spare. Where
every rank computes on all the core it has, the copying itself must be paid for: at least the processor time that the
transfer alone takes while both ranks poll as little as they can (p), so at most (t - p) / t can hide. Printed is
hidden / allowed, the median over the rounds. ``--check`` exits 1 where it is under 0.85; in shared memory, where a transfer is
nothing but copying, only if there are cores to spare.
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

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402
from two_hosts import Start, same_host, two_hosts, why_not  # noqa: E402

from tests.support.processes import run_within  # noqa: E402

RATES = {"shared": None, "1gbit": 1e9}
"""Bits per second of the link; None: one host."""
MESSAGE_BYTES = 16 << 20
MESSAGES = {"shared": 8, "1gbit": 2}
"""Some tens of milliseconds in shared memory, a quarter of a second on the link."""
COMPUTE_SHARE = 1.5
BAR = 0.85
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> int:
    arguments = _arguments()
    if arguments.rank:
        return _rank(*map(int, arguments.rank))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are taken down all the same
    obstacle = why_not()
    results = {}
    print(
        f"{'setting':>8} {'transfer':>10} {'compute':>10} {'together':>10} {'hidden':>7} {'allowed':>8} {'of allowed':>11}"
    )
    for setting in arguments.settings:
        rate = RATES[setting]
        if rate is not None and obstacle is not None:
            print(f"{setting:>8} skipped: {obstacle}")
            continue
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            start: Start = same_host if rate is None else stack.enter_context(two_hosts(rate, Path(folder)))
            results[setting] = _measure(start, setting, arguments.rounds)
        _print(setting, results[setting])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    shares = {setting: _share(rounds) for setting, rounds in results.items()}
    if "shared" in shares and not results["shared"][0]["spare_core"]:
        print("shared: not judged, copying takes a core and none is to spare")
        del shares["shared"]
    for setting, share in shares.items():
        print(f"{setting}: {share:.3f} of what the link allows is hidden (bar {BAR})")
    return int(arguments.check and any(share < BAR for share in shares.values()))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=1, settings=["shared"])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of the three measurements")
    parser.add_argument("--settings", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(start: Start, setting: str, rounds: int) -> list[dict[str, float]]:
    command = start([sys.executable, str(Path(__file__).resolve()), "--rank", str(MESSAGES[setting]), str(rounds)])
    done = run_within(300, command, {**os.environ, **ENVIRONMENT}, ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != rounds:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return lines


def _hidden(one: dict[str, float]) -> float:
    return (one["transfer_s"] + one["compute_s"] - one["together_s"]) / one["transfer_s"]


def _allowed(one: dict[str, float]) -> float:
    return 1.0 if one["spare_core"] else (one["transfer_s"] - one["processor_s"]) / one["transfer_s"]


def _share(rounds: list[dict[str, float]]) -> float:
    return median(_hidden(one) / _allowed(one) for one in rounds)


def _print(setting: str, rounds: list[dict[str, float]]) -> None:
    times = (
        f"{median(one[key] for one in rounds) * 1e3:>7.1f} ms" for key in ("transfer_s", "compute_s", "together_s")
    )
    hidden, allowed = median(map(_hidden, rounds)), median(map(_allowed, rounds))
    print(f"{setting:>8} {' '.join(times)} {hidden:>7.3f} {allowed:>8.3f} {_share(rounds):>11.3f}")


def _rank(messages: int, rounds: int) -> int:
    """One of the two ranks; rank 0 prints a line per round with the longer of both ranks' times."""
    import torch

    from hetero_mpi.comm import huge_pages
    from hetero_mpi.comm.mpi_transport import MpiTransport
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.comm.ranks.world import World

    torch.set_num_threads(1)
    matrix, product = torch.randn(256, 256), torch.empty(256, 256)

    def compute(turns: int) -> None:
        for _ in range(turns):
            torch.mm(matrix, matrix, out=product)

    def program(world: World) -> int:
        peer = 1 - world.rank
        buffers = [huge_pages.empty(MESSAGE_BYTES) for _ in range(messages)]

        def timed(turns: int, moving: bool) -> tuple[float, float]:
            receives, sends = moving and world.rank == 1, moving and world.rank == 0
            requests = [transport.post_receive(peer, 1, buffer) for buffer in buffers] if receives else []
            ready()
            begin, begin_processor = time.perf_counter(), time.process_time()
            requests += [transport.send(peer, 1, buffer) for buffer in buffers] if sends else []
            compute(turns)
            for request in requests:
                transport.wait(request)
            return time.perf_counter() - begin, time.process_time() - begin_processor

        def ready() -> None:
            """Both ranks are here: a one-byte message each way."""
            receive = transport.post_receive(peer, 2, token)
            transport.wait(transport.send(peer, 2, np.zeros(1, np.uint8)))
            transport.wait(receive)

        def longest(*seconds: float) -> list[float]:
            return [max(column) for column in zip(*world.all_gather_json(seconds), strict=True)]

        token = np.zeros(1, np.uint8)
        with MpiTransport(world.comm) as transport:
            timed(10, True)
            (transfer_s,) = longest(timed(0, True)[0])
            (turn_s,) = longest(timed(200, False)[0] / 200)
            turns = max(1, int(COMPUTE_SHARE * transfer_s / turn_s))
            for _ in range(rounds):
                transfer, computing, together = timed(0, True), timed(turns, False), timed(turns, True)
                names = ("transfer_s", "processor_s", "compute_s", "together_s")
                values = longest(*transfer, computing[0], together[0])
                spare = (os.cpu_count() or 1) > 2
                if world.rank == 0:
                    print(json.dumps({**dict(zip(names, values, strict=True)), "spare_core": spare}), flush=True)
        return 0

    return run_guarded(program)


if __name__ == "__main__":
    sys.exit(main())
