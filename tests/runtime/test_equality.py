"""N ranks equal one process: the first promise of the program.

Each case runs on ranks of the pool when a test first asks for it, and is held against a plain transformers loop
(plain_training.py). What equal means is in equality.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.case_product import FULL
from tests.support.equality import Bench, assert_equals_plain
from tests.support.mpi import on_ranks
from tests.support.training_cases import FURTHER, NORMAL, Case

RANKS = (1, 2, 3, 4)
CASES = {case.name: case for case in NORMAL}
QUICK = [
    "llama-even", "gpt_neox-dropout-reversed", "phi3-nf4", "llama-lora-groups", "qwen3-tied-two-split-unequal",
    "llama-bf16-split", "mixtral-routers-streamed", "llama-tied-V-dropout",
]  # fmt: skip
"""Cases of the quick tier, on three ranks: each way to share the work once, and most of what is trained."""
REPLANNED = [
    "llama-even", "gemma2-tied-ends", "gpt_neox-dropout-reversed", "phi3-nf4", "llama-dropout-streamed",
    "qwen3-tied-lora-streamed", "llama-8bit", "qwen3-tied-8bit-two-streamed", "mixtral-routers-streamed",
    "llama-tied-V-dropout", "qwen3-tied-noise-streamed", "llama-lora-plus", "llama-pissa", "phi3-nf4-pissa", "llama-adafactor",
    "qwen3-tied-adafactor-two-streamed", "qwen3-tied-muon", "gemma2-lora-tokens-streamed", "qwen3-tied-nf4-saved-V",
    "llama-8bit-V",
]  # fmt: skip
AGAIN = [
    "llama-frozen-rates-two", "qwen3-frozen-noise-groups", "qwen3-tied-two-split-unequal", "gemma2-tail-changing",
    "llama-lora-groups", "qwen3-nf4-group", "llama-pissa-groups", "qwen3-tied-olora-two-streamed", "llama-lora-saved-groups",
]  # fmt: skip
"""Cases with several pipelines, or stages of several ranks, that are also run again, resumed under their own plan, and resumed
under one pipeline."""
MORE_AGAIN = [
    "llama-lora-two-gpipe", "gpt_oss-routers-two-split-changing", "llama-tied-group-recompute", "qwen3-groups-changing",
]  # fmt: skip
"""The same in the long tier."""
WAYS: list[tuple[str, Sequence[str], Sequence[int], Any]] = [
    ("run", [*CASES], RANKS, ()),
    ("one", [name for name, case in CASES.items() if case.pipelines == "one"], RANKS[1:], pytest.mark.slow),
    ("replan", REPLANNED, RANKS[1:], ()),
    *((via, AGAIN, RANKS[1:], pytest.mark.slow) for via in ("again", "resume")),
    ("regroup", AGAIN, RANKS[1:], ()),
    *((via, MORE_AGAIN, RANKS[1:], pytest.mark.long) for via in ("again", "resume", "regroup")),
    ("load", [*CASES], [3], ()),
]
"""(how a run comes about, its cases, on how many ranks, at least in which tier); see ``assert_equals_plain``."""


def tier(ranks: int, name: str) -> pytest.MarkDecorator | tuple[()]:
    """Quick on three ranks; slow on one and three; long on others, and where one rank has no choice of plans."""
    if ranks == 3:
        return () if name in QUICK else pytest.mark.slow
    return pytest.mark.slow if ranks == 1 and CASES[name].pipelines == "one" else pytest.mark.long


def parameters() -> Iterator[Any]:
    for via, names, numbers, least in WAYS:
        for name in names:
            for ranks in numbers:
                marks = [mark for mark in (tier(ranks, name), least) if mark != ()]
                yield pytest.param(via, ranks, CASES[name], id=f"{via}-np{ranks}-{name}", marks=marks)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("equality"))


@pytest.mark.parametrize(("via", "ranks", "case"), parameters())
def test_a_case_equals_one_process(bench: Bench, via: str, ranks: int, case: Case) -> None:
    assert_equals_plain(bench, ranks, case, via)


@pytest.mark.long
@pytest.mark.parametrize("case", FURTHER + FULL, ids=lambda case: case.name)
@on_ranks(*RANKS)
def test_pairs_of_everything(bench: Bench, ranks: int, case: Case) -> None:
    for via in ("run", "load", *(["one"] if case.pipelines == "one" else [])):
        assert_equals_plain(bench, ranks, case, via)
