"""What does interpreting an action cost? The executor on two ranks with a stage that computes nothing.

    python benchmarks/executor.py [--json FILE] [--check]

Two stages, 64 micro-batches of 4 KiB, real MPI. Counted is the processor time of the thread that interprets the actions,
without what it spends waiting for messages: choosing the action, posting sends and receives, keeping events. Printed:
microseconds per action, median over the steps. ``--check`` exits 1 where a rank needs more than 100.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from harness import Metered, found_by_ranks, parser_of  # noqa: E402

from hetero_mpi.comm.ranks.mpi_start import run_guarded  # noqa: E402
from hetero_mpi.comm.ranks.world import World  # noqa: E402
from hetero_mpi.comm.transport import Transport  # noqa: E402
from hetero_mpi.device.backend import Backend  # noqa: E402
from hetero_mpi.engine.executor import Executor, StepData, Update  # noqa: E402
from hetero_mpi.engine.placement import Placement, RankSetup  # noqa: E402
from hetero_mpi.job.training_tables import TrainTable  # noqa: E402
from hetero_mpi.model.stage import MicroBatch, Stage  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.tuning import nothing_trained  # noqa: E402
from hetero_mpi.planning.schedule import WHOLE_STEP, Action, schedule_of  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import (  # noqa: E402
    PipelinePlan,
    Plan,
    StagePlan,
)

BAR_US = 100.0
MICRO_BATCHES, LENGTH, HIDDEN, STEPS = 64, 16, 64, 30


class EmptyStage:
    """Has the shape of a stage and computes nothing."""

    routers = None

    def __init__(self, first: bool, last: bool) -> None:
        self.chain = SimpleNamespace(boundary=lambda layer, rows, length: (rows, length, HIDDEN), appended_rows=0)
        self.first, self.last = (0, 1) if first else (1, 3)
        self.backend, self.dtype = Backend(), torch.float32
        self.is_first, self.is_last = first, last
        self._tensor = torch.zeros(1, LENGTH, HIDDEN)
        self._loss = torch.zeros(())
        self.rewards: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self._loss if self.is_last else self._tensor

    def backward(self, index: int, dy: torch.Tensor | None = None, finished: object = None) -> torch.Tensor | None:
        return None if self.is_first else self._tensor


def plan_of_two() -> tuple[Plan, ModelCost]:
    """A stage on each of two ranks, 1F1B."""
    stages = (StagePlan((0,), 0, 1, 1), StagePlan((1,), 1, 3, 0))
    plan = Plan((PipelinePlan(stages, 1, MICRO_BATCHES),), MICRO_BATCHES, LENGTH, 3)
    layers = tuple(LayerCost(kind, 1, 1, 4, 0.0, 0.0, 4 * HIDDEN) for kind in ("embedding", "block", "head"))
    return plan, ModelCost("none", "fp32", LENGTH, False, 16.0, layers)


def executor_of(
    world: World,
    transport: Transport,
    stage: Stage,
    place: Placement,
    plan: Plan,
    actions: list[Action],
    **train: Any,
) -> Executor:
    """``train``: settings of the job."""
    settings = TrainTable(steps=STEPS, **{"dtype": "fp32", **train})
    chain = cast(TransformersChain, stage.chain)
    setup = RankSetup(world.rank, transport, chain, nothing_trained(), stage.backend, settings)
    return Executor(setup, [stage], [place], plan.pipelines[0], actions)


def work(world: World) -> int:
    """One rank; rank 0 writes what all found."""
    plan, model = plan_of_two()
    place = Placement(world.rank, 0, world.rank)
    transport = Metered(world.comm)
    with transport:
        stage = cast(Stage, EmptyStage(world.rank == 0, world.rank == 1))
        actions = [action for action in schedule_of(plan, model)[world.rank] if action.op not in WHOLE_STEP]
        executor = executor_of(world, transport, stage, place, plan, actions)
        tokens = torch.zeros(MICRO_BATCHES, LENGTH, dtype=torch.int64)
        data = StepData(0, (1,) * MICRO_BATCHES, tuple(range(MICRO_BATCHES)), LENGTH, tokens, tokens, None, 1)
        if world.rank == 1:
            data = StepData(0, data.sizes, data.first_samples, LENGTH, None, tokens, None, 1)
        per_action_us = []
        for _ in range(STEPS):
            world.barrier()
            begin, waited = time.thread_time(), transport.waiting_s
            executor.run(data, cast(Update, SimpleNamespace(finished=lambda layer: None)))
            spent_s = time.thread_time() - begin - (transport.waiting_s - waited)
            per_action_us.append(1e6 * spent_s / len(actions))
    found = world.gather_json([len(actions), statistics.median(per_action_us[3:])])
    if found is not None:
        Path(sys.argv[2]).write_text(json.dumps(found))
    return 0


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    found = found_by_ranks(2, [str(Path(__file__).resolve()), "--worker"])
    print("rank  actions per step  us per action")
    for rank, (actions, spent_us) in enumerate(found):
        print(f"{rank:>4}  {actions:>16}  {spent_us:>13.1f}")
    worst = max(spent_us for _, spent_us in found)
    if arguments.json:
        arguments.json.write_text(json.dumps({"us_per_action": [one[1] for one in found], "bar_us": BAR_US}) + "\n")
    print(f"most per action: {worst:.1f} us (bar {BAR_US:.0f} us)")
    return int(arguments.check and worst > BAR_US)


if __name__ == "__main__":
    sys.exit(run_guarded(work) if sys.argv[1:2] == ["--worker"] else main())
