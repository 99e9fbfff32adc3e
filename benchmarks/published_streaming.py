"""Does planning predict how fast others train with weights that come from host memory?

    python benchmarks/published_streaming.py [--json FILE] [--check]

Predicts what five systems measured: RoundPipe on 1 to 8 RTX 4090 (``published_roundpipe``), MegaTrain-Plus and MegaTrain on a DGX
Spark, ZeRO-3 with offloading on an RTX 4090, and the stages of KTransformers (``published_offload``). Rows that decide a constant
are marked ``fitted``; no constant was found by any other row. ``--check`` exits 1 where a held-out row
misses its bar, or where a row is refused that fits, or fits that must be refused.

Columns of one card: ``plan`` is the nearest plan of this program, ``copies`` that plan if computing took no time, ``as ours`` what
this program would reach with all weights trained, whose gradients leave and come back in fp32 and whose optimizer is waited for
(RoundPipe's runs during its next step).

RoundPipe's 235B model has a bar on one card alone. On several cards it is not predicted (``NOT_PREDICTED``): the error is shown and
no constant makes it smaller.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import published_offload as offload  # noqa: E402
import published_roundpipe as roundpipe  # noqa: E402
from harness import parser_of  # noqa: E402

DENSE = ("qwen3-1.7b", "llama3.1-8b", "qwen3-32b")
ONE_CARD = {**dict.fromkeys(DENSE, 0.03), "gpt-oss-20b": 0.15, "qwen3-235b": 0.15}
CARDS = {**dict.fromkeys(DENSE, 0.05), "gpt-oss-20b": 0.10}
"""Model -> bar of the error on one card, and on each other number of them."""
NOT_PREDICTED = "not predicted: steps take 43 s + 230 s / GPUs, and this program has no cost for what GPUs do in turns"
"""Of a model without a bar on several cards."""
SPARK, ZERO = 0.10, 0.05


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    raw: dict[str, object] = {}
    missed = [*_roundpipe(raw), *_megatrain(raw), *_zero(raw)]
    print("\nKTransformers, Qwen3-30B-A3B, seconds of a step: measured, arithmetic alone")
    print("\n".join(offload.kt_lines()))
    raw["ktransformers"] = [asdict(one) for one in offload.ktransformers()]
    if arguments.json:
        arguments.json.write_text(json.dumps(raw, indent=1) + "\n")
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    return int(arguments.check and bool(missed))


@dataclass(frozen=True)
class Cards:
    """RoundPipe's tokens per second with so many cards."""

    model: str
    cards: int
    measured: float
    predicted: float
    plan: float
    """Predicted of the nearest plan of this program."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def bar(self) -> float | None:
        return (ONE_CARD if self.cards == 1 else CARDS).get(self.model)


def roundpipe_rows() -> list[Cards]:
    measured, found = roundpipe.read_measured(), []
    for row in roundpipe.read_rows():
        tokens = row.sequences * roundpipe.SEQUENCE
        for cards, own in measured[row.model].items():
            seconds = roundpipe.predicted_s(row, cards), roundpipe.as_plan_s(row, cards)
            found.append(Cards(row.model, cards, own, *(tokens / one for one in seconds)))
    return found


def _roundpipe(raw: dict[str, object]) -> list[str]:
    rows = roundpipe_rows()
    raw["roundpipe"] = [asdict(one) for one in rows]
    by_model = {row.model: row for row in roundpipe.read_rows()}
    print("RoundPipe on one RTX 4090, tokens per second")
    print(f"{'':>12} training  measured  predicted    error     plan   copies  as ours")
    for one in (one for one in rows if one.cards == 1):
        row = by_model[one.model]
        tokens = row.sequences * roundpipe.SEQUENCE
        copies, ours = (tokens / roundpipe.as_plan_s(row, 1, *how) for how in ((0.0,), (1.0, True)))
        print(
            f"{row.model:>12} {row.training:>8} {one.measured:>9.0f} {one.predicted:>10.0f} {one.error:>+8.1%}"
            f" {one.plan:>8.0f} {copies:>8.0f} {ours:>8.0f}  bar {one.bar:.0%}"
        )
    print("\nRoundPipe on several, error of the tokens per second")
    counts = sorted({one.cards for one in rows} - {1})
    print(f"{'GPUs':>12} " + " ".join(f"{cards:>7}" for cards in counts))
    for model in by_model:
        errors = {one.cards: one.error for one in rows if one.model == model}
        told = f"bar {CARDS[model]:.0%}" if model in CARDS else NOT_PREDICTED
        print(f"{model:>12} " + " ".join(f"{errors[cards]:>+7.1%}" for cards in counts) + f"  {told}")
    missed = [(one.model, one.cards) for one in rows if one.bar is not None and abs(one.error) > one.bar]
    return [f"{model} on {cards}" for model, cards in missed]


def _megatrain(raw: dict[str, object]) -> list[str]:
    constants, plus, upstream = offload.spark()
    rows = {"plus": [asdict(one) for one in plus], "upstream": [asdict(one) for one in upstream]}
    raw["megatrain"] = {"constants": asdict(constants), **rows}
    print("\nMegaTrain-Plus on a DGX Spark, seconds of a step")
    print(
        f"fitted: {constants.operations_per_s / 1e12:.1f} TFLOPS, {1e3 * constants.load_s:.2f} ms per load of a layer, "
        f"{1e12 * constants.rest_s_per_parameter:.1f} ps per parameter after backward"
    )
    missed = _print(plus, SPARK)
    print("\nMegaTrain itself, by the same constants")
    return missed + [f"{name} of MegaTrain" for name in _print(upstream, SPARK)]


def _zero(raw: dict[str, object]) -> list[str]:
    fixed_s, found = offload.zero()
    raw["zero-3"] = {"fixed_s": fixed_s, "rows": [asdict(one) for one in found]}
    print("\nZeRO-3 with offloading, Llama 3.1 8B on an RTX 4090, seconds of a step")
    print(f"fitted: {fixed_s:.2f} s whatever the tokens")
    return _print(found, ZERO)


def _print(found: list[offload.Found], bar: float) -> list[str]:
    """Prints rows; those that miss the bar, or are refused where others are not."""
    missed = []
    for one in found:
        refused = one.predicted_s is None
        if (one.use == "refused") != refused or (one.use == "held out" and abs(one.error) > bar):
            missed.append(one.name)
        told = one.refusal if refused else f"{one.predicted_s:>9.3f} {one.error:>+8.1%}"
        print(
            f"{one.name:>14} {one.measured_s:>9.3f} {told}  {one.use}{f', bar {bar:.0%}' if one.use == 'held out' else ''}"
        )
    return missed


if __name__ == "__main__":
    sys.exit(main())
