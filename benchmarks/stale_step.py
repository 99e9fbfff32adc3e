"""How much of the optimizer passes beside the next step where the step is stale? A streamed stage that is trained whole.

    python benchmarks/stale_step.py [--rounds 7] [--device-s 1.0] [--json FILE] [--check]

The GPU is made of host memory (``tests/stand_in_gpu``): it copies as one does, and each forward of a layer is made to last, in
which the processor is free, ``--device-s`` in a step all together. Its arithmetic is done by the process's main thread besides. A
Llama of 155 M parameters in bf16, one micro-batch of few tokens. Steps with and without alternate. Told are medians: of a step,
and of the seconds of it in which the main thread computes norms, rounds, steps, or waits for what steps beside it. The rest of a
step may be longer where both want the same cores, and scatters on a machine that others use. ``--check``: at least half of these
seconds are no more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from harness import parser_of  # noqa: E402

import tests.stand_in_gpu.fixtures  # noqa: E402, F401  (it makes the stand-in the only GPU)
from hetero_mpi.device.accelerators import open_backend  # noqa: E402
from hetero_mpi.job.training_tables import TrainTable  # noqa: E402
from hetero_mpi.model.optimizer import Optimizer  # noqa: E402
from hetero_mpi.model.stage import MicroBatch  # noqa: E402
from hetero_mpi.model.streamed_stage import StreamedStage  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.transformers.families import read_config  # noqa: E402
from hetero_mpi.model.transformers.weights import SeededStart  # noqa: E402
from hetero_mpi.model.tuning import full_training  # noqa: E402
from tests.stand_in_gpu import module  # noqa: E402
from tests.support.stages import streamed_stage_of  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 512,
}
TOKENS, IN_A_ROW = 4, 3
BAR = 0.5


class Way:
    """One of the two: a stage that takes steps."""

    def __init__(self, stale: bool, device_s: float) -> None:
        chain = TransformersChain(read_config(CONFIG))
        self.gpu = open_backend("auto", 1)
        trained = replace(full_training(chain), stale=stale)
        given: Any = chain, 0, chain.layer_count, self.gpu, "bf16", SeededStart(0), 7, trained
        stage = streamed_stage_of(*given)
        assert isinstance(stage, StreamedStage)
        self.stage, self.optimizer = stage, Optimizer(stage, TrainTable(steps=10_000))
        self.number, self.found = 0, list[tuple[float, float]]()
        self.waited_s = 0.0
        assert stage.offloaded is not None
        stage.offloaded.readers[:] = [self._timed(reader) for reader in stage.offloaded.readers]
        each_s = device_s / chain.layer_count / 2  # backward repeats it
        for layer in range(chain.layer_count):
            for name in chain.module_names(layer):
                stage.model.get_submodule(name).register_forward_hook(lambda *_: self._compute_for(each_s))

    def _timed(self, reader: Callable[[int], None]) -> Callable[[int], None]:
        def timed(layer: int) -> None:
            begun_s = time.perf_counter()
            reader(layer)
            self.waited_s += time.perf_counter() - begun_s

        return timed

    def _compute_for(self, seconds: float) -> None:
        module.device.compute_for(module.device.current_stream(self.gpu.index), seconds)

    def step(self) -> tuple[float, float]:
        """(seconds of a step, those of them that the optimizer takes from the main thread)"""
        generator = torch.Generator().manual_seed(self.number)
        tokens = torch.randint(1, CONFIG["vocab_size"], (1, TOKENS), generator=generator).to(self.gpu.device)
        self.waited_s, begun_s = 0.0, time.perf_counter()
        self.stage.forward(MicroBatch(0, self.number, 0, TOKENS), tokens, tokens)
        self.stage.backward(0, finished=lambda layer: None)
        computed_s = time.perf_counter()
        self.optimizer.squared_norms()
        self.optimizer.end_step(self.number, 0.5)
        ended_s = time.perf_counter()
        self.number += 1
        return ended_s - begun_s, ended_s - computed_s + self.waited_s

    @property
    def medians(self) -> tuple[float, float]:
        step_s, waited_s = (median(own) for own in zip(*self.found, strict=True))
        return step_s, waited_s


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="steps of each way that count")
    parser.add_argument(
        "--device-s", type=float, default=1.0, metavar="S", help="seconds of a step that the device computes"
    )
    arguments = parser.parse_args()
    ways = {name: Way(stale, arguments.device_s) for name, stale in (("as ever", False), ("stale", True))}
    for number in range(1 + arguments.rounds):
        for way in ways.values():
            found = [way.step() for _ in range(IN_A_ROW)][1:]  # the first has nothing beside it
            way.optimizer.finish()  # not beside the other's steps
            way.found += found if number else []
    for name, way in ways.items():
        step_s, waited_s = way.medians
        print(f"{name:>8}: {step_s:.3f} s per step, of which {waited_s:.3f} s are the optimizer's")
    (_, before_s), (_, after_s) = (way.medians for way in ways.values())
    hidden = 1 - after_s / before_s
    print(f"{hidden:.0%} of them pass beside the next step (bar {BAR:.0%})")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: way.found for name, way in ways.items()}, indent=1) + "\n")
    return int(arguments.check and hidden < BAR)


if __name__ == "__main__":
    sys.exit(main())
