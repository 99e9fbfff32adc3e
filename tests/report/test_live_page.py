"""The page of a run that goes on: the state of the run and of its ranks, who may see what, and what many viewers cost; and what
rank 0 writes for it."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from hetero_mpi.cli import main
from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.commands.options import parser
from hetero_mpi.device import backends
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.backends.cuda import CudaBackend
from hetero_mpi.job.schema import ReportTable
from hetero_mpi.report.page import document, sections
from hetero_mpi.report.page.document import report_html, write_report
from hetero_mpi.report.past_run import PastRun, anonymous, read_run
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.rundir.present import Present, Standing, read_present, write_present
from hetero_mpi.serve import live_page
from hetero_mpi.serve.live_page import LiveServer, watch
from hetero_mpi.serve.web.server import Names, bound_socket
from hetero_mpi.training import run_report
from hetero_mpi.training.run_report import LiveView
from hetero_mpi.util.errors import UserError
from tests.report.test_looks import RANKS
from tests.support.errors import refuses
from tests.support.mpi import ROOT
from tests.support.past_runs import JOB, cluster, make_run, planned


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """60 of 100 steps, on three ranks, that goes on."""
    profile = cluster(3)
    job = {**JOB, "train": {**JOB["train"], "steps": 100}}
    directory = make_run(tmp_path / "home" / "secret-folder", planned(profile), profile, job=job)
    write_present(directory, Present(time.time(), "training step 61", ranks=RANKS))
    (directory / "logs").mkdir()
    (directory / "logs" / "rank-0001.log").write_text("host0: reads /home/ada/corpus.txt\nthe last line\n")
    return directory


def happened(run: Path, **event: Any) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"unix_s": time.time(), **event}) + "\n")


@pytest.mark.parametrize("unix_s", ["NaN", "-1e18", "1e308", "Infinity"])
def test_numbers_that_are_no_times_are_shown_as_they_are(run: Path, unix_s: str) -> None:
    (run / "now.json").write_text(f'{{"unix_s": {unix_s}, "doing": "step 1"}}')
    happened(run, event="rebalanced", text="moved")
    with (run / "events.jsonl").open("a") as file:
        file.write(f'{{"unix_s": {unix_s}, "event": "rebalanced", "text": "another time"}}\n')
    assert "another time" in report_html(read_run(run))


@pytest.mark.parametrize("host", [None, 3, True, {"a": 1}, [1, "host0"]])
def test_hosts_of_an_event_that_are_no_names(run: Path, host: Any) -> None:
    happened(run, event="ranks-lost", text="host0 is lost", host=host)
    assert "host0" not in report_html(anonymous(read_run(run)))


def test_texts_that_no_file_can_hold_are_spelt_out(run: Path, tmp_path: Path) -> None:
    """Half characters (lone surrogates), which JSON can hold."""
    half = "\ud800<b>"
    told = json.loads((run / "run.json").read_text())
    told |= {"name": half, "versions": {f"library-{half}": half}, "job": {**told["job"], "data": {"text": [half]}}}
    (run / "run.json").write_text(json.dumps(told))
    happened(run, event=f"kind-{half}", text=f"text-{half}")
    for run_shown in (read_run(run), anonymous(read_run(run))):
        page = write_report(run_shown, tmp_path / "page.html").read_text()
        assert all(f"{what}\\ud800&lt;b&gt;" in page for what in ("<h1>", "library-", "kind-", "text-"))
    assert "text-" in live_page.Parts(run, False).since(0)["parts"]["happenings"]


@pytest.mark.parametrize("steps", ["many", [100], {"a": 1}, None, 1.5])
def test_steps_of_a_job_that_are_no_number(run: Path, steps: Any) -> None:
    told = json.loads((run / "run.json").read_text())
    told["job"]["train"]["steps"] = steps
    (run / "run.json").write_text(json.dumps(told))
    assert "60 steps" in report_html(read_run(run))


def test_a_defect_in_reading_is_told_and_not_taken_for_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> None:
        raise PermissionError(13, "denied", "/home/ada/metrics.jsonl")

    monkeypatch.setattr(live_page, "read_run", fails)
    texts = [live_page.Parts(run, shared).since(0)["parts"]["header"] for shared in (False, True)]
    assert all("PermissionError" in text for text in texts)
    assert "metrics.jsonl" in texts[0] and "ada" not in texts[1]


def test_damaged_files_tell_nothing(run: Path) -> None:
    for damaged in (
        "{",
        '{"unix_s": 1}',
        '{"ranks": {"0": 1}}',
        '{"unix_s": "x", "doing": ""}',
        '{"unix_s": 1, "doing": "", "ranks": {"0": {}}}',
    ):
        (run / "now.json").write_text(damaged)
        assert read_present(run) is None


def test_a_rank_without_a_stage_is_idle_now(tmp_path: Path) -> None:
    profile = cluster(3)
    job = {**JOB, "train": {**JOB["train"], "steps": 100}}
    run = make_run(tmp_path, planned(profile, 2), profile, job=job)
    write_present(run, Present(time.time(), "training step 61", ranks=RANKS))
    stages, _, idle = document.page_parts(read_run(run))["now"].partition(">idle<")
    assert [re.findall(r'data-rank="(\d)"', part) for part in (stages, idle)] == [["0", "1"], ["2"]]


def test_a_dead_rank_is_dead_until_the_run_goes_on(run: Path) -> None:
    happened(run, event="ranks-lost", text="Died: rank 2 on host1", ranks=[2], left=2)
    assert read_run(run).lost == {2}
    happened(run, event="recovered", text="1.06 s after it was noticed", step=61)
    assert read_run(run).lost == frozenset()


# ------------------------------------------------------------------------------------------------------------------ who sees what


@contextmanager
def served(run: Path, host: str = "127.0.0.1") -> Iterator[LiveServer]:
    server = LiveServer(bound_socket(host, 0), run, Names.for_address(host), "key")
    try:
        yield server
    finally:
        server.stop(0.0)


def asked(
    server: LiveServer, path: str, token: str | None = "key", method: str = "GET", **headers: str
) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    headers |= {"Authorization": f"Bearer {token}"} if token is not None else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_without_the_token_nothing_of_the_run_is_told(run: Path) -> None:
    with served(run) as server:
        for path in ("/", "/live.js"):
            status, text = asked(server, path, None)
            assert status == 200 and "secret" not in text and "host0" not in text
        for path in ("/changes/0", "/log/0001", "/metrics.jsonl"):
            assert asked(server, path, None)[0] == asked(server, path, "wrong")[0] == 401
        assert asked(server, "/changes/0")[0] == 200
        assert asked(server, "/changes/0", method="POST")[0] == 405
        assert asked(server, "/changes/0", Host="evil.example")[0] == 403


def test_the_browser_may_load_and_run_nothing_else(run: Path) -> None:
    with served(run) as server:
        page = asked(server, "/", None)[1]
    assert "content=\"default-src 'none'; script-src 'self'; connect-src 'self';" in page
    assert (
        "http" not in page.replace('http-equiv="', "")
        and page.count("<script") == 1
        and '<script src="live.js"' in page
    )


def test_only_logs_of_the_run_directory_itself_are_shown(run: Path) -> None:
    (run / "logs" / "rank-0002.log").symlink_to(run / "plan.toml")
    with served(run) as server:
        assert asked(server, "/log/0001") == (200, "host0: reads /home/ada/corpus.txt\nthe last line\n")
        for path in ("/log/0002", "/log/0003", "/log/1", "/log/..%2f..%2fplan", "/log/../plan.toml", "/now.json"):
            assert asked(server, path)[0] == 404, path


def test_others_see_no_names_no_paths_and_no_logs(run: Path) -> None:
    write_present(run, Present(time.time(), f"reading {run}/corpus.txt", ranks=RANKS))
    happened(run, event="silent", text=f"no word from host1, see {run}/logs", hosts=["host1"])
    with served(run) as own, served(run, "0.0.0.0") as others:
        names = "host0", "host1", "secret-folder/"
        drawn = dict[bool, str]()
        for server in (own, others):
            deadline = time.monotonic() + 60
            while '"topology": "<' not in (text := asked(server, "/changes/0")[1]) and time.monotonic() < deadline:
                time.sleep(0.1)
            drawn[server is own] = text
        assert all(name in drawn[True] for name in names) and 'data-log=\\"0001\\"' in drawn[True]
        assert not any(name in drawn[False] for name in names) and "data-log" not in drawn[False]
        assert "host 0" in drawn[False] and "reading .../corpus.txt" in drawn[False]
        assert asked(others, "/log/0001")[0] == 404


def test_only_what_has_changed_is_sent_and_figures_are_drawn_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[int]()

    def counted(run: PastRun) -> sections.Section:
        drawn.append(1)
        return topology(run)

    counted.__name__ = "topology"
    topology = sections.topology
    monkeypatch.setattr(document, "SECTIONS", tuple(counted if one is topology else one for one in document.SECTIONS))
    monkeypatch.setattr(live_page, "READ_INTERVAL_S", 0.0)
    monkeypatch.setattr(live_page, "_PAUSE_RATIO", 0.0)

    def changes(after: int) -> dict[str, Any]:
        return dict(json.loads(asked(server, f"/changes/{after}")[1]))

    with served(run) as server:
        with ThreadPoolExecutor(20) as pool:
            first = list(pool.map(changes, [0] * 20))
        assert all({"header", "tiles", "now", "logs"} <= one["parts"].keys() for one in first)
        seen, deadline = first[0], time.monotonic() + 60
        # Curves are there at once, the other sections when they have been drawn.
        while not seen["parts"].get("links") and time.monotonic() < deadline:
            seen = changes(0)
        assert (
            seen["order"][:3] == ["header", "tiles", "now"] and "<svg" in seen["parts"]["learning"] and len(drawn) == 1
        )
        while (more := changes(seen["version"]))["parts"]:
            seen = more
        write_present(run, Present(time.time(), "training step 62", ranks=RANKS))
        while not (more := changes(seen["version"]))["parts"]:
            assert time.monotonic() < deadline
        assert more["parts"].keys() == {"header"}, "the ranks stand where they stood"
        assert changes(10**17)["parts"] == {}


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == UserError.exit_code
    assert "not a run directory" in capsys.readouterr().err


def test_the_address_has_the_token_behind_the_hash(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_MPI_TOKEN", raising=False)
    with bound_socket("127.0.0.1", 0) as taken:
        monkeypatch.setattr(live_page, "DEFAULT_PORT", taken.getsockname()[1])
        lines = [next(watch(run)), next(watch(run, token="mine"))]
        with refuses("serve.address"):
            next(watch(run, port=live_page.DEFAULT_PORT))
    assert lines[0].startswith("Watch this run at http://127.0.0.1:") and len(lines[0].partition("/#")[2]) >= 16
    assert lines[1].endswith("/#mine")


# ------------------------------------------------------------------------------------------------------------------------ rank 0


def test_rank_0_writes_what_the_ranks_do_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "WRITE_INTERVAL_S", 0.01)
    world: Any = SimpleNamespace(current_action="training step 3")
    display = ProgressDisplay(10)
    display.standings = lambda: {0: Standing("training step 3, 0F1", computed=0.5)}

    def shown(ended: bool) -> Present:
        deadline = time.monotonic() + 60
        while (found := read_present(tmp_path)) is None or (found.ended is not None) != ended:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    with pytest.raises(ZeroDivisionError), LiveView(world) as live:
        live.show_run(ReportTable(), tmp_path, None)
        assert not list(tmp_path.iterdir()), "on another rank"
        live.show_run(ReportTable(), tmp_path, display)
        told = shown(False)
        assert told.alive and told.doing == "training step 3" and told.ranks["0"].text == "forward 1"
        raise ZeroDivisionError("of a test")
    assert shown(True).ended == "ZeroDivisionError: of a test" and not shown(True).alive
    with pytest.raises(CollectiveUserError), LiveView(world) as live:
        live.show_run(ReportTable(), tmp_path, display)
        shown(False)
        raise CollectiveUserError("run.not_finite", "step 3: the loss is nan")
    assert shown(True).ended == "step 3: the loss is nan"
    with LiveView(world) as live:
        live.show_run(ReportTable(), tmp_path, display)
    assert shown(True).ended == ""


BESIDE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from hetero_mpi.job.schema import ReportTable
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.training.run_report import LiveView

with LiveView(SimpleNamespace(current_action="training step 61")) as live:
    live.show_run(ReportTable(watch=0), Path(sys.argv[1]), ProgressDisplay(100))
    time.sleep(600)
"""


@contextmanager
def beside(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that shows a run as rank 0 does."""
    words = [sys.executable, "-c", BESIDE, str(run)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_the_page_ends_with_rank_0_however_that_ends(run: Path) -> None:
    with beside(run) as rank_0:
        assert rank_0.stdout is not None
        port = urlsplit(rank_0.stdout.readline().split()[-1]).port
        with socket.create_connection(("127.0.0.1", port or 0), timeout=60):
            rank_0.kill()
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "its page is still served"
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port or 0)):
                time.sleep(0.1)
                continue
            break


def test_the_option_is_short_for_the_key() -> None:
    words = ["train", "job.toml", "--watch"]
    assert parser().parse_args(words).overrides == ["report.watch=true"]
    assert parser().parse_args([*words, "8650", "--set", "a.b=1"]).overrides == ["report.watch=8650", "a.b=1"]
    assert ReportTable(watch=True).watch is True and ReportTable(watch=0).watch == 0 and ReportTable().watch is False
    for wrong in (-1, 65536, "yes"):
        with pytest.raises(ValueError, match="watch"):
            ReportTable.model_validate({"watch": wrong})


def test_a_device_tells_what_its_vendor_s_library_does_or_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Card(CudaBackend):
        place: Any = None

        def module(self) -> Any:
            def none(device: Any) -> float:
                raise RuntimeError("a slice of a GPU has no power of its own")

            return SimpleNamespace(
                utilization=lambda device: 97,
                power_draw=none,
                temperature=lambda device: 61,
                get_device_properties=lambda device: self.place,
            )

    assert Card().sensors() == {"busy": 0.97, "celsius": 61.0}
    assert Backend().sensors() == {}
    card = tmp_path / "0000:c4:00.0"
    (card / "hwmon" / "hwmon3").mkdir(parents=True)
    (card / "gpu_busy_percent").write_text("42\n")
    (card / "hwmon" / "hwmon3" / "power1_average").write_text("97000000\n")
    monkeypatch.setattr(backends, "PCI_DEVICES", tmp_path)
    assert Card().sensors() == {"busy": 0.97, "celsius": 61.0}, "torch does not tell which device it is"
    Card.place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC4, pci_device_id=0)
    assert Card().sensors() == {"busy": 0.97, "celsius": 61.0, "watts": pytest.approx(97.0)}
    assert 0.5 < Backend().used_bytes() / psutil.Process().memory_info().rss < 2
