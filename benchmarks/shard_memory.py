"""How much memory does a rank need to hold its share of a model? Resident set per rank for 1, 2 and 4 ranks.

    python benchmarks/shard_memory.py [--streamed] [--only full lora nf4 8bit] [--ranks 1 2 4] [--json FILE] [--check]

Creates a random Llama of about 1.1 GB (fp32) in a temporary directory and has 1, 2 and 4 ranks load their shares of it from
the files, by an even split of the chain: for full training in fp32, for LoRA over bf16 weights and for LoRA over NF4 weights.
Printed per rank: bytes of its own parameters, growth of the resident set after loading, and growth of its peak while loading.
The promise: growth is the own shard; the peak exceeds it by two layers in fp32 at most (one as read, one while it is packed).
``--check`` exits 1 where a rank's peak exceeds its shard by more than twice the largest layer and 100 MB.

``--streamed``: stages are streamed, with LoRA over bf16 and over NF4 weights from mapped files; of full training in fp32, what is
trained stays in memory (16 bytes of every parameter, or 10 where moments are in 8 bits). Loading and two steps of a micro-batch
of 4 sequences of 64 tokens, in slices of one, are watched: by how much what the rank cannot give back (RssAnon) grows at most,
every 2 ms, and its clean mapped pages (RssFile) at the end. Bar: beyond what is trained whole, three layers in fp32 and 80 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import output_of_ranks, parser_of  # noqa: E402

RANKS, STREAMED_RANKS = (1, 2, 4), (1, 2)
HELD = {"full": "fp32", "lora": "bf16", "nf4": "bf16"}
"""What is trained, and the compute dtype."""
STREAMED = {**HELD, "8bit": "fp32"}
"""The same, with full training whose moments are in 8 bits: ``adamw_8bit``."""
STREAMED_BYTES = 80_000_000
ALLOWANCE_BYTES = 100_000_000
"""bitsandbytes packs with about 10 bytes of temporaries per weight of a matrix (29 MB here), allocators round up."""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> int:
    arguments = _arguments()
    if arguments.load is not None:
        return (_stream if arguments.streamed else _load)(arguments.load, arguments.held)
    if arguments.streamed:
        return _streamed(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        total = _create(model, arguments.blocks)
        print(f"Llama of {total / 1e9:.2f} GB (fp32), {arguments.blocks} blocks, in {model.name}/")
        kinds, counts = [held for held in HELD if held in arguments.only], arguments.ranks or RANKS
        rows = [row for held in kinds for ranks in counts for row in _measure(ranks, model, held)]
    print(
        f"{'held':>5} {'ranks':>5} {'rank':>4} {'own shard':>10} {'RSS growth':>11} {'peak growth':>12} {'largest layer':>13}"
    )
    for row in rows:
        own, rss, peak, layer = (row[key] / 1e6 for key in ("shard_bytes", "rss_bytes", "peak_bytes", "layer_bytes"))
        print(
            f"{row['held']:>5} {row['ranks']:>5} {row['rank']:>4} {own:>7.0f} MB {rss:>8.0f} MB {peak:>9.0f} MB {layer:>10.0f} MB"
        )
    worst = max(row["peak_bytes"] - row["shard_bytes"] - 2 * row["layer_bytes"] for row in rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"model_bytes": total, "rows": rows}, indent=1) + "\n")
    print(f"largest peak above own shard + two layers: {worst / 1e6:.0f} MB (bar: {ALLOWANCE_BYTES / 1e6:.0f} MB)")
    return int(arguments.check and worst > ALLOWANCE_BYTES)


def _streamed(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        total = _create(model, arguments.blocks)
        print(f"Llama of {total / 1e9:.2f} GB (fp32), {arguments.blocks} blocks, streamed")
        counts = arguments.ranks or STREAMED_RANKS
        rows = [
            row for held in arguments.only for ranks in counts for row in _measure(ranks, model, held, "--streamed")
        ]
    who = f"{'held':>5} {'ranks':>5} {'rank':>4}"
    print(f"{who} {'in files':>9} {'trained':>8} {'RssAnon grows':>14} {'RssFile grows':>14} {'largest layer':>13}")
    for row in rows:
        streamed, trained, anon, file, layer = (
            row[key] / 1e6 for key in ("streamed_bytes", "trained_bytes", "anon_bytes", "file_bytes", "layer_bytes")
        )
        who = f"{row['held']:>5} {row['ranks']:>5} {row['rank']:>4}"
        print(f"{who} {streamed:>6.0f} MB {trained:>5.0f} MB {anon:>11.0f} MB {file:>11.0f} MB {layer:>10.0f} MB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"model_bytes": total, "rows": rows}, indent=1) + "\n")
    worst = max(row["anon_bytes"] - row["trained_bytes"] - 3 * row["layer_bytes"] for row in rows)
    print(
        f"largest growth above what is trained whole and three layers: {worst / 1e6:.0f} MB (bar: {STREAMED_BYTES / 1e6:.0f} MB)"
    )
    return int(arguments.check and worst > STREAMED_BYTES)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, only=["full"], ranks=[1], blocks=1)
    parser.add_argument("--streamed", action="store_true", help="streamed stages")
    kinds = list(STREAMED)
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="what is held; 8bit: only streamed")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks")
    parser.add_argument("--blocks", type=int, default=CONFIG["num_hidden_layers"], metavar="N", help="of the model")
    parser.add_argument(
        "--load", type=Path, metavar="MODEL", help=argparse.SUPPRESS
    )  # a rank's part, started by this program
    parser.add_argument("--held", default="full", choices=list(STREAMED), help=argparse.SUPPRESS)
    return parser.parse_args()


def _create(directory: Path, blocks: int) -> int:
    """Write the model, in a process of its own so that its memory goes away; returns its bytes."""
    code = (
        "import json, sys, torch; from transformers import AutoConfig, AutoModelForCausalLM\n"
        "keys = json.loads(sys.argv[1]); config = AutoConfig.for_model(keys.pop('model_type'), **keys)\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.float32); model.save_pretrained(sys.argv[2])\n"
        "print(sum(p.nbytes for p in model.parameters()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps({**CONFIG, "num_hidden_layers": blocks}), str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def _measure(ranks: int, model: Path, held: str, *options: str) -> list[dict[str, Any]]:
    program = [str(Path(__file__).resolve()), "--load", str(model), "--held", held, *options]
    lines = output_of_ranks(ranks, program).splitlines()
    return list(json.loads(next(line for line in lines if line.startswith("["))))


def _optimizer(held: str) -> Any:
    return "adamw_8bit" if held == "8bit" else "adamw"


def _opened(directory: Path, held: str) -> tuple[Any, Any, Any, list[int]]:
    """(start weights, chain, what is trained, bytes of each layer in fp32)"""
    import bitsandbytes.functional  # noqa: F401  (its own memory is not the shard's)
    from transformers.utils import logging

    from hetero_mpi.job.schema import JobConfig
    from hetero_mpi.model.adapters.adapter_tuning import tuning_of
    from hetero_mpi.model.files.model_files import ModelFiles
    from hetero_mpi.model.transformers.chain import TransformersChain
    from hetero_mpi.model.transformers.families import read_config
    from hetero_mpi.model.transformers.weights import FileStart

    logging.disable_progress_bar()
    files = ModelFiles(directory)
    chain = TransformersChain(read_config(files.config))
    model = {"path": str(directory), "quantization": "nf4" if held == "nf4" else "none"}
    adapter, train = {"method": "lora" if held in ("lora", "nf4") else "none"}, {"optimizer": _optimizer(held)}
    job = {"model": model, "adapter": adapter, "train": train, "data": {"text": ["-"]}}
    tuning = tuning_of(JobConfig.model_validate(job), chain)
    sizes = [sum(spec.count for spec in chain.specs(layer, layer + 1)) * 4 for layer in range(chain.layer_count)]
    return FileStart(files, chain), chain, tuning, sizes


def _stream(directory: Path, held: str) -> int:
    """One rank: a streamed stage on its share, two steps, and the memory that took."""
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.comm.ranks.world import World

    def command(world: World) -> int:
        import torch

        from hetero_mpi.device.backend import Backend
        from hetero_mpi.job.training_tables import TrainTable
        from hetero_mpi.model.host_weights import large_files_folder
        from hetero_mpi.model.optimizer import Optimizer
        from hetero_mpi.model.stage import MicroBatch, StageSpec
        from hetero_mpi.model.streamed_stage import StreamedStage

        files, chain, tuning, sizes = _opened(directory, held)
        first, last = (_cut(sizes, part / world.size) for part in (world.rank, world.rank + 1))
        watched = _Watched()
        spec = StageSpec(chain, first, last, Backend(), STREAMED[held], 0, tuning, slice_sequences=1)
        stage = StreamedStage(spec, files, folder=large_files_folder())
        optimizer = Optimizer(stage, TrainTable(steps=2, optimizer=_optimizer(held)))
        tokens = torch.ones((4, 64), dtype=torch.int64)
        hidden = torch.zeros((4, 64, CONFIG["hidden_size"]), dtype=stage.dtype)
        for step in range(2):
            y = stage.forward(MicroBatch(0, step, 0, 256), tokens if stage.is_first else hidden, tokens)
            stage.backward(0, None if stage.is_last else torch.zeros_like(y))
            optimizer.end_step(step, 1.0)
        anon, file = watched.grown()
        row = {
            "ranks": world.size,
            "rank": world.rank,
            "held": held,
            "streamed_bytes": stage.weights.bytes,
            "trained_bytes": sum(
                8 * p.numel() + sum(moment.nbytes for moment in optimizer.state(name).values())
                for name, p in optimizer.targets.items()
                if tuning.full
            ),
            "anon_bytes": anon,
            "file_bytes": file,
            "layer_bytes": max(sizes[first:last]),
        }
        rows = world.gather_json(row)
        if rows is not None:
            print(json.dumps(rows), flush=True)
        return 0

    return run_guarded(command)


class _Watched:
    """The process's anonymous and mapped memory from now on, looked at every 2 ms."""

    def __init__(self) -> None:
        self.begun = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def grown(self) -> tuple[int, int]:
        """(most growth of RssAnon, growth of RssFile) in bytes."""
        self._ended.set()
        self._thread.join()
        return self.most[0] - self.begun[0], self._now()[1] - self.begun[1]

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["RssAnon"].split()[0]) * 1024, int(found["RssFile"].split()[0]) * 1024


def _load(directory: Path, held: str) -> int:
    """One rank: load the share, report the memory."""
    from hetero_mpi.comm.ranks.mpi_start import run_guarded
    from hetero_mpi.comm.ranks.world import World

    def command(world: World) -> int:
        import psutil

        from hetero_mpi.device.backend import Backend
        from hetero_mpi.model.stage import Stage, StageSpec

        backend, (start, chain, tuning, sizes) = Backend(), _opened(directory, held)
        first, last = (_cut(sizes, part / world.size) for part in (world.rank, world.rank + 1))
        process = psutil.Process()
        before, peak_before = process.memory_info().rss, backend.peak_bytes()
        stage = Stage(StageSpec(chain, first, last, backend, HELD[held], 0, tuning), start)
        row = {
            "ranks": world.size,
            "rank": world.rank,
            "held": held,
            "shard_bytes": _held_bytes(stage.model),
            "rss_bytes": process.memory_info().rss - before,
            "peak_bytes": max(0, backend.peak_bytes() - max(before, peak_before)),
            "layer_bytes": max(sizes[first:last]),
        }
        rows = world.gather_json(row)
        if rows is not None:
            print(json.dumps(rows), flush=True)
        return 0

    return run_guarded(command)


def _held_bytes(model: Any) -> int:
    """Bytes of all real tensors of a stage, the scales of packed weights included."""
    total = 0
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            total += parameter.nbytes
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                total += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return total


def _cut(sizes: list[int], share: float) -> int:
    """The layer boundary nearest to ``share`` of all bytes."""
    reached = [sum(sizes[:layer]) for layer in range(len(sizes) + 1)]
    return min(range(len(reached)), key=lambda layer: abs(reached[layer] - share * reached[-1]))


if __name__ == "__main__":
    sys.exit(main())
