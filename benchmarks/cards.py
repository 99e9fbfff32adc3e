"""A card and a processor in one job: do copies hide behind messages, and does the prediction hold?

    python benchmarks/cards.py [--json FILE] [--check] [--smallest]

*pieces*: tensors of 64 MiB pass from the first card to a rank on the processor, and back. Timed are the copies by themselves, the
messages by themselves, and both by a channel (``engine/channel.py``), in turns; *hidden* is how much of the shorter of the two
the channel hides. *job*: a rank for every card and one more, on the processor, train a Llama of 29 million parameters by the
planner's plan; the median step against the predicted one.

Needs a card that torch offers (CUDA, ROCm, XPU); elsewhere it says so and ends. ``--check`` exits 1 where less than half of the
shorter one is hidden, or where the step is not within 15 % of its prediction. ``--smallest``: small tensors and a small model.
Not yet run on any card but the tests' stand-in, where its figures mean nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import tomli_w  # noqa: E402
import torch  # noqa: E402
from harness import found_by_ranks, output_of_ranks, parser_of, skip  # noqa: E402

from hetero_mpi.comm.mpi_transport import MpiTransport  # noqa: E402
from hetero_mpi.comm.ranks.mpi_start import run_guarded  # noqa: E402
from hetero_mpi.comm.ranks.world import World  # noqa: E402
from hetero_mpi.device.accelerators import BACKENDS, available, usable  # noqa: E402
from hetero_mpi.device.backend import Backend  # noqa: E402
from hetero_mpi.engine.channel import Inbox, Outbox  # noqa: E402
from hetero_mpi.rundir.metrics import read_metrics  # noqa: E402

NUMBERS, LEAST_NUMBERS, TENSORS, ROUNDS = 16 << 20, 2 << 20, 8, 5
"""fp32 numbers of a tensor (more than a piece), the same of --smallest, tensors of a stream, turns."""
STEPS, WARM = 30, 5
HIDDEN_BAR, PREDICTION_BAR = 0.5, 0.15
TO_PROCESSOR, TO_CARD = 1, 2


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rank", type=Path, help="of the ranks that this program starts")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_guarded(lambda world: _rank(world, arguments.rank, LEAST_NUMBERS if arguments.smallest else NUMBERS))
    cards = _cards()
    if not cards:
        skip("torch offers no card here (CUDA, ROCm, XPU)")
    rows = found_by_ranks(2, [str(Path(__file__).resolve()), *(["--smallest"] if arguments.smallest else []), "--rank"])
    missed = False
    print(f"{'':>18} {'copies':>9} {'messages':>9} {'channel':>9} {'hidden':>7}")
    for name, turns in rows.items():
        medians = [statistics.median(column) for column in zip(*turns, strict=True)]
        hidden = statistics.median(_hidden(*turn) for turn in turns)
        missed |= hidden < HIDDEN_BAR
        print(
            f"{name:>18} {' '.join(f'{seconds * 1e3:>6.1f} ms' for seconds in medians)} {hidden:>7.2f} (bar {HIDDEN_BAR})"
        )
    measured_s, predicted_s = _job(len(cards) + 1, arguments.smallest)
    off = measured_s / predicted_s - 1
    missed |= abs(off) > PREDICTION_BAR
    print(
        f"job: {measured_s * 1e3:.0f} ms per step, {predicted_s * 1e3:.0f} predicted: {off:+.1%} (bar {PREDICTION_BAR:.0%})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"pieces": rows, "job": [measured_s, predicted_s]}, indent=1) + "\n")
    return int(arguments.check and missed)


def _cards() -> list[Backend]:
    every = (BACKENDS[name](index) for name in available() for index in usable(name))
    return [backend for backend in every if backend.copying().overlaps]


def _hidden(copies_s: float, messages_s: float, channel_s: float) -> float:
    return (copies_s + messages_s - channel_s) / min(copies_s, messages_s)


def _rank(world: World, out: Path, numbers: int) -> int:
    """Rank 0 has the card."""
    backend = _cards()[0] if world.rank == 0 else Backend()
    found: dict[str, list[list[float]]] = {}
    with MpiTransport(world.comm) as transport:
        for name, tag, sender in (("card to processor", TO_PROCESSOR, 0), ("processor to card", TO_CARD, 1)):
            ends = {
                copying: _Channel(transport, 1 - world.rank, tag, device, world.rank == sender, numbers)
                for copying, device in ((True, backend), (False, Backend()))
            }
            turns = []
            for _ in range(ROUNDS + 1):
                seconds = [_copies_s(backend, tag, numbers)] if world.rank == 0 else [0.0]
                for copying in (False, True):
                    world.barrier()
                    begin = time.perf_counter()
                    ends[copying].stream()
                    seconds.append(time.perf_counter() - begin)
                turns.append([max(column) for column in zip(*world.all_gather_json(seconds), strict=True)])
            found[name] = turns[1:]
            for end in ends.values():
                end.stream(looked_at=True)
    if world.rank == 0:
        out.write_text(json.dumps(found))
    return 0


class _Channel:
    """One end of a stream of tensors."""

    def __init__(
        self, transport: MpiTransport, peer: int, tag: int, backend: Backend, sends: bool, numbers: int
    ) -> None:
        self._backend, self._sends, self._numbers = backend, sends, numbers
        self._tensors = [
            torch.full((numbers,), float(n), device=backend.device) for n in range(TENSORS if sends else 0)
        ]
        self._box: Any = (
            Outbox(transport, peer, tag, backend, torch.float32)
            if sends
            else Inbox(transport, peer, tag, backend, torch.float32, 2)
        )

    def stream(self, looked_at: bool = False) -> None:
        """All tensors: sent, or received and let go. ``looked_at``: are they those that were sent?"""
        if self._sends:
            for tensor in self._tensors:
                self._box.put(tensor)
            self._box.flush()
        else:
            self._box.start_step([(self._numbers,)] * TENSORS)
            for number in range(TENSORS):
                tensor = self._box.receive()
                if looked_at and not bool((tensor == number).all()):
                    raise RuntimeError(f"tensor {number} is not what was sent")
                self._box.release()
        self._backend.synchronize()


def _copies_s(card: Backend, tag: int, numbers: int) -> float:
    """The same tensors' copies, with nothing beside."""
    host, device = card.host_buffer((numbers,), torch.float32), torch.empty(numbers, device=card.device)
    copying = card.copying()
    card.synchronize()
    begin = time.perf_counter()
    for _ in range(TENSORS):
        last = copying.copy(host, device) if tag == TO_PROCESSOR else copying.copy(device, host)
    last.wait()
    return time.perf_counter() - begin


def _job(ranks: int, smallest: bool) -> tuple[float, float]:
    """(median step, predicted step), seconds."""
    width, blocks, steps = (64, 2, WARM + 3) if smallest else (512, 8, STEPS)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": blocks,
        "num_attention_heads": 8,
    }
    job = {
        "model": {"config": {"model_type": "llama", **sizes}},
        "tokenizer": {"train_vocab_size": 2048},
        "data": {
            "text": ["{stdlib}/*.py"],
            "max_bytes": 300_000 if smallest else 3_000_000,
            "sequence_length": width // 2,
            "evaluation_fraction": 0,
        },
        "train": {"steps": steps, "global_batch": 16},
        "checkpoint": {"every": 0},
        "plan": {"allow_idle": False, "rebalance": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "job.toml", Path(folder) / "run"
        path.write_text(tomli_w.dumps(job))
        output_of_ranks(ranks, ["-m", "hetero_mpi", "train", str(path), "--run-dir", str(run), "--reprofile"])
        steps = read_metrics(run / "metrics.jsonl").steps[WARM:]
    return statistics.median(one.step_s for one in steps), steps[-1].predicted_step_s


if __name__ == "__main__":
    sys.exit(main())
