"""Timeline, profile picture and Chrome trace, made from events and a profile."""

import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.planning.schedule import Action, Event, Op
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.figures.profile_curves import profile_picture
from hetero_mpi.report.figures.style import COLOURS, save, svg
from hetero_mpi.report.figures.timeline import KINDS, Panel, timeline
from hetero_mpi.report.trace import save_trace, trace
from tests.support.errors import refuses
from tests.support.planning_samples import (
    make_model,
    make_plan_of,
    make_profile,
    random_instance,
    random_plan,
    with_split,
)


def predicted(ranks: int, micro_batches: int) -> tuple[Event, ...]:
    """A step of ``ranks`` unlike ranks over slow links, two blocks each; both ends tied."""
    layers = 2 * ranks + 2
    slowness = [1 + 0.1 * (rank % 4) for rank in range(ranks)]
    profile = make_profile(slowness, make_model(layers - 2, tied=True), latency_s=0.2, bytes_per_s=5e3)
    cuts = [round(place * layers / ranks) for place in range(ranks + 1)]
    return simulate(make_plan_of(cuts, list(range(ranks)), micro_batches), profile).events


def several(seed: int) -> tuple[Event, ...]:
    """A step of several pipelines, some with a split backward."""
    return simulate(*random_plan(seed)).events


def colours_of(path: Path) -> tuple[int, int, int]:
    """(width, height, number of different 8-byte pieces) of a PNG: the last says how much is drawn."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    data, place = b"", 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        if content[place + 4 : place + 8] == b"IDAT":
            data += content[place + 8 : place + 8 + length]
        place += length + 12
    pixels = zlib.decompress(data)
    return width, height, len({pixels[i : i + 8] for i in range(0, len(pixels), 8)})


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (3, 8), (32, 40)])
def test_a_timeline_is_a_picture_of_any_number_of_ranks(tmp_path: Path, ranks: int, micro_batches: int) -> None:
    figure = timeline([Panel("a step", predicted(ranks, micro_batches))], {0: "a name"})
    width, height, different = colours_of(save(figure, tmp_path / "new" / "step.png", "a step"))
    assert width >= 1500 and different > 200
    assert height >= 35 * ranks, "a lane of 35 pixels for every rank"
    text = save(figure, tmp_path / "step.svg", "a step").read_text()
    assert text.startswith("<svg") and text.count("<path") > 2 * ranks * micro_batches
    assert text.count("<title>0F") == micro_batches and "<title>0F0 " in text, "every bar says what it is"


def test_parts_of_a_split_backward_and_sums_have_colours_of_their_own(tmp_path: Path) -> None:
    """Each kind of bar is named in the legend; sums lie below the computing they pass beside."""
    profile = with_split(make_profile([1.0] * 3, make_model(2), bytes_per_s=2e3))
    halves = PipelinePlan((StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0)), 1, 3, split_backward=True)
    plan = Plan((halves, PipelinePlan((StagePlan((2,), 0, 4, 0),), 2, 3)), 6, 10, 4)
    text = svg(timeline([Panel("", simulate(plan, profile).events)], {}), "step")
    for kind, colour in KINDS.values():
        assert f">{kind}</text>" in text
        assert text.count(COLOURS[colour][0]) > 1, "in the legend, and as a bar"
    plain = svg(timeline([Panel("", predicted(1, 2))], {}), "step")
    assert ">gradient all-reduce</text>" not in plain and ">backward</text>" in plain


@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_a_profile_is_a_picture_of_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    profile: ClusterProfile = random_instance(seed=1, ranks=ranks, layers=6)[0]
    width, height, different = colours_of(save(profile_picture(profile), tmp_path / "p.png", "profile"))
    assert width >= 1300 and height >= 500 and different > 300


def test_zeros_and_no_limits_are_drawn_too(tmp_path: Path) -> None:
    """A profile edited by hand may say that something takes no time."""
    save(profile_picture(make_profile((0.0, 0.0))), tmp_path / "p.png", "profile")
    assert (tmp_path / "p.png").is_file()


def test_a_picture_that_cannot_be_written_says_where_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses("file.unwritable", "-o"):
        save(profile_picture(make_profile()), tmp_path / "file" / "p.png", "profile")


def test_a_trace_has_one_complete_event_per_event(tmp_path: Path) -> None:
    events = predicted(3, 8)
    path = save_trace({"": events}, tmp_path / "new" / "trace.json", {1: "Strix Halo"})
    entries = json.loads(path.read_text())["traceEvents"]
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert len(complete) == len(events)
    for event, entry in zip(events, complete, strict=True):
        assert Action.parse(entry["name"]) == event.action and entry["pid"] == 100 * (event.rank + 1)
        assert entry["ts"] == pytest.approx(event.start_s * 1e6)
        assert entry["dur"] == pytest.approx((event.end_s - event.start_s) * 1e6)
        assert entry["args"] == {"step": 0, "bytes": event.bytes}
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {100: "rank 0", 200: "rank 1: Strix Halo", 300: "rank 2"}


def test_a_lane_has_a_number_of_its_own_and_computing_that_of_its_process() -> None:
    """Perfetto takes the thread that bears its process's number for the main one, and 0 for the kernel's: it put computing into the
    lane of receives (seen by ``benchmarks/perfetto.py``)."""
    entries = trace({"": predicted(4, 8)})["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert len({tid for _, tid in lanes}) == len(lanes) and all(tid > 0 for _, tid in lanes)
    assert {pid for pid, tid in lanes if lanes[pid, tid] == "compute"} == {pid for pid, _ in lanes}
    assert all((pid == tid) == (name == "compute") for (pid, tid), name in lanes.items())


def test_events_of_a_lane_do_not_overlap() -> None:
    """Perfetto draws a lane's events above each other where they overlap: computing and sending are lanes of their own."""
    for events in (predicted(4, 8), *(several(seed) for seed in range(30))):
        complete = [entry for entry in trace({"": events})["traceEvents"] if entry["ph"] == "X"]
        _assert_lanes_do_not_overlap(complete)


def _assert_lanes_do_not_overlap(complete: list[dict[str, Any]]) -> None:
    for lane in {(entry["pid"], entry["tid"]) for entry in complete}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == lane)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(own))


def test_sums_of_gradients_have_lanes_of_their_own() -> None:
    entries = trace({"": several(8)})["traceEvents"]
    names = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    lanes = {op: {names[e["pid"], e["tid"]] for e in entries if e.get("cat") == op} for op in ("REDUCE", "W", "STEP")}
    assert lanes["REDUCE"] == {"gradient all-reduce", "all-reduce of the embedding's gradients"}
    assert lanes["STEP"] == {"compute"} and lanes["W"] == {"compute"}


def test_steps_follow_each_other_in_a_trace() -> None:
    action = Action(Op.F, 0, 0)
    events = [Event(0, 5, action, 0.0, 2.0), Event(1, 5, action, 1.0, 3.0), Event(0, 6, action, 0.5, 1.0)]
    found = [(entry["ts"], entry["dur"]) for entry in trace({"": events})["traceEvents"] if entry["ph"] == "X"]
    assert found == [(0.0, 2e6), (1e6, 2e6), (3.5e6, 0.5e6)]
