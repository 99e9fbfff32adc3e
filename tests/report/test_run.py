"""A run read back from its directory: recorded steps, traces, and the HTML report."""

import json
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.planning.schedule import Action, Op, schedule_of
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.report.page.document import key_figures, report_html, write_report
from hetero_mpi.report.past_run import read_run
from hetero_mpi.report.trace import save_run_trace, trace
from hetero_mpi.rundir.line_files import STEPS_NAME, keep_until
from hetero_mpi.rundir.metrics import Metrics
from hetero_mpi.rundir.rank_steps import (
    MeasuredEvent,
    RankStep,
    Usage,
    newest_step,
    on_one_clock,
    rank_step_from_dict,
    rank_step_to_dict,
    read_rank_steps,
    traffic,
)
from hetero_mpi.rundir.run_directory import describe_run
from hetero_mpi.util.shipped import USED_PROFILE
from tests.support.errors import refuses
from tests.support.jobs import Workshop
from tests.support.mpi import finish_mpi
from tests.support.past_runs import JOB, cluster, make_run, measured, planned, several_stages
from tests.support.planning_samples import make_model, make_plan_of, make_profile, with_split

# Recorded steps


def test_recorded_steps_come_back_and_forget_what_is_done_again(tmp_path: Path) -> None:
    profile = cluster(3)
    report = planned(profile)
    plan = report.plan
    make_run(tmp_path / "a", report, profile)
    path = tmp_path / "a" / STEPS_NAME
    records = read_rank_steps(path)
    assert [rank_step_from_dict(rank_step_to_dict(record)) for record in records] == list(records)
    with path.open("a") as file:
        file.write('{"step": 61, "ra')  # torn by a crash
    line = path.read_text().splitlines()[0]
    with path.open("a") as file:  # of another form
        for odd in ({"usage": {"seconds": "x"}}, {"events": [["0F1", "x", 1.0, 0, 0.0, None, 0.0]]}, {"begin_s": None}):
            file.write(f"\n{json.dumps({**json.loads(line), **odd})}")
    assert read_rank_steps(path) == records
    assert {record.rank for record in newest_step(records, plan)} == {0, 1, 2}
    assert newest_step(records[:2], plan) == (), "not every rank told"
    other = make_plan_of([0, 4, 8], [0, 1], 8)
    assert newest_step(records, other) == (), "measured under another plan"
    keep_until(path, 59)
    assert read_rank_steps(path) == ()


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 1, 0)])
def test_events_of_several_clocks_are_brought_onto_one(ranks: tuple[int, ...]) -> None:
    """Measured exactly as predicted, by ranks that began at different times: the simulator's events come back. Where ranks hold
    several stages, activations and gradients may share a link, and those of two stages take unlike ones."""
    profile = with_split(cluster(3))
    plan = several_stages(profile, ranks) if len(ranks) > 3 else planned(profile).plan
    found = on_one_clock(measured(plan, profile, 5, slower=1.0))
    expected = {event.action: event for event in simulate(plan, profile).events}
    assert {event.action for event in found} == set(expected)
    for event in found:
        same = expected[event.action]
        assert event.start_s == pytest.approx(same.start_s, abs=1e-9)
        assert event.end_s == pytest.approx(same.end_s, abs=1e-9), "a send lasts until its message has come"
    seen, promised = traffic(found, plan)[0, 1], traffic(simulate(plan, profile).events, plan)[0, 1]
    sent = (
        3 if ranks == (0, 1, 0, 1) else 2 if ranks == (0, 1, 2, 1, 0) else 1
    )  # times per micro-batch from rank 0 to rank 1
    assert (seen.messages, seen.bytes) == (promised.messages, promised.bytes) == (sent * 8, sent * 8 * 1000)
    assert seen.seconds == pytest.approx(promised.seconds)


def test_messages_of_one_link_follow_each_other() -> None:
    """Handed over at 1 s and 2 s, arrived at 4 s and 5 s: the second was under way from 4 s on."""
    sends = [MeasuredEvent(0, 1, Action(Op.SEND_F, 0, m), 1.0 + m, 1.1 + m, 10, copied_s=0.1) for m in (0, 1)]
    takes = [MeasuredEvent(1, 1, Action(Op.RECV_F, 1, m), 0.0, 6.0, 10, arrived_s=4.0 + m) for m in (0, 1)]
    records = [RankStep(0, 1, 50.0, tuple(sends), Usage()), RankStep(1, 1, 50.0, tuple(takes), Usage())]
    found = [event for event in on_one_clock(records) if event.action.op is Op.SEND_F]
    assert [(event.start_s, event.end_s) for event in found] == [(1.0, 4.0), (4.0, 5.0)]
    copies = [
        entry for entry in trace({"": found})["traceEvents"] if entry["ph"] == "X" and entry["tid"] - entry["pid"] == 7
    ]
    assert [entry["ts"] for entry in copies] == [1e6, 2e6], "but they were copied when the rank began them"


def test_a_link_is_a_pair_of_ranks_whatever_their_stages() -> None:
    """Rank 0 hands over at 1 s, 2 s and 3 s: activations and gradients for rank 1, then activations of another stage for rank 2."""
    actions = (Action(Op.SEND_F, 0, 0), Action(Op.SEND_B, 2, 0), Action(Op.SEND_F, 4, 0))
    sends = [MeasuredEvent(0, 1, action, 1.0 + n, 1.1 + n, 10) for n, action in enumerate(actions)]
    there = (
        MeasuredEvent(1, 1, Action(Op.RECV_F, 1, 0), 0.0, 4.0, 10, arrived_s=4.0),
        MeasuredEvent(1, 1, Action(Op.RECV_B, 1, 0), 4.0, 5.0, 10, arrived_s=5.0),
    )
    elsewhere = (MeasuredEvent(2, 1, Action(Op.RECV_F, 5, 0), 0.0, 6.0, 10, arrived_s=6.0),)
    told = [RankStep(rank, 1, 50.0, events, Usage()) for rank, events in enumerate((tuple(sends), there, elsewhere))]
    found = {event.action: (event.start_s, event.end_s) for event in on_one_clock(told) if event.rank == 0}
    assert found == dict(zip(actions, ((1.0, 4.0), (4.0, 5.0), (3.0, 6.0)), strict=True))


def test_every_second_of_a_step_is_accounted_for() -> None:
    events = [
        MeasuredEvent(0, 1, Action(Op.RECV_F, 1, 0), 0.0, 1.0, 100, copied_s=0.25),
        MeasuredEvent(0, 1, Action(Op.F, 1, 0), 1.0, 3.0),
        MeasuredEvent(0, 1, Action(Op.B, 1, 0), 3.0, 6.0),
        MeasuredEvent(0, 1, Action(Op.SEND_B, 1, 0), 6.0, 6.5, 80, copied_s=0.5),
        MeasuredEvent(0, 1, Action(Op.REDUCE, 1, layer=2), 6.5, 7.0),
        MeasuredEvent(0, 1, Action(Op.STEP, 1), 8.0, 9.0),
    ]
    used = Usage().and_step(events, 10.0).and_step(events, 10.0)
    assert (used.steps, used.computing_s, used.activations_s, used.copies_s, used.sums_s) == (2, 12.0, 1.5, 1.5, 1.0)
    assert (used.sent_bytes, used.received_bytes, used.end_s) == (160, 200, 4.0)


def test_a_trace_has_predicted_beside_measured(tmp_path: Path) -> None:
    profile = cluster(3, source="emulated, measured")
    report = planned(profile)
    run = make_run(tmp_path / "a", report, profile)
    path = save_run_trace(read_run(run), run / "trace.json")
    assert path is not None
    entries = json.loads(path.read_text())["traceEvents"]
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert names[0] == "rank 0, measured, emulated: card 0, host0" and "rank 2, predicted: card 2, host1" in names
    complete = [entry for entry in entries if entry["ph"] == "X"]
    count = len(simulate(report.plan, profile).events)
    assert [sum(entry["pid"] // 100 % 2 == 1 - which for entry in complete) for which in (0, 1)] == [count, count]
    assert min(entry["ts"] for entry in complete) == 0.0


def test_a_plan_made_for_other_speeds_is_simulated_at_those(tmp_path: Path) -> None:
    """After a change of plan the page named two predictions: the plan's, and one at the speeds of the profile."""
    profile = cluster(3)
    slow = with_slowness(profile, {1: 3.0})
    report = planned(profile)
    report = replace(report, predicted_step_s=simulate(report.plan, slow).step_s)
    run = make_run(tmp_path / "a", report, profile)
    told = {"event": "rebalanced", "text": "rank 1 is slow", "speeds": {"0": 1.0, "1": 1 / 3}}
    events, later = run / "events.jsonl", time.time() + 60
    events.write_text(json.dumps({"unix_s": later, **told}) + "\n")
    found = read_run(run)
    assert found.speeds == {0: 1.0, 1: 1 / 3}
    step = found.predicted
    assert step is not None and step.step_s == pytest.approx(report.predicted_step_s)
    with events.open("a") as file:
        file.write(json.dumps({"unix_s": later + 1, "event": "ranks-lost", "text": "Died: rank 2"}) + "\n")
    assert read_run(run).speeds == {}, "those that are left plan from the profile"


# The report


class Reader(HTMLParser):
    """Collects what a page says, and everything in it that could lead out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.leads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)
        self.leads += [
            value or ""
            for name, value in attributes
            if name in ("src", "href", "data", "action") or name.startswith("on")
        ]
        assert tag not in ("script", "iframe", "object")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"


def test_the_report_holds_everything_and_leads_nowhere(tmp_path: Path) -> None:
    profile = cluster(4)
    run = make_run(tmp_path / "a <b> & c", planned(profile, 3), profile)
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [] and "url(" not in text and "@import" not in text
    assert reader.leads == ["data:,", "checkpoints", "metrics.jsonl", "steps.jsonl", "plan.toml", "profile.toml"]
    assert not list(run.glob(".*.tmp-*"))
    elsewhere = write_report(read_run(run), tmp_path / "page.html").read_text()
    assert "<a " not in elsewhere and "metrics.jsonl" in elsewhere and "trace.json" not in text, "only what is there"


def test_the_report_counts_a_tied_matrix_once(tmp_path: Path) -> None:
    """Two blocks of 400 parameters and a matrix of 1,000 that both ends share."""
    profile = make_profile(model=make_model(2, tied=True))
    page = report_html(read_run(make_run(tmp_path / "tied", planned(profile), profile, steps=5)))
    assert "llama, 1.80 k parameters" in page and "2.80 k parameters" not in page


def test_tokens_of_an_emulated_run_are_told_apart(tmp_path: Path) -> None:
    """Steps of 5 tokens of the stand-in, each of them for 16 of the profile's."""
    profile = cluster(2, source="emulated, measured")
    run = read_run(make_run(tmp_path / "emulated", planned(profile), profile, steps=10))
    own = [replace(step, tokens=5, tokens_per_s=16 * 5 / step.step_s) for step in run.metrics.steps]
    tiles = {what: rest for what, *rest in key_figures(replace(run, metrics=Metrics(tuple(own), ())))}
    assert tiles["target tokens"][0] == "50"
    assert tiles["target tokens"][1].startswith("of the stand-in model; for 800 in ")
    assert "of the small stand-in model" in report_html(run)


def test_a_run_that_was_cut_short_is_reported_too(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "a", planned(profile), profile)
    (run / STEPS_NAME).unlink()
    (run / "events.jsonl").write_text('{"unix_s": 1')
    (run / "metrics.jsonl").write_text("")
    assert "No step was recorded" in report_html(read_run(run))
    save_profile(cluster(1), run / USED_PROFILE)  # of another cluster: the plan is not for it
    assert read_run(run).profile is None and "Plan and reasons" in report_html(read_run(run))
    (run / "plan.toml").unlink()
    assert "Events" in report_html(read_run(run))
    with refuses("run.not_a_run"):
        read_run(tmp_path)
    with refuses("file.unwritable", "-o"):
        write_report(read_run(run), tmp_path / "nowhere" / "report.html")


def test_a_resumed_run_keeps_its_starts(tmp_path: Path) -> None:
    for step in (0, 20, 10):
        describe_run(tmp_path, "a", "a.toml", JOB, {}, 3, step)
    assert [one.text for one in read_run(tmp_path).happenings] == [
        "training started on 3 ranks",
        "training resumed after step 10 on 3 ranks",
    ]
    describe_run(tmp_path, "a", "a.toml", JOB, {}, 2, 10, skipped_records=3)
    assert read_run(tmp_path).happenings[-1].text == (
        "training resumed after step 10 on 2 ranks, 3 malformed records skipped"
    )
    describe_run(tmp_path, "a", "a.toml", JOB, {}, 2, 0)
    assert len(read_run(tmp_path).happenings) == 1, "another run in the same directory"


# A real run


@pytest.mark.slow
def test_a_run_leaves_all_of_it_behind(tmp_path: Path) -> None:
    """Two ranks under mpirun: every action of the recorded steps is there, times add up, and the files are made from them."""
    shop = Workshop(tmp_path)
    job = shop.job(
        "shown", shop.values(shop.model()), report={"write": True}, train={"steps": 5}, plan={"allow_idle": False}
    )
    run = tmp_path / "run"
    done = finish_mpi(2, ["-m", "hetero_mpi", "train", str(job), "--run-dir", str(run)], timeout_s=400)
    assert "report.html" in done.stdout and "\x1b" not in done.stdout
    found = read_run(run)
    assert (
        found.plan is not None
        and found.profile is not None
        and found.name == "shown"
        and found.job["train"]["steps"] == 5
    )
    schedule = schedule_of(found.plan, found.profile.model)
    assert sorted({record.step for record in found.rank_steps}) == [1, 2, 3, 5], (
        "the third, and the ends of the quarters"
    )
    for record in found.rank_steps:
        assert tuple(event.action for event in record.events) == schedule[record.rank]
        assert record.usage.steps == record.step and record.usage.peak_bytes > 10**7
        assert 0 < record.usage.computing_s <= record.usage.seconds * 1.001
        assert all(event.arrived_s is not None for event in record.events if event.action.op in (Op.RECV_F, Op.RECV_B))
    step = on_one_clock(newest_step(found.rank_steps, found.plan))
    took = {event.action: event for event in step}
    for event in step:
        if event.action.op is Op.RECV_F:
            send = took[Action(Op.SEND_F, event.action.stage - 1, event.action.micro_batch)]
            assert send.start_s < event.end_s, "no message is taken before it is sent, whatever the clocks"
    assert max(event.end_s for event in step) <= 1.2 * found.metrics.steps[-1].step_s
    report = (run / "report.html").read_text()
    assert "measured, step 5" in report and "emulated" not in report
    assert {entry["pid"] for entry in json.loads((run / "trace.json").read_text())["traceEvents"]} == {
        100,
        200,
        300,
        400,
    }
    assert (run / "architecture.png").stat().st_size > 10_000 and "<svg" in (run / "architecture.svg").read_text()
    assert not list(run.glob(".*.tmp-*"))
