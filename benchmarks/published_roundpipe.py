"""RoundPipe on 1 to 8 RTX 4090 of one host, for ``published_streaming``: rows, and what is predicted of them.

RoundPipe holds no layer on a card for good. Forward and backward are divided into stages, each of its own layers, and the stages of
a load go round over the cards: a stage brings its weights, computes all micro-batches of the load one after the other, and the next
stage does so on the next card, a micro-batch behind. This program's plans keep a layer's forward and backward on one rank, so that
they cannot say that: ``rounds_s`` works it out, from the times that planning's ``durations`` gives for layers and copies. Beside it
stands the nearest plan: as many pipelines as cards, each of one streamed stage.

What counts besides, none of it chosen by a look at the tokens per second:

* Stages are divided by the library's rule (roundpipe 0.1.1: ``ModelExecutePlan.auto``), and as the authors' simulator lists them
  where every stage has room (``LIMIT``). Which one ran is not published, and the rule divides anew before every load, by times of
  loads before: predicted is the mean of both steps.
* The part of a mixture's times that does not depend on the tokens is that of ``moe_parts``: bytes of all experts that pass the
  card's memory, in backward also three times those of their gradients where they are trained. The rest is in proportion to the
  tokens.
* A copy is asked for when the host has launched what comes before it. That is far ahead, but not where experts compute one by
  one: a card queues ``QUEUE`` kernels, and a forward waits in each layer for the number of tokens that every expert gets.

Gradients leave in fp16 beside the computing, and the optimizer runs on the host beside the following step: both are left out, and
so are fences between steps, the times of the embedding, and what threads of one interpreter wait for each other.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from make_profiles import RTX_4090  # noqa: E402
from moe_parts import MEMORY_EFFICIENCY  # noqa: E402
from profile_parts import GIB  # noqa: E402

from hetero_mpi.planning.device_times import layer_s, repeated_s, weights_s  # noqa: E402
from hetero_mpi.planning.schedule import Op  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes  # noqa: E402
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD  # noqa: E402

DATA = ROOT / "benchmarks" / "data"
SEQUENCE, TIMED = 2048, 4
"""Tokens of a sequence, and sequences that the times hold for."""
FP16_BYTES = 2
COPIED_BYTES_PER_S = 2**26 / 3.2e-3
"""The 4 x 2048 x 4096 fp16 values that Llama 8B's layers hand on take 3.2 ms (``COMM_TIME`` of ``pp-simulate/run.sh``); those of
the other models come to the same."""
LIMIT = 0.6 / 2 * 0.94 * RTX_4090.gib * 1e9
"""Bytes of weights (and of gradients, in backward) in a stage: half of 60 % of a card's GiB, which the library takes for GB."""
LONGER = 1.1
"""A stage may take so many times as long as the longest layer."""
QUEUE = 1024
"""Kernels that CUDA queues before a launch waits."""
GRADIENT_PASSES = 3
"""The gradient of an expert is written, and read and written as it is added up."""
WARM, STEPS = 5, 10
"""Steps before those that are timed, and these."""
BLOCK = "block"


@dataclass(frozen=True)
class Row:
    model: str
    training: str
    blocks: int
    hidden: int
    vocabulary: int
    block_parameters: int
    expert_parameters: int
    adapter_parameters: int
    kernels: int
    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float
    sequences: int
    loads: int
    micro_batches: int
    listed: str

    @property
    def whole(self) -> bool:
        return self.training == "full"

    @property
    def parameters(self) -> list[int]:
        """Of each layer of the chain."""
        ends = self.vocabulary * self.hidden
        return [ends, *([self.block_parameters + self.adapter_parameters] * self.blocks), ends]

    @cached_property
    def sizes(self) -> list[int]:
        """Sequences of each micro-batch of a load, as even as can be."""
        load, count = self.sequences // self.loads, self.micro_batches
        return [load // count + (m < load % count) for m in range(count)]

    @cached_property
    def times(self) -> dict[str, LayerTimes]:
        """Layer kind -> times."""
        experts_s = FP16_BYTES * self.expert_parameters / (RTX_4090.memory_bytes_per_s * MEMORY_EFFICIENCY)
        gradients = GRADIENT_PASSES if self.whole else 0
        # Theirs computes the head once: its forward belongs to the first backward stage (pp-simulate/README.md).
        ends = line(0.0), line(self.head_backward_s)
        return {
            EMBEDDING: LayerTimes(ends[0], ends[0]),
            BLOCK: LayerTimes(line(self.forward_s, experts_s), line(self.backward_s, (1 + gradients) * experts_s)),
            HEAD: LayerTimes(line(self.head_forward_s), ends[1], recompute_s=ends[1]),
        }


def line(seconds: float, fixed_s: float = 0.0) -> Curve:
    """``seconds`` for the sequences that are timed, ``fixed_s`` of them whatever their number."""
    return Curve((TIMED * SEQUENCE, 2 * TIMED * SEQUENCE), (seconds, 2 * seconds - fixed_s))


def read_rows() -> list[Row]:
    kinds = {"str": str, "int": int, "float": float}
    known = {name: kinds[str(kind)] for name, kind in Row.__annotations__.items()}
    lines = csv.DictReader(told(DATA / "roundpipe_layers.csv"))
    return [Row(**{name: known[name](value) for name, value in line.items()}) for line in lines]


def read_measured() -> dict[str, dict[int, float]]:
    """Model -> number of cards -> tokens per second."""
    lines = list(csv.DictReader(told(DATA / "roundpipe_cards.csv")))
    return {model: {int(line["cards"]): float(line[model]) for line in lines} for model in lines[0] if model != "cards"}


def told(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


# Stages


@dataclass(frozen=True)
class Stage:
    """Layers [first, last) of the chain in forward, or in backward; the first one in backward has its forward as well."""

    first: int
    last: int
    backward: bool


def predicted_s(row: Row, cards: int) -> float:
    """Seconds of a step."""
    found = [rounds_s(row, cards, stages) for stages in divisions(row, cards)]
    return sum(found) / len(found)


def divisions(row: Row, cards: int) -> list[list[Stage]]:
    forward, backward = ([int(count) for count in part.split()] for part in row.listed.split("|"))
    forward[0] += 1  # the embedding
    backward[0] += 1  # the head
    backward[-1] += 1
    listed = [*_counted(forward, backward)]
    return [divided(row, cards), *([listed] if all(_held(row, stage) <= LIMIT for stage in listed) else [])]


def _counted(forward: Sequence[int], backward: Sequence[int]) -> Iterator[Stage]:
    place = 0
    for count in forward:
        yield Stage(place, place + count, False)
        place += count
    place = sum(backward)
    for count in backward:
        yield Stage(place - count, place, True)
        place -= count


def divided(row: Row, cards: int) -> list[Stage]:
    """By the library's rule: no stage longer than a limit, the one of those possible with the least (stages * limit)."""
    tokens, layers = round(sum(row.sizes) / len(row.sizes) * SEQUENCE), range(len(row.parameters))
    seconds = [[_layer_s(row, layer, tokens, backward) for layer in layers] for backward in (False, True)]
    least, limits = max(map(max, seconds)), set[float]()
    for own in seconds:
        for first in layers:
            sums = [sum(own[first:last]) for last in range(first + 1, len(own) + 1)]
            limits |= {total for total in sums if least <= total <= LONGER * least}
    return min(
        (_within(row, limit, seconds) for limit in sorted(limits)),
        key=lambda found: max(len(found[1]), cards) * found[0],
    )[1]


def _within(row: Row, limit: float, seconds: Sequence[Sequence[float]]) -> tuple[float, list[Stage]]:
    """Stages as large as ``limit`` allows: those of forward from the last layer on that backward does not begin with, those of
    backward from the first layer on."""

    def fits(first: int, last: int, backward: bool) -> bool:
        own_s = sum(seconds[backward][first:last])
        return last - first == 1 or (own_s <= limit + 1e-9 and _held(row, Stage(first, last, backward)) <= LIMIT)

    count = len(row.parameters)
    begin = next(first for first in range(count) if fits(first, count, True))
    forward: list[Stage] = []
    last = begin
    while last:
        first = next(first for first in range(last) if fits(first, last, False))
        forward.insert(0, Stage(first, last, False))
        last = first
    backward: list[Stage] = []
    while last < begin:
        first, last = last, next(end for end in range(begin, last, -1) if fits(last, end, True))
        backward.insert(0, Stage(first, last, True))
    return limit, [*forward, Stage(begin, count, True), *backward]


def _held(row: Row, stage: Stage) -> float:
    """Bytes of its weights, and in backward of what is trained once more."""
    own, blocks = sum(row.parameters[stage.first : stage.last]), stage.last - stage.first
    trained = own if row.whole else blocks * row.adapter_parameters
    return FP16_BYTES * (own + stage.backward * trained)


def _layer_s(row: Row, layer: int, tokens: int, backward: bool) -> float:
    times = row.times[{0: EMBEDDING, row.blocks + 1: HEAD}.get(layer, BLOCK)]
    if not backward:
        return layer_s(times, Op.F, tokens)
    again = layer_s(times, Op.F, tokens) if layer == row.blocks + 1 else repeated_s(times, tokens)
    return again + layer_s(times, Op.B, tokens)


# Rounds


def rounds_s(row: Row, cards: int, stages: Sequence[Stage]) -> float:
    """Seconds of a step, of many in a row: stages go round over the cards, from load to load and from step to step.

    A stage begins a micro-batch when its card is free, its weights are there and the stage before has handed it on. A card holds
    two stages' weights: those that come wait for the stage before the last one to end, and for the host to ask for them.
    """
    device = device_of(row, 0)
    own = {stage: [_stage_s(row, stage, size * SEQUENCE) for size in row.sizes] for stage in stages}
    hop_s = [size * SEQUENCE * FP16_BYTES * row.hidden / COPIED_BYTES_PER_S for size in row.sizes]
    free, before, copied, asked = ([0.0] * cards for _ in range(4))
    card, ends = 0, []
    for _ in range(WARM + STEPS):
        for load in range(row.loads):
            handed, last = [0.0] * row.micro_batches, card
            for stage in stages:
                sums = load > 0 and stage.backward and row.whole
                size = FP16_BYTES * sum(row.parameters[stage.first : stage.last]) * (1 + sums)
                copied[card] = max(copied[card], before[card], asked[card]) + weights_s(device, size)
                before[card], now, hops = free[card], max(free[card], copied[card]), last != card
                for m, seconds in enumerate(own[stage]):
                    now = max(now, handed[m] + hops * hop_s[m]) + seconds
                    handed[m] = now
                free[card], asked[card] = now, now - _ahead_s(row, stage, own[stage][-1])
                last, card = card, (card + 1) % cards
        ends.append(max(free))
    return (ends[-1] - ends[WARM - 1]) / STEPS


def _stage_s(row: Row, stage: Stage, tokens: int) -> float:
    return sum(_layer_s(row, layer, tokens, stage.backward) for layer in range(stage.first, stage.last))


def _ahead_s(row: Row, stage: Stage, micro_batch_s: float) -> float:
    """Seconds before the end of a stage in which the host has launched all of it."""
    blocks = min(stage.last, row.blocks + 1) - max(stage.first, 1)
    if not row.kernels or not blocks:
        return math.inf
    # Backward repeats the forward and launches twice as many kernels besides.
    queued = QUEUE / (row.kernels * blocks * (3 if stage.backward else 1))
    return micro_batch_s * (queued if stage.backward else min(queued, 1 / blocks))


# As a plan of this program


def as_plan_s(row: Row, cards: int, computing: float = 1.0, trained: bool = False) -> float:
    """Seconds of a step of the nearest plan. ``computing``: share of the times that computing takes; ``trained``: with gradients
    and an optimizer as this program has them, where all weights are trained."""
    return simulate(plan_of(row, cards), profile_of(row, cards, computing, trained)).step_s


def plan_of(row: Row, cards: int) -> Plan:
    """Every card holds the whole model and brings its weights for its share of a load, as one micro-batch in slices."""

    def pipeline(card: int) -> PipelinePlan:
        sequences = row.sequences // cards + (card < row.sequences % cards)
        stage = StagePlan((card,), 0, row.blocks + 2, 0, streamed=True, slice_sequences=row.sizes[0])
        return PipelinePlan((stage,), -(-sequences // row.loads), sequences)

    return Plan(tuple(map(pipeline, range(cards))), row.sequences, SEQUENCE, row.blocks + 2)


def device_of(row: Row, rank: int, computing: float = 1.0) -> DeviceProfile:
    def shared(curve: Curve) -> Curve:
        return Curve(curve.tokens, tuple(computing * seconds for seconds in curve.seconds))

    times = {
        kind: LayerTimes(shared(one.forward_s), shared(one.backward_s), one.recompute_s and shared(one.recompute_s))
        for kind, one in row.times.items()
    }
    return DeviceProfile(
        rank=rank,
        host="host",
        backend="cuda",
        name=RTX_4090.name,
        memory_bytes=int(RTX_4090.gib * GIB),
        memory_reason="not looked at",
        dtypes=("fp16",),
        layers=times,
        optimizer_fixed_s=0.0,
        optimizer_s_per_parameter=0.0,
        device_to_host_bytes_per_s=COPIED_BYTES_PER_S,
        host_to_device_bytes_per_s=COPIED_BYTES_PER_S,
    )


def profile_of(row: Row, cards: int, computing: float, trained: bool) -> ClusterProfile:
    source = "derived from layer times measured by ITcarrot/RoundPipe-artifact (MIT)"
    devices = tuple(device_of(row, rank, computing) for rank in range(cards))
    return ClusterProfile(source, "2026", row.model, "none", {}, model_cost(row, trained and row.whole), devices, ())


def model_cost(row: Row, trained: bool) -> ModelCost:
    """Bytes of the weights; nothing that is kept from forward to backward is asked for here."""
    boundary = FP16_BYTES * row.hidden
    kinds = [EMBEDDING, *([BLOCK] * row.blocks), HEAD]
    layers = (
        LayerCost(kind, own, own * trained, FP16_BYTES * own, 0.0, 0.0, boundary * (kind != HEAD))
        for kind, own in zip(kinds, row.parameters, strict=True)
    )
    return ModelCost(row.model, "fp16", SEQUENCE, False, 0.0, tuple(layers))
