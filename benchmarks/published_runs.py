"""Does the simulator predict steps that others measured on mixed nodes?

    python benchmarks/published_runs.py [--runs FILE] [--json FILE] [--check]

Predicts every run of ``data/sailor_runs.csv`` (OPT-350M on nodes of RTX 3090, RTX 2080 and Titan RTX) from the measured layer
times in ``data/sailor_opt350m_layers.csv`` and from the run's own description. What follows below as a constant is a property of
that cluster, of the model or of the software that ran there, the same for all runs. Which of these properties count was found
by a look at the rows marked ``constants``; rows marked ``held out`` came afterwards and say how good that is. Rows marked ``apart``
are shown and not averaged: they took less time in all than their messages over one of the published links would, there and back.
``--runs`` predicts other runs: a file with the same columns, or with those of the publication's own table (``PUBLISHED``).
``--check`` exits 1 where the mean absolute error of the step time, of rows of either kind, is above the bar.

Every run is predicted twice: with one NIC per node, and with one for every link. The publication's table of links has
one rate for 1, 2, 4 and 8 GPUs that send, that of a Gigabit Ethernet port, so a node has one; two flows at once were not published.

How a run becomes a simulation: a node is one rank, whose times are those measured with all its GPUs on one layer; every
pipeline is simulated as DeepSpeed's engine orders it (``gradients_first``), with one NIC per node: a message is cut over
all GPUs of a node, each of which sends its share. Gradients are summed over the pipelines in rings, and the optimizer runs.
That engine sends from the stream that computes and sums after the last backward; both are left out (benchmarks/RESULTS.md says what
that changes).
The peak of memory is counted per GPU from published activation formulas and shown beside the measured one, without a bar; what the
runtime itself takes is left out. Nodes of two GPUs are taken to recompute activations (``RECOMPUTING_GPUS``): N2_D1's 4.1 GB are
less than its activations, and N2_D2, which did not decide it, is then right too. The publication does not say so.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.planning.device_times import optimizer_s  # noqa: E402
from hetero_mpi.planning.memory import StageMode, stage_memory  # noqa: E402
from hetero_mpi.planning.schedule import Op, Schedule, holdings, schedule_of  # noqa: E402
from hetero_mpi.planning.simulator import SimulatedStep, simulate  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile  # noqa: E402
from hetero_mpi.planning.types.request import with_shared_nics  # noqa: E402
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD  # noqa: E402

DATA = ROOT / "benchmarks" / "data"
BAR = 0.08

BLOCKS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, POSITIONS = 24, 1024, 16, 2048, 50272, 2050
"""OPT-350M as it was profiled: all 24 blocks 1024 wide, a head of its own (the measured gradient sums are too long for a
shared one: 21.6 s in N4_D4 need 1.6 GB of gradients, not 1.4)."""
FP32_BYTES = 4
"""Weights, messages and gradients were fp32."""
TRAINING_BYTES = 16
"""Weight, gradient and two Adam moments per parameter, all fp32."""
BYTES_PER_S = {
    ("RTX-2080", "RTX-2080"): 0.1175e9,
    ("RTX-2080", "RTX-3090"): 0.1148e9,
    ("RTX-2080", "Titan-RTX"): 0.1175e9,
    ("RTX-3090", "RTX-3090"): 0.1174e9,
    ("RTX-3090", "Titan-RTX"): 0.1159e9,
    ("Titan-RTX", "Titan-RTX"): 2.94e9,
}
"""Between nodes of these GPUs, large messages: ``sailor/providers/mit/bandwidth_sockets.json`` of the publication."""
RECOMPUTING_GPUS = 2
"""Activations of nodes of so many GPUs are recomputed: found by a look at N2_D1."""
AVERAGED = ("constants", "held out")

PUBLISHED = {
    "file": "run",
    "mbs": "micro_batch",
    "gbs": "global_batch",
    "layers_per_stage": "layers",
    "gpu_per_stage": "nodes",
    "real_s": "step_s",
    "red_grads_s": "sync_s",
    "max_mem_bytes": "peak_bytes",
}
"""Column of the publication's table -> column here."""


@dataclass(frozen=True)
class Node:
    gpu: str
    gpus: int


@dataclass(frozen=True)
class Run:
    """One measured run. ``nodes[stage][pipeline]``; measurements that are not given are 0."""

    name: str
    micro_batch: int
    global_batch: int
    layers: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]
    step_s: float
    sync_s: float
    peak_bytes: int
    use: str = "held out"
    """``constants``: constants were chosen by a look at it; ``held out``: not; ``apart``: it counts for no mean."""


@dataclass(frozen=True)
class Prediction:
    run: str
    use: str
    measured_s: float
    predicted_s: float
    predicted_apart_s: float
    """With a NIC for every link."""
    measured_sync_s: float
    predicted_sync_s: float
    measured_peak_bytes: int
    predicted_peak_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def error_apart(self) -> float:
        return self.predicted_apart_s / self.measured_s - 1


Times = dict[tuple[str, int, str], list[tuple[int, float, float, float]]]
"""(GPU, how many share a layer, layer kind) -> (sequences, forward, backward, optimizer seconds), sequences rising."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, default=DATA / "sailor_runs.csv", metavar="FILE", help="runs to predict")
    arguments = parser.parse_args()
    times = read_times(DATA / "sailor_opt350m_layers.csv")
    predictions = [predict(run, times) for run in read_runs(arguments.runs)]
    print_table(predictions)
    means = {use: mean_errors(predictions, use) for use in AVERAGED}
    if arguments.json:
        rows = [
            {**asdict(p), **({"error": p.error, "error_apart": p.error_apart} if p.measured_s else {})}
            for p in predictions
        ]
        arguments.json.write_text(json.dumps({"mean_absolute_errors": means, "rows": rows}, indent=1) + "\n")
    known = {use: errors for use, errors in means.items() if errors}
    for use, (shared, apart) in known.items():
        print(
            f"mean absolute error of the step time, {use}: {100 * shared:.1f} % with a NIC per node, {100 * apart:.1f} % with one "
            f"per link (bar: {100 * BAR:.0f} %, NIC per node)"
        )
    return int(arguments.check and any(shared > BAR for shared, _ in known.values()))


def _records(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(lines))


def read_times(path: Path) -> Times:
    times: Times = {}
    for record in _records(path):
        key = record["gpu"], int(record["gpus"]), record["layer"]
        seconds = (float(record[column]) for column in ("forward_s", "backward_s", "optimizer_s"))
        times.setdefault(key, []).append((int(record["sequences"]), *seconds))  # type: ignore[arg-type]
    return {key: sorted(rows) for key, rows in times.items()}


def read_runs(path: Path) -> list[Run]:
    runs = []
    for record in _records(path):
        row = {PUBLISHED.get(column, column): value for column, value in record.items()}
        runs.append(
            Run(
                name=Path(row["run"]).stem.removeprefix("plan_config_"),
                micro_batch=int(row["micro_batch"]),
                global_batch=int(row["global_batch"]),
                layers=tuple(int(count) for count in row["layers"].split("|")),
                nodes=tuple(tuple(_node(text) for text in stage.split("+")) for stage in row["nodes"].split("|")),
                step_s=float(row.get("step_s") or 0),
                sync_s=float(row.get("sync_s") or 0),
                peak_bytes=int(float(row.get("peak_bytes") or 0)),
                use=row.get("use") or Run.use,
            )
        )
    return runs


def _node(text: str) -> Node:
    gpu, _, gpus = text.strip().rpartition("x")
    return Node(gpu, int(gpus))


def predict(run: Run, times: Times, counted: Callable[[ModelCost], ModelCost] = lambda model: model) -> Prediction:
    """``counted``: the bytes to count, of a model's tensors."""
    plan, profile = plan_of(run), profile_of(run, times)
    schedule = gradients_first(plan, profile.model)
    step_s, sync = replicated_s(simulate(plan, with_shared_nics(profile), schedule), plan, profile)
    apart_s, _ = replicated_s(simulate(plan, profile, schedule), plan, profile)
    nodes = [run.nodes[s][p] for p in range(len(run.nodes[0])) for s in range(len(run.layers))]
    peak = 0
    for number, _, stage in plan.numbered:
        flying = max(flying for flying, _ in holdings(schedule[stage.ranks[0]]))
        model, mode = counted(model_cost(nodes[number].gpus)), StageMode(nodes[number].gpus <= RECOMPUTING_GPUS)
        parts = stage_memory(model, stage.first, stage.last, run.micro_batch * SEQUENCE, flying, mode)
        peak = max(peak, int(parts.total - parts.staging))  # messages were sent from the device, not from host buffers
    return Prediction(run.name, run.use, run.step_s, step_s, apart_s, run.sync_s, sync, run.peak_bytes, peak)


def replicated_s(simulation: SimulatedStep, plan: Plan, profile: ClusterProfile) -> tuple[float, float]:
    """Seconds of a step, and of its gradient sums on the rank where they take longest, where every holder of a layer keeps all its
    state.

    What is simulated sums at one owner of each parameter, which then sends new values. There, an all-reduce takes twice that sum's
    time (its second half brings the sums to all), and everybody steps all of its stage.
    """
    ends, syncs = [], []
    for _, _, stage in plan.numbered:
        rank = stage.ranks[0]
        own = [event for event in simulation.events if event.rank == rank]
        sync = sum(event.end_s - event.start_s for event in own if event.action.op is Op.REDUCE)
        summed = max(event.end_s for event in own if event.action.op is not Op.STEP)
        syncs.append(2 * sync)
        parameters = sum(layer.trainable_parameters for layer in profile.model.layers[stage.first : stage.last])
        ends.append(summed + sync + optimizer_s(profile, profile.devices[rank], parameters))
    return max(ends), max(syncs)


def gradients_first(plan: Plan, model: ModelCost) -> Schedule:
    """The plan's 1F1B, except that after its warm-up a stage takes the gradient it needs next before it sends an activation.

    That is the order of DeepSpeed's pipeline engine, which sends an output at the beginning of the following turn::

        1F1B       0F1 0SEND_F1 0RECV_B0 0B0
        this       0F1 0RECV_B0 0SEND_F1 0B0

    An activation then travels only after a gradient has come: where links are slow, every micro-batch pays for a round
    trip that 1F1B hides. The last activation of a warm-up goes first: the gradient that is awaited next needs it.
    """
    schedule = schedule_of(plan, model)
    for _, _, stage in plan.numbered:
        actions = list(schedule[stage.ranks[0]])
        for i, (sent, taken) in enumerate(itertools.pairwise(actions)):
            in_turn = sent.op is Op.SEND_F and taken.op is Op.RECV_B
            if in_turn and sent.micro_batch >= taken.micro_batch + stage.warm_up:
                actions[i], actions[i + 1] = taken, sent
        schedule[stage.ranks[0]] = tuple(actions)
    return schedule


def plan_of(run: Run) -> Plan:
    """One pipeline per column of nodes; micro-batches that do not come out even go to the first pipelines."""
    count = len(run.nodes[0])
    share, left = divmod(run.global_batch // run.micro_batch, count)
    cuts = [sum(run.layers[:s]) for s in range(len(run.layers) + 1)]
    depth = len(run.layers)
    pipelines = []
    for p in range(count):
        held = tuple(StagePlan((p * depth + s,), cuts[s], cuts[s + 1], depth - 1 - s) for s in range(depth))
        pipelines.append(PipelinePlan(held, run.micro_batch, run.micro_batch * (share + (p < left))))
    return Plan(tuple(pipelines), run.global_batch, SEQUENCE, BLOCKS + 2)


def profile_of(run: Run, times: Times) -> ClusterProfile:
    """The run's nodes as ranks, pipeline by pipeline, in the order of ``plan_of``."""
    nodes = [run.nodes[s][p] for p in range(len(run.nodes[0])) for s in range(len(run.layers))]
    links = tuple(
        LinkProfile(a, b, 0.0, BYTES_PER_S[min(gpus), max(gpus)], False)
        for a in range(len(nodes))
        for b in range(len(nodes))
        if a != b
        for gpus in [(nodes[a].gpu, nodes[b].gpu)]
    )
    devices = tuple(device_of(rank, node, times) for rank, node in enumerate(nodes))
    source = "derived from layer times measured by eth-easl/sailor (MIT)"
    return ClusterProfile(source, "2025", run.name, "NCCL", {}, model_cost(), devices, links)


def device_of(rank: int, node: Node, times: Times) -> DeviceProfile:
    """A node as one rank: the times of all its GPUs sharing every layer. Its memory is not known here."""
    kinds = (EMBEDDING, "first_block", "block", HEAD)
    if (node.gpu, node.gpus, "block") not in times:
        known = ", ".join(f"{gpu}x{gpus}" for gpu, gpus, kind in sorted(times) if kind == "block")
        raise SystemExit(f"{node.gpu}x{node.gpus}: no measured layer times for this node; known: {known}")
    rows = {kind: times[node.gpu, node.gpus, kind] for kind in kinds}
    step_s = (BLOCKS + 2) * rows["block"][0][3]
    return DeviceProfile(
        rank=rank,
        host=f"node{rank}",
        backend="cuda",
        name=f"{node.gpus} x {node.gpu}",
        memory_bytes=0,
        memory_reason="not published with the runs",
        dtypes=("fp32",),
        layers={kind: LayerTimes(_curve(rows[kind], 1), _curve(rows[kind], 2)) for kind in kinds},
        optimizer_fixed_s=0.0,
        optimizer_s_per_parameter=step_s / sum(layer.parameters for layer in model_cost().layers),
    )


def _curve(rows: Iterable[tuple[int, float, float, float]], column: int) -> Curve:
    rows = list(rows)
    return Curve(tuple(row[0] * SEQUENCE for row in rows), tuple(float(row[column]) for row in rows))


def model_cost(gpus: int = 1) -> ModelCost:
    """OPT-350M, of which each of ``gpus`` GPUs holds its share.

    Activations that a block keeps, in bytes per token: ``h (18 + 48/t) + 9 a s / t`` for hidden size h, a heads, sequence
    s and t GPUs: the count of Korthikanti et al. 2022 (section 4.1) with fp32 tensors and one-byte dropout masks. The
    loss needs the logits, their softmax and their gradient.
    """

    def layer(kind: str, parameters: int, kept: float, workspace: float, boundary: int) -> LayerCost:
        held = parameters // gpus
        return LayerCost(kind, held, held, held * FP32_BYTES, kept, workspace, boundary)

    boundary = HIDDEN * FP32_BYTES
    block = 12 * HIDDEN * HIDDEN + 13 * HIDDEN
    kept = HIDDEN * (18 + 48 / gpus) + 9 * HEADS * SEQUENCE / gpus
    chain = [layer(EMBEDDING, (VOCABULARY + POSITIONS) * HIDDEN, HIDDEN, 0.0, boundary)]
    chain += [layer("first_block" if i == 0 else "block", block, kept, 0.0, boundary) for i in range(BLOCKS)]
    chain += [layer(HEAD, VOCABULARY * HIDDEN, 2 * boundary, 3 * FP32_BYTES * VOCABULARY / gpus, 0)]
    return ModelCost("opt", "fp32", SEQUENCE, False, TRAINING_BYTES - FP32_BYTES, tuple(chain))


def mean_errors(predictions: list[Prediction], use: str) -> tuple[float, float] | None:
    """Mean absolute relative errors of the step time over the runs of this use whose time was measured: with a NIC per node, with
    one per link. None: there are no such runs."""
    rows = [p for p in predictions if p.measured_s and p.use == use]
    if not rows:
        return None
    return sum(abs(p.error) for p in rows) / len(rows), sum(abs(p.error_apart) for p in rows) / len(rows)


def print_table(predictions: list[Prediction]) -> None:
    print(
        "                              step time:  NIC per node      per link     gradient sum             memory of a GPU"
    )
    print(
        "run         use         measured predicted   error  predicted   error    measured predicted    measured predicted"
    )
    for p in predictions:
        measured, error, apart = "-", "-", "-"
        if p.measured_s:
            measured, error, apart = (
                f"{p.measured_s:.2f} s",
                f"{100 * p.error:+.1f} %",
                f"{100 * p.error_apart:+.1f} %",
            )
        sync = f"{p.measured_sync_s:.2f} s" if p.measured_sync_s else "-"
        peak = f"{p.measured_peak_bytes / 1e9:.2f} GB" if p.measured_peak_bytes else "-"
        print(
            f"{p.run:<11} {p.use:<9} {measured:>10} {p.predicted_s:>7.2f} s {error:>9} {p.predicted_apart_s:>7.2f} s {apart:>9} "
            f"{sync:>10} {p.predicted_sync_s:>7.2f} s {peak:>10} {p.predicted_peak_bytes / 1e9:>6.2f} GB"
        )


if __name__ == "__main__":
    sys.exit(main())
