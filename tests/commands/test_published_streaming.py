"""What others measured with weights from host memory: every system within its bars, by no constant of a held-out row."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import published_offload as offload  # noqa: E402
import published_roundpipe as roundpipe  # noqa: E402
import published_streaming as streaming  # noqa: E402

DOCUMENT = ROOT / "benchmarks" / "RESULTS.md"


@pytest.fixture(scope="module")
def cards() -> list[streaming.Cards]:
    return streaming.roundpipe_rows()


@pytest.fixture
def llama() -> roundpipe.Row:
    return next(row for row in roundpipe.read_rows() if row.model == "llama3.1-8b")


def assert_told(found: list[offload.Found]) -> None:
    text = DOCUMENT.read_text()
    for one in found:
        assert f"| {one.name} | {one.measured_s:.3f} | {one.predicted_s or 0:.3f} | {100 * one.error:+.1f} % |" in text


@pytest.mark.parametrize(
    ("name", "source", "licence"),
    [
        ("roundpipe_layers", "ITcarrot/RoundPipe-artifact", "MIT"),
        ("roundpipe_cards", "ITcarrot/RoundPipe-artifact", "MIT"),
        ("megatrain_spark", "bdqnghi/MegaTrain-Plus", "Apache-2.0"),
        ("zero3_4090", "RegiaYoung/SlideFormer", "Apache-2.0"),
        ("ktransformers_stages", "kvcache-ai/ktransformers", "Apache-2.0"),
        ("qwen_a100", "QwenLM/Qwen", "Apache-2.0"),
        ("sailor_opt350m_layers", "eth-easl/sailor", "MIT"),
        ("sailor_runs", "eth-easl/sailor", "MIT"),
        ("zorse_llama_layers", "benson-guo/zorse", "MIT"),
    ],
)
def test_figures_name_their_source_and_licence(name: str, source: str, licence: str) -> None:
    lines = (ROOT / "benchmarks" / "data" / f"{name}.csv").read_text().splitlines()
    heading = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    assert source in heading and f"{licence} licence" in heading
    rows = list(csv.reader(line for line in lines if not line.startswith("#")))
    assert len(rows) > 3 and len({len(row) for row in rows}) == 1


def test_roundpipe_within_its_bars_and_in_the_document(cards: list[streaming.Cards]) -> None:
    barred = [one for one in cards if one.bar is not None]
    assert len(barred) == 5 + 4 * 7
    assert not [one for one in barred if abs(one.error) > (one.bar or 0)]
    text = DOCUMENT.read_text()
    for one in cards:
        if one.cards == 1:
            assert f"| {one.model} | {one.measured:,.0f} | {one.predicted:,.0f} | {100 * one.error:+.1f} % |" in text
    for model in dict.fromkeys(one.model for one in cards):
        errors = [f"{100 * one.error:+.1f}" for one in cards if one.model == model and one.cards > 1]
        assert f"| {model} | {' | '.join(errors)} |" in text


def test_what_is_not_predicted_is_said_and_is_the_sum_stated(cards: list[streaming.Cards]) -> None:
    assert "43 s + 230 s / GPUs" in streaming.NOT_PREDICTED and "not predicted" in DOCUMENT.read_text()
    for one in (one for one in cards if one.bar is None):
        assert (one.model, 64 * 2048 / one.measured) == ("qwen3-235b", pytest.approx(43 + 230 / one.cards, rel=0.04))


@pytest.mark.parametrize("upstream", [False, True])
def test_megatrain_within_its_bar_and_what_has_no_room_is_refused(upstream: bool) -> None:
    _, *both = offload.spark()
    by_use: dict[str, list[offload.Found]] = {}
    for one in both[upstream]:
        by_use.setdefault(one.use, []).append(one)
    held_out, (refused,) = by_use["held out"], by_use["refused"]
    assert len(held_out) == 4 + upstream and all(abs(one.error) <= streaming.SPARK for one in held_out)
    assert upstream or by_use["fitted"][0].error == pytest.approx(0, abs=1e-9)
    assert refused.name == "qwen2.5-32b" and refused.predicted_s is None and "128 GB is usable" in refused.refusal
    assert all(one.predicted_s is not None for one in both[upstream] if one is not refused)
    assert_told(held_out)


@pytest.mark.slow
def test_no_held_out_row_decides_a_constant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other figures in them change nothing that is predicted."""
    before = offload.spark(), offload.zero()
    for path in roundpipe.DATA.glob("*.*"):
        lines = path.read_text().splitlines()
        changed = [
            line.replace("1.522", "3.0").replace("11.9340", "1.0") if "held out" in line else line for line in lines
        ]
        (tmp_path / path.name).write_text("\n".join(changed))
    monkeypatch.setattr(offload, "DATA", tmp_path)
    after = offload.spark(), offload.zero()
    for (constant, found, *_), (other, changed_rows, *_) in zip(before, after, strict=True):
        assert constant == other and found != changed_rows
        assert [one.predicted_s for one in found] == [one.predicted_s for one in changed_rows]


def test_zero_within_its_bar() -> None:
    fixed_s, found = offload.zero()
    held_out = [one for one in found if one.use == "held out"]
    assert fixed_s > 0 and len(held_out) == 2 and all(abs(one.error) <= streaming.ZERO for one in held_out)
    assert_told(held_out)


def test_stages_without_a_cost_of_ours_are_named() -> None:
    by_stage = {one.stage: one for one in offload.ktransformers()}
    assert sum(by_stage[stage].seconds for stage in offload.NAMED) == pytest.approx(0.493 + 0.352 + 0.272)
    assert all(by_stage[stage].arithmetic_s is None for stage in offload.NAMED)
    experts = 48 * 1024 * 8 * 3 * 2 * 2048 * 768
    assert by_stage["experts forward"].arithmetic_s == pytest.approx(experts / 17.55e12)
    assert by_stage["experts backward"].arithmetic_s == pytest.approx(2 * experts / 18.41e12)
    for one in by_stage.values():
        if one.arithmetic_s is not None:
            assert one.arithmetic_s < one.seconds
    assert any("1.117 s of 5.102 s, 0.845 s of them in backward" in line for line in offload.kt_lines())


@pytest.mark.slow
def test_check_fails_where_a_bar_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, cards: list[streaming.Cards]
) -> None:
    monkeypatch.setattr(streaming, "roundpipe_rows", lambda: cards)
    monkeypatch.setattr(sys, "argv", ["published_streaming", "--check", "--json", str(tmp_path / "raw.json")])
    assert streaming.main() == 0 and capsys.readouterr().out.endswith("missed: none\n")
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert len(raw["roundpipe"]) == len(cards) and len(raw["zero-3"]["rows"]) == 3
    monkeypatch.setattr(streaming, "ZERO", 0.001)
    assert streaming.main() == 1 and capsys.readouterr().out.endswith("missed: 16 sequences, 32 sequences\n")


def test_a_card_by_itself_computes_all_the_time(llama: roundpipe.Row) -> None:
    """Copies hide: what is left is arithmetic, in rounds as in the nearest plan."""
    layer_s = 2 * llama.forward_s + llama.backward_s
    computing_s = llama.sequences / 4 * (llama.blocks * layer_s + llama.head_forward_s + llama.head_backward_s)
    assert roundpipe.predicted_s(llama, 1) == pytest.approx(computing_s, rel=1e-3)
    assert roundpipe.as_plan_s(llama, 1) == pytest.approx(computing_s, rel=1e-3)


def test_copies_wait_where_experts_compute_one_by_one(llama: roundpipe.Row) -> None:
    """With kernels without number nothing is asked for before the stage ahead has ended: every copy is waited for."""
    stages = roundpipe.divided(llama, 1)
    parameters = sum(sum(llama.parameters[stage.first : stage.last]) for stage in stages)
    sums = sum(sum(llama.parameters[stage.first : stage.last]) for stage in stages if stage.backward)
    copies_s = 2 * (llama.loads * parameters + (llama.loads - 1) * sums) / roundpipe.COPIED_BYTES_PER_S
    waiting_s = roundpipe.rounds_s(replace(llama, kernels=10**9), 1, stages) - roundpipe.rounds_s(llama, 1, stages)
    assert waiting_s == pytest.approx(copies_s, rel=0.1)


def test_stages_go_round_over_the_cards(llama: roundpipe.Row) -> None:
    """Two cards share like work evenly; where one always has the long stages, it decides."""
    alike = replace(
        llama, head_forward_s=0.0, head_backward_s=0.0, backward_s=0.0, block_parameters=0, loads=1, sequences=40
    )
    alike = replace(alike, vocabulary=0)

    def blocks_s(cards: int, blocks: int, *stages: roundpipe.Stage) -> float:
        """In forwards of a block for a micro-batch."""
        return roundpipe.rounds_s(replace(alike, blocks=blocks), cards, stages) / alike.forward_s / 10

    forward, backward = (lambda *layers, back=back: roundpipe.Stage(*layers, back) for back in (False, True))
    even = 4, forward(0, 3), backward(3, 6), backward(2, 3), backward(0, 2)
    assert (blocks_s(1, *even), blocks_s(2, *even)) == pytest.approx((2 + 2 + 1 + 1, 3))
    uneven = 6, forward(0, 5), backward(5, 8), backward(1, 5), backward(0, 1)
    assert (blocks_s(1, *uneven), blocks_s(2, *uneven)) == pytest.approx((4 + 2 + 4, 4 + 4))


def test_stages_of_the_library_cover_the_chain(llama: roundpipe.Row) -> None:
    for row in roundpipe.read_rows():
        for cards in (1, 3, 8):
            for stages in roundpipe.divisions(row, cards):
                forward, backward = ([one for one in stages if one.backward is back] for back in (False, True))
                ends = [layer for one in (*forward, backward[0]) for layer in range(one.first, one.last)]
                assert ends == list(range(row.blocks + 2)), "forward, and what the first stage of backward has of it"
                back = [layer for one in backward for layer in reversed(range(one.first, one.last))]
                assert back == list(reversed(range(row.blocks + 2)))
    assert [len(roundpipe.divisions(row, 8)) for row in roundpipe.read_rows()] == [2, 2, 2, 1, 1]
