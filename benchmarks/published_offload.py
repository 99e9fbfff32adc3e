"""Three systems that train from host memory on one machine, for ``published_streaming``: rows, and what is predicted of them.

* MegaTrain-Plus on a DGX Spark: one streamed stage, whose layers compute in host memory. Three constants come from one row's three
  figures: operations per second and seconds per load of a layer from its forward and backward, which repeats the forward, and
  seconds per parameter from the rest of its step. Gradients stay in bf16 and there is no optimizer: 4 bytes a parameter in all.
  MegaTrain itself has the same constants, one more forward in backward, and a copy of every layer's weights each time they come.
* ZeRO-3 with parameters and optimizer in host memory: one streamed stage. Arithmetic takes as long as at the card's dense peak for
  bf16 (data sheet): RoundPipe's fp16 layers run faster than that on the same card, with sums in fp16, so that the peak is what
  limits. What else a step takes, whatever its tokens, comes from one row.
* KTransformers: experts on processors, the rest on a GPU. Its stages stand beside what arithmetic takes, at the rates that it
  published for another processor; nothing is fitted, nothing has a bar, what no cost of ours stands for is named.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from make_profiles import RTX_4090, RTX_5090  # noqa: E402
from moe_parts import MEMORY_EFFICIENCY, QWEN3_30B  # noqa: E402
from profile_parts import GIB  # noqa: E402
from published_roundpipe import DATA, read_rows, told  # noqa: E402

from hetero_mpi.planning.decision.planner import complete_plan  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD  # noqa: E402
from hetero_mpi.util.errors import UserError  # noqa: E402

BLOCK, BF16_BYTES = "block", 2
SPARK_BYTES, SPARK_BYTES_PER_S = 128e9, 273e9
"""Data sheet."""
LOGIT_BYTES = 6
"""A logit in bf16, and its gradient in fp32. Liger's loss keeps no more than some of them at once."""


@dataclass(frozen=True)
class Dense:
    """A model whose blocks are alike."""

    hidden: int
    blocks: int
    width: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 2 * self.hidden * self.head_size * (self.heads + self.key_heads) + 3 * self.hidden * self.width

    @property
    def ends(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + (1 if self.tied else 2) * self.ends

    def operations(self, sequence: int) -> float:
        """Of a block's forward, per token."""
        return 2.0 * self.block + 2.0 * sequence * self.heads * self.head_size

    def cost(self, sequence: int, state_bytes: float, logit_bytes: int) -> ModelCost:
        """``state_bytes``: of gradients and all that the optimizer keeps, per parameter."""
        boundary = BF16_BYTES * self.hidden

        def layer(kind: str, own: int, trained: int) -> LayerCost:
            workspace = logit_bytes * self.vocabulary * (kind == HEAD)
            return LayerCost(kind, own, trained, BF16_BYTES * own, 0.0, workspace, boundary * (kind != HEAD))

        block = layer(BLOCK, self.block, self.block)
        layers = (
            layer(EMBEDDING, self.ends, self.ends),
            *[block] * self.blocks,
            layer(HEAD, self.ends, 0 if self.tied else self.ends),
        )
        return ModelCost("dense", "bf16", sequence, self.tied, state_bytes, layers, 4 * self.ends * self.tied)


LLAMA_8B = Dense(4096, 32, 14336, 32, 8, 128, 128256, False)


@dataclass(frozen=True)
class Found:
    """A row beside its prediction."""

    name: str
    use: str
    measured_s: float
    predicted_s: float | None
    """None: refused."""
    refusal: str = ""

    @property
    def error(self) -> float:
        return (self.predicted_s or 0.0) / self.measured_s - 1


def of_rate(model: Dense, sequence: int, per_s: float, tokens: tuple[int, ...]) -> dict[str, LayerTimes]:
    """Times of layers that take as long as their arithmetic; backward twice the forward, and of blocks once more."""

    def curve(operations: float) -> Curve:
        return Curve(tokens, tuple(operations * count / per_s for count in tokens))

    own, head = model.operations(sequence), 2.0 * model.ends
    ends = curve(2 * head)
    return {
        EMBEDDING: LayerTimes(curve(0.0), curve(0.0)),
        BLOCK: LayerTimes(curve(own), curve(2 * own)),
        HEAD: LayerTimes(curve(head), ends, recompute_s=ends),
    }


def step_s(profile: ClusterProfile, sequences: int) -> float:
    """Seconds of one streamed stage on one device, all sequences at once; what has no room raises ``UserError``, as always."""
    layers = len(profile.model.layers)
    stage = StagePlan((0,), 0, layers, 0, streamed=True)
    plan = Plan((PipelinePlan((stage,), sequences, sequences),), sequences, profile.model.sequence_length, layers)
    request = PlanRequest(
        sequences, profile.model.sequence_length, (sequences,), streaming="shorter", memory_reserve=0.0
    )
    return complete_plan(plan, profile, request).predicted_step_s


def profile_of(source: str, model: ModelCost, **device: Any) -> ClusterProfile:
    own: dict[str, Any] = {
        "rank": 0,
        "host": "host",
        "backend": "cuda",
        "memory_reason": "as published",
        "dtypes": ("bf16",),
        "optimizer_fixed_s": 0.0,
    }
    one = DeviceProfile(**own | {"optimizer_s_per_parameter": 0.0, "host_optimizer_s_per_parameter": 0.0} | device)
    return ClusterProfile(f"derived from {source}", "2026", source, "none", {}, model, (one,), ())


# MegaTrain-Plus

SPARK_SEQUENCE, SPARK_SEQUENCES = 512, 2


@dataclass(frozen=True)
class SparkRow:
    model: str
    shape: Dense
    forward_s: float
    backward_s: float
    step_s: float
    upstream_s: float
    """Of MegaTrain itself."""
    use: str


@dataclass(frozen=True)
class Spark:
    """What one row decides."""

    operations_per_s: float
    load_s: float
    """Of each layer, both ends included, for its weights to come: once in forward and once in backward."""
    rest_s_per_parameter: float

    @classmethod
    def fitted(cls, row: SparkRow) -> Spark:
        model, tokens, calls = row.shape, SPARK_SEQUENCES * SPARK_SEQUENCE, row.shape.blocks + 2
        blocks, head = model.blocks * model.operations(SPARK_SEQUENCE), 2.0 * model.ends
        # Its clock of the forward stops before the head, whose forward its backward has.
        forward, backward = (tokens * operations for operations in (blocks, 3 * (blocks + head)))
        per_s = (backward - forward) / (row.backward_s - row.forward_s)
        rest_s = row.step_s - row.forward_s - row.backward_s
        return cls(per_s, (row.forward_s - forward / per_s) / calls, rest_s / model.parameters)

    def predicted(self, row: SparkRow, upstream: bool = False) -> Found:
        """``upstream``: of MegaTrain itself, for which no row is fitted."""
        tokens = (SPARK_SEQUENCE, SPARK_SEQUENCES * SPARK_SEQUENCE)
        layers = of_rate(row.shape, SPARK_SEQUENCE, self.operations_per_s, tokens)
        if upstream:
            layers[BLOCK] = self._upstream(layers[BLOCK], row.shape)
        profile = profile_of(
            "measurements of bdqnghi/MegaTrain-Plus (Apache-2.0)",
            row.shape.cost(SPARK_SEQUENCE, BF16_BYTES, LOGIT_BYTES),
            name="NVIDIA GB10",
            memory_bytes=int(SPARK_BYTES),
            shares_host_memory=True,
            layers=layers,
            forward_overhead_s=self.load_s,
            optimizer_s_per_parameter=self.rest_s_per_parameter,
        )
        measured_s, use = (row.upstream_s, row.use.replace("fitted", "held out")) if upstream else (row.step_s, row.use)
        try:
            return Found(row.model, use, measured_s, step_s(profile, SPARK_SEQUENCES))
        except UserError as problem:
            return Found(row.model, use, measured_s, None, str(problem).splitlines()[0])

    def _upstream(self, block: LayerTimes, model: Dense) -> LayerTimes:
        """A block whose weights are read and written once more whenever they come, in backward also for one more forward."""
        copy_s = 2 * BF16_BYTES * model.block / (SPARK_BYTES_PER_S * MEMORY_EFFICIENCY)

        def more(curve: Curve, times: int, *others: Curve, fixed_s: float = 0.0) -> Curve:
            own = (seconds + times * copy_s + fixed_s for seconds in curve.seconds)
            return Curve(curve.tokens, tuple(map(sum, zip(own, *(one.seconds for one in others), strict=True))))

        forward, backward = block.forward_s, block.backward_s
        repeated = more(backward, 2, forward, forward, fixed_s=self.load_s)
        return LayerTimes(more(forward, 1), backward, recompute_s=repeated)


def read_spark() -> list[SparkRow]:
    found = []
    for line in csv.DictReader(told(DATA / "megatrain_spark.csv")):
        whole = ("hidden", "blocks", "width", "heads", "key_heads", "head_size", "vocabulary")
        shape = Dense(**{name: int(line[name]) for name in whole}, tied=line["tied"] == "1")
        seconds = {name: float(line[name]) for name in ("forward_s", "backward_s", "step_s", "upstream_s")}
        found.append(SparkRow(line["model"], shape, **seconds, use=line["use"]))
    return found


def spark() -> tuple[Spark, list[Found], list[Found]]:
    """(what is fitted, rows of MegaTrain-Plus, rows of MegaTrain itself)"""
    rows = read_spark()
    constants = Spark.fitted(next(row for row in rows if row.use == "fitted"))
    return constants, *([constants.predicted(row, upstream) for row in rows] for upstream in (False, True))


# ZeRO-3

ZERO_SEQUENCE = 1024


def zero() -> tuple[float, list[Found]]:
    """(seconds of a step whatever its tokens, rows)"""
    rows = [
        (int(line["sequences"]), float(line["step_s"]), line["use"])
        for line in csv.DictReader(told(DATA / "zero3_4090.csv"))
    ]
    without = {sequences: step_s(_zero_profile(sequences), sequences) for sequences, _, _ in rows}
    fixed_s = next(measured_s - without[sequences] for sequences, measured_s, use in rows if use == "fitted")
    return fixed_s, [
        Found(f"{sequences} sequences", use, own_s, without[sequences] + fixed_s) for sequences, own_s, use in rows
    ]


def fp16_operations_per_s() -> float:
    """Of RoundPipe's Llama 8B blocks on an RTX 4090, forward."""
    row = next(row for row in read_rows() if row.model == "llama3.1-8b")
    return LLAMA_8B.operations(2048) * 4 * 2048 / row.forward_s


def _zero_profile(sequences: int) -> ClusterProfile:
    tokens = (ZERO_SEQUENCE, sequences * ZERO_SEQUENCE)
    return profile_of(
        "measurements of RegiaYoung/SlideFormer (Apache-2.0)",
        LLAMA_8B.cost(ZERO_SEQUENCE, 16.0, 0),
        name=RTX_4090.name,
        memory_bytes=int(RTX_4090.gib * GIB),
        layers=of_rate(LLAMA_8B, ZERO_SEQUENCE, min(RTX_4090.peak, fp16_operations_per_s()), tokens),
        device_to_host_bytes_per_s=RTX_4090.copy_bytes_per_s,
        host_to_device_bytes_per_s=RTX_4090.copy_bytes_per_s,
    )


# KTransformers

KT_TOKENS = 1024
FORWARD_PER_S, BACKWARD_PER_S = 17.55e12, 18.41e12
"""Operations of DeepSeek-V3's experts in bf16 on a Xeon Platinum 8488C (AMX), forward and backward, as measured by KTransformers
(doc/en/SFT/KTransformers-Fine-Tuning_Developer-Technical-Notes.md)."""
NAMED = "weights repacked", "buffers cleared", "weights reloaded"
"""Stages that no cost of this program stands for: its products read weights as they lie, and gradients are written, not added."""


@dataclass(frozen=True)
class KtStage:
    stage: str
    within: str
    seconds: float
    arithmetic_s: float | None
    """None: it has no arithmetic, or is not looked at."""


def ktransformers() -> list[KtStage]:
    known = _arithmetic_s()
    lines = csv.DictReader(told(DATA / "ktransformers_stages.csv"))
    return [KtStage(line["stage"], line["within"], float(line["seconds"]), known.get(line["stage"])) for line in lines]


def _arithmetic_s() -> dict[str, float]:
    model = QWEN3_30B
    experts = model.blocks * 2.0 * model.expert_weights * model.chosen / model.experts * KT_TOKENS
    attention = 2.0 * model.attention_weights + 2.0 * KT_TOKENS * model.head_size * model.heads
    blocks_s, head_s = (
        operations * KT_TOKENS / (RTX_5090.peak * RTX_5090.peak_share)
        for operations in (model.blocks * attention, 2.0 * model.hidden * model.vocabulary)
    )
    forward_s, backward_s = experts / FORWARD_PER_S, 2 * experts / BACKWARD_PER_S
    return {
        "experts forward": forward_s,
        "experts repeated": forward_s,
        "experts backward": backward_s,
        "forward": forward_s + blocks_s + head_s,
        "backward": forward_s + backward_s + 3 * blocks_s + 2 * head_s,
    }


def kt_lines() -> Iterator[str]:
    stages = ktransformers()
    for one in stages:
        worked_out = "-" if one.arithmetic_s is None else f"{one.arithmetic_s:.3f}"
        told = "named, not modelled" if one.stage in NAMED else ""
        yield f"{one.stage:>18} {one.seconds:>9.3f} {worked_out:>10}  {told}".rstrip()
    seconds = {one.stage: one.seconds for one in stages}
    whole = seconds["step"]
    named, inner = sum(seconds[stage] for stage in NAMED), sum(seconds[stage] for stage in NAMED[:2])
    yield f"named, not modelled: {named:.3f} s of {whole:.3f} s, {inner:.3f} s of them in backward"
    own = [one for one in stages if one.stage.startswith("experts ")]
    slower_s = sum(one.seconds - (one.arithmetic_s or 0.0) for one in own)
    rest_s = seconds["forward"] + seconds["backward"] - sum(one.seconds for one in own) - inner
    yield f"experts slower on these processors than on the Xeon: {slower_s:.3f} s; forward and backward besides: {rest_s:.3f} s"
