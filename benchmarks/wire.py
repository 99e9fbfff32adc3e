"""What does int8 on the wire save where links limit a step? Two stages that compute nothing, 1F1B, on a link of 1 Gbit/s.

    python benchmarks/wire.py [--rounds 5] [--mbits 1000] [--json FILE] [--check]

Two network namespaces (needs root). Activations and gradients of 1,024 positions x 1,024 numbers in bf16, 16 micro-batches a step;
steps take turns: as they are, as int8 (packing and unpacking included). Bytes are those of the interface. Printed: medians, and
the processor time of a message's packing and unpacking. ``--check`` exits 1 where int8 takes more than 0.55 of the bytes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from executor import EmptyStage, executor_of  # noqa: E402
from harness import parser_of, skip  # noqa: E402
from two_hosts import two_hosts, why_not  # noqa: E402

from hetero_mpi.comm.mpi_transport import MpiTransport  # noqa: E402
from hetero_mpi.comm.ranks.mpi_start import run_guarded  # noqa: E402
from hetero_mpi.comm.ranks.world import World  # noqa: E402
from hetero_mpi.engine.executor import StepData, Update  # noqa: E402
from hetero_mpi.engine.placement import Placement  # noqa: E402
from hetero_mpi.engine.wire_format import format_of  # noqa: E402
from hetero_mpi.model.stage import Stage  # noqa: E402
from hetero_mpi.planning.schedule import WHOLE_STEP, schedule_of  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from tests.support.processes import run_within  # noqa: E402

MICRO_BATCHES, LENGTH, HIDDEN = 16, 1024, 1024
WIRES = ("exact", "int8")
BAR = 0.55
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Sender(EmptyStage):
    """An empty stage whose tensors are drawn anew for no step."""

    seed = 0

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__(first, last)
        self.chain = SimpleNamespace(boundary=lambda layer, rows, length: (rows, length, HIDDEN))
        self.dtype = torch.bfloat16
        self._tensor = torch.randn(1, LENGTH, HIDDEN).to(self.dtype)


def work(world: World) -> int:
    """One rank; rank 0 prints what it saw."""
    first, steps = world.rank == 0, 2 * int(sys.argv[2]) + 2
    layers = tuple(LayerCost(kind, 1, 1, 2, 0.0, 0.0, 2 * HIDDEN) for kind in ("embedding", "block", "head"))
    stages = StagePlan((0,), 0, 1, 1), StagePlan((1,), 1, 3, 0)
    plan = Plan((PipelinePlan(stages, 1, MICRO_BATCHES),), MICRO_BATCHES, LENGTH, 3)
    schedule = schedule_of(plan, ModelCost("none", "bf16", LENGTH, False, 16.0, layers))
    actions = [action for action in schedule[world.rank] if action.op not in WHOLE_STEP]
    tokens = torch.zeros(MICRO_BATCHES, LENGTH, dtype=torch.int64)
    sizes = (1,) * MICRO_BATCHES
    found: dict[str, list[tuple[int, float]]] = {wire: [] for wire in WIRES}
    with MpiTransport(world.comm) as transport:
        place, stage = Placement(world.rank, 0, world.rank), cast(Stage, Sender(first, not first))
        executors = [
            executor_of(world, transport, stage, place, plan, actions, dtype="bf16", wire=wire) for wire in WIRES
        ]
        for step in range(steps):
            data = StepData(
                step, sizes, tuple(range(MICRO_BATCHES)), LENGTH, tokens if first else None, tokens, None, 1
            )
            world.barrier()
            sent, begin = sent_bytes(), time.perf_counter()
            executors[step % 2].run(data, cast(Update, SimpleNamespace(finished=lambda layer: None)))
            world.barrier()
            found[WIRES[step % 2]].append((sent_bytes() - sent, time.perf_counter() - begin))
    if first:
        print(json.dumps({**{wire: seen[1:] for wire, seen in found.items()}, "packing": packing_ms()}))
    return 0


def packing_ms() -> list[float]:
    """Processor time of packing an activation, of packing a gradient, of unpacking either; medians."""
    tensor, wire = torch.randn(1, LENGTH, HIDDEN).to(torch.bfloat16), format_of("int8", torch.bfloat16)
    packed = wire.packed(tensor)

    def once(work: Callable[[], object]) -> float:
        begin = time.thread_time()
        work()
        return 1e3 * (time.thread_time() - begin)

    works = lambda: wire.packed(tensor), lambda: wire.packed(tensor, [1]), lambda: wire.unpacked(packed, tensor.shape)
    return [median(once(work) for _ in range(15)) for work in works]


def sent_bytes() -> int:
    """That have left by the interface."""
    line = re.search(r"cable0:(.*)", Path("/proc/self/net/dev").read_text())
    assert line is not None
    return int(line[1].split()[8])


def main() -> int:
    parser = parser_of(__doc__, rounds=1, mbits=10_000.0)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of both")
    parser.add_argument("--mbits", type=float, default=1000, metavar="N", help="rate of the link, Mbit/s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are taken down all the same
    obstacle = why_not()
    if obstacle is not None:
        skip(obstacle)
    with tempfile.TemporaryDirectory() as folder, two_hosts(arguments.mbits * 1e6, Path(folder)) as start:
        command = start([sys.executable, str(Path(__file__).resolve()), "--worker", str(arguments.rounds)])
        done = run_within(500, command, {**os.environ, **ENVIRONMENT}, ROOT)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if done.returncode != 0 or line is None:
        sys.exit(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
    found = json.loads(line)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    exact, int8 = ([median(one[at] for one in found[wire]) for at in (0, 1)] for wire in WIRES)
    for wire, (size, seconds) in zip(WIRES, (exact, int8), strict=True):
        print(f"{wire:>6}: {size / 1e6:7.1f} MB sent by rank 0 in a step of {seconds * 1e3:7.0f} ms")
    size, seconds = (after / before for before, after in zip(exact, int8, strict=True))
    print("int8: {:.1f} ms to pack an activation, {:.1f} a gradient, {:.1f} to unpack".format(*found["packing"]))
    print(f"int8 / exact: {size:.3f} of the bytes, {seconds:.3f} of the time")
    return int(arguments.check and size > BAR)


if __name__ == "__main__":
    sys.exit(run_guarded(work) if sys.argv[1:2] == ["--worker"] else main())
