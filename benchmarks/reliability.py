"""What does it cost to lose nothing, and does it work? Figures of checkpoints.

    python benchmarks/reliability.py [--only NAME ...] [--json FILE] [--check]

bandwidth  a checkpoint of 512 MB against a raw write and fsync of the same bytes, in turns, medians
stall      two ranks train a small Llama on this machine, once all its weights and once LoRA adapters, with a checkpoint every
           6 steps: how long training stands still for the snapshot (the slower rank, the first checkpoint apart), against a
           step and against one copy of the same bytes in host memory; how much slower the steps are beside the writing
damage     random damage to a checkpoint (flipped bits, zeroed and foreign blocks, cut ends): how many files are recognised,
           or are read as they were written because the damage hit bytes that mean nothing
kills      four ranks under Open MPI's fault tolerance, of which three are killed one after the other at random moments, up to
           eight times, as far as four minutes suffice: deaths survived, steps lost, seconds from the death to the next new step,
           losses against an undisturbed run
pipeline_kills  likewise, of two pipelines with two ranks each, until each has one
copies     two ranks with copies of the trained state in memory, on disk and without, in turns: what a step takes
rebalancing  three emulated devices, of which one falls to a third of its speed after step 20 and recovers after step 60: step times
           with layers that stay and with layers that move, changes of plan, losses; changes of plan under noise alone

A measurement is a function that returns figures; a figure with a bar is what ``--check`` holds it to (exit code 1 if missed).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import output_of_ranks, parser_of  # noqa: E402

from tests.support.checkpoint_samples import told  # noqa: E402

KINDS = ("parameters", "moments1", "moments2")
STEPS, EVERY = 37, 6
DAMAGES = 500


@dataclass(frozen=True)
class Figure:
    """One number, and what it must be where there is a promise."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def kept(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def __str__(self) -> str:
        bars = [
            f"{word} {bar:g}" for word, bar in (("at least", self.least), ("at most", self.most)) if bar is not None
        ]
        promise = f"   ({', '.join(bars)}{'' if self.kept else ': MISSED'})" if bars else ""
        return f"{self.name:<62} {self.value:>10.4g} {self.unit}{promise}"


def bandwidth(folder: Path, smallest: bool) -> list[Figure]:
    """Checkpoint against raw bytes."""
    from hetero_mpi.state.writer import CheckpointWriter

    tensors = {
        f"w{number}": np.random.default_rng(number).random((4096, 2048), np.float32)
        for number in range(1 if smallest else 16)
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    times: dict[str, list[float]] = {"raw": [], "checkpoint": []}
    for _ in range(1 if smallest else 7):
        begin = time.perf_counter()
        with (folder / "raw").open("wb", buffering=0) as file:
            for tensor in tensors.values():
                file.write(tensor.data)
            os.fsync(file.fileno())
        times["raw"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        with CheckpointWriter(folder / "a.h5", {"step": 1}) as writer:
            for name, tensor in tensors.items():
                writer.write("parameters", name, tensor, "float32")
        times["checkpoint"].append(time.perf_counter() - begin)
    speeds = {name: size / statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(raw / own for raw, own in zip(times["raw"], times["checkpoint"], strict=True))
    return [
        Figure("raw write and fsync", speeds["raw"] / 1e6, "MB/s"),
        Figure("checkpoint", speeds["checkpoint"] / 1e6, "MB/s"),
        Figure("checkpoint bandwidth / raw (median of the rounds)", ratio, "", least=0.6),
    ]


def stall(folder: Path, smallest: bool) -> list[Figure]:
    """Snapshots of real runs."""
    figures = []
    for kind in ("lora",) if smallest else ("full", "lora"):
        snapshots, size, quiet_s, beside_s = _train(folder, kind)
        stall_s, copy_s = statistics.median(snapshots), _copy_s(size)
        figures += [
            Figure(f"{kind}: largest snapshot of a rank", size / 1e6, "MB"),
            Figure(f"{kind}: step", quiet_s * 1e3, "ms"),
            Figure(f"{kind}: stall per checkpoint", stall_s * 1e3, "ms"),
            Figure(f"{kind}: stall / step", stall_s / quiet_s, "", most=0.05 if kind == "lora" else None),
            Figure(f"{kind}: stall / one host copy", stall_s / copy_s, "", most=1.0 if kind == "full" else None),
            Figure(f"{kind}: first step beside the writing / other steps", beside_s / quiet_s, ""),
        ]
    return figures


def _train(folder: Path, kind: str) -> tuple[list[float], int, float, float]:
    """(stall of each checkpoint but the first, bytes of the largest snapshot, median step, median first step beside a write)."""
    run = folder / f"run-{kind}"
    job = _job(folder, kind)
    output_of_ranks(2, ["-m", "hetero_mpi", "train", str(job), "--run-dir", str(run)])
    seconds: dict[int, float] = {}
    size = 0
    for log in (run / "logs").glob("rank-*.log"):
        for step, taken, took in re.findall(r"step (\d+): snapshot of (\d+) bytes in ([\d.]+) s", log.read_text()):
            seconds[int(step)] = max(seconds.get(int(step), 0.0), float(took))
            size = max(size, int(taken))
    first = min(seconds)
    steps = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line.get("step_s") is not None and line["step"] > 2:
            steps[line["step"]] = line["step_s"]
    beside = [value for step, value in steps.items() if step - 1 in seconds]
    quiet = [value for step, value in steps.items() if step % EVERY in (4, 5, 0)]
    stalls = [value for step, value in seconds.items() if step != first]
    return stalls, size, statistics.median(quiet), statistics.median(beside)


def _job(folder: Path, kind: str) -> Path:
    model = folder / "model"
    if not model.exists():
        code = (
            "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0)\n"
            "config = AutoConfig.for_model('llama', hidden_size=512, intermediate_size=1376, num_hidden_layers=8,"
            " num_attention_heads=8, num_key_value_heads=8, vocab_size=2048, bos_token_id=0, eos_token_id=0)\n"
            "AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", code, str(model)], check=True, capture_output=True)
    values = {
        "model": {"path": str(model)},
        "adapter": {"method": "lora" if kind == "lora" else "none"},
        "tokenizer": {"train_vocab_size": 2048},
        "data": {"text": ["{stdlib}/*.py"], "max_bytes": 1_500_000, "sequence_length": 128, "evaluation_fraction": 0},
        "train": {"steps": STEPS, "global_batch": 8},
        "checkpoint": {"every": EVERY, "keep": 1},
        "plan": {"allow_idle": False},
        "cluster": {"threads": 1},
    }
    import tomli_w

    path = folder / f"{kind}.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def _copy_s(size: int) -> float:
    """Seconds to copy so many bytes in host memory, as ``clone`` does: into fresh memory, both ranks at once as in the run."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(2), context.SimpleQueue()
    ranks = [context.Process(target=_copies, args=(size, together, found)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    seconds = max(found.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    return float(seconds)


def _copies(size: int, together: Any, found: Any) -> None:
    import torch

    torch.set_num_threads(1)
    tensors = [torch.ones(max(1, size // 4 // 24)) for _ in range(24)]
    times = []
    for _ in range(7):
        together.wait()
        begin = time.perf_counter()
        copies = [tensor.clone() for tensor in tensors]
        times.append(time.perf_counter() - begin)
        del copies
    found.put(statistics.median(times))


def damage(folder: Path, smallest: bool) -> list[Figure]:
    """Damaged files that are recognised."""
    from hetero_mpi.state.reader import CheckpointReader, verify
    from hetero_mpi.state.writer import CheckpointWriter

    path, dice, tried = folder / "step-00000001.h5", random.Random(1), 10 if smallest else DAMAGES
    rng = np.random.default_rng(1)
    with CheckpointWriter(path, told(50)) as writer:
        for number in range(10):
            for kind in KINDS:
                writer.write(kind, f"model.layers.{number}.w", rng.random((20, 30), np.float32), "float32")

    def content() -> dict[Any, bytes]:
        with CheckpointReader(path) as reader:
            found = {
                (kind, name): reader.read(kind, name)[0].tobytes() for kind in KINDS for name in reader.names(kind)
            }
            return {**found, "metadata": repr(sorted(reader.metadata.items(), key=str)).encode()}

    good, wanted = path.read_bytes(), content()
    recognised = harmless = 0
    for _ in range(tried):
        path.write_bytes(_damaged(good, dice))
        if verify(path) is not None:
            recognised += 1
        else:
            harmless += content() == wanted
    return [
        Figure("damaged files tried", tried, ""),
        Figure("... recognised and named", recognised, ""),
        Figure("... read as written, the damage hit bytes without meaning", harmless, ""),
        Figure("... neither", tried - recognised - harmless, "", most=0),
    ]


def _damaged(good: bytes, dice: random.Random) -> bytes:
    found = bytearray(good)
    begin = dice.randrange(len(found))
    end = min(len(found), begin + dice.randint(1, 4096))
    match dice.choice(["bit", "zero", "foreign", "cut"]):
        case "bit":
            found[begin] ^= 1 << dice.randrange(8)
        case "zero":
            found[begin:end] = bytes(end - begin)
        case "foreign":
            found[begin:end] = dice.randbytes(end - begin)
        case _:
            del found[begin:]
    return bytes(found)


def kills(folder: Path, smallest: bool) -> list[Figure]:
    """Ranks die, and the others go on in the same processes."""
    from benchmarks import reliability_kills

    return [Figure(*row) for row in reliability_kills.kills(folder, smallest)]


def pipeline_kills(folder: Path, smallest: bool) -> list[Figure]:
    """Deaths of ranks of two pipelines."""
    from benchmarks import reliability_kills

    return [Figure(*row) for row in reliability_kills.kills(folder, smallest, pipelines=2)]


def copies(folder: Path, smallest: bool) -> list[Figure]:
    """Copies of the trained state in other ranks' memory and on hosts' disks, as often as the run thinks right."""
    from benchmarks import reliability_copies

    return [Figure(*row) for row in reliability_copies.copies(folder, smallest)]


def rebalancing(folder: Path, smallest: bool) -> list[Figure]:
    """A device slows down and recovers, and layers move."""
    from benchmarks import reliability_rebalancing

    return [Figure(*row) for row in reliability_rebalancing.rebalancing(folder, smallest)]


MEASUREMENTS: dict[str, Callable[[Path, bool], list[Figure]]] = {
    measurement.__name__: measurement
    for measurement in (bandwidth, stall, damage, kills, pipeline_kills, copies, rebalancing)
}


def main() -> int:
    arguments = _arguments()
    figures: dict[str, list[Figure]] = {}
    for name in arguments.only or MEASUREMENTS:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = MEASUREMENTS[name](Path(folder), arguments.smallest)
        print(f"\n{name}: {MEASUREMENTS[name].__doc__}", *map(str, figures[name]), sep="\n", flush=True)
    if arguments.json:
        rows = {name: [asdict(figure) for figure in found] for name, found in figures.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [figure.name for found in figures.values() for figure in found if not figure.kept]
    print(f"\nbars missed: {', '.join(missed) or 'none'}")
    return int(arguments.check and bool(missed))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, only=["bandwidth", "damage"])
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), metavar="NAME", help="measure only these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
