"""Figures: the architecture of a plan, and charts."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, RankMemory, StagePlan
from hetero_mpi.report.figures.architecture import architecture
from hetero_mpi.report.figures.curves import Series, line_chart
from hetero_mpi.report.figures.style import COLOURS, save, svg
from hetero_mpi.report.plan_text import headline, plan_lines
from hetero_mpi.report.progress import overview
from tests.support.past_runs import cluster, planned, several_stages
from tests.support.planning_samples import with_split

SVG = "{http://www.w3.org/2000/svg}"


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure: Figure, role: str) -> list[Bbox]:
    """The boxes that are filled with a colour."""
    return [patch.get_bbox() for patch in figure.axes[0].patches if patch.get_facecolor() == to_rgba(COLOURS[role][0])]


def assert_apart(figure: Figure, count: int) -> None:
    """So many stages, all inside the picture, none over another."""
    stages = boxes(figure, "surface")
    assert len(stages) == count
    for place, box in enumerate(stages):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height
        assert not any(box.overlaps(other) for other in stages[:place])


def assert_readable(figure: Figure) -> None:
    """No text over another, none cut by the edge."""
    figure.draw_without_rendering()
    extents = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
    for place, (text, extent) in enumerate(extents):
        assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width, f"{text} is cut"
        for other, box in extents[:place]:
            assert not extent.padded(-2).overlaps(box.padded(-2)), f"{text!r} over {other!r}"


@pytest.mark.parametrize(("ranks", "used"), [(1, 1), (3, 2), (34, 32)])
def test_the_architecture_names_every_rank_and_overlaps_none(tmp_path: Path, ranks: int, used: int) -> None:
    profile = cluster(ranks)
    figure = architecture(planned(profile, used), profile, "a job")
    said = texts(figure)
    stages = [f"stage {number}" for number in range(used)] if used > 1 else []
    assert [text for text in said if text.startswith("stage ")] == stages
    assert all(
        any(text == f"rank {rank}" or text.startswith(f"rank {rank}  card") for text in said) for rank in range(ranks)
    )
    assert sum("kB/s" in text for text in said) == used - 1, "a bandwidth at every link"
    assert_apart(figure, used)
    assert_readable(figure)
    png = save(figure, tmp_path / "new" / "architecture.png", "a job")
    vector = save(figure, tmp_path / "architecture.svg", "a job").read_text()
    assert png.read_bytes().startswith(b"\x89PNG") and COLOURS["accent"][0] in vector and "var(" not in vector
    for rank in range(used, ranks):
        assert f"<title>rank {rank}  card {rank}, host{rank // 2}: it would slow &lt;everybody&gt;" in vector
    page = svg(figure, "a job", page=True)
    assert "fill: var(--surface)" in page and not any(light in page for light, _ in COLOURS.values())


def test_ranks_of_a_group_stand_side_by_side_with_their_shares_in_one_box() -> None:
    profile = cluster(3)
    report = planned(profile, 2)
    first, second = report.plan.pipelines[0].stages
    stages = (replace(first, ranks=(0, 2), shares=(5, 3), experts=(2, 6)), second)
    plan = replace(report.plan, pipelines=(replace(report.plan.pipelines[0], stages=stages),))
    report = replace(
        report, plan=plan, idle=(), memory=tuple(RankMemory(rank, 10**9 * (1 + rank), 10**10) for rank in range(3))
    )
    figure = architecture(report, profile, "a job", {0: 0.5, 1: 0.25, 2: 0.75})
    said = texts(figure)
    assert said.count("stage 0") == 1 and "ranks 0, 2" in said and {"rank 0: card 0", "rank 2: card 2"} < {*said}
    assert "5/8 heads, 62 % of columns, 2/8 experts" in said and "3/8 heads, 38 % of columns, 6/8 experts" in said
    assert {"50 %", "75 %", "1.00 GB of 10.0 GB", "3.00 GB of 10.0 GB"} < {*said}, "each has its own load"
    assert_apart(figure, 2)
    assert_readable(figure)
    left, right = boxes(figure, "paper")
    assert left.y0 == right.y0 and left.x1 <= right.x0, "the ranks stand side by side"
    assert boxes(figure, "surface")[0].contains(*left.p0) and boxes(figure, "surface")[0].contains(*right.p1)


@pytest.mark.parametrize("ranks", [5, 8])
def test_a_group_of_many_fits_the_page(ranks: int) -> None:
    profile = cluster(ranks, per_host=ranks)
    stage = StagePlan(tuple(range(ranks)), 0, len(profile.model.layers), 0, shares=(1,) * ranks, recompute=True)
    report = PlanReport(Plan((PipelinePlan((stage,), 1, 4),), 4, 10, stage.last), 1.0, 0.9)
    report = replace(report, memory=tuple(RankMemory(rank, 123 * 10**9, 456 * 10**9) for rank in range(ranks)))
    figure = architecture(report, profile, "a job", dict.fromkeys(range(ranks), 0.5))
    assert_apart(figure, 1)
    assert_readable(figure)
    assert figure.bbox.width <= 1080 and len(boxes(figure, "paper")) == ranks


def test_no_two_roles_share_a_colour() -> None:
    """A page finds the role of a colour by its value on light paper."""
    assert len({light for light, _ in COLOURS.values()}) == len(COLOURS)


def test_names_are_shown_as_they_are() -> None:
    """A dollar is no formula, and markup no markup."""
    profile = cluster(1)
    odd = replace(profile, devices=(replace(profile.devices[0], name=r"$x<b>\1"),))
    page = svg(architecture(planned(odd), odd, r"a $y \2"), r"a $y \2 & <b>", page=True)
    assert r"$x&lt;b&gt;\1" in page and r"a $y \2" in page and "<b>" not in page


def test_pipelines_have_strips_of_their_own() -> None:
    profile = cluster(6)
    layers = len(profile.model.layers)
    one = PipelinePlan((StagePlan((0,), 0, 7, 1), StagePlan((1,), 7, layers, 0)), 1, 4)
    plan = Plan((one, PipelinePlan((StagePlan((5,), 0, layers, 0),), 2, 4)), 8, 10, layers)
    report = PlanReport(plan, 1.0, 0.9)
    emulated = architecture(report, replace(profile, source="emulated, measured"), "a job")
    said = texts(emulated)
    assert "pipeline 0: 4 sequences, 1 at a time" in said and "copy 1: 4 sequences, 2 at a time" in said
    assert any(text == "the whole model" for text in said)
    assert any("a gradient all-reduce of 14 layers over 2 copies of the model" in text for text in said)
    assert any(text.startswith("EMULATED") for text in said)
    assert_apart(emulated, 3)
    alone = tuple(PipelinePlan((StagePlan((rank,), 0, 26, 0),), 1, 2) for rank in range(12))
    report = PlanReport(Plan(alone, 24, 10, 26), 1.0, 0.9)
    assert_apart(architecture(report, cluster(12), "a job"), 12)


def test_ranks_with_several_stages_are_counted_once() -> None:
    profile = with_split(cluster(2))
    plan = several_stages(profile, (0, 1, 1, 0))
    report = PlanReport(plan, 1.0, 0.9, memory=predict_memory(plan, profile, 0.05))
    said = texts(architecture(report, profile, "a job"))
    assert any(text.startswith("2 of 2 ranks on 1 host") for text in said)
    assert said.count("no message") == 1 and sum("kB/s" in text for text in said) == 2
    assert headline(report) == "2 ranks, 1.00 s per step"
    assert "Plan: 4 stages on 2 ranks, schedule zbv (2 stages per rank)" in plan_lines(report, profile)
    shown = overview(plan, profile, "a job")
    assert shown.title.startswith("a job: 4 stages on 2 of 2 ranks")
    assert [(row.rank, row.holds) for row in shown.ranks] == [
        (0, "embedding, block 0; block 3, head"),
        (1, "block 1; block 2"),
    ]


def test_charts_leave_out_what_is_no_number() -> None:
    points = tuple((float(step), float("nan") if step == 3 else 1.0 * step) for step in range(1, 2000))
    chart = line_chart("loss", [Series("training", points, "accent")])
    assert chart is not None and "nan" not in chart and len(chart) < 30_000
    assert line_chart("loss", [Series("training", ((1.0, float("nan")),), "accent")]) is None


@pytest.mark.parametrize("value", [0.0, 2.0, 0.37, 1e-9, 123_456.0])
def test_axes_have_round_numbers(value: float) -> None:
    """Also of a series that does not change; and no two ticks are written alike."""
    chart = line_chart("loss", [Series("training", ((1.0, value), (2.0, value)), "accent")], from_zero=True)
    assert chart is not None
    ticks = re.findall(r'text-anchor="end">([^<]+)<', chart)
    ticks.remove("step")
    assert len(set(ticks)) == len(ticks) >= 2 and max(map(len, ticks)) <= 8, ticks


@pytest.mark.parametrize("steps", [(7.0,), (7.0, 9.0), (1.0, 100_000.0)])
def test_a_curve_lies_where_its_axes_say(steps: tuple[float, ...]) -> None:
    """Its points, read by the numbers at the axes, are the values."""
    points = tuple((step, 3.0 + place) for place, step in enumerate(steps))
    chart = line_chart(
        "loss <nats>", [Series("training", points, "accent"), Series("held out", points, "warm", dots=True)]
    )
    assert chart is not None and 'aria-label="loss &lt;nats&gt;, step ' in chart and "–●–</tspan> held out" in chart
    found = ElementTree.fromstring(chart)
    texts = [(one.text or "", float(one.attrib["x"]), float(one.attrib["y"])) for one in found.iter(f"{SVG}text")]
    across = [(x, float(text.replace(",", ""))) for text, x, y in texts if y == 231]
    up = [(y - 4, float(text)) for text, x, y in texts if x == 60]
    shown = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found.iter(f"{SVG}circle")]
    assert len(across) >= 2 and len(up) >= 2
    shown = shown[-len(points) :]
    assert [value_at(x, across) for x, _ in shown] == pytest.approx(list(steps), abs=0.005 * steps[-1])
    assert [value_at(y, up) for _, y in shown] == pytest.approx([y for _, y in points], rel=0.005)


def value_at(pixel: float, ticks: Sequence[tuple[float, float]]) -> float:
    """On an axis of ticks (pixel, value)."""
    (low, first), (high, last) = ticks[0], ticks[-1]
    return first + (pixel - low) / (high - low) * (last - first)
