"""How far are times and memory that follow from data sheets from what others measured? One table, by kind of measurement.

    python benchmarks/published_sheets.py [--json FILE] [--check]

Predicted by the rules of ``profile_parts``: steps and memory of LoRA on an A100 (Qwen), passes of a block in full fine-tuning on
cards of seven kinds (Zorse, RoundPipe), and GPU memory of full fine-tuning in fp32 (Sailor). Rows marked ``fitted`` decided
constants of the rules, rows marked ``held out`` none. An error is the prediction over the measurement, less 1. ``--check`` exits 1
where a row misses the bar of its kind, or where memory is predicted so much too small that a plan could run out of it.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import profile_parts as parts  # noqa: E402
import published_roundpipe as roundpipe  # noqa: E402
import published_runs as runs  # noqa: E402
from harness import parser_of  # noqa: E402
from make_profiles import A100, GIGABIT, LLAMA_3B, LLAMA_7B, RTX_4090, ZORSE_CARDS  # noqa: E402

from hetero_mpi.planning.memory_model import predict_memory  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402

SEQUENCES, RANK = 8, 64
QWEN = {
    "1.8B": parts.Shape(2048, 24, 5504, 151936, 2048),
    "7B": parts.Shape(4096, 32, 11008, 151936, 4096),
    "14B": parts.Shape(5120, 40, 13696, 152064, 5120),
}
LLAMAS = {"llama-3b": LLAMA_3B, "llama-7b": LLAMA_7B}
ROUNDPIPE = {"qwen3-1.7b": 6144, "llama3.1-8b": 14336, "qwen3-32b": 25600}
"""Intermediate size of the dense models."""
CARDS = ZORSE_CARDS | {"a100x40": replace(A100, memory_bytes_per_s=1555e9)}
FITTED_BLOCKS = "a100x40", "a10g llama-3b", "4090 llama3.1-8b"
BARS = {"LoRA, seconds": 0.20, "LoRA, memory": 0.15, "LoRA and ends, seconds": 0.20, "fp32, memory": 0.30}
"""Kind -> largest error of a row."""
SHORTFALL = 1 - 0.95 * parts.USABLE
"""Memory may be predicted too small by this share, which plan and profile keep free."""


@dataclass(frozen=True)
class Row:
    kind: str
    name: str
    use: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def missed(self) -> bool:
        return abs(self.error) > BARS.get(self.kind, 1.0) or ("memory" in self.kind and self.error < -SHORTFALL)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    rows = [*lora_rows(), *block_rows(), *memory_rows()]
    print("| kind | fitted rows | mean error | from | to | held-out rows | mean error | from | to |\n|" + " --- |" * 9)
    for kind in dict.fromkeys(row.kind for row in rows):
        print(f"| {kind} | {summary(rows, kind, 'fitted')} | {summary(rows, kind, 'held out')} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [f"{row.kind}: {row.name}" for row in rows if row.missed]
    print(f"missed: {', '.join(missed) or 'none'}")
    return int(arguments.check and bool(missed))


def summary(rows: list[Row], kind: str, use: str) -> str:
    """Number of rows of a kind and use, mean of their absolute errors, and the range of the errors."""
    errors = [row.error for row in rows if (row.kind, row.use) == (kind, use)]
    mean = sum(map(abs, errors)) / max(1, len(errors))
    return f"{len(errors)} | {mean:.1%} | {min(errors):+.1%} | {max(errors):+.1%}" if errors else "- | - | - | -"


def lines_of(name: str) -> Iterator[dict[str, str]]:
    return csv.DictReader(roundpipe.told(runs.DATA / f"{name}.csv"))


def lora_rows() -> Iterator[Row]:
    """One rank holds all layers and recomputes activations."""
    for line in lines_of("qwen_a100"):
        shape, tokens, ends = QWEN[line["model"]], int(line["tokens"]), line["ends"] == "1"
        profile = parts.sheet_cluster("qwen", "", [("host", A100)], shape, "bf16", tokens, GIGABIT, (), True)
        first, block, *_, last = profile.model.layers
        extra = block.trainable_parameters * RANK // parts.LORA_RANK
        held = 2 * shape.block_weights + 4 * extra
        block = replace(block, trainable_parameters=extra, parameter_bytes=held, workspace_bytes=0)
        if ends:
            first, last = (replace(end, trainable_parameters=end.parameters) for end in (first, last))
        layers = (first, *[block] * shape.blocks, last)
        profile = replace(profile, model=replace(profile.model, layers=layers))
        pipeline = PipelinePlan((StagePlan((0,), 0, len(layers), 0, recompute=True),), 1, SEQUENCES)
        plan = Plan((pipeline,), SEQUENCES, tokens, len(layers))
        predicted_gb = (predict_memory(plan, profile)[0].peak_bytes + parts.FRAMEWORK_BYTES) / 1e9
        kind, name = "LoRA and ends" if ends else "LoRA", f"{line['model']}, {tokens} tokens"
        yield Row(f"{kind}, seconds", name, line["use"], float(line["seconds"]), simulate(plan, profile).step_s)
        yield Row(f"{kind}, memory", name, line["use"], float(line["memory_gb"]), predicted_gb)


def block_rows() -> Iterator[Row]:
    """Forward and backward of a block in fp16."""
    for line in lines_of("zorse_llama_layers"):
        if line["gpu"] in CARDS and CARDS[line["gpu"]].peak:
            tokens, seconds = int(line["sequence_length"]), float(line["forward_s"]) + float(line["backward_s"])
            names, card = (line["gpu"], line["model"]), CARDS[line["gpu"]]
            yield block_row(names, card, LLAMAS[line["model"]], tokens, int(line["sequences"]), seconds)
    for row in (row for row in roundpipe.read_rows() if row.model in ROUNDPIPE):
        shape = parts.Shape(row.hidden, row.blocks, ROUNDPIPE[row.model], row.vocabulary, 1024)
        names, seconds = ("4090", row.model), row.forward_s + row.backward_s
        yield block_row(names, RTX_4090, shape, roundpipe.SEQUENCE, roundpipe.TIMED, seconds)


def block_row(
    names: tuple[str, str], card: parts.Card, shape: parts.Shape, sequence: int, sequences: int, measured_s: float
) -> Row:
    times, tokens = parts.sheet_times(card, shape, sequence, "fp16", False)["block"], sequence * sequences
    predicted_s = times.forward_s.at(tokens) + times.backward_s.at(tokens)
    use = "fitted" if " ".join(names).startswith(FITTED_BLOCKS) else "held out"
    return Row(f"fp16 block, {names[0]}", names[1], use, measured_s, predicted_s)


def memory_rows() -> Iterator[Row]:
    times = runs.read_times(runs.DATA / "sailor_opt350m_layers.csv")
    for run in runs.read_runs(runs.DATA / "sailor_runs.csv"):
        if run.use in runs.AVERAGED:
            predicted = runs.predict(run, times, parts.with_allocator).predicted_peak_bytes
            yield Row("fp32, memory", run.name, "held out", run.peak_bytes, predicted)


if __name__ == "__main__":
    sys.exit(main())
