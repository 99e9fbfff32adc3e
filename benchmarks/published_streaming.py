"""Does the simulator predict how fast others train with weights that come from host memory?

    python benchmarks/published_streaming.py [--json FILE] [--check]

Predicts every row of ``data/roundpipe_layers.csv``: five models on one RTX 4090 under RoundPipe. A row becomes a plan of one
streamed stage, whose micro-batches are the row's loads, in slices of the 4 sequences that the layer times hold for. No figure is
chosen by a look at what was measured. What is a property of the software that ran there is a constant below, with its source.

RoundPipe's gradients leave in fp16 beside the computing, and its optimizer runs on the host beside the following step. So layers
count as frozen here: they come from host memory, and backward repeats their forward. The column "as ours" says what this program
would reach on that card with all weights trained: its gradients leave and come back in fp32, and its optimizer is waited for.
``--check`` exits 1 where a dense model's tokens per second are further from the measured ones than the bar. The models with experts
have no bar: the time of their layers is not in proportion to the tokens, and only one number of tokens was published.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.planning.types.cost import EMBEDDING, HEAD, LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "roundpipe_layers.csv"
BAR = 0.03
DENSE = ("qwen3-1.7b", "llama3.1-8b", "qwen3-32b")
SEQUENCE, SLICE = 2048, 4
"""Tokens of a sequence, and sequences that the times hold for (480 in 12 x 10 parts and so on: ``roundpipe-timing/run.sh``)."""
FP16_BYTES = 2
COPIED_BYTES_PER_S = 2**26 / 3.2e-3
"""The 4 x 2048 x 4096 fp16 values that Llama 8B's layers hand on take 3.2 ms (``COMM_TIME`` of ``pp-simulate/run.sh``); those of
the other models come to the same."""


@dataclass(frozen=True)
class Row:
    model: str
    training: str
    blocks: int
    hidden: int
    vocabulary: int
    block_parameters: int
    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float
    sequences: int
    loads: int
    tokens_per_s: float


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    found = [(row, predict(row)) for row in read_rows()]
    print(
        f"{'':>12} {'training':>8} {'measured':>9} {'predicted':>10} {'error':>8} {'copies alone':>13} {'as ours':>8}  tokens/s"
    )
    for row, predicted in found:
        error, copies, ours = predicted / row.tokens_per_s - 1, predict(row, 0.0), predict(row, trained=True)
        print(
            f"{row.model:>12} {row.training:>8} {row.tokens_per_s:>9.0f} {predicted:>10.0f} {error:>+8.1%} {copies:>13.0f}"
            f" {ours:>8.0f}  {f'bar {BAR:.0%}' if row.model in DENSE else 'no bar'}"
        )
    if arguments.json:
        rows = [
            {**asdict(row), "predicted_tokens_per_s": predicted, "ours": predict(row, trained=True)}
            for row, predicted in found
        ]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    worst = max(abs(predicted / row.tokens_per_s - 1) for row, predicted in found if row.model in DENSE)
    print(f"largest error of the dense models: {worst:.1%} (bar: {BAR:.0%})")
    return int(arguments.check and worst > BAR)


def read_rows() -> list[Row]:
    lines = [line for line in DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    kinds = {"str": str, "int": int, "float": float}
    known = {name: kinds[str(kind)] for name, kind in Row.__annotations__.items()}
    return [Row(**{name: known[name](value) for name, value in line.items()}) for line in csv.DictReader(lines)]


def predict(row: Row, computing: float = 1.0, trained: bool = False) -> float:
    """Tokens per second. ``computing``: share of the published times that computing takes; ``trained``: by this program, with all
    weights trained where the row's were."""
    plan = plan_of(row)
    return plan.global_batch * SEQUENCE / simulate(plan, profile_of(row, computing, trained)).step_s


def plan_of(row: Row) -> Plan:
    """One stage that holds the whole model; a load of weights serves one micro-batch."""
    stage = StagePlan((0,), 0, row.blocks + 2, 0, streamed=True, slice_sequences=SLICE)
    pipeline = PipelinePlan((stage,), -(-row.sequences // row.loads), row.sequences)
    return Plan((pipeline,), row.sequences, SEQUENCE, row.blocks + 2)


def profile_of(row: Row, computing: float, trained: bool) -> ClusterProfile:
    def curve(seconds: float) -> Curve:
        return Curve((SLICE * SEQUENCE,), (computing * seconds,))

    head_back = curve(row.head_backward_s)
    # Theirs computes the head once: its forward belongs to the first backward stage (pp-simulate/README.md).
    head = LayerTimes(curve(row.head_forward_s), head_back, recompute_s=head_back)
    embedding = LayerTimes(curve(0.0), curve(0.0))  # not published
    device = DeviceProfile(
        rank=0,
        host="host",
        backend="cuda",
        name="NVIDIA RTX 4090",
        memory_bytes=0,
        memory_reason="not needed",
        dtypes=("fp16",),
        layers={EMBEDDING: embedding, "block": LayerTimes(curve(row.forward_s), curve(row.backward_s)), HEAD: head},
        optimizer_fixed_s=0.0,
        optimizer_s_per_parameter=0.0,
        device_to_host_bytes_per_s=COPIED_BYTES_PER_S,
        host_to_device_bytes_per_s=COPIED_BYTES_PER_S,
    )
    source = "derived from layer times measured by ITcarrot/RoundPipe-artifact (MIT)"
    return ClusterProfile(
        source, "2026", row.model, "none", {}, model_cost(row, trained and row.training == "full"), (device,), ()
    )


def model_cost(row: Row, trained: bool) -> ModelCost:
    """Bytes of the weights; nothing that is kept from forward to backward is asked for here."""

    def layer(kind: str, parameters: int, boundary: int) -> LayerCost:
        return LayerCost(kind, parameters, parameters * trained, FP16_BYTES * parameters, 0.0, 0.0, boundary)

    ends, boundary = row.vocabulary * row.hidden, FP16_BYTES * row.hidden
    block = layer("block", row.block_parameters, boundary)
    layers = (layer(EMBEDDING, ends, boundary), *([block] * row.blocks), layer(HEAD, ends, 0))
    return ModelCost(row.model, "fp16", SEQUENCE, False, 0.0, layers)


if __name__ == "__main__":
    sys.exit(main())
