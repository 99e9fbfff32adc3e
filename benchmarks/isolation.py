"""How much longer a step takes where packed records do not see each other: forward and backward of one stage on one CPU thread.

    python benchmarks/isolation.py [--length 1024] [--records 8] [--repeats 9] [--json FILE] [--check]

A Llama of 4 blocks (hidden size 512) on a sequence of ``--records`` packed records. The ways take turns; medians of the ratios of
neighbours. ``--check``: at most 1.1.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from harness import parser_of  # noqa: E402

from hetero_mpi.device.backend import Backend  # noqa: E402
from hetero_mpi.model.stage import MicroBatch, Stage, StageSpec  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.transformers.families import read_config  # noqa: E402
from hetero_mpi.model.transformers.weights import SeededStart  # noqa: E402

BAR = 1.1


def main() -> int:
    """Print the seconds of both ways and their ratio."""
    parser = parser_of(__doc__, length=32, records=2, repeats=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of the sequence")
    parser.add_argument("--records", type=int, default=8, help="packed in it")
    parser.add_argument("--repeats", type=int, default=9, help="turns of both ways")
    arguments = parser.parse_args()
    stage = _stage(arguments.length)
    tokens = torch.arange(arguments.length)[None] % 1000
    positions = torch.arange(arguments.length)[None] % -(-arguments.length // arguments.records)
    joined, isolated = [], []
    for _ in range(arguments.repeats + 1):
        joined.append(_seconds(stage, tokens, None))
        isolated.append(_seconds(stage, tokens, positions))
    ratio = statistics.median(after / before for before, after in zip(joined[1:], isolated[1:], strict=True))
    before_s, after_s = statistics.median(joined[1:]), statistics.median(isolated[1:])
    print(
        f"one sequence of {arguments.length} tokens, {arguments.records} records: {before_s:.2f} s, isolated {after_s:.2f} s, "
        f"ratio {ratio:.3f} (bar {BAR})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"joined_s": joined[1:], "isolated_s": isolated[1:]}, indent=1) + "\n")
    return int(arguments.check and ratio > BAR)


def _stage(length: int) -> Stage:
    keys = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": length,
    }
    chain = TransformersChain(read_config(keys))
    return Stage(StageSpec(chain, 0, chain.layer_count, Backend(), "fp32"), SeededStart(0))


def _seconds(stage: Stage, tokens: torch.Tensor, positions: torch.Tensor | None) -> float:
    """Processor time of this thread: other work on the machine does not count."""
    begin_s = time.thread_time()
    stage.forward(MicroBatch(0, 0, 0, tokens.numel(), positions), tokens, tokens)
    stage.backward(0)
    return time.thread_time() - begin_s


if __name__ == "__main__":
    sys.exit(main())
