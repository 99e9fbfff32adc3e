"""What does a step cost as the work grows: more layers, more micro-batches, more parameters, more ranks?

    python benchmarks/step_scaling.py [--only layers micro-batches parameters ranks] [--sizes 4]
                                      [--json FILE] [--check]

Real steps of small Llamas, cut evenly, one thread per rank, one size doubled or quadrupled at a time. Layers, micro-batches and
parameters grow on 2 ranks. Ranks grow from 2 to 16, a block each, as emulated devices whose every forward and backward
lasts 60 ms, so that 16 of them run on two cores. Counted is processor time, so that ranks that share a core can be compared:

* *us per action*: of the thread that interprets the actions, without computing and waiting for messages: choosing the action,
  posting its message, books;
* *us per block*: forward and backward of one micro-batch, per block held (ends of the chain included);
* *RSS*: growth of the resident set from before the stage was built; beside it parameters, gradients and optimizer state as
  the planner counts them; and growth over the last half of the steps.

Steps on the wall clock are printed for information, and for emulated ranks beside their prediction. The bars, each of which
``--check`` holds the figures to (it exits 1 where one is missed):

* the cost of an action grows by at most half from the smallest to the largest work of every kind;
* so does the cost of a block with the number of layers, though a stage's model then has more layers of others to pass through;
* a rank's memory grows with parameters as predicted, to 15 %; and with micro-batches by at most 8 MB, as depths do not;
* it does not grow with steps: at most 2 MB;
* 16 emulated ranks keep their prediction to 5 %.

About three minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from harness import Metered, Stopwatch, found_by_ranks, parser_of, resident_bytes  # noqa: E402

from hetero_mpi.comm.ranks.mpi_start import run_guarded  # noqa: E402
from hetero_mpi.comm.ranks.world import World  # noqa: E402
from hetero_mpi.data.batch import Batch  # noqa: E402
from hetero_mpi.device.backend import Backend  # noqa: E402
from hetero_mpi.emulation.emulated_cluster import emulate  # noqa: E402
from hetero_mpi.engine.placement import RankSetup  # noqa: E402
from hetero_mpi.engine.trainer import Trainer  # noqa: E402
from hetero_mpi.job.load import LoadedJob  # noqa: E402
from hetero_mpi.job.schema import JobConfig  # noqa: E402
from hetero_mpi.model.model_cost import model_cost  # noqa: E402
from hetero_mpi.model.stage import Stage  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.transformers.families import read_config  # noqa: E402
from hetero_mpi.model.transformers.weights import SeededStart  # noqa: E402
from hetero_mpi.model.tuning import full_training  # noqa: E402
from hetero_mpi.planning.memory import stage_memory  # noqa: E402
from hetero_mpi.planning.schedule import schedule_of  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.planning.types.cost import ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile  # noqa: E402
from hetero_mpi.training.build import StageBuilder  # noqa: E402

SEQUENCE, VOCABULARY = 16, 256
WARM, STEPS = 2, 8
EMULATED_STEPS = 4
EMULATED_S = 0.060
"""Of a forward or a backward of one block: 20 times what it takes here."""
GROWTH_BAR, MEMORY_BAR, PREDICTION_BAR = 1.5, 0.15, 0.05
MICRO_BATCHES_BAR_BYTES, STEPS_BAR_BYTES = 8_000_000, 2_000_000


@dataclass(frozen=True)
class Case:
    """One size of the work."""

    grows: str
    size: int
    """What ``grows``: blocks, micro-batches, parameters of a block, ranks."""
    ranks: int = 2
    blocks: int = 8
    micro_batches: int = 8
    hidden: int = 64
    emulated: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4 * SEQUENCE,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        }

    def plan(self) -> Plan:
        """Blocks divided evenly, the ends of the chain beside the first and the last; 1F1B."""
        inner = [1 + rank * self.blocks // self.ranks for rank in range(1, self.ranks)]
        cuts = [0, *inner, self.blocks + 2]
        stages = tuple(StagePlan((r,), cuts[r], cuts[r + 1], self.ranks - 1 - r) for r in range(self.ranks))
        pipeline = PipelinePlan(stages, 1, self.micro_batches)
        return Plan((pipeline,), self.micro_batches, SEQUENCE, self.blocks + 2)


def cases() -> list[Case]:
    """Smallest first within each kind: memory that a smaller one has left behind is used again by a larger one."""
    found = [Case("layers", n, blocks=n) for n in (4, 8, 16, 32)]
    found += [Case("micro-batches", n, blocks=4, micro_batches=n) for n in (8, 32, 128)]
    found += [Case("parameters", 10 * h * h, blocks=4, hidden=h) for h in (64, 256, 512, 1024)]
    found += [Case("ranks", n, ranks=n, blocks=n, micro_batches=16, hidden=32, emulated=True) for n in (2, 4, 8, 16)]
    return found


@dataclass(frozen=True)
class Rank:
    """What one rank found for one case."""

    actions: int
    action_us: float
    block_us: float
    step_s: float
    predicted_s: float | None
    """Of emulated ranks."""
    grown_bytes: int
    predicted_bytes: int
    """Parameters and their state."""
    steps_bytes: int


def main() -> int:
    parser = parser_of(__doc__, only=["layers"], sizes=2)
    kinds = list(dict.fromkeys(case.grows for case in cases()))
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="what is to grow")
    parser.add_argument("--sizes", type=int, metavar="N", help="only the N smallest of each kind, 2 or more")
    arguments = parser.parse_args()
    by_kind = {kind: [case for case in cases() if case.grows == kind] for kind in arguments.only}
    chosen = [case for same_kind in by_kind.values() for case in same_kind[: arguments.sizes]]
    results: list[tuple[Case, list[Rank]]] = []
    print("what grows        size ranks actions  us per    us per  wall clock of a step, s   RSS growth, MB  in steps")
    print("                             (rank)   action     block  measured      predicted  found predicted        MB")
    for ranks in dict.fromkeys(case.ranks for case in chosen):
        same = [index for index, case in enumerate(cases()) if case in chosen and case.ranks == ranks]
        program = [str(Path(__file__).resolve()), "--worker", ",".join(map(str, same))]
        for index, found in zip(same, found_by_ranks(ranks, program), strict=True):
            results.append((cases()[index], [Rank(**one) for one in found]))
            print(_line(*results[-1]), flush=True)
    bars = [bar for kind in arguments.only for bar in _bars(kind, [one for one in results if one[0].grows == kind])]
    for name, share, text in bars:
        print(f"{'missed' if share > 1 else 'kept':>6}: {name}: {text}")
    if arguments.json:
        rows = [{**asdict(case), "found": [asdict(rank) for rank in found]} for case, found in results]
        arguments.json.write_text(json.dumps({"rows": rows, "shares_of_bars": {b[0]: b[1] for b in bars}}) + "\n")
    worst = max(bars, key=lambda bar: bar[1])
    print(f"nearest to its bar, as a share of it: {worst[1]:.2f} ({worst[0]})")
    return int(arguments.check and worst[1] > 1)


def _line(case: Case, found: Sequence[Rank]) -> str:
    """The busiest rank of each column."""
    predicted = found[0].predicted_s
    largest = max(found, key=lambda one: one.predicted_bytes)
    return (
        f"{case.grows:<14} {case.size:>7,} {case.ranks:>5} {max(one.actions for one in found):>7} "
        f"{_action_us(found):>7.1f} {_block_us(found):>9.0f} {max(one.step_s for one in found):>9.3f} "
        f"{f'{predicted:.3f}' if predicted is not None else '':>14} {largest.grown_bytes / 1e6:>6.1f} "
        f"{largest.predicted_bytes / 1e6:>9.1f} {max(one.steps_bytes for one in found) / 1e6:>9.1f}"
    )


def _action_us(found: Sequence[Rank]) -> float:
    return max(one.action_us for one in found)


def _block_us(found: Sequence[Rank]) -> float:
    return max(one.block_us for one in found)


Bar = tuple[str, float, str]
"""(what is held to it, the figure as a share of the bar, in words)"""


def _bars(kind: str, found: Sequence[tuple[Case, list[Rank]]]) -> list[Bar]:
    """What is asked of one kind of growth."""
    (_, small), (_, large) = found[0], found[-1]

    def growth(name: str, cost: Callable[[Sequence[Rank]], float]) -> Bar:
        factor = cost(large) / cost(small)
        return f"{name}, as {kind} grow", factor / GROWTH_BAR, f"{factor:.2f} times (bar {GROWTH_BAR})"

    bars = [growth("cost of an action", _action_us)]
    if kind == "layers":
        bars.append(growth("cost of a block", _block_us))
    steps_bytes = max(one.steps_bytes for _, ranks in found for one in ranks)
    text = f"{steps_bytes / 1e6:.1f} MB (bar {STEPS_BAR_BYTES / 1e6:.0f} MB)"
    bars.append((f"memory over steps, {kind}", steps_bytes / STEPS_BAR_BYTES, text))
    grown = [a.grown_bytes - b.grown_bytes for a, b in zip(large, small, strict=False)]
    if kind == "micro-batches":
        text = f"{max(grown) / 1e6:.1f} MB (bar {MICRO_BATCHES_BAR_BYTES / 1e6:.0f} MB)"
        bars.append(("memory, as micro-batches grow", max(grown) / MICRO_BATCHES_BAR_BYTES, text))
    if kind == "parameters":
        predicted = [a.predicted_bytes - b.predicted_bytes for a, b in zip(large, small, strict=True)]
        error = max(abs(g / p - 1) for g, p in zip(grown, predicted, strict=True))
        bars.append(("memory, as parameters grow", error / MEMORY_BAR, f"off by {error:.1%} (bar {MEMORY_BAR:.0%})"))
    if kind == "ranks":
        predicted_s = cast(float, large[0].predicted_s)
        error = max(one.step_s for one in large) / predicted_s - 1
        text = f"{error:+.1%} (bar {PREDICTION_BAR:.0%})"
        bars.append((f"step of {len(large)} emulated ranks over its prediction", abs(error) / PREDICTION_BAR, text))
    return bars


class _MeteredStage:
    """Counts what the stage of a trainer computes, apart from what its executor does around it."""

    def __init__(self, stage: Stage) -> None:
        self.watch = Stopwatch()
        for name in ("forward", "backward"):
            setattr(stage, name, self._metered(getattr(stage, name)))

    def _metered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.watch.running():
                return method(*arguments, **keywords)

        return call


def work(world: World) -> int:
    """One rank; rank 0 writes what all found, case after case."""
    torch.set_num_threads(1)
    rows, indices = [], [int(word) for word in sys.argv[2].split(",")]
    _measure(world, cases()[indices[0]])  # what is loaded and allocated once belongs to no case
    for index in indices:
        world.current_action = str(cases()[index])
        rows.append(world.gather_json(asdict(_measure(world, cases()[index]))))
    if world.rank == 0:
        Path(sys.argv[3]).write_text(json.dumps(rows))
    return 0


def _measure(world: World, case: Case) -> Rank:
    chain, tuning = (
        TransformersChain(read_config(case.config())),
        full_training(TransformersChain(read_config(case.config()))),
    )
    cost = model_cost(chain, tuning, "fp32", SEQUENCE, dict.fromkeys(chain.kinds, 0.0))
    plan, loaded = case.plan(), _job(case)
    before, transport = resident_bytes(), Metered(world.comm)
    with transport:
        emulation, predicted_s = None, None
        if case.emulated:
            profile = _cluster(cost, case.ranks)
            predicted_s = simulate(plan, profile).step_s
            emulation = emulate(world, transport, loaded, chain, profile, plan, 2 / case.ranks)
        carries = transport if emulation is None else emulation.transport
        setup = RankSetup(world.rank, carries, chain, tuning, Backend(), loaded.job.train)
        build = StageBuilder(setup, SeededStart(0))
        build_paced = build if emulation is None else emulation.paced(build)
        trainer = Trainer(setup, world, plan, schedule_of(plan, cost), build_paced, {})
        return _stepped(trainer, transport, case, before, cost, predicted_s)


def _stepped(
    trainer: Trainer, transport: Metered, case: Case, before: int, cost: ModelCost, predicted_s: float | None
) -> Rank:
    executor, stage = trainer.executor, trainer.stages[0]
    assert executor is not None
    computing, interpreting = _MeteredStage(stage).watch, Stopwatch()
    whole = Stopwatch()
    run = executor.run

    def metered(data: Any, update: Any) -> Any:
        with interpreting.running():
            return run(data, _TimedUpdate(update, whole))

    executor.run = metered  # type: ignore[method-assign]
    steps = EMULATED_STEPS if case.emulated else STEPS
    per_action_us, per_block_us, walls_s, half = [], [], [], 0
    for step in range(WARM + steps):
        if step == WARM + steps // 2:
            half = resident_bytes()
        trainer.world.barrier()
        marks = interpreting.seconds, computing.seconds, whole.seconds, transport.waiting_s
        begin = time.perf_counter()
        _step(trainer, step, case)
        walls_s.append(time.perf_counter() - begin)
        ran, computed, ended, waited = (
            now - mark
            for now, mark in zip(
                (interpreting.seconds, computing.seconds, whole.seconds, transport.waiting_s), marks, strict=True
            )
        )
        per_action_us.append(1e6 * (ran - computed - ended - waited) / len(executor.actions))
        per_block_us.append(1e6 * computed / case.micro_batches / max(1, case.blocks // case.ranks))
    memory = stage_memory(cost, stage.first, stage.last, 0, 0)
    now = resident_bytes()
    return Rank(
        len(executor.actions),
        statistics.median(per_action_us[WARM:]),
        statistics.median(per_block_us[WARM:]),
        statistics.median(walls_s[WARM:]),
        predicted_s,
        now - before,
        memory.parameters + memory.state,
        now - half,
    )


class _TimedUpdate:
    """An ``executor.Update`` with a watch that runs in what REDUCE and STEP do."""

    def __init__(self, update: Any, watch: Stopwatch) -> None:
        self.finished = update.finished
        for name in ("reduce", "decide", "carry_out"):
            setattr(self, name, self._timed(getattr(update, name), watch))

    @staticmethod
    def _timed(perform: Callable[[Any], Any], watch: Stopwatch) -> Callable[[Any], Any]:
        def call(given: Any) -> Any:
            with watch.running():
                return perform(given)

        return call


def _step(trainer: Trainer, step: int, case: Case) -> None:
    draw = np.random.default_rng(step)
    shape = (case.micro_batches, SEQUENCE)
    tokens, targets = (draw.integers(0, VOCABULARY, shape, np.int32) for _ in range(2))
    trainer.step(step, Batch(tokens, targets, targets.size))


def _job(case: Case) -> LoadedJob:
    keys = {key: value for key, value in case.config().items() if value is not None}
    job = JobConfig.model_validate(
        {
            "model": {"config": keys},
            "data": {"text": ["-"], "sequence_length": SEQUENCE},
            "train": {"steps": WARM + STEPS, "global_batch": case.micro_batches, "dtype": "fp32"},
        }
    )
    return LoadedJob(job, ROOT / "step_scaling.toml", "step_scaling", ROOT)


def _cluster(cost: ModelCost, ranks: int) -> ClusterProfile:
    """Like devices, a host each, a block's forward or backward in ``EMULATED_S``, a message in 0.2 ms."""

    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((SEQUENCE,), (seconds,)), Curve((SEQUENCE,), (seconds,)))

    layers = {kind: times(EMULATED_S if kind not in ("embedding", "head") else 0.0) for kind in cost_kinds(cost)}
    devices = tuple(
        DeviceProfile(r, f"host{r}", "cpu", f"device {r}", 1 << 40, "made up", ("fp32",), layers, EMULATED_S, 0.0)
        for r in range(ranks)
    )
    links = tuple(LinkProfile(a, b, 2e-4, 1e10, False) for a in range(ranks) for b in range(ranks) if a != b)
    return ClusterProfile("emulated", "", "scaling", "none", {}, cost, devices, links)


def cost_kinds(cost: ModelCost) -> list[str]:
    """Kinds of the chain's layers, each once."""
    return list(dict.fromkeys(layer.kind for layer in cost.layers))


if __name__ == "__main__":
    sys.exit(run_guarded(work) if sys.argv[1:2] == ["--worker"] else main())
