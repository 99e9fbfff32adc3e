"""A processor beside a card holds experts where it is fast at them, by the profiles of ``benchmarks/experts_on_cpu.py``."""

from dataclasses import replace

import pytest

from tests.support.mpi import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("processor", ["AMX", "AVX2"])
def test_experts_are_on_a_processor_that_is_faster_at_them_than_copies_are(processor: str) -> None:
    import experts_on_cpu as cluster

    profile = cluster.profile_of(cluster.QWEN3_30B, cluster.WIDE, cluster.PROCESSORS[processor])
    report = cluster.planned(profile, 2)
    assert report is not None
    told = [reason for reason in report.reasons if "the processor of rank 1 computes" in reason]
    stages = [stage for _, _, stage in report.plan.numbered]
    if processor == "AVX2":
        assert any(stage.streamed for stage in stages) and not any(stage.grouped for stage in stages) and not told
        return
    (stage,) = stages
    assert stage.ranks == (0, 1) and stage.shares == (4, 0) and stage.experts is not None and stage.experts[1] >= 64
    assert len(told) == 1 and f"computes {stage.experts[1]} experts of each layer" in told[0]
    # Streaming is counted among what is beaten.
    alone = cluster.planned(cluster.profile_of(cluster.QWEN3_30B, cluster.WIDE, None), 2)
    assert alone is not None and alone.predicted_step_s > 5 * report.predicted_step_s


@pytest.mark.parametrize(
    ("sequences", "share", "has_blocks"), [(2, 1 / 8, True), (2, 1 / 16, False), (16, 1 / 8, False)]
)
def test_a_processor_without_amx_has_blocks_where_copies_would_take_longer(
    sequences: int, share: float, has_blocks: bool
) -> None:
    """Copies of all experts take 4.75 s a step, whatever its tokens: those of two sequences are computed in less at an eighth of
    AMX's rate, 2.3e12 operations per second."""
    import experts_on_cpu as cluster

    processor = replace(cluster.XEON, name="another", peak=share * cluster.XEON.peak)
    report = cluster.planned(cluster.profile_of(cluster.QWEN3_30B, cluster.WIDE, processor), sequences)
    assert report is not None and has_blocks is any(
        1 in stage.ranks and stage.last - stage.first > 1 for _, _, stage in report.plan.numbered
    )
